//! One run, from asking whether the server is there to the files of its folder: health, hardware, idle baseline, warm-up, queries,
//! score, attribute, save, teardown. Resuming is the same with the finished queries left out.

mod desk;
mod lateness;
mod others;
mod plan;
mod session;
mod waker;

use crate::client::{self, Client, Limits};
use crate::dataset::{self, Census, Dataset};
use crate::folder::{Destination, Folder};
use crate::metering::Metering;
use crate::score::{self, Scorer};
use crate::server::{self, Home, Managed};
use crate::{LabError, Stop, StopCause, calibrate, summarize};
use session::Session;
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::Duration;
use wattle_core::Warning;
use wattle_core::arrival::Spread;
use wattle_core::calibration::Attribution;
use wattle_core::cost::{Weights, bytes_of};
use wattle_core::sensor::DeviceKind;
use wattle_core::spec::{Layer, MOST_IN_FLIGHT, Spec};
use wattle_core::summary::{ModelInfo, RunInfo, Summary};
use wattle_store::RunDir;

/// What to run.
#[derive(Debug, Clone)]
pub enum What {
    /// A new run.
    New {
        /// What to do.
        spec: Box<Spec>,
        /// Where its folder goes.
        destination: Destination,
    },
    /// Go on with a run that was cut off.
    Resume {
        /// Its folder.
        run: PathBuf,
        /// Settings that may change on the way: where the server is, how long to wait ([`RESUMABLE`]).
        changes: Vec<Layer>,
    },
}

/// Settings that may be other ones when a run is resumed, because they do not change what is measured.
pub const RESUMABLE: &[&str] = &[
    "url",
    "client_param",
    "server",
    "timeout_s",
    "connect_timeout_s",
    "first_token_timeout_s",
    "stall_timeout_s",
    "retries",
    "max_errors",
];

/// What is going on, for whoever shows it.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// A stage began.
    Stage(String),
    /// The queries begin.
    Start {
        /// The run's folder.
        run: PathBuf,
        /// How many queries the run has; `None` if it goes by time.
        total: Option<u64>,
        /// How many were finished before.
        done: u64,
    },
    /// How far the queries are; a few times a second.
    Load {
        /// How many are finished and saved.
        done: u64,
        /// Of how many.
        total: Option<u64>,
        /// How many of them failed.
        errors: u64,
        /// How many are in flight.
        in_flight: usize,
        /// Since the queries began.
        seconds: f64,
        /// Median and 99th percentile so far.
        ttft_s: Option<(f64, f64)>,
        /// Median and 99th percentile so far.
        itl_s: Option<(f64, f64)>,
        /// Power of the last second.
        watts: Option<f64>,
        /// Mean so far.
        joules_per_query: Option<f64>,
        /// Mean so far.
        joules_per_token: Option<f64>,
    },
}

/// Whoever watches a run.
pub type Observer<'a> = dyn FnMut(Progress) + 'a;

/// How a run ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// Its folder.
    pub run: PathBuf,
    /// What it found.
    pub summary: Summary,
    /// Why it was stopped before its end, if it was.
    pub stopped: Option<StopCause>,
}

/// Runs it. With a server of its own, this process must have no other children, and the calling thread must live as long as it does.
pub fn run(what: What, stop: &Stop, observe: &mut Observer<'_>) -> Result<Ended, LabError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| LabError::System { what: "cannot start the event loop", error })?;
    runtime.block_on(async {
        let order = Order::read(what)?;
        allow_files(order.cap() as u64);
        let mut server = Managed::plan(&order.spec)?;
        let client = client::open(&order.spec.client, &server.settings(order.client_settings()))?;
        let ended = order.carry_out(client.as_ref(), &mut server, stop, observe).await;
        server.explain(ended).await
    })
}

/// Lets this process have as many connections open as it may have requests in flight, as far as the system allows. What does
/// not fit is told by the requests that fail.
fn allow_files(connections: u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    /// Beside connections: the log, readings, sensors, tables.
    const OTHERS: u64 = 256;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(connections + OTHERS, |most| most.min(connections + OTHERS));
    if current.is_some_and(|now| now < wanted) {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    }
}

/// What is to be done, read and checked, nothing touched yet.
struct Order {
    spec: Spec,
    dataset: Box<dyn Dataset>,
    census: Census,
    scorer: Option<(String, Box<dyn Scorer>)>,
    target: Target,
}

enum Target {
    New(Destination),
    Existing {
        folder: Folder,
        info: Box<RunInfo>,
        /// What this session does otherwise, for the log.
        changes: Vec<Layer>,
    },
}

