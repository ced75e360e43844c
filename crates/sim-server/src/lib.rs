//! A scripted model server: token schedules met on absolute moments, traps on demand, and the truth in a log. Tests and
//! benchmarks only; Linux only.
//!
//! It speaks OpenAI (`/v1/chat/completions`, `/v1/completions`, `/v1/models`, vLLM's `/metrics`, llama.cpp's `timings`, `/health`) and Ollama (`/api/chat`,
//! `/api/generate`, `/api/tags`, `/api/pull`, `/api/version`). When tokens come is a fixed schedule, counted from the arrival of the
//! request, or an engine with continuous batching whose power a simulated board draws ([`EngineConfig::live`]). A prompt may
//! say how it wants to be answered: `#tokens=17 #ttft_ms=500 #itl_ms=50 #trap=usage_missing`.
//!
//! One thread does it all, on raw sockets: what a client is measured against must not be what the measurement shows. Tokens that are due
//! together are written together; a write that comes late is logged with its true time.

mod answer;
mod ask;
mod clock;
mod config;
mod conn;
mod cost;
mod desk;
mod engine;
mod http;
mod log;
mod priority;
mod reactor;
mod served;
mod socket;
mod trap;
mod voice;

pub use config::{Config, EveryNth};
pub use cost::{Cost, Quirks};
pub use engine::{Engine, EngineConfig, Joules, Told};
pub use served::{Clock, Outcome, Served};
pub use trap::{Shape, Trap};

use reactor::Reactor;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often a program looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(50);

/// What the thread and its owner share.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    connections: AtomicUsize,
    /// Answers being given.
    speaking: AtomicUsize,
    log: Mutex<Vec<Served>>,
}

/// A running server; it stops when dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Server {
    /// Listens, and serves on a thread of its own. Raises the process's limit of open files to what it may be: each
    /// connection is one.
    pub fn start(config: Config) -> io::Result<Server> {
        raise_open_files();
        let shared = Arc::new(Shared::default());
        // What the thread owns is not shared with any other, so it is made there.
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("sim-server".into()).spawn(move || {
            let made = Reactor::new(config, theirs).and_then(|r| Ok((r.address()?, r.wake(), r)));
            match made {
                Ok((address, wake, reactor)) => {
                    let _ = tell.send(Ok((address, wake)));
                    reactor.run()
                }
                Err(e) => {
                    let _ = tell.send(Err(e));
                    Ok(())
                }
            }
        })?;
        let (address, wake) = told.recv().map_err(io::Error::other)??;
        Ok(Server { address, shared, wake, thread: Some(thread) })
    }

    /// `http://127.0.0.1:PORT`
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Requests that are over, in the order of their ends. Nothing, if the log goes to a file.
    pub fn log(&self) -> Vec<Served> {
        self.shared.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Requests being answered now, or kept waiting.
    pub fn in_flight(&self) -> usize {
        self.shared.speaking.load(Ordering::Relaxed)
    }

    /// Serves until `stop` or until it fails, for a program that does nothing else. The log is then whole.
    pub fn wait(mut self, stop: &AtomicBool) -> io::Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        while !stop.load(Ordering::Relaxed) && !thread.is_finished() {
            std::thread::sleep(LOOK);
        }
        self.stop();
        join(thread)
    }

    fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = join(thread);
        }
    }
}

fn join(thread: JoinHandle<io::Result<()>>) -> io::Result<()> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the server's thread panicked")))
}

fn raise_open_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Where that is not allowed, fewer connections fit.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
