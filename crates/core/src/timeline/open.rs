//! What the readings leave open about a window: the part of its bound that is not the sensor's gain. docs/method.md#windows
//!
//! Factors were set by the accuracy study (`tests/accuracy`), which asserts how often the bound holds the truth.

use super::track::Track;
use crate::time::{Span, Stamp};

/// Standard deviations in a 95 % bound.
const SIGMAS: f64 = 1.96;
/// Counter: of what one change of power can move at worst. More than one, because a change may hide another. Accuracy study.
const CHANGE: f64 = 1.0;
/// Counter: standard deviations of energy that neither neighbour explains and that lies anywhere in the step. Less than 1.96,
/// because it is not all in one place. Accuracy study.
const BUMP: f64 = 1.4;
/// Counter: differences in power up to so many standard deviations of what the stamps alone make are none. Accuracy study.
const NOISE: f64 = 3.0;
/// Counter: a step so many times longer than a neighbour is a gap, and the neighbours say nothing about its inside. Above what
/// one late poll makes of a refresh of 10 ms.
pub(super) const GAP: f64 = 4.0;
/// Gauge: bound per root of the sum of squares of change × time shown. √2 of it is noise from reading to reading at 1.96
/// standard deviations; a change of power at an unknown moment needs less. Accuracy study.
const ROUGH: f64 = 1.4;
/// Gauge: how late its values may be, in times shown: half for holding them, a quarter for what went into them.
const LATE: f64 = 0.75;

/// Gauge that averages: of the range of its values around an edge, times the time it averages. One change of power in the middle
/// moves an eighth of that; more of them hide each other. Accuracy study.
const SMEAR: f64 = 0.15;
/// Gauge that averages: of the range of its values around a window, times the length of the window, if that is less. Accuracy study.
const SHORT: f64 = 1.0;

/// A window's edge in a covered step of a counter.
#[derive(Debug, Clone, Copy)]
struct Edge {
    /// The step's first corner.
    corner: usize,
    /// Where in the step, 0 to 1.
    fraction: f64,
    /// Mean power of the step.
    watts: f64,
}

impl Track {
    /// Half-width of what `span` leaves open, at 95 %, in joules.
    pub(super) fn open(&self, span: Span) -> f64 {
        if self.counter {
            return self.open_edges(span);
        }
        let (start, end) = (self.smear(span.start()), self.smear(span.end()));
        // A window that is short against the averaging cannot be further off than power is.
        let most = SHORT / SMEAR * start.max(end) * span.duration().get() / (self.averaged as f64 * 1e-9);
        self.open_changes(span).hypot(start.hypot(end).min(most))
    }

    /// What one moment leaves open about the energy up to it: of a chain of windows only the two ends count, because what one
    /// window has too much the next has too little. Of gauges only those that average have such ends.
    pub(super) fn open_at(&self, t: Stamp, marks: &[Stamp]) -> f64 {
        if !self.counter {
            return self.smear(t);
        }
        let Some(edge) = self.end_edge(t).or_else(|| self.start_edge(t)) else { return 0.0 };
        let even = || self.shape(edge.corner, edge.watts, edge.fraction);
        let shape = self.open_bend(edge.corner, t, marks).unwrap_or_else(even);
        let corners = [edge.corner, edge.corner + 1];
        let stamps: f64 = corners.into_iter().map(|c| (self.pull(&edge, c) * self.stamp_sd(c)).powi(2)).sum();
        shape.hypot(SIGMAS * stamps.sqrt()).hypot(self.quantum)
    }

    /// What a window leaves open whatever comes before and after it; over a chain of windows it adds up in quadrature. A gauge's.
    pub(super) fn open_within(&self, span: Span) -> f64 {
        if self.counter { 0.0 } else { self.open_changes(span) }
    }

    /// Counter: where in the steps that the edges cut did the energy fall, and when exactly were their corners?
    fn open_edges(&self, span: Span) -> f64 {
        let (Some(a), Some(b)) = (self.start_edge(span.start()), self.end_edge(span.end())) else {
            return 0.0;
        };
        let shape = if a.corner == b.corner {
            self.shape(a.corner, a.watts, b.fraction - a.fraction)
        } else {
            self.shape(a.corner, a.watts, a.fraction).hypot(self.shape(b.corner, b.watts, b.fraction))
        };
        // Edges close together share corners, whose errors then partly cancel.
        let corners = [a.corner, a.corner + 1].into_iter();
        let corners = corners.chain([b.corner, b.corner + 1].into_iter().filter(|c| *c > a.corner + 1));
        let pull = |corner| self.pull(&b, corner) - self.pull(&a, corner);
        let stamps: f64 = corners.map(|c| (pull(c) * self.stamp_sd(c)).powi(2)).sum();
        shape.hypot(SIGMAS * stamps.sqrt())
    }

    /// The edge at the start of a window; where nothing is covered, the beginning of the next step that is.
    fn start_edge(&self, t: Stamp) -> Option<Edge> {
        let after = self.nodes.partition_point(|n| n.at <= t);
        self.edge_at(t, after).or_else(|| {
            let next = |corner| Some(Edge { corner, fraction: 0.0, watts: self.watts(corner)? });
            (after..self.nodes.len()).find_map(next)
        })
    }

    /// The edge at the end of a window; where nothing is covered, the end of the step before.
    fn end_edge(&self, t: Stamp) -> Option<Edge> {
        let after = self.nodes.partition_point(|n| n.at <= t);
        self.edge_at(t, after).or_else(|| {
            let previous = |corner| Some(Edge { corner, fraction: 1.0, watts: self.watts(corner)? });
            (0..after.saturating_sub(1)).rev().find_map(previous)
        })
    }

