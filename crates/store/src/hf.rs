//! `hf/`: the run as a Hugging Face dataset that `datasets.load_from_disk` opens, with the columns that users of the
//! reference system know. What is unknown is null, at the leaves: the nesting is always there.

use crate::column::{self, Column, count, flag, group, made_text, number, text};
use crate::error::{Cause, Result, StoreError};
use crate::file;
use crate::records::metadata_json;
use crate::run_dir::HF;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::SchemaRef;
use serde_json::json;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use wattle_core::Joules;
use wattle_core::record::Record;
use wattle_core::sensor::DeviceKind;
use wattle_core::summary::RunInfo;
use wattle_core::timeline::Level;

const DATA: &str = "data-00000-of-00001.arrow";

/// Megabytes, gigabytes and percent, as the reference's names say.
const MB: f64 = 1e-6;
const GB: f64 = 1e-9;
const PERCENT: f64 = 100.0;
const MS: f64 = 1e3;

fn columns(info: &RunInfo, model: &str) -> Vec<Column> {
    let scored = info.scorer.is_some();
    vec![
        text("problem", |r| Some(&r.item.prompt)),
        text("answer", |r| r.item.expected.as_deref()),
        // JSON text: a dataset has one type per field for all rows, and other people's columns do not keep to that.
        made_text("dataset_metadata", |r| Some(metadata_json(r))),
        text("subject", |r| r.item.subject.as_deref()),
        group("model_answers", vec![text(model, answer)]),
        group("model_metrics", vec![group(model, model_metrics(info, scored))]),
        group(
            "wattle_metrics",
            vec![
                number("energy_j", |r| r.share.map(|s| s.total().get())),
                number("energy_bound_j", |r| r.share.map(|s| s.bound.get())),
                text("energy_method", |r| r.share.map(|s| s.method.name())),
                text("energy_perimeter", |r| r.perimeter.map(|p| p.name())),
            ],
        ),
    ]
}

fn model_metrics(info: &RunInfo, scored: bool) -> Vec<Column> {
    vec![
        group("compute_metrics", unknown(&["flops_per_request", "macs_per_request"])),
        group("energy_metrics", energy_metrics()),
        group(
            "latency_metrics",
            vec![
                number("per_token_ms", |r| Some(seconds(r) * MS / output(r)?)),
                number("throughput_tokens_per_sec", |r| Some(output(r)? / seconds(r))),
                number("time_to_first_token_seconds", |r| r.exchange.ttft().map(|t| t.get())),
                number("total_query_seconds", |r| Some(seconds(r))),
            ],
        ),
        group(
            "memory_metrics",
            vec![
                levels("cpu_mb", MB, |r| r.telemetry.cpu_memory),
                levels("gpu_mb", MB, |r| r.telemetry.gpu_memory),
            ],
        ),
        group("power_metrics", vec![power("gpu", |r| r.telemetry.gpu_power), power("cpu", cpu_power)]),
        levels("temperature_metrics", 1.0, |r| r.telemetry.gpu_temperature),
        group(
            "token_metrics",
            vec![
                count("input", |r| r.exchange.usage.prompt),
                count("output", |r| r.exchange.usage.completion),
                count("total", |r| {
                    Some(r.exchange.usage.prompt?.saturating_add(r.exchange.usage.completion?))
                }),
            ],
        ),
        group(
            "phase_metrics",
            vec![
                number("prefill_energy_j", |r| Some(r.share?.to_first_token?.get())),
                number("decode_energy_j", |r| Some((r.share?.total() - r.share?.to_first_token?).get())),
                number("prefill_duration_ms", |r| {
                    r.exchange.first_token.map(|t| t.since(r.exchange.sent).get() * MS)
                }),
                number("decode_duration_ms", |r| {
                    r.exchange.first_token.map(|t| r.exchange.done.since(t).get() * MS)
                }),
            ],
        ),
        group("hardware_utilization", hardware_utilization()),
        gpu_info(info),
        system_info(info),
        // As in the metric `accuracy`: an answer that did not come, or could not be scored, is not right.
        flag("lm_correctness", move |r| {
            (scored && r.item.expected.is_some()).then(|| r.score.as_ref().is_some_and(|s| s.value >= 0.5))
        }),
        text("lm_response", answer),
    ]
}

/// The answer; null if none came.
fn answer(record: &Record) -> Option<&str> {
    let exchange = &record.exchange;
    (exchange.outcome.is_ok() || !exchange.answer.is_empty()).then_some(&exchange.answer)
}

fn seconds(record: &Record) -> f64 {
    record.exchange.latency().get()
}

fn output(record: &Record) -> Option<f64> {
    record.exchange.usage.completion.map(|n| n as f64)
}

/// The reference fills both names of each pair with the same figure.
fn energy_metrics() -> Vec<Column> {
    type Device = fn(&Record) -> Option<Joules>;
    let devices: [([&str; 2], Device); 3] = [
        (["per_query_joules", "total_joules"], |r| r.telemetry.gpu),
        (["cpu_per_query_joules", "cpu_total_joules"], |r| r.telemetry.cpu),
        (["ane_per_query_joules", "ane_total_joules"], |r| r.telemetry.ane),
    ];
    let columns = devices
        .into_iter()
        .flat_map(|(names, energy)| names.map(|name| number(name, move |r| energy(r).map(Joules::get))));
    columns.collect()
}

fn power(device: &str, level: fn(&Record) -> Option<Level>) -> Column {
    group(device, vec![levels("per_query_watts", 1.0, level), levels("total_watts", 1.0, level)])
}

