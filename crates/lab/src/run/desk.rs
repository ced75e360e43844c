//! The desk of one session: finished exchanges wait here until their energy is known, and leave as records.
//!
//! Memory is flat: the timeline forgets what no waiting exchange needs, and a record is on disk before the next one is looked at.

use super::{Observer, Progress};
use crate::LabError;
use crate::books::{Books, Metered, PATIENCE_NS, PUMP};
use crate::metering::Metering;
use serde_json::json;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;
use wattle_core::attribute::{Ledger, Share};
use wattle_core::event::Event;
use wattle_core::metrics::Accumulator;
use wattle_core::record::{Item, Record, Score, Telemetry};
use wattle_core::sensor::{DeviceKind, Perimeter, Quantity, SensorId};
use wattle_core::spec::Spec;
use wattle_core::{Exchange, Joules, Stamp};
use wattle_meter::clock;
use wattle_store::RunDir;

pub(super) struct Desk {
    run: PathBuf,
    books: Books,
    ledger: Option<Ledger>,
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
        Ok(Self {
            run: dir.path().into(),
            books: Books::open(dir, session, queries, metering)?,
            ledger: None,
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
        self.books.has_energy()
    }

    pub(super) fn note(&mut self, event: &Event) -> Result<(), LabError> {
        self.books.note(event)
    }

    /// Waits until every sensor of the panel has shown a first change, so that the first query is covered from its start.
    pub(super) async fn first_readings(&mut self) -> Result<(), LabError> {
        self.books.wait_until_known(clock::now()).await
    }

    /// Measures the machine with nothing in flight.
    pub(super) async fn idle(&mut self, length: Duration, alone: bool) -> Result<(), LabError> {
        self.books.idle(length, alone).await
    }

    /// From here on queries are counted and the past is forgotten.
    pub(super) fn start_queries(&mut self, done: u64) {
        self.done = done;
        if let Some(metered) = self.books.metered() {
            metered.needed_from = clock::now();
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
        self.ledger.get_or_insert_with(|| Ledger::open(exchange.sent));
        self.pending.push_back(Pending { item, exchange, score });
        // While answers come faster than the pump's sleep ends, this is where it runs.
        if !self.books.has_energy() || clock::now().since(self.pumped).get() >= PUMP.as_secs_f64() {
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
        let stopped = self.books.stop_meter()?;
        while let Some(pending) = self.pending.pop_front() {
            self.settle(pending, observe)?;
        }
        // If the run gave up, the failures that made it do so were dropped already.
        self.write_failures(observe)?;
        self.books.close(stopped, alone)
    }

    fn pump(&mut self, observe: &mut Observer<'_>) -> Result<(), LabError> {
        self.pumped = clock::now();
        self.books.collect()?;
        while let Some(front) = self.pending.front() {
            let done = front.exchange.done;
            if !self.books.knows(done) && clock::now() < done.plus_nanos(PATIENCE_NS) {
                break;
            }
            if let Some(pending) = self.pending.pop_front() {
                self.settle(pending, observe)?;
            }
        }
        Ok(())
    }

    /// Makes a record of an exchange and writes it.
    fn settle(&mut self, pending: Pending, observe: &mut Observer<'_>) -> Result<(), LabError> {
        let Pending { item, exchange, score } = pending;
        let bill = match self.books.metered() {
            Some(metered) => bill(metered, self.ledger.as_mut(), &exchange),
            None => Bill::default(),
        };
        let Bill { share, perimeter, telemetry, ledger } = bill;
        let session = self.books.session;
        let record = Record { session, item, exchange, share, perimeter, telemetry, score, ledger };
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

/// What an exchange has to do with energy.
#[derive(Default)]
struct Bill {
    share: Option<Share>,
    perimeter: Option<Perimeter>,
    telemetry: Telemetry,
    ledger: Option<Ledger>,
}

/// The share of an exchange, entered into the ledger.
fn bill(metered: &mut Metered, ledger: Option<&mut Ledger>, exchange: &Exchange) -> Bill {
    metered.needed_from = exchange.done;
    let (Some(panel), Some(ledger)) = (&metered.panel, ledger) else {
        return Bill { telemetry: telemetry(metered, exchange, None), ..Bill::default() };
    };
    let share = ledger.bill(exchange, &metered.timeline, &panel.sensors);
    Bill {
        share,
        perimeter: share.map(|_| panel.perimeter),
        telemetry: telemetry(metered, exchange, share),
        ledger: Some(*ledger),
    }
}

fn telemetry(metered: &Metered, exchange: &Exchange, share: Option<Share>) -> Telemetry {
    let (timeline, sensors) = (&metered.timeline, &metered.sensors);
    let span = exchange.span();
    let panel = metered.panel.as_ref().map_or(&[][..], |p| &p.sensors);
    let whole = timeline.energy_of(panel, span).map(|e| e.value());
    // What part of the machine's energy in that span was this exchange's.
    let part = share.zip(whole).filter(|(_, w)| w.get() > 0.0).map(|(s, w)| s.total() / w);
    let of_kind = |kind: DeviceKind| -> Option<Joules> {
        let of = |s: &&SensorId| sensors[usize::from(s.0)].device.kind == kind;
        let sensors: Vec<SensorId> = panel.iter().filter(of).copied().collect();
        Some(timeline.energy_of(&sensors, span)?.value() * part?)
    };
    let level = |kind: DeviceKind, quantity: Quantity| {
        let at = sensors.iter().position(|s| s.device.kind == kind && s.quantity == quantity)?;
        timeline.level(SensorId(at as u16), span)
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
