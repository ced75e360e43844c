//! `exec`: a command of the user's in place of client and dataset. It runs as it would without us; we watch.
//!
//! While it runs, only readings and lines of the log are written: the energy of its runs and phases is worked out from them
//! afterwards, so that memory stays flat and a run that was killed can still be summed up. If wattle itself is killed the command
//! goes on; the log knows its process.

mod notes;
mod watch;

use crate::books::Books;
use crate::client::Place;
use crate::folder::{Destination, Folder};
use crate::metering::Metering;
use crate::run::absolute;
use crate::{LabError, StopCause, summarize};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::mpsc;
use watch::Watch;
use wattle_core::Stamp;
use wattle_core::event::Event;
use wattle_core::spec::Spec;
use wattle_core::summary::{RunInfo, Summary};
use wattle_meter::{child, clock};
use wattle_store::RunDir;

/// What to run.
#[derive(Debug, Clone)]
pub enum What {
    /// A command, as `spec` says.
    New {
        /// What to do.
        spec: Box<Spec>,
        /// Where its folder goes.
        destination: Destination,
    },
    /// Go on with the repetitions of a run that was cut off.
    Resume(PathBuf),
}

/// What to do with a run of the command that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// End there.
    Stop,
    /// Go on with the next.
    GoOn,
}

/// How it ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// Its folder.
    pub run: PathBuf,
    /// What it found.
    pub summary: Summary,
    /// The command's own exit code: of its first run that failed, else 0.
    pub code: i32,
}

/// A signal that reached us.
#[derive(Debug, Clone, Copy)]
pub struct Signal {
    /// Its number.
    pub number: i32,
    /// Whether the terminal sent it, and so sent it to the command as well.
    pub from_terminal: bool,
}

/// Where signals go in.
#[derive(Debug, Clone)]
pub struct Signals(mpsc::UnboundedSender<Signal>);

/// Where they come out.
#[derive(Debug)]
pub struct Signalled(mpsc::UnboundedReceiver<Signal>);

/// A way for signals from whoever catches them to [`exec`].
pub fn signals() -> (Signals, Signalled) {
    let (send, receive) = mpsc::unbounded_channel();
    (Signals(send), Signalled(receive))
}

impl Signals {
    /// Hands on a signal.
    pub fn send(&self, signal: Signal) {
        let _ = self.0.send(signal);
    }
}

/// What happens while a command runs.
pub(crate) enum Happening {
    /// It wrote a line, then.
    Line(Stamp, Vec<u8>),
    /// It ended, then.
    Ended(std::io::Result<Stamp>),
}

/// Runs a command and measures it. This process must have no other children: those that the command leaves behind are adopted.
pub fn exec(what: What, on_failure: OnFailure, signals: &mut Signalled) -> Result<Ended, LabError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| LabError::System { what: "cannot start the event loop", error })?;
    runtime.block_on(Order::read(what)?.carry_out(on_failure, signals))
}

struct Order {
    spec: Spec,
    program: PathBuf,
    working_dir: PathBuf,
    target: Target,
}

enum Target {
    New(Destination),
    Existing(Box<Folder>, Box<RunInfo>),
}

impl Order {
    fn read(what: What) -> Result<Self, LabError> {
        let here = || {
            std::env::current_dir()
                .map_err(|error| LabError::System { what: "cannot find the working folder", error })
        };
        let (spec, working_dir, target) = match what {
            What::New { spec, destination } => {
                destination.check()?;
                (absolute(*spec), here()?, Target::New(destination))
            }
            What::Resume(run) => {
                let dir = RunDir::open(&run)?;
                let info = dir.info()?;
                info.spec.validate().map_err(|e| LabError::Usage(format!("{}: {e}", run.display())))?;
                let working_dir = info.working_dir.clone().map_or_else(here, |dir| Ok(dir.into()))?;
                let folder = Folder::take_up(dir)?;
                if let Some(pid) = folder.past.running() {
                    return Err(LabError::StillRuns { pid, run });
                }
                (info.spec.clone(), working_dir, Target::Existing(Box::new(folder), Box::new(info)))
            }
        };
        let Some(name) = spec.command.first() else {
            return Err(LabError::Usage(
                "no command; write it after two dashes: wattle exec -- sleep 2".into(),
            ));
        };
        let program = find(name, &working_dir)?;
        Ok(Self { spec, program, working_dir, target })
    }

    async fn carry_out(self, on_failure: OnFailure, signals: &mut Signalled) -> Result<Ended, LabError> {
        child::adopt_orphans();
        let mut metering = Metering::open(&self.spec, &Place::ThisHost, None, None)?;
        tokio::select! {
            biased;
            signal = stop(signals) => return Err(LabError::Stopped(signal)),
            () = metering.qualify() => {}
        }
        let made;
        let folder = match &self.target {
            Target::Existing(folder, info) => {
                metering.check_unchanged(info, folder.dir.path())?;
                metering.keep_panel(&info.panel);
                folder.as_ref()
            }
            Target::New(destination) => {
                let name = self.program.file_name().unwrap_or(self.program.as_os_str()).to_string_lossy();
                made = Folder::make(destination, &[&name], &self.spec, &metering, |info| {
                    info.working_dir = Some(self.working_dir.display().to_string());
                })?;
                &made
            }
        };
        let held = self.hold(folder, metering, on_failure, signals).await;
        let held = match held {
            // Nothing was ever run, so there is nothing to keep.
            Err(error @ (LabError::NotStarted { .. } | LabError::Stopped(_))) if !was_run(&folder.dir)? => {
                let _ = std::fs::remove_dir_all(folder.dir.path());
                return Err(error);
            }
            held => held,
        };
        match (held, summarize::wrap_up(&folder.dir)) {
            (Ok(code), Ok(summary)) => Ok(Ended { run: folder.dir.path().into(), summary, code }),
            // The command's own end must not be lost over the trouble with our files.
            (Ok(code), Err(error)) => Err(LabError::After { code, error: Box::new(error) }),
            (Err(error), _) => Err(error),
        }
    }

