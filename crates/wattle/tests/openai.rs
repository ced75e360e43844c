//! The `openai` client against a scripted server: what comes over the wire is what stands in the records.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::Ordering;
use support::{
    Bench, Server, assert_fails, metric, recorded, reply, respond, send_event, start_stream, stderr, stream,
};

fn questions(bench: &Bench, count: usize) -> String {
    let lines: String =
        (0..count).map(|i| format!("{{\"prompt\":\"question {i}\",\"answer\":\"Rome\"}}\n")).collect();
    format!("path={}", bench.write("q.jsonl", &lines))
}

fn args<'a>(server: &'a Server, path: &'a str) -> Vec<&'a str> {
    let mut args = vec![
        "run",
        "--client",
        "openai",
        "--url",
        &server.url,
        "--dataset",
        "jsonl",
        "--dataset-param",
        path,
    ];
    args.extend(["--energy", "none", "--scorer", "contains", "--name", "x"]);
    args
}

fn exchanges(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("log.jsonl")).unwrap();
    let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    lines.filter(|v| v["type"] == "record").map(|v| v["exchange"].clone()).collect()
}

#[test]
fn a_streamed_answer_is_put_together_with_its_usage_and_its_stamps() {
    let bench = Bench::new();
    let server = Server::start(Box::new(|n, request, out| {
        assert_eq!(request["stream_options"]["include_usage"], true);
        assert_eq!(request["model"], "tiny", "the only model of the server");
        stream(out, &reply(n, &["The capital", " is ", "Rome."]))
    }));
    let path = questions(&bench, 20);
    let summary = bench.summary(&args(&server, &path));
    assert_eq!((metric(&summary, "accuracy"), metric(&summary, "errors")), (1.0, 0.0));
    assert_eq!((metric(&summary, "output_tokens"), metric(&summary, "prompt_tokens")), (60.0, 140.0));
    for exchange in exchanges(&bench.only_run()) {
        assert_eq!(exchange["answer"], "The capital is Rome.");
        assert!(exchange["response_id"].as_str().unwrap().starts_with('r'));
        let stamps: Vec<u64> =
            exchange["token_ns"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect();
        assert_eq!(stamps.len(), 3, "the chunk that only names the role is no token");
        assert!(stamps.is_sorted());
        assert_eq!(exchange["first_token_ns"], stamps[0]);
        let at = |key: &str| exchange[key].as_u64().unwrap();
        assert!(at("due_ns") <= at("sent_ns") && at("sent_ns") <= stamps[0] && stamps[2] <= at("done_ns"));
    }
    assert_eq!(server.connections.load(Ordering::SeqCst), 1, "one connection serves all requests");
}

#[test]
fn one_failing_request_is_one_error_row_and_the_run_goes_on() {
    let bench = Bench::new();
    // The first three are the warm-up.
    let server = Server::start(Box::new(|n, _, out| match n {
        4 => respond(
            out,
            "500 Internal Server Error",
            "application/json",
            r#"{"error":{"message":"out of memory"}}"#,
        ),
        5 => respond(out, "200 OK", "text/event-stream", "data: {\"choices\": 7}\n\n"),
        6 => {
            start_stream(out)?;
            send_event(out, &json!({"choices":[{"delta":{"content":"half an ans"}}]}).to_string())?;
            out.shutdown(std::net::Shutdown::Both)
        }
        7 => stream(out, &[json!({"error":{"message":"CUDA died"}}).to_string()]),
        8 => respond(
            out,
            "200 OK",
            "application/json",
            r#"{"choices":[{"message":{"content":"Rome"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#,
        ),
        9 => stream(out, &reply(n, &["Rome"])[..2]),
        _ => stream(out, &reply(n, &["Rome"])),
    }));
    let path = questions(&bench, 10);
    let summary = bench.summary(&args(&server, &path));
    assert_eq!((metric(&summary, "errors"), metric(&summary, "accuracy")), (5.0, 0.5));
    let rows = exchanges(&bench.only_run());
    let row = |i: usize| (rows[i]["class"].as_str(), rows[i]["error"].as_str().unwrap_or_default());
    assert_eq!(row(1), (Some("server"), "HTTP 500: out of memory"));
    assert_eq!(row(2).0, Some("protocol"));
    assert_eq!(row(3).0, Some("network"));
    assert_eq!(rows[3]["answer"], "half an ans", "what had come is kept");
    assert_eq!(row(4), (Some("server"), "CUDA died"));
    assert_eq!((rows[5]["status"].as_str(), rows[5]["answer"].as_str()), (Some("ok"), Some("Rome")));
    assert!(row(6).1.contains("without a finish reason"), "{:?}", row(6));
    assert!(summary["warnings"].to_string().contains("5 of 10 requests failed"));
}

#[test]
fn a_server_without_usage_is_counted_by_chunks_and_labelled() {
    let bench = Bench::new();
    let server = Server::start(Box::new(|n, _, out| {
        let mut events = reply(n, &["Ro", "me"]);
        events.retain(|e| !e.contains("usage"));
        stream(out, &events)
    }));
    let path = questions(&bench, 2);
    bench.summary(&args(&server, &path));
    for exchange in exchanges(&bench.only_run()) {
        assert_eq!(
            (&exchange["usage"]["completion"], &exchange["usage"]["from"]),
            (&2.into(), &"chunks".into())
        );
        assert!(exchange["usage"]["prompt"].is_null());
    }
}

#[test]
fn a_request_that_takes_too_long_has_failed() {
    let bench = Bench::new();
    let server = Server::start(Box::new(|n, _, out| {
        if n == 3 {
            start_stream(out)?;
            out.flush()?;
            std::thread::sleep(std::time::Duration::from_secs(3));
        }
        stream(out, &reply(n, &["Rome"]))
    }));
    let path = questions(&bench, 2);
    let summary = bench.summary(&[&args(&server, &path)[..], &["--timeout-s", "0.3"]].concat());
    assert_eq!(metric(&summary, "errors"), 1.0);
    assert_eq!(exchanges(&bench.only_run())[0]["class"], "timeout");
}

#[test]
fn a_server_that_never_answers_can_be_left_with_one_signal() {
    let bench = Bench::new();
    let deaf = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", deaf.local_addr().unwrap());
    let child = bench.start(&["run", "--client", "openai", "--url", &url]);
    let (_held, _) = deaf.accept().unwrap();
    let killed = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130), "{}", stderr(&out));
    assert!(stderr(&out).contains("stopped before there was anything to keep"), "{}", stderr(&out));
    assert!(bench.runs().is_empty());
}

