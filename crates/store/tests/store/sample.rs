//! A made-up run: no machine ever measured these figures.

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use tempfile::TempDir;
use wattle_core::account::Account;
use wattle_core::attribute::{Ledger, Share};
use wattle_core::calibration::{Attribution, Calibration, Cell, Effort, Ladder, Quality, Subject};
use wattle_core::command::{Gauge, Phase, Repetition};
use wattle_core::cost::{Cost, Origin, Work};
use wattle_core::estimate::Estimate;
use wattle_core::exchange::{Dated, Exchange, FailureClass, Finish, Outcome, TokensFrom, Usage};
use wattle_core::metrics::{METRICS, Metric};
use wattle_core::qualify::Qualification;
use wattle_core::record::{Item, Record, Score, Telemetry};
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Trust};
use wattle_core::spec::Spec;
use wattle_core::steady::{Steady, Trend, Trends};
use wattle_core::summary::{
    DeviceEnergy, Host, ModelInfo, PhaseEnergy, RepetitionEnergy, RunInfo, SCHEMA_VERSION, SourceInfo,
    Summary,
};
use wattle_core::time::{Anchor, Wall};
use wattle_core::timeline::Level;
use wattle_core::{Event, Joules, Method, Reading, Sensor, SensorId, Span, Stamp, Warning, Watts};
use wattle_store::{LogWriter, RunDir};

pub(crate) const NOW: Wall = Wall(1_767_225_599_999);

/// Text that has broken other programs: a newline, quotes, an emoji, NUL and other controls, the escape of half a
/// surrogate pair written out, a byte-order mark, line separators.
pub(crate) const ODD: &str = "a\nb\r\t\"c\" \\ \\ud800 🦉 \0\u{1}\u{7f}\u{feff}\u{2028}é";

/// An empty run in a folder of its own.
pub(crate) fn run(name: &str) -> (TempDir, RunDir) {
    let parent = TempDir::new().unwrap();
    let run = RunDir::create(&parent.path().join("runs"), name).unwrap();
    run.write_info(&info()).unwrap();
    run.log().unwrap();
    (parent, run)
}

/// A run with these records in its log.
pub(crate) fn run_of(records: impl IntoIterator<Item = Record>) -> (TempDir, RunDir) {
    let (parent, run) = run("r");
    let mut log = run.log().unwrap();
    for record in records {
        append(&mut log, record);
    }
    (parent, run)
}

pub(crate) fn append(log: &mut LogWriter, record: Record) {
    log.append(NOW, &Event::Record(Box::new(record))).unwrap();
}

/// A record with everything known and figures that do not fit in few digits.
pub(crate) fn record(index: u64) -> Record {
    let at = |ms: u64| Stamp::from_nanos(7_000_000_000 + index * 2_000_000_000 + ms * 1_000_000 + 1);
    let x = (index as f64 + 0.1) / 3.0;
    let level = Level { mean: x, median: x + 0.1, min: x - 0.1, max: x + 0.2 };
    Record {
        session: (index / 100) as u32,
        item: Item {
            index,
            id: format!("q-{index}"),
            prompt: format!("{index}: {ODD}"),
            expected: Some("42".into()),
            subject: Some("sums".into()),
            metadata: Map::from_iter([("level".into(), json!(index)), ("odd".into(), json!(ODD))]),
            conversation: Some(format!("chat-{index}")),
            history: wattle_core::exchange::History::default(),
            output_tokens: Some(3),
            due_s: Some(x),
        },
        exchange: Exchange {
            response_id: Some(format!("chatcmpl-{index}")),
            due: at(0),
            sent: at(1),
            first_token: Some(at(101)),
            tokens: vec![at(101), at(301), at(501)],
            done: at(601),
            dated: Dated::Kernel,
            attempts: 2,
            usage: Usage {
                prompt: Some(11),
                completion: Some(3),
                reasoning: Some(1),
                cached: Some(u64::MAX),
                from: Some(TokensFrom::Usage),
            },
            outcome: Outcome::Ok { finish: Finish::Stop },
            answer: format!("42 {ODD}"),
            server: Some(json!({"prompt_ms": 0.1, "ids": [1, 2]})),
        },
        share: Some(Share {
            queue: Joules(x * 0.7),
            prefill: Joules(x),
            decode: Joules(x * 3.3),
            shared: Joules(x / 7.0),
            to_first_token: Some(Joules(x * 1.7)),
            bound: Joules(x / 3.0),
            method: Method::Integral,
            coverage: 0.1 + 0.2,
        }),
        perimeter: Some(Perimeter::Host),
        telemetry: Telemetry {
            gpu: Some(Joules(x * 1.1)),
            cpu: Some(Joules(x * 1.2)),
            dram: Some(Joules(x * 1.3)),
            ane: Some(Joules(x * 1.4)),
            gpu_power: Some(level),
            gpu_temperature: Some(level),
            gpu_memory: Some(Level { mean: 3e9, median: 3e9, min: 2e9, max: 4e9 }),
            gpu_utilisation: Some(level),
            cpu_memory: Some(Level { mean: 3e9, median: 3e9, min: 2e9, max: 4e9 }),
        },
        score: Some(Score { value: 1.0, scorer: "exact".into() }),
        ledger: Some(Ledger {
            account: Account {
                start: Some(Joules(0.1)),
                method: Some(Method::Counter),
                ..Account::open(at(0))
            },
            ..Ledger::open(at(0))
        }),
    }
}

