//! Every metric, one definition each, as a function of records. Sums, not means of ratios; the same queries above and below the line.

mod command;
mod definition;
mod window;

pub use command::of_command;
pub use definition::{Definition, METRICS, Metric};

use crate::account::Account;
use crate::attribute::Ledger;
use crate::baseline::Idle;
use crate::estimate::Method;
use crate::exchange::{Finish, Outcome};
use crate::record::Record;
use crate::slo::Slo;
use crate::stats::{Batches, Histogram, Interval, wilson};
use crate::time::{Span, Stamp};
use crate::units::{Joules, Seconds, Watts};
use std::collections::BTreeMap;

/// Less coverage than this and a figure would be of part of the energy; the edges of a run cost a fraction of it.
pub const WHOLE: f64 = 0.99;

// Columns of the batches.
const ENERGY: usize = 0;
const QUERIES: usize = 1;
const SCORE: usize = 2;
const IN_FLIGHT: usize = 3;

/// Takes in records one by one, in flat memory, and gives the metrics.
#[derive(Debug, Clone, Default)]
pub struct Accumulator {
    queries: u64,
    errors: u64,
    truncated: u64,
    unstreamed: u64,
    scored: u64,
    score: f64,
    /// Joules by phase, of queries whose energy is wholly known: queue, prefill, decode, shared.
    phases: [f64; 4],
    /// Joules, 1: of queries whose energy is wholly known.
    by_query: Batches<2>,
    /// Joules, 1, score, time in flight: of those of them that have a score.
    by_score: Batches<4>,
    /// Joules, tokens: of those of them that know their tokens.
    by_token: Batches<2>,
    /// Tokens, 1, time since the end of the query before, within the limits, time in flight: of all.
    by_time: Batches<5>,
    /// Sum, and how many knew.
    prompt_tokens: (u64, u64),
    output_tokens: (u64, u64),
    ttft: Times,
    itl: Times,
    latency: Times,
    /// From due to sent: what this client itself added.
    lateness: Times,
    retried: u64,
    /// Whether requests were due at times of their own.
    scheduled: bool,
    cached_tokens: (u64, u64),
    slo: Slo,
    slo_met: u64,
    ledgers: BTreeMap<u32, Ledger>,
    /// Sum of all shares.
    billed: f64,
    spans: BTreeMap<u32, Span>,
    /// First and last moment at which anything was due, and how many were, by session.
    due: BTreeMap<u32, (Stamp, Stamp, u64)>,
    method: Option<Method>,
}

/// What the records do not know.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// The idle baselines of each session.
    pub idle: BTreeMap<u32, Idle>,
    /// CPU time of the sampler thread and the time it ran.
    pub meter_cpu: Option<(Seconds, Seconds)>,
    /// How late the sampler's rounds began at the 99th percentile, in seconds; of several sessions the worst.
    pub lateness_p99: Option<f64>,
    /// Most memory that the processes of a command were seen to hold together, in bytes.
    pub tree_memory: Option<f64>,
}

#[derive(Debug, Clone, Default)]
struct Times {
    histogram: Histogram,
    /// Weighted time, weight.
    batches: Batches<2>,
}

impl Times {
    fn middle_and_tail(&self) -> Option<(f64, f64)> {
        self.histogram.quantile(0.5).zip(self.histogram.quantile(0.99))
    }

    fn push(&mut self, time: Seconds, weight: f64) {
        self.histogram.push(time.get());
        self.batches.push([time.get() * weight, weight]);
    }
}

impl Accumulator {
    /// An empty one that counts answers within these limits.
    pub fn new(slo: Slo) -> Self {
        Self { slo, ..Self::default() }
    }

