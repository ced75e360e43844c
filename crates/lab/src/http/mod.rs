//! Requests to one server over connections that are kept, dated and limited: the way of every client that speaks HTTP.
//!
//! Stamps are taken below TLS, when bytes come and when they are written. The key comes from the environment or a file and is
//! written nowhere.

mod endpoint;
mod socket;

use socket::Traffic;

pub(crate) use endpoint::Endpoint;

use crate::LabError;
use crate::client::Live;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::{http1, http2};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, RETRY_AFTER};
use hyper::{Method, Response};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use wattle_core::exchange::{Dated, FailureClass};
use wattle_core::registry::Params;
use wattle_core::time::Stamp;
use wattle_meter::clock;

/// More of an error body nobody reads.
const LONGEST_ERROR: usize = 64 << 10;
/// A connection that was closed before the request came shows it sooner; later, the server had begun to work.
const STALE: Duration = Duration::from_millis(100);
/// Servers take a hundred streams on one connection by default, and no fewer by the book (RFC 9113, 6.5.2).
const STREAMS: usize = 100;
/// A server that wants to be left alone for longer is not asked again in this run.
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// The environment variable that holds the key, as everywhere.
pub(crate) const KEY_VARIABLE: &str = "OPENAI_API_KEY";

/// How requests are put on connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Version {
    /// One at a time.
    #[default]
    Http1,
    /// Up to a hundred at once.
    Http2,
}

impl Version {
    /// Reads the option `http`.
    pub(crate) fn parse(params: &Params) -> Result<Self, LabError> {
        match params.get("http").map(String::as_str) {
            None | Some("1" | "1.1") => Ok(Version::Http1),
            Some("2") => Ok(Version::Http2),
            Some(other) => Err(LabError::Usage(format!("http={other}: there is 1 and 2"))),
        }
    }
}

/// Something went wrong on the way to an answer.
#[derive(Debug)]
pub(crate) struct Trouble {
    pub(crate) class: FailureClass,
    pub(crate) error: String,
    pub(crate) again: Again,
}

/// Whether it is worth trying once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    /// The server had begun to work, or would say the same again.
    No,
    /// It did not take the request.
    Soon,
    /// It said when.
    After(Duration),
}

impl Trouble {
    pub(crate) fn new(class: FailureClass, error: impl std::fmt::Display) -> Self {
        Self { class, error: error.to_string(), again: Again::No }
    }

    pub(crate) fn network(error: impl std::fmt::Display) -> Self {
        Self::new(FailureClass::Network, error)
    }

    pub(crate) fn protocol(error: impl std::fmt::Display) -> Self {
        Self::new(FailureClass::Protocol, error)
    }

    /// There is no connection.
    fn refused(error: impl std::fmt::Display) -> Self {
        Self { again: Again::Soon, ..Self::network(error) }
    }
}

/// A connection to the server.
struct Connection {
    sender: Sender,
    traffic: Arc<Traffic>,
}

enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

/// A connection that several requests are on.
struct Shared {
    sender: http2::SendRequest<Full<Bytes>>,
    traffic: Arc<Traffic>,
    streams: Arc<AtomicUsize>,
}

/// A server, and the connections to it.
pub(crate) struct Http {
    endpoint: Endpoint,
    key: Option<HeaderValue>,
    patience: Duration,
    idle: Mutex<Vec<Connection>>,
    shared: Mutex<Vec<Shared>>,
    /// Held by whoever opens a connection that others can share.
    opening: tokio::sync::Mutex<()>,
    opened: AtomicU64,
}

/// An answer that has begun.
pub(crate) struct Answer<'a> {
    pub(crate) response: Response<Incoming>,
    lease: Lease<'a>,
}

