//! Notices changes of files that are used while the process runs, and reads their text: API keys, certificates, the
//! secret of a deployment.
//!
//! Files are polled, because notifications of the system miss files on network file systems, and links to folders that
//! are replaced, as Kubernetes does with secrets.

use std::fs::{self, File};
use std::io::{self, Read, Take};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Interval of the checks. A change is applied after two of them, so within a second.
const INTERVAL: Duration = Duration::from_millis(250);

/// Files, and what they were when they were last loaded.
pub struct WatchedFiles {
    paths: Vec<PathBuf>,
    loaded: Vec<Option<FileStamp>>,
    previous: Vec<Option<FileStamp>>,
}

/// What differs after a change of a file, also if it was replaced by one of the same length within a tick of the clock.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl WatchedFiles {
    /// Files as they are now. To be called before they are loaded: a change in between is noticed then.
    pub fn now(paths: Vec<PathBuf>) -> Self {
        let loaded = stamps(&paths);
        Self { paths, previous: loaded.clone(), loaded }
    }

    /// Calls `reload` on a blocking thread after each change, until the owner is dropped.
    pub fn spawn<T: Send + Sync + 'static>(self, owner: &Arc<T>, reload: fn(&T)) {
        let owner = Arc::downgrade(owner);
        let mut files = self;
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(INTERVAL).await;
                let owner = Weak::clone(&owner);
                let check = move || {
                    let owner = owner.upgrade()?;
                    if files.has_changed() {
                        // The hook of the process has logged the panic; the previous content stays in effect.
                        let _ = catch_unwind(AssertUnwindSafe(|| reload(&owner)));
                    }
                    Some(files)
                };
                // Fails when the runtime ends.
                let Ok(Some(checked)) = tokio::task::spawn_blocking(check).await else { return };
                files = checked;
            }
        });
    }

    /// Whether the files differ from the loaded ones, and have not changed for one interval: files that are still
    /// being written are not read.
    fn has_changed(&mut self) -> bool {
        let now = stamps(&self.paths);
        let has_changed = now == self.previous && now != self.loaded;
        if has_changed {
            self.loaded.clone_from(&now);
        }
        self.previous = now;
        has_changed
    }
}

/// A missing file has no stamp.
fn stamps(paths: &[PathBuf]) -> Vec<Option<FileStamp>> {
    let stamp = |path: &PathBuf| {
        let file = fs::metadata(path).ok()?;
        Some(FileStamp {
            device: file.dev(),
            inode: file.ino(),
            length: file.len(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    };
    paths.iter().map(stamp).collect()
}

/// The text of a regular file of at most `max_bytes`. Blocks while it reads.
pub fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    let mut text = String::new();
    open_within(path, max_bytes)?.read_to_string(&mut text)?;
    Ok(text)
}

/// The bytes of a regular file of at most `max_bytes`. Blocks while it reads.
pub fn read_bytes(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_within(path, max_bytes)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn open_within(path: &Path, max_bytes: u64) -> io::Result<Take<File>> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() || metadata.len() > max_bytes {
        return Err(not_regular(format!("expected a regular file of at most {max_bytes} bytes")));
    }
    Ok(open_regular(path)?.take(max_bytes))
}

/// Opens a regular file. A pipe is refused, because opening it would wait for its writer.
pub fn open_regular(path: &Path) -> io::Result<File> {
    if !fs::metadata(path)?.is_file() {
        return Err(not_regular("expected a regular file".to_owned()));
    }
    File::open(path)
}

fn not_regular(expected: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_named_pipe_is_refused_and_blocks_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let errors = [open_regular(&path).map(drop), read_text(&path, 9).map(drop), read_bytes(&path, 9).map(drop)];
        for error in errors {
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with("expected a regular file"), "{error}");
        }
    }

    #[test]
    fn a_change_is_reported_once_it_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        fs::write(&path, "a").unwrap();
        let mut watched = WatchedFiles::now(vec![path.clone()]);
        assert!(!watched.has_changed());
        let write = || fs::write(&path, "ab").unwrap();
        let remove = || fs::remove_file(&path).unwrap();
        let changes: [&dyn Fn(); 3] = [&write, &remove, &write];
        for change in changes {
            change();
            let reports = [(); 3].map(|()| watched.has_changed());
            assert_eq!(reports, [false, true, false], "once, after an interval without a further change");
        }
    }
}
