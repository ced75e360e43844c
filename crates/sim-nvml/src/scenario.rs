//! What the boards do, and the exact joules of any window of it.
//!
//! ```json
//! {"devices": [{"uuid": "GPU-a", "power": [[0, 100], [2, 300]], "period_s": 4, "refresh_ms": 100, "without": ["memory_info"]}]}
//! ```
//! What is left out is as in [`Board::default`]. With `"live": "PATH"` beside `devices`, power is what another process says
//! there: [`crate::Live`].

use crate::live::Curve;
use serde::Deserialize;
use std::io;
use std::path::{Path, PathBuf};

/// A machine with boards in it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// In the order of their indices.
    pub devices: Vec<Board>,
    /// Where another process says what the boards draw; a path that is not absolute is below the scenario's folder.
    #[serde(default)]
    pub live: Option<PathBuf>,
}

/// One board.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Board {
    /// Its marketing name.
    pub name: String,
    /// Its identity.
    pub uuid: String,
    /// Its place, `00000000:01:00.0`; by default one bus after the other.
    pub pci: Option<String>,
    /// `nvmlDeviceArchitecture_t`: 7 is Ampere, 9 Hopper.
    pub architecture: u32,
    /// Steps (from second, watts) on the monotonic clock, the first at 0, over and over. With `live`, until its first line.
    pub power: Vec<(f64, f64)>,
    /// After this many seconds the steps start again; by default one second after the last.
    pub period_s: Option<f64>,
    /// The energy counter stands still for this long at a time.
    pub refresh_ms: u64,
    /// What the counter shows of each joule: a counter that lies against the truth and against power.
    pub counter_gain: f64,
    /// `nvmlDeviceGetPowerUsage` is the mean of so many seconds; 0 for power of the moment, as on GA100 and before Ampere.
    pub average_s: f64,
    /// Watts it may draw, enforced; the default limit is the same.
    pub power_limit: f64,
    /// Megahertz of the compute units and of the memory.
    pub clocks: (u32, u32),
    /// Why the clocks are held down, as a bit mask.
    pub throttle: u64,
    /// UUIDs of its MIG instances, none of them yet if empty; by default it knows no MIG.
    pub mig: Option<Vec<String>>,
    /// Processes that compute on it.
    pub processes: Vec<u32>,
    /// Processes that draw on it.
    pub graphics_processes: Vec<u32>,
    /// Bytes of memory.
    pub memory_total: u64,
    /// Bytes of it in use.
    pub memory_used: u64,
    /// Degrees Celsius.
    pub temperature: u32,
    /// Per cent of time that the compute units were busy.
    pub utilisation: u32,
    /// Per cent of time that the memory was busy.
    pub memory_utilisation: u32,
    /// What this board does not offer.
    pub without: Vec<Part>,
    /// After this many answers (of any kind, from when the library was loaded) it fails …
    pub fail_after: Option<u64>,
    /// … this many times; by default for good.
    pub fail_for: Option<u64>,
    /// After this many answers it answers no more, and does not come back either: a driver that hangs.
    pub hang_after: Option<u64>,
}

/// What a board may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// `nvmlDeviceGetTotalEnergyConsumption`, as before Volta.
    EnergyCounter,
    /// `NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION`: the same counter, asked for together with other fields.
    EnergyField,
    /// `NVML_FI_DEV_POWER_INSTANT`, as with old drivers.
    PowerInstant,
    /// `nvmlDeviceGetPowerUsage`.
    PowerAverage,
    /// `nvmlDeviceGetMemoryInfo`, as on boards that share the host's memory.
    MemoryInfo,
    /// `nvmlDeviceGetTemperature`.
    Temperature,
    /// `nvmlDeviceGetUtilizationRates`.
    Utilisation,
    /// `nvmlDeviceGetUUID`.
    Uuid,
    /// `nvmlDeviceGetPciInfo_v3`.
    Pci,
    /// `nvmlDeviceGetArchitecture`.
    Architecture,
    /// `nvmlDeviceGetClockInfo`.
    Clocks,
    /// `nvmlDeviceGetEnforcedPowerLimit` and its like.
    PowerLimit,
    /// `nvmlDeviceGetCurrentClocksEventReasons` and its older name.
    Throttle,
    /// Lists of processes.
    Processes,
}

impl Default for Scenario {
    fn default() -> Self {
        Self { devices: vec![Board::default()], live: None }
    }
}

impl Default for Board {
    fn default() -> Self {
        Self {
            name: "Pretend 100".into(),
            uuid: "GPU-00000000-0000-0000-0000-000000000000".into(),
            pci: None,
            architecture: 9,
            power: vec![(0.0, 100.0)],
            period_s: None,
            refresh_ms: 100,
            counter_gain: 1.0,
            average_s: 1.0,
            power_limit: 700.0,
            clocks: (1_980, 2_619),
            throttle: 0,
            mig: None,
            processes: Vec::new(),
            graphics_processes: Vec::new(),
            memory_total: 80 << 30,
            memory_used: 1 << 30,
            temperature: 40,
            utilisation: 50,
            memory_utilisation: 25,
            without: Vec::new(),
            fail_after: None,
            fail_for: None,
            hang_after: None,
        }
    }
}

