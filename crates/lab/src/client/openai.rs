//! Any server that speaks OpenAI's chat completions, streaming: vLLM, SGLang, llama.cpp, TGI, LM Studio, OpenAI itself.
//!
//! Stamps are taken when bytes arrive, before they are parsed. The key comes from the environment or a file and is written nowhere.

mod socket;

use self::socket::{Arrived, Socket};
use super::{BoxFuture, Client, Driver, Place, Settings};
use crate::LabError;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Response, Uri};
use hyper_util::rt::TokioIo;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use wattle_core::exchange::{Dated, Exchange, FailureClass, Finish, Outcome, Request, TokensFrom, Usage};
use wattle_core::registry::{About, Opt, nearest};
use wattle_core::summary::ModelInfo;
use wattle_core::time::Stamp;
use wattle_core::wire::openai::{self as wire, Malformed};
use wattle_core::wire::sse;
use wattle_meter::clock;

/// More than this is not an answer.
const LONGEST_ANSWER: usize = 64 << 20;
/// More of an error body nobody reads.
const LONGEST_ERROR: usize = 64 << 10;
/// More than this is not a list of models.
const LONGEST_LISTING: usize = 4 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection that was closed before the request came shows it sooner; later, the server had begun to work.
const STALE: Duration = Duration::from_millis(100);
/// A server that is well lists its models sooner.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(30);
/// The environment variable that holds the key, as everywhere.
const KEY_VARIABLE: &str = "OPENAI_API_KEY";

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "openai",
        about: "an OpenAI-compatible server at --url (vLLM, SGLang, llama.cpp, TGI, LM Studio, OpenAI); key from OPENAI_API_KEY or key_file",
        options: &[Opt {
            key: "key_file",
            about: "file with the API key (environment variable OPENAI_API_KEY)",
        }],
    },
    open: |settings| Ok(Box::new(OpenAi::open(settings)?)),
};

struct OpenAi {
    endpoint: Endpoint,
    key: Option<HeaderValue>,
    model: Option<String>,
    timeout: Duration,
    idle: Mutex<Vec<Connection>>,
}

/// A connection to the server.
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// When its last bytes came.
    arrived: Arc<Arrived>,
}

/// Where the server is.
struct Endpoint {
    url: String,
    host: String,
    port: u16,
    /// What the Host header says.
    authority: HeaderValue,
    /// Path before `/chat/completions`, without a slash at its end.
    base: String,
    tls: Option<TlsConnector>,
}

/// Something went wrong on the way to an answer.
struct Trouble {
    class: FailureClass,
    error: String,
}

impl Trouble {
    fn network(error: impl std::fmt::Display) -> Self {
        Self { class: FailureClass::Network, error: error.to_string() }
    }

    fn protocol(error: impl std::fmt::Display) -> Self {
        Self { class: FailureClass::Protocol, error: error.to_string() }
    }
}

impl Endpoint {
    fn parse(url: &str) -> Result<Self, LabError> {
        let bad =
            |why: &str| LabError::Usage(format!("--url {url}: {why}; for example http://127.0.0.1:8000/v1"));
        let uri: Uri = url.parse().map_err(|_| bad("not a URL"))?;
        let (tls, usual_port) = match uri.scheme_str() {
            Some("http") => (None, 80),
            Some("https") => (Some(tls()), 443),
            _ => return Err(bad("must start with http:// or https://")),
        };
        let authority = uri.authority().ok_or_else(|| bad("names no host"))?;
        if authority.as_str().contains('@') {
            return Err(bad("must not hold a password; give the key by OPENAI_API_KEY or key_file"));
        }
        if uri.query().is_some() {
            return Err(bad("must not hold a query; give the key by OPENAI_API_KEY or key_file"));
        }
        let base = match uri.path().trim_end_matches('/') {
            "" => "/v1",
            path => path.strip_suffix("/chat/completions").unwrap_or(path),
        };
        Ok(Self {
            url: url.to_owned(),
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(usual_port),
            authority: HeaderValue::from_str(authority.as_str()).map_err(|_| bad("not a URL"))?,
            base: base.to_owned(),
            tls,
        })
    }

