//! The words of a command: placeholders in them, and secrets, which are kept out of everything that is written down.

use std::fmt;

/// What stands for a variable of the environment: `{env:NAME}`.
const ENV: &str = "env:";
/// Names of flags and variables that end in one of these are of secrets.
const SECRETS: &[&str] = &["key", "apikey", "token", "secret", "password", "passwd"];
/// Tokens that are no secrets: those of a vocabulary.
const VOCABULARY: &[&str] =
    &["pad", "bos", "eos", "unk", "sep", "cls", "mask", "stop", "image", "audio", "video"];
/// How keys of OpenAI and its like, and of Hugging Face, begin.
const KEYS: &[&str] = &["sk-", "hf_"];

/// A word of a command with its placeholders filled in.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Word {
    /// What the server is told.
    pub(super) told: String,
    /// What anybody may see: variables of the environment are only named.
    pub(super) shown: String,
}

impl Word {
    /// Fills in what `value` knows, and variables of the environment. What is filled in is not looked at again: it may hold anything.
    pub(super) fn fill(
        text: &str,
        value: impl Fn(&str) -> Option<String>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        let mut word = Self { told: String::new(), shown: String::new() };
        let mut rest = text;
        while let Some(at) = rest.find('{') {
            let (before, from) = rest.split_at(at);
            word.push(before, before);
            let key = from[1..].split_once('}').map(|(key, _)| key).unwrap_or_default();
            let length = match key.strip_prefix(ENV) {
                Some(name) => {
                    let secret = variable(name).filter(|v| !v.is_empty());
                    let secret = secret.ok_or_else(|| {
                        format!("it is to be told {{{key}}}, and the environment has no variable {name}")
                    })?;
                    word.push(&secret, &format!("{{{key}}}"));
                    key.len() + 2
                }
                None => match value(key) {
                    Some(value) => {
                        word.push(&value, &value);
                        key.len() + 2
                    }
                    None => {
                        word.push("{", "{");
                        1
                    }
                },
            };
            rest = &from[length..];
        }
        word.push(rest, rest);
        Ok(word)
    }

    fn push(&mut self, told: &str, shown: &str) {
        self.told += told;
        self.shown += shown;
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shown.fmt(f)
    }
}

/// What in a command looks like a secret in clear text: the flag or the kind of it, never the secret.
pub(super) fn secret_in(words: &[String]) -> Option<String> {
    // A script that a shell is given is a command, too.
    let parts: Vec<&str> = words.iter().flat_map(|word| word.split_whitespace()).collect();
    parts.iter().enumerate().find_map(|(at, part)| {
        let part = part.trim_matches(['"', '\'']);
        let next = parts.get(at + 1).map_or("", |next| next.trim_matches(['"', '\'']));
        let (name, value) = match part.split_once('=') {
            Some((name, value)) => (name, value.trim_matches(['"', '\''])),
            None if part.starts_with('-') && !next.starts_with('-') => (part, next),
            None => (part, ""),
        };
        if part.eq_ignore_ascii_case("bearer") {
            return is_clear(next).then(|| "Bearer".to_owned());
        }
        if names_secret(name) && is_clear(value) {
            return Some(name.to_owned());
        }
        let key = KEYS.iter().find(|key| part.starts_with(**key) && part.len() > 16);
        key.map(|key| format!("{key}…"))
    })
}

/// Whether a flag or a variable is of a secret, by its name.
fn names_secret(name: &str) -> bool {
    let flag = name.starts_with('-');
    let name = name.trim_start_matches('-').to_lowercase();
    let parts: Vec<&str> = name.split(['-', '_', '.']).collect();
    let Some((last, before)) = parts.split_last() else { return false };
    let of_words = before.last().is_some_and(|word| VOCABULARY.contains(word));
    (flag && name.starts_with("auth")) || (SECRETS.contains(last) && !of_words)
}

/// Whether a value may be a secret as it is, and not a number, a switch, a path, or where to find one.
fn is_clear(value: &str) -> bool {
    let switch = ["", "true", "false", "none", "null", "auto"].contains(&value.to_lowercase().as_str());
    let path = value.starts_with(['/', '~', '.']) || value.ends_with(".pem") || value.ends_with(".key");
    // An "Authorization: Bearer …" is told by what follows.
    let scheme = value.eq_ignore_ascii_case("bearer") || value.eq_ignore_ascii_case("bearer:");
    let named = value.starts_with('$') || value.contains(&format!("{{{ENV}"));
    !switch && !path && !scheme && !named && value.parse::<f64>().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(text: &str) -> Result<Word, String> {
        let value = |key: &str| match key {
            "port" => Some("80".to_owned()),
            "model" => Some("{port}{env:KEY}".to_owned()),
            _ => None,
        };
        Word::fill(text, value, |name| (name == "KEY").then(|| "sk-{port}".to_owned()))
    }

    #[test]
    fn what_is_filled_in_is_not_looked_at_again() {
        let word = fill("{a{port}:{model}{").unwrap();
        assert_eq!(word.told, "{a80:{port}{env:KEY}{");
        assert_eq!(word.shown, word.told);
    }

    #[test]
    fn a_variable_is_told_and_not_shown() {
        let word = fill("--api-key={env:KEY}").unwrap();
        assert_eq!((word.told.as_str(), word.shown.as_str()), ("--api-key=sk-{port}", "--api-key={env:KEY}"));
        assert!(!format!("{word:?}").contains("sk-"));
        assert!(fill("{env:NONE}").unwrap_err().contains("no variable NONE"));
    }

    #[test]
    fn a_secret_in_clear_text_is_found_and_not_repeated() {
        let found = |command: &str| secret_in(&shlex::split(command).unwrap());
        for (command, name) in [
            ("serve --api-key geheim", "--api-key"),
            ("serve --api-key=geheim", "--api-key"),
            ("serve --hf-token geheim", "--hf-token"),
            ("serve --hf_token geheim", "--hf_token"),
            ("serve --token geheim", "--token"),
            ("serve --auth user:geheim", "--auth"),
            ("serve --auth-token geheim", "--auth-token"),
            ("env HF_TOKEN=geheim serve", "HF_TOKEN"),
            ("sh -c 'serve --api-key \"geheim\"'", "--api-key"),
            ("serve --header 'Authorization: Bearer geheim'", "Bearer"),
            ("serve sk-0123456789abcdef0123", "sk-…"),
        ] {
            assert_eq!(found(command), Some(name.to_owned()), "{command}");
        }
        for command in [
            "serve --api-key {env:KEY} --hf-token={env:HF}",
            "sh -c 'serve --api-key \"$KEY\"'",
            "serve --header 'Authorization: Bearer {env:KEY}'",
            "serve --api-key-file keys --ssl-key /etc/key.pem --ssl-keyfile x",
            "serve --max-tokens 5 --tokenizer x --pad-token '<pad>' --token 5 --api-key --verbose",
            "serve --enable-auto-tool-choice --key-value-cache fp8",
        ] {
            assert_eq!(found(command), None, "{command}");
        }
    }
}
