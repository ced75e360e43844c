//! `wattle exec`: the command runs as it would without us, and what it drew is known.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use support::{Bench, assert_fails, metric, stderr};
use wattle_sim_nvml::Sim;

/// One board of 100 W behind a stand-in NVML.
fn board(bench: &Bench, scenario: &str) -> String {
    let sim = Sim::install(bench.path(), &format!(r#"{{"devices": [{scenario}]}}"#)).unwrap();
    format!("nvml.library={}", sim.library.display())
}

/// Runs `exec` with its result as JSON after the command's own output.
fn exec(bench: &Bench, args: &[&str], command: &[&str]) -> (Value, String) {
    let all = [&["exec", "--name", "x", "--format", "json"], args, &["--"], command].concat();
    let out = bench.run(&all);
    let text = String::from_utf8(out.stdout.clone()).unwrap();
    let start = text.find("{\n").unwrap_or_else(|| panic!("{args:?}: {}", stderr(&out)));
    (serde_json::from_str(&text[start..]).unwrap(), text[..start].to_owned())
}

fn warned(summary: &Value, warning: &str) -> bool {
    summary["warnings"].as_array().unwrap().iter().any(|w| w["warning"] == warning)
}

fn lines(run: &Path, kind: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("log.jsonl")).unwrap_or_default();
    let all = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    all.filter(|v| v["type"] == kind).collect()
}

/// Waits for something; the limit is only there to fail rather than hang.
fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    for _ in 0..3000 {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what} did not come");
}

#[test]
fn two_seconds_at_a_hundred_watts_are_two_hundred_joules_within_the_bound() {
    let bench = Bench::new();
    let library = board(&bench, "{}");
    let args = ["--source", "nvml", "--source-param", &library, "--energy", "measured"];
    let (summary, _) = exec(&bench, &args, &["sleep", "2"]);
    let energy = &summary["repetitions"][0]["energy"];
    let number = |v: &Value| v.as_f64().unwrap();
    let run = &summary["repetitions"][0];
    let seconds = (number(&run["end_ns"]) - number(&run["start_ns"])) * 1e-9;
    let (value, bound) = (number(&energy["value"]), number(&energy["bound"]));
    assert!((value - 100.0 * seconds).abs() <= bound, "{energy} in {seconds} s");
    assert!(seconds >= 2.0 && bound < 0.2 * value, "{energy} in {seconds} s");
    assert_eq!(energy["method"], "counter");
    assert!(number(&energy["coverage"]) > 0.999_999);
    assert!((metric(&summary, "energy_j") - value).abs() < 1e-6);
    assert_eq!(summary["devices"][0]["energy"]["value"], energy["value"]);
    assert_eq!(summary["perimeters"]["device"]["value"], energy["value"]);
    assert!(warned(&summary, "pretended_hardware"));
    // The screen has the interval, too.
    let shown = bench.run(&["exec", "--source", "nvml", "--source-param", &library, "--", "true"]);
    assert!(stderr(&shown).contains("95 % interval") && shown.stdout.is_empty(), "{}", stderr(&shown));
}

#[test]
fn output_input_and_exit_code_are_the_commands_own() {
    let bench = Bench::new();
    let args = ["exec", "--energy", "none", "--", "sh", "-c", "cat; echo to stderr >&2; exit 7"];
    let mut child = bench.command(&args);
    let mut child =
        child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"\x00\xffany bytes\n").unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!((out.status.code(), out.stdout.as_slice()), (Some(7), &b"\x00\xffany bytes\n"[..]));
    assert!(stderr(&out).starts_with("to stderr\n"), "{}", stderr(&out));
    let killed = bench.run(&["exec", "--energy", "none", "--", "sh", "-c", "kill -9 $$"]);
    assert_eq!(killed.status.code(), Some(137));
    assert_fails(&bench.run(&["exec", "--", "no-such-program"]), 127, "no such program");
    assert_fails(&bench.run(&["exec", "--", "/dev/null"]), 126, "may be run");
    assert_fails(&bench.run(&["exec"]), 2, "wattle exec -- sleep 2");
    assert_eq!(bench.runs().len(), 2, "what was not run has no folder");
}

