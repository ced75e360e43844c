//! What the log tells.

use crate::LabError;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use wattle_core::baseline::Baseline;
use wattle_core::command::{Gauge, Repetition};
use wattle_core::event::{Event, Line};
use wattle_core::metrics::{Accumulator, Surroundings};
use wattle_core::seen::Seen;
use wattle_core::slo::Slo;
use wattle_core::spec::Spec;
use wattle_core::steady::Flow;
use wattle_core::summary::RunInfo;
use wattle_core::{Seconds, Span, Warning};

/// More names than this are a mistake of the program's, and a summary of them all helps nobody.
const MOST_NAMES: usize = 1000;

/// A thread that is busy for more of the time than this cannot take more.
const BUSY: f64 = 0.9;
/// Requests sent later than this, and than a tenth of a typical answer's time, were not sent when they should.
const LATE_S: f64 = 0.01;
/// Over less than this a thread's start is most of what it did.
const SHORTEST_LOAD_S: f64 = 0.5;
/// More of the prompts than this in a cache, and the figures are of a server that knew them.
const CACHED: f64 = 0.1;
/// Ollama says a few milliseconds even if the model is there.
const LOADED_NS: f64 = 1e8;

#[derive(Default)]
pub(super) struct Told {
    pub(super) records: Accumulator,
    pub(super) around: Surroundings,
    /// What happened to the requests of each session over time.
    pub(super) flows: BTreeMap<u32, Flow>,
    pub(super) warnings: Vec<Warning>,
    /// Why queries failed, and how many of them.
    reasons: BTreeMap<String, u64>,
    pub(super) repetitions: Vec<Repetition>,
    /// A run of the command of which no end is told.
    unended: Option<u32>,
    /// Phases of the command by name: in which session, and when.
    pub(super) phases: BTreeMap<String, Vec<(u32, Span)>>,
    pub(super) gauges: BTreeMap<String, Gauge>,
    /// Phases and gauges of too many names.
    left_out: u64,
    /// What each session's load was like.
    loads: Vec<Load>,
    /// Whether the queries came to their end.
    pub(super) ended: bool,
    /// The session at hand, and what its command has said since it was started.
    session: u32,
    said: Vec<Said>,
    asked: Seen,
    /// That the last session ended early.
    gave_up: Option<Warning>,
    /// Answers of another length than was asked for, and of how many.
    lengths: (u64, u64),
    /// Queries for which the server loaded the model, and how long that took.
    loaded: (u64, f64),
}

/// What the log says of a load.
#[derive(Deserialize)]
struct Load {
    requests: u64,
    held_back: u64,
    cpu_s: f64,
    wall_s: f64,
    lateness: Late,
}

#[derive(Deserialize)]
struct Late {
    p99_s: f64,
}

/// What a command said about itself.
enum Said {
    Phase(String, Span),
    Gauge(String, f64),
}

impl Told {
    /// What a log with these settings will tell.
    pub(super) fn new(spec: &Spec) -> Result<Self, LabError> {
        let slo = Slo::parse(&spec.slo).map_err(LabError::Usage)?;
        Ok(Self { records: Accumulator::new(slo), ..Self::default() })
    }

