//! The sampler: one thread that reads every source to absolute deadlines and never bursts to catch up.
//!
//! Counters are polled faster than they change; only the polls around a change are handed on, which is all that the timeline
//! needs to place it. How late each round was is a sensor like any other, and the thread's own CPU time is metered.

use crate::clock;
use crate::source::{Depth, Source};
use rtrb::{Consumer, Producer, RingBuffer};
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use wattle_core::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Reading, Sensor, SensorId, Trust};
use wattle_core::stats::Histogram;
use wattle_core::time::Stamp;
use wattle_core::units::Seconds;

/// Room for readings not yet drained: 3 s of 20 sensors at 1 kHz, 1.5 MB.
const RING: usize = 1 << 16;
/// Slow gauges (temperature, memory) are read this often.
const SLOW: Duration = Duration::from_millis(250);
/// A counter that does not change is still shown alive this often.
const HEARTBEAT_NS: u64 = 1_000_000_000;
/// A read that takes longer (a driver that hangs) is not waited for at the end.
const STOP_NS: u64 = 2_000_000_000;

/// What sampling itself cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// CPU time of the sampler thread.
    pub cpu: Seconds,
    /// How long it ran.
    pub wall: Seconds,
    /// Rounds of reading.
    pub rounds: u64,
    /// Deadlines missed by more than a whole interval; they are skipped, never made up for.
    pub missed: u64,
    /// Readings dropped because nobody drained them.
    pub lost: u64,
    /// Whether the thread runs before all ordinary ones, which the system grants to root.
    pub realtime: bool,
}

/// How times are spread, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The middle one.
    pub p50_s: f64,
    /// All but one in a hundred are shorter.
    pub p99_s: f64,
    /// The longest.
    pub max_s: f64,
}

/// How the sampler kept time; known once it has stopped.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Timing {
    /// How late rounds began.
    pub lateness: Option<Spread>,
    /// How long reads took, by source.
    pub reads: Vec<(String, Option<Spread>)>,
}

#[derive(Default)]
struct Counters {
    stop: AtomicBool,
    realtime: AtomicBool,
    cpu_ns: AtomicU64,
    wall_ns: AtomicU64,
    rounds: AtomicU64,
    missed: AtomicU64,
    lost: AtomicU64,
}

/// A running sampler. Dropping it stops the thread.
pub struct Meter {
    sensors: Vec<Sensor>,
    readings: Consumer<Reading>,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<Timing>>,
    timing: Option<Timing>,
}

impl Meter {
    /// Starts reading `sources` every `interval`, or as seldom as they ask for.
    pub fn start(sources: Vec<Box<dyn Source>>, interval: Duration) -> std::io::Result<Meter> {
        let mut sensors: Vec<Sensor> = sources.iter().flat_map(|s| s.sensors().iter().cloned()).collect();
        let lateness = SensorId(u16::try_from(sensors.len()).map_err(std::io::Error::other)?);
        sensors.push(lateness_sensor());
        let (producer, readings) = RingBuffer::new(RING);
        let counters = Arc::new(Counters::default());
        let mut base = 0;
        let slots = sources.into_iter().map(|source| {
            let first = base;
            base += source.sensors().len() as u16;
            Slot::new(source, first)
        });
        let mut sampler = Sampler {
            slots: slots.collect(),
            thin: sensors
                .iter()
                .map(|s| matches!(s.kind, Kind::Counter { .. }).then(Thin::default))
                .collect(),
            lateness,
            late: Times::default(),
            out: producer,
            counters: Arc::clone(&counters),
        };
        let thread =
            std::thread::Builder::new().name("wattle-sampler".into()).spawn(move || sampler.run(interval))?;
        Ok(Meter { sensors, readings, counters, thread: Some(thread), timing: None })
    }

    /// All sensors; a reading's id is a position here.
    pub fn sensors(&self) -> &[Sensor] {
        &self.sensors
    }

    /// Hands over what was read since the last call, in order per sensor.
    pub fn drain(&mut self, mut on: impl FnMut(&Reading)) {
        while let Ok(reading) = self.readings.pop() {
            on(&reading);
        }
    }

