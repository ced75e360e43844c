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
use wattle_core::{Span, Stamp, Warning};
use wattle_meter::child::{self, Child};
use wattle_meter::clock;
use wattle_store::RunDir;

/// Lines that may wait for us; a program that writes more has to wait itself, which its file does for it.
const LINES: usize = 1024;

pub(super) struct Watch {
    launcher: Box<dyn Launcher>,
    program: Program,
    /// What the command has to say.
    log: PathBuf,
    /// Not there while a thread follows them.
    notes: Option<Notes>,
    /// Lines that make no sense, and what is wrong with the first.
    skipped: u64,
    why: String,
    /// Somebody asked for the end.
    pub(super) interrupted: bool,
}

impl Watch {
    pub(super) fn new(order: &Order, dir: &RunDir) -> Result<Self, LabError> {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        let (log, results) = (absolute(dir.notes()?), absolute(dir.results()?));
        let notes = Notes::open(&log)
            .map_err(|error| LabError::System { what: "cannot read the command's notes", error })?;
        let environment = vec![
            ("WATTLE_LOG", log.clone()),
            ("WATTLE_RESULT_DIR", results),
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
            log,
            notes: Some(notes),
            skipped: 0,
            why: String::new(),
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
    ) -> Result<Repetition, LabError> {
        let (send, mut happenings) = mpsc::channel(LINES);
        let follower = self.follow(send.clone())?;
        let child = self.launcher.start(&self.program).map_err(|error| LabError::NotStarted {
            name: self.program.command.first().cloned().unwrap_or_default(),
            error,
        })?;
        let session = books.session;
        let started = Event::Started { session, index, warmup, pid: child.pid(), start_ns: child.start };
        // What goes wrong with our own files must not keep us from the command: it is told when that has ended.
        let mut trouble = books.note(&started).err();
        wait_for(child, send)?;

        let mut phases = Phases::new(child.start);
        let mut pumped = clock::now();
        let mut end = None;
        // After its end there may be lines left; the channel closes when the thread that reads them is done.
        while !(end.is_some() && follower.is_finished() && happenings.is_empty()) {
            tokio::select! {
                biased;
                Some(signal) = signals.0.recv(), if end.is_none() => self.forward(child, signal),
                Some(happening) = happenings.recv() => match happening {
                    Happening::Line(at, line) => {
                        let noted = self.note(&line, at, child.start, &mut phases, books);
                        trouble = trouble.or(noted.err());
                    }
                    Happening::Ended(at) => {
                        end = Some(at.map_err(|error| LabError::System { what: "cannot wait for the command", error })?);
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
        self.notes = follower.join();
        let end = end.unwrap_or_else(clock::now);
        for phase in phases.close(end) {
            trouble = trouble.or(books.note(&Event::of_command(phase)).err());
        }
        let repetition = reap(child, session, index, warmup, end)?;
        trouble = trouble.or(books.note(&Event::Repetition(Box::new(repetition.clone()))).err());
        trouble = trouble.or(books.wait_until_known(end).await.err());
        trouble.map_or(Ok(repetition), Err)
    }

    fn follow(&mut self, to: mpsc::Sender<Happening>) -> Result<Follower, LabError> {
        let notes = match self.notes.take() {
            Some(notes) => Ok(notes),
            None => Notes::open(&self.log),
        };
        let follow = notes.and_then(|notes| Follower::start(notes, to));
        follow.map_err(|error| LabError::System { what: "cannot follow the command's notes", error })
    }

    /// What the terminal sends it sends to the command as well.
    fn forward(&mut self, child: Child, signal: Signal) {
        self.interrupted |= matches!(signal.number, INTERRUPT | TERMINATE | HANG_UP);
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
        let taken = Note::parse(line).and_then(|(note, at)| {
            // A moment outside the run of the command is of another clock.
            let at = at.filter(|at| start <= *at && *at <= arrived).unwrap_or(arrived);
            Ok(match note {
                Note::Begin { name } => phases.begin(name, at).map(|()| None)?,
                Note::End { name, extra } => Some(Event::of_command(phases.end(name, at, extra)?)),
                Note::Phase { name, seconds, extra } => {
                    Some(Event::of_command(phases.past(name, seconds, at, extra)))
                }
                Note::Gauge { name, value } => Some(Event::Gauge { name, value, at_ns: at }),
                Note::Event { event, data } => Some(Event::Event { event, data }),
            })
        });
        match taken {
            Ok(event) => event.map_or(Ok(()), |event| books.note(&event)),
            Err(why) => {
                self.skipped += 1;
                if self.why.is_empty() {
                    self.why = why;
                }
                Ok(())
            }
        }
    }

    /// Says what was skipped.
    pub(super) fn close(self, books: &mut Books) -> Result<(), LabError> {
        match self.skipped {
            0 => Ok(()),
            skipped => books.note(&Event::Warning(Warning::Notes { skipped, why: self.why })),
        }
    }
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
    })
}
