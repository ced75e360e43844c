//! Right if the answer is the expected text, white space around it left out.

use super::{Driver, Scorer};
use wattle_core::registry::About;

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "exact",
        about: "the answer is the expected text, white space around it left out",
        options: &[],
    },
    open: || Box::new(Exact),
};

struct Exact;

impl Scorer for Exact {
    fn score(&self, expected: &str, answer: &str) -> f64 {
        f64::from(u8::from(expected.trim() == answer.trim()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_very_text_is_right() {
        for (expected, answer, score) in [
            ("46", "46", 1.0),
            ("46", " 46\n", 1.0),
            ("46", "46.", 0.0),
            ("Yes", "yes", 0.0),
            ("46", "The answer is 46", 0.0),
        ] {
            assert_eq!(Exact.score(expected, answer), score, "{expected:?} {answer:?}");
        }
    }
}
