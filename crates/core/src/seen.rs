//! Which queries are finished: a set of indices in memory that does not grow with them.

use std::collections::BTreeMap;

/// A set of indices as ranges, first to last: a run of a billion queries in order is one range.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    ranges: BTreeMap<u64, u64>,
    len: u64,
}

impl Seen {
    /// Whether the index was added.
    pub fn contains(&self, index: u64) -> bool {
        self.ranges.range(..=index).next_back().is_some_and(|(_, last)| index <= *last)
    }

    /// Adds an index; false if it was there.
    pub fn insert(&mut self, index: u64) -> bool {
        if self.contains(index) {
            return false;
        }
        let before = self.ranges.range(..index).next_back().filter(|(_, last)| **last + 1 == index);
        let first = before.map_or(index, |(first, _)| *first);
        let last = index.checked_add(1).and_then(|next| self.ranges.remove(&next)).unwrap_or(index);
        self.ranges.insert(first, last);
        self.len += 1;
        true
    }

    /// How many there are.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_seen_once_in_any_order_and_neighbours_become_one_range() {
        let mut seen = Seen::default();
        for (n, index) in [5, 0, 2, 1, u64::MAX, 4, u64::MAX - 1, 3].into_iter().enumerate() {
            assert!(!seen.contains(index));
            assert!(seen.insert(index));
            assert!(!seen.insert(index));
            assert_eq!(seen.len(), n as u64 + 1);
        }
        assert_eq!(seen.ranges, BTreeMap::from([(0, 5), (u64::MAX - 1, u64::MAX)]));
    }
}
