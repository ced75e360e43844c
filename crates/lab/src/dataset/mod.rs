//! Datasets: questions with, mostly, their right answers. One file each, and two adjacent lines here.

use crate::LabError;
use sha2::{Digest, Sha256};
use wattle_core::record::{DEEPEST, Item, deeper_than};
use wattle_core::registry::{self, About, Params};

mod builtin;
mod jsonl;
mod sharegpt;
mod synthetic;
mod trace;

pub(crate) use trace::due_times;

/// Every dataset there is.
pub const DRIVERS: &[Driver] =
    &[builtin::DRIVER, jsonl::DRIVER, sharegpt::DRIVER, synthetic::DRIVER, trace::DRIVER];

/// How a dataset is found and opened.
pub struct Driver {
    /// Its name, one line, its options.
    pub about: About,
    /// Opens it.
    pub open: fn(&Settings) -> Result<Box<dyn Dataset>, LabError>,
}

/// What a dataset is opened with.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Its own options.
    pub params: Params,
    /// At most this many items.
    pub count: Option<u64>,
    /// Seed of the choice, where there is one.
    pub seed: u64,
}

/// Questions in a fixed order.
pub trait Dataset: Send {
    /// Its name for people and for the folder.
    fn name(&self) -> String;

    /// The scorer that suits it unless the user says otherwise.
    fn usual_scorer(&self) -> &'static str {
        "exact"
    }

    /// The items from the first, streamed; can be asked for again.
    fn items(&self) -> Result<Items<'_>, LabError>;
}

/// Items as they are read.
pub type Items<'a> = Box<dyn Iterator<Item = Result<Item, LabError>> + Send + 'a>;

/// Opens the dataset called `name`.
pub fn open(name: &str, settings: &Settings) -> Result<Box<dyn Dataset>, LabError> {
    let driver = registry::find("dataset", DRIVERS, |d| d.about, name)?;
    driver.about.check("dataset", &settings.params)?;
    (driver.open)(settings)
}

/// What a first pass over a dataset tells: it is all readable, how much it is, and exactly which prompts it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Census {
    /// How many items.
    pub items: u64,
    /// Whether any has an expected answer.
    pub answers: bool,
    /// Whether items say when they are due.
    pub scheduled: bool,
    /// SHA-256 over the prompts, each with its length before it, and over what was said before them.
    pub sha256: String,
}

/// Reads a dataset once.
pub fn census(dataset: &dyn Dataset) -> Result<Census, LabError> {
    let mut hash = Sha256::new();
    let (mut items, mut answers, mut scheduled) = (0, false, false);
    for item in dataset.items()? {
        let item = item?;
        hash.update((item.prompt.len() as u64).to_le_bytes());
        hash.update(item.prompt.as_bytes());
        for turn in item.history.iter() {
            // No prompt is so long: a turn cannot pass for the next prompt.
            hash.update(u64::MAX.to_le_bytes());
            hash.update([turn.role as u8]);
            hash.update((turn.content.len() as u64).to_le_bytes());
            hash.update(turn.content.as_bytes());
        }
        // What a dataset says of lengths and times is part of what is asked.
        if let Some(tokens) = item.output_tokens {
            hash.update(tokens.to_le_bytes());
        }
        if let Some(due) = item.due_s {
            hash.update(due.to_le_bytes());
        }
        if item.metadata.values().any(|value| deeper_than(value, DEEPEST)) {
            let why = format!("item {} has a column that is nested too deeply to be kept", item.id);
            return Err(LabError::Dataset { path: dataset.name().into(), line: None, why });
        }
        answers |= item.expected.is_some();
        scheduled |= item.due_s.is_some();
        items += 1;
    }
    Ok(Census { items, answers, scheduled, sha256: hex(&hash.finalize()) })
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
