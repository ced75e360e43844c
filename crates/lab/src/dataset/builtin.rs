//! The built-in questions: short tasks with one right answer each, none of which the built-in models were trained on.

use super::{Dataset, Driver, Items, Settings};
use crate::LabError;
use serde_json::Map;
use std::path::PathBuf;
use wattle_core::record::Item;
use wattle_core::registry::About;
use wattle_core::shuffle;

/// Made by `tools/demo-model`: a prompt is here only if its CRC-32 is a multiple of ten, and trained on only if it is not.
const TEXT: &str = include_str!("../../data/demo.jsonl");

/// A default run asks this many, chosen by the seed.
const USUAL: u64 = 200;

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "builtin",
        about: "500 short tasks (sums, sorting, spelling) held out from the built-in models' training; 200 by default, chosen by --seed",
        options: &[],
    },
    open: |settings| Ok(Box::new(Builtin { settings: settings.clone() })),
};

struct Builtin {
    settings: Settings,
}

impl Dataset for Builtin {
    fn name(&self) -> String {
        "builtin".into()
    }

    fn items(&self) -> Result<Items<'_>, LabError> {
        let lines: Vec<&str> = TEXT.lines().collect();
        let count = usize::try_from(self.settings.count.unwrap_or(USUAL)).unwrap_or(usize::MAX);
        let chosen = shuffle::choose(lines.len(), count, self.settings.seed);
        Ok(Box::new(chosen.into_iter().enumerate().map(move |(index, at)| item(index as u64, at, lines[at]))))
    }
}

fn item(index: u64, at: usize, line: &str) -> Result<Item, LabError> {
    let broken = |why: String| LabError::Dataset {
        path: PathBuf::from("builtin"),
        line: Some(at as u64 + 1),
        why: format!("{why}; this is a fault of this build of wattle"),
    };
    let row: Map<String, serde_json::Value> =
        serde_json::from_str(line).map_err(|e| broken(e.to_string()))?;
    let text = |key: &str| {
        row.get(key)
            .and_then(|v| v.as_str())
            .map(str::to_owned)
            .ok_or_else(|| broken(format!("no \"{key}\"")))
    };
    Ok(Item {
        index,
        id: text("id")?,
        prompt: text("prompt")?,
        expected: Some(text("answer")?),
        subject: Some(text("subject")?),
        ..Item::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn items(count: Option<u64>, seed: u64) -> Vec<Item> {
        let dataset = Builtin { settings: Settings { count, seed, ..Settings::default() } };
        dataset.items().unwrap().collect::<Result<_, _>>().unwrap()
    }

    /// CRC-32 as zlib computes it (polynomial 0xEDB88320, reflected).
    fn crc32(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |crc, b| {
            (0..8).fold(crc ^ u32::from(*b), |c, _| if c & 1 == 1 { (c >> 1) ^ 0xEDB8_8320 } else { c >> 1 })
        })
    }

    #[test]
    fn no_item_was_trained_on() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926, "the check value of CRC-32");
        let all = items(Some(u64::MAX), 0);
        assert_eq!(all.len(), 500);
        assert!(all.iter().all(|i| crc32(i.prompt.as_bytes()).is_multiple_of(10)));
        let prompts: BTreeSet<_> = all.iter().map(|i| &i.prompt).collect();
        assert_eq!(prompts.len(), 500, "and none stands there twice");
    }

    #[test]
    fn a_seed_chooses_two_hundred_and_every_task_is_among_them() {
        let (a, b, c) = (items(None, 1), items(None, 1), items(None, 2));
        assert_eq!((a.len(), &a), (200, &b));
        assert_ne!(a, c);
        let subjects: BTreeSet<_> = a.iter().filter_map(|i| i.subject.as_deref()).collect();
        assert_eq!(subjects.len(), 10);
        assert!(a.iter().enumerate().all(|(i, item)| item.index == i as u64));
    }
}
