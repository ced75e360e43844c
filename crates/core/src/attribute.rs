//! Whose joules: splits measured energy over the exchanges in flight. All shares + idle = total, always.
//!
//! Time is cut where an exchange is sent, sees its first token or ends. The energy of each piece goes in equal parts to those
//! in flight, to `prefill` before their first token and to `decode` after it; a piece with nobody in flight is idle. An answer that
//! did not stream shows no first token: its energy is `shared` between phases that cannot be told apart.

use crate::account::Account;
use crate::estimate::Method;
use crate::exchange::Exchange;
use crate::sensor::SensorId;
use crate::time::{Span, Stamp};
use crate::timeline::Timeline;
use crate::units::Joules;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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

/// The running account of one session: what was measured, and how much of it nobody asked for. Kept with every record, so
/// that a run that was killed still adds up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// From the first request sent to the end of this record's exchange, all sensors of the panel.
    #[serde(flatten)]
    pub account: Account,
    /// The part drawn with nobody in flight.
    pub idle: Joules,
    /// The part billed to exchanges that have ended.
    pub billed: Joules,
    /// The part of those still in flight, or that count nowhere.
    #[serde(default)]
    pub open: Joules,
}

impl Ledger {
    /// An empty one that starts at `start`.
    pub fn open(start: Stamp) -> Self {
        Self { account: Account::open(start), idle: Joules::ZERO, billed: Joules::ZERO, open: Joules::ZERO }
    }

    /// Everything that somebody or nobody was charged for.
    pub fn accounted(&self) -> Joules {
        self.billed + self.idle + self.open
    }

    /// What the shares and idle miss of the measured energy, relative to it: 0 to rounding.
    pub fn residual(&self) -> Option<f64> {
        let measured = self.account.measured;
        (measured.get() > 0.0).then(|| (self.accounted() - measured) / measured)
    }
}

/// What is measured: some sensors of a timeline.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Their readings.
    pub timeline: &'a Timeline,
    /// Whose sum counts.
    pub sensors: &'a [SensorId],
}

/// Splits energy over exchanges as they are sent, see their first token and end. These are told in the order of their times;
/// one that is told late counts from where the account stands, so that nothing is billed twice.
///
/// Equal parts make one curve: what an exchange that was always in flight would have paid so far. The part of any one is the
/// difference of two points on it, whatever number there are.
#[derive(Debug, Clone)]
pub struct Splitter {
    ledger: Ledger,
    at: Stamp,
    curve: Joules,
    in_flight: BTreeMap<u64, Entry>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    sent: Stamp,
    at_sent: Joules,
    at_first: Option<Joules>,
}

impl Splitter {
    /// Starts an account at `start`.
    pub fn open(start: Stamp) -> Self {
        Self { ledger: Ledger::open(start), at: start, curve: Joules::ZERO, in_flight: BTreeMap::new() }
    }

    /// The account as it stands after the last exchange that ended.
    pub fn ledger(&self) -> Ledger {
        self.ledger
    }

    /// Nothing before this is asked of a timeline any more.
    pub fn needs_from(&self) -> Stamp {
        self.at.min(self.ledger.account.span.end())
    }

    /// Nobody is in flight, and nothing more will be told of the time before `until`.
    pub fn rest(&mut self, until: Stamp, view: View<'_>) {
        if self.in_flight.is_empty() {
            self.pass(until, view);
            self.ledger.account.extend(view.timeline, view.sensors, self.at);
        }
    }

    /// Exchange `id` was sent.
    pub fn sent(&mut self, id: u64, at: Stamp, view: View<'_>) {
        self.pass(at, view);
        self.in_flight.insert(id, Entry { sent: self.at, at_sent: self.curve, at_first: None });
    }

    /// Exchange `id` saw its first token.
    pub fn first_token(&mut self, id: u64, at: Stamp, view: View<'_>) {
        self.pass(at, view);
        if let Some(entry) = self.in_flight.get_mut(&id) {
            entry.at_first = Some(self.curve);
        }
    }

