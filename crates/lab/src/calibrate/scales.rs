//! Weighs loads: readings on their way to a timeline, the idle machine, and windows that begin and end in rest, so that no tick of a
//! counter lies half in a load.

use crate::LabError;
use crate::books::{PATIENCE_NS, PUMP};
use crate::metering::Metering;
use std::time::Duration;
use wattle_core::attribute::{Splitter, View};
use wattle_core::baseline::{Baseline, Idle, When};
use wattle_core::cost::{Weights, Work};
use wattle_core::metrics::WHOLE;
use wattle_core::qualify::Qualifier;
use wattle_core::sensor::{DeviceKind, Panel, Quantity, Reading, Sensor, SensorId};
use wattle_core::survey::HELD_DOWN;
use wattle_core::{Estimate, Exchange, Seconds, Span, Stamp, Timeline, Warning, Watts};
use wattle_meter::{Meter, clock};

/// A load lasts so many periods of the slowest sensor, at least.
const PERIODS: f64 = 8.0;
/// Of a sensor that did not change while it was looked at: boards have up to so much (docs/method.md#qualification).
const UNKNOWN_PERIOD: f64 = 0.5;
/// A device that was held down for less of the time is not worth a word.
const LEAST_HELD_DOWN: f64 = 0.01;
/// Rest around a load, in periods: its edges lie in ticks that hold nothing but rest.
const REST: f64 = 1.3;
const SHORTEST_REST: f64 = 0.03;
/// The idle machine is looked at for so long, at least.
const IDLE: f64 = 1.0;

pub(super) struct Scales {
    meter: Meter,
    panel: Panel,
    timeline: Timeline,
    /// Of the slowest sensor of the panel.
    period: f64,
    /// Until the period is settled.
    qualifier: Option<Qualifier>,
    needed_from: Stamp,
    idle: Idle,
    rested: bool,
    gain: f64,
    /// Whether a load is being weighed.
    weighing: bool,
    /// Of each sensor: readings during loads, and those of them that say that clocks were held down.
    throttled: Vec<(u64, u64)>,
}

/// What a load came to.
pub(super) struct Weighed {
    pub(super) work: Work,
    pub(super) busy_s: f64,
    pub(super) window_s: f64,
    pub(super) energy_j: f64,
    pub(super) error_j: f64,
}

impl Scales {
    /// With what was opened; `None` if nothing there measures energy.
    pub(super) fn open(metering: Metering) -> Option<Self> {
        let Metering { meter, panel, early, .. } = metering;
        let (meter, panel) = (meter?, panel?);
        let mut timeline = Timeline::new(meter.sensors());
        let mut qualifier = Qualifier::new(meter.sensors());
        early.iter().for_each(|reading| {
            timeline.push(reading);
            qualifier.push(reading);
        });
        let mut scales = Self {
            period: 0.0,
            qualifier: Some(qualifier),
            throttled: vec![(0, 0); meter.sensors().len()],
            meter,
            panel,
            timeline,
            needed_from: clock::now(),
            idle: Idle::default(),
            rested: false,
            gain: 0.0,
            weighing: false,
        };
        scales.period = slowest(scales.seen());
        Some(scales)
    }

    /// The sensors of the panel, and their periods as far as they were seen.
    fn seen(&self) -> impl Iterator<Item = (&Sensor, Option<f64>)> {
        let qualified = self.qualifier.as_ref().map_or_else(Vec::new, Qualifier::finish);
        self.panel.sensors.iter().map(move |id| {
            let index = usize::from(id.0);
            (&self.meter.sensors()[index], qualified.get(index).and_then(|q| q.period_s))
        })
    }

    /// Whether all of them have changed often enough.
    pub(super) fn knows_period(&self) -> bool {
        self.seen().all(|(_, period)| period.is_some())
    }

    /// Takes the period to be what was seen until now.
    pub(super) fn settle(&mut self) {
        if self.qualifier.is_some() {
            self.period = slowest(self.seen());
            self.qualifier = None;
        }
    }

