//! When requests came, and how long they were, from a file: JSON lines, or CSV with a header. Rows are read one at a time.

use super::super::jsonl::Lines;
use crate::LabError;
use chrono::NaiveDateTime;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use wattle_core::length::LONGEST;
use wattle_core::registry::Params;

/// What is read of a row. Names are compared without case and without anything but letters and digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Column {
    Time,
    Input,
    Output,
}

impl Column {
    /// Its names in Mooncake's, Azure's and BurstGPT's traces, and others that are in use.
    const fn names(self) -> &'static [&'static str] {
        match self {
            Column::Time => &["timestamp", "time", "arrivedat", "arrivaltime", "arrivaltimestamp"],
            Column::Input => &[
                "inputlength",
                "contexttokens",
                "requesttokens",
                "inputtokens",
                "prompttokens",
                "numprefilltokens",
            ],
            Column::Output => &[
                "outputlength",
                "generatedtokens",
                "responsetokens",
                "outputtokens",
                "completiontokens",
                "numdecodetokens",
            ],
        }
    }

    fn is(self, name: &str) -> bool {
        let folded: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
        self.names().contains(&folded.to_ascii_lowercase().as_str())
    }

    /// As people are told.
    const fn told(self) -> &'static str {
        match self {
            Column::Time => "timestamp",
            Column::Input => "input_length, ContextTokens or Request tokens",
            Column::Output => "output_length, GeneratedTokens or Response tokens",
        }
    }
}

/// One request.
pub(super) struct Arrival {
    path: PathBuf,
    /// Its line, from 1.
    pub(super) line: u64,
    /// When it came, in seconds after the first one.
    pub(super) due_s: f64,
    cells: Cells,
}

impl Arrival {
    /// A length in tokens. What failed in the trace may have a length of 0; it is asked here with 1.
    pub(super) fn tokens(&self, column: Column) -> Result<u32, LabError> {
        let bad = |why: String| bad(&self.path, self.line, why);
        let Some(cell) = self.cells.get(column) else {
            return Err(bad(format!("no column {}, and a length is needed", column.told())));
        };
        let number = match &cell {
            Value::String(text) => text.parse::<f64>().ok(),
            other => other.as_f64(),
        };
        let whole = number.filter(|n| n.fract() == 0.0 && (0.0..=f64::from(LONGEST)).contains(n));
        whole
            .map(|n| (n as u32).max(1))
            .ok_or_else(|| bad(format!("{cell} is not a length in tokens, a whole number up to {LONGEST}")))
    }
}

/// The rows of a file in order.
pub(super) struct Arrivals {
    path: PathBuf,
    lines: Lines,
    header: Option<Vec<String>>,
    /// Seconds in one of the file's own, if it is known.
    unit: Option<f64>,
    /// Integers were taken for milliseconds.
    guessed: bool,
    speed: f64,
    first: Option<Moment>,
    last_s: f64,
}

impl Arrivals {
    /// Opens `path` with the options `unit` and `speed`.
    pub(super) fn open(path: &Path, params: &Params) -> Result<Self, LabError> {
        let unit = match params.get("unit").map(String::as_str) {
            None => None,
            Some("s") => Some(1.0),
            Some("ms") => Some(1e-3),
            Some("us") => Some(1e-6),
            Some(other) => {
                return Err(LabError::Usage(format!(
                    "\"{other}\" is not a unit of time here; write unit=s, ms or us"
                )));
            }
        };
        let speed = params.get("speed").map_or(Ok(1.0), |text| {
            text.parse().ok().filter(|s: &f64| s.is_finite() && *s > 0.0).ok_or_else(|| {
                LabError::Usage(format!("\"{text}\" is not a speed; write speed=2 for twice as fast"))
            })
        })?;
        let lines = Lines::open(path)?;
        Ok(Self {
            path: path.into(),
            lines,
            header: None,
            unit,
            guessed: false,
            speed,
            first: None,
            last_s: 0.0,
        })
    }

