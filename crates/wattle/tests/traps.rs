//! What real servers do to clients, each on demand: right tokens, right outcome, right error text.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use serde_json::{Value, json};
use std::collections::BTreeMap;
use support::Bench;
use wattle_sim_server::{Config, Server};

/// Asks each prompt once, and gives the records by prompt.
fn ask(server: &Server, prompts: &[String], more: &[&str]) -> BTreeMap<String, Value> {
    let bench = Bench::new();
    let lines: Vec<String> = prompts.iter().map(|p| json!({ "prompt": p }).to_string()).collect();
    let path = format!("path={}", bench.write("prompts.jsonl", &(lines.join("\n") + "\n")));
    let url = server.url();
    let args = [
        "run",
        "--client",
        "openai",
        "--url",
        &url,
        "--energy",
        "none",
        "--warmup",
        "0",
        "--max-errors",
        "0",
    ];
    let dataset = ["--dataset", "jsonl", "--dataset-param", &path];
    bench.run(&[&args[..], &dataset, more].concat());
    let log = std::fs::read_to_string(bench.only_run().join("log.jsonl")).unwrap();
    let records = log.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    let of = |r: Value| (r["item"]["prompt"].as_str().unwrap().to_owned(), r);
    records.filter(|r| r["type"] == "record").map(of).collect()
}

fn server() -> Server {
    Server::start(Config { tokens: 6, ttft_ms: 5.0, itl_ms: 1.0, ..Config::default() }).unwrap()
}

#[test]
fn what_servers_do_to_answers_costs_no_token() {
    // Trap, tokens counted by the server, who counted.
    let traps = [
        ("role_first", "usage"),
        ("usage_extra", "usage"),
        ("usage_last", "usage"),
        ("usage_missing", "chunks"),
        ("reasoning", "usage"),
        ("reasoning_key", "usage"),
        ("tool_call", "usage"),
        ("coalesced", "usage"),
        ("split_utf8", "usage"),
        ("split_lines", "usage"),
        ("crlf", "usage"),
        ("comments", "usage"),
        ("not_streaming", "usage"),
        ("close_after", "usage"),
    ];
    let prompt = |trap: &str| format!("say something #tokens=6 #trap={trap}");
    let server = server();
    let prompts: Vec<String> = traps.iter().map(|(trap, _)| prompt(trap)).collect();
    let records = ask(&server, &prompts, &[]);
    for (trap, from) in traps {
        let exchange = &records[&prompt(trap)]["exchange"];
        assert_eq!(exchange["status"], "ok", "{trap}: {exchange}");
        assert_eq!(exchange["usage"]["completion"], 6, "{trap}: {exchange}");
        assert_eq!(exchange["usage"]["from"], from, "{trap}: {exchange}");
        if trap != "not_streaming" {
            assert!(
                exchange["first_token_ns"].as_u64() >= exchange["sent_ns"].as_u64(),
                "{trap}: {exchange}"
            );
        }
    }
    // The role alone is no token: the first one came when the schedule says.
    let served = server.log();
    let early = &records[&prompt("role_first")]["exchange"];
    let truth = served.iter().find(|s| Some(s.id.as_str()) == early["response_id"].as_str()).unwrap();
    assert!(early["first_token_ns"].as_u64().unwrap() >= truth.written[0], "{early}");
}

#[test]
fn what_is_no_answer_is_one_failed_row_with_its_reason() {
    let traps = [
        ("disconnect_mid", "network", "broke off"),
        ("status_429:99", "server", "429"),
        ("status_500", "server", "500"),
        ("status_503", "server", "503"),
        ("error_body:openai", "server", "HTTP"),
        ("error_body:vllm", "server", "HTTP"),
        ("error_body:llamacpp", "server", "HTTP"),
        ("error_body:fastapi", "server", "HTTP"),
        ("error_body:tgi", "server", "HTTP"),
        ("error_body:html", "server", "HTTP"),
        ("error_in_stream", "server", ""),
        ("hang", "timeout", "raise timeout_s"),
        ("hang_mid", "timeout", "raise timeout_s"),
        ("huge_line", "protocol", "longer than"),
        ("garbage", "protocol", ""),
        ("garbage_head", "protocol", "not an HTTP answer"),
    ];
    let prompt = |trap: &str| format!("say something #tokens=6 #trap={trap}");
    let server = server();
    let prompts: Vec<String> = traps.iter().map(|(trap, ..)| prompt(trap)).collect();
    let records = ask(&server, &prompts, &["--timeout-s", "2"]);
    for (trap, class, text) in traps {
        let exchange = &records[&prompt(trap)]["exchange"];
        assert_eq!(exchange["status"], "failed", "{trap}: {exchange}");
        assert_eq!(exchange["class"], class, "{trap}: {exchange}");
        let error = exchange["error"].as_str().unwrap();
        assert!(!error.is_empty() && error.contains(text), "{trap}: {error}");
    }
}

#[test]
fn tokens_are_dated_by_the_kernel_when_they_came() {
    let server =
        Server::start(Config { tokens: 8, ttft_ms: 20.0, itl_ms: 5.0, ..Config::default() }).unwrap();
    let prompts: Vec<String> = (0..30).map(|i| format!("question {i}")).collect();
    let records = ask(&server, &prompts, &[]);
    let served: BTreeMap<String, _> = server.log().into_iter().map(|s| (s.id.clone(), s)).collect();
    let mut off = Vec::new();
    let mut by_kernel = 0;
    for record in records.values() {
        let exchange = &record["exchange"];
        by_kernel += usize::from(exchange["dated"] == "kernel");
        let truth = &served[exchange["response_id"].as_str().unwrap()];
        let first = exchange["first_token_ns"].as_u64().unwrap();
        off.push(first as i64 - truth.written[0] as i64);
        assert_eq!(exchange["token_ns"].as_array().unwrap().len(), 8);
    }
    off.sort_unstable();
    // From the write of the first token to its arrival; on a busy machine the writer may be put aside after its stamp.
    let median = off[off.len() / 2];
    assert!((-1_000_000..5_000_000).contains(&median), "{off:?}");
    assert!(by_kernel >= 20, "{by_kernel} of 30");
}
