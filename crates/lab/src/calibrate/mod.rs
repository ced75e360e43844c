//! What work costs one model on one engine and device, measured: loads of known work in random order, and a fit of what they drew.
//!
//! Every load goes through the client and the sensors of a run, and its work is counted by the splitter that bills requests, so that
//! a calibration and a run mean the same by an iteration. docs/method.md#calibration

mod ladder;
mod pilot;
mod scales;
mod stored;

pub use stored::{Shelf, find, folder, list, read};
pub(crate) use stored::{chosen, command, subject};

use crate::client::{self, Client, Limits, Live, Verdict};
use crate::folder::unique_id;
use crate::metering::Metering;
use crate::server::{Home, Managed};
use crate::{LabError, Stop, run};
use futures_util::future::join_all;
use ladder::{Plan, Rung, Words};
use scales::Scales;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use wattle_core::calibration::{CALIBRATION_VERSION, Calibration, Cell, Effort, fit};
use wattle_core::exchange::{Request, Role, Turn};
use wattle_core::spec::{Energy, Spec};
use wattle_core::{Exchange, Warning, Watts};
use wattle_meter::clock;

/// How often a server is asked whether it works for others before that is believed.
const LOOKS: u32 = 3;
const PAUSE: Duration = Duration::from_millis(500);
/// A load that could not be measured is tried so often in all, and so many may fail in a row.
const TRIES: u32 = 4;
const IN_A_ROW: u32 = 5;
/// How long to wait before the next one, if nobody says; longer each time.
const WAIT: Duration = Duration::from_secs(1);
/// As long as a server may say.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// Sensors whose period is not known are looked at for so many seconds while the server works.
const LOOK_S: f64 = 3.0;
/// The client that answers one at a time, whatever is asked of it.
const ONE_AT_A_TIME: &str = "embedded";

/// Whether a client answers several requests at once, so that there is something to tell apart.
pub(crate) fn may_be_calibrated(client: &str) -> bool {
    client != ONE_AT_A_TIME
}

/// What to calibrate, and how.
#[derive(Debug, Clone)]
pub struct Asked {
    /// The client, its server, the sensors and the seed; what it says of questions and load is of no matter here.
    pub spec: Spec,
    /// How thoroughly.
    pub level: Effort,
    /// As many requests at once, at most; by default 32, and 64 if it is to be thorough.
    pub max_concurrency: Option<u32>,
    /// File, or folder, instead of the usual one.
    pub out: Option<PathBuf>,
}

/// What is going on, for whoever shows it.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// A stage began.
    Stage(String),
    /// It is known what will be done.
    Plan {
        /// How many loads.
        loads: u64,
        /// How long they will take, about.
        seconds: f64,
    },
    /// So many loads are done.
    Load {
        /// How many.
        done: u64,
    },
    /// A load could not be measured, and will be once more.
    Again {
        /// Why.
        why: String,
    },
}

/// Whoever watches a calibration.
pub type Watcher<'a> = dyn FnMut(Step) + 'a;

/// What came of it.
#[derive(Debug, Clone)]
pub struct Calibrated {
    /// The result.
    pub calibration: Calibration,
    /// Where it is.
    pub path: PathBuf,
    /// What runs of the same find by themselves: this one, another one that is better, or none if this one is not where they look.
    pub found: Option<PathBuf>,
}

/// Calibrates. With a server of its own, this process must have no other children, and the calling thread must live as long as it does.
pub fn calibrate(asked: Asked, stop: &Stop, watch: &mut Watcher<'_>) -> Result<Calibrated, LabError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| LabError::System { what: "cannot start the event loop", error })?;
    runtime.block_on(async {
        if asked.spec.energy == Energy::None {
            return Err(LabError::Usage(
                "without energy there is nothing to calibrate; leave out --energy none".into(),
            ));
        }
        if asked.max_concurrency.is_some_and(|most| most < 2) {
            return Err(LabError::Usage(
                "with one request at a time there is nothing to split, and what a token costs cannot be told from an iteration; let --max-concurrency be 2 at least".into(),
            ));
        }
        let mut spec = run::settled(asked.spec.clone())?;
        if !may_be_calibrated(&spec.client) {
            return Err(LabError::Usage(format!(
                "the client {} answers one at a time, so there is nothing to split and nothing to calibrate",
                spec.client
            )));
        }
        // An estimate is made by a formula of its own: fitting ours to it would tell nothing.
        spec.energy = Energy::Measured;
        stored::check(asked.out.as_deref())?;
        let mut server = Managed::plan(&spec)?;
        let client = client::open(&spec.client, &server.settings(settings(&spec)))?;
        let work = Work { asked: &asked, spec: &spec, client: client.as_ref(), stop, began: clock::now() };
        let done = work.carry_out(&mut server, watch).await;
        server.explain(done).await
    })
}

