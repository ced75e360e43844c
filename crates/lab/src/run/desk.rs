//! The books of one session: readings come in, finished exchanges wait until their energy is known, and leave as records.
//!
//! Memory is flat: the timeline forgets what no waiting exchange needs, and a record is on disk before the next one is looked at.

use super::energy::Metering;
use super::{Observer, PUMP, Progress};
use crate::LabError;
use serde_json::json;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;
use wattle_core::attribute::{self, Doubt, Ledger, Share};
use wattle_core::event::Event;
use wattle_core::metrics::Accumulator;
use wattle_core::record::{Item, Record, Score, Telemetry};
use wattle_core::sensor::{DeviceKind, Panel, Quantity, Sensor, SensorId};
use wattle_core::spec::Spec;
use wattle_core::timeline::{Anomalies, Timeline};
use wattle_core::{Estimate, Exchange, Joules, Seconds, Span, Stamp, Warning, Watts};
use wattle_meter::{Meter, clock};
use wattle_store::{LogWriter, ReadingsWriter, RunDir};

/// An exchange waits at most this long for the reading that ends its window; a sensor that is later has a gap there. Short
/// enough that a finished query is on disk within a second.
const PATIENCE_NS: u64 = 700_000_000;
/// Readings reach the disk at least this often.
const FLUSH_NS: u64 = 500_000_000;
/// Below this, other processes are noise.
const FOREIGN_CORES: f64 = 0.3;
/// CPU times tick a hundred times a second: over less than this they tell nothing.
const FOREIGN_SECONDS: f64 = 0.7;

pub(super) struct Desk {
    run: PathBuf,
    session: u32,
    log: LogWriter,
    books: Option<Books>,
    pending: VecDeque<Pending>,
    pumped: Stamp,
    /// Failures since the last success, at most as many as make the run give up. They become rows when something succeeds or
    /// the run ends; if it gives up because of them, or is killed, they are asked again when it is resumed.
    failures: Vec<Record>,
    give_up_after: u64,
    so_far: Accumulator,
    total: u64,
    done: u64,
}

/// What is only there when something is metered.
struct Books {
    meter: Meter,
    panel: Option<Panel>,
    sensors: Vec<Sensor>,
    timeline: Timeline,
    readings: ReadingsWriter,
    flushed: Stamp,
    /// No window starts before this.
    needed_from: Stamp,
    ledger: Option<Ledger>,
    /// The first and the last look at who is busy.
    busy: Vec<Busy>,
}

/// CPU seconds of the machine and of this process at one moment.
#[derive(Clone, Copy)]
struct Busy {
    at: Stamp,
    machine: f64,
    own: f64,
}

struct Pending {
    item: Item,
    exchange: Exchange,
    score: Option<Score>,
}

impl Desk {
    /// Opens the books of session number `session` of a run of `queries`.
    pub(super) fn open(
        dir: &RunDir,
        session: u32,
        queries: u64,
        metering: Metering,
        spec: &Spec,
    ) -> Result<Self, LabError> {
        let mut log = dir.log()?;
        let version = env!("CARGO_PKG_VERSION").to_owned();
        log.append(clock::wall(), &Event::Session { session, anchor: clock::anchor(), version, queries })?;
        for warning in &metering.warnings {
            log.append(clock::wall(), &Event::Warning(warning.clone()))?;
        }
        let panel = metering.panel().cloned();
        let books = match metering.meter {
            None => None,
            Some(meter) => {
                let sensors = meter.sensors().to_vec();
                Some(Books {
                    readings: dir.readings(session, &sensors)?,
                    timeline: Timeline::new(&sensors),
                    sensors,
                    panel,
                    flushed: clock::now(),
                    needed_from: clock::now(),
                    ledger: None,
                    busy: Vec::new(),
                    meter,
                })
            }
        };
        Ok(Self {
            run: dir.path().into(),
            session,
            log,
            books,
            pending: VecDeque::new(),
            pumped: clock::now(),
            failures: Vec::new(),
            give_up_after: spec.max_errors,
            so_far: Accumulator::default(),
            total: queries,
            done: 0,
        })
    }

    pub(super) fn meters(&self) -> bool {
        self.books.as_ref().is_some_and(|b| b.panel.is_some())
    }

    pub(super) fn note(&mut self, event: &Event) -> Result<(), LabError> {
        Ok(self.log.append(clock::wall(), event)?)
    }

