//! Any server that speaks OpenAI's chat completions or completions, streaming: vLLM, SGLang, llama.cpp, TGI, LM Studio, OpenAI.

use super::{BoxFuture, Client, Driver, Limits, Live, Place, Settings, Tell, Verdict, carry};
use crate::LabError;
use crate::http::{Answer, Endpoint, Http, KEY_VARIABLE, Piece, Trouble, Version, read_key, refusal};
use crate::tokenizer::Tokenizer;
use hyper::Method;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use wattle_core::exchange::{Exchange, FailureClass, Finish, Request, TokensFrom};
use wattle_core::record::{DEEPEST, deeper_than};
use wattle_core::registry::{About, Opt, Params, nearest};
use wattle_core::summary::ModelInfo;
use wattle_core::time::Stamp;
use wattle_core::wire::openai::{self as wire, Api, CapKey, Malformed};
use wattle_core::wire::prometheus::{LONGEST_SCRAPE, Load};
use wattle_core::wire::sse;

/// More than this is not an answer.
const LONGEST_ANSWER: usize = 64 << 20;
/// More than this is not a list of models.
const LONGEST_LISTING: usize = 4 << 20;
/// A server that is well lists its models sooner.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(30);
/// What a server says later about its load is old.
const LOAD_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "openai",
        about: "an OpenAI-compatible server at --url (vLLM, SGLang, llama.cpp, TGI, LM Studio, OpenAI); key from OPENAI_API_KEY or key_file",
        options: &[
            Opt { key: "key_file", about: "file with the API key (environment variable OPENAI_API_KEY)" },
            Opt { key: "api", about: "chat, or completions: the prompt as it is, without a template (chat)" },
            Opt {
                key: "cap",
                about: "key of the token cap: max_tokens or max_completion_tokens (max_tokens)",
            },
            Opt { key: "body", about: "more of each request, a JSON object; null takes a key away" },
            Opt {
                key: "tokenizer",
                about: "tokenizer.json, to count tokens where a server does not; else pieces are counted",
            },
            Opt {
                key: "http",
                about: "1, or 2: up to a hundred requests on a connection, tokens dated when read (1)",
            },
        ],
    },
    open: |settings| Ok(Box::new(OpenAi::open(settings)?)),
};

struct OpenAi {
    http: Http,
    /// The same server beside its API: what it says about itself has connections of its own.
    beside: Http,
    model: Option<String>,
    limits: Limits,
    api: Api,
    cap: CapKey,
    more: Map<String, Value>,
    tokenizer: Option<Tokenizer>,
}

/// What a stream said beside its exchange.
#[derive(Default)]
struct Said {
    finish: Option<Finish>,
    /// Reasoning and tool calls: tokens that are not part of the answer. Kept where they are to be counted.
    aside: Option<String>,
}

impl OpenAi {
    fn open(settings: &Settings) -> Result<Self, LabError> {
        let url = settings.url.as_deref().ok_or_else(|| {
            LabError::Usage("client \"openai\" needs its server: --url http://127.0.0.1:8000/v1".into())
        })?;
        let version = Version::parse(&settings.params)?;
        let endpoint = Endpoint::parse(url, version, "/v1", &["/chat/completions", "/completions"])?;
        let key = read_key(&settings.params, Some(KEY_VARIABLE))?;
        Ok(Self {
            beside: Http::new(endpoint.without("/v1"), key.clone(), LOAD_TIMEOUT),
            http: Http::new(endpoint, key, settings.limits.connect),
            model: settings.model.clone(),
            limits: settings.limits,
            api: choice(&settings.params, "api", &[("chat", Api::Chat), ("completions", Api::Completions)])?,
            cap: choice(
                &settings.params,
                "cap",
                &[("max_tokens", CapKey::MaxTokens), ("max_completion_tokens", CapKey::MaxCompletionTokens)],
            )?,
            more: match settings.params.get("body") {
                None => Map::new(),
                Some(text) => serde_json::from_str(text)
                    .map_err(|e| LabError::Usage(format!("body={text}: not a JSON object: {e}")))?,
            },
            tokenizer: settings.params.get("tokenizer").map(|p| Tokenizer::open(Path::new(p))).transpose()?,
        })
    }

    /// The names of the models the server offers, if it lists them.
    async fn models(&self) -> Result<Option<Vec<String>>, Trouble> {
        let asking = async {
            let answer = self.http.call(Method::GET, "/models", Vec::new(), None).await?;
            Ok((answer.status(), answer.whole(LONGEST_LISTING).await?))
        };
        let (status, body) = tokio::time::timeout(HEALTH_TIMEOUT, asking).await.unwrap_or_else(|_| {
            let error = format!("nothing came within {} s", HEALTH_TIMEOUT.as_secs());
            Err(Trouble::new(FailureClass::Timeout, error))
        })?;
        match status {
            401 | 403 => Err(Trouble::new(
                FailureClass::Server,
                format!("the server refuses the key (HTTP {status}); set {KEY_VARIABLE}"),
            )),
            // llama.cpp and others say so while they load.
            503 => Err(Trouble::new(FailureClass::Server, "the server is not ready yet (HTTP 503)")),
            200 => {
                let list: Value = serde_json::from_slice(&body).map_err(Trouble::protocol)?;
                let names = list["data"].as_array().map(|models| {
                    models.iter().filter_map(|m| m["id"].as_str().map(str::to_owned)).collect::<Vec<_>>()
                });
                Ok(names)
            }
            _ => Ok(None), // Alive, and does not list models.
        }
    }

