//! `wattle doctor`: can energy be measured here, by what, and if not, what would change that.

use crate::args::DoctorArgs;
use crate::cmd::{print, print_json};
use anyhow::Result;
use serde_json::json;
use std::process::ExitCode;
use wattle_core::Method;
use wattle_core::sensor::{Panel, Sensor};
use wattle_meter::source::{self, Wanted};

/// Examines the machine; exit code 0 if energy can be measured.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<ExitCode> {
    let opened = source::open(&Wanted {
        params: args.source_param.iter().cloned().collect(),
        root: args.root.clone(),
        estimate: true,
        lenient: true,
        ..Wanted::default()
    })?;
    let sensors: Vec<Sensor> = opened.sources.iter().flat_map(|s| s.sensors().iter().cloned()).collect();
    let panel = Panel::choose(&sensors, None);
    let chosen: Vec<&Sensor> =
        panel.iter().flat_map(|p| &p.sensors).filter_map(|s| sensors.get(usize::from(s.0))).collect();
    let measurable = !chosen.is_empty() && chosen.iter().all(|s| s.energy_method() != Some(Method::Model));
    if args.json {
        print_json(&json!({
            "measurable": measurable,
            "perimeter": panel.as_ref().map(|p| p.perimeter),
            "panel": chosen.iter().map(|s| &s.name).collect::<Vec<_>>(),
            "sources": opened.tried,
            "sensors": sensors,
            "pretended": opened.pretended,
        }))?;
        return Ok(verdict(measurable));
    }
    let mut out = String::new();
    for tried in &opened.tried {
        match (&tried.unavailable, &tried.fix) {
            (Some(why), fix) => {
                out += &format!("  no   {:9} {why}\n", tried.name);
                out += &fix.as_ref().map_or_else(String::new, |f| format!("                 fix: {f}\n"));
            }
            (None, _) => {
                out += &format!("  yes  {:9}\n", tried.name);
                for sensor in sensors.iter().filter(|s| s.source == tried.name) {
                    out += &format!(
                        "                 {} [{}]  {}\n",
                        sensor.name,
                        sensor.quantity.unit(),
                        sensor.device.name
                    );
                }
            }
        }
    }
    for what in &opened.pretended {
        out += &format!("\n  ! pretended hardware: {what}\n");
    }
    let perimeter = panel.as_ref().map_or("none", |p| p.perimeter.name());
    out += &match measurable {
        true => format!("\nEnergy can be measured here (perimeter: {perimeter}).\n"),
        false if chosen.is_empty() => "\nEnergy can be neither measured nor estimated here.\n".to_owned(),
        false => {
            "\nEnergy cannot be measured here; \"wattle run\" will estimate it from CPU load and say so.\n"
                .to_owned()
        }
    };
    print(&out)?;
    Ok(verdict(measurable))
}

fn verdict(measurable: bool) -> ExitCode {
    if measurable { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
