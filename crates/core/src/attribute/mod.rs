//! Whose joules: splits measured energy over the exchanges in flight. All shares + idle = total, always.
//!
//! Time is cut into ticks. The energy of a tick goes to those in flight by what each had done in it, at the cost of such work
//! ([`Weights`](crate::cost::Weights)): what a request adds is its own, what an iteration costs whoever is in it is shared, idle power is shared, too.
//! A stretch with nobody in flight is idle. docs/method.md#attribution

mod flight;
mod guess;
mod pace;
mod splitter;
mod tick;

pub use splitter::{Ended, Flying, Foreign, Splitter};

use crate::account::Account;
use crate::estimate::Method;
use crate::sensor::SensorId;
use crate::time::Stamp;
use crate::timeline::Timeline;
use crate::units::Joules;
use serde::{Deserialize, Serialize};

/// One exchange's part of the energy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// While it waited at the server and nobody was worked for.
    pub queue: Joules,
    /// What its prompt added.
    pub prefill: Joules,
    /// What its tokens added.
    pub decode: Joules,
    /// Its part of what is there for whoever is in flight: weights read, idle power. Of an answer that did not stream, all of it.
    pub shared: Joules,
    /// Of all this, what was billed until its first token; `None` if there was none.
    #[serde(default)]
    pub to_first_token: Option<Joules>,
    /// Half-width of the 95 % interval of the total: what the sensors leave open, and what the costs do.
    pub bound: Joules,
    /// How the energy was got.
    pub method: Method,
    /// Part of its time that readings covered.
    pub coverage: f64,
}

impl Share {
    /// All phases.
    pub fn total(&self) -> Joules {
        self.queue + self.prefill + self.decode + self.shared
    }
}

/// The running account of one session: what was measured, and how much of it nobody asked for. Kept with every record, so
/// that a run that was killed still adds up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// From the first request sent to the end of this record's exchange, all sensors of the panel.
    #[serde(flatten)]
    pub account: Account,
    /// The part drawn with nobody in flight.
    pub idle: Joules,
    /// The part billed to exchanges that have ended.
    pub billed: Joules,
    /// The part of those still in flight, or that count nowhere.
    #[serde(default)]
    pub open: Joules,
    /// The part of requests that others sent.
    #[serde(default)]
    pub foreign: Joules,
}

impl Ledger {
    /// An empty one that starts at `start`.
    pub fn open(start: Stamp) -> Self {
        Self {
            account: Account::open(start),
            idle: Joules::ZERO,
            billed: Joules::ZERO,
            open: Joules::ZERO,
            foreign: Joules::ZERO,
        }
    }

    /// Everything that somebody or nobody was charged for.
    pub fn accounted(&self) -> Joules {
        self.billed + self.idle + self.open + self.foreign
    }

    /// What the shares and idle miss of the measured energy, relative to it: 0 to rounding.
    pub fn residual(&self) -> Option<f64> {
        let measured = self.account.measured;
        (measured.get() > 0.0).then(|| (self.accounted() - measured) / measured)
    }
}

/// What is measured: some sensors of a timeline.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Their readings.
    pub timeline: &'a Timeline,
    /// Whose sum counts.
    pub sensors: &'a [SensorId],
}

#[cfg(test)]
mod tests;
