//! Everything that descends from a program that was started, so that it can be ended with all of it: also what left its process group,
//! and what lost its parent and was [adopted](crate::child::adopt_orphans) by this process.
//!
//! Whoever was once seen to belong stays in. Where there is no procfs nobody is ever seen, and only the process group remains.

use crate::source::procstat::tree::{Process, list};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions};

/// The kin of a program that this process starts. Other children that this process starts meanwhile would be taken for it.
#[derive(Debug)]
pub struct Kin {
    folder: Option<OwnedFd>,
    /// The program itself. Who began before it is no kin.
    head: Option<Id>,
    /// Everything below this process that has nothing to do with it.
    strangers: Vec<Id>,
    /// Process groups of strangers. Whoever a stranger starts and leaves to us is still in one of them.
    groups: Vec<u32>,
    members: Vec<Member>,
}

/// A process, told from a later one of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Id {
    pid: u32,
    start: u64,
}

#[derive(Debug, Clone, Copy)]
struct Member {
    id: Id,
    /// It had ended at the last look.
    ended: bool,
}

impl Kin {
    /// To be called before the program is started: who is there already is no kin of it.
    pub fn before() -> Self {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open("/proc", flags, Mode::empty()).ok();
        let mut kin =
            Self { folder, head: None, strangers: Vec::new(), groups: Vec::new(), members: Vec::new() };
        let all = kin.processes().unwrap_or_default();
        let own = std::process::id();
        for process in all.iter().filter(|p| p.parent == own) {
            kin.strangers.push(id(process));
        }
        kin.know_strangers(&all);
        kin.groups =
            all.iter().filter(|p| p.pid == own || kin.strangers.contains(&id(p))).map(|p| p.group).collect();
        kin
    }

    /// The program was started.
    pub fn begin(&mut self, head: u32) {
        self.head = self.read(head).as_ref().map(id);
    }

    /// A child of this process that is no kin either.
    pub fn spare(&mut self, pid: u32) {
        let process = self.read(pid);
        self.strangers.extend(process.as_ref().map(id));
    }

    /// Looks who belongs to it by now.
    pub fn look(&mut self) {
        let Some(all) = self.processes() else { return };
        // First who is gone: another may have its number.
        self.strangers.retain(|s| all.iter().any(|p| id(p) == *s));
        self.members.retain(|m| all.iter().any(|p| id(p) == m.id));
        self.know_strangers(&all);
        // Again and again, because a child may be listed before its parent.
        loop {
            let before = self.members.len();
            for process in &all {
                if !self.has(id(process)) && self.belongs(process) {
                    self.members.push(Member { id: id(process), ended: process.ended });
                }
            }
            if self.members.len() == before {
                break;
            }
        }
        for member in &mut self.members {
            member.ended = all.iter().any(|p| id(p) == member.id && p.ended);
        }
    }

    /// Whether any of it ran at the last look.
    pub fn lives(&self) -> bool {
        self.members.iter().any(|m| !m.ended)
    }

    /// Kills all that was seen to run and still does.
    pub fn kill(&self) {
        for member in self.members.iter().filter(|m| !m.ended) {
            self.kill_one(member.id);
        }
    }

    /// Lets go of those that have ended and are children of this process, all but the program itself.
    pub fn reap(&mut self) {
        let head = self.head;
        self.members.retain(|member| {
            // Nobody else can have the number of one that ended and was not let go of.
            let reaped = member.ended
                && Some(member.id) != head
                && pid(member.id).is_some_and(|pid| {
                    matches!(rustix::process::waitpid(Some(pid), WaitOptions::NOHANG), Ok(Some(_)))
                });
            !reaped
        });
    }

    fn has(&self, id: Id) -> bool {
        self.members.iter().any(|m| m.id == id)
    }

    /// Takes children of strangers for strangers.
    fn know_strangers(&mut self, all: &[Process]) {
        loop {
            let before = self.strangers.len();
            for process in all {
                let theirs = self.strangers.iter().any(|s| s.pid == process.parent);
                if theirs && !self.has(id(process)) && !self.strangers.contains(&id(process)) {
                    self.strangers.push(id(process));
                }
            }
            if self.strangers.len() == before {
                return;
            }
        }
    }

    /// Whether a process that is neither member nor stranger yet belongs to the program.
    fn belongs(&self, process: &Process) -> bool {
        let Some(head) = self.head else { return false };
        if process.start < head.start || self.strangers.contains(&id(process)) {
            return false;
        }
        // One that heads its group made it, whoever had that number before.
        let in_old_group = process.group != process.pid && self.groups.contains(&process.group);
        id(process) == head
            || self.members.iter().any(|m| m.id.pid == process.parent)
            || (process.parent == std::process::id() && !in_old_group)
    }

    #[cfg(target_os = "linux")]
    fn kill_one(&self, target: Id) {
        use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};
        let Some(number) = pid(target) else { return };
        // Held before it is looked at, it cannot become another one in between.
        let held = pidfd_open(number, PidfdFlags::empty());
        if self.read(target.pid).is_none_or(|p| id(&p) != target || p.ended) {
            return;
        }
        let _ = match held {
            Ok(held) => pidfd_send_signal(held, Signal::KILL),
            // Before Linux 5.3.
            Err(_) => rustix::process::kill_process(number, Signal::KILL),
        };
    }

    /// Without procfs there are no members.
    #[cfg(not(target_os = "linux"))]
    fn kill_one(&self, _: Id) {}

    fn read(&self, pid: u32) -> Option<Process> {
        self.folder.as_ref().and_then(|folder| Process::read(folder, pid).ok())
    }

    /// All processes; `None` if they cannot be told.
    fn processes(&self) -> Option<Vec<Process>> {
        let folder = self.folder.as_ref()?;
        let mut ids = Vec::new();
        list(folder, &mut ids).ok()?;
        let mut all = Vec::with_capacity(ids.len());
        for pid in ids {
            match Process::read(folder, pid) {
                Ok(process) => all.push(process),
                // It is there, and we are not: no file can be opened.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => return None,
                Err(_) => {}
            }
        }
        Some(all)
    }
}

fn id(process: &Process) -> Id {
    Id { pid: process.pid, start: process.start }
}

fn pid(id: Id) -> Option<Pid> {
    i32::try_from(id.pid).ok().and_then(Pid::from_raw)
}
