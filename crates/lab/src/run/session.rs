//! One uninterrupted stretch of a run: idle baseline, warm-up, queries, idle baseline. A resumed run has several.

use super::desk::{Desk, Landed};
use super::plan::{Next, Plan, Unit};
use super::waker::Waker;
use super::{Observer, Order, Progress, Target};
use crate::books::PUMP;
use crate::client::{Client, Live, Place, Verdict};
use crate::metering::Metering;
use crate::{LabError, Stop, StopCause};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::sync::Arc;
use std::time::Duration;
use wattle_core::Warning;
use wattle_core::cost::Weights;
use wattle_core::event::Event;
use wattle_core::exchange::{Request, Role, Turn};
use wattle_core::record::{Item, Score};
use wattle_core::summary::ModelInfo;
use wattle_core::time::Stamp;
use wattle_core::wire::prometheus::Load;
use wattle_meter::clock;
use wattle_store::RunDir;

/// Above this many parameters a model needs more warming (requirement L1).
const LARGE_MODEL: u64 = 10_000_000_000;
/// Warm-up answers need not be long.
const WARMUP_TOKENS: u32 = 16;
/// The first wait before a request is sent again; each further one is twice as long.
const BACKOFF: Duration = Duration::from_millis(250);
/// No wait is longer.
const LONGEST_BACKOFF: Duration = Duration::from_secs(30);

/// How often a server is asked how busy it is.
const ASK: Duration = Duration::from_millis(500);

/// One uninterrupted stretch of a run.
pub(super) struct Session<'a> {
    pub(super) order: &'a Order,
    pub(super) client: &'a dyn Client,
    pub(super) model: &'a ModelInfo,
    pub(super) stop: &'a Stop,
    pub(super) past: &'a crate::folder::Past,
    /// The model's name, shared by all requests.
    pub(super) name: Arc<str>,
    /// What no prompt of another run begins with.
    pub(super) mark: &'a str,
    /// By what energy is split.
    pub(super) weights: Weights,
    /// What to say of them if more than one request is in flight.
    pub(super) doubt: Option<Warning>,
}

/// One request on its way.
struct Flight {
    number: u64,
    item: Item,
    /// What is asked after it.
    rest: Unit,
    live: Arc<Live>,
    /// When it could have been sent.
    ready: Stamp,
    /// Whether it is one of the run's queries; else it only keeps the load up.
    counts: bool,
}

impl Flight {
    /// Length of all that the model reads, but for what every prompt of the run has.
    fn bytes(&self) -> u64 {
        let before: usize = self.item.history.iter().map(|turn| turn.content.len()).sum();
        (self.item.prompt.len() + before) as u64
    }
}

