//! Every metric, one definition each, as a function of records. Sums, not means of ratios; the same queries above and below the line.

use crate::attribute::Ledger;
use crate::estimate::{Estimate, Method};
use crate::record::Record;
use crate::stats::{Batches, Histogram, Interval, wilson};
use crate::units::{Joules, Seconds, Watts};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One figure of a summary; `low` and `high` are the ends of its 95 % interval, `null` where unknown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// The figure.
    pub value: Option<f64>,
    /// Lower end.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
    /// Its unit.
    pub unit: String,
    /// How many queries it stands on.
    pub n: u64,
    /// How it was got: `count`, `clock`, `score`, or the energy's method.
    pub method: String,
    /// Median, for times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50: Option<f64>,
    /// 90th percentile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p90: Option<f64>,
    /// 99th percentile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99: Option<f64>,
}

/// What a metric means.
#[derive(Debug, Clone, Copy)]
pub struct Definition {
    /// Its name in `summary.json`.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// One sentence.
    pub definition: &'static str,
}

const fn def(name: &'static str, unit: &'static str, definition: &'static str) -> Definition {
    Definition { name, unit, definition }
}

/// All metrics, in the order they are shown. `wattle list metrics` prints this.
pub const METRICS: &[Definition] = &[
    def("queries", "1", "Queries asked, warm-up left out."),
    def("errors", "1", "Queries that got no whole answer."),
    def(
        "accuracy",
        "1",
        "Mean score; a failed query or an answer that cannot be scored counts as 0. Wilson interval.",
    ),
    def(
        "energy_j",
        "J",
        "Energy drawn from the first request sent to the last one done, all devices of the perimeter, idle included (gross).",
    ),
    def("idle_power_w", "W", "Mean power of the baseline before the run, nothing in flight."),
    def(
        "net_energy_j",
        "J",
        "energy_j minus idle_power_w times the same span; the bound says what is left of it.",
    ),
    def("joules_per_query", "J", "Sum of all queries' shares / number of those queries."),
    def("joules_per_correct", "J", "Sum of all queries' shares / sum of their scores."),
    def("joules_per_output_token", "J", "Sum of shares / sum of output tokens, over queries that know both."),
    def(
        "output_tokens_per_joule",
        "1/J",
        "Sum of output tokens / sum of shares, over queries that know both.",
    ),
    def("mean_power_w", "W", "energy_j / the span it covers."),
    def("wh_per_1000_queries", "Wh", "1000 × joules_per_query / 3600."),
    def("prompt_tokens", "1", "Sum of prompt tokens of queries that know them."),
    def("output_tokens", "1", "Sum of output tokens, reasoning included, of queries that know them."),
    def(
        "output_tokens_per_s",
        "1/s",
        "output_tokens / the span from the first request sent to the last one done.",
    ),
    def("queries_per_s", "1/s", "queries / the same span."),
    def(
        "ttft_s",
        "s",
        "From the moment a request was due to its first content or reasoning token; a chunk that only names the role does not count.",
    ),
    def(
        "itl_s",
        "s",
        "Per request: last token minus first token / (output tokens - 1); the mean over tokens, so long answers weigh more.",
    ),
    def("latency_s", "s", "From the moment a request was due to its end, over whole answers."),
    def("ipj", "1/J", "Intelligence per joule: accuracy / mean joules per query."),
    def(
        "ipw",
        "1/W",
        "Intelligence per watt: accuracy / mean watts while a query is in flight (sum of shares / sum of times in flight).",
    ),
    def("energy_coverage", "1", "Part of the measured span that readings covered."),
    def(
        "attribution_residual",
        "1",
        "(Shares + idle - measured) / measured: 0 to rounding, or joules were lost.",
    ),
    def("meter_cpu_fraction", "1", "CPU time of wattle's sampler thread / length of the run, in cores."),
];

// Columns of the batches.
const ENERGY: usize = 0;
const QUERIES: usize = 1;
const SCORE: usize = 2;
const IN_FLIGHT: usize = 3;
const COLUMNS: usize = 4;

/// Takes in records one by one, in flat memory, and gives the metrics.
#[derive(Debug, Clone, Default)]
pub struct Accumulator {
    queries: u64,
    errors: u64,
    scored: u64,
    score: f64,
    by_query: Batches<COLUMNS>,
    /// Joules, tokens, of queries that know both.
    by_token: Batches<2>,
    prompt_tokens: (u64, u64),
    output_tokens: (u64, u64),
    ttft: Times,
    itl: Times,
    latency: Times,
    sessions: BTreeMap<u32, Ledger>,
    spans: BTreeMap<u32, crate::time::Span>,
    method: Option<Method>,
}

