//! The sensors of a recorded run, played back: its first reading at the first read, the others as far apart as they were.
//!
//! Reading takes what is due out of a ring that a thread of its own fills ahead of time, so memory stays the same however long
//! the recording is. When it is over, everything is a gap. A recording that cannot be read to its end is over there.

use super::super::{Depth, Recording, Settings, Source, Unavailable};
use super::FIX;
use crate::clock;
use rtrb::{Consumer, Producer, PushError, RingBuffer};
use std::collections::BTreeMap;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;
use wattle_core::sensor::{Kind, Reading, Sensor};
use wattle_core::time::Stamp;

/// Readings kept ahead: 3 s of 20 sensors at 1 kHz, 1.5 MB.
const AHEAD: usize = 1 << 16;
/// How long the thread that fills the ring rests when it is full.
const REST: Duration = Duration::from_millis(20);

/// A recorded run.
pub(super) struct Recorded {
    run: String,
    speed: f64,
    sensors: Vec<Sensor>,
    /// What each sensor shows. `None` until its first reading is due.
    shown: Vec<Option<Shown>>,
    /// When it was recorded first, and when it was read first.
    began: Stamp,
    first_read: Option<Stamp>,
    tape: Tape,
}

/// A value, and whether it was handed on. A gap is a value too.
#[derive(Clone, Copy)]
struct Shown {
    value: Option<f64>,
    new: bool,
}

impl Recorded {
    pub(super) fn open(settings: &Settings, run: &str, speed: f64) -> Result<Self, Unavailable> {
        if !(speed.is_finite() && speed > 0.0) {
            let why = "replay.speed is not a number above 0";
            return Err(Unavailable::new(why, "give a number, for example 2 for twice as fast"));
        }
        let bad = |e: &str| Unavailable::new(format!("cannot play back run {run}: {e}"), FIX);
        let recordings = settings.recordings.ok_or_else(|| bad("recorded runs are not opened here"))?;
        let Recording { sensors, mut readings } = recordings(Path::new(run)).map_err(|e| bad(&e))?;
        let first = match readings.next() {
            Some(first) => first.map_err(|e| bad(&e))?,
            None => return Err(bad("it has no readings")),
        };
        let renamed = |s: Sensor| Sensor { name: format!("replay/{}", s.name), source: "replay".into(), ..s };
        let sensors: Vec<Sensor> = sensors.into_iter().map(renamed).collect();
        let tape = Tape::start(first, readings).map_err(|e| bad(&e.to_string()))?;
        let shown = vec![None; sensors.len()];
        Ok(Self { run: run.into(), speed, sensors, shown, began: first.at, first_read: None, tape })
    }

    /// The moment of the recording that is played now.
    fn due(&mut self) -> Stamp {
        let now = clock::now();
        let played = now.nanos() - self.first_read.get_or_insert(now).nanos();
        self.began.plus_nanos((played as f64 * self.speed) as u64)
    }
}

impl Source for Recorded {
    fn sensors(&self) -> &[Sensor] {
        &self.sensors
    }

    /// A gauge is put when it was read in the recording, and in full reads. A counter is put always: what it showed just before
    /// a change places the change. A sensor whose first reading is not due yet is left out.
    fn read(&mut self, depth: Depth, put: &mut dyn FnMut(usize, Option<f64>)) {
        let due = self.due();
        if self.tape.is_over() {
            (0..self.sensors.len()).for_each(|i| put(i, None));
            return;
        }
        while let Some(Reading { sensor, value, .. }) = self.tape.next_until(due) {
            if let Some(shown) = self.shown.get_mut(usize::from(sensor.0)) {
                *shown = Some(Shown { value, new: true });
            }
        }
        for (i, (sensor, shown)) in self.sensors.iter().zip(&mut self.shown).enumerate() {
            let counts = matches!(sensor.kind, Kind::Counter { .. });
            if let Some(shown) = shown.as_mut().filter(|s| s.new || counts || depth == Depth::All) {
                put(i, shown.value);
                shown.new = false;
            }
        }
    }

    fn facts(&self) -> BTreeMap<String, String> {
        [("run", self.run.clone()), ("speed", self.speed.to_string())].map(|(k, v)| (k.to_owned(), v)).into()
    }

    fn pretended(&self) -> Option<String> {
        let speed =
            if self.speed == 1.0 { String::new() } else { format!(" at {} times its speed", self.speed) };
        Some(format!("readings of run {}, played back{speed}", self.run))
    }
}

/// Readings still to come, and the thread that gets them.
struct Tape {
    /// Taken away to tell the thread to end.
    readings: Option<Consumer<Reading>>,
    thread: Option<JoinHandle<()>>,
}

impl Tape {
    fn start(
        first: Reading,
        rest: impl Iterator<Item = Result<Reading, String>> + Send + 'static,
    ) -> std::io::Result<Self> {
        let (mut out, readings) = RingBuffer::new(AHEAD);
        // There at the first read, however late the thread starts.
        push(&mut out, first);
        let fill = move || {
            for reading in rest.map_while(Result::ok) {
                if !push(&mut out, reading) {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("wattle-replay".into()).spawn(fill)?;
        Ok(Self { readings: Some(readings), thread: Some(thread) })
    }

    /// The next reading, if it was taken no later than `due`.
    fn next_until(&mut self, due: Stamp) -> Option<Reading> {
        let readings = self.readings.as_mut()?;
        readings.peek().is_ok_and(|next| next.at <= due).then(|| readings.pop().ok()).flatten()
    }

    /// Whether every reading was taken out and no more will come.
    fn is_over(&self) -> bool {
        // In this order: after the thread has let go of the ring, nothing is added.
        self.readings.as_ref().is_none_or(|r| r.is_abandoned() && r.is_empty())
    }
}

/// Adds to the ring as soon as there is room; false when nobody wants it any more.
fn push(out: &mut Producer<Reading>, mut reading: Reading) -> bool {
    while let Err(PushError::Full(back)) = out.push(reading) {
        if out.is_abandoned() {
            return false;
        }
        reading = back;
        std::thread::sleep(REST);
    }
    true
}

impl Drop for Tape {
    fn drop(&mut self) {
        self.readings = None;
        if let Some(thread) = self.thread.take() {
            // It has nothing left to lose if it panicked.
            let _ = thread.join();
        }
    }
}
