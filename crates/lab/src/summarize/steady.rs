//! Steady state: where it is, from the log and the readings, and its figures, from the log once more.

use super::told::Told;
use crate::LabError;
use wattle_core::account::Account;
use wattle_core::metrics::{Accumulator, WHOLE};
use wattle_core::sensor::{Quantity, Reading, Sensor};
use wattle_core::slo::Slo;
use wattle_core::steady::{Bin, Bins, Found, Steady, Trend, Trends, find};
use wattle_core::summary::RunInfo;
use wattle_core::{Span, Stamp, Warning};
use wattle_store::RunDir;

/// The slowest counters are refreshed twice a second: taken for those whose period is not known.
const SLOWEST_S: f64 = 0.5;
/// A sensor's period is measured and may come out a little long.
const LENIENCE: f64 = 1.05;
/// A value stands for at most this long, as in the timeline.
const LONGEST_HOLD_NS: u64 = 2_000_000_000;

/// The longest session, bin by bin.
pub(super) struct Chart {
    pub(super) session: u32,
    span: Span,
    bins: Vec<Bin>,
    /// Energy of each bin; none without energy.
    pub(super) energy: Vec<Account>,
    /// °C × seconds, seconds.
    temperature: Bins<2>,
    /// The last reading of each sensor of temperature.
    last: Vec<Option<(Stamp, f64)>>,
}

impl Chart {
    /// Lays it out; `None` if there is too little to find anything in.
    pub(super) fn new(told: &Told, info: &RunInfo) -> Option<Self> {
        let (session, span) =
            told.records.spans().max_by_key(|(_, s)| s.end().nanos() - s.start().nanos())?;
        let bins = told.flows.get(&session)?.clone().chart(span, resolution(info))?;
        let widest = bins.iter().map(|b| b.span.end().nanos() - b.span.start().nanos()).max()?;
        let last = vec![None; info.sensors.len()];
        Some(Self { session, span, bins, energy: Vec::new(), temperature: Bins::of_width(widest), last })
    }

    pub(super) fn spans(&self) -> Vec<Span> {
        self.bins.iter().map(|b| b.span).collect()
    }

    /// Takes in a reading of its session.
    pub(super) fn push(&mut self, table: &[Sensor], reading: &Reading) {
        let at = usize::from(reading.sensor.0);
        if table.get(at).is_none_or(|s| s.quantity != Quantity::Temperature) {
            return;
        }
        let before = std::mem::replace(&mut self.last[at], reading.value.map(|v| (reading.at, v)));
        if let Some((since, value)) = before {
            let until = reading.at.min(since.plus_nanos(LONGEST_HOLD_NS));
            if let Some(held) = Span::new(since, until).intersect(self.span) {
                self.temperature.spread(held, 0, value);
                self.temperature.spread(held, 1, 1.0);
            }
        }
    }

    /// Mean power of each bin, if all of it was seen.
    fn power(&self) -> Option<Vec<f64>> {
        let each = self.energy.iter().map(|a| {
            let seconds = a.span.duration().get() * a.coverage;
            (a.coverage >= 0.5).then(|| a.measured.get() / seconds)
        });
        let all: Option<Vec<f64>> = each.collect();
        let whole = Account::chain(&self.energy).is_some_and(|a| a.coverage >= WHOLE);
        all.filter(|_| whole)
    }

    /// Mean temperature of each bin; one without a reading has that of the bin before.
    fn temperature(&self) -> Option<Vec<f64>> {
        let each: Vec<Option<f64>> = self
            .temperature
            .within(self.span)
            .map(|(_, [degrees, seconds])| (seconds > 0.0).then(|| degrees / seconds))
            .collect();
        let first = each.iter().copied().flatten().next()?;
        let held = each.iter().scan(first, |held, bin| {
            *held = bin.unwrap_or(*held);
            Some(*held)
        });
        Some(held.collect())
    }

    /// Finds the window and its figures. The log is read once more if the window is not the whole of it.
    pub(super) fn finish(self, dir: &RunDir, told: &Told, slo: Slo) -> Result<Steady, LabError> {
        let power = self.power();
        let in_flight: Vec<f64> = self.bins.iter().map(|b| b.in_flight).collect();
        let series: Vec<&[f64]> = power.as_deref().into_iter().chain([in_flight.as_slice()]).collect();
        let Found { bins, reached } = find(&series);
        let window = &self.bins[bins.clone()];
        let span = match window {
            [first, .., last] => Span::new(first.span.start(), last.span.end()),
            _ => self.span,
        };
        let trend = |series: Option<&[f64]>| series.and_then(|s| Trend::of(s.get(bins.clone())?));
        let trends = Trends {
            power: trend(power.as_deref()),
            in_flight: trend(Some(&in_flight)),
            temperature: trend(self.temperature().as_deref()),
        };
        let metrics = if reached {
            let all = span == self.span && told.records.spans().count() == 1;
            let ended = if all { told.records.clone() } else { self.ended_in(dir, span, slo)? };
            let energy = self.energy.get(bins).unwrap_or_default();
            let alone = told.records.foreign().is_none_or(|part| part <= super::FOREIGN);
            ended.of_window(self.session, window, energy, alone, &told.around)
        } else {
            Default::default()
        };
        Ok(Steady {
            session: self.session,
            span,
            seconds: span.duration().get(),
            trimmed_start_s: span.start().since(self.span.start()).get(),
            trimmed_end_s: self.span.end().since(span.end()).get(),
            reached,
            trends,
            metrics,
        })
    }

    /// What ended in a window.
    fn ended_in(&self, dir: &RunDir, window: Span, slo: Slo) -> Result<Accumulator, LabError> {
        let mut ended = Accumulator::new(slo);
        // The last of all ends where the session does.
        let inside = |done: Stamp| window.contains(done) || done == window.end() && done == self.span.end();
        for record in dir.records()? {
            let record = record?;
            if record.session == self.session && inside(record.exchange.done) {
                ended.push(&record);
            }
        }
        Ok(ended)
    }
}

/// The shortest time over which the sensors of the panel tell power.
fn resolution(info: &RunInfo) -> f64 {
    let panel = info.sensors.iter().filter(|s| info.panel.contains(&s.name));
    let period = |s: &Sensor| {
        let looked = info.qualification.iter().find(|q| q.sensor == s.name);
        looked.and_then(|q| q.period_s).unwrap_or(SLOWEST_S).max(s.averaged_s) / LENIENCE
    };
    panel.map(period).fold(0.0, f64::max)
}

/// What about it gives reason to doubt the figures.
pub(super) fn doubt(steady: &Steady) -> Option<Warning> {
    let change = |trend: Option<Trend>| trend.filter(Trend::matters).map(|t| t.change);
    let Trends { power, in_flight, temperature } = steady.trends;
    let [power, in_flight, temperature] = [power, in_flight, temperature].map(change);
    let drifts = [power, in_flight, temperature].iter().any(Option::is_some);
    (!steady.reached || drifts).then_some(Warning::Unsteady {
        reached: steady.reached,
        power,
        in_flight,
        temperature,
    })
}
