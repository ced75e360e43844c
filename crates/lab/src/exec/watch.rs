//! One run of the command after the other: started, listened to, waited for.

use super::notes::{Follower, Notes};
use super::{HANG_UP, Happening, INTERRUPT, Order, Signal, Signalled, TERMINATE};
use crate::LabError;
use crate::books::{Books, PUMP};
use crate::launch::{self, Launcher, Program};
use std::path::PathBuf;
use tokio::sync::mpsc;
use wattle_core::command::{Note, Phases, Repetition};
use wattle_core::event::Event;
use wattle_core::{Seconds, Span, Stamp, Warning};
use wattle_meter::child::{self, Child};
use wattle_meter::clock;
use wattle_store::RunDir;

/// Lines that may wait for us; a program that writes more has to wait itself, which its file does for it.
const LINES: usize = 1024;
/// Lines that waited longer for us are worth a word.
const LATE: Seconds = Seconds(0.05);

pub(super) struct Watch {
    launcher: Box<dyn Launcher>,
    program: Program,
    dir: RunDir,
    session: u32,
    /// Runs so far.
    runs: u64,
    /// Lines so far, those that make no sense, and what is wrong with the first.
    lines: u64,
    skipped: u64,
    why: String,
    /// For how long lines had to wait for us, at most.
    behind: Seconds,
    /// Somebody asked for the end.
    pub(super) interrupted: bool,
}

impl Watch {
    pub(super) fn new(order: &Order, dir: &RunDir, session: u32) -> Result<Self, LabError> {
        let environment = vec![
            ("WATTLE_RESULT_DIR", absolute(dir.results()?)),
            ("WATTLE_RUN_ID", dir.info()?.run_id.into()),
        ];
        Ok(Self {
            launcher: launch::open("local")?,
            program: Program {
                path: order.program.clone(),
                command: order.spec.command.clone(),
                working_dir: order.working_dir.clone(),
                environment,
            },
            dir: dir.clone(),
            session,
            runs: 0,
            lines: 0,
            skipped: 0,
            why: String::new(),
            behind: Seconds(0.0),
            interrupted: false,
        })
    }

    /// Runs the command once.
    pub(super) async fn run(
        &mut self,
        index: u64,
        warmup: bool,
        books: &mut Books,
        signals: &mut Signalled,
    ) -> Result<Repetition, (Option<i32>, LabError)> {
        let (send, mut happenings) = mpsc::channel(LINES);
        let (log, follower) = self.follow(send.clone()).map_err(|e| (None, e))?;
        let child = self.launcher.start(&self.program).map_err(|error| {
            let name = self.program.command.first().cloned().unwrap_or_default();
            (None, LabError::NotStarted { name, error })
        })?;
        let session = books.session;
        let started = Event::Started { session, index, warmup, pid: child.pid(), start_ns: child.start };
        // What goes wrong with our own files must not keep us from the command: it is told when that has ended.
        let mut trouble = books.note(&started).err();
        wait_for(child, send).map_err(|e| (None, e))?;

        let mut phases = Phases::new(child.start);
        let mut pumped = clock::now();
        let mut end: Option<Stamp> = None;
        // After its end there may be lines left, unless somebody is tired of waiting for them.
        while !(end.is_some() && follower.is_finished() && happenings.is_empty()) {
            tokio::select! {
                biased;
                Some(signal) = signals.0.recv() => {
                    if end.is_some() && is_end(signal) {
                        self.interrupted = true;
                        break;
                    }
                    self.forward(child, signal);
                }
                Some(happening) = happenings.recv() => match happening {
                    Happening::Line(at, line) => {
                        // Nothing that a command says is of a time after it.
                        let at = end.map_or(at, |end| at.min(end));
                        let noted = self.note(&line, at, child.start, &mut phases, books);
                        trouble = trouble.or(noted.err());
                    }
                    Happening::Ended(at) => {
                        end = Some(at.unwrap_or_else(|_| clock::now()));
                        follower.stop();
                    }
                },
                () = tokio::time::sleep(PUMP) => {}
            }
            if clock::now().since(pumped).get() >= PUMP.as_secs_f64() {
                pumped = clock::now();
                if let Some(metered) = books.metered() {
                    metered.needed_from = pumped;
                }
                trouble = trouble.or(books.collect().err());
            }
        }
        drop(happenings);
        let behind = follower.join().map_or(self.behind, |notes| notes.behind);
        self.behind = if behind > self.behind { behind } else { self.behind };
        if log.metadata().is_ok_and(|m| m.len() == 0) {
            let _ = std::fs::remove_file(&log);
        }
        let end = end.unwrap_or_else(clock::now);
        for phase in phases.close(end) {
            trouble = trouble.or(books.note(&Event::of_command(phase)).err());
        }
        let mut repetition = reap(child, session, index, warmup, end).map_err(|e| (None, e))?;
        repetition.interrupted = self.interrupted && !repetition.is_ok();
        trouble = trouble.or(books.note(&Event::Repetition(Box::new(repetition.clone()))).err());
        trouble = trouble.or(books.wait_until_known(end).await.err());
        trouble.map_or(Ok(repetition.clone()), |error| Err((Some(repetition.code()), error)))
    }

