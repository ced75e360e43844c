//! The metrics of a window of a run. Figures of requests are of those that ended in it; rates and energy are of the window itself,
//! so that what came before it or comes after it is in neither side of a ratio. docs/method.md#steady

use super::{Accumulator, Metric, Out, Surroundings, WHOLE};
use crate::account::Account;
use crate::attribute::Ledger;
use crate::estimate::Method;
use crate::stats::{Batches, Interval};
use crate::steady::Bin;
use crate::units::Joules;
use std::collections::BTreeMap;

/// Metrics that are of the whole run only. What energy is for is in the ledger of a session, of which a window has no part.
const OF_THE_RUN: [&str; 6] = [
    "offered_per_s",
    "foreign_j",
    "unattributed_j",
    "attribution_residual",
    "meter_cpu_fraction",
    "meter_lateness_p99_s",
];

// Columns of the batches.
const SECONDS: usize = 0;
const TOKENS: usize = 1;
const ANSWERS: usize = 2;
const IN_FLIGHT: usize = 3;
const ENERGY: usize = 4;

impl Accumulator {
    /// The part of the energy that was drawn for requests of others; `None` without any energy.
    pub fn foreign(&self) -> Option<f64> {
        let foreign: Joules = self.ledgers.values().map(|l| l.foreign).sum();
        let measured: Joules = self.accounts().map(|a| a.measured).sum();
        (measured.get() > 0.0).then(|| foreign / measured)
    }

