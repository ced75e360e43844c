//! A timer that an event loop can wait for, to the precision of the kernel: event loops' own timers count milliseconds.
//!
//! It is read like a pipe: eight bytes, once it rang.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use wattle_core::time::Stamp;

/// Makes one that is not set; an error where the system has none.
#[cfg(target_os = "linux")]
pub fn open() -> io::Result<OwnedFd> {
    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
    let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
    Ok(timerfd_create(TimerfdClockId::Monotonic, flags)?)
}

/// Sets it; what it was set to before is forgotten. A moment that has passed rings at once.
#[cfg(target_os = "linux")]
pub fn set(alarm: BorrowedFd<'_>, at: Stamp) -> io::Result<()> {
    use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec, timerfd_settime};
    // Zero would switch it off.
    let nanos = at.nanos().max(1);
    let time = Itimerspec {
        it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
        it_value: Timespec {
            tv_sec: (nanos / 1_000_000_000) as i64,
            tv_nsec: (nanos % 1_000_000_000) as i64,
        },
    };
    timerfd_settime(alarm, TimerfdTimerFlags::ABSTIME, &time)?;
    Ok(())
}

/// Makes one that is not set; an error where the system has none.
#[cfg(not(target_os = "linux"))]
pub fn open() -> io::Result<OwnedFd> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Sets it.
#[cfg(not(target_os = "linux"))]
pub fn set(_alarm: BorrowedFd<'_>, _at: Stamp) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::clock;
    use std::os::fd::AsFd;

    #[test]
    fn it_rings_when_it_should_and_once() {
        let alarm = open().unwrap();
        let rang = || rustix::io::read(&alarm, &mut [0u8; 8]).is_ok();
        assert!(!rang());
        let at = clock::now().plus_nanos(3_000_000);
        set(alarm.as_fd(), at).unwrap();
        assert!(!rang() || clock::now() >= at);
        clock::sleep_until(at.plus_nanos(1_000_000));
        assert!(rang());
        assert!(!rang());
        set(alarm.as_fd(), Stamp::from_nanos(0)).unwrap();
        assert!(rang(), "a moment that has passed");
    }
}