    /// Seconds between changes of the slowest sensor.
    pub(super) const fn period(&self) -> f64 {
        self.period
    }

    /// Seconds that a load must last, at least.
    pub(super) fn shortest_load(&self) -> f64 {
        PERIODS * self.period
    }

    /// Rest before and after a load.
    pub(super) fn pad(&self) -> f64 {
        (REST * self.period).max(SHORTEST_REST)
    }

    /// How long the idle machine is looked at.
    pub(super) fn rest_length(&self, asked: f64) -> f64 {
        asked.max(IDLE).max(2.0 * PERIODS * self.period)
    }

    /// Relative gain error of what was measured.
    pub(super) const fn gain(&self) -> f64 {
        self.gain
    }

    fn collect(&mut self) {
        let Self { meter, timeline, qualifier, throttled, weighing, .. } = self;
        let throttles: Vec<bool> = meter.sensors().iter().map(|s| s.quantity == Quantity::Throttle).collect();
        meter.drain(|reading: &Reading| {
            timeline.push(reading);
            if let Some(qualifier) = qualifier {
                qualifier.push(reading);
            }
            let index = usize::from(reading.sensor.0);
            if let (true, true, Some(value)) = (*weighing, throttles[index], reading.value) {
                throttled[index].0 += 1;
                throttled[index].1 += u64::from(value as u64 & HELD_DOWN != 0);
            }
        });
        self.timeline.forget_before(self.needed_from);
    }

    /// Waits for `what`, collecting readings meanwhile.
    pub(super) async fn pump_while<T>(&mut self, what: impl Future<Output = T>) -> Result<T, LabError> {
        tokio::pin!(what);
        loop {
            tokio::select! {
                biased;
                out = &mut what => {
                    self.collect();
                    return Ok(out);
                }
                () = tokio::time::sleep(PUMP) => self.collect(),
            }
        }
    }

    async fn wait(&mut self, seconds: f64) -> Result<(), LabError> {
        self.pump_while(tokio::time::sleep(Duration::from_secs_f64(seconds))).await
    }

    /// Waits until energy up to `at` is known, or will not be.
    async fn wait_until_known(&mut self, at: Stamp) -> Result<(), LabError> {
        let patience = at.plus_nanos(PATIENCE_NS.max((4.0 * self.period * 1e9) as u64));
        let known = |s: &Self| {
            let until = s.panel.sensors.iter().map(|id| s.timeline.known_until(*id).unwrap_or_default());
            until.min().unwrap_or_default() >= at
        };
        while !known(self) && clock::now() < patience {
            self.wait(PUMP.as_secs_f64()).await?;
        }
        Ok(())
    }

    /// Looks at the idle machine: the first time before the loads, the second after them.
    pub(super) async fn idle(&mut self, length: f64) -> Result<(), LabError> {
        // What was before is not rest.
        self.wait(self.pad()).await?;
        let start = clock::now();
        self.needed_from = start;
        self.wait(self.rest_length(length)).await?;
        let span = Span::new(start, clock::now());
        self.wait_until_known(span.end()).await?;
        let sensors = &self.panel.sensors;
        let energy = self.timeline.energy_of(sensors, span).filter(|e| e.coverage() >= WHOLE);
        let Some(energy) = energy else { return Err(unseen()) };
        // The gain error is the same in all that is weighed.
        let open = energy.bound() - self.timeline.gain_of(sensors, span);
        let covered = span.duration() * energy.coverage();
        self.idle.put(Baseline {
            when: if self.rested { When::After } else { When::Before },
            seconds: span.duration().get(),
            power_w: Estimate::new(
                energy.value() / covered,
                open / covered,
                energy.method(),
                energy.coverage(),
            ),
            gain_w: Watts(0.0),
        });
        self.rested = true;
        Ok(())
    }

    /// Power with nothing at work; what it drifted by is in its bound.
    pub(super) fn idle_power(&self) -> Result<Estimate<Watts>, LabError> {
        self.idle.power().ok_or_else(unseen)
    }

