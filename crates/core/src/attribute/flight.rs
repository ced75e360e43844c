//! One request in flight: what was done for it in each tick, and what it owes so far.

use super::Share;
use super::guess::Guess;
use super::pace::Pace;
use crate::account::Account;
use crate::cost::{DRAWS, Work};
use crate::exchange::Exchange;
use crate::time::{Span, Stamp};
use crate::units::Joules;
use std::collections::{BTreeSet, VecDeque};

/// First tokens that come closer together than this came out of one iteration.
pub(super) const TOGETHER_NS: u64 = 2_000_000;
/// Beside decoding, work on a prompt takes at most this many times as long as alone.
const SLOWED: f64 = 2.0;

/// Ticks and iterations have other edges, and counters tell only what was drawn in between: standard deviation of what one of
/// several pays for a tick, relative to it and independent from tick to tick. From simulation: tests/attribution.
const PLACED: f64 = 0.3;

/// A request between sent and settled.
#[derive(Debug, Clone)]
pub(super) struct Flight {
    pub(super) key: u64,
    /// When it was sent; from where it is billed, if that is later.
    pub(super) sent: Stamp,
    pub(super) bytes: f64,
    prompt: f64,
    /// Prompt tokens that nobody was charged for yet.
    left: f64,
    /// When work on its prompt began, once that is known.
    began: Option<Stamp>,
    pub(super) first: Option<Stamp>,
    /// Pieces that are not wholly charged, and when the one before them came.
    pieces: VecDeque<Stamp>,
    last: Stamp,
    /// When the last piece that is charged came, how long after the one before, and the part of the next that was charged before
    /// it came.
    beat: Stamp,
    gap: f64,
    presumed: f64,
    said: f64,
    pub(super) end: Option<(Stamp, End)>,
    queue: f64,
    prefill: f64,
    decode: f64,
    shared: f64,
    to_first: f64,
    /// Variance of all this because nobody knows what happened when within a tick.
    placed: f64,
    /// How far the guess of its prompt was off, relative to it.
    misguessed: f64,
    drawn: [f64; DRAWS],
}

/// How a flight ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum End {
    /// With a record of its own.
    Billed,
    /// The same, after an answer in one piece of so many tokens.
    Whole(f64),
    /// It counts nowhere: its energy stays open.
    Withdrawn,
}

/// What holds for all in a tick.
pub(super) struct Around<'a> {
    pub(super) guess: &'a Guess,
    /// Seconds of work for a prompt token.
    pub(super) speed: Option<f64>,
    pub(super) pace: Option<&'a Pace>,
    /// Moments of first tokens.
    pub(super) firsts: &'a BTreeSet<Stamp>,
    /// Who is worked for, if nobody said so: the one that waits for its first token longest; all, where answers do not stream.
    pub(super) head: Option<usize>,
    pub(super) streams: bool,
}

/// What was done for one flight in one tick.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Part {
    /// Seconds at work on its prompt, on its tokens, and waiting.
    pub(super) prefilling: f64,
    pub(super) decoding: f64,
    pub(super) waiting: f64,
    /// Pieces that came, and the part of its work on the prompt.
    pub(super) pieces: f64,
    pub(super) begun: f64,
    pub(super) prefill: f64,
    pub(super) decode: f64,
    pub(super) context: f64,
}

impl Part {
    pub(super) fn presence(&self) -> f64 {
        self.prefilling + self.decoding
    }

    /// So many times as much.
    pub(super) fn times(&self, n: f64) -> Self {
        Self {
            prefill: self.prefill * n,
            decode: self.decode * n,
            context: self.context * n,
            decoding: self.decoding * n,
            ..*self
        }
    }

    pub(super) fn add_to(&self, work: &mut Work) {
        work.prefill += self.prefill;
        work.decode += self.decode;
        work.context += self.context;
    }
}

/// What one flight owes of a tick.
pub(super) struct Due<'a> {
    pub(super) queue: f64,
    pub(super) prefill: f64,
    pub(super) decode: f64,
    pub(super) shared: f64,
    /// Part of the shared that was before its first token.
    pub(super) before: f64,
    /// Part of the tick's energy that is not its own.
    pub(super) others: f64,
    /// Part of what is shared, and what was done for it: in the order of `drawn`.
    pub(super) factors: [f64; 4],
    /// Joules for each of them under other coefficients.
    pub(super) drawn: &'a [[f64; DRAWS]; 4],
}

impl Flight {
    pub(super) fn new(key: u64, sent: Stamp, bytes: f64, prompt: f64) -> Self {
        Self {
            key,
            sent,
            bytes,
            prompt,
            left: prompt,
            began: None,
            first: None,
            pieces: VecDeque::new(),
            last: sent,
            beat: sent,
            gap: 0.0,
            presumed: 0.0,
            said: 0.0,
            end: None,
            queue: 0.0,
            prefill: 0.0,
            decode: 0.0,
            shared: 0.0,
            to_first: 0.0,
            placed: 0.0,
            misguessed: 0.0,
            drawn: [0.0; DRAWS],
        }
    }