    /// Makes the file that takes what the next run has to say, and follows it.
    fn follow(&mut self, to: mpsc::Sender<Happening>) -> Result<(PathBuf, Follower), LabError> {
        let log = absolute(self.dir.notes(self.session, self.runs)?);
        self.runs += 1;
        self.program.environment.retain(|(name, _)| *name != "WATTLE_LOG");
        self.program.environment.push(("WATTLE_LOG", log.clone()));
        let follower = Notes::open(&log).and_then(|notes| Follower::start(notes, to));
        let follower = follower
            .map_err(|error| LabError::System { what: "cannot follow the command's notes", error })?;
        Ok((log, follower))
    }

    /// What the terminal sends it sends to the command as well.
    fn forward(&mut self, child: Child, signal: Signal) {
        self.interrupted |= is_end(signal);
        if !signal.from_terminal {
            child.signal(signal.number);
        }
    }

    /// Takes in a line that the command wrote.
    fn note(
        &mut self,
        line: &[u8],
        arrived: Stamp,
        start: Stamp,
        phases: &mut Phases,
        books: &mut Books,
    ) -> Result<(), LabError> {
        self.lines += 1;
        let taken = Note::parse(line).and_then(|(note, at)| {
            // A moment outside the run of the command is of another clock.
            let at = at.filter(|at| start <= *at && *at <= arrived).unwrap_or(arrived);
            Ok(match note {
                Note::Begin { name } => phases.begin(name, at).map(|()| None)?,
                Note::End { name, extra } => Some(Event::of_command(phases.end(name, at, extra)?)),
                Note::Phase { name, seconds, extra } => {
                    Some(Event::of_command(phases.past(name, seconds, at, extra)?))
                }
                Note::Gauge { name, value } => Some(Event::Gauge { name, value, at_ns: at }),
                Note::Event { event, data } => Some(Event::Event { event, by: Some("command".into()), data }),
            })
        });
        match taken {
            Ok(event) => event.map_or(Ok(()), |event| books.note(&event)),
            Err(why) => {
                self.skipped += 1;
                if self.why.is_empty() {
                    let said: String = String::from_utf8_lossy(line).chars().take(60).collect();
                    self.why = format!("line {}, {said:?}: {why}", self.lines);
                }
                Ok(())
            }
        }
    }

    /// Says what was skipped, and what came too fast.
    pub(super) fn close(self, books: &mut Books) -> Result<(), LabError> {
        if self.skipped > 0 {
            books.note(&Event::Warning(Warning::Notes { skipped: self.skipped, why: self.why }))?;
        }
        if self.behind > LATE {
            books.note(&Event::Warning(Warning::NotesLate { seconds: self.behind.get() }))?;
        }
        Ok(())
    }
}

fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// Whether a signal means the end.
pub(super) fn is_end(signal: Signal) -> bool {
    matches!(signal.number, INTERRUPT | TERMINATE | HANG_UP)
}

/// Waits for the command on a thread of its own, which stamps its end.
fn wait_for(child: Child, to: mpsc::Sender<Happening>) -> Result<(), LabError> {
    let wait = move || {
        let _ = to.blocking_send(Happening::Ended(child.wait()));
    };
    match std::thread::Builder::new().name("wattle-wait".into()).spawn(wait) {
        Ok(_) => Ok(()),
        Err(error) => Err(LabError::System { what: "cannot start a thread", error }),
    }
}

/// What became of the command, and of what it left behind.
fn reap(child: Child, session: u32, index: u64, warmup: bool, end: Stamp) -> Result<Repetition, LabError> {
    let start = child.start;
    let used =
        child.reap().map_err(|error| LabError::System { what: "cannot wait for the command", error })?;
    let (orphans, more) = child::reap_orphans();
    let all = || orphans.iter().chain([&used]);
    Ok(Repetition {
        session,
        index,
        warmup,
        span: Span::new(start, end),
        exit_code: used.exit_code,
        signal: used.signal,
        user_s: all().map(|u| u.user.get()).sum(),
        system_s: all().map(|u| u.system.get()).sum(),
        peak_rss_bytes: all().filter_map(|u| u.peak_rss).max(),
        left_behind: more,
        interrupted: false,
    })
}
