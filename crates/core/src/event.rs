//! One line of the run log. Progress, resume and the live view read only this.

use crate::command::{Phase, Repetition};
use crate::record::Record;
use crate::time::{Anchor, Span, Stamp, Wall};
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
        /// When it was, where its energy is asked for.
        #[serde(flatten)]
        span: Option<Span>,
        /// Anything else worth keeping.
        #[serde(flatten)]
        extra: Map<String, Value>,
    },
    /// One query is done and everything about it is known.
    Record(Box<Record>),
    /// A command is started.
    Started {
        /// In which session.
        session: u32,
        /// Position among its like, from 0.
        index: u64,
        /// Whether it only warms up.
        warmup: bool,
        /// Its process.
        pid: u32,
        /// When.
        start_ns: Stamp,
    },
    /// The command has ended.
    Repetition(Box<Repetition>),
    /// A figure of the command's own.
    Gauge {
        /// Its name.
        name: String,
        /// What it is.
        value: f64,
        /// When it was said.
        at_ns: Stamp,
    },
    /// Something to know about the result.
    Warning(Warning),
    /// Anything else, the user's own lines included.
    Event {
        /// What happened.
        event: String,
        /// Who says so, if not wattle itself: a command.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
        /// Details.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<Value>,
    },
}

impl Event {
    /// A phase that took `seconds`.
    pub fn phase(name: &str, seconds: f64) -> Self {
        Event::Phase { name: name.into(), seconds: to_ms(seconds), span: None, extra: Map::new() }
    }

    /// A phase of a command.
    pub fn of_command(phase: Phase) -> Self {
        let Phase { name, span, extra } = phase;
        Event::Phase { name, seconds: to_ms(span.duration().get()), span: Some(span), extra }
    }

    /// An event without details.
    pub fn plain(event: &str) -> Self {
        Event::Event { event: event.into(), by: None, data: None }
    }

    /// An event with details.
    pub fn with(event: &str, data: Value) -> Self {
        Event::Event { event: event.into(), by: None, data: Some(data) }
    }
}

fn to_ms(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_keeps_its_span_apart_from_what_the_program_said() {
        let span = Span::new(Stamp::from_nanos(5), Stamp::from_nanos(7));
        let extra = Map::from_iter([("tokens".to_owned(), Value::from(3))]);
        let phase = Event::of_command(Phase { name: "prefill".into(), span, extra });
        let text = serde_json::to_string(&phase).unwrap();
        assert_eq!(
            text,
            r#"{"type":"phase","name":"prefill","seconds":0.0,"start_ns":5,"end_ns":7,"tokens":3}"#
        );
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), phase);
        let plain = Event::phase("warmup", 1.25);
        let text = serde_json::to_string(&plain).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), plain);
    }
}
