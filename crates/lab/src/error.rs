//! What can go wrong in a run. Whether it is the user's call or the world that failed decides the exit code.

use crate::StopCause;
use std::path::{Path, PathBuf};
use wattle_core::registry::Unknown;
use wattle_meter::source::OpenError;
use wattle_store::StoreError;

/// Why a run did not start or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// No such driver, or no such option.
    #[error(transparent)]
    Unknown(#[from] Unknown),
    /// The request makes no sense.
    #[error("{0}")]
    Usage(String),
    /// Sources could not be opened.
    #[error(transparent)]
    Source(#[from] OpenError),
    /// `--energy measured`, and nothing can be measured.
    #[error(
        "energy cannot be measured here ({why}); run \"wattle doctor\" for the fix, or use --energy auto for a labelled estimate"
    )]
    NotMeasurable {
        /// Why, by source.
        why: String,
    },
    /// A calibration, and nothing can be measured.
    #[error("a calibration needs measured energy ({why}); run \"wattle doctor\" for the fix")]
    NotCalibratable {
        /// Why, by source.
        why: String,
    },
    /// A calibration could not be carried out.
    #[error("{0}")]
    Calibrate(String),
    /// What was measured tells no coefficients.
    #[error("no calibration was made: {0}")]
    IllPosed(#[from] wattle_core::calibration::IllPosed),
    /// The model server is not there or not well.
    #[error("{0}")]
    Client(String),
    /// The server that was to be started for the run is not there.
    #[error("{0}")]
    Server(String),
    /// The dataset cannot be read.
    #[error("{}{}: {why}", .path.display(), .line.map_or_else(String::new, |l| format!(":{l}")))]
    Dataset {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: Option<u64>,
        /// What is wrong, and the way out.
        why: String,
    },
    /// The tokenizer cannot be used.
    #[error("{}: {why}; name the model's tokenizer.json, or the folder it is in", .path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The run folder cannot be written or read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The user stopped it before there was anything to save.
    #[error("stopped before there was anything to keep")]
    Stopped(StopCause),
    /// The user stopped it and had no time for its files.
    #[error("stopped at once; what had finished is kept, see it with \"wattle report {}\"", .run.display())]
    Hurried {
        /// How.
        cause: StopCause,
        /// The run folder.
        run: PathBuf,
    },
    /// Too many requests failed in a row.
    #[error("{failed} requests in a row failed, the last with: {error}; what was answered before is in {}{}", .run.display(), if *.by_time { String::new() } else { format!("; when that is mended, go on with \"wattle run --resume {}\"", .run.display()) })]
    GaveUp {
        /// How many.
        failed: u64,
        /// The last reason.
        error: String,
        /// The run folder.
        run: PathBuf,
        /// Whether it went by time, and has no rest.
        by_time: bool,
    },
    /// The run to resume was made with something else.
    #[error("the {what} changed since {} was started: it was {then} and is {now}; start a new run with --from, or put back what changed", .run.display())]
    Changed {
        /// What changed.
        what: &'static str,
        /// The run folder.
        run: PathBuf,
        /// As in `run.json`.
        then: String,
        /// As it is now.
        now: String,
    },
    /// The command ended, and then something else went wrong.
    #[error("{error}; the command itself ended with {code}")]
    After {
        /// Its exit code.
        code: i32,
        /// What went wrong.
        error: Box<LabError>,
    },
    /// The command of a session that was killed is still running.
    #[error("the command that {} last started still runs (process {pid}); wait for it, or end it with \"kill {pid}\"", .run.display())]
    StillRuns {
        /// Its process.
        pid: u32,
        /// The run folder.
        run: PathBuf,
    },
    /// There is no such program.
    #[error("{}", if *.found { format!("{name} is not a program that may be run; see its permissions") } else { format!("{name}: no such program; check the name, or give its path") })]
    NoProgram {
        /// As it was called.
        name: String,
        /// Whether there is a file of that name.
        found: bool,
    },
    /// The program was not started.
    #[error("cannot start {name}: {error}")]
    NotStarted {
        /// As it was called.
        name: String,
        /// What the system said.
        error: std::io::Error,
    },
    /// The system refused something basic (a thread, the runtime).
    #[error("{what}: {error}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        error: std::io::Error,
    },
}

impl LabError {
    /// Something is not what it was when the run was started.
    pub(crate) fn changed(what: &'static str, run: &Path, then: String, now: String) -> Self {
        let named = |text: String| if text.is_empty() { "none".to_owned() } else { text };
        LabError::Changed { what, run: run.into(), then: named(then), now: named(now) }
    }

    /// Whether the call was wrong (exit code 2) rather than the world (exit code 1).
    pub const fn is_usage(&self) -> bool {
        matches!(
            self,
            LabError::Unknown(_)
                | LabError::Usage(_)
                | LabError::Source(
                    OpenError::Unknown(_) | OpenError::Unqualified(_) | OpenError::Interval(_)
                )
        )
    }
}
