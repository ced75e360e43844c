//! What is not known of a request while it is in flight, guessed from those that have ended.

use crate::exchange::{Exchange, TokensFrom};
use crate::wire::timings;

/// Tokens of English text are about four bytes long; holds until a first answer tells.
const TOKENS_PER_BYTE: f64 = 0.25;

/// Of what was learned, so much is kept with each further request: the last few hundred count.
const KEPT: f64 = 0.995;
/// No prompt has more tokens than bytes, but for what a template or the user's own words to the model add.
const MOST_ADDED: f64 = 16_384.0;
/// No piece holds more tokens.
const MOST_PER_PIECE: f64 = 256.0;

/// What ended requests teach.
#[derive(Debug, Clone, Default)]
pub(super) struct Guess {
    /// Of prompts: how many, bytes, tokens, squares of bytes, bytes × tokens.
    prompts: [f64; 5],
    /// Prompt tokens worked off, and all of them.
    worked: [f64; 2],
    /// Tokens and the pieces in which they came.
    answers: [f64; 2],
    /// What engines say themselves: seconds of prefill, prompt tokens worked off.
    engine: [f64; 2],
    /// What was seen: seconds from the start of the work on a prompt to the first token, tokens.
    seen: [f64; 2],
}

impl Guess {
    /// Prompt tokens to be worked off for a prompt of so many bytes.
    pub(super) fn prompt(&self, bytes: f64) -> f64 {
        let [n, x, y, xx, xy] = self.prompts;
        if x <= 0.0 {
            return bytes * TOKENS_PER_BYTE;
        }
        // A line, because templates add the same to every prompt; a ratio, where all are alike.
        let (spread, slope) = (n * xx - x * x, n * xy - x * y);
        let guess = match spread > 1e-3 * x * x && slope > 0.0 {
            true => y / n + slope / spread * (bytes - x / n),
            false => bytes * y / x,
        };
        let [worked, all] = self.worked;
        let part = if all > 0.0 { worked / all } else { 1.0 };
        (guess * part).clamp(1.0, bytes + MOST_ADDED)
    }

    /// Tokens in a piece of an answer.
    pub(super) fn per_piece(&self) -> f64 {
        let [tokens, pieces] = self.answers;
        if pieces > 0.0 { tokens / pieces } else { 1.0 }
    }

    /// Seconds of work for a prompt token, as the engine says.
    pub(super) fn engine_pace(&self) -> Option<f64> {
        let [seconds, tokens] = self.engine;
        (tokens > 0.0).then(|| seconds / tokens)
    }

    /// The same, or as it was seen.
    pub(super) fn pace(&self) -> Option<f64> {
        let [seconds, tokens] = self.seen;
        self.engine_pace().or((tokens > 0.0 && seconds > 0.0).then(|| seconds / tokens))
    }

    /// Work on a prompt of so many tokens took so long.
    pub(super) fn prefilled(&mut self, seconds: f64, tokens: f64) {
        add(&mut self.seen, [seconds, tokens]);
    }

    /// Takes in one that ended; its prompt had so many bytes. How many prompt tokens were worked off, if it says and that can be.
    pub(super) fn learn(&mut self, exchange: &Exchange, bytes: f64) -> Option<f64> {
        let usage = exchange.usage;
        let told = exchange.server.as_ref();
        let counted = matches!(usage.from, Some(TokensFrom::Usage | TokensFrom::Tokenizer));
        let pieces = exchange.tokens.len().saturating_sub(1) as f64;
        let tokens = usage.completion.map_or(0.0, |n| n as f64 - 1.0);
        if counted && tokens > 0.0 && pieces > 0.0 && tokens <= pieces * MOST_PER_PIECE {
            add(&mut self.answers, [tokens, pieces]);
        }
        let prompt = usage.prompt.map(|n| n as f64).filter(|n| *n <= bytes + MOST_ADDED)?;
        let cached = usage.cached.map_or(0.0, |n| n as f64);
        let worked = told.and_then(timings::processed_tokens).map_or(prompt - cached, |n| n as f64);
        let worked = worked.clamp(1.0, prompt.max(1.0));
        if let Some(seconds) = told.and_then(timings::prefill_seconds).filter(|s| *s > 0.0) {
            add(&mut self.engine, [seconds, worked]);
        }
        add(&mut self.worked, [worked, prompt]);
        add(&mut self.prompts, [1.0, bytes, prompt, bytes * bytes, bytes * prompt]);
        Some(worked)
    }
}

fn add<const N: usize>(sums: &mut [f64; N], row: [f64; N]) {
    sums.iter_mut().zip(row).for_each(|(sum, x)| *sum = *sum * KEPT + x);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::Usage;
    use crate::time::Stamp;

    fn ended(prompt: u64, completion: u64, pieces: usize) -> Exchange {
        Exchange {
            usage: Usage {
                prompt: Some(prompt),
                completion: Some(completion),
                from: Some(TokensFrom::Usage),
                ..Usage::default()
            },
            tokens: vec![Stamp::from_nanos(1); pieces],
            ..Exchange::due(Stamp::from_nanos(0))
        }
    }

    #[test]
    fn prompts_are_guessed_with_what_a_template_adds() {
        let mut guess = Guess::default();
        assert_eq!(guess.prompt(400.0), 100.0);
        guess.learn(&ended(130, 1, 1), 400.0);
        assert_eq!(guess.prompt(400.0), 130.0);
        guess.learn(&ended(1030, 1, 1), 4000.0);
        assert!((guess.prompt(2000.0) - 530.0).abs() < 1e-6);
    }

    #[test]
    fn what_was_in_a_cache_is_no_work_and_does_not_turn_the_line() {
        let mut guess = Guess::default();
        // Later turns of conversations: longer, and nearly all of it known.
        for i in 1..=20u64 {
            let mut turn = ended(i * 200, 10, 10);
            turn.usage.cached = Some(i * 200 - 50);
            assert_eq!(guess.learn(&turn, (i * 800) as f64), Some(50.0));
        }
        let fresh = guess.prompt(16_000.0);
        assert!((50.0..1000.0).contains(&fresh), "{fresh}");
    }

    #[test]
    fn numbers_that_cannot_be_teach_nothing() {
        let mut guess = Guess::default();
        guess.learn(&ended(100, 10, 10), 400.0);
        assert_eq!(guess.learn(&ended(u64::MAX, u64::MAX, 10), 400.0), None);
        assert_eq!((guess.prompt(400.0), guess.per_piece()), (100.0, 1.0));
    }

    #[test]
    fn several_tokens_in_a_piece_are_several_tokens() {
        let mut guess = Guess::default();
        assert_eq!(guess.per_piece(), 1.0);
        guess.learn(&ended(10, 61, 31), 40.0);
        assert_eq!(guess.per_piece(), 2.0);
    }
}
