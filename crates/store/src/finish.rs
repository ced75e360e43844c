//! The end of a session: the tables are made from the log and the streams. Repeatable: made again, they are the same.

use crate::error::Result;
use crate::file;
use crate::hf::HfWriter;
use crate::log::Records;
use crate::readings;
use crate::records::RequestsWriter;
use crate::run_dir::{HF, READINGS, REQUESTS, RUN, SUMMARY};
use std::path::Path;
use wattle_core::record::Record;
use wattle_core::summary::RunInfo;

/// Rows held in memory at once, at most.
const BATCH_ROWS: usize = 1024;
/// Bytes of log held in memory at once, at most, give or take a line.
const BATCH_BYTES: u64 = 8 << 20;

/// What a run folder holds now, and what was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Rows of `requests.parquet` and of `hf/`.
    pub records: u64,
    /// Records left out because an earlier one has the same index; above 0 is a bug.
    pub duplicates: u64,
    /// Lines of the log that this version does not understand.
    pub skipped: u64,
    /// Whether the log ends in a torn line.
    pub torn_line: bool,
    /// Rows of `readings.parquet`.
    pub readings: u64,
    /// Streams of readings that ended in a torn batch.
    pub torn_streams: u64,
}

pub(crate) fn finish(run: &Path, info: &RunInfo, mut records: Records) -> Result<Finished> {
    for name in [RUN, SUMMARY, REQUESTS, READINGS, HF] {
        file::remove(&file::temporary(&run.join(name)))?;
    }
    // A command has no requests.
    let rows: u64 = match &info.model {
        Some(model) => tables_of(run, info, &model.name, &mut records)?,
        None => 0,
    };
    let merged = readings::merge(run, info)?;
    Ok(Finished {
        records: rows,
        duplicates: records.duplicates(),
        skipped: records.so_far().skipped,
        torn_line: records.so_far().torn,
        readings: merged.rows,
        torn_streams: merged.torn,
    })
}

/// Makes the tables of requests and says how many rows they have.
fn tables_of(run: &Path, info: &RunInfo, model: &str, records: &mut Records) -> Result<u64> {
    let mut requests = RequestsWriter::create(run, info)?;
    let mut hf = HfWriter::create(run, info, model)?;
    let (mut batch, mut rows) = (Vec::new(), 0);
    while next_batch(records, &mut batch)? {
        requests.write(&batch)?;
        hf.write(&batch)?;
        rows += batch.len() as u64;
    }
    requests.commit()?;
    hf.commit()?;
    Ok(rows)
}

/// Fills `batch` with the next records; false at the end.
fn next_batch(records: &mut Records, batch: &mut Vec<Record>) -> Result<bool> {
    batch.clear();
    let start = records.so_far().bytes;
    while batch.len() < BATCH_ROWS && records.so_far().bytes - start < BATCH_BYTES {
        match records.next() {
            Some(record) => batch.push(record?),
            None => break,
        }
    }
    Ok(!batch.is_empty())
}
