//! The simulated server as a program: `wattle-sim-server --listen 127.0.0.1:0 --config F.json --log F.jsonl`.
//!
//! It ends on SIGTERM and SIGINT, with its log whole.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the address is its result; errors go to stderr"
)]

use signal_hook::consts::{SIGINT, SIGTERM};
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use wattle_sim_server::{Config, Server};

const USAGE: &str = "wattle-sim-server [--listen 127.0.0.1:0] [--config F.json] [--log F.jsonl]";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let config = config(std::env::args().skip(1))?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(|e| e.to_string())?;
    }
    let server = Server::start(config).map_err(|e| format!("cannot start: {e}"))?;
    // The first line is what whoever started us waits for.
    println!("{}", server.address());
    std::io::stdout().flush().map_err(|e| e.to_string())?;
    server.wait(&stop).map_err(|e| e.to_string())
}

fn config(mut args: impl Iterator<Item = String>) -> Result<Config, String> {
    let (mut config, mut listen, mut log) = (Config::default(), None, None);
    while let Some(name) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{name} needs a value; {USAGE}"));
        match name.as_str() {
            "--listen" => listen = Some(value()?),
            "--log" => log = Some(value()?.into()),
            "--config" => {
                let path = value()?;
                let text = std::fs::read_to_string(&path).map_err(|e| format!("cannot read {path}: {e}"))?;
                config = Config::parse(&text).map_err(|e| format!("{path}: {e}"))?;
            }
            _ => return Err(format!("unknown argument {name}; {USAGE}")),
        }
    }
    config.listen = listen.unwrap_or(config.listen);
    config.log = log.or(config.log);
    config.keep_log = false;
    Ok(config)
}
