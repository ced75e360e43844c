//! Time on one host's monotonic clock. A [`Stamp`] never comes from wall time: only `wattle_meter::clock` hands them out,
//! and one [`Anchor`] per session says when its zero was.

use crate::units::Seconds;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Nanoseconds on this host's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Stamp(u64);

impl Stamp {
    /// From a reading of the monotonic clock, or from a stored one.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// The nanoseconds, for storage.
    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// How long after `earlier` this is; zero if it is not after.
    pub fn since(self, earlier: Stamp) -> Seconds {
        Seconds(self.0.saturating_sub(earlier.0) as f64 * 1e-9)
    }

    /// This stamp moved forward.
    pub const fn plus_nanos(self, nanos: u64) -> Self {
        Self(self.0.saturating_add(nanos))
    }

    /// This stamp moved back, at most to the clock's zero.
    pub const fn minus_nanos(self, nanos: u64) -> Self {
        Self(self.0.saturating_sub(nanos))
    }

    /// The point halfway to `other`.
    pub const fn midpoint(self, other: Stamp) -> Self {
        Self(self.0.midpoint(other.0))
    }
}

/// A half-open interval `[start, end)`; never negative.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    #[serde(rename = "start_ns")]
    start: Stamp,
    #[serde(rename = "end_ns")]
    end: Stamp,
}

impl Span {
    /// From `start` to `end`; empty (at `start`) if `end` comes first.
    pub fn new(start: Stamp, end: Stamp) -> Self {
        Self { start, end: end.max(start) }
    }

    /// First instant inside.
    pub const fn start(self) -> Stamp {
        self.start
    }

    /// First instant after.
    pub const fn end(self) -> Stamp {
        self.end
    }

    /// How long it is.
    pub fn duration(self) -> Seconds {
        self.end.since(self.start)
    }

    /// Whether it has no inside.
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// Whether `at` is inside.
    pub fn contains(self, at: Stamp) -> bool {
        self.start <= at && at < self.end
    }

    /// The part shared with `other`, if any.
    pub fn intersect(self, other: Span) -> Option<Span> {
        let start = self.start.max(other.start);
        let end = self.end.min(other.end);
        (start < end).then_some(Span { start, end })
    }
}

/// Wall time in milliseconds since 1970 (UTC): for people and for `ts` fields, never for arithmetic on measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Wall(pub u64);

impl fmt::Display for Wall {
    /// RFC 3339 in UTC with milliseconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, ms) = (self.0 / 86_400_000, self.0 % 86_400_000);
        // Days to a civil date, counting years from March so that the leap day comes last.
        let z = days + 719_468;
        let (era, day_of_era) = (z / 146_097, z % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted + 2) / 5 + 1;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        let (h, m, s) = (ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}.{:03}Z", ms % 1000)
    }
}

/// One moment on both clocks of one boot of one host: what ties stamps to dates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Anchor {
    /// The moment on the monotonic clock.
    #[serde(rename = "monotonic_ns")]
    pub stamp: Stamp,
    /// The same moment on the wall clock.
    #[serde(rename = "unix_ms")]
    pub wall: Wall,
    /// Which boot the monotonic clock belongs to, where the system says so.
    pub boot_id: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn wall_time_prints_as_rfc_3339() {
        assert_eq!(Wall(0).to_string(), "1970-01-01T00:00:00.000Z");
        assert_eq!(Wall(951_782_400_000).to_string(), "2000-02-29T00:00:00.000Z");
        assert_eq!(Wall(1_767_225_599_999).to_string(), "2025-12-31T23:59:59.999Z");
        assert_eq!(Wall(1_772_323_200_001).to_string(), "2026-03-01T00:00:00.001Z");
    }

    proptest! {
        #[test]
        fn spans_are_half_open_and_intersect_inside_both(a in 0u64..1000, b in 0u64..1000, c in 0u64..1000, d in 0u64..1000) {
            let x = Span::new(Stamp(a), Stamp(b));
            let y = Span::new(Stamp(c), Stamp(d));
            prop_assert!(!x.contains(x.end()));
            prop_assert_eq!(x.intersect(y), y.intersect(x));
            if let Some(both) = x.intersect(y) {
                prop_assert!(x.contains(both.start()) && y.contains(both.start()));
                prop_assert!(both.duration() <= x.duration() && both.duration() <= y.duration());
            }
        }

        #[test]
        fn durations_add_up(a in 0u64..1_000_000, b in 0u64..1_000_000, c in 0u64..1_000_000) {
            let mut s = [a, b, c];
            s.sort_unstable();
            let [a, b, c] = s.map(Stamp);
            let parts = Span::new(a, b).duration() + Span::new(b, c).duration();
            prop_assert!((parts.get() - Span::new(a, c).duration().get()).abs() < 1e-15);
        }
    }
}
