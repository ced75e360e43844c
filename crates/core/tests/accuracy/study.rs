//! Windows at random places over a simulated run: how far off the value is, and how often the bound holds the truth.

use crate::curve::{Curve, Load, uniform};
use crate::sensor::{Model, stamp};
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::SeedableRng;
use wattle_core::account::{Account, Total};
use wattle_core::estimate::Estimate;
use wattle_core::sensor::SensorId;
use wattle_core::time::Span;
use wattle_core::timeline::Timeline;
use wattle_core::units::Joules;

/// Seconds of one simulated run.
const SECONDS: f64 = 120.0;
/// Windows of each length in it.
const WINDOWS: usize = 500;
/// Seeds of the runs of each kind. The factors of the bound were set on 0 to 3 and 7, not on these.
const SEEDS: std::ops::Range<u64> = 100..104;
/// The lengths of window studied, in seconds.
pub(crate) const LENGTHS: [f64; 4] = [0.1, 0.25, 1.0, 5.0];

/// When a window is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// As soon as its value is final, as a run does: the step after its end is not there yet.
    AtOnce,
    /// When all is over.
    Later,
}

/// What came out for one sensor, one load and one length of window.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Outcome {
    /// Root mean square error over mean energy.
    pub(crate) rms: f64,
    /// The same for the difference of the readings last seen at both ends.
    pub(crate) naive: f64,
    /// Part of the windows whose bound holds the truth.
    pub(crate) held: f64,
    /// Mean bound over mean energy.
    pub(crate) bound: f64,
}

/// Simulated runs, looked at through windows of each of [`LENGTHS`].
pub(crate) fn study(model: Model, load: Load, asked: Asked) -> [Outcome; 4] {
    let (mut outcomes, mut energy) = ([Outcome::default(); 4], [0.0; 4]);
    for seed in SEEDS {
        run(model, load, asked, seed, &mut |row, truth, naive, estimate| {
            let (error, bound) = (estimate.value().get() - truth, estimate.bound().get());
            energy[row] += truth;
            let out = &mut outcomes[row];
            out.rms += error * error;
            out.naive += (naive - truth).powi(2);
            out.held += f64::from(u8::from(error.abs() <= bound));
            out.bound += bound;
        });
    }
    let n = WINDOWS as f64 * SEEDS.count() as f64;
    for (out, energy) in outcomes.iter_mut().zip(energy) {
        let rms = |square: f64| (square / n).sqrt() / (energy / n);
        *out = Outcome {
            rms: rms(out.rms),
            naive: rms(out.naive),
            held: out.held / n,
            bound: out.bound / energy,
        };
    }
    outcomes
}

/// Work that begins and ends with its window, gathered as a command's energy is: how far off the sum of all windows is relative to
/// its energy, how often the bound of each held, and whether that of the sum did.
pub(crate) fn aligned(model: Model, length: f64) -> (f64, f64, bool) {
    let mut rng = Pcg64Mcg::seed_from_u64(SEEDS.start);
    let (mut held, mut truth, mut total) = (0.0, 0.0, Total::default());
    for _ in 0..WINDOWS {
        let from = uniform(&mut rng, 4.0, 5.0);
        let to = from + length * uniform(&mut rng, 0.9, 1.1);
        let curve = Curve::alone(from, to);
        let mut timeline = Timeline::new(&[model.sensor()]);
        timeline.mark(stamp(from));
        timeline.mark(stamp(to));
        model.readings(&curve, to + 10.0, &mut rng).iter().for_each(|reading| timeline.push(reading));
        let mut account = Account::open(stamp(from));
        account.extend(&timeline, &[SensorId(0)], stamp(to));
        let energy = account.estimate().expect("a window clear of both ends is covered");
        held += f64::from(u8::from(
            (energy.value().get() - curve.joules(from, to)).abs() <= energy.bound().get(),
        ));
        truth += curve.joules(from, to);
        total.add(&account);
    }
    let sum = total.estimate().expect("every window is covered");
    let error = sum.value().get() - truth;
    (error / truth, held / WINDOWS as f64, error.abs() <= sum.bound().get())
}

/// One run: hands over the row, the true and the naive joules, and the estimate of each window.
fn run(
    model: Model,
    load: Load,
    asked: Asked,
    seed: u64,
    put: &mut impl FnMut(usize, f64, f64, Estimate<Joules>),
) {
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let curve = Curve::new(load, SECONDS, &mut rng);
    let readings = model.readings(&curve, SECONDS, &mut rng);
    let mut windows = Vec::new();
    for (row, length) in LENGTHS.into_iter().enumerate() {
        for _ in 0..WINDOWS {
            // Not a multiple of the refresh: there, the errors of the naive rule at both ends cancel by chance.
            let length = length * uniform(&mut rng, 0.9, 1.1);
            // Clear of the first and last refresh, so that every window is wholly covered.
            let from = uniform(&mut rng, 3.0, SECONDS - 3.0 - length);
            windows.push((row, from, from + length));
        }
    }
    windows.sort_by(|a, b| a.2.total_cmp(&b.2));

    let mut timeline = Timeline::new(&[model.sensor()]);
    let mut coming = readings.iter();
    for (row, from, to) in windows {
        let window = Span::new(stamp(from), stamp(to));
        let known = |t: &Timeline| t.known_until(SensorId(0)).is_some_and(|k| k >= window.end());
        while asked == Asked::Later || !known(&timeline) {
            let Some(reading) = coming.next() else { break };
            timeline.push(reading);
        }
        let estimate = timeline.energy(SensorId(0), window).expect("a window clear of both ends is covered");
        put(row, curve.joules(from, to), model.naive(&readings, from, to), estimate);
    }
}
