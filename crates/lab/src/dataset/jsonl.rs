//! Questions from a JSON-lines file, one object a line, streamed: a file larger than memory works.

use super::{Dataset, Driver, Items, Settings};
use crate::LabError;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use wattle_core::record::Item;
use wattle_core::registry::{About, Opt};

/// A longer line is not a question.
const LONGEST_LINE: u64 = 64 << 20;

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "jsonl",
        about: "a JSON-lines file, one question a line",
        options: &[
            Opt { key: "path", about: "the file (needed)" },
            Opt { key: "prompt", about: "column with the question (prompt)" },
            Opt { key: "answer", about: "column with the right answer (answer, if there)" },
            Opt { key: "subject", about: "column with the topic (subject, if there)" },
            Opt { key: "id", about: "column with the id (id, if there; else the line number)" },
        ],
    },
    open: |settings| Ok(Box::new(Jsonl::open(settings)?)),
};

struct Jsonl {
    path: PathBuf,
    prompt: String,
    answer: Column,
    subject: Column,
    id: Column,
    count: Option<u64>,
}

/// A column, and whether the user named it: a named column must be there.
struct Column {
    name: String,
    named: bool,
}

impl Jsonl {
    fn open(settings: &Settings) -> Result<Self, LabError> {
        let get = |key: &str| settings.params.get(key);
        let column =
            |key: &str| Column { name: get(key).map_or(key, |n| n).to_owned(), named: get(key).is_some() };
        let path = get("path").ok_or_else(|| {
            LabError::Usage("dataset \"jsonl\" needs its file: --dataset-param path=FILE".into())
        })?;
        Ok(Self {
            path: path.into(),
            prompt: get("prompt").map_or("prompt", |n| n).to_owned(),
            answer: column("answer"),
            subject: column("subject"),
            id: column("id"),
            count: settings.count,
        })
    }

    fn item(&self, index: u64, line: u64, text: &str) -> Result<Item, LabError> {
        let bad = |why: String| LabError::Dataset { path: self.path.clone(), line: Some(line), why };
        let mut row: Map<String, Value> = serde_json::from_str(text).map_err(|e| {
            // The parser saw one line; which one it is in the file is said before.
            let error = e.to_string().replace(" at line 1 column ", " at column ");
            let hint = if text.trim_start().starts_with('[') {
                "this looks like a JSON array, and one object a line is needed: jq -c '.[]' makes that"
            } else {
                "each line must be one"
            };
            bad(format!("not a JSON object ({error}); {hint}"))
        })?;
        let names = row.keys().cloned().collect::<Vec<_>>().join(", ");
        let missing = |name: &str, option: &str| {
            bad(format!(
                "no column \"{name}\" (there is: {names}); name it with --dataset-param {option}=COLUMN"
            ))
        };
        let optional =
            |row: &mut Map<String, Value>, column: &Column, option: &str| match row.remove(&column.name) {
                Some(Value::Null) => Ok(None),
                Some(value) => Ok(Some(plain(value))),
                None if column.named => Err(missing(&column.name, option)),
                None => Ok(None),
            };
        let prompt = match row.remove(&self.prompt) {
            Some(Value::String(text)) => text,
            Some(other) => return Err(bad(format!("column \"{}\" must be text, not {other}", self.prompt))),
            None => return Err(missing(&self.prompt, "prompt")),
        };
        Ok(Item {
            index,
            expected: optional(&mut row, &self.answer, "answer")?,
            subject: optional(&mut row, &self.subject, "subject")?,
            id: optional(&mut row, &self.id, "id")?.unwrap_or_else(|| line.to_string()),
            prompt,
            metadata: row,
            ..Item::default()
        })
    }
}

