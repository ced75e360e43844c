//! The embedded engine against an independent implementation: logits and answers of the demonstration
//! models, computed by `tools/demo-model` in JAX from the same files, without quantised activations.

#![allow(clippy::unwrap_used, reason = "a helper of a test may panic, too")]

use serde_json::Value;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use wattle_lab::client::embedded::{Finish, Generated, Model, Options, Session, Step, generate};

/// The engine rounds activations to 8 bits, the reference does not: noise of about 0.5 % in every product,
/// which grows on its way through the layers. Found: 0.4 to 1.1 % for demo-1m, 0.8 to 2.8 % for demo-300k.
/// (With the same weights stored as F32 nothing is rounded, and 0.002 % remains: the reference has five
/// digits.)
const LOGIT_TOLERANCE: f64 = 0.04;

/// The same noise decides near ties between tokens. Found: up to 2 of 500 answers.
const ANSWER_TOLERANCE: f64 = 5.0 / 500.0;

struct Reference {
    file: String,
    prompt: String,
    tokens: Vec<u32>,
    logits: Vec<f64>,
    /// The greedy continuation, up to and including the end of sequence.
    greedy: Vec<u32>,
}

fn read(path: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

fn references() -> Vec<Reference> {
    let json: Value = serde_json::from_slice(&read("../../fixtures/demo-logits.json")).unwrap();
    let ids =
        |value: &Value| value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let mut references = Vec::new();
    for model in json["models"].as_array().unwrap() {
        for prompt in model["prompts"].as_array().unwrap() {
            references.push(Reference {
                file: model["file"].as_str().unwrap().to_owned(),
                prompt: prompt["prompt"].as_str().unwrap().to_owned(),
                tokens: ids(&prompt["tokens"]),
                logits: prompt["logits"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect(),
                greedy: ids(&prompt["greedy"]),
            });
        }
    }
    references
}

fn session(file: &str) -> Session {
    Session::new(Arc::new(Model::from_bytes(&read(&format!("models/{file}"))).unwrap()))
}

fn answer(session: &mut Session, prompt: &str) -> (Vec<u32>, Generated) {
    let options = Options { max_tokens: 32, temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
    let mut ids = Vec::new();
    let mut on = |step| {
        if let Step::Token { id, .. } = step {
            ids.push(id);
        }
        ControlFlow::Continue(())
    };
    let generated = generate(session, prompt, &options, &mut on).unwrap();
    (ids, generated)
}

#[test]
fn every_demonstration_model_has_a_reference() {
    let mut files: Vec<String> = references().into_iter().map(|reference| reference.file).collect();
    files.dedup();
    assert_eq!(files, ["demo-1m-q8_0.gguf", "demo-1m-q4_0.gguf", "demo-300k-q8_0.gguf"]);
}

#[test]
fn prompts_are_read_as_the_same_tokens() {
    for Reference { file, prompt, tokens, .. } in references() {
        assert_eq!(session(&file).model().vocab().encode(&prompt), tokens, "{file}: {prompt}");
    }
}

#[test]
fn logits_agree_with_the_reference() {
    for Reference { file, prompt, tokens, logits: expected, .. } in references() {
        let mut session = session(&file);
        let logits = session.prefill(&tokens).unwrap();
        assert_eq!(logits.len(), expected.len());
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let mut differences = logits.iter().zip(&expected).map(|(a, b)| f64::from(*a) - b);
        let error = squares(&mut differences) / squares(&mut expected.iter().copied());
        assert!(error < LOGIT_TOLERANCE, "{file}: {prompt} is off by {:.1} %", error * 100.0);
    }
}

#[test]
fn greedy_answers_are_those_of_the_reference() {
    for Reference { file, prompt, tokens, greedy, .. } in references() {
        let (eos, expected) = greedy.split_last().unwrap();
        let mut session = session(&file);
        assert_eq!(session.model().vocab().eos(), *eos);
        let (ids, generated) = answer(&mut session, &prompt);
        assert_eq!(ids, expected, "{file}: {prompt}");
        assert_eq!(generated.finish, Finish::Stop);
        assert_eq!((generated.prompt_tokens, generated.completion_tokens), (tokens.len(), expected.len()));
    }
}

#[test]
fn the_models_are_as_good_as_the_reference_says() {
    let accuracies: Value = serde_json::from_slice(&read("../../fixtures/demo-accuracy.json")).unwrap();
    let items = String::from_utf8(read("data/demo.jsonl")).unwrap();
    let items: Vec<Value> = items.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for model in accuracies["models"].as_array().unwrap() {
        let file = model["file"].as_str().unwrap();
        let mut session = session(file);
        let right = items.iter().filter(|item| {
            let (ids, generated) = answer(&mut session, item["prompt"].as_str().unwrap());
            let text = session.model().vocab().decode(&ids);
            generated.finish == Finish::Stop && text == item["answer"].as_str().unwrap().as_bytes()
        });
        let exact = right.count() as f64 / items.len() as f64;
        let expected = model["exact"].as_f64().unwrap();
        assert!((exact - expected).abs() <= ANSWER_TOLERANCE, "{file}: {exact}, reference {expected}");
    }
}
