//! The books of one session: the log, and the readings on their way from the meter to the timeline and to disk.

use crate::LabError;
use crate::metering::Metering;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;
use wattle_core::baseline::{Baseline, When};
use wattle_core::event::Event;
use wattle_core::metrics::WHOLE;
use wattle_core::sensor::{DeviceKind, Panel, Quantity, Reading, Sensor, SensorId};
use wattle_core::timeline::Timeline;
use wattle_core::{Estimate, Seconds, Span, Stamp, Warning, Watts};
use wattle_meter::{Meter, clock};
use wattle_store::{LogWriter, ReadingsWriter, RunDir};

/// How often readings are collected and finished work written.
pub(crate) const PUMP: Duration = Duration::from_millis(20);
/// A window waits at most this long for the reading that ends it; a sensor that is later has a gap there. Short enough that
/// what has finished is on disk within a second.
pub(crate) const PATIENCE_NS: u64 = 700_000_000;
/// Sensors that are read or refreshed less often are waited for that many times as long.
const PERIODS: f64 = 3.0;
/// Readings reach the disk at least this often.
const FLUSH_NS: u64 = 500_000_000;
/// Below this, other processes are noise.
const FOREIGN_CORES: f64 = 0.3;
/// CPU times tick a hundred times a second: over less than this they tell nothing.
const FOREIGN_SECONDS: f64 = 0.7;

pub(crate) struct Books {
    pub(crate) session: u32,
    log: LogWriter,
    metered: Option<Metered>,
    /// Whether the next idle baseline comes before the work or after it.
    when: When,
    /// The one before.
    idle: Option<Baseline>,
    /// How long a reading is waited for.
    patience: u64,
}

/// What is only there when something is metered.
pub(crate) struct Metered {
    meter: Meter,
    pub(crate) panel: Option<Panel>,
    pub(crate) sensors: Vec<Sensor>,
    pub(crate) timeline: Timeline,
    readings: ReadingsWriter,
    flushed: Stamp,
    /// Readings on their way, empty in between.
    drained: Vec<Reading>,
    /// No window that will be asked for starts before this.
    pub(crate) needed_from: Stamp,
    /// The sensor of all that this machine's CPUs do; a replayed run brings one of its own.
    cpu_busy: Option<SensorId>,
    /// The first and the last look at who is busy.
    busy: Vec<Busy>,
    /// The first look of the idle baseline at hand, or of the last one.
    at_rest: Option<Busy>,
}

/// CPU seconds of the machine and of this process at one moment.
#[derive(Clone, Copy)]
struct Busy {
    at: Stamp,
    machine: f64,
    own: f64,
}

impl Books {
    /// Opens the books of session number `session` of a run of `queries`.
    pub(crate) fn open(
        dir: &RunDir,
        session: u32,
        queries: u64,
        metering: Metering,
    ) -> Result<Self, LabError> {
        let mut log = dir.log()?;
        let version = env!("CARGO_PKG_VERSION").to_owned();
        log.append(clock::wall(), &Event::Session { session, anchor: clock::anchor(), version, queries })?;
        for event in &metering.happened {
            log.append(clock::wall(), event)?;
        }
        for warning in &metering.warnings {
            log.append(clock::wall(), &Event::Warning(warning.clone()))?;
        }
        let patience = PATIENCE_NS.max((PERIODS * metering.slowest_s() * 1e9) as u64);
        let Metering { meter, panel, early, .. } = metering;
        let metered = match meter {
            None => None,
            Some(meter) => {
                let sensors = meter.sensors().to_vec();
                let of_machine = |s: &Sensor| {
                    s.source == "procstat"
                        && (s.device.kind, s.quantity) == (DeviceKind::Machine, Quantity::CpuBusy)
                };
                let cpu_busy = sensors.iter().position(of_machine);
                let mut metered = Metered {
                    cpu_busy: cpu_busy.and_then(|i| u16::try_from(i).ok()).map(SensorId),
                    readings: dir.readings(session, &sensors)?,
                    timeline: Timeline::new(&sensors),
                    sensors,
                    panel,
                    flushed: clock::now(),
                    needed_from: clock::now(),
                    drained: Vec::new(),
                    busy: Vec::new(),
                    at_rest: None,
                    meter,
                };
                early.iter().try_for_each(|reading| metered.take(reading))?;
                Some(metered)
            }
        };
        Ok(Self { session, log, metered, when: When::Before, idle: None, patience })
    }

    /// What is metered, if anything is.
    pub(crate) fn metered(&mut self) -> Option<&mut Metered> {
        self.metered.as_mut()
    }

