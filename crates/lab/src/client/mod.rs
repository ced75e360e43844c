//! Clients: whoever answers, asked the same way. One file each, and two adjacent lines here.

use crate::LabError;
use crate::http::{Again, Trouble};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use wattle_core::exchange::{Exchange, FailureClass, Finish, Outcome, Request, TokensFrom};
use wattle_core::registry::{self, About, Params};
use wattle_core::sensor::DeviceKind;
use wattle_core::summary::ModelInfo;
use wattle_core::time::Stamp;
use wattle_core::wire::prometheus::Load;
use wattle_meter::clock;

pub mod embedded;
mod ollama;
mod openai;

/// Every client there is.
pub const DRIVERS: &[Driver] = &[embedded::DRIVER, openai::DRIVER, ollama::DRIVER];

/// How a client is found and opened.
pub struct Driver {
    /// Its name, one line, its options.
    pub about: About,
    /// Opens it; nothing is sent yet.
    pub open: fn(&Settings) -> Result<Box<dyn Client>, LabError>,
}

/// What a client is opened with.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Where its server is.
    pub url: Option<String>,
    /// The model, if the user named one.
    pub model: Option<String>,
    /// Its own options.
    pub params: Params,
    /// How long it may take.
    pub limits: Limits,
}

/// How long a request may take.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// Until there is a connection.
    pub connect: Duration,
    /// Until the first token.
    pub first_token: Option<Duration>,
    /// From one token to the next.
    pub stall: Option<Duration>,
    /// Until its end.
    pub total: Duration,
}

impl Limits {
    /// Waits for `work` on `live`, as long as it keeps to the limits; else says which it broke.
    pub(crate) async fn hold<T>(&self, live: &Live, work: impl Future<Output = T>) -> Result<T, Outcome> {
        let began = clock::now();
        tokio::pin!(work);
        let timer = tokio::time::sleep(self.look(self.next(live, began).0));
        tokio::pin!(timer);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                () = &mut timer => {}
            }
            // Tokens have come meanwhile, perhaps; looking only now costs nothing for each of them.
            let (left, (what, key, limit)) = self.next(live, began);
            if left.is_zero() {
                let error = format!("{what} after {} s; raise {key}", limit.as_secs_f64());
                return Err(Outcome::Failed { class: FailureClass::Timeout, error });
            }
            timer.as_mut().reset(tokio::time::Instant::now() + self.look(left));
        }
    }

    /// When to look again, if `left` is left: the first token may come any time, and with it a limit that was none before.
    fn look(&self, left: Duration) -> Duration {
        self.stall.map_or(left, |stall| left.min(stall))
    }

    /// How long until the next limit is broken, and which that is.
    fn next(&self, live: &Live, began: Stamp) -> (Duration, Limit) {
        let now = clock::now();
        let left = |since: Stamp, limit: Duration| {
            limit.saturating_sub(Duration::from_nanos(now.nanos().saturating_sub(since.nanos())))
        };
        let total = (left(began, self.total), ("no whole answer", "timeout_s", self.total));
        let other = match (live.with(|e| e.tokens.last().copied()), self.first_token, self.stall) {
            (None, Some(limit), _) => {
                Some((left(began, limit), ("no first token", "first_token_timeout_s", limit)))
            }
            (Some(last), _, Some(limit)) => {
                Some((left(last, limit), ("nothing more", "stall_timeout_s", limit)))
            }
            _ => None,
        };
        match other {
            Some(other) if other.0 < total.0 => other,
            _ => total,
        }
    }
}

/// What did not happen, the setting that says how long it may take, and its value.
type Limit = (&'static str, &'static str, Duration);

/// A future that a trait object can return.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Hears what takes long.
pub type Tell<'a> = &'a dyn Fn(String);

/// Where a client's joules are drawn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In this process.
    Here,
    /// By another process on this host.
    ThisHost,
    /// On another host: this machine's joules are not charged to it.
    Elsewhere {
        /// Its name.
        host: String,
    },
}

/// An exchange under way: its client fills it, and whoever bills it looks at it meanwhile.
#[derive(Debug)]
pub struct Live {
    exchange: Mutex<Exchange>,
    /// Whether it is with its server now.
    under_way: AtomicBool,
    /// Whether it was due at a time of its own; else it is due when it is sent.
    scheduled: bool,
}

impl Live {
    /// One of an open loop, due then.
    pub fn due(due: Stamp) -> Arc<Self> {
        Self::new(due, true)
    }

    /// One of a closed loop, due when it is sent.
    pub fn now() -> Arc<Self> {
        Self::new(clock::now(), false)
    }

    fn new(due: Stamp, scheduled: bool) -> Arc<Self> {
        let (exchange, under_way) = (Mutex::new(Exchange::due(due)), AtomicBool::new(false));
        Arc::new(Self { exchange, under_way, scheduled })
    }

    /// When it was sent, if it is under way.
    pub(crate) fn progress(&self) -> Option<Stamp> {
        let under_way = self.under_way.load(Ordering::Relaxed);
        under_way.then(|| self.with(|exchange| exchange.sent))
    }

    /// When it was first sent, if it was; of one that is sent again, when it was due.
    pub(crate) fn tried(&self) -> Option<Stamp> {
        let under_way = self.under_way.load(Ordering::Relaxed);
        self.with(|exchange| match exchange.attempts {
            1 => under_way.then_some(exchange.sent),
            _ => Some(exchange.due),
        })
    }

