//! The atomics of the lock-free files. The loom test compiles those files with another module in place of this one, and
//! runs them in every possible thread interleaving.

pub(crate) use kvbm::hugepages::HUGE_PAGE;
pub(crate) use kvbm::lazy_lines::{CacheLine, LazyLines, NoAddresses};
pub(crate) use kvbm::prefetch::{prefetch, prefetch_for_write};
pub(crate) use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// Groups per bucket of a hash table, as a power of two: a memory page.
pub(crate) const BUCKET_BITS: u32 = 6;
/// Levels of a hash table whose tags have the same address bits. A bucket at the last of them has tags that differ in
/// twelve bits, so one lookup of an absent hash in a thousand reads a page in vain.
pub(crate) const TAG_LEVELS: u32 = 5;

/// Maximum number of attempts of a reader. A write takes a hundred nanoseconds, so a writer that has not finished by
/// then was descheduled.
pub(crate) const MAX_READ_ATTEMPTS: usize = 64;

/// Waits before the next attempt. The last attempts yield the core, which a descheduled writer may need.
pub(crate) fn pause(attempt: usize) {
    if attempt < MAX_READ_ATTEMPTS - 4 { std::hint::spin_loop() } else { std::thread::yield_now() }
}
