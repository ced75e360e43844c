//! Where finished requests go: a file of JSON lines, or memory.

use crate::{Config, Served, Shared, clock};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::sync::{Arc, PoisonError};

/// Lines reach the file within this time.
const LATEST_NS: u64 = 50_000_000;

/// The log.
pub(crate) struct Log {
    file: Option<BufWriter<File>>,
    in_memory: bool,
    /// When what is written must reach the file.
    due: Option<u64>,
    shared: Arc<Shared>,
    trouble: Option<io::Error>,
}

impl Log {
    pub(crate) fn new(config: &Config, shared: Arc<Shared>) -> io::Result<Log> {
        let file = config
            .log
            .as_ref()
            .map(File::create)
            .transpose()?
            .map(|file| BufWriter::with_capacity(1 << 20, file));
        Ok(Log { file, in_memory: config.keep_log, due: None, shared, trouble: None })
    }

    pub(crate) fn add(&mut self, served: Served) {
        let Some(file) = &mut self.file else {
            if self.in_memory {
                self.shared.log.lock().unwrap_or_else(PoisonError::into_inner).push(served);
            }
            return;
        };
        let written = serde_json::to_writer(&mut *file, &served).map_err(io::Error::from);
        self.trouble = written.and_then(|()| file.write_all(b"\n")).err().or(self.trouble.take());
        self.due.get_or_insert_with(|| clock::now() + LATEST_NS);
    }

    pub(crate) fn due(&self) -> Option<u64> {
        self.due
    }

    /// Writes what is due. A log that cannot be written ends the server: benchmarks must not lose their truth unseen.
    pub(crate) fn keep(&mut self, now: u64) -> io::Result<()> {
        if self.due.is_some_and(|due| due <= now) {
            self.finish()?;
        }
        self.trouble.take().map_or(Ok(()), Err)
    }

    /// Writes everything.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        self.due = None;
        self.file.as_mut().map_or(Ok(()), BufWriter::flush)
    }
}
