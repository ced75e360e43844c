//! One sensor's readings as a curve: corners of energy so far and time covered so far, with what went wrong on the way.

use super::{Anomalies, Level};
use crate::estimate::Method;
use crate::sensor::{Kind, Sensor};
use crate::time::{Span, Stamp};
use std::collections::VecDeque;

/// No single device draws more: a counter that claims so was reset or lies. The largest boards sold draw about 2 kW.
const PLAUSIBLE_WATTS: f64 = 20_000.0;
/// A counter hands over what it gathered since its last refresh all at once, also between two polls a millisecond apart. The
/// slowest known are refreshed every half second. docs/method.md#windows
const LONGEST_REFRESH_S: f64 = 0.5;
/// The counters that wrap (RAPL) are refreshed every millisecond, so less may hide behind a wrap: a reset close to the end of
/// the range must not pass for one.
const WRAP_REFRESH_S: f64 = 0.05;
/// A counter that is read and does not move for this long is stuck; no hardware that is on draws nothing.
const STALL_NS: u64 = 2_000_000_000;

/// A gauge's last value stands for at most this long; after that the sensor is taken for dead.
const LONGEST_HOLD_NS: u64 = 2_000_000_000;

/// A corner of the curve.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    pub(super) at: Stamp,
    /// Joules (or the integral of a gauge) so far.
    pub(super) sum: f64,
    /// Nanoseconds covered so far.
    pub(super) covered: u64,
    /// Gauge: the value that holds from here. `None` ends the hold.
    pub(super) value: Option<f64>,
    /// Counter: how far off `at` may be, in nanoseconds. Gauge: how long its values were shown of late.
    pub(super) slack: u64,
    /// Gauge: the squares of change × time shown so far, in J².
    pub(super) rough: f64,
}

/// The curve at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    pub(super) sum: f64,
    pub(super) covered: u64,
}

#[derive(Debug, Clone)]
pub(super) struct Track {
    pub(super) counter: bool,
    wrap: Option<f64>,
    pub(super) method: Option<Method>,
    pub(super) gain: f64,
    pub(super) quantum: f64,
    /// Gauge: each value is the mean of so many nanoseconds before it was read.
    pub(super) averaged: u64,
    pub(super) nodes: VecDeque<Node>,
    last_poll: Option<Poll>,
    stalled: bool,
    /// Gauge: when its value last changed, and how long the value before had stood.
    changed: Stamp,
    shown: u64,
    pub(super) anomalies: Anomalies,
}

/// The last good poll of a counter.
#[derive(Debug, Clone, Copy)]
struct Poll {
    pub(super) at: Stamp,
    raw: f64,
    changed: bool,
}

impl Track {
    pub(super) fn new(sensor: &Sensor) -> Self {
        let (counter, wrap) = match sensor.kind {
            Kind::Counter { wrap } => (true, wrap),
            Kind::Gauge => (false, None),
        };
        Self {
            counter,
            wrap,
            method: sensor.energy_method(),
            gain: sensor.trust.gain(),
            quantum: sensor.quantum,
            averaged: (sensor.averaged_s.clamp(0.0, 60.0) * 1e9) as u64,
            nodes: VecDeque::new(),
            last_poll: None,
            stalled: false,
            changed: Stamp::default(),
            shown: 0,
            anomalies: Anomalies::default(),
        }
    }

    pub(super) fn push(&mut self, at: Stamp, value: Option<f64>) {
        // A mean is of the middle of its time.
        let at = at.minus_nanos(self.averaged / 2);
        let value = match value {
            Some(v) if !v.is_finite() || (self.counter && v < 0.0) => {
                self.anomalies.nonsense += 1;
                None
            }
            None => {
                self.anomalies.failed += 1;
                None
            }
            good => good,
        };
        let newest = self.last_poll.map(|p| p.at).max(self.nodes.back().map(|n| n.at));
        if newest.is_some_and(|n| at <= n) {
            self.anomalies.out_of_order += 1;
            return;
        }
        match (self.counter, value) {
            (true, Some(raw)) => self.poll(at, raw),
            (true, None) => {} // The counter itself goes on; the next good poll tells what it counted.
            (false, value) => self.hold(at, value),
        }
    }

    /// A gauge holds its value until the next reading.
    fn hold(&mut self, at: Stamp, value: Option<f64>) {
        let Some(last) = self.nodes.back().copied() else {
            self.nodes.push_back(Node { at, sum: 0.0, covered: 0, value, slack: 0, rough: 0.0 });
            self.changed = at;
            return;
        };
        let held = Self::held(&last, at);
        let sum = last.sum + last.value.unwrap_or(0.0) * held as f64 * 1e-9;
        let (mut slack, mut rough) = (last.slack, last.rough);
        if value != last.value {
            let shown = (at.nanos() - self.changed.nanos()).min(LONGEST_HOLD_NS);
            // A value that stood still by chance was not refreshed less often: the shorter of the last two.
            slack = if self.shown == 0 { shown } else { shown.min(self.shown) };
            (self.changed, self.shown) = (at, shown);
            if let Some((new, old)) = value.zip(last.value) {
                rough += ((new - old) * slack as f64 * 1e-9).powi(2);
            }
        }
        self.nodes.push_back(Node { at, sum, covered: last.covered + held, value, slack, rough });
    }

    /// For how many nanoseconds before `until` the value of `node` stands.
    fn held(node: &Node, until: Stamp) -> u64 {
        match node.value {
            Some(_) => (until.nanos() - node.at.nanos()).min(LONGEST_HOLD_NS),
            None => 0,
        }
    }

