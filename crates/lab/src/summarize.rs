//! From the log to `summary.json`: a function of what is on disk, so a resumed run, a killed one and a whole one are summed up alike.

use crate::LabError;
use serde_json::Value;
use std::collections::BTreeMap;
use wattle_core::event::Event;
use wattle_core::metrics::{Accumulator, Surroundings, WHOLE};
use wattle_core::seen::Seen;
use wattle_core::sensor::DeviceKind;
use wattle_core::summary::{SCHEMA_VERSION, Summary};
use wattle_core::time::Wall;
use wattle_core::{Seconds, Warning};
use wattle_store::RunDir;

/// Sums up the run in `dir` at the moment `now`.
pub fn summarize(dir: &RunDir, now: Wall) -> Result<Summary, LabError> {
    let info = dir.info()?;
    let mut records = Accumulator::default();
    let mut around = Surroundings::default();
    let mut warnings: Vec<Warning> = Vec::new();
    let mut asked = Seen::default();
    let mut reasons: BTreeMap<String, u64> = BTreeMap::new();
    let mut session = 0;
    dir.replay(|line| match line.event {
        Event::Session { session: number, .. } => session = number,
        // A query that stands there twice counts once, the first time.
        Event::Record(record) if asked.insert(record.item.index) => {
            if let Some(error) = record.exchange.outcome.error() {
                count(&mut reasons, error);
            }
            records.push(&record);
        }
        Event::Warning(warning) if !warnings.contains(&warning) => warnings.push(warning),
        Event::Event { event, data: Some(data) } => match event.as_str() {
            "idle_baseline" => {
                if let Ok(power) = serde_json::from_value(data["power_w"].clone()) {
                    around.idle_power.insert(session, power);
                }
            }
            "meter_cost" => around.meter_cpu = add_cost(around.meter_cpu, &data),
            _ => {}
        },
        _ => {}
    })?;
    let metrics = records.finish(&around);
    let complete = records.queries() == info.queries;
    warnings.extend(doubts(&records, info.queries, &reasons));
    let partial = around.idle_power.values().any(|p| p.coverage() < WHOLE);
    let value = |name: &str| metrics.get(name).and_then(|m| m.value);
    if partial || value("idle_power_w").zip(value("mean_power_w")).is_some_and(|(idle, mean)| idle > mean) {
        warnings.push(Warning::BadBaseline);
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
        complete,
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
        metrics,
    })
}

/// What the records themselves give reason to doubt.
fn doubts(records: &Accumulator, queries: u64, reasons: &BTreeMap<String, u64>) -> Vec<Warning> {
    let of = records.queries();
    let mut doubts = Vec::new();
    if of < queries {
        doubts.push(Warning::Incomplete { done: of, of: queries });
    }
    if records.errors() > 0 {
        let most = reasons.iter().max_by_key(|(_, n)| **n).map(|(reason, _)| reason.clone());
        doubts.push(Warning::Errors { failed: records.errors(), of, reason: most.unwrap_or_default() });
    }
    if records.truncated() > 0 {
        doubts.push(Warning::Truncated { truncated: records.truncated(), of });
    }
    if records.unstreamed() > 0 {
        doubts.push(Warning::NotStreamed { answers: records.unstreamed() });
    }
    match records.scored() {
        _ if of == 0 => {}
        0 => doubts.push(Warning::Unscored),
        scored if scored < of => doubts.push(Warning::PartlyUnscored { unscored: of - scored, of }),
        _ => {}
    }
    if let Some(coverage) = records.coverage().filter(|c| *c < WHOLE) {
        doubts.push(Warning::Coverage { coverage });
    }
    doubts
}

/// Counts reasons, as long as they are few and short: a server may say anything.
fn count(reasons: &mut BTreeMap<String, u64>, error: &str) {
    let reason: String = error.chars().take(200).collect();
    if reasons.len() < 100 || reasons.contains_key(&reason) {
        *reasons.entry(reason).or_default() += 1;
    }
}

/// Sessions add up.
fn add_cost(so_far: Option<(Seconds, Seconds)>, data: &Value) -> Option<(Seconds, Seconds)> {
    let new = data["cpu_s"].as_f64().zip(data["wall_s"].as_f64());
    let (cpu, wall) = so_far.unwrap_or_default();
    new.map(|(c, w)| (cpu + Seconds(c), wall + Seconds(w))).or(so_far)
}
