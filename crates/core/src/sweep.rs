//! One setting through several values, or up to where the server takes no more: what to try next, given what was found.

use crate::metrics::Metric;
use crate::registry::nearest;
use crate::spec::{Layer, MOST_IN_FLIGHT, Spec};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A server that answers fewer than this part of what it is asked falls behind.
const KEEPS_UP: f64 = 0.95;
/// More failures than this part, and it does not answer.
const MOST_ERRORS: f64 = 0.01;
/// Fewer answers within their limits than this part, and they are not kept to.
const WITHIN_LIMITS: f64 = 0.9;
/// Twice the requests at once that bring less than this more are of no use.
const WORTH_IT: f64 = 1.05;
/// How often the gap between the last that was kept up with and the first that was not is halved.
const HALVINGS: usize = 3;
/// Where a search begins unless told otherwise.
const FIRST: f64 = 1.0;

/// What is tried.
#[derive(Debug, Clone, PartialEq)]
pub enum Sweep {
    /// These values of this key, in this order.
    List {
        /// A key of the spec.
        key: String,
        /// What it is set to.
        values: Vec<Value>,
    },
    /// More and more, until the server takes no more.
    Search {
        /// Of what.
        of: Load,
        /// The first value.
        first: f64,
    },
}

/// What a search raises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Requests a second.
    Rate,
    /// Requests at once.
    Concurrency,
}

/// What was found at one value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The value.
    pub value: Value,
    /// Name of its run's folder.
    pub run: String,
    /// Whether the server kept up: it answered as many as were sent, without errors and within their limits.
    pub kept_up: bool,
    /// The run's metrics.
    pub metrics: BTreeMap<String, Metric>,
}

/// What a sweep found: `sweep.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Swept {
    /// The setting that was changed.
    pub key: String,
    /// What was found, in the order in which it was tried.
    pub points: Vec<Point>,
    /// Where it is kept.
    pub output_dir: PathBuf,
}

impl Point {
    /// The value as people write it, on one line.
    pub fn label(&self) -> String {
        let whole = self.value.as_str().map_or_else(|| self.value.to_string(), str::to_owned);
        whole.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
    }
}

impl Swept {
    /// The points in the order of their values, if those are numbers; else in that in which they were tried.
    pub fn in_order(&self) -> Vec<&Point> {
        let mut points: Vec<&Point> = self.points.iter().collect();
        let value = |p: &Point| p.value.as_f64();
        if points.iter().all(|p| value(p).is_some()) {
            points.sort_by(|a, b| value(a).partial_cmp(&value(b)).unwrap_or(Ordering::Equal));
        }
        points
    }

    /// Whether a metric is known at any point.
    pub fn knows(&self, metric: &str) -> bool {
        self.points.iter().any(|p| p.metrics.get(metric).is_some_and(|m| m.value.is_some()))
    }

    /// Whether a metric is not measured but estimated, at any point.
    pub fn estimates(&self, metric: &str) -> bool {
        self.points.iter().any(|p| p.metrics.get(metric).is_some_and(|m| m.method == "model"))
    }
}

impl Sweep {
    /// Reads `concurrency=1,2,4` and `rate`.
    pub fn parse(text: &str, spec: &Spec) -> Result<Self, String> {
        let Some((key, values)) = text.split_once('=') else {
            let (of, first) = match text {
                "rate" => (Load::Rate, spec.rate.unwrap_or(FIRST)),
                "concurrency" => (Load::Concurrency, spec.concurrency.map_or(FIRST, f64::from)),
                _ => {
                    return Err(format!(
                        "{text}: write rate or concurrency to search where the server takes no more, or {text}=VALUE,VALUE,…"
                    ));
                }
            };
            return Ok(Sweep::Search { of, first });
        };
        let key = key.trim().replace('-', "_");
        let keys = Spec::keys();
        if !keys.contains(&key) {
            let meant = nearest(&key, keys.iter().map(String::as_str));
            let meant = meant.map_or_else(String::new, |n| format!(", did you mean \"{n}\"?"));
            return Err(format!("unknown key \"{key}\"{meant}"));
        }
        let value = |text: &str| {
            let layer = Spec::layer_from_text("--sweep", &key, text.trim()).map_err(|e| e.to_string())?;
            Ok(layer.values[&key].clone())
        };
        let values = values.split(',').map(value).collect::<Result<Vec<_>, String>>()?;
        Ok(Sweep::List { key, values })
    }

