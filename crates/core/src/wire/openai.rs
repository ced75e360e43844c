//! The OpenAI dialect, chat completions and completions, as vLLM, SGLang, llama.cpp, TGI, LM Studio and OpenAI speak it.

use crate::exchange::{Finish, Request, Role, TokensFrom, Turn, Usage};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Which of the two ways to ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Api {
    /// `/chat/completions`: the server puts turns into the model's template.
    #[default]
    Chat,
    /// `/completions`: the model reads the text as it is.
    Completions,
}

impl Api {
    /// Where it is, below the base of the address.
    pub const fn path(self) -> &'static str {
        match self {
            Api::Chat => "/chat/completions",
            Api::Completions => "/completions",
        }
    }
}

/// What the key of the token cap is called; newer models of OpenAI know only the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CapKey {
    /// `max_tokens`.
    #[default]
    MaxTokens,
    /// `max_completion_tokens`.
    MaxCompletionTokens,
}

/// The body of a streaming request; `more` goes in as it is, and wins.
pub fn body(request: &Request, api: Api, cap: CapKey, more: &Map<String, Value>) -> Vec<u8> {
    #[derive(Serialize)]
    struct Body<'a> {
        model: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        messages: Option<&'a [Turn]>,
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        max_tokens: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        max_completion_tokens: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        min_tokens: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        ignore_eos: Option<bool>,
        temperature: f64,
        seed: u64,
        stream: bool,
        stream_options: StreamOptions,
    }
    #[derive(Serialize)]
    struct StreamOptions {
        include_usage: bool,
    }
    let chat = api == Api::Chat;
    let exact = request.exact.then_some(request.max_tokens);
    let body = Body {
        model: &request.model,
        messages: chat.then_some(&request.turns),
        prompt: (!chat).then(|| as_text(&request.turns)),
        max_tokens: (cap == CapKey::MaxTokens).then_some(request.max_tokens),
        max_completion_tokens: (cap == CapKey::MaxCompletionTokens).then_some(request.max_tokens),
        // vLLM and SGLang know both, llama.cpp the second.
        min_tokens: exact,
        ignore_eos: exact.map(|_| true),
        temperature: request.temperature,
        seed: request.seed,
        stream: true,
        stream_options: StreamOptions { include_usage: true },
    };
    if more.is_empty() {
        return serde_json::to_vec(&body).unwrap_or_else(|_| unreachable!("plain fields are JSON"));
    }
    // A key must not stand there twice.
    let mut all = match serde_json::to_value(&body) {
        Ok(Value::Object(map)) => map,
        _ => unreachable!("a struct of plain fields serialises to an object"),
    };
    all.extend(more.iter().map(|(k, v)| (k.clone(), v.clone())));
    all.retain(|_, v| !v.is_null());
    Value::Object(all).to_string().into_bytes()
}

/// Turns as one text, for a model that has no template; one question alone is that question.
pub fn as_text(turns: &[Turn]) -> String {
    if let [only] = turns {
        return only.content.clone();
    }
    let who = |role: Role| match role {
        Role::System => "",
        Role::User => "User: ",
        Role::Assistant => "Assistant: ",
    };
    let mut text = String::new();
    for turn in turns {
        text += who(turn.role);
        text += &turn.content;
        text += "\n";
    }
    text + "Assistant:"
}

/// One event of the stream, or a whole answer that was not streamed.
#[derive(Debug, Default, PartialEq)]
pub struct Chunk<'a> {
    /// The server's id of the answer.
    pub id: Option<Cow<'a, str>>,
    /// What the model says, its reasoning left out.
    pub content: Cow<'a, str>,
    /// Whether a token came with it: content, reasoning or a tool call. A chunk that only names the role has none.
    pub has_token: bool,
    /// Characters of reasoning or of a tool call, which are tokens and not content.
    pub aside: Cow<'a, str>,
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
pub fn parse(data: &[u8]) -> Result<Option<Chunk<'_>>, Malformed> {
    if data.trim_ascii() == b"[DONE]" {
        return Ok(None);
    }
    let raw: RawChunk<'_> = serde_json::from_slice(data).map_err(|e| Malformed::Shape(e.to_string()))?;
    if let Some(error) = &raw.error {
        return Err(Malformed::Server(error_text(error)));
    }
    let mut chunk = Chunk {
        id: raw.id.map(|t| t.0),
        usage: raw.usage.map(Usage::from),
        timings: raw.timings,
        ..Chunk::default()
    };
    // The usage chunk has an empty list of choices; more than one choice is never asked for.
    if let Some(choice) = raw.choices.into_iter().next() {
        chunk.finish = choice.finish_reason.map(|reason| match reason.0.as_ref() {
            "stop" | "eos" | "stop_sequence" => Finish::Stop,
            "length" => Finish::Length,
            _ => Finish::Other,
        });
        if let Some(delta) = choice.delta.or(choice.message) {
            chunk.content = text(delta.content);
            chunk.aside = [delta.reasoning_content, delta.reasoning]
                .into_iter()
                .map(text)
                .find(|t| !t.is_empty())
                .or_else(|| delta.tool_calls.as_deref().map(called))
                .unwrap_or_default();
            let called = delta.tool_calls.is_some_and(|calls| !calls.is_empty());
            chunk.has_token = !chunk.content.is_empty() || !chunk.aside.is_empty() || called;
        } else {
            chunk.content = text(choice.text);
            chunk.has_token = !chunk.content.is_empty();
        }
    }
    Ok(Some(chunk))
}

