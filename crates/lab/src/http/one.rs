//! HTTP/1.1, one request at a time on a connection, read where its bytes arrive.
//!
//! Every piece of an answer is handed out with the moment at which its own bytes came, and without going through a task and a
//! channel: with hyper's client that was half of what a streamed token cost (benches/README.md).

use super::Trouble;
use super::socket::{Socket, Traffic};
use httparse::{EMPTY_HEADER, Status};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio_rustls::client::TlsStream;
use wattle_core::exchange::Dated;
use wattle_core::time::Stamp;

/// More of a head than this is none.
const LONGEST_HEAD: usize = 64 << 10;
/// More fields than this no server sends.
const MOST_FIELDS: usize = 100;
/// The line before a chunk is a number, and perhaps a few words that nobody reads.
const LONGEST_SIZE: usize = 4096;
/// Room for a read.
const READ: usize = 16 << 10;

/// What bytes go over.
pub(super) enum Stream {
    Plain(Socket),
    Tls(Box<TlsStream<Socket>>),
}

/// A connection.
pub(super) struct One {
    stream: Stream,
    traffic: Arc<Traffic>,
    buffer: Vec<u8>,
    /// What of the buffer came and was not handed out yet.
    from: usize,
    until: usize,
}

/// What the head of an answer says.
pub(super) struct Head {
    pub(super) status: u16,
    pub(super) kind: Option<String>,
    pub(super) retry_after: Option<u64>,
    body: Body,
    /// Whether the connection can be used again.
    keep: bool,
}

/// How the end of a body is found, and how far it is.
enum Body {
    /// So many bytes more.
    Length(u64),
    /// With the connection.
    Close,
    /// The line with the size of the next chunk comes next.
    Size,
    /// So many bytes of the chunk, then the end of its line.
    Chunk(u64),
    /// The end of the line after a chunk comes next.
    Gap,
    /// Fields after the last chunk, up to an empty line.
    Trailer,
    Ended,
}

/// When bytes came, and who says so.
type Came = (Stamp, Dated);

fn socket_of(tls: &TlsStream<Socket>) -> &Socket {
    tls.get_ref().0
}

/// Why there is no answer.
pub(super) enum Broken {
    /// The connection was closed before the request came.
    Gone(String),
    /// Anything else.
    Trouble(Trouble),
}

impl One {
    pub(super) fn new(stream: Stream, traffic: Arc<Traffic>) -> Self {
        Self { stream, traffic, buffer: Vec::new(), from: 0, until: 0 }
    }

    /// Whether it is open and nothing came on it since its last answer.
    pub(super) fn is_quiet(&mut self) -> bool {
        self.from == self.until
            && match &self.stream {
                Stream::Plain(socket) => socket.waiting().is_none(),
                // Servers renew the keys of sessions whenever they like.
                Stream::Tls(tls) => socket_of(tls).waiting() != Some(0),
            }
    }

    /// When the request was given to the kernel.
    pub(super) fn written(&self) -> Option<Stamp> {
        self.traffic.written()
    }

    /// Sends a whole request.
    pub(super) async fn send(&mut self, request: &[u8]) -> Result<(), Broken> {
        self.traffic.start();
        let sent = async {
            self.stream.write_all(request).await?;
            self.stream.flush().await
        };
        sent.await.map_err(|e: io::Error| Broken::Gone(e.to_string()))
    }

    /// Waits for the head of the answer.
    pub(super) async fn head(&mut self) -> Result<Head, Broken> {
        let trouble = |t| Broken::Trouble(t);
        loop {
            let mut fields = [EMPTY_HEADER; MOST_FIELDS];
            let mut response = httparse::Response::new(&mut fields);
            let waiting = &self.buffer[self.from..self.until];
            match response.parse(waiting) {
                Ok(Status::Complete(length)) => {
                    let head = Head::read(&response);
                    self.from += length;
                    // Those that come before the answer itself say nothing that we asked.
                    match head.map_err(trouble)? {
                        head if head.status < 200 => continue,
                        head => return Ok(head),
                    }
                }
                Ok(Status::Partial) if waiting.len() > LONGEST_HEAD => {
                    return Err(trouble(Trouble::protocol("the head of the answer is longer than 64 KiB")));
                }
                Ok(Status::Partial) => {}
                Err(error) => return Err(trouble(Trouble::protocol(format!("not an HTTP answer: {error}")))),
            }
            let first = self.from == self.until;
            match self.read().await {
                Ok(0) if first => {
                    return Err(Broken::Gone("the connection was closed without an answer".into()));
                }
                Ok(0) => {
                    return Err(trouble(Trouble::network(
                        "the connection was closed within the head of the answer",
                    )));
                }
                Ok(_) => {}
                Err(error) if first => return Err(Broken::Gone(error.to_string())),
                Err(error) => return Err(trouble(Trouble::network(error))),
            }
        }
    }