impl Order {
    fn read(what: What) -> Result<Self, LabError> {
        let (spec, target) = match what {
            What::New { spec, destination } => {
                destination.check()?;
                refuse_command(&spec, "give it to \"wattle exec\", or leave out the key command")?;
                (settled(*spec)?, Target::New(destination))
            }
            What::Resume { run, changes } => {
                let dir = RunDir::open(&run)?;
                let mut info = dir.info()?;
                info.spec.validate().map_err(|e| LabError::Usage(format!("{}: {e}", run.display())))?;
                refuse_command(&info.spec, "go on with \"wattle exec --resume\"")?;
                if info.spec.duration_s.is_some() {
                    return Err(LabError::Usage(format!(
                        "{}: a run by time has no rest to go on with; see what it has with \"wattle report\", start anew with --from",
                        run.display()
                    )));
                }
                info.spec = with_changes(&info.spec, &changes)?;
                let folder = Folder::take_up(dir)?;
                (info.spec.clone(), Target::Existing { folder, info: Box::new(info), changes })
            }
        };
        check_load(&spec).map_err(LabError::Usage)?;
        let settings = dataset::Settings {
            params: spec.dataset_param.clone(),
            count: spec.max_queries,
            seed: spec.seed,
        };
        let dataset = dataset::open(&spec.dataset, &settings)?;
        let scorer = spec.scorer.clone().unwrap_or_else(|| dataset.usual_scorer().to_owned());
        let opened = score::open(&scorer)?;
        let mut census = dataset::census(dataset.as_ref())?;
        if let Some(trace) = &spec.trace {
            // What has no time is not asked.
            let times = dataset::due_times(Path::new(trace), &spec.dataset_param)?;
            let times = times.map(|time| time.map(|_| 1)).sum::<Result<u64, LabError>>()?;
            census.items = census.items.min(times);
        }
        if census.items == 0 {
            return Err(LabError::Dataset {
                path: spec.dataset_param.get("path").unwrap_or(&spec.dataset).into(),
                line: None,
                why: "holds no question".into(),
            });
        }
        if let Target::Existing { folder, info, .. } = &target
            && info.dataset_sha256.as_ref() != Some(&census.sha256)
        {
            let (then, now) = (info.dataset_sha256.clone().unwrap_or_default(), census.sha256);
            return Err(LabError::Changed { what: "dataset", run: folder.dir.path().into(), then, now });
        }
        let scorer = census.answers.then_some((scorer, opened));
        Ok(Self { spec, dataset, census, scorer, target })
    }

    fn client_settings(&self) -> client::Settings {
        client::Settings {
            url: self.spec.url.clone(),
            model: self.spec.model.clone(),
            params: self.spec.client_param.clone(),
            limits: Limits {
                connect: Duration::from_secs_f64(self.spec.connect_timeout_s),
                first_token: self.spec.first_token_timeout_s.map(Duration::from_secs_f64),
                stall: self.spec.stall_timeout_s.map(Duration::from_secs_f64),
                total: Duration::from_secs_f64(self.spec.timeout_s),
            },
        }
    }

    /// Whether requests are sent when they are due, whatever became of those before.
    fn is_open(&self) -> bool {
        self.spec.rate.is_some() || self.spec.trace.is_some() || self.census.scheduled
    }

    /// How many requests may be in flight.
    fn cap(&self) -> usize {
        let usual = if self.is_open() { MOST_IN_FLIGHT } else { 1 };
        self.spec.concurrency.unwrap_or(usual) as usize
    }

    /// How many queries the run has; `None` if it goes by time.
    fn total(&self) -> Option<u64> {
        self.spec.duration_s.is_none().then_some(self.census.items)
    }

    fn unique_prefix(&self) -> bool {
        self.spec.unique_prefix.unwrap_or(false)
    }

