//! CPU time and memory of the whole machine from procfs. No energy: it tells who else was busy, and feeds the [`super::model`].

use super::{Depth, Driver, Settings, Source, Unavailable, When};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use wattle_core::registry::About;
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Sensor, Trust};

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "procstat",
        about: "CPU time and memory of the machine (Linux procfs)",
        options: &[],
    },
    when: When::Present,
    open: |settings| Ok(Box::new(ProcStat::open(settings)?)),
};

struct ProcStat {
    cpu: CpuTimes,
    memory: Option<File>,
    sensors: Vec<Sensor>,
}

impl ProcStat {
    fn open(settings: &Settings) -> Result<Self, Unavailable> {
        let cpu = CpuTimes::open(&settings.path("/proc/stat"))?;
        let memory = File::open(settings.path("/proc/meminfo")).ok();
        let sensor = |quantity, kind, id: &str, name: &str| Sensor {
            name: format!("procstat/{id}"),
            source: "procstat".into(),
            device: Device { kind: DeviceKind::Machine, id: "machine".into(), name: name.into() },
            quantity,
            perimeter: Perimeter::Host,
            kind,
            trust: Trust::Measured { gain: 0.0 },
            quantum: 0.0,
            averaged_s: 0.0,
        };
        let mut sensors =
            vec![sensor(Quantity::CpuBusy, Kind::Counter { wrap: None }, "cpu_busy", "all CPUs")];
        if memory.is_some() {
            sensors.push(sensor(Quantity::MemoryUsed, Kind::Gauge, "memory_used", "main memory"));
        }
        Ok(Self { cpu, memory, sensors })
    }
}

impl Source for ProcStat {
    fn sensors(&self) -> &[Sensor] {
        &self.sensors
    }

    fn read(&mut self, depth: Depth, put: &mut dyn FnMut(usize, Option<f64>)) {
        if depth == Depth::Fast {
            return;
        }
        put(0, self.cpu.busy_seconds());
        if let Some(file) = &self.memory {
            put(1, memory_used(file));
        }
    }
}

/// `/proc/stat`, kept open: one `pread` per look.
pub(super) struct CpuTimes {
    file: File,
    ticks_per_second: f64,
    /// Logical CPUs.
    pub(super) cpus: usize,
}

impl CpuTimes {
    pub(super) fn open(path: &Path) -> Result<Self, Unavailable> {
        let unavailable = |e: &dyn std::fmt::Display| {
            Unavailable::new(
                format!("cannot read {}: {e}", path.display()),
                "CPU load is read from Linux procfs only",
            )
        };
        let file = File::open(path).map_err(|e| unavailable(&e))?;
        let text = std::fs::read_to_string(path).map_err(|e| unavailable(&e))?;
        let numbered = |line: &&str| {
            line.strip_prefix("cpu").is_some_and(|r| r.starts_with(|c: char| c.is_ascii_digit()))
        };
        let cpus = text.lines().filter(numbered).count();
        let times = Self { file, ticks_per_second: rustix::param::clock_ticks_per_second() as f64, cpus };
        match times.busy_seconds() {
            Some(_) if cpus > 0 => Ok(times),
            _ => Err(unavailable(&"no line of CPU times in it")),
        }
    }

    /// The step that CPU times move in, in seconds.
    pub(super) fn tick(&self) -> f64 {
        1.0 / self.ticks_per_second
    }

    /// CPU seconds spent busy since boot, over all CPUs: everything but idle, waiting for I/O, and time the hypervisor gave to
    /// others (steal). Guest time is part of user time.
    pub(super) fn busy_seconds(&self) -> Option<f64> {
        let mut buffer = [0u8; 256];
        let n = self.file.read_at(&mut buffer, 0).ok()?;
        let line = std::str::from_utf8(&buffer[..n]).ok()?.lines().next()?.strip_prefix("cpu ")?;
        let mut ticks = [0u64; 7]; // user nice system idle iowait irq softirq
        let mut fields = line.split_ascii_whitespace();
        for tick in &mut ticks {
            *tick = fields.next()?.parse().ok()?;
        }
        let [user, nice, system, _idle, _iowait, irq, softirq] = ticks;
        Some((user + nice + system + irq + softirq) as f64 / self.ticks_per_second)
    }
}

fn memory_used(file: &File) -> Option<f64> {
    let mut buffer = [0u8; 512];
    let n = file.read_at(&mut buffer, 0).ok()?;
    let text = std::str::from_utf8(&buffer[..n]).ok()?;
    let kib = |key: &str| -> Option<f64> {
        text.lines().find_map(|l| l.strip_prefix(key))?.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    Some((kib("MemTotal:")? - kib("MemAvailable:")?) * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wattle_core::registry::Params;

    fn settings(root: &Path) -> Settings {
        Settings { params: Params::new(), root: root.into(), recordings: None }
    }

    #[test]
    fn busy_time_leaves_out_idle_iowait_and_steal() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("proc")).unwrap();
        let stat = "cpu  100 20 30 4000 500 6 7 800 90 0\ncpu0 1 0 0 0 0 0 0 0 0 0\ncpu1 1 0 0 0 0 0 0 0 0 0\nintr 5\n";
        std::fs::write(root.path().join("proc/stat"), stat).unwrap();
        std::fs::write(
            root.path().join("proc/meminfo"),
            "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 40 kB\n",
        )
        .unwrap();
        let mut source = ProcStat::open(&settings(root.path())).unwrap();
        assert_eq!(source.cpu.cpus, 2);
        let mut seen = Vec::new();
        source.read(Depth::All, &mut |i, v| seen.push((i, v)));
        let hz = rustix::param::clock_ticks_per_second() as f64;
        assert_eq!(seen, [(0, Some(163.0 / hz)), (1, Some(60.0 * 1024.0))]);
    }

    #[test]
    fn garbage_is_refused_when_opened_and_a_gap_later() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("proc")).unwrap();
        let stat = root.path().join("proc/stat");
        assert!(ProcStat::open(&settings(root.path())).is_err());
        std::fs::write(&stat, "nonsense").unwrap();
        assert!(ProcStat::open(&settings(root.path())).is_err());
        std::fs::write(&stat, "cpu  1 2 3 4 5 6 7 8 9 0\ncpu0 1\n").unwrap();
        let mut source = ProcStat::open(&settings(root.path())).unwrap();
        std::fs::write(&stat, "cpu  x\n").unwrap();
        source.read(Depth::All, &mut |_, v| assert_eq!(v, None));
    }
}
