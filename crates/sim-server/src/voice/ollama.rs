//! Ollama's chat, generate and pull: JSON lines, and nanoseconds in the last one.

use super::{Dialect, Durations, Usage, Voice, quoted};
use std::io::Write;
use std::ops::Range;

/// Bytes of the layer that a pull pretends to fetch.
const LAYER: u64 = 91_739_413;
/// Its digest: made up.
const DIGEST: &str = "sha256:6a0746a1ec1aef3e7ec53868f220ff6e389f6f8ef87a01d77c96807de94ca2aa";
/// Lines of a pull's progress.
pub(crate) const PULL_LINES: u32 = 8;

/// Up to the first key that differs from line to line.
pub(super) fn opening(model: &str, created: u64) -> Vec<u8> {
    format!(r#"{{"model":{},"created_at":"{}","#, quoted(model), date(created)).into_bytes()
}

/// A line with tokens.
pub(super) fn line(voice: &Voice, range: Range<u32>, json: &mut Vec<u8>) {
    said(voice, range, json);
    json.extend_from_slice(b"\"done\":false}");
}

/// The last line, which counts: with no tokens, or with all if it is the only one.
pub(super) fn last(voice: &Voice, durations: Durations, range: Range<u32>, json: &mut Vec<u8>) {
    said(voice, range, json);
    let _ = write!(json, r#""done":true,"done_reason":"{}""#, voice.finish);
    if voice.usage != Usage::Never {
        let Durations { total, load, prompt, eval } = durations;
        let _ = write!(
            json,
            r#","total_duration":{total},"load_duration":{load},"prompt_eval_count":{},"prompt_eval_duration":{prompt},"eval_count":{},"eval_duration":{eval}"#,
            voice.prompt_tokens, voice.tokens
        );
    }
    json.push(b'}');
}

/// The message, or the response, of a line.
fn said(voice: &Voice, range: Range<u32>, json: &mut Vec<u8>) {
    let (key, thoughts) = voice.reasoning;
    let thought = range.start.min(thoughts)..range.end.min(thoughts);
    let said = range.start.max(thoughts)..range.end.max(thoughts);
    let chat = voice.dialect == Dialect::OllamaChat;
    json.extend_from_slice(if chat {
        br#""message":{"role":"assistant","content":""#
    } else {
        br#""response":""#
    });
    if !voice.tool_call {
        voice.words.say(said, json);
    }
    json.push(b'"');
    if !thought.is_empty() {
        let _ = write!(json, ",\"{key}\":\"");
        voice.words.say(thought, json);
        json.push(b'"');
    }
    // Ollama says a tool call whole, when it has it.
    if voice.tool_call && !range.is_empty() && range.end == voice.tokens {
        json.extend_from_slice(
            br#","tool_calls":[{"function":{"name":"look_up","arguments":{"query":"word"}}}]"#,
        );
    }
    json.extend_from_slice(if chat { b"}," } else { b"," });
}

/// The `n`-th of `lines` lines of a pull.
pub(super) fn progress(n: u32, lines: u32, json: &mut Vec<u8>) {
    let steps = lines.saturating_sub(4).max(1);
    let _ = match n {
        1 => write!(json, r#"{{"status":"pulling manifest"}}"#),
        _ if n == lines => write!(json, r#"{{"status":"success"}}"#),
        _ if n + 1 == lines => write!(json, r#"{{"status":"writing manifest"}}"#),
        _ if n + 2 == lines => write!(json, r#"{{"status":"verifying sha256 digest"}}"#),
        _ => write!(
            json,
            r#"{{"status":"pulling {}","digest":"{DIGEST}","total":{LAYER},"completed":{}}}"#,
            &DIGEST[7..19],
            LAYER * u64::from(n - 1) / u64::from(steps)
        ),
    };
}

/// A moment as RFC 3339 has it.
pub(crate) fn date(seconds: u64) -> String {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // Years counted from March have their leap day at the end: four of them are 1,461 days, but for centuries.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, turn) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year + era * 400 + turn;
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", time / 3600, time / 60 % 60, time % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(date(1_772_323_199), "2026-02-28T23:59:59Z");
        assert_eq!(date(1_772_323_200), "2026-03-01T00:00:00Z");
    }
}
