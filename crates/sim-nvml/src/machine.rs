//! The boards as they answer: what their counters show of what they truly draw, and when they fail.

use crate::live::Curve;
use crate::{Board, Part, Scenario};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A machine with boards in it, as long as the library is loaded.
pub(crate) struct Machine {
    pub(crate) slots: Vec<Slot>,
    live: Option<Mutex<Curve>>,
}

/// A board where it is plugged in.
pub(crate) struct Slot {
    pub(crate) board: Board,
    /// Domain, bus and device.
    pub(crate) place: (u32, u32, u32),
    /// Answers so far.
    answers: AtomicU64,
    /// The highest count shown. A live line that comes late makes less of what was drawn: the counter then waits.
    shown: AtomicU64,
}

/// Why a board gives no answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Silent {
    /// It does not have what was asked for.
    Lacks,
    /// It fails.
    Fails,
}

impl Machine {
    pub(crate) fn new(scenario: Scenario) -> Result<Machine, String> {
        let live = scenario.live.map(|path| Mutex::new(Curve::new(&path, scenario.devices.len())));
        let slots = scenario.devices.into_iter().enumerate().map(|(i, board)| {
            let place = match &board.pci {
                None => (0, i as u32 + 1, 0),
                Some(pci) => {
                    place(pci).ok_or_else(|| format!("{pci} is no PCI bus id such as 00000000:01:00.0"))?
                }
            };
            Ok(Slot { board, place, answers: AtomicU64::new(0), shown: AtomicU64::new(0) })
        });
        Ok(Machine { slots: slots.collect::<Result<_, String>>()?, live })
    }

    /// What the counter shows: the joules as of its last refresh, in whole millijoules.
    pub(crate) fn counter_mj(&self, index: usize, at: u64) -> u64 {
        let Slot { board, shown, .. } = &self.slots[index];
        let refreshed = at - at % (board.refresh_ms * 1_000_000);
        let count = (self.joules_since_boot(index, refreshed) * board.counter_gain * 1e3) as u64;
        shown.fetch_max(count, Ordering::Relaxed).max(count)
    }

    /// The watts truly drawn.
    pub(crate) fn watts(&self, index: usize, at: u64) -> f64 {
        let board = &self.slots[index].board;
        self.curve(|curve| curve.watts(index, board, at)).unwrap_or_else(|| board.watts(at))
    }

    /// What `nvmlDeviceGetPowerUsage` gives: the mean power of the last while.
    pub(crate) fn average_watts(&self, index: usize, at: u64) -> f64 {
        let from = at.saturating_sub((self.slots[index].board.average_s * 1e9) as u64);
        if from == at {
            return self.watts(index, at);
        }
        (self.joules_since_boot(index, at) - self.joules_since_boot(index, from))
            / ((at - from) as f64 * 1e-9)
    }

    fn joules_since_boot(&self, index: usize, at: u64) -> f64 {
        let board = &self.slots[index].board;
        self.curve(|curve| curve.joules_since_boot(index, board, at))
            .unwrap_or_else(|| board.joules_since_boot(at))
    }

    /// What was said until now, if power is said at all.
    fn curve<T>(&self, ask: impl FnOnce(&Curve) -> T) -> Option<T> {
        let mut curve = self.live.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        // A file that cannot be read says nothing new.
        let _ = curve.catch_up();
        curve.forget();
        Some(ask(&curve))
    }
}

impl Slot {
    /// Whether it has that part.
    pub(crate) fn has(&self, part: Part) -> Result<(), Silent> {
        if self.board.without.contains(&part) { Err(Silent::Lacks) } else { Ok(()) }
    }

    /// Counts an answer, and fails or hangs where that was asked for.
    pub(crate) fn answer(&self, part: Part) -> Result<(), Silent> {
        self.has(part)?;
        let (board, before) = (&self.board, self.answers.fetch_add(1, Ordering::Relaxed));
        while board.hang_after.is_some_and(|n| before >= n) {
            std::thread::sleep(Duration::from_secs(3_600));
        }
        let failed = board.fail_after.and_then(|n| before.checked_sub(n));
        if failed.is_some_and(|n| n < board.fail_for.unwrap_or(u64::MAX)) {
            Err(Silent::Fails)
        } else {
            Ok(())
        }
    }
}