#[test]
fn a_program_that_goes_away_between_runs_takes_nothing_with_it() {
    let bench = Bench::new();
    let program = bench.write("once.sh", "#!/bin/sh\nrm \"$0\"\n");
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, executable).unwrap();
    let out = bench.run(&["exec", "--energy", "none", "--name", "x", "--repeat", "3", "--", &program]);
    assert_fails(&out, 126, "cannot start");
    let run = bench.path().join("runs/x");
    assert_eq!(lines(&run, "repetition").len(), 1, "what had finished is kept");
    assert!(run.join("summary.json").exists());
    // What was never run leaves nothing.
    let broken = bench.write("broken.sh", "#!/no/such/interpreter\n");
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&broken, executable).unwrap();
    assert_fails(&bench.run(&["exec", "--energy", "none", "--", &broken]), 126, "cannot start");
    assert_eq!(bench.runs().len(), 1);
}

#[test]
fn a_signal_is_handed_on_and_the_command_decides() {
    let bench = Bench::new();
    let script = "trap 'echo told; exit 5' TERM; echo ready; while :; do sleep 0.05; done";
    let child = bench.start(&["exec", "--energy", "none", "--name", "x", "--", "sh", "-c", script]);
    let run = bench.path().join("runs/x");
    wait_for("its start", || lines(&run, "started").pop());
    std::thread::sleep(Duration::from_millis(200)); // for its trap
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(5), "{}", stderr(&out));
    assert_eq!(String::from_utf8_lossy(&out.stdout), "ready\ntold\n");
    assert_eq!(lines(&run, "repetition")[0]["exit_code"], 5);
}

#[test]
fn a_command_marks_its_phases_and_each_gets_its_energy() {
    let bench = Bench::new();
    let library = board(&bench, "{}");
    let script = r#"
        echo "{\"type\":\"begin\",\"name\":\"prefill\"}" >> $WATTLE_LOG; sleep 0.4
        echo "{\"type\":\"end\",\"name\":\"prefill\",\"tokens\":7}" >> $WATTLE_LOG; sleep 0.3
        echo "{\"type\":\"phase\",\"name\":\"decode\",\"seconds\":0.2}" >> $WATTLE_LOG
        echo "{\"type\":\"gauge\",\"name\":\"jax_peak_bytes\",\"value\":1048576}" >> $WATTLE_LOG
        echo "{\"type\":\"event\",\"event\":\"saved\",\"data\":{\"step\":1}}" >> $WATTLE_LOG
        echo "not json" >> $WATTLE_LOG
        printf '{"type":"begin","name":"left open"}' >> $WATTLE_LOG
        echo mine > $WATTLE_RESULT_DIR/mine.txt"#;
    let (summary, _) = exec(&bench, &["--source-param", &library, "--idle-s", "0"], &["sh", "-c", script]);
    let phase = |name: &str| {
        let phase = &summary["phases"][name];
        (phase["energy"]["value"].as_f64().unwrap(), phase["seconds"].as_f64().unwrap(), &phase["energy"])
    };
    // A line is dated when it is read; of the first, on a busy machine, that is a little later than it was written.
    for (name, least) in [("prefill", 0.3), ("decode", 0.2)] {
        let (joules, seconds, energy) = phase(name);
        let bound = energy["bound"].as_f64().unwrap();
        assert!(seconds >= least && (joules - 100.0 * seconds).abs() <= bound, "{name}: {summary}");
    }
    assert_eq!(summary["phases"]["left open"]["count"], 1);
    assert_eq!(summary["gauges"]["jax_peak_bytes"]["max"], 1048576.0);
    assert_eq!(summary["resources"]["jax_peak_bytes_mb"], 1.0);
    assert!(warned(&summary, "notes"));
    let run = bench.path().join("runs/x");
    assert_eq!(lines(&run, "phase")[0]["tokens"], 7);
    assert!(lines(&run, "event").iter().any(|e| e["event"] == "saved" && e["data"]["step"] == 1));
    assert_eq!(std::fs::read_to_string(run.join("result/mine.txt")).unwrap(), "mine\n");
}

