//! What a server may do wrong, or otherwise than expected; each was seen in a real one or in a network.
//!
//! A request falls into the traps its prompt names (`#trap=usage_missing`, `#trap=disconnect_mid:3`), and into those that the
//! config has for every n-th.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// One trap. A number after a colon is its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trap {
    /// `role_first`: a chunk with only the role is sent at once, long before the first token.
    RoleFirst,
    /// `usage_extra`: the chunk with `choices: []` comes even if nobody asked for usage.
    UsageExtra,
    /// `usage_last`: usage and finish reason are in the last chunk with content, and nowhere else.
    UsageLast,
    /// `usage_missing`: no usage, even if asked for.
    UsageMissing,
    /// `reasoning`: the first half of the tokens is `reasoning_content` (DeepSeek, vLLM; Ollama's `thinking`).
    Reasoning,
    /// `reasoning_key`: the same under the key `reasoning` (OpenRouter, newer vLLM).
    ReasoningKey,
    /// `tool_call`: the tokens are the deltas of one tool call.
    ToolCall,
    /// `coalesced:K`: K tokens (4) to a chunk.
    Coalesced(u32),
    /// `split_utf8:US`: multi-byte characters, cut between their bytes, with a pause (200 µs) at each cut.
    SplitUtf8(u64),
    /// `split_lines:US`: every byte in a write of its own, with a pause (100 µs) after each.
    SplitLines(u64),
    /// `crlf`: lines of the event stream end in CR LF.
    Crlf,
    /// `comments`: a comment line, as keep-alives are, at once and before every token.
    Comments,
    /// `disconnect_mid:N`: the connection is closed after N tokens (half of them).
    DisconnectMid(Option<u32>),
    /// `status_429:K`: the first K tries (1) of the same body get 429 with `Retry-After`; later ones are fine.
    Status429(u32),
    /// `status_500`.
    Status500,
    /// `status_503`.
    Status503,
    /// `error_body:SHAPE`: an error as `openai`, `vllm`, `llamacpp`, `ollama`, `fastapi`, `tgi`, `text` or `html` has it.
    ErrorBody(Shape),
    /// `error_in_stream:N`: after N tokens (half of them) an error event ends the stream.
    ErrorInStream(Option<u32>),
    /// `hang`: no byte, ever.
    Hang,
    /// `hang_mid:N`: no byte more after N tokens (half of them).
    HangMid(Option<u32>),
    /// `slow_loris:MS`: the response head comes at once, byte by byte, one every 100 ms.
    SlowLoris(u64),
    /// `huge_line:MIB`: the first event is a line of so many MiB (64).
    HugeLine(u64),
    /// `garbage`: the event stream holds lines that are no JSON and bytes that are no UTF-8.
    Garbage,
    /// `garbage_head`: what comes is no HTTP.
    GarbageHead,
    /// `not_streaming`: one JSON body although a stream was asked for.
    NotStreaming,
    /// `close_after`: promises keep-alive and closes after the answer, as llama.cpp does after streams.
    CloseAfter,
    /// `stall:MS`: from this request's arrival on nobody gets a byte for so long (1000 ms).
    Stall(u64),
}

/// How vendors put an error into a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// `{"error": {"message": …, "type": …, "param": …, "code": …}}`
    OpenAi,
    /// `{"object": "error", "message": …, "type": …, "code": …}`
    Vllm,
    /// `{"error": {"code": …, "message": …, "type": …}}`
    LlamaCpp,
    /// `{"error": "…"}`
    Ollama,
    /// `{"detail": [{"loc": …, "msg": …, "type": …}]}`
    FastApi,
    /// `{"error": "…", "error_type": "…"}`
    Tgi,
    /// Plain text.
    Text,
    /// The page of a reverse proxy.
    Html,
}

/// Names of the shapes.
const SHAPES: &[(&str, Shape)] = &[
    ("openai", Shape::OpenAi),
    ("vllm", Shape::Vllm),
    ("llamacpp", Shape::LlamaCpp),
    ("ollama", Shape::Ollama),
    ("fastapi", Shape::FastApi),
    ("tgi", Shape::Tgi),
    ("text", Shape::Text),
    ("html", Shape::Html),
];