fn settings(spec: &Spec) -> client::Settings {
    client::Settings {
        url: spec.url.clone(),
        model: spec.model.clone(),
        params: spec.client_param.clone(),
        limits: Limits {
            connect: Duration::from_secs_f64(spec.connect_timeout_s),
            first_token: spec.first_token_timeout_s.map(Duration::from_secs_f64),
            stall: spec.stall_timeout_s.map(Duration::from_secs_f64),
            total: Duration::from_secs_f64(spec.timeout_s),
        },
    }
}

/// One calibration under way.
struct Work<'a> {
    asked: &'a Asked,
    spec: &'a Spec,
    client: &'a dyn Client,
    stop: &'a Stop,
    began: wattle_core::Stamp,
}

/// What came of a load.
enum Load {
    Weighed(Cell),
    /// It is of no use, and may be the next time: why, what to do if it is not, and how long to wait.
    Aside(Trouble, Option<Duration>),
}

/// What keeps a load from being measured, and the way out.
struct Trouble {
    why: String,
    way_out: &'static str,
}

/// One request that has ended.
struct Answered {
    /// Length of its prompt.
    bytes: u64,
    exchange: Exchange,
    verdict: Verdict,
}

/// Who is asked, and by what prompts.
struct Asking<'a> {
    client: &'a dyn Client,
    model: Arc<str>,
    words: RefCell<Words>,
    temperature: f64,
    seed: u64,
}

