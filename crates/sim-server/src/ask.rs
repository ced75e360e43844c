//! What one request asks for: its JSON body, and the words in its prompt that begin with `#`.
//!
//! The tokens of a prompt are its words: what ASCII white space separates, in all messages together. Words such as `#tokens=17` are
//! words too. They are `#tokens` (of the answer, beyond any limit), `#prompt_tokens` (counts as so many), `#ttft_ms`,
//! `#itl_ms` and `#trap`, which may come more than once; `#` words with other names mean nothing.

use crate::Trap;
use serde::Deserialize;

/// What is asked.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Ask {
    pub(crate) model: Option<String>,
    pub(crate) stream: Option<bool>,
    pub(crate) include_usage: bool,
    /// The most tokens the client wants.
    pub(crate) limit: Option<u32>,
    pub(crate) prompt_tokens: u64,
    pub(crate) tokens: Option<u32>,
    pub(crate) ttft_ms: Option<f64>,
    pub(crate) itl_ms: Option<f64>,
    pub(crate) traps: Vec<Trap>,
}

#[derive(Deserialize)]
struct Body {
    #[serde(alias = "name")]
    model: Option<String>,
    #[serde(default)]
    messages: Vec<Message>,
    prompt: Option<Text>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    options: Option<Options>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
struct Options {
    /// Ollama's limit; below 0 there is none.
    num_predict: Option<i64>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<Text>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Text {
    One(String),
    Many(Vec<String>),
    Parts(Vec<Part>),
    /// A prompt that is tokens already.
    Ids(Vec<u64>),
}

#[derive(Deserialize)]
struct Part {
    text: Option<String>,
}

/// Reads a body of OpenAI's or Ollama's.
pub(crate) fn parse(body: &[u8]) -> Result<Ask, String> {
    let body: Body = serde_json::from_slice(body).map_err(|e| e.to_string())?;
    let mut ask = Ask {
        model: body.model,
        stream: body.stream,
        include_usage: body.stream_options.is_some_and(|o| o.include_usage),
        limit: body.max_completion_tokens.or(body.max_tokens).or_else(|| {
            let wanted = body.options.and_then(|o| o.num_predict)?;
            u32::try_from(wanted).ok()
        }),
        ..Ask::default()
    };
    let mut claimed = None;
    for text in body.messages.iter().filter_map(|m| m.content.as_ref()).chain(&body.prompt) {
        match text {
            Text::One(text) => read(text, &mut ask, &mut claimed)?,
            Text::Many(all) => all.iter().try_for_each(|text| read(text, &mut ask, &mut claimed))?,
            Text::Parts(all) => all
                .iter()
                .filter_map(|part| part.text.as_ref())
                .try_for_each(|text| read(text, &mut ask, &mut claimed))?,
            Text::Ids(ids) => ask.prompt_tokens += ids.len() as u64,
        }
    }
    ask.prompt_tokens = claimed.unwrap_or(ask.prompt_tokens);
    Ok(ask)
}

fn read(text: &str, ask: &mut Ask, claimed: &mut Option<u64>) -> Result<(), String> {
    for word in text.split_ascii_whitespace() {
        ask.prompt_tokens += 1;
        let Some((name, value)) = word.strip_prefix('#').and_then(|w| w.split_once('=')) else { continue };
        let number = || value.parse::<f64>().map_err(|_| format!("{word}: not a number"));
        match name {
            "tokens" => ask.tokens = Some(number()? as u32),
            "prompt_tokens" => *claimed = Some(number()? as u64),
            "ttft_ms" => ask.ttft_ms = Some(number()?),
            "itl_ms" => ask.itl_ms = Some(number()?),
            "trap" => ask.traps.push(value.parse()?),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_of_a_prompt_are_its_words() {
        let ask = parse(br#"{"messages": [{"role": "system", "content": "be  brief"}, {"role": "user", "content": [{"type": "text", "text": "one two\nthree"}]}]}"#).unwrap();
        assert_eq!(ask.prompt_tokens, 5);
        assert_eq!(parse(br#"{"prompt": [1, 2, 3]}"#).unwrap().prompt_tokens, 3);
        assert_eq!(parse(br#"{"prompt": "a #prompt_tokens=4000"}"#).unwrap().prompt_tokens, 4000);
    }

    #[test]
    fn a_prompt_says_how_it_wants_to_be_answered() {
        let ask = parse(
            br#"{"prompt": "go #tokens=17 #ttft_ms=500 #itl_ms=0.5 #trap=crlf #trap=coalesced:2 #no=thing # 1"}"#,
        )
        .unwrap();
        assert_eq!((ask.tokens, ask.ttft_ms, ask.itl_ms), (Some(17), Some(500.0), Some(0.5)));
        assert_eq!(ask.traps, [Trap::Crlf, Trap::Coalesced(2)]);
    }

    #[test]
    fn a_trap_that_is_not_there_is_an_error() {
        assert!(parse(br##"{"prompt": "#trap=usage_mising"}"##).unwrap_err().contains("usage_mising"));
    }

    #[test]
    fn each_dialect_names_its_limit() {
        let limit = |body: &str| parse(body.as_bytes()).unwrap().limit;
        assert_eq!(limit(r#"{"max_tokens": 5}"#), Some(5));
        assert_eq!(limit(r#"{"max_tokens": 5, "max_completion_tokens": 6}"#), Some(6));
        assert_eq!(limit(r#"{"options": {"num_predict": 7}}"#), Some(7));
        assert_eq!(limit(r#"{"options": {"num_predict": -1}}"#), None);
    }
}
