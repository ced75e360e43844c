//! What work costs, measured on a server and a board that know the truth, and used by the runs that follow.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use serde_json::{Value, json};
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::{Mutex, MutexGuard, PoisonError};
use support::{Bench, stderr};
use wattle_meter::clock;
use wattle_sim_nvml::Sim;
use wattle_sim_server::{Config, Server};

/// What the engine truly costs: joules above idle, and seconds.
const JOULES: [(&str, f64); 4] = [("fixed", 1.0), ("prefill", 0.006), ("decode", 0.05), ("context", 1e-4)];
const SECONDS: [(&str, f64); 4] = [("fixed", 4e-3), ("prefill", 2e-5), ("decode", 5e-5), ("context", 1e-7)];

/// A server with an engine, and the board that draws what it says.
struct World {
    bench: Bench,
    server: Server,
    library: String,
    /// Calibrations beside each other would measure each other.
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl World {
    fn new(max_batch: usize) -> Self {
        Self::with(max_batch, &json!({}), &json!({}))
    }

    /// With more of the server's settings, and of the board's.
    fn with(max_batch: usize, server: &Value, board: &Value) -> Self {
        let bench = Bench::new();
        let live = bench.path().join("live.txt");
        let cost =
            |parts: [(&str, f64); 4]| json!(parts.into_iter().collect::<std::collections::BTreeMap<_, _>>());
        let engine = json!({
            "max_batch": max_batch, "idle_watts": 60, "live": live, "prefill_budget": 8192,
            "joules": cost(JOULES), "seconds": cost(SECONDS),
        });
        let mut config = json!({"tokens": 4096, "realtime": true, "keep_log": false, "engine": engine});
        let add = |to: &mut Value, more: &Value| {
            to.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        };
        add(&mut config, server);
        let server = Server::start(Config::parse(&config.to_string()).unwrap()).unwrap();
        let mut device = json!({"power": [[0, 60]], "refresh_ms": 100});
        add(&mut device, board);
        let scenario = json!({"devices": [device], "live": live});
        let sim = Sim::install(bench.path(), &scenario.to_string()).unwrap();
        let library = format!("nvml.library={}", sim.library.display());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Self { bench, server, library, _alone }
    }

    fn calibrations(&self) -> PathBuf {
        self.bench.path().join("calibrations")
    }

    fn run(&self, command: &str, more: &[&str]) -> Output {
        self.run_at(&self.server.url(), command, more)
    }

    fn run_at(&self, url: &str, command: &str, more: &[&str]) -> Output {
        let args = [
            command,
            "--client",
            "openai",
            "--url",
            url,
            "--source",
            "nvml",
            "--source-param",
            &self.library,
        ];
        self.bench.run(&[&args[..], more].concat())
    }

    /// So many at once, by name; gives its `run.json` and its warnings.
    fn load(&self, name: &str, at_once: &str, more: &[&str]) -> (Value, String) {
        self.load_at(&self.server.url(), name, at_once, more)
    }

    fn load_at(&self, url: &str, name: &str, at_once: &str, more: &[&str]) -> (Value, String) {
        let what = ["--dataset", "synthetic", "--dataset-param", "input=64", "--dataset-param", "output=16"];
        let load = ["--max-queries", "24", "--concurrency", at_once, "--name", name, "--format", "json"];
        let out = self.run_at(url, "run", &[&what[..], &load, more].concat());
        assert!(out.status.success(), "{}", stderr(&out));
        let summary: Value = serde_json::from_slice(&out.stdout).unwrap();
        (read(&self.bench.path().join("runs").join(name).join("run.json")), summary["warnings"].to_string())
    }
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn what_work_costs_is_found_and_used_by_the_runs_that_follow() {
    let world = World::new(64);
    let out = world.run("calibrate", &["--quick", "--format", "json"]);
    assert!(out.status.success(), "{}", stderr(&out));
    assert!(stderr(&out).contains("24 loads in random order, about"), "{}", stderr(&out));
    let found: Value = serde_json::from_slice(&out.stdout).unwrap();
    for (part, truth) in JOULES {
        let (got, bound) = (found["joules"][part].as_f64().unwrap(), found["bound"][part].as_f64().unwrap());
        // A quick one on a busy machine: near, and not further off than it says itself.
        let most = (2.0 * bound).clamp(0.15 * truth, 0.6 * truth);
        assert!((got - truth).abs() < most, "{part}: {got} ± {bound} J of {truth}");
    }
    for (part, truth) in SECONDS {
        let got = found["seconds"][part].as_f64().unwrap();
        assert!((got - truth).abs() < 0.5 * truth, "{part}: {got} s of {truth}");
    }
    let quality = &found["quality"];
    assert!(
        quality["r2"].as_f64().unwrap() > 0.95 && quality["condition"].as_f64().unwrap() < 30.0,
        "{quality}"
    );
    assert_eq!((&quality["cells"], &quality["repeats"]), (&json!(24), &json!(3)));

    let listed = String::from_utf8(world.bench.run(&["list", "calibrations"]).stdout).unwrap();
    assert!(listed.contains("tiny") && listed.contains(&found["digest"].as_str().unwrap()[..12]), "{listed}");

    let (info, warnings) = world.load("same", "8", &[]);
    let attribution = &info["attribution"];
    assert_eq!((&attribution["origin"], &attribution["digest"]), (&json!("calibration"), &found["digest"]));
    assert_eq!(attribution["joules"], found["joules"]);
    assert!(!warnings.contains("uncalibrated"), "{warnings}");

    let (info, warnings) = world.load("none", "8", &["--calibration", "none"]);
    assert_eq!(info["attribution"]["origin"], "defaults");
    assert!(warnings.contains("uncalibrated"), "{warnings}");

    let file = std::fs::read_dir(world.calibrations()).unwrap().next().unwrap().unwrap().path();
    let file = file.display().to_string();
    let (info, _) = world.load("file", "8", &["--calibration", &file]);
    assert_eq!(info["attribution"]["origin"], "calibration");

    // By another name it is another model.
    let other = Server::start(Config { model: "other".into(), ..Config::default() }).unwrap();
    let (info, warnings) = world.load_at(&other.url(), "other", "8", &[]);
    assert_eq!(info["attribution"]["origin"], "defaults");
    assert!(warnings.contains("uncalibrated"), "{warnings}");
    let wrong = world.run_at(&other.url(), "run", &["--calibration", &file]);
    support::assert_fails(&wrong, 2, "its model is tiny, and that of this run is other");
}

#[test]
fn a_run_that_could_be_calibrated_says_how() {
    let world = World::new(64);
    let (info, warnings) = world.load("plain", "8", &[]);
    assert_eq!(info["attribution"]["origin"], "defaults");
    let call = format!("wattle calibrate --client openai --url {} --model tiny", world.server.url());
    assert!(warnings.contains(&call), "{call} is not in {warnings}");
    let (_, alone) = world.load("alone", "1", &[]);
    assert!(!alone.contains("uncalibrated"), "{alone}");
    let (info, without) = world.load("without", "8", &["--energy", "none"]);
    assert!(!without.contains("uncalibrated") && info["attribution"].is_null(), "{without}");
}

#[test]
fn a_calibration_that_is_stopped_leaves_nothing_behind() {
    let world = World::new(64);
    let (url, library) = (world.server.url(), &world.library);
    let args =
        ["calibrate", "--client", "openai", "--url", &url, "--source", "nvml", "--source-param", library];
    let mut child = world.bench.start(&[&args[..], &["--out", "here"]].concat());
    let mut told = String::new();
    std::io::BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut told).unwrap();
    assert!(told.contains("80 loads in random order"), "{told}");
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(std::fs::read_dir(world.bench.path().join("here")).unwrap().next().is_none());
}

#[test]
fn a_server_that_takes_one_at_a_time_is_refused_before_anything_is_measured() {
    let world = World::new(1);
    let out = world.run("calibrate", &["--quick", "--max-concurrency", "8"]);
    let told = stderr(&out);
    assert_eq!(out.status.code(), Some(1), "{told}");
    assert!(told.contains("answers one at a time") && told.contains("--max-num-seqs"), "{told}");
    assert!(!told.contains("loads in random order"), "{told}");
    assert!(std::fs::read_dir(world.calibrations()).unwrap().next().is_none(), "nothing is kept");
    let out = world.run("calibrate", &["--quick", "--out", "/proc/x.json"]);
    support::assert_fails(&out, 1, "cannot keep a calibration in /proc");
    let out = world.run("calibrate", &["--quick", "--max-concurrency", "1"]);
    support::assert_fails(&out, 2, "let --max-concurrency be 2 at least");
}

#[test]
fn a_client_that_answers_one_at_a_time_is_not_told_to_calibrate() {
    let world = World::new(64);
    let sensors = ["--source", "nvml", "--source-param", &world.library];
    let what = ["run", "--client", "embedded", "--max-queries", "6", "--concurrency", "3"];
    let how = ["--warmup", "0", "--max-tokens", "4", "--format", "json"];
    let out = world.bench.run(&[&what[..], &how, &sensors].concat());
    assert!(out.status.success(), "{}", stderr(&out));
    let summary: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert!(!summary["warnings"].to_string().contains("uncalibrated"), "{}", summary["warnings"]);
    let out = world.bench.run(&[&["calibrate", "--client", "embedded"], &sensors[..]].concat());
    support::assert_fails(&out, 2, "answers one at a time");
}

#[test]
fn a_request_that_is_refused_once_loses_no_calibration_and_doubts_are_kept() {
    // Every five-hundredth is told to come back in a second. The board is hot all the time.
    let traps = json!({"traps": [{"trap": "status_429", "every": 500}]});
    let world = World::with(64, &traps, &json!({"throttle": 0x40}));
    let out = world.run("calibrate", &["--quick", "--max-concurrency", "8", "--out", "here.json"]);
    // Lines are broken where the screen ends.
    let told = stderr(&out).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(out.status.success(), "{told}");
    assert!(told.contains("a load will be measured again") && told.contains("429"), "{told}");
    assert!(told.contains("slowed down by heat"), "{told}");
    let shown = String::from_utf8(out.stdout).unwrap();
    assert!(
        shown.contains("use it with --calibration ./here.json") && !shown.contains("from now on"),
        "{shown}"
    );
    let kept = read(&world.bench.path().join("here.json"));
    assert!(kept["warnings"].to_string().contains("slowed down by heat"), "{}", kept["warnings"]);
    assert_eq!(kept["quality"]["repeats"], 3, "what was refused was measured in the end");
}

#[test]
fn answers_that_end_by_themselves_are_told() {
    let world = World::with(64, &json!({"tokens": 5}), &json!({}));
    let out = world.run("calibrate", &["--quick"]);
    support::assert_fails(&out, 1, "answers end by themselves after 5 tokens, although 24 were asked for");
}

#[test]
fn a_server_without_usage_is_told_what_helps() {
    let world = World::with(64, &json!({"traps": [{"trap": "usage_missing", "every": 1}]}), &json!({}));
    let out = world.run("calibrate", &["--quick"]);
    support::assert_fails(&out, 1, "let it send usage");
    assert!(!stderr(&out).contains("tokenizer"));
}

#[test]
fn calibrations_that_are_passed_over_are_named() {
    let bench = Bench::new();
    std::fs::create_dir_all(bench.path().join("calibrations")).unwrap();
    bench.write("calibrations/old.json", r#"{"calibration_version": 0}"#);
    let out = bench.run(&["list", "calibrations"]);
    assert!(stderr(&out).contains("old.json") && stderr(&out).contains("version 0"), "{}", stderr(&out));
    let listed = String::from_utf8(out.stdout).unwrap();
    assert!(listed.contains("passed over") && listed.contains("calibrate again"), "{listed}");
}

#[test]
fn somebody_else_who_comes_later_costs_loads_and_then_the_calibration() {
    let world = World::new(64);
    let (url, library) = (world.server.url(), &world.library);
    let args =
        ["calibrate", "--client", "openai", "--url", &url, "--source", "nvml", "--source-param", library];
    let mut child = world.bench.start(&[&args[..], &["--quick", "--out", "here"]].concat());
    let mut reader = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut told = String::new();
    reader.read_line(&mut told).unwrap();
    assert!(told.contains("loads in random order"), "{told}");
    let asks = ["run", "--client", "openai", "--url", &url, "--energy", "none", "--warmup", "0"];
    let what = ["--dataset", "synthetic", "--dataset-param", "output=4000", "--max-queries", "9"];
    let mut other = world.bench.start(&[&asks[..], &what].concat());
    std::io::Read::read_to_string(&mut reader, &mut told).unwrap();
    let code = child.wait().unwrap().code();
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("a load will be measured again: the server works for somebody else"), "{told}");
    assert!(told.contains("keep them away, and calibrate again"), "{told}");
}

#[test]
fn what_is_estimated_cannot_be_calibrated() {
    let world = World::new(64);
    let url = world.server.url();
    let base = ["calibrate", "--client", "openai", "--url", &url, "--out", "here"];
    let out = world.bench.run(&[&base[..], &["--source", "model"]].concat());
    support::assert_fails(&out, 1, "a calibration needs measured energy");
    let out = world.bench.run(&[&base[..], &["--energy", "none"]].concat());
    support::assert_fails(&out, 2, "leave out --energy none");
}

#[test]
fn a_server_that_works_for_somebody_else_is_refused() {
    let world = World::new(64);
    let url = world.server.url();
    // 4000 tokens take sixteen seconds.
    let asks = ["run", "--client", "openai", "--url", &url, "--energy", "none", "--warmup", "0"];
    let what = ["--dataset", "synthetic", "--dataset-param", "output=4000", "--max-queries", "1"];
    let mut other = world.bench.start(&[&asks[..], &what].concat());
    let deadline = clock::now().plus_nanos(20_000_000_000);
    while world.server.in_flight() == 0 && clock::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let out = world.run("calibrate", &["--quick"]);
    other.kill().unwrap();
    other.wait().unwrap();
    support::assert_fails(&out, 1, "the server works for somebody else");
}
