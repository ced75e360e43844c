//! `wattle exec`.

use crate::args::{ExecArgs, Format};
use crate::cmd::run::may_replace;
use crate::cmd::{print_json, show, unmeasured};
use crate::config;
use crate::render;
use anyhow::Result;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use std::process::ExitCode;
use wattle_lab::Destination;
use wattle_lab::exec::{OnFailure, Signal, Signals, What, exec as exec_lab, signals};

/// Runs the command, shows what it drew, and ends as it did.
pub(crate) fn exec(args: &ExecArgs) -> Result<ExitCode> {
    let what = match &args.resume {
        Some(run) => What::Resume(run.clone()),
        None => What::New {
            spec: Box::new(config::spec(None, args.config.as_deref(), &args.spec)?),
            destination: Destination {
                out: args.out.clone(),
                name: args.name.clone(),
                overwrite: args.overwrite || may_replace(&args.out, args.name.as_deref())?,
            },
        },
    };
    let (send, mut receive) = signals();
    catch_signals(send)?;
    let on_failure = if args.keep_going { OnFailure::GoOn } else { OnFailure::Stop };
    let ended = exec_lab(what, on_failure, &mut receive)?;
    let report = wattle_serve::report::write(&ended.run, None);
    if let Err(error) = &report {
        eprintln!("wattle: no report was written: {error}");
    }
    match args.format {
        Format::Json => print_json(&ended.summary)?,
        // Stdout is the command's.
        Format::Table => show(&render::command(&ended, report.ok().as_deref())),
    }
    if ended.code == 0 && unmeasured(&ended.summary) {
        eprintln!("wattle: --energy measured was asked for, and not all of the energy was measured");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::from(u8::try_from(ended.code & 0xff).unwrap_or(1)))
}

/// Hands every signal that a program may be told something with to the command.
fn catch_signals(to: Signals) -> Result<()> {
    let kinds = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];
    let mut caught = SignalsInfo::<WithOrigin>::new(kinds)?;
    std::thread::Builder::new().name("wattle-signals".into()).spawn(move || {
        for origin in caught.forever() {
            // The terminal's come from the kernel and go to everybody in the foreground.
            let from_terminal = matches!(origin.cause, Cause::Kernel);
            to.send(Signal { number: origin.signal, from_terminal });
        }
    })?;
    Ok(())
}