/// A failed query of a run that knows nothing.
pub(crate) fn bare_record(index: u64) -> Record {
    let whole = record(index);
    Record {
        item: Item { expected: None, subject: None, metadata: Map::new(), conversation: None, ..whole.item },
        exchange: Exchange {
            response_id: None,
            first_token: None,
            tokens: vec![],
            usage: Usage::default(),
            outcome: Outcome::Failed { class: FailureClass::Timeout, error: "600 s\nare over".into() },
            answer: String::new(),
            server: None,
            ..whole.exchange
        },
        share: None,
        perimeter: None,
        telemetry: Telemetry::default(),
        score: None,
        ledger: None,
        ..whole
    }
}

/// Two counters, and between them a gauge that a model makes up.
pub(crate) fn sensors() -> Vec<Sensor> {
    let sensor = |name: &str, device: &str, kind, quantity| Sensor {
        name: name.into(),
        source: "made-up".into(),
        device: Device { kind, id: device.into(), name: format!("Made-up {device}") },
        quantity,
        perimeter: Perimeter::Device,
        kind: Kind::Counter { wrap: Some(2f64.powi(32)) },
        trust: Trust::Measured { gain: 0.05 },
        quantum: 0.0,
        averaged_s: 0.0,
    };
    let power = sensor("made-up/gpu-0/power", "gpu-0", DeviceKind::Gpu, Quantity::Power);
    vec![
        sensor("made-up/gpu-0/energy", "gpu-0", DeviceKind::Gpu, Quantity::Energy),
        Sensor { kind: Kind::Gauge, trust: Trust::Modelled { gain: 0.5 }, ..power },
        sensor("made-up/pkg-0/energy", "pkg-0", DeviceKind::Cpu, Quantity::Energy),
    ]
}

/// The `i`-th reading of a session: all sensors in turn, every fifth read failed.
pub(crate) fn reading(i: u64) -> Reading {
    let value = (i % 5 != 4).then_some(i as f64 / 3.0);
    Reading { sensor: SensorId((i % 3) as u16), at: Stamp::from_nanos(1_000_000 + i * 1_666_667), value }
}

pub(crate) fn info() -> RunInfo {
    RunInfo {
        schema_version: SCHEMA_VERSION,
        run_id: "0123456789abcdef".into(),
        created: NOW.to_string(),
        version: "0.1.0".into(),
        spec: spec(),
        queries: 3,
        dataset_name: Some("Made-up sums".into()),
        dataset_sha256: Some("00".repeat(32)),
        working_dir: Some("/nowhere".into()),
        scorer: Some("exact".into()),
        host: host(),
        hardware_label: "1xMade-up".into(),
        model: Some(ModelInfo {
            // No NUL: pyarrow ends a name there, and neither a path nor an argument can hold one.
            name: format!("org/model \"{}\"", ODD.replace('\0', "")),
            parameters: Some(1_000_000),
            format: Some("q8_0".into()),
            sha256: Some("11".repeat(32)),
            engine: Some("made-up 1.0".into()),
        }),
        sources: vec![SourceInfo {
            name: "made-up".into(),
            unavailable: Some("it is not there".into()),
            fix: Some("make it up".into()),
            facts: BTreeMap::from([("driver".into(), "1.0".into())]),
        }],
        sensors: sensors(),
        qualification: vec![Qualification {
            sensor: "made-up/gpu-0/energy".into(),
            failed: 1,
            answers: true,
            period_s: Some(0.1),
            ratio: Some(0.97),
            ratio_bound: Some(0.01),
        }],
        panel: vec!["made-up/gpu-0/energy".into()],
        perimeter: Some(Perimeter::Device),
        attribution: Some(attribution()),
    }
}

