//! Everything one run is asked to do. The same struct is the TOML file, the result of the flags, a suite's cell and `run.json`.
//!
//! One name in four places: the key `max_queries` is `max_queries = 10` in `wattle.toml`, `WATTLE_MAX_QUERIES=10` in the
//! environment, `--max-queries 10` on the command line and `spec.max_queries` in `run.json`.

use crate::arrival::Spread;
use crate::registry::{Params, nearest};
use crate::slo::Slo;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// More requests than this at once are more than the ports of one address.
pub const MOST_IN_FLIGHT: u32 = 30_000;
/// Requests a second that make sense.
const RATES: std::ops::RangeInclusive<f64> = 1e-6..=1e6;
/// Seconds that make sense where some are needed.
const TIMES: std::ops::RangeInclusive<f64> = 1e-3..=1e6;

fn rate_range() -> String {
    "must lie between 0.000001 and 1000000".into()
}

fn time_range() -> String {
    "must lie between 0.001 and 1000000".into()
}

/// Where energy figures may come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Energy {
    /// Measure with what there is; where there is no sensor at all, a labelled estimate.
    #[default]
    Auto,
    /// Measure or refuse.
    Measured,
    /// Go without.
    None,
}

/// What one run is asked to do: text and numbers only, no effects.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Spec {
    /// The command to run and measure (`wattle exec`); empty where a model is asked (`wattle run`).
    pub command: Vec<String>,
    /// How often the command is run.
    pub repeat: u64,
    /// Which client asks: `embedded`, `openai` …
    pub client: String,
    /// Where the model server is, for clients that need one.
    pub url: Option<String>,
    /// The model: a built-in name, a path to a GGUF file, or the name its server knows; by default the client's own choice.
    pub model: Option<String>,
    /// Options of the client.
    pub client_param: Params,
    /// A server to start for this run and to stop after it: `command`, or `preset` and its options.
    pub server: Params,
    /// What the model is told before every question.
    pub system: Option<String>,
    /// Which dataset is asked.
    pub dataset: String,
    /// Options of the dataset.
    pub dataset_param: Params,
    /// At most this many queries; by default what the dataset suggests, else all of it.
    pub max_queries: Option<u64>,
    /// How answers are scored; by default as the dataset suggests.
    pub scorer: Option<String>,
    /// Requests in flight at once, at most: by default 1 in a closed loop, and any number in an open one.
    pub concurrency: Option<u32>,
    /// Requests a second, whatever becomes of those before: an open loop. Without, a closed one.
    pub rate: Option<f64>,
    /// How the gaps of an open loop are spread.
    pub arrival: Spread,
    /// Squared coefficient of variation of gamma distributed gaps: 1 is Poisson, more comes in bursts.
    pub burstiness: f64,
    /// The rate changes evenly to this one.
    pub ramp_to: Option<f64>,
    /// How long that takes, in seconds.
    pub ramp_s: f64,
    /// A file with the times at which requests are due: an open loop.
    pub trace: Option<String>,
    /// Requests are sent for this long, in seconds, the dataset over and over if it must be.
    pub duration_s: Option<f64>,
    /// Keep the load up with further requests, which count nowhere, until the last measured one has ended.
    pub cooldown: bool,
    /// What an answer must keep to: `ttft`, `itl`, `latency`, each a time (`500ms`).
    pub slo: Params,
    /// Begin every prompt with something of its own, so that no server finds it in a cache; by default in sweeps and
    /// runs by time, which ask the same more than once.
    pub unique_prefix: Option<bool>,
    /// Extra requests before the measured ones, by default 3, and 5 above 10 B parameters; extra runs of a command, by default none.
    pub warmup: Option<u32>,
    /// At most this many tokens of answer.
    pub max_tokens: u32,
    /// 0 is greedy.
    pub temperature: f64,
    /// Seed of everything that draws: the choice of items and the sampler.
    pub seed: u64,
    /// A request that takes longer, in seconds, has failed.
    pub timeout_s: f64,
    /// A server that takes longer to accept a connection, in seconds, is not there.
    pub connect_timeout_s: f64,
    /// A request whose first token takes longer, in seconds, has failed.
    pub first_token_timeout_s: Option<f64>,
    /// An answer of which nothing more came for so long, in seconds, has failed.
    pub stall_timeout_s: Option<f64>,
    /// How often a request that the server did not take (429, 503, no connection) is sent again.
    pub retries: u32,
    /// Give up after this many failed requests in a row; 0 never does.
    pub max_errors: u64,
    /// Where energy figures may come from.
    pub energy: Energy,
    /// Which sources are read; by default all that this machine has.
    pub source: Vec<String>,
    /// Options of the sources, as `source.key`.
    pub source_param: Params,
    /// Read sysfs and procfs below this folder instead of `/`: pretended hardware, and the run says so.
    pub root: Option<String>,
    /// How often counters are polled, in milliseconds.
    pub interval_ms: f64,
    /// Length of the idle baseline before the run, in seconds.
    pub idle_s: f64,
    /// By what energy is split among requests in flight together: `auto` (a calibration of this model, engine and device, if there
    /// is one), `none` (documented ratios), or a calibration file.
    pub calibration: String,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            command: Vec::new(),
            repeat: 1,
            client: "embedded".into(),
            url: None,
            model: None,
            client_param: Params::new(),
            server: Params::new(),
            system: None,
            dataset: "builtin".into(),
            dataset_param: Params::new(),
            max_queries: None,
            scorer: None,
            concurrency: None,
            rate: None,
            arrival: Spread::default(),
            burstiness: 1.0,
            ramp_to: None,
            ramp_s: 0.0,
            trace: None,
            duration_s: None,
            cooldown: false,
            slo: Params::new(),
            unique_prefix: None,
            warmup: None,
            max_tokens: 256,
            temperature: 0.0,
            seed: 1,
            timeout_s: 600.0,
            connect_timeout_s: 10.0,
            first_token_timeout_s: None,
            stall_timeout_s: None,
            retries: 2,
            max_errors: 10,
            energy: Energy::Auto,
            source: Vec::new(),
            source_param: Params::new(),
            root: None,
            interval_ms: 5.0,
            idle_s: 1.0,
            calibration: "auto".into(),
        }
    }
}