    async fn carry_out(
        &self,
        client: &dyn Client,
        server: &mut Managed,
        stop: &Stop,
        observe: &mut Observer<'_>,
    ) -> Result<Ended, LabError> {
        if let Target::Existing { folder: Folder { dir, past, .. }, .. } = &self.target
            && past.done.len() == self.census.items
        {
            observe(Progress::Stage("nothing left to ask; writing the files anew".into()));
            return self.wrap_up(dir, None);
        }
        if server.is_planned() {
            observe(Progress::Stage("starting the server".into()));
            let home = match &self.target {
                Target::New(destination) => Home::Below(&destination.out),
                Target::Existing { folder, .. } => Home::Run(&folder.dir),
            };
            server.start(home, client, stop).await?;
        }
        observe(Progress::Stage("asking the client whether it is there".into()));
        let mut model = tokio::select! {
            biased;
            cause = stop.wait() => return Err(LabError::Stopped(cause)),
            ready = async {
                client.health().await?;
                let observe = RefCell::new(&mut *observe);
                client.prepare(&|what| (observe.borrow_mut())(Progress::Stage(what))).await
            } => ready?,
        };
        observe(Progress::Stage("opening sensors".into()));
        let mut metering = Metering::open(&self.spec, &client.place(), client.worker(), server.pid())?;
        self.check_unchanged(&model, &metering)?;
        tokio::select! {
            biased;
            cause = stop.wait() => return Err(LabError::Stopped(cause)),
            () = metering.qualify() => {}
        }
        if let Target::Existing { info, .. } = &self.target {
            metering.keep_panel(&info.panel);
        }
        if metering.panel.is_some() {
            client.identify(&mut model).await;
        }
        let (weights, doubt) = weights(self, &model, &mut metering, client.worker())?;
        let made;
        let Folder { dir, past, .. } = match &self.target {
            Target::Existing { folder, .. } => folder,
            Target::New(destination) => {
                made = self.make_folder(destination, &model, &metering)?;
                &made
            }
        };
        server.move_in(dir, &mut metering)?;
        let run_id = dir.info()?.run_id;
        let name = model.name.as_str().into();
        let mark = &run_id[..run_id.len().min(8)];
        let session = Session { order: self, client, model: &model, stop, past, name, mark, weights, doubt };
        let held = session.hold(dir, metering, observe).await;
        if let Some(cause) = stop.cause().filter(|_| stop.hurries()) {
            return Err(LabError::Hurried { cause, run: dir.path().into() });
        }
        // Before the files are written: how it ended is in them.
        let closed = server.close(dir).await;
        observe(Progress::Stage("writing the files".into()));
        let ended = self.wrap_up(dir, held.as_ref().ok().copied().flatten());
        // The session's own trouble comes first; the files were still written as far as that went.
        held.and(closed).and(ended)
    }

    /// A run is of one model and of one set of sensors: two sessions that differ would add up to nothing.
    fn check_unchanged(&self, model: &ModelInfo, metering: &Metering) -> Result<(), LabError> {
        let Target::Existing { folder, info, .. } = &self.target else { return Ok(()) };
        let run = folder.dir.path();
        let same = |what, then: String, now: String| {
            if then == now { Ok(()) } else { Err(LabError::changed(what, run, then, now)) }
        };
        let before = info.model.clone().unwrap_or_default();
        let digest = |m: &ModelInfo| m.sha256.clone().unwrap_or_default();
        same("model", before.name.clone(), model.name.clone())?;
        same("model's digest", digest(&before), digest(model))?;
        metering.check_unchanged(info, run)
    }

    fn make_folder(
        &self,
        destination: &Destination,
        model: &ModelInfo,
        metering: &Metering,
    ) -> Result<Folder, LabError> {
        let dataset = self.dataset.name();
        Folder::make(destination, &[&model.name, &dataset], &self.spec, metering, |info| {
            info.queries = self.census.items;
            info.dataset_name = Some(dataset.clone());
            info.dataset_sha256 = Some(self.census.sha256.clone());
            info.scorer = self.scorer.as_ref().map(|(name, _)| name.clone());
            info.model = Some(model.clone());
        })
    }

    fn wrap_up(&self, dir: &RunDir, stopped: Option<StopCause>) -> Result<Ended, LabError> {
        let summary = summarize::wrap_up(dir)?;
        Ok(Ended { run: dir.path().into(), summary, stopped })
    }
}

/// The settings of a run with those changed that may change.
fn with_changes(spec: &Spec, changes: &[Layer]) -> Result<Spec, LabError> {
    let usage = |e: &dyn std::fmt::Display| LabError::Usage(e.to_string());
    let Ok(serde_json::Value::Object(values)) = serde_json::to_value(spec) else { return Ok(spec.clone()) };
    let mut layers = vec![Layer { origin: "run.json".into(), values }];
    for layer in changes {
        if let Some(key) = layer.values.keys().find(|k| !RESUMABLE.contains(&k.as_str())) {
            let may: Vec<String> = RESUMABLE.iter().map(|k| format!("--{}", k.replace('_', "-"))).collect();
            return Err(usage(&format!(
                "a resumed run keeps its settings, and {key} is one of them; only {} may change. For other settings start a new run with --from",
                may.join(", ")
            )));
        }
        layers.push(layer.clone());
    }
    Spec::from_layers(&layers).map_err(|e| usage(&e))
}

