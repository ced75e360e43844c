//! Whose joules: splits measured energy over the exchanges in flight. All shares + idle = total, always.
//!
//! Time is cut where an exchange is sent, sees its first token or ends. The energy of each piece goes in equal parts to those
//! in flight, to `prefill` before their first token and to `decode` after it; a piece with nobody in flight is idle. An answer that
//! did not stream shows no first token: its energy is `shared` between phases that cannot be told apart.

use crate::account::Account;
use crate::estimate::{Estimate, Method};
use crate::exchange::Exchange;
use crate::sensor::SensorId;
use crate::time::{Span, Stamp};
use crate::timeline::Timeline;
use crate::units::Joules;
use serde::{Deserialize, Serialize};

/// One exchange's part of the energy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// While it waited to be sent; a client's queue draws nothing from the server, so this is 0 unless the engine says more.
    pub queue: Joules,
    /// Until its first token.
    pub prefill: Joules,
    /// After its first token.
    pub decode: Joules,
    /// What cannot be told apart by phase: the whole answer, if it did not stream.
    pub shared: Joules,
    /// Half-width of the 95 % interval of the total.
    pub bound: Joules,
    /// How the energy was got.
    pub method: Method,
    /// Part of its time that readings covered.
    pub coverage: f64,
}

impl Share {
    /// All phases.
    pub fn total(&self) -> Joules {
        self.queue + self.prefill + self.decode + self.shared
    }
}

/// The split of one window.
#[derive(Debug, Clone, PartialEq)]
pub struct Split {
    /// One per exchange, in their order; `None` where no sensor covered any of its time.
    pub shares: Vec<Option<Share>>,
    /// Drawn while nobody was in flight.
    pub idle: Joules,
}

/// Splits the energy of `window` over `exchanges`. `energy` answers for any span and must be additive
/// ([`crate::Timeline`] is); exchanges count only as far as they lie inside the window.
pub fn split(
    window: Span,
    exchanges: &[Exchange],
    energy: impl Fn(Span) -> Option<Estimate<Joules>>,
) -> Split {
    let mut cuts = vec![window.start(), window.end()];
    for e in exchanges {
        cuts.extend([Some(e.sent), e.first_token, Some(e.done)].into_iter().flatten());
    }
    cuts.retain(|c| window.start() <= *c && *c <= window.end());
    cuts.sort_unstable();
    cuts.dedup();

    let mut idle = Joules::ZERO;
    let mut phases = vec![(Joules::ZERO, Joules::ZERO, Joules::ZERO); exchanges.len()];
    for pair in cuts.windows(2) {
        let piece = Span::new(pair[0], pair[1]);
        let Some(joules) = energy(piece).map(|e| e.value()) else { continue };
        let active: Vec<usize> =
            (0..exchanges.len()).filter(|i| exchanges[*i].span().contains(piece.start())).collect();
        if active.is_empty() {
            idle += joules;
        }
        for i in &active {
            let part = joules / active.len() as f64;
            let (prefill, decode, shared) = &mut phases[*i];
            match exchanges[*i].first_token {
                Some(first) if first <= piece.start() => *decode += part,
                None if exchanges[*i].outcome.is_ok() => *shared += part,
                _ => *prefill += part,
            }
        }
    }

    let shares = exchanges.iter().zip(phases).map(|(exchange, (prefill, decode, shared))| {
        let own = exchange.span().intersect(window)?;
        let whole = energy(own)?;
        let total = prefill + decode + shared;
        // The bound of its whole span, in proportion to the part that is its own.
        let part = if whole.value().get() > 0.0 { total / whole.value() } else { 1.0 };
        Some(Share {
            queue: Joules::ZERO,
            prefill,
            decode,
            shared,
            bound: whole.bound() * part,
            method: whole.method(),
            coverage: whole.coverage(),
        })
    });
    Split { shares: shares.collect(), idle }
}

/// The running account of one session: what was measured, and how much of it nobody asked for. Kept with every record, so
/// that a run that was killed still adds up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// From the first request sent to the end of this record's exchange, all sensors of the panel.
    #[serde(flatten)]
    pub account: Account,
    /// The part drawn with nobody in flight.
    pub idle: Joules,
    /// The part billed to exchanges.
    pub billed: Joules,
}

impl Ledger {
    /// An empty one that starts at `start`.
    pub fn open(start: Stamp) -> Self {
        Self { account: Account::open(start), idle: Joules::ZERO, billed: Joules::ZERO }
    }

