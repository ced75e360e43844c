//! The energy of one tick, divided by what was done in it.

use super::flight::{Due, Part, ratio};
use crate::cost::{DRAWS, PARTS, Weights, Work};

/// What was done in a tick, and what it drew.
pub(super) struct Tick<'a> {
    energy: f64,
    /// As far as readings covered it.
    seconds: f64,
    ours: &'a [Part],
    others: Part,
    /// Work for ours.
    work: Work,
    /// Whether anybody was worked for; else all waited, and share the waiting.
    at_work: bool,
    /// Seconds of presence, or of waiting.
    all: f64,
}

/// Joules for what is shared, and for a unit of work at the costs taken.
type Rates = (f64, f64);

impl<'a> Tick<'a> {
    /// Of some joules; `None` if nobody was there for any time.
    pub(super) fn new(energy: f64, seconds: f64, ours: &'a [Part], others: Part) -> Option<Self> {
        let mut work = Work { iterations: iterations(ours, seconds), ..Work::default() };
        ours.iter().for_each(|p| p.add_to(&mut work));
        let present = ours.iter().map(Part::presence).sum::<f64>() + others.presence();
        let at_work = present > 0.0;
        let all = if at_work { present } else { ours.iter().map(|p| p.waiting).sum() };
        (all > 0.0).then_some(Self { energy, seconds, ours, others, work, at_work, all })
    }

    /// All work that was done.
    pub(super) fn work(&self) -> (Work, f64) {
        let mut work = self.work;
        self.others.add_to(&mut work);
        (work, self.seconds)
    }

    /// By these weights: what each of ours owes, in order, and what others do.
    pub(super) fn divide(&self, weights: &Weights, mut owe: impl FnMut(usize, &Due<'_>)) -> (f64, f64) {
        let costs = weights.joules.parts();
        let idle = weights.idle_part(self.energy, self.seconds);
        let (shared, scale) = self.rates(idle, costs, 1.0);
        let drawn = self.drawn(weights);
        let mut charged = 0.0;
        for (i, part) in self.ours.iter().enumerate() {
            let due = self.due(part, shared, costs.map(|c| c * scale), &drawn);
            charged += due.queue + due.prefill + due.decode + due.shared;
            owe(i, &due);
        }
        let others = self.others;
        let added = costs[1] * others.prefill + costs[2] * others.decode + costs[3] * others.context;
        (charged, shared * others.presence() / self.all + scale * added)
    }

    fn is_of_one(&self) -> bool {
        self.ours.len() == 1 && self.others.presence() == 0.0
    }

    /// If others did so many times as much as is taken.
    fn rates(&self, idle: f64, costs: [f64; PARTS], times: f64) -> Rates {
        let mut work = self.work;
        self.others.times(times).add_to(&mut work);
        let weight: f64 = costs.iter().zip(work.parts()).map(|(c, w)| c * w).sum();
        let scale = ratio(self.energy - idle, weight);
        // What no work explains is shared like idle power.
        let shared = scale.map_or(self.energy, |s| idle + s * costs[0] * work.iterations);
        let among = self.all / (self.all + self.others.presence() * (times - 1.0));
        (shared * among, scale.unwrap_or(0.0))
    }

    /// Joules for what is shared, a prompt token, a token and one looked back at, under other costs.
    fn drawn(&self, weights: &Weights) -> [[f64; DRAWS]; PARTS] {
        let mut drawn = [[0.0; DRAWS]; PARTS];
        if self.is_of_one() {
            // Whatever work costs, one that is alone pays for all of it.
            drawn[0] = [self.energy; DRAWS];
            return drawn;
        }
        let [of_shared, of_prefill, of_decode, of_context] = &mut drawn;
        let all = of_shared.iter_mut().zip(of_prefill).zip(of_decode).zip(of_context).enumerate();
        for (draw, (((shared, prefill), decode), context)) in all {
            let (costs, times) = weights.draw(draw);
            let idle = weights.idle_drawn(draw, self.energy, self.seconds);
            let (of_all, scale) = self.rates(idle, costs, times);
            (*shared, *prefill, *decode, *context) =
                (of_all, scale * costs[1], scale * costs[2], scale * costs[3]);
        }
        drawn
    }

    fn due<'d>(
        &self,
        part: &Part,
        shared: f64,
        unit: [f64; PARTS],
        drawn: &'d [[f64; DRAWS]; PARTS],
    ) -> Due<'d> {
        let there = if self.at_work { part.presence() } else { part.waiting };
        let part_of_all = there / self.all;
        let shared = shared * part_of_all;
        let prefill = unit[1] * part.prefill;
        let decode = unit[2] * part.decode + unit[3] * part.context;
        let own = ratio(prefill + decode + shared, self.energy).unwrap_or(1.0).clamp(0.0, 1.0);
        Due {
            queue: if self.at_work { 0.0 } else { shared },
            prefill,
            decode,
            shared: if self.at_work { shared } else { 0.0 },
            others: 1.0 - own,
            before: ratio(part.prefilling, part.presence()).unwrap_or(0.0),
            factors: match self.is_of_one() {
                true => [part_of_all, 0.0, 0.0, 0.0],
                false => [part_of_all, part.prefill, part.decode, part.context],
            },
            drawn,
        }
    }
}

/// Passes over the weights: as many as pieces came to each of those that decode, and one for each prompt while none does.
fn iterations(ours: &[Part], seconds: f64) -> f64 {
    let sum = |of: fn(&Part) -> f64| ours.iter().map(of).sum::<f64>();
    let decoding = ours.iter().map(|p| p.decoding).fold(0.0, f64::max).min(seconds);
    let pieces = ratio(sum(|p| p.pieces), sum(|p| p.decoding)).unwrap_or(0.0);
    let prompts = ratio(sum(|p| p.begun), sum(|p| p.prefilling)).unwrap_or(0.0);
    pieces * decoding + prompts * (seconds - decoding)
}
