//! Token counts by a model's own `tokenizer.json`, for prompts of exact lengths and for servers that send no usage.

use crate::LabError;
use std::path::{Path, PathBuf};

/// A tokenizer in the format of Hugging Face. What it counts is the text alone: no special tokens, no chat template.
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads `path`, or `tokenizer.json` in it if it is a folder.
    pub fn open(path: &Path) -> Result<Self, LabError> {
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let bad = |why: String| LabError::Tokenizer { path: path.clone(), why };
        let bytes = std::fs::read(&path).map_err(|e| bad(format!("cannot read it: {e}")))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|e| bad(format!("not a tokenizer in the format of Hugging Face ({e})")))?;
        // Files often carry the cuts and fills of their training, which would make every long text as long as another.
        inner.with_truncation(None).map_err(|e| bad(e.to_string()))?;
        inner.with_padding(None);
        Ok(Self { path, inner })
    }

    /// The tokens of `text`, by their numbers.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, LabError> {
        Ok(self.encoding(text)?.get_ids().to_vec())
    }

    /// How many tokens `text` has. A vocabulary that neither knows a word nor has a token for unknown ones cannot say.
    pub fn count(&self, text: &str) -> Result<usize, LabError> {
        Ok(self.encoding(text)?.len())
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn encoding(&self, text: &str) -> Result<tokenizers::Encoding, LabError> {
        let bad = |e: tokenizers::Error| LabError::Tokenizer {
            path: self.path.clone(),
            why: format!("cannot encode a text ({e})"),
        };
        self.inner.encode_fast(text, false).map_err(bad)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::{Map, Value, json};

    /// A made-up tokenizer that knows these words, each one token, and has its last token for anything else.
    pub(crate) fn word_level(words: &[&str]) -> Value {
        let mut vocab: Map<String, Value> =
            words.iter().enumerate().map(|(i, w)| ((*w).to_owned(), json!(i))).collect();
        vocab.insert("[UNK]".into(), json!(words.len()));
        json!({
            "version": "1.0",
            "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
        })
    }

    /// A made-up byte-level BPE in the manner of GPT-2: each of these words is one token with a space before it and without;
    /// anything else is in letters.
    pub(crate) fn byte_level(words: &[&str]) -> Value {
        let mut pieces: Vec<String> = ('!'..='~').map(String::from).collect();
        pieces.push("Ġ".into());
        let mut merges = Vec::new();
        let mut merge = |left: &str, right: &str| {
            let whole = format!("{left}{right}");
            if !pieces.contains(&whole) {
                merges.push(json!([left, right]));
                pieces.push(whole);
            }
        };
        for word in words {
            // The word from its first letter on, and then a space and the whole word.
            for end in 2..=word.len() {
                merge(&word[..end - 1], &word[end - 1..end]);
            }
            merge("Ġ", word);
        }
        let vocab: Map<String, Value> = pieces.into_iter().enumerate().map(|(i, p)| (p, json!(i))).collect();
        json!({
            "version": "1.0",
            "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges},
        })
    }

    /// A folder with this `tokenizer.json`.
    pub(crate) fn written(tokenizer: &Value) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        dir
    }

    fn opened(tokenizer: &Value) -> Tokenizer {
        Tokenizer::open(written(tokenizer).path()).unwrap()
    }

    #[test]
    fn tokens_are_counted_as_the_file_says() {
        let words = opened(&word_level(&["the", "cat"]));
        assert_eq!(words.encode("the cat, the dog").unwrap(), [0, 1, 2, 0, 2]);
        let bytes = opened(&byte_level(&["the", "cat"]));
        assert_eq!(bytes.count("the cat the cat").unwrap(), 4);
        assert_eq!(bytes.count("the dog").unwrap(), 5, "the, a space and three letters");
        assert_eq!(bytes.count("").unwrap(), 0);
    }

    #[test]
    fn a_file_and_its_folder_are_the_same() {
        let dir = written(&word_level(&["the"]));
        let (folder, file) =
            (Tokenizer::open(dir.path()), Tokenizer::open(&dir.path().join("tokenizer.json")));
        assert_eq!(folder.unwrap().path(), file.unwrap().path());
    }

    #[test]
    fn neither_cuts_nor_fills_nor_special_tokens_are_counted() {
        let mut json = word_level(&["the", "[CLS]"]);
        json["truncation"] =
            json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = json!({"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "the"});
        json["post_processor"] = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]}}});
        let tokenizer = opened(&json);
        assert_eq!(tokenizer.count("the the the the the").unwrap(), 5);
        assert_eq!(tokenizer.count("the").unwrap(), 1);
    }

    #[test]
    fn what_is_no_tokenizer_is_told_with_the_fix() {
        let dir = tempfile::tempdir().unwrap();
        let error = |path: &Path| Tokenizer::open(path).err().unwrap().to_string();
        assert!(error(dir.path()).contains("tokenizer.json: cannot read it"));
        let other = dir.path().join("model.gguf");
        std::fs::write(&other, b"GGUF\x03\x00").unwrap();
        let told = error(&other);
        assert!(told.contains("not a tokenizer in the format of Hugging Face"), "{told}");
        assert!(told.contains("name the model's tokenizer.json, or the folder it is in"), "{told}");
    }

    #[test]
    fn a_text_that_cannot_be_encoded_has_no_count() {
        let mut json = word_level(&["the"]);
        json["model"]["unk_token"] = json!("[NONE]");
        assert!(opened(&json).count("cat").unwrap_err().to_string().contains("cannot encode a text"));
    }

    #[test]
    fn threads_share_one_tokenizer() {
        let tokenizer = opened(&byte_level(&["the"]));
        let counts = std::thread::scope(|s| {
            let threads: Vec<_> = (1..5)
                .map(|n| {
                    (
                        n,
                        s.spawn({
                            let t = &tokenizer;
                            move || t.count(&"the ".repeat(n))
                        }),
                    )
                })
                .collect();
            threads.into_iter().map(|(n, t)| (n, t.join().unwrap().unwrap())).collect::<Vec<_>>()
        });
        assert_eq!(counts, [(1, 2), (2, 3), (3, 4), (4, 5)], "the last space is a token");
    }
}