    /// Waits until every sensor of the panel has shown a first change, so that the first query is covered from its start.
    pub(super) async fn first_readings(&mut self) -> Result<(), LabError> {
        self.wait_until_known(clock::now()).await
    }

    /// Measures the machine with nothing in flight.
    pub(super) async fn idle(&mut self, length: Duration, alone: bool) -> Result<(), LabError> {
        let start = clock::now();
        self.pump_while(tokio::time::sleep(length), &mut |_| {}).await?;
        let span = Span::new(start, clock::now());
        // The last reading of the window is one refresh away.
        self.wait_until_known(span.end()).await?;
        let Some(books) = &self.books else { return Ok(()) };
        // Whoever is busy now is neither us nor a server that waits for us. Alone, the whole session is looked at instead.
        let busy = books.foreign_cores().filter(|c| !alone && *c > FOREIGN_CORES);
        let energy = books.panel.as_ref().and_then(|p| books.timeline.energy_of(&p.sensors, span));
        if let Some(cores) = busy {
            self.note(&Event::Warning(Warning::BusyBaseline { cores }))?;
        }
        if let Some(energy) = energy {
            let covered = span.duration() * energy.coverage();
            let power: Estimate<Watts> = Estimate::new(
                energy.value() / covered,
                energy.bound() / covered,
                energy.method(),
                energy.coverage(),
            );
            let seconds = span.duration().get();
            self.note(&Event::with("idle_baseline", json!({ "seconds": seconds, "power_w": power })))?;
        }
        Ok(())
    }

    async fn wait_until_known(&mut self, at: Stamp) -> Result<(), LabError> {
        let patience = at.plus_nanos(PATIENCE_NS);
        while !self.knows(at) && clock::now() < patience {
            tokio::time::sleep(PUMP).await;
            self.pump(&mut |_| {})?;
        }
        Ok(())
    }

    /// From here on queries are counted and the past is forgotten.
    pub(super) fn start_queries(&mut self, done: u64) {
        self.done = done;
        if let Some(books) = &mut self.books {
            books.needed_from = clock::now();
        }
    }

    /// Waits for `what`, collecting readings and writing records meanwhile.
    pub(super) async fn pump_while<T>(
        &mut self,
        what: impl Future<Output = T>,
        observe: &mut Observer<'_>,
    ) -> Result<T, LabError> {
        tokio::pin!(what);
        loop {
            tokio::select! {
                biased;
                out = &mut what => return Ok(out),
                () = tokio::time::sleep(PUMP) => self.pump(observe)?,
            }
        }
    }

    /// Takes in a finished exchange.
    pub(super) fn take(
        &mut self,
        item: Item,
        exchange: Exchange,
        score: Option<Score>,
        observe: &mut Observer<'_>,
    ) -> Result<(), LabError> {
        if let Some(books) = &mut self.books {
            books.ledger.get_or_insert_with(|| Ledger::open(exchange.sent));
        }
        self.pending.push_back(Pending { item, exchange, score });
        // While answers come faster than the pump's sleep ends, this is where it runs.
        if self.books.is_none() || clock::now().since(self.pumped).get() >= PUMP.as_secs_f64() {
            self.pump(observe)?;
        }
        Ok(())
    }

    /// Waits until every exchange is a record.
    pub(super) async fn settle_all(&mut self, observe: &mut Observer<'_>) -> Result<(), LabError> {
        while !self.pending.is_empty() {
            self.pump(observe)?;
            if !self.pending.is_empty() {
                tokio::time::sleep(PUMP).await;
            }
        }
        self.write_failures(observe)
    }

    /// The user stopped it: what is finished still waits for the reading that ends its window.
    pub(super) async fn interrupted(&mut self, observe: &mut Observer<'_>) -> Result<(), LabError> {
        self.note(&Event::plain("interrupted"))?;
        self.settle_all(observe).await
    }

