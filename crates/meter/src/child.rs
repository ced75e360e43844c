//! A program that is started and measured: its end to the microsecond, and what the system says it used.
#![allow(unsafe_code)] // No safe crate waits for a child and tells what it used.

use crate::clock;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use wattle_core::time::Stamp;
use wattle_core::units::Seconds;

/// A program that runs.
#[derive(Debug, Clone, Copy)]
pub struct Child {
    pid: Pid,
    /// Just before it was started.
    pub start: Stamp,
    /// Most memory that this process had held by then: the system counts it as the program's own, because it began as a copy.
    inherited: u64,
}

/// How a program ended and what it used, with everything it waited for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Used {
    /// What it returned; `None` if a signal ended it.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// CPU time in user mode.
    pub user: Seconds,
    /// CPU time in the kernel.
    pub system: Seconds,
    /// Most memory that any one process held, in bytes; `None` if it was less than this process held when it started the program.
    pub peak_rss: Option<u64>,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// What it returned; `None` if a signal ended it.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
}

/// Makes this process the parent of whatever its children leave behind, so that it stays in the tree below this one.
pub fn adopt_orphans() {
    // Who ignores SIGCHLD, as whoever started us may have, never learns what a child returned.
    // SAFETY: sets the default, which runs no code of ours.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
}

/// Whether whoever started this process told it to ignore a signal, as `nohup` does.
pub fn ignores(signal: i32) -> bool {
    // SAFETY: a structure of numbers, for which zero is a value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: sets nothing, and the place can be written to for the whole of the call.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) };
    asked == 0 && action.sa_sigaction == libc::SIG_IGN
}

impl Child {
    /// Starts a program.
    pub fn spawn(command: &mut Command) -> io::Result<Child> {
        let start = clock::now();
        let child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        // What the standard library keeps of it is not needed: dropping it neither ends nor waits for the program.
        Ok(Child { pid: pid.ok_or(io::ErrorKind::InvalidData)?, start, inherited: own_peak() })
    }

    /// Starts a program at the head of a process group of its own. The system kills it when the calling thread ends, as it does with
    /// the whole process: call it on a thread that stays.
    pub fn spawn_bound(command: &mut Command) -> io::Result<Child> {
        command.process_group(0);
        #[cfg(target_os = "linux")]
        {
            let parent = rustix::process::getpid();
            let bind = move || {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                // Whoever died before that would never be missed.
                let orphaned = rustix::process::getppid() != Some(parent);
                if orphaned { Err(io::Error::from_raw_os_error(libc::ESRCH)) } else { Ok(()) }
            };
            // SAFETY: between fork and exec it makes system calls only, and allocates nothing.
            unsafe { command.pre_exec(bind) };
        }
        Self::spawn(command)
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Sends it a signal. It must not have been reaped.
    pub fn signal(&self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            let _ = rustix::process::kill_process(self.pid, signal);
        }
    }

    /// Sends a signal to the process group that it heads. It must not have been reaped.
    pub fn signal_group(&self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            let _ = rustix::process::kill_process_group(self.pid, signal);
        }
    }

    /// How it ended, if it has; it still has to be [reaped](Child::reap).
    pub fn end(&self) -> Option<End> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let status = rustix::process::waitid(WaitId::Pid(self.pid), options).ok()??;
        Some(End { exit_code: status.exit_status(), signal: status.terminating_signal() })
    }

    /// Waits for its end and says when that was; it still has to be [reaped](Child::reap).
    pub fn wait(&self) -> io::Result<Stamp> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        loop {
            match rustix::process::waitid(WaitId::Pid(self.pid), options) {
                Err(rustix::io::Errno::INTR) => {}
                result => return result.map(|_| clock::now()).map_err(Into::into),
            }
        }
    }

    /// What became of it, once it has ended.
    pub fn reap(self) -> io::Result<Used> {
        let used = wait4(self.pid.as_raw_nonzero().get(), 0)?.ok_or(io::ErrorKind::NotFound)?;
        Ok(Used { peak_rss: used.peak_rss.filter(|peak| *peak > self.inherited), ..used })
    }
}

/// Whether the process of that number is one that was started at `start`, in this boot. Numbers are used again.
pub fn runs_since(pid: u32, start: Stamp) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // After the name, which may hold anything, come the state and then numbers; the 20th field is its start, in ticks since boot.
    let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let zombie = fields.next() == Some("Z");
    let ticks = fields.nth(18).and_then(|t| t.parse::<f64>().ok());
    let began = ticks.map(|t| t / rustix::param::clock_ticks_per_second() as f64);
    // The kernel counts on while the machine sleeps; the monotonic clock does not.
    let asleep = clock::since_boot().get() - clock::now().nanos() as f64 * 1e-9;
    !zombie && began.is_some_and(|b| (b - asleep - start.nanos() as f64 * 1e-9).abs() < 2.0)
}

