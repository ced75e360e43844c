//! What every source has to keep to, whichever hardware it reads.
#![allow(clippy::unwrap_used)] // A test may, also in what its tests share.
#![allow(unsafe_code)] // An allocator that counts cannot be written without.

mod powercap;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashSet;
use std::path::Path;
use wattle_core::registry::Params;
use wattle_core::sensor::{Kind, Reading, SensorId};
use wattle_core::time::Stamp;
use wattle_meter::source::{DRIVERS, Depth, Recording, Settings, Source};
use wattle_sim_nvml::Sim;

/// Every source that can be opened on a made-up machine which has everything.
struct Machine {
    tree: powercap::Tree,
    sources: Vec<(&'static str, Box<dyn Source>)>,
}

impl Machine {
    fn new() -> Machine {
        let tree = powercap::Tree::two_sockets();
        let write = |path: &str, text: &str| {
            let path = tree.root().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        write("proc/stat", "cpu  100 20 30 4000 500 6 7 800 90 0\ncpu0 100 20 30 4000 500 6 7 800 90 0\n");
        write("proc/meminfo", "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 40 kB\n");
        write("proc/77/stat", "77 (sh) S 1 1 1 0 -1 0 0 0 0 0 5 6 7 8 20 0 1 0 100 4096 9 0\n");
        let scenario = r#"{"devices": [{"kind": "gpu", "id": "R-0", "name": "r", "power": [[0, 100]]}]}"#;
        let scenario = write("replay.json", scenario);
        let sim =
            Sim::install(tree.root(), r#"{"devices": [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]}"#).unwrap();
        let params = |name: &str| match name {
            "nvml" => Params::from([("library".to_owned(), sim.library.display().to_string())]),
            "replay" => Params::from([("scenario".to_owned(), scenario.clone())]),
            "procstat" => [("cores", "all"), ("pid", "77")].map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            _ => Params::new(),
        };
        let mut sources = Vec::new();
        for driver in DRIVERS {
            let name = driver.about.name;
            let settings = Settings { params: params(name), root: tree.root().to_owned(), recordings: None };
            match (driver.open)(&settings) {
                Ok(source) => sources.push((name, source)),
                Err(e) => {
                    assert!(!e.why.is_empty() && !e.fix.is_empty(), "{name} says neither why nor what to do")
                }
            }
        }
        Machine { tree, sources }
    }
}

#[test]
fn what_can_be_pretended_here_opens() {
    let machine = Machine::new();
    let opened: Vec<&str> = machine.sources.iter().map(|(name, _)| *name).collect();
    for name in ["nvml", "rapl", "replay", "procstat", "model"] {
        assert!(opened.contains(&name), "{name} does not open");
    }
}

#[test]
fn names_are_unique_and_begin_with_their_source() {
    let mut names = HashSet::new();
    for (name, source) in &Machine::new().sources {
        assert!(!source.sensors().is_empty(), "{name} reads nothing");
        for sensor in source.sensors() {
            assert_eq!(sensor.source, *name);
            assert!(sensor.name.starts_with(&format!("{name}/")), "{}", sensor.name);
            assert!(!sensor.device.id.is_empty() && !sensor.device.name.is_empty(), "{}", sensor.name);
            assert!((0.0..=1.0).contains(&sensor.trust.gain()), "{}", sensor.name);
            assert!(names.insert(sensor.name.clone()), "{} is there twice", sensor.name);
        }
    }
}

#[test]
fn a_read_stays_in_range_and_a_full_one_leaves_nothing_out() {
    for (name, mut source) in Machine::new().sources {
        let sensors = source.sensors().to_vec();
        let mut highest = vec![0.0; sensors.len()];
        for round in 0..200 {
            let depth = if round % 4 == 0 { Depth::All } else { Depth::Fast };
            let mut seen = vec![0; sensors.len()];
            source.read(depth, &mut |i, value| {
                seen[i] += 1;
                let value = value.unwrap_or_else(|| panic!("{} cannot be read", sensors[i].name));
                assert!(value.is_finite(), "{} reads {value}", sensors[i].name);
                if matches!(sensors[i].kind, Kind::Counter { .. }) {
                    assert!(value >= highest[i], "{} goes back", sensors[i].name);
                    highest[i] = value;
                }
            });
            assert!(seen.iter().all(|n| *n <= 1), "{name} puts a sensor twice");
            assert!(depth == Depth::Fast || seen.iter().all(|n| *n == 1), "{name} leaves a sensor out");
        }
        assert_eq!(source.sensors(), sensors, "{name} changes its sensors");
    }
}

#[test]
fn hardware_that_goes_away_gives_nothing_and_no_panic() {
    let Machine { tree, sources } = Machine::new();
    for file in ["proc/stat", "proc/meminfo", "sys/class/powercap/intel-rapl:0/energy_uj"] {
        std::fs::write(tree.root().join(file), "").unwrap();
    }
    for (name, mut source) in sources {
        let mut lost = 0;
        source.read(Depth::All, &mut |_, value| lost += usize::from(value.is_none()));
        assert_eq!(lost > 0, ["rapl", "procstat", "model"].contains(&name), "{name}");
    }
}

#[test]
fn reading_allocates_nothing() {
    let mut machine = Machine::new();
    // RAPL the other way, where the system allows it.
    let perf = powercap::Tree::empty();
    perf.pmu(&["energy-pkg"]);
    let settings = Settings { params: Params::new(), root: perf.root().to_owned(), recordings: None };
    let rapl = DRIVERS.iter().find(|d| d.about.name == "rapl").unwrap();
    machine.sources.extend((rapl.open)(&settings).ok().map(|source| ("rapl by perf events", source)));
    let played = Settings {
        params: Params::from([("run".into(), "any".into())]),
        recordings: Some(played),
        ..settings
    };
    let replay = DRIVERS.iter().find(|d| d.about.name == "replay").unwrap();
    machine.sources.push(("replay of a run", (replay.open)(&played).unwrap()));
    for (name, mut source) in machine.sources {
        let mut sum = 0.0;
        let before = ALLOCATIONS.get();
        for depth in [Depth::Fast, Depth::All, Depth::Fast, Depth::All] {
            source.read(depth, &mut |_, value| sum += value.unwrap_or(0.0));
        }
        assert_eq!(ALLOCATIONS.get(), before, "{name} allocates while reading (sum {sum})");
    }
}

/// A run with many readings at every moment.
fn played(_: &Path) -> Result<Recording, String> {
    let sensors = Machine::new().sources.iter().flat_map(|(_, s)| s.sensors().to_vec()).collect::<Vec<_>>();
    let ids = 0..sensors.len() as u16;
    let at = |n: u64| Stamp::from_nanos(n * 1000);
    let readings = (1..100_000).flat_map(move |n| {
        ids.clone().map(move |id| Ok(Reading { sensor: SensorId(id), at: at(n), value: Some(n as f64) }))
    });
    Ok(Recording { sensors, readings: Box::new(readings) })
}

/// The system's allocator, counting per thread. A library that is loaded has its own.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is handed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}