    /// Exchange `id` ended, as `exchange` says. Its share, unless no sensor covered any of its time.
    pub fn done(&mut self, id: u64, exchange: &Exchange, view: View<'_>) -> Option<Share> {
        self.pass(exchange.done, view);
        let entry = self.in_flight.remove(&id)?;
        let total = self.curve - entry.at_sent;
        self.ledger.open = self.ledger.open - total;
        self.ledger.billed += total;
        self.ledger.account.extend(view.timeline, view.sensors, self.at);
        // The bound is that of the whole span, in proportion to the part that is its own. Power changes where it begins and ends.
        let mut whole = Account::open(entry.sent);
        whole.extend(view.timeline, view.sensors, self.at);
        let seen = whole.estimate()?;
        let part = if seen.value().get() > 0.0 { total / seen.value() } else { 1.0 };
        let (prefill, decode, shared) = match entry.at_first {
            Some(first) => (first - entry.at_sent, self.curve - first, Joules::ZERO),
            None if exchange.outcome.is_ok() => (Joules::ZERO, Joules::ZERO, total),
            None => (total, Joules::ZERO, Joules::ZERO),
        };
        Some(Share {
            queue: Joules::ZERO,
            prefill,
            decode,
            shared,
            bound: seen.bound() * part,
            method: seen.method(),
            coverage: seen.coverage(),
        })
    }

    /// Exchange `id` is with the server no more, and counts nowhere so far: its energy stays open.
    pub fn withdraw(&mut self, id: u64, at: Stamp, view: View<'_>) {
        self.pass(at, view);
        self.in_flight.remove(&id);
    }

