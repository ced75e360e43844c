//! `wattle run`.

use crate::args::{Format, RunArgs};
use crate::cmd::{print, print_json, unmeasured};
use crate::config;
use crate::render;
use anyhow::Result;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use wattle_lab::run::{Progress, What, run as run_lab};
use wattle_lab::{Destination, LabError, Stop, StopCause};
use wattle_store::RunDir;

/// Runs and shows the result.
pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    if let Some(sweep) = sweep_of(args) {
        return super::sweep::sweep(args, &sweep);
    }
    let what = match &args.resume {
        Some(run) => What::Resume { run: run.clone(), changes: config::flags(&args.spec)? },
        None => What::New {
            spec: Box::new(config::spec(args.from.as_deref(), args.config.as_deref(), &args.spec)?),
            destination: Destination {
                out: args.out.clone(),
                name: args.name.clone(),
                overwrite: args.overwrite || may_replace(&args.out, args.name.as_deref())?,
            },
        },
    };
    let stop = Stop::default();
    end_on_signals(stop.clone())?;
    let bar = Bar::new();
    let ended = run_lab(what, &stop, &mut |progress| bar.show(progress));
    bar.0.finish_and_clear();
    if let Err(LabError::GaveUp { run, .. }) = &ended {
        // What had finished is worth a look.
        let report = wattle_serve::report::write(run, None).ok();
        if let Some(summary) = RunDir::open(run)?.summary()? {
            match args.format {
                Format::Json => print_json(&summary)?,
                Format::Table => print(&render::cut_off(&summary, run, report.as_deref()))?,
            }
        }
    }
    let ended = ended?;
    // The report is a convenience; a run is no worse for lacking it.
    let report = wattle_serve::report::write(&ended.run, None);
    if let Err(error) = &report {
        eprintln!("wattle: no report was written: {error}");
    }
    match args.format {
        Format::Json => print_json(&ended.summary)?,
        Format::Table => print(&render::result(&ended, report.ok().as_deref()))?,
    }
    if let Some(cause) = ended.stopped {
        match ended.summary.config.duration_s {
            None => {
                tell(&format!("wattle: stopped; go on with: wattle run --resume {}", ended.run.display()))
            }
            Some(_) => tell("wattle: stopped; a run by time has no rest to go on with"),
        }
        return Ok(ExitCode::from(exit_code(cause)));
    }
    if unmeasured(&ended.summary) {
        eprintln!("wattle: --energy measured was asked for, and not all of the energy was measured");
        return Ok(ExitCode::FAILURE);
    }
    let count = |name: &str| ended.summary.metrics.get(name).and_then(|m| m.value);
    if count("errors") == count("queries") {
        eprintln!("wattle: no query was answered");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// What is to be swept, if anything is.
fn sweep_of(args: &RunArgs) -> Option<String> {
    let rates: Vec<String> = args.spec.rate.iter().map(ToString::to_string).collect();
    match &args.sweep {
        Some(sweep) => Some(sweep.clone()),
        None => (rates.len() > 1).then(|| format!("rate={}", rates.join(","))),
    }
}

/// Asks before a run is replaced, where there is somebody to ask.
pub(crate) fn may_replace(out: &Path, name: Option<&str>) -> Result<bool> {
    let Some(path) = name.map(|n| out.join(n)).filter(|p| p.exists()) else {
        return Ok(false);
    };
    if !std::io::stdin().is_terminal() {
        return Ok(false);
    }
    eprint!("{} exists. Replace it? All its data will be removed. [y/N] ", path.display());
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// The exit code of a run that was stopped.
pub(crate) const fn exit_code(cause: StopCause) -> u8 {
    match cause {
        StopCause::Interrupt => 130,
        StopCause::Terminate => 143,
    }
}

/// How long a run that is stopped at once may take to write what has finished.
const PATIENCE: Duration = Duration::from_secs(2);

/// The first signal ends the run in good order, the second at once. Nothing finished is lost either way, and a server that was started
/// for the run is gone: a third signal changes nothing, because the end is near.
pub(crate) fn end_on_signals(stop: Stop) -> Result<()> {
    let mut heard = vec![SIGINT, SIGTERM];
    // Under nohup the terminal may go.
    if !wattle_meter::child::ignores(SIGHUP) {
        heard.push(SIGHUP);
    }
    let mut signals = signal_hook::iterator::Signals::new(heard)?;
    std::thread::Builder::new().name("wattle-signals".into()).spawn(move || {
        for signal in signals.forever() {
            let cause = if signal == SIGINT { StopCause::Interrupt } else { StopCause::Terminate };
            if stop.hurries() {
                continue;
            }
            if stop.cause().is_none() {
                stop.press(cause);
                tell("\nwattle: stopping; once more to stop at once");
                continue;
            }
            stop.hurry();
            // What has finished is written meanwhile; a disk that hangs must not keep us.
            std::thread::spawn(move || {
                std::thread::sleep(PATIENCE);
                std::process::exit(exit_code(cause).into());
            });
        }
    })?;
    Ok(())
}

/// Says it to whoever is still there: a terminal that hung up is no reason to panic.
fn tell(text: &str) {
    let _ = io::Write::write_all(&mut io::stderr(), format!("{text}\n").as_bytes());
}

/// The progress bar, on a terminal; on anything else, nothing.
pub(crate) struct Bar(pub(crate) ProgressBar);

impl Bar {
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    pub(crate) fn show(&self, progress: Progress) {
        let bar = &self.0;
        match progress {
            Progress::Stage(stage) => bar.set_message(stage),
            Progress::Start { total, done, .. } => {
                let template = match total {
                    Some(_) => "{wide_bar} {pos}/{len} {rate} ETA {eta} {msg}",
                    None => "{spinner} {elapsed} {pos} done {rate} {msg}",
                };
                if let Ok(style) = ProgressStyle::with_template(template) {
                    let rate = |state: &ProgressState, out: &mut dyn Write| {
                        let _ = write!(out, "{:.0}/s", state.per_sec());
                    };
                    bar.set_style(style.with_key("rate", rate));
                }
                if let Some(total) = total {
                    bar.set_length(total);
                }
                bar.set_position(done);
                bar.reset_eta();
                bar.set_message("");
            }
            Progress::Load { .. } => {
                if let Progress::Load { done, .. } = progress {
                    bar.set_position(done);
                }
                bar.set_message(render::live(&progress));
            }
        }
    }
}