pub(crate) fn calibration() -> Calibration {
    let cost = Cost { fixed: 1.5, prefill: 0.5, decode: 0.25, context: 0.125 };
    let ladders = || Ladder::ALL.map(|ladder| (ladder, 0.5)).into();
    Calibration {
        calibration_version: 1,
        digest: "22".repeat(32),
        subject: Subject {
            model: "made-up".into(),
            sha256: Some("11".repeat(32)),
            format: Some("q8_0".into()),
            engine: Some("made-up 1.0".into()),
            devices: vec![sensors()[0].device.clone()],
            perimeter: Perimeter::Device,
        },
        created: NOW.to_string(),
        version: "0.1.0".into(),
        level: Effort::Quick,
        seed: 1,
        duration_s: 1.5,
        joules: cost,
        bound: cost,
        covariance: [[0.5; 4]; 4],
        gain: 0.5,
        seconds: cost,
        idle_w: Estimate::new(Watts(1.5), Watts(0.5), Method::Counter, 1.0),
        quality: Quality {
            cells: 1,
            repeats: 1,
            r2: 0.5,
            condition: 1.5,
            widened: 1.5,
            residuals: ladders(),
            seconds_r2: 0.5,
            seconds_residuals: ladders(),
        },
        warnings: vec!["made up".into()],
        cells: vec![Cell {
            ladder: Ladder::Prefill,
            rung: 0,
            batch: 1,
            requests: 1,
            work: Work { iterations: 1.5, prefill: 0.5, decode: 0.5, context: 0.5 },
            busy_s: 0.5,
            window_s: 1.5,
            energy_j: 1.5,
            error_j: 0.5,
        }],
    }
}

fn attribution() -> Attribution {
    Attribution {
        origin: Origin::Calibration,
        digest: Some("22".repeat(32)),
        created: Some(NOW.to_string()),
        joules: Cost { fixed: 1.5, prefill: 0.5, decode: 0.25, context: 0.125 },
        covariance: Some([[0.5; 4]; 4]),
        seconds: Some(Cost { fixed: 1.5, prefill: 0.5, decode: 0.25, context: 0.125 }),
    }
}

fn host() -> Host {
    Host {
        os_name: "Made-up OS".into(),
        os_version: String::new(),
        kernel_version: "6.1".into(),
        host_name: "nowhere".into(),
        cpu_brand: "Made-up CPU".into(),
        cpu_count: 2,
        memory_bytes: 1 << 30,
    }
}

/// A spec with every key set, by way of JSON so that a new key needs no change here.
fn spec() -> Spec {
    let mut keys: BTreeMap<String, Value> =
        serde_json::from_value(serde_json::to_value(Spec::default()).unwrap()).unwrap();
    for (key, value) in [
        ("command", json!(["made-up"])),
        ("url", json!("http://127.0.0.1:1")),
        ("model", json!("made-up")),
        ("max_queries", json!(3)),
        ("scorer", json!("exact")),
        ("system", json!("be brief")),
        ("concurrency", json!(2)),
        ("rate", json!(1.5)),
        ("ramp_to", json!(2.5)),
        ("trace", json!("made-up.jsonl")),
        ("duration_s", json!(9.0)),
        ("unique_prefix", json!(true)),
        ("first_token_timeout_s", json!(5.0)),
        ("stall_timeout_s", json!(6.0)),
        ("warmup", json!(1)),
        ("root", json!("fixtures/made-up")),
        ("source", json!(["made-up"])),
    ] {
        assert!(keys.insert(key.into(), value).is_some(), "the spec has no key {key} any more");
    }
    serde_json::from_value(json!(keys)).unwrap()
}

const TREND: Trend = Trend { change: 0.125, significant: Some(true) };