    /// Pieces came; what is before `at` is settled.
    pub(super) fn pieces(&mut self, came: &[Stamp], at: Stamp) {
        let mut came = came.iter().copied();
        if self.first.is_none()
            && let Some(first) = came.next()
        {
            (self.first, self.last, self.beat) = (Some(first), first, first);
        }
        if self.pieces.is_empty() {
            // A stall that was settled without it.
            self.last = self.last.max(at.min(came.clone().next().unwrap_or(self.last)));
        }
        self.pieces.extend(came);
    }

    /// How many prompt tokens there were to work off. What was charged by a guess stays, and the bound says how far off it was.
    pub(super) fn correct(&mut self, prompt: f64) {
        if self.left == self.prompt {
            (self.prompt, self.left) = (prompt, prompt);
        }
        self.misguessed = ratio((prompt - self.prompt).abs(), self.prompt).unwrap_or(0.0);
    }

    /// Whether what it had done before `at` is known.
    pub(super) fn is_known(&self, at: Stamp) -> bool {
        let heard = self.pieces.back().copied().or(self.first.map(|f| f.max(self.last)));
        self.end.is_some() || heard.is_some_and(|heard| heard >= at)
    }

    /// How long work on the rest of its prompt takes, beside that for others.
    pub(super) fn takes(&self, speed: f64) -> f64 {
        self.left * speed * SLOWED
    }

    pub(super) fn ends_by(&self, at: Stamp) -> bool {
        self.end.is_some_and(|(end, _)| end <= at)
    }

    /// What was done for it in a tick.
    pub(super) fn part(&mut self, slot: usize, tick: Span, around: &Around<'_>) -> Part {
        let from = tick.start().max(self.sent);
        let until = self.end.map_or(tick.end(), |(end, _)| end.min(tick.end()));
        let mut part = Part::default();
        match (self.first, self.end) {
            (Some(first), _) => {
                self.prefilled(from, until, first, &mut part);
                part.decoding = until.since(from.max(first)).get();
                self.decoded(from.max(first), until, around.guess.per_piece(), &mut part);
            }
            (None, Some((end, End::Whole(tokens)))) => {
                // Evenly, for want of anything better.
                let fraction = ratio(until.since(from).get(), end.since(from).get()).unwrap_or(1.0);
                part.decoding = until.since(from).get();
                self.charge_prompt(self.left * fraction, &mut part);
                part.decode = (tokens - self.said) * fraction;
                part.pieces = part.decode;
                part.context = part.decode * (self.prompt + self.said + part.decode / 2.0);
                self.said += part.decode;
            }
            (None, _) if !around.streams => part.prefilling = until.since(from).get(),
            (None, _) if around.head == Some(slot) => {
                part.prefilling = until.since(from).get();
                if let Some(speed) = around.speed {
                    self.charge_prompt(self.left.min(part.prefilling / speed), &mut part);
                }
            }
            (None, _) => part.waiting = until.since(from).get(),
        }
        if self.first.is_some() {
            // In flight, but not worked for.
            part.waiting = (until.since(from).get() - part.presence()).max(0.0);
        }
        part
    }

    /// When work on its prompt began, if it has come to its end and that is not known yet. It ended with the first token. It began
    /// when it was sent, or with the first token before, because prompts are worked off one after the other; where it is known how
    /// long an iteration takes, as far back as iterations were longer than tokens alone explain.
    pub(super) fn locate(&self, around: &Around<'_>) -> Option<Stamp> {
        let first = self.first.filter(|_| self.began.is_none())?;
        let before = around.firsts.range(..first.minus_nanos(TOGETHER_NS)).next_back().copied();
        let before = before.unwrap_or_default();
        let back = |seconds: f64| first.minus_nanos((seconds * 1e9) as u64);
        let began = match (around.pace, around.guess.engine_pace()) {
            (Some(pace), _) => pace.back_from(first, self.prompt),
            (None, Some(pace)) => before.clamp(back(pace * self.prompt * SLOWED), back(pace * self.prompt)),
            (None, None) => before,
        };
        Some(began.max(self.sent).min(first))
    }

    /// Whether it has its first token, and it is open when work on it began.
    pub(super) fn is_unlocated(&self) -> bool {
        self.first.is_some() && self.began.is_none()
    }

    /// Work on its prompt began then.
    pub(super) fn begin(&mut self, began: Stamp) {
        self.began = Some(began);
    }

    /// Moments at which pieces came that are not charged yet, after the one before them.
    pub(super) fn beats(&self) -> (Stamp, &VecDeque<Stamp>) {
        (self.last, &self.pieces)
    }

    pub(super) fn prompt(&self) -> f64 {
        self.prompt
    }

