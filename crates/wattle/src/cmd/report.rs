//! `wattle report`.

use crate::args::ReportArgs;
use crate::cmd::print;
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use wattle_core::sweep::Swept;
use wattle_serve::curve;
use wattle_serve::report::{ReportError, write};

/// Writes the report and says where.
pub(crate) fn report(args: &ReportArgs) -> Result<ExitCode> {
    if curve::is_sweep(&args.run) {
        let path = match &args.out {
            Some(out) => curve::write(&args.run, Some(out)),
            None => curve::read(&args.run).and_then(|swept| sweep(&args.run, &swept)),
        }?;
        print(&format!("{}\n", path.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let path = match write(&args.run, args.out.as_deref()) {
        // A run that was killed is summed up as far as it came.
        Err(ReportError::Unfinished(_)) => {
            wattle_lab::sum_up(&args.run)?;
            write(&args.run, args.out.as_deref())
        }
        written => written,
    }?;
    print(&format!("{}\n", path.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the reports of a sweep's runs, and that of the sweep.
pub(crate) fn sweep(folder: &Path, swept: &Swept) -> Result<PathBuf, ReportError> {
    for run in swept.points.iter().filter_map(|point| curve::run_folder(folder, point)) {
        // The report is a convenience; a run is no worse for lacking it.
        let _ = write(&run, None);
    }
    curve::write(folder, None)
}
