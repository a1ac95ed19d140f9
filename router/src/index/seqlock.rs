//! A seqlock: readers detect concurrent writes and retry; they never block a writer.
//!
//! A [`SeqLock`] guards data that consists of atomics. Its number is odd during a write. A reader loads the number, the
//! data, and the number again. If both numbers are equal and even, no write overlapped the read.
//!
//! **Ordering.** Writers are serialized by another lock. A writer's release fence orders its odd number before its
//! first write. A reader that saw one of the writes, and then passed its own acquire fence, sees at least that odd
//! number when it loads the number again, and retries. The even number is stored with release and first loaded with
//! acquire, so a reader sees all writes before it.

use super::sync::{AtomicU32, MAX_READ_ATTEMPTS, Ordering, fence, pause};

/// Twice the number of writes, plus one during a write.
pub(crate) struct SeqLock(AtomicU32);

impl SeqLock {
    /// A lock of data that was never written.
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Runs a write. The caller holds the writers' lock.
    pub(crate) fn write<T>(&self, write: impl FnOnce() -> T) -> T {
        let seqlock = self.0.load(Ordering::Relaxed);
        self.0.store(seqlock.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        let outcome = write();
        self.0.store(seqlock.wrapping_add(2), Ordering::Release);
        outcome
    }

    /// Retries a read until no write overlaps it; `None` after [`MAX_READ_ATTEMPTS`].
    pub(crate) fn read<T>(&self, mut read: impl FnMut() -> T) -> Option<T> {
        for attempt in 0..MAX_READ_ATTEMPTS {
            let value = self.try_read(&mut read);
            if value.is_some() {
                return value;
            }
            pause(attempt);
        }
        None
    }

    /// Tries to read once; `None` if a write overlapped.
    #[inline]
    pub(crate) fn try_read<T>(&self, read: impl FnOnce() -> T) -> Option<T> {
        let seqlock = self.0.load(Ordering::Acquire);
        if !seqlock.is_multiple_of(2) {
            return None;
        }
        let value = read();
        fence(Ordering::Acquire);
        (self.0.load(Ordering::Relaxed) == seqlock).then_some(value)
    }
}
