//! The tables that are made when a session ends.

use crate::sample::{NOW, ODD, append, bare_record, info, reading, record, run, run_of, sensors};
use crate::table;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use wattle_core::Event;
use wattle_core::exchange::{Exchange, Finish, Outcome};
use wattle_core::record::{Item, Record, Score};
use wattle_store::{Finished, RunDir};

/// Every file below a folder, with its contents.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            files.extend(self::files(&path).into_iter().map(|(n, c)| (format!("{name}/{n}"), c)));
        } else {
            files.insert(name, fs::read(path).unwrap());
        }
    }
    files
}

fn requests(run: &RunDir) -> Vec<Value> {
    table::parquet(&run.path().join("requests.parquet")).1
}

fn hf(run: &RunDir) -> Vec<Value> {
    table::stream(&run.path().join("hf/data-00000-of-00001.arrow")).1
}

#[test]
fn a_record_is_a_row_with_all_it_knows() {
    let (_parent, run) = run_of([record(0), record(1)]);
    run.finish().unwrap();
    let r = record(1);
    let share = r.share.unwrap();
    let expected = json!({
        "index": 1, "id": "q-1", "response_id": "chatcmpl-1", "status": "ok", "error": null,
        "due_ns": 9_000_000_001u64, "sent_ns": 9_001_000_001u64, "first_token_ns": 9_101_000_001u64,
        "done_ns": 9_601_000_001u64, "token_ns": [9_101_000_001u64, 9_301_000_001u64, 9_501_000_001u64],
        "prompt_tokens": 11, "completion_tokens": 3, "reasoning_tokens": 1, "cached_tokens": u64::MAX,
        "dated_by": "kernel", "tokens_from": "usage", "attempts": 2, "conversation": "chat-1",
        "to_first_token_j": share.to_first_token.unwrap().get(),
        "energy_j": share.total().get(), "energy_bound_j": share.bound.get(), "energy_method": "integral",
        "energy_coverage": share.coverage, "energy_perimeter": "host", "prefill_j": share.prefill.get(),
        "decode_j": share.decode.get(), "shared_j": share.shared.get(),
        "subject": "sums", "prompt": r.item.prompt, "answer": r.exchange.answer, "expected": "42",
        "score": 1.0, "scorer": "exact",
        "queue_j": share.queue.get(), "gpu_j": r.telemetry.gpu, "cpu_j": r.telemetry.cpu,
        "dram_j": r.telemetry.dram, "ane_j": r.telemetry.ane, "finish": "stop", "session": 0,
        "metadata": json!({"level": 1, "odd": ODD}).to_string(),
        "server": json!({"prompt_ms": 0.1, "ids": [1, 2]}).to_string(),
    });
    assert_eq!(requests(&run)[1], expected);
}

#[test]
fn the_unknown_is_null_everywhere() {
    let (_parent, run) = run_of([bare_record(0)]);
    run.write_info(&wattle_core::summary::RunInfo { sensors: vec![], ..info() }).unwrap();
    run.finish().unwrap();
    let row = &requests(&run)[0];
    let known = [
        "index", "id", "status", "error", "due_ns", "sent_ns", "done_ns", "token_ns", "prompt", "answer",
        "session", "dated_by", "attempts",
    ];
    for (key, value) in row.as_object().unwrap() {
        assert_eq!(!value.is_null(), known.contains(&key.as_str()), "{key}: {value}");
    }
    assert_eq!(
        (&row["status"], &row["error"], &row["answer"]),
        (&json!("timeout"), &json!("600 s\nare over"), &json!(""))
    );

    let row = &hf(&run)[0];
    let model = &row["model_metrics"][&info().model.unwrap().name];
    assert_eq!(row["answer"], Value::Null);
    assert_eq!(row["model_answers"][&info().model.unwrap().name], Value::Null);
    assert_eq!(model["gpu_info"], Value::Null);
    assert_eq!(model["lm_correctness"], Value::Null);
    assert_eq!(model["system_info"]["os_version"], Value::Null);
    assert_eq!(
        model["power_metrics"]["cpu"]["total_watts"],
        json!({"avg": null, "max": null, "median": null, "min": null})
    );
    assert_eq!(model["latency_metrics"]["total_query_seconds"], bare_record(0).exchange.latency().get());
}

