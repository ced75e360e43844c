//! A run is recorded and played back as the hardware of another.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use serde_json::Value;
use support::{Bench, assert_fails, metric};

const CONSTANT: &str =
    r#"{"devices":[{"kind":"gpu","id":"GPU-0","name":"Pretend 120","power":[[0,120]],"refresh_ms":20}]}"#;

/// Records a run at 120 W; its idle baseline alone is longer than the run that plays it back.
fn record(bench: &Bench) -> String {
    let param = format!("replay.scenario={}", bench.write("constant.json", CONSTANT));
    let args = ["run", "--source", "replay", "--source-param", &param, "--idle-s", "8", "--name", "recorded"];
    let summary = bench.summary(&[&args[..], &["--max-queries", "500"]].concat());
    assert!((metric(&summary, "mean_power_w") - 120.0).abs() < 6.0, "{summary}");
    format!("replay.run={}", bench.only_run().display())
}

fn play(bench: &Bench, params: &[&str]) -> Value {
    let mut args =
        vec!["run", "--source", "replay", "--idle-s", "0.2", "--max-queries", "500", "--energy", "measured"];
    args.extend(params.iter().flat_map(|p| ["--source-param", *p]));
    bench.summary(&args)
}

#[test]
fn a_recorded_run_played_back_draws_what_it_drew_and_passes_for_pretended() {
    let bench = Bench::new();
    let run = record(&bench);
    let played = play(&bench, &[&run]);
    assert!((metric(&played, "mean_power_w") - 120.0).abs() < 6.0, "{played}");
    assert_eq!(played["metrics"]["energy_j"]["method"], "counter");
    assert!(metric(&played, "energy_coverage") > 0.99);
    assert!(played["hardware_label"].as_str().unwrap().contains("Pretend-120"));
    let warnings = played["warnings"].to_string();
    assert!(warnings.contains("pretended_hardware") && warnings.contains("played back"), "{warnings}");
    // The same joules in half the time.
    let fast = play(&bench, &[&run, "replay.speed=2"]);
    assert!((metric(&fast, "mean_power_w") - 240.0).abs() < 12.0, "{fast}");
}

#[test]
fn a_run_without_readings_cannot_be_played_back() {
    let bench = Bench::new();
    bench.summary(&["run", "--energy", "none", "--max-queries", "2"]);
    let run = format!("replay.run={}", bench.only_run().display());
    assert_fails(&bench.run(&["run", "--source-param", &run]), 1, "it has no readings");
    assert_fails(
        &bench.run(&["run", "--source-param", "replay.run=nowhere"]),
        1,
        "cannot play back run nowhere",
    );
}
