//! Sensors with something wrong: what can be told from the readings is followed or left out, and the bound knows.

use crate::curve::{Curve, Load};
use crate::print;
use crate::sensor::{Fault, Model, stamp};
use crate::study::{Asked, study};
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::SeedableRng;
use wattle_core::sensor::SensorId;
use wattle_core::time::Span;

const ID: SensorId = SensorId(0);

#[test]
fn a_wrap_changes_no_figure() {
    let plain = study(Model::counter(0.1), Load::Bursts, Asked::Later);
    // RAPL's range, and one that is gone through every few seconds.
    for wrap in [262_143.328_85, 1_000.0] {
        let wrapped = study(Model { wrap: Some(wrap), ..Model::counter(0.1) }, Load::Bursts, Asked::Later);
        for (a, b) in plain.iter().zip(wrapped) {
            assert!((a.rms - b.rms).abs() < 1e-9 && a.held == b.held, "{wrap}: {a:?} {b:?}");
        }
    }
}

#[test]
fn a_gain_error_is_held_by_the_gain_that_the_sensor_admits() {
    let model = Model { gain: 1.05, stated: 0.05, ..Model::counter(0.1) };
    for load in Load::REALISTIC {
        let outcomes = study(model, load, Asked::Later);
        print("100 ms, gain 1.05", &format!("{load:?}"), outcomes);
        assert!(outcomes.iter().all(|o| o.held >= 0.93), "{load:?}: {outcomes:?}");
    }
}

/// A caveat, kept true: no reading tells how old it is. The window is moved by the lag, so even power hides it.
#[test]
fn a_lag_of_20_ms_costs_nothing_on_even_power_and_is_beyond_the_bound_on_bursts() {
    let model = Model { lag: 0.02, ..Model::counter(0.1) };
    let [even, bursts] = [Load::Constant, Load::Bursts].map(|load| {
        let outcomes = study(model, load, Asked::Later);
        print("100 ms, lag 20 ms", &format!("{load:?}"), outcomes);
        outcomes
    });
    assert!(even.iter().all(|o| o.held >= 0.93), "{even:?}");
    assert!(bursts[2].rms < 0.03 && bursts[3].rms < 0.005, "{bursts:?}");
}

#[test]
fn joules_of_a_stall_or_a_dropout_are_kept_and_their_place_is_in_the_bound() {
    for fault in [Fault::Stall(40.0, 41.5), Fault::Dropout(40.0, 41.5)] {
        for load in Load::REALISTIC {
            let outcomes = study(Model { fault: Some(fault), ..Model::counter(0.1) }, load, Asked::Later);
            assert!(outcomes.iter().all(|o| o.held >= 0.90), "{fault:?} {load:?}: {outcomes:?}");
            let inside = held_between(fault, load, 39.0, 42.5);
            println!("{fault:?} {load:?}: windows with an edge near it are held in {:.1} %", inside * 1e2);
            assert!(inside >= 0.90, "{fault:?} {load:?}: {inside}");
        }
    }
}

/// How often the bound holds for half-second windows between two moments, over many runs.
fn held_between(fault: Fault, load: Load, from: f64, to: f64) -> f64 {
    let model = Model { fault: Some(fault), ..Model::counter(0.1) };
    let (mut held, mut all) = (0.0, 0.0);
    for seed in 0..20 {
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let curve = Curve::new(load, 50.0, &mut rng);
        let timeline = model.timeline(&model.readings(&curve, 50.0, &mut rng));
        let mut at = from;
        while at + 0.5 < to {
            let window = Span::new(stamp(at), stamp(at + 0.5));
            let estimate = timeline.energy(ID, window).expect("the run goes on after the fault");
            let error = estimate.value().get() - curve.joules(at, at + 0.5);
            held += f64::from(u8::from(error.abs() <= estimate.bound().get()));
            all += 1.0;
            at += 0.037;
        }
    }
    held / all
}

#[test]
fn a_reset_takes_its_time_out_of_the_coverage_and_adds_nothing() {
    for seed in 0..20 {
        let model = Model { fault: Some(Fault::Reset(20.0)), ..Model::counter(0.1) };
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let curve = Curve::new(Load::Bursts, 40.0, &mut rng);
        let timeline = model.timeline(&model.readings(&curve, 40.0, &mut rng));
        assert_eq!(timeline.anomalies(ID).resets, 1);
        let across = timeline.energy(ID, Span::new(stamp(15.0), stamp(25.0))).unwrap();
        let (value, truth) = (across.value().get(), curve.joules(15.0, 25.0));
        assert!((0.95..1.0).contains(&across.coverage()), "{across:?}");
        // The board draws at most 700 W, and at most two refreshes and a late poll are lost.
        assert!(value <= truth + across.bound().get() && value >= truth - 700.0 * 0.25, "{truth} {across:?}");
    }
}
