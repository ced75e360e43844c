//! No joule is lost, and each goes where it should.

use super::*;
use crate::cost::{Cost, Weights};
use crate::exchange::{Exchange, FailureClass, Finish, Outcome};
use crate::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Reading, Sensor, Trust};
use crate::time::Span;
use crate::units::Watts;
use proptest::prelude::*;
use std::collections::BTreeMap;

const SENSOR: [SensorId; 1] = [SensorId(0)];
const MS: u64 = 1_000_000;

fn sensor() -> Sensor {
    Sensor {
        name: "test/0/energy".into(),
        source: "test".into(),
        device: Device { kind: DeviceKind::Gpu, id: "0".into(), name: "test".into() },
        quantity: Quantity::Energy,
        perimeter: Perimeter::Device,
        kind: Kind::Counter { wrap: None },
        trust: Trust::Measured { gain: 0.05 },
        quantum: 0.0,
        averaged_s: 0.0,
    }
}

/// A counter of power that rises by 10 W every second, read every 10 ms for 3 s from 1 s on.
fn timeline() -> Timeline {
    let mut timeline = Timeline::new(&[sensor()]);
    for poll in 0..300u64 {
        let at = Stamp::from_nanos(1000 * MS + poll * 10 * MS);
        let value = Some(50.0 * poll as f64 * 0.01 + 5.0 * (poll as f64 * 0.01).powi(2));
        timeline.push(&Reading { sensor: SENSOR[0], at, value });
    }
    timeline
}

fn at(ms: u64) -> Stamp {
    Stamp::from_nanos(1000 * MS + ms * MS)
}

fn exchange(sent: u64, wait: u64, length: u64) -> Exchange {
    let first = at(sent + wait.min(length));
    Exchange {
        first_token: Some(first),
        tokens: vec![first],
        done: at(sent + length),
        outcome: Outcome::Ok { finish: Finish::Stop },
        ..Exchange::due(at(sent))
    }
}

fn weights() -> Weights {
    let joules = Cost { fixed: 1.0, prefill: 0.01, decode: 0.02, context: 1e-5 };
    Weights::calibrated(joules, &[[0.0; 4]; 4], None).with_idle(Watts(0.0), Watts(0.0))
}

fn tell(splitter: &mut Splitter, key: u64, exchange: &Exchange) {
    let flying = splitter.sent(key, exchange.sent, 400);
    splitter.pieces(flying, &exchange.tokens);
    splitter.done(flying, exchange);
}

/// Tells all that happened, and gives the shares in the order of the exchanges.
fn split(exchanges: &[Exchange], timeline: &Timeline) -> (Vec<Option<Share>>, Splitter) {
    let view = View { timeline, sensors: &SENSOR };
    let first = exchanges.iter().map(|e| e.sent).min().unwrap_or(at(0));
    let mut splitter = Splitter::open(first, weights());
    (0..).zip(exchanges).for_each(|(i, e)| tell(&mut splitter, i, e));
    let mut shares = vec![None; exchanges.len()];
    splitter.finish(view, |ended| shares[ended.key as usize] = ended.share);
    (shares, splitter)
}

fn joules(timeline: &Timeline, from: u64, until: u64) -> f64 {
    timeline.energy(SENSOR[0], Span::new(at(from), at(until))).unwrap().value().get()
}

