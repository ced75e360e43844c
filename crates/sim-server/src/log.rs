//! Where finished requests go: a file of JSON lines, memory, or nowhere.
//!
//! The file is written by a thread of its own, which looks every few milliseconds: neither a slow disk nor the making of JSON
//! makes a token late, and no request pays for waking it.

use crate::{Config, Served, Shared};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often the thread looks.
const PACE: Duration = Duration::from_millis(20);
/// Requests that may wait for it; then the server waits too, rather than lose one.
const MOST_WAITING: usize = 1 << 16;

/// The log.
pub(crate) enum Log {
    Memory(Arc<Shared>),
    File { lines: SyncSender<Served>, writer: JoinHandle<io::Result<()>> },
    Nowhere,
}

impl Log {
    pub(crate) fn new(config: &Config, shared: Arc<Shared>) -> io::Result<Log> {
        let Some(path) = &config.log else {
            return Ok(if config.keep_log { Log::Memory(shared) } else { Log::Nowhere });
        };
        let file = BufWriter::with_capacity(1 << 18, File::create(path)?);
        let (lines, waiting) = sync_channel(MOST_WAITING);
        let writer =
            std::thread::Builder::new().name("sim-server-log".into()).spawn(move || write(file, &waiting))?;
        Ok(Log::File { lines, writer })
    }

    /// Fails if the thread could not write: benchmarks must not lose their truth unseen.
    pub(crate) fn add(&mut self, served: Served) -> io::Result<()> {
        match self {
            Log::Memory(shared) => {
                shared.log.lock().unwrap_or_else(PoisonError::into_inner).push(served);
                Ok(())
            }
            Log::File { lines, .. } => {
                lines.send(served).map_err(|_| io::Error::other("the log cannot be written"))
            }
            Log::Nowhere => Ok(()),
        }
    }

    /// Writes everything.
    pub(crate) fn finish(self) -> io::Result<()> {
        let Log::File { lines, writer } = self else { return Ok(()) };
        drop(lines);
        writer.join().unwrap_or_else(|_| Err(io::Error::other("the log's thread panicked")))
    }
}

/// Writes lines until nobody sends any more.
fn write(mut file: BufWriter<File>, waiting: &Receiver<Served>) -> io::Result<()> {
    loop {
        match waiting.try_recv() {
            Ok(served) => {
                serde_json::to_writer(&mut file, &served)?;
                file.write_all(b"\n")?;
            }
            Err(TryRecvError::Empty) => {
                file.flush()?;
                std::thread::sleep(PACE);
            }
            Err(TryRecvError::Disconnected) => return file.flush(),
        }
    }
}
