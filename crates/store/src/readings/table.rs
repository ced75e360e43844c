//! `readings.parquet`: all sessions that have ended, in one file.

use super::stream::{Stream, streams};
use super::{BATCH, Batches, check, schema};
use crate::error::{Result, StoreError};
use crate::file;
use crate::parquet_file::{ParquetFile, properties, stamps};
use crate::run_dir::READINGS;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;
use wattle_core::summary::RunInfo;

/// Rows of a Parquet row group.
const ROW_GROUP: usize = 1 << 19;
/// Key in the Parquet file: which sessions are in it.
const SESSIONS: &str = "wattle.sessions";

/// `readings.parquet` as it is.
pub(super) struct Table {
    rows: u64,
    pub(super) sessions: BTreeSet<u32>,
    pub(super) batches: Batches,
}

impl Table {
    /// `None` if there is none yet.
    pub(super) fn open(path: &Path) -> Result<Option<Self>> {
        let file = match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|e| StoreError::read(path, e))?,
        };
        let damaged = |e| StoreError::damaged(path, e);
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(damaged)?;
        check(path, Some(builder.schema().clone()))?;
        let metadata = builder.metadata().file_metadata();
        let sessions = metadata
            .key_value_metadata()
            .and_then(|all| all.iter().find(|kv| kv.key == SESSIONS)?.value.as_deref())
            .and_then(|text| serde_json::from_str(text).ok())
            .ok_or_else(|| StoreError::damaged(path, format!("it does not say {SESSIONS}")))?;
        let rows = u64::try_from(metadata.num_rows()).unwrap_or_default();
        let batches = builder.with_batch_size(BATCH).build().map_err(damaged)?;
        let path = path.to_owned();
        let batches = batches.map(move |b| b.map_err(|e| StoreError::damaged(&path, e)));
        Ok(Some(Self { rows, sessions, batches: Box::new(batches) }))
    }
}

/// What became of the streams.
pub(crate) struct Merged {
    pub(crate) rows: u64,
    pub(crate) torn: u64,
}

/// Moves the streams into `readings.parquet`. A kill at any point is harmless: a stream goes only after the file that has
/// its session stands under its name, and a session that is in the file is not added twice.
pub(crate) fn merge(run: &Path, info: &RunInfo) -> Result<Merged> {
    let path = run.join(READINGS);
    let streams = streams(run)?;
    let old = Table::open(&path)?;
    let known = old.as_ref().map_or_else(BTreeSet::new, |o| o.sessions.clone());
    let fresh: Vec<_> = streams.iter().filter(|(session, _)| !known.contains(session)).collect();
    let mut merged = Merged { rows: old.as_ref().map_or(0, |o| o.rows), torn: 0 };
    if old.is_none() || !fresh.is_empty() {
        let properties = stamps(properties(info), &["at_ns"]).set_max_row_group_row_count(Some(ROW_GROUP));
        let mut new = ParquetFile::create(path, schema(), properties)?;
        for batch in old.into_iter().flat_map(|o| o.batches) {
            new.write(&batch?)?;
        }
        let mut sessions = known;
        for (session, path) in fresh {
            let mut stream = Stream::open(path)?;
            for batch in &mut stream {
                let batch = batch?;
                merged.rows += batch.num_rows() as u64;
                new.write(&batch)?;
                sessions.insert(*session);
            }
            merged.torn += u64::from(stream.torn);
        }
        new.label(SESSIONS, format!("{:?}", Vec::from_iter(sessions)));
        new.commit()?;
    }
    streams.values().try_for_each(|path| file::remove(path))?;
    Ok(merged)
}
