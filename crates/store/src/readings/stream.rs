//! The stream of one session. A batch is appended in one write; what a kill tears off its end is not read.

use super::{BATCH, check, schema};
use crate::error::{Result, StoreError};
use crate::file;
use arrow_array::{
    Array, DictionaryArray, Float64Array, RecordBatch, StringArray, UInt16Array, UInt32Array, UInt64Array,
};
use arrow_ipc::reader::StreamReader;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::ArrowError;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use wattle_core::{Reading, Sensor};

/// Where a session's readings go while it runs.
pub(super) fn path(run: &Path, session: u32) -> PathBuf {
    run.join(format!("readings-{session}.arrows"))
}

/// Writes the readings of one session.
pub struct ReadingsWriter {
    path: PathBuf,
    file: File,
    /// Encodes into memory, so that a batch reaches the file in one write or not at all.
    stream: StreamWriter<Vec<u8>>,
    session: u32,
    sensors: Arc<StringArray>,
    at: Vec<u64>,
    sensor: Vec<u16>,
    value: Vec<Option<f64>>,
}

impl ReadingsWriter {
    pub(super) fn create(path: PathBuf, session: u32, sensors: &[Sensor]) -> Result<Self> {
        let open = || File::options().create_new(true).append(true).open(&path);
        let file = match open() {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                // A session that was killed before it read anything is no reason to refuse its number.
                if Stream::open(&path)?.next().is_some() {
                    return Err(StoreError::taken(&path, session));
                }
                file::remove(&path)?;
                open()
            }
            opened => opened,
        };
        let file = file.map_err(|e| StoreError::write(&path, e))?;
        let stream = StreamWriter::try_new(Vec::new(), &schema()).map_err(|e| StoreError::write(&path, e))?;
        let sensors = Arc::new(StringArray::from_iter_values(sensors.iter().map(|s| &s.name)));
        let mut writer =
            Self { path, file, stream, session, sensors, at: vec![], sensor: vec![], value: vec![] };
        writer.write_out()?;
        Ok(writer)
    }

    /// Takes in one reading; it is safe after the next [`flush`](Self::flush).
    pub fn push(&mut self, reading: &Reading) -> Result<()> {
        if usize::from(reading.sensor.0) >= self.sensors.len() {
            let sensor = format!("number {}", reading.sensor.0);
            return Err(StoreError::NoSuchSensor { path: self.path.clone(), sensor });
        }
        self.at.push(reading.at.nanos());
        self.sensor.push(reading.sensor.0);
        // A source that says NaN has failed to read.
        self.value.push(reading.value.filter(|v| v.is_finite()));
        if self.at.len() >= BATCH { self.flush() } else { Ok(()) }
    }

    /// Hands everything pushed so far to the system: it survives the death of this process. After an error nothing is
    /// lost yet, the next flush tries again.
    pub fn flush(&mut self) -> Result<()> {
        if !self.at.is_empty() {
            let batch = self.take_batch().and_then(|batch| self.stream.write(&batch));
            batch.map_err(|e| StoreError::write(&self.path, e))?;
        }
        self.write_out()
    }

    /// Flushes and ends the stream.
    pub fn close(mut self) -> Result<()> {
        self.flush()?;
        self.stream.finish().map_err(|e| StoreError::write(&self.path, e))?;
        self.write_out()
    }

    fn take_batch(&mut self) -> std::result::Result<RecordBatch, ArrowError> {
        let keys = UInt16Array::from(std::mem::take(&mut self.sensor));
        let sensors = DictionaryArray::try_new(keys, self.sensors.clone())?;
        RecordBatch::try_new(
            schema(),
            vec![
                Arc::new(UInt32Array::from_value(self.session, self.at.len())),
                Arc::new(UInt64Array::from(std::mem::take(&mut self.at))),
                Arc::new(sensors),
                Arc::new(Float64Array::from(std::mem::take(&mut self.value))),
            ],
        )
    }

    fn write_out(&mut self) -> Result<()> {
        let bytes = self.stream.get_mut();
        file::append(&mut self.file, bytes).map_err(|e| StoreError::write(&self.path, e))?;
        bytes.clear();
        Ok(())
    }
}

/// The batches of one session's stream, as far as they are whole.
pub(super) struct Stream {
    path: PathBuf,
    end: End,
    reader: Option<StreamReader<File>>,
    pub(super) torn: bool,
}

impl Stream {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let open = || {
            let file = File::open(path)?;
            Ok((End { length: file.metadata()?.len(), file: file.try_clone()? }, file))
        };
        let (end, file) = open().map_err(|e| StoreError::read(path, e))?;
        let reader = end.whole(path, StreamReader::try_new(file, None))?;
        check(path, reader.as_ref().map(StreamReader::schema))?;
        Ok(Self { torn: reader.is_none(), reader, end, path: path.into() })
    }
}

impl Iterator for Stream {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Result<RecordBatch>> {
        let batch = self.reader.as_mut()?.next()?;
        let batch = self.end.whole(&self.path, batch).transpose();
        self.torn |= batch.is_none();
        if !matches!(batch, Some(Ok(_))) {
            self.reader = None;
        }
        batch
    }
}

/// The end of a file that is being read, unbuffered, through another handle that shares its position.
struct End {
    file: File,
    length: u64,
}

impl End {
    /// Tells a torn tail, which a kill explains, from damage, which it does not: whoever fails on a torn tail has wanted
    /// more than there is, and stands at the end.
    fn whole<T>(&self, path: &Path, result: std::result::Result<T, ArrowError>) -> Result<Option<T>> {
        let at_end = || (&self.file).stream_position().is_ok_and(|at| at >= self.length);
        match result {
            Ok(whole) => Ok(Some(whole)),
            Err(ArrowError::IoError(_, e)) if e.kind() != io::ErrorKind::UnexpectedEof => {
                Err(StoreError::read(path, e))
            }
            Err(_) if at_end() => Ok(None),
            Err(e) => Err(StoreError::damaged(path, e)),
        }
    }
}

/// The streams in a run folder, by session.
pub(super) fn streams(run: &Path) -> Result<BTreeMap<u32, PathBuf>> {
    let mut streams = BTreeMap::new();
    for entry in fs::read_dir(run).map_err(|e| StoreError::read(run, e))? {
        let path = entry.map_err(|e| StoreError::read(run, e))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let session = name.strip_prefix("readings-").and_then(|rest| rest.strip_suffix(".arrows"));
        if let Some(session) = session.and_then(|digits| digits.parse().ok()) {
            streams.insert(session, path);
        }
    }
    Ok(streams)
}