    /// Takes in one line of the log.
    pub(super) fn take(&mut self, line: &Line) {
        match &line.event {
            Event::Session { session, .. } => {
                self.session = *session;
                self.gave_up = None;
                self.said.clear();
            }
            // A query that stands there twice counts once, the first time.
            Event::Record(record) if self.asked.insert(record.item.index) => {
                if let Some(error) = record.exchange.outcome.error() {
                    count(&mut self.reasons, error);
                }
                let load = record.exchange.server.as_ref().and_then(|s| s["load_duration"].as_f64());
                if let Some(ns) = load.filter(|ns| *ns > LOADED_NS) {
                    self.loaded = (self.loaded.0 + 1, self.loaded.1 + ns * 1e-9);
                }
                let asked = record.item.output_tokens.zip(record.exchange.usage.completion);
                if let Some((asked, got)) = asked.filter(|_| record.exchange.outcome.is_ok()) {
                    self.lengths = (self.lengths.0 + u64::from(got != u64::from(asked)), self.lengths.1 + 1);
                }
                self.records.push(record);
                self.flows.entry(record.session).or_default().push(&record.exchange);
            }
            Event::Started { pid, .. } => {
                self.unended = Some(*pid);
                self.said.clear();
            }
            // What a command says counts when it has come to its end, and only then; while it warms up, as little as the rest of it.
            Event::Repetition(repetition) => {
                self.unended = None;
                self.repetitions.push(repetition.as_ref().clone());
                let said = std::mem::take(&mut self.said);
                said.into_iter().filter(|_| !repetition.warmup).for_each(|said| self.said(said));
            }
            Event::Phase { name, span: None, .. } if name == "queries" => self.ended = true,
            Event::Phase { name, span: Some(span), .. } => self.said.push(Said::Phase(name.clone(), *span)),
            Event::Gauge { name, value, .. } => self.said.push(Said::Gauge(name.clone(), *value)),
            Event::Warning(warning) => {
                // It comes after the baseline that it is about.
                if let (Warning::BusyServer { .. }, Some(idle)) =
                    (warning, self.around.idle.get_mut(&self.session))
                {
                    idle.forget_last();
                }
                if !self.warnings.contains(warning) {
                    self.warnings.push(warning.clone());
                }
            }
            Event::Event { event, by: None, data: Some(data) } => self.event(event, data),
            _ => {}
        }
    }

    /// Takes in what a command said.
    fn said(&mut self, said: Said) {
        let session = self.session;
        match said {
            Said::Phase(name, span) if has_room(&self.phases, &name) => {
                self.phases.entry(name).or_default().push((session, span));
            }
            Said::Gauge(name, value) if has_room(&self.gauges, &name) => {
                Gauge::push(&mut self.gauges, &name, value);
            }
            _ => self.left_out += 1,
        }
    }

    fn event(&mut self, event: &str, data: &Value) {
        match event {
            "idle_baseline" => {
                if let Ok(baseline) = Baseline::deserialize(data) {
                    self.around.idle.entry(self.session).or_default().put(baseline);
                }
            }
            "load" => self.loads.extend(Load::deserialize(data)),
            "gave_up" => {
                let error = data["error"].as_str().unwrap_or_default().to_owned();
                self.gave_up = Some(Warning::GaveUp { failed: data["failed"].as_u64().unwrap_or(0), error });
            }
            "meter_cost" => {
                self.around.meter_cpu = add_cost(self.around.meter_cpu, data);
                let late = data["timing"]["lateness"]["p99_s"].as_f64();
                self.around.lateness_p99 =
                    [self.around.lateness_p99, late].into_iter().flatten().reduce(f64::max);
            }
            _ => {}
        }
    }

    /// What gives reason to doubt.
    pub(super) fn doubts(&self, info: &RunInfo) -> Vec<Warning> {
        match (info.spec.command.is_empty(), info.spec.duration_s) {
            (true, None) => self.query_doubts(info.queries, info),
            // By time, it has asked as many as it could.
            (true, Some(of)) => {
                let sent_for = self.loads.iter().map(|l| l.wall_s).sum::<f64>();
                let cut = (!self.ended).then_some(Warning::CutShort { seconds: sent_for.min(of), of });
                cut.into_iter().chain(self.query_doubts(0, info)).collect()
            }
            (false, _) => self.command_doubts(info),
        }
    }

    fn command_doubts(&self, info: &RunInfo) -> Vec<Warning> {
        let of = self.repetitions.iter().filter(|r| r.counts()).count() as u64;
        let mut doubts = Vec::new();
        doubts.extend(self.unended.map(|pid| Warning::Unwatched { pid }));
        if of < info.spec.repeat {
            doubts.push(Warning::Repeats { done: of, of: info.spec.repeat });
        }
        // Warm-up that fails is no warm-up.
        let failed = self.repetitions.iter().filter(|r| !r.is_ok()).count() as u64;
        if failed > 0 {
            doubts.push(Warning::Failed { failed, of: self.repetitions.len() as u64 });
        }
        if self.left_out > 0 {
            doubts.push(Warning::Names { left_out: self.left_out });
        }
        if self.repetitions.iter().any(|r| r.left_behind) {
            doubts.push(Warning::LeftBehind);
        }
        doubts
    }

