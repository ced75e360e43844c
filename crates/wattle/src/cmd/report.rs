//! `wattle report`.

use crate::args::ReportArgs;
use crate::cmd::print;
use anyhow::Result;
use std::process::ExitCode;

/// Writes the report and says where.
pub(crate) fn report(args: &ReportArgs) -> Result<ExitCode> {
    let path = wattle_serve::report::write(&args.run, args.out.as_deref())?;
    print(&format!("{}\n", path.display()))?;
    Ok(ExitCode::SUCCESS)
}