    /// Takes in one record.
    pub fn push(&mut self, record: &Record) {
        let exchange = &record.exchange;
        self.queries += 1;
        match exchange.outcome {
            Outcome::Failed { .. } => self.errors += 1,
            Outcome::Ok { finish } => {
                // Where a length was asked for, that is its end.
                let cut = finish == Finish::Length && record.item.output_tokens.is_none();
                self.truncated += u64::from(cut);
                self.unstreamed += u64::from(exchange.first_token.is_none() && !exchange.answer.is_empty());
                self.latency.push(exchange.latency(), 1.0);
            }
        }
        let score = record.score.as_ref().map(|s| s.value);
        self.scored += u64::from(score.is_some());
        self.score += score.unwrap_or(0.0);
        if let Some(share) = record.share {
            self.method = self.method.max(Some(share.method));
            self.billed += share.total().get();
        }
        let tokens = exchange.usage.completion;
        if let Some(share) = record.share.filter(|s| s.coverage >= WHOLE) {
            let joules = share.total().get();
            let phases = [share.queue, share.prefill, share.decode, share.shared];
            self.phases.iter_mut().zip(phases).for_each(|(sum, part)| *sum += part.get());
            self.by_query.push([joules, 1.0]);
            if let Some(score) = score {
                self.by_score.push([joules, 1.0, score, exchange.span().duration().get()]);
            }
            if let Some(tokens) = tokens {
                self.by_token.push([joules, tokens as f64]);
            }
        }
        let met = self.slo.is_met(exchange);
        self.slo_met += u64::from(met);
        self.retried += u64::from(exchange.attempts > 1);
        // Of one that was sent again, the wait is the server's doing.
        if exchange.attempts == 1 {
            self.lateness.push(exchange.sent.since(exchange.due), 1.0);
        }
        for (sum, count) in [
            (&mut self.prompt_tokens, exchange.usage.prompt),
            (&mut self.output_tokens, tokens),
            (&mut self.cached_tokens, exchange.usage.cached),
        ] {
            if let Some(count) = count {
                *sum = (sum.0.saturating_add(count), sum.1 + 1);
            }
        }
        if let Some(ttft) = exchange.ttft() {
            self.ttft.push(ttft, 1.0);
        }
        if let (Some(itl), Some(tokens)) = (exchange.itl(), tokens) {
            self.itl.push(itl, tokens.saturating_sub(1) as f64);
        }
        if let Some(ledger) = record.ledger {
            self.ledgers.insert(record.session, ledger);
        }
        let span =
            self.spans.entry(record.session).or_insert_with(|| Span::new(exchange.sent, exchange.sent));
        // The times between ends, and what an earlier start adds, make the span.
        // Of one that was sent again, the first try is the start; it is due then, or later than that.
        let sent = if exchange.attempts > 1 { exchange.due } else { exchange.sent };
        let start = span.start().min(sent);
        let since_last = exchange.done.since(span.end()) + span.start().since(start);
        *span = Span::new(start, span.end().max(exchange.done));
        let due = self.due.entry(record.session).or_insert((exchange.due, exchange.due, 0));
        *due = (due.0.min(exchange.due), due.1.max(exchange.due), due.2 + 1);
        let in_flight = exchange.span().duration().get();
        let met = f64::from(u8::from(met));
        let answered = f64::from(u8::from(exchange.outcome.is_ok()));
        self.by_time.push([tokens.unwrap_or(0) as f64, answered, since_last.get(), met, in_flight]);
        self.scheduled |= exchange.sent != exchange.due && exchange.attempts == 1;
    }

    /// How many queries were taken in.
    pub const fn queries(&self) -> u64 {
        self.queries
    }

    /// How many of them failed.
    pub const fn errors(&self) -> u64 {
        self.errors
    }

    /// How many queries were sent more than once.
    pub const fn retried(&self) -> u64 {
        self.retried
    }

    /// How many answers were cut off.
    pub const fn truncated(&self) -> u64 {
        self.truncated
    }

    /// How many answers came in one piece, so that nothing is known of their tokens' times.
    pub const fn unstreamed(&self) -> u64 {
        self.unstreamed
    }

    /// How many queries had an expected answer.
    pub const fn scored(&self) -> u64 {
        self.scored
    }

    /// Running mean of joules per query, for progress.
    pub fn joules_per_query(&self) -> Option<f64> {
        self.by_query.ratio(ENERGY, QUERIES).map(|r| r.value)
    }

    /// Running mean of joules per output token, for progress.
    pub fn joules_per_token(&self) -> Option<f64> {
        self.by_token.ratio(0, 1).map(|r| r.value)
    }

    /// Median and 99th percentile of the time to the first token so far, for progress.
    pub fn ttft(&self) -> Option<(f64, f64)> {
        self.ttft.middle_and_tail()
    }

    /// Median and 99th percentile of the time between tokens so far, for progress.
    pub fn itl(&self) -> Option<(f64, f64)> {
        self.itl.middle_and_tail()
    }

    /// Median and 99th percentile of the time to the end of an answer so far.
    pub fn latency(&self) -> Option<(f64, f64)> {
        self.latency.middle_and_tail()
    }

    /// Part of the prompt tokens that servers say they had in a cache, if any says so.
    pub fn cached(&self) -> Option<f64> {
        let (cached, known) = self.cached_tokens;
        (known > 0 && self.prompt_tokens.0 > 0).then(|| cached as f64 / self.prompt_tokens.0 as f64)
    }

