//! NVIDIA boards, through the library that comes with their driver. It is opened at run time: wattle is built without it.
//!
//! Each board is by itself, known by its UUID. What a board or its driver does not offer is no sensor: it is tried once here.

mod library;
mod select;

use self::library::{Board, Library, SONAME};
use self::select::{Ask, Asked, Choice, Environment, Known};
use super::{Depth, Driver, Settings, Source, Unavailable, When};
use std::collections::BTreeMap;
use wattle_core::registry::{About, Opt};
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Sensor, Trust};

/// Public comparisons with a meter found −6 % to +11 % by card; the reference's own ±5 % is said of Fermi and Kepler only.
/// docs/method.md#nvml
const GAIN: f64 = 0.11;

/// `NVML_DEVICE_ARCH_AMPERE`.
const AMPERE: u32 = 7;
/// Boards with a GA100, by the word in their names that tells them from other Amperes.
const GA100: [&str; 6] = ["A100", "A100X", "A800", "A30", "A30X", "170HX"];
/// `NVML_DEVICE_ARCH_*`, from 2 on.
const ARCHITECTURES: [&str; 9] =
    ["Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell"];

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "nvml",
        about: "NVIDIA boards: energy, power, temperature, memory, utilisation, clocks and what limits them",
        options: &[
            Opt { key: "library", about: "path of the NVML library (libnvidia-ml.so.1)" },
            Opt {
                key: "device",
                about: "boards, separated by commas: index, UUID or its beginning, PCI bus id, MIG instance; all (default: \
                        those in CUDA_VISIBLE_DEVICES, else all)",
            },
            Opt { key: "pid", about: "only boards on which one of these processes runs when wattle starts" },
        ],
    },
    when: When::Present,
    open: |settings| Ok(Box::new(Nvml::open(settings, &Environment::here())?)),
};

/// Something that a board may offer.
struct Offer {
    name: &'static str,
    quantity: Quantity,
    depth: Depth,
    read: fn(&Library, Board) -> Option<f64>,
}

/// Of two that read the same quantity the first is taken.
const OFFERS: &[Offer] = &[
    Offer { name: "energy", quantity: Quantity::Energy, depth: Depth::Fast, read: Library::energy },
    // For every architecture (nvml.h), but not by old drivers.
    Offer {
        name: "power_instant",
        quantity: Quantity::Power,
        depth: Depth::Fast,
        read: Library::power_instant,
    },
    // Over 1 s on most boards: a shorter span cannot be told apart, and the name says so. [`averaged_s`]
    Offer {
        name: "power_average",
        quantity: Quantity::Power,
        depth: Depth::Fast,
        read: Library::power_average,
    },
    Offer {
        name: "temperature",
        quantity: Quantity::Temperature,
        depth: Depth::All,
        read: Library::temperature,
    },
    Offer {
        name: "memory_used",
        quantity: Quantity::MemoryUsed,
        depth: Depth::All,
        read: Library::memory_used,
    },
    Offer {
        name: "memory_total",
        quantity: Quantity::MemoryTotal,
        depth: Depth::All,
        read: Library::memory_total,
    },
    Offer {
        name: "utilisation",
        quantity: Quantity::Utilisation,
        depth: Depth::All,
        read: Library::utilisation,
    },
    Offer {
        name: "memory_utilisation",
        quantity: Quantity::MemoryUtilisation,
        depth: Depth::All,
        read: Library::memory_utilisation,
    },
    Offer { name: "clock", quantity: Quantity::Clock, depth: Depth::All, read: Library::clock },
    Offer {
        name: "memory_clock",
        quantity: Quantity::MemoryClock,
        depth: Depth::All,
        read: Library::memory_clock,
    },
    Offer {
        name: "power_limit",
        quantity: Quantity::PowerLimit,
        depth: Depth::All,
        read: Library::power_limit,
    },
    Offer { name: "throttle", quantity: Quantity::Throttle, depth: Depth::All, read: Library::throttle },
];

struct Nvml {
    library: Library,
    stand_in: Option<String>,
    sensors: Vec<Sensor>,
    boards: Vec<Watched>,
    facts: BTreeMap<String, String>,
    doubts: Vec<String>,
}

