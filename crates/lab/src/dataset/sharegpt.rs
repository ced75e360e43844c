//! Conversations of people with models, as ShareGPT and OpenAI write them down: every question is asked with all that was said before
//! it. One conversation at a time is in memory, whether the file is one array or has an object a line.

use super::{Dataset, Driver, Items, Settings};
use crate::LabError;
use objects::Objects;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::sync::Arc;
use wattle_core::exchange::{History, Role, Turn};
use wattle_core::record::Item;
use wattle_core::registry::{About, Opt};

mod objects;

const EXPECTED: &str = "one array, or one object a line, was expected of {\"id\": …, \"conversations\": [{\"from\": \"human\", \"value\": …}, \
                        {\"from\": \"gpt\", \"value\": …}]} or {\"messages\": [{\"role\": \"user\", \"content\": …}]}";

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "sharegpt",
        about: "conversations in the format of ShareGPT or OpenAI, each question with all that was said before it",
        options: &[
            Opt { key: "path", about: "the file, one JSON array or JSON lines (needed)" },
            Opt { key: "turns", about: "at most so many questions of a conversation (all)" },
        ],
    },
    open: |settings| Ok(Box::new(ShareGpt::open(settings)?)),
};

struct ShareGpt {
    path: PathBuf,
    turns: usize,
    count: Option<u64>,
}

impl ShareGpt {
    fn open(settings: &Settings) -> Result<Self, LabError> {
        let path = settings.params.get("path").ok_or_else(|| {
            LabError::Usage("dataset \"sharegpt\" needs its file: --dataset-param path=FILE".into())
        })?;
        let turns = settings.params.get("turns").map_or(Ok(usize::MAX), |text| {
            text.trim().parse().ok().filter(|n| *n > 0).ok_or_else(|| {
                LabError::Usage(format!("--dataset-param turns: \"{text}\" is not a whole number from 1"))
            })
        })?;
        Ok(Self { path: path.into(), turns, count: settings.count })
    }
}

impl Dataset for ShareGpt {
    fn name(&self) -> String {
        self.path.file_stem().map_or_else(|| "sharegpt".into(), |s| s.to_string_lossy().into_owned())
    }

    fn items(&self) -> Result<Items<'_>, LabError> {
        let mut objects = Objects::open(&self.path)?;
        let (mut index, mut number) = (0, 0);
        let mut questions = None;
        let mut next = move || -> Result<Option<Item>, LabError> {
            loop {
                if let Some(item) = questions.as_mut().and_then(Iterator::next) {
                    index += 1;
                    return Ok(Some(Item { index: index - 1, ..item }));
                }
                let Some(object) = objects.next()? else { break };
                number += 1;
                questions = Some(Conversation::new(&object, number).questions().take(self.turns));
            }
            if index > 0 {
                return Ok(None);
            }
            let why = format!("holds no conversation in which a person says something; {EXPECTED}");
            Err(LabError::Dataset { path: self.path.clone(), line: None, why })
        };
        let mut failed = false;
        let items = std::iter::from_fn(move || {
            if failed {
                return None;
            }
            let item = next().transpose();
            failed = matches!(item, Some(Err(_)));
            item
        });
        let count = self.count.map_or(usize::MAX, |c| usize::try_from(c).unwrap_or(usize::MAX));
        Ok(Box::new(items.take(count)))
    }
}

/// What was said, in an order that every chat template takes: perhaps a system prompt, then user and assistant in turn.
struct Conversation {
    id: String,
    turns: Vec<Turn>,
}

impl Conversation {
    /// Leaves out what nobody or somebody unknown said, answers before any question and system prompts after one; joins what one says
    /// twice in a row.
    fn new(object: &Map<String, Value>, number: u64) -> Self {
        let id = match object.get("id") {
            Some(Value::String(id)) if !id.is_empty() => id.clone(),
            Some(Value::Number(id)) => id.to_string(),
            _ => number.to_string(),
        };
        let said = ["conversations", "messages"].iter().find_map(|key| object.get(*key)?.as_array());
        let mut turns: Vec<Turn> = Vec::new();
        for turn in said.into_iter().flatten().filter_map(turn) {
            let before = turns.last().map(|t| t.role);
            match (before, turn.role) {
                (Some(before), now) if before == now => {
                    if let Some(last) = turns.last_mut() {
                        last.content.push_str("\n\n");
                        last.content.push_str(&turn.content);
                    }
                }
                (_, Role::User) | (None, Role::System) | (Some(Role::User), Role::Assistant) => {
                    turns.push(turn)
                }
                _ => {}
            }
        }
        Self { id, turns }
    }

