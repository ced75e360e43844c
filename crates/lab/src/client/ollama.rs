//! Ollama by its own API: its counts and durations are the engine's, and a model that is not there yet is fetched.

use super::{BoxFuture, Client, Driver, Limits, Live, Place, Settings, Tell, Verdict, carry};
use crate::LabError;
use crate::http::{Answer, Endpoint, Http, Piece, Trouble, Version, read_key, refusal};
use hyper::Method;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Duration;
use wattle_core::exchange::{Exchange, FailureClass, Finish, Request};
use wattle_core::registry::{About, Opt};
use wattle_core::summary::ModelInfo;
use wattle_core::time::Stamp;
use wattle_core::wire::ollama::{self as wire, Lines, Malformed};
use wattle_core::wire::openai::error_text;

/// Where Ollama listens unless told otherwise.
const USUAL: &str = "http://127.0.0.1:11434";
/// More than this is not an answer.
const LONGEST_ANSWER: usize = 64 << 20;
/// More than this is not a list of models.
const LONGEST_LISTING: usize = 4 << 20;
/// A server that is well says its version sooner.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(30);
/// A large model takes minutes from a slow disk.
const LOAD_TIMEOUT: Duration = Duration::from_secs(1800);

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "ollama",
        about: "Ollama by its own API, at --url or http://127.0.0.1:11434; fetches and loads the model first",
        options: &[
            Opt { key: "options", about: "options of the model, a JSON object: {\"num_ctx\": 8192}" },
            Opt { key: "pull", about: "true, or false: refuse if the model is not there (true)" },
            Opt { key: "key_file", about: "file with an API key, if a proxy wants one" },
        ],
    },
    open: |settings| Ok(Box::new(Ollama::open(settings)?)),
};

struct Ollama {
    http: Http,
    model: Option<String>,
    limits: Limits,
    options: Map<String, Value>,
    pull: bool,
}

impl Ollama {
    fn open(settings: &Settings) -> Result<Self, LabError> {
        let url = settings.url.as_deref().unwrap_or(USUAL);
        let endpoint = Endpoint::parse(url, Version::Http1, "", &["/api/chat", "/api", "/v1"])?;
        let wrong = |key: &str, why: &dyn std::fmt::Display| LabError::Usage(format!("{key}: {why}"));
        Ok(Self {
            http: Http::new(endpoint, read_key(&settings.params, None)?, settings.limits.connect),
            model: settings.model.clone(),
            limits: settings.limits,
            options: match settings.params.get("options") {
                None => Map::new(),
                Some(text) => serde_json::from_str(text)
                    .map_err(|e| wrong("options", &format!("not a JSON object: {e}")))?,
            },
            pull: match settings.params.get("pull").map(String::as_str) {
                None | Some("true") => true,
                Some("false") => false,
                Some(_) => return Err(wrong("pull", &"there is true and false")),
            },
        })
    }

