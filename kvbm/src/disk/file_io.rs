//! The file operations of one path, and how long each has been running.
//!
//! Every call that may wait for the device goes through [`FileIo`], so that a call that does not return is detected
//! ([`FileIo::longest_running`]), and so that tests can stop a process between any two calls.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Runs the file operations of one path.
#[derive(Default)]
pub(super) struct FileIo {
    next: AtomicU64,
    /// Start of each running operation.
    running: Mutex<BTreeMap<u64, Instant>>,
    scans_cancelled: AtomicBool,
    #[cfg(test)]
    faults: super::tests::Faults,
}

/// A running operation, until dropped.
struct Running<'a> {
    io: &'a FileIo,
    number: u64,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.io.running().remove(&self.number);
    }
}

impl FileIo {
    #[cfg(test)]
    pub(super) fn with_faults(self, faults: super::tests::Faults) -> Self {
        Self { faults, ..self }
    }

    /// Running time of the oldest operation.
    pub(super) fn longest_running(&self) -> Option<Duration> {
        self.running().values().map(Instant::elapsed).max()
    }

    /// Cancels recovery scans, which take many operations and can be repeated.
    pub(super) fn cancel_scans(&self) {
        self.scans_cancelled.store(true, Ordering::Relaxed);
    }

    pub(super) fn scans_are_cancelled(&self) -> bool {
        self.scans_cancelled.load(Ordering::Relaxed)
    }

    /// Runs an operation that changes nothing.
    pub(super) fn query<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let _running = self.begin();
        #[cfg(test)]
        self.faults.query();
        work()
    }

    /// Runs an operation that changes the folder atomically.
    pub(super) fn mutate<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let _running = self.begin();
        #[cfg(test)]
        return self.faults.mutate(work);
        #[cfg(not(test))]
        work()
    }

    pub(super) fn read_exact(&self, file: &File, into: &mut [u8], at: u64) -> io::Result<()> {
        self.query(|| file.read_exact_at(into, at))
    }

    pub(super) fn write_all(&self, file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
        let _running = self.begin();
        #[cfg(test)]
        return self.faults.write(file, bytes, at);
        #[cfg(not(test))]
        file.write_all_at(bytes, at)
    }

    pub(super) fn set_len(&self, file: &File, bytes: u64) -> io::Result<()> {
        self.mutate(|| file.set_len(bytes))
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.mutate(|| fs::rename(from, to))
    }

    pub(super) fn remove(&self, path: &Path) -> io::Result<()> {
        self.mutate(|| fs::remove_file(path))
    }

    fn begin(&self) -> Running<'_> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.running().insert(number, Instant::now());
        Running { io: self, number }
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<u64, Instant>> {
        // Only an insertion or a removal happens under this lock.
        self.running.lock()
    }
}