/// What adopted orphans that have ended used, each of them, and whether others still run.
pub fn reap_orphans() -> (Vec<Used>, bool) {
    let mut ended = Vec::new();
    loop {
        match wait4(-1, libc::WNOHANG) {
            Ok(Some(used)) => ended.push(used),
            Ok(None) => return (ended, true),
            // Nobody left to wait for.
            Err(_) => return (ended, false),
        }
    }
}

fn wait4(pid: i32, options: i32) -> io::Result<Option<Used>> {
    let mut status = 0;
    // SAFETY: numbers and arrays of numbers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let found = loop {
        // SAFETY: both places can be written to for the whole of the call.
        let found = unsafe { libc::wait4(pid, &mut status, options, &mut usage) };
        if found >= 0 {
            break found;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    };
    Ok((found > 0).then(|| used(status, &usage)))
}

/// Most memory that this process has held.
fn own_peak() -> u64 {
    // SAFETY: as in `wait4`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the place can be written to for the whole of the call; it fails for nobody's own usage.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    peak_of(&usage)
}

fn peak_of(usage: &libc::rusage) -> u64 {
    // Linux counts in KiB, macOS in bytes.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    u64::try_from(usage.ru_maxrss).unwrap_or(0) * unit
}

fn used(status: i32, usage: &libc::rusage) -> Used {
    let seconds = |t: libc::timeval| Seconds(t.tv_sec as f64 + t.tv_usec as f64 * 1e-6);
    let exited = libc::WIFEXITED(status);
    Used {
        exit_code: exited.then(|| libc::WEXITSTATUS(status)),
        signal: (!exited).then(|| libc::WTERMSIG(status)),
        user: seconds(usage.ru_utime),
        system: seconds(usage.ru_stime),
        peak_rss: Some(peak_of(usage)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str) -> (Child, Stamp, Used) {
        let child = Child::spawn(Command::new("sh").args(["-c", script])).unwrap();
        let end = child.wait().unwrap();
        (child, end, child.reap().unwrap())
    }

    #[test]
    fn its_code_its_signal_and_what_it_used_are_told() {
        let (child, end, used) = run("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; exit 7");
        assert_eq!((used.exit_code, used.signal), (Some(7), None));
        assert!(end > child.start && used.user.get() > 0.0, "{used:?}");
        let (_, _, used) = run("kill -9 $$");
        assert_eq!((used.exit_code, used.signal), (None, Some(9)));
    }

    #[test]
    fn memory_is_its_own_and_not_what_it_began_as() {
        let (_, _, used) = run("true");
        assert_eq!(used.peak_rss, None);
        // More than this process holds.
        let held = own_peak() + (64 << 20);
        let (_, _, used) = run(&format!("head -c {held} /dev/zero | tail -n 1 > /dev/null"));
        assert!(used.peak_rss.is_some_and(|peak| peak > held), "{used:?}");
    }

    #[test]
    fn a_signal_reaches_it() {
        let child = Child::spawn(Command::new("sleep").arg("600")).unwrap();
        child.signal(15);
        child.wait().unwrap();
        assert_eq!(child.reap().unwrap().signal, Some(15));
    }

    #[test]
    fn a_group_is_signalled_as_a_whole_and_its_end_is_seen_before_it_is_reaped() {
        // The shell waits for a sleep that only the group's signal reaches.
        let child = Child::spawn_bound(Command::new("sh").args(["-c", "sleep 600 & wait"])).unwrap();
        assert_eq!(child.end(), None);
        child.signal_group(9);
        child.wait().unwrap();
        assert_eq!(child.end(), Some(End { exit_code: None, signal: Some(9) }));
        assert_eq!(child.reap().unwrap().signal, Some(9));
        assert_eq!(child.end(), None, "nobody is left to ask");
    }

    #[test]
    fn a_process_is_known_again_and_another_of_its_number_is_not() {
        let child = Child::spawn(Command::new("sleep").arg("600")).unwrap();
        assert!(runs_since(child.pid(), child.start));
        assert!(!runs_since(child.pid(), child.start.minus_nanos(60_000_000_000)));
        child.signal(9);
        child.wait().unwrap();
        assert!(!runs_since(child.pid(), child.start), "it has ended");
        child.reap().unwrap();
    }

    #[test]
    fn what_is_not_there_cannot_be_started() {
        let error = Child::spawn(&mut Command::new("/no/such/program")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