    /// What the server says about its load; `None` if it does not.
    async fn scrape(&self) -> Option<Load> {
        let asking = async {
            let answer = self.beside.call(Method::GET, "/metrics", Vec::new(), None).await.ok()?;
            if answer.status() != 200 {
                return None;
            }
            answer.whole(LONGEST_SCRAPE).await.ok()
        };
        Load::read(&tokio::time::timeout(LOAD_TIMEOUT, asking).await.ok()??)
    }

    /// What the server says about itself at one of its own places.
    async fn said(&self, path: &str) -> Option<Value> {
        let asking = async {
            let answer = self.beside.call(Method::GET, path, Vec::new(), None).await.ok()?;
            if answer.status() != 200 {
                return None;
            }
            serde_json::from_slice(&answer.whole(LONGEST_LISTING).await.ok()?).ok()
        };
        tokio::time::timeout(LOAD_TIMEOUT, asking).await.ok()?
    }

    fn unwell(&self, trouble: Trouble) -> LabError {
        let Trouble { class, error, .. } = trouble;
        let url = self.http.url();
        LabError::Client(match class {
            FailureClass::Server => format!("{url}: {error}"),
            FailureClass::Protocol => {
                format!(
                    "{url} answered, but not with a list of models ({error}); does the address end in /v1?"
                )
            }
            _ => format!("no answer from {url}: {error}; is the server running, and is the address right?"),
        })
    }

    async fn exchange(&self, request: &Request, live: &Live) -> Result<Finish, Trouble> {
        let body = wire::body(request, self.api, self.cap, &self.more);
        let answer = self.http.call(Method::POST, self.api.path(), body, Some(live)).await?;
        if !answer.is_success() {
            return Err(refusal(answer, wire::error_text).await);
        }
        let mut said = Said { finish: None, aside: self.tokenizer.as_ref().map(|_| String::new()) };
        if answer.is("text/event-stream") {
            read_stream(answer, live, &mut said).await?;
        } else {
            let body = answer.whole(LONGEST_ANSWER).await?;
            live.with(|exchange| take_chunk(&body, None, exchange, &mut said))?;
        }
        live.with(|exchange| self.count(exchange, &said));
        said.finish.ok_or_else(|| {
            Trouble::protocol("the answer broke off: the stream ended without a finish reason")
        })
    }

    /// Counts the tokens of an answer whose server did not.
    fn count(&self, exchange: &mut Exchange, said: &Said) {
        if exchange.usage.completion.is_some() {
            return;
        }
        let counted = self.tokenizer.as_ref().zip(said.aside.as_ref()).and_then(|(tokenizer, aside)| {
            Some(tokenizer.count(&exchange.answer).ok()? + tokenizer.count(aside).ok()?)
        });
        if let Some(tokens) = counted {
            exchange.usage.completion = Some(tokens as u64);
            exchange.usage.from = Some(TokensFrom::Tokenizer);
        }
    }
}

/// One of several words, the first if none is given.
fn choice<T: Copy>(params: &Params, key: &str, all: &[(&str, T)]) -> Result<T, LabError> {
    let Some(given) = params.get(key) else { return Ok(all[0].1) };
    all.iter().find(|(word, _)| word == given).map(|(_, value)| *value).ok_or_else(|| {
        let words: Vec<&str> = all.iter().map(|(word, _)| *word).collect();
        LabError::Usage(format!("{key}={given}: there is {}", words.join(" and ")))
    })
}

async fn read_stream(mut answer: Answer<'_>, live: &Live, said: &mut Said) -> Result<(), Trouble> {
    let mut decoder = sse::Decoder::default();
    let mut trouble = None;
    let mut take = |data: &[u8], at: Stamp, exchange: &mut Exchange| {
        if trouble.is_none() {
            trouble = take_chunk(data, Some(at), exchange, said).err();
        }
    };
    let mut last = Stamp::default();
    while let Some(Piece { bytes, at, dated }) = answer.piece().await? {
        last = at;
        live.with(|exchange| {
            exchange.dated = dated;
            exchange.done = at;
            decoder.push(bytes, |event| take(event, at, exchange))
        })
        .map_err(Trouble::protocol)?;
    }
    live.with(|exchange| decoder.finish(|event| take(event, last, exchange))).map_err(Trouble::protocol)?;
    answer.give_back();
    trouble.map_or(Ok(()), Err)
}

