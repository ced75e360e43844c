//! The examples in the documents work: every `wattle …` line of their shell blocks is run as it stands.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use std::path::Path;
use support::{Bench, Server, stderr};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// Made up.
const CONVERSATIONS: &str = r#"[{"id": "a", "conversations": [{"from": "human", "value": "Capital of France?"}, {"from": "gpt", "value": "Paris."},
    {"from": "human", "value": "And of Italy?"}]}]"#;

/// Made up, in the format of the Azure LLM inference traces.
const ARRIVALS: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,30,4\n2023-11-16 18:17:04.0319600,12,9\n";

/// Lines of ```sh blocks that start with `wattle`.
fn examples(document: &str) -> Vec<String> {
    let text = read(document);
    let mut inside = false;
    let mut found = Vec::new();
    for line in text.lines() {
        match line.trim() {
            "```sh" => inside = true,
            "```" => inside = false,
            line if inside && line.starts_with("wattle ") => found.push(line.to_owned()),
            _ => {}
        }
    }
    found
}

fn run_examples(document: &str, at_least: usize) {
    let bench = Bench::new();
    let server = Server::answering("It is Paris, Rome or Berlin.");
    bench.write("questions.jsonl", &read("fixtures/questions/capitals.jsonl"));
    bench.write("square.json", &read("fixtures/scenarios/square.json"));
    bench.write("constant.json", &read("fixtures/scenarios/constant.json"));
    bench.write("conversations.json", CONVERSATIONS);
    bench.write("arrivals.csv", ARRIVALS);
    bench.summary(&["run", "--max-queries", "3", "--energy", "none", "--name", "NAME"]);
    let examples = examples(document);
    assert!(examples.len() >= at_least, "{document} has only {} examples", examples.len());
    for example in examples {
        let line = example.replace("http://127.0.0.1:8000/v1", &server.url);
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        let out = bench.run(&words);
        // Whether energy can be measured depends on the machine.
        let fine = out.status.success() || words[0] == "doctor" && out.status.code() == Some(1);
        assert!(fine, "{document}: {example}\n{}", stderr(&out));
        // Stdout is the command's own.
        let shown = if words[0] == "exec" { &out.stderr } else { &out.stdout };
        assert!(!shown.is_empty(), "{document}: {example} prints nothing");
    }
}

#[test]
fn the_examples_of_the_guide_work() {
    run_examples("docs/guide.md", 10);
}

#[test]
fn the_examples_of_the_readme_work() {
    run_examples("README.md", 3);
}

#[test]
fn the_settings_file_of_the_guide_is_a_settings_file() {
    let bench = Bench::new();
    let guide = read("docs/guide.md");
    let server = Server::answering("Paris");
    let toml = guide.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    bench.write("wattle.toml", &toml.replace("http://127.0.0.1:8000/v1", &server.url));
    bench.write("questions.jsonl", &read("fixtures/questions/capitals.jsonl"));
    let summary = bench.summary(&["run"]);
    assert_eq!((&summary["model"], &summary["total_queries"]), (&"tiny".into(), &8.into()));
}

#[test]
fn the_scenario_of_the_guide_is_the_fixture() {
    assert!(read("docs/guide.md").contains(read("fixtures/scenarios/square.json").trim()));
}

#[test]
fn the_readme_shows_the_real_output() {
    // The labels of the table in the README are those the binary prints; the figures are one machine's.
    let bench = Bench::new();
    let out = bench.run(&["run", "--max-queries", "20", "--idle-s", "0.1"]);
    let screen = String::from_utf8(out.stdout).unwrap();
    let readme = read("README.md");
    let table =
        screen.lines().skip_while(|l| !l.contains("95 % interval")).skip(1).take_while(|l| !l.is_empty());
    let labels: Vec<&str> = table.filter_map(|l| l.get(2..26)).map(str::trim).collect();
    assert!(labels.len() >= 12, "{labels:?}");
    for label in labels {
        assert!(readme.contains(label), "the README does not show {label:?}");
    }
}
