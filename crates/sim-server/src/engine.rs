//! An engine with continuous batching, as a simulation of events: no clock, no socket, and every joule has an owner.
//!
//! Time passes in iterations. Each gives one token to every decoding request and works off prompts, first come first served,
//! up to a budget of prompt tokens: a long prompt takes several iterations, and the one that ends it gives the first token. With
//! P prompt tokens, D decoding requests and K tokens of context that these look back at (their prompts and what they said so far), an iteration takes
//! `fixed + prefill·P + decode·D + context·K` seconds and, with other coefficients, as many joules on top of idle power;
//! [`Quirks`] make an engine that this formula does not fit.
//!
//! What a request caused is its own; `fixed` and the idle power of the iteration are shared equally by all in it: the
//! Shapley value of that game. An iteration that ends late goes on drawing its power: its joules are those that the board drew,
//! so the shares and the idle joules always sum up to the integral of power.

use crate::cost::{Cost, Noise, Quirks, Work};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::PathBuf;

/// The engine of a server. The defaults are made up: about a model of 8 B parameters on a board of 400 W.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Requests in one iteration at most.
    pub max_batch: usize,
    /// Prompt tokens in one iteration at most.
    pub prefill_budget: u64,
    /// Power when there is nothing to do, and part of the power when there is.
    pub idle_watts: f64,
    /// Of time, in seconds.
    pub seconds: Cost,
    /// Of energy on top of idle power, in joules.
    pub joules: Cost,
    /// Where both are not linear.
    pub quirks: Quirks,
    /// File in which power is said while it happens, for a [`wattle_sim_nvml::Scenario`] with the same `live`.
    pub live: Option<PathBuf>,
    /// Index of the board that draws it.
    pub board: usize,
}

/// True joules of one request, by what they were for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Joules {
    /// Its own, for the prompt.
    pub prefill: f64,
    /// Its own, for tokens and the context they looked back at.
    pub decode: f64,
    /// Its equal part of what iterations cost whoever is in them, idle power included.
    pub shared: f64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_batch: 64,
            prefill_budget: 2048,
            idle_watts: 60.0,
            seconds: Cost { fixed: 8e-3, prefill: 5e-5, decode: 5e-5, context: 5e-8 },
            joules: Cost { fixed: 1.6, prefill: 0.015, decode: 0.012, context: 1e-5 },
            quirks: Quirks::default(),
            live: None,
            board: 0,
        }
    }
}

impl Joules {
    /// All of it.
    pub fn total(&self) -> f64 {
        self.prefill + self.decode + self.shared
    }
}

/// What a turn of the engine tells.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Told {
    /// A request waits no more: its prompt is worked on from that moment.
    Begun {
        /// Whose.
        id: u64,
        /// When the iteration began.
        at: u64,
    },
    /// A request has its next token; it was due at that moment.
    Token {
        /// Whose.
        id: u64,
        /// When the iteration was to end.
        due: u64,
    },
    /// A request is over: all tokens given, or it left. Comes after its last token.
    Over {
        /// Whose.
        id: u64,
        /// What it cost.
        joules: Joules,
    },
}

#[derive(Debug)]
struct Sequence {
    id: u64,
    prompt: u64,
    /// Prompt tokens worked off.
    prefilled: u64,
    wanted: u64,
    given: u64,
    /// Prompt tokens of the running iteration.
    prefill: u64,
    /// What is done for it in that iteration.
    work: Work,
    joules: Joules,
    left: bool,
}

impl Sequence {
    fn is_over(&self) -> bool {
        self.left || self.given >= self.wanted
    }

    /// Whether its prompt is worked off.
    fn decodes(&self) -> bool {
        self.prefilled == self.prompt
    }

    /// What is done for it in the next iteration, in which so many requests decode.
    fn work_among(&self, decoding: usize, quirks: &Quirks) -> Work {
        if self.decodes() {
            quirks.decode(decoding, self.prompt + self.given)
        } else {
            quirks.prefill(self.prefilled, self.prefill)
        }
    }
}