    /// What its next token will look back at.
    pub(super) fn context(&self) -> f64 {
        self.prompt + self.said
    }

    fn prefilled(&mut self, from: Stamp, until: Stamp, first: Stamp, part: &mut Part) {
        let began = self.began.unwrap_or(first);
        let (from, until) = (from.max(began), until.min(first));
        part.prefilling = until.since(from).get();
        part.begun = ratio(part.prefilling, first.since(began).get()).unwrap_or(0.0);
        // What is left of it is spread over what is left of its time.
        let fraction = match first <= until {
            true => 1.0,
            false => ratio(part.prefilling, first.since(from).get()).unwrap_or(0.0),
        };
        if self.left > 0.0 && (part.prefilling > 0.0 || first <= until) {
            self.charge_prompt(self.left * fraction, part);
        }
    }

    fn charge_prompt(&mut self, tokens: f64, part: &mut Part) {
        part.prefill = tokens;
        self.left -= tokens;
    }

    /// Work on a piece is spread over the time since the one before.
    fn decoded(&mut self, from: Stamp, until: Stamp, per_piece: f64, part: &mut Part) {
        while let Some(&came) = self.pieces.front() {
            let whole = came.since(self.last).get();
            let here = came.min(until).since(self.last.max(from)).get();
            part.pieces += (1.0 - self.presumed) * if whole > 0.0 { here / whole } else { 1.0 };
            if came > until {
                break;
            }
            (self.gap, self.presumed) = (came.since(self.beat).get(), 0.0);
            (self.last, self.beat) = (came, came);
            self.pieces.pop_front();
        }
        if self.pieces.is_empty() && self.end.is_none() {
            // A piece that takes longer than anybody waits for it: at the pace of the one before.
            let here = until.since(self.last.max(from)).get();
            let part_of_next = ratio(here, self.gap).unwrap_or(0.0).min(1.0 - self.presumed);
            self.presumed += part_of_next;
            part.pieces += part_of_next;
        }
        part.decode = part.pieces * per_piece;
        part.context = part.decode * (self.prompt + self.said + 1.0 + part.decode / 2.0);
        self.said += part.decode;
    }

    /// When work on its prompt was seen to begin.
    pub(super) fn prefill_seconds(&self) -> Option<(f64, f64)> {
        Some((self.first?.since(self.began?).get(), self.prompt))
    }

    pub(super) fn owe(&mut self, due: &Due<'_>) {
        self.queue += due.queue;
        self.prefill += due.prefill;
        self.decode += due.decode;
        self.shared += due.shared;
        self.to_first += due.queue + due.prefill + due.shared * due.before;
        let total = due.queue + due.prefill + due.decode + due.shared;
        self.placed += (PLACED * total * due.others).powi(2);
        let ([a, b, c, d], [shared, prefill, decode, context]) = (due.factors, due.drawn);
        for i in 0..DRAWS {
            self.drawn[i] += a * shared[i] + b * prefill[i] + c * decode[i] + d * context[i];
        }
    }

    /// Nothing that is guessed matters to one that was always alone.
    fn shares_with_others(&self) -> f64 {
        f64::from(u8::from(self.placed > 0.0))
    }

    pub(super) fn total(&self) -> f64 {
        self.queue + self.prefill + self.decode + self.shared
    }

    /// Its share, from what the sensors say of its whole time.
    pub(super) fn share(&self, whole: &Account) -> Option<Share> {
        let seen = whole.estimate()?;
        let total = self.total();
        // The sensors' bound of the whole span, in proportion to the part that is its own.
        let part = ratio(total, seen.value().get()).unwrap_or(1.0);
        let squares: f64 = self.drawn.iter().map(|x| (x - total).powi(2)).sum();
        // Of many alike, guesses are wrong alike, and what one has too much the others have too little.
        let guess = self.misguessed * self.prefill * self.shares_with_others();
        let model = (1.96 * (squares / DRAWS as f64 + self.placed).sqrt()).hypot(guess);
        let phases = match self.end {
            Some((_, End::Whole(_))) => [0.0, 0.0, 0.0, total],
            _ => [self.queue, self.prefill, self.decode, self.shared],
        };
        let [queue, prefill, decode, shared] = phases.map(Joules);
        Some(Share {
            queue,
            prefill,
            decode,
            shared,
            to_first_token: self.first.map(|_| Joules(self.to_first)),
            bound: Joules((seen.bound().get() * part).hypot(model)),
            method: seen.method(),
            coverage: seen.coverage(),
        })
    }
}

impl End {
    /// How an exchange ended.
    pub(super) fn of(exchange: &Exchange) -> Self {
        match exchange.outcome.is_ok() && exchange.first_token.is_none() {
            true => End::Whole(exchange.usage.completion.unwrap_or(1).max(1) as f64),
            false => End::Billed,
        }
    }
}

pub(super) fn ratio(over: f64, under: f64) -> Option<f64> {
    (under > 0.0).then(|| over / under)
}
