//! Every metric against its definition, and what must be null.

use super::*;
use crate::Estimate;
use crate::attribute::Share;
use crate::exchange::{Dated, Exchange, FailureClass, TokensFrom, Usage};
use crate::record::{Item, Score, Telemetry};
use crate::sensor::Perimeter;
use crate::time::Stamp;

const MS: u64 = 1_000_000;

/// Query `i` of a run at a constant 100 W, 100 ms each, 11 tokens, right three times of four.
fn record(i: u64, energy: bool) -> Record {
    let (sent, first, done) = (i * 100 * MS, i * 100 * MS + 20 * MS, (i + 1) * 100 * MS);
    let at = Stamp::from_nanos;
    let share = Share {
        queue: Joules::ZERO,
        prefill: Joules(2.0),
        decode: Joules(8.0),
        shared: Joules::ZERO,
        to_first_token: Some(Joules(2.0)),
        bound: Joules(1.0),
        method: Method::Counter,
        coverage: 1.0,
    };
    let ledger = Ledger {
        account: Account {
            span: Span::new(at(0), at(done)),
            measured: Joules(10.0 * (i + 1) as f64),
            bound: Joules(0.5 * (i + 1) as f64),
            coverage: 1.0,
            ..Account::open(at(0))
        },
        idle: Joules::ZERO,
        billed: Joules(10.0 * (i + 1) as f64),
        open: Joules::ZERO,
        foreign: Joules::ZERO,
    };
    Record {
        session: 0,
        item: Item {
            index: i,
            id: i.to_string(),
            prompt: "?".into(),
            expected: Some("!".into()),
            subject: None,
            ..Item::default()
        },
        exchange: Exchange {
            response_id: None,
            due: at(sent),
            sent: at(sent),
            first_token: Some(at(first)),
            tokens: vec![at(first), at(done)],
            done: at(done),
            dated: Dated::Client,
            attempts: 1,
            usage: Usage {
                prompt: Some(5),
                completion: Some(11),
                from: Some(TokensFrom::Usage),
                ..Usage::default()
            },
            outcome: Outcome::Ok { finish: Finish::Stop },
            answer: "!".into(),
            server: None,
        },
        share: energy.then_some(share),
        perimeter: energy.then_some(Perimeter::Device),
        telemetry: Telemetry::default(),
        score: Some(Score { value: if i.is_multiple_of(4) { 0.0 } else { 1.0 }, scorer: "exact".into() }),
        ledger: energy.then_some(ledger),
    }
}

fn value(metrics: &BTreeMap<String, Metric>, name: &str) -> f64 {
    metrics[name].value.unwrap_or_else(|| panic!("{name} is null"))
}

#[test]
fn every_metric_has_the_value_its_definition_says() {
    let mut all = Accumulator::default();
    (0..100).for_each(|i| all.push(&record(i, true)));
    let idle = Estimate::new(Watts(40.0), Watts(2.0), Method::Counter, 1.0);
    let around = Surroundings {
        idle: BTreeMap::from([(0, idle.into())]),
        meter_cpu: Some((Seconds(0.05), Seconds(10.0))),
        lateness_p99: None,
        tree_memory: None,
    };
    let m = all.finish(&around);
    for (name, expected) in [
        ("queries", 100.0),
        ("errors", 0.0),
        ("unscored", 0.0),
        ("truncated", 0.0),
        ("accuracy", 0.75),
        ("energy_j", 1000.0),
        ("net_energy_j", 600.0),
        ("mean_power_w", 100.0),
        ("joules_per_query", 10.0),
        ("joules_per_correct", 1000.0 / 75.0),
        ("joules_per_output_token", 10.0 / 11.0),
        ("output_tokens_per_joule", 1.1),
        ("wh_per_1000_queries", 10_000.0 / 3600.0),
        ("prompt_tokens", 500.0),
        ("output_tokens", 1100.0),
        ("output_tokens_per_s", 110.0),
        ("queries_per_s", 10.0),
        ("ttft_s", 0.02),
        ("itl_s", 0.008),
        ("latency_s", 0.1),
        ("ipj", 0.075),
        ("ipw", 0.0075),
        ("energy_coverage", 1.0),
        ("attribution_residual", 0.0),
        ("meter_cpu_fraction", 0.005),
    ] {
        assert!((value(&m, name) - expected).abs() <= 1e-9 * expected.max(1.0), "{name}: {:?}", m[name]);
    }
    let of_command = of_command(&[], &Surroundings::default());
    assert!(METRICS.iter().all(|d| m.contains_key(d.name) || of_command.contains_key(d.name)));
    let energy = &m["energy_j"];
    assert_eq!((energy.low, energy.high, energy.method.as_str()), (Some(950.0), Some(1050.0), "counter"));
    let latency = &m["latency_s"];
    assert!((latency.p99.unwrap() / 0.1 - 1.0).abs() < 0.002);
}

#[test]
fn unknown_energy_is_null_everywhere() {
    let mut all = Accumulator::default();
    (0..12).for_each(|i| all.push(&record(i, false)));
    let m = all.finish(&Surroundings::default());
    for name in
        ["energy_j", "joules_per_query", "ipj", "ipw", "mean_power_w", "attribution_residual", "net_energy_j"]
    {
        assert_eq!(m[name].value, None, "{name}");
    }
    assert_eq!(value(&m, "accuracy"), 0.75);
}

