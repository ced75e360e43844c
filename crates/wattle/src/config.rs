//! Settings from their layers: defaults < `wattle.toml` < environment < flags.

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::Path;
use wattle_core::spec::{Layer, Spec};
use wattle_store::RunDir;

/// Read from the working folder if it is there.
const FILE: &str = "wattle.toml";
const PREFIX: &str = "WATTLE_";
/// Variables that wattle sets for programs it starts, and those of its simulated hardware; they are not settings.
const NOT_SETTINGS: &[&str] =
    &["LOG", "RESULT_DIR", "RUN_ID", "RANK", "WORLD_SIZE", "SIM_NVML", "OUT", "FORMAT", "CALIBRATIONS"];
/// What Kubernetes sets for every pod beside a service of our name.
const NOT_OURS: &[&str] = &["SERVICE_", "PORT"];

/// The call was wrong: exit code 2.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// The spec that all layers together make.
pub(crate) fn spec(from: Option<&Path>, config: Option<&Path>, given: &impl Serialize) -> Result<Spec> {
    let mut layers = Vec::new();
    if let Some(run) = from {
        let info = RunDir::open(run)?.info()?;
        layers.push(Layer {
            origin: run.display().to_string(),
            values: object(serde_json::to_value(info.spec)?),
        });
    }
    match config {
        Some(path) => layers.push(file(path)?),
        None if Path::new(FILE).exists() => layers.push(file(Path::new(FILE))?),
        None => {}
    }
    layers.extend(environment()?);
    layers.extend(flags(given)?);
    Ok(Spec::from_layers(&layers).map_err(|e| Usage(e.to_string()))?)
}

/// The settings that were given by flags alone, one layer each.
pub(crate) fn flags(given: &impl Serialize) -> Result<Vec<Layer>> {
    let given = object(serde_json::to_value(given)?);
    let layer =
        |(key, value): (String, Value)| Layer::one(format!("--{}", key.replace('_', "-")), &key, value);
    Ok(given.into_iter().map(layer).collect())
}

/// Settings from variables that are set, not empty, and ours.
fn environment() -> Result<Vec<Layer>> {
    let mut layers = Vec::new();
    for (name, value) in std::env::vars_os() {
        let Some(name) = name.to_str() else { continue };
        let Some(key) = name.strip_prefix(PREFIX) else { continue };
        if value.is_empty() || NOT_SETTINGS.contains(&key) || NOT_OURS.iter().any(|p| key.starts_with(p)) {
            continue;
        }
        let text = value.to_str().ok_or_else(|| Usage(format!("{name} is not UTF-8 text")))?;
        layers
            .push(Spec::layer_from_text(name, &key.to_lowercase(), text).map_err(|e| Usage(e.to_string()))?);
    }
    Ok(layers)
}

fn file(path: &Path) -> Result<Layer> {
    let origin = path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {origin}"))?;
    let values: Value = toml::from_str(&text).map_err(|e| Usage(format!("{origin}: {e}")))?;
    Ok(Layer { origin, values: object(values) })
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
