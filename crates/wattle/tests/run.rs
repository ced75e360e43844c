//! `wattle run` as a user meets it: the result, the files, the settings, the mistakes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use serde_json::Value;
use support::{Bench, assert_fails, metric, recorded, stderr};

/// The names other programs rely on.
const CONTRACT: &[&str] = &[
    "queries",
    "errors",
    "accuracy",
    "energy_j",
    "joules_per_query",
    "joules_per_output_token",
    "output_tokens_per_joule",
    "mean_power_w",
    "output_tokens_per_s",
    "ttft_s",
    "itl_s",
    "latency_s",
    "ipj",
    "ipw",
    "attribution_residual",
    "meter_cpu_fraction",
];

const CONSTANT: &str =
    r#"{"devices":[{"kind":"gpu","id":"GPU-0","name":"Pretend 100","power":[[0,100]],"refresh_ms":20}]}"#;

#[test]
fn a_plain_run_measures_and_shows_the_result() {
    let bench = Bench::new();
    let out = bench.run(&["run", "--max-queries", "20", "--idle-s", "0.1"]);
    assert!(out.status.success(), "{}", stderr(&out));
    let screen = String::from_utf8(out.stdout).unwrap();
    for text in ["accuracy", "energy per query", "95 % interval", "files", "Next:", "20 queries"] {
        assert!(screen.contains(text), "{text:?} is not in {screen}");
    }
    let run = bench.only_run();
    for file in
        ["run.json", "log.jsonl", "requests.parquet", "readings.parquet", "summary.json", "report.html", "hf"]
    {
        assert!(run.join(file).exists(), "{file}");
    }
    assert_eq!(recorded(&run), (0..20).collect::<Vec<_>>());
}

#[test]
fn json_has_every_name_of_the_contract_with_interval_unit_n_and_method() {
    let bench = Bench::new();
    let summary = bench.summary(&["run", "--max-queries", "50", "--idle-s", "0.1"]);
    for name in CONTRACT {
        let metric = &summary["metrics"][name];
        for field in ["value", "low", "high", "unit", "n", "method"] {
            assert!(metric.get(field).is_some(), "{name}.{field}");
        }
    }
    for field in ["p50", "p90", "p99"] {
        assert!(summary["metrics"]["latency_s"][field].is_f64(), "{field}");
    }
    let span = &summary["span"];
    assert!(span["start_ns"].as_u64() < span["end_ns"].as_u64());
    for key in ["schema_version", "run_id", "model", "dataset", "hardware_label", "warnings"] {
        assert!(!summary[key].is_null(), "{key}");
    }
    assert!(metric(&summary, "accuracy") > 0.8, "the built-in model can do its tasks");
    let on_disk = std::fs::read(bench.only_run().join("summary.json")).unwrap();
    assert_eq!(summary, serde_json::from_slice::<Value>(&on_disk).unwrap());
}

#[test]
fn known_power_gives_known_energy_and_every_joule_is_accounted_for() {
    let bench = Bench::new();
    let scenario = bench.write("constant.json", CONSTANT);
    let param = format!("replay.scenario={scenario}");
    let summary = bench.summary(&[
        "run",
        "--source",
        "replay",
        "--source-param",
        &param,
        "--idle-s",
        "0.2",
        "--energy",
        "measured",
    ]);
    let seconds = (summary["span"]["end_ns"].as_u64().unwrap()
        - summary["span"]["start_ns"].as_u64().unwrap()) as f64
        * 1e-9;
    let energy = &summary["metrics"]["energy_j"];
    let (low, high) = (energy["low"].as_f64().unwrap(), energy["high"].as_f64().unwrap());
    // A 95 % interval misses one time in twenty; three times as far, never.
    let (truth, stated) = (100.0 * seconds, metric(&summary, "energy_j"));
    assert!((truth - stated).abs() <= 1.5 * (high - low), "{truth} J in truth: {energy}");
    assert!(high - low < 0.05 * truth, "and it is narrow: {energy}");
    assert_eq!(energy["method"], "counter");
    assert!((metric(&summary, "idle_power_w") - 100.0).abs() < 10.0);
    assert!(metric(&summary, "attribution_residual").abs() < 1e-9);
    assert!(metric(&summary, "energy_coverage") > 0.99);
    let warnings = summary["warnings"].to_string();
    assert!(warnings.contains("pretended_hardware"), "{warnings}");
    assert!(!warnings.contains("energy_estimated"), "{warnings}");
    assert_eq!(summary["energy_perimeter"], "device");
    assert!(summary["hardware_label"].as_str().unwrap().contains("1xPretend-100"));
}

