//! Many requests at once, open and closed loop, against a server that knows what truly happened.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use support::{Bench, metric, recorded, records};
use wattle_meter::clock;
use wattle_sim_server::{Config, Server};

/// A dataset of prompts in the bench's folder, as arguments.
fn prompts(bench: &Bench, prompts: impl IntoIterator<Item = String>) -> Vec<String> {
    let lines: Vec<String> = prompts.into_iter().map(|p| json!({ "prompt": p }).to_string()).collect();
    let path = bench.write("prompts.jsonl", &(lines.join("\n") + "\n"));
    ["--dataset", "jsonl", "--dataset-param"]
        .map(str::to_owned)
        .into_iter()
        .chain([format!("path={path}")])
        .collect()
}

fn numbered(n: usize) -> impl Iterator<Item = String> {
    (0..n).map(|i| format!("question {i}"))
}

/// The arguments of a run without warm-up and idle baseline.
fn args<'a>(url: &'a str, dataset: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    let mut all = vec!["run", "--client", "openai", "--url", url, "--warmup", "0", "--idle-s", "0"];
    all.extend(dataset.iter().map(String::as_str));
    all.extend(more);
    all
}

fn event(run: &Path, name: &str) -> Value {
    let log = std::fs::read_to_string(run.join("log.jsonl")).unwrap();
    let mut lines = log.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    lines.find(|l| l["event"] == name).map(|l| l["data"].clone()).unwrap_or_default()
}

fn ns(record: &Value, key: &str) -> u64 {
    record["exchange"][key].as_u64().unwrap()
}

