//! What a server says about its own work on one request, as clients keep it: llama.cpp's `timings`, Ollama's durations.
//!
//! All of it is wall time at the server, so work for others that was in the same batches is part of it.

use serde_json::Value;

/// A key, and how many seconds its unit has.
type Key = (&'static str, f64);

/// For the prompt: llama.cpp, from when a slot begins with it to the first token; Ollama, in some versions with the wait before.
const PREFILL: &[Key] = &[("prompt_ms", 1e-3), ("prompt_eval_duration", 1e-9)];
/// For the tokens after the first.
const DECODE: &[Key] = &[("predicted_ms", 1e-3), ("eval_duration", 1e-9)];

/// Seconds from when the server began with the prompt to the first token.
pub fn prefill_seconds(server: &Value) -> Option<f64> {
    seconds(server, PREFILL)
}

/// Seconds from the first token to the last.
pub fn decode_seconds(server: &Value) -> Option<f64> {
    seconds(server, DECODE)
}

/// Prompt tokens that the server worked off, those in its cache left out. Ollama counts these with the others and does not say
/// how many they were.
pub fn processed_tokens(server: &Value) -> Option<u64> {
    server.get("prompt_n")?.as_u64()
}

/// Prompt tokens that the server had in its cache.
pub fn cached_tokens(server: &Value) -> Option<u64> {
    server.get("cache_n")?.as_u64()
}

fn seconds(server: &Value, keys: &[Key]) -> Option<f64> {
    let known = keys.iter().find_map(|(key, unit)| Some(server.get(key)?.as_f64()? * unit));
    known.filter(|seconds| seconds.is_finite() && *seconds >= 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn all(server: &Value) -> (Option<f64>, Option<f64>, Option<u64>, Option<u64>) {
        (prefill_seconds(server), decode_seconds(server), processed_tokens(server), cached_tokens(server))
    }

    #[test]
    fn llama_cpp_says_times_and_what_was_in_its_cache() {
        // Made up, with the keys of llama.cpp's `result_timings::to_json`.
        let timings = json!({
            "cache_n": 236, "prompt_n": 20, "prompt_ms": 62.5, "prompt_per_token_ms": 3.125, "prompt_per_second": 320.0,
            "predicted_n": 35, "predicted_ms": 500.0, "predicted_per_token_ms": 14.28, "predicted_per_second": 70.0
        });
        assert_eq!(all(&timings), (Some(0.0625), Some(0.5), Some(20), Some(236)));
    }

    #[test]
    fn ollama_says_times() {
        let durations = json!({
            "total_duration": 2_000_000_000u64, "load_duration": 1_000_000_000u64,
            "prompt_eval_duration": 250_000_000u64, "eval_duration": 750_000_000u64
        });
        assert_eq!(all(&durations), (Some(0.25), Some(0.75), None, None));
    }

    #[test]
    fn what_makes_no_sense_is_not_said() {
        let none = (None, None, None, None);
        for server in [
            json!(null),
            json!([1, 2]),
            json!("prompt_ms"),
            json!({"prompt_ms": -1.0, "predicted_ms": null, "prompt_n": -1, "cache_n": 0.5}),
            json!({"prompt_eval_duration": "250ms", "eval_duration": {}}),
        ] {
            assert_eq!(all(&server), none, "{server}");
        }
    }
}
