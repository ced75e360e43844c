//! Requests to one server over connections that are kept, dated and limited: the way of every client that speaks HTTP.
//!
//! Stamps are taken below TLS, when bytes come and when they are written. The key comes from the environment or a file and is
//! written nowhere.

mod endpoint;
mod one;
mod socket;

pub(crate) use endpoint::Endpoint;

use crate::LabError;
use crate::client::Live;
use futures_util::stream::{self, StreamExt};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http2;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Method, Response};
use one::{Broken, Head, One};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use wattle_core::exchange::{Dated, FailureClass};
use wattle_core::registry::Params;
use wattle_core::time::Stamp;
use wattle_meter::clock;

/// More of an error body nobody reads.
const LONGEST_ERROR: usize = 64 << 10;
/// Nor more of what it says.
const LONGEST_REASON: usize = 2000;
/// Connections that are opened at the same time, ahead of need.
const OPENED_AT_ONCE: usize = 64;
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
enum Connection {
    One(One),
    Two(Shared),
}

/// A connection that several requests are on.
#[derive(Clone)]
struct Shared {
    sender: http2::SendRequest<Full<Bytes>>,
    streams: Arc<AtomicUsize>,
}

/// A server, and the connections to it.
pub(crate) struct Http {
    endpoint: Endpoint,
    key: Option<HeaderValue>,
    patience: Duration,
    idle: Mutex<Vec<One>>,
    shared: Mutex<Vec<Shared>>,
    /// Held by whoever opens a connection that others can share.
    opening: tokio::sync::Mutex<()>,
    opened: AtomicU64,
}

/// An answer that has begun; its connection is closed if it is dropped before its end.
pub(crate) struct Answer<'a> {
    http: &'a Http,
    body: Body,
}

enum Body {
    One { connection: One, head: Head },
    Two { response: Response<Incoming>, piece: Bytes, _place: Place },
}

/// A place on a connection that others are on too.
struct Place(Shared);

impl Place {
    fn take(shared: &Shared) -> Self {
        shared.streams.fetch_add(1, Ordering::Relaxed);
        Self(shared.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Bytes of an answer, and when they came.
pub(crate) struct Piece<'a> {
    pub(crate) bytes: &'a [u8],
    /// On a connection that others are on too, when they were read.
    pub(crate) at: Stamp,
    pub(crate) dated: Dated,
}

impl Answer<'_> {
    pub(crate) fn status(&self) -> u16 {
        match &self.body {
            Body::One { head, .. } => head.status,
            Body::Two { response, .. } => response.status().as_u16(),
        }
    }

    pub(crate) fn is_success(&self) -> bool {
        (200..300).contains(&self.status())
    }

    /// Whether it says that it is of this kind.
    pub(crate) fn is(&self, kind: &str) -> bool {
        let said = match &self.body {
            Body::One { head, .. } => head.kind.as_deref(),
            Body::Two { response, .. } => response.headers().get(CONTENT_TYPE).and_then(|v| v.to_str().ok()),
        };
        said.is_some_and(|said| said.to_ascii_lowercase().starts_with(kind))
    }

    /// How long the server wants to be left alone.
    fn retry_after(&self) -> Option<Duration> {
        let seconds = match &self.body {
            Body::One { head, .. } => head.retry_after,
            Body::Two { response, .. } => {
                response.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok()?.trim().parse().ok())
            }
        };
        seconds.map(Duration::from_secs)
    }

    /// The rest of it, if it is not longer than `longest`.
    pub(crate) async fn whole(mut self, longest: usize) -> Result<Vec<u8>, Trouble> {
        let mut bytes = Vec::new();
        while let Some(piece) = self.piece().await? {
            if bytes.len() + piece.bytes.len() > longest {
                return Err(Trouble::protocol(format!("the server's answer is longer than {longest} bytes")));
            }
            bytes.extend_from_slice(piece.bytes);
        }
        self.give_back();
        Ok(bytes)
    }

