//! The folder of a run while it is ours: made anew or taken up again, and what earlier sessions did in it.

use crate::LabError;
use crate::metering::Metering;
use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};
use wattle_core::Stamp;
use wattle_core::event::Event;
use wattle_core::seen::Seen;
use wattle_core::spec::Spec;
use wattle_core::summary::{RunInfo, SCHEMA_VERSION, hardware_label, slug};
use wattle_meter::{child, clock};
use wattle_store::{Lock, RunDir, StoreError};

/// Where a new run goes.
#[derive(Debug, Clone)]
pub struct Destination {
    /// The folder in which the run's folder is made.
    pub out: PathBuf,
    /// The folder's name; by default made from the hardware, what is run, and a unique id.
    pub name: Option<String>,
    /// Whether a run of that name may be replaced.
    pub overwrite: bool,
}

impl Destination {
    /// A folder's name is one name, not a way out of the folder it is made in; and it is free, which is better known before a model is
    /// loaded than after.
    pub(crate) fn check(&self) -> Result<(), LabError> {
        self.check_name()?;
        match &self.name {
            Some(name) if !self.overwrite && self.out.join(name).exists() => {
                Err(StoreError::Exists { path: self.out.join(name) }.into())
            }
            _ => Ok(()),
        }
    }

    /// Only that it is a name.
    pub(crate) fn check_name(&self) -> Result<(), LabError> {
        match &self.name {
            Some(name) if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\']) => {
                Err(LabError::Usage(format!(
                    "--name \"{name}\" is not the name of a folder; leave out slashes and leading dots"
                )))
            }
            _ => Ok(()),
        }
    }
}

/// A run folder that is ours for now.
pub(crate) struct Folder {
    pub(crate) dir: RunDir,
    pub(crate) past: Past,
    /// Taken before the log is read: whatever another process had to add is in it.
    _lock: Lock,
}

/// What earlier sessions did.
#[derive(Default)]
pub(crate) struct Past {
    pub(crate) sessions: u32,
    /// Finished queries, or runs of the command.
    pub(crate) done: Seen,
    /// Exit code of the first run of the command that failed.
    pub(crate) code: i32,
    /// A run of the command of which no end is told: its process, and when it was started.
    unended: Option<(u32, Stamp)>,
}

impl Past {
    /// The process of a command that was started and never seen to end, if it still runs.
    pub(crate) fn running(&self) -> Option<u32> {
        self.unended.filter(|(pid, start)| child::runs_since(*pid, *start)).map(|(pid, _)| pid)
    }
}

impl Folder {
    /// Makes one for a run of `spec`, called after `parts` unless it has a name; `fill` adds what only the caller knows.
    pub(crate) fn make(
        destination: &Destination,
        parts: &[&str],
        spec: &Spec,
        metering: &Metering,
        fill: impl FnOnce(&mut RunInfo),
    ) -> Result<Self, LabError> {
        let host = wattle_meter::host(Path::new(spec.root.as_deref().unwrap_or("/")));
        let label = hardware_label(&host, metering.sensors());
        let run_id = unique_id();
        let name = destination.name.clone().unwrap_or_else(|| {
            let parts = parts.iter().map(|part| slug(part, 40)).collect::<Vec<_>>().join("_");
            format!("{label}_{parts}_{}", &run_id[..8])
        });
        if destination.overwrite && destination.out.join(&name).exists() {
            RunDir::open(destination.out.join(&name))?.remove()?;
        }
        let dir = RunDir::create(&destination.out, &name)?;
        let mut info = RunInfo {
            schema_version: SCHEMA_VERSION,
            run_id,
            created: clock::wall().to_string(),
            version: env!("CARGO_PKG_VERSION").into(),
            spec: spec.clone(),
            queries: 0,
            dataset_name: None,
            dataset_sha256: None,
            working_dir: None,
            scorer: None,
            host,
            hardware_label: label,
            model: None,
            sources: metering.tried.clone(),
            sensors: metering.sensors().to_vec(),
            qualification: metering.qualified.clone(),
            panel: metering.panel_names(),
            perimeter: metering.panel.as_ref().map(|p| p.perimeter),
            attribution: metering.attribution.clone(),
        };
        fill(&mut info);
        if let Err(error) = dir.write_info(&info) {
            // A folder without `run.json` is no run; leave none behind.
            let _ = std::fs::remove_dir_all(dir.path());
            return Err(error.into());
        }
        Ok(Self { past: Past::default(), _lock: dir.lock()?, dir })
    }

    /// Takes up one that is there.
    pub(crate) fn take_up(dir: RunDir) -> Result<Self, LabError> {
        let lock = dir.lock()?;
        let mut past = Past::default();
        dir.replay(|line| match line.event {
            Event::Session { session, .. } => past.sessions = past.sessions.max(session + 1),
            Event::Record(record) => {
                past.done.insert(record.item.index);
            }
            Event::Started { pid, start_ns, .. } => past.unended = Some((pid, start_ns)),
            Event::Repetition(repetition) => {
                past.unended = None;
                if repetition.counts() {
                    past.done.insert(repetition.index);
                    past.code = if past.code == 0 { repetition.code() } else { past.code };
                }
            }
            _ => {}
        })?;
        Ok(Self { dir, past, _lock: lock })
    }
}

/// Sixteen hexadecimal digits that no other run has.
pub(crate) fn unique_id() -> String {
    // The standard library seeds this from the system's random numbers; the time makes a repeat harmless.
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u64(clock::wall().0);
    hasher.write_u32(std::process::id());
    format!("{:016x}", hasher.finish())
}
