//! Pretended devices whose power is written in a file.
//!
//! ```json
//! {"devices": [{"kind": "gpu", "id": "GPU-0", "name": "Pretend 100", "power": [[0, 100], [2, 300]], "refresh_ms": 100}]}
//! ```
//! Power steps to the second number at the first one's second, over and over; it is a function of the monotonic clock alone, so
//! every process sees the same counter. `refresh_ms` makes the counter a staircase as real ones are.

use super::super::{Depth, Source, Unavailable};
use super::FIX;
use crate::clock;
use serde::Deserialize;
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Sensor, Trust};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    devices: Vec<Pretended>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pretended {
    kind: DeviceKind,
    id: String,
    name: String,
    /// Steps (from second, watts), the first at 0.
    power: Vec<(f64, f64)>,
    /// After this many seconds the steps start again; by default one second after the last.
    #[serde(default)]
    period_s: Option<f64>,
    #[serde(default)]
    refresh_ms: Option<f64>,
}

pub(super) struct Scenario {
    path: String,
    devices: Vec<Pretended>,
    sensors: Vec<Sensor>,
}

impl Scenario {
    pub(super) fn open(path: &str) -> Result<Self, Unavailable> {
        let bad =
            |e: &dyn std::fmt::Display| Unavailable::new(format!("cannot use scenario {path}: {e}"), FIX);
        let text = std::fs::read_to_string(path).map_err(|e| bad(&e))?;
        let Text { devices } = serde_json::from_str(&text).map_err(|e| bad(&e))?;
        for device in &devices {
            device.check().map_err(|why| bad(&format!("device {}: {why}", device.id)))?;
        }
        let sensors = devices.iter().map(|d| Sensor {
            name: format!("replay/{}/energy", d.id),
            source: "replay".into(),
            device: Device { kind: d.kind, id: d.id.clone(), name: d.name.clone() },
            quantity: Quantity::Energy,
            perimeter: match d.kind {
                DeviceKind::Gpu | DeviceKind::Ane => Perimeter::Device,
                DeviceKind::Cpu | DeviceKind::Dram => Perimeter::Host,
                DeviceKind::Machine | DeviceKind::Process => Perimeter::Wall,
            },
            kind: Kind::Counter { wrap: None },
            trust: Trust::Measured { gain: 0.0 },
            quantum: 0.0,
            averaged_s: 0.0,
        });
        Ok(Self { path: path.into(), sensors: sensors.collect(), devices })
    }
}

impl Pretended {
    fn check(&self) -> Result<(), &'static str> {
        let times = || self.power.iter().map(|(t, _)| *t);
        if times().next() != Some(0.0) || !times().is_sorted() {
            return Err("power must be a list of [second, watts] that starts at second 0 and goes up");
        }
        if !self.power.iter().all(|(t, w)| t.is_finite() && w.is_finite() && *w >= 0.0) {
            return Err("power must be finite and not negative");
        }
        if self.refresh_ms.is_some_and(|r| r <= 0.0) || self.period() <= self.power[self.power.len() - 1].0 {
            return Err("refresh_ms must be above 0 and period_s after the last step");
        }
        Ok(())
    }

    fn period(&self) -> f64 {
        self.period_s.unwrap_or_else(|| self.power[self.power.len() - 1].0 + 1.0)
    }

    /// Joules from second 0 of a period to `until`, in it.
    fn within(&self, until: f64) -> f64 {
        let ends = self.power.iter().skip(1).map(|(t, _)| *t).chain([f64::INFINITY]);
        self.power
            .iter()
            .zip(ends)
            .map(|((start, watts), end)| (until.min(end) - start).max(0.0) * watts)
            .sum()
    }

    /// What the counter shows at `seconds` on the monotonic clock.
    fn joules(&self, seconds: f64) -> f64 {
        let seen = self.refresh_ms.map_or(seconds, |ms| (seconds * 1e3 / ms).floor() * ms / 1e3);
        let period = self.period();
        let whole = (seen / period).floor();
        whole * self.within(period) + self.within(seen - whole * period)
    }
}

impl Source for Scenario {
    fn sensors(&self) -> &[Sensor] {
        &self.sensors
    }

    fn read(&mut self, _depth: Depth, put: &mut dyn FnMut(usize, Option<f64>)) {
        for (i, device) in self.devices.iter().enumerate() {
            put(i, Some(device.joules(clock::now().nanos() as f64 * 1e-9)));
        }
    }

    fn pretended(&self) -> Option<String> {
        Some(format!("devices of scenario {}", self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_is_the_integral_of_the_steps_over_and_over() {
        let text = r#"{"kind":"gpu","id":"a","name":"a","power":[[0,100],[2,300]],"period_s":4}"#;
        let device: Pretended = serde_json::from_str(text).unwrap();
        assert_eq!(device.joules(2.0), 200.0);
        assert_eq!(device.joules(3.0), 500.0);
        assert_eq!(device.joules(4.0), 800.0);
        assert_eq!(device.joules(9.0), 1700.0);
    }

    #[test]
    fn a_scenario_that_makes_no_sense_is_refused() {
        for power in ["[]", "[[1,5]]", "[[0,5],[3,1],[2,1]]", "[[0,-1]]"] {
            let text = format!(r#"{{"kind":"gpu","id":"a","name":"a","power":{power}}}"#);
            let device: Pretended = serde_json::from_str(&text).unwrap();
            assert!(device.check().is_err(), "{power}");
        }
    }
}
