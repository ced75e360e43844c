//! What a metric is, and what each one means: one definition each. `wattle list metrics` and docs/schema.md come from here.

use serde::{Deserialize, Serialize};

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
    def("unscored", "1", "Queries without an expected answer; they count in no figure that needs a score."),
    def("truncated", "1", "Answers cut off at the token cap or at the end of the model's context."),
    def(
        "accuracy",
        "1",
        "Mean score of queries with an expected answer; a failed query counts as 0. Wilson interval.",
    ),
    def(
        "energy_j",
        "J",
        "Energy drawn from the first request sent to the last one done, or while the command ran, all devices of the perimeter, idle included (gross); below 99 % coverage it is what was seen, and its upper end is null.",
    ),
    def(
        "idle_power_w",
        "W",
        "Mean power of the baselines before and after the run, nothing at work; of several sessions, weighted by their spans. Its interval holds both.",
    ),
    def(
        "net_energy_j",
        "J",
        "energy_j minus each session's idle power times its span; null below 99 % coverage, or if idle power came out above mean power by more than its bound.",
    ),
    def(
        "joules_per_query",
        "J",
        "Sum of shares / number of queries, over queries whose energy is wholly known (coverage of at least 99 %).",
    ),
    def("joules_per_correct", "J", "Sum of shares / sum of scores, over queries that know both."),
    def("joules_per_output_token", "J", "Sum of shares / sum of output tokens, over queries that know both."),
    def(
        "output_tokens_per_joule",
        "1/J",
        "Sum of output tokens / sum of shares, over queries that know both.",
    ),
    def("mean_power_w", "W", "energy_j / the time it covers; null below 99 % coverage."),
    def("wh_per_1000_queries", "Wh", "1000 × joules_per_query / 3600."),
    def("prompt_tokens", "1", "Sum of prompt tokens of queries that know them."),
    def(
        "cached_tokens",
        "1",
        "Those of them that the server says it had in a cache, of queries that know them.",
    ),
    def("output_tokens", "1", "Sum of output tokens, reasoning included, of queries that know them."),
    def(
        "output_tokens_per_s",
        "1/s",
        "output_tokens / the span from the first request sent to the last one done.",
    ),
    def("queries_per_s", "1/s", "Whole answers / the same span."),
    def(
        "offered_per_s",
        "1/s",
        "(Queries - 1) / the time from the first moment one was due to the last: what an open loop asked for.",
    ),
    def(
        "goodput_per_s",
        "1/s",
        "Whole answers within all limits of --slo / the same span; null without limits.",
    ),
    def(
        "slo_met",
        "1",
        "Part of all queries that got a whole answer within all limits of --slo. Wilson interval.",
    ),
    def(
        "mean_in_flight",
        "1",
        "Sum of times in flight / the same span: requests at the server at once, on average.",
    ),
    def("retried", "1", "Queries that were sent more than once because the server did not take them."),
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
    def(
        "send_lateness_s",
        "s",
        "From the moment a request was due to when it was sent: what the client, or its --concurrency, added. 0 in a closed loop, where a request is due when it is sent.",
    ),
    def("latency_s", "s", "From the moment a request was due to its end, over whole answers."),
    def("ipj", "1/J", "Intelligence per joule: accuracy / mean joules per query."),
    def(
        "ipw",
        "1/W",
        "Intelligence per watt: accuracy / mean watts while a query is in flight (sum of shares / sum of times in flight).",
    ),
    def(
        "prefill_j",
        "J",
        "What prompts added to the engine's work: sum over queries whose energy is wholly known, as the next three.",
    ),
    def("decode_j", "J", "What tokens said, and what they looked back at, added."),
    def("shared_j", "J", "Their parts of what is spent whoever is in flight: weights read, idle power."),
    def("queue_j", "J", "What was drawn while all in flight waited."),
    def(
        "unattributed_j",
        "J",
        "The part of energy_j that is in no query's share: drawn with nobody in flight, or by requests that count nowhere.",
    ),
    def(
        "foreign_j",
        "J",
        "The part of that which was drawn for requests that others sent, as far as the server says how many it has.",
    ),
    def("energy_coverage", "1", "Part of the measured span that readings covered."),
    def(
        "attribution_residual",
        "1",
        "(Shares of all queries + what is in no share - measured) / measured: 0 to rounding, or joules were lost.",
    ),
    def("meter_cpu_fraction", "1", "CPU time of wattle's sampler thread / length of the run, in cores."),
    def(
        "meter_lateness_p99_s",
        "s",
        "How late the sampler's rounds of reading began, 99th percentile; of several sessions the worst.",
    ),
    def("repetitions", "1", "Runs of the command, warm-up left out."),
    def("failed_repetitions", "1", "Runs of the command that did not return 0."),
    def(
        "joules_per_repetition",
        "J",
        "Mean energy of a run of the command, over runs that returned 0 and whose energy is wholly known (coverage of at least 99 %).",
    ),
    def(
        "seconds_per_repetition",
        "s",
        "Mean time from just before the command is started to its end, over runs that returned 0.",
    ),
    def(
        "cpu_s_per_repetition",
        "s",
        "Mean CPU time, user and system, of the command and every process it waited for, over runs that returned 0.",
    ),
    def(
        "peak_rss_bytes",
        "B",
        "Most memory that the processes of the command held together, as seen four times a second, or any one of them, whichever is more.",
    ),
];
