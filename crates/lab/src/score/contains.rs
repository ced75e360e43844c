//! Right if the expected text stands in the answer as words of its own, whatever its case.

use super::{Driver, Scorer};
use wattle_core::registry::About;

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "contains",
        about: "the expected text stands in the answer as whole words, whatever its case",
        options: &[],
    },
    open: || Box::new(Contains),
};

struct Contains;

impl Scorer for Contains {
    fn score(&self, expected: &str, answer: &str) -> f64 {
        let (expected, answer) = (expected.trim().to_lowercase(), answer.to_lowercase());
        if expected.is_empty() {
            return 0.0;
        }
        let stands_alone = |(at, found): (usize, &str)| {
            let before = answer[..at].chars().next_back();
            let after = answer[at + found.len()..].chars().next();
            // Only a letter or digit that runs on into the match makes it part of another word: "4" is not in "42".
            let runs_on = |edge: Option<char>, outside: Option<char>| {
                edge.is_some_and(char::is_alphanumeric) && outside.is_some_and(char::is_alphanumeric)
            };
            !runs_on(found.chars().next(), before) && !runs_on(found.chars().next_back(), after)
        };
        f64::from(u8::from(answer.match_indices(&expected).any(stands_alone)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_words_only() {
        for (expected, answer, score) in [
            ("Paris", "The capital is paris.", 1.0),
            ("4", "42", 0.0),
            ("4", "It is 4!", 1.0),
            ("4", "42 or 4", 1.0),
            ("", "anything", 0.0),
            ("straße", "Die STRASSE", 0.0),
            ("naïve", "so NAÏVE", 1.0),
            ("🙂", "ok🙂ok", 1.0),
        ] {
            assert_eq!(Contains.score(expected, answer), score, "{expected:?} {answer:?}");
        }
    }
}
