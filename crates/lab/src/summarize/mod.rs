//! From the run folder to `summary.json`: a function of what is on disk, so a resumed run, a killed one and a whole one are summed
//! up alike. Figures of queries come from the log, energies of devices, phases and commands from the readings.

mod energy;
mod steady;
mod told;

use crate::LabError;
use energy::Measured;
use std::collections::BTreeMap;
use std::path::Path;
use steady::Chart;
use told::Told;
use wattle_core::account::Account;
use wattle_core::baseline::Idle;
use wattle_core::command::Repetition;
use wattle_core::metrics::{Metric, WHOLE, of_command};
use wattle_core::sensor::DeviceKind;
use wattle_core::slo::Slo;
use wattle_core::summary::{RepetitionEnergy, RunInfo, SCHEMA_VERSION, Summary};
use wattle_core::time::Wall;
use wattle_core::{Span, Warning};
use wattle_meter::clock;
use wattle_store::RunDir;

/// Less than this of the energy for others is not worth a word.
const FOREIGN: f64 = 0.005;
/// Shares add up to what was measured, to rounding.
const BALANCED: f64 = 1e-9;

/// Makes the tables and the summary of the run in `dir`.
pub(crate) fn wrap_up(dir: &RunDir) -> Result<Summary, LabError> {
    let info = dir.info()?;
    let mut told = Told::new(&info.spec)?;
    dir.finish_seeing(&mut |line| told.take(line))?;
    let summary = summarize(dir, info, told, clock::wall())?;
    dir.write_summary(&summary)?;
    Ok(summary)
}

fn summarize(dir: &RunDir, info: RunInfo, mut told: Told, now: Wall) -> Result<Summary, LabError> {
    let mut chart = Chart::new(&told, &info);
    let measured = Measured::read(dir, &info, &told, chart.as_mut())?;
    let slo = Slo::parse(&info.spec.slo).map_err(LabError::Usage)?;
    let steady = chart.map(|chart| chart.finish(dir, &told, slo)).transpose()?;
    told.around.tree_memory = measured.tree_memory(&info.sensors);
    let (metrics, complete) = if info.spec.command.is_empty() {
        let complete = match info.spec.duration_s {
            Some(_) => told.ended,
            None => told.records.queries() == info.queries,
        };
        (told.records.finish(&told.around), complete)
    } else {
        let runs = counted(&measured);
        let complete = runs.iter().filter(|(r, _)| r.counts()).count() as u64 == info.spec.repeat;
        (of_command(&runs, &told.around), complete)
    };
    let mut warnings = told.warnings.clone();
    warnings.extend(told.doubts(&info));
    warnings.extend(measured.doubts(&info));
    warnings.extend(measured.other_device(&info));
    warnings.extend(energy_doubts(&told, &metrics, &info));
    warnings.extend(steady.as_ref().and_then(steady::doubt));
    let sessions = sessions(&told);
    let (model, engine) = info.model.map(|m| (m.name, m.engine)).unzip();
    let versions = [("wattle", Some(info.version)), ("engine", engine.flatten())];
    Ok(Summary {
        schema_version: SCHEMA_VERSION,
        run_id: info.run_id,
        span: sessions.last_key_value().map(|(_, span)| *span),
        sessions,
        complete,
        dataset: model.as_ref().map(|_| info.spec.dataset.clone()),
        model,
        dataset_name: info.dataset_name,
        scorer: info.scorer,
        hardware_label: info.hardware_label,
        energy_perimeter: info.perimeter,
        attribution: info.attribution.map(|a| a.origin),
        generated_at: now.to_string(),
        total_queries: told.records.queries(),
        output_dir: dir.path().display().to_string(),
        system_info: info.host,
        gpu_info: gpus(&info.sensors),
        versions: BTreeMap::from_iter(
            versions.into_iter().filter_map(|(what, version)| Some((what.to_owned(), version?))),
        ),
        config: info.spec,
        warnings: warnings.into_iter().map(Into::into).collect(),
        metrics,
        steady,
        devices: measured.devices(&info.sensors),
        perimeters: measured.perimeters(&info.sensors),
        resources: measured.resources(&info.sensors, &told),
        repetitions: measured
            .repetitions
            .iter()
            .map(|(repetition, account)| RepetitionEnergy {
                repetition: repetition.clone(),
                energy: account.estimate(),
            })
            .collect(),
        phases: measured.phases,
        gauges: told.gauges,
    })
}

/// Makes the tables and the summary of a run that nobody works on: one that was killed.
pub fn sum_up(run: &Path) -> Result<Summary, LabError> {
    let dir = RunDir::open(run)?;
    let _lock = dir.lock()?;
    wrap_up(&dir)
}

/// The runs of a command, warm-up left out.
fn counted(measured: &Measured) -> Vec<(&Repetition, Account)> {
    let all = measured.repetitions.iter();
    all.filter(|(r, _)| !r.warmup).map(|(r, account)| (r, *account)).collect()
}

/// The measured span of each session.
fn sessions(told: &Told) -> BTreeMap<u32, Span> {
    let mut sessions: BTreeMap<u32, Span> = told.records.spans().collect();
    for repetition in told.repetitions.iter().filter(|r| !r.warmup) {
        let span = sessions.entry(repetition.session).or_insert(repetition.span);
        *span = Span::new(span.start().min(repetition.span.start()), span.end().max(repetition.span.end()));
    }
    sessions
}

/// Names of the accelerators, each board once.
fn gpus(sensors: &[wattle_core::Sensor]) -> Vec<String> {
    let mut boards: Vec<(&str, &str)> = Vec::new();
    for device in sensors.iter().map(|s| &s.device).filter(|d| d.kind == DeviceKind::Gpu) {
        if !boards.iter().any(|(id, _)| *id == device.id) {
            boards.push((&device.id, &device.name));
        }
    }
    boards.iter().map(|(_, name)| (*name).to_owned()).collect()
}

/// What the energy itself gives reason to doubt.
fn energy_doubts(told: &Told, metrics: &BTreeMap<String, Metric>, info: &RunInfo) -> Vec<Warning> {
    let value = |name: &str| metrics.get(name).and_then(|m| m.value);
    let mut doubts = Vec::new();
    // A panel that gave no figure at all has no coverage either.
    let seen = value("energy_coverage").or(info.perimeter.and(value("repetitions")).map(|_| 0.0));
    if let Some(coverage) = seen.filter(|c| *c < WHOLE) {
        doubts.push(Warning::Coverage { coverage });
    }
    let foreign = value("foreign_j").zip(value("energy_j")).map(|(part, all)| part / all);
    doubts.extend(foreign.filter(|f| *f > FOREIGN).map(|fraction| Warning::ForeignRequests { fraction }));
    let residual = value("attribution_residual").filter(|r| r.abs() > BALANCED);
    doubts.extend(residual.map(|residual| Warning::Unbalanced { residual }));
    let partial = told.around.idle.values().filter_map(Idle::power).any(|p| p.coverage() < WHOLE);
    let contradicted =
        value("idle_power_w").and(value("mean_power_w")).is_some() && value("net_energy_j").is_none();
    if partial || contradicted {
        doubts.push(Warning::BadBaseline);
    }
    let drifts = told.around.idle.values().filter_map(Idle::drift);
    doubts.extend(
        drifts.map(|(before, after)| Warning::IdleDrift { before_w: before.get(), after_w: after.get() }),
    );
    doubts
}
