//! From the log to `summary.json`: a function of what is on disk, so a resumed run, a killed one and a whole one are summed up alike.

use crate::LabError;
use serde_json::Value;
use std::collections::BTreeMap;
use wattle_core::event::Event;
use wattle_core::metrics::{Accumulator, Surroundings};
use wattle_core::sensor::DeviceKind;
use wattle_core::summary::{SCHEMA_VERSION, Summary};
use wattle_core::time::Wall;
use wattle_core::{Seconds, Warning};
use wattle_store::RunDir;

/// Less coverage than this is worth a warning; the edges of a run cost a fraction of it.
const WHOLE: f64 = 0.99;

/// Sums up the run in `dir` at the moment `now`.
pub fn summarize(dir: &RunDir, now: Wall) -> Result<Summary, LabError> {
    let info = dir.info()?;
    let mut records = Accumulator::default();
    let mut around = Surroundings::default();
    let mut warnings: Vec<Warning> = Vec::new();
    let mut asked = vec![false; info.queries as usize];
    dir.replay(|line| match line.event {
        Event::Record(record) => {
            // A query that stands there twice counts once, the first time.
            let seen = asked.get_mut(record.item.index as usize);
            if seen.is_none_or(|seen| !std::mem::replace(seen, true)) {
                records.push(&record);
            }
        }
        Event::Warning(warning) if !warnings.contains(&warning) => warnings.push(warning),
        Event::Event { event, data: Some(data) } => match event.as_str() {
            "idle_baseline" => around.idle_power = serde_json::from_value(data["power_w"].clone()).ok(),
            "meter_cost" => around.meter_cpu = add_cost(around.meter_cpu, &data),
            _ => {}
        },
        _ => {}
    })?;

    if let Some(coverage) = records.coverage().filter(|c| *c < WHOLE) {
        warnings.push(Warning::Coverage { coverage });
    }
    if records.errors() > 0 {
        warnings.push(Warning::Errors { failed: records.errors(), of: records.queries() });
    }
    if !records.is_scored() && records.queries() > 0 {
        warnings.push(Warning::Unscored);
    }
    let mut gpus: Vec<(&str, &str)> = Vec::new();
    for device in info.sensors.iter().map(|s| &s.device).filter(|d| d.kind == DeviceKind::Gpu) {
        if !gpus.iter().any(|(id, _)| *id == device.id) {
            gpus.push((&device.id, &device.name));
        }
    }
    let sessions: BTreeMap<_, _> = records.spans().collect();
    Ok(Summary {
        schema_version: SCHEMA_VERSION,
        run_id: info.run_id,
        span: sessions.last_key_value().map(|(_, span)| *span),
        sessions,
        complete: asked.iter().all(|a| *a),
        model: info.model.name.clone(),
        dataset: info.spec.dataset.clone(),
        dataset_name: info.dataset_name,
        scorer: info.scorer,
        hardware_label: info.hardware_label,
        energy_perimeter: info.perimeter,
        generated_at: now.to_string(),
        total_queries: records.queries(),
        output_dir: dir.path().display().to_string(),
        system_info: info.host,
        gpu_info: gpus.iter().map(|(_, name)| (*name).to_owned()).collect(),
        versions: BTreeMap::from_iter(
            [("wattle", Some(info.version)), ("engine", info.model.engine)]
                .into_iter()
                .filter_map(|(what, version)| Some((what.to_owned(), version?))),
        ),
        config: info.spec,
        warnings: warnings.into_iter().map(Into::into).collect(),
        metrics: records.finish(&around),
    })
}

/// Sessions add up.
fn add_cost(so_far: Option<(Seconds, Seconds)>, data: &Value) -> Option<(Seconds, Seconds)> {
    let new = data["cpu_s"].as_f64().zip(data["wall_s"].as_f64());
    let (cpu, wall) = so_far.unwrap_or_default();
    new.map(|(c, w)| (cpu + Seconds(c), wall + Seconds(w))).or(so_far)
}
