//! The CPU lines of `/proc/stat`: how long all CPUs together, and each by itself, were in which state since boot.
//!
//! The kernel counts guest time as user time too, so the two guest columns are not read. Its columns for idle and waiting may
//! go back a little (proc(5)); they are handed on as they are.

use super::super::Unavailable;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use wattle_core::sensor::Quantity;

/// The columns, in the kernel's order. Kernels before 2.6.11 have fewer.
pub(super) const STATES: [(&str, Quantity); 8] = [
    ("user", Quantity::CpuUser),
    ("nice", Quantity::CpuNice),
    ("system", Quantity::CpuSystem),
    ("idle", Quantity::CpuIdle),
    ("iowait", Quantity::CpuIowait),
    ("irq", Quantity::CpuIrq),
    ("softirq", Quantity::CpuSoftirq),
    ("steal", Quantity::CpuSteal),
];
/// Without these there is no telling busy from idle.
const FEWEST: usize = 4;
/// A line at its longest: a name, and ten columns of 20 digits.
const LONGEST_LINE: usize = 224;

/// `/proc/stat`, kept open: one `pread` per look.
pub(in super::super) struct CpuTimes {
    file: File,
    ticks_per_second: f64,
    /// Logical CPUs that are online, when opened.
    pub(in super::super) cpus: usize,
    /// Their numbers, ascending.
    pub(super) numbers: Vec<u32>,
    /// How many of [`STATES`] this kernel counts.
    pub(super) states: usize,
}

impl CpuTimes {
    pub(in super::super) fn open(path: &Path) -> Result<Self, Unavailable> {
        let unavailable = |e: &dyn std::fmt::Display| {
            Unavailable::new(
                format!("cannot read {}: {e}", path.display()),
                "CPU load is read from Linux procfs only",
            )
        };
        let text = std::fs::read(path).map_err(|e| unavailable(&e))?;
        let file = File::open(path).map_err(|e| unavailable(&e))?;
        let mut all = None;
        let mut numbers = Vec::new();
        for line in lines(&text) {
            match line.cpu {
                None => all = Some(line.columns),
                Some(n) => numbers.push(n),
            }
        }
        numbers.sort_unstable();
        numbers.dedup();
        let states = all.map_or(0, |columns| columns.iter().take_while(|c| c.is_some()).count());
        if states < FEWEST || numbers.is_empty() {
            return Err(unavailable(&"no line of CPU times in it"));
        }
        let ticks_per_second = rustix::param::clock_ticks_per_second() as f64;
        Ok(Self { file, ticks_per_second, cpus: numbers.len(), numbers, states })
    }

    /// The step that CPU times move in, in seconds.
    pub(in super::super) fn tick(&self) -> f64 {
        1.0 / self.ticks_per_second
    }

    /// CPU seconds spent busy since boot, over all CPUs.
    pub(in super::super) fn busy_seconds(&self) -> Option<f64> {
        let mut buffer = [0; LONGEST_LINE];
        let first = lines(self.look(&mut buffer)?).next().filter(|line| line.cpu.is_none())?;
        self.seconds(&first)[0]
    }

    /// Room for all CPU lines. They come first, so what does not fit is not needed; numbers are mostly half as long as they
    /// may get, so that CPUs which come online later have room too.
    pub(super) fn buffer(&self) -> Vec<u8> {
        vec![0; (1 + self.cpus) * LONGEST_LINE]
    }

    /// The file as it is now, as far as there is room.
    pub(super) fn look<'a>(&self, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
        let n = self.file.read_at(buffer, 0).ok()?;
        Some(&buffer[..n])
    }

    /// What a line says in seconds, busy time first and then [`STATES`]; nothing if it has fewer columns than there were.
    pub(super) fn seconds(&self, line: &Line) -> [Option<f64>; 1 + STATES.len()] {
        let [user, nice, system, idle, iowait, irq, softirq, steal] = line.columns;
        let ticks = [line.busy(), user, nice, system, idle, iowait, irq, softirq, steal];
        let whole = line.columns[..self.states].iter().all(Option::is_some);
        ticks.map(|ticks| Some(ticks.filter(|_| whole)? as f64 / self.ticks_per_second))
    }
}

/// One CPU line.
pub(super) struct Line {
    /// Which CPU; `None` is all of them together.
    pub(super) cpu: Option<u32>,
    columns: [Option<u64>; STATES.len()],
}

impl Line {
    /// Everything but idle, waiting for I/O, and time the hypervisor gave to others (steal).
    fn busy(&self) -> Option<u64> {
        let [user, nice, system, _idle, _iowait, irq, softirq, _steal] = self.columns;
        // Old kernels count interrupts as system time.
        Some(user? + nice? + system? + irq.unwrap_or(0) + softirq.unwrap_or(0))
    }
}

/// The CPU lines at the start of `text`. One that is cut off is none.
pub(super) fn lines(text: &[u8]) -> impl Iterator<Item = Line> {
    let whole = text.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
    text[..whole].split(|b| *b == b'\n').map_while(|line| {
        let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
        let number = words.next()?.strip_prefix("cpu")?;
        let cpu = if number.is_empty() { None } else { Some(number.parse().ok()?) };
        let mut columns = [None; STATES.len()];
        for column in &mut columns {
            let Some(word) = words.next() else { break };
            *column = Some(word.parse().ok()?);
        }
        Some(Line { cpu, columns })
    })
}