    /// As much of it as comes and fits, for people.
    async fn beginning(mut self, longest: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while let Ok(Some(piece)) = self.piece().await {
            let room = longest - bytes.len();
            bytes.extend_from_slice(&piece.bytes[..piece.bytes.len().min(room)]);
            if bytes.len() == longest {
                return bytes;
            }
        }
        self.give_back();
        bytes
    }

    /// The next bytes of it; `None` at its end.
    pub(crate) async fn piece(&mut self) -> Result<Option<Piece<'_>>, Trouble> {
        match &mut self.body {
            Body::One { connection, head } => {
                let piece = connection.piece(head).await?;
                Ok(piece.map(|(bytes, (at, dated))| Piece { bytes, at, dated }))
            }
            Body::Two { response, piece, .. } => {
                while let Some(frame) = response.body_mut().frame().await {
                    let frame = frame.map_err(|e| Trouble::network(format!("the answer broke off: {e}")))?;
                    if let Ok(data) = frame.into_data() {
                        *piece = data;
                        return Ok(Some(Piece { bytes: piece, at: clock::now(), dated: Dated::Client }));
                    }
                }
                Ok(None)
            }
        }
    }

    /// It was read to its end: its connection can be used again, if the server leaves it open.
    pub(crate) fn give_back(self) {
        if let Body::One { connection, head } = self.body
            && connection.is_free(&head)
        {
            locked(&self.http.idle).push(connection);
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
        let there = locked(&self.idle).len() + STREAMS * locked(&self.shared).len();
        let missing = requests.saturating_sub(there);
        let count = if self.endpoint.shares() { missing.div_ceil(STREAMS) } else { missing };
        let mut opened = stream::iter((0..count).map(|_| self.open())).buffer_unordered(OPENED_AT_ONCE);
        while let Some(connection) = opened.next().await {
            match connection {
                Ok(Connection::One(one)) => locked(&self.idle).push(one),
                Ok(Connection::Two(shared)) => locked(&self.shared).push(shared),
                Err(_) => return,
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

    /// Sends on a kept connection or a new one, and waits for the head of the answer. `live` hears when it was sent.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        live: Option<&Live>,
    ) -> Result<Answer<'_>, Trouble> {
        if self.endpoint.shares() {
            return self.call_shared(method, path, body, live).await;
        }
        let request = self.request(&method, path, &body);
        let kept = self.kept();
        if let Some(connection) = kept {
            let began = clock::now();
            match self.send(connection, &request, live).await {
                Ok(answer) => return Ok(answer),
                // A kept connection that is closed at once was closed by the server meanwhile (llama.cpp does so after every
                // streamed answer, whatever it says): once more on a new one.
                Err(Broken::Gone(_)) if clock::now().since(began).get() < STALE.as_secs_f64() => {}
                Err(Broken::Gone(error)) => return Err(Trouble::network(error)),
                Err(Broken::Trouble(trouble)) => return Err(trouble),
            }
        }
        match self.open().await? {
            Connection::One(one) => self.send(one, &request, live).await.map_err(|broken| match broken {
                Broken::Gone(error) => Trouble::network(error),
                Broken::Trouble(trouble) => trouble,
            }),
            Connection::Two(_) => unreachable!("an endpoint opens connections of its own version"),
        }
    }

    /// A kept connection on which nothing happened meanwhile: its server has not closed it, and said nothing that nobody asked.
    fn kept(&self) -> Option<One> {
        loop {
            let mut connection = locked(&self.idle).pop()?;
            if connection.is_quiet() {
                return Some(connection);
            }
        }
    }

    fn request(&self, method: &Method, path: &str, body: &[u8]) -> Vec<u8> {
        let Endpoint { base, authority, .. } = &self.endpoint;
        let mut request = Vec::with_capacity(256 + body.len());
        let lines: [&[u8]; 5] =
            [method.as_str().as_bytes(), b" ", base.as_bytes(), path.as_bytes(), b" HTTP/1.1\r\nhost: "];
        lines.iter().for_each(|part| request.extend_from_slice(part));
        request.extend_from_slice(authority.as_bytes());
        if let Some(key) = &self.key {
            request.extend_from_slice(b"\r\nauthorization: ");
            request.extend_from_slice(key.as_bytes());
        }
        let rest = format!("\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
        request.extend_from_slice(rest.as_bytes());
        request.extend_from_slice(body);
        request
    }

    async fn send(&self, mut one: One, request: &[u8], live: Option<&Live>) -> Result<Answer<'_>, Broken> {
        if let Some(live) = live {
            live.sent(clock::now());
        }
        one.send(request).await?;
        // Better known now: when its bytes were given to the kernel.
        if let (Some(live), Some(written)) = (live, one.written()) {
            live.sent(written);
        }
        let head = one.head().await?;
        Ok(Answer { http: self, body: Body::One { connection: one, head } })
    }

    /// The same on a connection that others are on too.
    async fn call_shared(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        live: Option<&Live>,
    ) -> Result<Answer<'_>, Trouble> {
        let place = match self.place() {
            Some(place) => place,
            None => {
                // Those that come meanwhile wait, and share what one of them opens.
                let _one = self.opening.lock().await;
                match self.place() {
                    Some(place) => place,
                    None => match self.open().await? {
                        Connection::Two(shared) => {
                            let place = Place::take(&shared);
                            locked(&self.shared).push(shared);
                            place
                        }
                        Connection::One(_) => {
                            unreachable!("an endpoint opens connections of its own version")
                        }
                    },
                }
            }
        };
        let Endpoint { base, scheme, authority, .. } = &self.endpoint;
        let authority = authority.to_str().unwrap_or_default();
        let mut request = hyper::Request::builder()
            .method(method)
            .uri(format!("{scheme}://{authority}{base}{path}"))
            .header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key.clone());
        }
        let request = request.body(Full::new(Bytes::from(body))).map_err(Trouble::protocol)?;
        let mut sender = place.0.sender.clone();
        sender.ready().await.map_err(Trouble::refused)?;
        if let Some(live) = live {
            live.sent(clock::now());
        }
        let response = sender.send_request(request).await.map_err(|error| match error.is_canceled() {
            // The connection ended before it was sent.
            true => Trouble::refused(error),
            false => Trouble::network(error),
        })?;
        Ok(Answer { http: self, body: Body::Two { response, piece: Bytes::new(), _place: place } })
    }

    /// A place on a connection that has room.
    fn place(&self) -> Option<Place> {
        let mut shared = locked(&self.shared);
        shared.retain(|s| !s.sender.is_closed());
        shared.iter().find(|s| s.streams.load(Ordering::Relaxed) < STREAMS).map(Place::take)
    }
}

