//! One pass over the readings of a session: the energy of every span that is asked for, by device too, and the levels of gauges
//! meanwhile. Memory grows neither with the length of the spans nor with the number of readings.

use crate::account::Account;
use crate::sensor::{DeviceKind, Kind, Quantity, Reading, Sensor, SensorId};
use crate::time::{Span, Stamp};
use crate::timeline::Timeline;
use std::collections::VecDeque;

/// Spans are extended this often.
const STEP_NS: u64 = 1_000_000_000;
/// A sensor that is silent for so long holds the others up no more; what it counted meanwhile is not known.
const PATIENCE_NS: u64 = 60_000_000_000;
/// A value stands for at most this long, as in the timeline.
const LONGEST_HOLD_NS: u64 = 2_000_000_000;
/// Reasons for which hardware holds its clocks down that a user should hear of: slowdown by hardware, by heat (software,
/// hardware), by the power supply. Bits of `nvmlClocksEventReasons`. A power cap is how boards work under load.
pub const HELD_DOWN: u64 = 0x08 | 0x20 | 0x40 | 0x80;

/// Takes in readings of one session in order.
pub struct Survey {
    timeline: Timeline,
    /// Whose energy is asked for: that of the panel, then of each device.
    sets: Vec<Vec<SensorId>>,
    waiting: VecDeque<Job>,
    active: Vec<Job>,
    done: Vec<Job>,
    measured: Vec<Span>,
    /// How many spans are work of their own: measured ones and others.
    of_work: usize,
    /// Where spans begin and end, as far as readings have not come there yet.
    marks: VecDeque<Stamp>,
    tallies: Vec<Tally>,
    newest: Stamp,
    stepped: Stamp,
}

/// A span whose energy is asked for, of one of the sets.
struct Job {
    /// Of the measured spans, then of the others.
    number: usize,
    set: usize,
    end: Stamp,
    account: Account,
}

/// What a survey found.
#[derive(Debug, Clone, PartialEq)]
pub struct Findings {
    /// The energy of each measured span, in the order given.
    pub measured: Vec<Account>,
    /// The energy of each other span, in the order given.
    pub others: Vec<Account>,
    /// The energy of each bin, in the order given.
    pub bins: Vec<Account>,
    /// The energy of each measured span by device.
    pub devices: Vec<(SensorId, Vec<Account>)>,
    /// What each sensor did in the measured spans.
    pub tallies: Vec<Tally>,
}

/// What one sensor did in the measured spans.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tally {
    counter: bool,
    last: Option<(Stamp, f64)>,
    /// Counter: by how much it grew. Gauge: its integral.
    sum: f64,
    /// Seconds of the measured spans that it covered.
    pub covered_s: f64,
    /// Seconds of them in which hardware held its clocks down for a bad reason; of a throttle sensor.
    pub held_down_s: f64,
    max: Option<f64>,
}

impl Tally {
    fn new(sensor: &Sensor) -> Self {
        let counter = matches!(sensor.kind, Kind::Counter { .. });
        Self { counter, last: None, sum: 0.0, covered_s: 0.0, held_down_s: 0.0, max: None }
    }

    /// Adds another session of the same sensor.
    pub fn add(&mut self, other: &Tally) {
        self.sum += other.sum;
        self.covered_s += other.covered_s;
        self.held_down_s += other.held_down_s;
        self.max = [self.max, other.max].into_iter().flatten().reduce(f64::max);
    }

    /// By how much a counter grew.
    pub fn grown(&self) -> Option<f64> {
        (self.counter && self.covered_s > 0.0).then_some(self.sum)
    }

    /// Time-weighted mean of a gauge.
    pub fn mean(&self) -> Option<f64> {
        (!self.counter && self.covered_s > 0.0).then(|| self.sum / self.covered_s)
    }

    /// Highest value of a gauge.
    pub fn max(&self) -> Option<f64> {
        self.max.filter(|_| !self.counter)
    }

    fn push(&mut self, at: Stamp, value: Option<f64>, measured: &[Span], throttle: bool) {
        let Some((since, before)) = self.last.take() else {
            self.last = value.map(|v| (at, v));
            return;
        };
        let length = at.since(since).get();
        let until = if self.counter { at } else { at.min(since.plus_nanos(LONGEST_HOLD_NS)) };
        let overlap = overlap(Span::new(since, until), measured);
        if overlap > 0.0 {
            match (self.counter, value) {
                // A counter that went back was reset: what it counted is not known.
                (true, Some(value)) if value >= before => {
                    self.sum += (value - before) * overlap / length;
                    self.covered_s += overlap;
                }
                (true, _) => {}
                (false, _) => {
                    self.sum += before * overlap;
                    self.covered_s += overlap;
                    self.max = Some(self.max.map_or(before, |max| max.max(before)));
                    if throttle && before as u64 & HELD_DOWN != 0 {
                        self.held_down_s += overlap;
                    }
                }
            }
        }
        self.last = match (value, self.counter) {
            (Some(value), _) => Some((at, value)),
            // A counter goes on while it cannot be read.
            (None, true) => Some((since, before)),
            (None, false) => None,
        };
    }
}

