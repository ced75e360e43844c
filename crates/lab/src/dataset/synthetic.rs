//! Prompts and answers of chosen lengths: what a server does depends on how long they are more than on what they say.

use super::{Dataset, Driver, Items, Settings};
use crate::LabError;
use prompts::Prompts;
use wattle_core::length::{LONGEST, Lengths};
use wattle_core::record::Item;
use wattle_core::registry::{About, Opt};

pub(super) mod prompts;

/// A run asks this many unless told otherwise.
const USUAL: u64 = 1000;

pub(super) const TOKENIZER: Opt = Opt {
    key: "tokenizer",
    about: "the model's tokenizer.json, or its folder: lengths are exact (without: words are counted)",
};

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "synthetic",
        about: "made-up prompts and answers of chosen lengths, no two prompts alike; 1000 by default",
        options: &[
            Opt {
                key: "input",
                about: "tokens of a prompt: 512, uniform:100:900, normal:512:64 or lognormal:512:0.6, the last two with :MIN:MAX if need be (256)",
            },
            Opt { key: "output", about: "tokens of an answer, written likewise (128)" },
            Opt { key: "prefix", about: "tokens that all prompts have in front of these, the same ones (0)" },
            TOKENIZER,
        ],
    },
    open: |settings| Ok(Box::new(Synthetic::open(settings)?)),
};

struct Synthetic {
    prompts: Prompts,
    input: Lengths,
    output: Lengths,
    count: u64,
}

impl Synthetic {
    fn open(settings: &Settings) -> Result<Self, LabError> {
        let lengths = |key: &str, usual: u32| match settings.params.get(key) {
            None => Ok(Lengths::fixed(usual)),
            Some(text) => text.parse().map_err(|e| LabError::Usage(format!("--dataset-param {key}: {e}"))),
        };
        let prefix = settings.params.get("prefix").map_or(Ok(0), |text| {
            text.trim().parse().ok().filter(|n| *n <= LONGEST).ok_or_else(|| {
                LabError::Usage(format!(
                    "--dataset-param prefix: \"{text}\" is not a whole number from 0 to {LONGEST}"
                ))
            })
        })?;
        let (input, output) = (lengths("input", 256)?, lengths("output", 128)?);
        let prompts = Prompts::open(&settings.params, prefix, settings.seed)?;
        Ok(Self { prompts, input, output, count: settings.count.unwrap_or(USUAL) })
    }

    fn item(&self, index: u64) -> Result<Item, LabError> {
        let mut rng = self.prompts.rng(index);
        let (input, output) = (self.input.draw(&mut rng), self.output.draw(&mut rng));
        Ok(Item {
            index,
            id: index.to_string(),
            prompt: self.prompts.text(index, input, &mut rng)?,
            metadata: self.prompts.metadata(input),
            output_tokens: Some(output),
            ..Item::default()
        })
    }
}

impl Dataset for Synthetic {
    fn name(&self) -> String {
        "synthetic".into()
    }

