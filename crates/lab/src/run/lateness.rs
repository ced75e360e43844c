//! Whether the load was the one that was asked for: how late requests were sent, and what that cost this process.

use serde_json::json;
use wattle_core::event::Event;
use wattle_core::stats::Histogram;
use wattle_core::{Seconds, Stamp};
use wattle_meter::clock;

/// How late requests were sent after they could have been.
pub(super) struct Lateness {
    open: bool,
    histogram: Histogram,
    max: Seconds,
    count: u64,
    began: Stamp,
    cpu: Seconds,
    /// Requests of an open loop that had to wait for others to end.
    pub(super) held_back: u64,
}

impl Lateness {
    pub(super) fn new(open: bool) -> Self {
        Self {
            open,
            histogram: Histogram::default(),
            max: Seconds(0.0),
            count: 0,
            began: clock::now(),
            cpu: clock::thread_cpu(),
            held_back: 0,
        }
    }

    /// The queries begin.
    pub(super) fn start(&mut self) {
        (self.began, self.cpu) = (clock::now(), clock::thread_cpu());
    }

    pub(super) fn began(&self) -> Stamp {
        self.began
    }

    pub(super) fn push(&mut self, ready: Stamp, sent: Stamp) {
        let late = sent.since(ready);
        self.histogram.push(late.get());
        self.max = if late.get() > self.max.get() { late } else { self.max };
        self.count += 1;
    }

    /// What the log keeps of it; nothing if nothing was sent.
    pub(super) fn event(&self, connections: Option<u64>) -> Option<Event> {
        let at = |q: f64| self.histogram.quantile(q);
        let wall = clock::now().since(self.began);
        (self.count > 0).then(|| {
            let lateness = json!({ "p50_s": at(0.5), "p99_s": at(0.99), "max_s": self.max });
            let cpu = Seconds(clock::thread_cpu().get() - self.cpu.get());
            Event::with(
                "load",
                json!({
                    "loop": if self.open { "open" } else { "closed" }, "requests": self.count, "lateness": lateness,
                    "held_back": self.held_back, "cpu_s": cpu, "wall_s": wall, "connections": connections,
                }),
            )
        })
    }
}
