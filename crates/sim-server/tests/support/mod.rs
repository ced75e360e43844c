//! A client of plain sockets: what it shows is what the server wrote.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test file uses its own part; a test that cannot go on stops"
)]

use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use wattle_sim_server::{Config, Served, Server};

/// What came back on a connection.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    /// All bytes.
    pub(crate) raw: Vec<u8>,
    /// Bytes of each `read`.
    pub(crate) reads: Vec<usize>,
    /// Whether the server closed.
    pub(crate) closed: bool,
}

impl Reply {
    pub(crate) fn status(&self) -> u16 {
        self.head().split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_default()
    }

    pub(crate) fn head(&self) -> String {
        let end = find(&self.raw, b"\r\n\r\n").unwrap_or(self.raw.len());
        String::from_utf8_lossy(&self.raw[..end]).into_owned()
    }

    fn after_head(&self) -> &[u8] {
        &self.raw[find(&self.raw, b"\r\n\r\n").map_or(self.raw.len(), |at| at + 4)..]
    }

    fn is_chunked(&self) -> bool {
        self.head().contains("transfer-encoding: chunked")
    }

    /// Chunks of the body, and whether the last one came.
    pub(crate) fn chunks(&self) -> (Vec<&[u8]>, bool) {
        let (mut rest, mut chunks) = (self.after_head(), Vec::new());
        while let Some(line) = find(rest, b"\r\n") {
            let length = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
            if length == 0 {
                return (chunks, rest.len() >= line + 4);
            }
            if rest.len() < line + 2 + length + 2 {
                break;
            }
            chunks.push(&rest[line + 2..line + 2 + length]);
            rest = &rest[line + 2 + length + 2..];
        }
        (chunks, false)
    }

    pub(crate) fn body(&self) -> String {
        let bytes = if self.is_chunked() { self.chunks().0.concat() } else { self.after_head().to_vec() };
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(crate) fn is_whole(&self) -> bool {
        if self.is_chunked() {
            return self.chunks().1;
        }
        let length =
            self.head().lines().find_map(|l| l.strip_prefix("content-length: ")?.parse::<usize>().ok());
        length.is_some_and(|length| self.after_head().len() >= length)
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body()).unwrap_or_else(|e| panic!("{e}: {}", self.body()))
    }

    /// The JSON of all events but `[DONE]`.
    pub(crate) fn events(&self) -> Vec<Value> {
        let body = self.body();
        let data =
            body.lines().filter_map(|l| l.trim_end().strip_prefix("data: ")).filter(|d| *d != "[DONE]");
        data.map(|d| serde_json::from_str(d).unwrap_or_else(|e| panic!("{e}: {d}"))).collect()
    }

    /// The JSON of all lines.
    pub(crate) fn lines(&self) -> Vec<Value> {
        self.body().lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect()
    }

    /// The text of all deltas under one key.
    pub(crate) fn said(&self, key: &str) -> String {
        self.events()
            .iter()
            .filter_map(|e| e["choices"][0]["delta"][key].as_str().map(str::to_owned))
            .collect()
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|w| w == what)
}

pub(crate) fn start(config: Config) -> Server {
    Server::start(config).unwrap()
}

pub(crate) fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.address()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

pub(crate) fn send(stream: &mut TcpStream, method: &str, path: &str, body: &str) {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: sim\r\nx-request-id: mine\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
}

/// Reads until the answer is whole, the server closes, or nothing comes for so long.
pub(crate) fn receive(stream: &mut TcpStream, patience: Duration) -> Reply {
    stream.set_read_timeout(Some(patience)).unwrap();
    let (mut reply, mut buffer) = (Reply::default(), vec![0; 1 << 20]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => reply.closed = true,
            Ok(n) => {
                reply.raw.extend_from_slice(&buffer[..n]);
                reply.reads.push(n);
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return reply,
            Err(_) => reply.closed = true,
        }
        // What ends an answer is short: the whole of a long one is not looked through again and again.
        let tail = &reply.raw[reply.raw.len().saturating_sub(5)..];
        let maybe = reply.raw.len() < 1 << 16 || tail == b"0\r\n\r\n";
        if reply.closed || maybe && find(&reply.raw, b"\r\n\r\n").is_some() && reply.is_whole() {
            return reply;
        }
    }
}

const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn call(server: &Server, method: &str, path: &str, body: &str) -> Reply {
    let mut stream = connect(server);
    send(&mut stream, method, path, body);
    receive(&mut stream, PATIENCE)
}

/// A streamed chat whose prompt says what it wants; usage is asked for.
pub(crate) fn chat_body(prompt: &str) -> String {
    serde_json::json!({
        "model": "tiny", "messages": [{"role": "user", "content": prompt}], "stream": true,
        "stream_options": {"include_usage": true},
    })
    .to_string()
}

pub(crate) fn chat(server: &Server, prompt: &str) -> Reply {
    call(server, "POST", "/v1/chat/completions", &chat_body(prompt))
}

/// The log once it has so many lines.
pub(crate) fn logged(server: &Server, count: usize) -> Vec<Served> {
    for _ in 0..3_000 {
        let log = server.log();
        if log.len() >= count {
            return log;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{} of {count} requests in the log", server.log().len());
}
