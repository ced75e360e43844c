//! What is sent when: the items of a dataset in units that belong together, each with the moment at which it is due.

use super::Order;
use crate::LabError;
use crate::dataset::{self, Items};
use std::collections::VecDeque;
use std::path::Path;
use wattle_core::arrival::Arrival;
use wattle_core::record::Item;
use wattle_core::seen::Seen;
use wattle_core::spec::Spec;
use wattle_core::time::Stamp;

/// Items that are asked one after the other: the turns of a conversation, mostly one item alone.
pub(super) type Unit = VecDeque<Item>;

/// What comes next.
pub(super) enum Next {
    /// This unit, now. In an open loop it was due then.
    Send(Unit, Option<Stamp>),
    /// Something, but not before this moment.
    Wait(Stamp),
    /// Nothing more.
    End,
}

/// The rest of what is to be sent.
pub(super) struct Plan<'a> {
    order: &'a Order,
    done: &'a Seen,
    items: Items<'a>,
    /// How often the dataset was begun anew.
    passes: u64,
    /// The first item of the next unit.
    ahead: Option<Item>,
    /// The unit that is not due yet.
    waiting: Option<(Unit, Stamp)>,
    times: Times,
    /// When the first request is due by its schedule: that is when the load starts, also of a run that is resumed.
    first: Option<f64>,
    /// What passes before this one add to the times of a dataset that has its own, and the time of its last item.
    shift: f64,
    latest: f64,
    start: Stamp,
    end: Option<Stamp>,
    /// Everything that counts is sent: what comes now only keeps the load up.
    filling: bool,
}

/// Seconds after the start.
type Times = Option<Box<dyn Iterator<Item = Result<f64, LabError>> + Send>>;

impl<'a> Plan<'a> {
    /// All of `order` that is not `done`, from `start` on.
    pub(super) fn new(order: &'a Order, done: &'a Seen, start: Stamp) -> Result<Self, LabError> {
        let spec = &order.spec;
        let end = spec.duration_s.map(|s| start.plus_nanos(nanos(s)));
        let mut items = order.dataset.items()?;
        let ahead = items.next().transpose()?;
        Ok(Self {
            order,
            done,
            items,
            passes: 0,
            ahead,
            waiting: None,
            times: times(spec)?,
            first: None,
            shift: 0.0,
            latest: 0.0,
            start,
            end,
            filling: false,
        })
    }

    /// From now on there is always something more, which counts nowhere.
    pub(super) fn fill(&mut self) {
        self.filling = true;
    }

    /// Whether nothing more is begun at the moment `now`.
    pub(super) fn is_over(&self, now: Stamp) -> bool {
        self.end.is_some_and(|end| now >= end)
    }

    /// What comes next, at the moment `now`.
    pub(super) fn next(&mut self, now: Stamp) -> Result<Next, LabError> {
        let (unit, due) = match self.waiting.take() {
            Some((unit, due)) => (unit, Some(due)),
            None => match self.unit()? {
                None => return Ok(Next::End),
                Some(unit) => match self.due(&unit)? {
                    Due::Now => (unit, None),
                    Due::At(due) => (unit, Some(due)),
                    Due::Never => return Ok(Next::End),
                },
            },
        };
        // By a schedule, what was due before the end is sent, however late.
        if !self.filling && self.is_over(due.unwrap_or(now)) {
            self.waiting = due.map(|due| (unit, due));
            return Ok(Next::End);
        }
        match due {
            Some(due) if due > now => {
                self.waiting = Some((unit, due));
                Ok(Next::Wait(due))
            }
            due => Ok(Next::Send(unit, due)),
        }
    }

    fn due(&mut self, unit: &Unit) -> Result<Due, LabError> {
        let after = match (&mut self.times, unit.front().and_then(|item| item.due_s)) {
            (Some(times), _) => match times.next() {
                Some(time) => time?,
                None => return Ok(Due::Never),
            },
            (None, Some(time)) => time,
            (None, None) => return Ok(Due::Now),
        };
        let first = *self.first.get_or_insert(after);
        Ok(Due::At(self.start.plus_nanos(nanos(after - first))))
    }

    /// The next unit of which anything is left to ask.
    fn unit(&mut self) -> Result<Option<Unit>, LabError> {
        loop {
            let Some(first) = self.item()? else { return Ok(None) };
            let mut unit = Unit::new();
            let conversation = first.conversation.clone();
            unit.push_back(first);
            while conversation.is_some()
                && self.ahead.as_ref().is_some_and(|next| next.conversation == conversation)
            {
                unit.extend(self.item()?);
            }
            if !self.filling {
                unit.retain(|item| !self.done.contains(item.index));
            }
            if !unit.is_empty() {
                return Ok(Some(unit));
            }
            // Its time went by with it.
            if let Some(times) = &mut self.times {
                times.next().transpose()?;
            }
        }
    }

    /// The next item; over and over if the run goes by time, or the load is to be kept up.
    fn item(&mut self) -> Result<Option<Item>, LabError> {
        // By time, over and over, unless so many are enough.
        let endless = self.end.is_some() && self.order.spec.max_queries.is_none();
        if self.ahead.is_none() && (endless || self.filling) {
            self.passes += 1;
            // The gap between the last of a pass and the first of the next is a usual one.
            let gap = self.latest / self.order.census.items.saturating_sub(1).max(1) as f64;
            self.shift += self.latest + gap;
            self.items = self.order.dataset.items()?;
            self.ahead = self.items.next().transpose()?;
        }
        let Some(mut item) = self.ahead.take() else { return Ok(None) };
        self.ahead = self.items.next().transpose()?;
        item.index += self.passes * self.order.census.items;
        if let Some(due) = &mut item.due_s {
            self.latest = *due;
            *due += self.shift;
        }
        Ok(Some(item))
    }
}

/// Seconds as whole nanoseconds, none below zero.
fn nanos(seconds: f64) -> u64 {
    (seconds * 1e9).max(0.0) as u64
}

enum Due {
    Now,
    At(Stamp),
    Never,
}

/// The schedule that the user asked for, if any.
fn times(spec: &Spec) -> Result<Times, LabError> {
    if let Some(path) = &spec.trace {
        return Ok(Some(Box::new(dataset::due_times(Path::new(path), &spec.dataset_param)?)));
    }
    Ok(spec.rate.map(|rate| {
        let arrival = Arrival {
            rate,
            rate_end: spec.ramp_to,
            ramp_s: spec.ramp_s,
            spread: spec.arrival,
            burstiness: spec.burstiness,
            seed: spec.seed,
        };
        Box::new(arrival.times().map(Ok)) as Box<dyn Iterator<Item = _> + Send>
    }))
}
