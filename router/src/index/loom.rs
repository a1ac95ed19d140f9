//! The lock-free files once more, in every order in which threads can meet.

use loom::sync::Arc;
use loom::thread;
use seqlock::{Turn, Version};
use sync::{AtomicU64, Ordering};
use table::Table;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

    pub(crate) const LOOKS: usize = 2;
    pub(crate) const HUGE_PAGE: usize = 1 << 21;

    pub(crate) fn advise_hugepages<T>(_memory: *const [T]) {}

    pub(crate) fn prefetch_for_write<T>(_place: &T) {}

    pub(crate) fn pause(_look: usize) {
        loom::thread::yield_now();
    }
}

#[expect(clippy::duplicate_mod, dead_code, reason = "the same text over other atomics, and not all of it in a test")]
#[path = "table.rs"]
mod table;

#[expect(clippy::duplicate_mod, dead_code, reason = "the same text over other atomics, and no waiting")]
#[path = "seqlock.rs"]
mod seqlock;

/// Two preemptions find nearly every wrong order, and all of them would take hours.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

#[test]
fn what_changes_together_is_seen_together_or_not_at_all() {
    explore(|| {
        let page = Arc::new((Version::new(), AtomicU64::new(0), AtomicU64::new(0)));
        let writer = page.clone();
        let writer = thread::spawn(move || {
            for value in 1..=2 {
                writer.0.change(|| {
                    writer.1.store(value, Ordering::Relaxed);
                    writer.2.store(value, Ordering::Relaxed);
                });
            }
        });
        let seen = page.0.look(|| (page.1.load(Ordering::Relaxed), page.2.load(Ordering::Relaxed)));
        if let Some((one, other)) = seen {
            assert_eq!(one, other);
        }
        writer.join().unwrap();
    });
}

#[test]
fn whose_turn_it_is_sees_what_was_done_before_and_is_alone() {
    explore(|| {
        let shared = Arc::new((Turn::new(), AtomicU64::new(0)));
        let add = |shared: &(Turn, AtomicU64)| {
            // Waiting for it would go on for ever in one of the orders.
            let taken = shared.0.try_take();
            if taken.is_some() {
                shared.1.store(shared.1.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            }
            u64::from(taken.is_some())
        };
        let other = shared.clone();
        let other = thread::spawn(move || add(&other) + add(&other));
        let done = add(&shared) + other.join().unwrap();
        let _taken = shared.0.try_take().unwrap();
        assert_eq!(shared.1.load(Ordering::Relaxed), done);
        assert!(shared.0.try_take().is_none(), "it is somebody's");
    });
}

#[test]
fn an_entry_is_found_while_its_neighbours_come_and_go() {
    explore(|| {
        let table = Arc::new(Table::new(0));
        // The home group is full, so the last of eleven lies in the next.
        for place in 64..75 {
            table.enter(7, place, |_| false);
        }
        let writer = table.clone();
        let writer = thread::spawn(move || {
            assert!(writer.take(7, 66));
            assert!(writer.enter(7, 100, |_| false));
        });
        assert_eq!(table.find(7, |place| place == 74), Some(74));
        writer.join().unwrap();
        assert_eq!(table.find(7, |place| place == 66), None);
    });
}

#[test]
fn what_an_entry_points_to_is_there_before_it() {
    explore(|| {
        let shared = Arc::new((Table::new(0), AtomicU64::new(0)));
        let writer = shared.clone();
        let writer = thread::spawn(move || {
            writer.1.store(5, Ordering::Relaxed);
            writer.0.enter(7, 64, |_| false);
        });
        if shared.0.find(7, |_| true).is_some() {
            assert_eq!(shared.1.load(Ordering::Relaxed), 5);
        }
        writer.join().unwrap();
    });
}
