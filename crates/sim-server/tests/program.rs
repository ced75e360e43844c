//! The server as a program.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use wattle_sim_server::Served;

const PROGRAM: &str = env!("CARGO_BIN_EXE_wattle-sim-server");

#[test]
fn the_first_line_is_the_address_and_sigterm_leaves_the_log_whole() {
    let folder = tempfile::tempdir().unwrap();
    let (config, log) = (folder.path().join("config.json"), folder.path().join("log.jsonl"));
    std::fs::write(&config, r#"{"tokens": 3, "engine": {"max_batch": 4}}"#).unwrap();
    let mut server = Command::new(PROGRAM)
        .args(["--listen", "127.0.0.1:0", "--config"])
        .arg(&config)
        .arg("--log")
        .arg(&log)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut address = String::new();
    BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut address).unwrap();
    let mut stream = TcpStream::connect(address.trim()).unwrap();
    let body = r#"{"prompt": "hello"}"#;
    let length = body.len();
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert!(reply.contains("the river runs"), "{reply}");
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    let text = std::fs::read_to_string(&log).unwrap();
    let served: Served = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!(served.output_tokens, 3);
    assert!(served.joules.unwrap().total() > 0.0);
}

#[test]
fn a_wrong_call_says_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    std::fs::write(&config, r#"{"ttft": 3}"#).unwrap();
    let config = config.display().to_string();
    for (args, text) in [
        (["--confg", "x"], "unknown argument --confg"),
        (["--config", "/nowhere.json"], "cannot read /nowhere.json"),
        (["--config", config.as_str()], "unknown field `ttft`"),
        (["--listen", "nowhere"], "cannot start"),
    ] {
        let out = Command::new(PROGRAM).args(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && stderr.contains(text), "{args:?}: {stderr}");
        assert!(out.stdout.is_empty());
    }
}
