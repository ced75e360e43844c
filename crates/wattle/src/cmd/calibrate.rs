//! `wattle calibrate`.

use crate::args::{CalibrateArgs, Format};
use crate::cmd::run::{Bar, end_on_signals};
use crate::cmd::{print, print_json};
use crate::config;
use crate::render::wrapped;
use anyhow::Result;
use indicatif::ProgressStyle;
use std::path::Path;
use std::process::ExitCode;
use wattle_core::calibration::{CONDITION_LIMIT, Effort};
use wattle_core::units::si;
use wattle_lab::Stop;
use wattle_lab::calibrate::{Asked, Calibrated, Step, calibrate as calibrate_lab};

/// Calibrates and shows what was found.
pub(crate) fn calibrate(args: &CalibrateArgs) -> Result<ExitCode> {
    let level = match (args.quick, args.thorough) {
        (true, _) => Effort::Quick,
        (_, true) => Effort::Thorough,
        _ => Effort::Default,
    };
    let asked = Asked {
        spec: config::spec(None, args.config.as_deref(), &args.spec)?,
        level,
        max_concurrency: args.max_concurrency,
        out: args.out.clone(),
    };
    let stop = Stop::default();
    end_on_signals(stop.clone())?;
    let Bar(bar) = Bar::new();
    let done = calibrate_lab(asked, &stop, &mut |step| match step {
        Step::Stage(stage) => bar.set_message(stage),
        Step::Plan { loads, seconds } => {
            bar.suspend(|| eprintln!("{}", planned(loads, seconds)));
            bar.set_length(loads);
            bar.set_message("");
        }
        Step::Load { done } => {
            if done == 0 {
                if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} loads, ETA {eta}") {
                    bar.set_style(style);
                }
                bar.reset_eta();
            }
            bar.set_position(done);
        }
        Step::Again { why } => bar.suspend(|| eprintln!("wattle: a load will be measured again: {why}")),
    });
    bar.finish_and_clear();
    let done = done?;
    let warnings = done.calibration.warnings.iter().map(|w| wrapped(&format!("! {w}")));
    eprint!("{}", warnings.collect::<String>());
    match args.format {
        Format::Json => print_json(&done.calibration)?,
        Format::Table => print(&shown(&done))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What a calibration is about to do.
fn planned(loads: u64, seconds: f64) -> String {
    let time = if seconds < 100.0 { format!("{seconds:.0} s") } else { format!("{:.0} min", seconds / 60.0) };
    format!(
        "wattle: {loads} loads in random order, about {time}; leave the server and its devices alone meanwhile"
    )
}

/// The whole screen for a calibration.
fn shown(done: &Calibrated) -> String {
    let c = &done.calibration;
    let mut out = String::new();
    let devices = c.subject.devices.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ");
    let engine = c.subject.engine.as_deref().map_or_else(String::new, |e| format!(" ({e})"));
    out += &format!(
        "\n{}{engine} on {devices}, {} loads, each {} times, {:.0} s\n\n  {:34} {:>10}  {:22} time\n",
        c.subject.model,
        c.quality.cells,
        c.quality.repeats,
        c.duration_s,
        "above idle",
        "energy",
        "95 % interval"
    );
    let labels = [
        ("an iteration", 1.0),
        ("1000 prompt tokens", 1e3),
        ("a token", 1.0),
        ("1000 tokens looked back at", 1e3),
    ];
    for (i, (label, many)) in labels.into_iter().enumerate() {
        let (value, bound) = (c.joules.parts()[i] * many, c.bound.parts()[i] * many);
        let interval = format!("{} to {}", si((value - bound).max(0.0), "J"), si(value + bound, "J"));
        let seconds = si(c.seconds.parts()[i] * many, "s");
        out += &format!("  {label:34} {:>10}  {interval:22} {seconds}\n", si(value, "J"));
    }
    let percent = |x: f64| format!("{:.1} %", x * 100.0);
    let missed = c.quality.residuals.iter().map(|(ladder, x)| format!("{} {}", ladder.name(), percent(*x)));
    let missed = missed.collect::<Vec<_>>().join(", ");
    for (label, text) in [
        ("idle power", format!("{} ± {}", si(c.idle_w.value().get(), "W"), si(c.idle_w.bound().get(), "W"))),
        ("gain error of the sensors, on top", percent(c.gain)),
        (
            "explained (R²)",
            format!("{} of energy, {} of time", percent(c.quality.r2), percent(c.quality.seconds_r2)),
        ),
        ("condition number", format!("{:.1} (refused above {CONDITION_LIMIT:.0})", c.quality.condition)),
        ("missed, by ladder", missed),
    ] {
        out += &format!("  {label:34} {text}\n");
    }
    out += &format!("\nKept in {}\n{}\n", done.path.display(), used(done));
    out
}

/// What runs will do with it.
fn used(done: &Calibrated) -> String {
    let here = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let by_name = format!("use it with --calibration {}", done.path.display());
    match &done.found {
        Some(found) if here(found) == here(&done.path) => {
            "Runs of this model, engine and device split energy by it from now on.".into()
        }
        Some(found) => format!(
            "Runs of this model, engine and device go on with {}, which is more thorough or where they look; {by_name}, or remove that one.",
            found.display()
        ),
        None => format!("Runs do not look there; {by_name}."),
    }
}
