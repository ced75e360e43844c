//! A command that is run and measured: what becomes of it, and what it says about itself while it runs.
//!
//! A program marks its phases and gauges by appending lines of JSON to the file that `WATTLE_LOG` names; docs/guide.md#exec.

use crate::time::{Span, Stamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// No program has so many phases open at once; one that does has forgotten to end them.
const MOST_OPEN: usize = 1000;
/// Longer names are cut: they are keys of the summary.
const LONGEST_NAME: usize = 200;

/// One run of the command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Repetition {
    /// In which session.
    pub session: u32,
    /// Position among its like, from 0.
    pub index: u64,
    /// Whether it only warmed up and counts in no figure.
    pub warmup: bool,
    /// From just before it was started to its end.
    #[serde(flatten)]
    pub span: Span,
    /// What it returned; `None` if a signal ended it.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// CPU seconds in user mode, of it and everything it waited for.
    pub user_s: f64,
    /// CPU seconds in the kernel, likewise.
    pub system_s: f64,
    /// Most memory that any one of its processes held; `None` if less than wattle itself.
    pub peak_rss_bytes: Option<u64>,
    /// Whether processes it started were still running at its end.
    pub left_behind: bool,
    /// Whether somebody asked for its end: its energy counts, but it is in no mean, and is run again on resume.
    #[serde(default)]
    pub interrupted: bool,
}

impl Repetition {
    /// Whether it is one of those that were asked for, whole.
    pub fn counts(&self) -> bool {
        !self.warmup && !self.interrupted
    }

    /// Whether it ended well.
    pub fn is_ok(&self) -> bool {
        self.exit_code == Some(0)
    }

    /// The exit code that stands for its end, as shells have it: 128 and the number of a signal.
    pub fn code(&self) -> i32 {
        self.exit_code.unwrap_or_else(|| 128 + self.signal.unwrap_or(0))
    }
}

/// Something that the program says.
#[derive(Debug, Clone, PartialEq)]
pub enum Note {
    /// A phase begins.
    Begin {
        /// Its name.
        name: String,
    },
    /// The last phase of that name that began ends.
    End {
        /// Its name.
        name: String,
        /// Anything else worth keeping.
        extra: Map<String, Value>,
    },
    /// A phase just ended.
    Phase {
        /// Its name.
        name: String,
        /// How long it took.
        seconds: f64,
        /// Anything else worth keeping.
        extra: Map<String, Value>,
    },
    /// A figure of the program's own.
    Gauge {
        /// Its name.
        name: String,
        /// What it is now.
        value: f64,
    },
    /// Anything else that happened.
    Event {
        /// What.
        event: String,
        /// Details.
        data: Option<Value>,
    },
}

impl Note {
    /// Reads a line. Gives the moment it speaks of if it says one (`at_ns`, on the monotonic clock of this machine).
    pub fn parse(line: &[u8]) -> Result<(Note, Option<Stamp>), String> {
        let value: Value = serde_json::from_slice(line).map_err(|e| format!("not JSON: {e}"))?;
        let Value::Object(mut map) = value else { return Err("not a JSON object".into()) };
        let at = map.remove("at_ns").and_then(|at| at.as_u64()).map(Stamp::from_nanos);
        // The log has a time of its own for every line.
        map.remove("ts");
        let kind = take_text(&mut map, "type")?;
        let name = |map: &mut Map<String, Value>| {
            take_text(map, "name").map(|name| name.chars().take(LONGEST_NAME).collect::<String>())
        };
        let number = |map: &mut Map<String, Value>, key: &str| {
            map.remove(key).and_then(|v| v.as_f64()).ok_or_else(|| format!("\"{key}\" is not a number"))
        };
        let note = match kind.as_str() {
            "begin" => Note::Begin { name: name(&mut map)? },
            "end" => Note::End { name: name(&mut map)?, extra: map },
            "phase" => {
                let name = name(&mut map)?;
                let seconds = number(&mut map, "seconds")?;
                if seconds < 0.0 {
                    return Err("\"seconds\" is negative".into());
                }
                Note::Phase { name, seconds, extra: map }
            }
            "gauge" => Note::Gauge { name: name(&mut map)?, value: number(&mut map, "value")? },
            "event" => Note::Event { event: take_text(&mut map, "event")?, data: map.remove("data") },
            other => {
                return Err(format!("\"type\" is {other}; it must be phase, begin, end, gauge or event"));
            }
        };
        Ok((note, at))
    }
}

