//! What sensors turn out to do: how often they change, and whether a board's energy counter agrees with its own power.
//!
//! Neither is in any data sheet. Refresh periods run from 10 to 500 ms by card and driver, and there are boards whose counter and
//! power differ by half. docs/method.md#qualification

use crate::sensor::{Quantity, Reading, Sensor, SensorId};
use crate::time::{Span, Stamp};
use crate::timeline::Timeline;
use serde::{Deserialize, Serialize};

/// A counter further than this from the integral of its board's power is not believed.
pub const TOLERANCE: f64 = 0.05;
/// Fewer refreshes than this say nothing about a ratio.
const FEWEST_REFRESHES: usize = 5;

/// What one sensor did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qualification {
    /// Its name.
    pub sensor: String,
    /// Reads that failed.
    pub failed: u64,
    /// Whether the last one was good.
    #[serde(default)]
    pub answers: bool,
    /// Median time between changes of its value; `None` if it changed less than twice.
    pub period_s: Option<f64>,
    /// Energy by the counter / integral of the same device's power; `None` without both.
    pub ratio: Option<f64>,
    /// What the readings leave open about that ratio, at 95 %; the sensors' gain errors are not in it.
    pub ratio_bound: Option<f64>,
}

impl Qualification {
    /// Whether the counter and the power of its device contradict each other, beyond what a short look leaves open.
    pub fn is_doubtful(&self) -> bool {
        let bound = self.ratio_bound.unwrap_or(0.0);
        self.ratio.is_some_and(|r| (r - 1.0).abs() > TOLERANCE + bound)
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
    answers: bool,
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
        track.answers = reading.value.is_some();
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

    /// Whether there is a counter beside a power gauge of the same device, so that a ratio can be told at all.
    pub fn compares(&self) -> bool {
        (0..self.sensors.len()).any(|i| self.power_beside(i).is_some())
    }

    /// Whether every energy counter has changed often enough.
    pub fn is_sure(&self) -> bool {
        let each = self.sensors.iter().zip(&self.tracks);
        each.filter(|(s, _)| s.quantity == Quantity::Energy)
            .all(|(_, track)| track.changes.len() > FEWEST_REFRESHES)
    }

    /// What was learnt, one entry per sensor.
    pub fn finish(&self) -> Vec<Qualification> {
        let each = self.sensors.iter().zip(&self.tracks).enumerate();
        each.map(|(i, (sensor, track))| {
            let ratio = self.ratio(i);
            Qualification {
                sensor: sensor.name.clone(),
                failed: track.failed,
                answers: track.answers,
                period_s: median_gap(&track.changes),
                ratio: ratio.map(|(ratio, _)| ratio),
                ratio_bound: ratio.map(|(_, bound)| bound),
            }
        })
        .collect()
    }

    /// The power gauge of the device whose energy this counts.
    fn power_beside(&self, counter: usize) -> Option<usize> {
        let sensor = self.sensors.get(counter).filter(|s| s.quantity == Quantity::Energy)?;
        self.sensors.iter().position(|s| s.quantity == Quantity::Power && s.device == sensor.device)
    }

    /// Counter against power over the whole refreshes of the counter that were seen, and what is open about it.
    fn ratio(&self, counter: usize) -> Option<(f64, f64)> {
        let power = self.power_beside(counter)?;
        let changes = &self.tracks[counter].changes;
        if changes.len() < FEWEST_REFRESHES {
            return None;
        }
        let id = |sensor: usize| u16::try_from(sensor).ok().map(SensorId);
        let span = Span::new(*changes.first()?, self.timeline.known_until(id(counter)?)?);
        // Each over the time it covered, with what is open relative to it.
        let seen = |sensor: usize| {
            let energy = self.timeline.energy(id(sensor)?, span)?;
            let open = energy.bound() - self.timeline.gain_of(&[id(sensor)?], span);
            Some((energy.value().get() / energy.coverage(), open / energy.value()))
        };
        let ((counted, open), (integrated, rough)) = (seen(counter)?, seen(power)?);
        let ratio = counted / integrated;
        Some((ratio, ratio * open.hypot(rough))).filter(|(r, bound)| r.is_finite() && bound.is_finite())
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
    use crate::sensor::{Device, DeviceKind, Kind, Perimeter, Trust};

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