    /// Stops the meter and writes what is left, then the session's last lines.
    pub(super) fn close(mut self, alone: bool, observe: &mut Observer<'_>) -> Result<(), LabError> {
        let stopped = self.books.as_mut().is_none_or(|b| b.meter.stop());
        self.collect()?;
        while let Some(pending) = self.pending.pop_front() {
            self.settle(pending, observe)?;
        }
        // If the run gave up, the failures that made it do so were dropped already.
        self.write_failures(observe)?;
        let Some(books) = self.books.take() else { return Ok(()) };
        let cost = books.meter.cost();
        let mut warnings = Vec::new();
        if !stopped {
            let what = "a read did not return in time, or a source broke".to_owned();
            warnings.push(Warning::Sensor { sensor: "sampler".into(), what });
        }
        if cost.lost > 0 {
            warnings.push(Warning::ReadingsLost { lost: cost.lost });
        }
        for (i, sensor) in books.sensors.iter().enumerate() {
            let anomalies = books.timeline.anomalies(SensorId(i as u16));
            if let Some(what) = describe(&anomalies) {
                warnings.push(Warning::Sensor { sensor: sensor.name.clone(), what });
            }
        }
        warnings.extend(
            books
                .foreign_cores()
                .filter(|c| alone && *c > FOREIGN_CORES)
                .map(|cores| Warning::Contaminated { cores }),
        );
        books.readings.close()?;
        for warning in warnings {
            self.log.append(clock::wall(), &Event::Warning(warning))?;
        }
        let cost = json!({
            "cpu_s": cost.cpu, "wall_s": cost.wall, "rounds": cost.rounds, "missed": cost.missed, "lost": cost.lost,
        });
        self.note(&Event::with("meter_cost", cost))
    }

    fn pump(&mut self, observe: &mut Observer<'_>) -> Result<(), LabError> {
        self.pumped = clock::now();
        self.collect()?;
        while let Some(front) = self.pending.front() {
            let done = front.exchange.done;
            if !self.knows(done) && clock::now() < done.plus_nanos(PATIENCE_NS) {
                break;
            }
            if let Some(pending) = self.pending.pop_front() {
                self.settle(pending, observe)?;
            }
        }
        Ok(())
    }

    /// Whether energy figures up to `at` are final.
    fn knows(&self, at: Stamp) -> bool {
        let Some(books) = &self.books else { return true };
        let known = |s: &SensorId| books.timeline.known_until(*s).is_some_and(|k| k >= at);
        books.panel.as_ref().is_none_or(|p| p.sensors.iter().all(known))
    }

    /// Moves readings from the meter to the timeline and to disk.
    fn collect(&mut self) -> Result<(), LabError> {
        let Some(books) = &mut self.books else { return Ok(()) };
        let Books { meter, timeline, readings, sensors, busy, .. } = books;
        let mut result = Ok(());
        meter.drain(|reading| {
            timeline.push(reading);
            if result.is_ok() {
                result = readings.push(reading);
            }
            let sensor = &sensors[usize::from(reading.sensor.0)];
            if (sensor.device.kind, sensor.quantity) == (DeviceKind::Machine, Quantity::CpuBusy)
                && let Some(machine) = reading.value
            {
                busy.truncate(1);
                busy.push(Busy { at: reading.at, machine, own: clock::process_cpu().get() });
            }
        });
        result?;
        let now = clock::now();
        if now.since(books.flushed) >= Seconds(FLUSH_NS as f64 * 1e-9) {
            books.readings.flush()?;
            books.flushed = now;
        }
        books.timeline.forget_before(books.needed_from);
        Ok(())
    }

    /// Makes a record of an exchange and writes it.
    fn settle(&mut self, pending: Pending, observe: &mut Observer<'_>) -> Result<(), LabError> {
        let Pending { item, exchange, score } = pending;
        let (share, telemetry, ledger, perimeter) = match &mut self.books {
            Some(books) => books.bill(&exchange),
            None => (None, Telemetry::default(), None, None),
        };
        let record =
            Record { session: self.session, item, exchange, share, perimeter, telemetry, score, ledger };
        let Some(error) = record.exchange.outcome.error() else {
            self.write_failures(observe)?;
            return self.write(record, observe);
        };
        let index = record.item.index;
        self.note(&Event::with("query_failed", json!({ "index": index, "error": error })))?;
        if self.give_up_after == 0 {
            return self.write(record, observe);
        }
        self.failures.push(record);
        let failed = self.failures.len() as u64;
        if failed == self.give_up_after {
            let last = self.failures.pop().and_then(|r| r.exchange.outcome.error().map(str::to_owned));
            self.failures.clear();
            self.pending.clear();
            let error = last.unwrap_or_default();
            self.note(&Event::with("gave_up", json!({ "failed": failed, "error": error })))?;
            return Err(LabError::GaveUp { failed, error, run: self.run.clone() });
        }
        Ok(())
    }

    fn write_failures(&mut self, observe: &mut Observer<'_>) -> Result<(), LabError> {
        for record in std::mem::take(&mut self.failures) {
            self.write(record, observe)?;
        }
        Ok(())
    }

