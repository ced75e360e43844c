//! Requests that others send to the same server: seen when it says that it has more than ours.

use wattle_core::attribute::{Foreign, Splitter};
use wattle_core::time::{Span, Stamp};
use wattle_core::wire::prometheus::Load;

/// What is known of the server's load.
#[derive(Debug, Default)]
pub(super) struct Others {
    last: Option<Said>,
    /// Prompt tokens of ours that the server had not counted when we did: it counts them in its next word.
    ahead: f64,
}

/// What it said once.
#[derive(Debug, Clone, Copy)]
struct Said {
    at: Stamp,
    /// Requests that are not ours, and how many are worked on in all.
    more: f64,
    running: f64,
    prompt_tokens: Option<f64>,
}

impl Others {
    /// Up to when it is known who else was served; nothing, if the server does not say.
    pub(super) fn known_until(&self) -> Option<Stamp> {
        self.last.map(|said| said.at)
    }

    /// The server said so at a moment when at most `ours` of its requests were ours. What others had done since the last time.
    pub(super) fn hear(
        &mut self,
        at: Stamp,
        load: Option<Load>,
        ours: usize,
        splitter: Option<&Splitter>,
    ) -> Option<Foreign> {
        let Some((load, running)) = load.and_then(|load| Some((load, load.running?))) else {
            self.last = None;
            return None;
        };
        let more = (running + load.waiting.unwrap_or(0.0) - ours as f64).max(0.0);
        let said = Said { at, more, running, prompt_tokens: load.prompt_tokens };
        let before = self.last.replace(said)?;
        // A server takes a moment to see that a request has ended: who is there twice is there.
        let requests = before.more.min(more).min(before.running).min(running);
        let span = Span::new(before.at, at);
        let counted = said.prompt_tokens.zip(before.prompt_tokens).map(|(now, then)| now - then);
        let own = splitter.map_or(Some(0.0), |s| s.prompts_in(span));
        let more = counted.zip(own).map_or(0.0, |(counted, own)| counted - own - self.ahead);
        // No further than one window: what was never counted was in a cache.
        self.ahead = (-more).clamp(0.0, own.unwrap_or(0.0));
        (requests > 0.0).then_some(Foreign { span, requests, prefill: more.max(0.0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(running: f64, waiting: f64) -> Option<Load> {
        Some(Load { running: Some(running), waiting: Some(waiting), ..Load::default() })
    }

    fn at(ms: u64) -> Stamp {
        Stamp::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn who_is_seen_twice_is_there() {
        let mut others = Others::default();
        assert_eq!(others.hear(at(0), said(5.0, 0.0), 4, None), None);
        assert_eq!(others.hear(at(500), said(4.0, 0.0), 4, None), None, "one that had just ended");
        assert_eq!(others.hear(at(1000), said(6.0, 1.0), 4, None), None);
        let seen = others.hear(at(1500), said(6.0, 0.0), 4, None).unwrap();
        assert_eq!((seen.requests, seen.span), (2.0, Span::new(at(1000), at(1500))));
    }

    #[test]
    fn a_server_that_says_nothing_tells_nothing() {
        let mut others = Others::default();
        others.hear(at(0), said(9.0, 0.0), 0, None);
        assert_eq!(others.hear(at(500), None, 0, None), None);
        assert_eq!(others.known_until(), None);
    }
}
