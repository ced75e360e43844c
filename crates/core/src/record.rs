//! One stored row: the item, its exchange, its share of the energy and its score. Every metric is a function of records.

use crate::attribute::{Ledger, Share};
use crate::exchange::{Exchange, History};
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
    pub history: History,
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

/// Readers of JSON stop at 128 levels; a record adds a few to what it holds.
pub const DEEPEST: usize = 100;

impl Record {
    /// Why this could not be read back from JSON as it is, if that is so.
    pub fn repeatable(&self) -> Result<(), &'static str> {
        let share = self.share.map(|s| {
            let first = s.to_first_token.unwrap_or_default();
            [s.queue, s.prefill, s.decode, s.shared, first, s.bound].map(Joules::get)
        });
        let ledger = self.ledger.map(|l| {
            let a = l.account;
            [
                a.measured,
                a.bound,
                a.gain,
                a.within,
                a.start.unwrap_or_default(),
                l.idle,
                l.billed,
                l.open,
                l.foreign,
            ]
            .map(Joules::get)
        });
        let t = &self.telemetry;
        let joules = [t.gpu, t.cpu, t.dram, t.ane].into_iter().flatten().map(Joules::get);
        let levels = [t.gpu_power, t.gpu_temperature, t.gpu_memory, t.gpu_utilisation, t.cpu_memory];
        let levels = levels.into_iter().flatten().flat_map(|l| [l.mean, l.median, l.min, l.max]);
        let single = [
            self.score.as_ref().map(|s| s.value),
            self.share.map(|s| s.coverage),
            self.ledger.map(|l| l.account.coverage),
            self.item.due_s,
        ];
        let mut all =
            share.into_iter().flatten().chain(ledger.into_iter().flatten()).chain(joules).chain(levels);
        if !all.all(f64::is_finite) || !single.into_iter().flatten().all(f64::is_finite) {
            return Err("it holds a number that is none");
        }
        let server = self.exchange.server.as_ref();
        if self.item.metadata.values().chain(server).any(|v| deeper_than(v, DEEPEST)) {
            return Err("what the dataset or the server says is nested too deeply");
        }
        Ok(())
    }
}

/// Whether a value is nested more deeply than so many levels.
pub fn deeper_than(value: &Value, levels: usize) -> bool {
    match value {
        Value::Array(all) => levels == 0 || all.iter().any(|v| deeper_than(v, levels - 1)),
        Value::Object(all) => levels == 0 || all.values().any(|v| deeper_than(v, levels - 1)),
        _ => false,
    }
}
