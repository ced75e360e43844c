//! An engine in simulated time: requests in a closed loop, a board whose counter is refreshed every 100 ms, and the truth.

use std::collections::BTreeMap;
use wattle_core::attribute::{Ended, Ledger, Splitter, View};
use wattle_core::cost::{Weights, Work};
use wattle_core::exchange::{Exchange, Finish, Outcome, TokensFrom, Usage};
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Reading, Sensor, SensorId, Trust};
use wattle_core::{Seconds, Stamp, Timeline};
use wattle_sim_server::{Engine, EngineConfig, Joules, Told};

pub(crate) const SENSORS: [SensorId; 1] = [SensorId(0)];
const MS: u64 = 1_000_000;
/// The counter's period, and how often it is read.
const REFRESH: u64 = 100 * MS;
const POLL: u64 = 5 * MS;
/// From a token's moment to its bytes at the client.
const WIRE: u64 = 50_000;
/// Everything begins here; before that the board idles.
const START: u64 = 3_000 * MS;
/// Tokens of these prompts are longer than is guessed before a first answer tells.
const BYTES: u64 = 6;

/// One request: prompt tokens and answer tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ask {
    pub(crate) prompt: u64,
    pub(crate) answer: u64,
}

/// What happened, and what it truly cost.
pub(crate) struct Past {
    pub(crate) exchanges: Vec<Exchange>,
    pub(crate) asked: Vec<Ask>,
    pub(crate) truth: Vec<Joules>,
    pub(crate) timeline: Timeline,
}

/// Serves `asks`, `at_once` of them at a time.
pub(crate) fn serve(config: &EngineConfig, asks: &[Ask], at_once: usize) -> Past {
    let mut engine = Engine::new(config.clone(), 0);
    let mut power: Vec<(u64, f64)> = vec![(0, config.idle_watts)];
    let mut exchanges: Vec<Exchange> = Vec::new();
    let mut truth: BTreeMap<u64, Joules> = BTreeMap::new();
    let arrive = |engine: &mut Engine, exchanges: &mut Vec<Exchange>, now: u64| {
        let id = exchanges.len();
        if let Some(ask) = asks.get(id) {
            engine.arrive(id as u64, ask.prompt, ask.answer);
            exchanges.push(Exchange::due(Stamp::from_nanos(now.saturating_sub(WIRE))));
        }
    };
    (0..at_once).for_each(|_| arrive(&mut engine, &mut exchanges, START));
    let mut now = START;
    while let Some(due) = engine.due() {
        now = due.max(now);
        let mut told = Vec::new();
        engine.turn(
            |watts| {
                power.push((now, watts));
                now
            },
            &mut told,
        );
        for news in told {
            match news {
                Told::Token { id, .. } => {
                    let at = Stamp::from_nanos(now + WIRE);
                    let exchange = &mut exchanges[id as usize];
                    exchange.first_token.get_or_insert(at);
                    exchange.tokens.push(at);
                    exchange.done = at;
                }
                Told::Begun { .. } => {}
                Told::Over { id, joules } => {
                    truth.insert(id, joules);
                    arrive(&mut engine, &mut exchanges, now + 2 * WIRE);
                }
            }
        }
    }
    power.push((now, config.idle_watts));
    for (exchange, ask) in exchanges.iter_mut().zip(asks) {
        exchange.outcome = Outcome::Ok { finish: Finish::Length };
        exchange.usage = Usage {
            prompt: Some(ask.prompt),
            completion: Some(ask.answer),
            from: Some(TokensFrom::Usage),
            ..Usage::default()
        };
    }
    let timeline = watch(&power, now + 1_000 * MS);
    Past { exchanges, asked: asks.to_vec(), truth: truth.into_values().collect(), timeline }
}