    fn write(&mut self, record: Record, observe: &mut Observer<'_>) -> Result<(), LabError> {
        self.so_far.push(&record);
        self.note(&Event::Record(Box::new(record)))?;
        self.done += 1;
        observe(Progress::Query {
            done: self.done,
            total: self.total,
            errors: self.so_far.errors(),
            joules_per_query: self.so_far.joules_per_query(),
        });
        Ok(())
    }
}

type Bill = (Option<Share>, Telemetry, Option<Ledger>, Option<wattle_core::sensor::Perimeter>);

impl Books {
    /// The share of an exchange, entered into the ledger.
    fn bill(&mut self, exchange: &Exchange) -> Bill {
        self.needed_from = exchange.done;
        let (Some(panel), Some(ledger)) = (&self.panel, &mut self.ledger) else {
            return (None, self.telemetry(exchange, None), None, None);
        };
        let window = Span::new(ledger.span.end(), exchange.done);
        let split = attribute::split(window, std::slice::from_ref(exchange), |span| {
            self.timeline.energy_of(&panel.sensors, span)
        });
        let piece = self.timeline.energy_of(&panel.sensors, window);
        let doubt = Doubt {
            gain: self.timeline.gain_of(&panel.sensors, window),
            start: self.timeline.open_at(&panel.sensors, window.start()),
            end: self.timeline.open_at(&panel.sensors, window.end()),
            within: self.timeline.open_within(&panel.sensors, window),
        };
        ledger.add(window, &split, piece, doubt);
        let (share, ledger, perimeter) = (split.shares[0], *ledger, panel.perimeter);
        let telemetry = self.telemetry(exchange, share);
        (share, telemetry, Some(ledger), share.map(|_| perimeter))
    }

    fn telemetry(&self, exchange: &Exchange, share: Option<Share>) -> Telemetry {
        let span = exchange.span();
        let panel = self.panel.as_ref().map_or(&[][..], |p| &p.sensors);
        let whole = self.timeline.energy_of(panel, span).map(|e| e.value());
        // What part of the machine's energy in that span was this exchange's.
        let part = share.zip(whole).filter(|(_, w)| w.get() > 0.0).map(|(s, w)| s.total() / w);
        let of_kind = |kind: DeviceKind| -> Option<Joules> {
            let of = |s: &&SensorId| self.sensors[usize::from(s.0)].device.kind == kind;
            let sensors: Vec<SensorId> = panel.iter().filter(of).copied().collect();
            Some(self.timeline.energy_of(&sensors, span)?.value() * part?)
        };
        let level = |kind: DeviceKind, quantity: Quantity| {
            let at = self.sensors.iter().position(|s| s.device.kind == kind && s.quantity == quantity)?;
            self.timeline.level(SensorId(at as u16), span)
        };
        Telemetry {
            gpu: of_kind(DeviceKind::Gpu),
            cpu: of_kind(DeviceKind::Cpu),
            dram: of_kind(DeviceKind::Dram),
            ane: of_kind(DeviceKind::Ane),
            gpu_power: level(DeviceKind::Gpu, Quantity::Power),
            gpu_temperature: level(DeviceKind::Gpu, Quantity::Temperature),
            gpu_memory: level(DeviceKind::Gpu, Quantity::MemoryUsed),
            gpu_utilisation: level(DeviceKind::Gpu, Quantity::Utilisation),
            cpu_memory: level(DeviceKind::Machine, Quantity::MemoryUsed),
        }
    }

    /// CPU cores that other processes used since the session began, idle baseline included.
    fn foreign_cores(&self) -> Option<f64> {
        let [first, .., last] = self.busy.as_slice() else { return None };
        let seconds = last.at.since(first.at).get();
        (seconds >= FOREIGN_SECONDS)
            .then(|| (last.machine - first.machine - (last.own - first.own)) / seconds)
    }
}

fn describe(a: &Anomalies) -> Option<String> {
    // A wrap is followed correctly and is nobody's worry.
    let kinds = [
        (a.failed, "failed reads"),
        (a.stalls, "times stuck for more than two seconds"),
        (a.resets, "resets or impossible jumps (left out of the energy)"),
        (a.nonsense, "readings that make no sense"),
        (a.out_of_order, "readings out of order"),
    ];
    let seen: Vec<String> =
        kinds.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
    (!seen.is_empty()).then(|| seen.join(", "))
}
