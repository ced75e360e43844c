//! One stored row: the item, its exchange, its share of the energy and its score. Every metric is a function of records.

use crate::attribute::{Ledger, Share};
use crate::exchange::{Exchange, Turn};
use crate::sensor::Perimeter;
use crate::timeline::Level;
use crate::units::Joules;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One question of a dataset.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Item {
    /// Position in this run, from 0.
    pub index: u64,
    /// The dataset's own id of it.
    pub id: String,
    /// What the model is asked.
    pub prompt: String,
    /// The right answer, where there is one.
    pub expected: Option<String>,
    /// Topic, where there is one.
    pub subject: Option<String>,
    /// The dataset's other columns.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
    /// The conversation it belongs to: its turns are asked one after the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conversation: Option<String>,
    /// What was said before it, part of what the model reads. It stands in the records of the turns before and not here again.
    #[serde(skip)]
    pub history: Vec<Turn>,
    /// Exactly this many tokens of answer, where the dataset says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<u32>,
    /// When it is due, in seconds after the first, where the dataset says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub due_s: Option<f64>,
}

/// How good an answer was, by whom.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// 0 wrong to 1 right.
    pub value: f64,
    /// The scorer.
    pub scorer: String,
}

/// The measured surroundings of one exchange: energy by kind of device, and the levels of gauges while it was in flight.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Telemetry {
    /// Energy of the accelerator boards.
    pub gpu: Option<Joules>,
    /// Energy of the CPU packages.
    pub cpu: Option<Joules>,
    /// Energy of the memory.
    pub dram: Option<Joules>,
    /// Energy of the neural engine.
    pub ane: Option<Joules>,
    /// Power of the first accelerator, in watts.
    pub gpu_power: Option<Level>,
    /// Its temperature, in degrees Celsius.
    pub gpu_temperature: Option<Level>,
    /// Its memory in use, in bytes.
    pub gpu_memory: Option<Level>,
    /// Its compute utilisation, 0 to 1.
    pub gpu_utilisation: Option<Level>,
    /// Main memory in use, in bytes.
    pub cpu_memory: Option<Level>,
}

/// One stored row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Which session of the run asked it: 0, and one more after each resume.
    pub session: u32,
    /// What was asked.
    pub item: Item,
    /// What happened.
    pub exchange: Exchange,
    /// Its part of the energy, all devices of the perimeter; `None` if unknown.
    pub share: Option<Share>,
    /// What that energy covers.
    pub perimeter: Option<Perimeter>,
    /// What the sensors saw while it was in flight.
    pub telemetry: Telemetry,
    /// How good the answer was; `None` if nothing was expected.
    pub score: Option<Score>,
    /// The session's account up to here; `None` without energy.
    pub ledger: Option<Ledger>,
}