fn take_text(map: &mut Map<String, Value>, key: &str) -> Result<String, String> {
    match map.remove(key) {
        Some(Value::String(text)) if !text.is_empty() => Ok(text),
        _ => Err(format!("\"{key}\" is missing or not text")),
    }
}

/// A phase that has ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// Its name.
    pub name: String,
    /// When it was.
    pub span: Span,
    /// Anything else worth keeping.
    pub extra: Map<String, Value>,
}

/// The phases of one run of a command, as they begin and end.
#[derive(Debug, Clone)]
pub struct Phases {
    start: Stamp,
    open: Vec<(String, Stamp)>,
}

impl Phases {
    /// None yet; the command starts at `start`.
    pub fn new(start: Stamp) -> Self {
        Self { start, open: Vec::new() }
    }

    /// A phase begins.
    pub fn begin(&mut self, name: String, at: Stamp) -> Result<(), String> {
        if self.open.len() >= MOST_OPEN {
            return Err(format!("more than {MOST_OPEN} phases are open"));
        }
        self.open.push((name, at.max(self.start)));
        Ok(())
    }

    /// The phase of that name that began last ends.
    pub fn end(&mut self, name: String, at: Stamp, extra: Map<String, Value>) -> Result<Phase, String> {
        let place = self.open.iter().rposition(|(open, _)| *open == name);
        let (name, start) =
            self.open.remove(place.ok_or_else(|| format!("phase \"{name}\" ends and has not begun"))?);
        Ok(Phase { name, span: Span::new(start, at), extra })
    }

    /// A phase that ended at `at` and took so long; nothing was before the command.
    pub fn past(
        &self,
        name: String,
        seconds: f64,
        at: Stamp,
        extra: Map<String, Value>,
    ) -> Result<Phase, String> {
        // A line may come a little late, and a program's clock begins before it is started.
        if seconds > at.since(self.start).get() + 0.5 {
            return Err(format!("phase \"{name}\" took longer than the command has run"));
        }
        let start = at.minus_nanos((seconds * 1e9) as u64).max(self.start);
        Ok(Phase { name, span: Span::new(start, at), extra })
    }

    /// The command ended at `at`, and with it what was still open.
    pub fn close(&mut self, at: Stamp) -> Vec<Phase> {
        let unended = |(name, start)| Phase {
            name,
            span: Span::new(start, at),
            extra: Map::from_iter([("unended".to_owned(), Value::Bool(true))]),
        };
        self.open.drain(..).map(unended).collect()
    }
}

/// What is known of a figure of the program's own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Gauge {
    /// How often it was given.
    pub count: u64,
    /// Last value.
    pub last: f64,
    /// Mean of the values.
    pub mean: f64,
    /// Lowest.
    pub min: f64,
    /// Highest.
    pub max: f64,
}