#[test]
fn a_server_that_dies_ends_the_run_and_its_questions_are_asked_again_on_resume() {
    let bench = Bench::new();
    let ill = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let state = std::sync::Arc::clone(&ill);
    let server = Server::start(Box::new(move |n, _, out| {
        if n >= 8 && state.load(Ordering::SeqCst) {
            return respond(out, "503 Service Unavailable", "text/plain", "gone");
        }
        stream(out, &reply(n, &["Rome"]))
    }));
    let path = questions(&bench, 30);
    let out = bench.run(&args(&server, &path));
    assert_eq!(out.status.code(), Some(1));
    assert!(
        stderr(&out).contains("10 requests in a row failed, the last with: HTTP 503: gone"),
        "{}",
        stderr(&out)
    );
    assert!(stderr(&out).contains("--resume"));
    let shown = String::from_utf8_lossy(&out.stdout);
    assert!(shown.contains("5 queries") && shown.contains("gave up after 10 failures"), "{shown}");
    let run = bench.only_run();
    assert_eq!(recorded(&run), [0, 1, 2, 3, 4]);
    assert!(run.join("summary.json").exists(), "what had finished is summed up");
    ill.store(false, Ordering::SeqCst);
    let summary = bench.summary(&["run", "--resume", run.to_str().unwrap()]);
    assert_eq!(recorded(&run), (0..30).collect::<Vec<_>>());
    assert_eq!(metric(&summary, "accuracy"), 1.0);
}

#[test]
fn the_key_is_sent_and_written_nowhere() {
    let bench = Bench::new();
    let server = Server::answering("Rome");
    let path = questions(&bench, 2);
    let out = bench.command(&args(&server, &path)).env("OPENAI_API_KEY", "sk-very-secret").output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    assert!(
        server
            .heads
            .lock()
            .unwrap()
            .iter()
            .all(|h| h.to_lowercase().contains("authorization: bearer sk-very-secret"))
    );
    let mut files = vec![bench.path().join("runs")];
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(std::fs::read_dir(path).unwrap().map(|e| e.unwrap().path()));
        } else {
            let bytes = std::fs::read(&path).unwrap();
            assert!(!bytes.windows(14).any(|w| w == b"sk-very-secret"), "{}", path.display());
        }
    }
}

#[test]
fn a_model_the_server_does_not_have_is_told_with_those_it_has() {
    let bench = Bench::new();
    let server = Server::answering("Rome");
    let path = questions(&bench, 2);
    let out = bench.run(&[&args(&server, &path)[..], &["--model", "tinny"]].concat());
    assert_fails(&out, 2, "the server has no model \"tinny\", did you mean \"tiny\"?; it has: tiny");
    assert!(bench.runs().is_empty());
}

