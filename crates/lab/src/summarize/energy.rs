//! What the readings tell: one pass over them, session by session.

use super::steady::Chart;
use super::told::Told;
use crate::LabError;
use std::collections::BTreeMap;
use wattle_core::account::{Account, Total};
use wattle_core::command::Repetition;
use wattle_core::sensor::{DeviceKind, Panel, Perimeter, Quantity, Sensor, SensorId};
use wattle_core::summary::{DeviceEnergy, PhaseEnergy, Resources, RunInfo};
use wattle_core::survey::{self, Survey, Tally};
use wattle_core::{Estimate, Joules, Span, Warning};
use wattle_store::RunDir;

const MIB: f64 = 1024.0 * 1024.0;
/// A device that was held down for less of the time is not worth a word.
const HELD_DOWN: f64 = 0.01;

#[derive(Default)]
pub(super) struct Measured {
    /// Every run of the command, with its energy.
    pub(super) repetitions: Vec<(Repetition, Account)>,
    pub(super) phases: BTreeMap<String, PhaseEnergy>,
    devices: BTreeMap<SensorId, Total>,
    /// What each sensor did while it counted, by position in the table.
    tallies: Vec<Tally>,
}

/// What is asked of one session's readings.
struct Questions<'a> {
    /// Spans that count, and whose runs of the command they are.
    measured: Vec<(Span, Option<&'a Repetition>)>,
    /// Warm-up runs.
    warmup: Vec<&'a Repetition>,
    phases: Vec<(&'a str, Span)>,
}

impl<'a> Questions<'a> {
    fn of(session: u32, told: &'a Told) -> Self {
        let runs = || told.repetitions.iter().filter(move |r| r.session == session);
        let queries = told.records.spans().filter(|(s, _)| *s == session).map(|(_, span)| (span, None));
        let mut measured: Vec<_> = queries.collect();
        measured.extend(runs().filter(|r| !r.warmup).map(|r| (r.span, Some(r))));
        measured.sort_by_key(|(span, _)| span.start());
        let phases = told.phases.iter().flat_map(|(name, all)| {
            all.iter().filter(move |(s, _)| *s == session).map(move |(_, span)| (name.as_str(), *span))
        });
        Self { measured, warmup: runs().filter(|r| r.warmup).collect(), phases: phases.collect() }
    }

    fn survey(&self, table: &[Sensor], panel: Option<&Panel>, bins: &[Span]) -> Survey {
        let devices = panel.map_or_else(Vec::new, |p| p.devices(table));
        let panel = panel.map_or(&[][..], |p| &p.sensors);
        let measured: Vec<Span> = self.measured.iter().map(|(span, _)| *span).collect();
        let others = self.warmup.iter().map(|r| r.span).chain(self.phases.iter().map(|(_, span)| *span));
        Survey::new(table, panel, &devices, &measured, &others.collect::<Vec<_>>(), bins)
    }
}

impl Measured {
    pub(super) fn read(
        dir: &RunDir,
        info: &RunInfo,
        told: &Told,
        mut chart: Option<&mut Chart>,
    ) -> Result<Self, LabError> {
        let table = &info.sensors;
        let panel = info.perimeter.map(|perimeter| Panel {
            sensors: (0u16..)
                .map(SensorId)
                .zip(table)
                .filter(|(_, s)| info.panel.contains(&s.name))
                .map(|(id, _)| id)
                .collect(),
            perimeter,
        });
        let mut found = Self::default();
        let mut phases: BTreeMap<String, Total> = BTreeMap::new();
        let mut seen = Vec::new();
        let mut current: Option<(u32, Questions<'_>, Survey)> = None;
        let bins = |chart: Option<&Chart>, session| {
            chart.filter(|c| c.session == session && panel.is_some()).map_or_else(Vec::new, Chart::spans)
        };
        for row in dir.stored_readings()? {
            let (session, reading) = row?;
            if current.as_ref().is_none_or(|(open, ..)| *open != session) {
                if let Some(ended) = current.take() {
                    found.add(ended, &mut phases, chart.as_deref_mut());
                }
                let questions = Questions::of(session, told);
                let survey = questions.survey(table, panel.as_ref(), &bins(chart.as_deref(), session));
                seen.push(session);
                current = Some((session, questions, survey));
            }
            if let Some((_, _, survey)) = &mut current {
                survey.push(table, &reading);
            }
            if let Some(chart) = chart.as_deref_mut().filter(|c| c.session == session) {
                chart.push(table, &reading);
            }
        }
        if let Some(ended) = current {
            found.add(ended, &mut phases, chart);
        }
        // A session without readings has runs and phases all the same.
        let mut unread: Vec<u32> = told.repetitions.iter().map(|r| r.session).collect();
        unread.dedup();
        for session in unread.into_iter().filter(|s| !seen.contains(s)) {
            let questions = Questions::of(session, told);
            let survey = questions.survey(&[], None, &[]);
            found.add((session, questions, survey), &mut phases, None);
        }
        found.repetitions.sort_by_key(|(r, _)| (r.session, r.span.start()));
        found.phases = phases
            .into_iter()
            .map(|(name, total)| {
                let (count, seconds) = (total.spans, total.length.get());
                (name, PhaseEnergy { count, seconds, energy: total.estimate() })
            })
            .collect();
        Ok(found)
    }

    /// Takes in what the readings of a session showed.
    fn add(
        &mut self,
        (session, questions, survey): (u32, Questions<'_>, Survey),
        phases: &mut BTreeMap<String, Total>,
        chart: Option<&mut Chart>,
    ) {
        let found = survey.finish();
        if let Some(chart) = chart.filter(|c| c.session == session) {
            chart.energy = found.bins;
        }
        for ((_, repetition), account) in questions.measured.iter().zip(&found.measured) {
            self.repetitions.extend(repetition.map(|r| (r.clone(), *account)));
        }
        let (warmup, marked) = found.others.split_at(questions.warmup.len());
        let of_warmup = questions.warmup.iter().zip(warmup);
        self.repetitions.extend(of_warmup.map(|(r, account)| ((*r).clone(), *account)));
        for ((name, _), account) in questions.phases.iter().zip(marked) {
            phases.entry((*name).to_owned()).or_default().add(account);
        }
        for (sensor, accounts) in &found.devices {
            let total = self.devices.entry(*sensor).or_default();
            accounts.iter().for_each(|account| total.add(account));
        }
        if self.tallies.is_empty() {
            self.tallies = found.tallies;
        } else {
            self.tallies.iter_mut().zip(&found.tallies).for_each(|(all, new)| all.add(new));
        }
    }

    fn known<'a>(&'a self, table: &'a [Sensor]) -> impl Iterator<Item = (&'a Sensor, &'a Total)> {
        self.devices.iter().filter_map(|(id, total)| Some((table.get(usize::from(id.0))?, total)))
    }

    pub(super) fn devices(&self, table: &[Sensor]) -> Vec<DeviceEnergy> {
        let each = self.known(table).map(|(sensor, total)| DeviceEnergy {
            device: sensor.device.clone(),
            sensor: sensor.name.clone(),
            energy: total.estimate(),
        });
        each.collect()
    }

    /// What lies inside each perimeter that sensors reach. A wall meter contains the rest.
    pub(super) fn perimeters(&self, table: &[Sensor]) -> BTreeMap<Perimeter, Estimate<Joules>> {
        let mut sums = BTreeMap::new();
        for perimeter in self.known(table).map(|(s, _)| s.perimeter) {
            let inside = |s: &Sensor| {
                s.perimeter == perimeter || perimeter == Perimeter::Host && s.perimeter < perimeter
            };
            let parts: Vec<_> =
                self.known(table).filter(|(s, _)| inside(s)).map(|(_, total)| total.estimate()).collect();
            let coverage =
                parts.iter().map(|e| e.map_or(0.0, |e| e.coverage())).sum::<f64>() / parts.len() as f64;
            if let Some(sum) = parts.into_iter().flatten().reduce(|a, b| a + b) {
                sums.insert(perimeter, Estimate::new(sum.value(), sum.bound(), sum.method(), coverage));
            }
        }
        sums
    }

    /// Most memory that the processes of the command were seen to hold together.
    pub(super) fn tree_memory(&self, table: &[Sensor]) -> Option<f64> {
        let tallies = survey::of(table, &self.tallies, DeviceKind::Process, Quantity::MemoryUsed);
        // Nobody holds nothing: it was over before the first look.
        tallies.filter_map(Tally::max).reduce(f64::max).filter(|bytes| *bytes > 0.0)
    }

    pub(super) fn resources(&self, table: &[Sensor], told: &Told) -> Resources {
        let tallies = |kind, quantity| survey::of(table, &self.tallies, kind, quantity);
        let mean = |kind, quantity| {
            let means: Vec<f64> = tallies(kind, quantity).filter_map(Tally::mean).collect();
            (!means.is_empty()).then(|| means.iter().sum::<f64>() / means.len() as f64)
        };
        let max = |kind, quantity| tallies(kind, quantity).filter_map(Tally::max).reduce(f64::max);
        let grown = |quantity| tallies(DeviceKind::Machine, quantity).find_map(Tally::grown);
        let states = [
            Quantity::CpuUser,
            Quantity::CpuNice,
            Quantity::CpuSystem,
            Quantity::CpuIdle,
            Quantity::CpuIowait,
            Quantity::CpuIrq,
            Quantity::CpuSoftirq,
            Quantity::CpuSteal,
        ];
        let all: f64 = states.into_iter().filter_map(grown).sum();
        let part = |time: Option<f64>| time.filter(|_| all > 0.0).map(|t| t / all * 100.0);
        let user = grown(Quantity::CpuUser).map(|u| u + grown(Quantity::CpuNice).unwrap_or(0.0));
        let gpu = DeviceKind::Gpu;
        let tenth = |x: f64| (x * 10.0).round() / 10.0;
        let counted = || told.repetitions.iter().filter(|r| !r.warmup);
        let cpu = counted().map(|r| r.user_s + r.system_s);
        let largest = counted().filter_map(|r| r.peak_rss_bytes).max().map(|b| b as f64);
        let together = self.tree_memory(table);
        let resources = Resources {
            peak_vram_mb: max(gpu, Quantity::MemoryUsed).map(|b| b / MIB),
            jax_peak_bytes_mb: told.gauges.get("jax_peak_bytes").map(|g| g.max / MIB).filter(|b| *b > 0.0),
            gpu_util_mean_pct: mean(gpu, Quantity::Utilisation).map(|u| u * 100.0),
            gpu_util_max_pct: max(gpu, Quantity::Utilisation).map(|u| u * 100.0),
            mem_util_mean_pct: mean(gpu, Quantity::MemoryUtilisation).map(|u| u * 100.0),
            mem_util_max_pct: max(gpu, Quantity::MemoryUtilisation).map(|u| u * 100.0),
            power_watts_mean: mean(gpu, Quantity::Power),
            power_watts_max: max(gpu, Quantity::Power),
            cpu_usr_mean_pct: part(user),
            cpu_idle_mean_pct: part(grown(Quantity::CpuIdle)),
            tree_cpu_s: match told.repetitions.is_empty() {
                true => tallies(DeviceKind::Process, Quantity::CpuBusy).find_map(Tally::grown),
                false => Some(cpu.sum()),
            },
            // Four looks a second miss the peak of a short command; the system's own figure does not.
            tree_peak_rss_mb: [largest, together].into_iter().flatten().reduce(f64::max).map(|b| b / MIB),
        };
        resources.map(tenth)
    }

    /// Devices that were held down.
    pub(super) fn doubts(&self, info: &RunInfo) -> Vec<Warning> {
        let each = info.sensors.iter().zip(&self.tallies);
        let throttled = each.filter(|(s, _)| s.quantity == Quantity::Throttle);
        let fraction = |t: &Tally| t.held_down_s / t.covered_s.max(f64::MIN_POSITIVE);
        throttled
            .filter(|(_, tally)| fraction(tally) > HELD_DOWN)
            .map(|(s, tally)| Warning::Throttled {
                device: format!("{} ({})", s.device.name, s.device.id),
                fraction: fraction(tally),
            })
            .collect()
    }

    /// Whether a command worked on the CPU while only other devices were measured.
    pub(super) fn other_device(&self, info: &RunInfo) -> Option<Warning> {
        let panel = || info.sensors.iter().filter(|s| info.panel.contains(&s.name));
        let measures_cpu = |s: &Sensor| matches!(s.device.kind, DeviceKind::Cpu | DeviceKind::Machine);
        let idle = survey::of(&info.sensors, &self.tallies, DeviceKind::Gpu, Quantity::Utilisation)
            .filter_map(Tally::max)
            .all(|most| most < 0.05);
        let runs = || self.repetitions.iter().map(|(r, _)| r).filter(|r| !r.warmup);
        let cpu: f64 = runs().map(|r| r.user_s + r.system_s).sum();
        let seconds: f64 = runs().map(|r| r.span.duration().get()).sum();
        let elsewhere = panel().next().is_some() && !panel().any(measures_cpu);
        (elsewhere && idle && cpu > 0.5 * seconds).then_some(Warning::OtherDevice { worker: DeviceKind::Cpu })
    }
}