#[test]
fn the_idle_machine_is_measured_before_and_after_unless_that_is_not_wanted() {
    let bench = Bench::new();
    let param = format!("replay.scenario={}", bench.write("constant.json", CONSTANT));
    let baselines = |length: &str| -> Vec<Value> {
        let args =
            ["run", "--source", "replay", "--source-param", &param, "--idle", length, "--name", length];
        let summary = bench.summary(&[&args[..], &["--max-queries", "5"]].concat());
        assert!(!summary["warnings"].to_string().contains("idle_drift"), "{}", summary["warnings"]);
        let log = std::fs::read_to_string(bench.path().join("runs").join(length).join("log.jsonl")).unwrap();
        let lines = log.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
        lines.filter(|l| l["event"] == "idle_baseline").map(|l| l["data"].clone()).collect()
    };
    let both = baselines("300ms");
    assert_eq!((both.len(), &both[0]["when"], &both[1]["when"]), (2, &"before".into(), &"after".into()));
    for baseline in &both {
        assert!((baseline["power_w"]["value"].as_f64().unwrap() - 100.0).abs() < 10.0, "{baseline}");
        assert!(baseline["seconds"].as_f64().unwrap() >= 0.3, "{baseline}");
    }
    assert!(baselines("0").is_empty());
}

#[test]
fn an_nvidia_board_is_measured_through_its_library() {
    let bench = Bench::new();
    let library = format!("nvml.library={}", wattle_sim_nvml::library_path().display());
    let summary = bench.summary(&[
        "run",
        "--source",
        "nvml",
        "--source-param",
        &library,
        "--energy",
        "measured",
        "--idle-s",
        "0.3",
    ]);
    let power = metric(&summary, "mean_power_w");
    assert!((power - 100.0).abs() < 10.0, "the simulated board draws 100 W: {power}");
    assert_eq!(summary["metrics"]["energy_j"]["method"], "counter");
    assert!(summary["warnings"].to_string().contains("pretended_hardware"));
}

#[test]
fn without_a_sensor_energy_is_estimated_and_says_so() {
    let bench = Bench::new();
    let root = bench.path().join("root");
    std::fs::create_dir_all(root.join("proc")).unwrap();
    for file in ["proc/stat", "proc/meminfo"] {
        std::fs::write(root.join(file), std::fs::read(format!("/{file}")).unwrap()).unwrap();
    }
    let args = [
        "run",
        "--max-queries",
        "5",
        "--idle-s",
        "0.1",
        "--root",
        root.to_str().unwrap(),
        "--source",
        "procstat",
    ];
    let none = bench.summary(&args);
    assert!(none["metrics"]["energy_j"]["value"].is_null());
    assert!(none["warnings"].to_string().contains("no_energy"));
    let estimated = bench.summary(&[&args[..7], &["--source", "model", "--source", "procstat"]].concat());
    assert_eq!(estimated["metrics"]["energy_j"]["method"], "model");
    assert!(estimated["warnings"].to_string().contains("ESTIMATED"));
    let energy = &estimated["metrics"]["energy_j"];
    let width = (energy["high"].as_f64().unwrap() - energy["low"].as_f64().unwrap())
        / energy["value"].as_f64().unwrap();
    assert!(width > 1.0, "a guess has a wide bound: {energy}");
}

#[test]
fn measured_refuses_rather_than_estimate_and_none_goes_without() {
    let bench = Bench::new();
    let refused = bench.run(&["run", "--energy", "measured", "--source", "model"]);
    assert_fails(&refused, 1, "energy cannot be measured here");
    assert!(bench.runs().is_empty(), "nothing is left behind");
    let summary = bench.summary(&["run", "--energy", "none", "--max-queries", "5"]);
    assert!(summary["metrics"]["joules_per_query"]["value"].is_null());
    assert!(metric(&summary, "output_tokens_per_s") > 0.0);
}