impl Gauge {
    /// Takes in another value.
    pub fn push(gauges: &mut BTreeMap<String, Gauge>, name: &str, value: f64) {
        let first = Gauge { count: 0, last: value, mean: 0.0, min: value, max: value };
        let gauge = gauges.entry(name.to_owned()).or_insert(first);
        gauge.count += 1;
        gauge.last = value;
        gauge.mean += (value - gauge.mean) / gauge.count as f64;
        gauge.min = gauge.min.min(value);
        gauge.max = gauge.max.max(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Stamp {
        Stamp::from_nanos(ms * 1_000_000)
    }

    fn parse(text: &str) -> Result<Note, String> {
        Note::parse(text.as_bytes()).map(|(note, _)| note)
    }

    #[test]
    fn a_line_is_read_as_its_type_says() {
        let phase = parse(r#"{"type":"phase","name":"prefill","seconds":1.2,"tokens":7,"ts":"x"}"#).unwrap();
        let extra = Map::from_iter([("tokens".to_owned(), 7.into())]);
        assert_eq!(phase, Note::Phase { name: "prefill".into(), seconds: 1.2, extra });
        assert_eq!(parse(r#"{"type":"begin","name":"a"}"#), Ok(Note::Begin { name: "a".into() }));
        let gauge = Note::parse(br#"{"type":"gauge","name":"jax_peak_bytes","value":5,"at_ns":9}"#);
        let expected = Note::Gauge { name: "jax_peak_bytes".into(), value: 5.0 };
        assert_eq!(gauge, Ok((expected, Some(Stamp::from_nanos(9)))));
        let event = Note::Event { event: "ckpt".into(), data: Some(Value::Bool(true)) };
        assert_eq!(parse(r#"{"type":"event","event":"ckpt","data":true}"#), Ok(event));
    }

    #[test]
    fn what_makes_no_sense_is_told() {
        for (line, why) in [
            ("", "not JSON"),
            ("[1]", "not a JSON object"),
            ("{}", "\"type\" is missing"),
            (r#"{"type":"record"}"#, "must be phase"),
            (r#"{"type":"phase","name":"a"}"#, "\"seconds\""),
            (r#"{"type":"phase","name":"a","seconds":-1}"#, "negative"),
            (r#"{"type":"phase","name":"","seconds":1}"#, "\"name\""),
            (r#"{"type":"gauge","name":"a","value":"x"}"#, "\"value\""),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
    }

    #[test]
    fn phases_nest_and_those_of_one_name_end_last_first() {
        let mut phases = Phases::new(at(10));
        phases.begin("a".into(), at(20)).unwrap();
        phases.begin("b".into(), at(30)).unwrap();
        phases.begin("a".into(), at(40)).unwrap();
        let mut end = |name: &str, ms| phases.end(name.into(), at(ms), Map::new()).unwrap().span;
        assert_eq!(end("a", 50), Span::new(at(40), at(50)));
        assert_eq!(end("a", 60), Span::new(at(20), at(60)));
        assert!(phases.end("a".into(), at(70), Map::new()).is_err());
        let left = phases.close(at(90));
        assert_eq!((left.len(), left[0].span), (1, Span::new(at(30), at(90))));
    }

    #[test]
    fn no_phase_began_before_its_command() {
        let mut phases = Phases::new(at(1000));
        let phase = phases.past("a".into(), 0.9, at(1500), Map::new()).unwrap();
        assert_eq!(phase.span, Span::new(at(1000), at(1500)));
        assert!(phases.past("a".into(), 60.0, at(1500), Map::new()).is_err());
        phases.begin("b".into(), at(1)).unwrap();
        assert_eq!(phases.close(at(1100))[0].span, Span::new(at(1000), at(1100)));
    }

    #[test]
    fn a_gauge_keeps_its_extremes() {
        let mut gauges = BTreeMap::new();
        [3.0, 1.0, 2.0].into_iter().for_each(|v| Gauge::push(&mut gauges, "x", v));
        assert_eq!(gauges["x"], Gauge { count: 3, last: 2.0, mean: 2.0, min: 1.0, max: 3.0 });
    }

    #[test]
    fn a_signal_is_a_code_as_in_a_shell() {
        let mut repetition = Repetition {
            session: 0,
            index: 0,
            warmup: false,
            span: Span::new(at(0), at(1)),
            exit_code: Some(7),
            signal: None,
            user_s: 0.0,
            system_s: 0.0,
            peak_rss_bytes: None,
            left_behind: false,
            interrupted: false,
        };
        assert_eq!((repetition.code(), repetition.is_ok()), (7, false));
        (repetition.exit_code, repetition.signal) = (None, Some(15));
        assert_eq!(repetition.code(), 143);
    }
}