/// One layer of settings and where it came from, weakest first.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// For errors: `wattle.toml`, `WATTLE_MODEL`, `--model`.
    pub origin: String,
    /// Keys and values.
    pub values: Map<String, Value>,
}

impl Layer {
    /// A layer of one setting.
    pub fn one(origin: impl Into<String>, key: &str, value: Value) -> Self {
        Self { origin: origin.into(), values: Map::from_iter([(key.to_owned(), value)]) }
    }
}

/// Why settings do not make a spec.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// Nobody knows this key.
    #[error("{origin}: unknown key \"{key}\"{}", .nearest.as_ref().map_or_else(String::new, |n| format!(", did you mean \"{n}\"?")))]
    UnknownKey {
        /// Where it was given.
        origin: String,
        /// The key.
        key: String,
        /// The closest there is.
        nearest: Option<String>,
    },
    /// The value does not fit the key.
    #[error("{}: {why}", place(.origin, .key))]
    BadValue {
        /// Where it was given.
        origin: String,
        /// The key.
        key: String,
        /// What is wrong with it.
        why: String,
    },
}

/// A flag and a variable name their key already; a file does not.
fn place(origin: &str, key: &str) -> String {
    let named =
        origin.trim_start_matches("--").trim_start_matches("WATTLE_").to_lowercase().replace('-', "_");
    if named == key { origin.to_owned() } else { format!("{origin}: {key}") }
}

impl Spec {
    /// All keys.
    pub fn keys() -> Vec<String> {
        Self::default().to_map().keys().cloned().collect()
    }

