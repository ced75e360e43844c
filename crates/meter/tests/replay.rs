//! Recorded runs, played back. The recordings are made up; their names say what is in them.
#![allow(clippy::unwrap_used)] // A test may, also in what its tests share.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use wattle_core::registry::Params;
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Reading, Sensor, SensorId, Trust};
use wattle_core::time::Stamp;
use wattle_meter::clock;
use wattle_meter::source::{self, Depth, Recording, Source, Wanted};

const MS: u64 = 1_000_000;
/// On the clock of the machine that recorded.
const BEGAN: u64 = 77_000 * MS;

fn sensors() -> Vec<Sensor> {
    let sensor = |name: &str, quantity, kind| Sensor {
        name: name.into(),
        source: "nvml".into(),
        device: Device { kind: DeviceKind::Gpu, id: "GPU-7".into(), name: "Board 7".into() },
        quantity,
        perimeter: Perimeter::Device,
        kind,
        trust: Trust::Measured { gain: 0.11 },
        quantum: 0.5,
        averaged_s: 1.0,
    };
    vec![
        sensor("nvml/GPU-7/energy", Quantity::Energy, Kind::Counter { wrap: Some(9e9) }),
        sensor("nvml/GPU-7/temperature", Quantity::Temperature, Kind::Gauge),
    ]
}

fn reading(sensor: u16, ms: u64, value: Option<f64>) -> Reading {
    Reading { sensor: SensorId(sensor), at: Stamp::from_nanos(BEGAN + ms * MS), value }
}

/// Milliseconds and values of the counter in `steps`; a gap at 90.
const STEPS: [(u64, Option<f64>); 5] =
    [(0, Some(100.0)), (30, Some(103.0)), (60, Some(106.0)), (90, None), (120, Some(112.0))];

fn recordings(run: &Path) -> Result<Recording, String> {
    let energy = |(ms, value)| Ok(reading(0, ms, value));
    let readings: Vec<Result<Reading, String>> = match run.to_str().unwrap() {
        "steps" => STEPS.map(energy).into(),
        "gauge" => vec![
            Ok(reading(0, 0, Some(1.0))),
            Ok(reading(1, 0, Some(40.0))),
            Ok(reading(1, 20, Some(41.0))),
            Ok(reading(0, 60_000, Some(2.0))),
        ],
        "stranger" => vec![Ok(reading(9, 0, Some(1.0))), Ok(reading(0, 60_000, Some(2.0)))],
        "empty" => vec![],
        "broken" => vec![Err("a torn page".into())],
        "torn" => vec![energy(STEPS[0]), Err("a torn page".into()), energy(STEPS[1])],
        "endless" => return Ok(Recording { sensors: sensors(), readings: Box::new(Endless(0)) }),
        other => return Err(format!("no run {other}")),
    };
    Ok(Recording { sensors: sensors(), readings: Box::new(readings.into_iter()) })
}

static TAKEN: AtomicUsize = AtomicUsize::new(0);
static LET_GO: AtomicBool = AtomicBool::new(false);

/// A recording without end, that knows how much of it was asked for.
struct Endless(u64);

impl Iterator for Endless {
    type Item = Result<Reading, String>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0 += 1;
        TAKEN.fetch_add(1, Ordering::SeqCst);
        Some(Ok(reading(0, self.0 * 1000, Some(self.0 as f64))))
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        LET_GO.store(true, Ordering::SeqCst);
    }
}

fn wanted(params: &[(&str, &str)]) -> Wanted {
    let params: Params = params.iter().map(|(k, v)| (format!("replay.{k}"), (*v).to_owned())).collect();
    Wanted { names: vec!["replay".into()], params, recordings: Some(recordings), ..Wanted::default() }
}

fn open(params: &[(&str, &str)]) -> Box<dyn Source> {
    source::open(&wanted(params)).unwrap().sources.remove(0)
}

fn refusal(params: &[(&str, &str)]) -> String {
    source::open(&wanted(params)).err().unwrap().to_string()
}

fn read(source: &mut dyn Source, depth: Depth) -> Vec<(usize, Option<f64>)> {
    let mut seen = Vec::new();
    source.read(depth, &mut |i, value| seen.push((i, value)));
    seen
}

#[test]
fn sensors_are_as_recorded_under_the_name_of_replay() {
    let source = open(&[("run", "steps")]);
    let expected = sensors().into_iter().map(|s| Sensor {
        name: format!("replay/{}", s.name),
        source: "replay".into(),
        ..s
    });
    assert_eq!(source.sensors(), expected.collect::<Vec<_>>());
    assert_eq!(source.pretended().unwrap(), "readings of run steps, played back");
    assert_eq!(source.facts()["run"], "steps");
    let fast = open(&[("run", "steps"), ("speed", "2.5")]);
    assert!(fast.pretended().unwrap().ends_with("at 2.5 times its speed"));
}