    /// Charges the energy up to `at` to whoever was in flight.
    fn pass(&mut self, at: Stamp, view: View<'_>) {
        if at <= self.at {
            return;
        }
        let piece = Span::new(self.at, at);
        self.at = at;
        let Some(joules) = view.timeline.energy_of(view.sensors, piece).map(|e| e.value()) else { return };
        match self.in_flight.len() {
            0 => self.ledger.idle += joules,
            n => {
                self.curve += joules / n as f64;
                self.ledger.open += joules;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::{FailureClass, Finish, Outcome};
    use crate::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Reading, Sensor, Trust};
    use proptest::prelude::*;

    const SENSOR: [SensorId; 1] = [SensorId(0)];
    const MS: u64 = 1_000_000;

    /// A counter of power that rises by 10 W every second, read every 10 ms for 3 s from 1 s on.
    fn timeline() -> Timeline {
        let sensor = Sensor {
            name: "test/0/energy".into(),
            source: "test".into(),
            device: Device { kind: DeviceKind::Gpu, id: "0".into(), name: "test".into() },
            quantity: Quantity::Energy,
            perimeter: Perimeter::Device,
            kind: Kind::Counter { wrap: None },
            trust: Trust::Measured { gain: 0.05 },
            quantum: 0.0,
            averaged_s: 0.0,
        };
        let mut timeline = Timeline::new(&[sensor]);
        for poll in 0..300u64 {
            let at = Stamp::from_nanos(1000 * MS + poll * 10 * MS);
            let value = Some(50.0 * poll as f64 * 0.01 + 5.0 * (poll as f64 * 0.01).powi(2));
            timeline.push(&Reading { sensor: SENSOR[0], at, value });
        }
        timeline
    }

    fn at(ms: u64) -> Stamp {
        Stamp::from_nanos(1000 * MS + ms * MS)
    }

    fn exchange(sent: u64, wait: u64, length: u64) -> Exchange {
        let first = at(sent + wait.min(length));
        Exchange {
            first_token: Some(first),
            tokens: vec![first],
            done: at(sent + length),
            outcome: Outcome::Ok { finish: Finish::Stop },
            ..Exchange::due(at(sent))
        }
    }

    /// Tells all that happened, in order, and gives the shares in the order of the exchanges.
    fn split(exchanges: &[Exchange], timeline: &Timeline) -> (Vec<Option<Share>>, Splitter) {
        let view = View { timeline, sensors: &SENSOR };
        let mut told: Vec<(Stamp, u8, usize)> = Vec::new();
        for (i, e) in exchanges.iter().enumerate() {
            told.push((e.sent, 0, i));
            told.extend(e.first_token.map(|t| (t, 1, i)));
            told.push((e.done, 2, i));
        }
        told.sort_unstable();
        let mut splitter = Splitter::open(told.first().map_or(at(0), |t| t.0));
        let mut shares = vec![None; exchanges.len()];
        for (when, what, i) in told {
            match what {
                0 => splitter.sent(i as u64, when, view),
                1 => splitter.first_token(i as u64, when, view),
                _ => shares[i] = splitter.done(i as u64, &exchanges[i], view),
            }
        }
        (shares, splitter)
    }

    fn joules(timeline: &Timeline, from: u64, until: u64) -> f64 {
        timeline.energy(SENSOR[0], Span::new(at(from), at(until))).unwrap().value().get()
    }

    proptest! {
        #[test]
        fn no_joule_is_lost(lives in prop::collection::vec((20u64..2000, 0u64..300, 1u64..800), 1..40)) {
            let exchanges: Vec<_> = lives.into_iter().map(|(s, w, l)| exchange(s, w, l)).collect();
            let timeline = timeline();
            let (shares, splitter) = split(&exchanges, &timeline);
            let ledger = splitter.ledger();
            let sum: Joules = shares.iter().flatten().map(Share::total).sum();
            prop_assert!((sum - ledger.billed).get().abs() <= 1e-9 * sum.get());
            prop_assert!(ledger.residual().unwrap().abs() <= 1e-9);
            prop_assert!(ledger.open.get().abs() <= 1e-9 * sum.get(), "all have ended");
            prop_assert!(shares.iter().flatten().all(|s| s.prefill.get() >= 0.0 && s.decode.get() >= 0.0));
        }

        #[test]
        fn what_is_still_in_flight_is_kept_apart(n in 1u64..20) {
            let timeline = timeline();
            let view = View { timeline: &timeline, sensors: &SENSOR };
            let mut splitter = Splitter::open(at(100));
            (0..n).for_each(|id| splitter.sent(id, at(100), view));
            splitter.sent(99, at(100), view);
            splitter.done(99, &exchange(100, 1, 500), view).unwrap();
            let ledger = splitter.ledger();
            prop_assert!(ledger.residual().unwrap().abs() <= 1e-9);
            let part = ledger.open / ledger.account.measured;
            prop_assert!((part - n as f64 / (n + 1) as f64).abs() < 1e-9);
        }
    }

    #[test]
    fn alone_a_request_pays_for_all_of_its_time_by_phase() {
        let timeline = timeline();
        let (shares, _) = split(&[exchange(100, 40, 100)], &timeline);
        let share = shares[0].unwrap();
        assert!((share.prefill.get() - joules(&timeline, 100, 140)).abs() < 1e-9);
        assert!((share.decode.get() - joules(&timeline, 140, 200)).abs() < 1e-9);
        assert_eq!(share.queue + share.shared, Joules::ZERO);
        let mut own = Account::open(at(100));
        own.extend(&timeline, &SENSOR, at(200));
        assert!((share.bound - own.bound).get().abs() < 1e-12, "the bound of its whole time");
    }

    #[test]
    fn an_answer_that_did_not_stream_has_no_phases_and_a_failed_one_never_left_the_first() {
        let timeline = timeline();
        let mut e = Exchange { first_token: None, ..exchange(100, 40, 100) };
        let share = split(std::slice::from_ref(&e), &timeline).0[0].unwrap();
        assert_eq!(share.prefill + share.decode, Joules::ZERO);
        assert!((share.shared.get() - joules(&timeline, 100, 200)).abs() < 1e-9);
        e.outcome = Outcome::Failed { class: FailureClass::Timeout, error: "slow".into() };
        let share = split(&[e], &timeline).0[0].unwrap();
        assert!((share.prefill.get() - joules(&timeline, 100, 200)).abs() < 1e-9);
    }

    #[test]
    fn two_that_overlap_halve_what_they_share() {
        let timeline = timeline();
        let (shares, splitter) = split(&[exchange(100, 0, 100), exchange(150, 0, 50)], &timeline);
        let [long, short] = [0, 1].map(|i: usize| shares[i].unwrap().total().get());
        assert!((short - joules(&timeline, 150, 200) / 2.0).abs() < 1e-9);
        assert!((long - joules(&timeline, 100, 150) - short).abs() < 1e-9);
        assert_eq!(splitter.ledger().idle, Joules::ZERO);
    }

    #[test]
    fn what_is_told_late_is_billed_once() {
        let timeline = timeline();
        let view = View { timeline: &timeline, sensors: &SENSOR };
        let mut splitter = Splitter::open(at(100));
        splitter.sent(0, at(100), view);
        splitter.done(0, &exchange(100, 10, 200), view).unwrap();
        splitter.sent(1, at(250), view);
        let late = splitter.done(1, &exchange(250, 10, 100), view).unwrap();
        assert!((late.total().get() - joules(&timeline, 300, 350)).abs() < 1e-9);
        assert!(splitter.ledger().residual().unwrap().abs() < 1e-9);
    }

    #[test]
    fn unknown_energy_is_nobodys_and_not_zero() {
        let (shares, _) = split(&[exchange(0, 10, 50)], &Timeline::new(&[]));
        assert_eq!(shares, vec![None]);
    }
}
