//! `wattle doctor`: can energy be measured here, by what, how well, and if not, what would change that.

use crate::args::DoctorArgs;
use crate::cmd::{print, print_json};
use anyhow::Result;
use serde_json::json;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;
use wattle_core::Method;
use wattle_core::qualify::{Qualification, Qualifier};
use wattle_core::sensor::{DeviceKind, Panel, Sensor, SensorId};
use wattle_core::summary::SourceInfo;
use wattle_core::units::si;
use wattle_meter::source::{self, Wanted};
use wattle_meter::{Cost, Meter, Timing, clock};

/// What there is to say.
struct Findings {
    tried: Vec<SourceInfo>,
    pretended: Vec<String>,
    sensors: Vec<Sensor>,
    qualified: Vec<Qualification>,
    cost: Cost,
    /// Not there if a read did not come back.
    timing: Option<Timing>,
}

/// Examines the machine; exit code 0 if energy can be measured.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<ExitCode> {
    let findings = examine(args)?;
    let doubted = (0u16..).zip(&findings.qualified).filter(|(_, q)| q.is_doubtful());
    let doubted: Vec<SensorId> = doubted.map(|(id, _)| SensorId(id)).collect();
    let panel = Panel::choose(&findings.sensors, None, &doubted);
    let chosen: Vec<&Sensor> = panel
        .iter()
        .flat_map(|p| &p.sensors)
        .filter_map(|s| findings.sensors.get(usize::from(s.0)))
        .collect();
    let answers = |s: &&Sensor| findings.qualified.iter().any(|q| q.sensor == s.name && q.answers);
    let dead: Vec<&str> = chosen.iter().filter(|s| !answers(s)).map(|s| s.name.as_str()).collect();
    // A driver that hangs takes everything else with it.
    let works = findings.timing.is_some() && dead.is_empty();
    let measured = !chosen.is_empty() && chosen.iter().all(|s| s.energy_method() != Some(Method::Model));
    let measurable = works && measured;
    if args.json {
        print_json(&json!({
            "measurable": measurable,
            "perimeter": panel.as_ref().map(|p| p.perimeter),
            "panel": chosen.iter().map(|s| &s.name).collect::<Vec<_>>(),
            "sources": findings.tried,
            "sensors": findings.sensors,
            "qualified": findings.qualified,
            "sampler": {
                "cpu_fraction": findings.cost.cpu / findings.cost.wall,
                "rounds": findings.cost.rounds,
                "missed": findings.cost.missed,
                "lost": findings.cost.lost,
                "realtime": findings.cost.realtime,
                "timing": findings.timing,
            },
            "pretended": findings.pretended,
        }))?;
    } else {
        let perimeter = panel.as_ref().map_or("none", |p| p.perimeter.name());
        let on_cpu = chosen.iter().any(|s| matches!(s.device.kind, DeviceKind::Cpu | DeviceKind::Machine));
        let verdict = match measurable {
            true if on_cpu => format!("Energy can be measured here (perimeter: {perimeter}).\n"),
            true => format!(
                "Energy can be measured here (perimeter: {perimeter}) for a model on a server that uses these boards;\n\
                 the built-in models run on the CPU, and their energy is estimated.\n"
            ),
            false if measured && !dead.is_empty() => {
                format!("Energy cannot be measured here: {} gives no answer.\n", dead.join(", "))
            }
            false if measured => "Energy cannot be measured here: a driver hangs.\n".to_owned(),
            false if chosen.is_empty() => "Energy can be neither measured nor estimated here.\n".to_owned(),
            false => {
                "Energy cannot be measured here; \"wattle run\" and \"wattle exec\" will estimate it and say so.\n".to_owned()
            }
        };
        print(&format!("{}\n{verdict}", table(&findings)))?;
    }
    Ok(if measurable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Opens what there is and reads it for a moment.
fn examine(args: &DoctorArgs) -> Result<Findings> {
    let opened = source::open(&Wanted {
        params: args.source_param.iter().cloned().collect(),
        root: args.root.clone(),
        estimate: true,
        lenient: true,
        recordings: Some(wattle_lab::recording),
        ..Wanted::default()
    })?;
    let mut meter = Meter::start(opened.sources, Duration::from_millis(5))?;
    let sensors = meter.sensors().to_vec();
    let mut qualifier = Qualifier::new(&sensors);
    let end = clock::now().plus_nanos((args.seconds * 1e9) as u64);
    while clock::now() < end {
        std::thread::sleep(Duration::from_millis(50));
        meter.drain(|reading| qualifier.push(reading));
    }
    meter.stop();
    meter.drain(|reading| qualifier.push(reading));
    Ok(Findings {
        tried: opened.tried,
        pretended: opened.pretended,
        qualified: qualifier.finish(),
        cost: meter.cost(),
        timing: meter.timing().cloned(),
        sensors,
    })
}

fn table(findings: &Findings) -> String {
    let mut out = String::new();
    for tried in &findings.tried {
        let name = &tried.name;
        match &tried.unavailable {
            Some(why) => {
                out += &format!("  no   {name:9} {why}\n");
                out +=
                    &tried.fix.as_ref().map_or_else(String::new, |f| format!("                 fix: {f}\n"));
            }
            None => out += &format!("  yes  {name:9} {}\n", latency(findings, name)),
        }
        for line in facts(&tried.facts) {
            out += &format!("                 {line}\n");
        }
        let theirs = findings.sensors.iter().zip(&findings.qualified).filter(|(s, _)| &s.source == name);
        // What tells energy, and what failed; the rest is a number.
        let (shown, others): (Vec<_>, Vec<_>) =
            theirs.partition(|(s, q)| s.energy_method().is_some() || q.failed > 0);
        for (sensor, qualified) in shown {
            out += &format!(
                "                 {} [{}]{}\n",
                sensor.name,
                sensor.quantity.unit(),
                remarks(qualified)
            );
        }
        if !others.is_empty() {
            out += &format!("                 and {} sensors of other things\n", others.len());
        }
    }
    for what in &findings.pretended {
        out += &format!("\n  ! pretended hardware: {what}\n");
    }
    out + &sampler(findings)
}

/// One line for each device, and one for each thing that is of no device.
fn facts(facts: &BTreeMap<String, String>) -> Vec<String> {
    let mut lines: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (what, fact) in facts {
        match what.split_once('/') {
            Some((device, what)) => lines.entry(device).or_default().push(format!("{what} {fact}")),
            None => lines.entry(what).or_default().push(fact.clone()),
        }
    }
    lines.into_iter().map(|(what, said)| format!("{what}: {}", said.join(", "))).collect()
}

/// How long one read of a source takes.
fn latency(findings: &Findings, source: &str) -> String {
    let timing = findings.timing.iter().flat_map(|t| &t.reads);
    let spread = timing.filter(|(name, _)| name == source).find_map(|(_, spread)| *spread);
    spread
        .map_or_else(String::new, |s| format!("a read takes {}, p99 {}", si(s.p50_s, "s"), si(s.p99_s, "s")))
}

/// What reading for a moment cost, and how well it kept time.
fn sampler(findings: &Findings) -> String {
    let cost = &findings.cost;
    let Some(timing) = &findings.timing else {
        return "\n  ! a read did not come back: a driver hangs; leave it out by naming the others (wattle exec --source …)\n"
            .into();
    };
    let late = timing.lateness.map_or_else(String::new, |l| format!(", {} late at p99", si(l.p99_s, "s")));
    format!(
        "\n  read every 5 ms for {}: {} of CPU a round{late}, {} deadlines missed{}\n",
        si(cost.wall.get(), "s"),
        si(cost.cpu.get() / cost.rounds.max(1) as f64, "s"),
        cost.missed,
        if cost.realtime { ", before ordinary threads" } else { "" },
    )
}

/// What reading it for a moment showed.
fn remarks(qualified: &Qualification) -> String {
    let mut remarks = Vec::new();
    remarks.extend(qualified.period_s.map(|p| format!("changes every {}", si(p, "s"))));
    remarks.extend(qualified.ratio.map(|r| format!("counter / power = {r:.3}")));
    if qualified.is_doubtful() {
        remarks.push("! they contradict each other, so power is integrated instead".into());
    }
    if qualified.failed > 0 {
        remarks.push(format!("{} reads failed", qualified.failed));
    }
    if remarks.is_empty() { String::new() } else { format!("  {}", remarks.join(", ")) }
}
