//! From a prompt to an answer, one sampled token at a time, with a hook at each step.
//!
//! A hook runs when its step has happened, not before: stamps taken in it are honest.

use std::ops::ControlFlow;

use super::error::EngineError;
use super::sample::Sampler;
use super::session::Session;

/// How to answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Stop after this many tokens.
    pub max_tokens: usize,
    /// 0 takes the likeliest token each time; 1 samples the model's own distribution.
    pub temperature: f32,
    /// Sample from this many of the likeliest tokens; 0 is all.
    pub top_k: usize,
    /// Sample from the likeliest tokens that together have this probability; 1 is all.
    pub top_p: f32,
    /// Where the random choices start.
    pub seed: u64,
}

/// What just happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// One more token of the prompt was read, and it was not the last: a chance to cancel.
    Prefilling {
        /// Tokens read so far.
        read: usize,
    },
    /// The whole prompt was read; the first token of the answer is yet to be chosen.
    Prefilled {
        /// Tokens of the prompt.
        tokens: usize,
    },
    /// A token of the answer was sampled. The end-of-sequence token is not reported.
    Token {
        /// Its id.
        id: u32,
        /// The byte of text that it stands for, unless it is a marker. A character outside ASCII
        /// comes as several tokens.
        byte: Option<u8>,
    },
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model sampled its end-of-sequence token.
    Stop,
    /// `max_tokens` were sampled, or the context is full.
    Length,
    /// The hook broke off.
    Cancelled,
}

/// What an answer took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Generated {
    /// Tokens of the prompt that were read, the beginning-of-sequence token included.
    pub prompt_tokens: usize,
    /// Tokens sampled and reported. The end-of-sequence token is not counted, although it was
    /// computed: an answer of four bytes has four completion tokens.
    pub completion_tokens: usize,
    /// Why it ended.
    pub finish: Finish,
}

