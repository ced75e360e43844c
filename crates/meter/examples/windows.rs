//! Measures windows as a run does, for `benches/peers`: lines of `<seconds of pause> <seconds of window>` come in, one JSON
//! object per window goes out.
//!
//! ```sh
//! echo "0.1 0.25" | cargo run --release -p wattle-meter --example windows -- libnvidia-ml.so.1
//! ```
#![allow(clippy::print_stdout)] // It is a program.

use std::error::Error;
use std::io::BufRead;
use std::time::Duration;
use wattle_core::sensor::{Panel, Sensor, Trust};
use wattle_core::time::{Span, Stamp};
use wattle_core::timeline::Timeline;
use wattle_meter::source::{self, Wanted};
use wattle_meter::{Meter, clock};

/// As a run polls.
const INTERVAL: Duration = Duration::from_millis(5);

fn main() -> Result<(), Box<dyn Error>> {
    let library = std::env::args().nth(1).ok_or("which library?")?;
    let params = [("nvml.library".to_owned(), library), ("nvml.device".to_owned(), "all".to_owned())];
    let wanted = Wanted { names: vec!["nvml".into()], params: params.into(), ..Wanted::default() };
    let mut meter = Meter::start(source::open(&wanted)?.sources, INTERVAL)?;
    // Pretended boards have no gain error, so the bound is to hold without it.
    let exact = |s: &Sensor| Sensor { trust: Trust::Measured { gain: 0.0 }, ..s.clone() };
    let table: Vec<Sensor> = meter.sensors().iter().map(exact).collect();
    let panel = Panel::choose(&table, None, &[]).ok_or("nothing measures energy")?;
    let mut timeline = Timeline::new(&table);
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.split_whitespace().map(str::parse::<f64>);
        let (Some(pause), Some(length)) = (words.next(), words.next()) else {
            return Err(format!("not a pause and a length: {line}").into());
        };
        sleep(pause?);
        let start = clock::now();
        sleep(length?);
        let end = clock::now();
        // A figure is final once every counter was refreshed after the end; a run waits for that too.
        let known = |t: &Timeline| panel.sensors.iter().all(|s| t.known_until(*s).is_some_and(|k| k >= end));
        while !known(&timeline) {
            clock::sleep_until(clock::now().plus_nanos(5_000_000));
            meter.drain(|r| timeline.push(r));
        }
        let waited = clock::now().since(end).get();
        let energy = timeline.energy_of(&panel.sensors, Span::new(start, end)).ok_or("no energy")?;
        let (joules, bound) = (energy.value().get(), energy.bound().get());
        println!(
            "{}",
            serde_json::json!({"start": start.nanos(), "end": end.nanos(), "joules": joules, "bound": bound, "calls_s": waited})
        );
    }
    println!("{}", serde_json::json!({"cpu_s": clock::process_cpu().get()}));
    Ok(())
}

fn sleep(seconds: f64) {
    let until: Stamp = clock::now().plus_nanos((seconds * 1e9) as u64);
    clock::sleep_until(until);
}
