//! What a device's power looks like through a sensor: refreshed now and then, late, rounded, faulty, and polled by a thread that
//! is not always on time. Made up, with the figures docs/method.md#sensors gives for real ones.

use crate::curve::{Curve, uniform};
use rand_pcg::Pcg64Mcg;
use wattle_core::estimate::Method;
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Reading, Sensor, SensorId, Trust};
use wattle_core::time::Stamp;
use wattle_core::timeline::Timeline;

/// The sampler's default interval, in seconds.
const POLL: f64 = 0.005;
/// What a counter had counted before the run, in joules: close enough to RAPL's 262 kJ to wrap in it.
const BEFORE: f64 = 250_000.0;
/// NVML counts in millijoules.
const QUANTUM: f64 = 1e-3;

/// A moment of the simulation as a stamp.
pub(crate) fn stamp(seconds: f64) -> Stamp {
    Stamp::from_nanos((seconds * 1e9).round() as u64)
}

/// How a sensor sees power.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum View {
    /// An energy counter refreshed every so many seconds, give or take 5 %.
    Counter {
        /// Seconds between refreshes.
        refresh: f64,
    },
    /// A gauge that averages 25 ms of each 100 ms and shows them for the next 100 ms (A100, H100).
    PartTime,
    /// A gauge that shows the average of the last second, refreshed every 100 ms (Ampere and newer).
    Average,
}

/// What goes wrong, and from when to when.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fault {
    /// The counter starts again from zero at this second.
    Reset(f64),
    /// The counter is not refreshed between these seconds.
    Stall(f64, f64),
    /// Reads fail between these seconds.
    Dropout(f64, f64),
}

/// A modelled sensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Model {
    pub(crate) view: View,
    /// Seconds from a refresh to its publication.
    pub(crate) lag: f64,
    /// What a joule reads as.
    pub(crate) gain: f64,
    /// The gain error that its line in the sensor table admits. None by default, so that a bound shows what the window leaves
    /// open and nothing else.
    pub(crate) stated: f64,
    /// Where the counter starts again from zero.
    pub(crate) wrap: Option<f64>,
    pub(crate) fault: Option<Fault>,
}

impl Model {
    /// A sensor with nothing wrong except its nature.
    pub(crate) const fn new(view: View) -> Self {
        Self { view, lag: 0.0, gain: 1.0, stated: 0.0, wrap: None, fault: None }
    }

    /// A counter with nothing wrong except its refresh.
    pub(crate) const fn counter(refresh: f64) -> Self {
        Self::new(View::Counter { refresh })
    }

    /// Its line in a sensor table.
    pub(crate) fn sensor(&self) -> Sensor {
        let (quantity, kind) = match self.view {
            View::Counter { .. } => (Quantity::Energy, Kind::Counter { wrap: self.wrap }),
            _ => (Quantity::Power, Kind::Gauge),
        };
        Sensor {
            name: "simulated".into(),
            source: "simulated".into(),
            device: Device { kind: DeviceKind::Gpu, id: "0".into(), name: "simulated".into() },
            quantity,
            perimeter: Perimeter::Device,
            kind,
            trust: Trust::Measured { gain: self.stated },
            quantum: if quantity == Quantity::Energy { QUANTUM } else { 0.0 },
            averaged_s: if self.view == View::Average { 1.0 } else { 0.0 },
        }
    }

    /// Which values it shows from when on.
    fn shown(&self, curve: &Curve, seconds: f64, rng: &mut Pcg64Mcg) -> Vec<(f64, f64)> {
        let mut shown = Vec::new();
        let mut at = uniform(rng, 0.0, 0.1);
        while at < seconds {
            let stuck = matches!(self.fault, Some(Fault::Stall(a, b)) if a <= at && at < b);
            if !stuck {
                shown.push((at + self.lag, self.value(curve, at, rng)));
            }
            at += match self.view {
                View::Counter { refresh } => refresh * uniform(rng, 0.95, 1.05),
                _ => 0.1,
            };
        }
        shown
    }

    fn value(&self, curve: &Curve, at: f64, rng: &mut Pcg64Mcg) -> f64 {
        // Gauges are never quite still; this also makes a refresh visible, as on real boards.
        let mean = |over: f64| self.gain * curve.joules(at - over, at) / over;
        match self.view {
            View::Counter { .. } => {
                let joules = match self.fault {
                    Some(Fault::Reset(reset)) if at >= reset => curve.joules(reset, at),
                    _ => BEFORE + curve.joules(0.0, at),
                };
                let raw = (self.gain * joules / QUANTUM).floor() * QUANTUM;
                self.wrap.map_or(raw, |w| raw % w)
            }
            View::PartTime => mean(0.025) + uniform(rng, -0.5, 0.5),
            View::Average => mean(1.0) + uniform(rng, -0.5, 0.5),
        }
    }

    /// What the sampler reads: every 5 ms to absolute deadlines, up to 1 ms off, and one poll in 200 is 30 ms late; the deadlines
    /// missed meanwhile are skipped.
    pub(crate) fn readings(&self, curve: &Curve, seconds: f64, rng: &mut Pcg64Mcg) -> Vec<Reading> {
        let shown = self.shown(curve, seconds, rng);
        let (mut readings, mut next, mut deadline) = (Vec::new(), 0, 0.2);
        while deadline < seconds {
            let late = if uniform(rng, 0.0, 200.0) < 1.0 { 0.03 } else { 0.0 };
            let at = deadline + late + uniform(rng, -0.001, 0.001);
            while shown.get(next).is_some_and(|(from, _)| *from <= at) {
                next += 1;
            }
            let gone = matches!(self.fault, Some(Fault::Dropout(a, b)) if a <= at && at < b);
            let value = if next == 0 || gone { None } else { Some(shown[next - 1].1) };
            readings.push(Reading { sensor: SensorId(0), at: stamp(at), value });
            deadline += POLL + late;
        }
        readings
    }

    /// A timeline that has seen `readings`.
    pub(crate) fn timeline(&self, readings: &[Reading]) -> Timeline {
        let mut timeline = Timeline::new(&[self.sensor()]);
        readings.iter().for_each(|r| timeline.push(r));
        timeline
    }

    /// The rule of tools that read the sensor at both ends only: difference of the counter, or mean of two powers times time.
    pub(crate) fn naive(&self, readings: &[Reading], from: f64, to: f64) -> f64 {
        let last = |t: f64| {
            let after = readings.partition_point(|r| r.at <= stamp(t));
            readings[..after].iter().rev().find_map(|r| r.value).unwrap_or(0.0)
        };
        match self.sensor().energy_method() {
            Some(Method::Counter) => last(to) - last(from),
            _ => (last(from) + last(to)) / 2.0 * (to - from),
        }
    }
}