/// A counter in millijoules that is refreshed every 100 ms and read every 5 ms, beside such a curve of power.
fn watch(power: &[(u64, f64)], until: u64) -> Timeline {
    let sensor = Sensor {
        name: "sim/0/energy".into(),
        source: "sim".into(),
        device: Device { kind: DeviceKind::Gpu, id: "0".into(), name: "simulated".into() },
        quantity: Quantity::Energy,
        perimeter: Perimeter::Device,
        kind: Kind::Counter { wrap: None },
        trust: Trust::Measured { gain: 0.0 },
        quantum: 1e-3,
        averaged_s: 0.0,
    };
    let mut timeline = Timeline::new(&[sensor]);
    let (mut joules, mut at, mut next) = (0.0, 0, 0);
    let mut shown = 0.0;
    for poll in (POLL..until).step_by(POLL as usize) {
        // Not in step with anything.
        let refreshed = (poll - POLL + 37 * MS) / REFRESH != (poll + 37 * MS) / REFRESH;
        while at < poll {
            let to = power.get(next + 1).map_or(poll, |p| p.0.min(poll));
            joules += (to - at) as f64 * 1e-9 * power[next].1;
            at = to;
            while power.get(next + 1).is_some_and(|p| p.0 <= at) {
                next += 1;
            }
        }
        if refreshed {
            shown = (joules * 1e3).floor() * 1e-3;
        }
        timeline.push(&Reading { sensor: SENSORS[0], at: Stamp::from_nanos(poll), value: Some(shown) });
    }
    timeline
}

/// What was found of it.
pub(crate) struct Found {
    /// All that was done, and how long somebody was in flight.
    pub(crate) work: (Work, Seconds),
    pub(crate) ended: Vec<Ended>,
    pub(crate) ledger: Ledger,
}

/// Splits it as a calibration does: when all is known.
pub(crate) fn split_after(past: &Past, weights: Weights) -> Found {
    let view = View { timeline: &past.timeline, sensors: &SENSORS };
    let mut splitter = Splitter::open(past.exchanges[0].sent, weights);
    for (key, (e, ask)) in (0..).zip(past.exchanges.iter().zip(&past.asked)) {
        let flying = splitter.sent(key, e.sent, ask.prompt * BYTES);
        splitter.pieces(flying, &e.tokens);
        splitter.done(flying, e);
    }
    let mut ended = Vec::new();
    splitter.finish(view, |e| ended.push(e));
    Found { ended, ledger: splitter.ledger(), work: splitter.work() }
}

/// Splits it as a run does: what has happened is told every 20 ms, energy is known 100 ms later.
pub(crate) fn split(past: &Past, weights: Weights) -> Found {
    let view = View { timeline: &past.timeline, sensors: &SENSORS };
    let start = past.exchanges.iter().map(|e| e.sent).min().unwrap();
    let end = past.exchanges.iter().map(|e| e.done).max().unwrap();
    let mut splitter = Splitter::open(start, weights);
    let mut ended = Vec::new();
    let (mut live, mut next): (Vec<(usize, _, usize)>, usize) = (Vec::new(), 0);
    let mut now = start;
    while now < end.plus_nanos(1_000 * MS) {
        now = now.plus_nanos(20 * MS);
        while past.exchanges.get(next).is_some_and(|e| e.sent <= now) {
            let bytes = past.asked[next].prompt * BYTES;
            live.push((next, splitter.sent(next as u64, past.exchanges[next].sent, bytes), 0));
            next += 1;
        }
        live.retain_mut(|(i, flying, told)| {
            let e = &past.exchanges[*i];
            let came = e.tokens.partition_point(|t| *t <= now);
            splitter.pieces(*flying, &e.tokens[*told..came]);
            *told = came;
            let over = e.done <= now;
            if over {
                splitter.done(*flying, e);
            }
            !over
        });
        splitter.settle(now.minus_nanos(110 * MS), now, view, |e| ended.push(e));
    }
    splitter.finish(view, |e| ended.push(e));
    ended.sort_by_key(|e| e.key);
    Found { ended, ledger: splitter.ledger(), work: splitter.work() }
}
