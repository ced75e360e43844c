//! Weighs loads: readings on their way to a timeline, the idle machine, and windows that begin and end in rest, so that no tick of a
//! counter lies half in a load.

use crate::LabError;
use crate::books::{PATIENCE_NS, PUMP};
use crate::metering::Metering;
use std::time::Duration;
use wattle_core::attribute::{Splitter, View};
use wattle_core::baseline::{Baseline, Idle, When};
use wattle_core::cost::{Weights, Work};
use wattle_core::metrics::WHOLE;
use wattle_core::sensor::{DeviceKind, Panel};
use wattle_core::{Estimate, Exchange, Seconds, Span, Stamp, Timeline, Watts};
use wattle_meter::{Meter, clock};

/// A load lasts so many periods of the slowest sensor, at least.
const PERIODS: f64 = 8.0;
/// Of a sensor that did not change while it was looked at.
const USUAL_PERIOD: f64 = 0.1;
/// Rest around a load, in periods: its edges lie in ticks that hold nothing but rest.
const REST: f64 = 1.3;
const SHORTEST_REST: f64 = 0.03;
/// The idle machine is looked at for so long, at least.
const IDLE: f64 = 1.0;

pub(super) struct Scales {
    meter: Meter,
    panel: Panel,
    timeline: Timeline,
    /// Of the slowest sensor of the panel.
    period: f64,
    needed_from: Stamp,
    idle: Idle,
    rested: bool,
    gain: f64,
}

/// What a load came to.
pub(super) struct Weighed {
    pub(super) work: Work,
    pub(super) busy_s: f64,
    pub(super) window_s: f64,
    pub(super) energy_j: f64,
    pub(super) error_j: f64,
}

impl Scales {
    /// With what was opened; `None` if nothing there measures energy.
    pub(super) fn open(metering: Metering) -> Option<Self> {
        let Metering { meter, panel, early, qualified, .. } = metering;
        let (meter, panel) = (meter?, panel?);
        let mut timeline = Timeline::new(meter.sensors());
        early.iter().for_each(|reading| timeline.push(reading));
        let period = panel.sensors.iter().map(|id| {
            let sensor = &meter.sensors()[usize::from(id.0)];
            let seen = qualified.iter().find(|q| q.sensor == sensor.name).and_then(|q| q.period_s);
            seen.unwrap_or(USUAL_PERIOD).max(sensor.averaged_s)
        });
        Some(Self {
            period: period.fold(0.0, f64::max),
            meter,
            panel,
            timeline,
            needed_from: clock::now(),
            idle: Idle::default(),
            rested: false,
            gain: 0.0,
        })
    }

    /// Seconds between changes of the slowest sensor.
    pub(super) const fn period(&self) -> f64 {
        self.period
    }

    /// Seconds that a load must last, at least.
    pub(super) fn shortest_load(&self) -> f64 {
        PERIODS * self.period
    }

    /// Rest before and after a load.
    pub(super) fn pad(&self) -> f64 {
        (REST * self.period).max(SHORTEST_REST)
    }

    /// How long the idle machine is looked at.
    pub(super) fn rest_length(&self, asked: f64) -> f64 {
        asked.max(IDLE).max(2.0 * PERIODS * self.period)
    }

    /// Relative gain error of what was measured.
    pub(super) const fn gain(&self) -> f64 {
        self.gain
    }

    fn collect(&mut self) {
        let timeline = &mut self.timeline;
        self.meter.drain(|reading| timeline.push(reading));
        self.timeline.forget_before(self.needed_from);
    }

    /// Waits for `what`, collecting readings meanwhile.
    pub(super) async fn pump_while<T>(&mut self, what: impl Future<Output = T>) -> Result<T, LabError> {
        tokio::pin!(what);
        loop {
            tokio::select! {
                biased;
                out = &mut what => {
                    self.collect();
                    return Ok(out);
                }
                () = tokio::time::sleep(PUMP) => self.collect(),
            }
        }
    }