pub(crate) fn summary() -> Summary {
    let span = Span::new(Stamp::from_nanos(1), Stamp::from_nanos(2));
    let metric = |unit: &str| Metric {
        value: Some(1.5),
        low: Some(1.25),
        high: Some(1.75),
        unit: unit.into(),
        n: 3,
        method: "counter".into(),
        p50: Some(1.5),
        p90: Some(1.5),
        p99: Some(1.5),
    };
    Summary {
        schema_version: SCHEMA_VERSION,
        run_id: "0123456789abcdef".into(),
        span: Some(span),
        sessions: BTreeMap::from([(0, span)]),
        complete: true,
        model: Some("made-up".into()),
        dataset: Some("builtin".into()),
        dataset_name: Some("Made-up sums".into()),
        scorer: Some("exact".into()),
        hardware_label: "1xMade-up".into(),
        energy_perimeter: Some(Perimeter::Device),
        attribution: Some(wattle_core::cost::Origin::Calibration),
        generated_at: NOW.to_string(),
        total_queries: 3,
        output_dir: "runs/made-up".into(),
        system_info: host(),
        gpu_info: vec!["Made-up gpu-0".into()],
        versions: BTreeMap::from([("wattle".into(), "0.1.0".into())]),
        config: spec(),
        warnings: vec![Warning::Unscored.into()],
        metrics: METRICS.iter().map(|m| (m.name.to_owned(), metric(m.unit))).collect(),
        steady: Some(Steady {
            session: 0,
            span,
            seconds: 1.5,
            trimmed_start_s: 0.5,
            trimmed_end_s: 0.25,
            reached: true,
            trends: Trends { power: Some(TREND), in_flight: Some(TREND), temperature: Some(TREND) },
            metrics: BTreeMap::from([("energy_j".into(), metric("J"))]),
        }),
        devices: vec![DeviceEnergy {
            device: sensors()[0].device.clone(),
            sensor: sensors()[0].name.clone(),
            energy: Some(joules()),
        }],
        perimeters: BTreeMap::from([(Perimeter::Device, joules())]),
        resources: serde_json::from_value(resources()).unwrap(),
        repetitions: vec![RepetitionEnergy { repetition: repetition(), energy: Some(joules()) }],
        phases: BTreeMap::from([(
            "prefill".into(),
            PhaseEnergy { count: 1, seconds: 0.5, energy: Some(joules()) },
        )]),
        gauges: BTreeMap::from([(
            "loss".into(),
            Gauge { count: 2, last: 0.25, mean: 0.5, min: 0.25, max: 0.75 },
        )]),
    }
}

fn joules() -> Estimate<Joules> {
    Estimate::new(Joules(1.5), Joules(0.25), Method::Counter, 0.5)
}

/// Every figure known, also those that are left out where they are not.
fn resources() -> Value {
    let names = [
        "peak_vram_mb",
        "jax_peak_bytes_mb",
        "gpu_util_mean_pct",
        "gpu_util_max_pct",
        "mem_util_mean_pct",
        "mem_util_max_pct",
        "power_watts_mean",
        "power_watts_max",
        "cpu_usr_mean_pct",
        "cpu_idle_mean_pct",
        "tree_cpu_s",
        "tree_peak_rss_mb",
    ];
    names.into_iter().map(|name| (name.to_owned(), json!(1.5))).collect::<Map<_, _>>().into()
}

/// One that a signal ended after it returned: no program does both.
fn repetition() -> Repetition {
    Repetition {
        session: 0,
        index: 1,
        warmup: false,
        span: Span::new(Stamp::from_nanos(1), Stamp::from_nanos(2)),
        exit_code: Some(1),
        signal: Some(9),
        user_s: 0.5,
        system_s: 0.25,
        peak_rss_bytes: Some(1 << 20),
        left_behind: true,
        interrupted: true,
    }
}

/// One event of each type, and a query that failed; the match makes a new one fail to compile here.
pub(crate) fn events() -> Vec<Event> {
    let anchor = Anchor {
        stamp: Stamp::from_nanos(5),
        wall: NOW,
        boot_id: Some("6f1c0a52-0000-4000-8000-000000000000".into()),
    };
    let failed = Outcome::Failed { class: FailureClass::Server, error: "500".into() };
    let failed = Record { exchange: Exchange { outcome: failed, ..record(1).exchange }, ..record(1) };
    let events = vec![
        Event::Session { session: 0, anchor, version: "0.1.0".into(), queries: 3 },
        Event::phase("warmup", 1.25),
        Event::Record(Box::new(record(0))),
        Event::Record(Box::new(failed)),
        Event::Started { session: 0, index: 1, warmup: false, pid: 4711, start_ns: Stamp::from_nanos(1) },
        Event::of_command(Phase { name: "prefill".into(), span: repetition().span, extra: Map::new() }),
        Event::Gauge { name: "loss".into(), value: 0.5, at_ns: Stamp::from_nanos(2) },
        Event::Repetition(Box::new(repetition())),
        Event::Warning(Warning::Unscored),
        Event::Event { event: "saved".into(), by: Some("command".into()), data: Some(json!({"step": 1})) },
    ];
    for event in &events {
        match event {
            Event::Session { .. }
            | Event::Phase { .. }
            | Event::Record(_)
            | Event::Started { .. }
            | Event::Gauge { .. }
            | Event::Repetition(_)
            | Event::Warning(_)
            | Event::Event { .. } => {}
        }
    }
    events
}