#[derive(Debug)]
struct Iteration {
    began: u64,
    due: u64,
    seconds: f64,
    /// Times so much come its joules on top of idle power.
    noise: f64,
}

/// The engine. Moments are nanoseconds of whatever clock the caller has.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    iteration: Option<Iteration>,
    /// The last turn.
    turned: u64,
    idle_joules: f64,
    noise: Noise,
}

impl Engine {
    /// An engine that idles from `now` on.
    pub fn new(config: EngineConfig, now: u64) -> Engine {
        Engine {
            noise: Noise::new(&config.quirks),
            config,
            waiting: VecDeque::new(),
            running: Vec::new(),
            iteration: None,
            turned: now,
            idle_joules: 0.0,
        }
    }

    /// A request waits from now on. It is looked at by the next [`Engine::turn`].
    pub fn arrive(&mut self, id: u64, prompt: u64, tokens: u64) {
        let (prompt, wanted) = (prompt.max(1), tokens.max(1));
        self.waiting.push_back(Sequence {
            id,
            prompt,
            prefilled: 0,
            wanted,
            given: 0,
            prefill: 0,
            work: Work::default(),
            joules: Joules::default(),
            left: false,
        });
    }

    /// A request wants no more. Its iteration goes on, its slot is free in the next.
    pub fn leave(&mut self, id: u64, told: &mut Vec<Told>) {
        if let Some(at) = self.waiting.iter().position(|s| s.id == id) {
            self.waiting.remove(at);
            told.push(Told::Over { id, joules: Joules::default() });
        } else if let Some(sequence) = self.running.iter_mut().find(|s| s.id == id) {
            sequence.left = true;
        }
    }

    /// When to call [`Engine::turn`]: at the end of the iteration, at once (0) if a request waits for an idle engine.
    pub fn due(&self) -> Option<u64> {
        self.iteration.as_ref().map(|i| i.due).or((!self.waiting.is_empty()).then_some(0))
    }

