//! The sampler: one thread that reads every source to absolute deadlines and never bursts to catch up.
//!
//! Counters are polled faster than they change; only the polls around a change are handed on, which is all that the timeline
//! needs to place it. The thread's own CPU time is metered.

use crate::clock;
use crate::source::{Depth, Source};
use rtrb::{Consumer, Producer, RingBuffer};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use wattle_core::sensor::{Kind, Reading, Sensor, SensorId};
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
}

#[derive(Default)]
struct Counters {
    stop: AtomicBool,
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
    thread: Option<JoinHandle<()>>,
}

impl Meter {
    /// Starts reading `sources` every `interval`.
    pub fn start(sources: Vec<Box<dyn Source>>, interval: Duration) -> std::io::Result<Meter> {
        let sensors: Vec<Sensor> = sources.iter().flat_map(|s| s.sensors().iter().cloned()).collect();
        let (producer, readings) = RingBuffer::new(RING);
        let counters = Arc::new(Counters::default());
        let mut sampler = Sampler {
            bases: sources
                .iter()
                .scan(0u16, |next, s| {
                    let base = *next;
                    *next += s.sensors().len() as u16;
                    Some(base)
                })
                .collect(),
            thin: sensors
                .iter()
                .map(|s| matches!(s.kind, Kind::Counter { .. }).then(Thin::default))
                .collect(),
            sources,
            out: producer,
            counters: Arc::clone(&counters),
        };
        let thread =
            std::thread::Builder::new().name("wattle-sampler".into()).spawn(move || sampler.run(interval))?;
        Ok(Meter { sensors, readings, counters, thread: Some(thread) })
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
        }
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
        thread.join().is_ok()
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Sampler {
    sources: Vec<Box<dyn Source>>,
    /// First sensor of each source.
    bases: Vec<u16>,
    /// State of counters, by sensor.
    thin: Vec<Option<Thin>>,
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
    fn run(&mut self, interval: Duration) {
        // Without this the kernel may round each sleep up by 50 µs.
        #[cfg(target_os = "linux")]
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let step = interval.as_nanos() as u64;
        let (start, mut deadline) = (clock::now(), clock::now());
        let mut next_slow = start;
        loop {
            let stopping = self.counters.stop.load(Ordering::Relaxed);
            let now = clock::now();
            let depth = if stopping || now >= next_slow { Depth::All } else { Depth::Fast };
            if depth == Depth::All {
                next_slow = now.plus_nanos(SLOW.as_nanos() as u64);
            }
            self.round(depth);
            let counters = &self.counters;
            counters.rounds.fetch_add(1, Ordering::Relaxed);
            counters.cpu_ns.store((clock::thread_cpu().get() * 1e9) as u64, Ordering::Relaxed);
            counters.wall_ns.store(clock::now().nanos() - start.nanos(), Ordering::Relaxed);
            if stopping {
                return;
            }
            deadline = deadline.plus_nanos(step);
            let late = clock::now().nanos().saturating_sub(deadline.nanos()) / step;
            if late > 0 {
                counters.missed.fetch_add(late, Ordering::Relaxed);
                deadline = deadline.plus_nanos(late * step);
            }
            clock::sleep_until(deadline);
        }
    }

    fn round(&mut self, depth: Depth) {
        let Sampler { sources, bases, thin, out, counters } = self;
        let mut emit = |reading: Reading| {
            if out.push(reading).is_err() {
                counters.lost.fetch_add(1, Ordering::Relaxed);
            }
        };
        for (source, base) in sources.iter_mut().zip(bases) {
            source.read(depth, &mut |local, value| {
                let id = *base + local as u16;
                let reading = Reading { sensor: SensorId(id), at: clock::now(), value };
                match thin.get_mut(usize::from(id)) {
                    Some(Some(counter)) => counter.pass(reading, &mut emit),
                    _ => emit(reading),
                }
            });
        }
        // On the way out nothing is held back.
        if counters.stop.load(Ordering::Relaxed) {
            thin.iter_mut().flatten().filter_map(|c| c.held.take()).for_each(emit);
        }
    }
}

impl Thin {
    /// Hands on a poll that changed together with the one before it, and otherwise one poll per heartbeat.
    fn pass(&mut self, reading: Reading, emit: &mut impl FnMut(Reading)) {
        let same = self.shown.is_some_and(|(at, value)| {
            value == reading.value && reading.at.nanos() - at.nanos() < HEARTBEAT_NS
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
    use wattle_core::sensor::{Device, DeviceKind, Perimeter, Quantity, Trust};

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