    /// Begins a window with some rest.
    pub(super) async fn begin(&mut self) -> Result<Stamp, LabError> {
        let start = clock::now();
        self.needed_from = start;
        self.weighing = true;
        self.wait(self.pad()).await?;
        Ok(start)
    }

    /// What to know about what was weighed: devices that were held down, sensors that failed.
    pub(super) fn doubts(&self) -> Vec<Warning> {
        let mut doubts = Vec::new();
        for (index, sensor) in (0u16..).zip(self.meter.sensors()) {
            let (read, held) = self.throttled[usize::from(index)];
            let fraction = held as f64 / read.max(1) as f64;
            if fraction > LEAST_HELD_DOWN {
                let device = format!("{} ({})", sensor.device.name, sensor.device.id);
                doubts.push(Warning::Throttled { device, fraction });
            }
            let id = SensorId(index);
            if self.panel.sensors.contains(&id)
                && let Some(what) = self.timeline.anomalies(id).text()
            {
                doubts.push(Warning::Sensor { sensor: sensor.name.clone(), what });
            }
        }
        let lost = self.meter.cost().lost;
        doubts.extend((lost > 0).then_some(Warning::ReadingsLost { lost }));
        doubts
    }

    /// Ends it with some rest, after all of `landed` have ended.
    pub(super) async fn end(
        &mut self,
        start: Stamp,
        landed: &[(u64, Exchange)],
    ) -> Result<Weighed, LabError> {
        self.wait(self.pad()).await?;
        let end = clock::now();
        self.wait_until_known(end).await?;
        self.weighing = false;
        // Only what was done is of interest, and that does not depend on what it costs.
        let mut splitter = Splitter::open(start, Weights::defaults(None, None, DeviceKind::Gpu));
        for (key, (bytes, exchange)) in (0u64..).zip(landed) {
            let flying = splitter.sent(key, exchange.sent, *bytes);
            splitter.pieces(flying, &exchange.tokens);
            splitter.done(flying, exchange);
        }
        let view = View { timeline: &self.timeline, sensors: &self.panel.sensors };
        splitter.finish(view, |_| {});
        splitter.rest(end, view);
        let account = splitter.ledger().account;
        let (work, Seconds(busy_s)) = splitter.work();
        if account.coverage < WHOLE {
            return Err(unseen());
        }
        self.gain = self.gain.max(account.gain / account.measured);
        Ok(Weighed {
            work,
            busy_s,
            window_s: account.span.duration().get(),
            energy_j: account.measured.get(),
            error_j: (account.bound - account.gain).get().max(0.0) / 1.96,
        })
    }
}

fn unseen() -> LabError {
    LabError::Calibrate("the sensors did not cover all of a load; see how they are with \"wattle doctor\", and calibrate again".into())
}

/// Seconds between changes of the slowest of these. One that averages over longer is as slow as that.
fn slowest<'a>(sensors: impl Iterator<Item = (&'a Sensor, Option<f64>)>) -> f64 {
    sensors.map(|(s, seen)| seen.unwrap_or(UNKNOWN_PERIOD).max(s.averaged_s)).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wattle_core::sensor::{Device, Kind, Perimeter, Trust};

    #[test]
    fn a_sensor_of_unknown_period_is_taken_as_slow() {
        let sensor = |averaged_s| Sensor {
            name: "made-up".into(),
            source: "made-up".into(),
            device: Device { kind: DeviceKind::Gpu, id: "0".into(), name: "made-up".into() },
            quantity: Quantity::Power,
            perimeter: Perimeter::Device,
            kind: Kind::Gauge,
            trust: Trust::Measured { gain: 0.05 },
            quantum: 0.0,
            averaged_s,
        };
        let (plain, averaged) = (sensor(0.0), sensor(1.0));
        assert_eq!(slowest([(&plain, None)].into_iter()), 0.5);
        assert_eq!(slowest([(&plain, Some(0.02))].into_iter()), 0.02);
        assert_eq!(slowest([(&plain, Some(0.02)), (&averaged, Some(0.1))].into_iter()), 1.0);
    }
}
