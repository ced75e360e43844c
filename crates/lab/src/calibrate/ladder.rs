//! What is measured: the rungs of three ladders, how often, in what order, and by what prompts.

use super::pilot::Pace;
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};
use wattle_core::calibration::{Effort, Ladder};

/// Common English words that are one token in most vocabularies.
const WORDS: &str = include_str!("../../data/words.txt");
/// Prompts of the decode ladder.
const SHORT: u32 = 32;
/// No prompt is shorter.
const SHORTEST: u32 = 16;

/// One load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rung {
    pub(super) ladder: Ladder,
    /// Requests at once.
    pub(super) batch: u32,
    /// Tokens of each prompt, and of each answer.
    pub(super) prompt: u32,
    pub(super) tokens: u32,
}

/// Everything that will be measured.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) rungs: Vec<Rung>,
    /// Numbers of rungs, each as often as it is repeated.
    pub(super) order: Vec<usize>,
    /// Seconds that each load lasts, at least.
    pub(super) length: f64,
}

/// Seconds that a load lasts where sensors are fast.
pub(super) const fn usual_length(level: Effort) -> f64 {
    match level {
        Effort::Quick => 0.8,
        Effort::Default => 2.0,
        Effort::Thorough => 4.0,
    }
}

/// The longest prompt worth asking.
pub(super) const fn longest(level: Effort) -> u32 {
    match level {
        Effort::Quick => 2048,
        Effort::Default | Effort::Thorough => 4096,
    }
}

const fn repeats(level: Effort) -> usize {
    match level {
        Effort::Quick => 3,
        Effort::Default => 5,
        Effort::Thorough => 9,
    }
}

impl Plan {
    /// Loads of at most `most` requests at once, for a server of this pace.
    pub(super) fn new(level: Effort, most: u32, length: f64, pace: &Pace, seed: u64) -> Self {
        let longest = f64::from(pace.longest);
        let prompt = |part: f64| ((longest * part) as u32).max(SHORTEST);
        let parts: &[f64] = match level {
            Effort::Quick => &[1.0 / 16.0, 0.25, 1.0],
            Effort::Default => &[1.0 / 32.0, 0.125, 0.25, 0.5, 1.0],
            Effort::Thorough => &[1.0 / 32.0, 1.0 / 16.0, 0.125, 0.25, 0.5, 1.0],
        };
        let rung = |ladder, batch, prompt, tokens| Rung { ladder, batch, prompt, tokens };
        let mut rungs: Vec<Rung> =
            parts.iter().map(|part| rung(Ladder::Prefill, 1, prompt(*part), 1)).collect();
        let short = SHORT.min(pace.longest);
        rungs.extend(batches(level, most).into_iter().map(|n| rung(Ladder::Decode, n, short, pace.tokens)));
        // Enough at once that what they look back at shows beside the iteration, and not so many that prompts take all the time.
        let (few, many) = ((most / 8).clamp(1, 2), (most / 4).clamp(1, 8));
        let context: &[(u32, f64)] = match level {
            Effort::Quick => &[((most / 8).clamp(1, 4), 0.5), ((most / 8).clamp(1, 4), 1.0)],
            _ => &[(many, 0.25), (many, 0.5), (many, 1.0), (few, 0.5), (few, 1.0)],
        };
        rungs.extend(
            context.iter().map(|(n, part)| rung(Ladder::Context, *n, prompt(*part), pace.long_tokens)),
        );
        let mut order: Vec<usize> = (0..rungs.len()).flat_map(|r| vec![r; repeats(level)]).collect();
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        for i in (1..order.len()).rev() {
            order.swap(i, (rng.next_u64() % (i as u64 + 1)) as usize);
        }
        Self { rungs, order, length }
    }

    /// How long it will take, with so much rest around each load.
    pub(super) fn seconds(&self, pace: &Pace, rest: f64) -> f64 {
        let round = |rung: &Rung| {
            f64::from(rung.batch * rung.prompt) * pace.per_prompt_token
                + f64::from(rung.tokens) * pace.per_token
        };
        let load = |rung: &Rung| {
            let round = round(rung).max(1e-4);
            (self.length / round).ceil() * round + rest
        };
        self.order.iter().map(|number| load(&self.rungs[*number])).sum()
    }
}

