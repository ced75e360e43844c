//! A calibration of the simulated engine: the ladders of `wattle calibrate`, in simulated time.

use super::world::{Ask, SENSORS, serve, split_after};
use wattle_core::calibration::{Cell, Fit, Ladder, fit};
use wattle_core::cost::Weights;
use wattle_core::sensor::DeviceKind;
use wattle_core::{Span, Watts};
use wattle_sim_server::EngineConfig;

/// Rest before and after each load.
const REST_NS: u64 = 200_000_000;

/// Fits the ladders up to `most` at once.
pub(crate) fn calibrate(config: &EngineConfig, most: u64) -> Fit {
    let prefill = [128, 512, 1024, 2048, 4096].map(|prompt| (Ladder::Prefill, 1, prompt, 1, 12));
    let decode = [1, 2, 4, 8, 16, 32, 64].map(|n| (Ladder::Decode, n, 32, 150, 1));
    let context =
        [(8, 1024), (8, 2048), (8, 4096), (2, 2048), (2, 4096)].map(|(n, p)| (Ladder::Context, n, p, 150, 1));
    let rungs = prefill.into_iter().chain(decode).chain(context).filter(|r| r.1 <= most);
    let mut cells = Vec::new();
    for (rung, (ladder, batch, prompt, answer, rounds)) in (0..).zip(rungs) {
        for repeat in 0..5 {
            let mut config = config.clone();
            config.quirks.seed = 1 + rung * 10 + repeat;
            let past =
                serve(&config, &vec![Ask { prompt, answer }; (batch * rounds) as usize], batch as usize);
            let found = split_after(&past, Weights::defaults(None, None, DeviceKind::Gpu));
            let window = Span::new(
                past.exchanges[0].sent.minus_nanos(REST_NS),
                past.exchanges.iter().map(|e| e.done).max().unwrap().plus_nanos(REST_NS),
            );
            let energy = past.timeline.energy_of(&SENSORS, window).unwrap();
            cells.push(Cell {
                ladder,
                rung: rung as u32,
                batch: batch as u32,
                requests: batch * rounds,
                work: found.work.0,
                busy_s: found.work.1.get(),
                window_s: window.duration().get(),
                energy_j: energy.value().get(),
                error_j: energy.bound().get() / 1.96,
            });
        }
    }
    fit(&cells, Watts(config.idle_watts), Watts(0.2)).unwrap()
}