/// What an answer with a status of failure means; `text` finds the reason in its body.
pub(crate) async fn refusal(answer: Answer<'_>, text: fn(&serde_json::Value) -> String) -> Trouble {
    let (status, wait) = (answer.status(), answer.retry_after());
    let body = answer.beginning(LONGEST_ERROR).await;
    let reason = serde_json::from_slice(&body)
        .map_or_else(|_| String::from_utf8_lossy(&body).trim().to_owned(), |v| text(&v));
    let reason: String = reason.chars().take(LONGEST_REASON).collect();
    let again = match (status, wait) {
        (429 | 503, Some(wait)) if wait <= LONGEST_RETRY => Again::After(wait),
        (429 | 503, None) => Again::Soon,
        _ => Again::No,
    };
    Trouble { again, ..Trouble::new(FailureClass::Server, format!("HTTP {status}: {reason}")) }
}

/// The key, from `key_file` or the variable that holds one.
pub(crate) fn read_key(params: &Params, variable: Option<&str>) -> Result<Option<HeaderValue>, LabError> {
    let key = match params.get("key_file") {
        Some(path) => Some(
            std::fs::read_to_string(path)
                .map_err(|e| LabError::Client(format!("cannot read the key file {path}: {e}")))?,
        ),
        None => variable.and_then(|name| std::env::var(name).ok()).filter(|k| !k.trim().is_empty()),
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
