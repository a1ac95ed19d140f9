//! What a decision allocates, whatever the size of the fleet. A binary of its own: whoever else runs would be counted, too.

use router::measure::Decisions;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what is asked of the system: how often, and bytes.
struct Counting;

static COUNTED: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

// SAFETY: every call is the system allocator's own, unchanged; counting touches no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNTED[0].fetch_add(1, Ordering::Relaxed);
        COUNTED[1].fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn counted() -> [u64; 2] {
    [0, 1].map(|at| COUNTED[at].load(Ordering::Relaxed))
}

#[test]
fn a_decision_allocates_as_much_over_a_thousand_workers_as_over_sixteen() {
    let [few, many] = [16, 1024].map(|workers| {
        let router = Decisions::new(workers, 8192);
        let decide = |times| (0..times).for_each(|_| drop(router.decide()));
        decide(100);
        let before = counted();
        decide(100);
        let after = counted();
        [after[0] - before[0], after[1] - before[1]]
    });
    assert_eq!(few, many, "allocations, and their bytes, of a hundred decisions");
    assert!(few[0] > 0, "they are counted");
}