    /// A small question with a small answer.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        patience: Duration,
    ) -> Result<Value, Trouble> {
        let asking = async {
            let answer = self.http.call(method, path, body, None).await?;
            if !answer.is_success() {
                return Err(refusal(answer, error_text).await);
            }
            let body = answer.whole(LONGEST_LISTING).await?;
            serde_json::from_slice(&body).map_err(Trouble::protocol)
        };
        tokio::time::timeout(patience, asking).await.unwrap_or_else(|_| {
            let error = format!("nothing came within {} s", patience.as_secs());
            Err(Trouble::new(FailureClass::Timeout, error))
        })
    }

    fn unwell(&self, trouble: Trouble) -> LabError {
        let (url, error) = (self.http.url(), trouble.error);
        LabError::Client(match trouble.class {
            FailureClass::Server => format!("{url}: {error}"),
            FailureClass::Protocol => format!("{url} answered, but not as Ollama does ({error})"),
            _ => format!("no answer from {url}: {error}; is Ollama running (\"ollama serve\")?"),
        })
    }

    /// The models that are there.
    async fn listed(&self) -> Result<Vec<Value>, Trouble> {
        let mut tags = self.ask(Method::GET, "/api/tags", Vec::new(), HEALTH_TIMEOUT).await?;
        match tags["models"].take() {
            Value::Array(models) => Ok(models),
            _ => Ok(Vec::new()),
        }
    }

    /// Fetches a model, saying how far it is.
    async fn fetch(&self, name: &str, tell: Tell<'_>) -> Result<(), Trouble> {
        let body = json!({ "model": name, "stream": true }).to_string().into_bytes();
        let mut answer = self.http.call(Method::POST, "/api/pull", body, None).await?;
        if !answer.is_success() {
            return Err(refusal(answer, error_text).await);
        }
        let (mut lines, mut last) = (Lines::default(), Value::Null);
        while let Some(Piece { bytes, .. }) = answer.piece().await? {
            let fits = lines.push(bytes, |line| {
                last = serde_json::from_slice(line).unwrap_or_default();
                let part = last["completed"].as_f64().zip(last["total"].as_f64());
                let part =
                    part.map_or_else(String::new, |(done, all)| format!(" {:.0} %", done / all * 100.0));
                tell(format!("fetching {name}: {}{part}", last["status"].as_str().unwrap_or_default()));
            });
            if !fits {
                return Err(Trouble::protocol("a line of its progress is too long"));
            }
        }
        match &last["status"] {
            Value::String(status) if status == "success" => Ok(()),
            _ => Err(Trouble::new(FailureClass::Server, error_text(&last))),
        }
    }

    async fn ready(&self, tell: Tell<'_>) -> Result<ModelInfo, LabError> {
        let unwell = |trouble| self.unwell(trouble);
        let version =
            self.ask(Method::GET, "/api/version", Vec::new(), HEALTH_TIMEOUT).await.map_err(unwell)?;
        let mut models = self.listed().await.map_err(unwell)?;
        let names = |models: &[Value]| -> Vec<String> {
            models.iter().filter_map(|m| m["name"].as_str().map(str::to_owned)).collect()
        };
        let name = match (&self.model, names(&models).as_slice()) {
            (Some(name), _) => name.clone(),
            (None, [only]) => only.clone(),
            (None, []) => {
                return Err(LabError::Usage("Ollama has no model yet; name one with --model".into()));
            }
            (None, several) => {
                let several = several.join(", ");
                return Err(LabError::Usage(format!(
                    "Ollama has several models, name one with --model: {several}"
                )));
            }
        };
        // A name without a tag means the latest.
        let is = |m: &Value| {
            m["name"].as_str().is_some_and(|n| n == name || n.strip_suffix(":latest") == Some(name.as_str()))
        };
        if !models.iter().any(is) {
            if !self.pull {
                let all = names(&models).join(", ");
                return Err(LabError::Usage(format!(
                    "Ollama has no model \"{name}\" (it has: {all}); fetch it with \"ollama pull {name}\", or leave out pull=false"
                )));
            }
            self.fetch(&name, tell).await.map_err(unwell)?;
            models = self.listed().await.map_err(unwell)?;
        }
        tell(format!("loading {name}"));
        // Without a prompt, nothing is said and the model is loaded.
        let load = json!({ "model": name, "stream": false }).to_string().into_bytes();
        self.ask(Method::POST, "/api/generate", load, LOAD_TIMEOUT).await.map_err(unwell)?;
        let found = models.iter().find(|m| is(m)).unwrap_or(&Value::Null);
        let detail = |key: &str| found["details"][key].as_str().map(str::to_owned);
        Ok(ModelInfo {
            parameters: detail("parameter_size").and_then(|text| parameters(&text)),
            format: detail("quantization_level"),
            sha256: found["digest"].as_str().map(str::to_owned),
            engine: version["version"].as_str().map(|v| format!("ollama {v}")),
            name,
        })
    }

    async fn exchange(&self, request: &Request, live: &Live) -> Result<Finish, Trouble> {
        let body = wire::body(request, &self.options);
        let answer = self.http.call(Method::POST, "/api/chat", body, Some(live)).await?;
        if !answer.is_success() {
            return Err(refusal(answer, error_text).await);
        }
        let finish = read_lines(answer, live).await?;
        finish.ok_or_else(|| Trouble::protocol("the answer broke off: its last line never came"))
    }
}

