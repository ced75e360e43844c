//! The one clock: monotonic nanoseconds, the same for every process on this host. Wall time is asked for once per session.

use rustix::time::{ClockId, Timespec, clock_gettime};
use wattle_core::time::{Anchor, Stamp, Wall};
use wattle_core::units::Seconds;

/// Now, on the monotonic clock.
pub fn now() -> Stamp {
    Stamp::from_nanos(nanos(clock_gettime(ClockId::Monotonic)))
}

/// Now, for people.
pub fn wall() -> Wall {
    Wall(nanos(clock_gettime(ClockId::Realtime)) / 1_000_000)
}

/// Nanoseconds of wall time, to put a stamp of the kernel's on the monotonic clock.
pub(crate) fn wall_nanos() -> u64 {
    nanos(clock_gettime(ClockId::Realtime))
}

/// Time since boot, the time asleep included.
pub(crate) fn since_boot() -> Seconds {
    #[cfg(target_os = "linux")]
    let clock = ClockId::Boottime;
    #[cfg(not(target_os = "linux"))]
    let clock = ClockId::Monotonic;
    Seconds(nanos(clock_gettime(clock)) as f64 * 1e-9)
}

/// What ties this boot's stamps to dates.
pub fn anchor() -> Anchor {
    let boot_id =
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned());
    Anchor { stamp: now(), wall: wall(), boot_id }
}

/// CPU time of the calling thread so far.
pub fn thread_cpu() -> Seconds {
    Seconds(nanos(clock_gettime(ClockId::ThreadCPUTime)) as f64 * 1e-9)
}

/// CPU time of this process so far, all threads.
pub fn process_cpu() -> Seconds {
    Seconds(nanos(clock_gettime(ClockId::ProcessCPUTime)) as f64 * 1e-9)
}

/// Sleeps until `deadline`; returns at once if it has passed.
pub fn sleep_until(deadline: Stamp) {
    #[cfg(target_os = "linux")]
    {
        let at = Timespec {
            tv_sec: (deadline.nanos() / 1_000_000_000) as i64,
            tv_nsec: (deadline.nanos() % 1_000_000_000) as i64,
        };
        // Interrupted by a signal: sleep on to the same absolute deadline.
        while rustix::thread::clock_nanosleep_absolute(rustix::thread::ClockId::Monotonic, &at).is_err() {
            if now() >= deadline {
                break;
            }
        }
    }
    #[cfg(not(target_os = "linux"))]
    std::thread::sleep(std::time::Duration::from_secs_f64(deadline.since(now()).get()));
}

/// Asks the system to run the calling thread before all ordinary ones, so that a busy machine does not make it late. Granted
/// to root, or by `ulimit -r`; threads and programs started from this one do not inherit it.
pub(crate) fn go_first() -> bool {
    #[cfg(target_os = "linux")]
    #[allow(unsafe_code)] // No safe crate offers this call.
    {
        let lowest = libc::sched_param { sched_priority: 1 };
        // SAFETY: 0 is this thread, and the parameter is read before the call returns.
        unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &lowest) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    false
}

fn nanos(t: Timespec) -> u64 {
    t.tv_sec.max(0) as u64 * 1_000_000_000 + t.tv_nsec.max(0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_never_goes_back() {
        let stamps: Vec<Stamp> = (0..10_000).map(|_| now()).collect();
        assert!(stamps.is_sorted());
    }

    #[test]
    fn a_sleep_ends_no_earlier_than_its_deadline() {
        let deadline = now().plus_nanos(2_000_000);
        sleep_until(deadline);
        assert!(now() >= deadline);
        sleep_until(Stamp::from_nanos(1)); // long past: returns at once
    }
}
