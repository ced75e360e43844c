//! How an answer is said: the bytes of its head, of each token and of its end, in the dialect that was asked.
//!
//! What is the same in all tokens is made once; a token costs a few copies and nothing is allocated for it.

mod error;
mod ollama;
mod openai;

pub(crate) use error::{failure, garbage_head, shaped};
pub(crate) use ollama::{PULL_LINES, date};

use crate::http;
use crate::trap::Trap;
use std::ops::Range;
use std::rc::Rc;

/// Said in order, again and again, by a server that has no answer of its own.
const WORDS: &[&str] = &[
    "the", "river", "runs", "past", "an", "old", "mill", "and", "under", "two", "stone", "bridges", "before",
    "it", "meets", "sea",
];
/// Words of two-, three- and four-byte characters.
const WIDE_WORDS: &[&str] = &["über", "5€", "naïve", "😀", "日本", "Ω"];

/// The words of answers, as they stand inside JSON strings.
pub(crate) struct Words(Vec<String>);

impl Words {
    pub(crate) fn of(text: &str) -> Words {
        Words(text.split_whitespace().map(inside_string).collect())
    }

    pub(crate) fn usual() -> Words {
        Words(WORDS.iter().map(|w| (*w).to_owned()).collect())
    }

    pub(crate) fn wide() -> Words {
        Words(WIDE_WORDS.iter().map(|w| (*w).to_owned()).collect())
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Appends the tokens of a range; all but the first begin with their space.
    fn say(&self, range: Range<u32>, out: &mut Vec<u8>) {
        for i in range {
            if i > 0 {
                out.push(b' ');
            }
            if let Some(word) = self.0.get(i as usize % self.0.len().max(1)) {
                out.extend_from_slice(word.as_bytes());
            }
        }
    }
}

/// Text as it stands between the quotes of a JSON string.
fn inside_string(text: &str) -> String {
    let quoted = quoted(text);
    quoted[1..quoted.len() - 1].to_owned()
}

/// Text as a JSON string.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
    /// `/api/chat`
    OllamaChat,
    /// `/api/generate`
    OllamaGenerate,
    /// `/api/pull`: its tokens are lines of progress.
    Pull,
}

impl Dialect {
    pub(crate) fn of(path: &str) -> Option<Dialect> {
        Some(match path {
            "/v1/chat/completions" => Dialect::Chat,
            "/v1/completions" => Dialect::Text,
            "/api/chat" => Dialect::OllamaChat,
            "/api/generate" => Dialect::OllamaGenerate,
            "/api/pull" => Dialect::Pull,
            _ => return None,
        })
    }

    pub(crate) fn is_openai(self) -> bool {
        matches!(self, Dialect::Chat | Dialect::Text)
    }

    /// Ollama streams unless told not to.
    pub(crate) fn streams_by_itself(self) -> bool {
        !self.is_openai()
    }
}

/// Where token counts are said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Usage {
    Never,
    /// In a chunk of its own, without choices.
    Extra,
    /// In the last chunk with content.
    Last,
}

/// Times that the end of an answer tells, in nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Durations {
    pub(crate) total: u64,
    pub(crate) load: u64,
    pub(crate) prompt: u64,
    pub(crate) eval: u64,
}

/// What an answer is made of.
pub(crate) struct Script<'a> {
    pub(crate) dialect: Dialect,
    pub(crate) stream: bool,
    pub(crate) id: &'a str,
    pub(crate) model: &'a str,
    pub(crate) prompt_tokens: u64,
    pub(crate) tokens: u32,
    /// Why it ends after the last token.
    pub(crate) finish: &'static str,
    pub(crate) include_usage: bool,
    pub(crate) timings: bool,
    pub(crate) traps: &'a [Trap],
    pub(crate) words: Rc<Words>,
    /// Seconds since 1970.
    pub(crate) created: u64,
}

