//! What the server itself costs: CPU time of its process per request and per token, against a client that only counts bytes.
//!
//! `cargo run --release -p wattle-sim-server --example cost` (after `cargo build --release -p wattle-sim-server`).
//! With the argument `realtime` the server goes before all ordinary programs. Counting begins after some requests, so what starting costs is not in it.
//!
//! Seen in November 2026 on two virtual cores that others used too, 64 in flight: 6–13 µs for an answer of 16 tokens that are due together
//! (0.07–0.15 µs a token at 512), 55–135 µs for 16 tokens 1 ms apart and 2.1–5.1 µs a token at 512: one `send` each, nearly all of it
//! the kernel's.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a measurement prints, and stops if it cannot go on"
)]

use rustix::event::epoll;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

/// Events taken at once.
const EVENTS: usize = 256;

/// One kind of load.
struct Load {
    in_flight: usize,
    tokens: u64,
    ttft_ms: f64,
    itl_ms: f64,
    /// Requests before the count begins, and in it.
    before: u64,
    counted: u64,
}

const LOADS: &[Load] = &[
    Load { in_flight: 64, tokens: 16, ttft_ms: 0.0, itl_ms: 0.0, before: 2_000, counted: 20_000 },
    Load { in_flight: 64, tokens: 16, ttft_ms: 1.0, itl_ms: 1.0, before: 1_000, counted: 5_000 },
    Load { in_flight: 64, tokens: 512, ttft_ms: 0.0, itl_ms: 0.0, before: 200, counted: 2_000 },
    Load { in_flight: 64, tokens: 512, ttft_ms: 1.0, itl_ms: 1.0, before: 64, counted: 256 },
    Load { in_flight: 2_000, tokens: 16, ttft_ms: 500.0, itl_ms: 50.0, before: 2_000, counted: 4_000 },
];

fn main() {
    println!("in flight  tokens  itl_ms  log    CPU/request  CPU/token    late p50    late p99");
    for load in LOADS {
        [false, true].into_iter().for_each(|log| measure(load, log));
    }
}

fn measure(load: &Load, log: bool) {
    let Load { in_flight, tokens, ttft_ms, itl_ms, before, counted } = *load;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.jsonl");
    let program = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("wattle-sim-server");
    let config = folder.path().join("config.json");
    let realtime = std::env::args().any(|a| a == "realtime");
    std::fs::write(&config, format!(r#"{{"realtime": {realtime}}}"#)).unwrap();
    let mut command = Command::new(program);
    command.arg("--config").arg(config);
    if log {
        command.arg("--log").arg(&path);
    }
    let mut server = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut address = String::new();
    BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut address).unwrap();
    let prompt = format!("#tokens={tokens} #ttft_ms={ttft_ms} #itl_ms={itl_ms}");
    let body = format!(
        r#"{{"model":"tiny","messages":[{{"role":"user","content":"{prompt}"}}],"stream":true,"stream_options":{{"include_usage":true}}}}"#
    );
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: sim\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut clients: Vec<TcpStream> =
        (0..in_flight).map(|_| TcpStream::connect(address.trim()).unwrap()).collect();
    drive(&mut clients, request.as_bytes(), before);
    let began = cpu_ns(&server);
    drive(&mut clients, request.as_bytes(), counted);
    let spent = (cpu_ns(&server) - began) as f64 / counted as f64;
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    server.wait().unwrap();
    let late = if log { lateness(&std::fs::read_to_string(path).unwrap()) } else { (f64::NAN, f64::NAN) };
    println!(
        "{in_flight:9}  {tokens:6}  {itl_ms:6}  {log:5} {:9.1} µs  {:6.2} µs  {:7.0} µs  {:7.0} µs",
        spent / 1e3,
        spent / 1e3 / tokens as f64,
        late.0,
        late.1
    );
}

/// Keeps every connection busy until `requests` answers came.
fn drive(clients: &mut [TcpStream], request: &[u8], requests: u64) {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let (mut sent, mut done) = (0, 0);
    for (i, client) in clients.iter_mut().enumerate() {
        client.set_nodelay(true).unwrap();
        client.set_nonblocking(true).unwrap();
        epoll::add(&epoll, &*client, epoll::EventData::new_u64(i as u64), epoll::EventFlags::IN).unwrap();
        client.write_all(request).unwrap();
        sent += 1;
    }
    let (mut events, mut buffer) = (Vec::with_capacity(EVENTS), vec![0; 1 << 20]);
    while done < sent {
        events.clear();
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None).unwrap();
        for event in &events {
            let client = &mut clients[event.data.u64() as usize];
            match client.read(&mut buffer) {
                Ok(0) => panic!("the server hung up"),
                // The end of an answer is written in one piece with its last token.
                Ok(n) if buffer[..n].ends_with(b"\r\n0\r\n\r\n") => {
                    done += 1;
                    if sent < requests {
                        client.write_all(request).unwrap();
                        sent += 1;
                    }
                }
                Err(e) if e.kind() != ErrorKind::WouldBlock => panic!("{e}"),
                _ => {}
            }
        }
    }
}

/// CPU time of all threads.
fn cpu_ns(server: &Child) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.id())).unwrap();
    let one = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("schedstat")).unwrap();
    tasks.map(|t| one(t.unwrap()).split(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// Microseconds between due and written: the median and the 99th percentile.
fn lateness(log: &str) -> (f64, f64) {
    let mut late: Vec<u64> = Vec::new();
    for line in log.lines() {
        let served: wattle_sim_server::Served = serde_json::from_str(line).unwrap();
        late.extend(served.written.iter().zip(&served.scheduled).map(|(written, due)| written - due));
    }
    late.sort_unstable();
    let at = |part: usize| late[(late.len() - 1) * part / 100] as f64 / 1e3;
    (at(50), at(99))
}
