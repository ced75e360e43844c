//! Every trap puts onto the wire what its description says.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use std::time::Duration;
use support::{Reply, call, chat, chat_body, connect, logged, receive, send, start};
use wattle_sim_server::{Config, EveryNth, Outcome, Server, Trap};

/// Quick enough for tests, with tokens in writes of their own.
fn server() -> Server {
    start(Config { ttft_ms: 2.0, itl_ms: 1.0, tokens: 8, ..Config::default() })
}

fn trapped(server: &Server, trap: &str) -> Reply {
    chat(server, &format!("hello #trap={trap}"))
}

/// How the only request in the log ended, and the tokens written for it.
fn outcome(server: &Server) -> (Outcome, usize) {
    let log = logged(server, 1);
    (log[0].outcome, log[0].written.len())
}

/// What comes within a short time on a connection that is kept open.
fn glimpse(server: &Server, prompt: &str) -> (Reply, std::net::TcpStream) {
    let mut stream = connect(server);
    send(&mut stream, "POST", "/v1/chat/completions", &chat_body(prompt));
    (receive(&mut stream, Duration::from_millis(300)), stream)
}

#[test]
fn role_first_sends_the_role_long_before_the_first_token() {
    let server = server();
    let (reply, _stream) = glimpse(&server, "#trap=role_first #ttft_ms=60000");
    let events = reply.events();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0]["choices"][0]["delta"], serde_json::json!({"role": "assistant", "content": ""}));
    let later = chat(&server, "#trap=role_first");
    assert_eq!(later.events().len(), 1 + 8 + 2);
    let log = logged(&server, 1);
    assert_eq!(log[0].written.len(), 8, "the role is no token");
    assert!(log[0].first_byte.unwrap() < log[0].written[0]);
}

#[test]
fn usage_comes_unasked_in_the_last_chunk_or_not_at_all() {
    let server = server();
    let unasked = r##"{"messages": [{"content": "#trap=usage_extra"}], "stream": true}"##;
    let events = call(&server, "POST", "/v1/chat/completions", unasked).events();
    assert_eq!(events.last().unwrap()["choices"], serde_json::json!([]));
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 8);

    let events = trapped(&server, "usage_last").events();
    assert_eq!(events.len(), 8);
    let last = &events[7];
    assert_eq!(last["usage"]["completion_tokens"], 8);
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(last["choices"][0]["delta"]["content"], " and");

    let events = trapped(&server, "usage_missing").events();
    assert_eq!(events.len(), 9);
    assert!(events.iter().all(|e| e.get("usage").is_none()));
    let body = r##"{"prompt": "#trap=usage_missing"}"##;
    let last = call(&server, "POST", "/api/generate", body).lines().pop().unwrap();
    assert_eq!((&last["done"], last.get("eval_count")), (&true.into(), None));
}

#[test]
fn reasoning_is_half_of_the_tokens_under_either_key() {
    let server = server();
    for (trap, key) in [("reasoning", "reasoning_content"), ("reasoning_key", "reasoning")] {
        let reply = trapped(&server, trap);
        assert_eq!(reply.said(key), "the river runs past", "{trap}");
        assert_eq!(reply.said("content"), " an old mill and");
        let usage = &reply.events()[9]["usage"];
        assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 4);
        assert_eq!(usage["completion_tokens"], 8);
    }
    let body = r##"{"messages": [{"content": "#trap=reasoning"}]}"##;
    let lines = call(&server, "POST", "/api/chat", body).lines();
    assert_eq!(lines[0]["message"]["thinking"], "the");
    assert_eq!(lines[4]["message"]["content"], " an");
    let whole = r##"{"prompt": "#trap=reasoning", "stream": false}"##;
    let reply = call(&server, "POST", "/api/generate", whole).json();
    assert_eq!(
        (&reply["thinking"], &reply["response"]),
        (&"the river runs past".into(), &" an old mill and".into())
    );
}

#[test]
fn tool_call_deltas_join_to_one_call() {
    let server = server();
    for tokens in [1, 2, 3, 8] {
        let reply = chat(&server, &format!("#trap=tool_call #tokens={tokens}"));
        let events = reply.events();
        let calls: Vec<_> =
            events.iter().map(|e| &e["choices"][0]["delta"]["tool_calls"][0]["function"]).collect();
        assert_eq!(calls[0]["name"], "look_up");
        let arguments: String = calls.iter().filter_map(|c| c["arguments"].as_str()).collect();
        assert!(serde_json::from_str::<serde_json::Value>(&arguments).unwrap().is_object(), "{arguments}");
        assert_eq!(events[tokens]["choices"][0]["finish_reason"], "tool_calls");
        assert_eq!(reply.said("content"), "");
    }
}