/// Takes in one event; `at` is when its bytes arrived, if that says anything about its tokens.
fn take_chunk(
    data: &[u8],
    at: Option<Stamp>,
    exchange: &mut Exchange,
    said: &mut Said,
) -> Result<(), Trouble> {
    let chunk = match wire::parse(data) {
        Ok(Some(chunk)) => chunk,
        Ok(None) => return Ok(()),
        Err(Malformed::Server(error)) => return Err(Trouble::new(FailureClass::Server, error)),
        Err(shape) => return Err(Trouble::protocol(shape)),
    };
    if let Some(at) = at.filter(|_| chunk.has_token) {
        exchange.first_token.get_or_insert(at);
        exchange.tokens.push(at);
    }
    if exchange.answer.len() + chunk.content.len() > LONGEST_ANSWER {
        return Err(Trouble::protocol("the answer is longer than 64 MiB"));
    }
    exchange.answer.push_str(&chunk.content);
    if let Some(aside) = said.aside.as_mut().filter(|aside| aside.len() < LONGEST_ANSWER) {
        aside.push_str(&chunk.aside);
    }
    if exchange.response_id.is_none() {
        exchange.response_id = chunk.id.map(Into::into);
    }
    exchange.usage = chunk.usage.unwrap_or(exchange.usage);
    // What is nested too deeply could not be read back.
    if let Some(timings) = chunk.timings.filter(|t| !deeper_than(t, DEEPEST)) {
        exchange.server = Some(timings);
    }
    said.finish = chunk.finish.or(said.finish);
    Ok(())
}

/// Where an engine says which it is.
struct Identity {
    engine: &'static str,
    path: &'static str,
    /// The key of its version, and keys that name the format of the weights.
    version: &'static str,
    format: &'static [&'static str],
}

/// By their documentation in 2026; whoever answers first is it. llama.cpp's file has its format in its name.
const IDENTITIES: &[Identity] = &[
    Identity { engine: "vllm", path: "/version", version: "version", format: &[] },
    Identity { engine: "llama.cpp", path: "/props", version: "build_info", format: &["model_path"] },
    Identity {
        engine: "sglang",
        path: "/get_server_info",
        version: "version",
        format: &["quantization", "dtype"],
    },
    Identity { engine: "tgi", path: "/info", version: "version", format: &["quantize", "model_dtype"] },
];

/// A server may say anything; of a path, the file's name.
fn shortened(text: &str) -> String {
    let name = text.rsplit('/').next().unwrap_or(text);
    name.chars().filter(|c| !c.is_control()).take(100).collect()
}

impl Client for OpenAi {
    fn place(&self) -> Place {
        self.http.endpoint().place()
    }

    fn health(&self) -> BoxFuture<'_, Result<(), LabError>> {
        Box::pin(async { self.models().await.map(|_| ()).map_err(|t| self.unwell(t)) })
    }

    fn prepare<'a>(&'a self, _tell: Tell<'a>) -> BoxFuture<'a, Result<ModelInfo, LabError>> {
        Box::pin(async {
            let served = self.models().await.map_err(|t| self.unwell(t))?.unwrap_or_default();
            let name = match (&self.model, served.as_slice()) {
                (Some(name), []) => name.clone(),
                (Some(name), served) if served.contains(name) => name.clone(),
                (Some(name), served) => {
                    let meant = nearest(name, served.iter().map(String::as_str))
                        .map_or_else(String::new, |n| format!(", did you mean \"{n}\"?"));
                    let all = served.join(", ");
                    return Err(LabError::Usage(format!(
                        "the server has no model \"{name}\"{meant}; it has: {all}"
                    )));
                }
                (None, [only]) => only.clone(),
                (None, []) => {
                    return Err(LabError::Usage(
                        "the server does not list its models; name one with --model".into(),
                    ));
                }
                (None, several) => {
                    return Err(LabError::Usage(format!(
                        "the server has several models, name one with --model: {}",
                        several.join(", ")
                    )));
                }
            };
            Ok(ModelInfo { name, ..ModelInfo::default() })
        })
    }

    fn connect(&self, requests: u32) -> BoxFuture<'_, ()> {
        Box::pin(self.http.connect(requests as usize))
    }

    fn send<'a>(&'a self, request: &'a Request, live: &'a Arc<Live>) -> BoxFuture<'a, Verdict> {
        Box::pin(carry(&self.limits, live, self.exchange(request, live)))
    }

    fn identify<'a>(&'a self, model: &'a mut ModelInfo) -> BoxFuture<'a, ()> {
        Box::pin(async {
            for place in IDENTITIES {
                let Some(said) = self.said(place.path).await else { continue };
                let text = |key: &str| said[key].as_str().filter(|t| !t.is_empty()).map(shortened);
                let Some(version) = text(place.version) else { continue };
                model.engine.get_or_insert(format!("{} {version}", place.engine));
                if let Some(format) = place.format.iter().find_map(|key| text(key)) {
                    model.format.get_or_insert(format);
                }
                return;
            }
        })
    }

    fn load(&self) -> BoxFuture<'_, Option<Load>> {
        Box::pin(self.scrape())
    }

    fn connections(&self) -> Option<u64> {
        Some(self.http.opened())
    }

    fn close(&self) -> BoxFuture<'_, Result<(), LabError>> {
        Box::pin(async {
            self.http.close();
            self.beside.close();
            Ok(())
        })
    }
}
