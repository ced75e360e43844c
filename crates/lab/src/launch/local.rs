//! A program on this machine, on the same terminal, as if it had been typed.

use super::{Driver, Launcher, Program};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use wattle_core::registry::About;
use wattle_meter::child::Child;

pub(super) const DRIVER: Driver = Driver {
    about: About { name: "local", about: "a process on this machine", options: &[] },
    open: || Box::new(Local),
};

struct Local;

impl Launcher for Local {
    fn start(&self, program: &Program) -> io::Result<Child> {
        let mut command = Command::new(&program.path);
        // Programs that do several things look at the name they were called by.
        if let Some((name, arguments)) = program.command.split_first() {
            command.arg0(name).args(arguments);
        }
        command.current_dir(&program.working_dir);
        command.envs(program.environment.iter().map(|(name, value)| (name, value)));
        Child::spawn(&mut command)
    }
}