impl Scenario {
    /// From JSON.
    pub fn parse(text: &str) -> Result<Scenario, String> {
        let scenario: Scenario = serde_json::from_str(text).map_err(|e| e.to_string())?;
        for (i, board) in scenario.devices.iter().enumerate() {
            board.check().map_err(|why| format!("board {i}: {why}"))?;
            if scenario.devices[..i].iter().any(|b| b.uuid == board.uuid) {
                return Err(format!("two boards are called {}", board.uuid));
            }
        }
        Ok(scenario)
    }

    /// The joules that a board truly drew from `from` to `until`, in nanoseconds of the monotonic clock; with `live`, as far
    /// as it was said until now.
    ///
    /// # Panics
    /// If there is no such board.
    pub fn joules(&self, board: usize, from: u64, until: u64) -> io::Result<f64> {
        let boards = &self.devices;
        let Some(live) = &self.live else { return Ok(boards[board].joules(from, until)) };
        let mut curve = Curve::new(live, boards.len());
        curve.catch_up()?;
        Ok(curve.joules_since_boot(board, &boards[board], until)
            - curve.joules_since_boot(board, &boards[board], from))
    }

    /// With its live file, if it names one, below `folder`.
    pub(crate) fn below(mut self, folder: Option<&Path>) -> Scenario {
        self.live = self.live.map(|live| folder.map_or(live.clone(), |f| f.join(live)));
        self
    }
}

impl Board {
    fn check(&self) -> Result<(), &'static str> {
        let times = || self.power.iter().map(|(t, _)| *t);
        if times().next() != Some(0.0) || !times().is_sorted() {
            return Err("power must be a list of [second, watts] that starts at second 0 and goes up");
        }
        if !self.power.iter().all(|(t, w)| t.is_finite() && w.is_finite() && *w >= 0.0) {
            return Err("power must be finite and not negative");
        }
        if self.refresh_ms == 0 || self.period() <= self.power[self.power.len() - 1].0 {
            return Err("refresh_ms must be above 0 and period_s after the last step");
        }
        let figures = [self.counter_gain, self.average_s, self.power_limit];
        if !figures.iter().all(|f| f.is_finite() && *f >= 0.0) {
            return Err("counter_gain, average_s and power_limit must be finite and not negative");
        }
        Ok(())
    }

    /// The joules truly drawn from `from` to `until`, in nanoseconds of the monotonic clock.
    pub fn joules(&self, from: u64, until: u64) -> f64 {
        self.joules_since_boot(until) - self.joules_since_boot(from)
    }

    /// The watts truly drawn at a nanosecond of the monotonic clock.
    pub fn watts(&self, at: u64) -> f64 {
        let second = at as f64 * 1e-9 % self.period();
        let step = self.power.iter().rposition(|(start, _)| *start <= second).unwrap_or(0);
        self.power[step].1
    }

    fn period(&self) -> f64 {
        self.period_s.unwrap_or_else(|| self.power[self.power.len() - 1].0 + 1.0)
    }

    pub(crate) fn joules_since_boot(&self, at: u64) -> f64 {
        let (seconds, period) = (at as f64 * 1e-9, self.period());
        let whole = (seconds / period).floor();
        whole * self.joules_within(period) + self.joules_within(seconds - whole * period)
    }

    /// Joules from second 0 of a period to `until`, in it.
    fn joules_within(&self, until: f64) -> f64 {
        let ends = self.power.iter().skip(1).map(|(t, _)| *t).chain([f64::INFINITY]);
        let step = |((start, watts), end): (&(f64, f64), f64)| (until.min(end) - start).max(0.0) * watts;
        self.power.iter().zip(ends).map(step).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn board(json: &str) -> Board {
        Scenario::parse(&format!(r#"{{"devices": [{json}]}}"#)).unwrap().devices.remove(0)
    }

    #[test]
    fn energy_is_the_integral_of_power() {
        let board = board(r#"{"power": [[0, 50], [0.3, 350], [0.7, 0]], "period_s": 1.1}"#);
        let slices = 400_000;
        for (from, until) in [(0, S), (7 * S + 123, 9 * S + 456), (S / 3, S / 2)] {
            let width = (until - from) as f64 / slices as f64;
            let middle = |i: u64| from + (width * (i as f64 + 0.5)) as u64;
            let sum: f64 = (0..slices).map(|i| board.watts(middle(i)) * width * 1e-9).sum();
            let exact = board.joules(from, until);
            assert!((sum - exact).abs() < 0.01, "{from}..{until}: {sum} for {exact}");
        }
    }

    #[test]
    fn a_scenario_that_makes_no_sense_is_refused() {
        for json in [
            r#"{"power": []}"#,
            r#"{"power": [[1, 5]]}"#,
            r#"{"power": [[0, -5]]}"#,
            r#"{"power": [[0, 5], [3, 5]], "period_s": 2}"#,
            r#"{"refresh_ms": 0}"#,
            r#"{"counter_gain": -1}"#,
            "{}, {}",
        ] {
            assert!(Scenario::parse(&format!(r#"{{"devices": [{json}]}}"#)).is_err(), "{json}");
        }
    }
}
