//! One line of the run log. Progress, resume and the live view read only this.

use crate::record::Record;
use crate::time::{Anchor, Wall};
use crate::warning::Warning;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What a line says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// A session of the run begins; a run that was resumed has several.
    Session {
        /// 0, and one more after each resume.
        session: u32,
        /// Ties its stamps to dates.
        #[serde(flatten)]
        anchor: Anchor,
        /// Version of wattle.
        version: String,
        /// How many queries the whole run has.
        queries: u64,
    },
    /// A phase of the run ended.
    Phase {
        /// Its name.
        name: String,
        /// How long it took, to the millisecond.
        seconds: f64,
        /// Anything else worth keeping.
        #[serde(flatten)]
        extra: Map<String, Value>,
    },
    /// One query is done and everything about it is known.
    Record(Box<Record>),
    /// Something to know about the result.
    Warning(Warning),
    /// Anything else, the user's own lines included.
    Event {
        /// What happened.
        event: String,
        /// Details.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<Value>,
    },
}

impl Event {
    /// A phase that took `seconds`.
    pub fn phase(name: &str, seconds: f64) -> Self {
        Event::Phase { name: name.into(), seconds: (seconds * 1e3).round() / 1e3, extra: Map::new() }
    }

    /// An event without details.
    pub fn plain(event: &str) -> Self {
        Event::Event { event: event.into(), data: None }
    }

    /// An event with details.
    pub fn with(event: &str, data: Value) -> Self {
        Event::Event { event: event.into(), data: Some(data) }
    }
}

/// A line as it stands in the file: `ts` (UTC, milliseconds), `type`, and what the type brings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// When it was written, as RFC 3339 in UTC.
    pub ts: String,
    /// What it says.
    #[serde(flatten)]
    pub event: Event,
}

impl Line {
    /// The line for an event written at `wall`.
    pub fn new(wall: Wall, event: Event) -> Self {
        Self { ts: wall.to_string(), event }
    }
}