fn text(raw: Option<Text<'_>>) -> Cow<'_, str> {
    raw.map(|t| t.0).unwrap_or_default()
}

/// The words of tool calls: names and arguments.
fn called<'a>(calls: &[Value]) -> Cow<'a, str> {
    let functions = calls.iter().map(|call| &call["function"]);
    let words = functions.flat_map(|f| [f["name"].as_str(), f["arguments"].as_str()]);
    words.flatten().collect::<String>().into()
}

/// The message inside an error body, whichever of the common shapes it has.
pub fn error_text(error: &Value) -> String {
    let message = error.get("error").unwrap_or(error);
    let text = message.get("message").or_else(|| message.get("detail")).unwrap_or(message);
    text.as_str().map_or_else(|| text.to_string(), str::to_owned)
}

/// Text that stays where it was read, unless it holds escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
struct RawChunk<'a> {
    #[serde(borrow)]
    id: Option<Text<'a>>,
    #[serde(default, borrow)]
    choices: Vec<RawChoice<'a>>,
    usage: Option<RawUsage>,
    error: Option<Value>,
    timings: Option<Value>,
}

#[derive(Deserialize)]
struct RawChoice<'a> {
    #[serde(borrow)]
    delta: Option<RawDelta<'a>>,
    message: Option<RawDelta<'a>>,
    text: Option<Text<'a>>,
    finish_reason: Option<Text<'a>>,
}

#[derive(Deserialize)]
struct RawDelta<'a> {
    #[serde(borrow)]
    content: Option<Text<'a>>,
    reasoning_content: Option<Text<'a>>,
    reasoning: Option<Text<'a>>,
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
    use serde_json::json;

    fn chunk(json: &str) -> Chunk<'_> {
        parse(json.as_bytes()).unwrap().unwrap()
    }

    fn request(turns: &[(Role, &str)], exact: bool) -> Request {
        let turn = |(role, content): &(Role, &str)| Turn { role: *role, content: (*content).to_owned() };
        let turns = turns.iter().map(turn).collect();
        Request { model: "m".into(), turns, max_tokens: 7, exact, temperature: 0.0, seed: 1 }
    }

    fn asked(request: &Request, api: Api, cap: CapKey, more: Value) -> Value {
        serde_json::from_slice(&body(request, api, cap, more.as_object().unwrap())).unwrap()
    }

    #[test]
    fn both_ways_to_ask_say_the_same() {
        let one = request(&[(Role::User, "hi")], false);
        let chat = asked(&one, Api::Chat, CapKey::MaxTokens, json!({}));
        assert_eq!(chat["messages"], json!([{"role": "user", "content": "hi"}]));
        assert_eq!(
            (&chat["max_tokens"], &chat["stream_options"]["include_usage"]),
            (&json!(7), &json!(true))
        );
        assert!(chat.get("prompt").is_none() && chat.get("ignore_eos").is_none());
        let plain = asked(&one, Api::Completions, CapKey::MaxCompletionTokens, json!({}));
        assert_eq!((&plain["prompt"], &plain["max_completion_tokens"]), (&json!("hi"), &json!(7)));
        assert!(plain.get("messages").is_none() && plain.get("max_tokens").is_none());
        let talk = request(
            &[(Role::System, "be brief"), (Role::User, "hi"), (Role::Assistant, "yes?"), (Role::User, "go")],
            true,
        );
        let plain = asked(&talk, Api::Completions, CapKey::MaxTokens, json!({}));
        assert_eq!(plain["prompt"], "be brief\nUser: hi\nAssistant: yes?\nUser: go\nAssistant:");
        assert_eq!((&plain["min_tokens"], &plain["ignore_eos"]), (&json!(7), &json!(true)));
    }

    #[test]
    fn what_is_added_to_a_body_wins_and_null_takes_away() {
        let one = request(&[(Role::User, "hi")], false);
        let body = asked(
            &one,
            Api::Chat,
            CapKey::MaxTokens,
            json!({"top_p": 0.5, "temperature": 1.0, "seed": null}),
        );
        assert_eq!((&body["top_p"], &body["temperature"]), (&json!(0.5), &json!(1.0)));
        assert!(body.get("seed").is_none());
    }

    #[test]
    fn a_tool_call_is_a_token_and_not_content() {
        let c =
            chunk(r#"{"choices":[{"delta":{"tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}}]}"#);
        assert_eq!((c.has_token, c.content.as_ref(), c.aside.as_ref()), (true, "", "f{}"));
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
        assert_eq!((c.has_token, c.content.as_ref(), c.aside.as_ref()), (true, "", "hm"));
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
        assert_eq!((c.content.as_ref(), c.finish), ("hi", Some(Finish::Length)));
    }
}