    /// The key of the spec that changes.
    pub fn key(&self) -> &str {
        match self {
            Sweep::List { key, .. } => key,
            Sweep::Search { of: Load::Rate, .. } => "rate",
            Sweep::Search { of: Load::Concurrency, .. } => "concurrency",
        }
    }

    /// `spec` with that key set to `value`.
    pub fn apply(&self, spec: &Spec, value: &Value) -> Result<Spec, String> {
        let Ok(Value::Object(values)) = serde_json::to_value(spec) else { return Ok(spec.clone()) };
        let layers =
            [Layer { origin: "spec".into(), values }, Layer::one("--sweep", self.key(), value.clone())];
        Spec::from_layers(&layers).map_err(|e| e.to_string())
    }

    /// What to try next; `None` if there is nothing more to learn.
    pub fn next(&self, points: &[Point]) -> Option<Value> {
        match self {
            Sweep::List { values, .. } => values.get(points.len()).cloned(),
            Sweep::Search { of, first } => search(*of, *first, points),
        }
    }

    /// Whether the server kept up in a run with these metrics.
    pub fn kept_up(&self, metrics: &BTreeMap<String, Metric>, spec: &Spec, before: &[Point]) -> bool {
        let value = |name: &str| metrics.get(name).and_then(|m| m.value);
        let queries = value("queries").unwrap_or(0.0);
        let answers = queries > 0.0 && value("errors").unwrap_or(0.0) <= MOST_ERRORS * queries;
        let in_time = value("slo_met").is_none_or(|met| met >= WITHIN_LIMITS);
        let rate = value("queries_per_s").unwrap_or(0.0);
        let enough = match self {
            Sweep::Search { of: Load::Concurrency, .. } => {
                let last = before.last().and_then(|p| p.metrics.get("queries_per_s")?.value);
                last.is_none_or(|last| rate >= WORTH_IT * last)
            }
            _ => {
                // What was truly asked, which chance makes more or less than what was meant.
                let asked = spec.rate.map(|meant| value("offered_per_s").unwrap_or(meant));
                asked.is_none_or(|asked| rate >= KEEPS_UP * asked * drawn_out(metrics, asked, before))
            }
        };
        answers && in_time && enough
    }
}

/// Even a server that keeps up answers the last request later than it is sent: over a short run, that makes the rate smaller. How
/// much later is told by the run with the least load, because a queue that grows must not excuse itself.
fn drawn_out(metrics: &BTreeMap<String, Metric>, rate: f64, before: &[Point]) -> f64 {
    let sent_for = metrics.get("queries").and_then(|m| m.value).unwrap_or(0.0) / rate;
    let latency = |metrics: &BTreeMap<String, Metric>| metrics.get("latency_s").and_then(|m| m.p50);
    let least = before.iter().map(|p| &p.metrics).chain([metrics]).filter_map(latency).reduce(f64::min);
    if sent_for > 0.0 { sent_for / (sent_for + least.unwrap_or(0.0)) } else { 1.0 }
}

fn search(of: Load, first: f64, points: &[Point]) -> Option<Value> {
    let tried = || points.iter().filter_map(|p| Some((p.value.as_f64()?, p.kept_up)));
    let best = tried().filter(|(_, kept_up)| *kept_up).map(|(v, _)| v).fold(0.0, f64::max);
    let worst = tried().filter(|(v, kept_up)| !kept_up && *v > best).map(|(v, _)| v).reduce(f64::min);
    let most = match of {
        Load::Rate => 1e6,
        Load::Concurrency => f64::from(MOST_IN_FLIGHT),
    };
    let next = match worst {
        _ if points.is_empty() => first,
        // Too much already at the start: less.
        Some(worst) if best == 0.0 => worst / 2.0,
        Some(worst) if of == Load::Rate => (best * worst).sqrt(),
        // Requests at once are doubled; what lies between is of no use.
        Some(_) => return None,
        None => best * 2.0,
    };
    let halved = tried().filter(|(v, _)| *v > best || best == 0.0).count();
    let enough = worst.is_some()
        && (best == 0.0 && halved > 8 || best > 0.0 && points.len() > doublings(points) + HALVINGS);
    let next = match of {
        Load::Rate => (next * 1000.0).round() / 1000.0,
        Load::Concurrency => next.round().max(1.0),
    };
    let again = tried().any(|(v, _)| v == next);
    (!enough && !again && next <= most && next > 0.0).then(|| match of {
        Load::Rate => Value::from(next),
        Load::Concurrency => Value::from(next as u64),
    })
}

