//! Seeded choice whose outcome never changes between releases, so that a seed in `run.json` names the same items for ever.

use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};

/// The first `count` of `n` things in an order drawn from `seed`, sorted so that the dataset's own order is kept.
pub fn choose(n: usize, count: usize, seed: u64) -> Vec<usize> {
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut all: Vec<usize> = (0..n).collect();
    let count = count.min(n);
    for i in 0..count {
        let j = i + below(&mut rng, (n - i) as u64) as usize;
        all.swap(i, j);
    }
    all.truncate(count);
    all.sort_unstable();
    all
}

/// A uniform number below `n`, without modulo bias.
pub(crate) fn below(rng: &mut impl Rng, n: u64) -> u64 {
    let unbiased = u64::MAX - u64::MAX % n;
    loop {
        let x = rng.next_u64();
        if x < unbiased {
            return x % n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_names_the_same_items_for_ever() {
        assert_eq!(choose(500, 200, 1).len(), 200);
        assert_eq!(choose(500, 5, 1), choose(500, 5, 1));
        assert_ne!(choose(500, 5, 1), choose(500, 5, 2));
        assert_eq!(choose(100, 4, 1), [39, 47, 54, 96]);
    }

    #[test]
    fn every_item_is_as_likely_as_another() {
        let mut hits = [0u32; 20];
        (0..20_000).for_each(|seed| choose(20, 5, seed).into_iter().for_each(|i| hits[i] += 1));
        assert!(hits.iter().all(|h| (4_700..5_300).contains(h)), "{hits:?}");
    }
}