    /// A counter is polled faster than it changes; a corner is set where it changed, between the two polls that saw it.
    fn poll(&mut self, at: Stamp, raw: f64) {
        let Some(last) = self.last_poll else {
            self.last_poll = Some(Poll { at, raw, changed: false });
            return;
        };
        let seconds = at.since(last.at).get();
        let step = raw - last.raw;
        let delta = match self.wrap {
            Some(wrap) if step < 0.0 => step + wrap,
            _ => step,
        };
        let longest = if step < 0.0 { WRAP_REFRESH_S } else { LONGEST_REFRESH_S };
        if delta < 0.0 || delta > PLAUSIBLE_WATTS * seconds.max(longest) {
            self.anomalies.resets += 1;
            // What was counted since the last corner is lost: close the curve there, go on from here.
            let (sum, covered) = self.nodes.back().map_or((0.0, 0), |n| (n.sum, n.covered));
            // What it shows is as old as its refresh.
            let slack = (at.nanos() - last.at.nanos()).min((LONGEST_REFRESH_S * 1e9) as u64);
            self.nodes.push_back(Node { at, sum, covered, value: None, slack, rough: 0.0 });
            self.last_poll = Some(Poll { at, raw, changed: false });
            return;
        }
        if step < 0.0 {
            self.anomalies.wraps += 1;
        }
        if delta == 0.0 {
            let since_change = self.nodes.back().map_or(0, |n| at.nanos() - n.at.nanos());
            if since_change > STALL_NS && !self.stalled {
                self.anomalies.stalls += 1;
                self.stalled = true;
            }
            self.last_poll = Some(Poll { at, raw, changed: false });
            return;
        }
        // A counter that changed at the poll before too is refreshed faster than we poll: the value is as of now, or at most one
        // poll old.
        // After a gap in the polls, the refresh seen is as old as a refresh is long, not as the gap.
        let since = self.refresh_nanos().map_or(last.at, |refresh| last.at.max(at.minus_nanos(refresh)));
        let corner = if last.changed { at } else { since.midpoint(at) };
        let slack = (at.nanos() - since.nanos()) / 2;
        match self.nodes.back() {
            Some(n) => {
                let (sum, covered) = (n.sum + delta, n.covered + (corner.nanos() - n.at.nanos()));
                self.nodes.push_back(Node { at: corner, sum, covered, value: None, slack, rough: 0.0 });
            }
            // The first change: what was counted before it fell at an unknown time.
            None => self.nodes.push_back(Node {
                at: corner,
                sum: 0.0,
                covered: 0,
                value: None,
                slack,
                rough: 0.0,
            }),
        }
        self.stalled = false;
        self.last_poll = Some(Poll { at, raw, changed: true });
    }

    /// How long a refresh lately took: the longer of the last two steps, because one late poll makes one step short.
    fn refresh_nanos(&self) -> Option<u64> {
        let n = self.nodes.len();
        let step =
            |from: usize| Some(self.nodes.get(from + 1)?.at.nanos() - self.nodes.get(from)?.at.nanos());
        Some(step(n.checked_sub(3)?)?.max(step(n - 2)?))
    }

    /// The curve at `t`, bent at the `marks`; flat before the first corner and after the last, except that a gauge's last value
    /// holds on.
    pub(super) fn at(&self, t: Stamp, marks: &[Stamp]) -> Point {
        let after = self.nodes.partition_point(|n| n.at <= t);
        let Some(last) = after.checked_sub(1).map(|i| self.nodes[i]) else {
            let first = self.nodes.front();
            return Point { sum: first.map_or(0.0, |n| n.sum), covered: first.map_or(0, |n| n.covered) };
        };
        if !self.counter {
            let held = Self::held(&last, t);
            let sum = last.sum + last.value.unwrap_or(0.0) * held as f64 * 1e-9;
            return Point { sum, covered: last.covered + held };
        }
        match self.nodes.get(after) {
            Some(next) if next.covered > last.covered => {
                let gone = t.nanos() - last.at.nanos();
                Point { sum: last.sum + self.within(after - 1, t, marks), covered: last.covered + gone }
            }
            _ => Point { sum: last.sum, covered: last.covered },
        }
    }

    /// Joules from the corner that begins a step to `t`, in it: evenly, but bent where work is known to begin or end.
    fn within(&self, corner: usize, t: Stamp, marks: &[Stamp]) -> f64 {
        let (from, to) = (&self.nodes[corner], &self.nodes[corner + 1]);
        let energy = to.sum - from.sum;
        let (mut before, mut after) = ((from.at, 0.0), (to.at, energy));
        for (at, joules) in self.bends(corner, marks).into_iter().flatten() {
            if at <= t {
                before = (at, joules);
            } else {
                after = (at, joules);
                break;
            }
        }
        let length = after.0.since(before.0).get();
        let fraction = if length > 0.0 { t.since(before.0).get() / length } else { 0.0 };
        before.1 + (after.1 - before.1) * fraction
    }

    pub(super) fn level(&self, span: Span) -> Option<Level> {
        let (a, b) = (self.at(span.start(), &[]), self.at(span.end(), &[]));
        let covered = b.covered - a.covered;
        let first = self.nodes.partition_point(|n| n.at <= span.start()).saturating_sub(1);
        let mut values: Vec<f64> =
            self.nodes.range(first..).take_while(|n| n.at < span.end()).filter_map(|n| n.value).collect();
        if covered == 0 || values.is_empty() {
            return None;
        }
        values.sort_by(f64::total_cmp);
        Some(Level {
            mean: (b.sum - a.sum) / (covered as f64 * 1e-9),
            median: values[values.len() / 2],
            min: values[0],
            max: values[values.len() - 1],
        })
    }
}
