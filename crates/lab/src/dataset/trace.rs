//! Requests as they came to a real service: when each was due and how long it was, from a file. What was asked is not in such files, so
//! prompts are made up.

use super::synthetic::TOKENIZER;
use super::synthetic::prompts::Prompts;
use super::{Dataset, Driver, Items, Settings};
use crate::LabError;
use arrivals::{Arrival, Arrivals, Column, Pace};
use std::path::{Path, PathBuf};
use wattle_core::record::Item;
use wattle_core::registry::{About, Opt, Params};

mod arrivals;

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "trace",
        about: "made-up prompts that come when, and are as long as, a file says (Mooncake, Azure, BurstGPT)",
        options: &[
            Opt { key: "path", about: "the file, JSON lines or CSV with a header (needed)" },
            Opt {
                key: "unit",
                about: "of times that are numbers: s, ms or us (ms for integers in JSON lines, else s)",
            },
            Opt { key: "speed", about: "2 is twice as fast as it was (1)" },
            TOKENIZER,
        ],
    },
    open: |settings| Ok(Box::new(Trace::open(settings)?)),
};

/// When requests are due, in seconds after the first, from a file that may hold nothing but times. Takes the options `unit` and `speed`.
pub(crate) fn due_times(
    path: &Path,
    params: &Params,
) -> Result<impl Iterator<Item = Result<f64, LabError>> + use<>, LabError> {
    Ok(rows(Arrivals::open(path, Pace::read(params)?)?).map(|row| row.map(|arrival| arrival.due_s)))
}

/// Rows until the end or the first that cannot be read.
fn rows(mut arrivals: Arrivals) -> impl Iterator<Item = Result<Arrival, LabError>> + Send {
    let mut failed = false;
    std::iter::from_fn(move || {
        if failed {
            return None;
        }
        let row = arrivals.next().transpose();
        failed = matches!(row, Some(Err(_)));
        row
    })
}

struct Trace {
    path: PathBuf,
    pace: Pace,
    prompts: Prompts,
    count: Option<u64>,
}

impl Trace {
    fn open(settings: &Settings) -> Result<Self, LabError> {
        let path = settings.params.get("path").ok_or_else(|| {
            LabError::Usage("dataset \"trace\" needs its file: --dataset-param path=FILE".into())
        })?;
        Ok(Self {
            path: path.into(),
            pace: Pace::read(&settings.params)?,
            prompts: Prompts::open(&settings.params, 0, settings.seed)?,
            count: settings.count,
        })
    }

    fn item(&self, index: u64, arrival: &Arrival) -> Result<Item, LabError> {
        let tokens =
            |column| arrival.tokens(column).map_err(|why| Arrivals::bad(&self.path, arrival.line, why));
        let (input, output) = (tokens(Column::Input)?, tokens(Column::Output)?);
        Ok(Item {
            index,
            id: arrival.line.to_string(),
            prompt: self.prompts.text(index, input, &mut self.prompts.rng(index))?,
            metadata: self.prompts.metadata(input),
            output_tokens: Some(output),
            due_s: Some(arrival.due_s),
            ..Item::default()
        })
    }
}

impl Dataset for Trace {
    fn name(&self) -> String {
        self.path.file_stem().map_or_else(|| "trace".into(), |s| s.to_string_lossy().into_owned())
    }

