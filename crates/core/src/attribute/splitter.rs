//! Splits energy over requests, tick by tick.

use super::flight::{Around, End, Flight, Part, ratio};
use super::guess::Guess;
use super::pace::Pace;
use super::tick::Tick;
use super::{Ledger, Share, View};
use crate::account::Account;
use crate::cost::{Cost, Weights, Work};
use crate::estimate::Estimate;
use crate::exchange::Exchange;
use crate::time::{Span, Stamp};
use crate::units::{Joules, Seconds};
use std::collections::{BTreeSet, VecDeque};

/// Length of a tick: no counter of a board tells more than that it drew so much in the last 100 ms, and shorter ones would be split by
/// a power that nobody saw.
const TICK_NS: u64 = 100_000_000;

/// So long a first token or the next piece is waited for before a tick is split without it. Short enough that what has finished is
/// on disk within a second.
const PATIENCE_NS: u64 = 700_000_000;

/// A request that was told to a [`Splitter`], until it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flying(usize);

/// A request whose energy is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ended {
    /// As it was told.
    pub key: u64,
    /// Its part; `None` if no sensor covered any of its time.
    pub share: Option<Share>,
    /// The account as it stands now.
    pub ledger: Ledger,
}

/// What others had a server do in a stretch of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Foreign {
    /// When.
    pub span: Span,
    /// How many of their requests were worked on, on average. Each is taken to get as many tokens as each of ours.
    pub requests: f64,
    /// Their prompt tokens.
    pub prefill: f64,
}

/// Splits energy over exchanges: these are told as they are seen, and billed as soon as the energy and what was done for
/// everybody is known. One that is told late counts from where the account stands, so that nothing is billed twice.
#[derive(Debug, Clone)]
pub struct Splitter {
    ledger: Ledger,
    weights: Weights,
    /// All before this is settled.
    at: Stamp,
    slots: Vec<Option<Box<Flight>>>,
    free: Vec<usize>,
    /// Those sent after `at`, and those in flight then.
    coming: BTreeSet<(Stamp, usize)>,
    running: Vec<usize>,
    /// First tokens since `at`, and the last one before.
    firsts: BTreeSet<Stamp>,
    streams: bool,
    guess: Guess,
    foreign: VecDeque<Foreign>,
    work: Work,
    busy: Seconds,
    /// Parts of the tick at hand; empty in between.
    parts: Vec<Part>,
}

impl Splitter {
    /// Starts an account at `start`.
    pub fn open(start: Stamp, weights: Weights) -> Self {
        Self {
            ledger: Ledger::open(start),
            weights,
            at: start,
            slots: Vec::new(),
            free: Vec::new(),
            coming: BTreeSet::new(),
            running: Vec::new(),
            firsts: BTreeSet::new(),
            streams: false,
            guess: Guess::default(),
            foreign: VecDeque::new(),
            work: Work::default(),
            busy: Seconds(0.0),
            parts: Vec::new(),
        }
    }

    /// The account as it stands after the last exchange that ended.
    pub fn ledger(&self) -> Ledger {
        self.ledger
    }

    /// All that was done so far, as far as its energy was seen, and how long somebody was in flight.
    pub fn work(&self) -> (Work, Seconds) {
        (self.work, self.busy)
    }

    /// Nothing before this is asked of a timeline any more.
    pub fn needs_from(&self) -> Stamp {
        self.running
            .iter()
            .filter_map(|slot| Some(self.slots[*slot].as_ref()?.sent))
            .fold(self.at, Stamp::min)
    }