    async fn connect(&self) -> Result<Connection, Trouble> {
        let connecting = TcpStream::connect((self.host.as_str(), self.port));
        let tcp = tokio::time::timeout(CONNECT_TIMEOUT, connecting)
            .await
            .map_err(|_| Trouble { class: FailureClass::Timeout, error: "connecting took too long".into() })?
            .map_err(Trouble::network)?;
        tcp.set_nodelay(true).map_err(Trouble::network)?;
        let (socket, arrived) = Socket::new(tcp);
        let sender = match &self.tls {
            None => handshake(TokioIo::new(socket)).await?,
            Some(tls) => {
                let name = ServerName::try_from(self.host.clone()).map_err(Trouble::network)?;
                handshake(TokioIo::new(tls.connect(name, socket).await.map_err(Trouble::network)?)).await?
            }
        };
        Ok(Connection { sender, arrived })
    }
}

async fn handshake<T>(io: T) -> Result<SendRequest<Full<Bytes>>, Trouble>
where
    T: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(io).await.map_err(Trouble::network)?;
    // Ends by itself when the sender is dropped or the server hangs up; errors reach the request in flight.
    tokio::spawn(connection);
    Ok(sender)
}

fn tls() -> TlsConnector {
    let roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    TlsConnector::from(Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth()))
}

fn read_key(settings: &Settings) -> Result<Option<HeaderValue>, LabError> {
    let key = match settings.params.get("key_file") {
        Some(path) => Some(
            std::fs::read_to_string(path)
                .map_err(|e| LabError::Client(format!("cannot read the key file {path}: {e}")))?,
        ),
        None => std::env::var(KEY_VARIABLE).ok().filter(|k| !k.trim().is_empty()),
    };
    key.map(|key| {
        let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim()))
            .map_err(|_| LabError::Client("the API key holds characters that no header can carry".into()))?;
        value.set_sensitive(true);
        Ok(value)
    })
    .transpose()
}

impl OpenAi {
    fn open(settings: &Settings) -> Result<Self, LabError> {
        let url = settings.url.as_deref().ok_or_else(|| {
            LabError::Usage("client \"openai\" needs its server: --url http://127.0.0.1:8000/v1".into())
        })?;
        Ok(Self {
            endpoint: Endpoint::parse(url)?,
            key: read_key(settings)?,
            model: settings.model.clone(),
            timeout: settings.timeout,
            idle: Mutex::new(Vec::new()),
        })
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<hyper::Request<Full<Bytes>>, Trouble> {
        let mut builder = hyper::Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.endpoint.base))
            .header(HOST, self.endpoint.authority.clone())
            .header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            builder = builder.header(AUTHORIZATION, key.clone());
        }
        builder.body(Full::new(Bytes::from(body))).map_err(Trouble::protocol)
    }

    /// Sends on a kept connection or a new one.
    async fn call(
        &self,
        method: Method,
        path: &str,
        body: &[u8],
    ) -> Result<(Response<Incoming>, Lease<'_>, Stamp), Trouble> {
        let kept = self.idle.lock().unwrap_or_else(|e| e.into_inner()).pop();
        let mut first_sent = None;
        if let Some(mut connection) = kept
            && connection.sender.ready().await.is_ok()
        {
            let request = self.request(method.clone(), path, body.to_vec())?;
            let sent = clock::now();
            match connection.sender.send_request(request).await {
                Ok(response) => return Ok((response, Lease { pool: self, connection }, sent)),
                // A kept connection that is closed at once was closed by the server meanwhile (llama.cpp does so after every
                // streamed answer, whatever it says): once more on a new one. The query still counts from its first try.
                Err(error)
                    if (error.is_incomplete_message() || error.is_canceled())
                        && clock::now().since(sent).get() < STALE.as_secs_f64() =>
                {
                    first_sent = Some(sent);
                }
                Err(error) => return Err(Trouble::network(error)),
            }
        }
        let mut connection = self.endpoint.connect().await?;
        let request = self.request(method, path, body.to_vec())?;
        let sent = first_sent.unwrap_or_else(clock::now);
        let response = connection.sender.send_request(request).await.map_err(Trouble::network)?;
        Ok((response, Lease { pool: self, connection }, sent))
    }

    /// The names of the models the server offers, if it lists them.
    async fn models(&self) -> Result<Option<Vec<String>>, Trouble> {
        let asking = async {
            let (response, lease, _) = self.call(Method::GET, "/models", b"").await?;
            let status = response.status();
            let body = whole_body(response, LONGEST_LISTING).await?;
            lease.give_back();
            Ok((status, body))
        };
        let (status, body) = tokio::time::timeout(HEALTH_TIMEOUT, asking).await.unwrap_or_else(|_| {
            let error = format!("nothing came within {} s", HEALTH_TIMEOUT.as_secs());
            Err(Trouble { class: FailureClass::Timeout, error })
        })?;
        match status.as_u16() {
            401 | 403 => Err(Trouble {
                class: FailureClass::Server,
                error: format!("the server refuses the key (HTTP {}); set {KEY_VARIABLE}", status.as_u16()),
            }),
            200 => {
                let list: serde_json::Value = serde_json::from_slice(&body).map_err(Trouble::protocol)?;
                let names = list["data"].as_array().map(|models| {
                    models.iter().filter_map(|m| m["id"].as_str().map(str::to_owned)).collect::<Vec<_>>()
                });
                Ok(names)
            }
            _ => Ok(None), // Alive, and does not list models.
        }
    }

    fn unwell(&self, trouble: Trouble) -> LabError {
        let Trouble { class, error } = trouble;
        let url = &self.endpoint.url;
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

    async fn exchange(&self, request: &Request, exchange: &mut Exchange) -> Result<Finish, Trouble> {
        let body = wire::body(request).to_string();
        let (response, lease, sent) = self.call(Method::POST, "/chat/completions", body.as_bytes()).await?;
        exchange.sent = sent;
        let status = response.status();
        if !status.is_success() {
            let body = whole_body(response, LONGEST_ERROR).await?;
            lease.give_back();
            let text = serde_json::from_slice(&body)
                .map_or_else(|_| String::from_utf8_lossy(&body).trim().to_owned(), |v| wire::error_text(&v));
            return Err(Trouble {
                class: FailureClass::Server,
                error: format!("HTTP {}: {text}", status.as_u16()),
            });
        }
        let streamed = response
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|v| v.to_str().ok())
            .is_some_and(|v| v.starts_with("text/event-stream"));
        let finish = if streamed {
            read_stream(response.into_body(), &lease.connection.arrived, exchange).await?
        } else {
            let body = whole_body(response, LONGEST_ANSWER).await?;
            let mut finish = None;
            take_chunk(&body, None, exchange, &mut finish)?;
            finish
        };
        lease.give_back();
        finish.ok_or_else(|| {
            Trouble::protocol("the answer broke off: the stream ended without a finish reason")
        })
    }
}

