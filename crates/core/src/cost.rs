//! What work costs an engine: a shared part of every iteration, and what each request adds. docs/method.md#attribution

use crate::sensor::DeviceKind;
use crate::units::Watts;
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// How much of everything was done.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Work {
    /// Passes over the weights.
    pub iterations: f64,
    /// Prompt tokens worked off.
    pub prefill: f64,
    /// Tokens said after the first.
    pub decode: f64,
    /// Tokens that these looked back at, all together.
    pub context: f64,
}

/// What each of it costs, in joules above idle or in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Cost {
    /// An iteration, whoever is in it.
    pub fixed: f64,
    /// A prompt token.
    pub prefill: f64,
    /// A token said.
    pub decode: f64,
    /// A token looked back at.
    pub context: f64,
}

/// Coefficients of a cost.
pub const PARTS: usize = 4;

impl Work {
    /// In the order of [`Cost::parts`].
    pub const fn parts(&self) -> [f64; PARTS] {
        [self.iterations, self.prefill, self.decode, self.context]
    }
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.iterations += other.iterations;
        self.prefill += other.prefill;
        self.decode += other.decode;
        self.context += other.context;
    }
}

impl Cost {
    /// Names of the parts, in their order.
    pub const NAMES: [&str; PARTS] = ["fixed", "prefill", "decode", "context"];

    /// From its parts in order.
    pub const fn from_parts([fixed, prefill, decode, context]: [f64; PARTS]) -> Self {
        Self { fixed, prefill, decode, context }
    }

    /// Its parts in order.
    pub const fn parts(&self) -> [f64; PARTS] {
        [self.fixed, self.prefill, self.decode, self.context]
    }

    /// What so much work costs.
    pub fn of(&self, work: &Work) -> f64 {
        self.parts().iter().zip(work.parts()).map(|(c, w)| c * w).sum()
    }
}

/// Where coefficients come from, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Measured for this model, engine and device.
    Calibration,
    /// Documented ratios; the bound is wide.
    Defaults,
}

/// Half of them are the mirror of the other half, so that they have no bias of their own.
pub(crate) const DRAWS: usize = 64;
/// However well a fit went, engines are not quite linear and drift with temperature, version and length: one standard deviation of each
/// coefficient against the others.
const MODEL_ERROR: f64 = 0.2;
/// Of the documented ratios: the truth lies within a factor of four in 95 % of cases.
const DEFAULTS_ERROR: f64 = std::f64::consts::LN_2;
/// How many requests of others there are is seen twice a second, and what is done for them is a guess: one standard deviation of its
/// logarithm.
const FOREIGN_ERROR: f64 = 0.4;
/// Where nobody measured it, idle power is this part of the power at work, give or take all of it: boards draw 10 to 30 %.
const IDLE_PART: f64 = 0.2;
/// The draws are the same in every run.
const SEED: u64 = 0x5_7a77_1e00;

/// By what energy is split: coefficients, and what else they might be.
#[derive(Debug, Clone, PartialEq)]
pub struct Weights {
    /// Where they come from.
    pub origin: Origin,
    /// Joules above idle; of defaults only their ratios mean something.
    pub joules: Cost,
    /// Seconds, where they were calibrated.
    pub seconds: Option<Cost>,
    /// Power with nothing to do, where somebody measured it.
    idle: Option<Watts>,
    drawn: Box<Drawn>,
}

/// Coefficients that might be the true ones just as well, one array for each part.
#[derive(Debug, Clone, PartialEq)]
struct Drawn {
    parts: [[f64; DRAWS]; PARTS],
    /// Watts, or the part of all energy.
    idle: [f64; DRAWS],
    /// How many times as much as is taken was done for others.
    foreign: [f64; DRAWS],
}

impl Weights {
    /// From a fit: coefficients in joules and their covariance.
    pub fn calibrated(joules: Cost, covariance: &[[f64; PARTS]; PARTS], seconds: Option<Cost>) -> Self {
        Self::new(Origin::Calibration, joules, &root(covariance), MODEL_ERROR, seconds)
    }

