//! The run folder as a whole. Anyone may read it at any time; who writes to it holds its [`Lock`] meanwhile.

use crate::error::{Result, StoreError};
use crate::file;
use crate::finish::{self, Finished};
use crate::log::{Lines, LogWriter, Records, Replay};
use crate::readings::{self, ReadingsWriter, StoredReadings};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use wattle_core::Sensor;
use wattle_core::event::Line;
use wattle_core::summary::{RunInfo, SCHEMA_VERSION, Summary};

pub(crate) const RUN: &str = "run.json";
pub(crate) const LOG: &str = "log.jsonl";
pub(crate) const REQUESTS: &str = "requests.parquet";
pub(crate) const READINGS: &str = "readings.parquet";
pub(crate) const SUMMARY: &str = "summary.json";
pub(crate) const HF: &str = "hf";
const RESULT: &str = "result";
const SERVER_LOG: &str = "server.log";
const LOCK: &str = ".lock";

/// A run folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
}

impl RunDir {
    /// Makes `parent/name`, and `parent` where needed. Refuses if it exists: a run is never overwritten.
    pub fn create(parent: &Path, name: &str) -> Result<RunDir> {
        let path = parent.join(name);
        fs::create_dir_all(parent).map_err(|source| StoreError::Create { path: parent.into(), source })?;
        match fs::create_dir(&path) {
            Ok(()) => Ok(RunDir { path }),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(StoreError::Exists { path }),
            Err(source) => Err(StoreError::Create { path, source }),
        }
    }

    /// Opens an existing one, unless a newer wattle wrote it.
    pub fn open(path: impl AsRef<Path>) -> Result<RunDir> {
        #[derive(Deserialize)]
        struct Version {
            schema_version: u32,
        }
        let path = path.as_ref().to_owned();
        let Some(version) = read_json::<Version>(&path.join(RUN))? else {
            return Err(StoreError::NotARun { path });
        };
        match version.schema_version {
            found if found > SCHEMA_VERSION => Err(StoreError::Newer { path, found, ours: SCHEMA_VERSION }),
            _ => Ok(RunDir { path }),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `run.json`.
    pub fn info(&self) -> Result<RunInfo> {
        read_json(&self.path.join(RUN))?.ok_or_else(|| StoreError::NotARun { path: self.path.clone() })
    }

    /// `summary.json`; `None` until the run has ended once.
    pub fn summary(&self) -> Result<Option<Summary>> {
        read_json(&self.path.join(SUMMARY))
    }

    /// Writes `run.json`.
    pub fn write_info(&self, info: &RunInfo) -> Result<()> {
        write_json(self.path.join(RUN), info)
    }

    /// Writes `summary.json`.
    pub fn write_summary(&self, summary: &Summary) -> Result<()> {
        write_json(self.path.join(SUMMARY), summary)
    }

    /// Makes the file to which the `n`-th run of a command in a session appends what it has to say, and gives its path.
    pub fn notes(&self, session: u32, n: u64) -> Result<PathBuf> {
        let path = self.path.join(format!("notes-{session}-{n}.jsonl"));
        let made = File::options().create(true).append(true).open(&path);
        made.map_err(|e| StoreError::write(&path, e))?;
        Ok(path)
    }

    /// Makes the folder for a command's own results, and gives its path.
    pub fn results(&self) -> Result<PathBuf> {
        let path = self.path.join(RESULT);
        fs::create_dir_all(&path).map_err(|source| StoreError::Create { path: path.clone(), source })?;
        Ok(path)
    }

    /// Where the output of a server goes that was started for the run.
    pub fn server_log(&self) -> PathBuf {
        self.path.join(SERVER_LOG)
    }

    /// Opens the log for appending; a torn last line, left by a kill, is cut off first.
    pub fn log(&self) -> Result<LogWriter> {
        LogWriter::open(self.path.join(LOG))
    }

    /// The lines of the log, in flat memory; good for following a running one.
    pub fn lines(&self) -> Result<Lines> {
        Lines::open(self.path.join(LOG))
    }

    /// Shows every line of the log to `see`.
    pub fn replay(&self, mut see: impl FnMut(Line)) -> Result<Replay> {
        let mut lines = self.lines()?;
        for line in &mut lines {
            see(line?);
        }
        Ok(lines.so_far())
    }

    /// All finished queries, each once, in the order in which they were finished.
    pub fn records(&self) -> Result<Records> {
        self.lines().map(Records::new)
    }

    /// Opens the stream of readings of a new session; refuses a number that has readings already.
    pub fn readings(&self, session: u32, sensors: &[Sensor]) -> Result<ReadingsWriter> {
        readings::create(&self.path, session, sensors)
    }

    /// All readings of all sessions, those of a running one included as far as they are flushed.
    pub fn stored_readings(&self) -> Result<StoredReadings> {
        StoredReadings::open(&self.path, &self.info()?.sensors)
    }

    /// Makes `requests.parquet`, `readings.parquet` and `hf/` from the log and the streams, in flat memory. Close the
    /// session's [`ReadingsWriter`] first: what is still with it is not in the table.
    pub fn finish(&self) -> Result<Finished> {
        self.finish_seeing(&mut |_| {})
    }

    /// The same, and shows every line of the log on the way, so that a long one is read once.
    pub fn finish_seeing(&self, see: &mut dyn FnMut(&Line)) -> Result<Finished> {
        finish::finish(&self.path, &self.info()?, self.lines()?, see)
    }

    /// Deletes the run, unless it is in use.
    pub fn remove(self) -> Result<()> {
        let _lock = self.lock()?;
        file::remove(&self.path)
    }

    /// Takes the run for this process; refuses if another has it. The system frees it when a process dies, however it dies.
    pub fn lock(&self) -> Result<Lock> {
        let path = self.path.join(LOCK);
        let file = File::options().create(true).append(true).open(&path);
        let file = file.map_err(|e| StoreError::write(&path, e))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StoreError::Locked { path: self.path.clone() }),
            // Some cluster file systems are mounted without locks; a run there is better than none.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(e)) => return Err(StoreError::write(&path, e)),
        }
        Ok(Lock { _file: file })
    }
}

/// Holds a run for this process until it is dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Reads a JSON file; `None` if there is none.
pub fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| StoreError::damaged(path, e)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(StoreError::read(path, e)),
    }
}

/// Writes a JSON file, whole or not at all.
pub fn write_json(path: PathBuf, value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_vec_pretty(value).map_err(|e| StoreError::write(&path, e))?;
    text.push(b'\n');
    file::write(path, &text)
}
