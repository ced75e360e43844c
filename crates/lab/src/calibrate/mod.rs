//! What work costs one model on one engine and device, measured: loads of known work in random order, and a fit of what they drew.
//!
//! Every load goes through the client and the sensors of a run, and its work is counted by the splitter that bills requests, so that
//! a calibration and a run mean the same by an iteration. docs/method.md#calibration

mod ladder;
mod pilot;
mod scales;
mod stored;

pub(crate) use stored::{chosen, command, subject};
pub use stored::{find, folder, list, read};

use crate::client::{self, Client, Limits, Live};
use crate::folder::unique_id;
use crate::metering::Metering;
use crate::server::{Home, Managed};
use crate::{LabError, Stop, run};
use futures_util::future::join_all;
use ladder::{Plan, Rung, Words};
use scales::Scales;
use std::cell::RefCell;
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
    /// What to know about it.
    pub warnings: Vec<Warning>,
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
        let mut spec = run::settled(asked.spec.clone())?;
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
        let warnings = metering.warnings.clone();
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
        let plan = self.plan(&asking, &mut scales, watch).await?;
        let (cells, idle) = self.climb(&plan, &asking, &mut scales, watch).await?;
        let _ = self.client.close().await;
        let error = Watts(idle.bound().get() / 1.96);
        let fit = fit(&cells, idle.value(), error)?;
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
            cells,
        };
        let path = stored::save(&calibration, self.asked.out.as_deref())?;
        Ok(Calibrated { calibration, path, warnings })
    }

    /// Refuses a server that says it works for somebody else: what it draws for them would be charged to our loads.
    async fn check_alone(&self) -> Result<(), LabError> {
        let mut others = 0.0;
        for _ in 0..LOOKS {
            let load = self.client.load().await.unwrap_or_default();
            others = load.running.unwrap_or(0.0) + load.waiting.unwrap_or(0.0);
            if others == 0.0 {
                return Ok(());
            }
            // What it says may be old.
            tokio::time::sleep(PAUSE).await;
        }
        Err(LabError::Calibrate(format!(
            "the server works for somebody else ({others} requests), whose energy could not be told from ours; wait until they have ended, or keep them away, and calibrate again"
        )))
    }

    /// Warms up, sees how fast the server is and how much it takes, and decides what will be measured.
    async fn plan(
        &self,
        asking: &Asking<'_>,
        scales: &mut Scales,
        watch: &mut Watcher<'_>,
    ) -> Result<Plan, LabError> {
        watch(Step::Stage("warming up".into()));
        let most = self.asked.max_concurrency.unwrap_or(match self.asked.level {
            Effort::Thorough => 64,
            Effort::Quick | Effort::Default => 32,
        });
        let length = scales.shortest_load().max(ladder::usual_length(self.asked.level));
        let pace = scales.pump_while(pilot::fly(asking, self.asked.level, length)).await??;
        scales.pump_while(self.client.connect(most)).await?;
        let plan = Plan::new(self.asked.level, most, length, &pace, self.spec.seed);
        let seconds = plan.seconds(&pace, 2.0 * scales.pad() + scales.period())
            + 2.0 * scales.rest_length(self.spec.idle_s);
        watch(Step::Plan { loads: plan.order.len() as u64, seconds });
        Ok(plan)
    }

    /// Measures every load, and the idle machine before and after.
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
        for number in &plan.order {
            let rung = plan.rungs[*number];
            cells.push(self.weigh(*number as u32, rung, plan.length, asking, scales).await?);
            watch(Step::Load { done: cells.len() as u64 });
        }
        scales.idle(self.spec.idle_s).await?;
        Ok((cells, scales.idle_power()?))
    }

    /// Measures one load: the same over and over, until it has lasted long enough for the sensors.
    async fn weigh(
        &self,
        number: u32,
        rung: Rung,
        length: f64,
        asking: &Asking<'_>,
        scales: &mut Scales,
    ) -> Result<Cell, LabError> {
        let window = scales.begin().await?;
        let began = clock::now();
        let mut landed: Vec<(u64, Exchange)> = Vec::new();
        while clock::now().since(began).get() < length {
            let round = join_all((0..rung.batch).map(|_| asking.ask(rung.prompt, rung.tokens)));
            for (bytes, exchange) in scales.pump_while(round).await? {
                if let Some(error) = exchange.outcome.error() {
                    return Err(LabError::Calibrate(format!(
                        "a request of the {} ladder failed ({} at once, {} prompt tokens): {error}; see what the server says, or lower --max-concurrency",
                        rung.ladder.name(),
                        rung.batch,
                        rung.prompt
                    )));
                }
                landed.push((bytes, exchange));
            }
        }
        let weighed = scales.end(window, &landed).await?;
        Ok(Cell {
            ladder: rung.ladder,
            rung: number,
            batch: rung.batch,
            requests: landed.len() as u64,
            work: weighed.work,
            busy_s: weighed.busy_s,
            window_s: weighed.window_s,
            energy_j: weighed.energy_j,
            error_j: weighed.error_j,
        })
    }
}

impl Asking<'_> {
    /// Sends a prompt of about so many tokens and wants so many, no fewer; gives back the length of the prompt in bytes.
    async fn ask(&self, prompt: u32, tokens: u32) -> (u64, Exchange) {
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
        self.client.send(&request, &live).await;
        (bytes, live.take())
    }
}
