//! Raw telemetry at full rate: an Arrow stream per session while it runs, one Parquet file when it has ended.
//!
//! A stream is a row of messages, each whole or not there: after a kill every batch that was flushed loads, and a torn tail
//! is recognised by its missing end. Sensors are stored by name, so that the file explains itself and sessions may differ.

mod stream;
mod table;

use crate::error::{Result, StoreError};
use crate::run_dir::READINGS;
use arrow_array::cast::AsArray;
use arrow_array::types::{Float64Type, UInt16Type, UInt32Type, UInt64Type};
use arrow_array::{Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
pub use stream::ReadingsWriter;
use stream::{Stream, streams};
use table::Table;
pub(crate) use table::merge;
use wattle_core::{Reading, Sensor, SensorId, Stamp};

/// Rows of a batch: what is held in memory at most, on either side.
const BATCH: usize = 1 << 16;

type Batches = Box<dyn Iterator<Item = Result<RecordBatch>> + Send>;

fn schema() -> SchemaRef {
    let names = DataType::Dictionary(Box::new(DataType::UInt16), Box::new(DataType::Utf8));
    Arc::new(Schema::new(vec![
        Field::new("session", DataType::UInt32, false),
        Field::new("at_ns", DataType::UInt64, false),
        Field::new("sensor", names, false),
        Field::new("value", DataType::Float64, true),
    ]))
}

fn check(path: &Path, found: Option<SchemaRef>) -> Result<()> {
    match found {
        Some(found) if found.fields() != schema().fields() => {
            Err(StoreError::damaged(path, "its columns are not those of readings"))
        }
        _ => Ok(()),
    }
}

/// Opens the stream of a new session; refuses a number that has readings already.
pub(crate) fn create(run: &Path, session: u32, sensors: &[Sensor]) -> Result<ReadingsWriter> {
    match Table::open(&run.join(READINGS))? {
        Some(table) if table.sessions.contains(&session) => {
            Err(StoreError::taken(&run.join(READINGS), session))
        }
        _ => ReadingsWriter::create(stream::path(run, session), session, sensors),
    }
}

/// The readings of a run with the session each belongs to, session by session, each in the order of reading.
pub struct StoredReadings(Box<dyn Iterator<Item = Result<(u32, Reading)>> + Send>);

impl StoredReadings {
    pub(crate) fn open(run: &Path, sensors: &[Sensor]) -> Result<Self> {
        let (mut files, mut known): (Vec<Batches>, _) = (Vec::new(), BTreeSet::new());
        if let Some(table) = Table::open(&run.join(READINGS))? {
            files.push(table.batches);
            known = table.sessions;
        }
        for (_, path) in streams(run)?.into_iter().filter(|(session, _)| !known.contains(session)) {
            files.push(Box::new(Stream::open(&path)?));
        }
        let names = sensors.iter().map(|s| s.name.clone());
        let ids: HashMap<String, SensorId> = names.zip((0..=u16::MAX).map(SensorId)).collect();
        let path = run.join(READINGS);
        let rows = files.into_iter().flatten().flat_map(move |batch| {
            match batch.and_then(|b| rows(&path, &b, &ids)) {
                Ok(rows) => rows.into_iter().map(Ok).collect(),
                Err(e) => vec![Err(e)],
            }
        });
        Ok(Self(Box::new(rows)))
    }
}

impl Iterator for StoredReadings {
    type Item = Result<(u32, Reading)>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next()
    }
}

fn rows(path: &Path, batch: &RecordBatch, ids: &HashMap<String, SensorId>) -> Result<Vec<(u32, Reading)>> {
    let session = batch.column(0).as_primitive::<UInt32Type>().values();
    let at = batch.column(1).as_primitive::<UInt64Type>().values();
    let sensor = batch.column(2).as_dictionary::<UInt16Type>();
    let value = batch.column(3).as_primitive::<Float64Type>();
    let names = sensor.values().as_string::<i32>();
    let row = |i: usize| {
        let name = names.value(usize::from(sensor.keys().value(i)));
        let id = ids
            .get(name)
            .ok_or_else(|| StoreError::NoSuchSensor { path: path.into(), sensor: name.into() })?;
        let value = value.is_valid(i).then(|| value.value(i));
        Ok((session[i], Reading { sensor: *id, at: Stamp::from_nanos(at[i]), value }))
    };
    (0..batch.num_rows()).map(row).collect()
}
