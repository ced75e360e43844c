//! What the machine draws with nothing at work: measured before the work and after it, because idle power moves with temperature,
//! clocks and whoever else is there. docs/method.md#idle

use crate::estimate::{Estimate, Method};
use crate::metrics::WHOLE;
use crate::units::Watts;
use serde::{Deserialize, Serialize};

/// Less of a change than this is not worth a word.
const DRIFT: f64 = 0.05;

/// On which side of the work it was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// Before it: all that there was in older logs.
    #[default]
    Before,
    /// After it.
    After,
}

/// One measurement of the idle machine, as the log keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Before or after the work.
    #[serde(default)]
    pub when: When,
    /// How long it took.
    pub seconds: f64,
    /// Mean power.
    pub power_w: Estimate<Watts>,
    /// The part of its bound that is the sensors' gain error, which is the same before and after.
    #[serde(default)]
    pub gain_w: Watts,
}

impl Baseline {
    /// What the readings leave open about it, beside a gain that all readings share. A model's error is not one gain.
    fn open(&self) -> f64 {
        let gain = if self.power_w.method() == Method::Model { 0.0 } else { self.gain_w.get() };
        (self.power_w.bound().get() - gain).max(0.0)
    }
}

/// The idle power of one session, by what was measured before and after its work.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Idle {
    before: Option<Baseline>,
    after: Option<Baseline>,
}

#[cfg(test)]
impl From<Estimate<Watts>> for Idle {
    /// A power that is known from elsewhere.
    fn from(power_w: Estimate<Watts>) -> Self {
        let known = Baseline { when: When::Before, seconds: 0.0, power_w, gain_w: Watts(0.0) };
        Self { before: Some(known), after: None }
    }
}

impl Idle {
    /// Takes in a measurement; a later one of the same side takes its place.
    pub fn put(&mut self, baseline: Baseline) {
        match baseline.when {
            When::Before => self.before = Some(baseline),
            When::After => self.after = Some(baseline),
        }
    }

    /// The last measurement was none: somebody was at work.
    pub fn forget_last(&mut self) {
        if self.after.take().is_none() {
            self.before = None;
        }
    }

    /// Mean power, weighted by length, in an interval that holds both: what the bounds of the two do not explain of their
    /// difference is part of its bound. One that was seen in part counts only where there is no other.
    pub fn power(&self) -> Option<Estimate<Watts>> {
        let Some((before, after)) = self.both() else {
            let all = [self.before, self.after];
            let whole = all.into_iter().flatten().find(|b| b.power_w.coverage() >= WHOLE);
            return whole.or(self.before).or(self.after).map(|b| b.power_w);
        };
        let (a, b) = (before.power_w, after.power_w);
        let part = after.seconds / (before.seconds + after.seconds);
        let mix = |a: Watts, b: Watts| a.get() * (1.0 - part) + b.get() * part;
        let mean = mix(a.value(), b.value());
        let further = (a.value().get() - mean).abs().max((b.value().get() - mean).abs());
        let drift = (b.value() - a.value()).get().abs();
        let beyond = (drift - before.open().hypot(after.open())).max(0.0);
        let unexplained = if drift > 0.0 { further * beyond / drift } else { 0.0 };
        let bound = (mix(a.bound(), b.bound()) + unexplained).max(further);
        Some(Estimate::new(
            Watts(mean),
            Watts(bound),
            a.method().max(b.method()),
            a.coverage().min(b.coverage()),
        ))
    }

    /// Power before and after, if it changed by more than is usual and by more than the readings leave open.
    pub fn drift(&self) -> Option<(Watts, Watts)> {
        let (before, after) = self.both()?;
        let (a, b) = (before.power_w.value(), after.power_w.value());
        let open = before.open().hypot(after.open());
        let usual = self.power()?.value().get() * DRIFT;
        ((b - a).get().abs() > usual.max(open)).then_some((a, b))
    }

