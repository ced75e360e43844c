//! Units as types. Only lawful products compile: `Watts * Seconds = Joules`, and nothing turns into a bare number by accident.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident, $symbol:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub f64);

        impl $name {
            /// Zero of this unit.
            pub const ZERO: Self = Self(0.0);

            /// The bare number, for storage and display.
            pub const fn get(self) -> f64 {
                self.0
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl Mul<f64> for $name {
            type Output = Self;
            fn mul(self, factor: f64) -> Self {
                Self(self.0 * factor)
            }
        }

        impl Div<f64> for $name {
            type Output = Self;
            fn div(self, divisor: f64) -> Self {
                Self(self.0 / divisor)
            }
        }

        impl Div for $name {
            type Output = f64;
            fn div(self, other: Self) -> f64 {
                self.0 / other.0
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self::ZERO, Add::add)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match f.precision() {
                    Some(digits) => write!(f, "{:.digits$} {}", self.0, $symbol),
                    None => write!(f, "{} {}", self.0, $symbol),
                }
            }
        }
    };
}

unit!(
    /// Energy.
    Joules,
    "J"
);
unit!(
    /// Power.
    Watts,
    "W"
);
unit!(
    /// A length of time; points in time are [`crate::Stamp`]s.
    Seconds,
    "s"
);

/// A count of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tokens(pub u64);

impl Mul<Seconds> for Watts {
    type Output = Joules;
    fn mul(self, time: Seconds) -> Joules {
        Joules(self.0 * time.0)
    }
}

impl Mul<Watts> for Seconds {
    type Output = Joules;
    fn mul(self, power: Watts) -> Joules {
        power * self
    }
}

impl Div<Seconds> for Joules {
    type Output = Watts;
    fn div(self, time: Seconds) -> Watts {
        Watts(self.0 / time.0)
    }
}

impl Div<Watts> for Joules {
    type Output = Seconds;
    fn div(self, power: Watts) -> Seconds {
        Seconds(self.0 / power.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn power_times_time_is_energy_and_back(p in 0.1f64..1e4, t in 1e-6f64..1e6) {
            let e = Watts(p) * Seconds(t);
            prop_assert!(((e / Seconds(t)).get() - p).abs() <= 1e-9 * p);
            prop_assert!(((e / Watts(p)).get() - t).abs() <= 1e-9 * t);
            prop_assert_eq!(e, Seconds(t) * Watts(p));
        }

        #[test]
        fn a_sum_does_not_depend_on_where_it_is_cut(xs in prop::collection::vec(0.0f64..1e3, 1..50), cut in 0usize..50) {
            let cut = cut.min(xs.len());
            let whole: Joules = xs.iter().map(|x| Joules(*x)).sum();
            let left: Joules = xs[..cut].iter().map(|x| Joules(*x)).sum();
            let right: Joules = xs[cut..].iter().map(|x| Joules(*x)).sum();
            prop_assert!((whole.get() - (left + right).get()).abs() <= 1e-9 * whole.get().max(1.0));
        }
    }
}
