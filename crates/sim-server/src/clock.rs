//! Nanoseconds of `CLOCK_MONOTONIC`, the one clock of every log.

use rustix::time::{ClockId, clock_gettime};

/// Now, the same for every process of the machine.
pub(crate) fn now() -> u64 {
    read(ClockId::Monotonic)
}

/// Seconds since 1970, for the fields of answers that want a date.
pub(crate) fn wall_seconds() -> u64 {
    read(ClockId::Realtime) / 1_000_000_000
}

/// Two clocks read within this time were read at the same moment.
const SAME_MOMENT_NS: u64 = 2_000;

/// A stamp of `CLOCK_REALTIME` (the kernel's receive stamps are) on the monotonic clock.
///
/// The distance of the two clocks is read at this moment, so a stamp a few microseconds old is off by no more than what the
/// wall clock was slewed meanwhile. Where we are interrupted between the readings, they are taken again.
pub(crate) fn from_wall(wall_ns: u64) -> u64 {
    const TRIES: usize = 4;
    let read_both = || {
        let before = now();
        let wall = read(ClockId::Realtime);
        let took = now() - before;
        (took, before + took / 2, wall)
    };
    let mut best = read_both();
    for _ in 1..TRIES {
        if best.0 <= SAME_MOMENT_NS {
            break;
        }
        best = best.min(read_both());
    }
    let (_, monotonic, wall) = best;
    monotonic.saturating_add_signed(wall_ns.wrapping_sub(wall) as i64)
}

/// Milliseconds as written in a config.
pub(crate) fn from_ms(ms: f64) -> u64 {
    // A float beyond the range saturates, and a negative one is 0.
    (ms * 1e6).round() as u64
}

fn read(clock: ClockId) -> u64 {
    let t = clock_gettime(clock);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wall_stamp_of_now_is_now() {
        let before = now();
        let stamp = from_wall(read(ClockId::Realtime));
        assert!(stamp.abs_diff(before) < 50_000_000, "{before} {stamp}");
    }
}
