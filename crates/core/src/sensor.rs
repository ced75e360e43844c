//! What is read, and one raw number read at one moment. Devices are never summed inside a source: one sensor, one device, one quantity.

use crate::estimate::Method;
use crate::time::Stamp;
use serde::{Deserialize, Serialize};

/// Position of a sensor in its run's sensor table (`run.json`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SensorId(pub u16);

/// What kind of device a sensor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// A graphics or AI accelerator board.
    Gpu,
    /// A CPU package.
    Cpu,
    /// Main memory.
    Dram,
    /// A neural engine on a system on a chip.
    Ane,
    /// A whole machine (battery, wall meter, BMC).
    Machine,
    /// A process with everything it started.
    Process,
}

/// Which device: its kind, an identity that survives a reboot where the hardware has one, and a name for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// What it is.
    pub kind: DeviceKind,
    /// UUID of a GPU, `package-0` of a CPU.
    pub id: String,
    /// Marketing name.
    pub name: String,
}

/// What lies inside a figure. Two perimeters are never mixed in one comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Perimeter {
    /// The accelerator boards, or the rails of a system on a chip.
    Device,
    /// Device, CPU packages and DRAM.
    Host,
    /// What the plug delivers.
    Wall,
    /// Wall times PUE.
    Facility,
}

impl Perimeter {
    /// The word used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Perimeter::Device => "device",
            Perimeter::Host => "host",
            Perimeter::Wall => "wall",
            Perimeter::Facility => "facility",
        }
    }
}

/// What a sensor reads; the unit of its readings is fixed by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Energy since some start, in joules.
    Energy,
    /// Power, in watts.
    Power,
    /// Temperature, in degrees Celsius.
    Temperature,
    /// Memory in use, in bytes.
    MemoryUsed,
    /// Memory there is, in bytes.
    MemoryTotal,
    /// Compute utilisation, 0 to 1.
    Utilisation,
    /// Memory-bandwidth utilisation, 0 to 1.
    MemoryUtilisation,
    /// CPU seconds spent busy so far: of a machine or a core since boot, of a process tree since it began.
    CpuBusy,
    /// CPU seconds in user mode.
    CpuUser,
    /// CPU seconds in user mode at low priority.
    CpuNice,
    /// CPU seconds in the kernel.
    CpuSystem,
    /// CPU seconds with nothing to do.
    CpuIdle,
    /// CPU seconds with nothing to do but wait for I/O.
    CpuIowait,
    /// CPU seconds in interrupts.
    CpuIrq,
    /// CPU seconds in soft interrupts.
    CpuSoftirq,
    /// CPU seconds that the hypervisor gave to others.
    CpuSteal,
    /// Clock of the compute units, in hertz.
    Clock,
    /// Clock of the memory, in hertz.
    MemoryClock,
    /// Power that the device may draw, in watts.
    PowerLimit,
    /// Why the clocks are held down: the bits of NVML's clock event reasons.
    Throttle,
    /// How late the sampler was, in seconds.
    Lateness,
}

impl Quantity {
    /// The unit of a reading.
    pub const fn unit(self) -> &'static str {
        match self {
            Quantity::Energy => "J",
            Quantity::Power => "W",
            Quantity::Temperature => "°C",
            Quantity::MemoryUsed | Quantity::MemoryTotal => "B",
            Quantity::Utilisation | Quantity::MemoryUtilisation | Quantity::Throttle => "1",
            Quantity::PowerLimit => "W",
            Quantity::Clock | Quantity::MemoryClock => "Hz",
            Quantity::CpuBusy
            | Quantity::CpuUser
            | Quantity::CpuNice
            | Quantity::CpuSystem
            | Quantity::CpuIdle
            | Quantity::CpuIowait
            | Quantity::CpuIrq
            | Quantity::CpuSoftirq
            | Quantity::CpuSteal
            | Quantity::Lateness => "s",
        }
    }
}

/// Whether a reading accumulates or is a level.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Only grows, until it wraps at `wrap` (if it does) or is reset.
    Counter {
        /// The value at which it starts again from zero.
        wrap: Option<f64>,
    },
    /// A level; it holds until the next reading.
    Gauge,
}

/// How far to believe a sensor: relative 95 % gain error, which does not average out.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trust {
    /// Hardware measured it.
    Measured {
        /// Relative gain error.
        gain: f64,
    },
    /// It was computed from something else.
    Modelled {
        /// Relative error of the model.
        gain: f64,
    },
}