#[test]
fn the_same_seed_gives_the_same_answers() {
    let bench = Bench::new();
    let answers = |seed: &str| {
        bench.summary(&[
            "run",
            "--energy",
            "none",
            "--max-queries",
            "30",
            "--seed",
            seed,
            "--name",
            "x",
            "--overwrite",
            "--temperature",
            "1",
        ]);
        let text = std::fs::read_to_string(bench.path().join("runs/x/log.jsonl")).unwrap();
        let lines =
            text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()).filter(|v| v["type"] == "record");
        lines.map(|v| (v["item"]["id"].clone(), v["exchange"]["answer"].clone())).collect::<Vec<_>>()
    };
    let first = answers("7");
    assert_eq!(first, answers("7"));
    assert_ne!(first, answers("8"));
}

#[test]
fn flags_win_over_the_environment_and_that_over_the_file() {
    let bench = Bench::new();
    bench.write("wattle.toml", "energy = \"none\"\nmax_queries = 3\nseed = 5\nwarmup = 1\n");
    let out = bench
        .command(&["run", "--seed", "9", "--format", "json"])
        .env("WATTLE_SEED", "7")
        .env("WATTLE_MAX_QUERIES", "4")
        .output()
        .unwrap();
    let summary: Value = serde_json::from_slice(&out.stdout).unwrap();
    let config = &summary["config"];
    assert_eq!(
        (&config["seed"], &config["max_queries"], &config["warmup"]),
        (&9.into(), &4.into(), &1.into())
    );
    assert_eq!(summary["total_queries"], 4);
    let again =
        bench.summary(&["run", "--from", bench.only_run().to_str().unwrap(), "--config", "/dev/null"]);
    assert_eq!(again["config"], *config, "a run can be repeated from its folder");
}

#[test]
fn a_wrong_setting_names_its_place_and_the_nearest_right_one() {
    let bench = Bench::new();
    bench.write("bad.toml", "max_query = 3\n");
    assert_fails(
        &bench.run(&["run", "--config", "bad.toml"]),
        2,
        "bad.toml: unknown key \"max_query\", did you mean \"max_queries\"?",
    );
    let out = bench.command(&["run"]).env("WATTLE_MODLE", "x").output().unwrap();
    assert_fails(&out, 2, "WATTLE_MODLE: unknown key \"modle\", did you mean \"model\"?");
    assert_fails(&bench.run(&["run", "--concurrency", "0"]), 2, "--concurrency");
    assert_fails(&bench.run(&["run", "--energy", "lots"]), 2, "--energy");
    assert!(bench.runs().is_empty());
}

#[test]
fn unknown_names_are_usage_errors_with_the_nearest_match() {
    let bench = Bench::new();
    for (args, text) in [
        (&["run", "--dataset", "jsnl"][..], "unknown dataset \"jsnl\", did you mean \"jsonl\"?"),
        (&["run", "--client", "opena"], "unknown client \"opena\", did you mean \"openai\"?"),
        (&["run", "--model", "demo-1n"], "unknown model \"demo-1n\", did you mean \"demo-1m\"?"),
        (&["run", "--source", "nvlm"], "unknown source \"nvlm\", did you mean \"nvml\"?"),
        (&["run", "--scorer", "exat"], "unknown scorer \"exat\", did you mean \"exact\"?"),
        (&["run", "--dataset-param", "path=x"], "dataset \"builtin\" has no option \"path\""),
        (&["run", "--dataset", "jsonl"], "--dataset-param path=FILE"),
        (&["run", "--client", "openai"], "--url"),
        (&["run", "--url", "http://127.0.0.1:1"], "did you mean --client openai?"),
        (&["run", "--name", "../x"], "is not the name of a folder"),
        (&["run", "--timeout-s", "1e20"], "--timeout-s"),
        (&["run", "--temperature", "-1"], "--temperature"),
    ] {
        assert_fails(&bench.run(args), 2, text);
    }
    assert!(bench.runs().is_empty());
}

