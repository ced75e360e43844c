//! How long prompts and answers are, in tokens: a number, or a distribution that one is drawn from.

use crate::arrival::normal;
use crate::shuffle::below;
use rand_pcg::Pcg64Mcg;
use std::str::FromStr;

/// No model reads more at once (Llama 4 Scout, 2025, is said to read 10 million tokens); it also bounds the tail of a distribution.
pub const LONGEST: u32 = 10_000_000;

/// Lengths, each from 1 to [`LONGEST`] tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lengths {
    shape: Shape,
    min: u32,
    max: u32,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    /// Every length from `min` to `max` is as likely as another.
    Uniform,
    Normal {
        mean: f64,
        sd: f64,
    },
    LogNormal {
        median: f64,
        sigma: f64,
    },
}

/// Text that is no [`Lengths`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{text}\" is not a length: {why}; write 512, uniform:100:900 (least, most), normal:512:64 (mean, standard deviation) or lognormal:512:0.6 \
     (median, sigma of the logarithm), the last two also with :MIN:MAX at the end"
)]
pub struct NotLengths {
    text: String,
    why: String,
}

impl Lengths {
    /// Always the same.
    pub const fn fixed(tokens: u32) -> Self {
        Self { shape: Shape::Uniform, min: tokens, max: tokens }
    }

    /// The next length.
    pub fn draw(&self, rng: &mut Pcg64Mcg) -> u32 {
        let drawn = match self.shape {
            Shape::Uniform if self.min == self.max => return self.min,
            Shape::Uniform => {
                // Both ends are at most LONGEST, so the number of lengths fits, and so does the sum.
                return self.min + below(rng, u64::from(self.max - self.min) + 1) as u32;
            }
            Shape::Normal { mean, sd } => mean + sd * normal(rng),
            Shape::LogNormal { median, sigma } => median * (sigma * normal(rng)).exp(),
        };
        // A cast from a float saturates, and the clamp does the rest.
        (drawn.round() as u32).clamp(self.min, self.max)
    }
}

impl FromStr for Lengths {
    type Err = NotLengths;

    fn from_str(text: &str) -> Result<Self, NotLengths> {
        let (name, rest) = text.trim().split_once(':').unwrap_or((text.trim(), ""));
        let fields: Vec<&str> = if rest.is_empty() { Vec::new() } else { rest.split(':').collect() };
        let lengths = match (name, fields.as_slice()) {
            ("uniform", [min, max]) => {
                range(min, max).map(|(min, max)| Self { shape: Shape::Uniform, min, max })
            }
            ("normal", [mean, sd, clamp @ ..]) => {
                spread(mean, sd, clamp, |mean, sd| Shape::Normal { mean, sd })
            }
            ("lognormal", [median, sigma, clamp @ ..]) => {
                spread(median, sigma, clamp, |median, sigma| Shape::LogNormal { median, sigma })
            }
            ("uniform" | "normal" | "lognormal", _) => Err(format!("{name} needs two numbers")),
            (number, []) => tokens(number).map(Self::fixed),
            _ => Err(format!("there is no distribution \"{name}\"")),
        };
        lengths.map_err(|why| NotLengths { text: text.to_owned(), why })
    }
}

fn spread(
    middle: &str,
    width: &str,
    clamp: &[&str],
    shape: impl Fn(f64, f64) -> Shape,
) -> Result<Lengths, String> {
    let middle = f64::from(tokens(middle)?);
    let width = width.trim().parse::<f64>().ok().filter(|w| w.is_finite() && *w >= 0.0);
    let width = width.ok_or("its second number must be 0 or more")?;
    let (min, max) = match clamp {
        [] => (1, LONGEST),
        [min, max] => range(min, max)?,
        _ => return Err("the clamp at its end needs a least and a greatest length".into()),
    };
    Ok(Lengths { shape: shape(middle, width), min, max })
}

