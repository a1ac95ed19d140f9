//! The lock of a log's folder: an advisory lock on the file `owner`, which the kernel releases when the process dies.

use super::OpenError;
use crate::folder::FileId;
use crate::permissions;
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// Time to wait for an owner that is closing. Its last writes take some milliseconds per segment.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Whether a process owns the log in a folder, and the process id of the last owner; `None` when there is no log.
pub(super) fn inspect(folder: &Path) -> std::io::Result<Option<(bool, Option<u32>)>> {
    let mut file = match File::open(folder.join("owner")) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // The shared lock is released at once; a process that is starting retries for longer.
    let in_use = matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock));
    let mut pid = String::new();
    let _ = file.read_to_string(&mut pid);
    Ok(Some((in_use, pid.trim().parse().ok())))
}

/// [`OpenError::Owned`] if a process has the log in a folder open. The log is not changed, and may be missing.
pub fn check_owner(folder: &Path) -> Result<(), OpenError> {
    match inspect(folder) {
        Ok(Some((true, pid))) => Err(OpenError::Owned { folder: folder.to_owned(), pid }),
        Ok(_) => Ok(()),
        Err(source) => Err(OpenError::Io { path: folder.to_owned(), source }),
    }
}

/// The same for a process that is about to open the log: an owner that is closing gets the time for it. Blocks the
/// calling thread meanwhile.
pub fn wait_for_owner(folder: &Path) -> Result<(), OpenError> {
    let started = Instant::now();
    loop {
        match check_owner(folder) {
            Err(OpenError::Owned { .. }) if started.elapsed() < ACQUIRE_TIMEOUT => std::thread::sleep(RETRY_INTERVAL),
            checked => return checked,
        }
    }
}

/// The lock of a folder, until dropped.
#[must_use]
pub(super) struct FolderLock {
    file: File,
}

impl FolderLock {
    pub(super) fn acquire(folder: &Path) -> Result<Self, OpenError> {
        let path = folder.join("owner");
        let failed = |source| OpenError::Io { path: path.clone(), source };
        let mut options = permissions::private_file_options();
        let mut file = options.read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
        permissions::restrict_file(&file, &path).map_err(failed)?;
        let started = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if started.elapsed() < ACQUIRE_TIMEOUT => {
                    std::thread::sleep(RETRY_INTERVAL);
                }
                Err(TryLockError::WouldBlock) => {
                    let mut pid = String::new();
                    let _ = file.read_to_string(&mut pid);
                    return Err(OpenError::Owned { folder: folder.to_owned(), pid: pid.trim().parse().ok() });
                }
                Err(TryLockError::Error(source)) => return Err(failed(source)),
            }
        }
        // The process id is only for the error message of a second owner; the lock needs no content.
        let written =
            file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{}", std::process::id()));
        if let Err(error) = written {
            tracing::debug!(%error, "cannot write the process id to the lock file");
        }
        Ok(Self { file })
    }

    /// Whether the lock is still in this folder, which was not removed, moved away or mounted over.
    pub(super) fn is_in(&self, folder: &Path) -> bool {
        is_same_file(&self.file, &folder.join("owner"))
    }
}

/// Whether an open file is the one at a path, and not a later one.
pub(super) fn is_same_file(file: &File, path: &Path) -> bool {
    let ours = file.metadata().map(|metadata| FileId::from(&metadata)).ok();
    ours.is_some() && ours == FileId::at(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_of_a_log_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert!(check_owner(folder.path()).is_ok() && check_owner(&folder.path().join("missing")).is_ok());
        assert_eq!(folder.path().read_dir().unwrap().count(), 0, "nothing is created");
        let lock = FolderLock::acquire(folder.path()).unwrap();
        let error = check_owner(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with(&format!("belongs to process {}", std::process::id())), "{error}");
        assert!(matches!(wait_for_owner(folder.path()), Err(OpenError::Owned { .. })));
        drop(lock);
        assert!(wait_for_owner(folder.path()).is_ok());
    }
}
