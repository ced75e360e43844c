//! Several runs in a row that differ in one setting, in a folder of their own. What is there and whole is not run again.

use crate::dataset::hex;
use crate::folder::unique_id;
use crate::run::{self, Observer, What};
use crate::{Destination, LabError, Stop, StopCause};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;
use wattle_core::spec::Spec;
use wattle_core::summary::{Summary, slug};
pub use wattle_core::sweep::Swept;
use wattle_core::sweep::{Point, Sweep};
use wattle_store::RunDir;

/// How long each run takes if nothing else ends it.
const USUAL_S: f64 = 30.0;

/// What is going on.
pub enum Step<'a> {
    /// A run begins.
    Begins {
        /// The setting.
        key: &'a str,
        /// Its value.
        value: &'a Value,
    },
    /// A run ended, or had ended before.
    Ended(&'a Summary),
}

/// Sweeps.
pub fn sweep(
    sweep: &Sweep,
    spec: &Spec,
    destination: &Destination,
    stop: &Stop,
    step: &mut dyn FnMut(Step<'_>),
    observe: &mut Observer<'_>,
) -> Result<(Swept, Option<StopCause>), LabError> {
    destination.check_name()?;
    let name =
        destination.name.clone().unwrap_or_else(|| format!("sweep-{}_{}", sweep.key(), &unique_id()[..8]));
    let folder = destination.out.join(name);
    if destination.overwrite && folder.exists() {
        clear(&folder)?;
    }
    let mut swept = Swept { key: sweep.key().to_owned(), points: Vec::new(), output_dir: folder.clone() };
    std::fs::create_dir_all(&folder)
        .map_err(|error| LabError::System { what: "cannot make the sweep's folder", error })?;
    wattle_store::write_json(folder.join("sweep.json"), &swept)?;
    while let Some(value) = sweep.next(&swept.points) {
        let mut at = sweep.apply(spec, &value).map_err(LabError::Usage)?;
        if at.max_queries.is_none() && at.duration_s.is_none() && at.trace.is_none() && at.dataset != "trace"
        {
            at.duration_s = Some(USUAL_S);
        }
        // Each run asks the same; a cache must not answer for the one before.
        at.unique_prefix.get_or_insert(true);
        step(Step::Begins { key: sweep.key(), value: &value });
        let answered = swept.points.iter().any(|p| p.kept_up);
        let run = folder_name(sweep.key(), &plain(&value));
        let (summary, stopped) = point(&folder, &run, &at, answered, stop, observe)?;
        step(Step::Ended(&summary));
        if stopped.is_none() {
            let kept_up = summary.complete && sweep.kept_up(&summary.metrics, &at, &swept.points);
            swept.points.push(Point { value, run, kept_up, metrics: summary.metrics });
            wattle_store::write_json(folder.join("sweep.json"), &swept)?;
        }
        if stopped.is_some() {
            return Ok((swept, stopped));
        }
    }
    Ok((swept, None))
}

/// The run of one value: as it is there, its rest, or all of it. `answered`: the server answered at another.
fn point(
    folder: &Path,
    name: &str,
    spec: &Spec,
    answered: bool,
    stop: &Stop,
    observe: &mut Observer<'_>,
) -> Result<(Summary, Option<StopCause>), LabError> {
    let path = folder.join(name);
    let there = RunDir::open(&path).ok();
    if let Some(dir) = &there {
        let info = dir.info()?;
        if info.spec != run::settled(spec.clone())? {
            return Err(LabError::Usage(format!(
                "{} was run with other settings; choose another --name, or --overwrite",
                path.display()
            )));
        }
        if let Some(summary) = dir.summary()?.filter(|s| s.complete) {
            return Ok((summary, None));
        }
    }
    let what = match there {
        Some(_) if spec.duration_s.is_none() => What::Resume { run: path, changes: Vec::new() },
        there => What::New {
            spec: Box::new(spec.clone()),
            // What is there of a run by time has no rest.
            destination: Destination {
                out: folder.to_owned(),
                name: Some(name.to_owned()),
                overwrite: there.is_some(),
            },
        },
    };
    match run::run(what, stop, observe) {
        Ok(ended) => Ok((ended.summary, ended.stopped)),
        // A server that answers no more is what a sweep looks for, and one that never did is not.
        Err(LabError::GaveUp { run, failed, error, by_time }) => match RunDir::open(&run)?.summary()? {
            Some(summary) if summary.total_queries > 0 || answered => Ok((summary, None)),
            _ => Err(LabError::GaveUp { run, failed, error, by_time }),
        },
        Err(error) => Err(error),
    }
}

/// A name for the folder of one value; where letters had to go, a digest tells values apart.
fn folder_name(key: &str, value: &str) -> String {
    let whole = format!("{key}-{value}");
    let short = slug(&whole, 60);
    match short == whole.replace('_', "-") {
        true => short,
        false => format!("{short}-{}", &hex(&Sha256::digest(&whole))[..8]),
    }
}

/// Removes a sweep, and nothing else.
fn clear(folder: &Path) -> Result<(), LabError> {
    if !folder.join("sweep.json").exists() {
        return Err(LabError::Usage(format!("{} is no sweep; it is left alone", folder.display())));
    }
    std::fs::remove_dir_all(folder)
        .map_err(|error| LabError::System { what: "cannot remove the sweep", error })
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
