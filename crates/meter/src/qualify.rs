//! What sensors turn out to do: how often they change, and whether a board's energy counter agrees with its own power.
//!
//! Neither is in any data sheet. Refresh periods run from 10 to 500 ms by card and driver, and there are boards whose counter and
//! power differ by half. docs/method.md#qualification

use serde::Serialize;
use wattle_core::sensor::{Quantity, Reading, Sensor, SensorId};
use wattle_core::time::{Span, Stamp};
use wattle_core::timeline::Timeline;

/// A counter further than this from the integral of its board's power is not believed.
pub const TOLERANCE: f64 = 0.05;
/// Fewer refreshes than this say nothing about a ratio.
const FEWEST_REFRESHES: usize = 5;

/// What one sensor did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Qualification {
    /// Its name.
    pub sensor: String,
    /// Reads that failed.
    pub failed: u64,
    /// Median time between changes of its value; `None` if it changed less than twice.
    pub period_s: Option<f64>,
    /// Energy by the counter / integral of the same device's power; `None` without both.
    pub ratio: Option<f64>,
}

impl Qualification {
    /// Whether the counter and the power of its device contradict each other.
    pub fn is_doubtful(&self) -> bool {
        self.ratio.is_some_and(|r| (r - 1.0).abs() > TOLERANCE)
    }
}

/// Takes in readings and says what their sensors are like.
#[derive(Debug)]
pub struct Qualifier {
    sensors: Vec<Sensor>,
    timeline: Timeline,
    tracks: Vec<Track>,
}

#[derive(Debug, Clone, Default)]
struct Track {
    last: Option<f64>,
    failed: u64,
    changes: Vec<Stamp>,
}

impl Qualifier {
    /// For a table of sensors.
    pub fn new(sensors: &[Sensor]) -> Self {
        let tracks = vec![Track::default(); sensors.len()];
        Self { sensors: sensors.to_vec(), timeline: Timeline::new(sensors), tracks }
    }

    /// Takes in one reading.
    pub fn push(&mut self, reading: &Reading) {
        self.timeline.push(reading);
        let Some(track) = self.tracks.get_mut(usize::from(reading.sensor.0)) else { return };
        match reading.value {
            None => track.failed += 1,
            Some(value) => {
                // The first value is no change.
                if track.last.is_some_and(|last| last != value) {
                    track.changes.push(reading.at);
                }
                track.last = Some(value);
            }
        }
    }

    /// What was learnt, one entry per sensor.
    pub fn finish(&self) -> Vec<Qualification> {
        let each = self.sensors.iter().zip(&self.tracks).enumerate();
        each.map(|(i, (sensor, track))| Qualification {
            sensor: sensor.name.clone(),
            failed: track.failed,
            period_s: median_gap(&track.changes),
            ratio: self.ratio(i, sensor),
        })
        .collect()
    }

    /// Counter against power over the whole refreshes of the counter that were seen.
    fn ratio(&self, at: usize, sensor: &Sensor) -> Option<f64> {
        if sensor.quantity != Quantity::Energy {
            return None;
        }
        let power =
            self.sensors.iter().position(|s| s.quantity == Quantity::Power && s.device == sensor.device)?;
        let changes = &self.tracks[at].changes;
        if changes.len() < FEWEST_REFRESHES {
            return None;
        }
        let id = |sensor: usize| u16::try_from(sensor).ok().map(SensorId);
        let span = Span::new(*changes.first()?, self.timeline.known_until(id(at)?)?);
        // Each over the time it covered.
        let watts = |sensor: usize| {
            let energy = self.timeline.energy(id(sensor)?, span)?;
            Some(energy.value().get() / energy.coverage())
        };
        Some(watts(at)? / watts(power)?).filter(|r| r.is_finite())
    }
}

fn median_gap(changes: &[Stamp]) -> Option<f64> {
    let mut gaps: Vec<f64> = changes.windows(2).map(|pair| pair[1].since(pair[0]).get()).collect();
    gaps.sort_by(f64::total_cmp);
    gaps.get(gaps.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Trust};

    fn sensor(quantity: Quantity, kind: Kind) -> Sensor {
        Sensor {
            name: format!("test/{quantity:?}"),
            source: "test".into(),
            device: Device { kind: DeviceKind::Gpu, id: "0".into(), name: "test".into() },
            quantity,
            perimeter: Perimeter::Device,
            kind,
            trust: Trust::Measured { gain: 0.0 },
            quantum: 0.0,
            averaged_s: 0.0,
        }
    }

    /// A counter that counts `watts`, refreshed every 100 ms, beside a gauge that says 100 W.
    fn board(watts: f64) -> Vec<Qualification> {
        let table =
            [sensor(Quantity::Energy, Kind::Counter { wrap: None }), sensor(Quantity::Power, Kind::Gauge)];
        let mut qualifier = Qualifier::new(&table);
        for poll in 0..400u64 {
            let at = Stamp::from_nanos(poll * 5_000_000);
            let energy = (poll / 20) as f64 * 0.1 * watts;
            qualifier.push(&Reading { sensor: SensorId(0), at, value: Some(energy) });
            qualifier.push(&Reading { sensor: SensorId(1), at, value: (poll != 7).then_some(100.0) });
        }
        qualifier.finish()
    }

    #[test]
    fn the_refresh_period_is_found() {
        let [energy, power] = &board(100.0)[..] else { panic!("two sensors") };
        assert!((energy.period_s.unwrap() - 0.1).abs() < 1e-9);
        assert_eq!((power.period_s, power.failed), (None, 1));
    }

    #[test]
    fn a_counter_that_contradicts_its_boards_power_is_doubtful() {
        let honest = &board(100.0)[0];
        assert!((honest.ratio.unwrap() - 1.0).abs() < 0.02 && !honest.is_doubtful(), "{honest:?}");
        // 187 J by counter and 327 J by power, as one public report has it.
        let liar = &board(57.0)[0];
        assert!((liar.ratio.unwrap() - 0.57).abs() < 0.02 && liar.is_doubtful(), "{liar:?}");
    }

    #[test]
    fn too_little_says_nothing() {
        let table = [sensor(Quantity::Energy, Kind::Counter { wrap: None })];
        let qualifier = Qualifier::new(&table);
        assert_eq!(qualifier.finish()[0].period_s, None);
        assert_eq!(qualifier.finish()[0].ratio, None);
    }
}
