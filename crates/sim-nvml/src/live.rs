//! Power that another process says while it happens: a file of lines, only ever appended to.
//!
//! ```text
//! <nanosecond of CLOCK_MONOTONIC> <index of the board> <watts>
//! ```
//! From that moment on the board draws so much. Each line is written whole, by one `write` to a file opened for appending, right
//! after its moment was taken, and ends in a newline: what comes after the last newline is not read yet. Lines of one board
//! are in order; a moment before that of the board's last line counts as that one. What is no such line is passed over. In Python:
//!
//! ```python
//! live = open("live.txt", "a", buffering=1)
//! live.write(f"{time.monotonic_ns()} 0 350.5\n")
//! ```
//! A reader keeps only what it has read of the file, so every process that looks comes to the same joules.

use crate::scenario::Board;
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// One `read` at most; longer news is read in several.
const CHUNK: usize = 4096;
/// A library that runs for days forgets what lies this far behind the newest line of a board …
const MEMORY_NS: u64 = 60_000_000_000;
/// … but looks for such lines only when it has this many.
const MANY: usize = 1 << 16;

/// Says what boards draw.
#[derive(Debug)]
pub struct Live {
    file: File,
}

impl Live {
    /// Opens the file at `path` for appending, and makes it if it is not there.
    pub fn create(path: impl AsRef<Path>) -> io::Result<Live> {
        Ok(Live { file: File::options().append(true).create(true).open(path)? })
    }

    /// From now on `board` draws `watts`. Returns the moment.
    pub fn set(&mut self, board: usize, watts: f64) -> io::Result<u64> {
        let at = now();
        // One write: two writers' lines do not mix.
        self.file.write_all(format!("{at} {board} {watts}\n").as_bytes())?;
        Ok(at)
    }
}

/// What was said so far of all boards.
pub(crate) struct Curve {
    path: PathBuf,
    file: Option<File>,
    /// Bytes of whole lines read.
    read: u64,
    boards: Vec<Vec<Step>>,
}

/// Power from one moment on.
#[derive(Clone, Copy)]
struct Step {
    at: u64,
    watts: f64,
    /// Joules from the first step to this one.
    joules: f64,
}

impl Curve {
    pub(crate) fn new(path: &Path, boards: usize) -> Curve {
        Curve { path: path.to_owned(), file: None, read: 0, boards: vec![Vec::new(); boards] }
    }

    /// Reads what is new. Where nothing is, that is one call to the kernel.
    pub(crate) fn catch_up(&mut self) -> io::Result<()> {
        let file = match self.file.take() {
            Some(file) => file,
            None => match File::open(&self.path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()), // nobody has said anything yet
                Err(e) => return Err(e),
            },
        };
        let mut chunk = [0; CHUNK];
        loop {
            let filled = file.read_at(&mut chunk, self.read)?;
            // Torn: the rest of the line is not there yet. One longer than the chunk is no line of ours.
            let torn = chunk[..filled].iter().rposition(|b| *b == b'\n').map(|end| end + 1);
            let whole = torn.unwrap_or(if filled == CHUNK { CHUNK } else { 0 });
            if whole == 0 {
                break;
            }
            self.read += whole as u64;
            for line in chunk[..whole].split(|b| *b == b'\n') {
                std::str::from_utf8(line).ok().and_then(parse).into_iter().for_each(|l| self.add(l));
            }
        }
        self.file = Some(file);
        Ok(())
    }

    fn add(&mut self, (at, board, watts): (u64, usize, f64)) {
        let Some(steps) = self.boards.get_mut(board) else { return };
        let (at, joules) = steps.last().map_or((at, 0.0), |last| {
            let at = at.max(last.at);
            (at, last.joules_until(at))
        });
        steps.push(Step { at, watts, joules });
    }

    /// Lets go of what nobody will ask for again.
    pub(crate) fn forget(&mut self) {
        for steps in self.boards.iter_mut().filter(|s| s.len() > MANY) {
            let before = steps[steps.len() - 1].at.saturating_sub(MEMORY_NS);
            // The first step stays: joules are counted from it.
            let keep = steps.partition_point(|s| s.at < before).max(2) - 1;
            steps.drain(1..keep);
        }
    }

    /// Until its first line, a board draws what its scenario says.
    pub(crate) fn joules_since_boot(&self, index: usize, board: &Board, at: u64) -> f64 {
        let Some(first) = self.boards[index].first().filter(|first| first.at <= at) else {
            return board.joules_since_boot(at);
        };
        board.joules_since_boot(first.at) + self.step(index, at).map_or(0.0, |s| s.joules_until(at))
    }

    /// As for joules.
    pub(crate) fn watts(&self, index: usize, board: &Board, at: u64) -> f64 {
        self.step(index, at).map_or_else(|| board.watts(at), |s| s.watts)
    }

    fn step(&self, index: usize, at: u64) -> Option<Step> {
        let steps = &self.boards[index];
        Some(steps[steps.partition_point(|s| s.at <= at).checked_sub(1)?])
    }
}

