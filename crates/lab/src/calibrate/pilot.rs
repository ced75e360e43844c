//! A first look at the server: how fast it is, how long a prompt it takes, how many tokens a word has.

use super::ladder::longest;
use super::{Asking, LONGEST_WAIT, TRIES, WAIT};
use crate::LabError;
use crate::client::Verdict;
use futures_util::future::join_all;
use wattle_core::calibration::Effort;
use wattle_core::exchange::{FailureClass, Outcome};
use wattle_core::{Exchange, Span};

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
/// So many at once tell whether they are answered together.
const AT_ONCE: u32 = 4;
/// They are answered one after the other if they take so much of the time that they would take one by one …
const SERIAL: f64 = 0.7;
/// … each time that it is tried.
const LOOKS: u32 = 2;
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

/// What the first questions told.
#[derive(Debug)]
pub(super) struct Seen {
    /// Seconds that an answer took, and tokens that it had.
    took: f64,
    said: f64,
    per_prompt_token: f64,
    per_token: f64,
}

impl Seen {
    /// That answers are not as long as they are made to be, and what to do about it.
    pub(super) fn doubt(&self) -> Option<String> {
        (self.said < f64::from(SOME)).then(|| {
            format!(
                "answers end by themselves: {} tokens came where {SOME} were asked for and no fewer allowed, so loads are of short answers, and of other lengths each time; use a server that takes ignore_eos or min_tokens (vLLM, SGLang, llama-server), or see that nothing between cuts answers off",
                self.said
            )
        })
    }
}

/// Asks a few questions.
pub(super) async fn look(asking: &Asking<'_>) -> Result<Seen, LabError> {
    // The first may find connections and caches cold.
    ask(asking, FEW, SOME).await?;
    let few = ask(asking, FEW, SOME).await?;
    let more = ask(asking, MORE, 1).await?;
    let (a, b) = (prompt_tokens(&few)?, prompt_tokens(&more)?);
    let per_word = ((b - a) / f64::from(MORE - FEW)).max(0.1);
    let per_prompt_token = (first(&more)? - first(&few)?).max(1e-9) / (b - a).max(1.0);
    let said = few.usage.completion.unwrap_or(0).max(1) as f64;
    let per_token = match few.tokens.as_slice() {
        [first, .., last] => last.since(*first).get() / (few.tokens.len() - 1) as f64,
        _ if said < FEWEST_TOKENS => return Err(too_short(said)),
        _ => return Err(in_one_piece()),
    }
    .max(1e-6);
    if said < FEWEST_TOKENS {
        return Err(too_short(said));
    }
    asking.words.borrow_mut().tokens = (a - per_word * f64::from(FEW), per_word);
    Ok(Seen { took: few.done.since(few.sent).get(), said, per_prompt_token, per_token })
}

/// Refuses a server that answers one after the other, before anything is measured.
pub(super) async fn check_at_once(asking: &Asking<'_>, most: u32, seen: &Seen) -> Result<(), LabError> {
    let n = most.clamp(2, AT_ONCE);
    for _ in 0..LOOKS {
        let all = join_all((0..n).map(|_| ask(asking, FEW, SOME))).await;
        let all = all.into_iter().collect::<Result<Vec<_>, _>>()?;
        let (began, ended) = (all.iter().map(|e| e.sent).min(), all.iter().map(|e| e.done).max());
        let took = began.zip(ended).map_or(0.0, |(began, ended)| ended.since(began).get());
        if took < SERIAL * f64::from(n) * seen.took || together(&all) {
            return Ok(());
        }
    }
    Err(LabError::Calibrate(format!(
        "the server answers one at a time ({n} requests at once were answered one after the other), so there is nothing to split and the decode ladder would tell nothing; let it take more at once (vLLM --max-num-seqs, llama-server --parallel, OLLAMA_NUM_PARALLEL)"
    )))
}

/// Whether tokens of one came between tokens of another.
fn together(all: &[Exchange]) -> bool {
    let span = |e: &Exchange| Some(Span::new(*e.tokens.first()?, *e.tokens.last()?));
    let mut spans: Vec<Span> = all.iter().filter_map(span).collect();
    spans.sort_by_key(|s| s.start());
    spans.windows(2).any(|pair| pair[1].start() < pair[0].end())
}

