//! What can go wrong with a run folder. Each message says what, where, and the way out.

use arrow_schema::ArrowError;
use parquet::errors::ParquetError;
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

/// The result of everything here.
pub type Result<T> = std::result::Result<T, StoreError>;

/// Why a run folder could not be made, read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is something at that place.
    #[error("{} exists already; choose another --name, replace it with --overwrite, or go on with it by --resume", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The folder could not be made.
    #[error("cannot make {}: {source}; choose another --out", path.display())]
    Create {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It has no `run.json`.
    #[error("not a run folder: no run.json in {}; give the folder that \"wattle run\" or \"wattle exec\" printed", path.display())]
    NotARun {
        /// The folder.
        path: PathBuf,
    },
    /// A later version of wattle wrote it.
    #[error("{} has version {found} of the run folder and this wattle reads up to version {ours}; update wattle", path.display())]
    Newer {
        /// The folder.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The greatest one known here.
        ours: u32,
    },
    /// Another process writes to it.
    #[error("{} is in use by another wattle; wait until it ends, or stop it", path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("cannot read {}: {source}; check that it is there and that you may read it", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file could not be written.
    #[error("cannot write {}: {source}; {}", path.display(), way_out(path, source))]
    Write {
        /// The file; its folder is the run's.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A whole line of the log is not one.
    #[error("{}, line {line}: {why}; remove that line to go on without it, the others are whole", path.display())]
    Line {
        /// The log.
        path: PathBuf,
        /// Which line, from 1.
        line: u64,
        /// What is wrong with it.
        why: String,
    },
    /// A record that could be written but never be read again.
    #[error(
        "query {index} cannot be kept: its record does not survive the log ({why}); this is a bug of wattle or of a plugin: a number in it is not finite, or its metadata is nested too deeply"
    )]
    Unrepeatable {
        /// The query.
        index: u64,
        /// What the reader said.
        why: String,
    },
    /// A file has other contents than its name says.
    #[error("{} is damaged: {why}; move it away and run \"wattle run --resume {}\"", path.display(), folder(path).display())]
    Damaged {
        /// The file; its folder is the run's.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A session's readings would be written twice.
    #[error("{} has the readings of session {session} already; a new session needs a new number", path.display())]
    SessionTaken {
        /// The file of readings.
        path: PathBuf,
        /// The session.
        session: u32,
    },
    /// A reading names a sensor that the run's table does not have.
    #[error("{}: no sensor {sensor} in the table of {}; hand the same table to the writer and to run.json", path.display(), folder(path).join("run.json").display())]
    NoSuchSensor {
        /// The file of readings.
        path: PathBuf,
        /// Its name or position.
        sensor: String,
    },
}

impl StoreError {
    pub(crate) fn read(path: &Path, source: io::Error) -> Self {
        StoreError::Read { path: path.into(), source }
    }

    pub(crate) fn write(path: &Path, error: impl Into<Cause>) -> Self {
        StoreError::Write { path: path.into(), source: error.into().into_io() }
    }

    pub(crate) fn taken(path: &Path, session: u32) -> Self {
        StoreError::SessionTaken { path: path.into(), session }
    }

    pub(crate) fn damaged(path: &Path, why: impl ToString) -> Self {
        StoreError::Damaged { path: path.into(), why: why.to_string() }
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

fn way_out(path: &Path, source: &io::Error) -> String {
    let folder = folder(path).display();
    let first = match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free some space",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "make the folder writable",
        _ => "mend that",
    };
    format!(
        "{first}, then go on with --resume {folder}, or sum up what there is with \"wattle report {folder}\"; everything finished so far is kept"
    )
}

/// An error of a layer below. Arrow and Parquet wrap what the system said; it is unwrapped here, so that a full disk is
/// told apart from a bug.
pub(crate) struct Cause(Box<dyn Error + Send + Sync>);

impl Cause {
    fn into_io(self) -> io::Error {
        let mut error: Option<&(dyn Error + 'static)> = Some(self.0.as_ref());
        while let Some(e) = error {
            let io = match e.downcast_ref::<ArrowError>() {
                Some(ArrowError::IoError(_, io)) => Some(io),
                _ => e.downcast_ref::<io::Error>(),
            };
            if let Some(code) = io.and_then(io::Error::raw_os_error) {
                return io::Error::from_raw_os_error(code);
            }
            error = e.source();
        }
        io::Error::other(self.0)
    }
}

impl From<io::Error> for Cause {
    fn from(e: io::Error) -> Self {
        Self(Box::new(e))
    }
}

impl From<ArrowError> for Cause {
    fn from(e: ArrowError) -> Self {
        Self(Box::new(e))
    }
}

impl From<ParquetError> for Cause {
    fn from(e: ParquetError) -> Self {
        Self(Box::new(e))
    }
}

impl From<serde_json::Error> for Cause {
    fn from(e: serde_json::Error) -> Self {
        Self(Box::new(io::Error::from(e)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_recognised_through_every_layer() {
        let full = || io::Error::from_raw_os_error(28);
        let layers: [Cause; 4] = [
            full().into(),
            ArrowError::from(full()).into(),
            ParquetError::from(full()).into(),
            ParquetError::from(ArrowError::from(full())).into(),
        ];
        for cause in layers {
            assert_eq!(
                StoreError::write(Path::new("runs/a/requests.parquet"), cause).to_string(),
                "cannot write runs/a/requests.parquet: No space left on device (os error 28); free some space, then go on \
                 with --resume runs/a, or sum up what there is with \"wattle report runs/a\"; everything finished so far is kept"
            );
        }
    }
}