/// How many at once: 1, 2, 4 and so on; of a quick one the first, a middle and the last.
fn batches(level: Effort, most: u32) -> Vec<u32> {
    let mut all: Vec<u32> = (0..).map(|n| 1 << n).take_while(|n| *n < most).collect();
    all.push(most);
    if level == Effort::Quick && all.len() > 3 {
        all = vec![1, all[all.len() / 2], most];
    }
    all
}

/// Prompts, none of which begins like another.
pub(super) struct Words {
    words: Vec<&'static str>,
    rng: Pcg64Mcg,
    mark: String,
    made: u64,
    /// Tokens that every prompt has, and tokens of a word.
    pub(super) tokens: (f64, f64),
}

impl Words {
    /// Prompts that begin with `mark`, which no other calibration has.
    pub(super) fn new(seed: u64, mark: String) -> Self {
        let words = WORDS.split_ascii_whitespace().collect();
        Self { words, rng: Pcg64Mcg::seed_from_u64(seed), mark, made: 0, tokens: (0.0, 1.0) }
    }

    /// A prompt of about so many tokens.
    pub(super) fn prompt(&mut self, tokens: u32) -> String {
        self.made += 1;
        // The number first: caches know how a prompt begins.
        let mut text = format!("{}-{}", self.made, self.mark);
        let words = ((f64::from(tokens) - self.tokens.0) / self.tokens.1).round().max(1.0) as u64;
        for _ in 1..words {
            text.push(' ');
            text.push_str(self.words[(self.rng.next_u64() % self.words.len() as u64) as usize]);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const PACE: Pace =
        Pace { longest: 4096, tokens: 100, long_tokens: 200, per_prompt_token: 1e-4, per_token: 0.01 };

    #[test]
    fn every_ladder_varies_what_it_is_there_for() {
        for (level, rungs, repeats) in
            [(Effort::Quick, 8, 3), (Effort::Default, 16, 5), (Effort::Thorough, 18, 9)]
        {
            let most = if level == Effort::Thorough { 64 } else { 32 };
            let plan = Plan::new(level, most, 1.0, &PACE, 1);
            assert_eq!((plan.rungs.len(), plan.order.len()), (rungs, rungs * repeats));
            let of = |ladder, f: fn(&Rung) -> u32| {
                plan.rungs.iter().filter(|r| r.ladder == ladder).map(f).collect::<BTreeSet<u32>>()
            };
            assert!(of(Ladder::Prefill, |r| r.prompt).len() >= 3);
            assert!(of(Ladder::Decode, |r| r.batch).len() >= 3);
            assert!(of(Ladder::Decode, |r| r.batch).last() == Some(&most));
            assert!(of(Ladder::Context, |r| r.prompt).len() >= 2);
            assert!(plan.seconds(&PACE, 0.5) > 1.5 * plan.order.len() as f64);
        }
    }

    #[test]
    fn a_seed_gives_the_same_order_again_and_another_another() {
        let order = |seed| Plan::new(Effort::Default, 32, 1.0, &PACE, seed).order;
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
        assert_ne!(order(1), {
            let mut sorted = order(1);
            sorted.sort_unstable();
            sorted
        });
    }

    #[test]
    fn batches_end_with_the_largest_asked_for() {
        assert_eq!(batches(Effort::Default, 32), [1, 2, 4, 8, 16, 32]);
        assert_eq!(batches(Effort::Default, 24), [1, 2, 4, 8, 16, 24]);
        assert_eq!(batches(Effort::Quick, 32), [1, 8, 32]);
        assert_eq!(batches(Effort::Quick, 1), [1]);
    }

    #[test]
    fn prompts_have_the_length_asked_for_and_a_beginning_of_their_own() {
        let mut words = Words::new(1, "mark".into());
        let first = words.prompt(100);
        assert_eq!(first.split(' ').count(), 100);
        assert_ne!(first.split(' ').next(), words.prompt(100).split(' ').next());
        words.tokens = (10.0, 2.0);
        assert_eq!(words.prompt(100).split(' ').count(), 45);
    }
}
