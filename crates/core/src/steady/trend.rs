//! Whether a series goes up or down, with an error that knows that neighbours resemble each other.

use crate::stats::t_975;
use serde::{Deserialize, Serialize};

/// A series is gathered in at most so many points, so that what is alike over a few bins lies inside them.
const POINTS: usize = 64;
/// A smaller change over a window matters to nobody.
const MATTERS: f64 = 0.05;

/// Noise whose neighbours are alike by more than 1 − this/√n cannot be told from a random walk. Perron and Yabu have 1 for long series;
/// with 3, of 30 points, too, hardly more than one in twelve is called a trend by chance (the test below).
const LIKE_A_WALK: f64 = 3.0;
/// A step is taken for one if it leaves less than this part of what a curve leaves.
const STEP: f64 = 0.5;
/// And if there is this part of the points on both sides of it: of fewer, anything is one.
const SIDE: usize = 8;
/// What is fitted before noise is looked at: a parabola, or two levels and the place of the step.
const FITTED: f64 = 3.0;
/// Noise worth fewer independent points tells nothing.
const FEWEST: f64 = 3.0;
/// A change by less is one of rounding.
const ROUNDING: f64 = 1e-9;

/// A straight line through a series.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Trend {
    /// From the beginning of the line to its end, relative to the mean.
    pub change: f64,
    /// Whether that is more than chance makes of a series without a trend, at 95 %; `None` if it cannot be told.
    pub significant: Option<bool>,
}

impl Trend {
    /// The trend of a series at even times; `None` if it is too short, or has no mean to compare with.
    ///
    /// Drift is seldom straight, and what bends would pass for noise whose neighbours are alike: noise is what is left around a
    /// parabola or a step. It is taken for an AR(1) and, where it is so alike that it cannot be told from a random walk, for one
    /// (Perron and Yabu, J. Econometrics 151, 56, 2009): that is the most that noise with such steps can stray.
    pub fn of(series: &[f64]) -> Option<Self> {
        let each = series.len().div_ceil(POINTS).max(1);
        let points: Vec<f64> = series.chunks_exact(each).map(mean).collect();
        let level = mean(&points);
        if points.len() < 8 || level.abs() < f64::MIN_POSITIVE {
            return None;
        }
        let n = points.len() as f64;
        let slope = around_line(&points).0;
        let change = slope * n / level;
        let noise = around_bend(&points);
        let likeness = likeness(&noise, FITTED);
        let (error, worth) = error_of_slope(&noise, likeness);
        let beyond_noise = slope.abs() > error * t_975(worth as usize);
        let significant = if change.abs() < ROUNDING {
            Some(false)
        } else if likeness < 1.0 - LIKE_A_WALK / n.sqrt() {
            Some(beyond_noise)
        } else {
            // Means of a walk differ by less than the walk goes from one to the next.
            let squared = (each * each) as f64;
            let (error, worth) = error_of_slope(&noise, 1.0);
            let error = error * (3.0 * squared / (2.0 * squared + 1.0)).sqrt();
            let beyond_walk = slope.abs() > error * t_975(worth as usize);
            let undecided = beyond_noise || independent(n - FITTED, likeness) < FEWEST;
            if beyond_walk { Some(true) } else { (!undecided).then_some(false) }
        };
        Some(Self { change, significant })
    }

    /// Whether it is there, and large enough to matter.
    pub fn matters(&self) -> bool {
        self.significant == Some(true) && self.change.abs() > MATTERS
    }
}

/// The error of the slope of a line through noise that is an AR(1) with this likeness of neighbours, 1 being a random walk, and how
/// many independent values it rests on.
fn error_of_slope(noise: &[f64], likeness: f64) -> (f64, f64) {
    let n = noise.len() as f64;
    let steps: f64 = noise.windows(2).map(|pair| (pair[1] - likeness * pair[0]).powi(2)).sum();
    let walk = likeness >= 1.0;
    // Half the mean squared difference of values so far apart, by steps of variance 1.
    let apart = |lag: f64| match walk {
        true => lag / 2.0,
        false => (1.0 - likeness.powf(lag)) / (1.0 - likeness * likeness),
    };
    let (middle, squares) = ((n - 1.0) / 2.0, n * (n * n - 1.0) / 12.0);
    let weight = |i: usize| (i as f64 - middle) / squares;
    let weights = |lag: usize| (lag..noise.len()).map(|i| weight(i) * weight(i - lag)).sum::<f64>();
    // The weights' sum is zero, so that the level, which wanders off in a walk, falls out.
    let variance: f64 = (1..noise.len()).map(|lag| -2.0 * weights(lag) * apart(lag as f64)).sum();
    let worth = if walk { n - 1.0 - FITTED } else { independent(n - FITTED, likeness).max(FEWEST) };
    ((steps / (n - 1.0 - FITTED) * variance.max(0.0)).sqrt(), worth)
}