    /// The next row, if there is one more.
    pub(super) fn next(&mut self) -> Result<Option<Arrival>, LabError> {
        let Some((line, text)) = self.lines.next().transpose()? else { return Ok(None) };
        let text = text.trim();
        if text.starts_with('{') {
            let row =
                serde_json::from_str(text).map_err(|e| bad(&self.path, line, format!("not JSON ({e})")))?;
            return self.arrival(line, Cells::Json(row)).map(Some);
        }
        let cells =
            || text.split(',').map(|cell| cell.trim().trim_matches('"').to_owned()).collect::<Vec<_>>();
        if let Some(header) = &self.header {
            let row = header.iter().cloned().zip(cells()).collect();
            return self.arrival(line, Cells::Csv(row)).map(Some);
        }
        let header = cells();
        if self.first.is_some() || !header.iter().any(|name| Column::Time.is(name)) {
            let why = "neither JSON with a \"timestamp\" nor the header of a CSV file with a column timestamp, such as \
                       \"TIMESTAMP,ContextTokens,GeneratedTokens\"";
            return Err(bad(&self.path, line, why.into()));
        }
        self.header = Some(header);
        self.next()
    }

    fn arrival(&mut self, line: u64, cells: Cells) -> Result<Arrival, LabError> {
        let due_s = self.due_s(&cells).map_err(|why| bad(&self.path, line, why))?;
        if due_s < self.last_s {
            let why = "came before the line above it; sort the file by time".into();
            return Err(bad(&self.path, line, why));
        }
        self.last_s = due_s;
        Ok(Arrival { path: self.path.clone(), line, due_s, cells })
    }

    /// When a row is due, in seconds after the first.
    fn due_s(&mut self, cells: &Cells) -> Result<f64, String> {
        let cell = cells.get(Column::Time).ok_or("no column timestamp, and a time is needed")?;
        let moment = Moment::read(&cell).ok_or_else(|| {
            format!("{cell} is not a time; a number or a date such as 2023-11-16 18:17:03.979 was expected")
        })?;
        let first = *self.first.get_or_insert(moment);
        let seconds = match (first, moment) {
            (Moment::Date(first), Moment::Date(now)) => {
                let since = now - first;
                since.num_seconds() as f64 + f64::from(since.subsec_nanos()) * 1e-9
            }
            (Moment::Number(first), Moment::Number(now)) => {
                // JSON lines count milliseconds if they count in integers, as Mooncake's do.
                let unit = *self.unit.get_or_insert_with(|| {
                    self.guessed = cell.is_i64() || cell.is_u64();
                    if self.guessed { 1e-3 } else { 1.0 }
                });
                if self.guessed && cell.is_f64() {
                    return Err(format!(
                        "{cell} is not a whole number as the times before it are; say unit=s, ms or us"
                    ));
                }
                (now - first) * unit
            }
            _ => return Err(format!("{cell} is not written as the first time of the file is")),
        };
        Ok(seconds / self.speed)
    }
}

/// A row.
enum Cells {
    Json(Map<String, Value>),
    Csv(Vec<(String, String)>),
}

impl Cells {
    fn get(&self, column: Column) -> Option<Value> {
        match self {
            Cells::Json(row) => row.iter().find(|(name, _)| column.is(name)).map(|(_, value)| value.clone()),
            Cells::Csv(row) => {
                row.iter().find(|(name, _)| column.is(name)).map(|(_, text)| Value::String(text.clone()))
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Moment {
    Number(f64),
    Date(NaiveDateTime),
}

impl Moment {
    fn read(cell: &Value) -> Option<Self> {
        let text = match cell {
            Value::String(text) => text.trim(),
            other => return other.as_f64().map(Moment::Number),
        };
        if let Ok(number) = text.parse::<f64>() {
            return number.is_finite().then_some(Moment::Number(number));
        }
        // Only differences are used, so the zone does not matter as long as it is the same.
        let text = text.strip_suffix('Z').or_else(|| text.strip_suffix("+00:00")).unwrap_or(text);
        ["%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f"]
            .iter()
            .find_map(|form| NaiveDateTime::parse_from_str(text, form).ok())
            .map(Moment::Date)
    }
}

fn bad(path: &Path, line: u64, why: String) -> LabError {
    LabError::Dataset { path: path.into(), line: Some(line), why }
}