/// A connection in use; given back when its answer was read to the end, closed otherwise.
struct Lease<'a> {
    http: &'a Http,
    connection: Option<Connection>,
    /// Of a connection that is not ours alone: how many are on it.
    streams: Option<Arc<AtomicUsize>>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Some(streams) = &self.streams {
            streams.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Answer<'_> {
    /// When the bytes at hand came, and who says so: no later than this. On a connection that others are on too, the last bytes
    /// may be theirs, so it is when ours are read.
    pub(crate) fn came(&self) -> (Stamp, Dated) {
        let own = self.lease.connection.as_ref().filter(|_| self.lease.streams.is_none());
        own.map_or_else(|| (clock::now(), Dated::Client), |connection| connection.traffic.came())
    }

    /// The rest of it, if it is not longer than `longest`.
    pub(crate) async fn body(mut self, longest: usize) -> Result<Vec<u8>, Trouble> {
        let mut bytes = Vec::new();
        while let Some(data) = self.piece().await? {
            if bytes.len() + data.len() > longest {
                return Err(Trouble::protocol(format!("the server's answer is longer than {longest} bytes")));
            }
            bytes.extend_from_slice(&data);
        }
        self.give_back();
        Ok(bytes)
    }

    /// The next bytes of it; `None` at its end.
    pub(crate) async fn piece(&mut self) -> Result<Option<Bytes>, Trouble> {
        while let Some(frame) = self.response.body_mut().frame().await {
            let frame = frame.map_err(|e| Trouble::network(format!("the answer broke off: {e}")))?;
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// It was read to its end: its connection can be used again.
    pub(crate) fn give_back(mut self) {
        if let Some(connection) = self.lease.connection.take().filter(|_| self.lease.streams.is_none()) {
            locked(&self.lease.http.idle).push(connection);
        }
    }
}

impl Http {
    pub(crate) fn new(endpoint: Endpoint, key: Option<HeaderValue>, patience: Duration) -> Self {
        Self {
            endpoint,
            key,
            patience,
            idle: Mutex::default(),
            shared: Mutex::default(),
            opening: tokio::sync::Mutex::default(),
            opened: AtomicU64::new(0),
        }
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The address as the user gave it.
    pub(crate) fn url(&self) -> &str {
        &self.endpoint.url
    }

    /// Opens connections until there are enough for `requests` at once, so that none is opened while something is timed. What
    /// goes wrong here goes wrong again with the first request, and is told there.
    pub(crate) async fn connect(&self, requests: usize) {
        while locked(&self.idle).len() < requests && locked(&self.shared).is_empty() {
            let Ok(connection) = self.open().await else { return };
            match connection.sender {
                Sender::Http1(_) => locked(&self.idle).push(connection),
                // The first request that comes makes it one that is shared.
                Sender::Http2(_) => drop(self.lease(connection)),
            }
        }
    }

    /// Closes all connections that nobody uses.
    pub(crate) fn close(&self) {
        locked(&self.idle).clear();
        locked(&self.shared).clear();
    }

    /// How many connections were opened.
    pub(crate) fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    async fn open(&self) -> Result<Connection, Trouble> {
        let connection = self.endpoint.connect(self.patience).await?;
        self.opened.fetch_add(1, Ordering::Relaxed);
        Ok(connection)
    }

    fn request(
        &self,
        method: &Method,
        path: &str,
        body: Bytes,
    ) -> Result<hyper::Request<Full<Bytes>>, Trouble> {
        let mut builder = hyper::Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.endpoint.base))
            .header(HOST, self.endpoint.authority.clone())
            .header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            builder = builder.header(AUTHORIZATION, key.clone());
        }
        builder.body(Full::new(body)).map_err(Trouble::protocol)
    }

    /// Sends on a kept connection or a new one, and waits for the head of the answer. `live` hears when it was sent.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        live: Option<&Live>,
    ) -> Result<Answer<'_>, Trouble> {
        let body = Bytes::from(body);
        if let Some(lease) = self.share() {
            return self.send(lease, self.request(&method, path, body)?, live).await.map_err(|(t, _)| t);
        }
        let kept = locked(&self.idle).pop();
        if let Some(connection) = kept {
            let lease = Lease { http: self, connection: Some(connection), streams: None };
            let began = clock::now();
            match self.send(lease, self.request(&method, path, body.clone())?, live).await {
                Ok(answer) => return Ok(answer),
                // A kept connection that is closed at once was closed by the server meanwhile (llama.cpp does so after every
                // streamed answer, whatever it says): once more on a new one.
                Err((_, true)) if clock::now().since(began).get() < STALE.as_secs_f64() => {}
                Err((trouble, _)) => return Err(trouble),
            }
        }
        // Those that come meanwhile wait, and share what one of them opens.
        let shares = self.endpoint.shares();
        let one = if shares { Some(self.opening.lock().await) } else { None };
        let lease = match self.share().filter(|_| shares) {
            Some(lease) => lease,
            None => self.lease(self.open().await?),
        };
        drop(one);
        self.send(lease, self.request(&method, path, body)?, live).await.map_err(|(t, _)| t)
    }

    /// A new connection for one request; others may join it if it can carry several.
    fn lease(&self, connection: Connection) -> Lease<'_> {
        let streams = match &connection.sender {
            Sender::Http1(_) => None,
            Sender::Http2(sender) => {
                let streams = Arc::new(AtomicUsize::new(1));
                locked(&self.shared).push(Shared {
                    sender: sender.clone(),
                    traffic: Arc::clone(&connection.traffic),
                    streams: Arc::clone(&streams),
                });
                Some(streams)
            }
        };
        Lease { http: self, connection: Some(connection), streams }
    }

    /// A place on a connection that has room.
    fn share(&self) -> Option<Lease<'_>> {
        let mut shared = locked(&self.shared);
        shared.retain(|s| !s.sender.is_closed());
        let with_room = shared.iter().find(|s| s.streams.load(Ordering::Relaxed) < STREAMS)?;
        with_room.streams.fetch_add(1, Ordering::Relaxed);
        let connection = Connection {
            sender: Sender::Http2(with_room.sender.clone()),
            traffic: Arc::clone(&with_room.traffic),
        };
        Some(Lease {
            http: self,
            connection: Some(connection),
            streams: Some(Arc::clone(&with_room.streams)),
        })
    }

    /// Sends it; of trouble, also whether the connection was gone already.
    async fn send<'a>(
        &self,
        mut lease: Lease<'a>,
        request: hyper::Request<Full<Bytes>>,
        live: Option<&Live>,
    ) -> Result<Answer<'a>, (Trouble, bool)> {
        let connection = lease.connection.as_mut().unwrap_or_else(|| unreachable!("a lease begins with one"));
        connection.traffic.start();
        if let Some(live) = live {
            live.sent(clock::now());
        }
        let sent = match &mut connection.sender {
            Sender::Http1(sender) => match sender.ready().await {
                Ok(()) => sender.send_request(request).await,
                Err(error) => Err(error),
            },
            Sender::Http2(sender) => match sender.ready().await {
                Ok(()) => sender.send_request(request).await,
                Err(error) => Err(error),
            },
        };
        let response = sent.map_err(|error| {
            let gone = error.is_incomplete_message() || error.is_canceled() || error.is_closed();
            (Trouble::network(&error), gone)
        })?;
        // Better known now: when its bytes were given to the kernel.
        if let (Some(live), Some(written), None) = (live, connection.traffic.written(), &lease.streams) {
            live.sent(written);
        }
        Ok(Answer { response, lease })
    }
}

/// What an answer with a status of failure means; `text` finds the reason in its body.
pub(crate) async fn refusal(answer: Answer<'_>, text: fn(&serde_json::Value) -> String) -> Trouble {
    let status = answer.response.status().as_u16();
    let wait = answer.response.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok()?.trim().parse().ok());
    let body = match answer.body(LONGEST_ERROR).await {
        Ok(body) => body,
        Err(trouble) => return trouble,
    };
    let reason = serde_json::from_slice(&body)
        .map_or_else(|_| String::from_utf8_lossy(&body).trim().to_owned(), |v| text(&v));
    let again = match (status, wait.map(Duration::from_secs)) {
        (429 | 502 | 503 | 504, Some(wait)) if wait <= LONGEST_RETRY => Again::After(wait),
        (429 | 502 | 503 | 504, None) => Again::Soon,
        _ => Again::No,
    };
    Trouble { again, ..Trouble::new(FailureClass::Server, format!("HTTP {status}: {reason}")) }
}

/// The key, from `key_file` or the environment.
pub(crate) fn read_key(params: &Params) -> Result<Option<HeaderValue>, LabError> {
    let key = match params.get("key_file") {
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

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