impl Trust {
    /// The relative gain error.
    pub const fn gain(self) -> f64 {
        match self {
            Trust::Measured { gain } | Trust::Modelled { gain } => gain,
        }
    }
}

/// One thing that is read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sensor {
    /// Unique in the run: `source/device/quantity`.
    pub name: String,
    /// The source that reads it.
    pub source: String,
    /// The device it belongs to.
    pub device: Device,
    /// What it reads.
    pub quantity: Quantity,
    /// The smallest perimeter its energy lies in.
    pub perimeter: Perimeter,
    /// Counter or gauge.
    pub kind: Kind,
    /// How far to believe it.
    pub trust: Trust,
    /// By how much one reading may be off because it moves in steps, in the unit of the quantity.
    #[serde(default)]
    pub quantum: f64,
    /// Gauge: each value is the mean of so many seconds before it was read; 0 if it is of the moment.
    #[serde(default)]
    pub averaged_s: f64,
}

impl Sensor {
    /// How an energy figure from this sensor is got, or `None` if it has nothing to do with energy.
    pub const fn energy_method(&self) -> Option<Method> {
        match (self.quantity, self.kind, self.trust) {
            (Quantity::Energy | Quantity::Power, _, Trust::Modelled { .. }) => Some(Method::Model),
            (Quantity::Energy, Kind::Counter { .. }, _) => Some(Method::Counter),
            (Quantity::Power, Kind::Gauge, _) => Some(Method::Integral),
            _ => None,
        }
    }
}

/// The sensors whose sum is the run's energy, and the perimeter of that sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Panel {
    /// One per device: its counter if it has one, else its power gauge.
    pub sensors: Vec<SensorId>,
    /// What the sum covers.
    pub perimeter: Perimeter,
}

impl Panel {
    /// Chooses from a run's sensor table. A measurement is never mixed with a model, a device is never counted twice, and a
    /// measurement that leaves out the kind of device that does the work (`worker`) measures something else: then the model.
    /// The `doubted` are left out: counters that their own device's power contradicts.
    pub fn choose(table: &[Sensor], worker: Option<DeviceKind>, doubted: &[SensorId]) -> Option<Panel> {
        let candidates = || {
            table
                .iter()
                .enumerate()
                .filter_map(|(i, s)| Some((SensorId(u16::try_from(i).ok()?), s, s.energy_method()?)))
                .filter(|(id, ..)| !doubted.contains(id))
        };
        let covers =
            |s: &Sensor| worker.is_none_or(|w| s.device.kind == w || s.device.kind == DeviceKind::Machine);
        let modelled = candidates().any(|(_, _, m)| m == Method::Model);
        let measured = candidates().any(|(_, s, m)| m != Method::Model && (covers(s) || !modelled));
        let chosen = candidates().filter(|(_, _, m)| (*m != Method::Model) == measured);
        let mut best = best_of_each_device(chosen);
        // A wall meter already contains the devices inside the machine.
        let perimeter = best.iter().map(|(_, s, _)| s.perimeter).max()?;
        if perimeter >= Perimeter::Wall {
            best.retain(|(_, s, _)| s.perimeter == perimeter);
        }
        Some(Panel { sensors: best.into_iter().map(|(id, _, _)| id).collect(), perimeter })
    }

    /// One sensor for every device whose energy is known, in the panel or not, as the panel's are: measured or modelled.
    pub fn devices(&self, table: &[Sensor]) -> Vec<SensorId> {
        let method = |s: &SensorId| table.get(usize::from(s.0)).and_then(Sensor::energy_method);
        let modelled = self.sensors.iter().any(|s| method(s) == Some(Method::Model));
        let inside = |s: &Sensor| {
            let theirs = self.sensors.iter().filter_map(|s| table.get(usize::from(s.0)));
            theirs.filter(|t| t.device == s.device).count() > 0
        };
        let ids = (0u16..).map(SensorId).zip(table);
        let known = ids.filter_map(|(id, s)| Some((id, s, s.energy_method()?)));
        let alike = known.filter(|(_, _, m)| (*m == Method::Model) == modelled);
        // The panel's own choice stands, for it may have doubted a better sensor.
        let fit = alike.filter(|(id, s, _)| self.sensors.contains(id) || !inside(s));
        best_of_each_device(fit).into_iter().map(|(id, _, _)| id).collect()
    }
}

