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

/// A figure for people: three significant digits and a prefix for thousands or thousandths. A unit of `1` is none, one that
/// starts with `1/` is a rate.
pub fn si(value: f64, unit: &str) -> String {
    if unit == "1" || unit.is_empty() {
        return significant(value);
    }
    if let Some(per) = unit.strip_prefix("1/") {
        return format!("{} /{per}", significant(value));
    }
    let (scaled, prefix) = match value.abs() {
        // What is left of a difference of floating-point numbers.
        x if x < 1e-12 => (0.0, ""),
        x if x < 1e-3 => (value * 1e6, "µ"),
        x if x < 1.0 => (value * 1e3, "m"),
        x if x < 1e4 => (value, ""),
        x if x < 1e7 => (value / 1e3, "k"),
        _ => (value / 1e6, "M"),
    };
    format!("{} {prefix}{unit}", significant(scaled))
}

/// Three significant digits; whole numbers as they are.
fn significant(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e12 {
        return format!("{value:.0}");
    }
    let digits = value.abs().log10().floor() as i32;
    if digits < -6 {
        return format!("{value:.2e}");
    }
    format!("{value:.*}", usize::try_from(2 - digits).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn figures_have_three_digits_and_a_fitting_prefix() {
        for (value, text) in [
            (0.0, "0 J"),
            (0.000_012_34, "12.3 µJ"),
            (0.012_34, "12.3 mJ"),
            (1.234, "1.23 J"),
            (123.4, "123 J"),
            (1234.0, "1234 J"),
            (12_345.0, "12.3 kJ"),
            (-0.5, "-500 mJ"),
        ] {
            assert_eq!(si(value, "J"), text);
        }
        assert_eq!((si(0.123_45, "1/W"), si(200.0, "1")), ("0.123 /W".into(), "200".into()));
        assert_eq!(si(2e-12, "1"), "2.00e-12");
    }

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
