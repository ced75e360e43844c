//! The binary: what you type. Results go to stdout, everything else to stderr; exit codes are 0, 1, 2, 130, 143.
#![allow(clippy::print_stdout, clippy::print_stderr)] // This is the place where things are printed.

mod args;
mod cmd;
mod config;
mod render;

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => cmd::run::run(&args),
        Command::Report(args) => cmd::report::report(&args),
        Command::Doctor(args) => cmd::doctor::doctor(&args),
        Command::List(args) => cmd::list::list(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("wattle: {}", message(&error));
        if let Some(wattle_lab::LabError::Stopped(cause)) = error.downcast_ref() {
            return ExitCode::from(cmd::run::exit_code(*cause));
        }
        let usage = error.is::<config::Usage>()
            || error.downcast_ref::<wattle_lab::LabError>().is_some_and(wattle_lab::LabError::is_usage)
            || error.downcast_ref::<wattle_meter::source::OpenError>().is_some();
        ExitCode::from(if usage { 2 } else { 1 })
    })
}

/// The error and its causes, each said once: many messages hold their cause already.
fn message(error: &anyhow::Error) -> String {
    error.chain().skip(1).map(ToString::to_string).fold(error.to_string(), |text, cause| {
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}