    /// The items of this conversation, not yet numbered within the dataset.
    fn questions(self) -> impl Iterator<Item = Item> + Send {
        let asked: Vec<usize> =
            (0..self.turns.len()).filter(|at| self.turns[*at].role == Role::User).collect();
        let turns: Arc<[Turn]> = self.turns.into();
        asked.into_iter().zip(1u64..).map(move |(at, turn)| Item {
            id: format!("{}-{turn}", self.id),
            prompt: turns[at].content.clone(),
            history: History::of(&turns, at),
            conversation: Some(self.id.clone()),
            metadata: Map::from_iter([("turn".to_owned(), Value::from(turn))]),
            ..Item::default()
        })
    }
}

/// One turn, if it is known who says something.
fn turn(value: &Value) -> Option<Turn> {
    let role = match value.get("from").or_else(|| value.get("role"))?.as_str()? {
        "human" | "user" => Role::User,
        "gpt" | "assistant" | "chatgpt" | "model" | "bot" | "bing" | "bard" => Role::Assistant,
        "system" => Role::System,
        _ => return None,
    };
    let content = match value.get("value").or_else(|| value.get("content"))? {
        Value::String(text) => text.clone(),
        // OpenAI's parts, of which only text is for a language model.
        Value::Array(parts) => {
            parts.iter().filter_map(|p| p.get("text")?.as_str()).collect::<Vec<_>>().join("\n")
        }
        _ => return None,
    };
    (!content.trim().is_empty()).then_some(Turn { role, content })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::census;
    use wattle_core::registry::Params;

    // All conversations here are made up.
    const ARRAY: &str = r#"[
  {"id": "first", "conversations": [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "A brace } or a quote \" or a \\?"},
    {"from": "gpt", "value": "None [of] {these\u007d."},
    {"from": "user", "value": "And now?"},
    {"from": "chatgpt", "value": "Now."}]},
  {"conversations": [{"from": "human", "value": "Wie geht's, 世界?"}]}
]
"#;

    const LINES: &str = concat!(
        "\u{feff}{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":\"Hello\"},",
        "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"Look\"},{\"type\":\"image_url\"}]}],\"id\":7}\r\n\n",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"Bye\"}]}"
    );

    fn open(
        text: &str,
        params: &[(&str, &str)],
        count: Option<u64>,
    ) -> (tempfile::TempDir, Box<dyn Dataset>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk.json");
        std::fs::write(&path, text).unwrap();
        let mut all = Params::from([("path".to_owned(), path.display().to_string())]);
        all.extend(params.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
        let dataset = super::super::open("sharegpt", &Settings { params: all, count, seed: 0 }).unwrap();
        (dir, dataset)
    }

    fn items(text: &str, params: &[(&str, &str)], count: Option<u64>) -> Vec<Item> {
        open(text, params, count).1.items().unwrap().collect::<Result<_, _>>().unwrap()
    }

    fn error(text: &str) -> String {
        let (dir, dataset) = open(text, &[], None);
        let error = census(dataset.as_ref()).unwrap_err().to_string();
        assert!(dataset.items().unwrap().count() < 9, "it ends after an error");
        error.replace(&dir.path().display().to_string(), "DIR")
    }

    /// Who said what before each prompt, and the prompt.
    fn told(item: &Item) -> String {
        let role = |t: &Turn| match t.role {
            Role::System => "S",
            Role::User => "U",
            Role::Assistant => "A",
        };
        let turns: String = item.history.iter().map(|t| format!("{}({}) ", role(t), t.content)).collect();
        turns + &item.prompt
    }

    #[test]
    fn every_question_has_all_that_was_said_before_it() {
        let all = items(ARRAY, &[], None);
        let tell: Vec<String> = all.iter().map(told).collect();
        assert_eq!(
            tell,
            [
                "S(Be brief.) A brace } or a quote \" or a \\?",
                "S(Be brief.) U(A brace } or a quote \" or a \\?) A(None [of] {these}.) And now?",
                "Wie geht's, 世界?",
            ]
        );
        let ids: Vec<_> = all
            .iter()
            .map(|i| (i.index, i.id.as_str(), i.conversation.as_deref(), &i.metadata["turn"]))
            .collect();
        assert_eq!(
            ids,
            [
                (0, "first-1", Some("first"), &1.into()),
                (1, "first-2", Some("first"), &2.into()),
                (2, "2-1", Some("2"), &1.into())
            ]
        );
        assert!(all.iter().all(|i| i.expected.is_none()));
    }

    #[test]
    fn lines_and_messages_are_read_as_well() {
        let tell: Vec<String> = items(LINES, &[], None).iter().map(told).collect();
        assert_eq!(tell, ["Hi", "U(Hi) A(Hello) Look", "Bye"]);
        assert_eq!(items(LINES, &[], None)[1].conversation.as_deref(), Some("7"));
    }

    #[test]
    fn questions_are_capped_by_conversation_and_in_all() {
        let ids = |turns, count| items(ARRAY, turns, count).into_iter().map(|i| i.id).collect::<Vec<_>>();
        assert_eq!(ids(&[("turns", "1")], None), ["first-1", "2-1"]);
        assert_eq!(ids(&[], Some(2)), ["first-1", "first-2"]);
        assert!(ids(&[], Some(0)).is_empty());
        let params = Params::from([("path".into(), "x".into()), ("turns".into(), "0".into())]);
        let refused = super::super::open("sharegpt", &Settings { params, ..Settings::default() });
        assert!(refused.err().unwrap().is_usage());
    }

    #[test]
    fn what_makes_no_sense_is_left_out() {
        let text = r#"{"conversations": [{"from": "gpt", "value": "I begin"}, {"from": "human", "value": " "}, {"from": "human", "value": "a"},
            {"from": "human", "value": "b"}, {"from": "tool", "value": "?"}, {"from": "gpt", "value": "c"}, {"from": "gpt", "value": "d"},
            {"from": "system", "value": "too late"}, {"from": 5}, 6, null, {"value": "whose?"}, {"from": "human", "value": null},
            {"from": "human", "value": "e"}]}
            {"conversations": 5} {"id": "none"} {"conversations": []}"#;
        let tell: Vec<String> = items(text, &[], None).iter().map(told).collect();
        assert_eq!(tell, ["a\n\nb", "U(a\n\nb) A(c\n\nd) e"]);
    }

    #[test]
    fn a_file_without_a_question_is_told_with_what_was_expected() {
        for text in ["", "[]", "{}", "[{\"conversations\":[{\"from\":\"gpt\",\"value\":\"x\"}]}]"] {
            let error = error(text);
            assert!(
                error.starts_with("DIR/talk.json: holds no conversation")
                    && error.contains("\"conversations\": [{"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_broken_file_is_told_with_the_line() {
        for (text, told) in [
            ("prompt,answer\n", ":1: not a JSON object; one array"),
            ("[1, 2]", ":1: not a JSON object"),
            ("[\n{\"id\": 1},\n{\"id\" 2}\n]", ":3: the object that begins here is not JSON"),
            ("[\n{\"id\": 1},\n\n{\"id\": 2", ":4: the file ends within the object"),
            ("[\n{\"id\": 1},\n", ":3: the file ends within its array; is it whole?"),
        ] {
            let error = error(text);
            assert!(error.starts_with(&format!("DIR/talk.json{told}")), "{text}: {error}");
        }
    }

    #[test]
    fn the_digest_covers_what_was_said_before() {
        let digest = |text: &str| census(open(text, &[], None).1.as_ref()).unwrap().sha256;
        assert_eq!(digest(ARRAY), digest(&ARRAY.replace('\n', " ")));
        assert_ne!(digest(ARRAY), digest(&ARRAY.replace("Be brief.", "Be long.")));
        assert_ne!(digest(ARRAY), digest(&ARRAY.replace("None [of]", "None of")));
    }

    #[test]
    fn an_object_longer_than_the_buffer_is_read_whole() {
        let long = "x{\\\"".repeat(20_000);
        let text = format!("[{{\"conversations\":[{{\"from\":\"human\",\"value\":\"{long}\"}}]}}]");
        assert_eq!(items(&text, &[], None)[0].prompt.len(), 60_000);
    }
}
