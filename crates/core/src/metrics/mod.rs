//! Every metric, one definition each, as a function of records. Sums, not means of ratios; the same queries above and below the line.

mod definition;

pub use definition::{Definition, METRICS, Metric};

use crate::attribute::Ledger;
use crate::estimate::{Estimate, Method};
use crate::exchange::{Finish, Outcome};
use crate::record::Record;
use crate::stats::{Batches, Histogram, Interval, wilson};
use crate::time::Span;
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
    /// Joules, 1: of queries whose energy is wholly known.
    by_query: Batches<2>,
    /// Joules, 1, score, time in flight: of those of them that have a score.
    by_score: Batches<4>,
    /// Joules, tokens: of those of them that know their tokens.
    by_token: Batches<2>,
    /// Tokens, 1, time since the end of the query before: of all.
    by_time: Batches<3>,
    /// Sum, and how many knew.
    prompt_tokens: (u64, u64),
    output_tokens: (u64, u64),
    ttft: Times,
    itl: Times,
    latency: Times,
    ledgers: BTreeMap<u32, Ledger>,
    spans: BTreeMap<u32, Span>,
    method: Option<Method>,
}

/// What the records do not know.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// Power of the idle baseline of each session.
    pub idle_power: BTreeMap<u32, Estimate<Watts>>,
    /// CPU time of the sampler thread and the time it ran.
    pub meter_cpu: Option<(Seconds, Seconds)>,
}

#[derive(Debug, Clone, Default)]
struct Times {
    histogram: Histogram,
    /// Weighted time, weight.
    batches: Batches<2>,
}

impl Times {
    fn push(&mut self, time: Seconds, weight: f64) {
        self.histogram.push(time.get());
        self.batches.push([time.get() * weight, weight]);
    }
}