    /// One session: idle baseline, warm-up, the repetitions that are left, and the idle baseline again.
    async fn hold(
        &self,
        folder: &Folder,
        metering: Metering,
        on_failure: OnFailure,
        signals: &mut Signalled,
    ) -> Result<i32, LabError> {
        let Folder { dir, past, .. } = folder;
        let mut books = Books::open(dir, past.sessions, 0, metering)?;
        let ready = tokio::select! {
            biased;
            cause = stop(signals) => Err(LabError::Stopped(cause)),
            ready = async {
                books.wait_until_known(clock::now()).await?;
                self.rest(&mut books).await
            } => ready,
        };
        let result = match ready {
            Ok(()) => self.repeat(dir, past, &mut books, on_failure, signals).await,
            Err(error) => Err(error),
        };
        let result = match result {
            Ok((code, Left::Quiet)) => tokio::select! {
                biased;
                // Whoever waits for the end has it: the command has run.
                _ = stop(signals) => Ok(code),
                rested = self.rest(&mut books) => rested
                    .map(|()| code)
                    .map_err(|error| LabError::After { code, error: Box::new(error) }),
            },
            other => other.map(|(code, _)| code),
        };
        // Whatever happened, what was read is saved.
        let stopped = books.stop_meter();
        let closed = stopped.and_then(|stopped| books.close(stopped, false));
        result.and_then(|code| closed.map(|()| code))
    }

    /// Measures the idle machine.
    async fn rest(&self, books: &mut Books) -> Result<(), LabError> {
        match books.has_energy() && self.spec.idle_s > 0.0 {
            true => books.idle(Duration::from_secs_f64(self.spec.idle_s), false).await,
            false => Ok(()),
        }
    }

    async fn repeat(
        &self,
        dir: &RunDir,
        past: &crate::folder::Past,
        books: &mut Books,
        on_failure: OnFailure,
        signals: &mut Signalled,
    ) -> Result<(i32, Left), LabError> {
        let mut watch = Watch::new(self, dir, books.session)?;
        let warmup = (0..u64::from(self.spec.warmup.unwrap_or(0))).map(|i| (i, true));
        let rest = (0..self.spec.repeat).filter(|i| !past.done.contains(*i)).map(|i| (i, false));
        let (mut code, mut left) = (past.code, Left::Quiet);
        for (index, warmup) in warmup.chain(rest) {
            // A signal that came between two runs was for the next.
            if let Ok(signal) = signals.0.try_recv()
                && watch::is_end(signal)
            {
                if code == 0 {
                    code = 128 + signal.number;
                }
                left = Left::Busy;
                break;
            }
            let repetition = match watch.run(index, warmup, books, signals).await {
                // The command's own end must not be lost over the trouble with our files.
                Err((Some(code), error)) => return Err(LabError::After { code, error: Box::new(error) }),
                Err((None, error)) => return Err(error),
                Ok(repetition) => repetition,
            };
            if code == 0 {
                code = repetition.code();
            }
            if watch.interrupted || repetition.left_behind {
                left = Left::Busy;
            }
            if watch.interrupted || on_failure == OnFailure::Stop && !repetition.is_ok() {
                break;
            }
        }
        watch.close(books)?;
        Ok((code, left))
    }
}

/// What the repetitions leave behind.
enum Left {
    /// A machine that is idle again.
    Quiet,
    /// Somebody who wants the end now, or processes that still run.
    Busy,
}

/// Whether the command was started, in this session or an earlier one.
fn was_run(dir: &RunDir) -> Result<bool, LabError> {
    let mut started = false;
    dir.replay(|line| started |= matches!(line.event, Event::Started { .. }))?;
    Ok(started)
}

/// Waits for a signal that means the end.
async fn stop(signals: &mut Signalled) -> StopCause {
    loop {
        match signals.0.recv().await.map(|s| s.number) {
            Some(INTERRUPT) => return StopCause::Interrupt,
            Some(TERMINATE | HANG_UP) => return StopCause::Terminate,
            Some(_) => {}
            // Nobody sends any more: none will come.
            None => std::future::pending().await,
        }
    }
}

const HANG_UP: i32 = 1;
const INTERRUPT: i32 = 2;
const TERMINATE: i32 = 15;

/// The program that a shell would start, looked for before anything is measured.
pub(crate) fn find(name: &str, working_dir: &Path) -> Result<PathBuf, LabError> {
    let candidates: Vec<PathBuf> = match name.contains('/') {
        true => vec![working_dir.join(name)],
        false => {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).map(|folder| folder.join(name)).collect()
        }
    };
    let mut why = LabError::NoProgram { name: name.into(), found: false };
    for candidate in candidates {
        match candidate.metadata() {
            Ok(metadata) if metadata.is_file() && executable(&metadata) => return Ok(candidate),
            Ok(_) => why = LabError::NoProgram { name: name.into(), found: true },
            Err(_) => {}
        }
    }
    Err(why)
}

fn executable(metadata: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::PermissionsExt;
    metadata.permissions().mode() & 0o111 != 0
}