fn range(min: &str, max: &str) -> Result<(u32, u32), String> {
    let (min, max) = (tokens(min)?, tokens(max)?);
    if min > max {
        return Err(format!("{min} is more than {max}"));
    }
    Ok((min, max))
}

fn tokens(text: &str) -> Result<u32, String> {
    let number = text.trim().parse::<u32>().ok().filter(|n| (1..=LONGEST).contains(n));
    number.ok_or_else(|| format!("\"{text}\" is not a whole number from 1 to {LONGEST}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_pcg::rand_core::SeedableRng;

    fn drawn(text: &str, seed: u64) -> Vec<u32> {
        let lengths: Lengths = text.parse().unwrap();
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        (0..50_000).map(|_| lengths.draw(&mut rng)).collect()
    }

    /// Mean and standard deviation.
    fn moments(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
        let n = values.clone().count() as f64;
        let mean = values.clone().sum::<f64>() / n;
        (mean, (values.map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt())
    }

    #[test]
    fn lengths_have_the_middle_and_the_width_they_should() {
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 0.02;
        assert!(drawn(" 512 ", 1).iter().all(|l| *l == 512));
        let (mean, sd) = moments(drawn("uniform:100:900", 1).into_iter().map(f64::from));
        assert!(near(mean, 500.0) && near(sd, 800.0 / 12f64.sqrt()), "{mean} {sd}");
        let (mean, sd) = moments(drawn("normal:512:64", 1).into_iter().map(f64::from));
        assert!(near(mean, 512.0) && near(sd, 64.0), "{mean} {sd}");
        let (mean, sd) = moments(drawn("lognormal:512:0.6", 1).into_iter().map(|l| f64::from(l).ln()));
        assert!(near(mean, 512f64.ln()) && near(sd, 0.6), "{mean} {sd}");
    }

    #[test]
    fn the_ends_of_a_range_are_drawn_and_nothing_beyond() {
        for text in ["uniform:3:9", "normal:6:50:3:9", "lognormal:6:4:3:9"] {
            let all = drawn(text, 2);
            assert_eq!((all.iter().min(), all.iter().max()), (Some(&3), Some(&9)), "{text}");
        }
    }

    #[test]
    fn no_length_is_0_or_absurd() {
        for text in ["normal:1:1000", "lognormal:1:9", "uniform:1:2", "lognormal:10000000:1e300"] {
            assert!(drawn(text, 3).iter().all(|l| (1..=LONGEST).contains(l)), "{text}");
        }
    }

    #[test]
    fn one_seed_gives_one_sequence() {
        for text in ["uniform:1:1000", "normal:500:90", "lognormal:500:1"] {
            assert_eq!(drawn(text, 1), drawn(text, 1), "{text}");
            assert_ne!(drawn(text, 1), drawn(text, 2), "{text}");
        }
    }

    #[test]
    fn a_seed_names_the_same_lengths_for_ever() {
        let first = |text: &str| drawn(text, 1)[..4].to_vec();
        assert_eq!(first("uniform:1:1000"), [940, 800, 793, 981]);
        assert_eq!(first("normal:500:90"), [532, 484, 381, 492]);
    }

    #[test]
    fn what_is_no_length_is_told_with_what_would_be_one() {
        for (text, why) in [
            ("", "\"\" is not a whole number"),
            ("0", "\"0\" is not a whole number from 1"),
            ("-5", "\"-5\" is not a whole number"),
            ("1.5", "\"1.5\" is not a whole number"),
            ("20000000", "from 1 to 10000000"),
            ("uniform:9:3", "9 is more than 3"),
            ("uniform:9", "uniform needs two numbers"),
            ("normal", "normal needs two numbers"),
            ("normal:5:-1", "its second number must be 0 or more"),
            ("normal:5:nan", "its second number must be 0 or more"),
            ("normal:5:1:2", "needs a least and a greatest"),
            ("zipf:1:2", "there is no distribution \"zipf\""),
        ] {
            let error = text.parse::<Lengths>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("write 512, uniform:100:900"), "{text}: {error}");
        }
    }
}
