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

const COLUMNS: [Column; 3] = [Column::Time, Column::Input, Column::Output];

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

/// How the times of a file are to be taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pace {
    /// Seconds in one of the file's own, if the user says.
    unit: Option<f64>,
    /// 2 is twice as fast.
    speed: f64,
}

impl Pace {
    /// From the options `unit` and `speed`.
    pub(super) fn read(params: &Params) -> Result<Self, LabError> {
        let unit = match params.get("unit").map(String::as_str) {
            None => None,
            Some("s") => Some(1.0),
            Some("ms") => Some(1e-3),
            Some("us") => Some(1e-6),
            Some(other) => {
                let why = format!("\"{other}\" is not a unit of time here; write unit=s, ms or us");
                return Err(LabError::Usage(why));
            }
        };
        let speed = params.get("speed").map_or(Ok(1.0), |text| {
            text.parse().ok().filter(|s: &f64| s.is_finite() && *s > 0.0).ok_or_else(|| {
                LabError::Usage(format!("\"{text}\" is not a speed; write speed=2 for twice as fast"))
            })
        })?;
        Ok(Self { unit, speed })
    }
}

/// One request.
pub(super) struct Arrival {
    /// Its line, from 1.
    pub(super) line: u64,
    /// When it came, in seconds after the first one.
    pub(super) due_s: f64,
    cells: Cells,
}

impl Arrival {
    /// A length in tokens. What failed in the trace may have a length of 0; it is asked here with 1.
    pub(super) fn tokens(&self, column: Column) -> Result<u32, String> {
        let cell = self.cells.get(column)?;
        let number = match cell {
            Value::String(text) => text.parse::<f64>().ok(),
            other => other.as_f64(),
        };
        let whole = number.filter(|n| n.fract() == 0.0 && (0.0..=f64::from(LONGEST)).contains(n));
        whole
            .map(|n| (n as u32).max(1))
            .ok_or_else(|| format!("{cell} is not a length in tokens, a whole number up to {LONGEST}"))
    }
}

/// The rows of a file in order.
pub(super) struct Arrivals {
    path: PathBuf,
    lines: Lines,
    /// Where the columns of a CSV file are, once its header is read.
    header: Option<[Option<usize>; 3]>,
    pace: Pace,
    /// Integers were taken for milliseconds.
    guessed: bool,
    first: Option<Moment>,
    last_s: f64,
}

impl Arrivals {
    pub(super) fn open(path: &Path, pace: Pace) -> Result<Self, LabError> {
        let lines = Lines::open(path)?;
        Ok(Self { path: path.into(), lines, header: None, pace, guessed: false, first: None, last_s: 0.0 })
    }

    /// An error in this line.
    pub(super) fn bad(path: &Path, line: u64, why: String) -> LabError {
        LabError::Dataset { path: path.into(), line: Some(line), why }
    }

    /// The next row, if there is one more.
    pub(super) fn next(&mut self) -> Result<Option<Arrival>, LabError> {
        while let Some((line, text)) = self.lines.next().transpose()? {
            let row = self.row(line, text.trim()).map_err(|why| Self::bad(&self.path, line, why))?;
            if row.is_some() {
                return Ok(row);
            }
        }
        Ok(None)
    }

    /// What a line holds; a header holds no row.
    fn row(&mut self, line: u64, text: &str) -> Result<Option<Arrival>, String> {
        let cells = if text.starts_with('{') {
            Cells::of_json(serde_json::from_str(text).map_err(|e| format!("not JSON ({e})"))?)
        } else if let Some(header) = &self.header {
            Cells::of_csv(header, text)
        } else {
            let header = COLUMNS.map(|column| csv(text).position(|name| column.is(name)));
            if self.first.is_some() || header[Column::Time as usize].is_none() {
                return Err("neither JSON with a \"timestamp\" nor the header of a CSV file with a column timestamp, such as \
                            \"TIMESTAMP,ContextTokens,GeneratedTokens\""
                    .into());
            }
            self.header = Some(header);
            return Ok(None);
        };
        let due_s = self.due_s(cells.get(Column::Time)?)?;
        if due_s < self.last_s {
            return Err("came before the line above it; sort the file by time".into());
        }
        self.last_s = due_s;
        Ok(Some(Arrival { line, due_s, cells }))
    }

    /// When a row is due, in seconds after the first.
    fn due_s(&mut self, cell: &Value) -> Result<f64, String> {
        let moment = Moment::read(cell).ok_or_else(|| {
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
                let unit = *self.pace.unit.get_or_insert_with(|| {
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
        Ok(seconds / self.pace.speed)
    }
}

/// What a row holds, by [`Column`].
struct Cells([Option<Value>; 3]);

impl Cells {
    fn of_json(row: Map<String, Value>) -> Self {
        let mut cells = [const { None }; 3];
        for (name, value) in row {
            if let Some(column) = COLUMNS.into_iter().find(|column| column.is(&name)) {
                cells[column as usize] = Some(value);
            }
        }
        Self(cells)
    }

    fn of_csv(header: &[Option<usize>; 3], text: &str) -> Self {
        Self(header.map(|at| csv(text).nth(at?).map(Value::from)))
    }

    fn get(&self, column: Column) -> Result<&Value, String> {
        self.0[column as usize].as_ref().ok_or_else(|| format!("no column {}", column.told()))
    }
}

/// The cells of a line of CSV; numbers, dates and their names have no commas in them.
fn csv(line: &str) -> impl Iterator<Item = &str> {
    line.split(',').map(|cell| cell.trim().trim_matches('"'))
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
