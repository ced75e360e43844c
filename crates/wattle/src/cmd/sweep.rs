//! `wattle run --sweep`: several runs, one table, one curve.

use crate::args::{Format, RunArgs};
use crate::cmd::run::{Bar, end_on_signals, exit_code};
use crate::cmd::{print, print_json};
use crate::config::{self, Usage};
use crate::render;
use anyhow::Result;
use std::process::ExitCode;
use wattle_core::sweep::Sweep;
use wattle_lab::sweep::{Step, sweep as sweep_lab};
use wattle_lab::{Destination, Stop};

/// Sweeps and shows what was found.
pub(crate) fn sweep(args: &RunArgs, text: &str) -> Result<ExitCode> {
    let spec = config::spec(args.from.as_deref(), args.config.as_deref(), &args.spec)?;
    let plan = Sweep::parse(text, &spec).map_err(|why| Usage(format!("--sweep {why}")))?;
    let destination =
        Destination { out: args.out.clone(), name: args.name.clone(), overwrite: args.overwrite };
    let stop = Stop::default();
    end_on_signals(stop.clone())?;
    let bar = Bar::new();
    let mut doubts: Vec<String> = Vec::new();
    let mut step = |step: Step<'_>| {
        let text = match step {
            Step::Begins { key, value } => format!("{key} = {value}"),
            Step::Ended(summary) => {
                let new = summary.warnings.iter().map(|w| &w.text).filter(|t| !doubts.contains(t)).cloned();
                let new: Vec<String> = new.collect();
                doubts.extend(new);
                render::point(summary)
            }
        };
        bar.0.suspend(|| eprintln!("{text}"));
    };
    let (swept, stopped) =
        sweep_lab(&plan, &spec, &destination, &stop, &mut step, &mut |progress| bar.show(progress))?;
    bar.0.finish_and_clear();
    let report = super::report::sweep(&swept.output_dir, &swept);
    if let (Err(error), false) = (&report, swept.points.is_empty()) {
        eprintln!("wattle: no report was written: {error}");
    }
    match args.format {
        Format::Json => print_json(&swept)?,
        Format::Table => print(&render::sweep(&swept, &plan, &doubts, report.ok().as_deref()))?,
    }
    Ok(match stopped {
        Some(cause) => {
            let name = swept.output_dir.file_name().unwrap_or_default().to_string_lossy();
            eprintln!("wattle: stopped; go on with the same call and --name {name}");
            ExitCode::from(exit_code(cause))
        }
        None if swept.points.is_empty() => ExitCode::FAILURE,
        None => ExitCode::SUCCESS,
    })
}
