//! What work costs, measured: loads of known work, and the coefficients that explain what they drew. docs/method.md#calibration

mod fit;
mod linear;

pub use fit::{CONDITION_LIMIT, Fit, IllPosed, LEAST_EXPLAINED, LEAST_SIGNIFICANCE, fit};

use crate::cost::{Cost, Origin, PARTS, Weights, Work};
use crate::estimate::Estimate;
use crate::sensor::{Device, Perimeter};
use crate::units::Watts;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of a calibration file; a reader passes over others.
pub const CALIBRATION_VERSION: u32 = 1;

/// What changes from load to load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ladder {
    /// The length of prompts, with one token of answer each, one at a time.
    Prefill,
    /// How many are answered at once, with short prompts.
    Decode,
    /// What is looked back at: the length of prompts before long answers.
    Context,
}

impl Ladder {
    /// Every one.
    pub const ALL: [Ladder; 3] = [Ladder::Prefill, Ladder::Decode, Ladder::Context];

    /// The word used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Ladder::Prefill => "prefill",
            Ladder::Decode => "decode",
            Ladder::Context => "context",
        }
    }
}

/// One measured load.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// The ladder it is on.
    pub ladder: Ladder,
    /// Its rung, counted over all ladders: what was asked of repeats of a rung is the same.
    pub rung: u32,
    /// Requests sent at once.
    pub batch: u32,
    /// Requests sent in all.
    pub requests: u64,
    /// What was done.
    pub work: Work,
    /// How long somebody was in flight.
    pub busy_s: f64,
    /// The window in which energy was measured: that, and some rest before and after.
    pub window_s: f64,
    /// Energy of the window.
    pub energy_j: f64,
    /// Its standard error, without the gain error that all cells share.
    pub error_j: f64,
}

impl Cell {
    /// Joules above idle.
    pub fn above_idle(&self, idle: Watts) -> f64 {
        self.energy_j - idle.get() * self.window_s
    }
}

/// What a calibration is of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Subject {
    /// The name requests carry.
    pub model: String,
    /// Digest of the weights, where they are at hand.
    pub sha256: Option<String>,
    /// Weight format, where known.
    pub format: Option<String>,
    /// The engine and its version, where known.
    pub engine: Option<String>,
    /// What is measured, in the order of their ids.
    pub devices: Vec<Device>,
    /// What their sum covers.
    pub perimeter: Perimeter,
}

impl Subject {
    /// The first field in which two differ: its name, here, there.
    pub fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".into());
        let devices = |s: &Self| {
            let names = s.devices.iter().map(|d| format!("{} ({})", d.name, d.id));
            names.collect::<Vec<_>>().join(", ")
        };
        let perimeter = |s: &Self| s.perimeter.name().to_owned();
        let pairs = [
            ("model", self.model.clone(), other.model.clone()),
            ("digest of the weights", or_none(&self.sha256), or_none(&other.sha256)),
            ("weight format", or_none(&self.format), or_none(&other.format)),
            ("engine", or_none(&self.engine), or_none(&other.engine)),
            ("devices", devices(self), devices(other)),
            ("perimeter", perimeter(self), perimeter(other)),
        ];
        pairs.into_iter().find(|(_, a, b)| a != b)
    }
}

/// How thorough a calibration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effort {
    /// Three repeats of few rungs.
    Quick,
    /// Five repeats.
    #[default]
    Default,
    /// Nine repeats of many rungs, longer ones.
    Thorough,
}

impl Effort {
    /// The word used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Effort::Quick => "quick",
            Effort::Default => "default",
            Effort::Thorough => "thorough",
        }
    }
}

/// How far a fit can be believed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    /// Loads measured.
    pub cells: u64,
    /// How often each.
    pub repeats: u64,
    /// Part of the variation of joules that the coefficients explain, 0 to 1.
    pub r2: f64,
    /// Of the design, its columns scaled to the same length; above [`CONDITION_LIMIT`] there is no fit.
    pub condition: f64,
    /// By how much lack of fit widened the bounds: 1 is not at all.
    pub widened: f64,
    /// What the coefficients miss, by ladder: root of the mean square, relative.
    pub residuals: BTreeMap<Ladder, f64>,
    /// The same of seconds: part of the variation explained …
    pub seconds_r2: f64,
    /// … and what is missed.
    pub seconds_residuals: BTreeMap<Ladder, f64>,
}

/// A calibration file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Version of the file.
    pub calibration_version: u32,
    /// SHA-256 of the subject: what a run looks for.
    pub digest: String,
    /// What it is of.
    pub subject: Subject,
    /// When it was made (RFC 3339, UTC).
    pub created: String,
    /// Version of wattle.
    pub version: String,
    /// How thorough it is.
    pub level: Effort,
    /// Of the order of loads and of their prompts.
    pub seed: u64,
    /// How long it took.
    pub duration_s: f64,
    /// Joules above idle.
    pub joules: Cost,
    /// Half-width of the 95 % interval of each; the sensors' gain error, which all share, comes on top.
    pub bound: Cost,
    /// Covariance of the joules, in the order fixed, prefill, decode, context.
    pub covariance: [[f64; PARTS]; PARTS],
    /// Relative 95 % gain error of the sensors. Ratios do not depend on it.
    pub gain: f64,
    /// Seconds.
    pub seconds: Cost,
    /// Power with nothing to do, before and after; drift is in its bound, gain is not.
    pub idle_w: Estimate<Watts>,
    /// How far it can be believed.
    pub quality: Quality,
    /// What to know about it, for people.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// What was measured, in the order in which it was.
    pub cells: Vec<Cell>,
}

impl Calibration {
    /// By what energy is split.
    pub fn weights(&self) -> Weights {
        Weights::calibrated(self.joules, &self.covariance, Some(self.seconds))
    }

    /// What a run keeps of it.
    pub fn attribution(&self) -> Attribution {
        Attribution {
            origin: Origin::Calibration,
            digest: Some(self.digest.clone()),
            created: Some(self.created.clone()),
            joules: self.joules,
            covariance: Some(self.covariance),
            seconds: Some(self.seconds),
        }
    }
}

/// By what the energy of a run is split among its requests: all that it takes to split it again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Attribution {
    /// Where the coefficients come from.
    pub origin: Origin,
    /// Digest of the calibration's subject; `None` of defaults.
    pub digest: Option<String>,
    /// When it was made.
    pub created: Option<String>,
    /// Joules above idle; of defaults only their ratios mean something.
    pub joules: Cost,
    /// Covariance of the joules; `None` of defaults.
    pub covariance: Option<[[f64; PARTS]; PARTS]>,
    /// Seconds, where they were calibrated.
    pub seconds: Option<Cost>,
}

impl Attribution {
    /// Of documented ratios.
    pub fn defaults(weights: &Weights) -> Self {
        Self {
            origin: Origin::Defaults,
            digest: None,
            created: None,
            joules: weights.joules,
            covariance: None,
            seconds: None,
        }
    }

    /// The weights again; `None` of defaults, which are made from the model.
    pub fn weights(&self) -> Option<Weights> {
        let covariance = self.covariance.filter(|_| self.origin == Origin::Calibration)?;
        Some(Weights::calibrated(self.joules, &covariance, self.seconds))
    }
}

#[cfg(test)]
mod tests;