/// One answer's voice.
pub(crate) struct Voice {
    dialect: Dialect,
    pub(crate) stream: bool,
    /// JSON up to what differs from chunk to chunk.
    opening: Vec<u8>,
    id: String,
    prompt_tokens: u64,
    tokens: u32,
    finish: &'static str,
    usage: Usage,
    timings: bool,
    /// The key under which the first tokens come that are not yet the answer, and how many.
    reasoning: (&'static str, u32),
    tool_call: bool,
    crlf: bool,
    comments: bool,
    says_keep_alive: bool,
    words: Rc<Words>,
    scratch: Vec<u8>,
}

impl Voice {
    pub(crate) fn new(script: &Script<'_>) -> Voice {
        let has = |trap: Trap| script.traps.contains(&trap);
        let openai = script.dialect.is_openai();
        let usage = match () {
            () if has(Trap::UsageMissing) => Usage::Never,
            () if has(Trap::UsageLast) => Usage::Last,
            // Only OpenAI's streams have to be asked for it.
            () if has(Trap::UsageExtra) || script.include_usage || !openai || !script.stream => Usage::Extra,
            () => Usage::Never,
        };
        let half = script.tokens.div_ceil(2).min(script.tokens.saturating_sub(1));
        let reasoning = match script.dialect {
            Dialect::Chat if has(Trap::Reasoning) => ("reasoning_content", half),
            Dialect::Chat if has(Trap::ReasoningKey) => ("reasoning", half),
            Dialect::OllamaChat | Dialect::OllamaGenerate
                if has(Trap::Reasoning) || has(Trap::ReasoningKey) =>
            {
                ("thinking", half)
            }
            _ => ("", 0),
        };
        let opening =
            if openai { openai::opening(script) } else { ollama::opening(script.model, script.created) };
        Voice {
            dialect: script.dialect,
            stream: script.stream,
            opening,
            id: script.id.to_owned(),
            prompt_tokens: script.prompt_tokens,
            tokens: script.tokens,
            finish: if has(Trap::ToolCall) && script.dialect == Dialect::Chat {
                "tool_calls"
            } else {
                script.finish
            },
            usage,
            timings: script.timings,
            reasoning,
            tool_call: has(Trap::ToolCall) && matches!(script.dialect, Dialect::Chat | Dialect::OllamaChat),
            crlf: has(Trap::Crlf),
            comments: has(Trap::Comments),
            says_keep_alive: has(Trap::CloseAfter),
            words: Rc::clone(&script.words),
            scratch: Vec::new(),
        }
    }

    /// Headers that every answer has.
    fn headers(&self) -> String {
        let keep = if self.says_keep_alive {
            "connection: keep-alive\r\nkeep-alive: timeout=5, max=100\r\n"
        } else {
            ""
        };
        format!("x-request-id: {}\r\n{keep}", self.id)
    }

    /// The head of a stream.
    pub(crate) fn head(&self, out: &mut Vec<u8>) {
        let kind = if self.dialect.is_openai() {
            "text/event-stream; charset=utf-8"
        } else {
            "application/x-ndjson"
        };
        let headers = self.headers();
        out.extend_from_slice(b"HTTP/1.1 200 OK\r\ncontent-type: ");
        out.extend_from_slice(kind.as_bytes());
        out.extend_from_slice(b"\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n");
        out.extend_from_slice(headers.as_bytes());
        out.extend_from_slice(b"\r\n");
    }

