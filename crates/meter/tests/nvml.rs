//! NVML as it is opened and sampled in a run, against a stand-in library whose joules are known.
#![allow(clippy::unwrap_used)] // A test may, also in what its tests share.

use std::path::Path;
use std::time::Duration;
use wattle_core::estimate::{Estimate, Method};
use wattle_core::registry::Params;
use wattle_core::sensor::{Panel, Perimeter, SensorId};
use wattle_core::time::{Span, Stamp};
use wattle_core::timeline::Timeline;
use wattle_core::units::Joules;
use wattle_meter::source::{self, OpenError, Opened, Wanted};
use wattle_meter::{Meter, clock};
use wattle_sim_nvml::{Live, Sim};

const MS: u64 = 1_000_000;

/// Stand-in boards, sampled.
struct Bench {
    sim: Sim,
    meter: Meter,
    timeline: Timeline,
    start: Stamp,
    _folder: tempfile::TempDir,
}

fn open(library: &Path) -> Result<Opened, OpenError> {
    let params = Params::from([("nvml.library".to_owned(), library.display().to_string())]);
    source::open(&Wanted { names: vec!["nvml".into()], params, ..Wanted::default() })
}

fn install(boards: &str) -> (tempfile::TempDir, Sim) {
    let folder = tempfile::tempdir().unwrap();
    let sim = Sim::install(folder.path(), &format!(r#"{{"devices": [{boards}]}}"#)).unwrap();
    (folder, sim)
}

/// Turns a copy of the library into one that lacks a function, as an older one does.
fn remove(library: &Path, symbol: &str) {
    let mut bytes = std::fs::read(library).unwrap();
    let places: Vec<usize> = bytes
        .windows(symbol.len())
        .enumerate()
        .filter(|(_, w)| *w == symbol.as_bytes())
        .map(|p| p.0)
        .collect();
    assert!(!places.is_empty());
    places.into_iter().for_each(|at| bytes[at] = b'x');
    std::fs::write(library, bytes).unwrap();
}

impl Bench {
    fn start(boards: &str) -> Bench {
        Bench::on(install(boards))
    }

    fn on((folder, sim): (tempfile::TempDir, Sim)) -> Bench {
        let start = clock::now();
        let meter = Meter::start(open(&sim.library).unwrap().sources, Duration::from_millis(5)).unwrap();
        Bench { timeline: Timeline::new(meter.sensors()), sim, meter, start, _folder: folder }
    }

    fn names(&self) -> Vec<&str> {
        let theirs = self.meter.sensors().iter().filter(|s| s.source == "nvml");
        theirs.filter_map(|s| s.name.rsplit('/').next()).collect()
    }

    fn sensor(&self, name: &str) -> SensorId {
        let at = self.meter.sensors().iter().position(|s| s.name.ends_with(&format!("/{name}")));
        SensorId(at.unwrap_or_else(|| panic!("no sensor {name} in {:?}", self.names())) as u16)
    }

    /// Samples until `done`; the limit is only there to fail rather than hang.
    fn sample(&mut self, done: impl Fn(&Timeline) -> bool) {
        let limit = clock::now().plus_nanos(60_000 * MS);
        while !done(&self.timeline) {
            assert!(clock::now() < limit, "what was waited for did not come");
            clock::sleep_until(clock::now().plus_nanos(5 * MS));
            self.meter.drain(|r| self.timeline.push(r));
        }
    }

    /// Samples a sensor until figures up to `after` from its first one are final, and says where they begin.
    fn sample_for(&mut self, sensor: SensorId, after: u64) -> Stamp {
        self.sample(|t| t.known_until(sensor).is_some());
        let from = self.timeline.known_until(sensor).unwrap();
        self.sample(|t| t.known_until(sensor).is_some_and(|k| k >= from.plus_nanos(after)));
        from
    }

    fn energy(&self, sensor: SensorId, span: Span) -> Estimate<Joules> {
        self.timeline.energy(sensor, span).unwrap()
    }

    fn truth(&self, board: usize, span: Span) -> f64 {
        self.sim.scenario.devices[board].joules(span.start().nanos(), span.end().nanos())
    }

    /// One-second windows, ten of them, each begun at another place of the counters' steps.
    fn windows(&mut self, sensors: &[SensorId]) -> Vec<Span> {
        self.sample(|t| sensors.iter().all(|s| t.known_until(*s).is_some()));
        let from = sensors.iter().filter_map(|s| self.timeline.known_until(*s)).max().unwrap();
        let until = from.plus_nanos(1_200 * MS);
        self.sample(|t| sensors.iter().all(|s| t.known_until(*s) >= Some(until)));
        let window = |i: u64| from.plus_nanos(i * 20 * MS);
        (0..10).map(|i| Span::new(window(i), window(i).plus_nanos(1_000 * MS))).collect()
    }

    /// How far off each window's joules are, relative and sorted. Each is checked against its own bound.
    fn errors(&self, counter: SensorId, board: usize, windows: &[Span]) -> Vec<f64> {
        let error = |span: &Span| {
            let (energy, truth) = (self.energy(counter, *span), self.truth(board, *span));
            let error = (energy.value().get() - truth).abs();
            assert!(error <= energy.bound().get(), "{energy:?} for {truth} J");
            assert_eq!((energy.method(), energy.coverage()), (Method::Counter, 1.0));
            error / truth
        };
        let mut errors: Vec<f64> = windows.iter().map(error).collect();
        errors.sort_by(f64::total_cmp);
        errors
    }

    /// The same for a machine with one board.
    fn errors_of_one(&mut self) -> Vec<f64> {
        let counter = self.sensor("energy");
        let windows = self.windows(&[counter]);
        self.errors(counter, 0, &windows)
    }
}

/// The middle one: a machine busy with other things may see a step late.
fn median(errors: &[f64]) -> f64 {
    errors[errors.len() / 2]
}

#[test]
fn a_window_of_constant_power_is_right_within_its_bound() {
    let errors = Bench::start("{}").errors_of_one();
    assert!(median(&errors) < 0.01, "{errors:?}");
}

#[test]
fn a_window_of_a_square_wave_is_right_within_its_bound() {
    Bench::start(r#"{"power": [[0, 50], [0.25, 350]], "period_s": 0.5}"#).errors_of_one();
}

#[test]
fn a_fast_counter_shows_a_square_wave_to_a_per_cent() {
    let board = r#"{"power": [[0, 50], [0.25, 350]], "period_s": 0.5, "refresh_ms": 10}"#;
    let errors = Bench::start(board).errors_of_one();
    assert!(median(&errors) < 0.01, "{errors:?}");
}

#[test]
fn a_board_without_counter_is_integrated() {
    let mut bench = Bench::start(r#"{"without": ["energy_counter"]}"#);
    assert!(!bench.names().contains(&"energy"));
    let power = bench.sensor("power_instant");
    assert_eq!(Panel::choose(bench.meter.sensors(), None, &[]).unwrap().sensors, [power]);
    let from = bench.sample_for(power, 300 * MS);
    let span = Span::new(from, from.plus_nanos(300 * MS));
    let energy = bench.energy(power, span);
    assert_eq!((energy.method(), energy.coverage()), (Method::Integral, 1.0));
    assert!((energy.value().get() - bench.truth(0, span)).abs() < 1e-6, "{energy:?}");
}

#[test]
fn power_that_is_an_average_is_called_so() {
    let bench = Bench::start(r#"{"without": ["power_instant"]}"#);
    assert_eq!(bench.names()[..2], ["energy", "power_average"]);
    let bench = Bench::start("{}");
    assert_eq!(bench.names()[..2], ["energy", "power_instant"]);
}

#[test]
fn a_board_without_memory_info_still_measures() {
    let mut bench = Bench::start(r#"{"without": ["memory_info", "utilisation", "clocks", "power_limit"]}"#);
    assert_eq!(bench.names(), ["energy", "power_instant", "temperature", "throttle"]);
    let energy = bench.sensor("energy");
    let from = bench.sample_for(energy, 100 * MS);
    assert!(bench.energy(energy, Span::new(from, from.plus_nanos(100 * MS))).value().get() > 0.0);
}

#[test]
fn gauges_are_in_their_units() {
    let mut bench = Bench::start(
        r#"{"memory_used": 5, "memory_total": 8, "temperature": 71, "utilisation": 90, "memory_utilisation": 30,
            "clocks": [4300, 2619], "power_limit": 350.5, "throttle": 1032}"#,
    );
    let temperature = bench.sensor("temperature");
    let from = bench.sample_for(temperature, MS);
    let span = Span::new(from, from.plus_nanos(MS));
    let mean = |name: &str| bench.timeline.level(bench.sensor(name), span).unwrap().mean;
    for (name, value) in [
        ("power_instant", 100.0),
        ("temperature", 71.0),
        ("memory_used", 5.0),
        ("memory_total", 8.0),
        ("utilisation", 0.9),
        ("memory_utilisation", 0.3),
        ("clock", 4.3e9), // more than 32 bits hold
        ("memory_clock", 2.619e9),
        ("power_limit", 350.5),
        ("throttle", 1032.0),
    ] {
        assert!((mean(name) / value - 1.0).abs() < 1e-9, "{name} is {}", mean(name));
    }
}

#[test]
fn a_counter_that_is_no_field_is_read_by_its_own_call() {
    let mut bench = Bench::start(r#"{"without": ["energy_field"]}"#);
    assert_eq!(bench.names()[..2], ["energy", "power_instant"]);
    let errors = bench.errors_of_one();
    assert!(median(&errors) < 0.01, "{errors:?}");
}

#[test]
fn a_driver_that_hangs_does_not_hold_up_the_end() {
    let mut bench = Bench::start(r#"{"hang_after": 100}"#);
    let power = bench.sensor("power_instant");
    bench.sample(|t| t.known_until(power).is_some());
    let mut rounds = 0;
    while bench.meter.cost().rounds != rounds {
        rounds = bench.meter.cost().rounds;
        clock::sleep_until(clock::now().plus_nanos(500 * MS));
    }
    assert!(rounds > 0 && !bench.meter.stop());
    let known = bench.timeline.known_until(power);
    bench.meter.drain(|r| bench.timeline.push(r));
    assert!(bench.timeline.known_until(power) > known, "what was read until then is there");
}

#[test]
fn power_said_live_is_measured_as_it_was_said() {
    let folder = tempfile::tempdir().unwrap();
    let scenario = r#"{"live": "live.txt", "devices": [{"refresh_ms": 20}]}"#;
    let sim = Sim::install(folder.path(), scenario).unwrap();
    let mut live = Live::create(folder.path().join("live.txt")).unwrap();
    live.set(0, 50.0).unwrap();
    let mut bench = Bench::on((folder, sim));
    let energy = bench.sensor("energy");
    let from = bench.sample_for(energy, 0);
    for watts in [400.0, 20.0, 300.0, 80.0] {
        live.set(0, watts).unwrap();
        let until = clock::now().plus_nanos(150 * MS);
        bench.sample(|t| t.known_until(energy).is_some_and(|k| k >= until));
    }
    let span = Span::new(from, bench.timeline.known_until(energy).unwrap());
    let truth = bench.sim.scenario.joules(0, span.start().nanos(), span.end().nanos()).unwrap();
    let measured = bench.energy(energy, span);
    assert!((measured.value().get() - truth).abs() <= measured.bound().get(), "{measured:?} for {truth} J");
    assert!((measured.value().get() / truth - 1.0).abs() < 0.05, "{measured:?} for {truth} J");
}

#[test]
fn an_nvml_that_starts_failing_leaves_gaps_and_invents_nothing() {
    let mut bench = Bench::start(r#"{"fail_after": 150}"#);
    let (energy, power) = (bench.sensor("energy"), bench.sensor("power_instant"));
    bench.sample(|t| t.anomalies(energy).failed > 0);
    let alive = Span::new(bench.start, clock::now());
    bench.sample(|t| t.anomalies(power).failed > 20);
    let span = Span::new(bench.start, clock::now());
    let (counted, integrated) = (bench.energy(energy, span), bench.energy(power, span));
    assert!(counted.coverage() < 1.0 && counted.value().get() <= bench.truth(0, alive), "{counted:?}");
    let covered = bench.truth(0, span) * integrated.coverage();
    assert!(
        integrated.coverage() < 1.0 && (integrated.value().get() - covered).abs() < 1e-6,
        "{integrated:?}"
    );
    let dead = Span::new(bench.timeline.known_until(energy).unwrap(), span.end());
    assert_eq!(bench.timeline.energy(energy, dead), None);
}

#[test]
fn a_counter_counts_on_while_it_cannot_be_read_and_a_gauge_does_not() {
    let mut bench = Bench::start(r#"{"fail_after": 150, "fail_for": 60}"#);
    let (energy, power) = (bench.sensor("energy"), bench.sensor("power_instant"));
    let from = bench.sample_for(energy, 0);
    bench.sample(|t| t.anomalies(power).failed >= 20);
    let failed = clock::now();
    bench.sample(|t| t.known_until(energy).is_some_and(|k| k > failed.plus_nanos(300 * MS)));
    let span = Span::new(from, failed.plus_nanos(300 * MS));
    let (counted, integrated) = (bench.energy(energy, span), bench.energy(power, span));
    let truth = bench.truth(0, span);
    assert!((counted.value().get() - truth).abs() <= counted.bound().get(), "{counted:?} for {truth} J");
    assert_eq!(counted.coverage(), 1.0);
    assert!(integrated.coverage() < 1.0 && integrated.value().get() < truth, "{integrated:?} for {truth} J");
}

#[test]
fn two_boards_are_two_sensors() {
    let mut bench = Bench::start(
        r#"{"uuid": "GPU-a", "power": [[0, 100]]}, {"uuid": "GPU-b", "name": "Other", "power": [[0, 250]]}"#,
    );
    let panel = Panel::choose(bench.meter.sensors(), None, &[]).unwrap();
    assert_eq!((panel.sensors.len(), panel.perimeter), (2, Perimeter::Device));
    let windows = bench.windows(&panel.sensors);
    for (board, id) in ["GPU-a", "GPU-b"].into_iter().enumerate() {
        let sensor = bench.sensor(&format!("{id}/energy"));
        assert_eq!(sensor, panel.sensors[board]);
        assert_eq!(bench.meter.sensors()[usize::from(sensor.0)].device.id, id);
        let errors = bench.errors(sensor, board, &windows);
        assert!(median(&errors) < 0.01, "{id}: {errors:?}");
    }
}

#[test]
fn an_older_library_offers_less_and_still_measures() {
    let (folder, sim) = install("{}");
    for symbol in [
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetName",
    ] {
        remove(&sim.library, symbol);
    }
    let mut bench = Bench::on((folder, sim));
    assert_eq!(
        bench.names(),
        [
            "power_average",
            "temperature",
            "utilisation",
            "memory_utilisation",
            "clock",
            "memory_clock",
            "power_limit",
            "throttle"
        ]
    );
    let power = bench.sensor("power_average");
    // A mean over a second says nothing final about its first and its last.
    let from = bench.sample_for(power, 1_200 * MS).plus_nanos(1_000 * MS);
    let energy = bench.energy(power, Span::new(from, from.plus_nanos(100 * MS)));
    assert_eq!(energy.method(), Method::Integral);
    assert!((energy.value().get() - 10.0).abs() < 1e-3, "{energy:?}");
}

#[test]
fn every_extra_may_be_missing() {
    let (folder, sim) = install("{}");
    for symbol in [
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetPowerManagementDefaultLimit",
        "nvmlDeviceGetCurrentClocks",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
        "nvmlSystemGetNVMLVersion",
        "nvmlSystemGetDriverVersion",
    ] {
        remove(&sim.library, symbol);
    }
    let facts = open(&sim.library).unwrap().tried.remove(0).facts;
    let keys: Vec<&str> = facts.keys().map(|k| k.rsplit('/').next().unwrap()).collect();
    assert_eq!(keys, ["index", "name", "boards"]);
    let mut bench = Bench::on((folder, sim));
    assert_eq!(bench.names()[..2], ["energy", "power_average"]);
    assert_eq!(bench.meter.sensors()[1].averaged_s, 1.0, "unknown boards are taken for new ones");
    let errors = bench.errors_of_one();
    assert!(median(&errors) < 0.01, "{errors:?}");
}

#[test]
fn an_older_name_for_throttling_will_do() {
    let (folder, sim) = install(r#"{"throttle": 4}"#);
    remove(&sim.library, "nvmlDeviceGetCurrentClocksEventReasons");
    assert!(Bench::on((folder, sim)).names().contains(&"throttle"));
}

#[test]
fn a_missing_library_says_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libnvidia-ml.so.1");
    let error = open(&library).err().unwrap().to_string();
    let expected = format!(
        "source \"nvml\" cannot be read: {} not found; install the NVIDIA driver, or give --source-param nvml.library=PATH",
        library.display()
    );
    assert_eq!(error, expected);
    std::fs::write(&library, "not a library").unwrap();
    let error = open(&library).err().unwrap().to_string();
    assert!(error.contains("cannot load"), "{error}");
}

#[test]
fn a_library_that_is_not_nvml_is_refused_by_what_it_lacks() {
    for symbol in ["nvmlInit_v2", "nvmlDeviceGetUUID"] {
        let (_folder, sim) = install("{}");
        remove(&sim.library, symbol);
        let error = open(&sim.library).err().unwrap().to_string();
        assert!(error.contains(&format!("has no function {symbol}")), "{error}");
    }
}

#[test]
fn a_driver_without_boards_and_one_that_does_not_start_are_refused() {
    let (_folder, sim) = install("");
    let error = open(&sim.library).err().unwrap().to_string();
    assert!(error.contains("shows no board") && error.contains("999.00"), "{error}");

    let (folder, sim) = install("{}");
    std::fs::write(folder.path().join("libnvidia-ml.so.1.json"), "garbage").unwrap();
    let error = open(&sim.library).err().unwrap().to_string();
    assert!(error.contains("NVML does not start") && error.contains("999"), "{error}");
}

#[test]
fn users_of_one_library_do_not_shut_each_other_down() {
    let (_folder, sim) = install("{}");
    let mut first = open(&sim.library).unwrap();
    drop(open(&sim.library).unwrap());
    first.sources[0].read(source::Depth::All, &mut |i, value| assert!(value.is_some(), "sensor {i}"));
    assert!(first.pretended[0].contains("libnvidia-ml.so.1"), "a stand-in is said");
}
