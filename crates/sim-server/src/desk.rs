//! Takes requests: which answer belongs to which, with which traps, and what the small endpoints say.

use crate::answer::{Answer, Gaps, State};
use crate::ask::{self, Ask};
use crate::http::{self, Head};
use crate::served::{Clock, Outcome, Served};
use crate::socket::Received;
use crate::trap::Trap;
use crate::voice::{self, Dialect, PULL_LINES, Script, Voice, Words};
use crate::{Config, clock};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

const JSON: &str = "application/json";

/// The desk.
pub(crate) struct Desk {
    config: Config,
    words: Rc<Words>,
    wide_words: Rc<Words>,
    /// Requests for answers so far.
    requests: u64,
    /// How often the same body was refused.
    refusals: HashMap<u64, u32>,
    pub(crate) counts: Counts,
}

/// What `/metrics` tells.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    pub(crate) prompt_tokens: u64,
    pub(crate) generation_tokens: u64,
    pub(crate) finished: u64,
}

impl Counts {
    /// Tokens came for a request that had `before`. With the first, its prompt was worked off.
    pub(crate) fn add(&mut self, served: &Served, before: usize) {
        let came = served.scheduled.len() - before;
        self.generation_tokens += came as u64;
        if before == 0 && came > 0 {
            self.prompt_tokens += served.prompt_tokens;
        }
    }
}

impl Desk {
    pub(crate) fn new(config: Config) -> Desk {
        let words = config.answer.as_deref().map_or_else(Words::usual, Words::of);
        Desk {
            config,
            words: Rc::new(words),
            wide_words: Rc::new(Words::wide()),
            requests: 0,
            refusals: HashMap::new(),
            counts: Counts::default(),
        }
    }

    /// Takes a request: says what can be said at once into `out`, and gives the answer that is to be given.
    pub(crate) fn take(
        &mut self,
        head: &Head,
        body: &[u8],
        received: Received,
        connection: u64,
        out: &mut Vec<u8>,
    ) -> Option<Box<Answer>> {
        let dialect = Dialect::of(&head.path).filter(|_| head.method == "POST");
        let Some(dialect) = dialect else {
            self.small(head, out);
            return None;
        };
        let ask = match ask::parse(body) {
            Ok(ask) => ask,
            Err(why) => {
                let body = voice::failure(dialect.is_openai(), &why);
                http::respond(out, "400 Bad Request", JSON, "", body.as_bytes());
                return None;
            }
        };
        let mut answer = self.answer(head, dialect, ask, received, connection);
        if !self.refuses(&mut answer, body, dialect, out) {
            answer.open(out);
        }
        Some(Box::new(answer))
    }

    fn answer(
        &mut self,
        head: &Head,
        dialect: Dialect,
        ask: Ask,
        received: Received,
        connection: u64,
    ) -> Answer {
        self.requests += 1;
        let (number, config) = (self.requests, &self.config);
        let mut traps = ask.traps;
        let nth = config.traps.iter().filter(|t| number.is_multiple_of(t.every.max(1)));
        traps.extend(nth.map(|t| t.trap));
        let wide = traps.iter().any(|t| matches!(t, Trap::SplitUtf8(_)));
        let words = Rc::clone(if wide { &self.wide_words } else { &self.words });
        let (tokens, finish) = how_many(config, &words, dialect, ask.tokens, ask.limit);
        let id = head.id.clone().unwrap_or_else(|| {
            let kind = if dialect == Dialect::Chat { "chatcmpl" } else { "cmpl" };
            format!("{kind}-{number}")
        });
        let asked = ask.stream.unwrap_or(dialect.streams_by_itself());
        let voice = Voice::new(&Script {
            dialect,
            stream: asked && !traps.contains(&Trap::NotStreaming),
            id: &id,
            model: ask.model.as_deref().unwrap_or(&config.model),
            prompt_tokens: ask.prompt_tokens,
            tokens,
            finish,
            include_usage: ask.include_usage,
            timings: config.timings,
            traps: &traps,
            words,
            created: clock::wall_seconds(),
        });
        let (ttft, itl) = match dialect {
            Dialect::Pull => (config.pull_step_ms, config.pull_step_ms),
            _ => (ask.ttft_ms.unwrap_or(config.ttft_ms), ask.itl_ms.unwrap_or(config.itl_ms)),
        };
        let mut gaps = Gaps::new(clock::from_ms(itl), config.jitter, config.seed, number);
        let due = received.at + gaps.vary(clock::from_ms(ttft));
        let served = Served {
            id,
            number,
            connection,
            path: head.path.clone(),
            received: received.at,
            received_by: if received.by_kernel { Clock::Kernel } else { Clock::Server },
            first_byte: None,
            last_byte: None,
            begun: None,
            scheduled: Vec::with_capacity(tokens as usize),
            written: Vec::with_capacity(tokens as usize),
            prompt_tokens: ask.prompt_tokens,
            output_tokens: tokens,
            outcome: Outcome::Finished,
            traps,
            joules: None,
        };
        let mut answer = Answer::new(voice, served, due, gaps, clock::from_ms(config.load_ms));
        answer.close |= head.close;
        answer.in_engine = config.engine.is_some() && dialect != Dialect::Pull;
        answer
    }