    /// Both, if both were seen whole.
    fn both(&self) -> Option<(Baseline, Baseline)> {
        let whole = |b: Option<Baseline>| b.filter(|b| b.power_w.coverage() >= WHOLE && b.seconds > 0.0);
        whole(self.before).zip(whole(self.after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn baseline(when: When, seconds: f64, watts: f64, open: f64) -> Baseline {
        let gain = watts * 0.1;
        let power_w = Estimate::new(Watts(watts), Watts(gain + open), Method::Counter, 1.0);
        Baseline { when, seconds, power_w, gain_w: Watts(gain) }
    }

    fn idle(before: Baseline, after: Baseline) -> Idle {
        let mut idle = Idle::default();
        idle.put(after);
        idle.put(before);
        idle
    }

    #[test]
    fn a_log_that_does_not_say_when_is_of_before() {
        let old = r#"{"seconds":1,"power_w":{"value":5,"bound":1,"method":"counter","coverage":1}}"#;
        let old: Baseline = serde_json::from_str(old).unwrap();
        assert_eq!((old.when, old.gain_w), (When::Before, Watts(0.0)));
        let mut idle = Idle::default();
        idle.put(old);
        assert_eq!((idle.power(), idle.drift()), (Some(old.power_w), None));
    }

    #[test]
    fn drift_beyond_what_the_readings_leave_open_widens_the_bound_and_is_told() {
        let drifting = idle(baseline(When::Before, 2.0, 100.0, 1.0), baseline(When::After, 2.0, 130.0, 1.0));
        let power = drifting.power().unwrap();
        assert_eq!(power.value(), Watts(115.0));
        // A tenth of gain, one watt left open, and of 30 W all but √2 lie 15 W to either side.
        let unexplained = 15.0 * (30.0 - 2f64.sqrt()) / 30.0;
        assert!((power.bound().get() - (11.5 + 1.0 + unexplained)).abs() < 1e-9, "{power:?}");
        assert_eq!(drifting.drift(), Some((Watts(100.0), Watts(130.0))));
    }

    #[test]
    fn what_the_readings_leave_open_is_no_drift() {
        let noisy = idle(baseline(When::Before, 1.0, 100.0, 9.0), baseline(When::After, 1.0, 110.0, 9.0));
        assert_eq!(noisy.drift(), None);
        assert!((noisy.power().unwrap().bound().get() - 19.5).abs() < 1e-9);
        let small = idle(baseline(When::Before, 1.0, 100.0, 0.1), baseline(When::After, 1.0, 104.0, 0.1));
        assert_eq!(small.drift(), None, "below one in twenty");
    }

    #[test]
    fn what_was_seen_in_part_counts_only_alone() {
        let part = |mut b: Baseline| {
            b.power_w = Estimate::new(b.power_w.value(), b.power_w.bound(), Method::Counter, 0.5);
            b
        };
        let (before, after) =
            (baseline(When::Before, 1.0, 100.0, 1.0), baseline(When::After, 1.0, 50.0, 1.0));
        assert_eq!(idle(before, part(after)).power(), Some(before.power_w));
        assert_eq!(idle(part(before), after).power(), Some(after.power_w));
        assert_eq!(idle(part(before), part(after)).power().unwrap().coverage(), 0.5);
    }

    proptest! {
        #[test]
        fn the_interval_holds_both(
            watts in (1.0f64..500.0, 1.0f64..500.0),
            seconds in (0.1f64..60.0, 0.1f64..60.0),
            open in (0.0f64..50.0, 0.0f64..50.0),
        ) {
            let both = idle(
                baseline(When::Before, seconds.0, watts.0, open.0),
                baseline(When::After, seconds.1, watts.1, open.1),
            );
            let power = both.power().unwrap();
            for watts in [watts.0, watts.1] {
                prop_assert!((power.value().get() - watts).abs() <= power.bound().get() + 1e-9);
            }
        }
    }
}