#[test]
fn bad_files_and_places_are_told_in_one_line_and_leave_nothing_behind() {
    let bench = Bench::new();
    let jsonl = |name: &str, text: &str| format!("path={}", bench.write(name, text));
    let (empty, bad) =
        (jsonl("empty.jsonl", "\n\n"), jsonl("bad.jsonl", "{\"prompt\":\"a\"}\n{\"prompt\":\n"));
    let gguf = bench.write("broken.gguf", "GGUF but not really");
    let file = bench.write("file", "");
    bench.write("notes.txt", "");
    for (args, text) in [
        (&["run", "--dataset", "jsonl", "--dataset-param", &empty][..], "holds no question"),
        (&["run", "--dataset", "jsonl", "--dataset-param", &bad], "bad.jsonl:2: not a JSON object"),
        (&["run", "--dataset", "jsonl", "--dataset-param", "path=/nonexistent.jsonl"], "cannot open it"),
        (&["run", "--client", "openai", "--url", "http://127.0.0.1:1"], "is the server running"),
        (&["run", "--model", &gguf], "broken.gguf"),
        (&["run", "--out", &format!("{file}/sub")], "file"),
        (&["run", "--source-param", "model.idle_w=abc"], "model.idle_w is not a number"),
        (&["run", "--source-param", "replay.scenario=typo.json"], "typo.json"),
        (&["run", "--resume", "nowhere"], "nowhere"),
        (&["run", "--resume", "."], "run.json"),
        (&["report", "."], "run.json"),
    ] {
        assert_fails(&bench.run(args), 1, text);
    }
    assert!(bench.runs().is_empty());
}

