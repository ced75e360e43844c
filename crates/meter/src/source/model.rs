//! The estimate of last resort: energy from CPU load, for machines that have no sensor at all (most virtual ones).
//!
//! Always labelled as a model with a wide bound, and never opened beside a measurement.

use super::procstat::CpuTimes;
use super::{Depth, Driver, Settings, Source, Unavailable, When};
use crate::clock;
use wattle_core::registry::{About, Opt};
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Sensor, Trust};
use wattle_core::time::Stamp;

/// Watts per logical CPU of cloud servers, idle and at full load: the Cloud Carbon Footprint project's averages over the
/// SPECpower results of the CPUs that AWS rents out (methodology page, 2023).
const IDLE_WATTS: f64 = 0.74;
const FULL_WATTS: f64 = 3.5;
/// That table's own spread: full load runs from 1.6 W (EPYC 2nd gen.) to 5.0 W (Haswell) per logical CPU; other machines more.
const GAIN: f64 = 0.6;

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "model",
        about: "estimate from CPU load, ±60 %, only where nothing can be measured",
        options: &[
            Opt { key: "idle_w", about: "watts per logical CPU when idle (0.74)" },
            Opt { key: "full_w", about: "watts per logical CPU at full load (3.5)" },
        ],
    },
    when: When::LastResort,
    open: |settings| Ok(Box::new(Model::open(settings)?)),
};

struct Model {
    cpu: CpuTimes,
    idle_watts: f64,
    full_watts: f64,
    start: Stamp,
    start_busy: f64,
    sensors: Vec<Sensor>,
}

impl Model {
    fn open(settings: &Settings) -> Result<Self, Unavailable> {
        let cpu = CpuTimes::open(&settings.path("/proc/stat"))?;
        let watts = |key: &str, usual: f64| match settings.params.get(key).map(|v| v.parse::<f64>()) {
            None => Ok(usual),
            Some(Ok(w)) if w.is_finite() && w >= 0.0 => Ok(w),
            Some(_) => Err(Unavailable::new(
                format!("model.{key} is not a number of watts"),
                "give a number, for example 3.5",
            )),
        };
        let (idle_watts, full_watts) = (watts("idle_w", IDLE_WATTS)?, watts("full_w", FULL_WATTS)?);
        if full_watts < idle_watts {
            return Err(Unavailable::new(
                "model.full_w is below model.idle_w",
                "give the watts at full load as full_w",
            ));
        }
        let start_busy = cpu.busy_seconds().unwrap_or(0.0);
        let sensors = vec![Sensor {
            name: "model/cpu/energy".into(),
            source: "model".into(),
            device: Device {
                kind: DeviceKind::Cpu,
                id: "cpu".into(),
                name: format!("{} logical CPUs", cpu.cpus),
            },
            quantity: Quantity::Energy,
            perimeter: Perimeter::Host,
            kind: Kind::Counter { wrap: None },
            trust: Trust::Modelled { gain: GAIN },
            // CPU time is counted in ticks, on each CPU by itself.
            quantum: cpu.tick() * cpu.cpus as f64 * (full_watts - idle_watts),
            averaged_s: 0.0,
        }];
        Ok(Self { cpu, idle_watts, full_watts, start: clock::now(), start_busy, sensors })
    }
}

impl Source for Model {
    fn sensors(&self) -> &[Sensor] {
        &self.sensors
    }

    fn read(&mut self, _depth: Depth, put: &mut dyn FnMut(usize, Option<f64>)) {
        let joules = self.cpu.busy_seconds().map(|busy| {
            let time = clock::now().since(self.start).get();
            self.idle_watts * self.cpu.cpus as f64 * time
                + (self.full_watts - self.idle_watts) * (busy - self.start_busy)
        });
        put(0, joules);
    }
}
