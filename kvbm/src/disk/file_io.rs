//! The file operations of one path, each under way for as long as the kernel takes to answer.
//!
//! Every call that may wait for the device goes through [`FileIo`], so that one that does not return is seen from outside
//! ([`FileIo::longest`]), and so that tests can stop a process between any two of them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// The operations of one path.
#[derive(Default)]
pub(super) struct FileIo {
    next: AtomicU64,
    /// Since when each of those that are under way is.
    running: Mutex<BTreeMap<u64, Instant>>,
    called_off: AtomicBool,
    #[cfg(test)]
    faults: super::tests::Faults,
}

/// An operation under way, until it is dropped.
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

    /// How long the operation that has been under way for longest has been.
    pub(super) fn longest(&self) -> Option<Duration> {
        self.running().values().map(Instant::elapsed).max()
    }

    /// Ends what takes many operations and can be done again: looking through a folder.
    pub(super) fn call_off(&self) {
        self.called_off.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_called_off(&self) -> bool {
        self.called_off.load(Ordering::Relaxed)
    }

    /// Something that changes nothing.
    pub(super) fn look<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let _running = self.begin();
        #[cfg(test)]
        self.faults.look();
        work()
    }

    /// Something that changes the folder, in one step.
    pub(super) fn change<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let _running = self.begin();
        #[cfg(test)]
        return self.faults.change(work);
        #[cfg(not(test))]
        work()
    }

    pub(super) fn read_exact(&self, file: &File, into: &mut [u8], at: u64) -> io::Result<()> {
        self.look(|| file.read_exact_at(into, at))
    }

    pub(super) fn write_all(&self, file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
        let _running = self.begin();
        #[cfg(test)]
        return self.faults.write(file, bytes, at);
        #[cfg(not(test))]
        file.write_all_at(bytes, at)
    }

    pub(super) fn set_len(&self, file: &File, bytes: u64) -> io::Result<()> {
        self.change(|| file.set_len(bytes))
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change(|| fs::rename(from, to))
    }

    pub(super) fn remove(&self, path: &Path) -> io::Result<()> {
        self.change(|| fs::remove_file(path))
    }

    fn begin(&self) -> Running<'_> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.running().insert(number, Instant::now());
        Running { io: self, number }
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<u64, Instant>> {
        // An insertion or a removal is all that happens under this lock.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