    /// Defaults overlaid by each layer in turn. Tables (`…_param`) are merged key by key; everything else is replaced.
    pub fn from_layers(layers: &[Layer]) -> Result<Spec, SpecError> {
        let mut map = Self::default().to_map();
        for layer in layers {
            for (key, value) in &layer.values {
                let bad =
                    |why: String| SpecError::BadValue { origin: layer.origin.clone(), key: key.clone(), why };
                let Some(old) = map.get(key) else {
                    return Err(SpecError::UnknownKey {
                        origin: layer.origin.clone(),
                        key: key.clone(),
                        nearest: nearest(key, map.keys().map(String::as_str)).map(str::to_owned),
                    });
                };
                let value = match (old, value) {
                    (Value::Object(old), Value::Object(new)) => {
                        let mut both = old.clone();
                        both.extend(new.iter().map(|(k, v)| (k.clone(), text_of(v))));
                        Value::Object(both)
                    }
                    _ => value.clone(),
                };
                map.insert(key.clone(), value);
                Self::from_map(map.clone()).map_err(|e| bad(e.to_string()))?.check(key).map_err(bad)?;
            }
        }
        Self::from_map(map).map_err(|e| SpecError::BadValue {
            origin: "settings".into(),
            key: "spec".into(),
            why: e.to_string(),
        })
    }

    /// A layer from one piece of text, as the environment gives it: a string, a JSON value, one `key=value` or a
    /// comma-separated list, whichever fits the key.
    pub fn layer_from_text(origin: &str, key: &str, text: &str) -> Result<Layer, SpecError> {
        let list =
            || Value::Array(text.split(',').map(|part| Value::String(part.trim().to_owned())).collect());
        let pair =
            || text.split_once('=').map(|(k, v)| Value::Object(Map::from_iter([(k.to_owned(), v.into())])));
        let readings =
            [Some(Value::String(text.to_owned())), serde_json::from_str(text).ok(), pair(), Some(list())];
        let mut first_error = None;
        for value in readings.into_iter().flatten() {
            let layer = Layer::one(origin, key, value);
            match Self::from_layers(std::slice::from_ref(&layer)) {
                Ok(_) => return Ok(layer),
                Err(unknown @ SpecError::UnknownKey { .. }) => return Err(unknown),
                Err(e) => first_error = first_error.or(Some(e)),
            }
        }
        Err(first_error
            .expect("the loop ran at least once, and every pass that did not return kept its error"))
    }

    /// Refuses a spec that did not come through [`Spec::from_layers`] and makes no sense: a file somebody wrote to.
    pub fn validate(&self) -> Result<(), SpecError> {
        let bad = |key: String, why| SpecError::BadValue { origin: "run.json".into(), key, why };
        Self::keys().into_iter().try_for_each(|key| self.check(&key).map_err(|why| bad(key, why)))
    }

    /// Refuses values that fit the type and make no sense.
    fn check(&self, key: &str) -> Result<(), String> {
        match key {
            "concurrency" if self.concurrency.is_some_and(|n| !(1..=MOST_IN_FLIGHT).contains(&n)) => {
                Err(format!("must lie between 1 and {MOST_IN_FLIGHT}"))
            }
            "rate" if self.rate.is_some_and(|r| !RATES.contains(&r)) => Err(rate_range()),
            "ramp_to" if self.ramp_to.is_some_and(|r| !RATES.contains(&r)) => Err(rate_range()),
            "burstiness" if !(1e-3..=1e3).contains(&self.burstiness) => {
                Err("must lie between 0.001 and 1000".into())
            }
            "ramp_s" if !(0.0..=1e6).contains(&self.ramp_s) => Err("must lie between 0 and 1000000".into()),
            "duration_s" if self.duration_s.is_some_and(|s| !TIMES.contains(&s)) => Err(time_range()),
            "connect_timeout_s" if !TIMES.contains(&self.connect_timeout_s) => Err(time_range()),
            "first_token_timeout_s" if self.first_token_timeout_s.is_some_and(|s| !TIMES.contains(&s)) => {
                Err(time_range())
            }
            "stall_timeout_s" if self.stall_timeout_s.is_some_and(|s| !TIMES.contains(&s)) => {
                Err(time_range())
            }
            "retries" if self.retries > 100 => Err("must be at most 100".into()),
            "slo" => Slo::parse(&self.slo).map(|_| ()),
            "repeat" if self.repeat == 0 => Err("must be above 0".into()),
            "command" if self.command.first().is_some_and(String::is_empty) => {
                Err("must name a program".into())
            }
            "calibration" if self.calibration.is_empty() => Err("must be auto, none or a file".into()),
            "max_tokens" if self.max_tokens == 0 => Err("must be above 0".into()),
            "max_queries" if self.max_queries == Some(0) => Err("must be above 0".into()),
            "temperature" if !(0.0..=10.0).contains(&self.temperature) => {
                Err("must lie between 0 and 10".into())
            }
            "timeout_s" if !TIMES.contains(&self.timeout_s) => Err(time_range()),
            // Counters are refreshed every 10 to 500 ms and must be polled faster.
            "interval_ms" if !(0.5..=100.0).contains(&self.interval_ms) => {
                Err("must lie between 0.5 and 100".into())
            }
            "idle_s" if !(0.0..=3600.0).contains(&self.idle_s) => Err("must lie between 0 and 3600".into()),
            _ => Ok(()),
        }
    }