    /// The measured span of each session.
    pub fn spans(&self) -> impl Iterator<Item = (u32, Span)> + '_ {
        self.spans.iter().map(|(session, span)| (*session, *span))
    }

    fn accounts(&self) -> impl Iterator<Item = &Account> {
        self.ledgers.values().map(|l| &l.account)
    }

    /// Part of the measured span that readings covered; `None` without any energy.
    pub fn coverage(&self) -> Option<f64> {
        let seconds: f64 = self.accounts().map(|a| a.span.duration().get()).sum();
        let covered: f64 = self.accounts().map(|a| a.span.duration().get() * a.coverage).sum();
        (seconds > 0.0).then(|| (covered / seconds).min(1.0))
    }

    /// All metrics. What is unknown has the value `null`.
    pub fn finish(&self, around: &Surroundings) -> BTreeMap<String, Metric> {
        let mut out =
            Out { metrics: BTreeMap::new(), energy_method: self.method.map_or("none", Method::name) };
        let n = self.queries;

        out.count("queries", n as f64, n);
        out.count("errors", self.errors as f64, n);
        out.count("truncated", self.truncated as f64, n);
        out.count("unscored", (n - self.scored) as f64, n);
        let accuracy = (self.scored > 0).then(|| self.score / self.scored as f64);
        let ends = accuracy.and(wilson(self.score, self.scored as f64));
        out.put("accuracy", accuracy, ends.map(|e| e.0), ends.map(|e| e.1), self.scored, "score");
        for (name, (sum, known)) in [
            ("prompt_tokens", self.prompt_tokens),
            ("cached_tokens", self.cached_tokens),
            ("output_tokens", self.output_tokens),
        ] {
            out.put(name, (known > 0).then_some(sum as f64), None, None, known, "count");
        }
        // The times between ends of queries add up to the span.
        let with_slo = if self.slo.is_set() { n } else { 0 };
        for (name, column, known) in [
            ("output_tokens_per_s", 0, self.output_tokens.1),
            ("queries_per_s", 1, n),
            ("goodput_per_s", 3, with_slo),
            ("mean_in_flight", 4, n),
        ] {
            let rate = self.by_time.ratio(column, 2).filter(|_| known > 0);
            // In a closed loop answers come in waves, whose gaps tell nothing of the rate. There are always as many in flight, so
            // that the rate is known as well as the mean latency is (Little's law), and no better than tokens per answer.
            let of =
                |r: Option<Interval>| r.and_then(|r| r.half.map(|h| h / r.value)).filter(|s| s.is_finite());
            let spread = match (self.scheduled, name) {
                (true, _) => of(rate),
                (false, "mean_in_flight") => None,
                (false, "output_tokens_per_s") => of(self.latency.batches.ratio(0, 1))
                    .zip(of(self.by_time.ratio(0, 1)))
                    .map(|(a, b)| a.hypot(b)),
                (false, _) => of(self.latency.batches.ratio(0, 1)),
            };
            out.direct(name, rate.map(|r| r.value), spread, known, "clock");
        }
        let gaps =
            |(first, last, n): &(Stamp, Stamp, u64)| (n.saturating_sub(1) as f64, last.since(*first).get());
        let (gaps, seconds) = self.due.values().map(gaps).fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        let offered = (seconds > 0.0).then(|| gaps / seconds);
        out.put("offered_per_s", offered, None, None, n, "clock");
        let met = (with_slo > 0).then(|| self.slo_met as f64 / n as f64);
        let ends = met.and(wilson(self.slo_met as f64, n as f64));
        out.put("slo_met", met, ends.map(|e| e.0), ends.map(|e| e.1), with_slo, "clock");
        out.count("retried", self.retried as f64, n);
        for (name, times) in [
            ("ttft_s", &self.ttft),
            ("itl_s", &self.itl),
            ("latency_s", &self.latency),
            ("send_lateness_s", &self.lateness),
        ] {
            out.times(name, times);
        }

        self.energy(&mut out, around);
        out.own(around, n);
        out.metrics
    }

    fn energy(&self, out: &mut Out, around: &Surroundings) {
        let measured: Joules = self.accounts().map(|a| a.measured).sum();
        let bound: Joules = self.accounts().map(|a| a.bound).sum();
        let seconds = Seconds(self.accounts().map(|a| a.span.duration().get()).sum());
        let n = self.queries;
        let energy = (measured.get() > 0.0).then_some(measured);
        // Sensor error of the whole span; the spread between queries comes on top, independent of it.
        let sensor = energy.map(|e| bound / e);
        let spread = |r: Interval| sensor.zip(r.half).map(|(s, half)| s.hypot(half / r.value));
        let method = out.energy_method;
        // Power and net energy of a span that was seen in part would be those of another span.
        let whole = energy.filter(|_| self.coverage().is_some_and(|c| c >= WHOLE));

        out.gross(energy, whole.is_some(), sensor, n);
        let power = whole.map(|e| e / seconds / self.coverage().unwrap_or(1.0));
        out.direct("mean_power_w", power.map(Watts::get), sensor, n, method);
        let gain: Joules = self.accounts().map(|a| a.gain).sum();
        let time = self.ledgers.iter().map(|(session, l)| (*session, l.account.span.duration())).collect();
        out.idle(around, &time, power, (bound, gain), n);
        out.put("energy_coverage", self.coverage(), None, None, n, method);
        let foreign: Joules = self.ledgers.values().map(|l| l.foreign).sum();
        out.put("foreign_j", energy.map(|_| foreign.get()), None, None, n, method);
        let apart: Joules = self.ledgers.values().map(|l| l.idle + l.open + l.foreign).sum();
        out.put("unattributed_j", energy.map(|_| apart.get()), None, None, n, method);
        let residual = energy.map(|e| (apart + Joules(self.billed) - e) / e);
        out.put("attribution_residual", residual, None, None, n, method);

        let known = self.by_query.samples();
        for (name, sum) in ["queue_j", "prefill_j", "decode_j", "shared_j"].into_iter().zip(self.phases) {
            out.put(name, (known > 0).then_some(sum), None, None, known, method);
        }
        let per_query = self.by_query.ratio(ENERGY, QUERIES);
        let per_thousand = per_query.map(|r| r.value * 1000.0 / 3600.0);
        out.direct("joules_per_query", per_query.map(|r| r.value), per_query.and_then(spread), known, method);
        out.direct("wh_per_1000_queries", per_thousand, per_query.and_then(spread), known, method);

        let known = self.by_token.samples();
        let per_token = self.by_token.ratio(0, 1);
        out.direct(
            "joules_per_output_token",
            per_token.map(|r| r.value),
            per_token.and_then(spread),
            known,
            method,
        );
        let per_joule = self.by_token.ratio(1, 0);
        out.inverse(
            "output_tokens_per_joule",
            per_joule.map(|r| r.value),
            per_joule.and_then(spread),
            known,
            method,
        );

        let known = self.by_score.samples();
        let ratio = |over, under| self.by_score.ratio(over, under);
        let of_score = self.accuracy_spread();
        // Accuracy against energy: the spreads of both, taken as independent.
        let both =
            |r: Option<Interval>| r.and_then(spread).zip(of_score).map(|(energy, score)| energy.hypot(score));
        let per_correct = ratio(ENERGY, SCORE).map(|r| r.value);
        out.direct("joules_per_correct", per_correct, both(ratio(ENERGY, QUERIES)), known, method);
        let ipj = ratio(SCORE, ENERGY).map(|r| r.value);
        out.inverse("ipj", ipj, both(ratio(ENERGY, QUERIES)), known, method);
        let power = ratio(ENERGY, IN_FLIGHT).filter(|p| p.value > 0.0);
        let ipw = power.zip(ratio(SCORE, QUERIES)).map(|(p, s)| s.value / p.value);
        out.inverse("ipw", ipw, both(power), known, method);
    }

    /// Relative half-width of the accuracy of the queries in `by_score`: that of batches, or Wilson's where answers are so alike
    /// that batches show no spread.
    fn accuracy_spread(&self) -> Option<f64> {
        let score = self.by_score.ratio(SCORE, QUERIES)?;
        let (low, high) = wilson(self.by_score.sum(SCORE), self.by_score.samples() as f64)?;
        let half = score.half?.max((high - low) / 2.0);
        Some(if score.value > 0.0 { half / score.value } else { f64::INFINITY })
    }
}