#[test]
fn a_run_is_never_overwritten_without_consent() {
    let bench = Bench::new();
    let args = ["run", "--energy", "none", "--max-queries", "2", "--name", "mine"];
    let first = bench.summary(&args);
    assert_fails(&bench.run(&args), 1, "mine");
    let replaced = bench.summary(&[&args[..], &["--overwrite"]].concat());
    assert_ne!(first["run_id"], replaced["run_id"]);
    // A folder that is not a run is not ours to remove.
    std::fs::create_dir(bench.path().join("runs/other")).unwrap();
    bench.write("runs/other/precious.txt", "x");
    let out = bench.run(&["run", "--energy", "none", "--max-queries", "2", "--name", "other", "--overwrite"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(bench.path().join("runs/other/precious.txt").exists());
}

#[test]
fn a_real_model_with_another_vocabulary_says_where_it_can_run() {
    let bench = Bench::new();
    let mut file =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../lab/models/demo-300k-q8_0.gguf")).unwrap();
    // "<0x41>" stands for one byte; "<0x4!>" is text of six.
    let at = file.windows(6).position(|w| w == b"<0x41>").unwrap();
    file[at + 4] = b'!';
    let path = bench.path().join("other.gguf");
    std::fs::write(&path, file).unwrap();
    let out = bench.run(&["run", "--model", path.to_str().unwrap()]);
    assert_fails(&out, 1, "--client openai");
}

#[test]
fn lists_and_doctor_answer_without_a_run() {
    let bench = Bench::new();
    for kind in ["clients", "datasets", "scorers", "sources", "metrics", "models"] {
        let out = bench.run(&["list", kind, "--format", "json"]);
        let rows: Vec<Value> = serde_json::from_slice(&out.stdout).unwrap();
        assert!(
            rows.len() >= 2 && rows.iter().all(|r| r["name"].is_string() && r["about"].is_string()),
            "{kind}"
        );
    }
    let metrics = String::from_utf8(bench.run(&["list", "metrics"]).stdout).unwrap();
    assert!(CONTRACT.iter().all(|name| metrics.contains(name)));

    let root = bench.path().join("empty");
    std::fs::create_dir(&root).unwrap();
    let no_library = ["--source-param", "nvml.library=/nonexistent.so"];
    let none = bench.run(&[&["doctor", "--root", root.to_str().unwrap()], &no_library[..]].concat());
    assert_eq!(none.status.code(), Some(1));
    let text = String::from_utf8(none.stdout).unwrap();
    assert!(text.contains("fix:") && text.contains("rapl"), "{text}");

    let library = format!("nvml.library={}", wattle_sim_nvml::library_path().display());
    let board = bench.run(&["doctor", "--json", "--source-param", &library]);
    assert_eq!(board.status.code(), Some(0));
    let found: Value = serde_json::from_slice(&board.stdout).unwrap();
    assert_eq!(found["measurable"], true);
    // The figures themselves are the unit tests' business: this machine may be busy.
    let qualified = found["qualified"].as_array().unwrap();
    assert!(qualified.iter().any(|q| q["ratio"].is_f64() && q["period_s"].is_f64()), "{qualified:?}");
    let wrong = bench.run(&["doctor", "--seconds", "nan"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(stderr(&wrong).contains("between 0.1 and 60"));
}

#[test]
fn a_board_that_does_not_do_the_work_is_not_taken_for_the_cpu_that_does() {
    let bench = Bench::new();
    let root = bench.path().join("root");
    std::fs::create_dir_all(root.join("proc")).unwrap();
    std::fs::write(root.join("proc/stat"), std::fs::read("/proc/stat").unwrap()).unwrap();
    let library = format!("nvml.library={}", wattle_sim_nvml::library_path().display());
    let args = [
        "run",
        "--max-queries",
        "5",
        "--idle-s",
        "0.1",
        "--root",
        root.to_str().unwrap(),
        "--source-param",
        &library,
    ];
    let summary = bench.summary(&args);
    assert_eq!(summary["metrics"]["energy_j"]["method"], "model");
    assert!(summary["warnings"].to_string().contains("the model runs on the CPU"), "{}", summary["warnings"]);
    let refused = bench.run(&[&args[..], &["--energy", "measured"]].concat());
    assert_fails(&refused, 1, "the model runs on the CPU");
    let named = bench.summary(&[&args[..], &["--source", "nvml"]].concat());
    assert_eq!(named["metrics"]["energy_j"]["method"], "counter");
    assert!(named["warnings"].to_string().contains("other_device"), "{}", named["warnings"]);
}

#[test]
fn the_environment_may_hold_anything() {
    use std::os::unix::ffi::OsStrExt;
    let bench = Bench::new();
    let args = ["run", "--energy", "none", "--max-queries", "2"];
    let odd = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    let out = bench
        .command(&args)
        .env("ODD", odd)
        .env("WATTLE_SEED", "")
        .env("WATTLE_SERVICE_HOST", "x")
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    assert_fails(&bench.command(&args).env("WATTLE_MODEL", odd).output().unwrap(), 2, "WATTLE_MODEL");
}

#[test]
fn questions_without_an_answer_are_counted_apart() {
    let bench = Bench::new();
    let path = format!(
        "path={}",
        bench.write("q.jsonl", "{\"prompt\":\"rev abc=\",\"answer\":\"cba\"}\n{\"prompt\":\"rev abd=\"}\n")
    );
    let summary = bench.summary(&["run", "--energy", "none", "--dataset", "jsonl", "--dataset-param", &path]);
    assert_eq!((metric(&summary, "accuracy"), metric(&summary, "unscored")), (1.0, 1.0));
    assert!(summary["warnings"].to_string().contains("1 of 2 questions have no expected answer"));
}

#[test]
fn answers_that_were_cut_off_are_told() {
    let bench = Bench::new();
    let summary = bench.summary(&["run", "--energy", "none", "--max-queries", "20", "--max-tokens", "1"]);
    assert!(metric(&summary, "truncated") > 5.0);
    assert!(summary["warnings"].to_string().contains("--max-tokens"));
}

#[test]
fn every_joule_can_be_recomputed_from_the_readings_on_disk() {
    use wattle_core::{SensorId, Timeline, time::Span};
    let bench = Bench::new();
    let scenario = bench.write("constant.json", CONSTANT);
    let summary = bench.summary(&[
        "run",
        "--source",
        "replay",
        "--source-param",
        &format!("replay.scenario={scenario}"),
    ]);
    let dir = wattle_store::RunDir::open(bench.only_run()).unwrap();
    let info = dir.info().unwrap();
    let mut timeline = Timeline::new(&info.sensors);
    for reading in dir.stored_readings().unwrap() {
        timeline.push(&reading.unwrap().1);
    }
    let panel: Vec<SensorId> = (0..info.sensors.len() as u16)
        .map(SensorId)
        .filter(|s| info.panel.contains(&info.sensors[usize::from(s.0)].name))
        .collect();
    let energy = |span: Span| timeline.energy_of(&panel, span).unwrap().value().get();
    let whole: Span = serde_json::from_value(summary["span"].clone()).unwrap();
    let stated = metric(&summary, "energy_j");
    assert!((energy(whole) / stated - 1.0).abs() < 1e-9, "{} and {stated}", energy(whole));
    for record in dir.records().unwrap() {
        let record = record.unwrap();
        let share = record.share.unwrap().total().get();
        assert!(
            (energy(record.exchange.span()) - share).abs() <= 1e-9 * share.max(1e-3),
            "{}",
            record.item.index
        );
    }
}
