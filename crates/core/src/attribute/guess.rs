//! What is not known of a request while it is in flight, guessed from those that have ended.

use crate::exchange::Exchange;
use crate::wire::timings;

/// Tokens of English text are about four bytes long; holds until a first answer tells.
const TOKENS_PER_BYTE: f64 = 0.25;

/// What ended requests teach.
#[derive(Debug, Clone, Default)]
pub(super) struct Guess {
    /// Of prompts: how many, bytes, tokens, squares of bytes, bytes × tokens.
    prompts: [f64; 5],
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
        let guess = match spread > 1e-3 * x * x {
            true => y / n + slope / spread * (bytes - x / n),
            false => bytes * y / x,
        };
        guess.max(1.0)
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
        self.seen[0] += seconds;
        self.seen[1] += tokens;
    }

    /// Takes in one that ended; its prompt had so many bytes. How many prompt tokens were worked off, if it says.
    pub(super) fn learn(&mut self, exchange: &Exchange, bytes: f64) -> Option<f64> {
        let usage = exchange.usage;
        let told = exchange.server.as_ref();
        if let Some((completion, pieces)) = usage.completion.zip(exchange.tokens.len().checked_sub(1))
            && completion > 0
            && pieces > 0
        {
            self.answers[0] += (completion - 1) as f64;
            self.answers[1] += pieces as f64;
        }
        let worked = told
            .and_then(timings::processed_tokens)
            .map(|n| n as f64)
            .or_else(|| Some((usage.prompt? as f64 - usage.cached.unwrap_or(0) as f64).max(1.0)))?;
        if let Some(seconds) = told.and_then(timings::prefill_seconds).filter(|s| *s > 0.0) {
            self.engine[0] += seconds;
            self.engine[1] += worked;
        }
        let row = [1.0, bytes, worked, bytes * bytes, bytes * worked];
        self.prompts.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        Some(worked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::Usage;
    use crate::time::Stamp;

    fn ended(prompt: u64, completion: u64, pieces: usize) -> Exchange {
        Exchange {
            usage: Usage { prompt: Some(prompt), completion: Some(completion), ..Usage::default() },
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
        assert!((guess.prompt(2000.0) - 530.0).abs() < 1e-9);
    }

    #[test]
    fn several_tokens_in_a_piece_are_several_tokens() {
        let mut guess = Guess::default();
        assert_eq!(guess.per_piece(), 1.0);
        guess.learn(&ended(10, 61, 31), 40.0);
        assert_eq!(guess.per_piece(), 2.0);
    }
}
