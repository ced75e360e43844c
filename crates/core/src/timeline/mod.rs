//! Readings in order. Its one question is [`Timeline::energy`]: the joules of any span, with a bound, or `None`.
//!
//! Every track, counter or gauge, is kept as the same thing: a piecewise-linear curve of energy so far and of time covered so
//! far. A window is a difference of two points on it, so windows are additive to rounding by construction, and what was
//! not covered adds to neither. docs/method.md#windows

mod track;

use crate::estimate::Estimate;
use crate::sensor::{Reading, Sensor, SensorId};
use crate::time::{Span, Stamp};
use crate::units::Joules;
use serde::{Deserialize, Serialize};
use track::Track;

/// What a track saw that was not a plain reading. Counted, never billed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Anomalies {
    /// Reads that failed.
    pub failed: u64,
    /// Counter wraps, followed correctly.
    pub wraps: u64,
    /// Counter resets and impossible jumps: the energy across them is unknown and left out.
    pub resets: u64,
    /// Times a counter was read and did not move for two seconds.
    pub stalls: u64,
    /// Readings that were not finite or were negative.
    pub nonsense: u64,
    /// Readings not later than the one before them.
    pub out_of_order: u64,
}

impl Anomalies {
    /// Whether there was none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Mean and extremes of a gauge over a span.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Level {
    /// Time-weighted mean.
    pub mean: f64,
    /// Middle of the values read, each counted once.
    pub median: f64,
    /// Lowest value.
    pub min: f64,
    /// Highest value.
    pub max: f64,
}

/// All tracks of one session.
#[derive(Debug, Clone)]
pub struct Timeline {
    tracks: Vec<Track>,
}

impl Timeline {
    /// An empty timeline for a run's sensor table.
    pub fn new(table: &[Sensor]) -> Self {
        Self { tracks: table.iter().map(Track::new).collect() }
    }

    /// Adds a reading; each sensor's readings come in order.
    pub fn push(&mut self, reading: &Reading) {
        if let Some(track) = self.tracks.get_mut(usize::from(reading.sensor.0)) {
            track.push(reading.at, reading.value);
        }
    }

    /// The energy a sensor saw in `span`. `None` if the sensor does not tell energy or covered nothing of it.
    pub fn energy(&self, sensor: SensorId, span: Span) -> Option<Estimate<Joules>> {
        let track = self.tracks.get(usize::from(sensor.0))?;
        let method = track.method?;
        let (a, b) = (track.at(span.start()), track.at(span.end()));
        let covered = b.covered - a.covered;
        if covered == 0 {
            return None;
        }
        let joules = b.sum - a.sum;
        // Where inside a step the energy fell is unknown; the worst case of 2·ΔE·f(1-f) stands for the 95 % bound.
        let edge = match (a.step, b.step) {
            (Some(s), Some(t)) if s.from == t.from => s.unsure(b.fraction - a.fraction),
            (s, t) => s.map_or(0.0, |s| s.unsure(a.fraction)).hypot(t.map_or(0.0, |t| t.unsure(b.fraction))),
        };
        // Two readings, each off by up to a step.
        let steps = track.quantum * std::f64::consts::SQRT_2;
        let bound = edge.hypot(steps) + track.gain * joules.abs();
        let coverage = covered as f64 / (span.end().nanos() - span.start().nanos()) as f64;
        Some(Estimate::new(Joules(joules), Joules(bound), method, coverage))
    }

    /// The sum over several sensors of one span; `None` if none of them knows. A sensor that saw nothing adds nothing, and
    /// takes its part of the coverage with it.
    pub fn energy_of(&self, sensors: &[SensorId], span: Span) -> Option<Estimate<Joules>> {
        let known = || sensors.iter().filter_map(|s| self.energy(*s, span));
        let sum = known().reduce(|a, b| a + b)?;
        let coverage = known().map(|e| e.coverage()).sum::<f64>() / sensors.len() as f64;
        Some(Estimate::new(sum.value(), sum.bound(), sum.method(), coverage))
    }

