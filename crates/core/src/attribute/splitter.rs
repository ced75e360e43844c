//! Splits energy over requests, tick by tick.

use super::flight::{Around, Due, End, Flight, Part, ratio};
use super::guess::Guess;
use super::pace::Pace;
use super::{Ledger, Share, View};
use crate::account::Account;
use crate::cost::{Cost, DRAWS, Weights, Work};
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
        let settled = self.at.min(self.ledger.account.span.end());
        self.running
            .iter()
            .filter_map(|slot| Some(self.slots[*slot].as_ref()?.sent))
            .fold(settled, Stamp::min)
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

    /// Prompt tokens of ours that were worked off in a span of which nothing is settled.
    pub fn prompts_in(&self, span: Span) -> f64 {
        self.slots
            .iter()
            .flatten()
            .filter(|f| f.first.is_some_and(|t| span.contains(t)))
            .map(|f| f.prompt())
            .sum()
    }

    /// Others were served, too. Told in order, before the time it is about is settled.
    pub fn foreign(&mut self, foreign: Foreign) {
        self.foreign.push_back(foreign);
    }

    /// Nobody is in flight, and nothing more will be told of the time before `until`.
    pub fn rest(&mut self, until: Stamp, view: View<'_>) {
        if self.is_empty() && until > self.at {
            self.idle(until, view);
            self.ledger.account.extend(view.timeline, view.sensors, self.at);
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
        let piece = Span::new(self.at, until);
        self.at = until;
        if let Some(energy) = view.timeline.energy_of(view.sensors, piece) {
            self.ledger.idle += energy.value();
        }
    }

    /// Splits the energy from where the account stands to `until`.
    fn tick(&mut self, until: Stamp, view: View<'_>) {
        let tick = Span::new(self.at, until);
        let seconds = tick.duration().get();
        let mut parts = std::mem::take(&mut self.parts);
        parts.clear();
        let flights = || self.running.iter().filter_map(|slot| self.slots[*slot].as_deref());
        // One whose prompt takes less than was waited for its first token has to wait itself.
        let decoding = flights().any(|f| f.first.is_some());
        let speed = self.weights.seconds.map(|s| s.prefill).or(self.guess.pace());
        let waits = |f: &&Flight| match speed {
            _ if f.first.is_some() || matches!(f.end, Some((_, End::Whole(_)))) => false,
            Some(speed) if f.end.is_none() => f.takes(speed) * 1e9 >= PATIENCE_NS as f64,
            _ => !decoding || f.end.is_some(),
        };
        let pace = self.weights.seconds.and_then(|seconds| pace(seconds, self.at, flights()));
        let around = Around {
            guess: &self.guess,
            speed,
            pace: pace.as_ref(),
            firsts: &self.firsts,
            head: flights().filter(waits).min_by_key(|f| f.sent).map(|f| f.key),
            streams: self.streams,
        };
        let began: Vec<_> = self.running.iter().map(|s| self.slots[*s].as_ref()?.locate(&around)).collect();
        for (slot, began) in self.running.iter().zip(began) {
            if let Some((flight, began)) = self.slots[*slot].as_mut().zip(began) {
                flight.begin(began);
            }
        }
        for slot in &self.running {
            parts.extend(self.slots[*slot].as_mut().map(|f| f.part(tick, &around)));
        }
        let others = self.others(tick, &parts);
        parts.push(others);
        self.at = until;
        if seconds > 0.0
            && let Some(energy) = view.timeline.energy_of(view.sensors, tick)
        {
            self.split(energy.value().get(), seconds, &parts);
        }
        self.parts = parts;
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

    /// Charges joules for what was done in so many seconds; the last part is that of others.
    fn split(&mut self, energy: f64, seconds: f64, parts: &[Part]) {
        let mut work = Work { iterations: iterations(parts, seconds), ..Work::default() };
        parts.iter().for_each(|p| p.add_to(&mut work));
        let present: f64 = parts.iter().map(Part::presence).sum();
        // While all wait, they share the waiting.
        let waiting: f64 = if present > 0.0 { 0.0 } else { parts.iter().map(|p| p.waiting).sum() };
        let all = present + waiting;
        if all <= 0.0 {
            // All ended in no time: nobody can be charged.
            self.ledger.idle += Joules(energy);
            return;
        }
        let costs = self.weights.joules.parts();
        let rate = |idle: f64, costs: [f64; 4]| {
            let weight: f64 = costs.iter().zip(work.parts()).map(|(c, w)| c * w).sum();
            let scale = ratio(energy - idle, weight);
            // What no work explains is shared like idle power.
            let shared = scale.map_or(energy, |s| idle + s * costs[0] * work.iterations);
            (shared, scale.unwrap_or(0.0))
        };
        let (shared, scale) = rate(self.weights.idle_part(energy, seconds), costs);
        let mut drawn = [[0.0; DRAWS]; 4];
        for d in 0..DRAWS {
            let costs = self.weights.drawn.parts.map(|part| part[d]);
            let (shared, scale) = rate(self.weights.idle_drawn(d, energy, seconds), costs);
            (drawn[0][d], drawn[1][d], drawn[2][d], drawn[3][d]) =
                (shared, scale * costs[1], scale * costs[2], scale * costs[3]);
        }
        let mut charged = 0.0;
        for (slot, part) in self.running.iter().zip(parts) {
            let Some(flight) = self.slots[*slot].as_mut() else { continue };
            let part_of_all = (part.presence() + if present > 0.0 { 0.0 } else { part.waiting }) / all;
            let shared = shared * part_of_all;
            let prefill = scale * costs[1] * part.prefill;
            let decode = scale * (costs[2] * part.decode + costs[3] * part.context);
            let due = Due {
                queue: if present > 0.0 { 0.0 } else { shared },
                prefill,
                decode,
                shared: if present > 0.0 { shared } else { 0.0 },
                others: 1.0 - ratio(prefill + decode + shared, energy).unwrap_or(1.0).clamp(0.0, 1.0),
                before: ratio(part.prefilling, part.presence()).unwrap_or(0.0),
                factors: [part_of_all, part.prefill, part.decode, part.context],
                drawn: &drawn,
            };
            charged += prefill + decode + shared;
            flight.owe(&due);
        }
        let foreign = parts.last().filter(|p| p.presence() > 0.0).map_or(0.0, |p| {
            shared * p.presence() / all
                + scale * (costs[1] * p.prefill + costs[2] * p.decode + costs[3] * p.context)
        });
        self.ledger.foreign += Joules(foreign);
        self.ledger.open += Joules(charged);
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
        self.ledger.account.extend(view.timeline, view.sensors, self.at);
        let mut billed = Vec::with_capacity(over.len());
        for slot in over {
            self.free.push(slot);
            let Some(flight) = self.slots[slot].take() else { continue };
            if let Some((seconds, tokens)) = flight.prefill_seconds() {
                self.guess.prefilled(seconds, tokens);
            }
            let Some((end, End::Billed | End::Whole(_))) = flight.end else { continue };
            self.ledger.open = self.ledger.open - Joules(flight.total());
            self.ledger.billed += Joules(flight.total());
            let mut whole = Account::open(flight.sent);
            whole.extend(view.timeline, view.sensors, end);
            billed.push((flight.key, flight.share(&whole)));
        }
        for (key, share) in billed {
            ended(Ended { key, share, ledger: self.ledger });
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

/// Passes over the weights: as many as pieces came to each of those that decode, and one for each prompt while none does.
fn iterations(parts: &[Part], seconds: f64) -> f64 {
    // Of others only tokens are known.
    let ours = &parts[..parts.len().saturating_sub(1)];
    let sum = |of: fn(&Part) -> f64| ours.iter().map(of).sum::<f64>();
    let decoding = ours.iter().map(|p| p.decoding).fold(0.0, f64::max).min(seconds);
    let pieces = ratio(sum(|p| p.pieces), sum(|p| p.decoding)).unwrap_or(0.0);
    let prompts = ratio(sum(|p| p.begun), sum(|p| p.prefilling)).unwrap_or(0.0);
    pieces * decoding + prompts * (seconds - decoding)
}