/// One warning of each kind; the match makes a new one fail to compile here.
pub(crate) fn warnings() -> Vec<Warning> {
    let text = || "made up".to_owned();
    let warnings = vec![
        Warning::EnergyEstimated { why: text() },
        Warning::NoEnergy { why: text() },
        Warning::PretendedHardware { what: text() },
        Warning::Coverage { coverage: 0.5 },
        Warning::Sensor { sensor: text(), what: text() },
        Warning::CounterDoubted { sensor: text(), ratio: 0.5 },
        Warning::ReadingsLost { lost: 1 },
        Warning::Incomplete { done: 1, of: 2 },
        Warning::Errors { failed: 1, of: 2, reason: text() },
        Warning::Truncated { truncated: 1, of: 2 },
        Warning::NotStreamed { answers: 1 },
        Warning::PartlyUnscored { unscored: 1, of: 2 },
        Warning::BusyBaseline { cores: 0.5 },
        Warning::IdleDrift { before_w: 0.5, after_w: 1.5 },
        Warning::Unsteady { reached: false, power: Some(0.5), in_flight: Some(0.5), temperature: Some(0.5) },
        Warning::BadBaseline,
        Warning::ClientBottleneck { cpu: 0.5, lateness_s: 0.5 },
        Warning::HeldBack { requests: 1, of: 2 },
        Warning::Cached { fraction: 0.5 },
        Warning::BusyServer { requests: 2.0 },
        Warning::ForeignRequests { fraction: 0.25 },
        Warning::Unbalanced { residual: -0.5 },
        Warning::Lengths { other: 1, of: 2 },
        Warning::GaveUp { error: text(), failed: 1 },
        Warning::CutShort { seconds: 0.5, of: 1.5 },
        Warning::Retried { queries: 1, of: 2 },
        Warning::ModelLoaded { queries: 1, seconds: 0.5 },
        Warning::Unscored,
        Warning::OtherDevice { worker: DeviceKind::Cpu },
        Warning::Uncalibrated { command: text() },
        Warning::Throttled { device: text(), fraction: 0.5 },
        Warning::Notes { skipped: 1, why: text() },
        Warning::NotesLate { seconds: 0.5 },
        Warning::Names { left_out: 1 },
        Warning::Repeats { done: 1, of: 2 },
        Warning::Failed { failed: 1, of: 2 },
        Warning::LeftBehind,
        Warning::Unwatched { pid: 4711 },
        Warning::Close { error: text() },
        Warning::ServerEnded { how: text() },
        Warning::Contaminated { cores: 0.5 },
    ];
    for warning in &warnings {
        match warning {
            Warning::EnergyEstimated { .. }
            | Warning::NoEnergy { .. }
            | Warning::PretendedHardware { .. }
            | Warning::Coverage { .. }
            | Warning::Sensor { .. }
            | Warning::CounterDoubted { .. }
            | Warning::ReadingsLost { .. }
            | Warning::Incomplete { .. }
            | Warning::Errors { .. }
            | Warning::Truncated { .. }
            | Warning::NotStreamed { .. }
            | Warning::PartlyUnscored { .. }
            | Warning::BusyBaseline { .. }
            | Warning::IdleDrift { .. }
            | Warning::Unsteady { .. }
            | Warning::BadBaseline
            | Warning::ClientBottleneck { .. }
            | Warning::HeldBack { .. }
            | Warning::Cached { .. }
            | Warning::BusyServer { .. }
            | Warning::ForeignRequests { .. }
            | Warning::Unbalanced { .. }
            | Warning::Lengths { .. }
            | Warning::GaveUp { .. }
            | Warning::CutShort { .. }
            | Warning::Retried { .. }
            | Warning::ModelLoaded { .. }
            | Warning::Unscored
            | Warning::OtherDevice { .. }
            | Warning::Uncalibrated { .. }
            | Warning::Throttled { .. }
            | Warning::Notes { .. }
            | Warning::NotesLate { .. }
            | Warning::Names { .. }
            | Warning::Repeats { .. }
            | Warning::Failed { .. }
            | Warning::LeftBehind
            | Warning::Unwatched { .. }
            | Warning::Close { .. }
            | Warning::ServerEnded { .. }
            | Warning::Contaminated { .. } => {}
        }
    }
    warnings
}
