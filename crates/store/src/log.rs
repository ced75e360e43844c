//! `log.jsonl`, the write-ahead log: one line per event, each appended with a single write as it happens.
//!
//! A kill can only tear the last line, and a torn line has no newline: the reader leaves it alone, the next writer cuts it off.

use crate::error::{Result, StoreError};
use crate::file;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::PathBuf;
use wattle_core::event::{Event, Line};
use wattle_core::record::Record;
use wattle_core::seen::Seen;
use wattle_core::time::Wall;

/// How a line begins.
const HEAD: &[u8] = br#"{"ts":""#;
/// What follows the time in the line of a record.
const RECORD: &[u8] = br#"","type":"record""#;

/// More than this is not kept in memory.
const MOST_BYTES: usize = 1 << 20;

/// Appends to the log.
#[derive(Debug)]
pub struct LogWriter {
    file: File,
    path: PathBuf,
    /// Put down and not yet written.
    lines: Vec<u8>,
}

impl LogWriter {
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        let open = || {
            let mut file = File::options().create(true).read(true).append(true).open(&path)?;
            let whole = whole_lines(&mut file)?;
            if whole < file.metadata()?.len() {
                file.set_len(whole)?;
            }
            Ok(file)
        };
        let file = open().map_err(|e: io::Error| StoreError::write(&path, e))?;
        Ok(Self { file, path, lines: Vec::new() })
    }

    /// Appends one event, and all that was put down before it, whole or not at all. When this returns the line survives the
    /// death of the process; a power cut may still take the last seconds, because a sync per line would be part of what is measured.
    pub fn append(&mut self, wall: Wall, event: &Event) -> Result<()> {
        self.put(wall, event)?;
        self.flush()
    }

    /// Puts one event down, to be written by the next [`LogWriter::flush`]: one call of the system for many lines.
    pub fn put(&mut self, wall: Wall, event: &Event) -> Result<()> {
        #[derive(Serialize)]
        struct Stamped<'a> {
            ts: String,
            #[serde(flatten)]
            event: &'a Event,
        }
        if let Event::Record(record) = event {
            // JSON has no NaN, and readers limit nesting: better to hear of it now than when the run is resumed.
            record
                .repeatable()
                .map_err(|why| StoreError::Unrepeatable { index: record.item.index, why: why.to_owned() })?;
        }
        let before = self.lines.len();
        let ts = wall.to_string();
        let written = match event {
            // The same line as below, without the detours that a tagged enum takes: there are a million of these.
            Event::Record(record) => {
                self.lines.extend_from_slice(HEAD);
                self.lines.extend_from_slice(ts.as_bytes());
                self.lines.extend_from_slice(RECORD);
                let opening = self.lines.len();
                let written = serde_json::to_writer(&mut self.lines, record);
                self.lines.get_mut(opening).into_iter().for_each(|brace| *brace = b',');
                written
            }
            event => serde_json::to_writer(&mut self.lines, &Stamped { ts, event }),
        };
        if let Err(error) = written {
            self.lines.truncate(before);
            return Err(StoreError::write(&self.path, error));
        }
        self.lines.push(b'\n');
        if self.lines.len() >= MOST_BYTES { self.flush() } else { Ok(()) }
    }

    /// Writes what was put down, whole or not at all.
    pub fn flush(&mut self) -> Result<()> {
        if self.lines.is_empty() {
            return Ok(());
        }
        let written = file::append(&mut self.file, &self.lines);
        self.lines.clear();
        written.map_err(|e| StoreError::write(&self.path, e))
    }
}