#[test]
fn the_dataset_has_the_columns_its_users_know() {
    let (_parent, run) = run_of([record(0), record(1)]);
    run.finish().unwrap();
    let row = &hf(&run)[1];
    let (r, name) = (record(1), info().model.unwrap().name);
    assert!(name.contains('/') && name.contains('"') && name.contains('🦉'));
    let model = &row["model_metrics"][&name];
    assert_eq!(row["problem"], json!(r.item.prompt));
    assert_eq!(row["answer"], "42");
    assert_eq!(row["model_answers"][&name], json!(r.exchange.answer));
    assert_eq!(
        serde_json::from_str::<Value>(row["dataset_metadata"].as_str().unwrap()).unwrap(),
        json!(r.item.metadata)
    );
    assert_eq!(row["wattle_metrics"]["energy_j"], r.share.unwrap().total().get());
    assert_eq!(row["wattle_metrics"]["energy_method"], "integral");
    assert_eq!(model["energy_metrics"]["per_query_joules"], json!(r.telemetry.gpu));
    assert_eq!(model["energy_metrics"]["ane_total_joules"], json!(r.telemetry.ane));
    assert_eq!(model["latency_metrics"]["time_to_first_token_seconds"], r.exchange.ttft().unwrap().get());
    assert_eq!(model["latency_metrics"]["per_token_ms"], r.exchange.latency().get() * 1e3 / 3.0);
    assert_eq!(model["phase_metrics"]["prefill_duration_ms"], 100.0);
    assert_eq!(model["phase_metrics"]["decode_duration_ms"], 500.0);
    assert_eq!(
        model["memory_metrics"]["gpu_mb"],
        json!({"avg": 3000.0, "max": 4000.0, "median": 3000.0, "min": 2000.0})
    );
    assert_eq!(
        model["power_metrics"]["cpu"]["per_query_watts"]["avg"],
        r.telemetry.cpu.unwrap().get() / r.exchange.span().duration().get()
    );
    assert_eq!(model["power_metrics"]["cpu"]["per_query_watts"]["max"], Value::Null);
    assert_eq!(model["token_metrics"], json!({"input": 11, "output": 3, "total": 14}));
    assert_eq!(model["gpu_info"]["device_id"], "gpu-0");
    assert_eq!(model["system_info"]["cpu_count"], 2);
    assert_eq!(model["lm_correctness"], true);
}

#[test]
fn an_answer_that_did_not_come_is_not_right() {
    let wrong = Record { score: Some(Score { value: 0.0, scorer: "exact".into() }), ..record(0) };
    let failed = bare_record(1);
    let failed = Record { item: Item { expected: Some("42".into()), ..failed.item }, ..failed };
    let cut = Exchange { outcome: Outcome::Ok { finish: Finish::Length }, ..record(2).exchange };
    let (_parent, run) = run_of([wrong, failed, Record { exchange: cut, ..record(2) }]);
    run.finish().unwrap();
    let right = |row: &Value| row["model_metrics"][&info().model.unwrap().name]["lm_correctness"].clone();
    assert_eq!(hf(&run).iter().map(right).collect::<Vec<_>>(), [json!(false), json!(false), json!(true)]);
    assert_eq!(requests(&run)[2]["finish"], "length");
}

#[test]
fn finishing_twice_is_the_same() {
    let (_parent, run) = run_of((0..5).map(record));
    let mut writer = run.readings(0, &sensors()).unwrap();
    (0..50).for_each(|i| writer.push(&reading(i)).unwrap());
    writer.close().unwrap();
    let first = run.finish().unwrap();
    let before = files(run.path());
    assert_eq!(
        before.keys().collect::<Vec<_>>(),
        [
            "hf/data-00000-of-00001.arrow",
            "hf/dataset_info.json",
            "hf/state.json",
            "log.jsonl",
            "readings.parquet",
            "requests.parquet",
            "run.json"
        ]
    );
    assert_eq!(run.finish().unwrap(), first);
    assert_eq!(files(run.path()), before);
}

