//! `wattle list`: what there is to choose from, straight from the slices of drivers.

use crate::args::{Format, ListArgs, Listed};
use crate::cmd::{print, print_json};
use anyhow::Result;
use serde_json::{Value, json};
use std::process::ExitCode;
use wattle_core::calibration::Calibration;
use wattle_core::metrics::METRICS;
use wattle_core::registry::About;
use wattle_lab::{calibrate, client, dataset, launch, score, server};
use wattle_meter::source;

/// Prints the list.
pub(crate) fn list(args: &ListArgs) -> Result<ExitCode> {
    let rows = match args.kind {
        Listed::Clients => drivers(client::DRIVERS.iter().map(|d| d.about)),
        Listed::Datasets => drivers(dataset::DRIVERS.iter().map(|d| d.about)),
        Listed::Scorers => drivers(score::DRIVERS.iter().map(|d| d.about)),
        Listed::Launchers => drivers(launch::DRIVERS.iter().map(|d| d.about)),
        Listed::Servers => {
            let presets =
                server::PRESETS.iter().map(|p| About { name: p.name, about: p.about, options: &[] });
            let options = About {
                name: "(options)",
                about: "given as --server KEY=VALUE, with a preset or with a command",
                ..server::ABOUT
            };
            drivers(presets.chain([options]))
        }
        Listed::Sources => drivers(source::DRIVERS.iter().map(|d| d.about)),
        Listed::Models => {
            rows(client::embedded::MODELS.iter().map(|m| (m.name.to_owned(), m.about.to_owned())))
        }
        Listed::Calibrations => calibrations(),
        Listed::Metrics => {
            rows(METRICS.iter().map(|m| (m.name.to_owned(), format!("[{}] {}", m.unit, m.definition))))
        }
    };
    match args.format {
        Format::Json => print_json(&rows)?,
        Format::Table => print(&table(&rows))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// One row for each file, newest first; then those that runs pass over, with the reason.
fn calibrations() -> Vec<Value> {
    let all = calibrate::folder().map(|folder| calibrate::list(&folder)).unwrap_or_default();
    let skipped = all.skipped.iter().map(|(path, why)| {
        eprintln!("wattle: a calibration is passed over: {why}");
        json!({ "name": "(passed over)", "about": why.to_string(), "path": path, "calibration": null })
    });
    let skipped: Vec<Value> = skipped.collect();
    let row = |(path, found): (std::path::PathBuf, Calibration)| {
        let subject = &found.subject;
        let devices = subject.devices.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ");
        let engine = subject.engine.as_deref().unwrap_or("unknown engine");
        let about = format!(
            "{} on {engine}, {devices}; {}, {} {}",
            subject.model,
            found.level.name(),
            found.created,
            path.display()
        );
        json!({ "name": &found.digest[..12.min(found.digest.len())], "about": about, "path": path, "calibration": found })
    };
    all.found.into_iter().map(row).chain(skipped).collect()
}

fn rows(rows: impl Iterator<Item = (String, String)>) -> Vec<Value> {
    rows.map(|(name, about)| json!({ "name": name, "about": about })).collect()
}

fn drivers(drivers: impl Iterator<Item = About>) -> Vec<Value> {
    let options = |about: &About| {
        about.options.iter().map(|o| json!({ "key": o.key, "about": o.about })).collect::<Vec<_>>()
    };
    drivers.map(|d| json!({ "name": d.name, "about": d.about, "options": options(&d) })).collect()
}

fn table(rows: &[Value]) -> String {
    let text = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let width = rows.iter().map(|r| text(r, "name").len()).max().unwrap_or(0);
    let mut out = String::new();
    for row in rows {
        out += &format!("{:width$}  {}\n", text(row, "name"), text(row, "about"));
        for option in row["options"].as_array().into_iter().flatten() {
            out += &format!("{:width$}    {:10}  {}\n", "", text(option, "key"), text(option, "about"));
        }
    }
    out
}
