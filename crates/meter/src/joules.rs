//! The joules of a piece of code, for programs that use wattle as a library.

use crate::clock;
use crate::sampler::Meter;
use crate::source::{self, OpenError, Wanted};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use wattle_core::account::Account;
use wattle_core::estimate::Estimate;
use wattle_core::sensor::{Panel, Perimeter, SensorId};
use wattle_core::time::Stamp;
use wattle_core::timeline::Timeline;
use wattle_core::units::Joules;

/// How often counters are polled.
const INTERVAL: Duration = Duration::from_millis(5);
/// How often readings are taken over.
const COLLECT: Duration = Duration::from_millis(50);
/// A figure waits at most this long for the reading that ends its window.
const PATIENCE_NS: u64 = 700_000_000;
/// What a sensor counts after so long a silence is not used.
const SILENT_NS: u64 = 60_000_000_000;
/// Windows are gathered up to so long ago: longer than the patience, so that none is gathered beyond its end.
const LAG_NS: u64 = 1_000_000_000;

/// Why there is no meter.
#[derive(Debug, thiserror::Error)]
pub enum JouleError {
    /// A source could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The sampler did not start.
    #[error("cannot start the sampler: {0}")]
    Start(#[from] std::io::Error),
    /// Nothing tells energy, not even an estimate.
    #[error("no source tells energy here ({0}); run \"wattle doctor\" for the fix")]
    Nothing(String),
}

/// Measures the energy that the machine draws while code runs.
pub struct Joulemeter {
    shared: Arc<Shared>,
    panel: Panel,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    stop: AtomicBool,
    books: Mutex<Books>,
}

struct Books {
    meter: Meter,
    timeline: Timeline,
    panel: Vec<SensorId>,
    /// The window that is being measured.
    open: Option<Account>,
}

impl Joulemeter {
    /// With what this machine has; where nothing can be measured, with an estimate, whose method says so.
    pub fn open() -> Result<Self, JouleError> {
        Self::with(&Wanted { estimate: true, ..Wanted::default() })
    }

    /// With these sources.
    pub fn with(wanted: &Wanted) -> Result<Self, JouleError> {
        let opened = source::open(wanted)?;
        let meter = Meter::start(opened.sources, INTERVAL)?;
        let Some(panel) = Panel::choose(meter.sensors(), None, &[]) else {
            let why =
                opened.tried.into_iter().filter_map(|s| Some(format!("{}: {}", s.name, s.unavailable?)));
            return Err(JouleError::Nothing(why.collect::<Vec<_>>().join("; ")));
        };
        let timeline = Timeline::new(meter.sensors());
        let books = Books { meter, timeline, panel: panel.sensors.clone(), open: None };
        let shared = Arc::new(Shared { stop: AtomicBool::new(false), books: Mutex::new(books) });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("wattle-joules".into()).spawn(move || {
            while !theirs.stop.load(Ordering::Relaxed) {
                theirs.books().collect();
                std::thread::sleep(COLLECT);
            }
        })?;
        let meter = Self { shared, panel, thread: Some(thread) };
        // So that the first window is covered from its start.
        meter.wait_until_known(clock::now());
        Ok(meter)
    }

    /// What the figures cover.
    pub fn perimeter(&self) -> Perimeter {
        self.panel.perimeter
    }

    /// Does `work` and gives what it returned, and the energy drawn meanwhile; `None` if no sensor saw anything. Comes back up
    /// to 0.7 s after the work is done: the counter's next refresh ends the window.
    pub fn measure<T>(&mut self, work: impl FnOnce() -> T) -> (T, Option<Estimate<Joules>>) {
        self.shared.books().open = Some(Account::open(clock::now()));
        let result = work();
        let end = clock::now();
        self.wait_until_known(end);
        let mut books = self.shared.books();
        let account = books.open.take().map(|mut account| {
            account.extend(&books.timeline, &books.panel, end);
            account
        });
        (result, account.and_then(|a| a.estimate()))
    }

    fn wait_until_known(&self, at: Stamp) {
        let patience = at.plus_nanos(PATIENCE_NS);
        while clock::now() < patience {
            let mut books = self.shared.books();
            books.collect();
            if books.known() >= at {
                return;
            }
            drop(books);
            std::thread::sleep(INTERVAL);
        }
    }
}

impl Drop for Joulemeter {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        // Work that panicked held no lock.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Books {
    /// Takes over what was read, and keeps no more of it than is needed: a window may be long.
    fn collect(&mut self) {
        let timeline = &mut self.timeline;
        self.meter.drain(|reading| timeline.push(reading));
        // A sensor that is silent for long holds the others up no more.
        let past = self.known().minus_nanos(LAG_NS).max(clock::now().minus_nanos(SILENT_NS));
        if let Some(account) = &mut self.open {
            account.extend(&self.timeline, &self.panel, past);
        }
        self.timeline.forget_before(past);
    }

    /// Until when figures are final.
    fn known(&self) -> Stamp {
        let known = self.panel.iter().map(|s| self.timeline.known_until(*s)).min();
        known.flatten().unwrap_or_default()
    }
}
