//! One run, from asking whether the server is there to the files of its folder: health, hardware, idle baseline, warm-up, queries,
//! score, attribute, save, teardown. Resuming is the same with the finished queries left out.

mod desk;
mod session;

use crate::client::{self, Client};
use crate::dataset::{self, Census, Dataset};
use crate::metering::Metering;
use crate::score::{self, Scorer};
use crate::{LabError, Stop, StopCause, summarize};
use session::Session;
use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};
use std::time::Duration;
use wattle_core::event::Event;
use wattle_core::seen::Seen;
use wattle_core::sensor::Sensor;
use wattle_core::spec::{Layer, Spec};
use wattle_core::summary::{ModelInfo, RunInfo, SCHEMA_VERSION, Summary, hardware_label, slug};
use wattle_meter::clock;
use wattle_store::{Lock, RunDir};

/// What to run.
#[derive(Debug, Clone)]
pub enum What {
    /// A new run.
    New {
        /// What to do.
        spec: Box<Spec>,
        /// The folder in which the run's folder is made.
        out: PathBuf,
        /// The folder's name; by default made from hardware, model, dataset and a unique id.
        name: Option<String>,
        /// Whether a run of that name may be replaced.
        overwrite: bool,
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
pub const RESUMABLE: &[&str] = &["url", "client_param", "timeout_s", "max_errors"];

/// What is going on, for whoever shows it.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// A stage began.
    Stage(&'static str),
    /// The queries begin.
    Start {
        /// The run's folder.
        run: PathBuf,
        /// How many queries the run has.
        total: u64,
        /// How many were finished before.
        done: u64,
    },
    /// Another query is finished and saved.
    Query {
        /// How many are finished.
        done: u64,
        /// Of how many.
        total: u64,
        /// How many of them failed.
        errors: u64,
        /// Mean joules per query so far.
        joules_per_query: Option<f64>,
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

/// Runs it.
pub fn run(what: What, stop: &Stop, observe: &mut Observer<'_>) -> Result<Ended, LabError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| LabError::System { what: "cannot start the event loop", error })?;
    runtime.block_on(async {
        let order = Order::read(what)?;
        let client = client::open(&order.spec.client, &order.client_settings())?;
        order.carry_out(client.as_ref(), stop, observe).await
    })
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
    New {
        out: PathBuf,
        name: Option<String>,
        overwrite: bool,
    },
    Existing {
        folder: Folder,
        info: Box<RunInfo>,
        /// What this session does otherwise, for the log.
        changes: Vec<Layer>,
    },
}

/// A run folder that is ours for now.
struct Folder {
    dir: RunDir,
    past: Past,
    /// Taken before the log is read: whatever another process had to add is in it.
    _lock: Lock,
}

/// What earlier sessions did.
#[derive(Default)]
struct Past {
    sessions: u32,
    /// Finished queries.
    done: Seen,
}

impl Order {
    fn read(what: What) -> Result<Self, LabError> {
        let (spec, target) = match what {
            What::New { spec, out, name, overwrite } => {
                check_name(name.as_deref())?;
                (absolute(*spec), Target::New { out, name, overwrite })
            }
            What::Resume { run, changes } => {
                let dir = RunDir::open(&run)?;
                let mut info = dir.info()?;
                info.spec.validate().map_err(|e| LabError::Usage(format!("{}: {e}", run.display())))?;
                info.spec = with_changes(&info.spec, &changes)?;
                let lock = dir.lock()?;
                let past = Past::read(&dir)?;
                (
                    info.spec.clone(),
                    Target::Existing {
                        folder: Folder { dir, past, _lock: lock },
                        info: Box::new(info),
                        changes,
                    },
                )
            }
        };
        let settings = dataset::Settings {
            params: spec.dataset_param.clone(),
            count: spec.max_queries,
            seed: spec.seed,
        };
        let dataset = dataset::open(&spec.dataset, &settings)?;
        let scorer = spec.scorer.clone().unwrap_or_else(|| dataset.usual_scorer().to_owned());
        let opened = score::open(&scorer)?;
        let census = dataset::census(dataset.as_ref())?;
        if census.items == 0 {
            return Err(LabError::Dataset {
                path: spec.dataset_param.get("path").unwrap_or(&spec.dataset).into(),
                line: None,
                why: "holds no question".into(),
            });
        }
        if let Target::Existing { folder, info, .. } = &target
            && info.dataset_sha256 != census.sha256
        {
            let (then, now) = (info.dataset_sha256.clone(), census.sha256);
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
            timeout: Duration::from_secs_f64(self.spec.timeout_s),
        }
    }

    async fn carry_out(
        &self,
        client: &dyn Client,
        stop: &Stop,
        observe: &mut Observer<'_>,
    ) -> Result<Ended, LabError> {
        if let Target::Existing { folder: Folder { dir, past, .. }, .. } = &self.target
            && past.done.len() == self.census.items
        {
            observe(Progress::Stage("nothing left to ask; writing the files anew"));
            return self.wrap_up(dir, None);
        }
        observe(Progress::Stage("asking the client whether it is there"));
        let model = tokio::select! {
            biased;
            cause = stop.wait() => return Err(LabError::Stopped(cause)),
            ready = async {
                client.health().await?;
                client.prepare().await
            } => ready?,
        };
        observe(Progress::Stage("opening sensors"));
        let mut metering = Metering::open(&self.spec, &client.place(), client.worker())?;
        self.check_unchanged(&model, &metering)?;
        tokio::select! {
            biased;
            cause = stop.wait() => return Err(LabError::Stopped(cause)),
            () = metering.qualify() => {}
        }
        if let Target::Existing { info, .. } = &self.target {
            metering.keep_panel(&info.panel);
        }
        let made;
        let Folder { dir, past, .. } = match &self.target {
            Target::Existing { folder, .. } => folder,
            Target::New { out, name, overwrite } => {
                made = self.make_folder(out, name.as_deref(), *overwrite, &model, &metering)?;
                &made
            }
        };
        let session = Session { order: self, client, model: &model, stop, past };
        let held = session.hold(dir, metering, observe).await;
        observe(Progress::Stage("writing the files"));
        let ended = self.wrap_up(dir, held.as_ref().ok().copied().flatten());
        // The session's own trouble comes first; the files were still written as far as that went.
        held.and(ended)
    }

    /// A run is of one model and of one set of sensors: two sessions that differ would add up to nothing.
    fn check_unchanged(&self, model: &ModelInfo, metering: &Metering) -> Result<(), LabError> {
        let Target::Existing { folder, info, .. } = &self.target else { return Ok(()) };
        let changed = |what, then: String, now: String| {
            if then == now {
                return Ok(());
            }
            let named = |text: String| if text.is_empty() { "none".to_owned() } else { text };
            let (then, now) = (named(then), named(now));
            Err(LabError::Changed { what, run: folder.dir.path().into(), then, now })
        };
        let digest = |m: &ModelInfo| m.sha256.clone().unwrap_or_default();
        let names =
            |sensors: &[Sensor]| sensors.iter().map(|s| s.name.as_str()).collect::<Vec<_>>().join(", ");
        changed("model", info.model.name.clone(), model.name.clone())?;
        changed("model's digest", digest(&info.model), digest(model))?;
        changed("set of sensors", names(&info.sensors), names(metering.sensors()))
    }

    fn make_folder(
        &self,
        out: &Path,
        name: Option<&str>,
        overwrite: bool,
        model: &ModelInfo,
        metering: &Metering,
    ) -> Result<Folder, LabError> {
        let root = self.spec.root.as_deref().unwrap_or("/");
        let host = wattle_meter::host(Path::new(root));
        let label = hardware_label(&host, metering.sensors());
        let run_id = unique_id();
        let name = name.map(str::to_owned).unwrap_or_else(|| {
            let (model, dataset) = (slug(&model.name, 40), slug(&self.dataset.name(), 40));
            format!("{label}_{model}_{dataset}_{}", &run_id[..8])
        });
        if overwrite && out.join(&name).exists() {
            RunDir::open(out.join(&name))?.remove()?;
        }
        let dir = RunDir::create(out, &name)?;
        let info = RunInfo {
            schema_version: SCHEMA_VERSION,
            run_id,
            created: clock::wall().to_string(),
            version: env!("CARGO_PKG_VERSION").into(),
            spec: self.spec.clone(),
            queries: self.census.items,
            dataset_name: self.dataset.name(),
            dataset_sha256: self.census.sha256.clone(),
            scorer: self.scorer.as_ref().map(|(name, _)| name.clone()),
            host,
            hardware_label: label,
            model: model.clone(),
            sources: metering.tried.clone(),
            sensors: metering.sensors().to_vec(),
            qualification: metering.qualified.clone(),
            panel: metering.panel_names(),
            perimeter: metering.panel.as_ref().map(|p| p.perimeter),
        };
        if let Err(error) = dir.write_info(&info) {
            // A folder without `run.json` is no run; leave none behind.
            let _ = std::fs::remove_dir_all(dir.path());
            return Err(error.into());
        }
        Ok(Folder { past: Past::default(), _lock: dir.lock()?, dir })
    }

    fn wrap_up(&self, dir: &RunDir, stopped: Option<StopCause>) -> Result<Ended, LabError> {
        dir.finish()?;
        let summary = summarize(dir, clock::wall())?;
        dir.write_summary(&summary)?;
        Ok(Ended { run: dir.path().into(), summary, stopped })
    }
}

impl Past {
    fn read(dir: &RunDir) -> Result<Self, LabError> {
        let mut past = Past::default();
        dir.replay(|line| match line.event {
            Event::Session { session, .. } => past.sessions = past.sessions.max(session + 1),
            Event::Record(record) => {
                past.done.insert(record.item.index);
            }
            _ => {}
        })?;
        Ok(past)
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

/// Paths as seen from anywhere, so that a run can be resumed from another folder.
fn absolute(mut spec: Spec) -> Spec {
    let fix = |value: &mut String| {
        if Path::new(value.as_str()).exists()
            && let Ok(path) = std::path::absolute(&*value)
        {
            *value = path.display().to_string();
        }
    };
    let paths = [
        spec.dataset_param.get_mut("path"),
        spec.client_param.get_mut("key_file"),
        spec.model.as_mut().filter(|m| m.ends_with(".gguf")),
    ];
    paths.into_iter().flatten().for_each(fix);
    ["replay.scenario", "nvml.library"].iter().filter_map(|k| spec.source_param.get_mut(*k).map(fix)).count();
    spec
}

/// A folder's name is one name, not a way out of the folder it is made in.
fn check_name(name: Option<&str>) -> Result<(), LabError> {
    match name {
        Some(name) if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\']) => {
            Err(LabError::Usage(format!(
                "--name \"{name}\" is not the name of a folder; leave out slashes and leading dots"
            )))
        }
        _ => Ok(()),
    }
}

/// Sixteen hexadecimal digits that no other run has.
fn unique_id() -> String {
    // The standard library seeds this from the system's random numbers; the time makes a repeat harmless.
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u64(clock::wall().0);
    hasher.write_u32(std::process::id());
    format!("{:016x}", hasher.finish())
}
