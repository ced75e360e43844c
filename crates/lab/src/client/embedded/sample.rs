//! Chooses the next token from the logits. The same logits and the same seed make
//! the same choice.

/// Chooses tokens: the likeliest at temperature 0, otherwise at random.
///
/// The order is that of vLLM and OpenAI: temperature first, then the `top_k` likeliest tokens, then
/// of those the fewest that together reach `top_p`. (llama.cpp applies the temperature last.)
#[derive(Debug)]
pub(super) struct Sampler {
    temperature: f32,
    top_k: usize,
    top_p: f64,
    random: SplitMix64,
    candidates: Vec<(u32, f64)>,
}

impl Sampler {
    /// A `top_k` of 0 and a `top_p` of 1 keep every token.
    pub(super) fn new(temperature: f32, top_k: usize, top_p: f32, seed: u64) -> Self {
        Self { temperature, top_k, top_p: top_p.into(), random: SplitMix64(seed), candidates: Vec::new() }
    }

    /// The next token for logits that are finite and not empty.
    pub(super) fn sample(&mut self, logits: &[f32]) -> u32 {
        if self.temperature > 0.0 { self.draw(logits) } else { likeliest(logits) }
    }

    fn draw(&mut self, logits: &[f32]) -> u32 {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| f64::from((logit - max) / self.temperature).exp();
        self.candidates.clear();
        self.candidates.extend((0..).zip(logits.iter().map(|logit| weight(*logit))));
        self.candidates.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if self.top_k > 0 {
            self.candidates.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            let enough = self.top_p * total(&self.candidates);
            let kept = 1 + reach(&self.candidates, enough);
            self.candidates.truncate(kept);
        }
        let point = self.random.fraction() * total(&self.candidates);
        self.candidates[reach(&self.candidates, point)].0
    }
}

/// The likeliest token; of equals the first.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, logit) in (0..).zip(logits) {
        if *logit > best.1 {
            best = (id, *logit);
        }
    }
    best.0
}

fn total(candidates: &[(u32, f64)]) -> f64 {
    candidates.iter().map(|(_, weight)| weight).sum()
}

/// The index at which the running sum of the weights reaches `point`, or the last.
fn reach(candidates: &[(u32, f64)], point: f64) -> usize {
    let mut sum = 0.0;
    let index = candidates.iter().position(|(_, weight)| {
        sum += weight;
        sum >= point
    });
    index.unwrap_or(candidates.len().saturating_sub(1))
}

/// Steele, Lea and Flood's generator, <https://doi.org/10.1145/2660193.2660195>: eight bytes of
/// state, any seed is good, and its stream cannot change under us with a dependency's version.
#[derive(Debug, Clone)]
pub(super) struct SplitMix64(pub(super) u64);

impl SplitMix64 {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1), with all of an f64's 53 bits.
    pub(super) fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 * 2.0_f64.powi(-53)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probabilities 0.5, 0.125, 0.25, 0.125 at temperature 1.
    fn logits() -> [f32; 4] {
        [0.5, 0.125, 0.25, 0.125].map(f32::ln)
    }

    fn shares(mut sampler: Sampler) -> [f64; 4] {
        const DRAWS: u32 = 40_000;
        let mut counts = [0; 4];
        for _ in 0..DRAWS {
            counts[sampler.sample(&logits()) as usize] += 1;
        }
        counts.map(|count| f64::from(count) / f64::from(DRAWS))
    }

    /// Five standard deviations of a share among 40,000 draws are at most 0.0125.
    fn assert_shares(sampler: Sampler, expected: [f64; 4]) {
        let shares = shares(sampler);
        let close =
            shares.iter().zip(expected).all(|(a, b)| (a - b).abs() < 0.0125 && (b > 0.0 || *a == 0.0));
        assert!(close, "{shares:?} is not {expected:?}");
    }

    #[test]
    fn at_temperature_zero_the_first_of_the_likeliest_wins() {
        for temperature in [0.0, -1.0, f32::NAN] {
            assert_eq!(Sampler::new(temperature, 0, 1.0, 1).sample(&[-3.0, 2.0, 1.0, 2.0]), 1);
        }
    }

    #[test]
    fn samples_follow_the_distribution() {
        assert_shares(Sampler::new(1.0, 0, 1.0, 1), [0.5, 0.125, 0.25, 0.125]);
    }

    #[test]
    fn temperature_sharpens_and_flattens() {
        // At 1/2 the probabilities are squared: 16, 1, 4 and 1 parts of 22.
        assert_shares(Sampler::new(0.5, 0, 1.0, 1), [16.0 / 22.0, 1.0 / 22.0, 4.0 / 22.0, 1.0 / 22.0]);
        assert_shares(Sampler::new(f32::INFINITY, 0, 1.0, 1), [0.25; 4]);
        assert_shares(Sampler::new(f32::MIN_POSITIVE, 0, 1.0, 1), [1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn top_k_keeps_the_likeliest() {
        assert_shares(Sampler::new(1.0, 2, 1.0, 1), [2.0 / 3.0, 0.0, 1.0 / 3.0, 0.0]);
        assert_shares(Sampler::new(1.0, 99, 1.0, 1), [0.5, 0.125, 0.25, 0.125]);
    }

    #[test]
    fn top_p_keeps_the_fewest_that_reach_it() {
        assert_shares(Sampler::new(1.0, 0, 0.7, 1), [2.0 / 3.0, 0.0, 1.0 / 3.0, 0.0]);
        assert_shares(Sampler::new(1.0, 0, 0.8, 1), [4.0 / 7.0, 1.0 / 7.0, 2.0 / 7.0, 0.0]);
        assert_shares(Sampler::new(1.0, 0, 0.0, 1), [1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_seed_makes_one_sequence() {
        let sequence = |seed| {
            let mut sampler = Sampler::new(1.0, 0, 1.0, seed);
            (0..50).map(|_| sampler.sample(&logits())).collect::<Vec<_>>()
        };
        assert_eq!(sequence(5), sequence(5));
        assert_ne!(sequence(5), sequence(6));
    }

    #[test]
    fn the_generator_is_splitmix64() {
        // The first outputs for seed 1234567 of Vigna's splitmix64.c.
        let mut random = SplitMix64(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }
}
