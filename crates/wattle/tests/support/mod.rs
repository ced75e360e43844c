//! What the tests of the binary share: a private folder to run it in, and a scripted model server on loopback.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test file uses its own part; a test that cannot go on stops"
)]

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A folder of its own, and the binary run in it.
pub(crate) struct Bench {
    pub(crate) dir: tempfile::TempDir,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        let path = self.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    /// The binary with nothing of the tester's own settings.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wattle"));
        command.args(args).current_dir(self.path()).stdin(Stdio::null());
        for (name, _) in std::env::vars().filter(|(n, _)| n.starts_with("WATTLE_") || n == "OPENAI_API_KEY") {
            command.env_remove(name);
        }
        command.env("WATTLE_CALIBRATIONS", self.path().join("calibrations"));
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Starts it with its output kept.
    pub(crate) fn start(&self, args: &[&str]) -> Child {
        self.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Runs with `--format json` and gives the summary.
    pub(crate) fn summary(&self, args: &[&str]) -> Value {
        let mut all = args.to_vec();
        all.extend(["--format", "json"]);
        let out = self.run(&all);
        assert!(out.status.success(), "{args:?}: {}", stderr(&out));
        serde_json::from_slice(&out.stdout).unwrap()
    }

    /// Run folders made so far.
    pub(crate) fn runs(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.path().join("runs")) else { return Vec::new() };
        entries.map(|e| e.unwrap().path()).collect()
    }

    pub(crate) fn only_run(&self) -> PathBuf {
        let runs = self.runs();
        assert_eq!(runs.len(), 1, "{runs:?}");
        runs[0].clone()
    }
}

pub(crate) fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// A wrong call ends with this code, one line that holds `text`, and nothing on stdout.
pub(crate) fn assert_fails(out: &Output, code: i32, text: &str) {
    let stderr = stderr(out);
    assert_eq!(out.status.code(), Some(code), "{stderr}");
    assert!(stderr.contains(text), "{text:?} is not in {stderr:?}");
    assert!(out.stdout.is_empty(), "{}", String::from_utf8_lossy(&out.stdout));
    assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
}

/// The index of every record in a run's log, in order.
pub(crate) fn recorded(run: &Path) -> Vec<u64> {
    let Ok(text) = std::fs::read_to_string(run.join("log.jsonl")) else { return Vec::new() };
    text.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|v| v["type"] == "record")
        .map(|v| v["item"]["index"].as_u64().unwrap())
        .collect()
}

pub(crate) fn metric(summary: &Value, name: &str) -> f64 {
    summary["metrics"][name]["value"]
        .as_f64()
        .unwrap_or_else(|| panic!("{name} is {}", summary["metrics"][name]))
}

/// What a server does with one chat request: writes a whole HTTP response, or part of one.
pub(crate) type Script = dyn Fn(usize, &Value, &mut TcpStream) -> std::io::Result<()> + Send + Sync;

/// A scripted model server: `/v1/models` lists `tiny`, each chat completion is answered by the script.
pub(crate) struct Server {
    pub(crate) url: String,
    /// Connections accepted so far.
    pub(crate) connections: Arc<AtomicUsize>,
    /// Raw heads of the requests seen.
    pub(crate) heads: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub(crate) fn start(script: Box<Script>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let (connections, heads) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
        let server = Self { url, connections: Arc::clone(&connections), heads: Arc::clone(&heads) };
        let (script, asked): (Arc<Script>, _) = (script.into(), Arc::new(AtomicUsize::new(0)));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                connections.fetch_add(1, Ordering::SeqCst);
                let (script, asked, heads) = (Arc::clone(&script), Arc::clone(&asked), Arc::clone(&heads));
                std::thread::spawn(move || {
                    let _ = serve(stream.unwrap(), script.as_ref(), &asked, &heads);
                });
            }
        });
        server
    }

    /// Answers every question with `answer`, properly.
    pub(crate) fn answering(answer: &'static str) -> Self {
        Self::start(Box::new(move |n, _, out| stream(out, &reply(n, &[answer]))))
    }
}

fn serve(
    stream: TcpStream,
    script: &Script,
    asked: &AtomicUsize,
    heads: &Mutex<Vec<String>>,
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream.try_clone()?;
    let mut reader = BufReader::new(stream);
    loop {
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
            if line.trim().is_empty() {
                break;
            }
            head += &line;
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let chat = head.starts_with("POST");
        heads.lock().unwrap().push(head);
        if chat {
            let request = serde_json::from_slice(&body).unwrap_or(Value::Null);
            script(asked.fetch_add(1, Ordering::SeqCst), &request, &mut out)?;
        } else {
            respond(&mut out, "200 OK", "application/json", r#"{"data":[{"id":"tiny"}]}"#)?;
        }
    }
}

/// A whole response.
pub(crate) fn respond(out: &mut TcpStream, status: &str, kind: &str, body: &str) -> std::io::Result<()> {
    write!(out, "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// A whole event stream, each event in a chunk of its own.
pub(crate) fn stream(out: &mut TcpStream, events: &[String]) -> std::io::Result<()> {
    start_stream(out)?;
    for event in events {
        send_event(out, event)?;
    }
    out.write_all(b"0\r\n\r\n")
}

pub(crate) fn start_stream(out: &mut TcpStream) -> std::io::Result<()> {
    out.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
}

pub(crate) fn send_event(out: &mut TcpStream, event: &str) -> std::io::Result<()> {
    let data = format!("data: {event}\n\n");
    write!(out, "{:x}\r\n{data}\r\n", data.len())
}

/// The events of a proper answer: role first, then the pieces, a reason, the usage without choices, the end.
pub(crate) fn reply(n: usize, pieces: &[&str]) -> Vec<String> {
    let id = format!("r{n}");
    let delta = |delta: Value, finish: Value| {
        serde_json::json!({"id": id, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
            .to_string()
    };
    let mut events = vec![delta(serde_json::json!({"role": "assistant", "content": ""}), Value::Null)];
    events.extend(pieces.iter().map(|p| delta(serde_json::json!({ "content": p }), Value::Null)));
    events.push(delta(serde_json::json!({}), "stop".into()));
    events.push(
        serde_json::json!({"id": id, "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": pieces.len()}})
            .to_string(),
    );
    events.push("[DONE]".into());
    events
}
