//! Launchers: one file each, and two adjacent lines here. They start programs.

mod local;

use std::io;
use std::path::PathBuf;
use wattle_core::registry::{About, Unknown, find};
use wattle_meter::child::Child;

/// Every launcher there is.
pub const DRIVERS: &[Driver] = &[local::DRIVER];

/// How a launcher is found and opened.
pub struct Driver {
    /// Its name, one line, its options.
    pub about: About,
    /// Opens it.
    pub open: fn() -> Box<dyn Launcher>,
}

/// What to start.
#[derive(Debug, Clone)]
pub struct Program {
    /// The file.
    pub path: PathBuf,
    /// What it is called as, then its arguments.
    pub command: Vec<String>,
    /// The folder to start it in.
    pub working_dir: PathBuf,
    /// Variables beside those that it inherits.
    pub environment: Vec<(&'static str, PathBuf)>,
}

/// Starts programs.
pub trait Launcher {
    /// Starts one.
    fn start(&self, program: &Program) -> io::Result<Child>;
}

/// Opens the launcher of that name.
pub fn open(name: &str) -> Result<Box<dyn Launcher>, Unknown> {
    Ok((find("launcher", DRIVERS, |d| d.about, name)?.open)())
}