#[test]
fn the_fingerprint_changes_with_the_contents() {
    let (_parent, run) = run_of([record(0)]);
    let fingerprint = || {
        run.finish().unwrap();
        let state: Value =
            serde_json::from_slice(&fs::read(run.path().join("hf/state.json")).unwrap()).unwrap();
        state["_fingerprint"].as_str().unwrap().to_owned()
    };
    let one = fingerprint();
    append(&mut run.log().unwrap(), record(1));
    assert_ne!(fingerprint(), one);
}

#[test]
fn what_an_earlier_kill_left_is_swept_away() {
    let (_parent, run) = run_of([record(0)]);
    fs::create_dir(run.path().join("hf.tmp")).unwrap();
    for name in
        ["requests.parquet.tmp", "readings.parquet.tmp", "summary.json.tmp", "hf.tmp/old.arrow", "mine.tmp"]
    {
        fs::write(run.path().join(name), "half of it").unwrap();
    }
    run.finish().unwrap();
    let left: Vec<_> =
        files(run.path()).into_keys().filter(|n| n.contains(".tmp") || n.contains("old")).collect();
    assert_eq!(left, ["mine.tmp"]);
}

#[test]
fn an_empty_run_makes_valid_empty_tables() {
    let (_parent, run) = run("r");
    let nothing =
        Finished { records: 0, duplicates: 0, skipped: 0, torn_line: false, readings: 0, torn_streams: 0 };
    assert_eq!(run.finish().unwrap(), nothing);
    assert_eq!(requests(&run), Vec::<Value>::new());
    assert_eq!(hf(&run), Vec::<Value>::new());
    assert_eq!(table::parquet(&run.path().join("readings.parquet")).1, Vec::<Value>::new());
}

#[test]
fn more_records_than_a_batch_holds_keep_their_order() {
    let (_parent, run) = run_of((0..2500).map(record));
    assert_eq!(run.finish().unwrap().records, 2500);
    let indexes = |rows: Vec<Value>| rows.iter().map(|r| r["index"].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(indexes(requests(&run)), (0..2500).collect::<Vec<_>>());
    assert!(hf(&run).iter().zip(0..).all(|(row, i)| row["problem"] == json!(record(i).item.prompt)));
}

#[test]
fn tables_say_which_run_and_which_schema_they_are_of() {
    let (_parent, run) = run_of([record(0)]);
    run.finish().unwrap();
    for name in ["requests.parquet", "readings.parquet"] {
        let path = run.path().join(name);
        assert_eq!(table::label(&path, "wattle.run_id"), Some(info().run_id));
        assert_eq!(table::label(&path, "wattle.schema_version").as_deref(), Some("1"));
    }
}

#[test]
fn a_torn_log_and_lines_of_others_are_reported() {
    let (_parent, run) = run_of([record(0)]);
    let mut log = fs::read(run.path().join("log.jsonl")).unwrap();
    log.extend(b"{\"type\": \"mine\"}\n{\"ts\": \"20");
    fs::write(run.path().join("log.jsonl"), log).unwrap();
    let finished = run.finish().unwrap();
    assert_eq!((finished.records, finished.skipped, finished.torn_line), (1, 1, true));
}

/// Leaves a folder for `scripts/check_datasets.py` where `WATTLE_STORE_KEEP` says.
#[test]
fn a_run_can_be_left_for_other_programs_to_open() {
    let Some(parent) = std::env::var_os("WATTLE_STORE_KEEP") else { return };
    for (name, records) in [("full", 3), ("empty", 0)] {
        let run = RunDir::create(Path::new(&parent), name).unwrap();
        run.write_info(&info()).unwrap();
        let mut log = run.log().unwrap();
        log.append(NOW, &Event::plain("made up")).unwrap();
        (0..records).for_each(|i| append(&mut log, if i == 1 { bare_record(i) } else { record(i) }));
        let mut writer = run.readings(0, &sensors()).unwrap();
        (0..records * 100).for_each(|i| writer.push(&reading(i)).unwrap());
        writer.close().unwrap();
        run.finish().unwrap();
    }
}
