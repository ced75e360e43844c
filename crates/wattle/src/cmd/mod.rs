//! The commands, one file each: words to calls, results to the screen.

pub(crate) mod calibrate;
pub(crate) mod doctor;
pub(crate) mod exec;
pub(crate) mod list;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod sweep;

use std::io::Write;
use wattle_core::metrics::WHOLE;
use wattle_core::spec::Energy;
use wattle_core::summary::Summary;

/// Prints a result. A reader that went away (`| head`) is no error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e.into()),
        _ => Ok(()),
    }
}

/// Shows something to people, beside the output of a command.
pub(crate) fn show(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// Whether nothing but measured energy would do, and some of it is missing.
pub(crate) fn unmeasured(summary: &Summary) -> bool {
    let coverage = summary.metrics.get("energy_coverage").and_then(|m| m.value);
    summary.config.energy == Energy::Measured && coverage.is_none_or(|c| c < WHOLE)
}

/// Prints a result as JSON.
pub(crate) fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    print(&format!("{}\n", serde_json::to_string_pretty(value)?))
}
