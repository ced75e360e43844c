//! OpenAI's chat and text completions.

use super::{Dialect, Durations, Script, Usage, Voice, quoted};
use std::io::Write;
use std::ops::Range;

/// After the delta of a chunk that is not the last.
pub(super) const NO_FINISH: &[u8] = br#","logprobs":null,"finish_reason":null}]"#;

/// Up to the value of `delta` or `text`.
pub(super) fn opening(script: &Script<'_>) -> Vec<u8> {
    let (object, key) = match script.dialect {
        Dialect::Text => ("text_completion", "text"),
        _ => ("chat.completion.chunk", "delta"),
    };
    let (id, model, created) = (quoted(script.id), quoted(script.model), script.created);
    format!(
        r#"{{"id":{id},"object":"{object}","created":{created},"model":{model},"choices":[{{"index":0,"{key}":"#
    )
    .into_bytes()
}

/// A chunk with tokens; the last may say how it ended, too.
pub(super) fn chunk(voice: &Voice, range: Range<u32>, json: &mut Vec<u8>) {
    let last = range.end == voice.tokens;
    if voice.dialect == Dialect::Text {
        json.push(b'"');
        voice.words.say(range, json);
        json.push(b'"');
    } else {
        delta(voice, range, json);
    }
    if last && voice.usage == Usage::Last {
        finish_reason(voice, json);
        json.extend_from_slice(b",\"usage\":");
        usage(voice, json);
    } else {
        json.extend_from_slice(NO_FINISH);
    }
    json.push(b'}');
}

fn delta(voice: &Voice, range: Range<u32>, json: &mut Vec<u8>) {
    let (key, thoughts) = voice.reasoning;
    json.push(b'{');
    if range.start == 0 {
        json.extend_from_slice(br#""role":"assistant","#);
    }
    if voice.tool_call {
        tool_call(voice, range, json);
    } else {
        let thought = range.start.min(thoughts)..range.end.min(thoughts);
        if !thought.is_empty() {
            let _ = write!(json, "\"{key}\":\"");
            voice.words.say(thought, json);
            json.extend_from_slice(b"\",");
        }
        let said = range.start.max(thoughts)..range.end.max(thoughts);
        if said.is_empty() {
            json.pop();
        } else {
            json.extend_from_slice(b"\"content\":\"");
            voice.words.say(said, json);
            json.push(b'"');
        }
    }
    json.push(b'}');
}

/// The first token names the function, the others are pieces of its arguments: together one JSON object.
fn tool_call(voice: &Voice, range: Range<u32>, json: &mut Vec<u8>) {
    json.extend_from_slice(br#""tool_calls":[{"index":0,"#);
    if range.start == 0 {
        let _ = write!(json, r#""id":"call_1","type":"function","#);
    }
    json.extend_from_slice(br#""function":{"#);
    if range.start == 0 {
        json.extend_from_slice(br#""name":"look_up","#);
    }
    json.extend_from_slice(br#""arguments":""#);
    arguments(voice, range, json);
    json.extend_from_slice(b"\"}}]");
}

fn arguments(voice: &Voice, range: Range<u32>, json: &mut Vec<u8>) {
    for i in range {
        let last = i + 1 == voice.tokens;
        match i {
            0 if last => json.extend_from_slice(b"{}"),
            0 => {}
            1 if last => json.extend_from_slice(b"{}"),
            1 => json.extend_from_slice(br#"{\"query\": \""#),
            _ if last => json.extend_from_slice(br#"\"}"#),
            _ => json.extend_from_slice(b"word "),
        }
    }
}

/// The chunk that only says why it ended.
pub(super) fn finish(voice: &Voice, timings: Option<Durations>, json: &mut Vec<u8>) {
    json.extend_from_slice(if voice.dialect == Dialect::Text { b"\"\"" } else { b"{}" });
    finish_reason(voice, json);
    times(voice, timings, json);
    json.push(b'}');
}

fn finish_reason(voice: &Voice, json: &mut Vec<u8>) {
    let _ = write!(json, r#","logprobs":null,"finish_reason":"{}"}}]"#, voice.finish);
}

/// The chunk that only counts: no choices.
pub(super) fn usage_chunk(voice: &Voice, timings: Option<Durations>, json: &mut Vec<u8>) {
    const CHOICES: &[u8] = b"\"choices\":[";
    // The opening is ours; its last key but one is `choices`.
    let place = json.windows(CHOICES.len()).rposition(|w| w == CHOICES).unwrap_or_default();
    json.truncate(place + CHOICES.len());
    json.extend_from_slice(b"],\"usage\":");
    usage(voice, json);
    times(voice, timings, json);
    json.push(b'}');
}

/// As llama.cpp says them; nothing is ever in the cache.
fn times(voice: &Voice, timings: Option<Durations>, json: &mut Vec<u8>) {
    let Some(Durations { prompt, eval, .. }) = timings else { return };
    let ms = |nanoseconds: u64| nanoseconds as f64 / 1e6;
    let _ = write!(
        json,
        r#","timings":{{"cache_n":0,"prompt_n":{},"prompt_ms":{:?},"predicted_n":{},"predicted_ms":{:?}}}"#,
        voice.prompt_tokens,
        ms(prompt),
        voice.tokens,
        ms(eval)
    );
}

fn usage(voice: &Voice, json: &mut Vec<u8>) {
    let (prompt, said) = (voice.prompt_tokens, u64::from(voice.tokens));
    let _ = write!(
        json,
        r#"{{"prompt_tokens":{prompt},"completion_tokens":{said},"total_tokens":{}"#,
        prompt + said
    );
    if voice.reasoning.1 > 0 {
        let _ = write!(json, r#","completion_tokens_details":{{"reasoning_tokens":{}}}"#, voice.reasoning.1);
    }
    json.push(b'}');
}

/// A whole answer in one object.
pub(super) fn whole(voice: &Voice, timings: Option<Durations>, json: &mut Vec<u8>) {
    let opening = String::from_utf8_lossy(&voice.opening);
    let all = 0..voice.tokens;
    if voice.dialect == Dialect::Text {
        json.extend_from_slice(&voice.opening);
        json.push(b'"');
        voice.words.say(all, json);
        json.push(b'"');
    } else {
        let message = opening.replace("chat.completion.chunk", "chat.completion");
        let message = message.strip_suffix("\"delta\":").unwrap_or(&message);
        json.extend_from_slice(message.as_bytes());
        json.extend_from_slice(b"\"message\":");
        delta(voice, all, json);
    }
    finish_reason(voice, json);
    if voice.usage != Usage::Never {
        json.extend_from_slice(b",\"usage\":");
        usage(voice, json);
    }
    times(voice, timings, json);
    json.push(b'}');
}
