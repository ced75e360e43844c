//! What a server says about all of its work at once: its `/metrics` in the text format of Prometheus, or OpenMetrics.
//!
//! Samples of one name are summed over their labels, so engines side by side are one server. What is no sample is skipped.

use std::collections::BTreeMap;

/// More than this is no scrape of a model server.
pub const LONGEST_SCRAPE: usize = 4 << 20;
/// Nor is a longer line a sample.
const LONGEST_LINE: usize = 64 << 10;
/// What OpenMetrics wants at the end of a counter's samples, and some exporters leave out.
const TOTAL: &str = "_total";

/// How busy a server is, as far as it says.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    /// Requests it works on.
    pub running: Option<f64>,
    /// Requests that wait.
    pub waiting: Option<f64>,
    /// Prompt tokens worked off since it started; those in its cache count as well with some engines.
    pub prompt_tokens: Option<f64>,
    /// Tokens given since it started. llama.cpp counts them when their answer is whole.
    pub generation_tokens: Option<f64>,
}

/// What an engine calls the parts of a [`Load`]; counters without [`TOTAL`].
struct Names {
    running: &'static str,
    waiting: &'static str,
    prompt_tokens: Option<&'static str>,
    generation_tokens: Option<&'static str>,
}

const ENGINES: &[Names] = &[
    // docs.vllm.ai: design/metrics
    Names {
        running: "vllm:num_requests_running",
        waiting: "vllm:num_requests_waiting",
        prompt_tokens: Some("vllm:prompt_tokens"),
        generation_tokens: Some("vllm:generation_tokens"),
    },
    // docs.sglang.io: references/production_metrics; needs --enable-metrics
    Names {
        running: "sglang:num_running_reqs",
        waiting: "sglang:num_queue_reqs",
        prompt_tokens: Some("sglang:prompt_tokens"),
        generation_tokens: Some("sglang:generation_tokens"),
    },
    // llama.cpp: tools/server/README.md; needs --metrics
    Names {
        running: "llamacpp:requests_processing",
        waiting: "llamacpp:requests_deferred",
        prompt_tokens: Some("llamacpp:prompt_tokens"),
        generation_tokens: Some("llamacpp:tokens_predicted"),
    },
    // huggingface.co/docs/text-generation-inference: reference/metrics; tokens only of requests that are over
    Names {
        running: "tgi_batch_current_size",
        waiting: "tgi_queue_size",
        prompt_tokens: None,
        generation_tokens: None,
    },
];

impl Load {
    /// Reads a scrape; `None` if it is none of an engine we know.
    pub fn read(scrape: &[u8]) -> Option<Load> {
        if scrape.len() > LONGEST_SCRAPE {
            return None;
        }
        let sums = sums(scrape);
        let gauge = |name: &str| sums.get(name).copied().filter(|sum: &f64| sum.is_finite());
        // Where both are there, the one without is something else that is called so.
        let counter = |name: &str| gauge(&format!("{name}{TOTAL}")).or_else(|| gauge(name));
        let mut loads = ENGINES.iter().map(|names| Load {
            running: gauge(names.running),
            waiting: gauge(names.waiting),
            prompt_tokens: names.prompt_tokens.and_then(counter),
            generation_tokens: names.generation_tokens.and_then(counter),
        });
        loads.find(|load| *load != Load::default())
    }
}

impl Names {
    fn contains(&self, name: &str) -> bool {
        let counter = name.strip_suffix(TOTAL).unwrap_or(name);
        name == self.running
            || name == self.waiting
            || [self.prompt_tokens, self.generation_tokens].contains(&Some(counter))
    }
}

/// The samples that an engine's load is made of, each name's summed over its labels.
fn sums(scrape: &[u8]) -> BTreeMap<&str, f64> {
    let mut sums = BTreeMap::new();
    for line in scrape.split(|byte| *byte == b'\n').filter(|line| line.len() <= LONGEST_LINE) {
        let Some((name, rest)) = std::str::from_utf8(line).ok().and_then(split_name) else { continue };
        // Most of a scrape are the buckets of histograms.
        if !ENGINES.iter().any(|engine| engine.contains(name)) || is_repeated(rest) {
            continue;
        }
        if let Some(value) = value(rest) {
            *sums.entry(name).or_insert(0.0) += value;
        }
    }
    sums
}

/// Whether another rank of the same engine says so, too: ranks that share the work of each request all count it.
fn is_repeated(rest: &str) -> bool {
    ["tp_rank=\"", "pp_rank=\""].iter().any(|label| {
        rest.split_once(label).is_some_and(|(_, value)| !value.starts_with("0\"") && !value.starts_with('"'))
    })
}

/// The name of a sample, and what comes after it. Comments have none.
fn split_name(line: &str) -> Option<(&str, &str)> {
    let end = line.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':')?;
    (end > 0).then(|| line.split_at(end))
}

/// The value of a sample, of which the name is gone; a timestamp or an exemplar may follow it. Load is never negative.
fn value(rest: &str) -> Option<f64> {
    let rest = rest.trim_start_matches([' ', '\t']);
    let rest = match rest.strip_prefix('{') {
        Some(labels) => &labels[end_of_labels(labels)?..],
        None => rest,
    };
    let value: f64 = rest.split_ascii_whitespace().next()?.parse().ok()?;
    (value.is_finite() && value >= 0.0).then_some(value)
}

/// Where the labels are over; a brace inside quotes does not end them.
fn end_of_labels(labels: &str) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    for (at, byte) in labels.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return Some(at + 1),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // All scrapes here are made up after the engines' documented format.
    const VLLM: &str = r#"# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 12.0