/// The length of the file up to and with its last newline.
fn whole_lines(file: &mut File) -> io::Result<u64> {
    let mut buffer = vec![0; 64 * 1024];
    let mut end = file.metadata()?.len();
    while end > 0 {
        let start = end.saturating_sub(buffer.len() as u64);
        let block = &mut buffer[..(end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(block)?;
        if let Some(newline) = block.iter().rposition(|b| *b == b'\n') {
            return Ok(start + newline as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

/// The lines of a log, one after the other. After `None` it can be asked again: a running log may have grown.
#[derive(Debug)]
pub struct Lines {
    file: BufReader<File>,
    path: PathBuf,
    /// The line at hand; after the end, what there is of a line without its newline.
    line: Vec<u8>,
    lines: u64,
    bytes: u64,
    skipped: u64,
}

impl Lines {
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        let file = File::open(&path).map_err(|e| StoreError::read(&path, e))?;
        let file = BufReader::with_capacity(1 << 16, file);
        Ok(Self { file, path, line: Vec::new(), lines: 0, bytes: 0, skipped: 0 })
    }

    /// How far it has come.
    pub fn so_far(&self) -> Replay {
        Replay { lines: self.lines, bytes: self.bytes, skipped: self.skipped, torn: !self.line.is_empty() }
    }
}

/// How far the log was read, and what was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replay {
    /// Whole lines.
    pub lines: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those of them that this version does not understand: a user's own, or a later version's.
    pub skipped: u64,
    /// Whether a line without its newline follows: it is being written, or its writer was killed.
    pub torn: bool,
}

impl Iterator for Lines {
    type Item = Result<Line>;

    fn next(&mut self) -> Option<Result<Line>> {
        loop {
            if let Err(e) = self.file.read_until(b'\n', &mut self.line) {
                return Some(Err(StoreError::read(&self.path, e)));
            }
            if self.line.last() != Some(&b'\n') {
                return None;
            }
            self.lines += 1;
            self.bytes += self.line.len() as u64;
            let parsed = parse(&self.line);
            self.line.clear();
            match parsed {
                Ok(Some(line)) => return Some(Ok(line)),
                Ok(None) => self.skipped += 1,
                Err(e) => {
                    let (path, line) = (self.path.clone(), self.lines);
                    return Some(Err(StoreError::Line { path, line, why: e.to_string() }));
                }
            }
        }
    }
}

/// One line; `None` if it is of no use here. What carries results must be understood, everything else may be.
fn parse(line: &[u8]) -> serde_json::Result<Option<Line>> {
    #[derive(Deserialize)]
    struct Head<'a> {
        #[serde(rename = "type", borrow)]
        kind: Cow<'a, str>,
    }
    if let Some(ts) = ts_of_record(line) {
        let record = serde_json::from_slice(line)?;
        return Ok(Some(Line { ts: ts.to_owned(), event: Event::Record(record) }));
    }
    serde_json::from_slice(line).map(Some).or_else(|error| {
        let head: Head = serde_json::from_slice(line)?;
        if matches!(head.kind.as_ref(), "record" | "session") { Err(error) } else { Ok(None) }
    })
}

/// The time of a line that is a record as we write them. Its other fields are a record's, and that is read without the detours
/// that a tagged enum takes.
fn ts_of_record(line: &[u8]) -> Option<&str> {
    let rest = line.strip_prefix(HEAD)?;
    let end = rest.iter().take(64).position(|b| *b == b'"')?;
    rest[end..].starts_with(RECORD).then_some(())?;
    std::str::from_utf8(&rest[..end]).ok().filter(|ts| !ts.contains('\\'))
}

/// The finished queries of a log, each once.
#[derive(Debug)]
pub struct Records {
    lines: Lines,
    seen: Seen,
    duplicates: u64,
}

impl Records {
    pub(crate) fn new(lines: Lines) -> Self {
        Self { lines, seen: Seen::default(), duplicates: 0 }
    }

    /// How far the log was read for them.
    pub fn so_far(&self) -> Replay {
        self.lines.so_far()
    }

    /// Records left out because an earlier one has the same index.
    pub const fn duplicates(&self) -> u64 {
        self.duplicates
    }
}

impl Iterator for Records {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Result<Record>> {
        loop {
            match self.lines.next()? {
                Ok(Line { event: Event::Record(record), .. }) if self.seen.insert(record.item.index) => {
                    return Some(Ok(*record));
                }
                Ok(Line { event: Event::Record(_), .. }) => self.duplicates += 1,
                Ok(_) => {}
                Err(e) => return Some(Err(e)),
            }
        }
    }
}