impl FromStr for Trap {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, size) = text.split_once(':').map_or((text, None), |(name, size)| (name, Some(size)));
        if name == "error_body" {
            let wanted = size.unwrap_or("openai");
            let found = SHAPES.iter().find(|(shape, _)| *shape == wanted);
            return found.map(|(_, shape)| Trap::ErrorBody(*shape)).ok_or_else(|| unknown(text));
        }
        let number = size.map(|s| s.parse::<u32>().map_err(|_| unknown(text))).transpose()?;
        let or = |usual: u32| number.unwrap_or(usual);
        let or_long = |usual: u32| u64::from(number.unwrap_or(usual));
        Ok(match name {
            "coalesced" => Trap::Coalesced(or(4).max(1)),
            "split_utf8" => Trap::SplitUtf8(or_long(200)),
            "split_lines" => Trap::SplitLines(or_long(100)),
            "disconnect_mid" => Trap::DisconnectMid(number),
            "status_429" => Trap::Status429(or(1)),
            "error_in_stream" => Trap::ErrorInStream(number),
            "hang_mid" => Trap::HangMid(number),
            "slow_loris" => Trap::SlowLoris(or_long(100)),
            "huge_line" => Trap::HugeLine(or_long(64)),
            "stall" => Trap::Stall(or_long(1000)),
            _ if number.is_some() => return Err(unknown(text)),
            "role_first" => Trap::RoleFirst,
            "usage_extra" => Trap::UsageExtra,
            "usage_last" => Trap::UsageLast,
            "usage_missing" => Trap::UsageMissing,
            "reasoning" => Trap::Reasoning,
            "reasoning_key" => Trap::ReasoningKey,
            "tool_call" => Trap::ToolCall,
            "crlf" => Trap::Crlf,
            "comments" => Trap::Comments,
            "status_500" => Trap::Status500,
            "status_503" => Trap::Status503,
            "hang" => Trap::Hang,
            "garbage" => Trap::Garbage,
            "garbage_head" => Trap::GarbageHead,
            "not_streaming" => Trap::NotStreaming,
            "close_after" => Trap::CloseAfter,
            _ => return Err(unknown(text)),
        })
    }
}

fn unknown(text: &str) -> String {
    format!("\"{text}\" is no trap; crates/sim-server/src/trap.rs lists them")
}

impl fmt::Display for Trap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let after = |f: &mut fmt::Formatter<'_>, name: &str, n: &Option<u32>| match n {
            Some(n) => write!(f, "{name}:{n}"),
            None => f.write_str(name),
        };
        match self {
            Trap::RoleFirst => f.write_str("role_first"),
            Trap::UsageExtra => f.write_str("usage_extra"),
            Trap::UsageLast => f.write_str("usage_last"),
            Trap::UsageMissing => f.write_str("usage_missing"),
            Trap::Reasoning => f.write_str("reasoning"),
            Trap::ReasoningKey => f.write_str("reasoning_key"),
            Trap::ToolCall => f.write_str("tool_call"),
            Trap::Coalesced(k) => write!(f, "coalesced:{k}"),
            Trap::SplitUtf8(us) => write!(f, "split_utf8:{us}"),
            Trap::SplitLines(us) => write!(f, "split_lines:{us}"),
            Trap::Crlf => f.write_str("crlf"),
            Trap::Comments => f.write_str("comments"),
            Trap::DisconnectMid(n) => after(f, "disconnect_mid", n),
            Trap::Status429(k) => write!(f, "status_429:{k}"),
            Trap::Status500 => f.write_str("status_500"),
            Trap::Status503 => f.write_str("status_503"),
            Trap::ErrorBody(shape) => {
                let name = SHAPES.iter().find(|(_, s)| s == shape).map_or("openai", |(name, _)| name);
                write!(f, "error_body:{name}")
            }
            Trap::ErrorInStream(n) => after(f, "error_in_stream", n),
            Trap::Hang => f.write_str("hang"),
            Trap::HangMid(n) => after(f, "hang_mid", n),
            Trap::SlowLoris(ms) => write!(f, "slow_loris:{ms}"),
            Trap::HugeLine(mib) => write!(f, "huge_line:{mib}"),
            Trap::Garbage => f.write_str("garbage"),
            Trap::GarbageHead => f.write_str("garbage_head"),
            Trap::NotStreaming => f.write_str("not_streaming"),
            Trap::CloseAfter => f.write_str("close_after"),
            Trap::Stall(ms) => write!(f, "stall:{ms}"),
        }
    }
}

impl<'de> Deserialize<'de> for Trap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Serialize for Trap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trap_is_written_as_it_is_read() {
        for text in [
            "role_first",
            "coalesced:7",
            "disconnect_mid",
            "hang_mid:3",
            "error_body:fastapi",
            "status_429:2",
            "slow_loris:5",
            "stall:250",
        ] {
            assert_eq!(text.parse::<Trap>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_size_where_none_belongs_is_an_error() {
        assert!("crlf:3".parse::<Trap>().is_err());
        assert!("coalesced:x".parse::<Trap>().is_err());
        assert!("error_body:soap".parse::<Trap>().is_err());
    }
}