/// Seconds of `span` that lie in the sorted, separate `spans`.
fn overlap(span: Span, spans: &[Span]) -> f64 {
    let first = spans.partition_point(|s| s.end() <= span.start());
    let in_reach = spans[first..].iter().take_while(|s| s.start() < span.end());
    in_reach.filter_map(|s| s.intersect(span)).map(|s| s.duration().get()).sum()
}

impl Survey {
    /// Of these sensors, whose `panel` makes the energy: of the `measured` spans, one after the other in time, also by each of
    /// `devices`; and of `others`. The `bins` begin and end where nothing in particular happens.
    pub fn new(
        table: &[Sensor],
        panel: &[SensorId],
        devices: &[SensorId],
        measured: &[Span],
        others: &[Span],
        bins: &[Span],
    ) -> Self {
        let mut sets = vec![panel.to_vec()];
        sets.extend(devices.iter().map(|s| vec![*s]));
        let job = |number, set, span: Span| Job {
            number,
            set,
            end: span.end(),
            account: Account::open(span.start()),
        };
        let every =
            measured.iter().enumerate().flat_map(|(i, span)| (0..sets.len()).map(move |set| (i, set, *span)));
        let mut waiting: Vec<Job> = every.map(|(i, set, span)| job(i, set, span)).collect();
        let numbered = others.iter().chain(bins).enumerate();
        waiting.extend(numbered.map(|(i, span)| job(measured.len() + i, 0, *span)));
        waiting.sort_by_key(|j| j.account.span.start());
        let mut marks: Vec<Stamp> =
            measured.iter().chain(others).flat_map(|span| [span.start(), span.end()]).collect();
        marks.sort_unstable();
        Self {
            timeline: Timeline::new(table),
            sets,
            waiting: waiting.into(),
            active: Vec::new(),
            done: Vec::new(),
            measured: measured.to_vec(),
            of_work: measured.len() + others.len(),
            marks: marks.into(),
            tallies: table.iter().map(Tally::new).collect(),
            newest: Stamp::default(),
            stepped: Stamp::default(),
        }
    }

    /// Takes in one reading.
    pub fn push(&mut self, table: &[Sensor], reading: &Reading) {
        self.timeline.push(reading);
        let at = usize::from(reading.sensor.0);
        if let Some((tally, sensor)) = self.tallies.get_mut(at).zip(table.get(at)) {
            tally.push(reading.at, reading.value, &self.measured, sensor.quantity == Quantity::Throttle);
        }
        self.newest = self.newest.max(reading.at);
        while let Some(mark) = self.marks.pop_front_if(|m| *m <= self.newest) {
            self.timeline.mark(mark);
        }
        if self.newest.nanos() >= self.stepped.nanos() + STEP_NS {
            self.stepped = self.newest;
            let all = self.sets.iter().flatten();
            let known = all.map(|s| self.timeline.settled_until(*s)).min().flatten();
            let horizon = known.unwrap_or_default().max(self.newest.minus_nanos(PATIENCE_NS));
            self.advance(horizon);
        }
    }

    /// Extends every span as far as `horizon`, before which nothing more will be learnt.
    fn advance(&mut self, horizon: Stamp) {
        while let Some(job) = self.waiting.pop_front_if(|j| j.account.span.start() < horizon) {
            self.active.push(job);
        }
        let Survey { timeline, sets, active, .. } = self;
        for job in active.iter_mut() {
            job.account.extend(timeline, &sets[job.set], job.end.min(horizon));
        }
        self.done.extend(self.active.extract_if(.., |j| j.end <= horizon));
        self.timeline.forget_before(horizon);
    }

    /// What was found.
    pub fn finish(mut self) -> Findings {
        self.advance(Stamp::from_nanos(u64::MAX));
        self.done.append(&mut self.active);
        self.done.sort_by_key(|j| (j.set, j.number));
        let whole: Vec<Account> = self.done.iter().filter(|j| j.set == 0).map(|j| j.account).collect();
        let (work, bins) = whole.split_at(self.of_work);
        let (measured, others) = work.split_at(self.measured.len());
        let of = |set: usize| self.done.iter().filter(|j| j.set == set).map(|j| j.account).collect();
        let devices = self.sets.iter().enumerate().skip(1);
        Findings {
            measured: measured.to_vec(),
            others: others.to_vec(),
            bins: bins.to_vec(),
            devices: devices.map(|(set, sensors)| (sensors[0], of(set))).collect(),
            tallies: self.tallies,
        }
    }
}