    /// The metrics of a window in `session`: `self` has taken in what ended in it, `bins` are those of the window, each with its
    /// energy if there is any. Unless we were `alone` at the server, the energy of the window is not that of its tokens.
    pub fn of_window(
        mut self,
        session: u32,
        bins: &[Bin],
        energy: &[Account],
        alone: bool,
        around: &Surroundings,
    ) -> BTreeMap<String, Metric> {
        let account = Account::chain(energy);
        self.method = self.method.max(account.and_then(|a| a.method));
        self.ledgers = account
            .map(|account| (session, Ledger { account, ..Ledger::open(account.span.start()) }))
            .into_iter()
            .collect();
        let mut metrics = self.finish(around);
        metrics.retain(|name, _| !OF_THE_RUN.contains(&name.as_str()));
        let mut out = Out { metrics, energy_method: self.method.map_or("none", Method::name) };

        let mut batches = Batches::<5>::default();
        for (i, bin) in bins.iter().enumerate() {
            let seconds = bin.span.duration().get();
            let joules = energy.get(i).map_or(0.0, |a| a.measured.get());
            batches.push([seconds, bin.tokens, bin.answers, bin.in_flight * seconds, joules]);
        }
        let n = self.queries;
        let tokens = batches.sum(TOKENS);
        let counted = self.output_tokens.1 > 0 || tokens > 0.0;
        out.put("output_tokens", counted.then_some(tokens), None, None, n, "count");
        let relative =
            |r: Option<Interval>| r.and_then(|r| Some(r.half? / r.value)).filter(|s| s.is_finite());
        for (name, column, known) in [
            ("output_tokens_per_s", TOKENS, counted),
            ("queries_per_s", ANSWERS, true),
            ("mean_in_flight", IN_FLIGHT, true),
        ] {
            let rate = batches.ratio(column, SECONDS).filter(|_| known);
            out.direct(name, rate.map(|r| r.value), relative(rate), n, "clock");
        }
        let seconds = batches.sum(SECONDS);
        let good = (self.slo.is_set() && seconds > 0.0).then(|| self.slo_met as f64 / seconds);
        out.put("goodput_per_s", good, None, None, if self.slo.is_set() { n } else { 0 }, "clock");

        let method = out.energy_method;
        let whole = account.filter(|a| a.coverage >= WHOLE && a.measured.get() > 0.0);
        let sensor = whole.map(|a| a.bound / a.measured);
        let ratio =
            |over, under| batches.ratio(over, under).filter(|_| alone && whole.is_some() && tokens > 0.0);
        let both = |r: Option<Interval>| relative(r).zip(sensor).map(|(spread, sensor)| spread.hypot(sensor));
        let (per_token, per_joule) = (ratio(ENERGY, TOKENS), ratio(TOKENS, ENERGY));
        out.direct("joules_per_output_token", per_token.map(|r| r.value), both(per_token), n, method);
        out.inverse("output_tokens_per_joule", per_joule.map(|r| r.value), both(per_joule), n, method);
        out.metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::Method;
    use crate::time::{Span, Stamp};

    /// Bins of a second: 100 tokens and 2 answers in each, 5 J a token, 3 in flight.
    fn window(n: u64, coverage: f64) -> (Vec<Bin>, Vec<Account>) {
        let span = |i: u64| {
            let at = |s: u64| Stamp::from_nanos(s * 1_000_000_000);
            Span::new(at(i), at(i + 1))
        };
        let bin = |i| Bin { span: span(i), in_flight: 3.0, tokens: 100.0, answers: 2.0 };
        let account = |i| Account {
            span: span(i),
            measured: Joules(500.0),
            bound: Joules(26.0),
            gain: Joules(25.0),
            start: Some(Joules(0.5)),
            coverage,
            method: Some(Method::Counter),
            ..Account::open(span(i).start())
        };
        ((0..n).map(bin).collect(), (0..n).map(account).collect())
    }

    #[test]
    fn rates_and_joules_are_those_of_the_window() {
        let (bins, energy) = window(10, 1.0);
        let m = Accumulator::default().of_window(0, &bins, &energy, true, &Surroundings::default());
        let value = |name: &str| m[name].value.unwrap();
        assert_eq!((value("energy_j"), value("mean_power_w")), (5000.0, 500.0));
        assert_eq!((value("output_tokens"), value("output_tokens_per_s")), (1000.0, 100.0));
        assert_eq!((value("queries_per_s"), value("mean_in_flight")), (2.0, 3.0));
        assert_eq!((value("joules_per_output_token"), value("output_tokens_per_joule")), (5.0, 0.2));
        // The gain of the sensor, and what its two outer ends leave open.
        let high = m["joules_per_output_token"].high.unwrap();
        assert!((high - 5.0 * (1.0 + 251.0 / 5000.0)).abs() < 1e-9, "{high}");
        for name in OF_THE_RUN {
            assert!(!m.contains_key(name), "{name}");
        }
    }

    #[test]
    fn energy_seen_in_part_has_no_ratio() {
        let (bins, energy) = window(10, 0.5);
        let m = Accumulator::default().of_window(0, &bins, &energy, true, &Surroundings::default());
        assert_eq!((m["joules_per_output_token"].value, m["mean_power_w"].value), (None, None));
        let m = Accumulator::default().of_window(0, &bins, &[], true, &Surroundings::default());
        assert_eq!((m["energy_j"].value, m["output_tokens_per_s"].value), (None, Some(100.0)));
    }
    #[test]
    fn energy_of_others_is_in_no_ratio_of_the_window() {
        let (bins, energy) = window(10, 1.0);
        let ledger =
            Ledger { foreign: Joules(50.0), account: energy[0], ..Ledger::open(Stamp::from_nanos(0)) };
        let ours = Accumulator { ledgers: [(0, ledger)].into(), ..Accumulator::default() };
        assert_eq!((ours.foreign(), Accumulator::default().foreign()), (Some(0.1), None));
        let m = ours.of_window(0, &bins, &energy, false, &Surroundings::default());
        assert_eq!((m["energy_j"].value, m["output_tokens_per_s"].value), (Some(5000.0), Some(100.0)));
        assert_eq!((m["joules_per_output_token"].value, m["output_tokens_per_joule"].value), (None, None));
        assert!(!m.contains_key("foreign_j"), "nobody knows which part of it fell in the window");
    }
}
