//! The energy of a span that is too long to keep: gathered piece by piece, with the bound of the whole.
//!
//! Pieces that follow each other share their ends, and what one has too much the next has too little. So only the two outer ends
//! count in the bound, however many pieces there were. What is billed to somebody begins and ends where power changes, so that the
//! errors of both ends, and of all spans of a kind, may go the same way: they add up. docs/method.md#windows

use crate::estimate::{Estimate, Method};
use crate::sensor::SensorId;
use crate::time::{Span, Stamp};
use crate::timeline::Timeline;
use crate::units::{Joules, Seconds};
use serde::{Deserialize, Serialize};

/// The energy of one span so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Account {
    /// From its start to where it has come.
    #[serde(flatten)]
    pub span: Span,
    /// Energy of that span, all its sensors.
    pub measured: Joules,
    /// Half-width of its 95 % interval.
    pub bound: Joules,
    /// The part of the bound that grows with the energy and does not average out.
    pub gain: Joules,
    /// What the start of the span leaves open; `None` until something was measured.
    #[serde(default)]
    pub start: Option<Joules>,
    /// What lies open between its ends, pieces in quadrature.
    #[serde(default)]
    pub within: Joules,
    /// Part of the span that readings covered.
    pub coverage: f64,
    /// How it was got; `None` until something was measured.
    #[serde(default)]
    pub method: Option<Method>,
}

impl Account {
    /// An empty account that starts at `start`.
    pub fn open(start: Stamp) -> Self {
        Self {
            span: Span::new(start, start),
            measured: Joules::ZERO,
            bound: Joules::ZERO,
            gain: Joules::ZERO,
            start: None,
            within: Joules::ZERO,
            coverage: 0.0,
            method: None,
        }
    }

    /// Adds what `sensors` saw from where the account stands to `until`.
    pub fn extend(&mut self, timeline: &Timeline, sensors: &[SensorId], until: Stamp) {
        let piece = Span::new(self.span.end(), until);
        if piece.is_empty() {
            return;
        }
        let seen = timeline.energy_of(sensors, piece);
        let covered = self.span.duration().get() * self.coverage
            + seen.map_or(0.0, |e| e.coverage()) * piece.duration().get();
        self.span = Span::new(self.span.start(), until);
        let coverage = covered / self.span.duration().get();
        // All of it is all of it, also after rounding.
        self.coverage = if coverage > 1.0 - 1e-9 { 1.0 } else { coverage };
        let Some(seen) = seen else { return };
        self.measured += seen.value();
        self.method = self.method.max(Some(seen.method()));
        self.gain += timeline.gain_of(sensors, piece);
        let start = *self.start.get_or_insert_with(|| timeline.open_at(sensors, piece.start()));
        self.within = quadrature(self.within, timeline.open_within(sensors, piece));
        let ends = start + timeline.open_at(sensors, piece.end()) + timeline.open_short(sensors, self.span);
        self.bound = self.gain + quadrature(ends, self.within);
    }

    /// One account of pieces that follow each other, none shorter than gauges average: of their ends only the outermost count.
    pub fn chain(pieces: &[Account]) -> Option<Account> {
        let (first, last) = (pieces.first()?, pieces.last()?);
        let mut whole = Self::open(first.span.start());
        whole.span = Span::new(first.span.start(), last.span.end());
        whole.measured = pieces.iter().map(|p| p.measured).sum();
        whole.gain = pieces.iter().map(|p| p.gain).sum();
        whole.within = pieces.iter().map(|p| p.within).fold(Joules::ZERO, quadrature);
        whole.method = pieces.iter().filter_map(|p| p.method).max();
        let covered: f64 = pieces.iter().map(|p| p.span.duration().get() * p.coverage).sum();
        whole.coverage = (covered / whole.span.duration().get()).min(1.0);
        whole.start = first.start;
        // What the end of a piece leaves open is in its bound, beside its start and what lies between.
        let open = (last.bound - last.gain).get();
        let ends = (open * open - last.within.get().powi(2)).max(0.0).sqrt();
        let end = (ends - last.start.unwrap_or_default().get()).max(0.0);
        whole.bound = whole.gain + quadrature(whole.start.unwrap_or_default() + Joules(end), whole.within);
        Some(whole)
    }

    /// The figure; `None` if nothing was seen.
    pub fn estimate(&self) -> Option<Estimate<Joules>> {
        Some(Estimate::new(self.measured, self.bound, self.method?, self.coverage))
    }
}