impl Session<'_> {
    pub(super) async fn hold(
        &self,
        dir: &RunDir,
        metering: Metering,
        observe: &mut Observer<'_>,
    ) -> Result<Option<StopCause>, LabError> {
        let mut desk = Desk::open(dir, self.past.sessions, self.order, metering, self.weights.clone())?;
        if let Target::Existing { changes, .. } = &self.order.target {
            for change in changes.iter().filter(|c| !c.values.is_empty()) {
                desk.note(&Event::with("settings_changed", change.values.clone().into()))?;
            }
        }
        let result = tokio::select! {
            biased;
            cause = self.stop.wait() => Ok(Some(cause)),
            result = self.work(&mut desk, dir, observe) => result.map(|()| None),
        };
        // Trouble on the way out must not keep the books from being closed.
        let result = match result {
            Ok(Some(cause)) => desk.interrupted(self.stop, observe).await.map(|()| Some(cause)),
            other => other,
        };
        if let Err(error) = self.client.close().await {
            let _ = desk.note(&Event::Warning(Warning::Close { error: error.to_string() }));
        }
        // Whatever happened, what had finished is saved.
        let closed = desk.close(self.client);
        result.and_then(|cause| closed.map(|()| cause))
    }

    async fn work(&self, desk: &mut Desk, dir: &RunDir, observe: &mut Observer<'_>) -> Result<(), LabError> {
        desk.first_readings().await?;
        self.rest(desk, observe).await?;
        observe(Progress::Stage("warming up".into()));
        self.warm_up(desk).await?;
        let at_once = if self.order.is_open() { 0 } else { self.order.cap() as u32 };
        desk.pump_while(self.client.connect(at_once)).await?;

        // Who is served beside us is of interest where energy is split.
        let says = desk.meters() && self.hear(desk).await?;
        let total = self.order.total();
        observe(Progress::Start { run: dir.path().into(), total, done: self.past.done.len() });
        desk.start_queries(self.past.done.len());
        let began = clock::now();
        self.load(desk, began, says, observe).await?;
        if says {
            self.hear(desk).await?;
        }
        desk.settle_all(self.stop, observe).await?;
        desk.note(&Event::phase("queries", clock::now().since(began).get()))?;
        self.rest(desk, observe).await
    }

    /// Measures the idle machine, before the queries and after them.
    async fn rest(&self, desk: &mut Desk, observe: &mut Observer<'_>) -> Result<(), LabError> {
        let length = self.order.spec.idle_s;
        if !desk.meters() || length <= 0.0 {
            return Ok(());
        }
        observe(Progress::Stage("measuring the idle machine".into()));
        desk.idle(Duration::from_secs_f64(length), self.client.place() == Place::Here).await?;
        // Nothing of ours is at the server now.
        let load = desk.pump_while(self.client.load()).await?;
        let requests = load.map_or(0.0, |l| l.running.unwrap_or(0.0) + l.waiting.unwrap_or(0.0));
        if requests > 0.0 { desk.was_not_idle(requests) } else { Ok(()) }
    }

    /// Sends what is to be sent when it is due, and takes in what comes back; asks a server that `says` so how busy it is.
    async fn load(
        &self,
        desk: &mut Desk,
        began: Stamp,
        says: bool,
        observe: &mut Observer<'_>,
    ) -> Result<(), LabError> {
        let mut plan = Plan::new(self.order, &self.past.done, began)?;
        let cap = self.order.cap();
        let mut waker = Waker::new();
        let mut flights = FuturesUnordered::new();
        let asked = async |()| Some((self.ask(ASK).await, ()));
        let mut asked = std::pin::pin!(futures_util::stream::unfold((), asked));
        let mut pump = tokio::time::interval(PUMP);
        pump.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut number, mut counted, mut ended, mut filling) = (0, 0, false, false);
        let mut doubt = self.doubt.as_ref();
        // When the place of the next request became free, and whether requests had to wait for one.
        let (mut free, mut full) = (began, false);
        loop {
            let mut wait = None;
            while !ended {
                if flights.len() >= cap {
                    full = true;
                    break;
                }
                match plan.next(clock::now())? {
                    Next::Send(unit, due) => {
                        desk.held_back(full && due.is_some() && !filling);
                        let flight = self.flight(number, unit, due, free, !filling);
                        desk.take_off(number, &flight.live, flight.bytes());
                        flights.push(self.fly(flight));
                        (number, counted) = (number + 1, counted + u64::from(!filling));
                    }
                    Next::Wait(until) => {
                        (wait, full) = (Some(until), false);
                        break;
                    }
                    Next::End if self.order.spec.cooldown && !filling => {
                        filling = true;
                        plan.fill();
                    }
                    Next::End => ended = true,
                }
                // What only keeps the load up need not be begun for its own sake.
                if filling && counted == 0 {
                    break;
                }
            }
            if let Some(doubt) = doubt.take_if(|_| flights.len() > 1) {
                desk.note(&Event::Warning(doubt.clone()))?;
            }
            if (ended || filling) && counted == 0 {
                // What only kept the load up is cancelled.
                return Ok(());
            }
            tokio::select! {
                biased;
                Some(mut flight) = flights.next() => {
                    let score = flight.live.with(|e| {
                        self.score(&flight.item, e.outcome.is_ok().then_some(e.answer.as_str()))
                    });
                    let (rest, counts) = (std::mem::take(&mut flight.rest), flight.counts);
                    let Flight { number: landed, item, live, ready, .. } = flight;
                    let was_sent = live.progress().is_some();
                    let exchange = live.take();
                    free = exchange.done;
                    counted -= u64::from(counts);
                    desk.land(Landed { number: landed, item, exchange, score, counts, was_sent, ready })?;
                    if counts && !rest.is_empty() && !plan.is_over(clock::now()) {
                        // The next turn is due when the one before has been answered.
                        let due = self.order.is_open().then_some(free);
                        let flight = self.flight(number, rest, due, free, true);
                        desk.take_off(number, &flight.live, flight.bytes());
                        flights.push(self.fly(flight));
                        (number, counted) = (number + 1, counted + 1);
                    }
                }
                () = waker.wait(wait) => {}
                Some((asked, answered, load)) = asked.next(), if says => desk.hear(asked, answered, load),
                _ = pump.tick() => desk.pump(flights.len(), observe)?,
            }
            desk.pump_if_due(flights.len(), observe)?;
        }
    }

    /// Asks the server how busy it is; whether it says so.
    async fn hear(&self, desk: &mut Desk) -> Result<bool, LabError> {
        let (asked, answered, load) = desk.pump_while(self.ask(Duration::ZERO)).await?;
        desk.hear(asked, answered, load);
        Ok(load.is_some())
    }

    /// Asks the server how busy it is, when the time has come.
    async fn ask(&self, wait: Duration) -> (Stamp, Stamp, Option<Load>) {
        tokio::time::sleep(wait).await;
        let asked = clock::now();
        let load = self.client.load().await;
        (asked, clock::now(), load)
    }

    fn flight(&self, number: u64, mut unit: Unit, due: Option<Stamp>, free: Stamp, counts: bool) -> Flight {
        let item = unit.pop_front().unwrap_or_default();
        let live = due.map_or_else(Live::now, Live::due);
        Flight { number, item, rest: unit, live, ready: due.unwrap_or(free), counts }
    }

    /// Sends one request, again if the server did not take it, and gives it back when it has ended.
    async fn fly(&self, mut flight: Flight) -> Flight {
        let spec = &self.order.spec;
        let tokens = flight.item.output_tokens;
        let mut request = self.request(&flight.item.prompt, tokens.unwrap_or(spec.max_tokens));
        request.exact = tokens.is_some();
        let before = request.turns.len() - 1;
        // What the user tells the model takes the place of what the conversation does.
        let said = flight.item.history.iter().filter(|t| spec.system.is_none() || t.role != Role::System);
        request.turns.splice(before..before, said.cloned());
        if self.order.unique_prefix() {
            // Caches know how a prompt begins, so that is where it must differ.
            let first = &mut request.turns[0];
            let mark = (self.mark, self.past.sessions, flight.number);
            first.content = format!("[{}-{}-{}] {}", mark.0, mark.1, mark.2, first.content);
            if let [only] = request.turns.as_slice() {
                flight.item.prompt.clone_from(&only.content);
            }
        }
        let mut wait = BACKOFF;
        for _ in 0..spec.retries {
            match self.client.send(&request, &flight.live).await {
                Verdict::Final => return flight,
                Verdict::Again(said) => {
                    flight.live.again();
                    // Those that failed together must not come back together.
                    let spread = 0.75 + 0.5 * (flight.number % 97) as f64 / 97.0;
                    tokio::time::sleep(said.unwrap_or_else(|| wait.mul_f64(spread))).await;
                    wait = (wait * 2).min(LONGEST_BACKOFF);
                }
            }
        }
        self.client.send(&request, &flight.live).await;
        flight
    }

    async fn warm_up(&self, desk: &mut Desk) -> Result<(), LabError> {
        let large = self.model.parameters.is_some_and(|n| n > LARGE_MODEL);
        let count = self.order.spec.warmup.unwrap_or(if large { 5 } else { 3 });
        let began = clock::now();
        let tokens = WARMUP_TOKENS.min(self.order.spec.max_tokens);
        let ask = |i: u32| async move {
            // An extra request, never an item of the dataset: its answer must not be in a cache.
            let request = self.request(&format!("warm up {i} {}", self.mark), tokens);
            let live = Live::now();
            self.client.send(&request, &live).await;
            live.take().outcome
        };
        // As many at once as there will be.
        let mut asked = futures_util::stream::iter((0..count).map(ask)).buffer_unordered(self.order.cap());
        while let Some(outcome) = desk.pump_while(asked.next()).await? {
            if let Some(error) = outcome.error() {
                desk.note(&Event::with("warmup_failed", serde_json::json!({ "error": error })))?;
            }
        }
        desk.note(&Event::phase("warmup", clock::now().since(began).get()))
    }

    fn request(&self, prompt: &str, max_tokens: u32) -> Request {
        let spec = &self.order.spec;
        let turn = |role, content: &str| Turn { role, content: content.to_owned() };
        let system = spec.system.as_deref().map(|text| turn(Role::System, text));
        Request {
            model: Arc::clone(&self.name),
            turns: system.into_iter().chain([turn(Role::User, prompt)]).collect(),
            max_tokens,
            exact: false,
            temperature: spec.temperature,
            seed: spec.seed,
        }
    }

    /// A failed query is a wrong one; a question without an expected answer has no score.
    fn score(&self, item: &Item, answer: Option<&str>) -> Option<Score> {
        let (name, scorer) = self.order.scorer.as_ref()?;
        let expected = item.expected.as_deref()?;
        Some(Score { value: answer.map_or(0.0, |a| scorer.score(expected, a)), scorer: name.clone() })
    }
}