#[test]
fn a_run_in_which_nothing_was_answered_has_failed_and_says_why() {
    let bench = Bench::new();
    let server = Server::start(Box::new(|_, _, out| {
        respond(out, "500 Oops", "application/json", r#"{"error":"no memory"}"#)
    }));
    let path = questions(&bench, 3);
    let out = bench.run(&args(&server, &path));
    assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
    let screen = String::from_utf8(out.stdout).unwrap();
    assert!(screen.contains("3 of 3 requests failed, most with: HTTP 500: no memory"), "{screen}");
    assert_eq!(recorded(&bench.only_run()), [0, 1, 2]);
}

#[test]
fn where_the_server_is_and_how_long_to_wait_may_change_on_resume_and_nothing_else() {
    let bench = Bench::new();
    let ill = Server::start(Box::new(|_, _, out| respond(out, "503 Gone", "text/plain", "gone")));
    let path = questions(&bench, 12);
    assert_eq!(bench.run(&args(&ill, &path)).status.code(), Some(1));
    let run = bench.only_run();
    let well = Server::answering("Rome");
    let resume = ["run", "--resume", run.to_str().unwrap()];
    assert_fails(&bench.run(&[&resume[..], &["--seed", "3"]].concat()), 2, "seed");
    // From another folder, too: paths are kept as seen from anywhere.
    let out = bench
        .command(&[&resume[..], &["--url", &well.url, "--timeout-s", "9"]].concat())
        .current_dir("/")
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    assert_eq!(recorded(&run), (0..12).collect::<Vec<_>>());
    assert!(std::fs::read_to_string(run.join("log.jsonl")).unwrap().contains("settings_changed"));
}

#[test]
fn an_answer_in_one_piece_has_no_first_token() {
    let bench = Bench::new();
    let body = r#"{"choices":[{"message":{"content":"Rome"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":9}}"#;
    let server = Server::start(Box::new(move |_, _, out| respond(out, "200 OK", "application/json", body)));
    let path = questions(&bench, 3);
    let summary = bench.summary(&args(&server, &path));
    assert_eq!(metric(&summary, "accuracy"), 1.0);
    assert!(
        summary["metrics"]["ttft_s"]["value"].is_null() && summary["metrics"]["itl_s"]["value"].is_null()
    );
    assert!(summary["warnings"].to_string().contains("not_streamed"));
}

#[test]
fn a_failure_is_in_the_log_at_once_and_rows_never_wait_when_the_run_never_gives_up() {
    let bench = Bench::new();
    let server = Server::start(Box::new(|_, _, out| respond(out, "500 Oops", "text/plain", "no")));
    let path = questions(&bench, 15);
    let out = bench.run(&[&args(&server, &path)[..], &["--max-errors", "0"]].concat());
    assert_eq!(out.status.code(), Some(1));
    let log = std::fs::read_to_string(bench.only_run().join("log.jsonl")).unwrap();
    let kinds: Vec<&str> = log
        .lines()
        .filter_map(|l| {
            if l.contains("query_failed") {
                Some("failed")
            } else {
                l.contains("\"type\":\"record\"").then_some("row")
            }
        })
        .collect();
    assert_eq!(kinds, ["failed", "row"].repeat(15));
}

#[test]
fn a_kept_connection_that_turns_out_to_be_closed_costs_no_query() {
    let bench = Bench::new();
    // Every other request is the one on a kept connection: it finds the door shut, and is sent again on a new one.
    let server = Server::start(Box::new(|n, _, out| match n % 2 {
        0 => stream(out, &reply(n, &["Rome"])),
        _ => out.shutdown(std::net::Shutdown::Both),
    }));
    let path = questions(&bench, 20);
    let summary = bench.summary(&args(&server, &path));
    assert_eq!((metric(&summary, "errors"), metric(&summary, "accuracy")), (0.0, 1.0));
}

#[test]
fn a_server_that_dies_at_work_is_not_asked_twice() {
    let bench = Bench::new();
    // The second answer on a connection works for a while and then hangs up without a word.
    let server = Server::start(Box::new(|n, _, out| {
        if n == 4 {
            std::thread::sleep(std::time::Duration::from_millis(400));
            return out.shutdown(std::net::Shutdown::Both);
        }
        stream(out, &reply(n, &["Rome"]))
    }));
    let path = questions(&bench, 4);
    let summary = bench.summary(&args(&server, &path));
    assert_eq!(metric(&summary, "errors"), 1.0);
    let chats = server.heads.lock().unwrap().iter().filter(|h| h.starts_with("POST")).count();
    assert_eq!(chats, 3 + 4, "three to warm up, and each question once");
}