    /// What sampling has cost so far.
    pub fn cost(&self) -> Cost {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        Cost {
            cpu: Seconds(get(&self.counters.cpu_ns) as f64 * 1e-9),
            wall: Seconds(get(&self.counters.wall_ns) as f64 * 1e-9),
            rounds: get(&self.counters.rounds),
            missed: get(&self.counters.missed),
            lost: get(&self.counters.lost),
            realtime: self.counters.realtime.load(Ordering::Relaxed),
        }
    }

    /// How it kept time; `None` until it has stopped, and if it did not come back.
    pub fn timing(&self) -> Option<&Timing> {
        self.timing.as_ref()
    }

    /// Reads everything once more and stops; the last readings can still be drained. False if the thread did not come back
    /// from a read in time and was left behind.
    pub fn stop(&mut self) -> bool {
        self.counters.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return true };
        let patience = clock::now().plus_nanos(STOP_NS);
        while !thread.is_finished() {
            if clock::now() > patience {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // A source that panicked took its thread with it; what it had read is still here.
        self.timing = thread.join().ok();
        self.timing.is_some()
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The sampler watches itself, too.
fn lateness_sensor() -> Sensor {
    Sensor {
        name: "sampler/lateness".into(),
        source: "sampler".into(),
        device: Device { kind: DeviceKind::Process, id: "sampler".into(), name: "wattle's sampler".into() },
        quantity: Quantity::Lateness,
        perimeter: Perimeter::Host,
        kind: Kind::Gauge,
        trust: Trust::Measured { gain: 0.0 },
        quantum: 0.0,
        averaged_s: 0.0,
    }
}

/// Times seen so far.
#[derive(Default)]
struct Times {
    histogram: Histogram,
    longest: f64,
}

impl Times {
    fn push(&mut self, seconds: f64) {
        self.histogram.push(seconds);
        self.longest = self.longest.max(seconds);
    }

    fn spread(&self) -> Option<Spread> {
        let quantile = |q| self.histogram.quantile(q).map(|t| t.min(self.longest));
        Some(Spread { p50_s: quantile(0.5)?, p99_s: quantile(0.99)?, max_s: self.longest })
    }
}

/// One source and when it is read.
struct Slot {
    source: Box<dyn Source>,
    /// Its first sensor.
    base: u16,
    /// How often it asks to be read; every round if it does not say.
    every: Option<u64>,
    /// When it is next due: for everything, if it is read every round.
    next: Stamp,
    reads: Times,
}

impl Slot {
    fn new(source: Box<dyn Source>, base: u16) -> Self {
        let every = source.interval().map(|i| i.as_nanos() as u64);
        Self { source, base, every, next: Stamp::default(), reads: Times::default() }
    }

    /// How much of it is read in a round that should begin at `deadline`.
    fn due(&mut self, deadline: Stamp) -> Option<Depth> {
        if deadline >= self.next {
            self.next = deadline.plus_nanos(self.every.unwrap_or(SLOW.as_nanos() as u64));
            return Some(Depth::All);
        }
        self.every.is_none().then_some(Depth::Fast)
    }
}

struct Sampler {
    slots: Vec<Slot>,
    /// State of counters, by sensor.
    thin: Vec<Option<Thin>>,
    /// The sensor of how late we are.
    lateness: SensorId,
    late: Times,
    out: Producer<Reading>,
    counters: Arc<Counters>,
}

/// What a counter last showed, and its newest poll not handed on yet.
#[derive(Default)]
struct Thin {
    shown: Option<(Stamp, Option<f64>)>,
    held: Option<Reading>,
}

impl Sampler {
    fn run(&mut self, interval: Duration) -> Timing {
        // Without this the kernel may round each sleep up by 50 µs.
        #[cfg(target_os = "linux")]
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        self.counters.realtime.store(clock::go_first(), Ordering::Relaxed);
        let step = interval.as_nanos() as u64;
        let start = clock::now();
        let mut deadline = start;
        loop {
            let stopping = self.counters.stop.load(Ordering::Relaxed);
            self.round(deadline, stopping);
            let counters = &self.counters;
            let now = clock::now();
            counters.rounds.fetch_add(1, Ordering::Relaxed);
            counters.cpu_ns.store((clock::thread_cpu().get() * 1e9) as u64, Ordering::Relaxed);
            counters.wall_ns.store(now.nanos() - start.nanos(), Ordering::Relaxed);
            if stopping {
                let reads = |s: &Slot| {
                    let name = s.source.sensors().first().map_or("", |s| &s.source).to_owned();
                    (name, s.reads.spread())
                };
                return Timing {
                    lateness: self.late.spread(),
                    reads: self.slots.iter().map(reads).collect(),
                };
            }
            deadline = deadline.plus_nanos(step);
            let missed = now.nanos().saturating_sub(deadline.nanos()) / step;
            if missed > 0 {
                counters.missed.fetch_add(missed, Ordering::Relaxed);
                deadline = deadline.plus_nanos(missed * step);
            }
            clock::sleep_until(deadline);
        }
    }

    fn round(&mut self, deadline: Stamp, stopping: bool) {
        let Sampler { slots, thin, lateness, late, out, counters } = self;
        let mut emit = |reading: Reading| {
            if out.push(reading).is_err() {
                counters.lost.fetch_add(1, Ordering::Relaxed);
            }
        };
        let mut before = clock::now();
        let seconds = before.since(deadline).get();
        late.push(seconds);
        emit(Reading { sensor: *lateness, at: before, value: Some(seconds) });
        for slot in slots {
            let depth = match slot.due(deadline) {
                _ if stopping => Depth::All,
                Some(depth) => depth,
                None => continue,
            };
            let (began, mut seen) = (before, false);
            slot.source.read(depth, &mut |local, value| {
                let after = clock::now();
                let id = slot.base + local as u16;
                // A call that takes long tells of some moment in it.
                let reading = Reading { sensor: SensorId(id), at: before.midpoint(after), value };
                (before, seen) = (after, true);
                match thin.get_mut(usize::from(id)) {
                    Some(Some(counter)) => counter.pass(reading, &mut emit),
                    _ => emit(reading),
                }
            });
            before = clock::now();
            if seen {
                slot.reads.push(before.since(began).get());
            }
        }
        // On the way out nothing is held back.
        if stopping {
            thin.iter_mut().flatten().filter_map(|c| c.held.take()).for_each(emit);
        }
    }
}

impl Thin {
    /// Hands on a poll that changed together with the one before it, every one that failed, and otherwise one per heartbeat.
    fn pass(&mut self, reading: Reading, emit: &mut impl FnMut(Reading)) {
        let same = self.shown.is_some_and(|(at, value)| {
            value.is_some() && value == reading.value && reading.at.nanos() - at.nanos() < HEARTBEAT_NS
        });
        if same {
            self.held = Some(reading);
            return;
        }
        if let Some(before) = self.held.take() {
            emit(before);
        }
        self.shown = Some((reading.at, reading.value));
        emit(reading);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Steps {
        sensors: Vec<Sensor>,
        polls: u64,
    }

    impl Steps {
        fn new() -> Self {
            let sensor = |quantity, kind| Sensor {
                name: format!("test/{quantity:?}"),
                source: "test".into(),
                device: Device { kind: DeviceKind::Gpu, id: "0".into(), name: "test".into() },
                quantity,
                perimeter: Perimeter::Device,
                kind,
                trust: Trust::Measured { gain: 0.0 },
                quantum: 0.0,
                averaged_s: 0.0,
            };
            let energy = sensor(Quantity::Energy, Kind::Counter { wrap: None });
            Self { sensors: vec![energy, sensor(Quantity::Temperature, Kind::Gauge)], polls: 0 }
        }
    }

    impl Source for Steps {
        fn sensors(&self) -> &[Sensor] {
            &self.sensors
        }

        fn read(&mut self, depth: Depth, put: &mut dyn FnMut(usize, Option<f64>)) {
            self.polls += 1;
            put(0, Some((self.polls / 10) as f64));
            if depth == Depth::All {
                put(1, Some(40.0));
            }
        }
    }

    fn sample(rounds: u64) -> (Vec<Reading>, Cost) {
        let mut meter = Meter::start(vec![Box::new(Steps::new())], Duration::from_millis(1)).unwrap();
        while meter.cost().rounds < rounds {
            std::thread::yield_now();
        }
        meter.stop();
        let mut readings = Vec::new();
        meter.drain(|r| readings.push(*r));
        (readings, meter.cost())
    }

    #[test]
    fn only_the_polls_around_a_change_are_kept_and_nothing_is_lost_at_the_end() {
        let (readings, cost) = sample(100);
        let energy: Vec<f64> =
            readings.iter().filter(|r| r.sensor == SensorId(0)).filter_map(|r| r.value).collect();
        let last = (cost.rounds / 10) as f64;
        assert_eq!(energy.last(), Some(&last));
        for step in 1..(last as u64) {
            let seen = energy.iter().filter(|v| **v == step as f64).count();
            // The poll that saw it come and the last before it went; more only by heartbeat, and far from all ten.
            assert!((2..10).contains(&seen), "{step} seen {seen} times");
        }
        assert_eq!(cost.lost, 0);
    }

    #[test]
    fn slow_gauges_are_read_at_the_start_and_at_the_end() {
        let (readings, _) = sample(5);
        assert!(readings.iter().filter(|r| r.sensor == SensorId(1)).count() >= 2);
    }

    #[test]
    fn a_read_that_hangs_does_not_hold_up_the_end() {
        struct Hangs(Vec<Sensor>);
        impl Source for Hangs {
            fn sensors(&self) -> &[Sensor] {
                &self.0
            }
            fn read(&mut self, _: Depth, _: &mut dyn FnMut(usize, Option<f64>)) {
                std::thread::sleep(Duration::from_secs(600));
            }
        }
        let mut meter =
            Meter::start(vec![Box::new(Hangs(Steps::new().sensors))], Duration::from_millis(1)).unwrap();
        assert!(!meter.stop());
    }

    #[test]
    fn how_late_each_round_was_is_kept_and_summed_up() {
        let mut meter = Meter::start(vec![Box::new(Steps::new())], Duration::from_millis(1)).unwrap();
        while meter.cost().rounds < 50 {
            std::thread::yield_now();
        }
        assert_eq!(meter.timing(), None);
        meter.stop();
        let mut late = Vec::new();
        meter.drain(|r| late.extend((r.sensor == SensorId(2)).then_some(r.value).flatten()));
        assert_eq!(late.len() as u64, meter.cost().rounds);
        let timing = meter.timing().unwrap();
        let spread = timing.lateness.unwrap();
        assert_eq!(spread.max_s, late.iter().copied().fold(0.0, f64::max));
        assert!(spread.p50_s <= spread.p99_s && spread.p99_s <= spread.max_s);
        assert_eq!(timing.reads.len(), 1);
        assert_eq!(timing.reads[0].0, "test");
        assert!(timing.reads[0].1.unwrap().p50_s > 0.0);
    }

    #[test]
    fn a_source_that_asks_for_less_is_read_less_often() {
        struct Slow(Steps);
        impl Source for Slow {
            fn sensors(&self) -> &[Sensor] {
                &self.0.sensors
            }
            fn read(&mut self, depth: Depth, put: &mut dyn FnMut(usize, Option<f64>)) {
                assert_eq!(depth, Depth::All);
                put(1, Some(1.0));
            }
            fn interval(&self) -> Option<Duration> {
                Some(Duration::from_millis(20))
            }
        }
        let sources: Vec<Box<dyn Source>> = vec![Box::new(Steps::new()), Box::new(Slow(Steps::new()))];
        let mut meter = Meter::start(sources, Duration::from_millis(1)).unwrap();
        while meter.cost().rounds < 100 {
            std::thread::yield_now();
        }
        meter.stop();
        let cost = meter.cost();
        let mut slow = 0;
        meter.drain(|r| slow += u64::from(r.sensor == SensorId(3)));
        // One in twenty of the deadlines, whether met or missed, the first, and one at the end.
        let most = (cost.rounds + cost.missed) / 20 + 2;
        assert!((3..=most).contains(&slow), "{slow} of {most}");
    }

    #[test]
    fn its_own_cost_is_metered() {
        let (_, cost) = sample(50);
        assert!(cost.cpu.get() > 0.0 && cost.wall.get() >= cost.cpu.get() * 0.5);
    }

    #[test]
    fn what_nobody_drains_is_counted_as_lost() {
        struct Flood(Vec<Sensor>);
        impl Source for Flood {
            fn sensors(&self) -> &[Sensor] {
                &self.0
            }
            fn read(&mut self, _: Depth, put: &mut dyn FnMut(usize, Option<f64>)) {
                (0..RING).for_each(|_| put(1, Some(1.0)));
            }
        }
        let mut meter =
            Meter::start(vec![Box::new(Flood(Steps::new().sensors))], Duration::from_millis(1)).unwrap();
        while meter.cost().rounds < 2 {
            std::thread::yield_now();
        }
        meter.stop();
        assert!(meter.cost().lost >= RING as u64);
    }
}