/// Answers a prompt in a session that is reset first. `on` may break off at any step.
pub fn generate(
    session: &mut Session,
    prompt: &str,
    options: &Options,
    on: &mut dyn FnMut(Step) -> ControlFlow<()>,
) -> Result<Generated, EngineError> {
    session.reset();
    let ids = session.model().vocab().encode(prompt);
    let eos = session.model().vocab().eos();
    session.check_room(ids.len())?;

    let mut generated = Generated { prompt_tokens: 0, completion_tokens: 0, finish: Finish::Cancelled };
    for id in &ids {
        session.absorb(*id)?;
        generated.prompt_tokens += 1;
        let read = generated.prompt_tokens;
        if read < ids.len() && on(Step::Prefilling { read }).is_break() {
            return Ok(generated);
        }
    }
    if on(Step::Prefilled { tokens: ids.len() }).is_break() {
        return Ok(generated);
    }

    let Options { max_tokens, temperature, top_k, top_p, seed } = *options;
    let mut sampler = Sampler::new(temperature, top_k, top_p, seed);
    generated.finish = Finish::Length;
    while generated.completion_tokens < max_tokens {
        let id = sampler.sample(session.logits()?);
        if id == eos {
            generated.finish = Finish::Stop;
            break;
        }
        generated.completion_tokens += 1;
        let byte = session.model().vocab().byte(id);
        if on(Step::Token { id, byte }).is_break() {
            generated.finish = Finish::Cancelled;
            break;
        }
        if generated.completion_tokens == max_tokens || session.room() == 0 {
            break;
        }
        session.absorb(id)?;
    }
    Ok(generated)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::fixture::{Fixture, SMALL};
    use super::super::model::Model;
    use super::*;

    const GREEDY: Options = Options { max_tokens: 5, temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

    fn session() -> Session {
        Session::new(Arc::new(Model::from_bytes(&Fixture::new(SMALL).file).unwrap()))
    }

    /// Runs to the end, or to the first step that `stop` wants to be the last.
    fn run(prompt: &str, options: &Options, stop: impl Fn(Step) -> bool) -> (Generated, Vec<Step>) {
        let mut steps = Vec::new();
        let on = &mut |step| {
            steps.push(step);
            if stop(step) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        (generate(&mut session(), prompt, options, on).unwrap(), steps)
    }

    fn answer(steps: &[Step]) -> Vec<u32> {
        steps
            .iter()
            .filter_map(|step| if let Step::Token { id, .. } = step { Some(*id) } else { None })
            .collect()
    }

    #[test]
    fn steps_come_in_the_order_of_the_work() {
        let (generated, steps) = run("1+2=", &GREEDY, |_| false);
        let prefill: Vec<Step> = (1..5).map(|read| Step::Prefilling { read }).collect();
        assert_eq!(steps[..4], prefill);
        assert_eq!(steps[4], Step::Prefilled { tokens: 5 });
        assert_eq!(generated, Generated { prompt_tokens: 5, completion_tokens: 5, finish: Finish::Length });
        assert_eq!(answer(&steps[5..]).len(), 5);
    }

    #[test]
    fn greedy_tokens_are_the_likeliest_of_each_step() {
        let (_, steps) = run("1+2=", &GREEDY, |_| false);
        let mut session = session();
        let ids = session.model().vocab().encode("1+2=");
        let mut logits = session.prefill(&ids).unwrap();
        for id in answer(&steps) {
            assert!(logits.iter().all(|logit| *logit <= logits[id as usize]));
            logits = session.step(id).unwrap();
        }
    }

    #[test]
    fn a_seed_makes_one_answer_whatever_the_session_read_before() {
        let options = Options { temperature: 1.0, seed: 3, ..GREEDY };
        let (_, first) = run("ab", &options, |_| false);
        let mut session = session();
        let mut again = Vec::new();
        let mut ignore = |_| ControlFlow::Continue(());
        generate(&mut session, "something else", &GREEDY, &mut ignore).unwrap();
        let mut keep = |step| {
            again.push(step);
            ControlFlow::Continue(())
        };
        generate(&mut session, "ab", &options, &mut keep).unwrap();
        assert_eq!(first, again);
        assert_ne!(first, run("ab", &Options { seed: 4, ..options }, |_| false).1);
    }

    #[test]
    fn the_end_of_sequence_stops_and_is_neither_reported_nor_counted() {
        // Hot enough, a model ends once in some 259 tokens, its vocabulary: 200 answers of 20 tokens do.
        let hot = Options { max_tokens: 20, temperature: 10.0, ..GREEDY };
        let runs = (0..200).map(|seed| run("a", &Options { seed, ..hot.clone() }, |_| false));
        let stopped: Vec<_> = runs.filter(|(generated, _)| generated.finish == Finish::Stop).collect();
        assert!(!stopped.is_empty());
        for (generated, steps) in stopped {
            let answer = answer(&steps);
            assert!(!answer.contains(&2));
            assert_eq!(answer.len(), generated.completion_tokens);
            assert!(generated.completion_tokens < 20);
        }
    }

    #[test]
    fn a_hook_can_break_off_at_every_step() {
        let whole = run("1+2=", &GREEDY, |_| false).1;
        for (i, last) in whole.iter().enumerate() {
            let (generated, steps) = run("1+2=", &GREEDY, |step| step == *last);
            assert!(steps.len() <= i + 1 && steps == whole[..steps.len()]);
            assert_eq!(generated.finish, Finish::Cancelled);
            assert_eq!(generated.completion_tokens, answer(&steps).len());
            assert_eq!(generated.prompt_tokens, steps.len().min(5));
        }
    }

    #[test]
    fn an_answer_ends_where_the_context_does() {
        let (generated, steps) = run(&"x".repeat(20), &Options { max_tokens: 99, ..GREEDY }, |_| false);
        // 21 tokens of prompt leave room to read 3 of the answer, after which one more is sampled.
        assert_eq!(generated, Generated { prompt_tokens: 21, completion_tokens: 4, finish: Finish::Length });
        assert_eq!(answer(&steps).len(), 4);
    }

    #[test]
    fn a_prompt_that_does_not_fit_is_an_error_before_any_work() {
        let mut on = |_| panic!("a step was reported");
        let error = generate(&mut session(), &"x".repeat(24), &GREEDY, &mut on).unwrap_err();
        assert_eq!(error, EngineError::ContextFull { context: 24, needed: 25 });
    }

    #[test]
    fn no_tokens_asked_for_are_no_tokens_sampled() {
        let (generated, steps) = run("a", &Options { max_tokens: 0, ..GREEDY }, |_| false);
        assert_eq!(generated, Generated { prompt_tokens: 2, completion_tokens: 0, finish: Finish::Length });
        assert_eq!(steps.last(), Some(&Step::Prefilled { tokens: 2 }));
    }
}