/// Lives of requests: when sent, how long until the first token, how long in all, how many pieces, and how it ended.
fn lives() -> impl Strategy<Value = Vec<Exchange>> {
    let life = (20u64..2000, 0u64..300, 1u64..800, 0u64..40, 0u8..4);
    prop::collection::vec(life, 1..40).prop_map(|lives| {
        lives
            .into_iter()
            .map(|(sent, wait, length, pieces, how)| {
                let mut e = exchange(sent, wait, length);
                let (first, left) = (wait.min(length), length - wait.min(length));
                e.tokens.extend((1..=pieces).map(|i| at(sent + first + left * i / pieces)));
                match how {
                    0 => (e.first_token, e.tokens) = (None, Vec::new()),
                    1 => {
                        (e.first_token, e.tokens) = (None, Vec::new());
                        e.outcome = Outcome::Failed { class: FailureClass::Timeout, error: "slow".into() };
                    }
                    _ => {}
                }
                e
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn no_joule_is_lost(exchanges in lives(), foreign in 0.0f64..5.0, idle in 0.0f64..100.0) {
        let timeline = timeline();
        let view = View { timeline: &timeline, sensors: &SENSOR };
        let first = exchanges.iter().map(|e| e.sent).min().unwrap();
        let mut splitter = Splitter::open(first, weights().with_idle(Watts(idle), Watts(1.0)));
        splitter.foreign(Foreign {
            span: Span::new(at(500), at(900)), requests: foreign, prefill: 100.0 * foreign,
        });
        (0..).zip(&exchanges).for_each(|(i, e)| tell(&mut splitter, i, e));
        let mut shares = Vec::new();
        splitter.finish(view, |ended| shares.push(ended));
        prop_assert_eq!(shares.len(), exchanges.len());
        let ledger = splitter.ledger();
        let sum: Joules = shares.iter().filter_map(|e| e.share).map(|s| s.total()).sum();
        prop_assert!((sum - ledger.billed).get().abs() <= 1e-9 * sum.get());
        prop_assert!(ledger.residual().unwrap().abs() <= 1e-9);
        prop_assert!(ledger.open.get().abs() <= 1e-9 * sum.get(), "all have ended");
        let positive = |s: &Share| [s.queue, s.prefill, s.decode, s.shared, s.bound].iter().all(|j| j.get() >= 0.0);
        prop_assert!(shares.iter().filter_map(|e| e.share).all(|s| positive(&s)));
        // Each ledger adds up on its own, whenever the run was killed.
        prop_assert!(shares.iter().all(|e| e.ledger.residual().unwrap().abs() <= 1e-9));
    }

    #[test]
    fn nothing_is_lost_of_what_is_told_while_it_happens(exchanges in lives(), step in 20u64..300) {
        let timeline = timeline();
        let view = View { timeline: &timeline, sensors: &SENSOR };
        let first = exchanges.iter().map(|e| e.sent).min().unwrap();
        let mut splitter = Splitter::open(first, weights());
        let mut flying: Vec<Option<Flying>> = vec![None; exchanges.len()];
        let mut told = vec![0; exchanges.len()];
        let mut over = vec![false; exchanges.len()];
        let mut seen = 0;
        for now in (0..3200).step_by(step as usize).map(at) {
            for (i, e) in exchanges.iter().enumerate().filter(|(_, e)| e.sent <= now) {
                let flying = *flying[i].get_or_insert_with(|| splitter.sent(i as u64, e.sent, 400));
                let came = e.tokens.partition_point(|t| *t <= now);
                splitter.pieces(flying, &e.tokens[told[i]..came]);
                told[i] = came;
                if e.done <= now && !std::mem::replace(&mut over[i], true) {
                    splitter.done(flying, e);
                }
            }
            splitter.settle(now.minus_nanos(100 * MS), now, view, |ended| {
                assert!(ended.ledger.residual().unwrap().abs() <= 1e-9);
                seen += 1;
            });
        }
        splitter.finish(view, |_| seen += 1);
        prop_assert_eq!(seen, exchanges.len());
        prop_assert!(splitter.ledger().residual().unwrap().abs() <= 1e-9);
        prop_assert!(splitter.is_empty());
    }
}

#[test]
fn what_is_still_in_flight_is_kept_apart() {
    let timeline = timeline();
    let view = View { timeline: &timeline, sensors: &SENSOR };
    let mut splitter = Splitter::open(at(100), weights());
    let stays = splitter.sent(0, at(100), 400);
    splitter.pieces(stays, &[at(101), at(1300)]);
    tell(&mut splitter, 1, &exchange(100, 1, 500));
    let mut ended = Vec::new();
    splitter.settle(at(1000), at(1700), view, |e| ended.push(e));
    let ledger = ended[0].ledger;
    assert!(ledger.residual().unwrap().abs() <= 1e-9);
    assert!(ledger.open.get() > 0.3 * ledger.account.measured.get());
    assert_eq!((ended.len(), splitter.needs_from()), (1, at(100)));
}

#[test]
fn alone_a_request_pays_for_all_of_its_time() {
    let timeline = timeline();
    let (shares, _) = split(&[exchange(100, 40, 100)], &timeline);
    let share = shares[0].unwrap();
    assert!((share.total().get() - joules(&timeline, 100, 200)).abs() < 1e-9);
    assert!((share.to_first_token.unwrap().get() - joules(&timeline, 100, 140)).abs() < 1e-9);
    assert_eq!(share.queue, Joules::ZERO);
    let mut own = Account::open(at(100));
    own.extend(&timeline, &SENSOR, at(200));
    assert!((share.bound - own.bound).get().abs() < 1e-9, "whatever costs are, all of it is its own");
}

#[test]
fn phases_are_what_the_work_costs_and_the_rest_is_shared() {
    let timeline = timeline();
    // 400 bytes are 100 tokens: 1 J of prompt and 1 J of weights before the first token.
    let mut e = exchange(100, 50, 150);
    e.tokens.extend((1..=10).map(|i| at(150 + 10 * i)));
    let share = split(&[e], &timeline).0[0].unwrap();
    let prefill = joules(&timeline, 100, 150) * 0.5;
    assert!((share.prefill.get() - prefill).abs() < 1e-9, "{share:?}");
    let decode = 10.0 * 0.02 + (0..10).map(|i| 1e-5 * (100.0 + 1.5 + f64::from(i))).sum::<f64>();
    let of_decode = joules(&timeline, 150, 250) * decode / (decode + 10.0);
    assert!((share.decode.get() / of_decode - 1.0).abs() < 1e-3, "{share:?} {of_decode}");
}

#[test]
fn an_answer_that_did_not_stream_has_no_phases_and_a_failed_one_never_left_the_first() {
    let timeline = timeline();
    let mut e = Exchange { first_token: None, tokens: Vec::new(), ..exchange(100, 40, 100) };
    let share = split(std::slice::from_ref(&e), &timeline).0[0].unwrap();
    assert_eq!(share.prefill + share.decode, Joules::ZERO);
    assert!((share.shared.get() - joules(&timeline, 100, 200)).abs() < 1e-9);
    assert_eq!(share.to_first_token, None);
    e.outcome = Outcome::Failed { class: FailureClass::Timeout, error: "slow".into() };
    let share = split(&[e], &timeline).0[0].unwrap();
    assert!((share.total().get() - joules(&timeline, 100, 200)).abs() < 1e-9);
    assert_eq!(share.decode, Joules::ZERO);
}

#[test]
fn a_long_prompt_pays_for_itself() {
    let timeline = timeline();
    let view = View { timeline: &timeline, sensors: &SENSOR };
    let mut splitter = Splitter::open(at(100), weights());
    for (key, bytes) in [(0, 400), (1, 40_000)] {
        let mut e = exchange(100, 100, 500);
        e.tokens.extend((1..=20).map(|i| at(200 + 20 * i)));
        let flying = splitter.sent(key, e.sent, bytes);
        splitter.pieces(flying, &e.tokens);
        splitter.done(flying, &e);
    }
    let mut shares = Vec::new();
    splitter.finish(view, |e| shares.push(e.share.unwrap()));
    assert!((shares[1].prefill / shares[0].prefill - 100.0).abs() < 1e-6);
    assert_eq!(shares[0].shared, shares[1].shared);
    assert!(shares[1].decode > shares[0].decode, "it looks back at more");
    assert!(shares[1].bound > Joules(0.02 * shares[1].total().get()), "what costs might be widens it");
}

#[test]
fn who_waits_behind_another_prompt_pays_nothing_for_it() {
    let timeline = timeline();
    // Both sent at once; the second prompt is worked on only after the first has its first token.
    let mut exchanges = [exchange(100, 300, 600), exchange(100, 400, 600)];
    for e in &mut exchanges {
        let first = e.tokens[0].nanos() / MS - 1000;
        e.tokens.extend((first + 20..700).step_by(20).map(at));
    }
    let shares = split(&exchanges, &timeline).0;
    let [ahead, behind] = [0, 1].map(|i: usize| shares[i].unwrap());
    assert!(ahead.to_first_token.unwrap() > behind.to_first_token.unwrap() * 2.0);
    assert!((ahead.to_first_token.unwrap().get() - joules(&timeline, 100, 400)).abs() < 1e-6);
}

#[test]
fn what_others_are_served_is_not_billed_to_ours() {
    let timeline = timeline();
    let view = View { timeline: &timeline, sensors: &SENSOR };
    let mut splitter = Splitter::open(at(100), weights());
    splitter.foreign(Foreign { span: Span::new(at(100), at(300)), requests: 1.0, prefill: 0.0 });
    let mut e = exchange(100, 0, 200);
    e.tokens.extend((1..=10).map(|i| at(100 + 20 * i)));
    tell(&mut splitter, 0, &e);
    splitter.finish(view, |_| {});
    let ledger = splitter.ledger();
    assert!(ledger.residual().unwrap().abs() <= 1e-9);
    let part = ledger.foreign / ledger.account.measured;
    assert!((0.4..0.5).contains(&part), "half, but for the prompt of ours: {part}");
}

#[test]
fn what_is_told_late_is_billed_once() {
    let timeline = timeline();
    let view = View { timeline: &timeline, sensors: &SENSOR };
    let mut splitter = Splitter::open(at(100), weights());
    tell(&mut splitter, 0, &exchange(100, 10, 200));
    splitter.settle(at(400), at(1100), view, |_| {});
    tell(&mut splitter, 1, &exchange(250, 10, 100));
    let mut late = None;
    splitter.settle(at(400), at(1100), view, |e| late = e.share);
    assert!((late.unwrap().total().get() - joules(&timeline, 300, 350)).abs() < 1e-9);
    assert!(splitter.ledger().residual().unwrap().abs() < 1e-9);
}

#[test]
fn unknown_energy_is_nobodys_and_not_zero() {
    let (shares, _) = split(&[exchange(0, 10, 50)], &Timeline::new(&[]));
    assert_eq!(shares, vec![None]);
}

/// Requests beside each other, told as time goes on; 20 pieces a second each after `wait`. Gives shares by key.
fn live(exchanges: &[Exchange], weights: Weights) -> (BTreeMap<u64, Share>, Splitter) {
    let timeline = timeline();
    let view = View { timeline: &timeline, sensors: &SENSOR };
    let mut splitter = Splitter::open(at(100), weights);
    let mut flying = BTreeMap::new();
    let mut shares = BTreeMap::new();
    let mut told = vec![0; exchanges.len()];
    for now in (100..2900).step_by(20).map(at) {
        for (key, e) in (0u64..).zip(exchanges).filter(|(_, e)| e.sent <= now) {
            let f = *flying.entry(key).or_insert_with(|| splitter.sent(key, e.sent, 400));
            let came = e.tokens.partition_point(|t| *t <= now);
            splitter.pieces(f, &e.tokens[told[key as usize]..came]);
            told[key as usize] = came;
            if e.done <= now && e.done.nanos() + 20 * MS > now.nanos() {
                splitter.done(f, e);
            }
        }
        splitter.settle(now.minus_nanos(100 * MS), now, view, |e| shares.extend([(e.key, e.share.unwrap())]));
    }
    splitter.finish(view, |e| shares.extend([(e.key, e.share.unwrap())]));
    (shares, splitter)
}

#[test]
fn who_gave_up_waiting_for_a_place_pays_nothing() {
    let mut busy = exchange(100, 20, 2000);
    busy.tokens.extend((1..=98).map(|i| at(120 + 20 * i)));
    let failed = Outcome::Failed { class: FailureClass::Timeout, error: "slow".into() };
    let waits = Exchange { first_token: None, tokens: Vec::new(), outcome: failed, ..exchange(300, 0, 1500) };
    let seconds = Some(Cost { fixed: 0.02, prefill: 1e-4, decode: 0.0, context: 0.0 });
    let weights = Weights::calibrated(weights().joules, &[[0.0; 4]; 4], seconds);
    let (shares, splitter) = live(&[busy, waits], weights.with_idle(Watts(10.0), Watts(0.0)));
    assert_eq!(shares[&1].total(), Joules::ZERO, "{:?}", shares[&1]);
    assert!(splitter.ledger().residual().unwrap().abs() <= 1e-9);
}

#[test]
fn tokens_that_take_longer_than_anybody_waits_still_cost_what_tokens_cost() {
    // A token in 1.1 s: of the second, nothing is known for the first 0.4 s of it but the pace of the one before.
    let mut slow = exchange(100, 20, 2220);
    slow.tokens.extend([at(1220), at(2320)]);
    let costly = Weights::calibrated(Cost { decode: 1.0, ..Cost::default() }, &[[0.0; 4]; 4], None);
    let (shares, _) = live(&[slow.clone(), slow], costly.with_idle(Watts(0.0), Watts(0.0)));
    let part = shares[&0].decode / shares[&0].total();
    assert!(part > 0.75, "without the pace it is 0.71: {part}");
}

#[test]
fn a_sensor_that_comes_too_late_is_a_gap_in_bills_and_account_alike() {
    let readings: Vec<u64> = vec![0, 1000, 2000, 2900];
    let mut timeline = Timeline::new(&[sensor()]);
    let mut splitter = Splitter::open(at(100), weights());
    let mut e = exchange(100, 20, 2600);
    e.tokens.extend((1..=120).map(|i| at(120 + 20 * i)));
    let flying = splitter.sent(0, e.sent, 400);
    splitter.pieces(flying, &e.tokens);
    let mut next = 0;
    for now in (100..2900).step_by(20) {
        while readings.get(next).is_some_and(|r| *r <= now) {
            let seconds = readings[next] as f64 * 1e-3;
            let value = Some(50.0 * seconds + 5.0 * seconds.powi(2));
            timeline.push(&Reading { sensor: SENSOR[0], at: at(readings[next]), value });
            next += 1;
        }
        // Nobody waits longer than 0.7 s for it.
        let known = at(now.saturating_sub(700));
        splitter.settle(known, at(now), View { timeline: &timeline, sensors: &SENSOR }, |_| {});
    }
    splitter.done(flying, &e);
    splitter.finish(View { timeline: &timeline, sensors: &SENSOR }, |_| {});
    let ledger = splitter.ledger();
    assert!(ledger.residual().unwrap().abs() <= 1e-9, "{ledger:?}");
    assert!(ledger.account.coverage < 0.99, "what came too late is missing, and that is said");
}