/// CPUs have an energy counter and no power gauge: the mean is known, the rest is not.
fn cpu_power(record: &Record) -> Option<Level> {
    let mean = record.telemetry.cpu?.get() / record.exchange.span().duration().get();
    Some(Level { mean, median: f64::NAN, min: f64::NAN, max: f64::NAN })
}

fn hardware_utilization() -> Vec<Column> {
    let mut gpu =
        vec![number("compute_utilization_pct", |r| Some(r.telemetry.gpu_utilisation?.mean * PERCENT))];
    gpu.extend(unknown(&["memory_bandwidth_utilization_pct", "tensor_core_utilization_pct"]));
    gpu.push(number("memory_used_gb", |r| Some(r.telemetry.gpu_memory?.max * GB)));
    gpu.extend(unknown(&["memory_total_gb"]));
    vec![group("gpu", gpu), group("derived", unknown(&["mfu", "mbu", "arithmetic_intensity"]))]
}

fn gpu_info(info: &RunInfo) -> Column {
    let gpu = info.sensors.iter().find(|s| s.device.kind == DeviceKind::Gpu);
    let columns = vec![
        constant("name", gpu.map(|s| s.device.name.clone())),
        constant("vendor", None),
        constant("device_id", gpu.map(|s| s.device.id.clone())),
        constant("device_type", Some("gpu".into())),
        constant("backend", gpu.map(|s| s.source.clone())),
    ];
    group("gpu_info", columns).null_unless(gpu.is_some())
}

fn system_info(info: &RunInfo) -> Column {
    let host = &info.host;
    let known = |text: &String| (!text.is_empty()).then(|| text.clone());
    let cpus = host.cpu_count;
    let columns = vec![
        constant("os_name", known(&host.os_name)),
        constant("os_version", known(&host.os_version)),
        constant("kernel_version", known(&host.kernel_version)),
        constant("host_name", known(&host.host_name)),
        count("cpu_count", move |_| (cpus > 0).then_some(cpus)),
        constant("cpu_brand", known(&host.cpu_brand)),
    ];
    group("system_info", columns)
}

/// Mean, extremes and median of a gauge, in another unit.
fn levels(name: &str, unit: f64, level: fn(&Record) -> Option<Level>) -> Column {
    let part = |name, part: fn(Level) -> f64| number(name, move |r| level(r).map(|l| part(l) * unit));
    group(
        name,
        vec![
            part("avg", |l| l.mean),
            part("max", |l| l.max),
            part("median", |l| l.median),
            part("min", |l| l.min),
        ],
    )
}

/// The same text in every row.
fn constant(name: &str, value: Option<String>) -> Column {
    made_text(name, move |_| value.clone())
}

/// Figures that nothing here can know.
fn unknown(names: &[&str]) -> Vec<Column> {
    names.iter().map(|name| number(name, |_| None)).collect()
}

/// Writes the folder.
pub(crate) struct HfWriter {
    columns: Vec<Column>,
    schema: SchemaRef,
    data: StreamWriter<Hashing>,
    path: PathBuf,
}

impl HfWriter {
    pub(crate) fn create(run: &Path, info: &RunInfo, model: &str) -> Result<Self> {
        let path = run.join(HF);
        let columns = columns(info, model);
        let schema = column::schema(&columns);
        let open = || {
            let folder = file::temporary(&path);
            fs::create_dir_all(&folder)?;
            let file = BufWriter::new(File::create(folder.join(DATA))?);
            StreamWriter::try_new(Hashing { file, hash: DefaultHasher::new() }, &schema)
        };
        let data = open().map_err(|e| StoreError::write(&path, e))?;
        Ok(Self { columns, schema, data, path })
    }

    pub(crate) fn write(&mut self, rows: &[Record]) -> Result<()> {
        let batch = column::batch(&self.schema, &self.columns, rows);
        batch.and_then(|b| self.data.write(&b)).map_err(|e| StoreError::write(&self.path, e))
    }

    pub(crate) fn commit(self) -> Result<()> {
        let path = self.path;
        let seal = || -> std::result::Result<(), Cause> {
            let folder = file::temporary(&path);
            let data = self.data.into_inner()?;
            // Caches of `datasets` are keyed by this, so it must change with the contents.
            let fingerprint = format!("{:016x}", data.hash.finish());
            data.file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
            // Without features here, `datasets` takes them from the Arrow schema, which has them all.
            let info = json!({"description": "Made by wattle; see docs/schema.md#hf", "citation": "", "homepage": "", "license": ""});
            let state = json!({
                "_data_files": [{"filename": DATA}],
                "_fingerprint": fingerprint,
                "_format_columns": null,
                "_format_kwargs": {},
                "_format_type": null,
                "_output_all_columns": false,
                "_split": null,
            });
            for (name, value) in [("dataset_info.json", info), ("state.json", state)] {
                let mut file = File::create(folder.join(name))?;
                serde_json::to_writer_pretty(&mut file, &value)?;
                file.sync_all()?;
            }
            Ok(())
        };
        seal().map_err(|e| StoreError::write(&path, e))?;
        // A folder cannot be replaced in one step; a kill between these two leaves none, and finishing again makes it.
        file::remove(&path)?;
        fs::rename(file::temporary(&path), &path).map_err(|e| StoreError::write(&path, e))?;
        file::sync_folder(&path);
        Ok(())
    }
}

/// A file, and a hash of what went into it.
struct Hashing {
    file: BufWriter<File>,
    hash: DefaultHasher,
}

impl Write for Hashing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hash.write(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