    async fn wait(&mut self, seconds: f64) -> Result<(), LabError> {
        self.pump_while(tokio::time::sleep(Duration::from_secs_f64(seconds))).await
    }

    /// Waits until energy up to `at` is known, or will not be.
    async fn wait_until_known(&mut self, at: Stamp) -> Result<(), LabError> {
        let patience = at.plus_nanos(PATIENCE_NS.max((4.0 * self.period * 1e9) as u64));
        let known = |s: &Self| {
            let until = s.panel.sensors.iter().map(|id| s.timeline.known_until(*id).unwrap_or_default());
            until.min().unwrap_or_default() >= at
        };
        while !known(self) && clock::now() < patience {
            self.wait(PUMP.as_secs_f64()).await?;
        }
        Ok(())
    }

    /// Looks at the idle machine: the first time before the loads, the second after them.
    pub(super) async fn idle(&mut self, length: f64) -> Result<(), LabError> {
        // What was before is not rest.
        self.wait(self.pad()).await?;
        let start = clock::now();
        self.needed_from = start;
        self.wait(self.rest_length(length)).await?;
        let span = Span::new(start, clock::now());
        self.wait_until_known(span.end()).await?;
        let sensors = &self.panel.sensors;
        let energy = self.timeline.energy_of(sensors, span).filter(|e| e.coverage() >= WHOLE);
        let Some(energy) = energy else { return Err(unseen()) };
        // The gain error is the same in all that is weighed.
        let open = energy.bound() - self.timeline.gain_of(sensors, span);
        let covered = span.duration() * energy.coverage();
        self.idle.put(Baseline {
            when: if self.rested { When::After } else { When::Before },
            seconds: span.duration().get(),
            power_w: Estimate::new(
                energy.value() / covered,
                open / covered,
                energy.method(),
                energy.coverage(),
            ),
            gain_w: Watts(0.0),
        });
        self.rested = true;
        Ok(())
    }

    /// Power with nothing at work; what it drifted by is in its bound.
    pub(super) fn idle_power(&self) -> Result<Estimate<Watts>, LabError> {
        self.idle.power().ok_or_else(unseen)
    }

    /// Begins a window with some rest.
    pub(super) async fn begin(&mut self) -> Result<Stamp, LabError> {
        let start = clock::now();
        self.needed_from = start;
        self.wait(self.pad()).await?;
        Ok(start)
    }

    /// Ends it with some rest, after all of `landed` have ended.
    pub(super) async fn end(
        &mut self,
        start: Stamp,
        landed: &[(u64, Exchange)],
    ) -> Result<Weighed, LabError> {
        self.wait(self.pad()).await?;
        let end = clock::now();
        self.wait_until_known(end).await?;
        // Only what was done is of interest, and that does not depend on what it costs.
        let mut splitter = Splitter::open(start, Weights::defaults(None, None, DeviceKind::Gpu));
        for (key, (bytes, exchange)) in (0u64..).zip(landed) {
            let flying = splitter.sent(key, exchange.sent, *bytes);
            splitter.pieces(flying, &exchange.tokens);
            splitter.done(flying, exchange);
        }
        let view = View { timeline: &self.timeline, sensors: &self.panel.sensors };
        splitter.finish(view, |_| {});
        splitter.rest(end, view);
        let account = splitter.ledger().account;
        let (work, Seconds(busy_s)) = splitter.work();
        if account.coverage < WHOLE {
            return Err(unseen());
        }
        self.gain = self.gain.max(account.gain / account.measured);
        Ok(Weighed {
            work,
            busy_s,
            window_s: account.span.duration().get(),
            energy_j: account.measured.get(),
            error_j: (account.bound - account.gain).get().max(0.0) / 1.96,
        })
    }
}

fn unseen() -> LabError {
    LabError::Calibrate("the sensors did not cover all of a load; see how they are with \"wattle doctor\", and calibrate again".into())
}
