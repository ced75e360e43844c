//! The desk of one session: requests in flight are watched here, and ended ones wait until their energy is known, to leave as
//! records.
//!
//! Memory is flat in the number of requests: the timeline forgets what nothing in flight or waiting needs, and a record leaves for
//! the disk as soon as it is whole.

use super::lateness::Lateness;
use super::others::Others;
use super::{Observer, Order, Progress};
use crate::books::{Books, Metered, PUMP};
use crate::client::{Client, Live, Place};
use crate::metering::Metering;
use crate::{LabError, Stop};
use serde_json::json;
use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use wattle_core::attribute::{Ended, Flying, Ledger, Share, Splitter, View};
use wattle_core::cost::Weights;
use wattle_core::event::Event;
use wattle_core::metrics::Accumulator;
use wattle_core::record::{Item, Record, Score, Telemetry};
use wattle_core::sensor::{DeviceKind, Perimeter, Quantity, SensorId};
use wattle_core::slo::Slo;
use wattle_core::wire::prometheus::Load;
use wattle_core::{Exchange, Joules, Seconds, Stamp, Warning};
use wattle_meter::clock;
use wattle_store::RunDir;

/// How often whoever watches hears of it.
const SHOW: Seconds = Seconds(0.2);
/// A server that has not said for so long how busy it is is not waited for.
const SILENT_NS: u64 = 800_000_000;
/// A server takes up to so long to see that a request has ended.
const UNSEEN_NS: u64 = 50_000_000;

pub(super) struct Desk {
    run: PathBuf,
    books: Books,
    weights: Weights,
    splitter: Option<Splitter>,
    others: Others,
    /// When requests ended lately.
    ends: VecDeque<Stamp>,
    /// When the queries began.
    began: Stamp,
    flights: HashMap<u64, Watched>,
    landed: HashMap<u64, Landed>,
    pumped: Stamp,
    shown: Stamp,
    lateness: Lateness,
    /// Failures since the last success, at most as many as make the run give up. They become rows when something succeeds or
    /// the run ends; if it gives up because of them, or is killed, they are asked again when it is resumed.
    failures: Vec<Record>,
    give_up_after: u64,
    given_up: Option<LabError>,
    so_far: Accumulator,
    total: Option<u64>,
    done: u64,
}

/// A request in flight, and what of it the splitter was told.
struct Watched {
    live: Arc<Live>,
    /// Length of its prompt.
    bytes: u64,
    /// When it was sent, the last time.
    sent: Option<(Stamp, Flying)>,
    pieces: usize,
}

/// A request that has ended.
pub(super) struct Landed {
    pub(super) number: u64,
    pub(super) item: Item,
    pub(super) exchange: Exchange,
    pub(super) score: Option<Score>,
    /// Whether it is one of the run's queries.
    pub(super) counts: bool,
    /// Whether any of it reached the server.
    pub(super) was_sent: bool,
    /// When it could have been sent.
    pub(super) ready: Stamp,
}

