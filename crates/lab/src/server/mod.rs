//! Servers that are started for a run and stopped after it, with everything they started, however the run ends.
//!
//! The server starts before the run has a folder or a log: what happened until then is kept here and told when there is one.

mod choice;
mod output;
mod plan;
mod preset;
mod process;
mod words;

pub(crate) use choice::settle;
pub use plan::ABOUT;
pub use preset::{PRESETS, Preset};

use crate::client::{self, Client};
use crate::http::{Endpoint, Http, KEY_VARIABLE, Version, read_key};
use crate::metering::Metering;
use crate::{LabError, Stop};
use hyper::Method;
use output::Output;
use plan::Plan;
use process::{Process, Stopped};
use serde_json::json;
use std::path::Path;
use std::time::Duration;
use tokio::time::sleep;
use wattle_core::Warning;
use wattle_core::event::Event;
use wattle_core::registry::Params;
use wattle_meter::child::End;
use wattle_meter::clock;
use wattle_store::RunDir;

/// A server that is not ready is asked again after so long, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Whether it is well a server says sooner.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(10);
/// A warning is one line, and quotes less than an error.
const WARNING_LINES: usize = 5;

/// The server of a run, if it has one of its own.
pub(crate) struct Managed {
    plan: Option<Plan>,
    running: Option<Running>,
    /// What it said, if it was stopped before there was a run.
    unsettled: Option<Output>,
    /// How it ended, if that was by itself.
    fate: Option<Fate>,
}

struct Running {
    // Ends before its output goes.
    process: Process,
    output: Output,
    /// Whether the run has a folder, and the output is in it.
    moved_in: bool,
    /// What is to be told when there is a log.
    happened: Vec<Event>,
}

struct Fate {
    end: End,
    said: Vec<String>,
}

/// Where the output of a server goes.
pub(crate) enum Home<'a> {
    /// The run's folder is still to be made, in this one.
    Below(&'a Path),
    /// The run has a folder.
    Run(&'a RunDir),
}

impl Managed {
    /// What `spec` asks for. Nothing is started yet.
    pub(crate) fn plan(spec: &wattle_core::Spec) -> Result<Self, LabError> {
        Ok(Self { plan: Plan::of(spec)?, running: None, unsettled: None, fate: None })
    }

    /// What a client is opened with that is to ask this server.
    pub(crate) fn settings(&self, settings: client::Settings) -> client::Settings {
        match &self.plan {
            None => settings,
            Some(plan) => {
                client::Settings { url: Some(plan.url.clone()), model: plan.model.clone(), ..settings }
            }
        }
    }

    /// Whether there is something to start.
    pub(crate) fn is_planned(&self) -> bool {
        self.plan.is_some()
    }

    /// Starts it and waits until it can be asked. To be called on a thread that lives as long as the process: the server dies with it.
    pub(crate) async fn start(
        &mut self,
        home: Home<'_>,
        client: &dyn Client,
        stop: &Stop,
    ) -> Result<(), LabError> {
        let Some(plan) = &self.plan else { return Ok(()) };
        let program = plan.program()?;
        plan.check_free()?;
        let no_file = |error| LabError::System { what: "cannot keep the output of the server", error };
        let (output, log) = match home {
            Home::Below(folder) => Output::temporary(folder),
            Home::Run(dir) => Output::kept(dir.server_log()),
        }
        .map_err(no_file)?;
        let process = Process::start(plan, &program, log, stop.clone()).map_err(|error| {
            LabError::Server(format!("cannot start the server {}: {error}", program.display()))
        })?;
        let started = json!({
            "pid": process.pid(), "command": plan.shown(), "port": plan.port, "start_ns": process.started(),
        });
        let happened = vec![Event::with("server_started", started)];
        let running = self.running.insert(Running { process, output, moved_in: false, happened });
        running.get_ready(plan, client, stop).await
    }

    /// Its process.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.running.as_ref().map(|running| running.process.pid())
    }

    /// The run has a folder now: the output goes there, and the log is told what happened.
    pub(crate) fn move_in(&mut self, dir: &RunDir, metering: &mut Metering) -> Result<(), LabError> {
        let Some(running) = &mut self.running else { return Ok(()) };
        metering.happened.append(&mut running.happened);
        let kept = running.output.keep(dir.server_log());
        running.moved_in = kept.is_ok();
        kept.map_err(|error| LabError::System { what: "cannot move the output of the server", error })
    }

    /// Stops it, and writes to the log of the run how it ended.
    pub(crate) async fn close(&mut self, dir: &RunDir) -> Result<(), LabError> {
        let Some(Stopped { end, killed }) = self.stop().await else { return Ok(()) };
        let mut log = dir.log()?;
        if let Some(fate) = &self.fate {
            log.append(clock::wall(), &Event::Warning(Warning::ServerEnded { how: fate.in_a_line() }))?;
        }
        let stopped = json!({
            "exit_code": end.and_then(|e| e.exit_code), "signal": end.and_then(|e| e.signal), "killed": killed,
        });
        Ok(log.append(clock::wall(), &Event::with("server_stopped", stopped))?)
    }

    /// Stops it if it still runs, and says in the run's error that it ended, if that was before it should.
    pub(crate) async fn explain<T>(mut self, result: Result<T, LabError>) -> Result<T, LabError> {
        self.stop().await;
        let result = match self.fate.take() {
            Some(fate) => result.map_err(|error| with_fate(error, &fate)),
            None => result,
        };
        match self.unsettled.take() {
            Some(output) => result.map_err(|error| with_all_it_said(error, output)),
            None => result,
        }
    }

    async fn stop(&mut self) -> Option<Stopped> {
        let Running { process, output, moved_in, .. } = self.running.take()?;
        self.fate = process.end().map(|end| Fate { end, said: output.last_lines() });
        let stopped = process.stop().await;
        self.unsettled = (!moved_in).then_some(output);
        Some(stopped)
    }
}

