//! The outermost objects of a JSON file, one at a time: of one array, or one after the other. Only where an object ends is looked for
//! here; what is in it is left to `serde_json`.

use crate::LabError;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// A longer object is not a conversation.
const LONGEST: usize = 64 << 20;

pub(super) struct Objects {
    path: PathBuf,
    reader: BufReader<File>,
    /// The line that is being read, from 1.
    line: u64,
    in_array: bool,
}

/// How far an object has been read.
#[derive(Default)]
struct Cut {
    depth: u32,
    in_text: bool,
    escaped: bool,
}

impl Cut {
    /// Whether the object ends with this byte.
    fn ends_with(&mut self, byte: u8) -> bool {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.in_text => self.escaped = true,
            b'"' => self.in_text = !self.in_text,
            b'{' | b'[' if !self.in_text => self.depth += 1,
            b'}' | b']' if !self.in_text => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        self.depth == 0
    }
}

impl Objects {
    pub(super) fn open(path: &Path) -> Result<Self, LabError> {
        let bad = |why: String| LabError::Dataset { path: path.into(), line: None, why };
        let file = File::open(path).map_err(|e| bad(format!("cannot open it: {e}")))?;
        if file.metadata().is_ok_and(|m| m.is_dir()) {
            return Err(bad("is a folder; name a file with --dataset-param path=FILE".into()));
        }
        Ok(Self { path: path.into(), reader: BufReader::new(file), line: 1, in_array: false })
    }

    /// The next object, if there is one more.
    pub(super) fn next(&mut self) -> Result<Option<Map<String, Value>>, LabError> {
        if !self.seek()? {
            return Ok(None);
        }
        let first = self.line;
        let bytes = self.cut()?;
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|e| self.bad(first, format!("the object that begins here is not JSON ({e})")))
    }

    /// Goes on to the next object; false at the end of the file.
    fn seek(&mut self) -> Result<bool, LabError> {
        loop {
            let Some(&byte) = self.buffer()?.first() else {
                if self.in_array {
                    return Err(self.bad(self.line, "the file ends within its array; is it whole?".into()));
                }
                return Ok(false);
            };
            match byte {
                b'{' => return Ok(true),
                b'[' if !self.in_array => self.in_array = true,
                b']' if self.in_array => self.in_array = false,
                b'\n' => self.line += 1,
                b',' | b' ' | b'\t' | b'\r' => {}
                // A byte-order mark may start the file.
                0xEF | 0xBB | 0xBF if self.line == 1 => {}
                _ => return Err(self.bad(self.line, format!("not a JSON object; {}", super::EXPECTED))),
            }
            self.reader.consume(1);
        }
    }

    /// The bytes of the object that begins here.
    fn cut(&mut self) -> Result<Vec<u8>, LabError> {
        let first = self.line;
        let (mut bytes, mut cut) = (Vec::new(), Cut::default());
        loop {
            let buffer = self.buffer()?;
            let end = buffer.iter().position(|b| cut.ends_with(*b));
            let read = end.map_or(buffer.len(), |at| at + 1);
            let lines = buffer[..read].iter().filter(|b| **b == b'\n').count() as u64;
            bytes.extend_from_slice(&buffer[..read]);
            self.line += lines;
            self.reader.consume(read);
            if end.is_some() {
                return Ok(bytes);
            }
            if read == 0 {
                return Err(
                    self.bad(first, "the file ends within the object that begins here; is it whole?".into())
                );
            }
            if bytes.len() > LONGEST {
                return Err(self.bad(
                    first,
                    "the object that begins here is longer than 64 MiB; each conversation must be one".into(),
                ));
            }
        }
    }

    fn buffer(&mut self) -> Result<&[u8], LabError> {
        let Self { path, reader, line, .. } = self;
        reader.fill_buf().map_err(|e| LabError::Dataset {
            path: path.clone(),
            line: Some(*line),
            why: format!("cannot read on: {e}"),
        })
    }

    fn bad(&self, line: u64, why: String) -> LabError {
        LabError::Dataset { path: self.path.clone(), line: Some(line), why }
    }
}