/// Plays `steps` to the end. Each value must be the newest that is due, by the clock before or after the read.
fn play(speed: f64) {
    let mut source = open(&[("run", "steps"), ("speed", &speed.to_string())]);
    let newest = |seconds: f64| {
        let due = STEPS.iter().rposition(|(ms, _)| *ms as f64 <= seconds * 1e3 * speed);
        due.unwrap()
    };
    let before_first = clock::now();
    let first = read(source.as_mut(), Depth::All);
    let after_first = clock::now();
    assert_eq!(first[0], (0, Some(100.0)));
    let mut over = false;
    while !over {
        let before = clock::now();
        let seen = read(source.as_mut(), Depth::Fast);
        let (low, high) =
            (newest(before.since(after_first).get()), newest(clock::now().since(before_first).get()));
        let right = STEPS[low..=high].iter().any(|(_, value)| seen == [(0, *value)]);
        over = seen == [(0, None), (1, None)];
        let last = STEPS.len() - 1;
        assert!(right || over && high == last, "{seen:?} is none of {:?}", &STEPS[low..=high]);
        std::thread::yield_now();
    }
    assert!(clock::now().since(before_first).get() * speed >= 0.12, "it is over too early");
    for depth in [Depth::All, Depth::Fast] {
        assert_eq!(read(source.as_mut(), depth), [(0, None), (1, None)], "and stays over");
    }
}

#[test]
fn readings_come_as_far_apart_as_they_were_and_then_there_is_nothing() {
    play(1.0);
}

#[test]
fn a_recording_can_be_played_faster_and_slower() {
    play(4.0);
    play(0.5);
}

#[test]
fn a_gauge_is_put_when_it_was_read_and_in_full_reads() {
    let mut source = open(&[("run", "gauge")]);
    let start = clock::now();
    let mut put = Vec::new();
    while put.len() < 2 {
        put.extend(read(source.as_mut(), Depth::Fast).into_iter().filter(|(i, _)| *i == 1));
        assert!(clock::now().since(start).get() < 60.0);
    }
    assert_eq!(put, [(1, Some(40.0)), (1, Some(41.0))]);
    assert_eq!(read(source.as_mut(), Depth::Fast), [(0, Some(1.0))]);
    assert_eq!(read(source.as_mut(), Depth::All), [(0, Some(1.0)), (1, Some(41.0))]);
}

#[test]
fn a_sensor_is_left_out_until_its_first_reading_is_due_and_a_stranger_always() {
    let mut source = open(&[("run", "stranger")]);
    for _ in 0..100 {
        assert_eq!(read(source.as_mut(), Depth::All), []);
    }
}

#[test]
fn a_recording_that_breaks_off_is_over_there() {
    let mut source = open(&[("run", "torn")]);
    let start = clock::now();
    while read(source.as_mut(), Depth::Fast) != [(0, None), (1, None)] {
        assert!(clock::now().since(start).get() < 60.0);
    }
}

#[test]
fn what_cannot_be_played_is_refused_with_the_reason() {
    assert!(refusal(&[("run", "nowhere")]).contains("cannot play back run nowhere: no run nowhere"));
    assert!(refusal(&[("run", "empty")]).contains("it has no readings"));
    assert!(refusal(&[("run", "broken")]).contains("a torn page"));
    for speed in ["0", "-1", "NaN", "inf", "fast", ""] {
        let refusal = refusal(&[("run", "steps"), ("speed", speed)]);
        assert!(refusal.contains("replay.speed is not a number above 0"), "{speed}: {refusal}");
    }
    assert!(refusal(&[("run", "steps"), ("scenario", "a.json")]).contains("both a scenario and a run"));
    assert!(refusal(&[("scenario", "a.json"), ("speed", "2")]).contains("speed is for a recorded run"));
    assert!(refusal(&[]).contains("replay.run=FOLDER"));
    let alone = Wanted { recordings: None, ..wanted(&[("run", "steps")]) };
    assert!(source::open(&alone).err().unwrap().to_string().contains("not opened here"));
}

#[test]
fn a_long_recording_is_read_a_little_ahead_and_let_go_with_its_source() {
    let mut source = open(&[("run", "endless")]);
    read(source.as_mut(), Depth::All);
    let (start, mut taken) = (clock::now(), 0);
    // Until the ring is full: then no more is asked for.
    while taken == 0 || taken != TAKEN.load(Ordering::SeqCst) {
        taken = TAKEN.load(Ordering::SeqCst);
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(clock::now().since(start).get() < 60.0);
    }
    assert!(taken < 100_000, "{taken} readings are kept");
    assert!(!LET_GO.load(Ordering::SeqCst));
    drop(source);
    assert!(LET_GO.load(Ordering::SeqCst), "its thread has ended");
}