impl Running {
    /// Waits until it can be asked, it ends, its time is up or the user has enough.
    async fn get_ready(&mut self, plan: &Plan, client: &dyn Client, stop: &Stop) -> Result<(), LabError> {
        let mut last = String::new();
        let healthy = async {
            let mut pause = FIRST_PAUSE;
            loop {
                match health(plan, client).await {
                    Ok(()) => return Ok(()),
                    Err(Unwell::ForGood(why)) => return Err(why),
                    Err(Unwell::NotYet(why)) => last = why,
                }
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        };
        let (process, output) = (&self.process, &self.output);
        let said = || quote(&output.last_lines());
        tokio::select! {
            biased;
            cause = stop.wait() => return Err(LabError::Stopped(cause)),
            end = process.wait() => {
                let daemon = match end.exit_code {
                    Some(0) => " (it must stay, not go into the background)",
                    _ => "",
                };
                let how = how(end);
                return Err(LabError::Server(format!("the server ended {how}{daemon} before it could be asked{}", said())));
            }
            ready = healthy => ready.map_err(|why| LabError::Server(format!("{why}{}", said())))?,
            () = sleep(plan.ready) => {
                let seconds = plan.ready.as_secs_f64();
                return Err(LabError::Server(format!(
                    "the server could not be asked after {seconds} s ({last}); if it only needs longer, raise it: --server ready_s={}{}",
                    (seconds * 2.0).max(1.0).ceil(), said()
                )));
            }
        }
        let seconds = clock::now().since(self.process.started()).get();
        let seconds = (seconds * 1e3).round() / 1e3;
        self.happened.push(Event::with("server_ready", json!({ "seconds": seconds })));
        Ok(())
    }
}

impl Fate {
    fn in_a_line(&self) -> String {
        let said = &self.said[self.said.len().saturating_sub(WARNING_LINES)..];
        match said.is_empty() {
            true => format!("{}, saying nothing", how(self.end)),
            false => format!("{}, after saying: {}", how(self.end), said.join(" / ")),
        }
    }
}

/// Why it cannot be asked.
enum Unwell {
    NotYet(String),
    /// Waiting does not help.
    ForGood(String),
}

/// Whether it can be asked, or why not. Of a server that the user started any answer will do; of this one it is known that it may still
/// load, and only a 200 says that it does not.
async fn health(plan: &Plan, client: &dyn Client) -> Result<(), Unwell> {
    if let Some(path) = &plan.health {
        match status(plan, &format!("http://{}:{}", host(plan), plan.port), "", path).await? {
            200 => {}
            status => return Err(Unwell::NotYet(format!("{path} says HTTP {status}"))),
        }
    }
    if plan.lists.is_some() {
        let status = status(plan, &plan.url, "/v1", "/models").await?;
        // With a path of its own, it need not list its models.
        if status != 200 && plan.health.is_none() {
            return Err(Unwell::NotYet(format!(
                "the list of models says HTTP {status}; if it has none, name a path that answers 200: --server health=PATH"
            )));
        }
    }
    client.health().await.map_err(|e| Unwell::NotYet(e.to_string()))
}

/// The status that a path below `url` is answered with.
async fn status(plan: &Plan, url: &str, usual: &str, path: &str) -> Result<u16, Unwell> {
    let for_good = |e: LabError| Unwell::ForGood(e.to_string());
    let none = Params::new();
    let params = plan.lists.as_ref().unwrap_or(&none);
    let version = Version::parse(params).map_err(for_good)?;
    let key = plan
        .lists
        .as_ref()
        .map(|params| read_key(params, Some(KEY_VARIABLE)))
        .transpose()
        .map_err(for_good)?
        .flatten();
    let endpoint =
        Endpoint::parse(url, version, usual, &["/chat/completions", "/completions"]).map_err(for_good)?;
    let http = Http::new(endpoint, key, HEALTH_TIMEOUT);
    let asking = http.call(Method::GET, path, Vec::new(), None);
    match tokio::time::timeout(HEALTH_TIMEOUT, asking).await {
        Err(_) => Err(Unwell::NotYet(format!("{path}: nothing came within {} s", HEALTH_TIMEOUT.as_secs()))),
        Ok(Err(trouble)) => Err(Unwell::NotYet(format!("{path}: {}", trouble.error))),
        Ok(Ok(answer)) => match answer.status() {
            status @ (401 | 403) => Err(Unwell::ForGood(format!(
                "the server refuses the key (HTTP {status} at {path}); set {KEY_VARIABLE} to the key that it was given"
            ))),
            status => Ok(status),
        },
    }
}

/// As a URL has it.
fn host(plan: &Plan) -> String {
    if plan.host.contains(':') { format!("[{}]", plan.host) } else { plan.host.clone() }
}

/// An error that may come from how the server ended.
fn with_fate(error: LabError, fate: &Fate) -> LabError {
    const WHO: &str = "the server that was started for this run ended";
    match error {
        LabError::GaveUp { failed, error, run, by_time } => {
            LabError::GaveUp { failed, error: format!("{error} ({WHO} {})", fate.in_a_line()), run, by_time }
        }
        LabError::Client(text) => {
            LabError::Client(format!("{text}; {WHO} {}{}", how(fate.end), quote(&fate.said)))
        }
        other => other,
    }
}

/// An error with the path of all that the server said, which is kept if it is named.
fn with_all_it_said(error: LabError, mut output: Output) -> LabError {
    let mut add = |text: String| match output.keep_for_the_user() {
        Some(path) => format!("{text}\nall that it said is in {}", path.display()),
        None => text,
    };
    match error {
        LabError::Server(text) => LabError::Server(add(text)),
        LabError::Client(text) => LabError::Client(add(text)),
        LabError::Usage(text) => LabError::Usage(add(text)),
        other => other,
    }
}

fn how(end: End) -> String {
    match end {
        End { exit_code: Some(code), .. } => format!("with exit code {code}"),
        End { signal: Some(signal), .. } => format!("by signal {signal}"),
        End { .. } => "in an unknown way".into(),
    }
}

fn quote(lines: &[String]) -> String {
    match lines {
        [] => "; it said nothing".into(),
        lines => format!("; its last lines:\n  {}", lines.join("\n  ")),
    }
}
