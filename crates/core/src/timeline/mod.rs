//! Readings in order. Its one question is [`Timeline::energy`]: the joules of any span, with a bound, or `None`.
//!
//! Every track, counter or gauge, is kept as the same thing: a piecewise-linear curve of energy so far and of time covered so
//! far. A window is a difference of two points on it, so windows are additive to rounding by construction, and what was
//! not covered adds to neither. docs/method.md#windows

mod bend;
mod open;
mod track;

use crate::estimate::Estimate;
use crate::sensor::{Reading, Sensor, SensorId};
use crate::time::{Span, Stamp};
use crate::units::Joules;
use serde::{Deserialize, Serialize};
use track::Track;

/// What a track saw that was not a plain reading. Counted, never billed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Anomalies {
    /// Reads that failed.
    pub failed: u64,
    /// Counter wraps, followed correctly.
    pub wraps: u64,
    /// Counter resets and impossible jumps: the energy across them is unknown and left out.
    pub resets: u64,
    /// Times a counter was read and did not move for two seconds.
    pub stalls: u64,
    /// Readings that were not finite or were negative.
    pub nonsense: u64,
    /// Readings not later than the one before them.
    pub out_of_order: u64,
}

impl Anomalies {
    /// Whether there was none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What people should know of it; a wrap is followed correctly and is nobody's worry.
    pub fn text(&self) -> Option<String> {
        let kinds = [
            (self.failed, "failed reads"),
            (self.stalls, "times stuck for more than two seconds"),
            (self.resets, "resets or impossible jumps (left out of the energy)"),
            (self.nonsense, "readings that make no sense"),
            (self.out_of_order, "readings out of order"),
        ];
        let seen = kinds.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}"));
        Some(seen.collect::<Vec<_>>().join(", ")).filter(|text| !text.is_empty())
    }
}

/// Mean and extremes of a gauge over a span.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Level {
    /// Time-weighted mean.
    pub mean: f64,
    /// Middle of the values read, each counted once.
    pub median: f64,
    /// Lowest value.
    pub min: f64,
    /// Highest value.
    pub max: f64,
}

/// All tracks of one session.
#[derive(Debug, Clone)]
pub struct Timeline {
    tracks: Vec<Track>,
    /// Moments at which work began or ended, in order.
    marks: Vec<Stamp>,
}

impl Timeline {
    /// An empty timeline for a run's sensor table.
    pub fn new(table: &[Sensor]) -> Self {
        Self { tracks: table.iter().map(Track::new).collect(), marks: Vec::new() }
    }

    /// Adds a reading; each sensor's readings come in order.
    pub fn push(&mut self, reading: &Reading) {
        if let Some(track) = self.tracks.get_mut(usize::from(reading.sensor.0)) {
            track.push(reading.at, reading.value);
        }
    }

    /// Work began or ended then. Counters are bent there from now on, so this comes before figures around it are asked for.
    pub fn mark(&mut self, at: Stamp) {
        let place = self.marks.partition_point(|m| *m <= at);
        if place.checked_sub(1).is_none_or(|i| self.marks[i] != at) {
            self.marks.insert(place, at);
        }
    }

    /// The energy a sensor saw in `span`. `None` if the sensor does not tell energy or covered nothing of it.
    pub fn energy(&self, sensor: SensorId, span: Span) -> Option<Estimate<Joules>> {
        let track = self.tracks.get(usize::from(sensor.0))?;
        let method = track.method?;
        let (a, b) = (track.at(span.start(), &self.marks), track.at(span.end(), &self.marks));
        let covered = b.covered - a.covered;
        if covered == 0 {
            return None;
        }
        let joules = b.sum - a.sum;
        // Two readings, each off by up to a step.
        let steps = track.quantum * std::f64::consts::SQRT_2;
        let bound = track.open(span).hypot(steps) + track.gain * joules.abs();
        let coverage = covered as f64 / (span.end().nanos() - span.start().nanos()) as f64;
        Some(Estimate::new(Joules(joules), Joules(bound), method, coverage))
    }