    /// Whether anybody is in flight, or will be.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty() && self.coming.is_empty()
    }

    /// A request with a prompt of so many bytes was sent.
    pub fn sent(&mut self, key: u64, at: Stamp, bytes: u64) -> Flying {
        let sent = at.max(self.at);
        let bytes = bytes as f64;
        let flight = Box::new(Flight::new(key, sent, bytes, self.guess.prompt(bytes)));
        let slot = self.free.pop().unwrap_or(self.slots.len());
        match self.slots.get_mut(slot) {
            Some(free) => *free = Some(flight),
            None => self.slots.push(Some(flight)),
        }
        self.coming.insert((sent, slot));
        Flying(slot)
    }

    /// More pieces of its answer came, in order; the first of all is its first token.
    pub fn pieces(&mut self, Flying(slot): Flying, came: &[Stamp]) {
        let Some(flight) = self.slots.get_mut(slot).and_then(Option::as_mut) else { return };
        let waited = flight.first.is_none();
        flight.pieces(came, self.at);
        if let Some(first) = flight.first.filter(|_| waited) {
            self.firsts.insert(first);
            self.streams = true;
        }
    }

    /// It ended as `exchange` says; all its pieces were told.
    pub fn done(&mut self, Flying(slot): Flying, exchange: &Exchange) {
        let Some(flight) = self.slots.get_mut(slot).and_then(Option::as_mut) else { return };
        if let Some(worked) = self.guess.learn(exchange, flight.bytes) {
            flight.correct(worked);
        }
        flight.end = Some((exchange.done, End::of(exchange)));
    }

    /// It is with the server no more, and counts nowhere: its energy stays open.
    pub fn withdraw(&mut self, Flying(slot): Flying, at: Stamp) {
        if let Some(flight) = self.slots.get_mut(slot).and_then(Option::as_mut) {
            flight.end = Some((at, End::Withdrawn));
        }
    }

    /// Prompt tokens of ours that were worked off in a span; `None` if some of it is settled.
    pub fn prompts_in(&self, span: Span) -> Option<f64> {
        if span.start() < self.at {
            return None;
        }
        let here = self.slots.iter().flatten().filter(|f| f.first.is_some_and(|t| span.contains(t)));
        Some(here.map(|f| f.prompt()).sum())
    }

    /// Others were served, too. Told in order, before the time it is about is settled.
    pub fn foreign(&mut self, foreign: Foreign) {
        self.foreign.push_back(foreign);
    }

    /// Nobody is in flight, and nothing more will be told of the time before `until`.
    pub fn rest(&mut self, until: Stamp, view: View<'_>) {
        if self.is_empty() && until > self.at {
            self.idle(until, view);
        }
    }

    /// Splits the energy up to `known`, as far as it is known what was done for whom, or was to be known before `now`.
    pub fn settle(&mut self, known: Stamp, now: Stamp, view: View<'_>, mut ended: impl FnMut(Ended)) {
        let hurry = now.minus_nanos(PATIENCE_NS);
        loop {
            self.begin(self.at);
            if self.running.is_empty() {
                match self.coming.first() {
                    Some((next, _)) if *next <= known => self.idle(*next, view),
                    _ => return,
                }
                continue;
            }
            let until = self.cut();
            let is_known = |slot: &usize| self.slots[*slot].as_ref().is_none_or(|f| f.is_known(until));
            let later = self.coming.range(..(until, 0)).map(|(_, slot)| slot);
            if until > known || (until > hurry && !self.running.iter().chain(later).all(is_known)) {
                return;
            }
            self.begin(until.minus_nanos(1));
            self.tick(until, view);
            self.land(view, &mut ended);
        }
    }

    /// Settles everything: what has not ended is with the server no more.
    pub fn finish(&mut self, view: View<'_>, ended: impl FnMut(Ended)) {
        let told = self.slots.iter().flatten().filter_map(|f| f.end.map(|(end, _)| end));
        let last = told.max().unwrap_or_default().max(self.at);
        let last = self.coming.last().map_or(last, |(sent, _)| last.max(*sent));
        for flight in self.slots.iter_mut().flatten().filter(|f| f.end.is_none()) {
            flight.end = Some((last, End::Withdrawn));
        }
        let ever = Stamp::from_nanos(u64::MAX);
        self.settle(ever, ever, view, ended);
    }

    /// Those sent by `at` are in flight.
    fn begin(&mut self, at: Stamp) {
        while let Some(next) = self.coming.first().copied().filter(|(sent, _)| *sent <= at) {
            self.coming.pop_first();
            self.running.push(next.1);
        }
    }

    /// Where the tick that begins now ends: on the grid, where nobody is in flight any more, and, if only one is, at whatever
    /// happens to it.
    fn cut(&self) -> Stamp {
        let start = self.ledger.account.span.start();
        let ticks = (self.at.nanos() - start.nanos()) / TICK_NS + 1;
        let until = start.plus_nanos(ticks.saturating_mul(TICK_NS));
        let ever = Stamp::from_nanos(u64::MAX);
        let end_of = |slot: &usize| {
            let flight = self.slots[*slot].as_ref();
            flight.and_then(|f| f.end).map_or(ever, |(end, _)| end.max(self.at))
        };
        if let [only] = self.running.as_slice()
            && let Some(flight) = &self.slots[*only]
        {
            let next = self.coming.first().map(|(sent, _)| *sent);
            let first = flight.first.filter(|first| *first > self.at);
            return [first, Some(end_of(only)), next].into_iter().flatten().fold(until, Stamp::min);
        }
        let mut busy = self.running.iter().map(end_of).max().unwrap_or(self.at);
        for (sent, slot) in &self.coming {
            if *sent > busy || *sent >= until {
                break;
            }
            busy = busy.max(end_of(slot));
        }
        until.min(busy)
    }

    fn idle(&mut self, until: Stamp, view: View<'_>) {
        if let Some(energy) = self.pass(until, view) {
            self.ledger.idle += energy.value();
        }
    }

    /// Splits the energy from where the account stands to `until`.
    fn tick(&mut self, until: Stamp, view: View<'_>) {
        let tick = Span::new(self.at, until);
        let seconds = tick.duration().get();
        let mut parts = std::mem::take(&mut self.parts);
        parts.clear();
        let speed = self.weights.seconds.map(|s| s.prefill).filter(|s| *s > 0.0).or(self.guess.pace());
        let flights = || self.running.iter().filter_map(|slot| self.slots[*slot].as_deref());
        let pace = self.weights.seconds.and_then(|seconds| pace(seconds, self.at, flights()));
        let head = self.head(speed);
        let around = Around {
            guess: &self.guess,
            speed,
            pace: pace.as_ref(),
            firsts: &self.firsts,
            head,
            streams: self.streams,
        };
        let began: Vec<_> = self.running.iter().map(|s| self.slots[*s].as_ref()?.locate(&around)).collect();
        for (slot, began) in self.running.iter().zip(began) {
            if let Some((flight, began)) = self.slots[*slot].as_mut().zip(began) {
                flight.begin(began);
            }
        }
        for slot in &self.running {
            parts.extend(self.slots[*slot].as_mut().map(|f| f.part(*slot, tick, &around)));
        }
        let others = self.others(tick, &parts);
        if let Some(energy) = self.pass(until, view).filter(|_| seconds > 0.0) {
            self.split(energy.value().get(), seconds * energy.coverage(), &parts, others);
        }
        self.parts = parts;
    }

    /// Moves on to `until`: the energy of that stretch, which is the same in the account as in the bills, whatever readings come later.
    fn pass(&mut self, until: Stamp, view: View<'_>) -> Option<Estimate<Joules>> {
        let piece = Span::new(self.at, until);
        self.at = until;
        self.ledger.account.extend(view.timeline, view.sensors, until);
        view.timeline.energy_of(view.sensors, piece)
    }

    /// Whose prompt is worked on, of those that have no first token yet: the oldest, unless its prompt takes less than was waited
    /// for it, so that it has to wait itself.
    fn head(&self, speed: Option<f64>) -> Option<usize> {
        let flights = || self.running.iter().filter_map(|slot| Some((*slot, self.slots[*slot].as_deref()?)));
        let decoding = flights().any(|(_, f)| f.first.is_some());
        let alone = self.running.len() == 1;
        let works = |f: &Flight| match speed {
            _ if f.first.is_some() || matches!(f.end, Some((_, End::Whole(_)))) => false,
            _ if alone => true,
            Some(speed) => f.takes(speed) * 1e9 >= PATIENCE_NS as f64,
            None => !decoding,
        };
        flights().filter(|(_, f)| works(f)).min_by_key(|(_, f)| f.sent).map(|(slot, _)| slot)
    }

    /// What others had done in a tick, as one more part.
    fn others(&mut self, tick: Span, ours: &[Part]) -> Part {
        while self.foreign.front().is_some_and(|f| f.span.end() <= tick.start()) {
            self.foreign.pop_front();
        }
        let mut others = Part::default();
        for foreign in &self.foreign {
            let overlap = foreign.span.end().min(tick.end()).since(foreign.span.start().max(tick.start()));
            let fraction = ratio(overlap.get(), foreign.span.duration().get()).unwrap_or(0.0);
            others.prefill += foreign.prefill * fraction;
            others.decoding += foreign.requests * overlap.get();
        }
        // Nobody knows how much is said to them and what that looks back at: as much as to ours.
        let sum = |of: fn(&Part) -> f64| ours.iter().map(of).sum::<f64>();
        let like_ours = |of| ratio(others.decoding * sum(of), sum(|p| p.decoding)).unwrap_or(0.0);
        (others.decode, others.context) = (like_ours(|p| p.decode), like_ours(|p| p.context));
        others
    }

    /// Charges joules for what was done in so many seconds.
    fn split(&mut self, energy: f64, seconds: f64, ours: &[Part], others: Part) {
        let Some(tick) = Tick::new(energy, seconds, ours, others) else {
            // All ended in no time: nobody can be charged.
            self.ledger.idle += Joules(energy);
            return;
        };
        let (running, slots) = (&self.running, &mut self.slots);
        let (charged, foreign) = tick.divide(&self.weights, |i, due| {
            if let Some(flight) = running.get(i).and_then(|slot| slots[*slot].as_mut()) {
                flight.owe(due);
            }
        });
        self.ledger.foreign += Joules(foreign);
        self.ledger.open += Joules(charged);
        let (work, seconds) = tick.work();
        self.work += work;
        self.busy += Seconds(seconds);
    }

    /// Hands out the shares of those that have ended.
    fn land(&mut self, view: View<'_>, ended: &mut impl FnMut(Ended)) {
        let (slots, at) = (&self.slots, self.at);
        let is_over = |slot: &usize| slots[*slot].as_ref().is_none_or(|f| f.ends_by(at));
        if !self.running.iter().any(is_over) {
            return;
        }
        let mut over: Vec<usize> = self.running.iter().copied().filter(is_over).collect();
        self.running.retain(|slot| !is_over(slot));
        over.sort_by_key(|slot| self.slots[*slot].as_ref().map(|f| (f.end.map(|e| e.0), f.key)));
        for slot in over {
            self.free.push(slot);
            let Some(flight) = self.slots[slot].take() else { continue };
            if let Some((seconds, tokens)) = flight.prefill_seconds() {
                self.guess.prefilled(seconds, tokens);
            }
            let Some((end, End::Billed | End::Whole(_))) = flight.end else { continue };
            let mut whole = Account::open(flight.sent);
            whole.extend(view.timeline, view.sensors, end);
            let share = flight.share(&whole);
            // What has no share is in nobody's bill. One after the other, so that each record's account adds up with the records before it.
            if let Some(share) = &share {
                self.ledger.open = self.ledger.open - share.total();
                self.ledger.billed += share.total();
            }
            ended(Ended { key: flight.key, share, ledger: self.ledger });
        }
        let before = self.firsts.range(..self.at).next_back().copied();
        if let Some(before) = before {
            self.firsts = self.firsts.split_off(&before);
        }
    }
}

/// How long iterations are from `at` on, as whoever shows most of them tells.
fn pace<'a>(seconds: Cost, at: Stamp, flights: impl Iterator<Item = &'a Flight> + Clone) -> Option<Pace> {
    if !flights.clone().any(Flight::is_unlocated) {
        return None;
    }
    let decoding = flights.filter(|f| f.first.is_some_and(|first| first <= at));
    let (n, context) = decoding.clone().fold((0.0, 0.0), |(n, k), f| (n + 1.0, k + f.context()));
    let (last, beats) = decoding.map(Flight::beats).max_by_key(|(_, beats)| beats.len())?;
    Some(Pace::new(seconds, last, beats, n, context))
}
