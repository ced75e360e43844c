//! What a server writes. It starts before the run has a folder: until then its output has a file of its own beside where that folder
//! will be, so that moving it in is a rename and the server goes on writing to it. If the start fails, that file is what tells why.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An error quotes at most so much of it: a log may be of any size.
const MOST_BYTES: u64 = 4096;
const MOST_LINES: usize = 20;
/// What a file is called that nobody keeps yet.
const PREFIX: &str = ".server-";
const SUFFIX: &str = ".log";
/// Who makes such a file locks it sooner.
const LOCKED_AFTER: Duration = Duration::from_secs(60);

/// The file that a server writes to.
#[derive(Debug)]
pub(super) struct Output {
    path: PathBuf,
    /// How long it was before: what an earlier session wrote is not this server's.
    from: u64,
    /// Nobody keeps it unless it is moved.
    temporary: bool,
    /// The folder that was made for it.
    made: Option<PathBuf>,
}

impl Output {
    /// A private file in `folder`, gone when this is dropped unless it was moved.
    pub(super) fn temporary(folder: &Path) -> io::Result<(Self, File)> {
        let made = (!folder.exists()).then(|| folder.to_owned());
        std::fs::create_dir_all(folder)?;
        remove_stale(folder);
        let path = folder.join(format!("{PREFIX}{}{SUFFIX}", crate::folder::unique_id()));
        let file = options().create_new(true).open(&path)?;
        // Held by whoever writes to it, the server too. Where there are no locks, nothing stale is found either.
        let _ = file.try_lock();
        Ok((Self { path, from: 0, temporary: true, made }, file))
    }

    /// The end of a file that is kept.
    pub(super) fn kept(path: PathBuf) -> io::Result<(Self, File)> {
        let file = options().create(true).open(&path)?;
        let from = file.metadata()?.len();
        Ok((Self { path, from, temporary: false, made: None }, file))
    }

    /// Moves it to where it is kept; who writes to it writes on.
    pub(super) fn keep(&mut self, path: PathBuf) -> io::Result<()> {
        if self.temporary {
            std::fs::rename(&self.path, &path)?;
            (self.path, self.temporary, self.made) = (path, false, None);
        }
        Ok(())
    }

    /// Keeps what a server said that never got to a run, and says where; `None` if it said nothing.
    pub(super) fn keep_for_the_user(&mut self) -> Option<PathBuf> {
        let said = self.path.metadata().is_ok_and(|m| m.len() > self.from);
        if self.temporary && said {
            // No longer hidden.
            let name = self.path.file_name()?.to_str()?.trim_start_matches('.');
            self.keep(self.path.with_file_name(name)).ok()?;
        }
        said.then(|| self.path.clone())
    }

    /// The last lines of it.
    pub(super) fn last_lines(&self) -> Vec<String> {
        let read = || {
            let mut file = File::open(&self.path)?;
            let start = file.metadata()?.len().saturating_sub(MOST_BYTES).max(self.from);
            file.seek(SeekFrom::Start(start))?;
            let mut bytes = Vec::new();
            file.take(MOST_BYTES).read_to_end(&mut bytes)?;
            // What was cut in two says nothing, unless it is all there is.
            let cut = bytes.iter().position(|b| *b == b'\n').filter(|_| start > self.from);
            io::Result::Ok(bytes.split_off(cut.map_or(0, |at| at + 1)))
        };
        let bytes = read().unwrap_or_default();
        let text: String = String::from_utf8_lossy(&bytes)
            .chars()
            // Colours and the like are for a terminal, and a terminal is not to be told what to do by a server.
            .filter(|c| !c.is_control() || matches!(c, '\n' | '\t'))
            .collect();
        let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        lines[lines.len().saturating_sub(MOST_LINES)..].iter().map(|line| (*line).to_owned()).collect()
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.temporary {
            let _ = std::fs::remove_file(&self.path);
            // Only if it is empty.
            let _ = self.made.take().map(std::fs::remove_dir);
        }
    }
}

/// Removes what servers wrote whose wattle was killed before it had a run: nobody holds its lock.
fn remove_stale(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|n| n.starts_with(PREFIX) && n.ends_with(SUFFIX));
        let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
        if ours
            && age().is_some_and(|age| age > LOCKED_AFTER)
            && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok())
        {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn options() -> std::fs::OpenOptions {
    let mut options = File::options();
    options.append(true).mode(0o600);
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn it_is_private_and_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("runs");
        let (output, _file) = Output::temporary(&folder).unwrap();
        assert_eq!(output.path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        drop(output);
        assert!(!folder.exists());
    }

    #[test]
    fn what_was_said_before_a_failure_is_kept_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let (mut output, mut file) = Output::temporary(dir.path()).unwrap();
        assert_eq!(output.keep_for_the_user(), None, "nothing was said");
        writeln!(file, "CUDA out of memory").unwrap();
        let kept = output.keep_for_the_user().unwrap();
        drop(output);
        assert_eq!(std::fs::read_to_string(&kept).unwrap(), "CUDA out of memory\n");
        assert_eq!(kept.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert!(kept.file_name().unwrap().to_str().unwrap().starts_with("server-"), "{kept:?}");
    }

    #[test]
    fn what_a_killed_wattle_left_is_removed_and_what_another_holds_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let old = std::time::SystemTime::UNIX_EPOCH;
        let stale = dir.path().join(".server-dead.log");
        File::create(&stale).unwrap().set_modified(old).unwrap();
        let (held, file) = Output::temporary(dir.path()).unwrap();
        assert!(!stale.exists());
        file.set_modified(old).unwrap();
        let fresh = dir.path().join(".server-fresh.log");
        File::create(&fresh).unwrap();
        let _another = Output::temporary(dir.path()).unwrap();
        assert!(held.path.exists() && fresh.exists());
    }

    #[test]
    fn who_writes_to_it_writes_on_after_it_was_moved() {
        let dir = tempfile::tempdir().unwrap();
        let (mut output, mut file) = Output::temporary(dir.path()).unwrap();
        writeln!(file, "before").unwrap();
        output.keep(dir.path().join("server.log")).unwrap();
        writeln!(file, "after").unwrap();
        assert_eq!(output.last_lines(), ["before", "after"]);
        drop(output);
        assert_eq!(std::fs::read_to_string(dir.path().join("server.log")).unwrap(), "before\nafter\n");
    }

    #[test]
    fn only_the_end_of_it_is_read_and_nothing_of_an_earlier_session() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("server.log");
        std::fs::write(&path, "earlier\n").unwrap();
        let (output, mut file) = Output::kept(path).unwrap();
        assert!(output.last_lines().is_empty());
        writeln!(file, "first \x1b[31mred\x1b[0m").unwrap();
        assert_eq!(output.last_lines(), ["first [31mred[0m"]);
        for i in 0..100_000 {
            writeln!(file, "line {i}").unwrap();
        }
        let lines = output.last_lines();
        assert_eq!((lines.len(), lines[0].as_str()), (20, "line 99980"));
        file.write_all(&vec![b'x'; 1 << 20]).unwrap();
        assert_eq!(output.last_lines(), ["x".repeat(4096)]);
    }
}