#[test]
fn coalesced_chunks_hold_several_tokens() {
    let server = server();
    let reply = trapped(&server, "coalesced:3");
    let events = reply.events();
    let said: Vec<_> = events
        .iter()
        .filter_map(|e| e["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(said, ["the river runs", " past an old", " mill and"]);
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 8);
    let log = logged(&server, 1);
    assert_eq!(log[0].written.len(), 8);
    assert_eq!(log[0].written[0], log[0].written[2]);
}

#[test]
fn split_utf8_cuts_inside_characters() {
    let server = server();
    let reply = trapped(&server, "split_utf8:2000");
    assert_eq!(reply.said("content"), "über 5€ naïve 😀 日本 Ω über 5€");
    let mut at = 0;
    let inside = reply.reads.iter().filter(|n| {
        at += **n;
        reply.raw.get(at).is_some_and(|b| b & 0b1100_0000 == 0b1000_0000)
    });
    assert!(inside.count() >= 5, "{:?}", reply.reads);
}

#[test]
fn split_lines_writes_every_byte_alone() {
    let server = server();
    let reply = chat(&server, "#trap=split_lines:300 #tokens=2");
    assert_eq!(reply.said("content"), "the river");
    // A reader that is late finds several bytes at once.
    assert!(reply.reads.len() > reply.raw.len() / 4, "{} of {}", reply.reads.len(), reply.raw.len());
    assert!(reply.reads.iter().filter(|n| **n == 1).count() > reply.raw.len() / 8);
}

#[test]
fn crlf_ends_lines_and_comments_come_between_tokens() {
    let server = server();
    let body = chat(&server, "#trap=crlf #trap=comments").body();
    assert!(body.ends_with("data: [DONE]\r\n\r\n"));
    assert!(!body.replace("\r\n", "").contains('\n'));
    assert_eq!(body.matches(": keep-alive\r\n\r\n").count(), 9, "one at once, one for each token");
}

#[test]
fn disconnect_mid_closes_in_the_middle_of_the_stream() {
    let server = server();
    let reply = trapped(&server, "disconnect_mid:3");
    assert!(reply.closed && !reply.is_whole());
    assert_eq!(reply.events().len(), 3);
    assert_eq!(outcome(&server), (Outcome::Trapped, 3));
    let whole = r##"{"messages": [{"content": "#trap=disconnect_mid"}]}"##;
    let reply = call(&server, "POST", "/v1/chat/completions", whole);
    assert!(reply.closed && !reply.is_whole());
}

#[test]
fn status_429_refuses_the_first_tries_of_the_same_request() {
    let server = start(Config { retry_after_s: 3, ..Config::default() });
    let first = trapped(&server, "status_429:2");
    assert_eq!(first.status(), 429);
    assert!(first.head().contains("retry-after: 3"));
    assert_eq!(chat(&server, "another #trap=status_429:1").status(), 429);
    assert_eq!(trapped(&server, "status_429:2").status(), 429);
    assert_eq!(trapped(&server, "status_429:2").status(), 200);
    let outcomes: Vec<_> = logged(&server, 4).iter().map(|s| s.outcome).collect();
    assert_eq!(outcomes, [Outcome::Trapped, Outcome::Trapped, Outcome::Trapped, Outcome::Finished]);
}

#[test]
fn failures_keep_the_connection() {
    let server = server();
    let mut stream = connect(&server);
    for (trap, status) in [("status_500", 500), ("status_503", 503), ("crlf", 200)] {
        send(&mut stream, "POST", "/v1/chat/completions", &chat_body(&format!("#trap={trap}")));
        assert_eq!(receive(&mut stream, Duration::from_secs(30)).status(), status);
    }
    assert_eq!(server.connections(), 1);
}

#[test]
fn error_bodies_have_their_vendors_shapes() {
    let server = server();
    for (shape, status, pointer) in [
        ("openai", 400, "/error/message"),
        ("vllm", 400, "/message"),
        ("llamacpp", 400, "/error/message"),
        ("ollama", 404, "/error"),
        ("fastapi", 422, "/detail/0/msg"),
        ("tgi", 422, "/error"),
    ] {
        let reply = trapped(&server, &format!("error_body:{shape}"));
        assert_eq!(reply.status(), status, "{shape}");
        assert!(reply.json().pointer(pointer).is_some_and(serde_json::Value::is_string), "{shape}");
    }
    assert_eq!(trapped(&server, "error_body:text").body(), "Internal Server Error");
    assert!(trapped(&server, "error_body:html").body().starts_with("<html>"));
}

#[test]
fn error_in_stream_comes_after_some_tokens() {
    let server = server();
    let reply = trapped(&server, "error_in_stream:2");
    let events = reply.events();
    assert_eq!(events.len(), 3);
    assert_eq!(events[2]["error"]["message"], "the engine died");
    assert!(reply.is_whole());
    assert_eq!(outcome(&server), (Outcome::Trapped, 2));
    let lines = call(&server, "POST", "/api/generate", r##"{"prompt": "#trap=error_in_stream:1"}"##).lines();
    assert_eq!(lines[1]["error"], "the engine died");
}

#[test]
fn hang_and_hang_mid_stay_silent_until_the_client_leaves() {
    let server = server();
    let (nothing, first) = glimpse(&server, "#trap=hang");
    assert!(nothing.raw.is_empty() && !nothing.closed);
    let (some, second) = glimpse(&server, "#trap=hang_mid:2");
    assert!(some.events().len() == 2 && !some.closed && !some.is_whole());
    assert_eq!(server.in_flight(), 2);
    drop((first, second));
    let log = logged(&server, 2);
    assert!(log.iter().all(|s| s.outcome == Outcome::Trapped));
    assert_eq!(server.in_flight(), 0);
}

#[test]
fn slow_loris_drips_the_head() {
    let server = server();
    let reply = chat(&server, "#trap=slow_loris:2 #tokens=2");
    let head = reply.head().len();
    let served = logged(&server, 1).remove(0);
    let took = served.written[0] - served.first_byte.unwrap();
    assert!(took >= head as u64 * 2_000_000, "{took}");
    assert!(reply.reads.iter().filter(|n| **n == 1).count() > head / 4, "{:?}", reply.reads);
    assert_eq!(reply.said("content"), "the river");
}

#[test]
fn huge_line_is_as_long_as_it_says() {
    let server = server();
    let reply = chat(&server, "#trap=huge_line:8 #tokens=2");
    let events = reply.events();
    assert_eq!(events[0]["choices"][0]["delta"]["content"].as_str().unwrap().len(), 8 << 20);
    assert_eq!(events.len(), 5);
    let (chunks, _) = reply.chunks();
    assert!(chunks[0].len() > 8 << 20 && !chunks[0][..8 << 20].contains(&b'\n'));
}

#[test]
fn garbage_is_no_json_no_text_and_no_http() {
    let server = server();
    let reply = trapped(&server, "garbage");
    let bytes = reply.chunks().0.concat();
    assert!(std::str::from_utf8(&bytes).is_err());
    assert!(reply.body().contains("data: not json\n\n"));
    assert!(reply.body().ends_with("data: [DONE]\n\n"));
    let reply = trapped(&server, "garbage_head");
    assert!(reply.closed && !reply.raw.starts_with(b"HTTP"));
}

#[test]
fn not_streaming_answers_a_stream_with_one_object() {
    let server = server();
    let reply = trapped(&server, "not_streaming");
    assert!(reply.head().contains("content-type: application/json"));
    assert_eq!(reply.json()["usage"]["completion_tokens"], 8);
    assert_eq!(outcome(&server), (Outcome::Finished, 8));
}

#[test]
fn close_after_promises_and_closes() {
    let server = server();
    let mut stream = connect(&server);
    send(&mut stream, "POST", "/v1/chat/completions", &chat_body("#trap=close_after"));
    let reply = receive(&mut stream, Duration::from_secs(30));
    assert!(reply.is_whole() && reply.head().contains("connection: keep-alive"));
    assert!(receive(&mut stream, Duration::from_secs(30)).closed);
    assert_eq!(outcome(&server), (Outcome::Finished, 8));
}

#[test]
fn a_stall_stops_everybody() {
    let server = start(Config { ttft_ms: 1.0, itl_ms: 1.0, tokens: 600, ..Config::default() });
    let mut other = connect(&server);
    send(&mut other, "POST", "/v1/chat/completions", &chat_body("hello"));
    while server.in_flight() == 0 {
        std::thread::yield_now();
    }
    chat(&server, "#trap=stall:300 #tokens=1");
    receive(&mut other, Duration::from_secs(30));
    let log = logged(&server, 2);
    let other = log.iter().find(|s| s.number == 1).unwrap();
    let moments: Vec<u64> = std::iter::once(other.received).chain(other.written.clone()).collect();
    let longest = moments.windows(2).map(|w| w[1] - w[0]).max().unwrap();
    assert!(longest >= 290_000_000, "{longest}");
    let late = other.written.iter().zip(&other.scheduled).map(|(w, due)| w - due).max().unwrap();
    assert!(late >= 280_000_000, "a token that was due in the stall came after it: {late}");
}

#[test]
fn every_nth_request_falls_into_the_trap_of_the_config() {
    let traps = vec![EveryNth { trap: Trap::Status500, every: 3 }];
    let server = start(Config { traps, ..Config::default() });
    let status: Vec<u16> = (0..6).map(|_| chat(&server, "hello").status()).collect();
    assert_eq!(status, [200, 200, 500, 200, 200, 500]);
}
