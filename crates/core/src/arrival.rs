//! When requests are due. An arrival is an iterator of due times; a closed loop is "all due now" behind a cap on how many are in
//! flight. Schedules are laid out before they are run, so they cannot drift.

use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// How gaps between requests are spread around their mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spread {
    /// All alike.
    Constant,
    /// As of many people who know nothing of each other.
    #[default]
    Poisson,
    /// In bursts: gamma distributed, see [`Arrival::burstiness`].
    Gamma,
}

/// When requests come, as text and numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Arrival {
    /// Requests a second at the start.
    pub rate: f64,
    /// Requests a second at the end of [`Arrival::ramp_s`], if they become more or fewer.
    pub rate_end: Option<f64>,
    /// How long that takes.
    pub ramp_s: f64,
    /// How gaps are spread.
    pub spread: Spread,
    /// Squared coefficient of variation of gamma distributed gaps: 1 is Poisson, more comes in bursts, less is more even.
    pub burstiness: f64,
    /// Seed of the gaps.
    pub seed: u64,
}

impl Arrival {
    /// Due times in seconds after the start, without an end.
    pub fn times(&self) -> impl Iterator<Item = f64> + use<> {
        let arrival = self.clone();
        let mut rng = Pcg64Mcg::seed_from_u64(self.seed);
        // Requests come at rate 1 in a time of their own, in which the rate does not change; that time is then stretched.
        let mut own = 0.0;
        std::iter::repeat_with(move || {
            let due = arrival.at(own);
            own += arrival.gap(&mut rng);
            due
        })
    }

    /// A gap whose mean is 1.
    fn gap(&self, rng: &mut Pcg64Mcg) -> f64 {
        match self.spread {
            Spread::Constant => 1.0,
            Spread::Poisson => exponential(rng),
            Spread::Gamma => gamma(1.0 / self.burstiness, rng) * self.burstiness,
        }
    }

    /// The moment by which `count` requests have come on average.
    fn at(&self, count: f64) -> f64 {
        let Some(end) = self.rate_end.filter(|_| self.ramp_s > 0.0) else { return count / self.rate };
        let (start, length) = (self.rate, self.ramp_s);
        // The integral of the rate up to t is start·t + slope·t²/2.
        let in_ramp = (start + end) / 2.0 * length;
        if count >= in_ramp {
            return length + (count - in_ramp) / end;
        }
        let slope = (end - start) / length;
        // The root that stays finite when the slope is 0.
        2.0 * count / (start + (start * start + 2.0 * slope * count).max(0.0).sqrt())
    }
}

/// Above 0 and at most 1.
fn uniform(rng: &mut Pcg64Mcg) -> f64 {
    ((rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
}

fn exponential(rng: &mut Pcg64Mcg) -> f64 {
    -uniform(rng).ln()
}

/// Standard normal, by Box and Muller.
pub(crate) fn normal(rng: &mut Pcg64Mcg) -> f64 {
    (2.0 * exponential(rng)).sqrt() * (std::f64::consts::TAU * uniform(rng)).cos()
}

/// Gamma with this shape and scale 1, by Marsaglia and Tsang (ACM TOMS 26, 2000).
fn gamma(shape: f64, rng: &mut Pcg64Mcg) -> f64 {
    if shape < 1.0 {
        return gamma(shape + 1.0, rng) * uniform(rng).powf(1.0 / shape);
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = normal(rng);
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && uniform(rng).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(spread: Spread, burstiness: f64) -> Arrival {
        Arrival { rate: 20.0, rate_end: None, ramp_s: 0.0, spread, burstiness, seed: 7 }
    }

    /// Mean and squared coefficient of variation of the gaps.
    fn gaps(arrival: &Arrival) -> (f64, f64) {
        let times: Vec<f64> = arrival.times().take(100_001).collect();
        let gaps: Vec<f64> = times.windows(2).map(|w| w[1] - w[0]).collect();
        let n = gaps.len() as f64;
        let mean = gaps.iter().sum::<f64>() / n;
        let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / n;
        (mean, variance / (mean * mean))
    }

    #[test]
    fn gaps_have_the_mean_and_the_spread_they_should() {
        for (spread, burstiness, variation) in [
            (Spread::Constant, 1.0, 0.0),
            (Spread::Poisson, 1.0, 1.0),
            (Spread::Gamma, 1.0, 1.0),
            (Spread::Gamma, 4.0, 4.0),
            (Spread::Gamma, 0.25, 0.25),
        ] {
            let (mean, found) = gaps(&arrival(spread, burstiness));
            assert!((mean * 20.0 - 1.0).abs() < 0.03, "{spread:?} {burstiness}: mean {mean}");
            assert!(
                (found - variation).abs() < 0.05 * variation.max(0.01),
                "{spread:?} {burstiness}: {found}"
            );
        }
    }

    #[test]
    fn the_first_request_is_due_at_once_and_the_rest_in_order() {
        for spread in [Spread::Constant, Spread::Poisson, Spread::Gamma] {
            let times: Vec<f64> = arrival(spread, 2.0).times().take(1000).collect();
            assert_eq!(times[0], 0.0);
            assert!(times.is_sorted());
        }
    }

    #[test]
    fn a_ramp_goes_from_one_rate_to_the_other_and_stays_there() {
        for (from, to) in [(10.0, 50.0), (50.0, 10.0), (20.0, 20.0)] {
            let ramp =
                Arrival { rate: from, rate_end: Some(to), ramp_s: 100.0, ..arrival(Spread::Constant, 1.0) };
            let count =
                |a: f64, b: f64| ramp.times().take(20_000).filter(|t| a <= *t && *t < b).count() as f64;
            let at = |t: f64| from + (to - from) * (t / 100.0).min(1.0);
            for second in [1.0, 50.0, 98.0, 150.0] {
                let (found, expected) = (count(second, second + 1.0), at(second + 0.5));
                assert!(
                    (found - expected).abs() <= 1.5,
                    "{from} to {to} at {second}: {found} for {expected}"
                );
            }
        }
    }

    #[test]
    fn one_seed_gives_one_schedule() {
        let times =
            |seed| Arrival { seed, ..arrival(Spread::Poisson, 1.0) }.times().take(9).collect::<Vec<_>>();
        assert_eq!(times(1), times(1));
        assert_ne!(times(1), times(2));
    }
}