    fn items(&self) -> Result<Items<'_>, LabError> {
        let rows = rows(Arrivals::open(&self.path, self.pace)?);
        let items = rows.zip(0u64..).map(|(row, index)| row.and_then(|row| self.item(index, &row)));
        let count = self.count.map_or(usize::MAX, |c| usize::try_from(c).unwrap_or(usize::MAX));
        Ok(Box::new(items.take(count)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::census;
    use crate::tokenizer::tests as made_up;

    // The formats are those of the public traces; all rows are made up.
    const MOONCAKE: &str = "{\"timestamp\": 500, \"input_length\": 70, \"output_length\": 5, \"hash_ids\": [0, 1]}\n\
                            {\"timestamp\": 500, \"input_length\": 3, \"output_length\": 52, \"hash_ids\": [0]}\n\
                            {\"timestamp\": 3500, \"input_length\": 9, \"output_length\": 1, \"hash_ids\": []}\n";
    const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                         2023-12-31 23:59:59.9000000,70,5\r\n2023-12-31 23:59:59.9000000,3,52\r\n2024-01-01 00:00:02.9000000,9,1\r\n";
    const BURST: &str = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                         45,ChatGPT,70,5,75,Conversation log\n45.0,GPT-4,3,52,55,Conversation log\n48,ChatGPT,9,0,9,API log\n";

    fn written(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arrivals");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    fn params(params: &[(&str, &str)]) -> Params {
        params.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn open(
        text: &str,
        more: &[(&str, &str)],
        count: Option<u64>,
    ) -> Result<(tempfile::TempDir, Box<dyn Dataset>), LabError> {
        let (dir, path) = written(text);
        let mut params = params(more);
        params.insert("path".into(), path.display().to_string());
        Ok((dir, super::super::open("trace", &Settings { params, count, seed: 1 })?))
    }

    fn items(text: &str, more: &[(&str, &str)], count: Option<u64>) -> Vec<Item> {
        open(text, more, count).unwrap().1.items().unwrap().collect::<Result<_, _>>().unwrap()
    }

    fn error(text: &str) -> String {
        let (dir, dataset) = open(text, &[], None).unwrap();
        let error = census(dataset.as_ref()).unwrap_err().to_string();
        error.replace(&dir.path().display().to_string(), "DIR")
    }

    /// Due time, words of the prompt, tokens of the answer.
    fn told(items: &[Item]) -> Vec<(f64, usize, u32)> {
        let due = |i: &Item| (i.due_s.unwrap() * 1e6).round() / 1e6;
        items.iter().map(|i| (due(i), i.prompt.split(' ').count(), i.output_tokens.unwrap())).collect()
    }

    #[test]
    fn three_formats_tell_the_same() {
        for text in [MOONCAKE, AZURE, BURST] {
            assert_eq!(told(&items(text, &[], None)), [(0.0, 70, 5), (0.0, 3, 52), (3.0, 9, 1)], "{text}");
        }
        let first = &items(MOONCAKE, &[], Some(1))[0];
        assert_eq!(
            (first.id.as_str(), &first.metadata["input_tokens"], &first.metadata["lengths"]),
            ("1", &70.into(), &"words".into())
        );
    }

    #[test]
    fn speed_and_unit_are_the_users_choice() {
        let last = |text, more: &[_]| told(&items(text, more, None))[2].0;
        assert_eq!(last(MOONCAKE, &[("speed", "2")]), 1.5);
        assert_eq!(last(MOONCAKE, &[("unit", "s"), ("speed", "0.5")]), 6000.0);
        assert_eq!(last(BURST, &[("unit", "us")]), 3e-6);
        for wrong in [("speed", "0"), ("speed", "fast"), ("unit", "h")] {
            assert!(open(BURST, &[wrong], None).err().unwrap().is_usage(), "{wrong:?}");
        }
    }

    #[test]
    fn a_tokenizer_makes_the_lengths_exact() {
        let words: Vec<&str> = include_str!("../../data/words.txt").split_whitespace().take(40).collect();
        let dir = made_up::written(&made_up::word_level(&words));
        let all = items(AZURE, &[("tokenizer", &dir.path().display().to_string())], None);
        assert_eq!(told(&all), [(0.0, 70, 5), (0.0, 3, 52), (3.0, 9, 1)]);
        assert_eq!(all[0].metadata["lengths"], "tokens");
    }

    #[test]
    fn a_row_that_cannot_be_used_is_named() {
        for (text, told) in [
            (
                "{\"timestamp\":5,\"input_length\":1,\"output_length\":1}\n{\"timestamp\":4,\"input_length\":1,\"output_length\":1}\n",
                ":2: came before the line above it",
            ),
            (
                "{\"timestamp\":0,\"input_length\":1,\"output_length\":1}\n{\"timestamp\":1.5,\"input_length\":1,\"output_length\":1}\n",
                ":2: 1.5 is not a whole number as the times before it are; say unit=s",
            ),
            (
                "{\"timestamp\":0,\"output_length\":1}\n",
                ":1: no column input_length, ContextTokens or Request tokens",
            ),
            ("{\"timestamp\":0,\"input_length\":1}\n", ":1: no column output_length"),
            (
                "{\"timestamp\":0,\"input_length\":-1,\"output_length\":1}\n",
                ":1: -1 is not a length in tokens",
            ),
            (
                "{\"timestamp\":0,\"input_length\":1e12,\"output_length\":1}\n",
                ":1: 1000000000000.0 is not a length",
            ),
            ("{\"input_length\":1}\n", ":1: no column timestamp"),
            ("{\"timestamp\":\"soon\"}\n", ":1: \"soon\" is not a time"),
            ("{\"timestamp\":0,\n", ":1: not JSON"),
            (
                "timestamp,input_length,output_length\n1,2,3\n2023-11-16 18:17:03,2,3\n",
                ":3: \"2023-11-16 18:17:03\" is not written as the first",
            ),
            ("timestamp,input_length,output_length\n1,2\n", ":2: no column output_length"),
            ("1,2,3\n4,5,6\n", ":1: neither JSON"),
        ] {
            let error = error(text);
            assert!(error.starts_with(&format!("DIR/arrivals{told}")), "{text}: {error}");
        }
    }

    #[test]
    fn times_alone_are_enough_for_due_times() {
        let times = |text: &str, more: &[_]| {
            let (_dir, path) = written(text);
            due_times(&path, &params(more)).unwrap().collect::<Result<Vec<f64>, _>>()
        };
        assert_eq!(times("timestamp\n10\n\n10.5\n12\n", &[]).unwrap(), [0.0, 0.5, 2.0]);
        assert_eq!(
            times("{\"arrived_at\": 1.0}\n{\"arrived_at\": 3.0}\n", &[("speed", "4")]).unwrap(),
            [0.0, 0.5]
        );
        assert_eq!(times("time\n2024-05-10T00:00:00.5Z\n2024-05-10T00:01:00Z\n", &[]).unwrap(), [0.0, 59.5]);
        assert_eq!(times("", &[]).unwrap(), [0.0; 0]);
        assert!(times("timestamp\n2\n1\n", &[]).is_err());
    }

    #[test]
    fn the_same_items_come_again_and_no_two_alike() {
        let (_dir, dataset) = open(AZURE, &[], None).unwrap();
        let all = || dataset.items().unwrap().collect::<Result<Vec<Item>, _>>().unwrap();
        assert_eq!(all(), all());
        assert_ne!(all()[0].prompt.split(' ').next(), all()[1].prompt.split(' ').next());
    }
}
