//! The end of a session: the tables are made from the log and the streams. Repeatable: made again, they are the same.

use crate::error::Result;
use crate::file;
use crate::hf::HfWriter;
use crate::log::Lines;
use crate::readings;
use crate::records::RequestsWriter;
use crate::run_dir::{HF, READINGS, REQUESTS, RUN, SUMMARY};
use std::path::Path;
use wattle_core::event::{Event, Line};
use wattle_core::record::Record;
use wattle_core::seen::Seen;
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

pub(crate) fn finish(
    run: &Path,
    info: &RunInfo,
    lines: Lines,
    see: &mut dyn FnMut(&Line),
) -> Result<Finished> {
    for name in [RUN, SUMMARY, REQUESTS, READINGS, HF] {
        file::remove(&file::temporary(&run.join(name)))?;
    }
    let mut log = Log { lines, see, asked: Seen::default(), duplicates: 0 };
    // A command has no requests.
    let rows: u64 = match &info.model {
        Some(model) => tables_of(run, info, &model.name, &mut log)?,
        None => {
            while log.next_record()?.is_some() {}
            0
        }
    };
    let merged = readings::merge(run, info)?;
    Ok(Finished {
        records: rows,
        duplicates: log.duplicates,
        skipped: log.lines.so_far().skipped,
        torn_line: log.lines.so_far().torn,
        readings: merged.rows,
        torn_streams: merged.torn,
    })
}

/// The log on its way through: everything is seen once, and finished queries stop here.
struct Log<'a> {
    lines: Lines,
    see: &'a mut dyn FnMut(&Line),
    asked: Seen,
    duplicates: u64,
}

impl Log<'_> {
    /// The next finished query that was not there before.
    fn next_record(&mut self) -> Result<Option<Record>> {
        for line in &mut self.lines {
            let line = line?;
            (self.see)(&line);
            match line.event {
                Event::Record(record) if self.asked.insert(record.item.index) => return Ok(Some(*record)),
                Event::Record(_) => self.duplicates += 1,
                _ => {}
            }
        }
        Ok(None)
    }

    /// Fills `batch` with the next records; false at the end.
    fn next_batch(&mut self, batch: &mut Vec<Record>) -> Result<bool> {
        batch.clear();
        let start = self.lines.so_far().bytes;
        while batch.len() < BATCH_ROWS && self.lines.so_far().bytes - start < BATCH_BYTES {
            match self.next_record()? {
                Some(record) => batch.push(record),
                None => break,
            }
        }
        Ok(!batch.is_empty())
    }
}

/// Makes the tables of requests and says how many rows they have.
fn tables_of(run: &Path, info: &RunInfo, model: &str, log: &mut Log<'_>) -> Result<u64> {
    let mut requests = RequestsWriter::create(run, info)?;
    let mut hf = HfWriter::create(run, info, model)?;
    let (mut batch, mut rows) = (Vec::new(), 0);
    while log.next_batch(&mut batch)? {
        requests.write(&batch)?;
        hf.write(&batch)?;
        rows += batch.len() as u64;
    }
    requests.commit()?;
    hf.commit()?;
    Ok(rows)
}
