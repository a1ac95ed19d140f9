//! One owner per log: an advisory lock on a file that the kernel lets go when the process dies.

use super::OpenError;
use crate::permissions;
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long an owner that is just leaving may take: its last writes are a few segments' worth of milliseconds.
const PATIENCE: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(20);

/// Whether somebody owns the log in a folder, and the process that last did; `None` when there is no log.
pub(super) fn look(folder: &Path) -> std::io::Result<Option<(bool, Option<u32>)>> {
    let mut file = match File::open(folder.join("owner")) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // Given back at once; an owner that is just coming has the patience.
    let in_use = matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock));
    let mut pid = String::new();
    let _ = file.read_to_string(&mut pid);
    Ok(Some((in_use, pid.trim().parse().ok())))
}

/// Owning the log, until it is dropped.
#[must_use]
pub(super) struct Owner {
    lock: File,
}

impl Owner {
    pub(super) fn claim(folder: &Path) -> Result<Self, OpenError> {
        let path = folder.join("owner");
        let failed = |source| OpenError::Io { path: path.clone(), source };
        let mut options = permissions::private();
        let mut file = options.read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
        permissions::narrow(&file, &path).map_err(failed)?;
        let started = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if started.elapsed() < PATIENCE => std::thread::sleep(AGAIN),
                Err(TryLockError::WouldBlock) => {
                    let mut pid = String::new();
                    let _ = file.read_to_string(&mut pid);
                    return Err(OpenError::Owned { folder: folder.to_owned(), pid: pid.trim().parse().ok() });
                }
                Err(TryLockError::Error(source)) => return Err(failed(source)),
            }
        }
        // Only for the message that a second one gets; the lock itself needs no content.
        let noted =
            file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{}", std::process::id()));
        if let Err(error) = noted {
            tracing::debug!(%error, "cannot write the process id to the lock file");
        }
        Ok(Self { lock: file })
    }

    /// Whether the folder is still the one that was claimed, and not removed, moved away or mounted over.
    pub(super) fn holds(&self, folder: &Path) -> bool {
        is_at(&self.lock, &folder.join("owner"))
    }
}

/// Whether a file that is open is the one at a path, and not another one that came to lie there.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    let identity = |found: std::io::Result<std::fs::Metadata>| found.map(|file| (file.dev(), file.ino())).ok();
    let ours = identity(file.metadata());
    ours.is_some() && ours == identity(std::fs::metadata(path))
}