/// Fills the map, units from the definitions.
struct Out {
    metrics: BTreeMap<String, Metric>,
    energy_method: &'static str,
}

impl Out {
    fn put(
        &mut self,
        name: &str,
        value: Option<f64>,
        low: Option<f64>,
        high: Option<f64>,
        n: u64,
        method: &str,
    ) {
        let unit = METRICS.iter().find(|d| d.name == name).map_or("", |d| d.unit).to_owned();
        let [value, low, high] = [value, low, high].map(|x| x.filter(|x| x.is_finite()));
        let metric =
            Metric { value, low, high, unit, n, method: method.to_owned(), p50: None, p90: None, p99: None };
        self.metrics.insert(name.to_owned(), metric);
    }

    fn count(&mut self, name: &str, value: f64, n: u64) {
        self.put(name, Some(value), Some(value), Some(value), n, "count");
    }

    /// Idle power and what is left without it, each session with its own baseline. `time` is how long each session was measured,
    /// `power` the mean over all of it; of the energy's bound, one part is gain.
    fn idle(
        &mut self,
        around: &Surroundings,
        time: &BTreeMap<u32, Seconds>,
        power: Option<Watts>,
        (bound, gain): (Joules, Joules),
        n: u64,
    ) {
        let method = self.energy_method;
        let baseline = |(session, time): (&u32, &Seconds)| {
            // Seen in part, it would be the power of part of the machine.
            let power = around.idle.get(session)?.power().filter(|p| p.coverage() >= WHOLE)?;
            Some((*time, power.value() * *time, power.bound() * *time))
        };
        let add =
            |a: (Seconds, Joules, Joules), b: (Seconds, Joules, Joules)| (a.0 + b.0, a.1 + b.1, a.2 + b.2);
        let all: Option<Vec<_>> = time.iter().map(baseline).collect();
        let sums = all.and_then(|all| all.into_iter().reduce(add)).filter(|(time, ..)| time.get() > 0.0);
        let idle = sums.map(|(time, joules, bound)| (joules / time, bound / joules));
        let sessions = time.len() as u64;
        self.direct("idle_power_w", idle.map(|i| i.0.get()), idle.map(|i| i.1), sessions, method);
        let net = power.zip(sums).map(|(power, (time, joules, idle_bound))| {
            // Both come from the same sensors: their gain error is one, and is that of what is left.
            let relative = gain / (power * time);
            let net = (power * time - joules).get();
            let edges = (bound - gain).get().hypot((idle_bound - joules * relative).get().max(0.0));
            (net, edges, relative * net.abs())
        });
        // A baseline above the run itself was no baseline, unless that is within what the readings leave open.
        let net = net.filter(|(net, edges, _)| *net >= -edges).map(|(net, edges, gain)| (net, edges + gain));
        let (low, high) = (net.map(|n| n.0 - n.1), net.map(|n| n.0 + n.1));
        self.put("net_energy_j", net.map(|n| n.0), low, high, n, method);
    }