/// The energy of several spans together.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Total {
    /// How many there were.
    pub spans: u64,
    /// Their length.
    pub length: Seconds,
    measured: Joules,
    gain: Joules,
    open: Joules,
    covered: Seconds,
    method: Option<Method>,
}

impl Total {
    /// Adds a span.
    pub fn add(&mut self, account: &Account) {
        let length = account.span.duration();
        self.spans += 1;
        self.length += length;
        self.measured += account.measured;
        self.gain += account.gain;
        self.open += account.bound - account.gain;
        self.covered += length * account.coverage;
        self.method = self.method.max(account.method);
    }

    /// The figure; `None` if nothing was seen.
    pub fn estimate(&self) -> Option<Estimate<Joules>> {
        let coverage = if self.length.get() > 0.0 { self.covered / self.length } else { 0.0 };
        Some(Estimate::new(self.measured, self.gain + self.open, self.method?, coverage))
    }
}

fn quadrature(a: Joules, b: Joules) -> Joules {
    Joules(a.get().hypot(b.get()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Reading, Sensor, Trust};
    use proptest::prelude::*;

    const SENSOR: [SensorId; 1] = [SensorId(0)];

    /// A counter of 100 W refreshed every 100 ms and polled every 5 ms, for 20 s.
    fn timeline() -> Timeline {
        let sensor = Sensor {
            name: "test/0/energy".into(),
            source: "test".into(),
            device: Device { kind: DeviceKind::Gpu, id: "0".into(), name: "test".into() },
            quantity: Quantity::Energy,
            perimeter: Perimeter::Device,
            kind: Kind::Counter { wrap: None },
            trust: Trust::Measured { gain: 0.05 },
            quantum: 0.0,
            averaged_s: 0.0,
        };
        let mut timeline = Timeline::new(&[sensor]);
        for poll in 0..4000u64 {
            let value = Some((poll / 20) as f64 * 10.0);
            timeline.push(&Reading { sensor: SENSOR[0], at: Stamp::from_nanos(poll * 5_000_000), value });
        }
        timeline
    }

    proptest! {
        #[test]
        fn pieces_make_the_whole_and_its_bound(mut cuts in prop::collection::vec(1_000_000_000u64..19_000_000_000, 2..20)) {
            let timeline = timeline();
            cuts.sort_unstable();
            cuts.dedup();
            prop_assume!(cuts.len() > 1);
            let stamp = |i: usize| Stamp::from_nanos(cuts[i]);
            let (mut pieces, mut whole) = (Account::open(stamp(0)), Account::open(stamp(0)));
            (1..cuts.len()).for_each(|i| pieces.extend(&timeline, &SENSOR, stamp(i)));
            whole.extend(&timeline, &SENSOR, stamp(cuts.len() - 1));
            let (pieces, whole) = (pieces.estimate().unwrap(), whole.estimate().unwrap());
            prop_assert!((pieces.value() - whole.value()).get().abs() < 1e-6);
            prop_assert!((pieces.bound() - whole.bound()).get().abs() < 1e-6);
            prop_assert!((pieces.coverage() - 1.0).abs() < 1e-9);
            // Opened one by one and chained afterwards they make the same.
            let each = (1..cuts.len()).map(|i| {
                let mut piece = Account::open(stamp(i - 1));
                piece.extend(&timeline, &SENSOR, stamp(i));
                piece
            });
            let chained = Account::chain(&each.collect::<Vec<_>>()).and_then(|a| a.estimate()).unwrap();
            prop_assert!((chained.value() - whole.value()).get().abs() < 1e-6);
            prop_assert!((chained.bound() - whole.bound()).get().abs() < 1e-6);
            prop_assert!((chained.coverage() - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn spans_apart_add_up() {
        let timeline = timeline();
        let second = |s: u64| Stamp::from_nanos(s * 1_000_000_000);
        let mut total = Total::default();
        assert_eq!(total.estimate(), None);
        for s in [2, 5, 9] {
            let mut account = Account::open(second(s));
            account.extend(&timeline, &SENSOR, second(s + 1));
            total.add(&account);
        }
        let sum = total.estimate().unwrap();
        assert!((sum.value().get() - 300.0).abs() < 3.0, "{sum:?}");
        assert!((total.length.get() - 3.0).abs() < 1e-9 && total.spans == 3);
        assert!(sum.bound().get() >= 0.05 * sum.value().get());
    }

    #[test]
    fn what_nobody_saw_is_no_figure() {
        let mut account = Account::open(Stamp::from_nanos(0));
        account.extend(&Timeline::new(&[]), &SENSOR, Stamp::from_nanos(9));
        assert_eq!((account.estimate(), account.coverage), (None, 0.0));
    }
}