/// The tallies of a quantity of a kind of device.
pub fn of<'a>(
    table: &'a [Sensor],
    tallies: &'a [Tally],
    kind: DeviceKind,
    quantity: Quantity,
) -> impl Iterator<Item = &'a Tally> + 'a {
    let each = table.iter().zip(tallies);
    each.filter(move |(s, _)| s.device.kind == kind && s.quantity == quantity).map(|(_, tally)| tally)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sensor::{Device, Perimeter, Trust};

    const S: u64 = 1_000_000_000;

    fn sensor(id: &str, quantity: Quantity, kind: Kind) -> Sensor {
        Sensor {
            name: format!("test/{id}/{quantity:?}"),
            source: "test".into(),
            device: Device { kind: DeviceKind::Gpu, id: id.into(), name: id.into() },
            quantity,
            perimeter: Perimeter::Device,
            kind,
            trust: Trust::Measured { gain: 0.0 },
            quantum: 0.0,
            averaged_s: 0.0,
        }
    }

    fn table() -> Vec<Sensor> {
        vec![
            sensor("a", Quantity::Energy, Kind::Counter { wrap: None }),
            sensor("b", Quantity::Energy, Kind::Counter { wrap: None }),
            sensor("a", Quantity::Utilisation, Kind::Gauge),
            sensor("a", Quantity::CpuUser, Kind::Counter { wrap: None }),
            sensor("a", Quantity::Throttle, Kind::Gauge),
        ]
    }

    fn span(from_ms: u64, until_ms: u64) -> Span {
        Span::new(Stamp::from_nanos(from_ms * S / 1000), Stamp::from_nanos(until_ms * S / 1000))
    }

    /// Boards of 100 and 250 W for 300 s, the second silent from 200 s on; one busy and hot from 100 s on.
    fn survey(measured: &[Span], others: &[Span]) -> (Findings, usize) {
        let table = table();
        let boards = [SensorId(0), SensorId(1)];
        let mut survey = Survey::new(
            &table,
            &boards,
            &boards,
            measured,
            others,
            &[span(70_000, 71_000), span(71_000, 72_500)],
        );
        let mut most = 0;
        for poll in 0..60_000u64 {
            let (at, seconds) = (Stamp::from_nanos(poll * 5_000_000), poll as f64 * 5e-3);
            let stairs = |watts: f64| (seconds * 10.0).floor() * 0.1 * watts;
            let late = seconds >= 100.0;
            let values = [
                Some(stairs(100.0)),
                (seconds < 200.0).then(|| stairs(250.0)),
                Some(if late { 0.8 } else { 0.2 }),
                Some(seconds * 0.5),
                Some(if late { 64.0 } else { 4.0 }),
            ];
            for (i, value) in values.into_iter().enumerate() {
                survey.push(&table, &Reading { sensor: SensorId(i as u16), at, value });
            }
            most = most.max(survey.timeline.kept());
        }
        (survey.finish(), most)
    }

    #[test]
    fn spans_of_any_length_get_their_energy_by_device_too() {
        let measured = [span(10_030, 11_070), span(50_000, 190_000)];
        let others = [span(60_000, 61_000), span(20_000, 180_000), span(60_500, 60_750)];
        let (found, _) = survey(&measured, &others);
        let joules = |a: &Account| a.estimate().unwrap().value().get();
        for (account, span) in found.measured.iter().zip(measured).chain(found.others.iter().zip(others)) {
            let truth = 350.0 * span.duration().get();
            assert_eq!(account.span, span);
            assert!((joules(account) - truth).abs() < 2.0, "{account:?} for {truth}");
            assert!((account.coverage - 1.0).abs() < 1e-6);
        }
        let bins: Vec<f64> = found.bins.iter().map(|a| joules(a).round()).collect();
        assert_eq!(bins, [350.0, 525.0]);
        let devices: Vec<f64> =
            found.devices.iter().map(|(_, all)| all.iter().map(joules).sum::<f64>().round()).collect();
        assert_eq!(devices, [14104.0, 35260.0]);
    }

    #[test]
    fn levels_and_counts_are_those_of_the_measured_spans() {
        let (found, _) = survey(&[span(90_000, 91_000), span(95_000, 105_000)], &[]);
        let table = table();
        let utilisation = of(&table, &found.tallies, DeviceKind::Gpu, Quantity::Utilisation).next().unwrap();
        assert!((utilisation.mean().unwrap() - (6.0 * 0.2 + 5.0 * 0.8) / 11.0).abs() < 1e-3);
        assert_eq!((utilisation.max(), utilisation.grown()), (Some(0.8), None));
        let user = of(&table, &found.tallies, DeviceKind::Gpu, Quantity::CpuUser).next().unwrap();
        assert!((user.grown().unwrap() - 5.5).abs() < 1e-6);
        let throttle = of(&table, &found.tallies, DeviceKind::Gpu, Quantity::Throttle).next().unwrap();
        assert!((throttle.held_down_s - 5.0).abs() < 0.01 && (throttle.covered_s - 11.0).abs() < 0.01);
    }

    #[test]
    fn a_sensor_that_dies_takes_its_coverage_with_it_and_memory_stays_flat() {
        let (found, most) = survey(&[span(10_000, 290_000)], &[]);
        let account = found.measured[0];
        // One board all of the time, the other 190 of 280 seconds.
        assert!((account.coverage - (280.0 + 190.0) / 560.0).abs() < 0.002, "{account:?}");
        assert!((account.measured.get() - 280.0 * 100.0 - 190.0 * 250.0).abs() < 100.0, "{account:?}");
        // A minute of what was read 200 times a second by three gauges and counters, and not five.
        assert!(most < 100_000, "{most}");
    }
}