    /// Whether there will be energy figures.
    pub(crate) fn has_energy(&self) -> bool {
        self.metered.as_ref().is_some_and(|m| m.panel.is_some())
    }

    /// Writes an event, after all that was put before it.
    pub(crate) fn note(&mut self, event: &Event) -> Result<(), LabError> {
        Ok(self.log.append(clock::wall(), event)?)
    }

    /// Puts an event down, to be written with the next ones.
    pub(crate) fn put(&mut self, event: &Event) -> Result<(), LabError> {
        Ok(self.log.put(clock::wall(), event)?)
    }

    /// Writes what was put down.
    pub(crate) fn flush(&mut self) -> Result<(), LabError> {
        Ok(self.log.flush()?)
    }

    /// Mean power of the panel in the last second that is known.
    pub(crate) fn watts(&self) -> Option<f64> {
        let metered = self.metered.as_ref()?;
        let panel = metered.panel.as_ref()?;
        let end = self.known_until();
        let span = Span::new(end.minus_nanos(1_000_000_000).max(metered.needed_from.min(end)), end);
        let energy = metered.timeline.energy_of(&panel.sensors, span)?;
        Some((energy.value() / (span.duration() * energy.coverage())).get()).filter(|w| w.is_finite())
    }

    /// Moves readings from the meter to the timeline and to disk.
    pub(crate) fn collect(&mut self) -> Result<(), LabError> {
        self.metered.as_mut().map_or(Ok(()), Metered::collect)
    }

    /// Until when energy figures are final; without any, for ever.
    pub(crate) fn known_until(&self) -> Stamp {
        let panel = self.metered.as_ref().and_then(|m| Some((&m.timeline, m.panel.as_ref()?)));
        let Some((timeline, panel)) = panel else { return Stamp::from_nanos(u64::MAX) };
        panel.sensors.iter().map(|s| timeline.known_until(*s).unwrap_or_default()).min().unwrap_or_default()
    }

    /// How long a reading is waited for, in nanoseconds.
    pub(crate) const fn patience(&self) -> u64 {
        self.patience
    }

    /// Whether energy figures up to `at` are final.
    pub(crate) fn knows(&self, at: Stamp) -> bool {
        self.known_until() >= at
    }

    /// Waits until energy figures up to `at` are final, or will not be.
    pub(crate) async fn wait_until_known(&mut self, at: Stamp) -> Result<(), LabError> {
        let patience = at.plus_nanos(self.patience);
        while !self.knows(at) && clock::now() < patience {
            tokio::time::sleep(PUMP).await;
            self.collect()?;
        }
        Ok(())
    }

    /// Measures the machine with nothing of ours at work: the first time before the work, the second after it. `alone`: nobody but
    /// this process is expected to do any.
    pub(crate) async fn idle(&mut self, length: Duration, alone: bool) -> Result<(), LabError> {
        let when = std::mem::replace(&mut self.when, When::After);
        let start = clock::now();
        if let Some(metered) = self.metered.as_mut() {
            metered.at_rest = None;
        }
        let end = start.plus_nanos(length.as_nanos() as u64);
        while clock::now() < end {
            tokio::time::sleep(PUMP.min(length)).await;
            self.collect()?;
        }
        let span = Span::new(start, clock::now());
        // The last reading of the window is one refresh away.
        self.wait_until_known(span.end()).await?;
        let Some(metered) = &self.metered else { return Ok(()) };
        // Whoever is busy now is neither us nor a server that waits for us; what was done before the work was done is its own.
        // Alone, the whole session is looked at instead. Nor does it matter to a board.
        let of_cpu = |s: &SensorId| metered.sensors[usize::from(s.0)].device.kind != DeviceKind::Gpu;
        let matters = metered.panel.as_ref().is_some_and(|p| p.sensors.iter().any(of_cpu));
        let since = if when == When::After { metered.at_rest } else { metered.busy.first().copied() };
        let busy = metered.foreign_cores(since).filter(|c| matters && !alone && *c > FOREIGN_CORES);
        let energy = metered.panel.as_ref().and_then(|p| {
            let gain = metered.timeline.gain_of(&p.sensors, span);
            Some((metered.timeline.energy_of(&p.sensors, span)?, gain))
        });
        if let Some(cores) = busy {
            self.note(&Event::Warning(Warning::BusyBaseline { cores }))?;
        }
        if let Some((energy, gain)) = energy {
            let covered = span.duration() * energy.coverage();
            let power: Estimate<Watts> = Estimate::new(
                energy.value() / covered,
                energy.bound() / covered,
                energy.method(),
                energy.coverage(),
            );
            let baseline =
                Baseline { when, seconds: span.duration().get(), power_w: power, gain_w: gain / covered };
            self.idle.get_or_insert(baseline);
            self.note(&Event::with("idle_baseline", json!(baseline)))?;
        }
        Ok(())
    }