/// Gives the server something to do.
pub(super) async fn keep_busy(asking: &Asking<'_>) -> Result<(), LabError> {
    ask(asking, FEW, SOME).await.map(|_| ())
}

/// Decides how long prompts and answers are, for loads of so many seconds.
pub(super) async fn fly(
    asking: &Asking<'_>,
    seen: &Seen,
    level: Effort,
    length: f64,
) -> Result<Pace, LabError> {
    let Seen { said, per_prompt_token, per_token, .. } = *seen;
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
        let exchange = asked(asking, longest, tokens).await;
        if longest > SHORTEST_LONGEST && is_too_long(&exchange.outcome) {
            longest = (longest / 2).max(SHORTEST_LONGEST);
            continue;
        }
        // Some servers cut a prompt off and say nothing but its length.
        let exchange = answered(exchange, longest, tokens)?;
        return Ok(longest.min(prompt_tokens(&exchange)? as u32).max(1));
    }
}

/// Whether a server refused a prompt because of its length: nothing else gets better with a shorter one.
fn is_too_long(outcome: &Outcome) -> bool {
    /// Of these, servers say at least one: "maximum context length", "longer than", "must have less than 1024 tokens", "too large".
    const SAID: [&str; 7] = ["context", "length", "long", "token", "exceed", "too large", "n_ctx"];
    let Outcome::Failed { class, error } = outcome else { return false };
    let error = error.to_ascii_lowercase();
    let about_length = SAID.iter().any(|word| error.contains(word));
    match class {
        FailureClass::Engine => about_length,
        FailureClass::Server => {
            let status = error.strip_prefix("http ").and_then(|rest| rest.get(..3));
            status == Some("413") || (matches!(status, Some("400" | "422")) && about_length)
        }
        _ => false,
    }
}

async fn ask(asking: &Asking<'_>, prompt: u32, tokens: u32) -> Result<Exchange, LabError> {
    answered(asked(asking, prompt, tokens).await, prompt, tokens)
}

/// Asks, and once more if the server does not take it now.
async fn asked(asking: &Asking<'_>, prompt: u32, tokens: u32) -> Exchange {
    let mut tries = 1;
    loop {
        let answer = asking.ask(prompt, tokens).await;
        match answer.verdict {
            Verdict::Again(wait) if tries < TRIES => {
                tokio::time::sleep(wait.unwrap_or(WAIT * tries).min(LONGEST_WAIT)).await;
                tries += 1;
            }
            _ => return answer.exchange,
        }
    }
}

fn answered(exchange: Exchange, prompt: u32, tokens: u32) -> Result<Exchange, LabError> {
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
            "the server does not say how many tokens a prompt has, so what one costs cannot be told; let it send usage in its stream (OpenAI's stream_options.include_usage, which it was asked for)".into(),
        )
    })
}

fn too_short(said: f64) -> LabError {
    LabError::Calibrate(format!(
        "answers end by themselves after {said} tokens, although {SOME} were asked for and no fewer allowed: too few to tell what a token costs; use a server that takes ignore_eos or min_tokens (vLLM, SGLang, llama-server), or see that nothing between cuts answers off"
    ))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refusal_of_length_asks_for_a_shorter_prompt() {
        let failed = |class, error: &str| is_too_long(&Outcome::Failed { class, error: error.into() });
        for said in [
            "HTTP 400: This model's maximum context length is 4096 tokens",
            "HTTP 400: the request exceeds the available context size",
            "HTTP 422: `inputs` must have less than 1024 tokens",
            "HTTP 413: Payload Too Large",
        ] {
            assert!(failed(FailureClass::Server, said), "{said}");
        }
        assert!(failed(FailureClass::Engine, "the prompt is longer than the context"));
        for said in [
            "HTTP 401: invalid token",
            "HTTP 403: no access to this context",
            "HTTP 404: no such model",
            "HTTP 429: too many tokens a minute",
            "HTTP 500: the context is broken",
            "HTTP 400: temperature must not be negative",
        ] {
            assert!(!failed(FailureClass::Server, said), "{said}");
        }
        assert!(!failed(FailureClass::Timeout, "no token for so long"));
        assert!(!failed(FailureClass::Network, "connection reset, too long"));
    }
}
