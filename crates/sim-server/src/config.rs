//! What a server does, as JSON: every key has a default.

use crate::Trap;
use crate::engine::EngineConfig;
use serde::Deserialize;
use std::path::PathBuf;

/// What a server does with requests that do not say otherwise.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address to listen at; port 0 takes a free one.
    pub listen: String,
    /// What it says at vLLM's `/version`; without, that place is not there.
    pub version: Option<String>,
    /// The one model it offers. A request may name any.
    pub model: String,
    /// Tokens of an answer: what is said if the request names no limit, and never more.
    pub tokens: u32,
    /// What it says: each word is one token, the last word ends the answer. Without, words of no meaning up to the limit.
    pub answer: Option<String>,
    /// From the arrival of a request to its first token. Without meaning where there is an engine.
    pub ttft_ms: f64,
    /// From one token to the next. Without meaning where there is an engine.
    pub itl_ms: f64,
    /// Each time above is drawn evenly from (1 ± jitter) times itself, 0 to 1.
    pub jitter: f64,
    /// Of the jitter.
    pub seed: u64,
    /// Time and energy by continuous batching instead of a fixed schedule.
    pub engine: Option<EngineConfig>,
    /// Traps for every n-th request.
    pub traps: Vec<EveryNth>,
    /// What the status 429 says in `Retry-After`.
    pub retry_after_s: u32,
    /// Whether OpenAI's answers end with llama.cpp's `timings`.
    pub timings: bool,
    /// Whether there is a `/metrics`.
    pub metrics: bool,
    /// What Ollama's answers call `load_duration`. Nothing waits for it.
    pub load_ms: f64,
    /// From one progress line of `/api/pull` to the next.
    pub pull_step_ms: f64,
    /// Runs before all ordinary programs (`SCHED_FIFO`), so that deadlines hold on a busy machine. Without the permission for
    /// it, nothing changes.
    pub realtime: bool,
    /// Where the log goes, line by line. Without, it is kept for [`crate::Server::log`].
    pub log: Option<PathBuf>,
    /// Whether it is kept. A program that serves for hours does not want that.
    pub keep_log: bool,
}

/// A trap that some requests fall into.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EveryNth {
    /// Which, as in `#trap=`.
    pub trap: Trap,
    /// 1: all requests; 10: the tenth, the twentieth and so on.
    pub every: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:0".into(),
            version: None,
            model: "tiny".into(),
            tokens: 16,
            answer: None,
            ttft_ms: 5.0,
            itl_ms: 1.0,
            jitter: 0.0,
            seed: 1,
            engine: None,
            traps: Vec::new(),
            retry_after_s: 1,
            timings: false,
            metrics: true,
            load_ms: 0.0,
            pull_step_ms: 1.0,
            realtime: false,
            log: None,
            keep_log: true,
        }
    }
}

impl Config {
    /// From JSON. An unknown key is an error.
    pub fn parse(json: &str) -> Result<Config, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Quirks;

    #[test]
    fn an_empty_object_is_the_default() {
        assert_eq!(Config::parse("{}"), Ok(Config::default()));
    }

    #[test]
    fn every_part_can_be_said_in_json() {
        let text = r#"{"ttft_ms": 500, "traps": [{"trap": "disconnect_mid:3", "every": 10}],
            "engine": {"max_batch": 8, "joules": {"fixed": 2}, "quirks": {"noise": 0.1}}}"#;
        let config = Config::parse(text).unwrap();
        assert_eq!(config.traps, [EveryNth { trap: Trap::DisconnectMid(Some(3)), every: 10 }]);
        let engine = config.engine.unwrap();
        assert_eq!((engine.max_batch, engine.joules.fixed), (8, 2.0));
        assert_eq!(engine.joules.prefill, 0.0, "a cost that is given is given whole");
        assert_eq!(engine.seconds, EngineConfig::default().seconds);
        assert_eq!(engine.quirks, Quirks { noise: 0.1, ..Quirks::default() });
    }

    #[test]
    fn a_wrong_key_or_trap_is_an_error() {
        assert!(Config::parse(r#"{"ttft": 500}"#).unwrap_err().contains("ttft"));
        let wrong = Config::parse(r#"{"traps": [{"trap": "usage_mising", "every": 1}]}"#);
        assert!(wrong.unwrap_err().contains("usage_mising"));
    }
}