    /// The idle baseline was none.
    pub(crate) fn forget_idle(&mut self) {
        self.idle = None;
    }

    /// Power with nothing at work, as it was before the work, and what is open about it beside the gain that all figures share.
    pub(crate) fn idle_power(&self) -> Option<(Watts, Watts)> {
        let baseline = self.idle.filter(|b| b.power_w.coverage() >= WHOLE)?;
        Some((baseline.power_w.value(), baseline.power_w.bound() - baseline.gain_w))
    }

    /// Stops the meter and collects what is left of its readings; false if a read did not come back.
    pub(crate) fn stop_meter(&mut self) -> Result<bool, LabError> {
        let stopped = self.metered.as_mut().is_none_or(|m| m.meter.stop());
        self.collect()?;
        Ok(stopped)
    }

    /// Writes the session's last lines. `alone`: nobody but this process was expected to do any work.
    pub(crate) fn close(mut self, stopped: bool, alone: bool) -> Result<(), LabError> {
        let Some(metered) = self.metered.take() else { return Ok(()) };
        let cost = metered.meter.cost();
        let mut warnings = Vec::new();
        if !stopped {
            let what = "a read did not return in time, or a source broke".to_owned();
            warnings.push(Warning::Sensor { sensor: "sampler".into(), what });
        }
        if cost.lost > 0 {
            warnings.push(Warning::ReadingsLost { lost: cost.lost });
        }
        // One line for each device: a board that goes away takes all its sensors with it.
        let mut troubled: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
        for (id, sensor) in (0u16..).zip(&metered.sensors) {
            let mut anomalies = metered.timeline.anomalies(SensorId(id));
            // CPU time stands still when nothing runs, and the kernel lets idle time go back.
            if sensor.energy_method().is_none() {
                (anomalies.stalls, anomalies.resets) = (0, 0);
            }
            if let Some(what) = anomalies.text() {
                let device = format!("{}/{}", sensor.source, sensor.device.id);
                troubled.entry(device).or_default().push((sensor.name.clone(), what));
            }
        }
        for (device, mut all) in troubled {
            let (sensor, what) = all.swap_remove(0);
            warnings.push(match all.len() {
                0 => Warning::Sensor { sensor, what },
                more => Warning::Sensor {
                    sensor: device,
                    what: format!("{what} ({sensor}; {more} more of it likewise)"),
                },
            });
        }
        warnings.extend(
            metered
                .foreign_cores(metered.busy.first().copied())
                .filter(|c| alone && *c > FOREIGN_CORES)
                .map(|cores| Warning::Contaminated { cores }),
        );
        let timing = metered.meter.timing().cloned();
        metered.readings.close()?;
        for warning in warnings {
            self.note(&Event::Warning(warning))?;
        }
        let cost = json!({
            "cpu_s": cost.cpu, "wall_s": cost.wall, "rounds": cost.rounds, "missed": cost.missed, "lost": cost.lost,
            "realtime": cost.realtime, "timing": timing,
        });
        self.note(&Event::with("meter_cost", cost))
    }
}

impl Metered {
    fn collect(&mut self) -> Result<(), LabError> {
        let mut drained = std::mem::take(&mut self.drained);
        self.meter.drain(|reading| drained.push(*reading));
        let taken = drained.iter().try_for_each(|reading| self.take(reading));
        drained.clear();
        self.drained = drained;
        taken?;
        let now = clock::now();
        if now.since(self.flushed) >= Seconds(FLUSH_NS as f64 * 1e-9) {
            self.readings.flush()?;
            self.flushed = now;
        }
        self.timeline.forget_before(self.needed_from);
        Ok(())
    }

    fn take(&mut self, reading: &Reading) -> Result<(), LabError> {
        self.timeline.push(reading);
        if Some(reading.sensor) == self.cpu_busy
            && let Some(machine) = reading.value
        {
            let look = Busy { at: reading.at, machine, own: clock::process_cpu().get() };
            self.busy.truncate(1);
            self.busy.push(look);
            self.at_rest.get_or_insert(look);
        }
        Ok(self.readings.push(reading)?)
    }

    /// CPU cores that other processes used since a look.
    fn foreign_cores(&self, since: Option<Busy>) -> Option<f64> {
        let (first, last) = since.as_ref().zip(self.busy.last())?;
        let seconds = last.at.since(first.at).get();
        (seconds >= FOREIGN_SECONDS)
            .then(|| (last.machine - first.machine - (last.own - first.own)) / seconds)
    }
}
