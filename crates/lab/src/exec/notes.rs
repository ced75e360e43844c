//! Follows the file to which a command appends what it has to say. A thread waits for it to grow, so that a line is stamped when it
//! is written and not when somebody next looks.

use super::Happening;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use wattle_core::{Seconds, Stamp};
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
    path: PathBuf,
    file: File,
    position: u64,
    /// Where to stop, once that is asked for.
    end: Option<u64>,
    watch: Watch,
    /// The line at hand.
    line: Vec<u8>,
    /// For how long lines had to wait for us, at most.
    pub(super) behind: Seconds,
}

impl Notes {
    /// Opens the file from its beginning.
    pub(super) fn open(path: &Path) -> io::Result<Notes> {
        Ok(Notes {
            path: path.to_owned(),
            file: File::open(path)?,
            position: 0,
            end: None,
            watch: Watch::new(path),
            line: Vec::new(),
            behind: Seconds(0.0),
        })
    }

    /// A program may cut the file off, or put another in its place: then that is read from its beginning.
    fn catch_up(&mut self) {
        let (Ok(ours), Ok(theirs)) = (self.file.metadata(), std::fs::metadata(&self.path)) else { return };
        if ours.ino() != theirs.ino()
            && let Ok(file) = File::open(&self.path)
        {
            (self.file, self.position) = (file, 0);
            self.watch = Watch::new(&self.path);
            self.line.clear();
        } else if ours.len() < self.position && self.file.seek(SeekFrom::Start(0)).is_ok() {
            self.position = 0;
            self.line.clear();
        }
    }

    /// Hands on every line that is whole by now; false if nobody takes them. Once it is to stop, what is written later, by somebody
    /// whom the command left behind, is nobody's note any more.
    fn read(&mut self, stop: &AtomicBool, to: &Sender<Happening>) -> bool {
        self.catch_up();
        let mut buffer = [0; 8192];
        loop {
            if self.end.is_none() && stop.load(Ordering::Acquire) {
                self.end = Some(self.file.metadata().map_or(self.position, |m| m.len()));
            }
            let left = self.end.map_or(u64::MAX, |end| end.saturating_sub(self.position));
            let room = left.min(buffer.len() as u64);
            let n = match self.file.read(&mut buffer[..room as usize]) {
                Ok(0) => return true,
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return true,
            };
            self.position += n as u64;
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

    fn send(&mut self, at: Stamp, to: &Sender<Happening>) -> bool {
        let line = std::mem::take(&mut self.line);
        let blank = line.iter().all(u8::is_ascii_whitespace);
        let sent = blank || to.blocking_send(Happening::Line(at, line)).is_ok();
        let waited = clock::now().since(at);
        self.behind = if waited > self.behind { waited } else { self.behind };
        sent
    }
}

impl Follower {
    /// Follows `notes` and hands their lines to `to`.
    pub(super) fn start(mut notes: Notes, to: Sender<Happening>) -> io::Result<Follower> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("wattle-notes".into()).spawn(move || {
            notes.end = None;
            while notes.read(&seen, &to) && notes.end.is_none() {
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

    /// Gives back the file, if it has ended; a thread that has not ends when nobody takes its lines.
    pub(super) fn join(mut self) -> Option<Notes> {
        if self.is_finished() { self.thread.take()?.join().ok() } else { None }
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
