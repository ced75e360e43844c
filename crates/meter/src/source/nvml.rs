//! NVIDIA boards, through the library that comes with their driver. It is opened at run time: wattle is built without it.
//!
//! Each board is by itself, known by its UUID. What a board or its driver does not offer is no sensor: it is tried once here.

mod library;

use self::library::{Board, Library, SONAME};
use super::{Depth, Driver, Settings, Source, Unavailable, When};
use wattle_core::registry::{About, Opt};
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Sensor, Trust};

/// Public comparisons with a meter found −6 % to +11 % by card; the reference's own ±5 % is said of Fermi and Kepler only.
/// docs/method.md#nvml
const GAIN: f64 = 0.11;

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "nvml",
        about: "NVIDIA boards: energy, power, temperature, memory, utilisation",
        options: &[Opt { key: "library", about: "path of the NVML library (libnvidia-ml.so.1)" }],
    },
    when: When::Present,
    open: |settings| Ok(Box::new(Nvml::open(settings)?)),
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
    // Over 1 s on most boards: a shorter span cannot be told apart, and the name says so.
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
];

struct Nvml {
    library: Library,
    stand_in: Option<String>,
    sensors: Vec<Sensor>,
    /// What each of the sensors reads, and of which board.
    reads: Vec<(Board, &'static Offer)>,
}

impl Nvml {
    fn open(settings: &Settings) -> Result<Self, Unavailable> {
        let stand_in = settings.params.get("library").cloned();
        let library = Library::open(stand_in.as_deref().unwrap_or(SONAME))?;
        let driver = library.driver().unwrap_or_else(|| "of unknown version".into());
        let unavailable = |why: String| {
            Unavailable::new(
                format!("NVML (driver {driver}) {why}"),
                "see that `nvidia-smi -L` lists the boards; in a container, pass them in (docker run --gpus all)",
            )
        };
        let boards = library.boards().map_err(|why| unavailable(format!("cannot list boards: {why}")))?;
        if boards.is_empty() {
            return Err(unavailable("shows no board".into()));
        }
        let (mut sensors, mut reads) = (Vec::<Sensor>::new(), Vec::new());
        for board in boards {
            let id = library.uuid(board).ok_or_else(|| unavailable("shows a board without a UUID".into()))?;
            let name = library.name(board).unwrap_or_else(|| "NVIDIA board".into());
            let device = Device { kind: DeviceKind::Gpu, id, name };
            let before = sensors.len();
            for offer in OFFERS {
                let already = sensors[before..].iter().any(|s| s.quantity == offer.quantity);
                // One that fails its first read is no sensor: better a gauge that works than a counter that does not.
                if !already && (offer.read)(&library, board).is_some() {
                    sensors.push(offer.sensor(&device));
                    reads.push((board, offer));
                }
            }
        }
        Ok(Self { library, stand_in, sensors, reads })
    }
}

impl Offer {
    fn sensor(&self, device: &Device) -> Sensor {
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
            // Energy comes in millijoules, power in milliwatts.
            quantum: 1e-3,
            averaged_s: 0.0,
        }
    }
}

impl Source for Nvml {
    fn sensors(&self) -> &[Sensor] {
        &self.sensors
    }

    fn read(&mut self, depth: Depth, put: &mut dyn FnMut(usize, Option<f64>)) {
        for (i, (board, offer)) in self.reads.iter().enumerate() {
            if depth == Depth::All || offer.depth == Depth::Fast {
                put(i, (offer.read)(&self.library, *board));
            }
        }
    }

    fn pretended(&self) -> Option<String> {
        self.stand_in.as_ref().map(|path| format!("NVML by the library {path}"))
    }
}
