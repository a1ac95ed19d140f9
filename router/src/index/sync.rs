//! The atomics of the lock-free files. The loom test compiles those files with another module in place of this one, and
//! runs them in every possible thread interleaving.

pub(crate) use kvbm::hugepages::{HUGE_PAGE, advise_hugepages};
pub(crate) use kvbm::prefetch::{prefetch, prefetch_for_write};
pub(crate) use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// Maximum number of attempts of a reader. A write takes a hundred nanoseconds, so a writer that has not finished by
/// then was descheduled.
pub(crate) const MAX_READ_ATTEMPTS: usize = 64;

/// Waits before the next attempt. The last attempts yield the core, which a descheduled writer may need.
pub(crate) fn pause(attempt: usize) {
    if attempt < MAX_READ_ATTEMPTS - 4 { std::hint::spin_loop() } else { std::thread::yield_now() }
}