/// Text as it is, anything else as JSON: an answer may be the number 42.
fn plain(value: Value) -> String {
    match value {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

impl Dataset for Jsonl {
    fn name(&self) -> String {
        self.path.file_stem().map_or_else(|| "jsonl".into(), |s| s.to_string_lossy().into_owned())
    }

    fn items(&self) -> Result<Items<'_>, LabError> {
        let mut lines = Lines::open(&self.path)?;
        let mut index = 0;
        let items = std::iter::from_fn(move || {
            if self.count.is_some_and(|count| index >= count) {
                return None;
            }
            let item = lines.next()?.and_then(|(line, text)| self.item(index, line, &text));
            index += 1;
            Some(item)
        });
        Ok(Box::new(items))
    }
}

/// The lines of a file that hold something, with their numbers.
pub(super) struct Lines {
    path: PathBuf,
    reader: BufReader<File>,
    line: u64,
}

impl Lines {
    pub(super) fn open(path: &Path) -> Result<Self, LabError> {
        let bad = |why: String| LabError::Dataset { path: path.into(), line: None, why };
        let file = File::open(path).map_err(|e| bad(format!("cannot open it: {e}")))?;
        if file.metadata().is_ok_and(|m| m.is_dir()) {
            return Err(bad("is a folder; name a file with --dataset-param path=FILE".into()));
        }
        Ok(Self { path: path.into(), reader: BufReader::new(file), line: 0 })
    }

    pub(super) fn next(&mut self) -> Option<Result<(u64, String), LabError>> {
        loop {
            self.line += 1;
            let bad = |why: String| LabError::Dataset { path: self.path.clone(), line: Some(self.line), why };
            let mut bytes = Vec::new();
            match self.reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut bytes) {
                Err(e) => return Some(Err(bad(format!("cannot read on: {e}")))),
                Ok(0) => return None,
                Ok(n) if n as u64 == LONGEST_LINE => {
                    return Some(Err(bad("longer than 64 MiB; is it JSON lines?".into())));
                }
                Ok(_) => {}
            }
            match String::from_utf8(bytes) {
                Err(_) => return Some(Err(bad("not UTF-8 text".into()))),
                // A byte-order mark may start the file; empty lines hold nothing.
                Ok(text) if text.trim_start_matches('\u{feff}').trim().is_empty() => {}
                Ok(text) => return Some(Ok((self.line, text.trim_start_matches('\u{feff}').to_owned()))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::census;
    use wattle_core::registry::Params;

    fn open(
        text: &[u8],
        params: &[(&str, &str)],
        count: Option<u64>,
    ) -> (tempfile::TempDir, Box<dyn Dataset>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q.jsonl");
        std::fs::write(&path, text).unwrap();
        let mut all = Params::from([("path".to_owned(), path.display().to_string())]);
        all.extend(params.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
        let dataset = super::super::open("jsonl", &Settings { params: all, count, seed: 0 }).unwrap();
        (dir, dataset)
    }

    fn error(text: &[u8], params: &[(&str, &str)]) -> String {
        let (dir, dataset) = open(text, params, None);
        let error = census(dataset.as_ref()).unwrap_err().to_string();
        error.replace(&dir.path().display().to_string(), "DIR")
    }

    #[test]
    fn columns_are_mapped_and_the_rest_is_kept() {
        let text = "\u{feff}{\"q\":\"2+2?\",\"a\":4,\"topic\":\"sums\",\"level\":[1]}\n\n{\"q\":\"π?\",\"a\":null}\n";
        let (_dir, dataset) =
            open(text.as_bytes(), &[("prompt", "q"), ("answer", "a"), ("subject", "topic")], None);
        // `topic` was named and the second line lacks it.
        let items: Vec<_> = dataset.items().unwrap().collect();
        let first = items[0].as_ref().unwrap();
        assert_eq!(
            (first.prompt.as_str(), first.expected.as_deref(), first.id.as_str()),
            ("2+2?", Some("4"), "1")
        );
        assert_eq!(first.metadata["level"], serde_json::json!([1]));
        assert!(items[1].as_ref().unwrap_err().to_string().contains("q.jsonl:3: no column \"topic\""));
    }

    #[test]
    fn a_bad_line_is_named() {
        assert!(error(b"{\"prompt\":\"a\"}\n{oops\n", &[]).starts_with("DIR/q.jsonl:2: not a JSON object"));
        assert!(
            error(b"[1]\n", &[]).contains("DIR/q.jsonl:1: not a JSON object")
                && error(b"[1]\n", &[]).contains("jq")
        );
        assert!(error(b"\xff\xfe\n", &[]).starts_with("DIR/q.jsonl:1: not UTF-8"));
        let no_column = error(b"{\"question\":\"a\"}\n", &[]);
        assert!(no_column.contains("no column \"prompt\" (there is: question)"), "{no_column}");
        assert!(error(b"{\"prompt\":5}\n", &[]).contains("must be text, not 5"));
    }

    #[test]
    fn a_digest_names_the_exact_prompts() {
        let digest = |text: &[u8], count| census(open(text, &[], count).1.as_ref()).unwrap();
        let two = digest(b"{\"prompt\":\"ab\"}\n{\"prompt\":\"c\"}\n", None);
        assert_eq!((two.items, two.answers), (2, false));
        // SHA-256 of 2 as eight bytes, "ab", 1 as eight bytes, "c": old runs are resumed by it.
        assert_eq!(two.sha256, "43ee655579de01ca739b3f95c1c2d3f46d353b2c0df818064ea594506cdb2617");
        assert_ne!(two.sha256, digest(b"{\"prompt\":\"a\"}\n{\"prompt\":\"bc\"}\n", None).sha256);
        assert_eq!(digest(b"{\"prompt\":\"ab\"}\n{\"prompt\":\"c\"}\n", Some(1)).items, 1);
        assert_eq!(digest(b"", None).items, 0);
    }

    #[test]
    fn a_missing_file_and_a_folder_are_told() {
        let params = |path: &str| Params::from([("path".to_owned(), path.to_owned())]);
        for path in ["/nonexistent/x.jsonl", "/"] {
            let dataset =
                super::super::open("jsonl", &Settings { params: params(path), ..Settings::default() })
                    .unwrap();
            assert!(dataset.items().is_err(), "{path}");
        }
        assert!(super::super::open("jsonl", &Settings::default()).err().unwrap().is_usage());
    }
}