/// What the records do not know.
#[derive(Debug, Clone, Copy, Default)]
pub struct Surroundings {
    /// Power of the idle baseline.
    pub idle_power: Option<Estimate<Watts>>,
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
        self.errors += u64::from(!exchange.outcome.is_ok());
        let score = record.score.as_ref().map_or(0.0, |s| s.value);
        self.scored += u64::from(record.score.is_some());
        self.score += score;
        if let Some(share) = record.share {
            self.method = self.method.max(Some(share.method));
            self.by_query.push([share.total().get(), 1.0, score, exchange.span().duration().get()]);
            if let Some(tokens) = exchange.usage.completion {
                self.by_token.push([share.total().get(), tokens as f64]);
            }
        }
        for (sum, count) in [
            (&mut self.prompt_tokens, exchange.usage.prompt),
            (&mut self.output_tokens, exchange.usage.completion),
        ] {
            if let Some(count) = count {
                *sum = (sum.0 + count, sum.1 + 1);
            }
        }
        if let Some(ttft) = exchange.ttft() {
            self.ttft.push(ttft, 1.0);
        }
        if let (Some(itl), Some(tokens)) = (exchange.itl(), exchange.usage.completion) {
            self.itl.push(itl, tokens.saturating_sub(1) as f64);
        }
        if exchange.outcome.is_ok() {
            self.latency.push(exchange.latency(), 1.0);
        }
        if let Some(ledger) = record.ledger {
            self.sessions.insert(record.session, ledger);
        }
        let span = self.spans.entry(record.session).or_insert_with(|| exchange.span());
        *span = crate::time::Span::new(span.start().min(exchange.sent), span.end().max(exchange.done));
    }

    /// How many queries were taken in.
    pub const fn queries(&self) -> u64 {
        self.queries
    }

    /// How many of them failed.
    pub const fn errors(&self) -> u64 {
        self.errors
    }

    /// Whether any query had an expected answer.
    pub const fn is_scored(&self) -> bool {
        self.scored > 0
    }

    /// Running mean of joules per query, for progress.
    pub fn joules_per_query(&self) -> Option<f64> {
        self.by_query.ratio(ENERGY, QUERIES).map(|r| r.value)
    }

    /// The measured span of each session.
    pub fn spans(&self) -> impl Iterator<Item = (u32, crate::time::Span)> + '_ {
        self.spans.iter().map(|(session, span)| (*session, *span))
    }

    /// Part of the measured span that readings covered, 0 without any energy.
    pub fn coverage(&self) -> Option<f64> {
        let seconds: f64 = self.sessions.values().map(|l| l.span.duration().get()).sum();
        let covered: f64 = self.sessions.values().map(|l| l.span.duration().get() * l.coverage).sum();
        (seconds > 0.0).then(|| covered / seconds)
    }

    /// All metrics. What is unknown has the value `null`.
    pub fn finish(&self, around: &Surroundings) -> BTreeMap<String, Metric> {
        let mut out =
            Out { metrics: BTreeMap::new(), energy_method: self.method.map_or("none", Method::name) };
        let n = self.queries;
        let seconds: f64 = self.spans.values().map(|s| s.duration().get()).sum();

        out.count("queries", n as f64, n);
        out.count("errors", self.errors as f64, n);
        let accuracy = (self.scored > 0).then(|| self.score / n as f64);
        let ends = accuracy.and(wilson(self.score, n as f64));
        out.put("accuracy", accuracy, ends.map(|e| e.0), ends.map(|e| e.1), n, "score");
        for (name, (sum, known)) in
            [("prompt_tokens", self.prompt_tokens), ("output_tokens", self.output_tokens)]
        {
            out.put(name, (known > 0).then_some(sum as f64), None, None, known, "count");
        }
        let (tokens, known) = self.output_tokens;
        // In a closed loop each session's span is the sum of its queries' times, so their spread is the rate's.
        let pace = self.latency.batches.ratio(0, 1).and_then(|r| Some(r.half? / r.value)).unwrap_or(0.0);
        let rate = |count: u64| (seconds > 0.0 && count > 0).then(|| count as f64 / seconds);
        out.inverse("output_tokens_per_s", rate(tokens), pace, known, "clock");
        out.inverse("queries_per_s", rate(n), pace, n, "clock");
        for (name, times) in [("ttft_s", &self.ttft), ("itl_s", &self.itl), ("latency_s", &self.latency)] {
            out.times(name, times);
        }

        self.energy(&mut out, around);
        let cpu = around.meter_cpu.map(|(cpu, wall)| cpu / wall).filter(|f| f.is_finite());
        out.put("meter_cpu_fraction", cpu, None, None, n, "clock");
        out.metrics
    }

    fn energy(&self, out: &mut Out, around: &Surroundings) {
        let ledgers = || self.sessions.values();
        let measured: Joules = ledgers().map(|l| l.measured).sum();
        let bound: Joules = ledgers().map(|l| l.bound).sum();
        let seconds: f64 = ledgers().map(|l| l.span.duration().get()).sum();
        let known = self.by_query.samples();
        let energy = (known > 0 && measured.get() > 0.0).then_some(measured.get());
        // Sensor error of the whole span; the spread between queries comes on top, independent of it.
        let sensor = energy.map_or(0.0, |e| bound.get() / e);
        let with_spread = |r: Interval| sensor.hypot(r.half.map_or(0.0, |h| h / r.value));
        let method = out.energy_method;

        out.direct("energy_j", energy, sensor, known, method);
        out.direct("mean_power_w", energy.map(|e| e / seconds), sensor, known, method);
        let idle = around.idle_power;
        let idle_bound = idle.map(|p| p.bound() / p.value());
        out.direct("idle_power_w", idle.map(|p| p.value().get()), idle_bound.unwrap_or(0.0), 1, method);
        let net = energy.zip(idle).map(|(e, p)| e - p.value().get() * seconds);
        let net_bound = idle.map_or(0.0, |p| bound.get().hypot(p.bound().get() * seconds));
        out.put("net_energy_j", net, net.map(|x| x - net_bound), net.map(|x| x + net_bound), known, method);

        let ratio = |over, under| self.by_query.ratio(over, under).filter(|_| energy.is_some());
        let scored = self.scored > 0;
        let per_query = ratio(ENERGY, QUERIES);
        let spread = per_query.map_or(0.0, with_spread);
        out.direct("joules_per_query", per_query.map(|r| r.value), spread, known, method);
        out.direct(
            "wh_per_1000_queries",
            per_query.map(|r| r.value * 1000.0 / 3600.0),
            spread,
            known,
            method,
        );
        let per_correct = ratio(ENERGY, SCORE).filter(|_| scored);
        out.direct(
            "joules_per_correct",
            per_correct.map(|r| r.value),
            per_correct.map_or(0.0, with_spread),
            known,
            method,
        );
        let ipj = ratio(SCORE, ENERGY).filter(|_| scored);
        out.inverse("ipj", ipj.map(|r| r.value), ipj.map_or(0.0, with_spread), known, method);
        // accuracy / (ΣE/ΣT) over the same queries.
        let power = ratio(ENERGY, IN_FLIGHT).filter(|p| scored && p.value > 0.0);
        let score = ratio(SCORE, QUERIES);
        let ipw = power
            .zip(score)
            .map(|(p, s)| (s.value / p.value, with_spread(p).hypot(s.half.unwrap_or(0.0) / s.value)));
        out.inverse("ipw", ipw.map(|i| i.0), ipw.map_or(0.0, |i| i.1), known, method);

        let by_token = |over, under| self.by_token.ratio(over, under).filter(|_| energy.is_some());
        let n = self.by_token.samples();
        let per_token = by_token(0, 1);
        out.direct(
            "joules_per_output_token",
            per_token.map(|r| r.value),
            per_token.map_or(0.0, with_spread),
            n,
            method,
        );
        let per_joule = by_token(1, 0);
        out.inverse(
            "output_tokens_per_joule",
            per_joule.map(|r| r.value),
            per_joule.map_or(0.0, with_spread),
            n,
            method,
        );

        out.put("energy_coverage", self.coverage(), None, None, known, method);
        let residual = energy.map(|e| {
            let accounted: Joules = ledgers().map(|l| l.billed + l.idle).sum();
            (accounted.get() - e) / e
        });
        out.put("attribution_residual", residual, None, None, known, method);
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

    /// A figure proportional to what carries the relative error.
    fn direct(&mut self, name: &str, value: Option<f64>, relative: f64, n: u64, method: &str) {
        let low = value.map(|v| (v * (1.0 - relative)).max(0.0));
        self.put(name, value, low, value.map(|v| v * (1.0 + relative)), n, method);
    }

    /// A figure inversely proportional to it; above 100 % its upper end is unknown.
    fn inverse(&mut self, name: &str, value: Option<f64>, relative: f64, n: u64, method: &str) {
        let high = value.filter(|_| relative < 1.0).map(|v| v / (1.0 - relative));
        self.put(name, value, value.map(|v| v / (1.0 + relative)), high, n, method);
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
    use crate::exchange::{Exchange, FailureClass, Finish, Outcome, TokensFrom, Usage};
    use crate::record::{Item, Score, Telemetry};
    use crate::sensor::Perimeter;
    use crate::time::{Span, Stamp};

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
        let around = Surroundings { idle_power: Some(idle), meter_cpu: Some((Seconds(0.05), Seconds(10.0))) };
        let m = all.finish(&around);
        for (name, expected) in [
            ("queries", 100.0),
            ("errors", 0.0),
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
        let m = all.finish(&Surroundings::default());
        assert_eq!(m["output_tokens_per_joule"].high, None);
        assert!(m["output_tokens_per_joule"].low.is_some());
        assert_eq!(m["energy_j"].low, Some(0.0));
    }
}