/// Power that jumps where a phase begins and ends, said live by another process, is told apart within a refresh.
#[test]
fn a_phase_that_begins_and_ends_with_its_load_has_its_own_joules() {
    let bench = Bench::new();
    let live = bench.path().join("live.txt");
    let scenario = format!(r#"{{"devices": [{{"power": [[0, 50]]}}], "live": "{}"}}"#, live.display());
    let sim = Sim::install(bench.path(), &scenario).unwrap();
    let library = format!("nvml.library={}", sim.library.display());
    let script = r#"
import json, os, time
def note(**line):
    with open(os.environ["WATTLE_LOG"], "a") as log:
        log.write(json.dumps(line) + "\n")
def draw(watts):
    with open("live.txt", "a") as live:
        live.write(f"{time.monotonic_ns()} 0 {watts}\n")
draw(50)
time.sleep(1)
for _ in range(6):
    draw(300)
    note(type="begin", name="work", at_ns=time.monotonic_ns())
    time.sleep(0.33)
    note(type="end", name="work", at_ns=time.monotonic_ns())
    draw(50)
    time.sleep(0.57)
"#;
    bench.write("work.py", script);
    let args = ["--source", "nvml", "--source-param", &library, "--idle-s", "0"];
    let (summary, _) = exec(&bench, &args, &["python3", "work.py"]);
    let phase = &summary["phases"]["work"];
    let (joules, seconds) = (phase["energy"]["value"].as_f64().unwrap(), phase["seconds"].as_f64().unwrap());
    assert_eq!(phase["count"], 6);
    // Interpolated evenly it would be 8 % less.
    assert!((joules / (300.0 * seconds) - 1.0).abs() < 0.03, "{joules} J in {seconds} s");
}

#[test]
fn idle_power_that_changes_over_the_run_is_told_and_is_in_the_bounds() {
    let bench = Bench::new();
    let live = bench.path().join("live.txt");
    wattle_sim_nvml::Live::create(&live).unwrap().set(0, 50.0).unwrap();
    let scenario = format!(r#"{{"devices": [{{"power": [[0, 50]]}}], "live": "{}"}}"#, live.display());
    let sim = Sim::install(bench.path(), &scenario).unwrap();
    let library = format!("nvml.library={}", sim.library.display());
    let script = r#"
import time
def draw(watts):
    with open("live.txt", "a") as live:
        live.write(f"{time.monotonic_ns()} 0 {watts}\n")
draw(300)
time.sleep(1)
draw(80)
"#;
    bench.write("work.py", script);
    let args = ["--source", "nvml", "--source-param", &library, "--idle", "1500ms"];
    let (summary, _) = exec(&bench, &args, &["python3", "work.py"]);
    let told: Vec<Value> = lines(&bench.path().join("runs/x"), "event");
    let baselines: Vec<&Value> =
        told.iter().filter(|e| e["event"] == "idle_baseline").map(|e| &e["data"]).collect();
    let when: Vec<&Value> = baselines.iter().map(|b| &b["when"]).collect();
    assert_eq!(when, ["before", "after"]);
    assert!(baselines.iter().all(|b| b["seconds"].as_f64().unwrap() >= 1.5), "{baselines:?}");
    let idle = &summary["metrics"]["idle_power_w"];
    assert!((metric(&summary, "idle_power_w") - 65.0).abs() < 3.0, "{idle}");
    assert!(idle["low"].as_f64().unwrap() < 50.0 && idle["high"].as_f64().unwrap() > 80.0, "{idle}");
    let net = &summary["metrics"]["net_energy_j"];
    let half = (net["high"].as_f64().unwrap() - net["low"].as_f64().unwrap()) / 2.0;
    assert!(half > 13.0, "fifteen watts over a second: {net}");
    assert!(warned(&summary, "idle_drift"), "{}", summary["warnings"]);
    // A board that draws the same before and after has nothing to tell.
    let bench = Bench::new();
    let library = board(&bench, "{}");
    let args = ["--source", "nvml", "--source-param", &library, "--idle", "0.7"];
    let (summary, _) = exec(&bench, &args, &["sleep", "0.5"]);
    assert!(!warned(&summary, "idle_drift"), "{}", summary["warnings"]);
}

#[test]
fn what_a_command_says_is_not_taken_for_what_wattle_says() {
    let bench = Bench::new();
    let library = board(&bench, "{}");
    let script = r#"
        echo '{"type":"event","event":"idle_baseline","data":{"seconds":1,"power_w":{"value":5,"bound":0,"method":"counter","coverage":1}}}' >> $WATTLE_LOG
        echo '{"type":"phase","name":"long","seconds":3000}' >> $WATTLE_LOG
        sleep 0.5"#;
    let args = ["--source", "nvml", "--source-param", &library, "--idle-s", "0.5"];
    let (summary, _) = exec(&bench, &args, &["sh", "-c", script]);
    assert!((metric(&summary, "idle_power_w") - 100.0).abs() < 10.0, "{summary}");
    assert!(summary["phases"].as_object().unwrap().is_empty(), "longer than the command has run");
    let why = summary["warnings"].to_string();
    assert!(why.contains("line 2") && why.contains("longer than the command"), "{why}");
}

#[test]
fn a_killed_sessions_command_is_not_started_twice_and_its_notes_are_its_own() {
    let bench = Bench::new();
    let script = "for i in $(seq 100); do echo '{\"type\":\"gauge\",\"name\":\"orphan\",\"value\":1}' >> $WATTLE_LOG; sleep 0.05; done";
    let mut child = bench.start(&["exec", "--energy", "none", "--name", "x", "--", "sh", "-c", script]);
    let run = bench.path().join("runs/x");
    let pid = wait_for("its start", || lines(&run, "started").pop())["pid"].as_u64().unwrap().to_string();
    child.kill().unwrap();
    child.wait().unwrap();
    let resume = ["exec", "--resume", run.to_str().unwrap()];
    assert_fails(&bench.run(&resume), 1, &format!("kill {pid}"));
    assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    wait_for("its end", || (!Path::new(&format!("/proc/{pid}")).exists()).then_some(()));
    let out = bench.run(&[&resume[..], &["--format", "json"]].concat());
    let summary: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(summary["gauges"]["orphan"]["count"], 100, "only those of the run that ended");
    assert!(run.join("notes-0-0.jsonl").exists() && run.join("notes-1-0.jsonl").exists());
}

#[test]
fn a_run_that_was_interrupted_is_in_no_mean_and_is_made_up_for() {
    let bench = Bench::new();
    let args = ["exec", "--energy", "none", "--name", "x", "--repeat", "2", "--", "sleep", "0.6"];
    let child = bench.start(&args);
    let run = bench.path().join("runs/x");
    wait_for("its start", || lines(&run, "started").pop());
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(143));
    assert_eq!(lines(&run, "repetition").len(), 1, "no further one is started");
    let out = bench.run(&["exec", "--resume", run.to_str().unwrap(), "--format", "json"]);
    let summary: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((out.status.code(), &summary["complete"]), (Some(0), &Value::Bool(true)));
    assert_eq!((metric(&summary, "repetitions"), metric(&summary, "failed_repetitions")), (2.0, 0.0));
    assert!(metric(&summary, "seconds_per_repetition") >= 0.6);
}

#[test]
fn somebody_left_behind_who_writes_on_holds_nothing_up() {
    let bench = Bench::new();
    let script = r#"(while :; do echo '{"type":"gauge","name":"g","value":1}'; done >> $WATTLE_LOG 2>/dev/null &
        echo $! > $WATTLE_RESULT_DIR/pid) > /dev/null 2>&1; sleep 0.3"#;
    let out = bench.run(&["exec", "--energy", "none", "--name", "x", "--", "sh", "-c", script]);
    let pid = std::fs::read_to_string(bench.path().join("runs/x/result/pid")).unwrap();
    let _ = Command::new("kill").args(["-9", pid.trim()]).status();
    assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
    assert!(stderr(&out).contains("left processes running"), "{}", stderr(&out));
}

