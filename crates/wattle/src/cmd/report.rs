//! `wattle report`.

use crate::args::ReportArgs;
use crate::cmd::print;
use anyhow::Result;
use std::process::ExitCode;
use wattle_serve::report::{ReportError, write};

/// Writes the report and says where.
pub(crate) fn report(args: &ReportArgs) -> Result<ExitCode> {
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