impl Desk {
    /// Opens the books of session number `session`.
    pub(super) fn open(
        dir: &RunDir,
        session: u32,
        order: &Order,
        metering: Metering,
        weights: Weights,
    ) -> Result<Self, LabError> {
        let slo = Slo::parse(&order.spec.slo).map_err(LabError::Usage)?;
        Ok(Self {
            run: dir.path().into(),
            books: Books::open(dir, session, order.census.items, metering)?,
            weights,
            splitter: None,
            others: Others::default(),
            ends: VecDeque::new(),
            began: clock::now(),
            flights: HashMap::new(),
            landed: HashMap::new(),
            pumped: clock::now(),
            shown: clock::now(),
            lateness: Lateness::new(order.is_open()),
            failures: Vec::new(),
            give_up_after: order.spec.max_errors,
            given_up: None,
            so_far: Accumulator::new(slo),
            total: order.total(),
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

    /// While the idle machine was measured, the server worked for others.
    pub(super) fn was_not_idle(&mut self, requests: f64) -> Result<(), LabError> {
        self.books.forget_idle();
        self.note(&Event::Warning(Warning::BusyServer { requests }))
    }

    /// From here on queries are counted and the past is forgotten.
    pub(super) fn start_queries(&mut self, done: u64) {
        (self.done, self.began) = (done, clock::now());
        self.lateness.start();
        if let Some((power, bound)) = self.books.idle_power() {
            self.weights = self.weights.clone().with_idle(power, bound);
        }
        if let Some(metered) = self.books.metered() {
            metered.needed_from = clock::now();
        }
    }

    /// Waits for `what`, collecting readings meanwhile.
    pub(super) async fn pump_while<T>(&mut self, what: impl Future<Output = T>) -> Result<T, LabError> {
        tokio::pin!(what);
        loop {
            tokio::select! {
                biased;
                out = &mut what => return Ok(out),
                () = tokio::time::sleep(PUMP) => self.books.collect()?,
            }
        }
    }

    /// A request with a prompt of so many bytes is about to be sent.
    pub(super) fn take_off(&mut self, number: u64, live: &Arc<Live>, bytes: u64) {
        if self.books.metered().is_some() {
            self.flights.insert(number, Watched { live: Arc::clone(live), bytes, sent: None, pieces: 0 });
        }
    }

    /// Whether the next request is late because as many as may were in flight.
    pub(super) fn held_back(&mut self, is: bool) {
        self.lateness.held_back += u64::from(is);
    }

    /// A request has ended.
    pub(super) fn land(&mut self, landed: Landed) -> Result<(), LabError> {
        // Of one that was sent again, the wait is the server's doing.
        if landed.exchange.attempts == 1 {
            self.lateness.push(landed.ready, landed.exchange.sent);
        }
        let number = landed.number;
        let Some(mut watched) = self.flights.remove(&number) else {
            return if landed.counts { self.settle(landed, Bill::default()) } else { Ok(()) };
        };
        if self.books.has_energy() {
            self.ends.push_back(landed.exchange.done);
            let Exchange { due, sent, done, attempts, ref tokens, .. } = landed.exchange;
            // Of one that was sent again, nobody may have seen the first try.
            self.open_splitter(Some(if attempts > 1 { due } else { sent }));
            if let Some(splitter) = &mut self.splitter {
                // One that never was sent waits for its turn like the others, so that they stay in order.
                let sent = if landed.was_sent { sent } else { done };
                let flying = watched.tell(splitter, number, Some(sent), tokens, done);
                match flying {
                    Some(flying) if landed.counts => splitter.done(flying, &landed.exchange),
                    Some(flying) => splitter.withdraw(flying, done),
                    None => {}
                }
            }
        }
        if landed.counts {
            self.landed.insert(number, landed);
        }
        Ok(())
    }

    /// Opens the account where the first request was sent, which somebody else in flight may have been.
    fn open_splitter(&mut self, sent: Option<Stamp>) {
        if self.splitter.is_none() {
            let first = self.flights.values().filter_map(|w| w.live.tried()).chain(sent).min();
            self.splitter = first.map(|first| Splitter::open(first, self.weights.clone()));
        }
    }

    /// Pumps if the time has come: while answers come faster than the pump's own timer is looked at, this is where it runs.
    pub(super) fn pump_if_due(
        &mut self,
        in_flight: usize,
        observe: &mut Observer<'_>,
    ) -> Result<(), LabError> {
        match clock::now().since(self.pumped).get() >= PUMP.as_secs_f64() {
            true => self.pump(in_flight, observe),
            false => Ok(()),
        }
    }

    /// Collects readings, makes records of what is known, writes them and shows how far it is.
    pub(super) fn pump(&mut self, in_flight: usize, observe: &mut Observer<'_>) -> Result<(), LabError> {
        self.pumped = clock::now();
        self.books.collect()?;
        self.watch();
        let known = self.books.known_until().max(self.pumped.minus_nanos(self.books.patience()));
        let heard = self.others.known_until().map_or(known, |at| at.max(self.pumped.minus_nanos(SILENT_NS)));
        let known = known.min(heard);
        self.bill(Some(known))?;
        if self.flights.is_empty()
            && let (Some(metered), Some(splitter)) = (self.books.metered(), &mut self.splitter)
            && let Some(panel) = &metered.panel
        {
            splitter.rest(known, View { timeline: &metered.timeline, sensors: &panel.sensors });
        }
        self.books.flush()?;
        self.give_up(observe)?;
        if self.pumped.since(self.shown).get() >= SHOW.get() {
            self.show(in_flight, observe);
        }
        Ok(())
    }

    /// Ends the run if too many requests failed in a row. What had finished well is kept, whatever becomes of the rest.
    fn give_up(&mut self, observe: &mut Observer<'_>) -> Result<(), LabError> {
        if self.given_up.is_some() {
            self.bill(None)?;
            self.books.flush()?;
            self.show(0, observe);
        }
        self.given_up.take().map_or(Ok(()), Err)
    }

    /// The server said how busy it is, some time between two moments.
    pub(super) fn hear(&mut self, asked: Stamp, answered: Stamp, load: Option<Load>) {
        self.watch();
        let at_work = self.flights.values().filter(|w| w.live.progress().is_some()).count();
        let lately = asked.minus_nanos(UNSEEN_NS);
        self.ends.retain(|end| *end >= lately);
        // Of very short ones, no more than one for each that is there now.
        let ended = self.ends.len().min(at_work.max(1));
        let at = asked.midpoint(answered);
        let others = self.others.hear(at, load, at_work + ended, self.splitter.as_ref());
        if let Some((splitter, others)) = self.splitter.as_mut().zip(others) {
            splitter.foreign(others);
        }
    }

    /// Looks at what is in flight.
    fn watch(&mut self) {
        let mut oldest = self.pumped;
        if self.books.has_energy() {
            self.open_splitter(None);
        }
        for (number, watched) in &mut self.flights {
            let live = Arc::clone(&watched.live);
            let sent = live.progress();
            oldest = sent.map_or(oldest, |sent| oldest.min(sent));
            if let Some(splitter) = &mut self.splitter {
                live.with(|exchange| watched.tell(splitter, *number, sent, &exchange.tokens, self.pumped));
            }
        }
        let waiting = self.landed.values().map(|l| l.exchange.sent).min();
        let told = self.splitter.as_ref().map_or(self.began, Splitter::needs_from);
        let needed = [waiting, Some(told)].into_iter().flatten().fold(oldest, Stamp::min);
        if let Some(metered) = self.books.metered() {
            metered.needed_from = needed.max(metered.needed_from);
        }
    }

    /// Makes records of those whose energy is known: up to a moment, or of everything there is.
    fn bill(&mut self, until: Option<Stamp>) -> Result<(), LabError> {
        let Some(metered) = self.books.metered() else { return Ok(()) };
        let mut bills = Vec::new();
        match (&metered.panel, &mut self.splitter) {
            (Some(panel), Some(splitter)) => {
                let view = View { timeline: &metered.timeline, sensors: &panel.sensors };
                let landed = &self.landed;
                let made = |ended: Ended| {
                    let Some(landed) = landed.get(&ended.key) else { return };
                    let bill = Bill {
                        share: ended.share,
                        perimeter: ended.share.map(|_| panel.perimeter),
                        telemetry: telemetry(metered, &landed.exchange, ended.share),
                        ledger: Some(ended.ledger),
                    };
                    bills.push((ended.key, bill));
                };
                match until {
                    Some(known) => splitter.settle(known, self.pumped, view, made),
                    None => splitter.finish(view, made),
                }
            }
            // Without energy there is nothing to split, but sensors may have seen something else.
            _ => {
                let known = |l: &&Landed| until.is_none_or(|known| l.exchange.done <= known);
                let mut all: Vec<&Landed> = self.landed.values().filter(known).collect();
                all.sort_by_key(|l| (l.exchange.done, l.number));
                bills.extend(all.into_iter().map(|landed| {
                    let telemetry = telemetry(metered, &landed.exchange, None);
                    (landed.number, Bill { telemetry, ..Bill::default() })
                }));
            }
        }
        for (number, bill) in bills {
            if let Some(landed) = self.landed.remove(&number) {
                self.settle(landed, bill)?;
            }
        }
        Ok(())
    }

    /// What is still in flight is with the server no more.
    fn let_go(&mut self) {
        let now = clock::now();
        for (_, watched) in self.flights.drain() {
            if let Some((splitter, (_, flying))) = self.splitter.as_mut().zip(watched.sent) {
                splitter.withdraw(flying, now);
            }
        }
    }

    /// Waits until every ended exchange is a record, unless there is no time for that.
    pub(super) async fn settle_all(
        &mut self,
        stop: &Stop,
        observe: &mut Observer<'_>,
    ) -> Result<(), LabError> {
        self.watch();
        self.let_go();
        while !self.landed.is_empty() && !stop.hurries() {
            self.pump(0, observe)?;
            if !self.landed.is_empty() {
                tokio::time::sleep(PUMP).await;
            }
        }
        self.give_up(observe)?;
        self.write_failures()?;
        self.books.flush()?;
        self.show(0, observe);
        Ok(())
    }

    /// The user stopped it: what is finished still waits for the reading that ends its window.
    pub(super) async fn interrupted(
        &mut self,
        stop: &Stop,
        observe: &mut Observer<'_>,
    ) -> Result<(), LabError> {
        self.note(&Event::plain("interrupted"))?;
        // It ends anyway: what failed is told as it is.
        self.give_up_after = 0;
        self.settle_all(stop, observe).await
    }

    /// Stops the meter and writes what is left, then the session's last lines.
    pub(super) fn close(mut self, client: &dyn Client) -> Result<(), LabError> {
        let stopped = self.books.stop_meter()?;
        self.bill(None)?;
        // If the run gave up, the failures that made it do so were dropped already.
        self.write_failures()?;
        if let Some(load) = self.lateness.event(client.connections()) {
            self.note(&load)?;
        }
        self.books.flush()?;
        self.books.close(stopped, client.place() == Place::Here)
    }

    /// Makes a record of an exchange.
    fn settle(&mut self, landed: Landed, bill: Bill) -> Result<(), LabError> {
        let Landed { item, exchange, score, .. } = landed;
        let Bill { share, perimeter, telemetry, ledger } = bill;
        let session = self.books.session;
        let record = Record { session, item, exchange, share, perimeter, telemetry, score, ledger };
        let Some(error) = record.exchange.outcome.error() else {
            self.write_failures()?;
            return self.write(record);
        };
        if self.given_up.is_some() {
            return Ok(());
        }
        let index = record.item.index;
        self.note(&Event::with("query_failed", json!({ "index": index, "error": error })))?;
        if self.give_up_after == 0 {
            return self.write(record);
        }
        self.failures.push(record);
        let failed = self.failures.len() as u64;
        if failed == self.give_up_after {
            let last = self.failures.pop().and_then(|r| r.exchange.outcome.error().map(str::to_owned));
            self.failures.clear();
            let error = last.unwrap_or_default();
            self.note(&Event::with("gave_up", json!({ "failed": failed, "error": error })))?;
            self.given_up = Some(LabError::GaveUp {
                failed,
                error,
                run: self.run.clone(),
                by_time: self.total.is_none(),
            });
        }
        Ok(())
    }

    fn write_failures(&mut self) -> Result<(), LabError> {
        std::mem::take(&mut self.failures).into_iter().try_for_each(|record| self.write(record))
    }

    fn write(&mut self, record: Record) -> Result<(), LabError> {
        self.so_far.push(&record);
        self.books.put(&Event::Record(Box::new(record)))?;
        self.done += 1;
        Ok(())
    }

    fn show(&mut self, in_flight: usize, observe: &mut Observer<'_>) {
        self.shown = clock::now();
        let seconds = self.shown.since(self.lateness.began()).get();
        observe(Progress::Load {
            done: self.done,
            total: self.total,
            errors: self.so_far.errors(),
            in_flight,
            seconds,
            ttft_s: self.so_far.ttft(),
            itl_s: self.so_far.itl(),
            watts: self.books.watts(),
            joules_per_query: self.so_far.joules_per_query(),
            joules_per_token: self.so_far.joules_per_token(),
        });
    }
}

impl Watched {
    /// Tells the splitter what is new: when it was sent, if it is with the server, and all pieces that came so far.
    fn tell(
        &mut self,
        splitter: &mut Splitter,
        number: u64,
        sent: Option<Stamp>,
        pieces: &[Stamp],
        now: Stamp,
    ) -> Option<Flying> {
        // Its place at the server is free until it is sent again.
        if let Some((_, flying)) = self.sent.take_if(|(before, _)| Some(*before) != sent) {
            splitter.withdraw(flying, sent.unwrap_or(now));
            self.pieces = 0;
        }
        let sent = sent?;
        let (_, flying) = *self.sent.get_or_insert_with(|| (sent, splitter.sent(number, sent, self.bytes)));
        splitter.pieces(flying, &pieces[self.pieces.min(pieces.len())..]);
        self.pieces = pieces.len();
        Some(flying)
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
