//! Doubt is data: what a reader of a result must know, kept in the run and shown by command line and report alike.

use crate::sensor::DeviceKind;
use crate::units::si;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One thing to know about a result. Its text says what to do about it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "warning", rename_all = "snake_case")]
pub enum Warning {
    /// No sensor: energy is a guess from CPU load.
    EnergyEstimated {
        /// Why nothing could be measured, by source.
        why: String,
    },
    /// No energy figure at all.
    NoEnergy {
        /// Why.
        why: String,
    },
    /// Sensors were read below another root, or through a stand-in library.
    PretendedHardware {
        /// What was pretended.
        what: String,
    },
    /// A sensor covered less than the whole run.
    Coverage {
        /// Part covered, 0 to 1.
        coverage: f64,
    },
    /// A sensor misbehaved.
    Sensor {
        /// Its name.
        sensor: String,
        /// What it did.
        what: String,
    },
    /// A board's energy counter and its own power contradict each other, so power is integrated instead.
    CounterDoubted {
        /// The counter.
        sensor: String,
        /// Energy by the counter / integral of power.
        ratio: f64,
    },
    /// The sampler could not keep up.
    ReadingsLost {
        /// How many readings were dropped.
        lost: u64,
    },
    /// Not every query was asked.
    Incomplete {
        /// How many were.
        done: u64,
        /// Of how many.
        of: u64,
    },
    /// Requests failed.
    Errors {
        /// How many.
        failed: u64,
        /// Of how many.
        of: u64,
        /// The most frequent reason.
        reason: String,
    },
    /// Answers were cut off.
    Truncated {
        /// How many.
        truncated: u64,
        /// Of how many.
        of: u64,
    },
    /// Answers came in one piece.
    NotStreamed {
        /// How many.
        answers: u64,
    },
    /// Some questions have no expected answer.
    PartlyUnscored {
        /// How many.
        unscored: u64,
        /// Of how many.
        of: u64,
    },
    /// Somebody else was busy while the idle machine was measured.
    BusyBaseline {
        /// CPU cores used, on average.
        cores: f64,
    },
    /// Idle power was another one after the run than before it, by more than the readings leave open.
    IdleDrift {
        /// Before.
        before_w: f64,
        /// After.
        after_w: f64,
    },
    /// The run was not in steady state, or something changed while it was.
    Unsteady {
        /// Whether steady state was reached.
        reached: bool,
        /// By how much power changed, relative to its mean, if that matters.
        power: Option<f64>,
        /// The same of requests in flight.
        in_flight: Option<f64>,
        /// The same of temperature.
        temperature: Option<f64>,
    },
    /// The idle baseline was seen in part, or came out above the run's own power.
    BadBaseline,
    /// This client could not keep up.
    ClientBottleneck {
        /// CPU cores that the one thread used which sends and receives.
        cpu: f64,
        /// How late requests were sent, at the 99th percentile.
        lateness_s: f64,
    },
    /// Requests of an open loop were sent late, because as many as may were in flight.
    HeldBack {
        /// How many.
        requests: u64,
        /// Of how many.
        of: u64,
    },
    /// The server worked for others while the idle machine was measured.
    BusyServer {
        /// Their requests.
        requests: f64,
    },
    /// The server worked for others, too.
    ForeignRequests {
        /// Part of the measured energy that went to them, 0 to 1.
        fraction: f64,
    },
    /// Shares and what is in none do not add up to what was measured.
    Unbalanced {
        /// What is missing or too much, relative to what was measured.
        residual: f64,
    },
    /// The server had part of the prompts in a cache.
    Cached {
        /// Part of the prompt tokens, 0 to 1.
        fraction: f64,
    },
    /// Answers are not as long as the dataset asked for.
    Lengths {
        /// How many.
        other: u64,
        /// Of how many.
        of: u64,
    },
    /// The run ended early because too many requests failed in a row.
    GaveUp {
        /// The last reason.
        error: String,
        /// How many.
        failed: u64,
    },
    /// A run by time was stopped before its time was up.
    CutShort {
        /// How long requests were sent, in seconds.
        seconds: f64,
        /// Of how many seconds.
        of: f64,
    },
    /// Requests had to be sent again.
    Retried {
        /// How many.
        queries: u64,
        /// Of how many.
        of: u64,
    },
    /// The server loaded the model while it was measured.
    ModelLoaded {
        /// In how many queries.
        queries: u64,
        /// How long it took, together.
        seconds: f64,
    },
    /// Nothing to compare answers with.
    Unscored,
    /// The sensors asked for do not include the device that does the work.
    OtherDevice {
        /// What does the work.
        worker: DeviceKind,
    },
    /// Several requests were in flight together, and nobody has measured what work costs this model here.
    Uncalibrated {
        /// The call that does.
        command: String,
    },
    /// Hardware held a device's clocks down.
    Throttled {
        /// The device.
        device: String,
        /// Part of the time, 0 to 1.
        fraction: f64,
    },
    /// Lines that the command wrote for us make no sense.
    Notes {
        /// How many.
        skipped: u64,
        /// What is wrong with the first.
        why: String,
    },
    /// Lines that the command wrote for us came faster than they could be read.
    NotesLate {
        /// By how much they are dated too late, at worst.
        seconds: f64,
    },
    /// The command used more names of phases or gauges than are kept.
    Names {
        /// How many lines that cost.
        left_out: u64,
    },
    /// The command was not run as often as it should.
    Repeats {
        /// How often it was.
        done: u64,
        /// Of how many times.
        of: u64,
    },
    /// The command did not end well.
    Failed {
        /// How many runs of it.
        failed: u64,
        /// Of how many.
        of: u64,
    },
    /// The command left processes running.
    LeftBehind,
    /// wattle was killed while the command ran.
    Unwatched {
        /// The command's process.
        pid: u32,
    },
    /// The client did not close cleanly.
    Close {
        /// What it said.
        error: String,
    },
    /// The server that was started for the run ended before the run did.
    ServerEnded {
        /// How, and what it last said.
        how: String,
    },
    /// Other processes used the CPU during the run.
    Contaminated {
        /// CPU cores used by others, on average.
        cores: f64,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::EnergyEstimated { why } => write!(
                f,
                "energy is ESTIMATED from CPU load, not measured ({why}); run \"wattle doctor\" for the way to a measurement"
            ),
            Warning::NoEnergy { why } => write!(f, "no energy figures: {why}"),
            Warning::PretendedHardware { what } => {
                write!(f, "pretended hardware: {what}; figures are not of this machine")
            }
            Warning::Coverage { coverage } => write!(
                f,
                "sensors covered only {:.1} % of the run; energy is what was seen, the rest is not filled in",
                coverage * 100.0
            ),
            Warning::Sensor { sensor, what } => write!(f, "sensor {sensor}: {what}"),
            Warning::CounterDoubted { sensor, ratio } => write!(
                f,
                "counter {sensor} shows {ratio:.2} times the energy of its own device's power and is not believed: power is integrated instead"
            ),
            Warning::ReadingsLost { lost } => {
                write!(f, "{lost} readings were lost because the run could not keep up; raise interval_ms")
            }
            Warning::Incomplete { done, of } => {
                write!(f, "only {done} of {of} queries were asked; go on with --resume")
            }
            Warning::Errors { failed, of, reason } => {
                write!(f, "{failed} of {of} requests failed, most with: {reason}")
            }
            Warning::Truncated { truncated, of } => write!(
                f,
                "{truncated} of {of} answers were cut off at the token cap or the model's context; raise --max-tokens"
            ),
            Warning::NotStreamed { answers } => write!(
                f,
                "{answers} answers came in one piece; time to first token and the energy of prefill and decode are unknown"
            ),
            Warning::PartlyUnscored { unscored, of } => {
                write!(f, "{unscored} of {of} questions have no expected answer and count in no score")
            }
            Warning::BusyBaseline { cores } => write!(
                f,
                "other processes used {cores:.1} CPU cores while the idle machine was measured; idle power is too high"
            ),
            Warning::IdleDrift { before_w, after_w } => write!(
                f,
                "the idle machine drew {} before the run and {} after it, so what it drew meanwhile is known no better than that; warm it up or let it cool down before a run, and see who else is at work",
                si(*before_w, "W"),
                si(*after_w, "W")
            ),
            Warning::Unsteady { reached, power, in_flight, temperature } => {
                let changes =
                    [("power", power), ("requests in flight", in_flight), ("temperature", temperature)]
                        .iter()
                        .filter_map(|(what, change)| Some(format!("{what} by {:+.0} %", (**change)? * 100.0)))
                        .collect::<Vec<_>>()
                        .join(", ");
                match reached {
                    true => write!(f, "the run drifted in its steady part ({changes})")?,
                    false if changes.is_empty() => write!(f, "the run never came to a steady state")?,
                    false => write!(f, "the run never came to a steady state (changed: {changes})")?,
                }
                write!(
                    f,
                    "; run longer (--duration-s, --max-queries), warm up more (--warmup), or let the machine cool down before"
                )
            }
            Warning::BadBaseline => {
                write!(
                    f,
                    "the idle baseline was seen in part or came out above the run's own power, so there is no net energy"
                )
            }
            Warning::OtherDevice { worker } => write!(
                f,
                "the model runs on the {}, and none of the sensors asked for measures it; the energy is that of other devices",
                match worker {
                    DeviceKind::Gpu => "GPU",
                    DeviceKind::Cpu | DeviceKind::Dram => "CPU",
                    DeviceKind::Ane => "neural engine",
                    DeviceKind::Machine | DeviceKind::Process => "machine",
                }
            ),
            Warning::Uncalibrated { command } => write!(
                f,
                "the energy of requests in flight together is split among them by documented ratios, so the bound of each is wide; measure once what work costs here: {command}"
            ),
            Warning::Throttled { device, fraction } => write!(
                f,
                "{device} was slowed down by heat or its power supply for {:.0} % of the time; cool it, or wait between runs",
                fraction * 100.0
            ),
            Warning::Notes { skipped, why } => {
                write!(f, "{skipped} lines in WATTLE_LOG make no sense, the first: {why}")
            }
            Warning::NotesLate { seconds } => write!(
                f,
                "lines in WATTLE_LOG came faster than they could be read and are dated up to {seconds:.1} s too late; give them at_ns, or write fewer"
            ),
            Warning::Names { left_out } => {
                write!(
                    f,
                    "{left_out} phases and gauges are left out: more than a thousand names are not kept"
                )
            }
            Warning::Repeats { done, of } => {
                write!(f, "the command was run {done} of {of} times; go on with \"wattle exec --resume RUN\"")
            }
            Warning::Failed { failed, of } => write!(f, "the command failed in {failed} of {of} runs"),
            Warning::LeftBehind => {
                write!(f, "the command left processes running; what they draw after its end is in no figure")
            }
            Warning::Unwatched { pid } => write!(
                f,
                "wattle was killed while the command ran (process {pid}, which was left alone); that run is not in the figures"
            ),
            Warning::ClientBottleneck { cpu, lateness_s } => write!(
                f,
                "wattle itself was the bottleneck (99 of 100 requests were sent within {:.1} ms, by a thread that was busy for {:.0} % of the time): the server could have taken more; lower --rate or --concurrency, or give wattle a core of its own",
                lateness_s * 1e3,
                cpu * 100.0
            ),
            Warning::HeldBack { requests, of } => write!(
                f,
                "{requests} of {of} requests were sent late because --concurrency was reached; their wait is in their latency"
            ),
            Warning::BusyServer { requests } => write!(
                f,
                "the server was working on {requests:.0} requests of others while the idle machine was measured, so that was not idle power and is not used"
            ),
            Warning::ForeignRequests { fraction } => write!(
                f,
                "the server worked for others, too: {:.1} % of the energy went to requests that this run did not send and is in no share of its own, and times are those of a shared server; measure again without them",
                fraction * 100.0
            ),
            Warning::Unbalanced { residual } => write!(
                f,
                "the shares of the requests and what is in none of them differ from the measured energy by {residual:e} of it; this is a bug of wattle, please report it with the run folder"
            ),
            Warning::Cached { fraction } => write!(
                f,
                "the server had {:.0} % of the prompt tokens in its cache, so time to first token and energy are those of prompts it knew; --unique-prefix makes each its own",
                fraction * 100.0
            ),
            Warning::Lengths { other, of } => write!(
                f,
                "{other} of {of} answers are not as long as was asked for; the server does not know ignore_eos, or its context is full"
            ),
            Warning::GaveUp { failed, error } => write!(
                f,
                "the run gave up after {failed} failures in a row, the last with: {error}; these are in no figure, and are asked again on --resume"
            ),
            Warning::CutShort { seconds, of } => {
                write!(f, "the run was stopped after {seconds:.1} of {of:.1} s")
            }
            Warning::Retried { queries, of } => write!(
                f,
                "{queries} of {of} requests were sent again because the server did not take them; that wait is in their latency"
            ),
            Warning::ModelLoaded { queries, seconds } => write!(
                f,
                "the server loaded the model in {queries} of the measured queries, {seconds:.1} s in all; raise its keep-alive, or --warmup"
            ),
            Warning::Unscored => {
                write!(f, "no expected answers, so no accuracy; name them with --dataset-param answer=COLUMN")
            }
            Warning::Close { error } => write!(f, "the client did not close cleanly: {error}"),
            Warning::ServerEnded { how } => write!(
                f,
                "the server that was started for this run ended {how}; what was asked after that has no answer, and server.log has all it said"
            ),
            Warning::Contaminated { cores } => write!(
                f,
                "other processes used {cores:.1} CPU cores in this session, idle baseline included; times and energy are not those of a quiet machine"
            ),
        }
    }
}