    /// The sum over several sensors of one span; `None` if none of them knows. A sensor that saw nothing adds nothing, and
    /// takes its part of the coverage with it.
    pub fn energy_of(&self, sensors: &[SensorId], span: Span) -> Option<Estimate<Joules>> {
        let known = || sensors.iter().filter_map(|s| self.energy(*s, span));
        let sum = known().reduce(|a, b| a + b)?;
        let coverage = known().map(|e| e.coverage()).sum::<f64>() / sensors.len() as f64;
        Some(Estimate::new(sum.value(), sum.bound(), sum.method(), coverage))
    }

    /// The part of [`Timeline::energy_of`]'s bound that comes from the sensors' gain errors.
    pub fn gain_of(&self, sensors: &[SensorId], span: Span) -> Joules {
        let gain =
            |s: &SensorId| Some(self.energy(*s, span)?.value() * self.tracks.get(usize::from(s.0))?.gain);
        sensors.iter().filter_map(gain).sum()
    }

    /// What one moment leaves open about the energy of these sensors up to it, at 95 %: the ends of a chain of windows.
    pub fn open_at(&self, sensors: &[SensorId], at: Stamp) -> Joules {
        self.tracks_of(sensors).map(|t| Joules(t.open_at(at, &self.marks))).sum()
    }

    /// What a window leaves open beside its ends, at 95 %; over a chain of windows it adds up in quadrature.
    pub fn open_within(&self, sensors: &[SensorId], span: Span) -> Joules {
        self.tracks_of(sensors).map(|t| Joules(t.open_within(span))).sum()
    }

    /// What a window that is work of its own leaves open because it is shorter than gauges average.
    pub fn open_short(&self, sensors: &[SensorId], span: Span) -> Joules {
        self.tracks_of(sensors).map(|t| Joules(t.open_short(span))).sum()
    }

    fn tracks_of(&self, sensors: &[SensorId]) -> impl Iterator<Item = &Track> {
        sensors.iter().filter_map(|s| self.tracks.get(usize::from(s.0)))
    }

    /// Mean and extremes of a gauge over a span.
    pub fn level(&self, sensor: SensorId, span: Span) -> Option<Level> {
        let track = self.tracks.get(usize::from(sensor.0))?;
        if track.counter {
            return None;
        }
        track.level(span)
    }

    /// Until when energy figures of this sensor are final. A gauge that averages has to see beyond an edge to bound it.
    pub fn known_until(&self, sensor: SensorId) -> Option<Stamp> {
        let track = self.tracks.get(usize::from(sensor.0))?;
        track.nodes.back().map(|n| n.at.minus_nanos(track.averaged))
    }

    /// What went wrong on a sensor so far.
    pub fn anomalies(&self, sensor: SensorId) -> Anomalies {
        self.tracks.get(usize::from(sensor.0)).map_or_else(Anomalies::default, |t| t.anomalies)
    }

    /// Until when nothing that is still to come changes a figure, also around marks: the step after has to be there, too.
    pub fn settled_until(&self, sensor: SensorId) -> Option<Stamp> {
        let track = self.tracks.get(usize::from(sensor.0))?;
        match track.counter {
            true => track.nodes.len().checked_sub(2).map(|i| track.nodes[i].at),
            false => self.known_until(sensor),
        }
    }

    /// How many corners are kept, of all sensors.
    pub fn kept(&self) -> usize {
        self.tracks.iter().map(|t| t.nodes.len()).sum()
    }

    /// Drops what no span starting at or after `at` needs, so that memory stays flat.
    pub fn forget_before(&mut self, at: Stamp) {
        for track in &mut self.tracks {
            // The step an edge falls into and the one before it, which its bound looks at.
            let at = at.minus_nanos(track.averaged);
            // Two more for the steps around a mark.
            while track.nodes.len() > 5 && track.nodes[4].at <= at {
                track.nodes.pop_front();
            }
        }
        // A mark before the first corner of every track bends nothing any more.
        let oldest = self.tracks.iter().filter_map(|t| t.nodes.front().map(|n| n.at)).min();
        let gone = oldest.map_or(0, |oldest| self.marks.partition_point(|m| *m < oldest));
        self.marks.drain(..gone);
    }
}

#[cfg(test)]
mod tests;