impl Accumulator {
    /// Takes in one record.
    pub fn push(&mut self, record: &Record) {
        let exchange = &record.exchange;
        self.queries += 1;
        match exchange.outcome {
            Outcome::Failed { .. } => self.errors += 1,
            Outcome::Ok { finish } => {
                self.truncated += u64::from(finish == Finish::Length);
                self.unstreamed += u64::from(exchange.first_token.is_none() && !exchange.answer.is_empty());
                self.latency.push(exchange.latency(), 1.0);
            }
        }
        let score = record.score.as_ref().map(|s| s.value);
        self.scored += u64::from(score.is_some());
        self.score += score.unwrap_or(0.0);
        if let Some(share) = record.share {
            self.method = self.method.max(Some(share.method));
        }
        let tokens = exchange.usage.completion;
        if let Some(share) = record.share.filter(|s| s.coverage >= WHOLE) {
            let joules = share.total().get();
            self.by_query.push([joules, 1.0]);
            if let Some(score) = score {
                self.by_score.push([joules, 1.0, score, exchange.span().duration().get()]);
            }
            if let Some(tokens) = tokens {
                self.by_token.push([joules, tokens as f64]);
            }
        }
        for (sum, count) in
            [(&mut self.prompt_tokens, exchange.usage.prompt), (&mut self.output_tokens, tokens)]
        {
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
        let since_last = exchange.done.since(span.end());
        *span = Span::new(span.start().min(exchange.sent), span.end().max(exchange.done));
        self.by_time.push([tokens.unwrap_or(0) as f64, 1.0, since_last.get()]);
    }

    /// How many queries were taken in.
    pub const fn queries(&self) -> u64 {
        self.queries
    }

    /// How many of them failed.
    pub const fn errors(&self) -> u64 {
        self.errors
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

    /// The measured span of each session.
    pub fn spans(&self) -> impl Iterator<Item = (u32, Span)> + '_ {
        self.spans.iter().map(|(session, span)| (*session, *span))
    }

    /// Part of the measured span that readings covered; `None` without any energy.
    pub fn coverage(&self) -> Option<f64> {
        let seconds: f64 = self.ledgers.values().map(|l| l.span.duration().get()).sum();
        let covered: f64 = self.ledgers.values().map(|l| l.span.duration().get() * l.coverage).sum();
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
        for (name, (sum, known)) in
            [("prompt_tokens", self.prompt_tokens), ("output_tokens", self.output_tokens)]
        {
            out.put(name, (known > 0).then_some(sum as f64), None, None, known, "count");
        }
        // The times between ends of queries add up to the span.
        for (name, column, known) in
            [("output_tokens_per_s", 0, self.output_tokens.1), ("queries_per_s", 1, n)]
        {
            let rate = self.by_time.ratio(column, 2).filter(|_| known > 0);
            let spread = rate.and_then(|r| r.half.map(|h| h / r.value));
            out.direct(name, rate.map(|r| r.value), spread, known, "clock");
        }
        for (name, times) in [("ttft_s", &self.ttft), ("itl_s", &self.itl), ("latency_s", &self.latency)] {
            out.times(name, times);
        }

        self.energy(&mut out, around);
        let cpu = around.meter_cpu.map(|(cpu, wall)| cpu / wall).filter(|f| f.is_finite());
        out.put("meter_cpu_fraction", cpu, None, None, n, "clock");
        out.metrics
    }

    fn energy(&self, out: &mut Out, around: &Surroundings) {
        let ledgers = || self.ledgers.values();
        let measured: Joules = ledgers().map(|l| l.measured).sum();
        let bound: Joules = ledgers().map(|l| l.bound).sum();
        let seconds = Seconds(ledgers().map(|l| l.span.duration().get()).sum());
        let n = self.queries;
        let energy = (measured.get() > 0.0).then_some(measured);
        // Sensor error of the whole span; the spread between queries comes on top, independent of it.
        let sensor = energy.map(|e| bound / e);
        let spread = |r: Interval| sensor.zip(r.half).map(|(s, half)| s.hypot(half / r.value));
        let method = out.energy_method;
        // Power and net energy of a span that was seen in part would be those of another span.
        let whole = energy.filter(|_| self.coverage().is_some_and(|c| c >= WHOLE));

        out.direct("energy_j", energy.map(Joules::get), sensor, n, method);
        let power = whole.map(|e| e / seconds / self.coverage().unwrap_or(1.0));
        out.direct("mean_power_w", power.map(Watts::get), sensor, n, method);
        self.idle(out, around, power, bound, method);
        out.put("energy_coverage", self.coverage(), None, None, n, method);
        let accounted: Joules = ledgers().map(|l| l.billed + l.idle).sum();
        out.put("attribution_residual", energy.map(|e| (accounted - e) / e), None, None, n, method);

        let known = self.by_query.samples();
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

    /// Idle power and what is left without it, each session with its own baseline.
    fn idle(&self, out: &mut Out, around: &Surroundings, power: Option<Watts>, bound: Joules, method: &str) {
        let baseline = |(session, ledger): (&u32, &Ledger)| {
            // Seen in part, it would be the power of part of the machine.
            let power = around.idle_power.get(session).filter(|p| p.coverage() >= WHOLE)?;
            let time = ledger.span.duration();
            Some((time, power.value() * time, power.bound() * time))
        };
        let add =
            |a: (Seconds, Joules, Joules), b: (Seconds, Joules, Joules)| (a.0 + b.0, a.1 + b.1, a.2 + b.2);
        let all: Option<Vec<_>> = self.ledgers.iter().map(baseline).collect();
        let sums = all.and_then(|all| all.into_iter().reduce(add)).filter(|(time, ..)| time.get() > 0.0);
        let idle = sums.map(|(time, joules, bound)| (joules / time, bound / joules));
        let n = self.ledgers.len() as u64;
        out.direct("idle_power_w", idle.map(|i| i.0.get()), idle.map(|i| i.1), n, method);
        // A baseline above the run itself was no baseline.
        let below = power.zip(idle).is_some_and(|(power, (idle, _))| idle <= power);
        let net = power.zip(sums).filter(|_| below).map(|(power, (time, joules, idle_bound))| {
            // Both come from the same sensors: their gain error is one, and is that of what is left.
            let gain: Joules = self.ledgers.values().map(|l| l.gain).sum();
            let relative = gain / (power * time);
            let net = (power * time - joules).get();
            let edges = (bound - gain).get().hypot((idle_bound - joules * relative).get().max(0.0));
            (net, edges + relative * net.abs())
        });
        out.put(
            "net_energy_j",
            net.map(|n| n.0),
            net.map(|n| n.0 - n.1),
            net.map(|n| n.0 + n.1),
            self.queries,
            method,
        );
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
mod tests {
    use super::*;
    use crate::attribute::Share;
    use crate::exchange::{Exchange, FailureClass, TokensFrom, Usage};
    use crate::record::{Item, Score, Telemetry};
    use crate::sensor::Perimeter;
    use crate::time::Stamp;

    const MS: u64 = 1_000_000;

    /// Query `i` of a run at a constant 100 W, 100 ms each, 11 tokens, right three times of four.
    fn record(i: u64, energy: bool) -> Record {
        let (sent, first, done) = (i * 100 * MS, i * 100 * MS + 20 * MS, (i + 1) * 100 * MS);
        let at = Stamp::from_nanos;
        let share = Share {
            queue: Joules::ZERO,
            prefill: Joules(2.0),
            decode: Joules(8.0),
            shared: Joules::ZERO,
            bound: Joules(1.0),
            method: Method::Counter,
            coverage: 1.0,
        };
        let ledger = Ledger {
            span: Span::new(at(0), at(done)),
            measured: Joules(10.0 * (i + 1) as f64),
            bound: Joules(0.5 * (i + 1) as f64),
            gain: Joules::ZERO,
            start: None,
            within: Joules::ZERO,
            idle: Joules::ZERO,
            billed: Joules(10.0 * (i + 1) as f64),
            coverage: 1.0,
        };
        Record {
            session: 0,
            item: Item {
                index: i,
                id: i.to_string(),
                prompt: "?".into(),
                expected: Some("!".into()),
                subject: None,
                metadata: serde_json::Map::new(),
            },
            exchange: Exchange {
                response_id: None,
                due: at(sent),
                sent: at(sent),
                first_token: Some(at(first)),
                tokens: vec![at(first), at(done)],
                done: at(done),
                usage: Usage {
                    prompt: Some(5),
                    completion: Some(11),
                    from: Some(TokensFrom::Usage),
                    ..Usage::default()
                },
                outcome: Outcome::Ok { finish: Finish::Stop },
                answer: "!".into(),
                server: None,
            },
            share: energy.then_some(share),
            perimeter: energy.then_some(Perimeter::Device),
            telemetry: Telemetry::default(),
            score: Some(Score { value: if i.is_multiple_of(4) { 0.0 } else { 1.0 }, scorer: "exact".into() }),
            ledger: energy.then_some(ledger),
        }
    }

    fn value(metrics: &BTreeMap<String, Metric>, name: &str) -> f64 {
        metrics[name].value.unwrap_or_else(|| panic!("{name} is null"))
    }

    #[test]
    fn every_metric_has_the_value_its_definition_says() {
        let mut all = Accumulator::default();
        (0..100).for_each(|i| all.push(&record(i, true)));
        let idle = Estimate::new(Watts(40.0), Watts(2.0), Method::Counter, 1.0);
        let around = Surroundings {
            idle_power: BTreeMap::from([(0, idle)]),
            meter_cpu: Some((Seconds(0.05), Seconds(10.0))),
        };
        let m = all.finish(&around);
        for (name, expected) in [
            ("queries", 100.0),
            ("errors", 0.0),
            ("unscored", 0.0),
            ("truncated", 0.0),
            ("accuracy", 0.75),
            ("energy_j", 1000.0),
            ("net_energy_j", 600.0),
            ("mean_power_w", 100.0),
            ("joules_per_query", 10.0),
            ("joules_per_correct", 1000.0 / 75.0),
            ("joules_per_output_token", 10.0 / 11.0),
            ("output_tokens_per_joule", 1.1),
            ("wh_per_1000_queries", 10_000.0 / 3600.0),
            ("prompt_tokens", 500.0),
            ("output_tokens", 1100.0),
            ("output_tokens_per_s", 110.0),
            ("queries_per_s", 10.0),
            ("ttft_s", 0.02),
            ("itl_s", 0.008),
            ("latency_s", 0.1),
            ("ipj", 0.075),
            ("ipw", 0.0075),
            ("energy_coverage", 1.0),
            ("attribution_residual", 0.0),
            ("meter_cpu_fraction", 0.005),
        ] {
            assert!((value(&m, name) - expected).abs() <= 1e-9 * expected.max(1.0), "{name}: {:?}", m[name]);
        }
        assert!(m.len() == METRICS.len() && METRICS.iter().all(|d| m.contains_key(d.name)));
        let energy = &m["energy_j"];
        assert_eq!((energy.low, energy.high, energy.method.as_str()), (Some(950.0), Some(1050.0), "counter"));
        let latency = &m["latency_s"];
        assert!((latency.p99.unwrap() / 0.1 - 1.0).abs() < 0.002);
    }

    #[test]
    fn unknown_energy_is_null_everywhere() {
        let mut all = Accumulator::default();
        (0..12).for_each(|i| all.push(&record(i, false)));
        let m = all.finish(&Surroundings::default());
        for name in [
            "energy_j",
            "joules_per_query",
            "ipj",
            "ipw",
            "mean_power_w",
            "attribution_residual",
            "net_energy_j",
        ] {
            assert_eq!(m[name].value, None, "{name}");
        }
        assert_eq!(value(&m, "accuracy"), 0.75);
    }

    #[test]
    fn a_failed_query_counts_as_wrong_and_still_pays() {
        let mut all = Accumulator::default();
        all.push(&record(1, true));
        let mut failed = record(2, true);
        failed.exchange.outcome = Outcome::Failed { class: FailureClass::Timeout, error: "slow".into() };
        failed.score = Some(Score { value: 0.0, scorer: "exact".into() });
        failed.exchange.usage = Usage::default();
        all.push(&failed);
        let m = all.finish(&Surroundings::default());
        assert_eq!((value(&m, "accuracy"), value(&m, "errors")), (0.5, 1.0));
        assert_eq!(value(&m, "joules_per_query"), 10.0);
        assert!((value(&m, "joules_per_output_token") - 10.0 / 11.0).abs() < 1e-12, "pairs only");
        assert_eq!(m["latency_s"].n, 1);
    }

    #[test]
    fn a_wide_sensor_bound_leaves_inverse_figures_open_above() {
        let mut all = Accumulator::default();
        let mut r = record(0, true);
        if let Some(ledger) = &mut r.ledger {
            ledger.bound = Joules(12.0);
        }
        all.push(&r);
        all.push(&r);
        let m = all.finish(&Surroundings::default());
        assert_eq!(m["output_tokens_per_joule"].high, None);
        assert!(m["output_tokens_per_joule"].low.is_some());
        assert_eq!(m["energy_j"].low, Some(0.0));
    }

    #[test]
    fn a_question_without_an_answer_is_no_wrong_answer() {
        let mut all = Accumulator::default();
        for i in 0..8 {
            let mut r = record(i, true);
            r.score = (i < 4).then(|| Score { value: 1.0, scorer: "exact".into() });
            all.push(&r);
        }
        let m = all.finish(&Surroundings::default());
        assert_eq!((value(&m, "accuracy"), m["accuracy"].n, value(&m, "unscored")), (1.0, 4, 4.0));
        assert_eq!((value(&m, "ipj"), m["ipj"].n), (0.1, 4));
        assert_eq!((value(&m, "joules_per_query"), m["joules_per_query"].n), (10.0, 8));
    }

    #[test]
    fn three_right_answers_do_not_make_intelligence_certain() {
        let mut all = Accumulator::default();
        (1..4).for_each(|i| all.push(&record(i, true)));
        let m = all.finish(&Surroundings::default());
        let width = |name: &str| (m[name].high.unwrap() - m[name].low.unwrap()) / value(&m, name);
        assert!(width("joules_per_correct") > 2.0 * width("joules_per_query"), "accuracy may be 0.44");
        assert!(m["ipj"].low.unwrap() < 0.08 && value(&m, "ipj") == 0.1);
    }

    #[test]
    fn what_was_seen_in_part_gives_no_power_and_no_query_figures() {
        let mut all = Accumulator::default();
        for i in 0..10 {
            let mut r = record(i, true);
            r.ledger.as_mut().unwrap().coverage = 0.5;
            r.share.as_mut().unwrap().coverage = 0.5;
            all.push(&r);
        }
        let idle = Estimate::new(Watts(40.0), Watts(2.0), Method::Counter, 1.0);
        let m = all.finish(&Surroundings { idle_power: BTreeMap::from([(0, idle)]), meter_cpu: None });
        assert_eq!((value(&m, "energy_j"), value(&m, "energy_coverage")), (100.0, 0.5));
        for name in
            ["mean_power_w", "net_energy_j", "joules_per_query", "ipj", "ipw", "joules_per_output_token"]
        {
            assert_eq!(m[name].value, None, "{name}");
        }
    }

    #[test]
    fn one_query_has_no_spread_and_so_no_interval() {
        let mut all = Accumulator::default();
        all.push(&record(1, true));
        let m = all.finish(&Surroundings::default());
        for name in ["output_tokens_per_s", "joules_per_query", "latency_s", "ipj"] {
            assert!(m[name].value.is_some() && m[name].low.is_none() && m[name].high.is_none(), "{name}");
        }
    }

    #[test]
    fn each_session_has_its_own_baseline_and_one_above_the_run_is_none() {
        let net = |first: f64, second: f64| {
            let mut all = Accumulator::default();
            for session in 0..2 {
                for i in 0..10 {
                    all.push(&Record { session, ..record(i, true) });
                }
            }
            // Not a number stands for a baseline of which half was seen.
            let idle = |w: f64| match w.is_nan() {
                true => Estimate::new(Watts(20.0), Watts(1.0), Method::Counter, 0.5),
                false => Estimate::new(Watts(w), Watts(1.0), Method::Counter, 1.0),
            };
            let around = Surroundings {
                idle_power: BTreeMap::from([(0, idle(first)), (1, idle(second))]),
                meter_cpu: None,
            };
            let m = all.finish(&around);
            (m["idle_power_w"].value, m["net_energy_j"].value)
        };
        assert_eq!(net(20.0, 40.0), (Some(30.0), Some(140.0)));
        assert_eq!(net(20.0, f64::NAN).1, None);
        assert_eq!(net(120.0, 140.0), (Some(130.0), None));
    }
}