    /// Requests in the iteration, and requests that wait.
    pub fn load(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// Joules drawn while nothing ran, up to the last turn.
    pub fn idle_joules(&self) -> f64 {
        self.idle_joules
    }

    /// Ends the iteration, if there is one, and begins the next, if there is work.
    ///
    /// `stamp` gets the power from this moment on and says which moment it is. Time does not run backwards: a moment before the
    /// last turn counts as that one.
    pub fn turn(&mut self, stamp: impl FnOnce(f64) -> u64, told: &mut Vec<Told>) {
        let ended = self.iteration.take();
        let done: Vec<Work> = self.running.iter().map(|s| s.work).collect();
        if let Some(ended) = &ended {
            self.running.iter_mut().for_each(|s| give(s, ended.due, told));
        }
        let active = self.running.len();
        let plan = self.plan();
        let begun = self.running[active..].iter().map(|s| s.id).collect::<Vec<_>>();
        let seconds = plan.map(|work| self.config.seconds.of(work).max(1e-9));
        let noise = plan.map_or(1.0, |_| self.noise.next());
        let drawn =
            plan.zip(seconds).map_or(0.0, |(work, seconds)| self.config.joules.of(work) * noise / seconds);
        let at = stamp(self.config.idle_watts + drawn).max(self.turned);
        match ended {
            Some(ended) => self.settle(&ended, at, &done, active),
            None => self.idle_joules += span(self.turned, at) * self.config.idle_watts,
        }
        self.running.retain(|s| {
            let over = s.is_over();
            if over {
                told.push(Told::Over { id: s.id, joules: s.joules });
            }
            !over
        });
        told.extend(begun.into_iter().map(|id| Told::Begun { id, at }));
        self.turned = at;
        self.iteration = seconds.map(|seconds| Iteration {
            began: at,
            due: at + ((seconds * 1e9) as u64).max(1),
            seconds,
            noise,
        });
    }

    /// Says who does what in the next iteration; the sum, or `None` if there is nothing to do.
    fn plan(&mut self) -> Option<Work> {
        let mut budget = self.config.prefill_budget.max(1);
        let mut running = 0;
        for s in self.running.iter_mut().filter(|s| !s.is_over()) {
            assign(s, &mut budget);
            running += 1;
        }
        // A prompt begun is worked on in every iteration: only the last one taken in can be left in part.
        while running < self.config.max_batch.max(1)
            && budget > 0
            && let Some(mut s) = self.waiting.pop_front()
        {
            assign(&mut s, &mut budget);
            self.running.push(s);
            running += 1;
        }
        let decoding = self.running.iter().filter(|s| !s.is_over() && s.decodes()).count();
        let mut all = None;
        for s in self.running.iter_mut().filter(|s| !s.is_over()) {
            s.work = s.work_among(decoding, &self.config.quirks);
            *all.get_or_insert_default() += s.work;
        }
        all
    }

    /// Charges an iteration that lasted until `at` to the first `active` of those that run.
    fn settle(&mut self, ended: &Iteration, at: u64, done: &[Work], active: usize) {
        let Cost { fixed, .. } = self.config.joules;
        let lasted = span(ended.began, at);
        // Power is constant over an iteration, so a longer one draws more in proportion.
        let stretch = ended.noise * lasted / ended.seconds;
        let shared = (fixed * stretch + self.config.idle_watts * lasted) / active as f64;
        for (sequence, work) in self.running.iter_mut().zip(done) {
            sequence.joules.prefill += self.config.joules.prefill_of(*work) * stretch;
            sequence.joules.decode += self.config.joules.decode_of(*work) * stretch;
            sequence.joules.shared += shared;
        }
    }
}

/// Gives a request its part of the next iteration's budget of prompt tokens.
fn assign(sequence: &mut Sequence, budget: &mut u64) {
    sequence.prefill = (*budget).min(sequence.prompt - sequence.prefilled);
    *budget -= sequence.prefill;
}

/// What an iteration that ended did for one request.
fn give(sequence: &mut Sequence, due: u64, told: &mut Vec<Told>) {
    sequence.prefilled += sequence.prefill;
    if sequence.decodes() && !sequence.left {
        sequence.given += 1;
        told.push(Told::Token { id: sequence.id, due });
    }
}

fn span(from: u64, until: u64) -> f64 {
    until.saturating_sub(from) as f64 * 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Debug, Clone)]
    struct Arrival {
        at: u64,
        prompt: u64,
        tokens: u64,
        /// Leaves so long after it came.
        leaves: Option<u64>,
    }

    /// What came of a simulation.
    #[derive(Default)]
    struct Seen {
        begun: BTreeMap<u64, u64>,
        tokens: BTreeMap<u64, Vec<u64>>,
        joules: BTreeMap<u64, Joules>,
        /// Power from each moment on.
        power: Vec<(u64, f64)>,
        most: usize,
    }

    impl Seen {
        fn drawn(&self) -> f64 {
            self.power.windows(2).map(|w| span(w[0].0, w[1].0) * w[0].1).sum()
        }
    }

    /// Plays arrivals; each turn comes later than due by the next of `late`.
    fn play(engine: &mut Engine, arrivals: &[Arrival], late: &[u64]) -> Seen {
        let mut events: Vec<(u64, u64, bool)> = Vec::new();
        for (id, a) in (0..).zip(arrivals) {
            events.push((a.at, id, true));
            events.extend(a.leaves.map(|after| (a.at + after, id, false)));
        }
        events.sort_unstable();
        let mut seen = Seen::default();
        let (mut next, mut now, mut late) = (0, 0, late.iter().cycle());
        loop {
            let turn = engine.due().map(|due| due.max(now) + late.next().unwrap_or(&0));
            let mut told = Vec::new();
            match (events.get(next), turn) {
                (Some((at, id, comes)), turn) if turn.is_none_or(|t| *at <= t) => {
                    now = now.max(*at);
                    next += 1;
                    let arrival = &arrivals[*id as usize];
                    if *comes {
                        engine.arrive(*id, arrival.prompt, arrival.tokens);
                    } else if !seen.joules.contains_key(id) {
                        engine.leave(*id, &mut told);
                    }
                }
                (_, Some(turn)) => {
                    now = turn;
                    let power = &mut seen.power;
                    engine.turn(
                        |watts| {
                            power.push((turn, watts));
                            turn
                        },
                        &mut told,
                    );
                    seen.most = seen.most.max(engine.load().0);
                }
                (_, None) => break,
            }
            for news in told {
                match news {
                    Told::Begun { id, at } => assert!(at == now && seen.begun.insert(id, at).is_none()),
                    Told::Token { id, .. } => seen.tokens.entry(id).or_default().push(now),
                    Told::Over { id, joules } => {
                        assert!(seen.joules.insert(id, joules).is_none(), "{id} is over twice");
                    }
                }
            }
        }
        seen
    }

    fn arrival() -> impl Strategy<Value = Arrival> {
        let leaves = prop::option::weighted(0.3, 0u64..500_000_000);
        (0u64..2_000_000_000, 1u64..6_000, 1u64..40, leaves)
            .prop_map(|(at, prompt, tokens, leaves)| Arrival { at, prompt, tokens, leaves })
    }

    fn quirks() -> impl Strategy<Value = Quirks> {
        (0.0..1e-3, 0.5..1.5, 0.5..1.5, 0.0..0.5, 0u64..9).prop_map(
            |(attention, batch_exponent, context_exponent, noise, seed)| Quirks {
                attention,
                batch_exponent,
                context_exponent,
                noise,
                seed,
            },
        )
    }

    proptest! {
        #[test]
        fn no_joule_is_lost(
            arrivals in prop::collection::vec(arrival(), 1..60),
            late in prop::collection::vec(0u64..3_000_000, 1..20),
            max_batch in 1usize..16,
            quirks in prop_oneof![Just(Quirks::default()), quirks()],
        ) {
            let mut engine = Engine::new(EngineConfig { max_batch, quirks, ..EngineConfig::default() }, 0);
            let seen = play(&mut engine, &arrivals, &late);
            prop_assert_eq!(seen.joules.len(), arrivals.len());
            let before = engine.config.idle_watts * seen.power.first().map_or(0.0, |p| span(0, p.0));
            let shares: f64 = seen.joules.values().map(Joules::total).sum();
            let (given, drawn) = (shares + engine.idle_joules(), before + seen.drawn());
            prop_assert!((given - drawn).abs() <= 1e-9 * drawn.max(1.0), "{} of {}", given, drawn);
        }

        #[test]
        fn every_token_comes_once_and_no_batch_is_too_large(
            arrivals in prop::collection::vec(arrival(), 1..60),
            max_batch in 1usize..16,
        ) {
            let mut engine = Engine::new(EngineConfig { max_batch, ..EngineConfig::default() }, 0);
            let seen = play(&mut engine, &arrivals, &[0]);
            prop_assert!(seen.most <= max_batch);
            for (id, a) in (0..).zip(&arrivals).filter(|(_, a)| a.leaves.is_none()) {
                prop_assert_eq!(seen.tokens[&id].len() as u64, a.tokens);
                prop_assert!(a.at <= seen.begun[&id] && seen.begun[&id] < seen.tokens[&id][0]);
            }
        }
    }

    fn alone(prompt: u64, tokens: u64) -> Arrival {
        Arrival { at: 1_000_000_000, prompt, tokens, leaves: None }
    }

    #[test]
    fn one_request_costs_what_the_coefficients_say() {
        let config = EngineConfig::default();
        let mut engine = Engine::new(config.clone(), 0);
        let seen = play(&mut engine, &[alone(5_000, 3)], &[0]);
        let joules = seen.joules[&0];
        // 5,000 prompt tokens at 2,048 an iteration are three iterations, the third with the first token; two decode.
        assert!((joules.prefill - 5_000.0 * config.joules.prefill).abs() < 1e-3);
        let decode = 2.0 * config.joules.decode + (5_001 + 5_002) as f64 * config.joules.context;
        assert!((joules.decode - decode).abs() < 1e-3);
        let seconds = span(1_000_000_000, seen.tokens[&0][2]);
        assert!((joules.shared - 5.0 * config.joules.fixed - config.idle_watts * seconds).abs() < 1e-3);
    }

    #[test]
    fn one_request_with_quirks_costs_what_the_formula_says() {
        let quirks = Quirks { attention: 2e-4, context_exponent: 1.3, ..Quirks::default() };
        let config = EngineConfig { quirks, ..EngineConfig::default() };
        let mut engine = Engine::new(config.clone(), 0);
        let seen = play(&mut engine, &[alone(5_000, 3)], &[0]);
        let joules = seen.joules[&0];
        let units: f64 = (0..5_000).map(|x| 1.0 + 2e-4 * f64::from(x)).sum();
        let contexts: f64 = [5_001.0, 5_002.0].map(|k: f64| 1000.0 * (k / 1000.0).powf(1.3)).iter().sum();
        assert!((joules.prefill - units * config.joules.prefill).abs() < 1e-3);
        assert!((joules.decode - 2.0 * config.joules.decode - contexts * config.joules.context).abs() < 1e-3);
        let Cost { fixed, prefill, decode, context } = config.seconds;
        let seconds = span(1_000_000_000, seen.tokens[&0][2]);
        let expected = 5.0 * fixed + units * prefill + 2.0 * decode + contexts * context;
        assert!((seconds - expected).abs() < 1e-6, "{seconds} {expected}");
        assert!((joules.shared - 5.0 * config.joules.fixed - config.idle_watts * seconds).abs() < 1e-3);
    }

    #[test]
    fn a_batch_pays_by_its_exponent_and_each_of_it_the_same() {
        let decode = |count: usize, batch_exponent: f64| {
            let quirks = Quirks { batch_exponent, ..Quirks::default() };
            let cost = Cost { fixed: 1e-3, prefill: 0.0, decode: 1e-3, context: 0.0 };
            let config = EngineConfig { seconds: cost, joules: cost, quirks, ..EngineConfig::default() };
            let seen = play(&mut Engine::new(config, 0), &vec![alone(10, 101); count], &[0]);
            assert!(seen.joules.values().all(|j| *j == seen.joules[&0]));
            seen.joules[&0].decode
        };
        // A hundred decode iterations of sixteen: 16^0.5 is a quarter of sixteen.
        assert!((decode(16, 1.0) - 0.1).abs() < 1e-6);
        assert!((decode(16, 0.5) - 0.025).abs() < 1e-6);
        assert!((decode(1, 0.5) - 0.1).abs() < 1e-6);
    }

    #[test]
    fn noise_changes_joules_and_not_times() {
        let play_with = |noise| {
            let quirks = Quirks { noise, ..Quirks::default() };
            play(
                &mut Engine::new(EngineConfig { quirks, ..EngineConfig::default() }, 0),
                &[alone(5_000, 30)],
                &[0],
            )
        };
        let (calm, noisy) = (play_with(0.0), play_with(0.3));
        assert_eq!(calm.tokens, noisy.tokens);
        let ratio = noisy.joules[&0].prefill / calm.joules[&0].prefill;
        assert!(ratio != 1.0 && (0.7..1.3).contains(&ratio), "{ratio}");
    }

    #[test]
    fn requests_that_do_the_same_together_pay_the_same_and_less_than_alone() {
        let twins =
            play(&mut Engine::new(EngineConfig::default(), 0), &[alone(100, 20), alone(100, 20)], &[0]);
        let single = play(&mut Engine::new(EngineConfig::default(), 0), &[alone(100, 20)], &[0]);
        assert_eq!(twins.joules[&0], twins.joules[&1]);
        assert!(twins.joules[&0].total() < 0.7 * single.joules[&0].total());
    }

    #[test]
    fn who_leaves_while_waiting_pays_nothing() {
        let mut engine = Engine::new(EngineConfig { max_batch: 1, ..EngineConfig::default() }, 0);
        let second = Arrival { leaves: Some(1_000_000), ..alone(10, 10) };
        let seen = play(&mut engine, &[alone(10, 10), second], &[0]);
        assert_eq!(seen.joules[&1], Joules::default());
        assert!(seen.joules[&0].total() > 0.0);
    }
}
