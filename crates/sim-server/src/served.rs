//! The log: what was truly done for each request, and when.

use crate::Joules;
use crate::Trap;
use serde::{Deserialize, Serialize};

/// One request at its end. All moments are nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Served {
    /// The client's `x-request-id`, else one of ours; the answer's `id` too.
    pub id: String,
    /// Requests are numbered from 1 as they come.
    pub number: u64,
    /// Connections are numbered from 1 as they are accepted.
    pub connection: u64,
    /// The path that was asked.
    pub path: String,
    /// When the last bytes of the request came.
    pub received: u64,
    /// Who says so.
    pub received_by: Clock,
    /// Just before the first byte of the answer was given to the kernel.
    pub first_byte: Option<u64>,
    /// The same for the last write.
    pub last_byte: Option<u64>,
    /// When its prompt was begun with, where there is an engine: before, it waited.
    pub begun: Option<u64>,
    /// When each token was due.
    pub scheduled: Vec<u64>,
    /// Just before the write that completed each token; shorter than `scheduled` if not all were written.
    pub written: Vec<u64>,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens the answer was to have.
    pub output_tokens: u32,
    /// How it ended.
    pub outcome: Outcome,
    /// The traps it fell into.
    pub traps: Vec<Trap>,
    /// What it truly cost, where there is an engine.
    pub joules: Option<Joules>,
}

/// Whose moment it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    /// The kernel's, from when the segment came (`SO_TIMESTAMPNS`, put on the monotonic clock).
    Kernel,
    /// The server's, from when it read it.
    Server,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The answer was whole.
    Finished,
    /// The client closed the connection before that.
    Left,
    /// A trap kept it from being whole.
    Trapped,
}