    /// Ratios from what hardware is like, for a model of so many parameters of so many bytes each; 8 B of 2 bytes where unknown.
    ///
    /// A token costs two operations a parameter, an iteration reads every parameter once. A board does 150 to 400 operations in the
    /// time in which it reads a byte (A100 156, H100 295, L4 403) and draws somewhat less meanwhile; a CPU about ten. Context is read
    /// like weights: 128 KiB a token with 8 B parameters (Llama 3.1), as the square root of their number.
    pub fn defaults(parameters: Option<u64>, bytes: Option<f64>, worker: DeviceKind) -> Self {
        let parameters = parameters.filter(|n| *n > 0).unwrap_or(8_000_000_000) as f64;
        let bytes = bytes.unwrap_or(2.0);
        let per_byte = if worker == DeviceKind::Cpu { 2.5 } else { 75.0 };
        let fixed = per_byte * bytes;
        let context = 131_072.0 * (parameters / 8e9).sqrt();
        let joules =
            Cost { fixed, prefill: 1.0, decode: 1.0, context: fixed * context / (parameters * bytes) };
        Self::new(Origin::Defaults, joules, &[[0.0; PARTS]; PARTS], DEFAULTS_ERROR, None)
    }

    fn new(
        origin: Origin,
        joules: Cost,
        root: &[[f64; PARTS]; PARTS],
        error: f64,
        seconds: Option<Cost>,
    ) -> Self {
        let mut normal = Normal::new(SEED);
        // Evenly from nothing to twice as much, in pairs around the middle.
        let idle = |d: usize| {
            let off = (d / 2) as f64 / (DRAWS / 2 - 1) as f64;
            IDLE_PART * if d.is_multiple_of(2) { 1.0 + off } else { 1.0 - off }
        };
        let mut drawn = Box::new(Drawn {
            parts: [[0.0; DRAWS]; PARTS],
            idle: std::array::from_fn(idle),
            foreign: [1.0; DRAWS],
        });
        for pair in 0..DRAWS / 2 {
            let z: [f64; PARTS] = std::array::from_fn(|_| normal.next());
            let e: [f64; PARTS] = std::array::from_fn(|_| normal.next());
            let foreign = FOREIGN_ERROR * normal.next();
            for (draw, sign) in [(2 * pair, 1.0), (2 * pair + 1, -1.0)] {
                drawn.foreign[draw] = (sign * foreign).exp();
                for (part, c) in joules.parts().into_iter().enumerate() {
                    let fit: f64 = root[part].iter().zip(z).map(|(l, z)| l * z).sum();
                    drawn.parts[part][draw] = (c + sign * fit).max(0.0) * (sign * error * e[part]).exp();
                }
            }
        }
        Self { origin, joules, seconds, idle: None, drawn }
    }

    /// The same with the power that is drawn when there is nothing to do, known to so many watts at 95 %.
    pub fn with_idle(mut self, power: Watts, bound: Watts) -> Self {
        let mut normal = Normal::new(SEED ^ 1);
        let (power, sd) = (power.get().max(0.0), bound.get().max(0.0) / 1.96);
        self.idle = Some(Watts(power));
        for pair in self.drawn.idle.chunks_mut(2) {
            let z = normal.next() * sd;
            pair[0] = (power + z).max(0.0);
            pair[1] = (power - z).max(0.0);
        }
        self
    }

    /// Coefficients that might be the true ones, and how much more or less might have been done for others.
    pub(crate) fn draw(&self, draw: usize) -> ([f64; PARTS], f64) {
        (std::array::from_fn(|part| self.drawn.parts[part][draw]), self.drawn.foreign[draw])
    }

    /// The part of some joules in some seconds that would have been drawn with nothing to do.
    pub(crate) fn idle_part(&self, energy: f64, seconds: f64) -> f64 {
        let idle = self.idle.map_or(IDLE_PART * energy, |power| power.get() * seconds);
        idle.min(energy).max(0.0)
    }

    /// The same under a draw.
    pub(crate) fn idle_drawn(&self, draw: usize, energy: f64, seconds: f64) -> f64 {
        let of = if self.idle.is_some() { seconds } else { energy };
        (self.drawn.idle[draw] * of).min(energy).max(0.0)
    }
}

