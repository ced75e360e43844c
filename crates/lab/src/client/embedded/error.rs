//! What can go wrong in the embedded engine. Every message says what, where and the way out.

use std::fmt;

/// An error of the embedded engine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineError {
    /// The bytes are not a whole GGUF file.
    Malformed {
        /// What was expected, or found instead.
        what: String,
        /// Offset in the file, in bytes.
        at: usize,
    },
    /// A metadata value is missing, of the wrong type or out of range.
    Metadata {
        /// The GGUF key.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor is missing, of the wrong shape or in a format that this engine has no kernel for.
    Tensor {
        /// The tensor's name in the file.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The vocabulary has tokens that stand for more than one byte.
    NotByteLevel {
        /// How many tokens the vocabulary has.
        tokens: usize,
    },
    /// More tokens than the context holds.
    ContextFull {
        /// Tokens that the model can hold.
        context: usize,
        /// Tokens that it was asked to hold.
        needed: usize,
    },
    /// A token id outside the vocabulary.
    UnknownToken {
        /// The id.
        id: u32,
        /// How many tokens the vocabulary has.
        tokens: usize,
    },
    /// Logits were asked of a session that has seen no token.
    NothingAbsorbed,
    /// The model computed a logit that is not a finite number.
    NotFinite {
        /// How many tokens the session had seen.
        position: usize,
    },
}

impl EngineError {
    pub(super) fn malformed(what: impl Into<String>, at: usize) -> Self {
        Self::Malformed { what: what.into(), at }
    }

    pub(super) fn metadata(key: &str, problem: impl Into<String>) -> Self {
        Self::Metadata { key: key.to_owned(), problem: problem.into() }
    }

    pub(super) fn tensor(name: &str, problem: impl Into<String>) -> Self {
        Self::Tensor { name: name.to_owned(), problem: problem.into() }
    }
}

impl fmt::Display for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed { what, at } => {
                write!(f, "not a whole GGUF file: {what} at byte {at}; fetch or convert the model again")
            }
            Self::Metadata { key, problem } => {
                write!(f, "GGUF metadata {key} {problem}; {CONVERT}, or run this model on a server")
            }
            Self::Tensor { name, problem } => {
                write!(f, "GGUF tensor {name} {problem}; {CONVERT}, or run this model on a server")
            }
            Self::NotByteLevel { tokens } => write!(
                f,
                "the model's vocabulary of {tokens} tokens is not byte-level, the embedded engine \
                 has no tokenizer for it; run this model on a server such as llama-server or vLLM"
            ),
            Self::ContextFull { context, needed } => {
                write!(f, "{needed} tokens do not fit the model's context of {context}; shorten the prompt")
            }
            Self::UnknownToken { id, tokens } => {
                write!(f, "token {id} is outside the vocabulary of {tokens}; encode with this model's Vocab")
            }
            Self::NothingAbsorbed => {
                write!(f, "the session has seen no token, so there are no logits; prefill it first")
            }
            Self::NotFinite { position } => write!(
                f,
                "the model computed a logit that is not finite after {position} tokens: its \
                 weights are damaged; fetch or convert the model again"
            ),
        }
    }
}

const CONVERT: &str = "convert it as a plain llama-architecture model";

impl std::error::Error for EngineError {}