    fn items(&self) -> Result<Items<'_>, LabError> {
        Ok(Box::new((0..self.count).map(|index| self.item(index))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::census;
    use crate::tokenizer::{Tokenizer, tests as made_up};
    use std::collections::BTreeSet;
    use std::path::Path;

    fn open(params: &[(&str, &str)], count: Option<u64>, seed: u64) -> Result<Box<dyn Dataset>, LabError> {
        let params = params.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        super::super::open("synthetic", &Settings { params, count, seed })
    }

    fn items(params: &[(&str, &str)], count: u64, seed: u64) -> Vec<Item> {
        open(params, Some(count), seed).unwrap().items().unwrap().collect::<Result<_, _>>().unwrap()
    }

    fn words(item: &Item) -> usize {
        item.prompt.split(' ').count()
    }

    #[test]
    fn lengths_are_as_asked() {
        let usual = items(&[], 3, 0);
        assert!(usual.iter().all(|i| words(i) == 256 && i.output_tokens == Some(128)));
        assert_eq!(
            usual[0].metadata,
            *serde_json::json!({"input_tokens": 256, "lengths": "words"}).as_object().unwrap()
        );
        let drawn = items(&[("input", "uniform:1:40"), ("output", "normal:50:10:45:55")], 500, 0);
        assert!(drawn.iter().all(|i| i.metadata["input_tokens"] == words(i)));
        let (inputs, outputs): (BTreeSet<_>, BTreeSet<_>) =
            drawn.iter().map(|i| (words(i), i.output_tokens)).unzip();
        assert_eq!((inputs.first(), inputs.last()), (Some(&1), Some(&40)));
        assert_eq!((outputs.first(), outputs.last()), (Some(&Some(45)), Some(&Some(55))));
        assert_eq!(open(&[], None, 0).unwrap().items().unwrap().count(), 1000);
    }

    #[test]
    fn prompts_share_the_prefix_and_no_word_more() {
        let all = items(&[("input", "8"), ("prefix", "100")], 1000, 3);
        let beginning = |item: &Item, n: usize| item.prompt.split(' ').take(n).collect::<Vec<_>>().join(" ");
        let prefixes: BTreeSet<_> = all.iter().map(|i| beginning(i, 100)).collect();
        assert_eq!((prefixes.len(), words(&all[0]), &all[0].metadata["input_tokens"]), (1, 108, &108.into()));
        let beginnings: BTreeSet<_> = all.iter().map(|i| beginning(i, 101)).collect();
        assert_eq!(beginnings.len(), 1000, "as long as there are fewer prompts than words");
        let pairs: BTreeSet<_> = items(&[("input", "4")], 5000, 3).iter().map(|i| beginning(i, 2)).collect();
        assert_eq!(pairs.len(), 5000, "and then two words tell them apart");
    }

    #[test]
    fn one_seed_makes_the_same_items_for_ever() {
        let digest = |seed| {
            census(open(&[("input", "lognormal:60:1:1:200")], Some(50), seed).unwrap().as_ref())
                .unwrap()
                .sha256
        };
        assert_eq!(digest(1), digest(1));
        assert_ne!(digest(1), digest(2));
        assert_eq!(digest(1), "117b54479dec7c4be4534eb08164e8e31355aacdb6f186e6cbc33e00c1c5e0a7");
        assert_ne!(
            items(&[], 1, 1)[0].prompt[..4],
            items(&[], 1, 2)[0].prompt[..4],
            "another seed begins otherwise"
        );
    }

    /// Items made with this tokenizer, whose counts it confirms.
    fn exact(tokenizer: &serde_json::Value, input: &str, prefix: &str) -> Vec<Item> {
        let dir = made_up::written(tokenizer);
        let path = dir.path().display().to_string();
        let all = items(&[("input", input), ("prefix", prefix), ("tokenizer", &path)], 200, 5);
        let tokenizer = Tokenizer::open(Path::new(&path)).unwrap();
        for item in &all {
            assert_eq!(item.metadata["input_tokens"], tokenizer.count(&item.prompt).unwrap());
            assert_eq!(item.metadata["lengths"], "tokens");
        }
        all
    }

    const KNOWN: &[&str] = &[
        "able", "about", "act", "air", "all", "also", "and", "area", "art", "book", "city", "day", "end",
        "eye", "king", "food", "game", "river", "music",
    ];

    #[test]
    fn with_a_tokenizer_prompts_have_exactly_the_tokens_asked_for() {
        for tokenizer in [made_up::byte_level(KNOWN), made_up::word_level(KNOWN)] {
            let all = exact(&tokenizer, "uniform:1:300", "20");
            let used: BTreeSet<_> = all.iter().flat_map(|i| i.prompt.split(' ')).collect();
            assert_eq!(used, KNOWN.iter().copied().collect(), "words of several tokens are not used");
        }
    }

    #[test]
    fn a_vocabulary_that_joins_words_is_mended() {
        // Nothing keeps words apart, and "food art" is one token.
        let mut joining = made_up::byte_level(KNOWN);
        joining["pre_tokenizer"]["use_regex"] = false.into();
        let next = joining["model"]["vocab"].as_object().unwrap().len();
        joining["model"]["vocab"]["ĠfoodĠart"] = next.into();
        joining["model"]["merges"].as_array_mut().unwrap().push(serde_json::json!(["Ġfood", "Ġart"]));
        let all = exact(&joining, "100", "0");
        assert!(all.iter().any(|i| words(i) > 100), "some have more words than tokens");
    }

    #[test]
    fn a_tokenizer_that_knows_too_few_words_is_told() {
        let dir = made_up::written(&made_up::byte_level(&KNOWN[..3]));
        let error =
            open(&[("tokenizer", &dir.path().display().to_string())], None, 0).err().unwrap().to_string();
        assert!(
            error.contains("only 3 common English words") && error.contains("leave the option tokenizer out"),
            "{error}"
        );
    }

    #[test]
    fn wrong_lengths_are_told_with_the_option() {
        for (key, value) in [("input", "0"), ("output", "normal:1"), ("prefix", "-1")] {
            let error = open(&[(key, value)], None, 0).err().unwrap();
            assert!(
                error.is_usage()
                    && error.to_string().starts_with(&format!("--dataset-param {key}: \"{value}\"")),
                "{error}"
            );
        }
    }
}
