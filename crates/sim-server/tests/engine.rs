//! The engine behind sockets: tokens by iterations, and joules that a board truly draws.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use std::time::Duration;
use support::{call, chat, chat_body, connect, logged, receive, send, start};
use wattle_sim_nvml::Scenario;
use wattle_sim_server::{Config, Cost, EngineConfig, Outcome};

/// Iterations of a few milliseconds.
fn quick() -> EngineConfig {
    EngineConfig {
        seconds: Cost { fixed: 2e-3, prefill: 1e-5, decode: 1e-5, context: 1e-8 },
        ..EngineConfig::default()
    }
}

#[test]
fn what_requests_cost_and_idleness_is_what_the_board_drew() {
    let folder = tempfile::tempdir().unwrap();
    let live = folder.path().join("live.txt");
    let engine = EngineConfig { live: Some(live.clone()), max_batch: 8, ..quick() };
    let idle = engine.idle_watts;
    let server = start(Config { engine: Some(engine), tokens: 20, ..Config::default() });
    let mut streams: Vec<_> = (0..24).map(|_| connect(&server)).collect();
    for (i, stream) in streams.iter_mut().enumerate() {
        send(stream, "POST", "/v1/chat/completions", &chat_body(&format!("#prompt_tokens={}", 10 + 300 * i)));
    }
    streams.iter_mut().for_each(|s| assert!(receive(s, Duration::from_secs(30)).is_whole()));
    let log = logged(&server, 24);
    let shares: f64 = log.iter().map(|s| s.joules.unwrap().total()).sum();

    // The file says power from each moment on; above idle power is work.
    let text = std::fs::read_to_string(&live).unwrap();
    let lines: Vec<(u64, f64)> = text
        .lines()
        .map(|l| l.split(' ').collect::<Vec<_>>())
        .map(|w| (w[0].parse().unwrap(), w[2].parse().unwrap()))
        .collect();
    let busy: f64 =
        lines.windows(2).filter(|w| w[0].1 > idle).map(|w| (w[1].0 - w[0].0) as f64 * 1e-9 * w[0].1).sum();
    assert!((shares - busy).abs() < 1e-6 * busy, "{shares} {busy}");

    // And a simulated board that reads the file draws the same, with the idle parts.
    let text = format!(r#"{{"live": {:?}, "devices": [{{"uuid": "a"}}]}}"#, live.display().to_string());
    let scenario = Scenario::parse(&text).unwrap();
    let (from, until) = (lines[0].0, lines[lines.len() - 1].0);
    let idle_time: u64 = lines.windows(2).filter(|w| w[0].1 == idle).map(|w| w[1].0 - w[0].0).sum();
    let drawn = scenario.joules(0, from, until).unwrap();
    let expected = shares + idle_time as f64 * 1e-9 * idle;
    assert!((drawn - expected).abs() < 1e-6 * drawn, "{drawn} {expected}");
}

#[test]
fn tokens_come_once_an_iteration() {
    let server = start(Config { engine: Some(quick()), tokens: 10, ..Config::default() });
    assert_eq!(chat(&server, "hello").events().len(), 12);
    let served = logged(&server, 1).remove(0);
    assert_eq!((served.outcome, served.written.len()), (Outcome::Finished, 10));
    assert!(served.scheduled.windows(2).all(|w| (2_000_000..2_100_000).contains(&(w[1] - w[0]))));
    let joules = served.joules.unwrap();
    assert!(joules.prefill > 0.0 && joules.decode > 0.0 && joules.shared > joules.decode);
}

#[test]
fn times_of_the_prompt_begin_when_the_wait_is_over() {
    let engine = EngineConfig { max_batch: 1, ..quick() };
    let server = start(Config { engine: Some(engine), tokens: 40, timings: true, ..Config::default() });
    let mut streams = [connect(&server), connect(&server)];
    streams
        .iter_mut()
        .for_each(|s| send(s, "POST", "/v1/chat/completions", &chat_body("#prompt_tokens=5000")));
    let replies = streams.each_mut().map(|s| receive(s, Duration::from_secs(30)));
    let log = logged(&server, 2);
    assert!(log[1].begun.unwrap() >= log[0].scheduled[39], "the second waits for the first");
    let mut said = replies.map(|r| r.events().last().unwrap()["timings"]["prompt_ms"].as_f64().unwrap());
    let mut truth = [0, 1].map(|i| (log[i].scheduled[0] - log[i].begun.unwrap()) as f64 * 1e-6);
    said.sort_by(f64::total_cmp);
    truth.sort_by(f64::total_cmp);
    assert!(said.iter().zip(truth).all(|(said, truth)| (said - truth).abs() < 1e-6), "{said:?} {truth:?}");
    // Three iterations for a prompt of 5,000 tokens.
    assert!(truth.iter().all(|ms| (56.0 - ms).abs() < 1.0), "{truth:?}");
}

#[test]
fn a_full_batch_makes_others_wait_and_metrics_say_so() {
    let engine = EngineConfig { max_batch: 2, ..quick() };
    let server = start(Config { engine: Some(engine), tokens: 100_000, ..Config::default() });
    let mut streams: Vec<_> = (0..5).map(|_| connect(&server)).collect();
    streams.iter_mut().for_each(|s| send(s, "POST", "/v1/chat/completions", &chat_body("hello")));
    while server.in_flight() < 5 {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(50));
    let metrics = call(&server, "GET", "/metrics", "").body();
    assert!(metrics.contains("num_requests_running{model_name=\"tiny\"} 2.0"), "{metrics}");
    assert!(metrics.contains("num_requests_waiting{model_name=\"tiny\"} 3.0"), "{metrics}");
}

#[test]
fn a_client_that_leaves_frees_its_place_in_the_batch() {
    let engine = EngineConfig { max_batch: 1, ..quick() };
    let server = start(Config { engine: Some(engine), tokens: 100_000, ..Config::default() });
    let (mut first, mut second) = (connect(&server), connect(&server));
    send(&mut first, "POST", "/v1/chat/completions", &chat_body("hello"));
    send(&mut second, "POST", "/v1/chat/completions", &chat_body("waits"));
    while server.in_flight() < 2 {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(second);
    let log = logged(&server, 1);
    assert_eq!((log[0].outcome, log[0].joules.unwrap().total()), (Outcome::Left, 0.0));
    drop(first);
    let log = logged(&server, 2);
    assert_eq!(log[1].outcome, Outcome::Left);
    assert!(log[1].joules.unwrap().total() > 0.0);
    assert!(chat(&server, "#tokens=3").is_whole());
}

#[test]
fn traps_leave_the_engine() {
    let server = start(Config { engine: Some(quick()), tokens: 50, ..Config::default() });
    for trap in ["disconnect_mid:2", "error_in_stream:2", "status_500", "garbage_head"] {
        chat(&server, &format!("#trap={trap}"));
    }
    let log = logged(&server, 4);
    assert!(log.iter().all(|s| s.outcome == Outcome::Trapped), "{log:?}");
    let charged: Vec<bool> = log.iter().map(|s| s.joules.is_some()).collect();
    assert_eq!(charged.iter().filter(|c| **c).count(), 2, "only those that came to the engine");
    let metrics = call(&server, "GET", "/metrics", "").body();
    assert!(metrics.contains("num_requests_running{model_name=\"tiny\"} 0.0"), "{metrics}");
}

#[test]
fn nobody_is_worked_on_before_he_came() {
    let server = start(Config { engine: Some(quick()), tokens: 400, ..Config::default() });
    let mut first = connect(&server);
    send(&mut first, "POST", "/v1/chat/completions", &chat_body("#trap=stall:300"));
    std::thread::sleep(Duration::from_millis(100));
    // Comes in the stall, when the engine is behind its time.
    let mut second = connect(&server);
    send(&mut second, "POST", "/v1/chat/completions", &chat_body("#tokens=3"));
    assert!(receive(&mut second, Duration::from_secs(30)).is_whole());
    let served = logged(&server, 1).remove(0);
    assert_eq!(served.number, 2);
    assert!(served.scheduled[0] >= served.received + 2_000_000, "{served:?}");
}
