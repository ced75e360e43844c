//! What an answer must keep to for its user to be content, and whether it did.

use crate::exchange::Exchange;
use crate::registry::{Params, nearest};
use crate::units::Seconds;

/// The limits that can be named.
const KEYS: [&str; 3] = ["ttft", "itl", "latency"];

/// Limits on the times of an answer; those not named are not asked for.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Slo {
    /// From due to the first token.
    pub ttft: Option<Seconds>,
    /// Mean time per token after the first.
    pub itl: Option<Seconds>,
    /// From due to the end.
    pub latency: Option<Seconds>,
}

impl Slo {
    /// Reads `ttft=500ms`, `itl=50ms`, `latency=5s`.
    pub fn parse(params: &Params) -> Result<Self, String> {
        let mut slo = Self::default();
        for (key, text) in params {
            let limit = match key.as_str() {
                "ttft" => &mut slo.ttft,
                "itl" => &mut slo.itl,
                "latency" => &mut slo.latency,
                _ => {
                    let meant =
                        nearest(key, KEYS).map_or_else(String::new, |n| format!(", did you mean \"{n}\"?"));
                    return Err(format!(
                        "no limit is called \"{key}\"{meant}; there are {}",
                        KEYS.join(", ")
                    ));
                }
            };
            // Most tools mean milliseconds by a bare number, and seconds are what we would mean.
            let bare = text.trim().parse::<f64>().is_ok();
            *limit = Some(time(text).filter(|t| !bare && t.get() > 0.0).ok_or_else(|| {
                format!("{key}={text} is no time; write for example {key}=500ms or {key}=2s")
            })?);
        }
        Ok(slo)
    }

    /// Whether any limit is set.
    pub fn is_set(&self) -> bool {
        *self != Self::default()
    }

    /// Whether `exchange` is a whole answer within all limits. What is not known was not kept to, except the time between
    /// tokens of an answer that has one token only.
    pub fn is_met(&self, exchange: &Exchange) -> bool {
        let within = |limit: Option<Seconds>, time: Option<Seconds>| {
            limit.is_none_or(|limit| time.is_some_and(|t| t.get() <= limit.get()))
        };
        let short = exchange.usage.completion.is_some_and(|n| n <= 1);
        exchange.outcome.is_ok()
            && within(self.ttft, exchange.ttft())
            && (short || within(self.itl, exchange.itl()))
            && within(self.latency, Some(exchange.latency()))
    }
}

/// A time with its unit; a bare number is seconds.
pub fn time(text: &str) -> Option<Seconds> {
    let text = text.trim();
    let (number, scale) =
        [("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("min", 60.0), ("m", 60.0), ("s", 1.0), ("h", 3600.0)]
            .iter()
            .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, *scale)))
            .unwrap_or((text, 1.0));
    let seconds = number.trim().parse::<f64>().ok()? * scale;
    (seconds.is_finite() && seconds >= 0.0).then_some(Seconds(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slo(pairs: &[(&str, &str)]) -> Result<Slo, String> {
        Slo::parse(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn times_have_units() {
        for (text, seconds) in [
            ("500ms", 0.5),
            ("2s", 2.0),
            ("2", 2.0),
            ("80 us", 8e-5),
            ("1.5min", 90.0),
            ("2m", 120.0),
            ("0s", 0.0),
        ] {
            assert!((time(text).unwrap().get() - seconds).abs() < 1e-12, "{text}");
        }
        for wrong in ["", "ms", "-1s", "5 parsecs", "nan", "1e999"] {
            assert_eq!(time(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_wrong_limit_names_what_was_meant() {
        assert!(slo(&[("tfft", "1s")]).unwrap_err().contains("did you mean \"ttft\""));
        assert!(slo(&[("ttft", "fast")]).unwrap_err().contains("ttft=500ms"));
        assert!(slo(&[("ttft", "500")]).unwrap_err().contains("ttft=500ms"), "a number needs its unit");
        assert!(slo(&[("ttft", "0s")]).is_err(), "nobody keeps to that");
        assert_eq!(slo(&[("itl", "50ms")]).unwrap().itl, Some(Seconds(0.05)));
        assert!(!slo(&[]).unwrap().is_set());
    }
}
