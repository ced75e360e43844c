//! Writing so that a kill at any moment leaves whole things: a finished file under its name, or the old one, never half of one.

use crate::error::{Result, StoreError};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file that is written beside its final name and takes it when it is whole.
pub(crate) struct Pending {
    file: File,
    path: PathBuf,
}

impl Pending {
    /// Starts to write what will be `path`; what an earlier kill left of it is dropped.
    pub(crate) fn create(path: PathBuf) -> Result<Self> {
        let file = File::create(temporary(&path)).map_err(|e| StoreError::write(&path, e))?;
        Ok(Self { file, path })
    }

    /// Gives the file its name.
    pub(crate) fn commit(self) -> Result<()> {
        let done = self.file.sync_all().and_then(|()| fs::rename(temporary(&self.path), &self.path));
        done.map_err(|e| StoreError::write(&self.path, e))?;
        sync_folder(&self.path);
        Ok(())
    }
}

impl Write for Pending {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes a whole small file.
pub(crate) fn write(path: PathBuf, contents: &[u8]) -> Result<()> {
    let mut pending = Pending::create(path)?;
    pending.write_all(contents).map_err(|e| StoreError::write(&pending.path, e))?;
    pending.commit()
}

/// The name under which `path` is written until it is whole.
pub(crate) fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    name.into()
}

/// Removes a file or a folder; that there is none is fine.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(what) if what.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(StoreError::write(path, e)),
        _ => Ok(()),
    }
}

/// Makes the rename of `path` itself survive a power cut. Some file systems cannot sync a folder; the file is whole
/// either way, so that is not an error.
pub(crate) fn sync_folder(path: &Path) {
    if let Some(Ok(folder)) = path.parent().map(File::open) {
        let _ = folder.sync_all();
    }
}

/// Appends all of `bytes` or nothing: on a full disk the part that did fit is cut off again, so that what is appended
/// later stands on a line, or a message, of its own.
pub(crate) fn append(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    let end = file.metadata()?.len();
    file.write_all(bytes).inspect_err(|_| {
        let _ = file.set_len(end);
    })
}
