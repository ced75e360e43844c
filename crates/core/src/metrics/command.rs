//! The metrics of a command: of each run of it, and of all together.

use super::{Metric, Out, Surroundings, WHOLE};
use crate::account::{Account, Total};
use crate::command::Repetition;
use crate::estimate::Method;
use crate::stats::Batches;
use crate::units::{Joules, Seconds};
use std::collections::BTreeMap;

/// The metrics of the runs of a command, warm-up left out; each with its energy, as far as it is known.
pub fn of_command(runs: &[(&Repetition, Account)], around: &Surroundings) -> BTreeMap<String, Metric> {
    let mut total = Total::default();
    runs.iter().for_each(|(_, account)| total.add(account));
    let energy = total.estimate();
    let method = energy.map_or("none", |e| Method::name(e.method()));
    let mut out = Out { metrics: BTreeMap::new(), energy_method: method };
    let n = runs.iter().filter(|(r, _)| r.counts()).count() as u64;
    out.count("repetitions", n as f64, n);
    let failed = runs.iter().filter(|(r, _)| r.counts() && !r.is_ok());
    out.count("failed_repetitions", failed.count() as f64, n);

    // What a sensor may be off by is the same in every run; the spread between runs comes on top.
    let sensor = energy.filter(|e| e.value().get() > 0.0).map(|e| e.bound() / e.value());
    let whole = energy.filter(|e| e.coverage() >= WHOLE);
    out.gross(energy.map(|e| e.value()), whole.is_some(), sensor, n);
    let power = whole.map(|e| e.value() / (total.length * e.coverage()));
    out.direct("mean_power_w", power.map(|p| p.get()), sensor, n, method);
    out.put("energy_coverage", energy.map(|e| e.coverage()), None, None, n, method);

    let gain: Joules = runs.iter().map(|(_, a)| a.gain).sum();
    let lengths = runs.iter().map(|(r, _)| (r.session, r.span.duration()));
    let mut time: BTreeMap<u32, Seconds> = BTreeMap::new();
    lengths.for_each(|(session, length)| *time.entry(session).or_default() += length);
    let bound = energy.map_or(Joules::ZERO, |e| e.bound());
    out.idle(around, &time, power, (bound, gain), n);

    let (mut by_run, mut seconds, mut cpu) = (Batches::<2>::default(), Batches::<2>::default(), 0.0);
    // A run that failed or was cut short did something else.
    let well = || runs.iter().filter(|(r, _)| r.counts() && r.is_ok());
    let n = well().count() as u64;
    for (run, account) in well() {
        seconds.push([run.span.duration().get(), 1.0]);
        cpu += run.user_s + run.system_s;
        if account.coverage >= WHOLE {
            by_run.push([account.measured.get(), 1.0]);
        }
    }
    let mean = by_run.ratio(0, 1);
    let spread = mean.zip(sensor).and_then(|(m, s)| Some(s.hypot(m.half? / m.value)));
    out.direct("joules_per_repetition", mean.map(|m| m.value), spread, by_run.samples(), method);
    let mean = seconds.ratio(0, 1);
    let ends = mean.and_then(|m| Some(((m.value - m.half?).max(0.0), m.value + m.half?)));
    let (low, high) = (ends.map(|e| e.0), ends.map(|e| e.1));
    out.put("seconds_per_repetition", mean.map(|m| m.value), low, high, n, "clock");
    out.put("cpu_s_per_repetition", (n > 0).then(|| cpu / n as f64), None, None, n, "clock");
    // A few looks a second miss the peak of a short command; the system's own figure does not, but is of one process.
    let one = runs.iter().filter_map(|(r, _)| r.peak_rss_bytes).max().map(|p| p as f64);
    let peak = [one, around.tree_memory].into_iter().flatten().reduce(f64::max);
    out.put("peak_rss_bytes", peak, None, None, n, "count");
    out.own(around, n);
    out.metrics
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::Estimate;
    use crate::time::{Span, Stamp};
    use crate::units::Watts;

    fn run(index: u64, joules: f64, coverage: f64) -> (Repetition, Account) {
        let start = Stamp::from_nanos(index * 10_000_000_000);
        let span = Span::new(start, start.plus_nanos(2_000_000_000));
        let repetition = Repetition {
            session: 0,
            index,
            warmup: false,
            span,
            exit_code: Some(i32::from(index == 3)),
            signal: None,
            user_s: 1.5,
            system_s: 0.5,
            peak_rss_bytes: (index > 0).then_some(1000 + index),
            left_behind: false,
            interrupted: false,
        };
        let account = Account {
            span,
            measured: Joules(joules),
            bound: Joules(joules * 0.05 + 1.0),
            gain: Joules(joules * 0.05),
            coverage,
            method: Some(Method::Counter),
            ..Account::open(start)
        };
        (repetition, account)
    }

    fn metrics(runs: &[(Repetition, Account)]) -> BTreeMap<String, Metric> {
        let idle = Estimate::new(Watts(40.0), Watts(2.0), Method::Counter, 1.0);
        let around = Surroundings { idle: BTreeMap::from([(0, idle.into())]), ..Surroundings::default() };
        of_command(&runs.iter().map(|(r, a)| (r, *a)).collect::<Vec<_>>(), &around)
    }

    #[test]
    fn repeats_give_a_mean_with_an_interval() {
        let joules = (0..).zip([190.0, 200.0, 210.0, 200.0]);
        let runs: Vec<_> = joules.map(|(i, j)| run(i, j, 1.0)).collect();
        let m = metrics(&runs);
        let value = |name: &str| m[name].value.unwrap();
        assert_eq!((value("repetitions"), value("failed_repetitions")), (4.0, 1.0));
        assert_eq!((value("energy_j"), value("mean_power_w")), (800.0, 100.0));
        assert_eq!((value("joules_per_repetition"), value("seconds_per_repetition")), (200.0, 2.0));
        assert_eq!((value("cpu_s_per_repetition"), value("peak_rss_bytes")), (2.0, 1003.0));
        assert!((value("net_energy_j") - (800.0 - 40.0 * 8.0)).abs() < 1e-9);
        // Student's t with 2 degrees of freedom over the three that did not fail, and the sensor's 5 % and a little.
        let spread = 4.303 * 10.0 / 3f64.sqrt() / 200.0;
        let sensor = (40.0 + 4.0) / 800.0;
        let half = 200.0 * spread.hypot(sensor);
        assert!((m["joules_per_repetition"].high.unwrap() - 200.0 - half).abs() < 0.5, "{half}");
    }

    #[test]
    fn one_run_has_the_sensors_bound_and_no_spread() {
        let m = metrics(&[run(0, 200.0, 1.0)]);
        assert_eq!((m["energy_j"].low, m["energy_j"].high), (Some(189.0), Some(211.0)));
        assert_eq!(m["joules_per_repetition"].high, None);
    }

    #[test]
    fn what_was_seen_in_part_has_no_power_and_no_net_energy() {
        let m = metrics(&[run(0, 200.0, 0.5)]);
        let energy = &m["energy_j"];
        assert_eq!((energy.value, energy.high), (Some(200.0), None), "it is more than that");
        for name in ["mean_power_w", "net_energy_j", "joules_per_repetition"] {
            assert_eq!(m[name].value, None, "{name}");
        }
    }
}
