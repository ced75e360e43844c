//! One request's life. `due` and `sent` are kept apart, so that a client that fell behind shows (coordinated omission).

use crate::time::{Span, Stamp};
use crate::units::Seconds;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Who says something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Whoever set the model up.
    System,
    /// Whoever asks.
    User,
    /// The model.
    Assistant,
}

/// One thing said in a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// By whom.
    pub role: Role,
    /// What.
    pub content: String,
}

/// What was said before a question: the beginning of a conversation, which is kept once for all its questions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct History {
    turns: Arc<[Turn]>,
    length: usize,
}

impl History {
    /// The first `length` turns of a conversation.
    pub fn of(turns: &Arc<[Turn]>, length: usize) -> Self {
        Self { turns: Arc::clone(turns), length: length.min(turns.len()) }
    }
}

impl std::ops::Deref for History {
    type Target = [Turn];

    fn deref(&self) -> &[Turn] {
        &self.turns[..self.length]
    }
}

/// What is asked: the same for every client.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The model, by the name its server knows.
    pub model: Arc<str>,
    /// What the model reads: the last turn is the question.
    pub turns: Vec<Turn>,
    /// At most this many tokens of answer.
    pub max_tokens: u32,
    /// Not fewer tokens either: the model may not stop by itself.
    pub exact: bool,
    /// 0 is greedy.
    pub temperature: f64,
    /// Seed of the sampler.
    pub seed: u64,
}

/// Why a model stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// It said it was done.
    Stop,
    /// It reached the token cap.
    Length,
    /// Anything else a server may say (tool call, content filter).
    Other,
}

impl Finish {
    /// The word used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Other => "other",
        }
    }
}

/// How an exchange ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Outcome {
    /// A whole answer came.
    Ok {
        /// Why it ended.
        finish: Finish,
    },
    /// No whole answer came.
    Failed {
        /// What went wrong.
        class: FailureClass,
        /// The reason, for people.
        error: String,
    },
}

impl Outcome {
    /// Whether a whole answer came.
    pub const fn is_ok(&self) -> bool {
        matches!(self, Outcome::Ok { .. })
    }

    /// The word used in files: `ok`, or the class of the failure.
    pub const fn status(&self) -> &'static str {
        match self {
            Outcome::Ok { .. } => "ok",
            Outcome::Failed { class, .. } => class.name(),
        }
    }

    /// The reason of a failure.
    pub fn error(&self) -> Option<&str> {
        match self {
            Outcome::Ok { .. } => None,
            Outcome::Failed { error, .. } => Some(error),
        }
    }
}

/// What kind of failure it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// The server could not be reached, or the connection broke.
    Network,
    /// It took too long.
    Timeout,
    /// The server answered with an error.
    Server,
    /// The server answered with something that is not an answer.
    Protocol,
    /// The engine itself failed (context overflow, bad model).
    Engine,
    /// The run was interrupted while it was in flight.
    Cancelled,
}

impl FailureClass {
    /// The word used in files.
    pub const fn name(self) -> &'static str {
        match self {
            FailureClass::Network => "network",
            FailureClass::Timeout => "timeout",
            FailureClass::Server => "server",
            FailureClass::Protocol => "protocol",
            FailureClass::Engine => "engine",
            FailureClass::Cancelled => "cancelled",
        }
    }
}

/// Where token counts come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokensFrom {
    /// The engine's own count.
    Usage,
    /// Counted by a tokenizer here.
    Tokenizer,
    /// Counted as pieces of the stream: a lower bound.
    Chunks,
}

impl TokensFrom {
    /// The word used in files.
    pub const fn name(self) -> &'static str {
        match self {
            TokensFrom::Usage => "usage",
            TokensFrom::Tokenizer => "tokenizer",
            TokensFrom::Chunks => "chunks",
        }
    }
}

/// Token counts; what is not known is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt as the engine saw it.
    pub prompt: Option<u64>,
    /// Tokens of the answer, reasoning included.
    pub completion: Option<u64>,
    /// Those of them that were reasoning.
    pub reasoning: Option<u64>,
    /// Prompt tokens answered from a cache.
    pub cached: Option<u64>,
    /// Where the counts come from.
    pub from: Option<TokensFrom>,
}

/// Who dated the bytes of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dated {
    /// The client, when it read them.
    #[default]
    Client,
    /// The kernel, when they came: our own load does not show in them.
    Kernel,
}

impl Dated {
    /// The word used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Dated::Client => "client",
            Dated::Kernel => "kernel",
        }
    }
}

/// One request's life on the client's monotonic clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exchange {
    /// The server's own id of the answer.
    pub response_id: Option<String>,
    /// When it should have been sent.
    #[serde(rename = "due_ns")]
    pub due: Stamp,
    /// When it was sent.
    #[serde(rename = "sent_ns")]
    pub sent: Stamp,
    /// First content or reasoning token.
    #[serde(rename = "first_token_ns")]
    pub first_token: Option<Stamp>,
    /// Every piece of the answer, the first included, as its bytes arrived.
    #[serde(rename = "token_ns")]
    pub tokens: Vec<Stamp>,
    /// When it ended, well or not.
    #[serde(rename = "done_ns")]
    pub done: Stamp,
    /// Who dated its tokens.
    #[serde(default)]
    pub dated: Dated,
    /// How often it was sent; above 1 if the server did not take it at first. The stamps are those of the last time.
    #[serde(default = "once")]
    pub attempts: u32,
    /// Token counts.
    pub usage: Usage,
    /// How it ended.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// What the model said.
    pub answer: String,
    /// What the server itself said about its times, kept as it was (llama.cpp's `timings`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<serde_json::Value>,
}

const fn once() -> u32 {
    1
}

impl Exchange {
    /// One that is due then, of which nothing is known yet; left so, it was cancelled.
    pub fn due(due: Stamp) -> Self {
        Self {
            response_id: None,
            due,
            sent: due,
            first_token: None,
            tokens: Vec::new(),
            done: due,
            dated: Dated::Client,
            attempts: 1,
            usage: Usage::default(),
            outcome: Outcome::Failed { class: FailureClass::Cancelled, error: "interrupted".into() },
            answer: String::new(),
            server: None,
        }
    }

    /// In flight: from sent to done.
    pub fn span(&self) -> Span {
        Span::new(self.sent, self.done)
    }

    /// From due to the first token.
    pub fn ttft(&self) -> Option<Seconds> {
        self.first_token.map(|t| t.since(self.due))
    }

    /// From due to done.
    pub fn latency(&self) -> Seconds {
        self.done.since(self.due)
    }

    /// Mean time per token after the first, by the token count and not by the pieces the stream came in.
    pub fn itl(&self) -> Option<Seconds> {
        let first = self.first_token?;
        // One stamp for many tokens tells nothing about the time between them.
        let [_, .., last] = self.tokens.as_slice() else { return None };
        let after_first = self.usage.completion?.checked_sub(1).filter(|n| *n > 0)?;
        Some(last.since(first) / after_first as f64)
    }
}
