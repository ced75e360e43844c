//! The accuracy study: windows over power curves with known energy, seen through modelled sensors. docs/method.md#windows quotes
//! its tables; `cargo test -p wattle-core --test accuracy -- --nocapture` prints them. Seeded, without a clock.

#![expect(clippy::print_stdout, reason = "the tables are what the study is for")]

mod curve;
mod faults;
mod sensor;
mod study;

use curve::Load;
use sensor::{Model, View};
use study::{Asked, LENGTHS, Outcome, aligned, study};

/// The refresh periods seen on real counters, in seconds.
const REFRESHES: [f64; 4] = [0.01, 0.02, 0.1, 0.5];
/// Windows of one second in [`LENGTHS`].
const ONE_SECOND: usize = 2;

/// Prints a row of the table in docs/method.md#windows: per length, rms error and how often the bound held, in per cent.
fn print(sensor: &str, load: &str, outcomes: [Outcome; 4]) {
    let cell = |o: Outcome| {
        format!(
            "{:7.3} {:5.1} (bound {:7.3}, naive {:7.3})",
            o.rms * 1e2,
            o.held * 1e2,
            o.bound * 1e2,
            o.naive * 1e2
        )
    };
    println!("{sensor:20} {load:9} | {}", outcomes.map(cell).join(" | "));
}

/// Studies every realistic load, prints them and their mean.
fn mix(name: &str, model: Model, asked: Asked) -> ([[Outcome; 4]; 4], [f64; 4]) {
    let all = Load::REALISTIC.map(|load| {
        let outcomes = study(model, load, asked);
        print(name, &format!("{load:?}"), outcomes);
        outcomes
    });
    let held = std::array::from_fn(|row| all.iter().map(|o| o[row].held).sum::<f64>() / all.len() as f64);
    println!("{name:20} mix       | held {held:.3?}");
    (all, held)
}

#[test]
fn a_second_is_known_to_three_tenths_of_a_per_cent_where_power_is_even() {
    println!("lengths of window: {LENGTHS:?} s; rms error %, bound held %");
    for load in [Load::Constant, Load::Ramp] {
        let second = study(Model::counter(0.1), load, Asked::Later)[ONE_SECOND];
        assert!(second.rms <= 0.003, "{load:?}: {second:?}");
        assert!(second.naive >= 10.0 * second.rms, "{load:?}: {second:?}");
    }
}

#[test]
fn every_load_is_known_several_times_better_than_by_the_naive_rule() {
    for load in Load::REALISTIC {
        for (length, o) in LENGTHS.iter().zip(study(Model::counter(0.1), load, Asked::Later)) {
            assert!(o.naive >= 4.0 * o.rms, "{load:?}, {length} s: {o:?}");
        }
    }
}

#[test]
fn the_bound_of_a_counter_holds_the_truth_as_often_as_it_says() {
    let mut off = Vec::new();
    for asked in [Asked::Later, Asked::AtOnce] {
        for refresh in REFRESHES {
            let name = format!("{} ms {asked:?}", refresh * 1e3);
            let (all, held) = mix(&name, Model::counter(refresh), asked);
            let mean = held.iter().sum::<f64>() / 4.0;
            if !(0.93..=0.97).contains(&mean) {
                off.push(format!("{name}: {mean}"));
            }
            off.extend(all.iter().flatten().filter(|o| o.held < 0.90).map(|o| format!("{name}: {o:?}")));
        }
    }
    assert!(off.is_empty(), "{off:#?}");
}

/// A command, a phase or a query begins and ends where power changes, and interpolation errs the same way at both ends.
#[test]
fn work_that_begins_and_ends_with_its_window_is_within_its_bound() {
    let mut off = Vec::new();
    let mut models: Vec<(String, Model)> =
        REFRESHES.iter().map(|r| (format!("counter, {} ms", r * 1e3), Model::counter(*r))).collect();
    models.push(("1 s average".into(), Model::new(View::Average)));
    models.push(("25 of 100 ms".into(), Model::new(View::PartTime)));
    for (name, model) in models {
        for length in [0.3, 1.0, 5.0] {
            let (bias, held, sum) = aligned(model, length);
            println!(
                "{name:20} aligned, {length} s | mean error {:6.2} % held {:5.1} %",
                bias * 1e2,
                held * 1e2
            );
            if held < 0.90 || !sum {
                off.push(format!("{name}, {length} s: {held}, sum {sum}"));
            }
        }
    }
    assert!(off.is_empty(), "{off:#?}");
}

#[test]
fn the_bound_of_a_part_time_gauge_holds_the_truth() {
    let (all, _) = mix("25 of 100 ms", Model::new(View::PartTime), Asked::Later);
    for o in all.iter().flatten() {
        assert!(o.held >= 0.90, "{o:?}");
    }
}

/// An average tells little about a window shorter than itself, and its bound says so.
#[test]
fn the_bound_of_a_one_second_average_holds_the_truth() {
    let (all, held) = mix("1 s average", Model::new(View::Average), Asked::Later);
    let mean = held.iter().sum::<f64>() / 4.0;
    assert!((0.93..=0.975).contains(&mean), "{mean}");
    for o in all.iter().flatten() {
        assert!(o.held >= 0.88, "{o:?}");
    }
    let [constant, _, square, bursts] = all;
    assert!(constant.iter().all(|o| o.rms < 0.002));
    for o in [square[3], bursts[3]] {
        assert!(o.rms < 0.03 && o.naive > 5.0 * o.rms, "{o:?}");
    }
}

/// A caveat, kept true: what comes and goes within a refresh leaves no trace in a counter.
#[test]
fn flicker_inside_a_refresh_is_beyond_the_bound_but_small() {
    for refresh in REFRESHES {
        let flicker = study(Model::counter(refresh), Load::Flicker, Asked::Later);
        print(&format!("{} ms", refresh * 1e3), "Flicker", flicker);
        assert!(flicker[ONE_SECOND].rms < 0.01, "{flicker:?}");
    }
}