    /// Looks at it, or fills it.
    pub fn with<T>(&self, f: impl FnOnce(&mut Exchange) -> T) -> T {
        f(&mut self.exchange.lock().unwrap_or_else(|e| e.into_inner()))
    }

    /// It was sent.
    pub fn sent(&self, at: Stamp) {
        self.under_way.store(true, Ordering::Relaxed);
        self.with(|exchange| {
            exchange.sent = at;
            exchange.done = exchange.done.max(at);
            if !self.scheduled && exchange.attempts == 1 {
                exchange.due = at;
            }
        });
    }

    /// It is sent once more: what came of it so far does not count.
    pub(crate) fn again(&self) {
        self.under_way.store(false, Ordering::Relaxed);
        self.with(|exchange| {
            *exchange = Exchange { attempts: exchange.attempts + 1, ..Exchange::due(exchange.due) };
        });
    }

    /// It ended so, now.
    pub fn ended(&self, outcome: Outcome) {
        self.with(|exchange| {
            exchange.done = clock::now();
            exchange.outcome = outcome;
            count_pieces(exchange);
        });
    }

    /// What it is now.
    pub fn take(&self) -> Exchange {
        self.with(|exchange| {
            let due = exchange.due;
            std::mem::replace(exchange, Exchange::due(due))
        })
    }
}

/// Whether a request that came to nothing is worth sending once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It has its answer, or would get none the next time either.
    Final,
    /// The server did not take it; it may have said how long to wait.
    Again(Option<Duration>),
}

/// Answers requests.
pub trait Client: Send + Sync {
    /// Where the work is done.
    fn place(&self) -> Place;

    /// The kind of device that does the work, where the client knows.
    fn worker(&self) -> Option<DeviceKind> {
        None
    }

    /// Whether it is there at all; asked before anything else.
    fn health(&self) -> BoxFuture<'_, Result<(), LabError>>;

    /// Makes the model ready and says what it is.
    fn prepare<'a>(&'a self, tell: Tell<'a>) -> BoxFuture<'a, Result<ModelInfo, LabError>>;

    /// Opens as many connections as there will be requests at once, so that none is opened while something is timed. That it
    /// cannot is seen when requests are sent.
    fn connect(&self, _requests: u32) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// Sends one request. Whatever comes of it, good or bad, is in `live`. Dropping the future cancels the request.
    fn send<'a>(&'a self, request: &'a Request, live: &'a Arc<Live>) -> BoxFuture<'a, Verdict>;

    /// Says more of what runs the model, where its server tells: of interest where what work costs is. It is asked as for its load.
    fn identify<'a>(&'a self, _model: &'a mut ModelInfo) -> BoxFuture<'a, ()> {
        Box::pin(async {})
    }

    /// How busy its server says it is, where it says so within two seconds. It is asked on a connection that no request is on,
    /// and nothing of it is counted.
    fn load(&self) -> BoxFuture<'_, Option<Load>> {
        Box::pin(async { None })
    }

    /// How many connections were opened so far, where there are any.
    fn connections(&self) -> Option<u64> {
        None
    }

    /// Lets go of what it holds.
    fn close(&self) -> BoxFuture<'_, Result<(), LabError>>;
}

/// A server that sends no usage leaves only the pieces to count; the label says so.
fn count_pieces(exchange: &mut Exchange) {
    if exchange.usage.completion.is_none() && !exchange.tokens.is_empty() {
        exchange.usage.completion = Some(exchange.tokens.len() as u64);
        exchange.usage.from = Some(TokensFrom::Chunks);
    }
}

/// Carries a request over HTTP to its end, within its limits.
async fn carry(
    limits: &Limits,
    live: &Live,
    exchange: impl Future<Output = Result<Finish, Trouble>>,
) -> Verdict {
    match limits.hold(live, exchange).await {
        Ok(came) => verdict(came, live),
        Err(overdue) => {
            live.ended(overdue);
            Verdict::Final
        }
    }
}

/// What is made of the end of a request over HTTP.
fn verdict(came: Result<Finish, Trouble>, live: &Live) -> Verdict {
    match came {
        Ok(finish) => {
            live.with(|exchange| {
                // A whole answer is dated by its last bytes, where these are dated at all.
                let end = exchange.tokens.last().map_or_else(clock::now, |last| exchange.done.max(*last));
                exchange.done = end;
                exchange.outcome = Outcome::Ok { finish };
                count_pieces(exchange);
            });
            Verdict::Final
        }
        Err(Trouble { class, error, again }) => {
            live.ended(Outcome::Failed { class, error });
            match again {
                // What has begun to answer is at work.
                _ if live.with(|e| e.first_token.is_some()) => Verdict::Final,
                Again::No => Verdict::Final,
                Again::Soon => Verdict::Again(None),
                Again::After(wait) => Verdict::Again(Some(wait)),
            }
        }
    }
}

/// Opens the client called `name`.
pub fn open(name: &str, settings: &Settings) -> Result<Box<dyn Client>, LabError> {
    let driver = registry::find("client", DRIVERS, |d| d.about, name)?;
    driver.about.check("client", &settings.params)?;
    (driver.open)(settings)
}
