//! The OpenAI chat-completions dialect as vLLM, SGLang, llama.cpp, TGI, LM Studio and OpenAI speak it.

use crate::exchange::{Finish, Request, TokensFrom, Usage};
use serde::Deserialize;
use serde_json::{Value, json};

/// The body of a streaming chat completion for `request`.
pub fn body(request: &Request) -> Value {
    json!({
        "model": request.model,
        "messages": [{"role": "user", "content": request.prompt}],
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "stream": true,
        "stream_options": {"include_usage": true},
    })
}

/// One event of the stream, or a whole answer that was not streamed.
#[derive(Debug, Default, PartialEq)]
pub struct Chunk {
    /// The server's id of the answer.
    pub id: Option<String>,
    /// What the model says, its reasoning left out.
    pub content: String,
    /// Whether a token came with it: content, reasoning or a tool call. A chunk that only names the role has none.
    pub has_token: bool,
    /// Why it ended, if it did.
    pub finish: Option<Finish>,
    /// Token counts, if it has them.
    pub usage: Option<Usage>,
    /// llama.cpp's own times.
    pub timings: Option<Value>,
}

/// Why an event is not a [`Chunk`].
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The server reports an error inside the stream.
    #[error("{0}")]
    Server(String),
    /// It is not what the dialect says.
    #[error("not a chat completion chunk: {0}")]
    Shape(String),
}

/// Parses the data of one event; `None` for the closing `[DONE]`.
pub fn parse(data: &[u8]) -> Result<Option<Chunk>, Malformed> {
    if data.trim_ascii() == b"[DONE]" {
        return Ok(None);
    }
    let raw: RawChunk = serde_json::from_slice(data).map_err(|e| Malformed::Shape(e.to_string()))?;
    if let Some(error) = &raw.error {
        return Err(Malformed::Server(error_text(error)));
    }
    let mut chunk =
        Chunk { id: raw.id, usage: raw.usage.map(Usage::from), timings: raw.timings, ..Chunk::default() };
    // The usage chunk has an empty list of choices; more than one choice is never asked for.
    if let Some(choice) = raw.choices.into_iter().next() {
        chunk.finish = choice.finish_reason.as_deref().map(|reason| match reason {
            "stop" | "eos" | "stop_sequence" => Finish::Stop,
            "length" => Finish::Length,
            _ => Finish::Other,
        });
        if let Some(delta) = choice.delta.or(choice.message) {
            let said = |text: &Option<String>| text.as_ref().is_some_and(|t| !t.is_empty());
            let tools = delta.tool_calls.as_ref().is_some_and(|t| !t.is_empty());
            chunk.has_token =
                said(&delta.content) || said(&delta.reasoning_content) || said(&delta.reasoning) || tools;
            chunk.content = delta.content.unwrap_or_default();
        } else if let Some(text) = choice.text {
            chunk.has_token = !text.is_empty();
            chunk.content = text;
        }
    }
    Ok(Some(chunk))
}

/// The message inside an error body, whichever of the common shapes it has.
pub fn error_text(error: &Value) -> String {
    let message = error.get("error").unwrap_or(error);
    let text = message.get("message").or_else(|| message.get("detail")).unwrap_or(message);
    text.as_str().map_or_else(|| text.to_string(), str::to_owned)
}

#[derive(Deserialize)]
struct RawChunk {
    id: Option<String>,
    #[serde(default)]
    choices: Vec<RawChoice>,
    usage: Option<RawUsage>,
    error: Option<Value>,
    timings: Option<Value>,
}

#[derive(Deserialize)]
struct RawChoice {
    delta: Option<RawDelta>,
    message: Option<RawDelta>,
    text: Option<String>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct RawDelta {
    content: Option<String>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct RawUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct CompletionDetails {
    reasoning_tokens: Option<u64>,
}

impl From<RawUsage> for Usage {
    fn from(raw: RawUsage) -> Self {
        Usage {
            prompt: raw.prompt_tokens,
            completion: raw.completion_tokens,
            reasoning: raw.completion_tokens_details.and_then(|d| d.reasoning_tokens),
            cached: raw.prompt_tokens_details.and_then(|d| d.cached_tokens),
            from: Some(TokensFrom::Usage),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(json: &str) -> Chunk {
        parse(json.as_bytes()).unwrap().unwrap()
    }

    #[test]
    fn a_chunk_that_only_names_the_role_has_no_token() {
        let c = chunk(
            r#"{"id":"a","choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
        );
        assert!(!c.has_token);
        assert_eq!(c.id.as_deref(), Some("a"));
    }

    #[test]
    fn reasoning_is_a_token_and_not_content() {
        let c = chunk(r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#);
        assert!(c.has_token);
        assert_eq!(c.content, "");
    }

    #[test]
    fn the_usage_chunk_has_no_choices() {
        let c = chunk(
            r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":3},"completion_tokens_details":{"reasoning_tokens":2}}}"#,
        );
        let usage = c.usage.unwrap();
        assert_eq!(
            (usage.prompt, usage.completion, usage.cached, usage.reasoning),
            (Some(7), Some(5), Some(3), Some(2))
        );
        assert_eq!(usage.from, Some(TokensFrom::Usage));
    }

    #[test]
    fn the_end_is_told_apart_from_garbage_and_errors() {
        assert_eq!(parse(b" [DONE] "), Ok(None));
        assert!(matches!(parse(b"{\"choices\": 3}"), Err(Malformed::Shape(_))));
        let error = parse(br#"{"error":{"message":"out of memory","code":500}}"#);
        assert_eq!(error, Err(Malformed::Server("out of memory".into())));
    }

    #[test]
    fn an_answer_that_was_not_streamed_is_read_too() {
        let c = chunk(r#"{"choices":[{"message":{"content":"hi"},"finish_reason":"length"}]}"#);
        assert_eq!((c.content.as_str(), c.finish), ("hi", Some(Finish::Length)));
    }
}