    fn to_map(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(map)) => map,
            _ => unreachable!("a struct of plain fields serialises to an object"),
        }
    }

    fn from_map(map: Map<String, Value>) -> Result<Spec, serde_json::Error> {
        serde_json::from_value(Value::Object(map))
    }
}

/// Numbers and booleans in a table of options are text like everything else there.
fn text_of(value: &Value) -> Value {
    match value {
        Value::Number(n) => Value::String(n.to_string()),
        Value::Bool(b) => Value::String(b.to_string()),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn layer(origin: &str, value: Value) -> Layer {
        Layer { origin: origin.into(), values: value.as_object().unwrap().clone() }
    }

    #[test]
    fn later_layers_win_and_tables_merge() {
        let spec = Spec::from_layers(&[
            layer(
                "wattle.toml",
                json!({"model": "a", "max_queries": 5, "dataset_param": {"path": "x", "n": 3}}),
            ),
            layer("--model", json!({"model": "b", "dataset_param": {"path": "y,z"}})),
        ])
        .unwrap();
        assert_eq!((spec.model.as_deref(), spec.max_queries), (Some("b"), Some(5)));
        assert_eq!(
            spec.dataset_param,
            Params::from([("path".into(), "y,z".into()), ("n".into(), "3".into())])
        );
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_nearest_match() {
        let error = Spec::from_layers(&[layer("wattle.toml", json!({"max_query": 5}))]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "wattle.toml: unknown key \"max_query\", did you mean \"max_queries\"?"
        );
    }

    #[test]
    fn a_wrong_value_names_its_place() {
        let error = Spec::from_layers(&[layer("--seed", json!({"seed": "x"}))]).unwrap_err();
        assert!(error.to_string().starts_with("--seed: invalid type"), "{error}");
        assert!(Spec { timeout_s: 1e20, ..Spec::default() }.validate().is_err());
        assert!(Spec { interval_ms: f64::NAN, ..Spec::default() }.validate().is_err());
        assert_eq!(Spec::default().validate(), Ok(()));
        let error = Spec::from_layers(&[layer("wattle.toml", json!({"idle_s": -1}))]).unwrap_err();
        assert_eq!(error.to_string(), "wattle.toml: idle_s: must lie between 0 and 3600");
    }

    #[test]
    fn text_is_read_as_the_key_needs_it() {
        let read =
            |key, text| Spec::from_layers(&[Spec::layer_from_text("env", key, text).unwrap()]).unwrap();
        assert_eq!(read("model", "5").model.as_deref(), Some("5"));
        assert_eq!(read("max_queries", "5").max_queries, Some(5));
        assert_eq!(read("source", "nvml, rapl").source, ["nvml", "rapl"]);
        assert_eq!(read("energy", "none").energy, Energy::None);
        assert_eq!(read("dataset_param", "path=a,b=c").dataset_param["path"], "a,b=c");
        assert_eq!(read("dataset_param", r#"{"path":"x","n":3}"#).dataset_param["n"], "3");
        assert!(
            Spec::layer_from_text("WATTLE_SEED", "seed", "many")
                .unwrap_err()
                .to_string()
                .starts_with("WATTLE_SEED")
        );
    }

    #[test]
    fn a_spec_survives_its_file() {
        let spec = Spec { url: Some("http://x".into()), source: vec!["rapl".into()], ..Spec::default() };
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<Spec>(&text).unwrap(), spec);
    }
}