/// A connection in use; given back when its answer was read to the end, closed otherwise.
struct Lease<'a> {
    pool: &'a OpenAi,
    connection: Connection,
}

impl Lease<'_> {
    fn give_back(self) {
        self.pool.idle.lock().unwrap_or_else(|e| e.into_inner()).push(self.connection);
    }
}

async fn whole_body(response: Response<Incoming>, longest: usize) -> Result<Vec<u8>, Trouble> {
    let mut body = response.into_body();
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Some(data) = frame.map_err(Trouble::network)?.data_ref() {
            if bytes.len() + data.len() > longest {
                return Err(Trouble::protocol(format!("the server's answer is longer than {longest} bytes")));
            }
            bytes.extend_from_slice(data);
        }
    }
    Ok(bytes)
}

async fn read_stream(
    mut body: Incoming,
    arrived: &Arrived,
    exchange: &mut Exchange,
) -> Result<Option<Finish>, Trouble> {
    let mut decoder = sse::Decoder::default();
    let (mut finish, mut trouble) = (None, None);
    let mut take = |data: &[u8], at: Stamp, exchange: &mut Exchange| {
        if trouble.is_none() {
            trouble = take_chunk(data, Some(at), exchange, &mut finish).err();
        }
    };
    while let Some(frame) = body.frame().await {
        // Its bytes came no later than this; a piece that came in two is dated by its end.
        let (at, dated) = arrived.last();
        let frame = frame.map_err(|e| Trouble::network(format!("the answer broke off: {e}")))?;
        if let Some(data) = frame.data_ref() {
            exchange.dated = dated;
            decoder.push(data, |event| take(event, at, exchange)).map_err(Trouble::protocol)?;
        }
    }
    let (at, _) = arrived.last();
    decoder.finish(|event| take(event, at, exchange)).map_err(Trouble::protocol)?;
    trouble.map_or(Ok(finish), Err)
}