    /// Whether a trap takes the place of the whole answer.
    fn refuses(&mut self, answer: &mut Answer, body: &[u8], dialect: Dialect, out: &mut Vec<u8>) -> bool {
        let json = |message: &str| voice::failure(dialect.is_openai(), message);
        let before = out.len();
        let mut state = State::Complete;
        for trap in &answer.served.traps {
            match *trap {
                Trap::Status429(tries) => {
                    let mut hasher = DefaultHasher::new();
                    body.hash(&mut hasher);
                    let refused = self.refusals.entry(hasher.finish()).or_default();
                    *refused += 1;
                    if *refused > tries {
                        continue;
                    }
                    let more = format!("retry-after: {}\r\n", self.config.retry_after_s);
                    let body = json("too many requests");
                    http::respond(out, "429 Too Many Requests", JSON, &more, body.as_bytes());
                }
                Trap::Status500 => {
                    http::respond(
                        out,
                        "500 Internal Server Error",
                        JSON,
                        "",
                        json("something broke").as_bytes(),
                    );
                }
                Trap::Status503 => {
                    let body = json("the model is loading");
                    http::respond(out, "503 Service Unavailable", JSON, "", body.as_bytes());
                }
                Trap::ErrorBody(shape) => {
                    let (status, kind, body) = voice::shaped(shape);
                    http::respond(out, status, kind, "", body.as_bytes());
                }
                Trap::GarbageHead => {
                    out.extend_from_slice(voice::garbage_head());
                    state = State::Cut;
                }
                Trap::Hang => state = State::Silent,
                _ => continue,
            }
            break;
        }
        let refused = out.len() > before || state == State::Silent;
        if refused {
            answer.state = state;
            answer.served.outcome = Outcome::Trapped;
        }
        refused
    }

    /// The endpoints that answer at once.
    fn small(&self, head: &Head, out: &mut Vec<u8>) {
        let model = voice::quoted(&self.config.model);
        let (kind, body) = match (head.method.as_str(), head.path.as_str()) {
            ("GET", "/v1/models") => (
                JSON,
                format!(
                    r#"{{"object":"list","data":[{{"id":{model},"object":"model","created":0,"owned_by":"wattle"}}]}}"#
                ),
            ),
            ("GET", "/version") if self.config.version.is_some() => {
                let version = voice::quoted(self.config.version.as_deref().unwrap_or_default());
                (JSON, format!(r#"{{"version":{version}}}"#))
            }
            ("GET", "/health") => (JSON, r#"{"status":"ok"}"#.to_owned()),
            ("GET", "/metrics") if self.config.metrics => {
                ("text/plain; version=0.0.4; charset=utf-8", self.metrics())
            }
            ("GET", "/api/version") => (JSON, r#"{"version":"0.12.0"}"#.to_owned()),
            ("GET", "/api/tags") => (
                JSON,
                format!(
                    r#"{{"models":[{{"name":{model},"model":{model},"modified_at":"{}","size":98000000,"digest":"0000","details":{{"format":"gguf","family":"llama","parameter_size":"135M","quantization_level":"Q4_1"}}}}]}}"#,
                    voice::date(clock::wall_seconds())
                ),
            ),
            ("GET", "/") => ("text/plain", "Ollama is running".to_owned()),
            ("HEAD", "/") => ("text/plain", String::new()), // Ollama's own client asks so
            _ => {
                let body = voice::failure(!head.path.starts_with("/api/"), "no such endpoint");
                return http::respond(out, "404 Not Found", JSON, "", body.as_bytes());
            }
        };
        http::respond(out, "200 OK", kind, "", body.as_bytes());
    }

    fn metrics(&self) -> String {
        let Counts { running, waiting, prompt_tokens, generation_tokens, finished } = self.counts;
        let label = format!("{{model_name={}}}", voice::quoted(&self.config.model));
        format!(
            "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{label} {running}.0\n\
             # TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{label} {waiting}.0\n\
             # TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total{label} {prompt_tokens}.0\n\
             # TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{label} {generation_tokens}.0\n\
             # TYPE vllm:request_success_total counter\nvllm:request_success_total{label} {finished}.0\n"
        )
    }
}

/// Tokens of an answer, and why it ends after them.
fn how_many(
    config: &Config,
    words: &Words,
    dialect: Dialect,
    wished: Option<u32>,
    limit: Option<u32>,
) -> (u32, &'static str) {
    if dialect == Dialect::Pull {
        return (PULL_LINES, "stop");
    }
    if let Some(wished) = wished {
        return (wished.max(1), "stop");
    }
    let all = if config.answer.is_some() { (words.count() as u32).min(config.tokens) } else { config.tokens };
    match limit {
        Some(limit) if limit <= all => (limit.max(1), "length"),
        _ => (all.max(1), "stop"),
    }
}
