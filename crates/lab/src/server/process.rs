//! A server while it runs, and its end with everything it started, whatever becomes of us.

use super::plan::Plan;
use crate::Stop;
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use wattle_core::Stamp;
use wattle_meter::child::{Child, End, adopt_orphans};
use wattle_meter::clock;
use wattle_meter::kin::Kin;

/// How often its end is looked for.
pub(super) const LOOK: Duration = Duration::from_millis(20);
/// What a server left behind has this long to follow it.
const FOLLOW_S: f64 = 1.0;
/// Who does not die of a kill within this time is stuck in the kernel.
const STUCK_S: f64 = 5.0;
const KILL: i32 = 9;
const TERMINATE: i32 = 15;
/// The key of the client is not the server's.
const KEYS: &[&str] = &["OPENAI_API_KEY"];
/// Settings of ours are none of its business.
const SETTINGS: &str = "WATTLE_";

/// A server that runs, or has ended and not been let go of.
pub(super) struct Process {
    child: Child,
    kin: Kin,
    guard: Option<Guard>,
    patience: Duration,
    /// Who is in a hurry has no patience.
    stop: Stop,
    /// When it was asked to end, when it did, and when it was first killed.
    asked: Option<Stamp>,
    ended: Option<Stamp>,
    killed: Option<Stamp>,
    over: bool,
}

/// How a server was stopped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stopped {
    /// How it ended; `None` if it never did.
    pub(super) end: Option<End>,
    /// Whether it, or something it left behind, had to be killed.
    pub(super) killed: bool,
}

impl Process {
    /// Starts it, with its output to `log`. Once `stop` is in a hurry it is not asked to end, but killed.
    pub(super) fn start(plan: &Plan, program: &Path, log: File, stop: Stop) -> io::Result<Self> {
        adopt_orphans();
        let mut kin = Kin::before();
        let mut command = Command::new(program);
        if let Some((name, arguments)) = plan.words.split_first() {
            command.arg0(&name.told).args(arguments.iter().map(|word| &word.told));
        }
        command.current_dir(&plan.dir).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let ours = |name: &str| name.starts_with(SETTINGS) || KEYS.contains(&name);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(ours)) {
            command.env_remove(name);
        }
        command.envs(plan.environment.iter().map(|(name, value)| (name, value)));
        let child = Child::spawn_bound(&mut command)?;
        kin.begin(child.pid());
        let guard = Guard::over(&child).ok();
        if let Some(guard) = &guard {
            kin.spare(guard.0.id());
        }
        let patience = plan.stop;
        Ok(Self { child, kin, guard, patience, stop, asked: None, ended: None, killed: None, over: false })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.pid()
    }

    pub(super) fn started(&self) -> Stamp {
        self.child.start
    }

    /// How it ended, if it has.
    pub(super) fn end(&self) -> Option<End> {
        self.child.end()
    }

    /// Waits for its end.
    pub(super) async fn wait(&self) -> End {
        loop {
            match self.end() {
                Some(end) => return end,
                None => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// Ends it in good order, and everything it started.
    pub(super) async fn stop(mut self) -> Stopped {
        while !self.is_over() {
            tokio::time::sleep(LOOK).await;
        }
        Stopped { end: self.end(), killed: self.killed.is_some() }
    }

    /// One step towards its end: asks, waits, kills; true when nothing of it is left, or nothing helps.
    fn is_over(&mut self) -> bool {
        let now = clock::now();
        let since = |at: Option<Stamp>| at.map_or(0.0, |at| now.since(at).get());
        // Before it is asked: once a parent is gone, who knows whose the children were.
        self.kin.look();
        self.kin.reap();
        if self.asked.is_none() {
            self.child.signal_group(TERMINATE);
            self.asked = Some(now);
        }
        let ended = self.end().is_some();
        if ended {
            self.ended.get_or_insert(now);
        }
        let patience = self.patience.as_secs_f64();
        let tired = self.stop.hurries()
            || since(self.asked) >= patience
            || since(self.ended) >= FOLLOW_S.min(patience);
        if ended && !self.kin.lives() {
            self.over = true;
        } else if tired || self.killed.is_some() {
            self.killed.get_or_insert(now);
            // Its number is its group's as long as it was not reaped.
            self.child.signal_group(KILL);
            self.kin.kill();
            self.over = since(self.killed) >= STUCK_S;
        }
        self.over
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        while !self.over && !self.is_over() {
            std::thread::sleep(LOOK);
        }
        self.guard = None;
        if self.end().is_some() {
            // Where nobody can look who is left, somebody may be. Once it is reaped, its number is no longer its group's.
            self.child.signal_group(KILL);
            let _ = self.child.reap();
        }
    }
}

/// Kills the server's group when this process is gone, however it goes. The system by itself would kill the server alone and leave what
/// that had started.
struct Guard(std::process::Child);

impl Guard {
    /// It waits for the end of a pipe that only this process holds.
    fn over(child: &Child) -> io::Result<Self> {
        let group = child.pid().to_string();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "read -r _; kill -s KILL -- \"-$1\"", "wattle-guard", &group]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        command.env_clear().current_dir("/").process_group(0).spawn().map(Self)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Killed before its pipe is closed: there is nothing to do for it any more.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wattle_core::registry::Params;
    use wattle_core::spec::Spec;

    /// The only test of this crate that starts processes: others would be taken for the server's.
    #[test]
    fn a_panic_ends_it_too() {
        let command = "sh -c 'trap \"\" TERM; echo up; while :; do sleep 0.1; done'";
        let options = [("command", command), ("port", "1"), ("stop_s", "0.2")];
        let server: Params = options.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let plan = Plan::of(&Spec { server, ..Spec::default() }).unwrap().unwrap();
        let log = tempfile::NamedTempFile::new().unwrap();
        let process = Process::start(&plan, &plan.program().unwrap(), log.reopen().unwrap(), Stop::default());
        let process = process.unwrap();
        let path = format!("/proc/{}", process.pid());
        while std::fs::read(log.path()).unwrap().is_empty() {
            std::thread::sleep(LOOK);
        }
        let broken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _held = process;
            panic!("as it would in the middle of a run");
        }));
        assert!(broken.is_err() && !std::path::Path::new(&path).exists());
    }
}
