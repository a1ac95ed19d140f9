//! A spin lock of one byte, so that it fits on the cache line that it guards.

use super::sync::{AtomicU8, Ordering, pause};

/// A spin lock. It is held while one page is changed; repacking a page holds it while table entries move as well.
/// Waiting threads spin, and soon yield.
pub(crate) struct SpinLock(AtomicU8);

/// Holds the lock until it is dropped.
#[must_use = "it is given back when this is dropped"]
pub(crate) struct SpinGuard<'a>(&'a SpinLock);

const UNLOCKED: u8 = 0;
const LOCKED: u8 = 1;

impl SpinLock {
    /// An unlocked lock.
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(UNLOCKED))
    }

    /// Waits for the lock.
    pub(crate) fn lock(&self) -> SpinGuard<'_> {
        for attempt in 0.. {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            pause(attempt);
        }
        unreachable!("the loop is infinite")
    }

    /// Acquires the lock if it is free.
    pub(crate) fn try_lock(&self) -> Option<SpinGuard<'_>> {
        // Test and test-and-set: a plain load first, so that waiting threads share the cache line.
        let unlocked = self.0.load(Ordering::Relaxed) == UNLOCKED;
        let acquired =
            unlocked && self.0.compare_exchange(UNLOCKED, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // Created only if acquired: dropping a guard unlocks.
        acquired.then(|| SpinGuard(self))
    }
}

impl Drop for SpinGuard<'_> {
    fn drop(&mut self) {
        self.0.0.store(UNLOCKED, Ordering::Release);
    }
}
