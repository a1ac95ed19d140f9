//! Allocations of a routing decision do not depend on the number of workers. A binary of its own, because the allocator
//! counts the allocations of all tests in a binary.

use router::replay::bench_support::DecisionBenchmark;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts allocations and their bytes.
struct Counting;

static COUNTED: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

// SAFETY: every call is passed unchanged to the system allocator; counting touches no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNTED[0].fetch_add(1, Ordering::Relaxed);
        COUNTED[1].fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn counted() -> [u64; 2] {
    [0, 1].map(|at| COUNTED[at].load(Ordering::Relaxed))
}

#[test]
fn allocations_of_a_decision_do_not_depend_on_fleet_size() {
    let [few, many] = [16, 1024].map(|workers| {
        // Considering copies ahead of demand reads every worker, ten times a second.
        let router = DecisionBenchmark::new(workers, 8192, false);
        let decide = |times| (0..times).for_each(|_| drop(router.decide()));
        decide(100);
        let before = counted();
        decide(100);
        let after = counted();
        [after[0] - before[0], after[1] - before[1]]
    });
    assert_eq!(few, many, "allocations and bytes of a hundred decisions");
    assert!(few[0] > 0, "the allocator counts");
}