    /// The edge at `t`, before the corner `after`, if that step is covered.
    fn edge_at(&self, t: Stamp, after: usize) -> Option<Edge> {
        let corner = after.checked_sub(1)?;
        let watts = self.watts(corner)?;
        Some(Edge { corner, fraction: t.since(self.nodes[corner].at).get() / self.seconds(corner), watts })
    }

    /// What is open about where the energy of a step lies, with `part` of the step's time on one side of the cut.
    ///
    /// One change from the power before to the power after, at the worst moment, moves change × part × (1 - part). Energy beyond
    /// both neighbours came in a bump somewhere.
    pub(super) fn shape(&self, corner: usize, watts: f64, part: f64) -> f64 {
        let seconds = self.seconds(corner);
        let near = |c: usize| self.watts(c).filter(|_| seconds < GAP * self.seconds(c));
        let (before, after) = match (corner.checked_sub(1).and_then(near), near(corner + 1)) {
            (Some(before), Some(after)) => (before, after),
            // A neighbour that is not there yet is taken to differ as far again.
            (Some(one), None) | (None, Some(one)) => (one, 2.0 * watts - one),
            // Alone or a gap: all of it may have come at once.
            (None, None) => (0.0, 0.0),
        };
        // Stamps that are off make constant power look uneven by so much.
        let noise = NOISE * watts * self.stamp_sd(corner).hypot(self.stamp_sd(corner + 1)) / seconds;
        let sure = |change: f64| (change * change - noise * noise).max(0.0).sqrt();
        let spread = part * (1.0 - part);
        let change = CHANGE * sure(after - before) * spread;
        let bump = BUMP * sure(watts - watts.clamp(before.min(after), before.max(after))) * spread.sqrt();
        // Energy only grows: nothing is further off than all of the step on one side.
        seconds * (change + bump).min(watts * part.max(1.0 - part))
    }

    /// Mean power of the step that begins at a corner, if it is covered.
    pub(super) fn watts(&self, corner: usize) -> Option<f64> {
        let (from, to) = (self.nodes.get(corner)?, self.nodes.get(corner + 1)?);
        (to.covered > from.covered).then(|| (to.sum - from.sum) / self.seconds(corner))
    }

    /// By how many watts a corner's stamp pulls at the curve at an edge.
    fn pull(&self, edge: &Edge, corner: usize) -> f64 {
        let share = match corner.checked_sub(edge.corner) {
            Some(0) => 1.0 - edge.fraction,
            Some(1) => edge.fraction,
            _ => return 0.0,
        };
        // Polls further apart than the step is long missed refreshes. The corner is then far off, and the power on one of its
        // sides looks too low.
        let missed = 2.0 * self.nodes[corner].slack as f64 * 1e-9 > self.seconds(edge.corner);
        let sides =
            || [corner.checked_sub(1), Some(corner)].into_iter().flatten().filter_map(|c| self.watts(c));
        share * if missed { sides().fold(edge.watts, f64::max) } else { edge.watts }
    }

    /// Length of a step.
    pub(super) fn seconds(&self, corner: usize) -> f64 {
        self.nodes[corner + 1].at.since(self.nodes[corner].at).get()
    }

    /// Standard deviation of a corner's stamp, in seconds: a refresh between two polls is as likely anywhere between them.
    fn stamp_sd(&self, corner: usize) -> f64 {
        self.nodes[corner].slack as f64 * 1e-9 / 3f64.sqrt()
    }

    /// Gauge: a mean over some time carries what happened there across an edge in its middle, as far as power changed around it.
    fn smear(&self, t: Stamp) -> f64 {
        SMEAR * self.averaged as f64 * 1e-9 * self.range(Span::new(t, t))
    }

    /// Gauge that averages: work that is shorter than its averaging is smeared far beyond its window.
    pub(super) fn open_short(&self, span: Span) -> f64 {
        let beyond = self.averaged as f64 * 1e-9 - span.duration().get();
        if self.counter || beyond <= 0.0 { 0.0 } else { beyond * self.range(span) }
    }

    /// By how much the values around a window differ, as far as the averaging reaches.
    fn range(&self, span: Span) -> f64 {
        if self.averaged == 0 {
            return 0.0;
        }
        let (from, until) = (span.start().minus_nanos(self.averaged), span.end().plus_nanos(self.averaged));
        let first = self.nodes.partition_point(|n| n.at <= from).saturating_sub(1);
        let values = self.nodes.range(first..).take_while(|n| n.at < until).filter_map(|n| n.value);
        let (low, high) = values.fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(v), high.max(v)));
        (high - low).max(0.0)
    }

    /// Gauge: each change fell somewhere in the time that the value before it was shown. The delay common to all of them moves
    /// the window, which matters as far as power differs between its ends.
    fn open_changes(&self, span: Span) -> f64 {
        let node = |t: Stamp| self.nodes.get(self.nodes.partition_point(|n| n.at <= t).saturating_sub(1));
        let (Some(a), Some(b)) = (node(span.start()), node(span.end())) else { return 0.0 };
        // What changed just before the end shows in the value after it.
        let rough = node(span.end().plus_nanos(b.slack)).map_or(0.0, |n| n.rough - a.rough);
        let change = b.value.zip(a.value).map_or(0.0, |(b, a)| b - a);
        (ROUGH * rough.max(0.0).sqrt()).hypot(LATE * b.slack as f64 * 1e-9 * change)
    }
}