#[test]
fn a_program_that_writes_its_notes_anew_loses_none() {
    let bench = Bench::new();
    // Cut off and shorter, then another file in its place.
    let script = r#"echo '{"type":"phase","name":"p","seconds":0.0,"more":"than the next"}' > $WATTLE_LOG; sleep 0.3
        echo '{"type":"phase","name":"p","seconds":0}' > $WATTLE_LOG; sleep 0.3
        rm $WATTLE_LOG; echo '{"type":"phase","name":"p","seconds":0,"in":"another file"}' > $WATTLE_LOG; sleep 0.3"#;
    let (summary, _) = exec(&bench, &["--energy", "none", "--repeat", "2"], &["sh", "-c", script]);
    assert_eq!(summary["phases"]["p"]["count"], 6);
}

#[test]
fn who_ignores_the_ends_of_children_learns_them_all_the_same() {
    let bench = Bench::new();
    let wattle = env!("CARGO_BIN_EXE_wattle");
    let script = format!("trap '' CHLD; exec {wattle} exec --energy none -- sh -c 'exit 3'");
    let out = Command::new("bash").args(["-c", &script]).current_dir(bench.path()).output().unwrap();
    assert_eq!(out.status.code(), Some(3), "{}", stderr(&out));
}

#[test]
fn a_resumed_run_keeps_to_its_sensors() {
    let bench = Bench::new();
    let library = board(&bench, "{}");
    let args = [
        "exec",
        "--name",
        "x",
        "--repeat",
        "2",
        "--source",
        "nvml",
        "--source-param",
        &library,
        "--idle-s",
        "0",
    ];
    let script = "test -e ran && touch again; touch ran; test -e again";
    assert_eq!(bench.run(&[&args[..], &["--", "sh", "-c", script]].concat()).status.code(), Some(1));
    board(&bench, r#"{}, {"uuid": "GPU-b"}"#);
    let out = bench.run(&["exec", "--resume", bench.path().join("runs/x").to_str().unwrap()]);
    assert_fails(&out, 1, "set of sensors changed");
    assert!(!bench.path().join("again").exists(), "what cannot be added up is not run");
}

#[test]
fn a_driver_that_hangs_when_it_is_opened_is_left_out() {
    let bench = Bench::new();
    let library = board(&bench, r#"{"hang_after": 1}"#);
    let doctor = bench.run(&["doctor", "--source-param", &library, "--seconds", "0.2"]);
    let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(said.contains("its driver hangs") && doctor.status.code() == Some(1), "{said}");
}

#[test]
fn measured_means_all_of_it() {
    let bench = Bench::new();
    let library = board(&bench, r#"{"fail_after": 900}"#);
    let out = bench.run(&[
        "exec",
        "--source",
        "nvml",
        "--source-param",
        &library,
        "--idle-s",
        "0",
        "--energy",
        "measured",
        "sleep",
        "5",
    ]);
    assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
    assert!(
        stderr(&out).contains("not all of the energy") && stderr(&out).contains("above "),
        "{}",
        stderr(&out)
    );
}

#[test]
fn repeats_give_a_mean_with_an_interval_and_warm_up_counts_in_nothing() {
    let bench = Bench::new();
    let library = board(&bench, "{}");
    let args = ["--source-param", &library, "--repeat", "3", "--warmup", "1", "--idle-s", "0"];
    let script = r#"echo "{\"type\":\"phase\",\"name\":\"p\",\"seconds\":0.1}" >> $WATTLE_LOG; sleep 0.3"#;
    let (summary, _) = exec(&bench, &args, &["sh", "-c", script]);
    assert_eq!(metric(&summary, "repetitions"), 3.0);
    assert_eq!(summary["repetitions"].as_array().unwrap().len(), 4);
    assert_eq!(summary["phases"]["p"]["count"], 3);
    let mean = &summary["metrics"]["joules_per_repetition"];
    assert!(mean["low"].as_f64().unwrap() < mean["value"].as_f64().unwrap(), "{mean}");
    let total: f64 = summary["repetitions"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|r| r["warmup"] == false)
        .map(|r| r["energy"]["value"].as_f64().unwrap())
        .sum();
    assert!((metric(&summary, "energy_j") - total).abs() < 1e-6 * total);
    assert_eq!(summary["complete"], true);
}

#[test]
fn a_run_that_fails_ends_the_repeats_unless_they_are_to_go_on_and_they_can_be_resumed() {
    let bench = Bench::new();
    let script = "echo . >> $WATTLE_RESULT_DIR/count; test $(wc -l < $WATTLE_RESULT_DIR/count) -ne 2";
    let args = ["exec", "--energy", "none", "--repeat", "4", "--name", "x", "--", "sh", "-c", script];
    let out = bench.run(&args);
    assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
    assert!(stderr(&out).contains("run 2 of 4 times"), "{}", stderr(&out));
    let run = bench.path().join("runs/x");
    assert_eq!(lines(&run, "repetition").len(), 2);
    assert_fails(&bench.run(&["run", "--resume", run.to_str().unwrap()]), 2, "wattle exec --resume");
    let out = bench.run(&["exec", "--resume", run.to_str().unwrap(), "--format", "json"]);
    let summary: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((metric(&summary, "repetitions"), metric(&summary, "failed_repetitions")), (4.0, 1.0));
    assert_eq!(summary["complete"], true);
    let all = [&["exec", "--keep-going", "--overwrite"], &args[1..]].concat();
    let out = bench.run(&all);
    assert_eq!((out.status.code(), lines(&run, "repetition").len()), (Some(1), 4));
}

#[test]
fn killed_it_leaves_what_it_read_and_the_command_and_says_so() {
    let bench = Bench::new();
    let library = board(&bench, "{}");
    let mut child = bench.start(&[
        "exec",
        "--source-param",
        &library,
        "--name",
        "x",
        "--idle-s",
        "0",
        "--",
        "sleep",
        "60",
    ]);
    let run = bench.path().join("runs/x");
    let pid = wait_for("its start", || lines(&run, "started").pop())["pid"].as_u64().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    child.kill().unwrap();
    child.wait().unwrap();
    let alive = Path::new(&format!("/proc/{pid}")).exists();
    assert!(Command::new("kill").arg(pid.to_string()).status().unwrap().success() && alive);
    let stored = wattle_store::RunDir::open(&run).unwrap().stored_readings().unwrap();
    let stamps: Vec<u64> = stored.map(|r| r.unwrap().1.at.nanos()).collect();
    // All but the last moments: readings are handed over every half second.
    assert!(stamps.last().unwrap() - stamps.first().unwrap() > 800_000_000);
    let out = bench.run(&["report", run.to_str().unwrap()]);
    assert!(out.status.success(), "{}", stderr(&out));
    let summary: Value = serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap();
    assert!(warned(&summary, "unwatched"), "{}", summary["warnings"]);
    assert!(std::fs::read_to_string(run.join("report.html")).unwrap().contains(&format!("process {pid}")));
}

#[test]
fn an_nvml_that_starts_failing_costs_coverage_and_invents_nothing() {
    let bench = Bench::new();
    let library = board(&bench, r#"{"fail_after": 1500}"#);
    let args = ["--source", "nvml", "--source-param", &library, "--idle-s", "0"];
    let (summary, _) = exec(&bench, &args, &["sleep", "6"]);
    let run = &summary["repetitions"][0];
    let coverage = run["energy"]["coverage"].as_f64().unwrap();
    assert!(coverage < 0.9 && warned(&summary, "coverage") && warned(&summary, "sensor"), "{summary}");
    assert!(run["energy"]["value"].as_f64().unwrap() <= 600.0 * (coverage + 0.05), "{run}");
    assert_eq!(summary["metrics"]["mean_power_w"]["value"], Value::Null);
}

#[test]
fn an_nvml_that_hangs_holds_up_neither_the_command_nor_its_end() {
    let bench = Bench::new();
    let library = board(&bench, r#"{"hang_after": 1500}"#);
    let args = ["--source", "nvml", "--source-param", &library, "--idle-s", "0"];
    let (summary, said) = exec(&bench, &args, &["sh", "-c", "sleep 5; echo done"]);
    assert_eq!(said, "done\n");
    let coverage = summary["repetitions"][0]["energy"]["coverage"].as_f64().unwrap();
    assert!(coverage < 0.9 && warned(&summary, "coverage"), "{summary}");
    let stuck = |w: &Value| w["sensor"] == "sampler";
    assert!(summary["warnings"].as_array().unwrap().iter().any(stuck), "{}", summary["warnings"]);
}

#[test]
fn garbage_in_sysfs_is_a_gap_and_the_rest_goes_on() {
    let bench = Bench::new();
    let zone = bench.path().join("root/sys/class/powercap/intel-rapl:0");
    std::fs::create_dir_all(&zone).unwrap();
    for (file, text) in
        [("name", "package-0"), ("max_energy_range_uj", "262143328850"), ("energy_uj", "1000000")]
    {
        std::fs::write(zone.join(file), text).unwrap();
    }
    let root = bench.path().join("root");
    // 20 W, written in place; then garbage; then as if nothing had been.
    let script = r#"f=root/sys/class/powercap/intel-rapl:0/energy_uj; i=0
        put() { printf '%-20s' "$1" | dd of=$f conv=notrunc status=none; }
        while [ $i -lt 120 ]; do i=$((i+1)); put $((1000000 + i * 400000)); sleep 0.02; done
        put garbage; sleep 0.5
        while [ $i -lt 180 ]; do i=$((i+1)); put $((1000000 + i * 400000)); sleep 0.02; done"#;
    let args = ["--root", root.to_str().unwrap(), "--source", "rapl", "--idle-s", "0"];
    let (summary, _) = exec(&bench, &args, &["sh", "-c", script]);
    let energy = &summary["repetitions"][0]["energy"];
    // From its first change on, no joule is lost: the counter counted on.
    let joules = energy["value"].as_f64().unwrap();
    assert!(joules > 60.0 && joules <= 72.0, "{energy}");
    assert!(warned(&summary, "sensor") && warned(&summary, "pretended_hardware"), "{}", summary["warnings"]);
}

#[test]
fn without_a_sensor_it_estimates_and_says_so_or_refuses() {
    let bench = Bench::new();
    // A machine without GPU and RAPL; its /proc is our own.
    let root = bench.path().join("bare");
    std::fs::create_dir_all(root.join("proc")).unwrap();
    for file in ["proc/stat", "proc/meminfo", "proc/cpuinfo"] {
        std::fs::copy(Path::new("/").join(file), root.join(file)).unwrap();
    }
    let root = root.to_str().unwrap();
    let (summary, _) = exec(&bench, &["--root", root, "--source", "model"], &["sleep", "0.3"]);
    assert_eq!(summary["metrics"]["energy_j"]["method"], "model");
    assert!(warned(&summary, "energy_estimated") && warned(&summary, "pretended_hardware"));
    let refused = bench
        .run(&["exec", "--root", root, "--source", "rapl", "--energy", "measured", "--", "touch", "ran"]);
    assert_fails(&refused, 1, "rapl");
    assert!(!bench.path().join("ran").exists(), "what is not measured is not run");
}

#[test]
fn everything_the_command_starts_is_counted_as_its_own() {
    let bench = Bench::new();
    // A grandchild that works and outlives its parent, and one that is left behind.
    let busy = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done";
    let left = "sleep 60 > /dev/null 2>&1 & echo $! > $WATTLE_RESULT_DIR/pid";
    let script = format!("(sh -c '{busy}' &) ; {left}; sleep 1.5");
    let (summary, _) = exec(&bench, &["--idle-s", "0"], &["sh", "-c", &script]);
    let pid = std::fs::read_to_string(bench.path().join("runs/x/result/pid")).unwrap();
    assert!(Command::new("kill").arg(pid.trim()).status().unwrap().success(), "it was left alone");
    assert!(summary["resources"]["tree_cpu_s"].as_f64().unwrap() > 0.05, "{}", summary["resources"]);
    assert!(warned(&summary, "left_behind"));
    assert!(summary["resources"]["tree_peak_rss_mb"].as_f64().unwrap() > 0.5);
    assert!(summary["resources"]["cpu_idle_mean_pct"].as_f64().is_some());
}