    /// The part of [`Timeline::energy_of`]'s bound that comes from the sensors' gain errors.
    pub fn gain_of(&self, sensors: &[SensorId], span: Span) -> Joules {
        let gain =
            |s: &SensorId| Some(self.energy(*s, span)?.value() * self.tracks.get(usize::from(s.0))?.gain);
        sensors.iter().filter_map(gain).sum()
    }

    /// Mean and extremes of a gauge over a span.
    pub fn level(&self, sensor: SensorId, span: Span) -> Option<Level> {
        let track = self.tracks.get(usize::from(sensor.0))?;
        if track.counter {
            return None;
        }
        track.level(span)
    }

    /// Until when energy figures of this sensor are final.
    pub fn known_until(&self, sensor: SensorId) -> Option<Stamp> {
        self.tracks.get(usize::from(sensor.0))?.nodes.back().map(|n| n.at)
    }

    /// What went wrong on a sensor so far.
    pub fn anomalies(&self, sensor: SensorId) -> Anomalies {
        self.tracks.get(usize::from(sensor.0)).map_or_else(Anomalies::default, |t| t.anomalies)
    }

    /// Drops what no span starting at or after `at` needs, so that memory stays flat.
    pub fn forget_before(&mut self, at: Stamp) {
        for track in &mut self.tracks {
            while track.nodes.len() > 2 && track.nodes[1].at <= at {
                track.nodes.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::Method;
    use crate::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Trust};
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    const ID: SensorId = SensorId(0);

    fn table(quantity: Quantity, kind: Kind) -> Vec<Sensor> {
        vec![Sensor {
            name: "test".into(),
            source: "test".into(),
            device: Device { kind: DeviceKind::Gpu, id: "0".into(), name: "test".into() },
            quantity,
            perimeter: Perimeter::Device,
            kind,
            trust: Trust::Measured { gain: 0.0 },
            quantum: 0.0,
        }]
    }

    fn counter(wrap: Option<f64>) -> Timeline {
        Timeline::new(&table(Quantity::Energy, Kind::Counter { wrap }))
    }

    fn gauge() -> Timeline {
        Timeline::new(&table(Quantity::Power, Kind::Gauge))
    }

    fn put(t: &mut Timeline, at: u64, value: impl Into<Option<f64>>) {
        t.push(&Reading { sensor: ID, at: Stamp::from_nanos(at), value: value.into() });
    }

    fn span(a: u64, b: u64) -> Span {
        Span::new(Stamp::from_nanos(a), Stamp::from_nanos(b))
    }

    fn joules(t: &Timeline, a: u64, b: u64) -> f64 {
        t.energy(ID, span(a, b)).unwrap().value().get()
    }

    /// 100 W through a counter refreshed every 100 ms and polled every 5 ms.
    fn staircase(wrap: Option<f64>) -> Timeline {
        let mut t = counter(wrap);
        for poll in 0..600u64 {
            let at = poll * 5 * MS + 1;
            let ticks = at / (100 * MS);
            let raw = 10.0 * ticks as f64;
            put(&mut t, at, wrap.map_or(raw, |w| raw % w));
        }
        t
    }

    #[test]
    fn a_staircase_is_interpolated_to_the_edges() {
        let t = staircase(None);
        let e = t.energy(ID, span(537 * MS, 1537 * MS)).unwrap();
        assert!((e.value().get() - 100.0).abs() < 0.3, "{e:?}");
        assert!((e.value().get() - 100.0).abs() <= e.bound().get());
        assert_eq!(e.method(), Method::Counter);
        assert_eq!(e.coverage(), 1.0);
    }

    #[test]
    fn a_wrapped_counter_keeps_counting() {
        let (plain, wrapped) = (staircase(None), staircase(Some(65.0)));
        let window = (300 * MS, 2700 * MS);
        assert!((joules(&plain, window.0, window.1) - joules(&wrapped, window.0, window.1)).abs() < 1e-9);
        assert!(wrapped.anomalies(ID).wraps >= 3);
    }

    #[test]
    fn a_reset_is_counted_and_never_billed() {
        let mut t = counter(None);
        for i in 0..10u64 {
            put(&mut t, i * 10 * MS, 1000.0 + i as f64);
        }
        for i in 10..20u64 {
            put(&mut t, i * 10 * MS, i as f64 - 10.0);
        }
        let e = t.energy(ID, span(50 * MS, 150 * MS)).unwrap();
        assert_eq!(t.anomalies(ID).resets, 1);
        assert!(e.value().get() > 7.0 && e.value().get() <= 9.01, "{e:?}");
        assert!(e.coverage() < 1.0);
    }

    #[test]
    fn a_leap_no_hardware_can_make_is_not_billed() {
        let mut t = counter(Some(262_143.0));
        for (i, raw) in [10.0, 11.0, 12.0, 5.0, 6.0, 7.0].into_iter().enumerate() {
            put(&mut t, i as u64 * 10 * MS, raw);
        }
        assert_eq!(t.anomalies(ID), Anomalies { resets: 1, ..Anomalies::default() });
        assert!(joules(&t, 0, 60 * MS) < 5.0);
    }

    #[test]
    fn a_large_step_between_two_close_polls_is_no_reset() {
        let mut t = counter(None);
        // 1.2 kW refreshed every 100 ms, seen by polls 1 ms apart.
        for (i, raw) in [0.0, 120.0, 120.0, 240.0, 240.0, 360.0].into_iter().enumerate() {
            put(&mut t, (i as u64 / 2 * 100 + i as u64 % 2) * MS + 1, raw);
        }
        assert_eq!(t.anomalies(ID).resets, 0);
        assert!((joules(&t, 0, 300 * MS) - 240.0).abs() < 1e-9);
    }

    #[test]
    fn a_failed_read_is_a_gap_the_counter_bridges() {
        let mut t = counter(None);
        for i in 0..100u64 {
            put(&mut t, i * 10 * MS, (!(40..60).contains(&i)).then_some(i as f64));
        }
        assert_eq!(t.anomalies(ID).failed, 20);
        assert!((joules(&t, 100 * MS, 900 * MS) - 80.0).abs() < 1e-9);
        let inside = t.energy(ID, span(450 * MS, 500 * MS)).unwrap();
        assert!(inside.bound().get() > 1.0, "the place of joules inside a gap is unknown: {inside:?}");
    }

    #[test]
    fn a_dead_gauge_loses_coverage_and_invents_nothing() {
        let mut t = gauge();
        for i in 0..10u64 {
            put(&mut t, i * 100 * MS, 50.0);
        }
        for i in 10..100u64 {
            put(&mut t, i * 100 * MS, None);
        }
        let e = t.energy(ID, span(0, 10_000 * MS)).unwrap();
        assert!((e.value().get() - 50.0).abs() < 1e-9);
        assert!((e.coverage() - 0.1).abs() < 1e-9);
        assert_eq!(e.method(), Method::Integral);
    }

    #[test]
    fn of_two_sensors_one_that_dies_takes_half_the_coverage_with_it() {
        let one = table(Quantity::Energy, Kind::Counter { wrap: None });
        let mut t = Timeline::new(&[one[0].clone(), one[0].clone()]);
        let both = [SensorId(0), SensorId(1)];
        for i in 0..800u64 {
            for (sensor, stuck) in [(0, 800), (1, 100)] {
                let value = Some(i.min(stuck) as f64);
                t.push(&Reading { sensor: SensorId(sensor), at: Stamp::from_nanos(i * 10 * MS), value });
            }
        }
        let alive = t.energy_of(&both, span(200 * MS, 800 * MS)).unwrap();
        assert_eq!((alive.value().get().round(), alive.coverage()), (120.0, 1.0));
        let dead = t.energy_of(&both, span(2_000 * MS, 3_000 * MS)).unwrap();
        assert_eq!((dead.value().get().round(), dead.coverage()), (100.0, 0.5));
        assert_eq!((t.anomalies(SensorId(0)).stalls, t.anomalies(SensorId(1)).stalls), (0, 1));
    }

    #[test]
    fn a_reset_near_the_end_of_the_range_is_not_a_wrap() {
        let mut t = counter(Some(262_143.0));
        for i in 0..10u64 {
            put(&mut t, i * 5 * MS, 257_000.0 + i as f64);
        }
        for i in 10..20u64 {
            put(&mut t, i * 5 * MS, i as f64);
        }
        assert_eq!((t.anomalies(ID).wraps, t.anomalies(ID).resets), (0, 1));
    }

    #[test]
    fn constant_power_held_to_the_edges_is_exact() {
        let mut t = gauge();
        put(&mut t, 0, 100.0);
        put(&mut t, 900 * MS, 100.0);
        assert!((joules(&t, 100 * MS, 1_100 * MS) - 100.0).abs() < 1e-9);
    }

    #[test]
    fn nonsense_is_counted_and_ignored() {
        let mut t = counter(None);
        for (i, raw) in [1.0, f64::NAN, 2.0, -5.0, 3.0, f64::INFINITY, 4.0].into_iter().enumerate() {
            put(&mut t, i as u64 * 10 * MS, raw);
        }
        put(&mut t, 5 * MS, 9.0);
        assert_eq!(t.anomalies(ID), Anomalies { nonsense: 3, out_of_order: 1, ..Anomalies::default() });
        assert!(joules(&t, 0, 100 * MS) <= 3.0);
    }

    #[test]
    fn nothing_known_is_none_not_zero() {
        let t = counter(None);
        assert_eq!(t.energy(ID, span(0, 10)), None);
        assert_eq!(t.energy(SensorId(7), span(0, 10)), None);
        let full = staircase(None);
        assert_eq!(full.energy(ID, span(9_000 * MS, 9_500 * MS)), None);
    }

    #[test]
    fn level_knows_mean_median_and_extremes() {
        let mut t = gauge();
        for (i, w) in [10.0, 20.0, 60.0, 20.0].into_iter().enumerate() {
            put(&mut t, i as u64 * 100 * MS, w);
        }
        let level = t.level(ID, span(0, 300 * MS)).unwrap();
        assert_eq!((level.min, level.max, level.median), (10.0, 60.0, 20.0));
        assert!((level.mean - 30.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn windows_are_additive_and_never_negative(
            steps in prop::collection::vec((1u64..50, 0.0f64..2.0), 3..200),
            cuts in prop::array::uniform3(0u64..4000),
            is_counter in any::<bool>(),
        ) {
            let mut t = if is_counter { counter(None) } else { gauge() };
            let (mut at, mut raw) = (0, 0.0);
            for (dt, value) in steps {
                at += dt * MS;
                raw += value;
                put(&mut t, at, if is_counter { raw } else { value * 100.0 });
            }
            let mut cuts = cuts.map(|c| c * MS);
            cuts.sort_unstable();
            let [a, b, c] = cuts;
            let part = |x, y| t.energy(ID, span(x, y)).map_or(0.0, |e| e.value().get());
            prop_assert!(part(a, b) >= 0.0 && part(b, c) >= 0.0);
            prop_assert!((part(a, b) + part(b, c) - part(a, c)).abs() <= 1e-9 * part(a, c).max(1.0));
        }

        #[test]
        fn forgetting_the_past_changes_no_later_window(
            steps in prop::collection::vec((1u64..50, 0.0f64..2.0), 3..100), from in 0u64..2000, length in 1u64..1000,
        ) {
            let mut t = counter(None);
            let (mut at, mut raw) = (0, 0.0);
            for (dt, value) in steps {
                at += dt * MS;
                raw += value;
                put(&mut t, at, raw);
            }
            let window = span(from * MS, (from + length) * MS);
            let before = t.energy(ID, window);
            t.forget_before(window.start());
            prop_assert_eq!(before, t.energy(ID, window));
        }
    }
}
