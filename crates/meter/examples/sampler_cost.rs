//! What sampling costs on a pretended machine with 8 boards and two sockets:
//!
//! ```sh
//! cargo run --release -p wattle-meter --example sampler_cost -- <interval in ms> <seconds>
//! ```
#![allow(clippy::print_stdout)] // It is a program.

use std::error::Error;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;
use wattle_meter::source::{self, Wanted};
use wattle_meter::{Meter, clock};
use wattle_sim_nvml::Sim;

const BOARDS: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).map(|a| a.parse::<f64>());
    let interval_ms = args.next().transpose()?.unwrap_or(5.0);
    let seconds = args.next().transpose()?.unwrap_or(10.0);
    let folder = tempfile::tempdir()?;
    let boards: Vec<String> = (0..BOARDS).map(|i| format!(r#"{{"uuid": "GPU-{i}"}}"#)).collect();
    let sim = Sim::install(folder.path(), &format!(r#"{{"devices": [{}]}}"#, boards.join(",")))?;
    for (zone, name) in [
        ("intel-rapl:0", "package-0"),
        ("intel-rapl:0/intel-rapl:0:0", "dram"),
        ("intel-rapl:1", "package-1"),
        ("intel-rapl:1/intel-rapl:1:0", "dram"),
    ] {
        add_zone(folder.path(), zone, name)?;
    }
    let params = [
        ("nvml.library".to_owned(), sim.library.display().to_string()),
        ("nvml.device".to_owned(), "all".to_owned()),
    ];
    let wanted = Wanted {
        names: vec!["nvml".into(), "rapl".into()],
        params: params.into(),
        root: Some(folder.path().to_owned()),
        ..Wanted::default()
    };
    let mut meter =
        Meter::start(source::open(&wanted)?.sources, Duration::from_secs_f64(interval_ms * 1e-3))?;
    let end = clock::now().plus_nanos((seconds * 1e9) as u64);
    let mut readings = 0u64;
    while clock::now() < end {
        clock::sleep_until(clock::now().plus_nanos(100_000_000));
        meter.drain(|_| readings += 1);
    }
    meter.stop();
    meter.drain(|_| readings += 1);
    let cost = meter.cost();
    println!(
        "{}",
        serde_json::json!({
            "interval_ms": interval_ms,
            "sensors": meter.sensors().len(),
            "cpu_s": cost.cpu.get(),
            "wall_s": cost.wall.get(),
            "cpu_fraction": cost.cpu.get() / cost.wall.get(),
            "cpu_us_per_round": cost.cpu.get() / cost.rounds as f64 * 1e6,
            "rounds": cost.rounds,
            "missed": cost.missed,
            "lost": cost.lost,
            "readings": readings,
            "realtime": cost.realtime,
            "timing": meter.timing(),
        })
    );
    Ok(())
}

/// A zone as powercap lays it out: a folder below `devices`, and a link to it from a flat list.
fn add_zone(root: &Path, zone: &str, name: &str) -> std::io::Result<()> {
    let folder = root.join("sys/devices/virtual/powercap/intel-rapl").join(zone);
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("name"), format!("{name}\n"))?;
    std::fs::write(folder.join("max_energy_range_uj"), "262143328850\n")?;
    std::fs::write(folder.join("energy_uj"), "1000000\n")?;
    let class = root.join("sys/class/powercap");
    std::fs::create_dir_all(&class)?;
    symlink(&folder, class.join(zone.rsplit('/').next().unwrap_or(zone)))
}
