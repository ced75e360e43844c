//! Settings from their layers: defaults < `wattle.toml` < environment < flags.

use crate::args::{RunArgs, SpecArgs};
use anyhow::{Context, Result};
use serde_json::{Map, Value};
use std::path::Path;
use wattle_core::spec::{Layer, Spec};
use wattle_store::RunDir;

/// Read from the working folder if it is there.
const FILE: &str = "wattle.toml";
const PREFIX: &str = "WATTLE_";
/// Variables that wattle sets for programs it starts, and those of its simulated hardware; they are not settings.
const NOT_SETTINGS: &[&str] = &["LOG", "RESULT_DIR", "RUN_ID", "RANK", "WORLD_SIZE", "SIM_NVML"];

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
pub(crate) fn spec(args: &RunArgs) -> Result<Spec> {
    let mut layers = Vec::new();
    if let Some(run) = &args.from {
        let info = RunDir::open(run)?.info()?;
        layers.push(Layer {
            origin: run.display().to_string(),
            values: object(serde_json::to_value(info.spec)?),
        });
    }
    match &args.config {
        Some(path) => layers.push(file(path)?),
        None if Path::new(FILE).exists() => layers.push(file(Path::new(FILE))?),
        None => {}
    }
    for (name, text) in std::env::vars() {
        if let Some(key) = name.strip_prefix(PREFIX).filter(|key| !NOT_SETTINGS.contains(key)) {
            layers.push(
                Spec::layer_from_text(&name, &key.to_lowercase(), &text).map_err(|e| Usage(e.to_string()))?,
            );
        }
    }
    layers.extend(flags(&args.spec)?);
    Ok(Spec::from_layers(&layers).map_err(|e| Usage(e.to_string()))?)
}

/// Whether any flag of the spec was given.
pub(crate) fn has_flags(args: &SpecArgs) -> Result<bool> {
    Ok(!flags(args)?.is_empty())
}

fn file(path: &Path) -> Result<Layer> {
    let origin = path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {origin}"))?;
    let values: Value = toml::from_str(&text).map_err(|e| Usage(format!("{origin}: {e}")))?;
    Ok(Layer { origin, values: object(values) })
}

fn flags(args: &SpecArgs) -> Result<Vec<Layer>> {
    let given = object(serde_json::to_value(args)?);
    let layer =
        |(key, value): (String, Value)| Layer::one(format!("--{}", key.replace('_', "-")), &key, value);
    Ok(given.into_iter().map(layer).collect())
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