    /// The next bytes of the body and when they came; `None` at its end.
    pub(super) async fn piece(&mut self, head: &mut Head) -> Result<Option<(&[u8], Came)>, Trouble> {
        loop {
            let waiting = self.until - self.from;
            match head.body {
                Body::Ended | Body::Length(0) => {
                    head.body = Body::Ended;
                    return Ok(None);
                }
                Body::Length(ref mut left) | Body::Chunk(ref mut left) if waiting > 0 => {
                    let now = waiting.min(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= now as u64;
                    if let Body::Chunk(0) = head.body {
                        head.body = Body::Gap;
                    }
                    return Ok(Some(self.hand_out(now)));
                }
                Body::Close if waiting > 0 => return Ok(Some(self.hand_out(waiting))),
                Body::Gap if waiting >= 2 => {
                    if &self.buffer[self.from..self.from + 2] != b"\r\n" {
                        return Err(Trouble::protocol(
                            "the answer broke off: a chunk is longer than it says",
                        ));
                    }
                    self.from += 2;
                    head.body = Body::Size;
                    continue;
                }
                Body::Size => {
                    let line = &self.buffer[self.from..self.until];
                    match httparse::parse_chunk_size(line) {
                        Ok(Status::Complete((length, size))) => {
                            self.from += length;
                            head.body = if size == 0 { Body::Trailer } else { Body::Chunk(size) };
                            continue;
                        }
                        Ok(Status::Partial) if line.len() <= LONGEST_SIZE => {}
                        _ => return Err(Trouble::protocol("the answer broke off: a chunk without its size")),
                    }
                }
                Body::Trailer => {
                    let rest = &self.buffer[self.from..self.until];
                    if let Some(end) = memchr::memchr(b'\n', rest) {
                        self.from += end + 1;
                        if rest[..end].trim_ascii().is_empty() {
                            head.body = Body::Ended;
                        }
                        continue;
                    }
                    if rest.len() > LONGEST_HEAD {
                        return Err(Trouble::protocol("what follows the answer is longer than 64 KiB"));
                    }
                }
                _ => {}
            }
            let broke =
                |why: &dyn std::fmt::Display| Trouble::network(format!("the answer broke off: {why}"));
            match (self.read().await.map_err(|e| broke(&e))?, &head.body) {
                (0, Body::Close) => head.body = Body::Ended,
                (0, _) => return Err(broke(&"the connection was closed")),
                _ => {}
            }
        }
    }

    /// Whether another request can be sent after this answer.
    pub(super) fn is_free(&self, head: &Head) -> bool {
        head.keep && matches!(head.body, Body::Ended | Body::Length(0)) && self.from == self.until
    }

    /// Bytes of the last read, mostly; of two reads, dated by the later.
    fn hand_out(&mut self, length: usize) -> (&[u8], Came) {
        let piece = self.from..self.from + length;
        self.from += length;
        (&self.buffer[piece], self.traffic.came())
    }

    /// Reads what there is; 0 at the end.
    async fn read(&mut self) -> io::Result<usize> {
        if self.from == self.until {
            (self.from, self.until) = (0, 0);
        } else if self.buffer.len() - self.until < READ / 2 {
            self.buffer.copy_within(self.from..self.until, 0);
            (self.from, self.until) = (0, self.until - self.from);
        }
        if self.buffer.len() - self.until < READ / 2 {
            self.buffer.resize(self.until + READ, 0);
        }
        let read = self.stream.read(&mut self.buffer[self.until..]).await?;
        self.until += read;
        Ok(read)
    }
}

impl Head {
    fn read(response: &httparse::Response<'_, '_>) -> Result<Self, Trouble> {
        let text = |name: &str| {
            let field = response.headers.iter().find(|h| h.name.eq_ignore_ascii_case(name));
            field.and_then(|h| std::str::from_utf8(h.value).ok()).map(str::trim)
        };
        let status = response.code.unwrap_or_default();
        let chunked = text("transfer-encoding").is_some_and(|v| v.to_ascii_lowercase().ends_with("chunked"));
        let length = text("content-length").map(|v| {
            v.parse::<u64>().map_err(|_| Trouble::protocol(format!("the answer is said to have {v} bytes")))
        });
        let body = match (status, chunked, length) {
            (100..200 | 204 | 304, ..) => Body::Ended,
            (_, true, _) => Body::Size,
            (_, false, Some(length)) => Body::Length(length?),
            (_, false, None) => Body::Close,
        };
        let connection = text("connection").unwrap_or_default().to_ascii_lowercase();
        let keep = match response.version {
            Some(1) => !connection.contains("close"),
            _ => connection.contains("keep-alive"),
        };
        Ok(Self {
            status,
            kind: text("content-type").map(str::to_owned),
            retry_after: text("retry-after").and_then(|v| v.parse().ok()),
            keep: keep && !matches!(body, Body::Close),
            body,
        })
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(socket) => Pin::new(socket).poll_read(cx, buf),
            Stream::Tls(tls) => Pin::new(tls).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(socket) => Pin::new(socket).poll_write(cx, bytes),
            Stream::Tls(tls) => Pin::new(tls).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Stream::Tls(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Stream::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::{TcpListener, TcpStream};

    /// What is made of an answer that comes in `pieces`: its status, its body, and whether the connection is free.
    fn answered(pieces: &[&[u8]]) -> Result<(u16, Vec<u8>, bool), String> {
        let work = async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (mut far, _) = listener.accept().await.unwrap();
            let (socket, traffic) = Socket::new(near);
            let mut one = One::new(Stream::Plain(socket), traffic);
            let saying = async {
                for piece in pieces {
                    far.write_all(piece).await.unwrap();
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
                drop(far);
            };
            let hearing = async {
                let text = |t: Trouble| t.error;
                let mut head = one.head().await.map_err(|b| match b {
                    Broken::Gone(why) => format!("gone: {why}"),
                    Broken::Trouble(t) => t.error,
                })?;
                let mut body = Vec::new();
                while let Some((piece, _)) = one.piece(&mut head).await.map_err(text)? {
                    body.extend_from_slice(piece);
                }
                Ok((head.status, body, one.is_free(&head)))
            };
            tokio::join!(saying, hearing).1
        };
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    const CHUNKED: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n7\r\n, world\r\n0\r\nx: y\r\n\r\n";

    #[test]
    fn an_answer_cut_anywhere_is_the_same_answer() {
        for cut in 1..CHUNKED.len() {
            let (head, tail) = CHUNKED.split_at(cut);
            assert_eq!(answered(&[head, tail]), Ok((200, b"hello, world".to_vec(), true)), "cut at {cut}");
        }
    }

    #[test]
    fn bodies_end_where_they_should() {
        let whole = |text: &[u8]| answered(&[text]);
        assert_eq!(
            whole(b"HTTP/1.1 404 No\r\ncontent-length: 3\r\n\r\nabc"),
            Ok((404, b"abc".to_vec(), true))
        );
        assert_eq!(
            whole(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"),
            Ok((200, vec![], false))
        );
        assert_eq!(whole(b"HTTP/1.0 200 OK\r\n\r\nto the end"), Ok((200, b"to the end".to_vec(), false)));
        assert_eq!(
            whole(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 None\r\n\r\n"),
            Ok((204, vec![], true)),
            "what comes before the answer is none"
        );
        assert_eq!(
            whole(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nabc"),
            Ok((200, b"a".to_vec(), false)),
            "more than it says: not to be used again"
        );
    }

    #[test]
    fn what_is_no_answer_is_told_apart() {
        let fails = |text: &[u8]| answered(&[text]).unwrap_err();
        assert!(fails(b"").starts_with("gone"));
        assert!(fails(b"HTTP/1.1 200 OK\r\ncontent-le").contains("within the head"));
        assert!(fails(b"SSH-2.0-OpenSSH\r\n").contains("not an HTTP answer"));
        assert!(fails(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc").contains("broke off"));
        assert!(fails(b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n").contains("many bytes"));
        let chunk = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        for wrong in [&b"zz\r\n"[..], b"3\r\nabcd\r\n", b"3\r\nab", b"fffffffffffffffffffff\r\n"] {
            let error = fails(&[&chunk[..], wrong].concat());
            assert!(error.contains("broke off"), "{error}");
        }
        let endless = [b"HTTP/1.1 200 OK\r\nx: ".to_vec(), vec![b'a'; 80 << 10]].concat();
        assert!(fails(&endless).contains("64 KiB"));
    }
}