    fn query_doubts(&self, queries: u64, info: &RunInfo) -> Vec<Warning> {
        let records = &self.records;
        let of = records.queries();
        let mut doubts = Vec::new();
        if of < queries {
            doubts.push(Warning::Incomplete { done: of, of: queries });
        }
        if records.errors() > 0 {
            let most = self.reasons.iter().max_by_key(|(_, n)| **n).map(|(reason, _)| reason.clone());
            doubts.push(Warning::Errors { failed: records.errors(), of, reason: most.unwrap_or_default() });
        }
        if records.truncated() > 0 {
            doubts.push(Warning::Truncated { truncated: records.truncated(), of });
        }
        if records.unstreamed() > 0 {
            doubts.push(Warning::NotStreamed { answers: records.unstreamed() });
        }
        doubts.extend(self.load_doubts());
        if let Some(fraction) = records.cached().filter(|f| *f > CACHED) {
            doubts.push(Warning::Cached { fraction });
        }
        doubts.extend(self.gave_up.clone());
        if records.retried() > 0 {
            doubts.push(Warning::Retried { queries: records.retried(), of });
        }
        let (other, asked) = self.lengths;
        if other > 0 {
            doubts.push(Warning::Lengths { other, of: asked });
        }
        let (loads, seconds) = self.loaded;
        if loads > 0 {
            doubts.push(Warning::ModelLoaded { queries: loads, seconds });
        }
        match records.scored() {
            _ if of == 0 => {}
            // Prompts that are made up have no right answer.
            0 if info.spec.dataset != "jsonl" => {}
            0 => doubts.push(Warning::Unscored),
            scored if scored < of => doubts.push(Warning::PartlyUnscored { unscored: of - scored, of }),
            _ => {}
        }
        doubts
    }
}

impl Told {
    fn load_doubts(&self) -> Vec<Warning> {
        let mut doubts = Vec::new();
        let sum = |part: fn(&Load) -> u64| self.loads.iter().map(part).sum::<u64>();
        let (requests, of) = (sum(|l| l.held_back), sum(|l| l.requests));
        if requests > 0 {
            doubts.push(Warning::HeldBack { requests, of });
        }
        let typical = self.records.latency().map_or(0.0, |(median, _)| median);
        let late = |l: &Load| l.held_back == 0 && l.lateness.p99_s > LATE_S.max(typical * 0.1);
        let behind = |l: &&Load| l.wall_s > SHORTEST_LOAD_S && (l.cpu() > BUSY || late(l));
        if let Some(load) = self.loads.iter().find(behind) {
            doubts.push(Warning::ClientBottleneck { cpu: load.cpu(), lateness_s: load.lateness.p99_s });
        }
        doubts
    }
}

impl Load {
    fn cpu(&self) -> f64 {
        if self.wall_s > 0.0 { self.cpu_s / self.wall_s } else { 0.0 }
    }
}

fn has_room<T>(names: &BTreeMap<String, T>, name: &str) -> bool {
    names.len() < MOST_NAMES || names.contains_key(name)
}

/// Counts reasons, as long as they are few and short: a server may say anything.
fn count(reasons: &mut BTreeMap<String, u64>, error: &str) {
    let reason: String = error.chars().take(200).collect();
    if reasons.len() < 100 || reasons.contains_key(&reason) {
        *reasons.entry(reason).or_default() += 1;
    }
}

/// Sessions add up.
fn add_cost(so_far: Option<(Seconds, Seconds)>, data: &Value) -> Option<(Seconds, Seconds)> {
    let new = data["cpu_s"].as_f64().zip(data["wall_s"].as_f64());
    let (cpu, wall) = so_far.unwrap_or_default();
    new.map(|(c, w)| (cpu + Seconds(c), wall + Seconds(w))).or(so_far)
}
