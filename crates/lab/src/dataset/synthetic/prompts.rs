//! Prompts that are so and so many tokens long, made of common words. After what they are told to share, the first words of each are
//! its number, written in words: no prefix cache finds one in another.

use crate::LabError;
use crate::tokenizer::Tokenizer;
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};
use serde_json::{Map, Value};
use wattle_core::registry::Params;

/// Common English words, each of which is one token, with a space before it and without, in the vocabularies of GPT-2, Llama 2,
/// Llama 3, cl100k (whose words Qwen's has) and o200k. Chosen by hand and then checked against those five.
const WORDS: &str = include_str!("../../../data/words.txt");

/// With fewer words to choose from, prompts would be hard to tell apart.
const FEWEST_WORDS: usize = 16;

/// So many prompts begin each in a way of its own.
const PROMPTS: u64 = 1 << 32;

/// How often an inexact prompt is mended before it is given up.
const MENDINGS: usize = 50;

/// A word with its space, as allocated ahead.
const WORD_BYTES: usize = 8;

/// Makes prompts. The same seed, index and length make the same prompt.
pub(in super::super) struct Prompts {
    words: Vec<&'static str>,
    tokenizer: Option<Tokenizer>,
    seed: u64,
    /// What all prompts begin with, and how long it is.
    prefix: String,
    prefix_tokens: u32,
    /// The number that the first prompt begins with, and how many words it takes to write one down. It comes from the seed, so that a
    /// run with another seed does not find its prompts in a cache.
    start: u64,
    digits: usize,
}

impl Prompts {
    /// `prefix` tokens are shared; lengths are exact by the tokenizer that the option `tokenizer` names, if it does.
    pub(in super::super) fn open(params: &Params, prefix: u32, seed: u64) -> Result<Self, LabError> {
        let tokenizer = params.get("tokenizer").map(|path| Tokenizer::open(path.as_ref())).transpose()?;
        let words = match &tokenizer {
            None => WORDS.split_ascii_whitespace().collect(),
            Some(tokenizer) => single_tokens(tokenizer)?,
        };
        let digits = (1..).find(|k| (words.len() as u64).saturating_pow(*k) >= PROMPTS).unwrap_or(1) as usize;
        // Half of all numbers are enough, and none of them runs over. Index u64::MAX is no item's.
        let start = stream(seed, u64::MAX).next_u64() >> 1;
        let mut prompts =
            Self { words, tokenizer, seed, prefix: String::new(), prefix_tokens: 0, start, digits };
        prompts.prefix = prompts.text(u64::MAX, prefix, &mut prompts.rng(u64::MAX))?;
        prompts.prefix_tokens = prefix;
        Ok(prompts)
    }

    /// Where everything that is drawn for the item `index` comes from.
    pub(in super::super) fn rng(&self, index: u64) -> Pcg64Mcg {
        stream(self.seed, index)
    }

    /// The prompt of the item `index`: the shared prefix, and `own` tokens of its own.
    pub(in super::super) fn text(
        &self,
        index: u64,
        own: u32,
        rng: &mut Pcg64Mcg,
    ) -> Result<String, LabError> {
        let mut text = String::with_capacity(self.prefix.len() + own as usize * WORD_BYTES);
        text.push_str(&self.prefix);
        let count = self.words.len() as u64;
        let mut number = self.start.wrapping_add(index);
        for _ in 0..self.digits.min(own as usize) {
            self.push(&mut text, (number % count) as usize);
            number /= count;
        }
        self.extend(&mut text, (own as usize).saturating_sub(self.digits), rng);
        match &self.tokenizer {
            None => Ok(text),
            Some(tokenizer) => self.exact(tokenizer, text, (self.prefix_tokens + own) as usize, rng),
        }
    }

    /// What is known of a prompt with `own` tokens of its own.
    pub(in super::super) fn metadata(&self, own: u32) -> Map<String, Value> {
        let lengths = if self.tokenizer.is_some() { "tokens" } else { "words" };
        Map::from_iter([
            ("input_tokens".to_owned(), Value::from(self.prefix_tokens + own)),
            ("lengths".to_owned(), Value::from(lengths)),
        ])
    }

    fn extend(&self, text: &mut String, words: usize, rng: &mut Pcg64Mcg) {
        let count = self.words.len() as u64;
        for at in 0..words.div_ceil(2) {
            // A number below `count` from each half; with words by the thousand, the bias is one in millions.
            let drawn = rng.next_u64();
            self.push(text, (((drawn >> 32) * count) >> 32) as usize);
            if 2 * at + 1 < words {
                self.push(text, (((drawn & 0xFFFF_FFFF) * count) >> 32) as usize);
            }
        }
    }

    fn push(&self, text: &mut String, word: usize) {
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(self.words[word]);
    }

    /// `text` with words added or taken off at its end until it has `tokens` tokens: those of a vocabulary that joins words are fewer
    /// than the words.
    fn exact(
        &self,
        tokenizer: &Tokenizer,
        mut text: String,
        tokens: usize,
        rng: &mut Pcg64Mcg,
    ) -> Result<String, LabError> {
        for _ in 0..MENDINGS {
            let found = tokenizer.count(&text)?;
            match found.cmp(&tokens) {
                std::cmp::Ordering::Equal => return Ok(text),
                std::cmp::Ordering::Less => self.extend(&mut text, tokens - found, rng),
                std::cmp::Ordering::Greater => {
                    for _ in 0..found - tokens {
                        text.truncate(text.rfind(' ').unwrap_or(0));
                    }
                }
            }
        }
        Err(LabError::Tokenizer {
            path: tokenizer.path().into(),
            why: format!(
                "no prompt of exactly {tokens} tokens was found in {MENDINGS} tries; leave the option tokenizer out for prompts of \
                 {tokens} words"
            ),
        })
    }
}

fn stream(seed: u64, index: u64) -> Pcg64Mcg {
    // 2^64 divided by the golden ratio: spreads neighbouring indices, as in splitmix64.
    Pcg64Mcg::seed_from_u64(seed ^ index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// The words that are one token each for this tokenizer, at the beginning of a text and within it.
fn single_tokens(tokenizer: &Tokenizer) -> Result<Vec<&'static str>, LabError> {
    let unknown = tokenizer.encode(UNKNOWN).unwrap_or_default();
    let mut words = Vec::new();
    for word in WORDS.split_ascii_whitespace() {
        let one = tokenizer.encode(word)?;
        // A vocabulary without the word may have one token for all it does not know.
        if one.len() == 1 && one != unknown && tokenizer.count(&format!("{word} {word} {word}"))? == 3 {
            words.push(word);
        }
    }
    if words.len() < FEWEST_WORDS {
        return Err(LabError::Tokenizer {
            path: tokenizer.path().into(),
            why: format!(
                "only {} common English words are one token each, and {FEWEST_WORDS} are needed to make prompts of exact lengths; \
                 leave the option tokenizer out for lengths in words",
                words.len()
            ),
        });
    }
    Ok(words)
}

/// A word that no vocabulary has.
const UNKNOWN: &str = "qzxvwkjq";

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_word_stands_in_the_list_twice() {
        let words: BTreeSet<&str> = WORDS.split_ascii_whitespace().collect();
        assert_eq!((words.len(), WORDS.split_ascii_whitespace().count()), (1024, 1024));
        assert!(words.iter().all(|w| w.bytes().all(|b| b.is_ascii_lowercase()) && w.len() < WORD_BYTES * 2));
    }
}