fn best_of_each_device<'a>(
    sensors: impl Iterator<Item = (SensorId, &'a Sensor, Method)>,
) -> Vec<(SensorId, &'a Sensor, Method)> {
    let mut best: Vec<(SensorId, &Sensor, Method)> = Vec::new();
    for (id, sensor, method) in sensors {
        let same = |s: &Sensor| s.device.kind == sensor.device.kind && s.device.id == sensor.device.id;
        match best.iter_mut().find(|(_, s, _)| same(s)) {
            Some(slot) if method < slot.2 => *slot = (id, sensor, method),
            Some(_) => {}
            None => best.push((id, sensor, method)),
        }
    }
    best
}

/// One raw number at one moment. `None` is a failed read: a gap, never a zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading {
    /// Which sensor.
    pub sensor: SensorId,
    /// When.
    pub at: Stamp,
    /// What, in the unit of the sensor's quantity.
    pub value: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sensor(kind: DeviceKind, id: &str, quantity: Quantity, perimeter: Perimeter, trust: Trust) -> Sensor {
        Sensor {
            name: format!("test/{id}/{quantity:?}"),
            source: "test".into(),
            device: Device { kind, id: id.into(), name: id.into() },
            quantity,
            perimeter,
            kind: if quantity == Quantity::Energy { Kind::Counter { wrap: None } } else { Kind::Gauge },
            trust,
            quantum: 0.0,
            averaged_s: 0.0,
        }
    }

    const SURE: Trust = Trust::Measured { gain: 0.05 };
    const GUESS: Trust = Trust::Modelled { gain: 0.5 };

    #[test]
    fn a_device_with_counter_and_gauge_is_counted_once_by_its_counter() {
        let table = [
            sensor(DeviceKind::Gpu, "a", Quantity::Power, Perimeter::Device, SURE),
            sensor(DeviceKind::Gpu, "a", Quantity::Energy, Perimeter::Device, SURE),
            sensor(DeviceKind::Gpu, "b", Quantity::Power, Perimeter::Device, SURE),
        ];
        let panel = Panel::choose(&table, None, &[]).unwrap();
        assert_eq!(panel, Panel { sensors: vec![SensorId(1), SensorId(2)], perimeter: Perimeter::Device });
        let doubting = Panel::choose(&table, None, &[SensorId(1)]).unwrap();
        assert_eq!(doubting.sensors, [SensorId(0), SensorId(2)]);
        assert_eq!((doubting.devices(&table), panel.devices(&table)), (doubting.sensors, panel.sensors));
    }

    #[test]
    fn a_model_never_stands_beside_a_measurement() {
        let table = [
            sensor(DeviceKind::Cpu, "cpu", Quantity::Energy, Perimeter::Host, GUESS),
            sensor(DeviceKind::Gpu, "a", Quantity::Energy, Perimeter::Device, SURE),
        ];
        let panel = Panel::choose(&table, None, &[]).unwrap();
        assert_eq!(panel, Panel { sensors: vec![SensorId(1)], perimeter: Perimeter::Device });
    }

    #[test]
    fn a_measurement_of_another_device_than_the_one_at_work_is_no_measurement() {
        let table = [
            sensor(DeviceKind::Gpu, "a", Quantity::Energy, Perimeter::Device, SURE),
            sensor(DeviceKind::Cpu, "cpu", Quantity::Energy, Perimeter::Host, GUESS),
        ];
        let guess = Panel::choose(&table, Some(DeviceKind::Cpu), &[]).unwrap();
        assert_eq!(guess, Panel { sensors: vec![SensorId(1)], perimeter: Perimeter::Host });
        let forced = Panel::choose(&table[..1], Some(DeviceKind::Cpu), &[]).unwrap();
        assert_eq!(forced.sensors, vec![SensorId(0)]);
    }

    #[test]
    fn a_wall_meter_is_not_added_to_what_it_contains() {
        let table = [
            sensor(DeviceKind::Gpu, "a", Quantity::Energy, Perimeter::Device, SURE),
            sensor(DeviceKind::Machine, "bmc", Quantity::Power, Perimeter::Wall, SURE),
        ];
        let panel = Panel::choose(&table, None, &[]).unwrap();
        assert_eq!(panel, Panel { sensors: vec![SensorId(1)], perimeter: Perimeter::Wall });
        assert_eq!(panel.devices(&table), [SensorId(0), SensorId(1)]);
    }

    #[test]
    fn no_energy_sensor_no_panel() {
        let table = [sensor(DeviceKind::Cpu, "cpu", Quantity::CpuBusy, Perimeter::Host, SURE)];
        assert_eq!(Panel::choose(&table, None, &[]), None);
    }
}