/// What is left of values around a parabola or, where that fits far better, around two levels.
fn around_bend(values: &[f64]) -> Vec<f64> {
    let n = values.len() as f64;
    let straight = around_line(values).1;
    let middle = (n - 1.0) / 2.0;
    // At right angles to every line.
    let bend: Vec<f64> =
        (0..values.len()).map(|i| (i as f64 - middle).powi(2) - (n * n - 1.0) / 12.0).collect();
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let bent = product(&straight, &bend) / product(&bend, &bend);
    let curve: Vec<f64> = straight.iter().zip(&bend).map(|(y, b)| y - bent * b).collect();

    let (level, side) = (mean(values), (values.len() / SIDE).max(1));
    // What two levels explain, by the sum of what comes before the step.
    let explained = values.iter().enumerate().scan(0.0, |sum, (i, y)| {
        *sum += y - level;
        let before = i as f64 + 1.0;
        Some((*sum * *sum * n / (before * (n - before)), i + 1))
    });
    let inner = explained.filter(|(_, at)| (side..=values.len() - side).contains(at));
    let Some((_, at)) = inner.max_by(|a, b| a.0.total_cmp(&b.0)) else { return curve };
    let rest = |part: &[f64]| {
        let level = mean(part);
        part.iter().map(|y| y - level).collect::<Vec<f64>>()
    };
    let step = [rest(&values[..at]), rest(&values[at..])].concat();
    if product(&step, &step) < STEP * product(&curve, &curve) { step } else { curve }
}

pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The slope of the line through values at even times, and what is left around it.
pub(super) fn around_line(values: &[f64]) -> (f64, Vec<f64>) {
    let n = values.len() as f64;
    let (level, middle) = (mean(values), (n - 1.0) / 2.0);
    let times = || (0..values.len()).map(|i| i as f64 - middle);
    let squares = n * (n * n - 1.0) / 12.0;
    let slope = times().zip(values).map(|(t, y)| t * y).sum::<f64>() / squares;
    (slope, times().zip(values).map(|(t, y)| y - level - slope * t).collect())
}

/// As many independent values as these are worth, after so many parameters were fitted to them.
pub(super) fn effective(residuals: &[f64], fitted: f64) -> f64 {
    independent(residuals.len() as f64, likeness(residuals, fitted).min(0.99))
}

/// How many independent values so many are worth.
fn independent(n: f64, likeness: f64) -> f64 {
    n * (1.0 - likeness) / (1.0 + likeness)
}

