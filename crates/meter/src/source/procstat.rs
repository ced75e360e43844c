//! CPU time and memory from procfs: of the whole machine, of each logical CPU, and of a process with everything it started. No
//! energy: it tells who else was busy, and feeds the [`super::model`].

mod times;
pub(crate) mod tree;

pub(super) use self::times::CpuTimes;
use self::times::{STATES, lines};
use self::tree::Tree;
use super::{Depth, Driver, Settings, Source, Unavailable, When};
use std::fs::File;
use std::os::unix::fs::FileExt;
use wattle_core::registry::{About, Opt};
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Sensor, Trust};

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "procstat",
        about: "CPU time and memory of the machine, its CPUs and a process tree (Linux procfs)",
        options: &[
            Opt { key: "cores", about: "per logical CPU: busy, all (every state too) or none (busy)" },
            Opt { key: "pid", about: "also a process with everything below it: its id, or self (none)" },
        ],
    },
    when: When::Present,
    open: |settings| Ok(Box::new(ProcStat::open(settings)?)),
};

/// What is read of each logical CPU.
#[derive(Clone, Copy, PartialEq)]
enum Cores {
    None,
    Busy,
    All,
}

struct ProcStat {
    cpu: CpuTimes,
    cores: Cores,
    buffer: Vec<u8>,
    memory: Option<File>,
    tree: Option<Tree>,
    sensors: Vec<Sensor>,
    /// Where the sensors of single CPUs begin.
    first_core: usize,
    /// One per sensor but the tree's, filled anew in each round: what a file does not say any more is a gap.
    values: Vec<Option<f64>>,
}

impl ProcStat {
    fn open(settings: &Settings) -> Result<Self, Unavailable> {
        let cores = match settings.params.get("cores").map(String::as_str) {
            None | Some("busy") => Cores::Busy,
            Some("all") => Cores::All,
            Some("none") => Cores::None,
            Some(other) => {
                let why = format!("procstat.cores is \"{other}\"");
                return Err(Unavailable::new(why, "give busy, all or none"));
            }
        };
        let cpu = CpuTimes::open(&settings.path("/proc/stat"))?;
        let memory = File::open(settings.path("/proc/meminfo")).ok().filter(|f| memory(f).is_some());
        let tree = settings.params.get("pid").map(|pid| Tree::open(settings, pid)).transpose()?;
        let mut source = Self {
            buffer: cpu.buffer(),
            cpu,
            cores,
            memory,
            tree,
            sensors: Vec::new(),
            first_core: 0,
            values: Vec::new(),
        };
        source.sensors = source.machine();
        source.first_core = source.sensors.len();
        source.sensors.extend(source.cores());
        source.values = vec![None; source.sensors.len()];
        if let Some(tree) = &source.tree {
            source.sensors.push(sensor("tree/cpu_busy", tree.device(), Quantity::CpuBusy));
            source.sensors.push(sensor("tree/memory_used", tree.device(), Quantity::MemoryUsed));
        }
        Ok(source)
    }

    /// The sensors of the machine: CPU time, memory.
    fn machine(&self) -> Vec<Sensor> {
        let states = &STATES[..self.cpu.states];
        let machine =
            |name: &str| Device { kind: DeviceKind::Machine, id: "machine".into(), name: name.into() };
        let all = || machine("all CPUs");
        let mut sensors = vec![sensor("cpu_busy", all(), Quantity::CpuBusy)];
        sensors.extend(states.iter().map(|(name, q)| sensor(&format!("cpu/{name}"), all(), *q)));
        if self.memory.is_some() {
            sensors.push(sensor("memory_used", machine("main memory"), Quantity::MemoryUsed));
            sensors.push(sensor("memory_total", machine("main memory"), Quantity::MemoryTotal));
        }
        sensors
    }

    /// How many sensors each CPU has.
    fn width(&self) -> usize {
        match self.cores {
            Cores::None => 0,
            Cores::Busy => 1,
            Cores::All => 1 + self.cpu.states,
        }
    }

    /// The sensors of single CPUs.
    fn cores(&self) -> Vec<Sensor> {
        let states = STATES[..self.cpu.states].iter().copied();
        let each = |n: &u32| {
            let core =
                Device { kind: DeviceKind::Cpu, id: format!("cpu{n}"), name: format!("logical CPU {n}") };
            let all = [("busy", Quantity::CpuBusy)].into_iter().chain(states.clone()).take(self.width());
            let name = |state: &str| format!("{}/{state}", core.id);
            all.map(|(state, quantity)| sensor(&name(state), core.clone(), quantity)).collect::<Vec<_>>()
        };
        self.cpu.numbers.iter().flat_map(each).collect()
    }

    /// What the CPU lines say, each in the place of its sensors.
    fn look(&mut self) {
        let (width, first_core) = (self.width(), self.first_core);
        let Self { cpu, buffer, values, .. } = self;
        let Some(text) = cpu.look(buffer) else { return };
        for line in lines(text) {
            match line.cpu {
                None => values[..=cpu.states].copy_from_slice(&cpu.seconds(&line)[..=cpu.states]),
                Some(_) if width == 0 => return,
                // By name: when a CPU goes offline, the lines after it move up.
                Some(n) => {
                    let Ok(i) = cpu.numbers.binary_search(&n) else { continue };
                    values[first_core + i * width..][..width].copy_from_slice(&cpu.seconds(&line)[..width]);
                }
            }
        }
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
        self.values.fill(None);
        self.look();
        if let Some(file) = &self.memory {
            let seen = memory(file);
            let at = 1 + self.cpu.states;
            self.values[at] = seen.map(|m| m.used);
            self.values[at + 1] = seen.map(|m| m.total);
        }
        self.values.iter().enumerate().for_each(|(i, value)| put(i, *value));
        // Last, because it takes longest: the others are stamped when they were read.
        if let Some(tree) = &mut self.tree {
            let (seen, at) = (tree.look(), self.values.len());
            put(at, seen.map(|t| t.cpu_seconds));
            put(at + 1, seen.map(|t| t.resident_bytes));
        }
    }
}

fn sensor(name: &str, device: Device, quantity: Quantity) -> Sensor {
    let level = matches!(quantity, Quantity::MemoryUsed | Quantity::MemoryTotal);
    Sensor {
        name: format!("procstat/{name}"),
        source: "procstat".into(),
        device,
        quantity,
        perimeter: Perimeter::Host,
        kind: if level { Kind::Gauge } else { Kind::Counter { wrap: None } },
        trust: Trust::Measured { gain: 0.0 },
        quantum: 0.0,
        averaged_s: 0.0,
    }
}

/// Main memory, in bytes.
#[derive(Clone, Copy)]
struct Memory {
    used: f64,
    total: f64,
}

fn memory(file: &File) -> Option<Memory> {
    let mut buffer = [0u8; 512];
    let n = file.read_at(&mut buffer, 0).ok()?;
    let text = std::str::from_utf8(&buffer[..n]).ok()?;
    let bytes = |key: &str| -> Option<f64> {
        let line = text.lines().find_map(|l| l.strip_prefix(key))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()? * 1024.0)
    };
    let total = bytes("MemTotal:")?;
    Some(Memory { used: total - bytes("MemAvailable:")?, total })
}
