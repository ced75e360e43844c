//! CPU packages and main memory by RAPL: through Linux powercap, or through perf events where that cannot be read. AMD's
//! counters are in the same places as Intel's. Both ways give the same sensors, so that runs compare.
//!
//! Read are the packages of every socket and the `dram` zone nested in each, which its package does not contain. Not read is
//! what would count twice: `core` and `uncore` (perf: `cores`, `gpu`) lie inside the package, `psys` around it, `intel-rapl-mmio` is package 0 again.

mod perf;
mod pmu;
mod powercap;

use super::{Depth, Driver, Settings, Source, Unavailable, When};
use std::collections::BTreeMap;
use std::fs::File;
use wattle_core::registry::About;
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Sensor, Trust};

/// Nobody promises one. On Haswell servers and later the package counter is measured, no longer modelled (Hackenberg et al.,
/// IPDPSW 2015), and goes closely with the plug (Khan et al., "RAPL in Action", TOMPECS 2018); AMD's has limits of its own
/// (Schöne et al., arXiv 2108.00808). 5 % is our round figure for that, not one of theirs.
const PACKAGE_GAIN: f64 = 0.05;
/// Off by an offset that depends on the machine, most when idle (Desrochers et al., "A Validation of DRAM RAPL Power
/// Measurements", MEMSYS 2016); a relative error cannot say that, so it is twice the package's.
const DRAM_GAIN: f64 = 0.10;

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "rapl",
        about: "CPU packages and main memory by RAPL (Linux powercap or perf events, Intel and AMD)",
        options: &[],
    },
    when: When::Present,
    open: |settings| Ok(Box::new(Rapl::open(settings)?)),
};

struct Rapl {
    /// One per sensor, kept open: a `pread` costs a tenth of opening and reading anew.
    counters: Vec<Counter>,
    sensors: Vec<Sensor>,
    facts: BTreeMap<String, String>,
}

/// A way to the counters.
struct Way {
    name: &'static str,
    /// Where in sysfs.
    path: String,
    found: Vec<Found>,
}

/// A counter, and what it counts.
struct Found {
    counter: Counter,
    device: Device,
    wrap: Option<f64>,
}

enum Counter {
    Powercap(File),
    Perf(pmu::Event),
}

impl Rapl {
    fn open(settings: &Settings) -> Result<Self, Unavailable> {
        let powercap = powercap::open(&settings.path("/sys/class/powercap"));
        let way = powercap.or_else(|first| {
            pmu::open(settings).map_err(|second| {
                let why = format!("{}; by perf events: {}", first.why, second.why);
                let fix = second.fix.map_or_else(String::new, |fix| format!("; or {fix}"));
                Unavailable::new(why, first.fix + &fix)
            })
        })?;
        let facts = [("way".to_owned(), way.name.to_owned()), ("path".to_owned(), way.path)].into();
        let sensors = way.found.iter().map(Found::sensor).collect();
        let counters = way.found.into_iter().map(|f| f.counter).collect();
        Ok(Self { counters, sensors, facts })
    }
}

impl Source for Rapl {
    fn sensors(&self) -> &[Sensor] {
        &self.sensors
    }

    fn read(&mut self, _depth: Depth, put: &mut dyn FnMut(usize, Option<f64>)) {
        for (i, counter) in self.counters.iter().enumerate() {
            let joules = match counter {
                Counter::Powercap(file) => powercap::joules(file),
                Counter::Perf(event) => event.joules(),
            };
            put(i, joules);
        }
    }

    fn facts(&self) -> BTreeMap<String, String> {
        self.facts.clone()
    }
}

impl Found {
    fn sensor(&self) -> Sensor {
        let gain = if self.device.kind == DeviceKind::Dram { DRAM_GAIN } else { PACKAGE_GAIN };
        Sensor {
            name: format!("rapl/{}/energy", self.device.id),
            source: "rapl".into(),
            device: self.device.clone(),
            quantity: Quantity::Energy,
            perimeter: Perimeter::Host,
            kind: Kind::Counter { wrap: self.wrap },
            trust: Trust::Measured { gain },
            // The hardware counts in steps of 15 to 61 µJ.
            quantum: 61e-6,
            averaged_s: 0.0,
        }
    }
}

/// A package, by powercap's name for it.
fn package(name: &str) -> Device {
    Device { kind: DeviceKind::Cpu, id: name.into(), name: format!("CPU {name}") }
}

/// The main memory of a package.
fn dram(package: &str) -> Device {
    let (id, name) = (format!("{package}/dram"), format!("main memory of {package}"));
    Device { kind: DeviceKind::Dram, id, name }
}