vllm:num_requests_running{engine="1",model_name="meta-llama/Llama-3.1-8B-Instruct"} 4.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 3.0
vllm:num_requests_waiting{engine="1",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3.0
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 1.20034e+06
vllm:prompt_tokens_created{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 1.755e+09
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 90210.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_sum{engine="0"} 1.29e+06
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 777.0
"#;
    const SGLANG: &str = r#"# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 8.128902e+06
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 7.557572e+06
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="meta-llama/Llama-3.1-8B-Instruct",pp_rank="0",tp_rank="0"} 162.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="meta-llama/Llama-3.1-8B-Instruct",pp_rank="0",tp_rank="0"} 2826.0
"#;
    const LLAMA_CPP: &str = "# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 512
# TYPE llamacpp:prompt_seconds_total counter
llamacpp:prompt_seconds_total 1.5
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 39080
llamacpp:tokens_predicted_seconds_total 1235.5
llamacpp:predicted_tokens_seconds nan
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 46
";
    const TGI: &str = r#"# TYPE tgi_request_count counter
tgi_request_count 253
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 8
# TYPE tgi_queue_size gauge
tgi_queue_size 5
# TYPE tgi_request_generated_tokens histogram
tgi_request_generated_tokens_bucket{le="1"} 0
tgi_request_generated_tokens_sum 8123
tgi_request_generated_tokens_count 44
"#;

    fn load(running: f64, waiting: f64, tokens: Option<(f64, f64)>) -> Option<Load> {
        Some(Load {
            running: Some(running),
            waiting: Some(waiting),
            prompt_tokens: tokens.map(|t| t.0),
            generation_tokens: tokens.map(|t| t.1),
        })
    }

    #[test]
    fn every_engine_is_understood() {
        for (scrape, expected) in [
            (VLLM, load(16.0, 3.0, Some((1_200_340.0, 90_210.0)))),
            (SGLANG, load(162.0, 2826.0, Some((8_128_902.0, 7_557_572.0)))),
            (LLAMA_CPP, load(4.0, 46.0, Some((512.0, 39_080.0)))),
            (TGI, load(8.0, 5.0, None)),
        ] {
            assert_eq!(Load::read(scrape.as_bytes()), expected, "{scrape}");
            assert_eq!(Load::read(scrape.replace('\n', "\r\n").as_bytes()), expected, "{scrape}");
        }
    }

    #[test]
    fn a_counter_is_known_with_and_without_its_ending() {
        let bare = Load::read(b"vllm:prompt_tokens{a=\"b\"} 7\n").unwrap();
        assert_eq!(bare, Load { prompt_tokens: Some(7.0), ..Load::default() });
        let both = Load::read(b"vllm:prompt_tokens 3\nvllm:prompt_tokens_total 9\n").unwrap();
        assert_eq!(both.prompt_tokens, Some(9.0));
    }

    #[test]
    fn timestamps_exemplars_and_odd_labels_do_not_matter() {
        let scrape = concat!(
            "vllm:num_requests_running {model_name=\"a \\\"}{\\\" b\", } 2 1755000000000\n",
            "vllm:generation_tokens_total{} 5.0 1755000000.5 # {trace_id=\"x\"} 1.0\n",
            "vllm:num_requests_waiting\t1e0\n# EOF\n",
        );
        let load = Load::read(scrape.as_bytes()).unwrap();
        assert_eq!((load.running, load.waiting, load.generation_tokens), (Some(2.0), Some(1.0), Some(5.0)));
    }

    #[test]
    fn garbage_is_skipped() {
        let mut scrape =
            b"\xff\xfe\nvllm:num_requests_running NaN\nvllm:num_requests_running{a=\"b 9\n".to_vec();
        scrape.extend_from_slice(
            b"vllm:num_requests_running -3\nvllm:num_requests_running\nvllm:num_requests_running x\n",
        );
        scrape.extend_from_slice(&vec![b'x'; LONGEST_LINE + 1]);
        scrape.extend_from_slice(b"\nvllm:num_requests_running +Inf\n{\"quoted\"} 3\n\n");
        assert_eq!(Load::read(&scrape), None);
        scrape.extend_from_slice(b"vllm:num_requests_running 1"); // the end of the last line may be missing
        assert_eq!(Load::read(&scrape).unwrap().running, Some(1.0));
        assert_eq!(Load::read(b"<html>404</html>"), None);
        assert_eq!(
            Load::read(b"# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 3\n"),
            None
        );
    }

    #[test]
    fn what_is_too_long_is_not_read() {
        let mut scrape = VLLM.as_bytes().to_vec();
        scrape.resize(LONGEST_SCRAPE + 1, b'\n');
        assert_eq!(Load::read(&scrape), None);
        scrape.truncate(LONGEST_SCRAPE);
        assert!(Load::read(&scrape).is_some());
    }

    #[test]
    fn ranks_that_share_the_work_count_it_once() {
        let scrape = b"sglang:num_running_reqs{model_name=\"m\",tp_rank=\"0\",dp_rank=\"0\"} 4.0\n\
            sglang:num_running_reqs{model_name=\"m\",tp_rank=\"1\",dp_rank=\"0\"} 4.0\n\
            sglang:num_running_reqs{model_name=\"m\",tp_rank=\"0\",dp_rank=\"1\"} 3.0\n";
        assert_eq!(Load::read(scrape).unwrap().running, Some(7.0));
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_much(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            at in 0usize..VLLM.len(),
        ) {
            let mut scrape = VLLM.as_bytes().to_vec();
            scrape.splice(at..at, bytes);
            for part in [&scrape[..], &scrape[at..]] {
                let Load { running, waiting, .. } = Load::read(part).unwrap_or_default();
                prop_assert!([running, waiting].into_iter().flatten().all(|v| v.is_finite() && v >= 0.0));
            }
        }
    }
}
