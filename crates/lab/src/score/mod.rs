//! Scorers: right or wrong, offline. One file each, and two adjacent lines here.

use crate::LabError;
use wattle_core::registry::{self, About};

mod contains;
mod exact;

/// Every scorer there is.
pub const DRIVERS: &[Driver] = &[exact::DRIVER, contains::DRIVER];

/// How a scorer is found.
pub struct Driver {
    /// Its name, one line, its options.
    pub about: About,
    /// Opens it.
    pub open: fn() -> Box<dyn Scorer>,
}

/// Judges an answer.
pub trait Scorer: Send {
    /// 0 wrong to 1 right.
    fn score(&self, expected: &str, answer: &str) -> f64;
}

/// Opens the scorer called `name`.
pub fn open(name: &str) -> Result<Box<dyn Scorer>, LabError> {
    Ok((registry::find("scorer", DRIVERS, |d| d.about, name)?.open)())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scorer_knows_right_from_wrong_and_stays_in_range() {
        for driver in DRIVERS {
            let scorer = (driver.open)();
            assert_eq!(scorer.score("Paris", "Paris"), 1.0, "{}", driver.about.name);
            assert_eq!(scorer.score("Paris", "Rome"), 0.0, "{}", driver.about.name);
            for (expected, answer) in
                [("", ""), ("x", ""), ("", "x"), ("é", "e\u{301}"), ("a", &"a".repeat(10_000))]
            {
                assert!((0.0..=1.0).contains(&scorer.score(expected, answer)), "{}", driver.about.name);
            }
        }
    }
}
