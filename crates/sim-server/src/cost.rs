//! What one iteration of the engine costs, and how much of it each request in it causes.
//!
//! As long as there are no [`Quirks`], cost is linear in prompt tokens, decoding requests and context. Whatever they bend, each
//! request's own part stays a closed form, so that what a model that does not know them gets wrong is known to the joule.

use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};
use serde::Deserialize;

/// At this many tokens context costs the same with any exponent: quirks bend the cost of short and long ones, and leave that of
/// common ones.
const COMMON_CONTEXT: f64 = 1000.0;

/// What an iteration costs. A part that is not given costs nothing.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// Each iteration.
    #[serde(default)]
    pub fixed: f64,
    /// Each prompt token worked off.
    #[serde(default)]
    pub prefill: f64,
    /// Each decoding request.
    #[serde(default)]
    pub decode: f64,
    /// Each token of context of a decoding request.
    #[serde(default)]
    pub context: f64,
}

/// Where an engine is not linear, of time as of energy. The default bends nothing.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Quirks {
    /// The prompt token at position x, from 0, costs `prefill·(1 + x·attention)`.
    pub attention: f64,
    /// D decoding requests cost `decode·D^batch_exponent`, each the same part of it: the Shapley value, as they are alike.
    pub batch_exponent: f64,
    /// K tokens of a request's context cost it `context·1000·(K/1000)^context_exponent`.
    pub context_exponent: f64,
    /// All joules of an iteration on top of idle power are drawn evenly from (1 ± noise) times themselves, 0 to 1; its time is not.
    pub noise: f64,
    /// Of the noise.
    pub seed: u64,
}

impl Default for Quirks {
    fn default() -> Self {
        Self { attention: 0.0, batch_exponent: 1.0, context_exponent: 1.0, noise: 0.0, seed: 1 }
    }
}

/// What is done for one request in one iteration, or for all together, in the units that costs are per.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Work {
    pub(crate) prefill: f64,
    pub(crate) decoding: f64,
    pub(crate) context: f64,
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, more: Work) {
        self.prefill += more.prefill;
        self.decoding += more.decoding;
        self.context += more.context;
    }
}

impl Cost {
    /// Of a whole iteration.
    pub(crate) fn of(&self, work: Work) -> f64 {
        self.fixed + self.prefill_of(work) + self.decode_of(work)
    }

    /// For prompts.
    pub(crate) fn prefill_of(&self, work: Work) -> f64 {
        self.prefill * work.prefill
    }

    /// For tokens and the context they look back at.
    pub(crate) fn decode_of(&self, work: Work) -> f64 {
        self.decode * work.decoding + self.context * work.context
    }
}

impl Quirks {
    /// The work of `tokens` prompt tokens that come after `before` others of the same prompt.
    pub(crate) fn prefill(&self, before: u64, tokens: u64) -> Work {
        let (before, tokens) = (before as f64, tokens as f64);
        let positions = tokens * before + tokens * (tokens - 1.0) / 2.0;
        Work { prefill: tokens + self.attention * positions, ..Work::default() }
    }

    /// The work of the next token of one of `decoding` requests, which looks back at `context` tokens.
    pub(crate) fn decode(&self, decoding: usize, context: u64) -> Work {
        Work {
            prefill: 0.0,
            decoding: (decoding as f64).powf(self.batch_exponent - 1.0),
            context: context as f64 * (context as f64 / COMMON_CONTEXT).powf(self.context_exponent - 1.0),
        }
    }
}

/// By how much the joules of each iteration differ from what they should be.
#[derive(Debug)]
pub(crate) struct Noise {
    amount: f64,
    rng: Pcg64Mcg,
}

impl Noise {
    /// The same quirks give the same factors.
    pub(crate) fn new(quirks: &Quirks) -> Noise {
        Noise { amount: quirks.noise.clamp(0.0, 1.0), rng: Pcg64Mcg::seed_from_u64(quirks.seed) }
    }

    /// The factor of the next iteration.
    pub(crate) fn next(&mut self) -> f64 {
        let even = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        1.0 + self.amount * (2.0 * even - 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_quirks_work_is_counted() {
        let plain = Quirks::default();
        assert_eq!(plain.prefill(2048, 952), Work { prefill: 952.0, ..Work::default() });
        assert_eq!(plain.decode(64, 5001), Work { prefill: 0.0, decoding: 1.0, context: 5001.0 });
        assert_eq!(Noise::new(&plain).next(), 1.0);
    }

    #[test]
    fn a_prompt_costs_the_same_however_it_is_cut() {
        let quirks = Quirks { attention: 1e-3, ..Quirks::default() };
        let whole = quirks.prefill(0, 3000).prefill;
        let mut pieces = quirks.prefill(0, 2048);
        pieces += quirks.prefill(2048, 952);
        let each: f64 = (0..3000).map(|x| 1.0 + f64::from(x) * 1e-3).sum();
        assert!(
            (whole - each).abs() < 1e-6 && (pieces.prefill - each).abs() < 1e-6,
            "{whole} {pieces:?} {each}"
        );
    }

    #[test]
    fn exponents_bend_batches_and_contexts() {
        let quirks = Quirks { batch_exponent: 0.5, context_exponent: 2.0, ..Quirks::default() };
        let work = quirks.decode(16, 1000);
        assert_eq!((16.0 * work.decoding, work.context), (4.0, 1000.0));
        assert_eq!(quirks.decode(1, 3000), Work { prefill: 0.0, decoding: 1.0, context: 9000.0 });
    }

    #[test]
    fn noise_is_even_around_one_and_repeats() {
        let quirks = Quirks { noise: 0.25, seed: 7, ..Quirks::default() };
        let draws = || {
            let mut noise = Noise::new(&quirks);
            (0..10_000).map(|_| noise.next()).collect::<Vec<_>>()
        };
        let all = draws();
        assert_eq!(all, draws());
        assert!(all.iter().all(|f| (0.75..=1.25).contains(f)));
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        assert!((mean - 1.0).abs() < 0.01, "{mean}");
    }
}
