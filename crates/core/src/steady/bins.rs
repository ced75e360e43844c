//! Sums by time in flat memory: bins of one width on one grid, which join in pairs when time outgrows them.

use crate::time::{Span, Stamp};
use std::collections::VecDeque;

/// At most so many bins.
const MOST: usize = 512;
/// The shortest bin: 1/64 s, as fast as the fastest counters are refreshed, give or take.
const SHORTEST_NS: u64 = 15_625_000;

/// Sums of `C` columns by time. Bins lie on a grid that begins at the clock's zero, so that those of one width fit each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Bins<const C: usize> {
    width: u64,
    /// Position of the first bin on the grid.
    first: u64,
    sums: VecDeque<[f64; C]>,
}

impl<const C: usize> Default for Bins<C> {
    fn default() -> Self {
        Self::of_width(SHORTEST_NS)
    }
}

impl<const C: usize> Bins<C> {
    /// Empty ones of this width, in nanoseconds.
    pub fn of_width(width: u64) -> Self {
        Self { width, first: 0, sums: VecDeque::new() }
    }

    /// Adds to a column at one moment.
    pub fn add(&mut self, at: Stamp, column: usize, amount: f64) {
        let bin = self.reach(at);
        self.sums[bin][column] += amount;
    }

    /// Adds `rate` times the seconds of `span` that lie in each bin.
    pub fn spread(&mut self, span: Span, column: usize, rate: f64) {
        if span.is_empty() {
            return;
        }
        self.reach(span.start());
        let last = self.reach(span.end().minus_nanos(1));
        let mut bin = self.reach(span.start());
        let mut from = span.start();
        while bin <= last {
            let until = Stamp::from_nanos((self.first + bin as u64 + 1) * self.width).min(span.end());
            self.sums[bin][column] += rate * until.since(from).get();
            (from, bin) = (until, bin + 1);
        }
    }

    /// Makes room for a moment and says in which bin it lies.
    pub fn reach(&mut self, at: Stamp) -> usize {
        loop {
            let place = at.nanos() / self.width;
            if self.sums.is_empty() {
                self.first = place;
            }
            let (first, end) = (self.first.min(place), (self.first + self.sums.len() as u64).max(place + 1));
            if end - first <= MOST as u64 {
                (first..self.first).for_each(|_| self.sums.push_front([0.0; C]));
                self.first = first;
                self.sums.resize((end - first) as usize, [0.0; C]);
                return (place - first) as usize;
            }
            self.double();
        }
    }

    /// Doubles the width until it is at least `width`.
    pub fn widen(&mut self, width: u64) {
        while self.width < width {
            self.double();
        }
    }

    fn double(&mut self) {
        if !self.first.is_multiple_of(2) {
            self.sums.push_front([0.0; C]);
        }
        let pairs = self.sums.make_contiguous().chunks(2);
        self.sums = pairs.map(|pair| std::array::from_fn(|c| pair.iter().map(|b| b[c]).sum())).collect();
        (self.width, self.first) = (self.width * 2, self.first / 2);
    }

    /// The bins that `span` touches, cut to it, with their sums.
    pub fn within(&self, span: Span) -> impl Iterator<Item = (Span, [f64; C])> + '_ {
        let places = span.start().nanos() / self.width..span.end().nanos().div_ceil(self.width);
        places.filter_map(move |place| {
            let stamp = |place: u64| Stamp::from_nanos(place * self.width);
            let bin = Span::new(stamp(place), stamp(place + 1)).intersect(span)?;
            let sums = place.checked_sub(self.first).and_then(|i| self.sums.get(i as usize));
            Some((bin, sums.copied().unwrap_or([0.0; C])))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn span(from: u64, until: u64) -> Span {
        Span::new(Stamp::from_nanos(from), Stamp::from_nanos(until))
    }

    proptest! {
        #[test]
        fn nothing_is_lost_however_long_it_takes(
            spans in prop::collection::vec((0u64..1 << 44, 0u64..1 << 38), 1..40),
        ) {
            let mut bins = Bins::<2>::default();
            for (start, length) in &spans {
                bins.spread(span(*start, start + length), 0, 3.0);
                bins.add(Stamp::from_nanos(*start), 1, 1.0);
            }
            prop_assert!(bins.sums.len() <= MOST);
            let seconds: f64 = spans.iter().map(|(_, length)| *length as f64 * 1e-9).sum();
            let end = spans.iter().map(|(start, length)| start + length).max().unwrap_or(0);
            let all: Vec<_> = bins.within(span(0, end + 1)).collect();
            let sum = |c: usize| all.iter().map(|(_, sums)| sums[c]).sum::<f64>();
            prop_assert!((sum(0) - 3.0 * seconds).abs() <= 1e-9 * seconds.max(1.0));
            prop_assert_eq!(sum(1), spans.len() as f64);
        }
    }

    #[test]
    fn what_is_joined_stays_where_it_was() {
        let mut bins = Bins::<1>::of_width(10);
        [15, 25, 35, 45].iter().for_each(|at| bins.add(Stamp::from_nanos(*at), 0, *at as f64));
        bins.widen(20);
        let all: Vec<_> = bins.within(span(0, 60)).map(|(s, [x])| (s, x)).collect();
        assert_eq!(all, [(span(0, 20), 15.0), (span(20, 40), 60.0), (span(40, 60), 45.0)]);
    }

    #[test]
    fn a_bin_holds_what_happened_in_it() {
        let mut bins = Bins::<1>::of_width(10);
        bins.spread(span(105, 127), 0, 1e9);
        let all: Vec<_> = bins.within(span(103, 140)).map(|(s, [x])| (s, x.round())).collect();
        let cut = [(103, 110, 5.0), (110, 120, 10.0), (120, 130, 7.0), (130, 140, 0.0)];
        assert_eq!(all, cut.map(|(a, b, x)| (span(a, b), x)));
    }
}
