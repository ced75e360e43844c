//! Ollama's own dialect: `/api/chat` as JSON lines, with the engine's own durations in the last one.

use super::openai::error_text;
use crate::exchange::{Finish, Request, TokensFrom, Turn, Usage};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// A line longer than this is not part of an answer.
pub const LONGEST_LINE: usize = 4 << 20;

/// The body of a streaming chat; `options` are the model's, as Ollama calls them, and win.
pub fn body(request: &Request, options: &Map<String, Value>) -> Vec<u8> {
    #[derive(Serialize)]
    struct Body<'a> {
        model: &'a str,
        messages: &'a [Turn],
        stream: bool,
        options: Map<String, Value>,
    }
    let mut all = Map::from_iter([
        ("num_predict".to_owned(), json!(request.max_tokens)),
        ("temperature".to_owned(), json!(request.temperature)),
        ("seed".to_owned(), json!(request.seed)),
    ]);
    all.extend(options.clone());
    all.retain(|_, v| !v.is_null());
    let body = Body { model: &request.model, messages: &request.turns, stream: true, options: all };
    serde_json::to_vec(&body).unwrap_or_else(|_| unreachable!("plain fields are JSON"))
}

/// One line of the answer.
#[derive(Debug, Default, PartialEq)]
pub struct Chunk<'a> {
    /// What the model says, its thinking left out.
    pub content: Cow<'a, str>,
    /// Whether a token came with it: content, thinking or a tool call.
    pub has_token: bool,
    /// Why it ended, if it did.
    pub finish: Option<Finish>,
    /// Token counts, if it has them.
    pub usage: Option<Usage>,
    /// The engine's own times in nanoseconds, if it has them.
    pub durations: Option<Value>,
}

/// Parses one line; the error is the server's own, or what is wrong with the line.
pub fn parse(line: &[u8]) -> Result<Chunk<'_>, Malformed> {
    let raw: Raw<'_> = serde_json::from_slice(line).map_err(|e| Malformed::Shape(e.to_string()))?;
    if let Some(error) = &raw.error {
        return Err(Malformed::Server(error_text(error)));
    }
    let mut chunk = Chunk::default();
    if let Some(message) = raw.message {
        let thinks = message.thinking.is_some_and(|t| !t.0.is_empty());
        let calls = message.tool_calls.is_some_and(|calls| !calls.is_empty());
        chunk.content = message.content.map(|t| t.0).unwrap_or_default();
        chunk.has_token = !chunk.content.is_empty() || thinks || calls;
    }
    if raw.done {
        chunk.finish = Some(match raw.done_reason.as_ref().map_or("stop", |r| r.0.as_ref()) {
            "stop" => Finish::Stop,
            "length" => Finish::Length,
            _ => Finish::Other,
        });
        // A prompt that was in the cache whole has no count.
        chunk.usage = raw.eval_count.map(|completion| Usage {
            prompt: raw.prompt_eval_count,
            completion: Some(completion),
            reasoning: None,
            cached: None,
            from: Some(TokensFrom::Usage),
        });
        let durations = [
            ("total_duration", raw.total_duration),
            ("load_duration", raw.load_duration),
            ("prompt_eval_duration", raw.prompt_eval_duration),
            ("eval_duration", raw.eval_duration),
        ];
        let known = durations.into_iter().filter_map(|(key, ns)| Some((key.to_owned(), json!(ns?))));
        let known: Map<String, Value> = known.collect();
        chunk.durations = (!known.is_empty()).then_some(Value::Object(known));
    }
    Ok(chunk)
}

/// Why a line is not a [`Chunk`].
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The server reports an error.
    #[error("{0}")]
    Server(String),
    /// It is not what the dialect says.
    #[error("not a line of an answer: {0}")]
    Shape(String),
}

/// Collects bytes and hands out lines; a stream cut at any byte gives the same ones.
#[derive(Debug, Default)]
pub struct Lines {
    line: Vec<u8>,
}

