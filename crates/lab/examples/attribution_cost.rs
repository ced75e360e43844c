//! What it costs to split energy: `cargo run --release -p wattle-lab --example attribution_cost -- [REQUESTS] [IN_FLIGHT]`.
//!
//! Requests of 100 tokens, 20 ms apart, so many in flight at a time, told every 20 ms as a run tells them, on a board whose counter is
//! refreshed every 100 ms. The CPU time is that of the whole process, making the requests up included.
#![allow(clippy::print_stdout, reason = "a program for people")]

use std::collections::VecDeque;
use wattle_core::attribute::{Flying, Splitter, View};
use wattle_core::cost::Weights;
use wattle_core::exchange::{Exchange, Finish, Outcome, Usage};
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Reading, Sensor, SensorId, Trust};
use wattle_core::{Stamp, Timeline, Watts};
use wattle_meter::clock;

const MS: u64 = 1_000_000;
const TOKENS: u64 = 100;
const GAP: u64 = 20 * MS;
const SENSORS: [SensorId; 1] = [SensorId(0)];

fn main() {
    let mut args = std::env::args().skip(1).map(|a| a.parse::<u64>());
    let mut next = |default| args.next().and_then(Result::ok).unwrap_or(default);
    let (requests, in_flight) = (next(1_000_000), next(64).max(1));
    let began = clock::process_cpu();
    let mut timeline = Timeline::new(&[sensor()]);
    let weights = Weights::defaults(None, None, DeviceKind::Gpu).with_idle(Watts(60.0), Watts(1.0));
    let mut splitter = Splitter::open(Stamp::from_nanos(1000 * MS), weights);
    // One after the other begins, so that they end evenly; each is told with its number of pieces told.
    let life = GAP * TOKENS;
    let (mut sent, mut joules, mut now) = (0, 0.0, 0);
    let mut live: VecDeque<(u64, Flying, usize, Exchange)> = VecDeque::new();
    let (mut ended, mut billed) = (0u64, 0.0);
    while ended < requests {
        now += 20 * MS;
        joules += 300.0 * 0.02;
        if now.is_multiple_of(100 * MS) {
            let value = Some(joules);
            timeline.push(&Reading { sensor: SENSORS[0], at: Stamp::from_nanos(now), value });
        }
        let due = |i: u64| 1000 * MS + i * life / in_flight;
        while sent < requests && due(sent) <= now {
            let exchange = exchange(due(sent));
            live.push_back((sent, splitter.sent(sent, exchange.sent, 800), 0, exchange));
            sent += 1;
        }
        for (_, flying, told, exchange) in &mut live {
            let came = exchange.tokens.partition_point(|t| t.nanos() <= now);
            splitter.pieces(*flying, &exchange.tokens[*told..came]);
            *told = came;
        }
        while let Some((_, flying, _, exchange)) = live.pop_front_if(|(.., e)| e.done.nanos() <= now) {
            splitter.done(flying, &exchange);
        }
        let view = View { timeline: &timeline, sensors: &SENSORS };
        let known = Stamp::from_nanos(now.saturating_sub(100 * MS));
        splitter.settle(known, Stamp::from_nanos(now), view, |e| {
            ended += 1;
            billed += e.share.map_or(0.0, |s| s.total().get());
        });
        timeline.forget_before(splitter.needs_from());
    }
    let cpu = (clock::process_cpu() - began).get();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find(|l| l.starts_with("VmHWM")).unwrap_or("VmHWM: unknown");
    println!("{requests} requests of {TOKENS} tokens, {in_flight} in flight: {cpu:.2} s of CPU");
    println!(
        "{:.2} µs a request, {:.1} ns a token",
        cpu / requests as f64 * 1e6,
        cpu / (requests * TOKENS) as f64 * 1e9
    );
    println!("{peak}; residual {:e}, {billed:.0} J billed", splitter.ledger().residual().unwrap_or(f64::NAN));
}

fn exchange(sent: u64) -> Exchange {
    let tokens: Vec<Stamp> = (1..=TOKENS).map(|i| Stamp::from_nanos(sent + i * GAP)).collect();
    Exchange {
        first_token: tokens.first().copied(),
        done: tokens[tokens.len() - 1],
        outcome: Outcome::Ok { finish: Finish::Stop },
        usage: Usage { prompt: Some(200), completion: Some(TOKENS), ..Usage::default() },
        tokens,
        ..Exchange::due(Stamp::from_nanos(sent))
    }
}

fn sensor() -> Sensor {
    Sensor {
        name: "made-up/0/energy".into(),
        source: "made-up".into(),
        device: Device { kind: DeviceKind::Gpu, id: "0".into(), name: "made up".into() },
        quantity: Quantity::Energy,
        perimeter: Perimeter::Device,
        kind: Kind::Counter { wrap: None },
        trust: Trust::Measured { gain: 0.05 },
        quantum: 1e-3,
        averaged_s: 0.0,
    }
}