/// Takes in one event; `at` is when its bytes arrived, if that says anything about its tokens.
fn take_chunk(
    data: &[u8],
    at: Option<Stamp>,
    exchange: &mut Exchange,
    finish: &mut Option<Finish>,
) -> Result<(), Trouble> {
    let chunk = match wire::parse(data) {
        Ok(Some(chunk)) => chunk,
        Ok(None) => return Ok(()),
        Err(Malformed::Server(error)) => return Err(Trouble { class: FailureClass::Server, error }),
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
    exchange.response_id = exchange.response_id.take().or(chunk.id);
    exchange.usage = chunk.usage.unwrap_or(exchange.usage);
    exchange.server = chunk.timings.or(exchange.server.take());
    *finish = chunk.finish.or(*finish);
    Ok(())
}

impl Client for OpenAi {
    fn place(&self) -> Place {
        let Endpoint { host, port, .. } = &self.endpoint;
        // An address is this machine's if a socket can be bound to it; nothing is sent.
        let ours = |address: SocketAddr| {
            address.ip().to_canonical().is_loopback() || UdpSocket::bind((address.ip(), 0)).is_ok()
        };
        let found = (host.as_str(), *port).to_socket_addrs();
        if found.is_ok_and(|mut all| all.any(ours)) {
            Place::ThisHost
        } else {
            Place::Elsewhere { host: host.clone() }
        }
    }

    fn health(&self) -> BoxFuture<'_, Result<(), LabError>> {
        Box::pin(async { self.models().await.map(|_| ()).map_err(|t| self.unwell(t)) })
    }

    fn prepare(&self) -> BoxFuture<'_, Result<ModelInfo, LabError>> {
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

    fn send<'a>(&'a self, request: &'a Request, due: Stamp) -> BoxFuture<'a, Exchange> {
        Box::pin(async move {
            let now = clock::now();
            let mut exchange = Exchange {
                response_id: None,
                due,
                sent: now,
                first_token: None,
                tokens: Vec::new(),
                done: now,
                dated: Dated::Client,
                usage: Usage::default(),
                outcome: Outcome::Ok { finish: Finish::Other },
                answer: String::new(),
                server: None,
            };
            let outcome = tokio::time::timeout(self.timeout, self.exchange(request, &mut exchange)).await;
            exchange.done = clock::now();
            exchange.outcome = match outcome {
                Ok(Ok(finish)) => Outcome::Ok { finish },
                Ok(Err(Trouble { class, error })) => Outcome::Failed { class, error },
                Err(_) => Outcome::Failed {
                    class: FailureClass::Timeout,
                    error: format!("no whole answer after {} s; raise timeout_s", self.timeout.as_secs_f64()),
                },
            };
            // A server that sends no usage leaves only the pieces to count; the label says so.
            if exchange.usage.completion.is_none() && !exchange.tokens.is_empty() {
                exchange.usage.completion = Some(exchange.tokens.len() as u64);
                exchange.usage.from = Some(TokensFrom::Chunks);
            }
            exchange
        })
    }

    fn close(&self) -> BoxFuture<'_, Result<(), LabError>> {
        Box::pin(async {
            self.idle.lock().unwrap_or_else(|e| e.into_inner()).clear();
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_understood_or_refused() {
        let base = |url: &str| Endpoint::parse(url).map(|e| (e.host, e.port, e.base)).ok();
        let is = |host: &str, port, base: &str| Some((host.to_owned(), port, base.to_owned()));
        assert_eq!(base("http://127.0.0.1:8000"), is("127.0.0.1", 8000, "/v1"));
        assert_eq!(base("http://[::1]:8000/v1/"), is("::1", 8000, "/v1"));
        assert_eq!(base("https://api.example.com/openai/v1"), is("api.example.com", 443, "/openai/v1"));
        assert_eq!(base("http://h/v1/chat/completions"), is("h", 80, "/v1"));
        for wrong in [
            "127.0.0.1:8000",
            "ftp://x",
            "http://",
            "http://user:secret@h/v1",
            "http://h/v1?key=secret",
            "not a url",
        ] {
            assert!(base(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn only_loopback_is_this_host() {
        let place = |url: &str| {
            let settings = Settings { url: Some(url.into()), ..Settings::default() };
            OpenAi::open(&settings).unwrap().place()
        };
        assert_eq!(place("http://localhost:1"), Place::ThisHost);
        assert_eq!(place("http://[::1]:1"), Place::ThisHost);
        assert_eq!(place("http://0.0.0.0:1"), Place::ThisHost);
        assert_eq!(place("http://192.0.2.7:1"), Place::Elsewhere { host: "192.0.2.7".into() });
        assert_eq!(place("http://gpu1.invalid:1"), Place::Elsewhere { host: "gpu1.invalid".into() });
    }
}
