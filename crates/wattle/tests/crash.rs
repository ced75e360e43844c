//! Nothing lost: kill -9 at any moment, signals, a second process, a full disk.
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that cannot go on stops, and says what it drew"
)]

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;
use support::{Bench, assert_fails, recorded, stderr};

const QUERIES: usize = 400;

fn wait_for_records(run: &dyn Fn() -> Option<PathBuf>, child: &mut Child, count: usize) {
    while child.try_wait().unwrap().is_none() {
        let log = run().and_then(|r| std::fs::read_to_string(r.join("log.jsonl")).ok()).unwrap_or_default();
        if log.matches("\"type\":\"record\"").count() >= count {
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Up to `below` milliseconds, at random: the test is about any moment. Printed, so that a failure shows which it was.
fn random(below: u64) -> Duration {
    use std::hash::{BuildHasher, Hasher};
    let drawn = std::hash::RandomState::new().build_hasher().finish() % below;
    eprintln!("drew {drawn} of {below}");
    Duration::from_millis(drawn)
}

fn signal(child: &Child, name: &str) {
    let ok = std::process::Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(ok.success());
}

fn assert_every_item_once(run: &Path, count: usize) {
    let indices = recorded(run);
    assert_eq!(indices.len(), count, "each item once");
    assert_eq!(indices.iter().copied().collect::<BTreeSet<_>>(), (0..count as u64).collect());
}

#[test]
fn killed_ten_times_and_resumed_every_item_is_recorded_exactly_once() {
    const MANY: usize = 3000;
    let bench = Bench::new();
    let lines: String =
        (0..MANY).map(|i| format!("{{\"prompt\":\"{i}+1=\",\"answer\":\"{}\"}}\n", i + 1)).collect();
    let path = format!("path={}", bench.write("many.jsonl", &lines));
    let start = ["run", "--dataset", "jsonl", "--dataset-param", &path, "--idle-s", "0", "--name", "victim"];
    let run = bench.path().join("runs/victim");
    let mut before = 0;
    for kill in 0..10usize {
        let resume = ["run", "--resume", run.to_str().unwrap()];
        let mut child = bench.start(if kill == 0 { &start } else { &resume });
        let wanted = before + random(60).as_millis() as usize;
        wait_for_records(&|| run.exists().then(|| run.clone()), &mut child, wanted);
        std::thread::sleep(random(15));
        child.kill().unwrap();
        child.wait().unwrap();
        let now = recorded(&run);
        assert!(now.len() >= before, "nothing that was finished is lost");
        assert_eq!(now.len(), now.iter().collect::<BTreeSet<_>>().len(), "nothing is asked twice");
        before = now.len();
    }
    assert!(before < MANY, "the kills came too late to mean anything");
    // And while the tables are made: all is asked, nothing may be asked again, and what is half made is made anew.
    for _ in 0..3 {
        let mut child = bench.start(&["run", "--resume", run.to_str().unwrap()]);
        wait_for_records(&|| Some(run.clone()), &mut child, MANY);
        std::thread::sleep(random(30));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let summary = bench.summary(&["run", "--resume", run.to_str().unwrap()]);
    assert_every_item_once(&run, MANY);
    assert_eq!((&summary["complete"], &summary["total_queries"]), (&true.into(), &MANY.into()));
    assert_eq!(summary["metrics"]["queries"]["value"].as_f64(), Some(MANY as f64));
    assert!(summary["sessions"].as_object().unwrap().len() > 1);
    let left: Vec<_> = std::fs::read_dir(&run)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.ends_with(".arrows") || n.contains("tmp"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_signal_saves_everything_and_resume_goes_on() {
    for (name, code) in [("-INT", 130), ("-TERM", 143)] {
        let bench = Bench::new();
        let queries = QUERIES.to_string();
        let run = bench.path().join("runs/x");
        let mut child = bench.start(&[
            "run",
            "--max-queries",
            &queries,
            "--idle-s",
            "0",
            "--name",
            "x",
            "--format",
            "json",
        ]);
        wait_for_records(&|| run.exists().then(|| run.clone()), &mut child, 5);
        signal(&child, name);
        let out = child.wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(code), "{}", stderr(&out));
        assert!(stderr(&out).contains("--resume"), "{}", stderr(&out));
        let summary: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        let asked = recorded(&run).len();
        assert_eq!((&summary["complete"], &summary["total_queries"]), (&false.into(), &asked.into()));
        assert!(run.join("requests.parquet").exists() && run.join("summary.json").exists());
        bench.summary(&["run", "--resume", run.to_str().unwrap()]);
        assert_every_item_once(&run, QUERIES);
    }
}

#[test]
fn an_interrupted_run_knows_the_energy_of_everything_it_finished() {
    let bench = Bench::new();
    let scenario = r#"{"devices":[{"kind":"cpu","id":"c","name":"c","power":[[0,100]],"refresh_ms":400}]}"#;
    let param = format!("replay.scenario={}", bench.write("slow.json", scenario));
    let run = bench.path().join("runs/x");
    let args = ["run", "--source", "replay", "--source-param", &param, "--name", "x", "--format", "json"];
    let server = support::Server::start(Box::new(|n, _, out| {
        std::thread::sleep(Duration::from_millis(10));
        support::stream(out, &support::reply(n, &["x"]))
    }));
    let lines: String = (0..1000).map(|i| format!("{{\"prompt\":\"{i}\"}}\n")).collect();
    let path = format!("path={}", bench.write("q.jsonl", &lines));
    let load = ["--client", "openai", "--url", &server.url, "--dataset", "jsonl", "--dataset-param", &path];
    let mut child = bench.start(&[&args[..], &load[..]].concat());
    wait_for_records(&|| run.exists().then(|| run.clone()), &mut child, 20);
    signal(&child, "-INT");
    let out = child.wait_with_output().unwrap();
    let summary: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert!(support::metric(&summary, "energy_coverage") > 0.99, "{}", summary["metrics"]["energy_coverage"]);
    let power = support::metric(&summary, "mean_power_w");
    assert!((power - 100.0).abs() < 10.0, "{power}");
}

#[test]
fn resuming_a_finished_run_asks_nothing() {
    let bench = Bench::new();
    let first = bench.summary(&["run", "--max-queries", "5", "--idle-s", "0.1"]);
    let run = bench.only_run();
    let again = bench.summary(&["run", "--resume", run.to_str().unwrap()]);
    assert_every_item_once(&run, 5);
    assert_eq!(first["metrics"], again["metrics"]);
}

#[test]
fn a_changed_dataset_is_not_mixed_with_the_old_one() {
    let bench = Bench::new();
    let path = bench.write("q.jsonl", "{\"prompt\":\"a\"}\n{\"prompt\":\"b\"}\n");
    bench.summary(&[
        "run",
        "--energy",
        "none",
        "--dataset",
        "jsonl",
        "--dataset-param",
        &format!("path={path}"),
    ]);
    bench.write("q.jsonl", "{\"prompt\":\"a\"}\n{\"prompt\":\"c\"}\n");
    let run = bench.only_run();
    assert_fails(&bench.run(&["run", "--resume", run.to_str().unwrap()]), 1, "the dataset changed");
}

#[test]
fn two_processes_cannot_work_on_one_run() {
    let bench = Bench::new();
    let server = support::Server::start(Box::new(|n, _, out| {
        std::thread::sleep(Duration::from_millis(50));
        support::stream(out, &support::reply(n, &["x"]))
    }));
    let lines: String = (0..1000).map(|i| format!("{{\"prompt\":\"{i}\"}}\n")).collect();
    let path = format!("path={}", bench.write("q.jsonl", &lines));
    let args =
        ["run", "--client", "openai", "--url", &server.url, "--dataset", "jsonl", "--dataset-param", &path];
    let run = bench.path().join("runs/x");
    let mut child = bench.start(&[&args[..], &["--name", "x", "--energy", "none"]].concat());
    wait_for_records(&|| run.exists().then(|| run.clone()), &mut child, 1);
    assert_fails(&bench.run(&["run", "--resume", run.to_str().unwrap()]), 1, "in use by another wattle");
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn a_run_is_of_one_model() {
    let bench = Bench::new();
    let queries = QUERIES.to_string();
    let run = bench.path().join("runs/x");
    let mut child = bench.start(&["run", "--max-queries", &queries, "--idle-s", "0", "--name", "x"]);
    wait_for_records(&|| run.exists().then(|| run.clone()), &mut child, 1);
    child.kill().unwrap();
    child.wait().unwrap();
    let info = std::fs::read_to_string(run.join("run.json")).unwrap();
    let digest = serde_json::from_str::<serde_json::Value>(&info).unwrap()["model"]["sha256"]
        .as_str()
        .unwrap()
        .to_owned();
    std::fs::write(run.join("run.json"), info.replace(&digest, &"0".repeat(64))).unwrap();
    assert_fails(&bench.run(&["run", "--resume", run.to_str().unwrap()]), 1, "the model's digest changed");
    let broken = info.replace("\"timeout_s\": 600.0", "\"timeout_s\": -1");
    assert_ne!(broken, info);
    std::fs::write(run.join("run.json"), broken).unwrap();
    assert_fails(&bench.run(&["run", "--resume", run.to_str().unwrap()]), 2, "timeout_s");
}

#[test]
fn a_report_is_never_older_than_the_log() {
    let bench = Bench::new();
    bench.summary(&["run", "--energy", "none", "--max-queries", "3"]);
    let run = bench.only_run();
    let log = std::fs::read_to_string(run.join("log.jsonl")).unwrap();
    let row = log
        .lines()
        .find(|l| l.contains("\"type\":\"record\""))
        .unwrap()
        .replace("\"index\":0", "\"index\":7");
    std::fs::write(run.join("log.jsonl"), format!("{log}{row}\n")).unwrap();
    assert!(bench.run(&["report", run.to_str().unwrap()]).status.success());
    let summary = std::fs::read(run.join("summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_slice(&summary).unwrap();
    assert_eq!(summary["total_queries"], 4);
}

#[test]
fn a_full_disk_is_told_and_what_was_finished_is_kept() {
    // A limit on file size stands in for the full disk: the write fails in the middle of the log.
    let bench = Bench::new();
    let run = bench.path().join("runs/x");
    let wattle = env!("CARGO_BIN_EXE_wattle");
    let script =
        format!("trap '' XFSZ; ulimit -f 64; exec {wattle} run --max-queries {QUERIES} --idle-s 0 --name x");
    let out =
        std::process::Command::new("bash").args(["-c", &script]).current_dir(bench.path()).output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
    assert!(stderr(&out).contains("--resume"), "{}", stderr(&out));
    let kept = recorded(&run).len();
    assert!(kept > 0 && kept < QUERIES, "{kept}");
    bench.summary(&["run", "--resume", run.to_str().unwrap()]);
    assert_every_item_once(&run, QUERIES);
}