    /// All that was seen. If that was not all there was, it is at least so much.
    fn gross(&mut self, energy: Option<Joules>, whole: bool, relative: Option<f64>, n: u64) {
        self.direct("energy_j", energy.map(Joules::get), relative, n, self.energy_method);
        if let Some(metric) = self.metrics.get_mut("energy_j").filter(|_| !whole) {
            metric.high = None;
        }
    }

    /// What wattle itself costs.
    fn own(&mut self, around: &Surroundings, n: u64) {
        let cpu = around.meter_cpu.map(|(cpu, wall)| cpu / wall).filter(|f| f.is_finite());
        self.put("meter_cpu_fraction", cpu, None, None, n, "clock");
        self.put("meter_lateness_p99_s", around.lateness_p99, None, None, n, "clock");
    }

    /// A figure proportional to what carries the relative error; where that is unknown, so are the ends.
    fn direct(&mut self, name: &str, value: Option<f64>, relative: Option<f64>, n: u64, method: &str) {
        let both = value.zip(relative);
        let low = both.map(|(v, r)| (v * (1.0 - r)).max(0.0));
        self.put(name, value, low, both.map(|(v, r)| v * (1.0 + r)), n, method);
    }

    /// A figure inversely proportional to it; above 100 % its upper end is unknown.
    fn inverse(&mut self, name: &str, value: Option<f64>, relative: Option<f64>, n: u64, method: &str) {
        let both = value.zip(relative);
        let high = both.filter(|(_, r)| *r < 1.0).map(|(v, r)| v / (1.0 - r));
        self.put(name, value, both.map(|(v, r)| v / (1.0 + r)), high, n, method);
    }

    fn times(&mut self, name: &str, times: &Times) {
        let mean = times.batches.ratio(0, 1);
        let ends = mean.and_then(|m| Some((m.value - m.half?, m.value + m.half?)));
        let low = ends.map(|e| e.0.max(0.0));
        self.put(name, mean.map(|m| m.value), low, ends.map(|e| e.1), times.batches.samples(), "clock");
        if let Some(metric) = self.metrics.get_mut(name) {
            metric.p50 = times.histogram.quantile(0.5);
            metric.p90 = times.histogram.quantile(0.9);
            metric.p99 = times.histogram.quantile(0.99);
        }
    }
}

#[cfg(test)]
mod tests;
