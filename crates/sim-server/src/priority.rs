//! Keeps deadlines on a machine that others use too.
#![allow(unsafe_code, reason = "the scheduling class of a thread: rustix has it not")]

/// The lowest of the class: enough to go before all that is not in it.
const LOWEST: libc::c_int = 1;

/// From now on this thread, and none that it starts, runs whenever it has something to do. Says whether that was permitted.
pub(crate) fn first() -> bool {
    // SAFETY: all-zero is a set of parameters; 0 names this thread, and the kernel only reads.
    unsafe {
        let mut parameters: libc::sched_param = std::mem::zeroed();
        parameters.sched_priority = LOWEST;
        libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const parameters) == 0
    }
}