#[test]
fn a_thousand_requests_at_concurrency_64_open_64_connections() {
    let server = Server::start(Config { tokens: 8, ttft_ms: 2.0, itl_ms: 0.2, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let (url, data) = (server.url(), prompts(&bench, numbered(1000)));
    let summary = bench.summary(&args(&url, &data, &["--energy", "none", "--concurrency", "64"]));
    assert_eq!((metric(&summary, "queries"), metric(&summary, "errors")), (1000.0, 0.0));
    assert_eq!(server.connections(), 64);
    let mut asked = recorded(&bench.only_run());
    asked.sort_unstable();
    assert_eq!(asked, (0..1000).collect::<Vec<u64>>());
    // Never more at once than asked for, and mostly as many.
    let mut ends: Vec<(u64, i32)> = records(&bench.only_run())
        .iter()
        .flat_map(|r| [(ns(r, "sent_ns"), 1), (ns(r, "done_ns"), -1)])
        .collect();
    ends.sort_unstable();
    let mut now = 0;
    let most = ends
        .iter()
        .map(|(_, step)| {
            now += step;
            now
        })
        .max()
        .unwrap();
    assert!((48..=64).contains(&most), "{most}");
    let load = event(&bench.only_run(), "load");
    assert_eq!(
        (&load["loop"], &load["requests"], &load["connections"]),
        (&json!("closed"), &json!(1000), &json!(64))
    );
}

#[test]
fn joules_of_many_at_once_add_up_to_what_was_drawn() {
    let server =
        Server::start(Config { tokens: 20, ttft_ms: 30.0, itl_ms: 5.0, jitter: 0.5, ..Config::default() })
            .unwrap();
    let bench = Bench::new();
    let scenario = bench.write(
        "scenario.json",
        r#"{"devices": [{"kind": "gpu", "id": "a", "name": "Pretend 100", "power": [[0, 100]], "refresh_ms": 20}]}"#,
    );
    let (url, data) = (server.url(), prompts(&bench, numbered(200)));
    let scenario = format!("replay.scenario={scenario}");
    let more = ["--concurrency", "16", "--source", "replay", "--source-param", &scenario];
    let summary = bench.summary(&args(&url, &data, &more));
    assert!(metric(&summary, "attribution_residual").abs() < 1e-9);
    let all = records(&bench.only_run());
    let total: f64 = all
        .iter()
        .map(|r| {
            ["queue", "prefill", "decode", "shared"]
                .iter()
                .map(|k| r["share"][k].as_f64().unwrap())
                .sum::<f64>()
        })
        .sum();
    let ledger = &all.last().unwrap()["ledger"];
    let [measured, idle, open] = ["measured", "idle", "open"].map(|k| ledger[k].as_f64().unwrap());
    assert!(
        (total + idle + open - measured).abs() < 1e-9 * measured,
        "{total} + {idle} + {open} of {measured}"
    );
    assert!((metric(&summary, "mean_power_w") - 100.0).abs() < 2.0);
    // Sixteen share a hundred watts: nobody pays for all of them.
    let seconds = |r: &Value| (ns(r, "done_ns") - ns(r, "sent_ns")) as f64 * 1e-9;
    let charged = total / all.iter().map(seconds).sum::<f64>();
    assert!(charged < 100.0 / 8.0, "{charged} W each");
}

#[test]
fn an_open_loop_keeps_to_its_schedule_whatever_the_server_does() {
    // One request takes half a second, and no other may be sent meanwhile.
    let server = Server::start(Config { tokens: 2, ttft_ms: 1.0, itl_ms: 0.5, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let stalls =
        |i: usize| if i == 40 { format!("question {i} #ttft_ms=500") } else { format!("question {i}") };
    let data = prompts(&bench, (0..160).map(stalls));
    let url = server.url();
    let more = ["--energy", "none", "--rate", "200", "--arrival", "constant", "--concurrency", "1"];
    let summary = bench.summary(&args(&url, &data, &more));
    let mut all = records(&bench.only_run());
    all.sort_by_key(|r| r["item"]["index"].as_u64());
    let first = ns(&all[0], "due_ns");
    for (i, r) in all.iter().enumerate() {
        let due = (ns(r, "due_ns") - first) as f64 * 1e-9;
        assert!((due - i as f64 * 0.005).abs() < 1e-6, "the schedule drifts: {i} at {due}");
        assert!(ns(r, "sent_ns") >= ns(r, "due_ns"));
    }
    // Behind the one that stalled, a hundred were due and could not be sent: their wait is in their latency.
    let late = all.iter().filter(|r| ns(r, "first_token_ns") - ns(r, "due_ns") > 100_000_000).count();
    assert!(late >= 60, "coordinated omission: only {late} saw the stall");
    assert!(metric(&summary, "ttft_s") > 0.05);
    assert!(metric(&summary, "send_lateness_s") > 0.05);
    let warnings = summary["warnings"].to_string();
    assert!(warnings.contains("held_back"), "{warnings}");
}

#[test]
fn a_server_that_stands_still_shows_in_every_request_that_was_due() {
    let server = Server::start(Config { tokens: 2, ttft_ms: 1.0, itl_ms: 0.5, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let stalls =
        |i: usize| if i == 40 { format!("question {i} #trap=stall:500") } else { format!("question {i}") };
    let (url, data) = (server.url(), prompts(&bench, (0..160).map(stalls)));
    let summary =
        bench.summary(&args(&url, &data, &["--energy", "none", "--rate", "200", "--arrival", "constant"]));
    assert_eq!(metric(&summary, "errors"), 0.0);
    let all = records(&bench.only_run());
    let late = all.iter().filter(|r| ns(r, "first_token_ns") - ns(r, "due_ns") > 100_000_000).count();
    // Of half a second, the requests of its first four tenths waited for more than one.
    assert!((60..=110).contains(&late), "coordinated omission: {late} saw the stall");
    assert!(summary["metrics"]["latency_s"]["p99"].as_f64().unwrap() > 0.4);
}

#[test]
fn a_run_by_time_asks_over_and_over_until_its_time_is_up() {
    let server = Server::start(Config { tokens: 2, ttft_ms: 5.0, itl_ms: 1.0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let (url, data) = (server.url(), prompts(&bench, numbered(5)));
    let began = clock::now();
    let summary =
        bench.summary(&args(&url, &data, &["--energy", "none", "--duration-s", "1", "--concurrency", "4"]));
    assert!(clock::now().since(began).get() >= 1.0);
    assert_eq!(summary["complete"], true);
    let mut asked = recorded(&bench.only_run());
    asked.sort_unstable();
    assert!(asked.len() > 20, "{}", asked.len());
    assert_eq!(asked, (0..asked.len() as u64).collect::<Vec<_>>(), "each has a number of its own");
    let run = bench.only_run().display().to_string();
    let out = bench.run(&["run", "--resume", &run]);
    assert_eq!(out.status.code(), Some(2), "{}", support::stderr(&out));
}

#[test]
fn what_the_server_did_not_take_is_sent_again_and_says_so() {
    let server = Server::start(Config { tokens: 2, retry_after_s: 0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let data = prompts(
        &bench,
        ["one #trap=status_429:2".to_owned(), "two #trap=status_429:9".to_owned(), "three".to_owned()],
    );
    let url = server.url();
    let summary = bench.summary(&args(&url, &data, &["--energy", "none", "--retries", "2"]));
    assert_eq!((metric(&summary, "errors"), metric(&summary, "retried")), (1.0, 2.0));
    let by: BTreeMap<String, Value> = records(&bench.only_run())
        .into_iter()
        .map(|r| (r["item"]["id"].as_str().unwrap().to_owned(), r))
        .collect();
    let attempts: Vec<u64> = by.values().map(|r| r["exchange"]["attempts"].as_u64().unwrap()).collect();
    assert_eq!(attempts, [3, 3, 1]);
    let latency = ns(&by["1"], "done_ns") - ns(&by["1"], "due_ns");
    let last = ns(&by["1"], "done_ns") - ns(&by["1"], "sent_ns");
    assert!(latency > last, "the tries before are part of the latency: {latency} {last}");
}

#[test]
fn each_limit_ends_what_it_is_there_for_and_names_itself() {
    let server = Server::start(Config { tokens: 6, ..Config::default() }).unwrap();
    for (prompt, flag, text) in [
        (
            "a #trap=hang",
            "--first-token-timeout-s",
            "no first token after 0.3 s; raise first_token_timeout_s",
        ),
        ("b #trap=hang_mid", "--stall-timeout-s", "nothing more after 0.3 s; raise stall_timeout_s"),
        ("c #trap=slow_loris", "--timeout-s", "no whole answer after 0.3 s; raise timeout_s"),
    ] {
        let bench = Bench::new();
        let data = prompts(&bench, [prompt.to_owned(), "fine".to_owned()]);
        let url = server.url();
        let summary = bench.summary(&args(&url, &data, &["--energy", "none", flag, "0.3"]));
        assert_eq!(metric(&summary, "errors"), 1.0, "{flag}");
        let all = records(&bench.only_run());
        let failed = all.iter().find(|r| r["exchange"]["status"] == "failed").unwrap();
        assert_eq!(
            (&failed["exchange"]["class"], &failed["exchange"]["error"]),
            (&json!("timeout"), &json!(text))
        );
    }
}

#[test]
fn goodput_counts_what_kept_to_its_limits() {
    let server = Server::start(Config { tokens: 4, ttft_ms: 5.0, itl_ms: 1.0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let slow = |i: usize| if i.is_multiple_of(4) { format!("q {i} #ttft_ms=600") } else { format!("q {i}") };
    let data = prompts(&bench, (0..20).map(slow));
    let url = server.url();
    let more = ["--energy", "none", "--concurrency", "20", "--slo", "ttft=400ms,latency=30s"];
    let summary = bench.summary(&args(&url, &data, &more));
    assert!((metric(&summary, "slo_met") - 0.75).abs() < 1e-9, "{}", summary["metrics"]["slo_met"]);
    let ratio = metric(&summary, "goodput_per_s") / metric(&summary, "queries_per_s");
    assert!((ratio - 0.75).abs() < 1e-9);
    let out = bench.run(&args(&url, &data, &["--slo", "tfft=1s"]));
    support::assert_fails(&out, 2, "did you mean \"ttft\"");
}

#[test]
fn one_signal_cancels_what_is_in_flight_and_saves_what_had_finished() {
    interrupted(1);
}

#[test]
fn two_signals_end_it_at_once_and_lose_nothing() {
    interrupted(2);
}

fn interrupted(signals: usize) {
    let server =
        Server::start(Config { tokens: 4, ttft_ms: 20.0, itl_ms: 1.0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    // One in ten never answers: eight of them are in flight when the signal comes.
    let hangs = |i: usize| if i % 10 == 3 { format!("q {i} #trap=hang") } else { format!("q {i}") };
    let (url, data) = (server.url(), prompts(&bench, (0..2000).map(hangs)));
    let mut child = bench.start(&args(&url, &data, &["--concurrency", "8"]));
    let finished = || server.log().iter().filter(|s| s.written.len() == 4).count();
    let deadline = clock::now().plus_nanos(30_000_000_000);
    // The others are answered until all eight places are taken by those that hang.
    while finished() < 60 && clock::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(300));
    let answered = finished();
    let began = clock::now();
    for _ in 0..signals {
        let pid = i32::try_from(child.id()).unwrap();
        std::process::Command::new("kill").args(["-INT", &pid.to_string()]).status().unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    assert!(clock::now().since(began).get() < 20.0);
    let run = bench.only_run();
    assert_eq!(recorded(&run).len(), answered, "what had finished is there, and nothing else");
    assert!(signals == 2 || run.join("summary.json").exists());
    // What was cancelled is no failure: it is asked again.
    assert!(records(&run).iter().all(|r| r["exchange"]["status"] == "ok"));
    if signals == 2 {
        let report = bench.run(&["report", &run.display().to_string()]);
        assert!(report.status.success(), "{}", support::stderr(&report));
    }
}

#[test]
fn every_prompt_can_begin_with_something_of_its_own() {
    let server = Server::start(Config { tokens: 2, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let (url, data) = (server.url(), prompts(&bench, (0..20).map(|_| "the same".to_owned())));
    bench.summary(&args(&url, &data, &["--energy", "none", "--unique-prefix"]));
    let all = records(&bench.only_run());
    let mut asked: Vec<&str> = all.iter().map(|r| r["item"]["prompt"].as_str().unwrap()).collect();
    assert!(asked.iter().all(|p| p.ends_with("the same")));
    asked.sort_unstable();
    asked.dedup();
    assert_eq!(asked.len(), 20);
}

#[test]
fn the_load_is_kept_up_until_the_last_counted_answer() {
    let server =
        Server::start(Config { tokens: 4, ttft_ms: 10.0, itl_ms: 1.0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    // The last one takes long, and meanwhile the others' places stay taken.
    let slow = |i: usize| if i == 15 { format!("q {i} #ttft_ms=400") } else { format!("q {i}") };
    let (url, data) = (server.url(), prompts(&bench, (0..16).map(slow)));
    let summary =
        bench.summary(&args(&url, &data, &["--energy", "none", "--concurrency", "4", "--cooldown"]));
    assert_eq!(metric(&summary, "queries"), 16.0);
    assert!(server.log().len() > 16 + 20, "{}", server.log().len());
}

#[test]
fn turns_of_a_conversation_wait_for_each_other_and_are_read_with_what_was_said() {
    let server =
        Server::start(Config { tokens: 3, ttft_ms: 15.0, itl_ms: 1.0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let talk = |c: usize| {
        let turns = (0..6).map(|t| {
            let from = if t % 2 == 0 { "human" } else { "gpt" };
            json!({"from": from, "value": format!("turn {t} of {c}")})
        });
        json!({"id": format!("talk-{c}"), "conversations": turns.collect::<Vec<_>>()})
    };
    let path = bench.write("talks.json", &json!((0..8).map(talk).collect::<Vec<_>>()).to_string());
    let url = server.url();
    let path = format!("path={path}");
    let data = ["--dataset", "sharegpt", "--dataset-param", &path].map(str::to_owned);
    let summary = bench.summary(&args(
        &url,
        &data,
        &["--energy", "none", "--concurrency", "8", "--system", "be brief"],
    ));
    assert_eq!(metric(&summary, "queries"), 24.0);
    let mut by: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for r in records(&bench.only_run()) {
        by.entry(r["item"]["conversation"].as_str().unwrap().to_owned()).or_default().push(r);
    }
    assert_eq!(by.len(), 8);
    for turns in by.values_mut() {
        turns.sort_by_key(|r| r["item"]["index"].as_u64());
        for pair in turns.windows(2) {
            assert!(ns(&pair[1], "sent_ns") >= ns(&pair[0], "done_ns"), "a turn before its answer");
            // Two turns of four words each come on top: the question before, and its answer.
            let words = |r: &Value| r["exchange"]["usage"]["prompt"].as_u64().unwrap();
            assert_eq!(words(&pair[1]), words(&pair[0]) + 8);
        }
        assert_eq!(
            turns[0]["exchange"]["usage"]["prompt"], 6,
            "two words of the system's and four of the question"
        );
    }
}

#[test]
fn a_trace_is_replayed_with_its_times_and_lengths() {
    let server =
        Server::start(Config { tokens: 500, ttft_ms: 1.0, itl_ms: 0.1, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let row = |i: u64| {
        json!({"timestamp": 1000 + i * 30, "input_length": 20 + i, "output_length": 3 + i}).to_string()
    };
    let path = bench.write("trace.jsonl", &(0..20).map(row).collect::<Vec<_>>().join("\n"));
    let url = server.url();
    let summary = bench.summary(&args(&url, &[], &["--energy", "none", "--trace", &path]));
    assert_eq!((metric(&summary, "queries"), metric(&summary, "errors")), (20.0, 0.0));
    let mut all = records(&bench.only_run());
    all.sort_by_key(|r| r["item"]["index"].as_u64());
    let first = ns(&all[0], "due_ns");
    for (i, r) in (0u64..).zip(&all) {
        assert!(((ns(r, "due_ns") - first) as f64 * 1e-6 - 30.0 * i as f64).abs() < 0.01);
        let usage = &r["exchange"]["usage"];
        assert_eq!((usage["prompt"].as_u64(), usage["completion"].as_u64()), (Some(20 + i), Some(3 + i)));
    }
    assert_eq!(event(&bench.only_run(), "load")["loop"], "open");
}

#[test]
fn ollama_is_asked_by_its_own_api_and_its_durations_are_kept() {
    let server =
        Server::start(Config { tokens: 7, ttft_ms: 10.0, itl_ms: 2.0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let data = prompts(
        &bench,
        ["one", "two #trap=reasoning", "three #trap=split_lines", "four #trap=status_500"].map(str::to_owned),
    );
    let url = server.url();
    let mut all = args(&url, &data, &["--energy", "none"]);
    all[2] = "ollama";
    let summary = bench.summary(&all);
    assert_eq!((metric(&summary, "output_tokens"), metric(&summary, "errors")), (21.0, 1.0));
    assert_eq!(summary["versions"]["engine"], "ollama 0.12.0");
    for r in records(&bench.only_run()).iter().filter(|r| r["exchange"]["status"] == "ok") {
        let server = &r["exchange"]["server"];
        assert!(server["eval_duration"].as_u64().is_some() && server["load_duration"].as_u64().is_some());
        assert_eq!(r["exchange"]["token_ns"].as_array().unwrap().len(), 7);
        assert_eq!(r["exchange"]["dated"], "kernel");
    }
    // A model that is not there is fetched, unless that is not wanted.
    let bench = Bench::new();
    let data = prompts(&bench, ["one".to_owned()]);
    let mut more =
        args(&url, &data, &["--energy", "none", "--model", "other:1b", "--client-param", "pull=false"]);
    more[2] = "ollama";
    support::assert_fails(&bench.run(&more), 2, "ollama pull other:1b");
    more.truncate(more.len() - 2);
    assert_eq!(metric(&bench.summary(&more), "queries"), 1.0);
    assert!(server.log().iter().any(|s| s.path == "/api/pull"));
}

#[test]
fn a_sweep_is_a_run_for_each_value_and_goes_on_where_it_was_cut_off() {
    let server = Server::start(Config { tokens: 3, ttft_ms: 4.0, itl_ms: 1.0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let (url, data) = (server.url(), prompts(&bench, numbered(40)));
    let more = ["--energy", "none", "--sweep", "concurrency=1,4", "--max-queries", "40", "--name", "s"];
    let swept = bench.summary(&args(&url, &data, &more));
    let folder = bench.path().join("runs/s");
    assert_eq!(swept["key"], "concurrency");
    let points = swept["points"].as_array().unwrap();
    let values: Vec<&Value> = points.iter().map(|p| &p["value"]).collect();
    assert_eq!(values, [&json!(1), &json!(4)]);
    let rate = |i: usize| points[i]["metrics"]["queries_per_s"]["value"].as_f64().unwrap();
    assert!(rate(1) > 2.0 * rate(0), "{} and {}", rate(0), rate(1));
    for (run, count) in [("concurrency-1", 40), ("concurrency-4", 40)] {
        assert_eq!(recorded(&folder.join(run)).len(), count, "{run}");
    }
    // What is whole is not asked again; what was cut off is asked for its rest.
    let log = folder.join("concurrency-4/log.jsonl");
    let text = std::fs::read_to_string(&log).unwrap();
    let kept: Vec<&str> = text.lines().take(20).collect();
    std::fs::write(&log, kept.join("\n") + "\n").unwrap();
    std::fs::remove_file(folder.join("concurrency-4/summary.json")).unwrap();
    let (before, asked) = (recorded(&folder.join("concurrency-4")).len(), server.log().len());
    bench.summary(&args(&url, &data, &more));
    assert_eq!(server.log().len() - asked, 40 - before);
    let mut whole = recorded(&folder.join("concurrency-4"));
    whole.sort_unstable();
    assert_eq!(whole, (0..40).collect::<Vec<u64>>());
    // Other settings are another sweep.
    let other = [&more[..], &["--max-tokens", "2"]].concat();
    let out = bench.run(&args(&url, &data, &other));
    assert_eq!(out.status.code(), Some(2), "{}", support::stderr(&out));
}

#[test]
fn a_sweep_draws_its_curve() {
    let server = Server::start(Config { tokens: 3, ttft_ms: 4.0, itl_ms: 1.0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let mut data = prompts(&bench, numbered(40));
    data.extend(hundred_watts(&bench, 20));
    let url = server.url();
    let more = ["--sweep", "concurrency=8,1,2", "--max-queries", "40", "--name", "s"];
    let out = bench.run(&args(&url, &data, &more));
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && !text.contains('\u{1b}'), "{text}");
    let title = text.lines().position(|l| l.contains("J per output token")).unwrap();
    let chart: Vec<&str> = text.lines().skip(title).take(4).collect();
    for (line, value) in chart[1..].iter().zip(["1", "2", "8"]) {
        assert!(line.trim_start().starts_with(value) && line.contains('±'), "{text}");
        assert!(line.contains('█') || line.contains('├') || line.contains('●'), "{text}");
    }
    assert!(chart.iter().all(|l| l.chars().count() < 80), "{text}");
    // The picture and the page are XML, and each point is in them.
    let folder = bench.path().join("runs/s");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let (svg, page) = (read("curve.svg"), read("report.html"));
    assert!(text.contains("runs/s/report.html"), "{text}");
    let tree = roxmltree::Document::parse(&svg).unwrap();
    let labels: Vec<&str> = tree.descendants().filter_map(|n| n.text()).map(str::trim).collect();
    for label in ["1", "2", "8", "Energy per output token", "Output tokens per second", "median", "p99"] {
        assert!(
            labels.iter().any(|l| l.strip_suffix(", logarithmic").unwrap_or(l) == label),
            "{label}: {labels:?}"
        );
    }
    let flat = page.replacen("<!doctype html>\n", "", 1);
    let tree = roxmltree::Document::parse(&flat).unwrap();
    let links: Vec<&str> = tree.descendants().filter_map(|n| n.attribute("href")).collect();
    assert_eq!(links, [1, 2, 8].map(|n| format!("./concurrency-{n}/report.html")));
    assert!(links.iter().all(|l| folder.join(l).is_file()));
    assert!(page.contains("pretended hardware"), "what is in doubt is told here too");
    // They are made again from what is kept.
    std::fs::remove_file(folder.join("curve.svg")).unwrap();
    let again = bench.run(&["report", "runs/s"]);
    assert!(
        again.status.success() && again.stdout.ends_with(b"runs/s/report.html\n"),
        "{}",
        support::stderr(&again)
    );
    assert_eq!((read("curve.svg"), read("report.html")), (svg, page));
    let elsewhere = bench.run(&["report", "runs/s", "--out", "page.html"]);
    assert!(elsewhere.status.success() && bench.path().join("page.html").is_file());
}

#[test]
fn a_search_finds_what_the_server_takes() {
    // Eight at once, 20 ms each: 400 a second at most.
    let engine =
        json!({"max_batch": 8, "seconds": {"fixed": 0.01, "prefill": 0.0, "decode": 0.0, "context": 0.0}});
    let config = json!({"tokens": 2, "engine": engine}).to_string();
    let server = Server::start(Config::parse(&config).unwrap()).unwrap();
    let bench = Bench::new();
    let (url, data) = (server.url(), prompts(&bench, numbered(300)));
    let more =
        ["--energy", "none", "--rate", "50", "--sweep", "rate", "--arrival", "constant", "--duration-s", "1"];
    let swept = bench.summary(&args(&url, &data, &more));
    let points = swept["points"].as_array().unwrap();
    let best = points
        .iter()
        .filter(|p| p["kept_up"] == true)
        .filter_map(|p| p["value"].as_f64())
        .fold(0.0, f64::max);
    assert!((200.0..=450.0).contains(&best), "{best}");
    let out = bench.run(&args(&url, &data, &["--energy", "none", "--rate", "20,40", "--duration-s", "0.5"]));
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && text.contains("TTFT") && text.contains("  40 "), "{text}");
}

/// Arguments that make a hundred watts, told every `refresh_ms`.
fn hundred_watts(bench: &Bench, refresh_ms: u32) -> Vec<String> {
    let device = json!({"kind": "gpu", "id": "a", "name": "Pretend 100", "power": [[0, 100]], "refresh_ms": refresh_ms});
    let path = bench.write("scenario.json", &json!({"devices": [device]}).to_string());
    let words = ["--source", "replay", "--source-param"].map(str::to_owned);
    words.into_iter().chain([format!("replay.scenario={path}")]).collect()
}

#[test]
fn a_load_with_pauses_loses_no_energy() {
    let server = Server::start(Config { tokens: 3, retry_after_s: 1, ..Config::default() }).unwrap();
    for (prompt, more) in
        [("q", &["--rate", "4", "--arrival", "constant"][..]), ("q #trap=status_429:1", &[])]
    {
        let bench = Bench::new();
        let mut data = prompts(&bench, (0..5).map(|i| format!("{prompt} {i}")));
        data.extend(hundred_watts(&bench, 20));
        let url = server.url();
        let summary = bench.summary(&args(&url, &data, more));
        assert_eq!(metric(&summary, "errors"), 0.0);
        assert!(
            metric(&summary, "energy_coverage") > 0.99,
            "{prompt}: {}",
            summary["metrics"]["energy_coverage"]
        );
        let seconds = metric(&summary, "queries") / metric(&summary, "queries_per_s");
        let energy = metric(&summary, "energy_j");
        assert!((energy / (100.0 * seconds) - 1.0).abs() < 0.1, "{energy} J in {seconds} s of 100 W");
        assert!(metric(&summary, "attribution_residual").abs() < 1e-9);
        // The wait was the server's wish, and no lateness of ours.
        assert!(!summary["warnings"].to_string().contains("client_bottleneck"), "{}", summary["warnings"]);
    }
}

#[test]
fn what_keeps_an_open_load_up_keeps_to_its_rate() {
    let server =
        Server::start(Config { tokens: 2, ttft_ms: 300.0, itl_ms: 1.0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let (url, data) = (server.url(), prompts(&bench, numbered(20)));
    let more = ["--energy", "none", "--rate", "40", "--arrival", "constant", "--cooldown"];
    let summary = bench.summary(&args(&url, &data, &more));
    assert_eq!(metric(&summary, "queries"), 20.0);
    let asked = server.log().len();
    assert!((24..=60).contains(&asked), "{asked} were sent");
}

#[test]
fn a_trace_by_time_goes_on_at_its_own_pace() {
    let server =
        Server::start(Config { tokens: 500, ttft_ms: 1.0, itl_ms: 0.1, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let row = |i: u64| json!({"timestamp": i * 50, "input_length": 9, "output_length": 2}).to_string();
    let path = bench.write("trace.jsonl", &(0..10).map(row).collect::<Vec<_>>().join("\n"));
    let url = server.url();
    let summary =
        bench.summary(&args(&url, &[], &["--energy", "none", "--trace", &path, "--duration-s", "1.2"]));
    let queries = metric(&summary, "queries");
    assert!((22.0..=26.0).contains(&queries), "{queries} in 1.2 s at 20 a second");
}

#[test]
fn by_time_too_whatever_was_due_is_asked() {
    let server = Server::start(Config { tokens: 2, ttft_ms: 1.0, itl_ms: 0.5, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let slow = |i: usize| if i == 20 { format!("q {i} #ttft_ms=1200") } else { format!("q {i}") };
    let (url, data) = (server.url(), prompts(&bench, (0..200).map(slow)));
    let more = [
        "--energy",
        "none",
        "--rate",
        "100",
        "--arrival",
        "constant",
        "--duration-s",
        "1",
        "--concurrency",
        "1",
    ];
    let summary = bench.summary(&args(&url, &data, &more));
    assert!((metric(&summary, "queries") - 100.0).abs() <= 1.0, "{}", summary["metrics"]["queries"]);
    assert!(metric(&summary, "ttft_s") > 0.2, "{}", summary["metrics"]["ttft_s"]);
}

#[test]
fn the_rate_counts_from_the_first_that_was_sent() {
    let server = Server::start(Config { tokens: 2, ttft_ms: 1.0, itl_ms: 0.5, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let slow = |i: usize| if i == 0 { format!("q {i} #ttft_ms=1000") } else { format!("q {i}") };
    let (url, data) = (server.url(), prompts(&bench, (0..4).map(slow)));
    let more = ["--energy", "none", "--rate", "4", "--arrival", "constant"];
    let summary = bench.summary(&args(&url, &data, &more));
    let rate = metric(&summary, "queries_per_s");
    assert!((3.0..=4.1).contains(&rate), "four in a little more than a second: {rate}");
    assert!((metric(&summary, "offered_per_s") - 4.0).abs() < 0.01);
}

#[test]
fn giving_up_keeps_what_had_been_answered() {
    let server = Server::start(Config { tokens: 2, ttft_ms: 1.0, itl_ms: 0.5, ..Config::default() }).unwrap();
    let bench = Bench::new();
    // The failures come together, after answers whose energy is not known yet.
    let broken = |i: usize| if i >= 60 { format!("q {i} #trap=status_500") } else { format!("q {i}") };
    let mut data = prompts(&bench, (0..200).map(broken));
    data.extend(hundred_watts(&bench, 400));
    let url = server.url();
    let out = bench.run(&args(&url, &data, &["--concurrency", "20", "--max-errors", "5"]));
    assert_eq!(out.status.code(), Some(1), "{}", support::stderr(&out));
    // A failure that an answer followed is a row, too.
    let all = records(&bench.only_run());
    let answered = all.iter().filter(|r| r["exchange"]["status"] == "ok");
    let mut kept: Vec<u64> = answered.map(|r| r["item"]["index"].as_u64().unwrap()).collect();
    kept.sort_unstable();
    assert_eq!(kept, (0..60).collect::<Vec<u64>>());
}

#[test]
fn a_sweep_survives_a_load_that_nobody_answers() {
    let server = Server::start(Config { tokens: 2, ttft_ms: 1.0, itl_ms: 0.5, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let broken = |i: usize| if i >= 5 { format!("q {i} #trap=status_500") } else { format!("q {i}") };
    let (url, data) = (server.url(), prompts(&bench, (0..40).map(broken)));
    let more = ["--energy", "none", "--max-errors", "5", "--name", "s", "--sweep"];
    let swept = bench.summary(&args(&url, &data, &[&more[..], &["max_queries=5,40"]].concat()));
    let kept_up: Vec<&Value> = swept["points"].as_array().unwrap().iter().map(|p| &p["kept_up"]).collect();
    assert_eq!(kept_up, [&json!(true), &json!(false)]);
    // A server that never answered is no finding.
    let never = prompts(&bench, (0..40).map(|i| format!("q {i} #trap=status_500")));
    let out = bench.run(&args(
        &url,
        &never,
        &["--energy", "none", "--sweep", "concurrency=1,2", "--max-queries", "20"],
    ));
    assert_eq!(out.status.code(), Some(1));
    assert!(support::stderr(&out).contains("HTTP 500"), "{}", support::stderr(&out));
}

#[test]
fn what_the_user_tells_the_model_is_said_once_and_prompts_differ_where_they_begin() {
    let server = Server::start(Config { tokens: 2, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let talk = json!([{"id": "t", "conversations": [
        {"from": "system", "value": "speak of cats"}, {"from": "human", "value": "hello"}]}]);
    let path = format!("path={}", bench.write("talks.json", &talk.to_string()));
    let url = server.url();
    let data = ["--dataset", "sharegpt", "--dataset-param", &path].map(str::to_owned);
    bench.summary(&args(
        &url,
        &data,
        &["--energy", "none", "--system", "be brief", "--unique-prefix", "--name", "a"],
    ));
    let all = records(&bench.path().join("runs/a"));
    assert_eq!(all[0]["exchange"]["usage"]["prompt"], 4, "a mark, two words of ours, one of the question");
    assert_eq!(
        all[0]["item"]["prompt"], "hello",
        "the mark is where the prompt begins, before what the user is asked"
    );
}

#[test]
fn what_sensors_see_beside_energy_is_kept_without_it() {
    let server = Server::start(Config { tokens: 2, ttft_ms: 30.0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let (url, data) = (server.url(), prompts(&bench, numbered(12)));
    bench.summary(&args(&url, &data, &["--source", "procstat", "--concurrency", "2"]));
    let all = records(&bench.only_run());
    assert!(all.len() == 12 && all.iter().all(|r| r["share"].is_null()));
    let seen = all.iter().filter(|r| r["telemetry"]["cpu_memory"]["mean"].as_f64().is_some()).count();
    assert!(seen > 0, "memory in use was read, and is in no record");
}

/// Joules of a board between two moments, by the file in which its power is said while it happens.
fn drawn(live: &Path, from: u64, until: u64) -> f64 {
    let text = std::fs::read_to_string(live).unwrap();
    let steps: Vec<(u64, f64)> = text
        .lines()
        .map(|l| l.split(' ').collect::<Vec<_>>())
        .map(|w| (w[0].parse().unwrap(), w[2].parse().unwrap()))
        .collect();
    let ends = steps.iter().skip(1).map(|(at, _)| *at).chain([u64::MAX]);
    let clip = |at: u64| at.clamp(from, until);
    steps.iter().zip(ends).map(|((at, watts), end)| (clip(end) - clip(*at)) as f64 * 1e-9 * watts).sum()
}

#[test]
fn what_fills_up_and_drains_is_cut_off_and_the_rest_has_its_own_joules() {
    let bench = Bench::new();
    let live = bench.path().join("live.txt");
    let engine = json!({
        "live": live, "max_batch": 128, "idle_watts": 60.0,
        "seconds": {"fixed": 0.012, "prefill": 1e-5, "decode": 2e-5, "context": 0.0},
        "joules": {"fixed": 1.0, "prefill": 0.01, "decode": 0.2, "context": 0.0},
    });
    let config = json!({"tokens": 120, "engine": engine}).to_string();
    let server = Server::start(Config::parse(&config).unwrap()).unwrap();
    let board = json!({"live": live, "devices": [{"uuid": "a", "power": [[0, 60]]}]}).to_string();
    let sim = wattle_sim_nvml::Sim::install(bench.path(), &board).unwrap();
    let library = format!("nvml.library={}", sim.library.display());
    let (url, data) = (server.url(), prompts(&bench, numbered(50)));
    // Fourteen seconds: three in which the rate rises, one and a half until as many end as begin, eight that are even, one and a
    // half to drain; on a machine that is busy otherwise answers take longer, and so do the second and the last.
    let load =
        ["--rate", "2", "--ramp-to", "20", "--ramp-s", "3", "--arrival", "constant", "--duration-s", "12"];
    let more = [&load[..], &["--source", "nvml", "--source-param", &library]].concat();
    let summary = bench.summary(&args(&url, &data, &more));
    let steady = &summary["steady"];
    let seconds = |key: &str| steady[key].as_f64().unwrap();
    // What truly happened, by the server's log.
    let log = server.log();
    let apart = |from: u64, until: u64| until.saturating_sub(from) as f64 * 1e-9;
    let (from, until) = (steady["start_ns"].as_u64().unwrap(), steady["end_ns"].as_u64().unwrap());
    // Before the session there were requests to warm up.
    let start = from - (seconds("trimmed_start_s") * 1e9) as u64 - 1000;
    let asked = log.iter().filter(|s| s.received >= start);
    let lives: Vec<(u64, u64)> = asked.filter_map(|s| Some((s.received, *s.written.last()?))).collect();
    let end = lives.iter().map(|l| l.1).max().unwrap();
    let last = lives.iter().map(|l| l.0).max().unwrap();
    let answer = lives.iter().map(|l| apart(l.0, l.1)).sum::<f64>() / lives.len() as f64;
    let (filling, draining) = (3.0 + answer, apart(last, end));
    // Whether it was as even in between as it was meant to be: where other work held the server up, more may be cut off, too.
    let halves = (start + (filling * 1e9) as u64..last - 500_000_000).step_by(500_000_000);
    let levels = halves.map(|at| {
        let there = lives.iter().map(|l| apart(l.0.max(at), l.1.min(at + 500_000_000))).sum::<f64>();
        [drawn(&live, at, at + 500_000_000), there]
    });
    let levels: Vec<[f64; 2]> = levels.collect();
    let even = [0, 1].iter().all(|i| {
        let mean = levels.iter().map(|l| l[*i]).sum::<f64>() / levels.len() as f64;
        levels.iter().all(|l| (l[*i] / mean - 1.0).abs() < 0.05)
    });
    println!("even in between: {even}; {levels:?}");
    if steady["reached"] == false {
        assert!(!even && summary["warnings"].to_string().contains("unsteady"), "{steady}");
        return;
    }
    // Where other work held the server up there may be any number of ups and downs; what the figures say of the window holds anyway.
    for (key, truth) in [("trimmed_start_s", filling), ("trimmed_end_s", draining)] {
        let cut = seconds(key);
        assert!(
            !even || (0.3 * truth..=truth + 2.0).contains(&cut),
            "{key}: {cut}, in truth {truth}; {steady}"
        );
    }
    let arrived = log.iter().flat_map(|s| &s.written).filter(|at| (from..until).contains(at)).count() as f64;
    let (joules, length) = (drawn(&live, from, until), (until - from) as f64 * 1e-9);
    let ended = lives.iter().filter(|l| (from..until).contains(&l.1)).count() as f64;
    let in_flight: f64 = lives.iter().map(|l| apart(l.0.max(from), l.1.min(until))).sum();
    let found = |name: &str| steady["metrics"][name]["value"].as_f64().unwrap();
    for (name, truth, off) in [
        ("energy_j", joules, 0.03),
        ("mean_power_w", joules / length, 0.03),
        ("output_tokens_per_s", arrived / length, 0.05),
        ("joules_per_output_token", joules / arrived, 0.05),
        ("queries_per_s", ended / length, 0.1),
        ("mean_in_flight", in_flight / length, 0.1),
    ] {
        let found = found(name);
        assert!((found / truth - 1.0).abs() < off, "{name}: {found}, in truth {truth}; {steady}");
    }
    // Those of the whole run are others: it also filled up and drained.
    let whole = metric(&summary, "joules_per_output_token") / found("joules_per_output_token");
    assert!(!even || whole > 1.03, "{whole}");
    assert!(!even || metric(&summary, "queries") > found("queries") + 20.0);
    let report = std::fs::read_to_string(bench.only_run().join("report.html")).unwrap();
    assert!(report.contains("<h2>Steady state</h2>"));
}

#[test]
fn a_short_run_is_not_judged_and_one_that_never_settles_says_so() {
    let server =
        Server::start(Config { tokens: 20, ttft_ms: 20.0, itl_ms: 10.0, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let (url, data) = (server.url(), prompts(&bench, numbered(60)));
    let short =
        bench.summary(&args(&url, &data, &["--energy", "none", "--concurrency", "8", "--name", "short"]));
    assert!(short["steady"].is_null() && !short["warnings"].to_string().contains("unsteady"), "{short}");
    // More and more requests until the end.
    let rising =
        ["--energy", "none", "--rate", "5", "--ramp-to", "150", "--ramp-s", "5", "--duration-s", "5"];
    let rising = bench.summary(&args(&url, &data, &[&rising[..], &["--name", "rising"]].concat()));
    let steady = &rising["steady"];
    assert!(rising["warnings"].to_string().contains("unsteady"), "{steady} {}", rising["warnings"]);
}

#[test]
fn of_a_resumed_run_the_longest_session_counts_and_its_window_has_what_came_in_it() {
    let server = Server::start(Config { tokens: 4, ..Config::default() }).unwrap();
    let bench = Bench::new();
    let (url, data) = (server.url(), prompts(&bench, numbered(2)));
    bench.summary(&args(&url, &data, &["--energy", "none"]));
    // Of the run its folder is kept, and another log written: a second session of 24 s between two short ones. In it four
    // requests a second fill up to sixteen in flight, each of them of 4 s and four pieces of ten tokens.
    let run = bench.only_run();
    let old = std::fs::read_to_string(run.join("log.jsonl")).unwrap();
    let lines: Vec<Value> = old.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let first = |kind: &str| lines.iter().find(|l| l["type"] == kind).unwrap().clone();
    let (session, record) = (first("session"), first("record"));
    let (mut log, mut index, mut all) = (Vec::new(), 0, Vec::new());
    for (number, length_ms) in [(0, 3000), (1, 20_000), (2, 3000)] {
        let mut line = session.clone();
        line["session"] = json!(number);
        log.push(line);
        let start = 1_000_000_000 * (1000 + 100 * number);
        for sent in (0..length_ms).step_by(250).map(|ms| start + ms * 1_000_000) {
            let mut line = record.clone();
            line["session"] = json!(number);
            line["item"]["index"] = json!(index);
            let tokens: Vec<u64> = (1..=4).map(|i| sent + i * 1_000_000_000).collect();
            let exchange = &mut line["exchange"];
            for (key, at) in
                [("due_ns", sent), ("sent_ns", sent), ("first_token_ns", tokens[0]), ("done_ns", tokens[3])]
            {
                exchange[key] = json!(at);
            }
            exchange["token_ns"] = json!(tokens);
            exchange["usage"]["completion"] = json!(40);
            all.extend((number == 1).then_some(tokens));
            log.push(line);
            index += 1;
        }
    }
    let text: String = log.iter().map(|l| format!("{l}\n")).collect();
    std::fs::write(run.join("log.jsonl"), text).unwrap();
    std::fs::remove_file(run.join("summary.json")).unwrap();
    let out = bench.run(&["report", &run.display().to_string()]);
    assert!(out.status.success(), "{}", support::stderr(&out));
    let summary: Value = serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap();
    let steady = &summary["steady"];
    assert_eq!((&steady["session"], &steady["reached"]), (&json!(1), &json!(true)), "{steady}");
    let seconds = |key: &str| steady[key].as_f64().unwrap();
    for end in ["trimmed_start_s", "trimmed_end_s"] {
        assert!((3.0..=5.0).contains(&seconds(end)), "{end}: {steady}");
    }
    let window = steady["start_ns"].as_u64().unwrap()..steady["end_ns"].as_u64().unwrap();
    let arrived = all.iter().flatten().filter(|at| window.contains(at)).count() as f64 * 10.0;
    let ended = all.iter().filter(|tokens| window.contains(&tokens[3])).count() as f64;
    let found = |name: &str| steady["metrics"][name]["value"].as_f64().unwrap();
    assert_eq!((found("output_tokens"), found("queries")), (arrived, ended), "{steady}");
    assert!((found("output_tokens_per_s") - 160.0).abs() < 3.0 && (found("queries_per_s") - 4.0).abs() < 0.1);
    assert!((found("mean_in_flight") - 16.0).abs() < 0.3, "{steady}");
    assert!(metric(&summary, "mean_in_flight") < 15.0, "with what fills up and drains");
    assert_eq!(found("latency_s"), 4.0);
}
