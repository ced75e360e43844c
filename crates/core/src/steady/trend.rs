//! Whether a series goes up or down, with an error that knows that neighbours resemble each other.

use crate::stats::t_975;
use serde::{Deserialize, Serialize};

/// A series is gathered in at most so many points, so that what is alike over a few bins lies inside them.
const POINTS: usize = 64;
/// A smaller change over a window matters to nobody.
const MATTERS: f64 = 0.05;

/// A straight line through a series.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Trend {
    /// From the beginning of the line to its end, relative to the mean.
    pub change: f64,
    /// Whether that is more than chance makes of a series without a trend, at 95 %.
    pub significant: bool,
}

impl Trend {
    /// The trend of a series at even times; `None` if it is too short, or has no mean to compare with.
    ///
    /// The error of the slope is that of as many independent points as the residuals' autocorrelation leaves of them (Santer et
    /// al., J. Geophys. Res. 105, 7337, 2000), that autocorrelation without its bias in short series (Kendall, Biometrika 41, 403, 1954).
    pub fn of(series: &[f64]) -> Option<Self> {
        let points: Vec<f64> = series.chunks_exact(series.len().div_ceil(POINTS).max(1)).map(mean).collect();
        let n = points.len() as f64;
        let level = mean(&points);
        if points.len() < 8 || level.abs() < f64::MIN_POSITIVE {
            return None;
        }
        let (slope, residuals) = around_line(&points);
        let change = slope * n / level;
        let effective = effective(&residuals, 2.0);
        let squares = n * (n * n - 1.0) / 12.0;
        let rest: f64 = residuals.iter().map(|e| e * e).sum();
        let significant = effective > 3.0 && {
            let error = (rest / (effective - 2.0) / squares).sqrt();
            slope.abs() > error * t_975((effective - 2.0) as usize)
        };
        Some(Self { change, significant })
    }

    /// Whether it is there, and large enough to matter.
    pub fn matters(&self) -> bool {
        self.significant && self.change.abs() > MATTERS
    }
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
    let n = residuals.len() as f64;
    let product = |lag: usize| residuals.iter().zip(&residuals[lag..]).map(|(a, b)| a * b).sum::<f64>();
    let squares = product(0);
    if squares <= 0.0 {
        return n;
    }
    let raw = product(1) / squares;
    let likeness = (raw + (fitted + (2.0 + fitted) * raw) / n).clamp(0.0, 0.99);
    n * (1.0 - likeness) / (1.0 + likeness)
}

#[cfg(test)]
mod tests {
    use super::super::tests::Noise;
    use super::*;

    #[test]
    fn chance_is_taken_for_a_trend_one_time_in_twenty_however_alike_neighbours_are() {
        for (n, likeness) in [(64, 0.0), (64, 0.5), (200, 0.7), (512, 0.0), (512, 0.9), (512, 0.95)] {
            let mut noise = Noise::new(n as u64, likeness);
            let alarm = |_: &usize| {
                let series: Vec<f64> = (0..n).map(|_| 100.0 + noise.next()).collect();
                Trend::of(&series).unwrap().significant
            };
            let alarms = (0..2000).filter(alarm).count() as f64 / 2000.0;
            println!("{n} bins, {likeness}: {alarms}");
            assert!((0.015..=0.08).contains(&alarms), "{n} bins, {likeness}: {alarms}");
        }
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
        assert_eq!(Trend::of(&[7.0; 100]), Some(Trend { change: 0.0, significant: false }));
        assert_eq!((Trend::of(&[0.0; 100]), Trend::of(&[1.0; 5])), (None, None));
    }
}
