//! Follows the file to which a command appends what it has to say. A thread waits for it to grow, so that a line is stamped when it
//! is written and not when somebody next looks.

use super::Happening;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use wattle_meter::clock;

/// A line that is longer is no note; its beginning is kept to say so.
const LONGEST: usize = 64 * 1024;
/// Without news, the wish to stop is looked for this often.
const WAIT: Duration = Duration::from_millis(100);

/// A thread that follows a file.
pub(super) struct Follower {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Notes>>,
}

/// The file as far as it was read.
pub(super) struct Notes {
    file: File,
    watch: Watch,
    /// The line at hand.
    line: Vec<u8>,
}

impl Notes {
    /// Opens the file; what stands in it is not read again.
    pub(super) fn open(path: &Path) -> io::Result<Notes> {
        let mut file = File::open(path)?;
        io::Seek::seek(&mut file, io::SeekFrom::End(0))?;
        Ok(Notes { file, watch: Watch::new(path), line: Vec::new() })
    }

    /// Hands on every line that is whole by now; false if nobody takes them.
    fn read(&mut self, to: &Sender<Happening>) -> bool {
        let mut buffer = [0; 8192];
        loop {
            let n = match self.file.read(&mut buffer) {
                Ok(0) => return true,
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return true,
            };
            let at = clock::now();
            for byte in &buffer[..n] {
                if *byte == b'\n' {
                    if !self.send(at, to) {
                        return false;
                    }
                } else if self.line.len() <= LONGEST {
                    self.line.push(*byte);
                }
            }
        }
    }

    fn send(&mut self, at: wattle_core::Stamp, to: &Sender<Happening>) -> bool {
        let line = std::mem::take(&mut self.line);
        let blank = line.iter().all(u8::is_ascii_whitespace);
        blank || to.blocking_send(Happening::Line(at, line)).is_ok()
    }
}

impl Follower {
    /// Follows `notes` and hands their lines to `to`.
    pub(super) fn start(mut notes: Notes, to: Sender<Happening>) -> io::Result<Follower> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("wattle-notes".into()).spawn(move || {
            loop {
                // Asked before the last read, so that nothing comes after it.
                let last = seen.load(Ordering::Acquire);
                if !notes.read(&to) || last {
                    break;
                }
                notes.watch.wait(WAIT);
            }
            // A last line without its newline: the program forgot it, or was killed.
            if !notes.line.is_empty() {
                notes.send(clock::now(), &to);
            }
            notes
        })?;
        Ok(Follower { stop, thread: Some(thread) })
    }

    /// Asks the thread to read what is there and end.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Whether it has ended.
    pub(super) fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Gives back the file, once it has ended.
    pub(super) fn join(mut self) -> Option<Notes> {
        self.thread.take()?.join().ok()
    }
}

/// Waits for a file to grow.
struct Watch {
    #[cfg(target_os = "linux")]
    inotify: Option<rustix::fd::OwnedFd>,
}

impl Watch {
    #[cfg(target_os = "linux")]
    fn new(path: &Path) -> Self {
        use rustix::fs::inotify;
        let watch = || {
            let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
            let inotify = inotify::init(flags)?;
            inotify::add_watch(&inotify, path, inotify::WatchFlags::MODIFY)?;
            Ok::<_, rustix::io::Errno>(inotify)
        };
        Self { inotify: watch().ok() }
    }

    #[cfg(target_os = "linux")]
    fn wait(&self, longest: Duration) {
        use rustix::event::{PollFd, PollFlags, poll};
        let Some(inotify) = &self.inotify else {
            // No watches left on this system: look often instead.
            std::thread::sleep(Duration::from_millis(5));
            return;
        };
        let timeout = longest.try_into().ok();
        let _ = poll(&mut [PollFd::new(inotify, PollFlags::IN)], timeout.as_ref());
        // What it says is only that something happened.
        let mut said = [0; 4096];
        while rustix::io::read(inotify, &mut said).is_ok_and(|n| n > 0) {}
    }

    #[cfg(not(target_os = "linux"))]
    fn new(_path: &Path) -> Self {
        Self {}
    }

    #[cfg(not(target_os = "linux"))]
    fn wait(&self, _longest: Duration) {
        std::thread::sleep(Duration::from_millis(5));
    }
}