    /// A chunk that names the role and says nothing.
    pub(crate) fn role(&mut self, out: &mut Vec<u8>) {
        match self.dialect {
            Dialect::Chat => self.event(out, |_, json| {
                json.extend_from_slice(br#"{"role":"assistant","content":""}"#);
                json.extend_from_slice(openai::NO_FINISH);
                json.push(b'}');
            }),
            Dialect::OllamaChat => self.event(out, |_, json| {
                json.extend_from_slice(br#""message":{"role":"assistant","content":""},"done":false}"#);
            }),
            _ => {}
        }
    }

    /// What an event stream may hold at any time, and nobody has to read.
    pub(crate) fn comment(&self, out: &mut Vec<u8>) {
        match (self.dialect.is_openai(), self.crlf) {
            (true, false) => http::chunk(out, b": keep-alive\n\n"),
            (true, true) => http::chunk(out, b": keep-alive\r\n\r\n"),
            (false, _) => {}
        }
    }

    /// One event with the tokens of a range.
    pub(crate) fn tokens(&mut self, range: Range<u32>, out: &mut Vec<u8>) {
        if self.comments {
            self.comment(out);
        }
        self.event(out, |voice, json| match voice.dialect {
            Dialect::Chat | Dialect::Text => openai::chunk(voice, range, json),
            Dialect::OllamaChat | Dialect::OllamaGenerate => ollama::line(voice, range, json),
            Dialect::Pull => {
                json.clear();
                ollama::progress(range.end, voice.tokens, json);
            }
        });
    }

    /// What comes after the last token.
    pub(crate) fn end(&mut self, durations: Durations, out: &mut Vec<u8>) {
        match self.dialect {
            Dialect::Chat | Dialect::Text => {
                // The last chunk has the times.
                let (usage, timings) = (self.usage, self.timings.then_some(durations));
                if usage != Usage::Last {
                    let timings = timings.filter(|_| usage == Usage::Never);
                    self.event(out, |voice, json| openai::finish(voice, timings, json));
                }
                if usage == Usage::Extra {
                    self.event(out, |voice, json| openai::usage_chunk(voice, timings, json));
                }
                self.done(out);
            }
            Dialect::OllamaChat | Dialect::OllamaGenerate => {
                self.event(out, |voice, json| ollama::last(voice, durations, 0..0, json));
            }
            Dialect::Pull => {}
        }
        self.terminate(out);
    }

    /// An error in the place of what was to come.
    pub(crate) fn error(&mut self, out: &mut Vec<u8>) {
        let openai = self.dialect.is_openai();
        self.event(out, |_, json| {
            json.clear();
            json.extend_from_slice(error::in_stream(openai));
        });
        if openai {
            self.done(out);
        }
        self.terminate(out);
    }

    /// A token of `bytes` bytes in one line.
    pub(crate) fn huge(&mut self, bytes: usize, out: &mut Vec<u8>) {
        self.event(out, |voice, json| {
            let (before, after): (&[u8], &[u8]) = match voice.dialect {
                Dialect::Chat => (br#"{"content":""#, br#""},"logprobs":null,"finish_reason":null}]}"#),
                Dialect::Text => (b"\"", br#"","logprobs":null,"finish_reason":null}]}"#),
                Dialect::OllamaChat => {
                    (br#""message":{"role":"assistant","content":""#, br#""},"done":false}"#)
                }
                Dialect::OllamaGenerate | Dialect::Pull => (br#""response":""#, br#"","done":false}"#),
            };
            json.extend_from_slice(before);
            json.resize(json.len() + bytes, b'x');
            json.extend_from_slice(after);
        });
        self.scratch = Vec::new(); // nobody needs so much again
    }

    /// Lines that are no events of the dialect.
    pub(crate) fn garbage(&self, out: &mut Vec<u8>) {
        http::chunk(out, error::garbage_lines());
    }

    /// The whole answer as one response.
    pub(crate) fn whole(&mut self, durations: Durations, out: &mut Vec<u8>) {
        let mut json = std::mem::take(&mut self.scratch);
        json.clear();
        match self.dialect {
            Dialect::Chat | Dialect::Text => {
                openai::whole(self, self.timings.then_some(durations), &mut json);
            }
            Dialect::OllamaChat | Dialect::OllamaGenerate => {
                json.extend_from_slice(&self.opening);
                ollama::last(self, durations, 0..self.tokens, &mut json);
            }
            Dialect::Pull => json.extend_from_slice(br#"{"status":"success"}"#),
        }
        http::respond(out, "200 OK", "application/json", &self.headers(), &json);
        self.scratch = json;
    }

    fn line_end(&self) -> &'static [u8] {
        if self.crlf { b"\r\n" } else { b"\n" }
    }

    fn done(&self, out: &mut Vec<u8>) {
        http::chunk(out, if self.crlf { b"data: [DONE]\r\n\r\n" } else { b"data: [DONE]\n\n" });
    }

    fn terminate(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"0\r\n\r\n");
    }

    /// Appends one event, whose JSON begins with the opening.
    fn event(&mut self, out: &mut Vec<u8>, rest: impl FnOnce(&Voice, &mut Vec<u8>)) {
        let mut json = std::mem::take(&mut self.scratch);
        json.clear();
        json.extend_from_slice(&self.opening);
        rest(self, &mut json);
        let end = self.line_end();
        json.extend_from_slice(end);
        // The whole event is one chunk of the body.
        if self.dialect.is_openai() {
            json.extend_from_slice(end);
            http::chunk_of(out, b"data: ", &json);
        } else {
            http::chunk(out, &json);
        }
        self.scratch = json;
    }
}