/// By what energy is split: as an earlier session did, by a calibration, or by documented ratios, and what to say of these if there is
/// more than one request to split it among.
fn weights(
    order: &Order,
    model: &ModelInfo,
    metering: &mut Metering,
    worker: Option<DeviceKind>,
) -> Result<(Weights, Option<Warning>), LabError> {
    let board = metering.panel_devices().any(|kind| kind == DeviceKind::Gpu);
    let worker = worker.unwrap_or(if board { DeviceKind::Gpu } else { DeviceKind::Cpu });
    let bytes = model.format.as_deref().and_then(bytes_of);
    let defaults = Weights::defaults(model.parameters, bytes, worker);
    let Some(subject) = calibrate::subject(model, metering) else { return Ok((defaults, None)) };
    let before = match &order.target {
        Target::Existing { info, .. } => info.attribution.clone(),
        Target::New(_) => None,
    };
    let attribution = match before {
        Some(before) => before,
        None => calibrate::chosen(&order.spec.calibration, &subject)?
            .map_or_else(|| Attribution::defaults(&defaults), |found| found.attribution()),
    };
    let calibrated = attribution.weights();
    metering.attribution = Some(attribution);
    // What is estimated cannot be calibrated, nor can what answers one at a time.
    let estimated = metering.warnings.iter().any(|w| matches!(w, Warning::EnergyEstimated { .. }));
    let could_be = !estimated && calibrate::may_be_calibrated(&order.spec.client);
    let doubt = (calibrated.is_none() && could_be)
        .then(|| Warning::Uncalibrated { command: calibrate::command(&order.spec, &model.name) });
    Ok((calibrated.unwrap_or(defaults), doubt))
}

/// The settings as they are kept: paths from anywhere, choices made.
pub(crate) fn settled(spec: Spec) -> Result<Spec, LabError> {
    let mut spec = server::settle(absolute(replayed(spec)))?;
    // What is asked over and over would be found in a cache.
    spec.unique_prefix.get_or_insert(spec.duration_s.is_some());
    Ok(spec)
}

/// A trace alone says what is asked, too: prompts of its lengths.
fn replayed(mut spec: Spec) -> Spec {
    if spec.dataset == Spec::default().dataset
        && let Some(trace) = spec.trace.take()
    {
        spec.dataset = "trace".into();
        spec.dataset_param.insert("path".into(), trace);
    }
    spec
}

/// Refuses settings of a load that contradict each other, or that nothing would come of.
fn check_load(spec: &Spec) -> Result<(), String> {
    let open = spec.rate.is_some() || spec.trace.is_some() || spec.dataset == "trace";
    let wrong = [
        (
            spec.rate.is_some() && (spec.trace.is_some() || spec.dataset == "trace"),
            "a trace has times of its own: leave out --rate, or the trace",
        ),
        (spec.burstiness != 1.0 && spec.arrival != Spread::Gamma, "--burstiness needs --arrival gamma"),
        (spec.arrival != Spread::default() && !open, "--arrival needs --rate"),
        (spec.ramp_to.is_some() && spec.rate.is_none(), "--ramp-to needs the --rate it begins with"),
        (spec.ramp_to.is_some() != (spec.ramp_s > 0.0), "--ramp-to and --ramp-s need each other"),
    ];
    wrong.iter().find(|(is, _)| *is).map_or(Ok(()), |(_, why)| Err((*why).to_owned()))
}

/// A spec of a command is none of ours.
fn refuse_command(spec: &Spec, fix: &str) -> Result<(), LabError> {
    match spec.command.is_empty() {
        true => Ok(()),
        false => Err(LabError::Usage(format!("these are the settings of a command; {fix}"))),
    }
}

/// Paths as seen from anywhere, so that a run can be resumed from another folder.
pub(crate) fn absolute(mut spec: Spec) -> Spec {
    let fix = |value: &mut String| {
        if Path::new(value.as_str()).exists()
            && let Ok(path) = std::path::absolute(&*value)
        {
            *value = path.display().to_string();
        }
    };
    [spec.trace.as_mut(), spec.model.as_mut().filter(|m| m.ends_with(".gguf"))]
        .into_iter()
        .flatten()
        .for_each(fix);
    for (params, keys) in [
        (&mut spec.dataset_param, &["path", "tokenizer"][..]),
        (&mut spec.client_param, &["key_file", "tokenizer"]),
        (&mut spec.source_param, &["replay.scenario", "replay.run", "nvml.library"]),
    ] {
        params.iter_mut().filter(|(key, _)| keys.contains(&key.as_str())).for_each(|(_, value)| fix(value));
    }
    spec
}