/// A board that is read.
struct Watched {
    board: Board,
    /// Its energy and its power now, where one call gives both.
    together: Option<(usize, usize)>,
    /// The rest of its sensors, each by a call of its own.
    apart: Vec<(usize, &'static Offer)>,
}

impl Nvml {
    fn open(settings: &Settings, environment: &Environment) -> Result<Self, Unavailable> {
        let stand_in = settings.params.get("library").cloned();
        let library = Library::open(stand_in.as_deref().unwrap_or(SONAME))?;
        let driver = library.driver().unwrap_or_else(|| "of unknown version".into());
        let unavailable = |why: String| {
            Unavailable::new(
                format!("NVML (driver {driver}) {why}"),
                "see that `nvidia-smi -L` lists the boards; in a container, pass them in (docker run --gpus all)",
            )
        };
        let there = library.boards().map_err(|why| unavailable(format!("cannot list boards: {why}")))?;
        let mut left_out: Vec<String> =
            there.closed.into_iter().map(|(index, why)| format!("{index}: {why}")).collect();
        let (mut handles, mut known) = (Vec::new(), Vec::new());
        for (index, board) in there.open {
            match identify(&library, index, board) {
                Some(identity) => {
                    known.push(identity);
                    handles.push(board);
                }
                None => left_out.push(format!("{index}: it says neither UUID nor place")),
            }
        }
        if known.is_empty() {
            let those: Vec<String> = left_out.iter().map(|board| format!(" ({board})")).collect();
            return Err(unavailable(format!("shows no board that can be read{}", those.concat())));
        }
        let asked = Asked {
            device: settings.params.get("device").map(String::as_str),
            pid: settings.params.get("pid").map(String::as_str),
        };
        let choice =
            select::choose(&known, &asked, environment, &Asking { library: &library, boards: &handles })
                .map_err(|why| {
                    let boards: Vec<String> = known.iter().map(Known::to_string).collect();
                    Unavailable::new(
                        format!("{why}; boards: {}", boards.join(", ")),
                        "name some of these by --source-param nvml.device=…, or all",
                    )
                })?;
        let mut nvml = Self {
            library,
            stand_in,
            sensors: Vec::new(),
            boards: Vec::new(),
            facts: BTreeMap::new(),
            doubts: choice.notes.clone(),
        };
        for (at, (board, known)) in handles.into_iter().zip(&known).enumerate() {
            if choice.boards.contains(&at) {
                nvml.watch(board, known);
            } else {
                left_out.push(known.to_string());
            }
        }
        nvml.say(&choice, known.len(), &left_out);
        Ok(nvml)
    }

    /// Adds the sensors of a board and what is to be known about it.
    fn watch(&mut self, board: Board, known: &Known) {
        let library = &self.library;
        let device = Device { kind: DeviceKind::Gpu, id: known.id.clone(), name: known.name.clone() };
        let average = averaged_s(library.architecture(board), &known.name);
        let first = self.sensors.len();
        let mut apart: Vec<(usize, &'static Offer)> = Vec::new();
        for offer in OFFERS {
            let already = self.sensors[first..].iter().any(|s| s.quantity == offer.quantity);
            // One that fails its first read is no sensor: better a gauge that works than a counter that does not.
            if !already && (offer.read)(library, board).is_some() {
                apart.push((self.sensors.len(), offer));
                self.sensors.push(offer.sensor(&device, average));
            }
        }
        let at = |name: &str| apart.iter().find(|(_, o)| o.name == name).map(|(i, _)| *i);
        let together = at("energy").zip(at("power_instant")).filter(|_| fields_agree(library, board));
        if let Some((energy, power)) = together {
            apart.retain(|(i, _)| *i != energy && *i != power);
        }
        let watts = |w: Option<f64>| w.map(|w| format!("{w:.0} W"));
        let whole = |split| if split { "enabled: energy is of the whole board" } else { "off" };
        let blind = self.sensors[first..].iter().all(|s| s.energy_method().is_none());
        let facts = [
            ("name", Some(known.name.clone())),
            ("index", Some(known.index.to_string())),
            ("pci", known.place.map(|p| p.to_string())),
            ("architecture", library.architecture(board).map(architecture)),
            ("power limit", watts(library.power_limit(board))),
            ("default power limit", watts(library.default_limit(board))),
            ("mig", library.mig(board).map(|split| whole(split).into())),
            ("energy", blind.then(|| "neither counter nor power".into())),
        ];
        let said = facts.into_iter().filter_map(|(key, value)| Some((format!("{}/{key}", known.id), value?)));
        self.facts.extend(said);
        self.boards.push(Watched { board, together, apart });
    }

    /// Keeps how the boards were chosen.
    fn say(&mut self, choice: &Choice, there: usize, left_out: &[String]) {
        let boards = format!("{} of {there}, by {}", choice.boards.len(), choice.by);
        let facts = [
            ("driver", self.library.driver()),
            ("library version", self.library.version()),
            ("boards", Some(boards)),
            ("boards left out", (!left_out.is_empty()).then(|| left_out.join("; "))),
            ("choice of boards", (!choice.notes.is_empty()).then(|| choice.notes.join("; "))),
        ];
        self.facts.extend(facts.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
    }
}

/// Which board it is. A place survives a reboot too, if nobody opens the machine.
fn identify(library: &Library, index: u32, board: Board) -> Option<Known> {
    let place = library.place(board);
    let id = library.uuid(board).or_else(|| place.map(|p| p.to_string()))?;
    Some(Known { index, id, name: library.name(board).unwrap_or_else(|| "NVIDIA board".into()), place })
}

/// The library, as boards are chosen.
struct Asking<'a> {
    library: &'a Library,
    boards: &'a [Board],
}

impl Ask for Asking<'_> {
    fn holder(&self, instance: &str) -> Option<String> {
        self.library.holder(instance)
    }

