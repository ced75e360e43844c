//! What each endpoint says to a client that does nothing special.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use support::{call, chat, chat_body, connect, logged, receive, send, start};
use wattle_sim_server::{Clock, Config, Outcome};

#[test]
fn a_streamed_chat_is_role_tokens_reason_usage_end() {
    let server = start(Config::default());
    let reply = chat(&server, "one two three #tokens=5");
    assert_eq!(reply.status(), 200);
    assert!(reply.head().contains("content-type: text/event-stream"));
    assert!(reply.is_whole() && reply.body().ends_with("data: [DONE]\n\n"));
    let events = reply.events();
    assert_eq!(events.len(), 7, "five tokens, the reason, the usage");
    assert!(events.iter().all(|e| e["id"] == "mine"));
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(reply.said("content"), "the river runs past an");
    assert_eq!(events[5]["choices"][0]["finish_reason"], "stop");
    assert_eq!(events[6]["choices"].as_array().unwrap().len(), 0);
    let usage = serde_json::json!({"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9});
    assert_eq!(events[6]["usage"], usage);
}

#[test]
fn usage_comes_only_if_asked_for_and_the_limit_is_the_reason() {
    let server = start(Config::default());
    let body = r#"{"messages": [{"content": "hi"}], "stream": true, "max_tokens": 3}"#;
    let events = call(&server, "POST", "/v1/chat/completions", body).events();
    assert_eq!(events.len(), 4);
    assert_eq!(events[3]["choices"][0]["finish_reason"], "length");
    assert!(events.iter().all(|e| e.get("usage").is_none()));
}

#[test]
fn an_answer_that_is_not_streamed_is_one_object() {
    let server = start(Config { answer: Some("four \"words\"\tto say".into()), ..Config::default() });
    let reply = call(&server, "POST", "/v1/chat/completions", r#"{"messages": [{"content": "a b"}]}"#).json();
    assert_eq!(reply["object"], "chat.completion");
    assert_eq!(reply["choices"][0]["message"]["content"], "four \"words\" to say");
    assert_eq!(
        (&reply["usage"]["prompt_tokens"], &reply["usage"]["completion_tokens"]),
        (&2.into(), &4.into())
    );
    let reply = call(&server, "POST", "/v1/completions", r#"{"prompt": "a b", "max_tokens": 2}"#).json();
    assert_eq!(reply["choices"][0]["text"], "four \"words\"");
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
}

#[test]
fn a_streamed_completion_has_text() {
    let server = start(Config::default());
    let reply =
        call(&server, "POST", "/v1/completions", r#"{"prompt": "x", "max_tokens": 3, "stream": true}"#);
    let texts: String =
        reply.events().iter().map(|e| e["choices"][0]["text"].as_str().unwrap().to_owned()).collect();
    assert_eq!(texts, "the river runs");
}

#[test]
fn ollama_streams_lines_and_counts_nanoseconds() {
    let server = start(Config { ttft_ms: 20.0, itl_ms: 2.0, load_ms: 7.0, ..Config::default() });
    let body = r#"{"model": "m", "messages": [{"role": "user", "content": "a b c"}], "options": {"num_predict": 6}}"#;
    let reply = call(&server, "POST", "/api/chat", body);
    assert!(reply.head().contains("application/x-ndjson"));
    let lines = reply.lines();
    assert_eq!(lines.len(), 7);
    assert_eq!((&lines[0]["message"]["content"], &lines[0]["done"]), (&"the".into(), &false.into()));
    let last = &lines[6];
    assert_eq!(
        (&last["done"], &last["done_reason"], &last["model"]),
        (&true.into(), &"length".into(), &"m".into())
    );
    assert_eq!((&last["prompt_eval_count"], &last["eval_count"]), (&3.into(), &6.into()));
    assert_eq!(last["prompt_eval_duration"], 20_000_000);
    assert_eq!(last["eval_duration"], 10_000_000);
    assert_eq!(last["total_duration"], 37_000_000);
    let whole = call(&server, "POST", "/api/generate", r#"{"prompt": "a", "stream": false}"#).json();
    assert_eq!((&whole["done"], &whole["eval_count"]), (&true.into(), &16.into()));
    assert!(whole["response"].as_str().unwrap().starts_with("the river runs"));
}

#[test]
fn a_pull_goes_on_until_success() {
    let server = start(Config::default());
    let lines = call(&server, "POST", "/api/pull", r#"{"model": "tiny"}"#).lines();
    assert_eq!(lines[0]["status"], "pulling manifest");
    assert_eq!(lines.last().unwrap()["status"], "success");
    let done: Vec<_> = lines.iter().filter_map(|l| l["completed"].as_u64()).collect();
    assert!(done.is_sorted() && done.len() > 2);
    assert_eq!(Some(done[done.len() - 1]), lines[1]["total"].as_u64());
}

#[test]
fn the_small_endpoints_answer_on_one_connection() {
    let server = start(Config::default());
    let mut stream = connect(&server);
    let mut get = |path: &str| {
        send(&mut stream, "GET", path, "");
        receive(&mut stream, std::time::Duration::from_secs(30))
    };
    assert_eq!(get("/v1/models").json()["data"][0]["id"], "tiny");
    assert_eq!(get("/api/tags").json()["models"][0]["name"], "tiny");
    assert_eq!(get("/api/version").status(), 200);
    assert_eq!(get("/health").status(), 200);
    assert_eq!(get("/nowhere").status(), 404);
    let metrics = get("/metrics").body();
    assert!(metrics.contains("vllm:num_requests_running{model_name=\"tiny\"} 0.0"), "{metrics}");
    assert_eq!(server.connections(), 1);
}

#[test]
fn timings_are_in_the_last_chunk_and_say_the_schedule() {
    let server = start(Config { ttft_ms: 20.0, itl_ms: 2.0, timings: true, ..Config::default() });
    let timings = serde_json::json!(
        {"cache_n": 0, "prompt_n": 3, "prompt_ms": 20.0, "predicted_n": 6, "predicted_ms": 10.0}
    );
    let events = chat(&server, "a b #tokens=6").events();
    assert_eq!(events[7]["timings"], timings, "beside the usage");
    assert!(events[..7].iter().all(|e| e.get("timings").is_none()));
    let body = |stream| format!(r#"{{"prompt": "a b c", "max_tokens": 6, "stream": {stream}}}"#);
    let events = call(&server, "POST", "/v1/completions", &body(true)).events();
    assert_eq!(events[6]["timings"], timings, "beside the reason, where there is no usage");
    let whole = call(&server, "POST", "/v1/completions", &body(false)).json();
    assert_eq!(whole["timings"], timings);
    assert!(chat(&start(Config::default()), "hi").events().iter().all(|e| e.get("timings").is_none()));
}

#[test]
fn there_may_be_no_metrics() {
    let server = start(Config { metrics: false, ..Config::default() });
    assert_eq!(call(&server, "GET", "/metrics", "").status(), 404);
}

#[test]
fn metrics_count_tokens_and_requests() {
    let server = start(Config { ttft_ms: 60_000.0, ..Config::default() });
    let mut slow = connect(&server);
    send(&mut slow, "POST", "/v1/chat/completions", &chat_body("a b c"));
    chat(&server, "#tokens=5 #ttft_ms=1 x");
    let metrics = call(&server, "GET", "/metrics", "").body();
    for line in
        ["num_requests_running{model_name=\"tiny\"} 1.0", "prompt_tokens_total{model_name=\"tiny\"} 3.0"]
    {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    assert!(metrics.contains("generation_tokens_total{model_name=\"tiny\"} 5.0"), "{metrics}");
}

#[test]
fn what_is_no_request_gets_400() {
    let server = start(Config::default());
    assert_eq!(call(&server, "POST", "/v1/chat/completions", "{").status(), 400);
    assert_eq!(chat(&server, "#trap=usage_mising").status(), 400);
    let reply = call(&server, "BAD METHOD", "/", "");
    assert!(reply.status() == 400 && reply.head().contains("connection: close"));
}

#[test]
fn the_log_says_what_was_done() {
    let server = start(Config::default());
    chat(&server, "a b #tokens=4");
    let log = logged(&server, 1);
    let served = &log[0];
    assert_eq!((served.id.as_str(), served.number, served.connection), ("mine", 1, 1));
    assert_eq!((served.prompt_tokens, served.output_tokens, served.outcome), (3, 4, Outcome::Finished));
    assert_eq!(served.received_by, Clock::Kernel);
    assert_eq!((served.written.len(), served.scheduled.len()), (4, 4));
    assert_eq!((served.first_byte, served.last_byte), (Some(served.written[0]), Some(served.written[3])));
    assert_eq!(served.scheduled[0], served.received + 5_000_000);
    assert!(served.joules.is_none());
}

#[test]
fn a_log_in_a_file_is_whole_when_the_server_stops() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.jsonl");
    let server = start(Config { log: Some(path.clone()), ..Config::default() });
    (0..5).for_each(|_| drop(chat(&server, "#trap=crlf hello")));
    drop(server);
    let text = std::fs::read_to_string(path).unwrap();
    let served: Vec<wattle_sim_server::Served> =
        text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(served.iter().map(|s| s.number).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    assert_eq!(served[0].traps[0].to_string(), "crlf");
}

#[test]
fn requests_sent_ahead_are_answered_in_order() {
    let server = start(Config::default());
    let mut stream = connect(&server);
    send(&mut stream, "POST", "/v1/chat/completions", &chat_body("#tokens=2"));
    send(&mut stream, "GET", "/health", "");
    let first = receive(&mut stream, std::time::Duration::from_secs(30));
    assert!(first.body().contains("[DONE]"));
    // The second may have come with the first.
    let rest = first.raw.windows(4).rposition(|w| w == b"\"ok\"").is_some()
        || receive(&mut stream, std::time::Duration::from_secs(30)).body().contains("ok");
    assert!(rest);
}