#[test]
fn a_failed_query_counts_as_wrong_and_still_pays() {
    let mut all = Accumulator::default();
    all.push(&record(1, true));
    let mut failed = record(2, true);
    failed.exchange.outcome = Outcome::Failed { class: FailureClass::Timeout, error: "slow".into() };
    failed.score = Some(Score { value: 0.0, scorer: "exact".into() });
    failed.exchange.usage = Usage::default();
    all.push(&failed);
    let m = all.finish(&Surroundings::default());
    assert_eq!((value(&m, "accuracy"), value(&m, "errors")), (0.5, 1.0));
    assert_eq!(value(&m, "joules_per_query"), 10.0);
    assert!((value(&m, "joules_per_output_token") - 10.0 / 11.0).abs() < 1e-12, "pairs only");
    assert_eq!(m["latency_s"].n, 1);
}

#[test]
fn a_wide_sensor_bound_leaves_inverse_figures_open_above() {
    let mut all = Accumulator::default();
    let mut r = record(0, true);
    if let Some(ledger) = &mut r.ledger {
        ledger.account.bound = Joules(12.0);
    }
    all.push(&r);
    all.push(&r);
    let m = all.finish(&Surroundings::default());
    assert_eq!(m["output_tokens_per_joule"].high, None);
    assert!(m["output_tokens_per_joule"].low.is_some());
    assert_eq!(m["energy_j"].low, Some(0.0));
}

#[test]
fn a_question_without_an_answer_is_no_wrong_answer() {
    let mut all = Accumulator::default();
    for i in 0..8 {
        let mut r = record(i, true);
        r.score = (i < 4).then(|| Score { value: 1.0, scorer: "exact".into() });
        all.push(&r);
    }
    let m = all.finish(&Surroundings::default());
    assert_eq!((value(&m, "accuracy"), m["accuracy"].n, value(&m, "unscored")), (1.0, 4, 4.0));
    assert_eq!((value(&m, "ipj"), m["ipj"].n), (0.1, 4));
    assert_eq!((value(&m, "joules_per_query"), m["joules_per_query"].n), (10.0, 8));
}

#[test]
fn three_right_answers_do_not_make_intelligence_certain() {
    let mut all = Accumulator::default();
    (1..4).for_each(|i| all.push(&record(i, true)));
    let m = all.finish(&Surroundings::default());
    let width = |name: &str| (m[name].high.unwrap() - m[name].low.unwrap()) / value(&m, name);
    assert!(width("joules_per_correct") > 2.0 * width("joules_per_query"), "accuracy may be 0.44");
    assert!(m["ipj"].low.unwrap() < 0.08 && value(&m, "ipj") == 0.1);
}

#[test]
fn what_was_seen_in_part_gives_no_power_and_no_query_figures() {
    let mut all = Accumulator::default();
    for i in 0..10 {
        let mut r = record(i, true);
        r.ledger.as_mut().unwrap().account.coverage = 0.5;
        r.share.as_mut().unwrap().coverage = 0.5;
        all.push(&r);
    }
    let idle = Estimate::new(Watts(40.0), Watts(2.0), Method::Counter, 1.0);
    let m = all.finish(&Surroundings {
        idle: BTreeMap::from([(0, idle.into())]),
        meter_cpu: None,
        lateness_p99: None,
        tree_memory: None,
    });
    assert_eq!((value(&m, "energy_j"), value(&m, "energy_coverage")), (100.0, 0.5));
    for name in ["mean_power_w", "net_energy_j", "joules_per_query", "ipj", "ipw", "joules_per_output_token"]
    {
        assert_eq!(m[name].value, None, "{name}");
    }
}

#[test]
fn one_query_has_no_spread_and_so_no_interval() {
    let mut all = Accumulator::default();
    all.push(&record(1, true));
    let m = all.finish(&Surroundings::default());
    for name in ["output_tokens_per_s", "joules_per_query", "latency_s", "ipj"] {
        assert!(m[name].value.is_some() && m[name].low.is_none() && m[name].high.is_none(), "{name}");
    }
}

#[test]
fn each_session_has_its_own_baseline_and_one_above_the_run_is_none() {
    let net = |first: f64, second: f64| {
        let mut all = Accumulator::default();
        for session in 0..2 {
            for i in 0..10 {
                all.push(&Record { session, ..record(i, true) });
            }
        }
        // Not a number stands for a baseline of which half was seen.
        let idle = |w: f64| match w.is_nan() {
            true => Estimate::new(Watts(20.0), Watts(1.0), Method::Counter, 0.5),
            false => Estimate::new(Watts(w), Watts(1.0), Method::Counter, 1.0),
        };
        let around = Surroundings {
            idle: BTreeMap::from([(0, idle(first).into()), (1, idle(second).into())]),
            meter_cpu: None,
            lateness_p99: None,
            tree_memory: None,
        };
        let m = all.finish(&around);
        (m["idle_power_w"].value, m["net_energy_j"].value)
    };
    assert_eq!(net(20.0, 40.0), (Some(30.0), Some(140.0)));
    assert_eq!(net(20.0, f64::NAN).1, None);
    assert_eq!(net(120.0, 140.0), (Some(130.0), None));
}
