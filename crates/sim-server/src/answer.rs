//! One answer while it is given: which token is next, when it is due, and whether a trap ends it.

use crate::served::{Outcome, Served};
use crate::trap::Trap;
use crate::voice::{Durations, Voice};
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};
use std::collections::VecDeque;

/// Bytes up to `end` of the output are so many tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    pub(crate) end: usize,
    pub(crate) tokens: u32,
}

/// Where an answer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Tokens are still to come.
    Speaking,
    /// All of it is in the output.
    Complete,
    /// Nothing more comes, and the connection stays.
    Silent,
    /// Nothing more comes, and the connection is closed.
    Cut,
}

/// How a trap ends an answer before its time.
#[derive(Debug, Clone, Copy)]
enum Stop {
    Disconnect,
    Error,
    Hang,
}

/// The times between tokens.
pub(crate) struct Gaps {
    pub(crate) itl: u64,
    pub(crate) jitter: f64,
    rng: Pcg64Mcg,
}

impl Gaps {
    /// The same seed and number of the request give the same times.
    pub(crate) fn new(itl: u64, jitter: f64, seed: u64, number: u64) -> Gaps {
        Gaps { itl, jitter: jitter.clamp(0.0, 1.0), rng: Pcg64Mcg::seed_from_u64(seed ^ number << 32) }
    }

    pub(crate) fn vary(&mut self, time: u64) -> u64 {
        if self.jitter == 0.0 {
            return time;
        }
        let even = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        (time as f64 * (1.0 + self.jitter * (2.0 * even - 1.0))).round() as u64
    }
}

/// One answer.
pub(crate) struct Answer {
    voice: Voice,
    pub(crate) served: Served,
    pub(crate) state: State,
    /// The connection is closed after it.
    pub(crate) close: bool,
    /// An engine says when tokens come.
    pub(crate) in_engine: bool,
    /// When the next token comes, where there is no engine.
    pub(crate) due: u64,
    gaps: Gaps,
    load: u64,
    head_said: bool,
    /// Tokens that came.
    came: u32,
    /// Of these, in the output.
    said: u32,
    together: u32,
    stop: Option<(u32, Stop)>,
}

impl Answer {
    /// An answer whose first token is due at `due`.
    pub(crate) fn new(voice: Voice, served: Served, due: u64, gaps: Gaps, load: u64) -> Answer {
        let half = (served.output_tokens / 2).max(1);
        let (mut stop, mut together, mut close) = (None, 1, false);
        for trap in &served.traps {
            match *trap {
                Trap::DisconnectMid(n) => stop = Some((n.unwrap_or(half), Stop::Disconnect)),
                Trap::ErrorInStream(n) => stop = Some((n.unwrap_or(half), Stop::Error)),
                Trap::HangMid(n) => stop = Some((n.unwrap_or(half), Stop::Hang)),
                Trap::Coalesced(k) => together = k,
                Trap::CloseAfter => close = true,
                _ => {}
            }
        }
        Answer {
            voice,
            served,
            state: State::Speaking,
            close,
            in_engine: false,
            due,
            gaps,
            load,
            head_said: false,
            came: 0,
            said: 0,
            together,
            stop,
        }
    }

    /// What is said at once, before any token.
    pub(crate) fn open(&mut self, out: &mut Vec<u8>) {
        if !self.voice.stream {
            return;
        }
        let has = |trap: fn(&Trap) -> bool| self.served.traps.iter().any(trap);
        let (role, comment) = (has(|t| *t == Trap::RoleFirst), has(|t| *t == Trap::Comments));
        if role || comment || has(|t| matches!(t, Trap::SlowLoris(_))) {
            self.head(out);
        }
        if comment {
            self.voice.comment(out);
        }
        if role {
            self.voice.role(out);
        }
    }

    fn head(&mut self, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.head_said, true) {
            self.voice.head(out);
        }
    }

    /// The tokens due by `now` on the fixed schedule.
    pub(crate) fn tokens_until(&mut self, now: u64, out: &mut Vec<u8>, marks: &mut VecDeque<Mark>) {
        while self.state == State::Speaking && self.due <= now {
            self.token(self.due, out, marks);
            self.due += self.gaps.vary(self.gaps.itl);
        }
    }

    /// The next token, which was due at `due`.
    pub(crate) fn token(&mut self, due: u64, out: &mut Vec<u8>, marks: &mut VecDeque<Mark>) {
        self.served.scheduled.push(due);
        self.came += 1;
        let last = self.came == self.served.output_tokens;
        let stops = self.stop.filter(|(after, _)| self.came == *after).map(|(_, stop)| stop);
        if self.voice.stream {
            self.say(last || stops.is_some(), out, marks);
            if let Some(stop) = stops {
                return self.stop(stop, out);
            }
        } else if let Some(stop) = stops {
            return self.stop_whole(stop, out);
        }
        if !last {
            return;
        }
        if self.voice.stream {
            self.voice.end(self.durations(), out);
        } else {
            self.voice.whole(self.durations(), out);
            marks.push_back(Mark { end: out.len(), tokens: self.came });
        }
        self.state = State::Complete;
    }

    /// Puts the tokens that came into the output, once there are enough for a chunk.
    fn say(&mut self, all: bool, out: &mut Vec<u8>, marks: &mut VecDeque<Mark>) {
        if self.came - self.said < self.together && !all {
            return;
        }
        if self.said == 0 {
            self.head(out);
            for trap in &self.served.traps {
                match trap {
                    Trap::HugeLine(mib) => self.voice.huge((mib << 20) as usize, out),
                    Trap::Garbage => self.voice.garbage(out),
                    _ => {}
                }
            }
        }
        self.voice.tokens(self.said..self.came, out);
        marks.push_back(Mark { end: out.len(), tokens: self.came - self.said });
        self.said = self.came;
    }

    fn stop(&mut self, stop: Stop, out: &mut Vec<u8>) {
        self.served.outcome = Outcome::Trapped;
        self.state = match stop {
            Stop::Disconnect => State::Cut,
            Stop::Hang => State::Silent,
            Stop::Error => {
                self.voice.error(out);
                State::Complete
            }
        };
    }

    /// An answer that is not streamed has nothing to show yet: half of a head, then the end.
    fn stop_whole(&mut self, stop: Stop, out: &mut Vec<u8>) {
        out.extend_from_slice(match stop {
            Stop::Error => b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n".as_slice(),
            Stop::Disconnect => b"HTTP/1.1 200 OK\r\ncontent-le",
            Stop::Hang => b"",
        });
        self.served.outcome = Outcome::Trapped;
        self.state = match stop {
            Stop::Error => State::Complete,
            Stop::Disconnect => State::Cut,
            Stop::Hang => State::Silent,
        };
    }

    /// Whether it ended although an engine has tokens left for it.
    pub(crate) fn wants_no_more(&self) -> bool {
        self.state != State::Speaking && self.came < self.served.output_tokens
    }

    /// By the schedule, not by the writes: it is what the engine would say.
    fn durations(&self) -> Durations {
        let (first, last) = match self.served.scheduled.as_slice() {
            [first, .., last] => (*first, *last),
            [only] => (*only, *only),
            [] => (self.served.received, self.served.received),
        };
        let begun = self.served.begun.unwrap_or(self.served.received);
        Durations {
            total: last.saturating_sub(self.served.received) + self.load,
            load: self.load,
            prompt: first.saturating_sub(begun),
            eval: last - first,
        }
    }
}