impl Lines {
    /// Feeds bytes as they arrived; calls `on` with every line they complete. `false` if a line is too long.
    pub fn push(&mut self, mut bytes: &[u8], mut on: impl FnMut(&[u8])) -> bool {
        while let Some(end) = memchr::memchr(b'\n', bytes) {
            if self.line.is_empty() {
                on(&bytes[..end]);
            } else {
                self.line.extend_from_slice(&bytes[..end]);
                on(&self.line);
                self.line.clear();
            }
            bytes = &bytes[end + 1..];
        }
        self.line.extend_from_slice(bytes);
        self.line.len() <= LONGEST_LINE
    }

    /// The end of the stream: a line that lacked its end is still one.
    pub fn finish(&mut self, mut on: impl FnMut(&[u8])) {
        if !self.line.is_empty() {
            on(&self.line);
            self.line.clear();
        }
    }
}

#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
struct Raw<'a> {
    #[serde(borrow)]
    message: Option<RawMessage<'a>>,
    #[serde(default)]
    done: bool,
    done_reason: Option<Text<'a>>,
    error: Option<Value>,
    prompt_eval_count: Option<u64>,
    eval_count: Option<u64>,
    total_duration: Option<u64>,
    load_duration: Option<u64>,
    prompt_eval_duration: Option<u64>,
    eval_duration: Option<u64>,
}

#[derive(Deserialize)]
struct RawMessage<'a> {
    #[serde(borrow)]
    content: Option<Text<'a>>,
    thinking: Option<Text<'a>>,
    tool_calls: Option<Vec<Value>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::Role;
    use proptest::prelude::*;

    #[test]
    fn the_last_line_counts_and_has_durations() {
        let line = br#"{"message":{"role":"assistant","content":""},"done":true,"done_reason":"length","total_duration":9,"load_duration":1,"prompt_eval_count":26,"prompt_eval_duration":3,"eval_count":7,"eval_duration":5}"#;
        let chunk = parse(line).unwrap();
        let usage = chunk.usage.unwrap();
        assert_eq!((usage.prompt, usage.completion, chunk.finish), (Some(26), Some(7), Some(Finish::Length)));
        assert_eq!(chunk.durations.unwrap()["load_duration"], 1);
        assert!(!chunk.has_token);
    }

    #[test]
    fn thinking_is_a_token_and_not_content() {
        let chunk = parse(br#"{"message":{"content":"","thinking":"hm"},"done":false}"#).unwrap();
        assert_eq!((chunk.has_token, chunk.content.as_ref(), chunk.finish), (true, "", None));
    }

    #[test]
    fn errors_are_told_apart_from_garbage() {
        assert_eq!(
            parse(br#"{"error":"model not found"}"#),
            Err(Malformed::Server("model not found".into()))
        );
        assert!(matches!(parse(b"<html>"), Err(Malformed::Shape(_))));
    }

    #[test]
    fn what_the_user_says_of_the_model_wins() {
        let turns = vec![Turn { role: Role::User, content: "hi".into() }];
        let request =
            Request { model: "m".into(), turns, max_tokens: 7, exact: false, temperature: 0.5, seed: 3 };
        let more = json!({"num_ctx": 512, "temperature": 0});
        let body: Value = serde_json::from_slice(&body(&request, more.as_object().unwrap())).unwrap();
        assert_eq!(body["options"], json!({"num_predict": 7, "temperature": 0, "seed": 3, "num_ctx": 512}));
        assert_eq!(body["messages"][0], json!({"role": "user", "content": "hi"}));
    }

    proptest! {
        #[test]
        fn a_stream_cut_anywhere_gives_the_same_lines(cuts in prop::collection::vec(0usize..40, 0..6)) {
            let text = b"{\"a\":1}\n\n{\"b\":\"\xc3\xa9\"}\n{\"last\":true}";
            let mut cuts = cuts;
            cuts.retain(|c| *c < text.len());
            cuts.sort_unstable();
            let (mut lines, mut out, mut from) = (Lines::default(), Vec::new(), 0);
            for cut in cuts.into_iter().chain([text.len()]) {
                prop_assert!(lines.push(&text[from..cut], |l| out.push(l.to_vec())));
                from = cut;
            }
            lines.finish(|l| out.push(l.to_vec()));
            prop_assert_eq!(out.join(&b'\n'), text.to_vec());
        }
    }
}