impl Work<'_> {
    async fn carry_out(&self, server: &mut Managed, watch: &mut Watcher<'_>) -> Result<Calibrated, LabError> {
        tokio::select! {
            biased;
            cause = self.stop.wait() => Err(LabError::Stopped(cause)),
            done = self.work(server, watch) => done,
        }
    }

    async fn work(&self, server: &mut Managed, watch: &mut Watcher<'_>) -> Result<Calibrated, LabError> {
        if server.is_planned() {
            watch(Step::Stage("starting the server".into()));
            server.start(Home::Below(&std::env::temp_dir()), self.client, self.stop).await?;
        }
        watch(Step::Stage("asking the client whether it is there".into()));
        self.client.health().await?;
        let model = {
            let watch = RefCell::new(&mut *watch);
            let mut model = self.client.prepare(&|what| (watch.borrow_mut())(Step::Stage(what))).await?;
            self.client.identify(&mut model).await;
            model
        };
        watch(Step::Stage("opening sensors".into()));
        let opened = Metering::open(self.spec, &self.client.place(), self.client.worker(), server.pid());
        let mut metering = opened.map_err(|error| match error {
            LabError::NotMeasurable { why } => LabError::NotCalibratable { why },
            other => other,
        })?;
        metering.qualify().await;
        let mut warnings: Vec<String> = metering.warnings.iter().map(Warning::to_string).collect();
        let nothing = || LabError::NotCalibratable { why: "no sensor measures energy".into() };
        let subject = subject(&model, &metering).ok_or_else(nothing)?;
        let mut scales = Scales::open(metering).ok_or_else(nothing)?;
        let asking = Asking {
            client: self.client,
            model: model.name.as_str().into(),
            words: RefCell::new(Words::new(self.spec.seed, unique_id())),
            temperature: self.spec.temperature,
            seed: self.spec.seed,
        };
        self.check_alone().await?;
        let plan = self.plan(&asking, &mut scales, &mut warnings, watch).await?;
        let (cells, idle) = self.climb(&plan, &asking, &mut scales, watch).await?;
        let _ = self.client.close().await;
        let error = Watts(idle.bound().get() / 1.96);
        let fit = fit(&cells, idle.value(), error)?;
        warnings.extend(scales.doubts().iter().map(Warning::to_string));
        let calibration = Calibration {
            calibration_version: CALIBRATION_VERSION,
            digest: stored::digest(&subject),
            subject,
            created: clock::wall().to_string(),
            version: env!("CARGO_PKG_VERSION").into(),
            level: self.asked.level,
            seed: self.spec.seed,
            duration_s: clock::now().since(self.began).get(),
            joules: fit.joules,
            bound: fit.bound(),
            covariance: fit.covariance,
            gain: scales.gain(),
            seconds: fit.seconds,
            idle_w: idle,
            quality: fit.quality,
            warnings,
            cells,
        };
        let path = stored::save(&calibration, self.asked.out.as_deref())?;
        let found = stored::found(&calibration.subject).map(|(path, _)| path);
        Ok(Calibrated { calibration, path, found })
    }

    /// Requests that the server has although none of ours is on its way.
    async fn others(&self) -> f64 {
        let mut others = 0.0;
        for look in 0..LOOKS {
            if look > 0 {
                // What it says may be old.
                tokio::time::sleep(PAUSE).await;
            }
            let load = self.client.load().await.unwrap_or_default();
            others = load.running.unwrap_or(0.0) + load.waiting.unwrap_or(0.0);
            if others == 0.0 {
                break;
            }
        }
        others
    }

    /// Refuses a server that says it works for somebody else: what it draws for them would be charged to our loads.
    async fn check_alone(&self) -> Result<(), LabError> {
        match self.others().await {
            0.0 => Ok(()),
            others => Err(works_for(others).into()),
        }
    }

    /// Warms up, sees how fast the server is and how much it takes, and decides what will be measured.
    async fn plan(
        &self,
        asking: &Asking<'_>,
        scales: &mut Scales,
        warnings: &mut Vec<String>,
        watch: &mut Watcher<'_>,
    ) -> Result<Plan, LabError> {
        watch(Step::Stage("warming up".into()));
        let most = self.asked.max_concurrency.unwrap_or(match self.asked.level {
            Effort::Thorough => 64,
            Effort::Quick | Effort::Default => 32,
        });
        let seen = scales.pump_while(pilot::look(asking)).await??;
        warnings.extend(seen.doubt());
        scales.pump_while(pilot::check_at_once(asking, most, &seen)).await??;
        // A gauge that stood still while nothing was done moves while something is.
        let began = clock::now();
        while !scales.knows_period() && clock::now().since(began).get() < LOOK_S {
            scales.pump_while(pilot::keep_busy(asking)).await??;
        }
        scales.settle();
        let length = scales.shortest_load().max(ladder::usual_length(self.asked.level));
        let pace = scales.pump_while(pilot::fly(asking, &seen, self.asked.level, length)).await??;
        scales.pump_while(self.client.connect(most)).await?;
        let plan = Plan::new(self.asked.level, most, length, &pace, self.spec.seed);
        let seconds = plan.seconds(&pace, 2.0 * scales.pad() + scales.period())
            + 2.0 * scales.rest_length(self.spec.idle_s);
        watch(Step::Plan { loads: plan.order.len() as u64, seconds });
        Ok(plan)
    }

    /// Measures every load, and the idle machine before and after. A load that others disturbed or that the server did not take is
    /// measured later.
    async fn climb(
        &self,
        plan: &Plan,
        asking: &Asking<'_>,
        scales: &mut Scales,
        watch: &mut Watcher<'_>,
    ) -> Result<(Vec<Cell>, wattle_core::Estimate<Watts>), LabError> {
        scales.idle(self.spec.idle_s).await?;
        let mut cells = Vec::with_capacity(plan.order.len());
        watch(Step::Load { done: 0 });
        let mut ahead: VecDeque<(usize, u32)> = plan.order.iter().map(|number| (*number, 1)).collect();
        let mut in_a_row = 0;
        while let Some((number, tries)) = ahead.pop_front() {
            match self.weigh(number as u32, plan.rungs[number], plan.length, asking, scales).await? {
                Load::Weighed(cell) => {
                    in_a_row = 0;
                    cells.push(cell);
                    watch(Step::Load { done: cells.len() as u64 });
                }
                Load::Aside(trouble, wait) => {
                    in_a_row += 1;
                    if tries >= TRIES || in_a_row >= IN_A_ROW {
                        return Err(trouble.into());
                    }
                    let wait = wait.unwrap_or(WAIT * in_a_row).min(LONGEST_WAIT);
                    watch(Step::Again { why: trouble.why });
                    scales.pump_while(tokio::time::sleep(wait)).await?;
                    ahead.push_back((number, tries + 1));
                }
            }
        }
        scales.idle(self.spec.idle_s).await?;
        Ok((cells, scales.idle_power()?))
    }

    /// Measures one load: the same over and over, until it has lasted long enough for the sensors. In the rest before and after it
    /// the server is asked for whom it works.
    async fn weigh(
        &self,
        number: u32,
        rung: Rung,
        length: f64,
        asking: &Asking<'_>,
        scales: &mut Scales,
    ) -> Result<Load, LabError> {
        let window = scales.begin().await?;
        let others = scales.pump_while(self.others()).await?;
        if others > 0.0 {
            return Ok(Load::Aside(works_for(others), None));
        }
        let began = clock::now();
        let mut landed: Vec<(u64, Exchange)> = Vec::new();
        while clock::now().since(began).get() < length {
            let round = join_all((0..rung.batch).map(|_| asking.ask(rung.prompt, rung.tokens)));
            for answered in scales.pump_while(round).await? {
                if let Some(error) = answered.exchange.outcome.error() {
                    let why = format!(
                        "a request of the {} ladder failed ({} at once, {} prompt tokens): {error}",
                        rung.ladder.name(),
                        rung.batch,
                        rung.prompt
                    );
                    let way_out = "see what the server says, or lower --max-concurrency";
                    let trouble = Trouble { why, way_out };
                    return match answered.verdict {
                        Verdict::Again(wait) => Ok(Load::Aside(trouble, wait)),
                        Verdict::Final => Err(trouble.into()),
                    };
                }
                landed.push((answered.bytes, answered.exchange));
            }
        }
        let others = scales.pump_while(self.others()).await?;
        if others > 0.0 {
            return Ok(Load::Aside(works_for(others), None));
        }
        let weighed = scales.end(window, &landed).await?;
        Ok(Load::Weighed(Cell {
            ladder: rung.ladder,
            rung: number,
            batch: rung.batch,
            requests: landed.len() as u64,
            work: weighed.work,
            busy_s: weighed.busy_s,
            window_s: weighed.window_s,
            energy_j: weighed.energy_j,
            error_j: weighed.error_j,
        }))
    }
}

fn works_for(others: f64) -> Trouble {
    let why = format!(
        "the server works for somebody else ({others} requests), whose energy could not be told from ours"
    );
    Trouble { why, way_out: "wait until they have ended, or keep them away, and calibrate again" }
}

impl From<Trouble> for LabError {
    fn from(Trouble { why, way_out }: Trouble) -> Self {
        LabError::Calibrate(format!("{why}; {way_out}"))
    }
}

impl Asking<'_> {
    /// Sends a prompt of about so many tokens and wants so many, no fewer.
    async fn ask(&self, prompt: u32, tokens: u32) -> Answered {
        let content = self.words.borrow_mut().prompt(prompt);
        let bytes = content.len() as u64;
        let request = Request {
            model: Arc::clone(&self.model),
            turns: vec![Turn { role: Role::User, content }],
            max_tokens: tokens,
            exact: tokens > 1,
            temperature: self.temperature,
            seed: self.seed,
        };
        let live = Live::now();
        let verdict = self.client.send(&request, &live).await;
        Answered { bytes, exchange: live.take(), verdict }
    }
}
