//! Loom models of the lock-free files: every interleaving of threads.

use super::holder;
use holder_digests::HolderDigests;
use loom::sync::Arc;
use loom::thread;
use seqlock::SeqLock;
use spin_lock::SpinLock;
use sync::{AtomicU64, Ordering};
use table::{Inserted, Table};

mod sync {
    pub(crate) use kvbm::lazy_lines::NoAddresses;
    pub(crate) use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

    pub(crate) const MAX_READ_ATTEMPTS: usize = 2;
    pub(crate) const BUCKET_BITS: u32 = 1;
    /// Tags change when the only bucket is divided, and not when two are.
    pub(crate) const TAG_LEVELS: u32 = 2;
    /// One bucket, so that each becomes accessible by itself.
    pub(crate) const HUGE_PAGE: usize = size_of::<CacheLine>() << BUCKET_BITS;

    /// As `kvbm::lazy_lines`, with other atomics.
    pub(crate) struct CacheLine {
        pub(crate) words: [AtomicU64; 3],
        pub(crate) halves: [AtomicU32; 10],
    }

    /// A few lines that are always accessible.
    pub(crate) struct LazyLines(Vec<CacheLine>);

    impl LazyLines {
        #[expect(clippy::unnecessary_wraps, reason = "as in the program")]
        pub(crate) fn reserve(_len: usize, min: usize) -> Result<Self, NoAddresses> {
            let line = || CacheLine {
                words: std::array::from_fn(|_| AtomicU64::new(0)),
                halves: std::array::from_fn(|_| AtomicU32::new(0)),
            };
            Ok(Self((0..3 * min).map(|_| line()).collect()))
        }

        pub(crate) fn allow(&self, len: usize) -> bool {
            len <= self.0.len()
        }

        pub(crate) fn collapse(&self, range: std::ops::Range<usize>) {
            assert!(range.end <= self.0.len(), "the lines are in the array");
        }

        pub(crate) fn release(&self, range: std::ops::Range<usize>) {
            assert!(range.end <= self.0.len(), "the lines are in the array");
        }
    }

    impl std::ops::Deref for LazyLines {
        type Target = [CacheLine];

        fn deref(&self) -> &[CacheLine] {
            &self.0
        }
    }

    pub(crate) fn prefetch_for_write<T>(_value: &T) {}

    pub(crate) fn pause(_attempt: usize) {
        loom::thread::yield_now();
    }
}

#[expect(clippy::duplicate_mod, reason = "the same text over other atomics")]
#[path = "group.rs"]
mod group;

#[expect(clippy::duplicate_mod, dead_code, reason = "the same text over other atomics, and not all of it in a test")]
#[path = "table.rs"]
mod table;

#[expect(clippy::duplicate_mod, reason = "the same text over other atomics")]
#[path = "resize.rs"]
mod resize;

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

/// Inserts an entry that the table does not have.
fn put(table: &Table, key: u64, position: u32) -> Inserted {
    table.insert(table.state(Ordering::Relaxed).place(key), position, |_| false)
}

#[test]
fn an_entry_is_found_while_its_neighbours_change() {
    explore(|| {
        let table = Arc::new(Table::new().unwrap());
        // These fill the home group, so the last of eleven overflows.
        for position in 64..75 {
            put(&table, 7, position);
        }
        let writer = table.clone();
        let writer = thread::spawn(move || {
            assert!(writer.remove(writer.state(Ordering::Relaxed).place(7), 66));
            assert_eq!(put(&writer, 7, 100), Inserted::New);
        });
        assert_eq!(table.find(7, |position| position == 74), Some(74));
        writer.join().unwrap();
        assert_eq!(table.find(7, |position| position == 66), None);
    });
}

/// The key of a position in a table whose buckets are divided by this address bit: odd positions belong to the second
/// half.
fn key_of(position: u32, bit: u32) -> u64 {
    u64::from(position % 2) << (u64::BITS - 8 - sync::BUCKET_BITS + bit)
}

fn keys(positions: &[u32], bit: u32) -> Vec<u64> {
    positions.iter().map(|position| key_of(*position, bit)).collect()
}

/// Divides the first of `1 << level` buckets while a reader looks for an entry of each half.
fn divide_under_a_reader(level: u32) {
    explore(move || {
        let table = Arc::new(Table::new().unwrap());
        (0..level).for_each(|_| assert!(table.grow(|positions| keys(positions, level))));
        for position in [64, 65] {
            assert_eq!(put(&table, key_of(position, level), position), Inserted::New);
        }
        let writer = table.clone();
        let writer = thread::spawn(move || writer.grow(|positions| keys(positions, level)));
        for position in [65, 64] {
            assert_eq!(table.find(key_of(position, level), |here| here == position), Some(position));
        }
        writer.join().unwrap();
        assert_eq!(table.buckets(), (1 << level) + 1);
        for position in [65, 64] {
            assert_eq!(table.find(key_of(position, level), |_| true), Some(position));
        }
    });
}

/// Merges that bucket again.
fn merge_under_a_reader(level: u32) {
    explore(move || {
        let table = Arc::new(Table::new().unwrap());
        put(&table, key_of(65, level), 65);
        (0..=level).for_each(|_| assert!(table.grow(|positions| keys(positions, level))));
        let writer = table.clone();
        let writer = thread::spawn(move || assert!(writer.shrink(|positions| keys(positions, level))));
        assert_eq!(table.find(key_of(65, level), |here| here == 65), Some(65));
        writer.join().unwrap();
        assert_eq!(table.buckets(), 1 << level);
        assert_eq!(table.find(key_of(65, level), |_| true), Some(65));
    });
}

#[test]
fn an_entry_is_found_while_its_bucket_is_divided_and_tags_change() {
    divide_under_a_reader(0);
}

#[test]
fn an_entry_is_found_while_its_bucket_is_divided_by_tags() {
    divide_under_a_reader(1);
}

#[test]
fn an_entry_is_found_while_its_bucket_is_merged_and_tags_change() {
    merge_under_a_reader(0);
}

#[test]
fn an_entry_is_found_while_its_bucket_is_merged_by_tags() {
    merge_under_a_reader(1);
}

#[test]
fn a_block_is_written_before_its_entry() {
    explore(|| {
        let shared = Arc::new((Table::new().unwrap(), AtomicU64::new(0)));
        let writer = shared.clone();
        let writer = thread::spawn(move || {
            writer.1.store(5, Ordering::Relaxed);
            put(&writer.0, 7, 64);
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