/// How alike neighbours are, after so many parameters were fitted, without the bias of short series (Kendall, Biometrika 41, 403, 1954).
fn likeness(residuals: &[f64], fitted: f64) -> f64 {
    let product = |lag: usize| residuals.iter().zip(&residuals[lag..]).map(|(a, b)| a * b).sum::<f64>();
    let squares = product(0);
    if squares <= 0.0 {
        return 0.0;
    }
    let raw = product(1) / squares;
    (raw + (fitted + (2.0 + fitted) * raw) / residuals.len() as f64).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::super::tests::Noise;
    use super::*;

    #[test]
    fn chance_is_taken_for_a_trend_one_time_in_twenty_or_so_however_alike_neighbours_are() {
        for n in [30, 50, 64, 100, 200, 500] {
            for likeness in [0.0, 0.3, 0.5, 0.7, 0.8, 0.9] {
                let mut noise = Noise::new(n as u64, likeness);
                let trend = |_| {
                    let series: Vec<f64> = (0..n).map(|_| 100.0 + noise.next()).collect();
                    Trend::of(&series).unwrap().significant
                };
                let all: Vec<Option<bool>> = (0..1000).map(trend).collect();
                let part = |what| all.iter().filter(|s| **s == what).count() as f64 / all.len() as f64;
                let (alarms, open) = (part(Some(true)), part(None));
                println!("{n} bins, {likeness}: {alarms}, {open} cannot be told");
                let most = if n < 50 { 0.105 } else { 0.085 };
                assert!(alarms <= most, "{n} bins, {likeness}: {alarms}");
                assert!(alarms >= 0.02 || likeness > 0.7, "{n} bins, {likeness}: {alarms}");
                // Where there are enough points for their likeness, there is an answer.
                let worth = n as f64 * (1.0 - likeness) / (1.0 + likeness);
                assert!(open < 0.15 || worth < 10.0, "{n} bins, {likeness}: {open} cannot be told");
            }
        }
    }

    #[test]
    fn drift_that_bends_or_comes_at_once_is_found() {
        let warming = |x: f64| 40.0 + 26.0 * (1.0 - (-2.0 * x).exp()) / (1.0 - (-2.0_f64).exp());
        let falling = |x: f64| 300.0 - 45.0 * x * x;
        let dropping = |x: f64| if x < 0.73 { 300.0 } else { 255.0 };
        type Shape<'a> = (&'a str, &'a dyn Fn(f64) -> f64, f64);
        let shapes: [Shape<'_>; 7] = [
            ("warming", &warming, 0.0),
            ("warming", &warming, 1.0),
            ("falling", &falling, 0.0),
            ("falling", &falling, 1.0),
            ("dropping", &dropping, 0.0),
            ("dropping", &dropping, 1.0),
            ("dropping", &dropping, 4.0),
        ];
        for n in [30, 64, 100, 500] {
            for (name, shape, off) in shapes {
                let mut noise = Noise::new(3, 0.0);
                let series: Vec<f64> =
                    (0..n).map(|i| shape(f64::from(i) / f64::from(n - 1)) + off * noise.next()).collect();
                let trend = Trend::of(&series).unwrap();
                assert!(trend.matters(), "{n} bins, {name}, {off}: {trend:?}");
            }
        }
    }

    /// A random walk goes somewhere by chance; no step of it says so.
    #[test]
    fn of_what_strays_like_a_walk_it_is_not_said_that_it_is_chance() {
        let mut noise = Noise::new(8, 0.0);
        let mut walk = || {
            let mut at = 1000.0;
            Trend::of(&(0..100).map(|_| (at += noise.next(), at).1).collect::<Vec<f64>>()).unwrap()
        };
        let all: Vec<Trend> = (0..500).map(|_| walk()).collect();
        let part = |what| all.iter().filter(|t| t.significant == what).count() as f64 / 500.0;
        println!("{} a trend, {} cannot be told", part(Some(true)), part(None));
        assert!(part(Some(true)) < 0.1 && part(None) > 0.5);
    }

    #[test]
    fn drift_is_found() {
        let mut noise = Noise::new(5, 0.8);
        let series: Vec<f64> = (0..300).map(|i| 300.0 + 0.1 * f64::from(i) + 2.0 * noise.next()).collect();
        let trend = Trend::of(&series).unwrap();
        assert!(trend.matters() && (trend.change - 30.0 / 315.0).abs() < 0.02, "{trend:?}");
        let flat: Vec<f64> = (0..300).map(|_| 300.0 + 2.0 * noise.next()).collect();
        assert!(!Trend::of(&flat).unwrap().matters());
    }

    #[test]
    fn what_does_not_change_has_no_trend() {
        assert_eq!(Trend::of(&[7.0; 100]), Some(Trend { change: 0.0, significant: Some(false) }));
        assert_eq!(Trend::of(&[0.1 + 0.2; 90]).unwrap().significant, Some(false));
        // One bin that differs, in the midst or at the end, is no step.
        for odd in [20, 63] {
            let mut series = [16.0; 64];
            series[odd] = 12.0;
            assert_eq!(Trend::of(&series).unwrap().significant, Some(false), "{odd}");
        }
        assert_eq!((Trend::of(&[0.0; 100]), Trend::of(&[1.0; 5])), (None, None));
    }
}
