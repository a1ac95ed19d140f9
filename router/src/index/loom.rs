//! Loom models of the lock-free files: every interleaving of threads.

use super::holder;
use holder_digests::HolderDigests;
use loom::sync::Arc;
use loom::thread;
use seqlock::SeqLock;
use spin_lock::SpinLock;
use sync::{AtomicU64, Ordering};
use table::Table;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

    pub(crate) const MAX_READ_ATTEMPTS: usize = 2;
    pub(crate) const HUGE_PAGE: usize = 1 << 21;

    pub(crate) fn advise_hugepages<T>(_memory: *const [T]) {}

    pub(crate) fn prefetch_for_write<T>(_value: &T) {}

    pub(crate) fn pause(_attempt: usize) {
        loom::thread::yield_now();
    }
}

#[expect(clippy::duplicate_mod, dead_code, reason = "the same text over other atomics, and not all of it in a test")]
#[path = "table.rs"]
mod table;

#[expect(clippy::duplicate_mod, reason = "the same text over other atomics")]
#[path = "seqlock.rs"]
mod seqlock;

#[expect(clippy::duplicate_mod, dead_code, reason = "the same text over other atomics, and no waiting")]
#[path = "spin_lock.rs"]
mod spin_lock;

#[expect(clippy::duplicate_mod, dead_code, reason = "the same text over other atomics, and not all of it in a test")]
#[path = "holder_digests.rs"]
mod holder_digests;

/// A bound of two preemptions finds nearly all errors; exploring every interleaving takes hours.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

#[test]
fn a_reader_sees_all_of_a_write_or_nothing() {
    explore(|| {
        let page = Arc::new((SeqLock::new(), AtomicU64::new(0), AtomicU64::new(0)));
        let writer = page.clone();
        let writer = thread::spawn(move || {
            for value in 1..=2 {
                writer.0.write(|| {
                    writer.1.store(value, Ordering::Relaxed);
                    writer.2.store(value, Ordering::Relaxed);
                });
            }
        });
        let read = page.0.read(|| (page.1.load(Ordering::Relaxed), page.2.load(Ordering::Relaxed)));
        if let Some((one, other)) = read {
            assert_eq!(one, other);
        }
        writer.join().unwrap();
    });
}

#[test]
fn a_spin_lock_is_exclusive_and_orders_its_holders() {
    explore(|| {
        let shared = Arc::new((SpinLock::new(), AtomicU64::new(0)));
        let add = |shared: &(SpinLock, AtomicU64)| {
            // A blocking lock would spin forever in some interleavings.
            let taken = shared.0.try_lock();
            if taken.is_some() {
                shared.1.store(shared.1.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            }
            u64::from(taken.is_some())
        };
        let other = shared.clone();
        let other = thread::spawn(move || add(&other) + add(&other));
        let done = add(&shared) + other.join().unwrap();
        let _taken = shared.0.try_lock().unwrap();
        assert_eq!(shared.1.load(Ordering::Relaxed), done);
        assert!(shared.0.try_lock().is_none(), "it is locked");
    });
}

#[test]
fn an_entry_is_found_while_its_neighbours_change() {
    explore(|| {
        let table = Arc::new(Table::new(0));
        // These fill the home group, so the last of eleven overflows.
        for position in 64..75 {
            table.insert(7, position, |_| false);
        }
        let writer = table.clone();
        let writer = thread::spawn(move || {
            assert!(writer.remove(7, 66));
            assert!(writer.insert(7, 100, |_| false));
        });
        assert_eq!(table.find(7, |position| position == 74), Some(74));
        writer.join().unwrap();
        assert_eq!(table.find(7, |position| position == 66), None);
    });
}

#[test]
fn a_block_is_written_before_its_entry() {
    explore(|| {
        let shared = Arc::new((Table::new(0), AtomicU64::new(0)));
        let writer = shared.clone();
        let writer = thread::spawn(move || {
            writer.1.store(5, Ordering::Relaxed);
            writer.0.insert(7, 64, |_| false);
        });
        if shared.0.find(7, |_| true).is_some() {
            assert_eq!(shared.1.load(Ordering::Relaxed), 5);
        }
        writer.join().unwrap();
    });
}

#[test]
fn a_lowered_digest_is_never_taken_for_complete() {
    explore(|| {
        let digests = Arc::new(HolderDigests::new());
        digests.add(0, 3, 7);
        let complete = digests.at(0);
        let evicting = digests.clone();
        let evicting = thread::spawn(move || evicting.evict(0, 1, 2));
        let read = digests.at(0);
        if digests.is_complete() {
            assert_eq!(read, complete);
        }
        evicting.join().unwrap();
        assert!(!digests.is_complete());
    });
}

#[test]
fn a_holder_that_loses_blocks_while_they_are_replaced_is_incomplete() {
    explore(|| {
        let digests = Arc::new(HolderDigests::new());
        digests.start_replacing();
        let evicting = digests.clone();
        let evicting = thread::spawn(move || evicting.evict(0, 1, 2));
        assert!(!digests.is_complete());
        digests.finish_replacing();
        evicting.join().unwrap();
        assert!(!digests.is_complete());
    });
}
