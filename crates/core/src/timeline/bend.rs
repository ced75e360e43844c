//! Where work begins and ends, power changes. A counter's step that such a moment falls into is bent there: before it power is
//! that of the step before, after it that of the step after. docs/method.md#bends

use super::open::GAP;
use super::track::Track;
use crate::time::Stamp;

/// A moment and the joules of its step up to it.
pub(super) type Bend = (Stamp, f64);

impl Track {
    /// The marks that fall into a step.
    pub(super) fn marks_in<'a>(&self, corner: usize, marks: &'a [Stamp]) -> &'a [Stamp] {
        let (Some(from), Some(to)) = (self.nodes.get(corner), self.nodes.get(corner + 1)) else { return &[] };
        let first = marks.partition_point(|m| *m <= from.at);
        let last = marks.partition_point(|m| *m < to.at);
        &marks[first..last.max(first)]
    }

    /// The bends of a step: at its first mark, and at its last if there are several. None where the neighbours say nothing, or
    /// contradict a change of power there.
    pub(super) fn bends(&self, corner: usize, marks: &[Stamp]) -> [Option<Bend>; 2] {
        let inside = self.marks_in(corner, marks);
        let (Some(first), Some(last)) = (inside.first(), inside.last()) else { return [None, None] };
        let energy = self.nodes[corner + 1].sum - self.nodes[corner].sum;
        let left = self.power_before(corner, marks).map(|w| w * first.since(self.nodes[corner].at).get());
        let right = self
            .power_after(corner, marks)
            .map(|w| energy - w * self.nodes[corner + 1].at.since(*last).get());
        let fits = |joules: &f64| (0.0..=energy).contains(joules);
        if first != last {
            let (left, right) = (left.filter(fits), right.filter(fits));
            // Energy does not go back.
            return match (left, right) {
                (Some(l), Some(r)) if l > r => [None, None],
                _ => [left.map(|l| (*first, l)), right.map(|r| (*last, r))],
            };
        }
        let joules = match (left, right) {
            (Some(left), Some(right)) => {
                if !self.agree(corner, *first, left, right, marks) {
                    return [None, None];
                }
                // Each is the surer the nearer its side.
                let fraction = first.since(self.nodes[corner].at).get() / self.seconds(corner);
                Some(left * (1.0 - fraction) + right * fraction)
            }
            (one, other) => one.or(other),
        };
        [joules.filter(fits).map(|j| (*first, j)), None]
    }

    /// Whether a change of power at the mark explains the energy of the step better than one anywhere could be told by
    /// interpolation.
    fn agree(&self, corner: usize, mark: Stamp, left: f64, right: f64, marks: &[Stamp]) -> bool {
        let (Some(before), Some(after)) = (self.power_before(corner, marks), self.power_after(corner, marks))
        else {
            return false;
        };
        let seconds = self.seconds(corner);
        let fraction = mark.since(self.nodes[corner].at).get() / seconds;
        (left - right).abs() <= (after - before).abs() * seconds * fraction * (1.0 - fraction)
    }

    /// Mean power of the step before, if nothing is known to have changed in it.
    fn power_before(&self, corner: usize, marks: &[Stamp]) -> Option<f64> {
        self.plain(corner.checked_sub(1)?, corner, marks)
    }

    fn power_after(&self, corner: usize, marks: &[Stamp]) -> Option<f64> {
        self.plain(corner + 1, corner, marks)
    }

    fn plain(&self, neighbour: usize, corner: usize, marks: &[Stamp]) -> Option<f64> {
        let watts = self.watts(neighbour)?;
        let near = self.seconds(corner) < GAP * self.seconds(neighbour);
        (near && self.marks_in(neighbour, marks).is_empty()).then_some(watts)
    }

    /// What a bend leaves open beside the stamps: how far its two sides disagree; with one side only, or with several marks in a step,
    /// half of what interpolation would.
    pub(super) fn open_bend(&self, corner: usize, t: Stamp, marks: &[Stamp]) -> Option<f64> {
        self.bends(corner, marks).into_iter().flatten().find(|(at, _)| *at == t)?;
        let inside = self.marks_in(corner, marks);
        let energy = self.nodes[corner + 1].sum - self.nodes[corner].sum;
        let before = self.power_before(corner, marks).map(|w| w * t.since(self.nodes[corner].at).get());
        let after =
            self.power_after(corner, marks).map(|w| energy - w * self.nodes[corner + 1].at.since(t).get());
        let fraction = t.since(self.nodes[corner].at).get() / self.seconds(corner);
        match (before, after) {
            (Some(left), Some(right)) if inside.len() == 1 => Some((left - right).abs()),
            _ => Some(0.5 * self.shape(corner, self.watts(corner)?, fraction)),
        }
    }
}