/// Domain, bus and device of a PCI bus id, with or without domain and function.
pub(crate) fn place(id: &str) -> Option<(u32, u32, u32)> {
    let hex = |text: &str| u32::from_str_radix(text, 16).ok();
    let (rest, device) = id.rsplit_once(':')?;
    let device = hex(device.split('.').next()?)?;
    match rest.split_once(':') {
        Some((domain, bus)) => Some((hex(domain)?, hex(bus)?, device)),
        None => Some((0, hex(rest)?, device)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Live;

    const S: u64 = 1_000_000_000;

    fn machine(board: &str) -> Machine {
        Machine::new(Scenario::parse(&format!(r#"{{"devices": [{board}]}}"#)).unwrap()).unwrap()
    }

    #[test]
    fn the_counter_is_a_staircase_below_the_truth() {
        let machine = machine(r#"{"power": [[0, 80]], "refresh_ms": 100}"#);
        assert_eq!(machine.counter_mj(0, 5 * S + 99_999_999), 400_000);
        assert_eq!(machine.counter_mj(0, 5 * S + 100_000_000), 408_000);
    }

    #[test]
    fn a_counter_may_lie_while_power_does_not() {
        let machine = machine(r#"{"power": [[0, 80]], "counter_gain": 0.5}"#);
        assert_eq!((machine.counter_mj(0, 5 * S), machine.watts(0, 5 * S)), (200_000, 80.0));
    }

    #[test]
    fn average_power_lags_by_as_long_as_it_is_averaged() {
        let square = r#""power": [[0, 100], [2, 300]], "period_s": 4"#;
        let second = machine(&format!("{{{square}}}"));
        assert_eq!(second.watts(0, 2 * S + S / 2), 300.0);
        assert!((second.average_watts(0, 2 * S + S / 2) - 200.0).abs() < 1e-6);
        assert!((second.average_watts(0, 3 * S) - 300.0).abs() < 1e-6);
        let moment = machine(&format!(r#"{{{square}, "average_s": 0}}"#));
        assert_eq!(moment.average_watts(0, 2 * S + S / 2), 300.0);
    }

    #[test]
    fn live_power_is_drawn_from_the_moment_it_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let text = r#"{"live": "live.txt", "devices": [{"uuid": "a", "refresh_ms": 1}, {"uuid": "b"}]}"#;
        let scenario = Scenario::parse(text).unwrap().below(Some(folder.path()));
        let (one, two) = (Machine::new(scenario.clone()).unwrap(), Machine::new(scenario.clone()).unwrap());
        let mut live = Live::create(folder.path().join("live.txt")).unwrap();
        let from = live.set(0, 1_000.0).unwrap();
        assert_eq!((one.watts(0, from), one.watts(1, from)), (1_000.0, 100.0));
        let until = live.set(0, 0.0).unwrap();
        let later = until + 10 * S;
        let counted = one.counter_mj(0, later) as f64 * 1e-3 - scenario.devices[0].joules(0, from);
        assert!((counted - (until - from) as f64 * 1e-6).abs() < 2e-3, "{counted}");
        assert_eq!(one.counter_mj(0, later), two.counter_mj(0, later));
        assert_eq!(one.watts(0, later), 0.0);
    }

    #[test]
    fn a_line_that_comes_late_does_not_turn_the_counter_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("live.txt");
        let text = r#"{"live": "live.txt", "devices": [{"refresh_ms": 1}]}"#;
        let machine = Machine::new(Scenario::parse(text).unwrap().below(Some(folder.path()))).unwrap();
        std::fs::write(&path, format!("{S} 0 1000\n")).unwrap();
        let high = machine.counter_mj(0, 10 * S);
        std::fs::write(&path, format!("{S} 0 1000\n{} 0 0\n", 2 * S)).unwrap();
        assert_eq!(machine.counter_mj(0, 11 * S), high);
    }

    #[test]
    fn a_place_is_read_in_every_usual_form() {
        for id in ["0000:0A:00.0", "00000000:0a:00.0", "0a:00.0", "0A:00"] {
            assert_eq!(place(id), Some((0, 10, 0)), "{id}");
        }
        assert_eq!(place("10"), None);
    }
}
