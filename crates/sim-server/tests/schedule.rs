//! Tokens come when they are due, to many clients at once.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use std::time::Duration;
use support::{call, chat, chat_body, connect, logged, receive, send, start};
use wattle_sim_server::{Config, Outcome, Served};

fn lateness(served: &[Served]) -> Vec<u64> {
    let mut all: Vec<u64> = served
        .iter()
        .flat_map(|s| s.written.iter().zip(&s.scheduled).map(|(written, due)| written - due))
        .collect();
    all.sort_unstable();
    all
}

#[test]
fn tokens_are_written_when_due_and_never_before() {
    let server = start(Config { ttft_ms: 30.0, itl_ms: 5.0, tokens: 40, ..Config::default() });
    chat(&server, "hello");
    let log = logged(&server, 1);
    let due = |i: u64| log[0].received + 30_000_000 + i * 5_000_000;
    assert_eq!(log[0].scheduled, (0..40).map(due).collect::<Vec<_>>());
    // The subtraction panics if a token came early. A loaded machine keeps fifty milliseconds at the median.
    let late = lateness(&log);
    assert!(late[late.len() / 2] < 50_000_000, "{late:?}");
}

#[test]
fn five_hundred_clients_are_served_at_once() {
    let server = start(Config { ttft_ms: 300.0, itl_ms: 20.0, tokens: 10, ..Config::default() });
    let mut streams: Vec<_> = (0..500).map(|_| connect(&server)).collect();
    streams.iter_mut().for_each(|s| send(s, "POST", "/v1/chat/completions", &chat_body("hello")));
    for stream in &mut streams {
        assert_eq!(receive(stream, Duration::from_secs(30)).events().len(), 12);
    }
    let log = logged(&server, 500);
    assert_eq!(server.connections(), 500);
    assert!(log.iter().all(|s| s.outcome == Outcome::Finished && s.written.len() == 10));
    lateness(&log); // panics if a token came early; how late depends on who else uses the machine
}

#[test]
fn jitter_is_drawn_from_the_seed() {
    let config = Config { ttft_ms: 2.0, itl_ms: 2.0, jitter: 0.5, seed: 7, ..Config::default() };
    let times = |config: &Config| {
        let server = start(config.clone());
        chat(&server, "hello");
        let served = logged(&server, 1).remove(0);
        served.scheduled.iter().map(|at| at - served.received).collect::<Vec<_>>()
    };
    let first = times(&config);
    assert_eq!(first, times(&config));
    assert_ne!(first, times(&Config { seed: 8, ..config }));
    assert!(first.windows(2).all(|w| (1_000_000..=3_000_000).contains(&(w[1] - w[0]))));
    assert!(first.windows(2).any(|w| (w[1] - w[0]).abs_diff(2_000_000) > 100_000));
}

#[test]
fn a_prompt_chooses_its_own_schedule() {
    let server = start(Config::default());
    chat(&server, "#tokens=3 #ttft_ms=40 #itl_ms=10");
    let served = logged(&server, 1).remove(0);
    let times: Vec<u64> = served.scheduled.iter().map(|at| at - served.received).collect();
    assert_eq!(times, [40_000_000, 50_000_000, 60_000_000]);
}

#[test]
fn a_client_that_leaves_frees_its_place() {
    let server = start(Config { ttft_ms: 60_000.0, ..Config::default() });
    let streams: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = connect(&server);
            send(&mut stream, "POST", "/v1/chat/completions", &chat_body("hello"));
            stream
        })
        .collect();
    while server.in_flight() < 20 {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(streams);
    let log = logged(&server, 20);
    assert!(log.iter().all(|s| s.outcome == Outcome::Left && s.written.is_empty()));
    assert_eq!(server.in_flight(), 0);
    assert_eq!(chat(&server, "#ttft_ms=1").status(), 200);
}

#[test]
fn a_client_that_leaves_mid_stream_is_told_apart() {
    let server = start(Config { ttft_ms: 1.0, itl_ms: 60_000.0, tokens: 1_000, ..Config::default() });
    let mut stream = connect(&server);
    send(&mut stream, "POST", "/v1/chat/completions", &chat_body("hello"));
    let reply = receive(&mut stream, Duration::from_millis(200));
    assert!(!reply.is_whole());
    drop(stream);
    let log = logged(&server, 1);
    assert_eq!(log[0].outcome, Outcome::Left);
    assert_eq!(log[0].written.len(), 1);
}

#[test]
fn a_client_that_reads_slowly_gets_everything() {
    let server = start(Config { ttft_ms: 0.0, itl_ms: 0.0, tokens: 100_000, ..Config::default() });
    let mut stream = connect(&server);
    send(&mut stream, "POST", "/v1/chat/completions", &chat_body("hello"));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(call(&server, "GET", "/health", "").status(), 200, "others are served meanwhile");
    let reply = receive(&mut stream, Duration::from_secs(30));
    assert_eq!(reply.events().len(), 100_002);
    let log = logged(&server, 1);
    assert_eq!(log[0].written.len(), 100_000);
    assert!(log[0].written.is_sorted());
}