/// How many points came before the first that was too much, that one included.
fn doublings(points: &[Point]) -> usize {
    points.iter().position(|p| !p.kept_up).map_or(points.len(), |i| i + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A server that answers up to `limit` requests a second, each in 10 ms, searched to the end.
    fn searched(text: &str, limit: f64) -> Vec<(f64, bool)> {
        let spec = Spec::default();
        let sweep = Sweep::parse(text, &spec).unwrap();
        let mut points: Vec<Point> = Vec::new();
        while let Some(value) = sweep.next(&points) {
            let at = sweep.apply(&spec, &value).unwrap();
            let asked = at.rate.or(at.concurrency.map(|c| f64::from(c) / 0.01)).unwrap();
            let metric = |value: f64| Metric {
                value: Some(value),
                low: None,
                high: None,
                unit: String::new(),
                n: 1,
                method: "clock".into(),
                p50: Some(0.01),
                p90: None,
                p99: None,
            };
            let metrics = BTreeMap::from([
                ("queries".to_owned(), metric(1000.0)),
                ("errors".to_owned(), metric(0.0)),
                ("queries_per_s".to_owned(), metric(asked.min(limit))),
                ("latency_s".to_owned(), metric(0.01)),
            ]);
            let kept_up = sweep.kept_up(&metrics, &at, &points);
            points.push(Point { value, run: String::new(), kept_up, metrics });
            assert!(points.len() < 40, "it never ends: {points:?}");
        }
        points.iter().map(|p| (p.value.as_f64().unwrap(), p.kept_up)).collect()
    }

    #[test]
    fn a_search_of_the_rate_ends_near_what_the_server_takes() {
        for limit in [3.0, 50.0, 777.0] {
            let points = searched("rate", limit);
            let best = points.iter().filter(|p| p.1).map(|p| p.0).fold(0.0, f64::max);
            assert!((0.8..=1.08).contains(&(best / limit)), "{limit}: {points:?}");
        }
        let points = searched("rate", 0.2);
        assert!(points.iter().any(|p| p.1 && p.0 <= 0.22), "it goes below its start: {points:?}");
    }

    #[test]
    fn a_search_of_the_requests_at_once_ends_when_more_bring_nothing() {
        let points = searched("concurrency", 800.0);
        assert_eq!(points, [(1.0, true), (2.0, true), (4.0, true), (8.0, true), (16.0, false)]);
    }

    #[test]
    fn a_list_is_gone_through_as_it_is() {
        let spec = Spec::default();
        let sweep = Sweep::parse("max-tokens=16, 32", &spec).unwrap();
        assert_eq!(sweep, Sweep::List { key: "max_tokens".into(), values: vec![json!(16), json!(32)] });
        assert_eq!(sweep.apply(&spec, &json!(32)).unwrap().max_tokens, 32);
        assert!(Sweep::parse("concurency=1", &spec).unwrap_err().contains("did you mean \"concurrency\""));
        assert!(Sweep::parse("rate=1,fast", &spec).is_err());
        assert!(Sweep::parse("seed", &spec).unwrap_err().contains("seed=VALUE"));
    }

    #[test]
    fn numbers_come_in_their_order_and_names_as_they_were_tried() {
        let swept = |values: &[Value]| {
            let point = |value: &Value| Point {
                value: value.clone(),
                run: String::new(),
                kept_up: true,
                metrics: BTreeMap::new(),
            };
            let swept =
                Swept { key: "k".into(), points: values.iter().map(point).collect(), output_dir: "s".into() };
            swept.in_order().iter().map(|p| p.label()).collect::<Vec<_>>()
        };
        assert_eq!(swept(&[json!(8), json!(1.5), json!(32)]), ["1.5", "8", "32"]);
        assert_eq!(swept(&[json!("b\u{1b}[2J"), json!("a"), json!(1)]), ["b [2J", "a", "1"]);
    }
}
