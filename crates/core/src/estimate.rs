//! A figure that says how it was got. There is no bare number for energy, no `-1`, no `0` for unknown.

use crate::units::{Joules, si};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Add;

/// How a figure was got, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Difference of a hardware energy counter.
    Counter,
    /// Integral of measured power.
    Integral,
    /// Computed from something else (CPU load, model size): a guess with a wide bound.
    Model,
}

impl Method {
    /// The word used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Method::Counter => "counter",
            Method::Integral => "integral",
            Method::Model => "model",
        }
    }
}

/// A value with the half-width of its 95 % interval, how it was got, and the part of the asked span that data covered.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate<T> {
    value: T,
    bound: T,
    method: Method,
    coverage: f64,
}

impl<T: Copy> Estimate<T> {
    /// An estimate; `coverage` is clamped to `0..=1`.
    pub fn new(value: T, bound: T, method: Method, coverage: f64) -> Self {
        Self { value, bound, method, coverage: coverage.clamp(0.0, 1.0) }
    }

    /// The best single figure.
    pub const fn value(&self) -> T {
        self.value
    }

    /// Half-width of the 95 % interval.
    pub const fn bound(&self) -> T {
        self.bound
    }

    /// How it was got.
    pub const fn method(&self) -> Method {
        self.method
    }

    /// Part of the span that readings covered, 0 to 1. What was not covered is not in the value.
    pub const fn coverage(&self) -> f64 {
        self.coverage
    }
}

impl<T: Copy + Add<Output = T>> Add for Estimate<T> {
    type Output = Self;

    /// The sum of two figures over the same span: bounds add up (sensor errors may share a cause), the worse method and
    /// the lower coverage stand for the whole.
    fn add(self, other: Self) -> Self {
        Self {
            value: self.value + other.value,
            bound: self.bound + other.bound,
            method: self.method.max(other.method),
            coverage: self.coverage.min(other.coverage),
        }
    }
}

impl fmt::Display for Estimate<Joules> {
    /// `12.3 J ± 0.4 J (counter)`, and how much was seen if that was not all.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let joules = |j: Joules| si(j.get(), "J");
        write!(f, "{} ± {} ({}", joules(self.value), joules(self.bound), self.method.name())?;
        // A hair's breadth at an edge is not worth a word.
        if self.coverage < 0.999 {
            write!(f, ", {:.1} % seen", self.coverage * 100.0)?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Joules;
    use proptest::prelude::*;

    fn any_estimate() -> impl Strategy<Value = Estimate<Joules>> {
        let method = prop_oneof![Just(Method::Counter), Just(Method::Integral), Just(Method::Model)];
        (0.0f64..1e6, 0.0f64..1e3, method, -0.5f64..1.5)
            .prop_map(|(v, b, m, c)| Estimate::new(Joules(v), Joules(b), m, c))
    }

    #[test]
    fn a_figure_says_how_it_was_got() {
        let energy = Estimate::new(Joules(12.3), Joules(0.4), Method::Counter, 1.0);
        assert_eq!(energy.to_string(), "12.3 J ± 400 mJ (counter)");
        let part = Estimate::new(Joules(12.3), Joules(0.4), Method::Model, 0.5);
        assert_eq!(part.to_string(), "12.3 J ± 400 mJ (model, 50.0 % seen)");
    }

    proptest! {
        #[test]
        fn a_sum_is_never_surer_than_its_parts(a in any_estimate(), b in any_estimate()) {
            let sum = a + b;
            prop_assert!(sum.bound() >= a.bound() && sum.bound() >= b.bound());
            prop_assert!(sum.method() >= a.method() && sum.method() >= b.method());
            prop_assert!(sum.coverage() <= a.coverage() && sum.coverage() <= b.coverage());
            prop_assert!((0.0..=1.0).contains(&sum.coverage()));
            prop_assert_eq!(sum, b + a);
        }
    }
}