    /// Bills the energy since its end up to the end of `exchange`, seen by `sensors`.
    pub fn bill(&mut self, exchange: &Exchange, timeline: &Timeline, sensors: &[SensorId]) -> Option<Share> {
        let window = Span::new(self.account.span.end(), exchange.done);
        let split = split(window, std::slice::from_ref(exchange), |span| timeline.energy_of(sensors, span));
        self.account.extend(timeline, sensors, window.end());
        self.idle += split.idle;
        self.billed += split.shares.iter().flatten().map(Share::total).sum();
        // Its time is its own, and power changes where it begins and ends.
        let mut own = Account::open(exchange.sent);
        own.extend(timeline, sensors, exchange.done);
        split.shares[0].map(|share| Share { bound: own.bound, ..share })
    }

    /// What the shares and idle miss of the measured energy, relative to it: 0 to rounding.
    pub fn residual(&self) -> Option<f64> {
        let measured = self.account.measured;
        (measured.get() > 0.0).then(|| (self.billed + self.idle - measured) / measured)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::{Dated, Finish, Outcome, Usage};
    use proptest::prelude::*;

    fn exchange(sent: u64, wait: u64, length: u64) -> Exchange {
        let first = Stamp::from_nanos(sent + wait.min(length));
        Exchange {
            response_id: None,
            due: Stamp::from_nanos(sent),
            sent: Stamp::from_nanos(sent),
            first_token: Some(first),
            tokens: vec![first],
            done: Stamp::from_nanos(sent + length),
            dated: Dated::Client,
            usage: Usage::default(),
            outcome: Outcome::Ok { finish: Finish::Stop },
            answer: String::new(),
            server: None,
        }
    }

    /// An additive measurement: power that ramps with time.
    fn ramp(span: Span) -> Option<Estimate<Joules>> {
        let (a, b) = (span.start().nanos() as f64, span.end().nanos() as f64);
        (b > a).then(|| Estimate::new(Joules((b * b - a * a) * 0.5), Joules(1.0), Method::Counter, 1.0))
    }

    proptest! {
        #[test]
        fn no_joule_is_lost(
            lives in prop::collection::vec((0u64..1000, 0u64..300, 1u64..300), 0..40),
            from in 0u64..400, length in 1u64..1500,
        ) {
            let window = Span::new(Stamp::from_nanos(from), Stamp::from_nanos(from + length));
            let exchanges: Vec<_> = lives.into_iter().map(|(s, w, l)| exchange(s, w, l)).collect();
            let split = split(window, &exchanges, ramp);
            let billed: Joules = split.shares.iter().flatten().map(Share::total).sum();
            let total = ramp(window).unwrap().value();
            prop_assert!((billed + split.idle - total).get().abs() <= 1e-9 * total.get());
            prop_assert!(split.shares.iter().flatten().all(|s| s.prefill.get() >= 0.0 && s.decode.get() >= 0.0));
        }
    }

    #[test]
    fn alone_a_request_pays_for_all_of_its_time_by_phase() {
        let e = exchange(100, 40, 100);
        let window = Span::new(Stamp::from_nanos(50), Stamp::from_nanos(250));
        let split = split(window, &[e], ramp);
        let share = split.shares[0].unwrap();
        assert_eq!(share.prefill, Joules((140.0 * 140.0 - 100.0 * 100.0) * 0.5));
        assert_eq!(share.decode, Joules((200.0 * 200.0 - 140.0 * 140.0) * 0.5));
        assert_eq!(share.queue + share.shared, Joules::ZERO);
    }

    #[test]
    fn an_answer_that_did_not_stream_has_no_phases() {
        let mut e = exchange(100, 40, 100);
        e.first_token = None;
        let window = Span::new(Stamp::from_nanos(100), Stamp::from_nanos(200));
        let share = split(window, &[e], ramp).shares[0].unwrap();
        assert_eq!(
            (share.prefill + share.decode, share.shared),
            (Joules::ZERO, ramp(window).unwrap().value())
        );
    }

    #[test]
    fn two_that_overlap_halve_what_they_share() {
        let split = split(
            Span::new(Stamp::from_nanos(0), Stamp::from_nanos(100)),
            &[exchange(0, 0, 100), exchange(50, 0, 50)],
            |s| Some(Estimate::new(Joules(s.duration().get() * 1e9), Joules::ZERO, Method::Counter, 1.0)),
        );
        let totals: Vec<f64> = split.shares.iter().flatten().map(|s| s.total().get().round()).collect();
        assert_eq!(totals, [75.0, 25.0]);
    }

    #[test]
    fn unknown_energy_is_nobodys_and_not_zero() {
        let split =
            split(Span::new(Stamp::from_nanos(0), Stamp::from_nanos(100)), &[exchange(0, 10, 50)], |_| None);
        assert_eq!(split.shares, vec![None]);
    }
}
