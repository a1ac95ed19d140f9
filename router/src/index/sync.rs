//! The atomics of the lock-free files. Their tests read those files a second time with others in this place, which try every
//! order in which threads can meet.

pub(crate) use kvbm::hugepages::{HUGE_PAGE, advise_hugepages};
pub(crate) use kvbm::prefetch::{prefetch, prefetch_for_write};
pub(crate) use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// How often a reader looks. A change takes a hundred nanoseconds: whoever has not finished by then does not run, and is not
/// waited for.
pub(crate) const LOOKS: usize = 64;

/// Lets some time pass before the next of so many looks. In the end a writer that does not run may have this core.
pub(crate) fn pause(look: usize) {
    if look < LOOKS - 4 { std::hint::spin_loop() } else { std::thread::yield_now() }
}