    fn runs(&self, board: usize, pid: u32) -> bool {
        self.library.processes(self.boards[board]).contains(&pid)
    }
}

/// Over how long `nvmlDeviceGetPowerUsage` averages: "On Ampere (except GA100) or newer GPUs, the API returns power averaged
/// over 1 sec interval. On GA100 and older architectures, instantaneous power is returned" (NVML reference). Where the
/// architecture is unknown the longer one is assumed: its bound is the wider.
fn averaged_s(architecture: Option<u32>, name: &str) -> f64 {
    let ga100 = || name.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| GA100.contains(&word));
    match architecture {
        Some(older) if older < AMPERE => 0.0,
        Some(AMPERE) if ga100() => 0.0,
        _ => 1.0,
    }
}

/// Whether the counter asked for as a field is the counter: a driver may have the one and not the other.
fn fields_agree(library: &Library, board: Board) -> bool {
    let before = library.energy(board);
    let (energy, power) = library.energy_and_power(board);
    let after = library.energy(board);
    energy.is_some() && power.is_some() && before <= energy && energy <= after
}

fn architecture(number: u32) -> String {
    let name = (number as usize).checked_sub(2).and_then(|i| ARCHITECTURES.get(i));
    name.map_or_else(|| format!("number {number}"), |name| (*name).to_owned())
}

impl Offer {
    fn sensor(&self, device: &Device, average_s: f64) -> Sensor {
        let (kind, gain) = match self.quantity {
            Quantity::Energy => (Kind::Counter { wrap: None }, GAIN),
            Quantity::Power => (Kind::Gauge, GAIN),
            _ => (Kind::Gauge, 0.0),
        };
        Sensor {
            name: format!("nvml/{}/{}", device.id, self.name),
            source: "nvml".into(),
            device: device.clone(),
            quantity: self.quantity,
            perimeter: Perimeter::Device,
            kind,
            trust: Trust::Measured { gain },
            quantum: match self.quantity {
                // Energy comes in millijoules, power in milliwatts.
                Quantity::Energy | Quantity::Power | Quantity::PowerLimit => 1e-3,
                Quantity::Clock | Quantity::MemoryClock => 1e6,
                Quantity::Temperature => 1.0,
                Quantity::Utilisation | Quantity::MemoryUtilisation => 0.01,
                _ => 0.0,
            },
            averaged_s: if self.name == "power_average" { average_s } else { 0.0 },
        }
    }
}

impl Source for Nvml {
    fn sensors(&self) -> &[Sensor] {
        &self.sensors
    }

    fn read(&mut self, depth: Depth, put: &mut dyn FnMut(usize, Option<f64>)) {
        for Watched { board, together, apart } in &self.boards {
            if let Some((energy, power)) = together {
                let (joules, watts) = self.library.energy_and_power(*board);
                put(*energy, joules);
                put(*power, watts);
            }
            for (i, offer) in apart {
                if depth == Depth::All || offer.depth == Depth::Fast {
                    put(*i, (offer.read)(&self.library, *board));
                }
            }
        }
    }

    fn facts(&self) -> BTreeMap<String, String> {
        self.facts.clone()
    }

    fn doubts(&self) -> Vec<String> {
        self.doubts.clone()
    }

    fn pretended(&self) -> Option<String> {
        self.stand_in.as_ref().map(|path| format!("NVML by the library {path}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn power_is_averaged_since_ampere_but_not_on_ga100() {
        for (architecture, name, seconds) in [
            (Some(9), "NVIDIA H100 80GB HBM3", 1.0),
            (Some(7), "NVIDIA RTX A6000", 1.0),
            (Some(7), "NVIDIA A100-SXM4-80GB", 0.0),
            (Some(7), "NVIDIA A30", 0.0),
            (Some(7), "NVIDIA GeForce RTX 3080", 1.0),
            (Some(5), "Tesla V100-SXM2-16GB", 0.0),
            (Some(13), "NVIDIA R100", 1.0),
            (None, "NVIDIA board", 1.0),
        ] {
            assert_eq!(averaged_s(architecture, name), seconds, "{name}");
        }
    }

    #[test]
    fn energy_and_power_are_one_call_where_the_board_has_both_as_fields() {
        let together = |board: &str| {
            let folder = tempfile::tempdir().unwrap();
            let sim = wattle_sim_nvml::Sim::install(folder.path(), &format!(r#"{{"devices": [{board}]}}"#))
                .unwrap();
            let params = [("library".to_owned(), sim.library.display().to_string())].into();
            let settings = Settings { params, root: "/".into(), recordings: None };
            Nvml::open(&settings, &Environment::default()).unwrap().boards[0].together
        };
        assert_eq!(together("{}"), Some((0, 1)));
        for part in ["energy_field", "energy_counter", "power_instant"] {
            assert_eq!(together(&format!(r#"{{"without": ["{part}"]}}"#)), None, "{part}");
        }
    }

    #[test]
    fn an_architecture_has_a_name_or_a_number() {
        assert_eq!(
            [2, 7, 10, 1, 13].map(architecture),
            ["Kepler", "Ampere", "Blackwell", "number 1", "number 13"]
        );
    }
}
