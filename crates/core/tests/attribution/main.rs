//! Energy per request among others, against a simulated engine that knows the truth.
//!
//! `cargo test --release -p wattle-core --test attribution -- --nocapture` prints the table of docs/method.md#attribution.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod ladders;
mod rules;
mod world;

use wattle_core::Watts;
use wattle_core::attribute::Share;
use wattle_core::cost::{Cost, Weights};
use wattle_core::sensor::DeviceKind;
use wattle_sim_server::{EngineConfig, Joules, Quirks};
use world::{Ask, Found, Past, serve, split};

/// Seven of ten ask 200 tokens for 400, three ask 4000 for 80, give or take a quarter.
fn mixed(n: u64) -> Vec<Ask> {
    // Not in step with the number in flight.
    let ask = |i: u64| match (i * 7919 + i / 3) % 10 < 7 {
        true => Ask { prompt: 150 + i * 37 % 100, answer: 350 + i * 53 % 100 },
        false => Ask { prompt: 3500 + i * 97 % 1000, answer: 60 + i * 31 % 40 },
    };
    (0..n).map(ask).collect()
}

/// An engine that is not linear: attention makes a prompt of 4000 tokens cost 40 % more, decoding together is cheaper, long contexts
/// dearer, and every iteration varies by 10 %.
fn bent() -> EngineConfig {
    let quirks = Quirks {
        attention: 2e-4,
        batch_exponent: 0.85,
        context_exponent: 1.15,
        noise: 0.1,
        ..Quirks::default()
    };
    EngineConfig { quirks, ..EngineConfig::default() }
}

fn cost(c: wattle_sim_server::Cost) -> Cost {
    Cost { fixed: c.fixed, prefill: c.prefill, decode: c.decode, context: c.context }
}

/// What a calibration of the ladders up to 32 at once finds, off by these factors.
fn calibrated(config: &EngineConfig, off: [f64; 4]) -> Weights {
    let fit = ladders::calibrate(config, 32);
    let parts = fit.joules.parts();
    let joules = Cost::from_parts(std::array::from_fn(|i| parts[i] * off[i]));
    idle(Weights::calibrated(joules, &fit.covariance, Some(fit.seconds)), config)
}

/// True coefficients, off by these factors; their fit says that it is sure.
fn weights(config: &EngineConfig, off: [f64; 4]) -> Weights {
    let parts = cost(config.joules).parts();
    let joules = Cost::from_parts(std::array::from_fn(|i| parts[i] * off[i]));
    idle(Weights::calibrated(joules, &[[0.0; 4]; 4], Some(cost(config.seconds))), config)
}

fn idle(weights: Weights, config: &EngineConfig) -> Weights {
    weights.with_idle(Watts(config.idle_watts), Watts(0.5))
}

fn defaults(config: &EngineConfig) -> Weights {
    idle(Weights::defaults(None, None, DeviceKind::Gpu), config)
}

#[derive(Debug)]
struct Errors {
    mean: f64,
    covered: f64,
    /// Mean of bound / share.
    width: f64,
}

fn errors(past: &Past, found: &Found) -> Errors {
    assert_eq!(found.ended.len(), past.truth.len());
    assert!(found.ledger.residual().unwrap().abs() <= 1e-9);
    let mut sums = [0.0; 3];
    for (truth, ended) in past.truth.iter().zip(&found.ended) {
        let share = ended.share.unwrap();
        let (got, truth, bound) = (share.total().get(), truth.total(), share.bound.get());
        let within = f64::from(u8::from((got - truth).abs() <= bound));
        let row = [(got / truth - 1.0).abs(), within, bound / got];
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x / past.truth.len() as f64);
    }
    let [mean, covered, width] = sums;
    Errors { mean, covered, width }
}

fn sum(found: &Found, phase: fn(&Share) -> wattle_core::Joules) -> f64 {
    found.ended.iter().filter_map(|e| e.share).map(|s| phase(&s).get()).sum()
}

fn truth(past: &Past, phase: fn(&Joules) -> f64) -> f64 {
    past.truth.iter().map(phase).sum()
}

#[test]
fn each_of_64_in_flight_gets_its_own_joules() {
    let config = EngineConfig::default();
    let past = serve(&config, &mixed(400), 64);
    let known = errors(&past, &split(&past, weights(&config, [1.0; 4])));
    println!("| true costs | {:.1} % | {:.1} % |", known.mean * 100.0, known.covered * 100.0);
    assert!(known.mean <= 0.05 && known.covered >= 0.9, "{known:?}");
    let fitted = errors(&past, &split(&past, calibrated(&config, [1.0; 4])));
    println!("| calibrated by ladders | {:.1} % | {:.1} % |", fitted.mean * 100.0, fitted.covered * 100.0);
    assert!(fitted.mean <= 0.05 && fitted.covered >= 0.9, "{fitted:?}");
    let unknown = errors(&past, &split(&past, defaults(&config)));
    println!("| documented ratios | {:.1} % | {:.1} % |", unknown.mean * 100.0, unknown.covered * 100.0);
    assert!(unknown.covered >= 0.9 && unknown.width > 1.8 * known.width, "{unknown:?} {known:?}");
    for (name, rule) in rules::RULES {
        let shares = rule(&past);
        let off = shares.iter().zip(&past.truth).map(|(s, t)| (s / t.total() - 1.0).abs());
        let mean = off.sum::<f64>() / shares.len() as f64;
        println!("| {name} | {:.0} % | - |", mean * 100.0);
        assert!(mean > 4.0 * known.mean, "{name} is as good: {mean}");
    }
}

#[test]
fn prefill_and_decode_are_right_at_any_concurrency() {
    let config = EngineConfig::default();
    for (at_once, n) in [(1, 40), (8, 200), (64, 400)] {
        let past = serve(&config, &mixed(n), at_once);
        let found = split(&past, calibrated(&config, [1.0; 4]));
        let prefill = sum(&found, |s| s.prefill) / truth(&past, |j| j.prefill);
        let decode = sum(&found, |s| s.decode) / truth(&past, |j| j.decode);
        let shared = sum(&found, |s| s.shared) / truth(&past, |j| j.shared);
        println!(
            "{at_once} at once: prefill {prefill:.3}, decode {decode:.3}, shared {shared:.3} of the truth"
        );
        assert!([prefill, decode, shared].iter().all(|r| (r - 1.0).abs() <= 0.1));
    }
}

#[test]
fn who_waits_for_a_place_pays_nothing_for_the_wait() {
    // Twice as many in flight as the engine works on.
    let config = EngineConfig { max_batch: 16, ..EngineConfig::default() };
    let past = serve(&config, &mixed(200), 32);
    let found = errors(&past, &split(&past, weights(&config, [1.0; 4])));
    println!("32 at once at an engine of 16: {found:?}");
    assert!(found.mean <= 0.05 && found.covered >= 0.9, "{found:?}");
}

#[test]
fn an_engine_that_is_not_linear_and_a_calibration_that_is_off_stay_within_the_bound() {
    let config = bent();
    let past = serve(&config, &mixed(400), 64);
    for off in [[1.0; 4], [1.2, 0.8, 1.2, 0.8], [0.8, 1.2, 0.8, 1.2], [1.2, 1.2, 0.8, 0.8]] {
        let found = errors(&past, &split(&past, calibrated(&config, off)));
        println!(
            "| not linear, off by {off:?} | {:.1} % | {:.1} % |",
            found.mean * 100.0,
            found.covered * 100.0
        );
        assert!(found.mean <= 0.2 && found.covered >= 0.9, "{off:?}: {found:?}");
    }
}
