//! How fast prompts are worked off, iteration by iteration, where it is calibrated what an iteration takes.

use crate::cost::Cost;
use crate::time::Stamp;
use std::collections::VecDeque;

/// Iterations as one request that decodes shows them, and the prompt tokens that made each as long as it was.
#[derive(Debug)]
pub(super) struct Pace {
    /// Ends of iterations in order, and the prompt tokens worked off since the one before.
    iterations: Vec<(Stamp, f64)>,
    seconds: Cost,
}

impl Pace {
    /// From when pieces came to a request, `from` on; so many decode at once and look back at so much together.
    pub(super) fn new(
        seconds: Cost,
        from: Stamp,
        beats: &VecDeque<Stamp>,
        decoding: f64,
        context: f64,
    ) -> Self {
        let without = seconds.fixed + seconds.decode * decoding + seconds.context * context;
        let mut last = from;
        let iterations = beats.iter().map(|beat| {
            let longer = beat.since(last).get() - without;
            last = *beat;
            (last, if seconds.prefill > 0.0 { (longer / seconds.prefill).max(0.0) } else { 0.0 })
        });
        Self { iterations: iterations.collect(), seconds }
    }

    /// When work on a prompt of so many tokens began that ended at `first`.
    pub(super) fn back_from(&self, first: Stamp, mut tokens: f64) -> Stamp {
        // The beats of one request and the first token of another are of one moment, give or take the network.
        let upto =
            self.iterations.partition_point(|(end, _)| *end <= first.plus_nanos(super::flight::TOGETHER_NS));
        for i in (1..upto).rev() {
            tokens -= self.iterations[i].1;
            if tokens <= 0.0 {
                return self.iterations[i - 1].0;
            }
        }
        // Before all that was seen: as fast as alone.
        let seen = if upto > 0 { self.iterations[0].0.min(first) } else { first };
        seen.minus_nanos(((self.seconds.fixed + self.seconds.prefill * tokens) * 1e9) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Stamp {
        Stamp::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn a_prompt_reaches_back_over_the_iterations_that_it_made_long() {
        let seconds = Cost { fixed: 0.01, prefill: 1e-4, decode: 0.0, context: 0.0 };
        // Iterations of 10, 10, 110, 60 and 10 ms: 1000 and 500 prompt tokens.
        let beats: VecDeque<Stamp> = [110, 120, 230, 290, 300].map(at).into();
        let pace = Pace::new(seconds, at(100), &beats, 1.0, 0.0);
        assert_eq!(pace.back_from(at(290), 400.0), at(230));
        assert_eq!(pace.back_from(at(290), 1400.0), at(120));
        assert_eq!(
            pace.back_from(at(290), 2500.0),
            at(110 - 10 - 100),
            "what was not seen goes as fast as alone"
        );
    }
}