impl Step {
    fn joules_until(&self, at: u64) -> f64 {
        self.joules + (at - self.at) as f64 * 1e-9 * self.watts
    }
}

fn parse(line: &str) -> Option<(u64, usize, f64)> {
    let mut words = line.split_ascii_whitespace();
    let parsed = (words.next()?.parse().ok()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let (_, _, watts): (u64, usize, f64) = parsed;
    (words.next().is_none() && watts.is_finite() && watts >= 0.0).then_some(parsed)
}

/// Nanoseconds of the monotonic clock, the same for every process.
pub(crate) fn now() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scenario;

    const S: u64 = 1_000_000_000;

    /// The same integral by another way.
    fn joules(lines: &[(u64, f64)], from: u64, until: u64) -> f64 {
        let ends = lines.iter().skip(1).map(|l| l.0).chain([u64::MAX]);
        let piece = |((at, watts), end): (&(u64, f64), u64)| {
            until.min(end).saturating_sub(from.max(*at)) as f64 * 1e-9 * watts
        };
        lines.iter().zip(ends).map(piece).sum()
    }

    fn scenario(folder: &Path) -> Scenario {
        let text = r#"{"live": "live.txt", "devices": [{"uuid": "a", "power": [[0, 10]]}, {"uuid": "b"}]}"#;
        Scenario::parse(text).unwrap().below(Some(folder))
    }

    #[test]
    fn energy_is_the_integral_of_the_lines() {
        let folder = tempfile::tempdir().unwrap();
        let scenario = scenario(folder.path());
        let lines: Vec<(u64, f64)> =
            (0..2_000).map(|i| (100 * S + i * 7_654_321, (i * 37 % 500) as f64)).collect();
        let text: String = lines.iter().map(|(at, watts)| format!("{at} 0 {watts}\n{at} 1 5\n")).collect();
        std::fs::write(folder.path().join("live.txt"), text).unwrap();
        for (from, until) in [(101 * S, 102 * S), (100 * S, 200 * S), (105 * S + 1, 105 * S + 7)] {
            let truth = joules(&lines, from, until);
            assert!((scenario.joules(0, from, until).unwrap() - truth).abs() < 1e-6, "{from}..{until}");
        }
        assert!((scenario.joules(1, 101 * S, 103 * S).unwrap() - 10.0).abs() < 1e-6);
        let before = scenario.joules(0, 98 * S, 100 * S).unwrap();
        assert!((before - 20.0).abs() < 1e-6, "until the first line, power is the scenario's: {before}");
    }

    #[test]
    fn whoever_reads_in_pieces_comes_to_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let scenario = scenario(folder.path());
        let path = folder.path().join("live.txt");
        let mut curve = Curve::new(&path, 2);
        curve.catch_up().unwrap();
        let mut file = File::options().append(true).create(true).open(&path).unwrap();
        let text: String = (1..500u64).map(|i| format!("{} {} {}.5\n", i * S, i % 2, i % 90)).collect();
        for piece in text.as_bytes().chunks(13) {
            file.write_all(piece).unwrap();
            curve.catch_up().unwrap();
        }
        let board = &scenario.devices[0];
        let read = curve.joules_since_boot(0, board, 600 * S) - curve.joules_since_boot(0, board, 3 * S);
        assert_eq!(read, scenario.joules(0, 3 * S, 600 * S).unwrap());
    }

    #[test]
    fn a_torn_line_is_not_read_yet_and_nonsense_never() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("live.txt");
        let board = Board::default();
        let mut curve = Curve::new(&path, 1);
        std::fs::write(&path, "hello\n5 0 -1\n5 0 nan\n5 7 100\n5 0 1 1\n1000 0 200\n2000 0 30").unwrap();
        curve.catch_up().unwrap();
        assert_eq!((curve.boards[0].len(), curve.watts(0, &board, 3_000)), (1, 200.0));
        Live::create(&path).unwrap().file.write_all(b"0\n").unwrap();
        curve.catch_up().unwrap();
        assert_eq!(curve.watts(0, &board, 3_000), 300.0);
    }

    #[test]
    fn what_is_long_past_is_forgotten_and_the_sum_stays() {
        let board = Board::default();
        let mut curve = Curve::new(Path::new("none"), 1);
        (0..200_000).for_each(|i| curve.add((S + i * 1_000_000, 0, 100.0)));
        let before = curve.joules_since_boot(0, &board, 300 * S);
        curve.forget();
        assert!(curve.boards[0].len() < 70_000);
        assert_eq!(curve.joules_since_boot(0, &board, 300 * S), before);
        assert!(
            (curve.joules_since_boot(0, &board, 201 * S)
                - curve.joules_since_boot(0, &board, 200 * S)
                - 100.0)
                .abs()
                < 1e-6
        );
    }
}
