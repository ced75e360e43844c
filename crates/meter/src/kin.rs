//! Everything that descends from a program that was started, so that it can be ended with all of it: also what left its process group,
//! and what lost its parent and was [adopted](crate::child::adopt_orphans) by this process.
//!
//! Whoever was once seen to belong stays in. Where there is no procfs nobody is ever seen, and only the process group remains.

use crate::source::procstat::tree::{Process, list};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, WaitOptions};

/// The kin of a program that this process starts. Other children that this process starts meanwhile would be taken for it.
#[derive(Debug)]
pub struct Kin {
    folder: Option<OwnedFd>,
    /// Children of this process that have nothing to do with it.
    strangers: Vec<Id>,
    members: Vec<Id>,
    /// Members that run.
    alive: usize,
}

/// A process, told from a later one of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Id {
    pid: u32,
    start: u64,
}

impl Kin {
    /// To be called before the program is started: who is there already is no kin of it.
    pub fn before() -> Self {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open("/proc", flags, Mode::empty()).ok();
        let mut kin = Self { folder, strangers: Vec::new(), members: Vec::new(), alive: 0 };
        let own = std::process::id();
        kin.strangers = kin.processes().iter().filter(|p| p.parent == own).map(id).collect();
        kin
    }

    /// A child of this process that is no kin either.
    pub fn spare(&mut self, pid: u32) {
        let process = self.folder.as_ref().and_then(|folder| Process::read(folder, pid).ok());
        self.strangers.extend(process.as_ref().map(id));
    }

    /// Looks who belongs to it by now.
    pub fn look(&mut self) {
        let own = std::process::id();
        let all = self.processes();
        // Again and again, because a child may be listed before its parent.
        loop {
            let before = self.members.len();
            for process in all.iter().filter(|p| !self.strangers.contains(&id(p))) {
                let ours = process.parent == own || self.members.iter().any(|m| m.pid == process.parent);
                if ours && !self.members.contains(&id(process)) {
                    self.members.push(id(process));
                }
            }
            if self.members.len() == before {
                break;
            }
        }
        self.members.retain(|m| all.iter().any(|p| id(p) == *m));
        self.alive = all.iter().filter(|p| !p.ended && self.members.contains(&id(p))).count();
    }

    /// Whether any of it ran at the last look.
    pub fn lives(&self) -> bool {
        self.alive > 0
    }

    /// Kills all that was seen to run.
    pub fn kill(&self) {
        for pid in self.members.iter().filter_map(|m| pid(*m)) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }

    /// Lets go of those that have ended and are children of this process, all but `head`.
    pub fn reap(&self, head: u32) {
        for pid in self.members.iter().filter(|m| m.pid != head).filter_map(|m| pid(*m)) {
            let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }

    fn processes(&self) -> Vec<Process> {
        let Some(folder) = &self.folder else { return Vec::new() };
        let mut ids = Vec::new();
        if list(folder, &mut ids).is_err() {
            return Vec::new();
        }
        ids.into_iter().filter_map(|pid| Process::read(folder, pid).ok()).collect()
    }
}

fn id(process: &Process) -> Id {
    Id { pid: process.pid, start: process.start }
}

fn pid(id: Id) -> Option<Pid> {
    i32::try_from(id.pid).ok().and_then(Pid::from_raw)
}