/// `7.6B`, `135M`.
fn parameters(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, scale) = match text.char_indices().next_back()? {
        (at, 'B') => (&text[..at], 1e9),
        (at, 'M') => (&text[..at], 1e6),
        (at, 'K') => (&text[..at], 1e3),
        _ => (text, 1.0),
    };
    number.trim().parse::<f64>().ok().map(|n| (n * scale) as u64)
}

async fn read_lines(mut answer: Answer<'_>, live: &Live) -> Result<Option<Finish>, Trouble> {
    let mut lines = Lines::default();
    let (mut finish, mut trouble) = (None, None);
    let mut take = |line: &[u8], at: Stamp, exchange: &mut Exchange| {
        if trouble.is_none() && !line.trim_ascii().is_empty() {
            trouble = take_line(line, at, exchange, &mut finish).err();
        }
    };
    let mut last = Stamp::default();
    while let Some(Piece { bytes, at, dated }) = answer.piece().await? {
        last = at;
        let fits = live.with(|exchange| {
            exchange.dated = dated;
            exchange.done = at;
            lines.push(bytes, |line| take(line, at, exchange))
        });
        if !fits {
            return Err(Trouble::protocol(format!("a line is longer than {} MiB", wire::LONGEST_LINE >> 20)));
        }
    }
    live.with(|exchange| lines.finish(|line| take(line, last, exchange)));
    answer.give_back();
    trouble.map_or(Ok(finish), Err)
}

fn take_line(
    line: &[u8],
    at: Stamp,
    exchange: &mut Exchange,
    finish: &mut Option<Finish>,
) -> Result<(), Trouble> {
    let chunk = wire::parse(line).map_err(|malformed| match malformed {
        Malformed::Server(error) => Trouble::new(FailureClass::Server, error),
        shape => Trouble::protocol(shape),
    })?;
    if chunk.has_token {
        exchange.first_token.get_or_insert(at);
        exchange.tokens.push(at);
    }
    if exchange.answer.len() + chunk.content.len() > LONGEST_ANSWER {
        return Err(Trouble::protocol("the answer is longer than 64 MiB"));
    }
    exchange.answer.push_str(&chunk.content);
    exchange.usage = chunk.usage.unwrap_or(exchange.usage);
    if chunk.durations.is_some() {
        exchange.server = chunk.durations;
    }
    *finish = chunk.finish.or(*finish);
    Ok(())
}

impl Client for Ollama {
    fn place(&self) -> Place {
        self.http.endpoint().place()
    }

    fn health(&self) -> BoxFuture<'_, Result<(), LabError>> {
        Box::pin(async {
            let asked = self.ask(Method::GET, "/api/version", Vec::new(), HEALTH_TIMEOUT).await;
            asked.map(|_| ()).map_err(|t| self.unwell(t))
        })
    }

    fn prepare<'a>(&'a self, tell: Tell<'a>) -> BoxFuture<'a, Result<ModelInfo, LabError>> {
        Box::pin(self.ready(tell))
    }

    fn connect(&self, requests: u32) -> BoxFuture<'_, ()> {
        Box::pin(self.http.connect(requests as usize))
    }

    fn send<'a>(&'a self, request: &'a Request, live: &'a Arc<Live>) -> BoxFuture<'a, Verdict> {
        Box::pin(carry(&self.limits, live, self.exchange(request, live)))
    }

    fn connections(&self) -> Option<u64> {
        Some(self.http.opened())
    }

    fn close(&self) -> BoxFuture<'_, Result<(), LabError>> {
        Box::pin(async {
            self.http.close();
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_numbers_of_parameters() {
        assert_eq!(parameters("7.6B"), Some(7_600_000_000));
        assert_eq!(parameters("135M"), Some(135_000_000));
        assert_eq!(parameters("many"), None);
        assert_eq!(parameters(""), None);
    }
}
