//! The binary: what you type. Results go to stdout, everything else to stderr; exit codes are 0, 1, 2, 130, 143, and of `exec` those of
//! its command, 126 and 127.
#![allow(clippy::print_stdout, clippy::print_stderr)] // This is the place where things are printed.

mod args;
mod chart;
mod cmd;
mod config;
mod render;

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;
use wattle_lab::LabError;

fn main() -> ExitCode {
    // A file that may not grow any more (ulimit -f) is a full disk, and not the end of us.
    let full = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, full);
    let result = match Cli::parse().command {
        Command::Run(args) => cmd::run::run(&args),
        Command::Exec(args) => cmd::exec::exec(&args),
        Command::Calibrate(args) => cmd::calibrate::calibrate(&args),
        Command::Report(args) => cmd::report::report(&args),
        Command::Doctor(args) => cmd::doctor::doctor(&args),
        Command::List(args) => cmd::list::list(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("wattle: {}", message(&error));
        ExitCode::from(code(&error))
    })
}

/// Shells give the last three to a program that was interrupted, is not one, is not there.
fn code(error: &anyhow::Error) -> u8 {
    match error.downcast_ref() {
        Some(LabError::Stopped(cause) | LabError::Hurried { cause, .. }) => cmd::run::exit_code(*cause),
        Some(LabError::NoProgram { found: false, .. }) => 127,
        Some(LabError::NoProgram { .. } | LabError::NotStarted { .. }) => 126,
        // The command's own end, if it has one to tell.
        Some(LabError::After { code, .. }) if *code != 0 => u8::try_from(code & 0xff).unwrap_or(1),
        Some(error) if error.is_usage() => 2,
        _ if error.is::<config::Usage>() || error.is::<wattle_meter::source::OpenError>() => 2,
        _ => 1,
    }
}

/// The error and its causes, each said once: many messages hold their cause already.
fn message(error: &anyhow::Error) -> String {
    error.chain().skip(1).map(ToString::to_string).fold(error.to_string(), |text, cause| {
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}