/// Bytes of a parameter in a format, as clients call it: `Q4_1`, `bf16`, `fp8`, `awq`. Blocks of quantised weights carry their scales.
pub fn bytes_of(format: &str) -> Option<f64> {
    const FORMATS: &[(&str, f64)] = &[
        ("bf16", 2.0),
        ("f32", 4.0),
        ("fp32", 4.0),
        ("f16", 2.0),
        ("fp16", 2.0),
        ("fp8", 1.0),
        ("int8", 1.0),
        ("q8", 1.06),
        ("q6", 0.82),
        ("q5", 0.69),
        ("mxfp4", 0.53),
        ("nvfp4", 0.56),
        ("int4", 0.56),
        ("awq", 0.56),
        ("gptq", 0.56),
        ("q4", 0.56),
        ("q3", 0.43),
        ("q2", 0.33),
    ];
    let format = format.to_lowercase();
    FORMATS.iter().find(|(name, _)| format.contains(name)).map(|(_, bytes)| *bytes)
}

/// Numbers of a standard normal distribution (Box and Muller).
struct Normal(Pcg64Mcg);

impl Normal {
    fn new(seed: u64) -> Self {
        Self(Pcg64Mcg::seed_from_u64(seed))
    }

    fn next(&mut self) -> f64 {
        let mut uniform = || ((self.0.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()
    }
}

/// Lower triangular `l` with `l·lᵀ = m` (Cholesky); a direction that has no spread has none.
fn root(m: &[[f64; PARTS]; PARTS]) -> [[f64; PARTS]; PARTS] {
    let mut l = [[0.0; PARTS]; PARTS];
    for i in 0..PARTS {
        for j in 0..=i {
            let known: f64 = (0..j).map(|k| l[i][k] * l[j][k]).sum();
            let rest = m[i][j] - known;
            l[i][j] = match i == j {
                true => rest.max(0.0).sqrt(),
                false if l[j][j] > 0.0 => rest / l[j][j],
                false => 0.0,
            };
        }
    }
    l
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_gives_the_matrix_back() {
        let m = [[4.0, 2.0, 0.0, 0.4], [2.0, 5.0, 1.0, 0.0], [0.0, 1.0, 3.0, 0.2], [0.4, 0.0, 0.2, 1.0]];
        let l = root(&m);
        for i in 0..PARTS {
            for j in 0..PARTS {
                let product: f64 = (0..PARTS).map(|k| l[i][k] * l[j][k]).sum();
                assert!((product - m[i][j]).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn formats_are_known_by_the_names_in_use() {
        for (format, bytes) in
            [("Q4_1", 0.56), ("BF16", 2.0), ("q8_0", 1.06), ("fp8_e4m3", 1.0), ("F32", 4.0)]
        {
            assert_eq!(bytes_of(format), Some(bytes), "{format}");
        }
        assert_eq!(bytes_of("ternary"), None);
    }

    #[test]
    fn draws_spread_as_they_are_told() {
        let cost = Cost { fixed: 1.6, prefill: 0.015, decode: 0.012, context: 1e-5 };
        let spread = |w: &Weights, part: usize| {
            let truth = w.joules.parts()[part];
            let squares: f64 = w.drawn.parts[part].iter().map(|c| (c / truth - 1.0).powi(2)).sum();
            (squares / DRAWS as f64).sqrt()
        };
        let known = Weights::calibrated(cost, &[[0.0; PARTS]; PARTS], None);
        let mut covariance = [[0.0; PARTS]; PARTS];
        covariance[1][1] = (0.5f64 * 0.015).powi(2);
        let vague = Weights::calibrated(cost, &covariance, None);
        let defaults = Weights::defaults(Some(8_000_000_000), Some(2.0), DeviceKind::Gpu);
        assert!((0.15..0.28).contains(&spread(&known, 0)), "{}", spread(&known, 0));
        assert!((0.35..0.75).contains(&spread(&vague, 1)), "{}", spread(&vague, 1));
        assert!(spread(&defaults, 2) > 0.5);
        let idle = known.with_idle(Watts(60.0), Watts(6.0));
        let squares: f64 = idle.drawn.idle.iter().map(|w| (w - 60.0).powi(2)).sum();
        assert!((2.0..4.5).contains(&(squares / DRAWS as f64).sqrt()));
    }

    #[test]
    fn defaults_say_that_a_board_shares_more_than_a_cpu() {
        let fixed = |kind| Weights::defaults(Some(8_000_000_000), Some(2.0), kind).joules.fixed;
        assert_eq!((fixed(DeviceKind::Gpu), fixed(DeviceKind::Cpu)), (150.0, 5.0));
        let context = |n| Weights::defaults(Some(n), Some(2.0), DeviceKind::Gpu).joules.context;
        assert!(context(70_000_000_000) < context(8_000_000_000), "a larger model has more weights to read");
    }
}
