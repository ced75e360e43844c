//! A first look at the server: how fast it is, how long a prompt it takes, how many tokens a word has.

use super::Asking;
use super::ladder::longest;
use crate::LabError;
use wattle_core::Exchange;
use wattle_core::calibration::Effort;

/// Words of the two prompts that tell how many tokens a word has.
const FEW: u32 = 32;
const MORE: u32 = 320;
/// Tokens of the answer that tells how fast they come.
const SOME: u32 = 24;
/// Answers that are long enough, and those that must be.
const MOST_TOKENS: f64 = 256.0;
const FEWEST_TOKENS: f64 = 8.0;
/// A round that is a little too short would be a round and then another.
const SPARE: f64 = 1.1;
/// A prompt that takes longer than so many loads is too long to be repeated.
const PATIENCE: f64 = 2.0;
/// A server that takes no longer prompts than this cannot be calibrated.
const SHORTEST_LONGEST: u32 = 128;

/// What was seen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pace {
    /// Tokens of the longest prompt that is asked.
    pub(super) longest: u32,
    /// Tokens of answers to short prompts, and to long ones.
    pub(super) tokens: u32,
    pub(super) long_tokens: u32,
    /// Seconds.
    pub(super) per_prompt_token: f64,
    pub(super) per_token: f64,
}

/// Asks a few questions, for loads of so many seconds.
pub(super) async fn fly(asking: &Asking<'_>, level: Effort, length: f64) -> Result<Pace, LabError> {
    // The first may find connections and caches cold.
    ask(asking, FEW, SOME).await?;
    let few = ask(asking, FEW, SOME).await?;
    let more = ask(asking, MORE, 1).await?;
    let (a, b) = (prompt_tokens(&few)?, prompt_tokens(&more)?);
    let per_word = ((b - a) / f64::from(MORE - FEW)).max(0.1);
    let per_prompt_token = (first(&more)? - first(&few)?).max(1e-9) / (b - a).max(1.0);
    let per_token = match few.tokens.as_slice() {
        [first, .., last] => last.since(*first).get() / (few.tokens.len() - 1) as f64,
        _ => return Err(in_one_piece()),
    }
    .max(1e-6);
    let said = few.usage.completion.unwrap_or(0).max(1) as f64;
    asking.words.borrow_mut().tokens = (a - per_word * f64::from(FEW), per_word);
    let fits = (PATIENCE * length / per_prompt_token).min(f64::from(longest(level)));
    let tokens = |seconds: f64| (seconds / per_token).clamp(FEWEST_TOKENS, MOST_TOKENS) as u32;
    // What stops by itself is asked again and again.
    let most = if said < f64::from(SOME) { said as u32 } else { u32::MAX };
    let long_tokens = tokens(2.0 * length).min(most);
    let longest = longest_taken(asking, (fits as u32).max(SHORTEST_LONGEST), long_tokens).await?;
    Ok(Pace { longest, tokens: tokens(SPARE * length).min(most), long_tokens, per_prompt_token, per_token })
}

/// The longest prompt that the server takes with an answer of so many tokens, at most `wanted`.
async fn longest_taken(asking: &Asking<'_>, wanted: u32, tokens: u32) -> Result<u32, LabError> {
    let mut longest = wanted;
    loop {
        match ask(asking, longest, tokens).await {
            // Some servers cut a prompt off and say nothing but its length.
            Ok(exchange) => return Ok(longest.min(prompt_tokens(&exchange)? as u32).max(1)),
            Err(error) if longest <= SHORTEST_LONGEST => return Err(error),
            Err(_) => longest = (longest / 2).max(SHORTEST_LONGEST),
        }
    }
}

async fn ask(asking: &Asking<'_>, prompt: u32, tokens: u32) -> Result<Exchange, LabError> {
    let (_, exchange) = asking.ask(prompt, tokens).await;
    match exchange.outcome.error() {
        None => Ok(exchange),
        Some(error) => Err(LabError::Calibrate(format!(
            "a request of {prompt} prompt tokens for {tokens} more failed: {error}; see what the server says"
        ))),
    }
}

fn prompt_tokens(exchange: &Exchange) -> Result<f64, LabError> {
    exchange.usage.prompt.map(|n| n as f64).ok_or_else(|| {
        LabError::Calibrate(
            "the server does not say how many tokens a prompt has; let it send usage (stream_options.include_usage), or name a tokenizer with --client-param tokenizer=FILE".into(),
        )
    })
}

/// Seconds to the first token.
fn first(exchange: &Exchange) -> Result<f64, LabError> {
    exchange.first_token.map(|at| at.since(exchange.sent).get()).ok_or_else(in_one_piece)
}

fn in_one_piece() -> LabError {
    LabError::Calibrate(
        "answers come in one piece, so prompts and tokens cannot be told apart; let the server stream".into(),
    )
}
