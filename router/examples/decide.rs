//! Measures the time and the allocations of a routing decision:
//!
//! ```text
//! cargo run --release -p router --example decide [-- --json] [--workers N]
//! ```
//! The prompt has 8,192 tokens, and an eighth of the workers hold parts of it. The measured path is the live one from
//! the request to its reservation: hash the blocks, look them up, compute the cost of each worker, choose, reserve. The
//! same prompt comes again each time, so its hashes are found in the cache; the columns of the new prompt are for
//! prompts of which no token was seen before. Copies ahead of demand are considered as by default, but not while
//! allocations are counted: a consideration allocates for each worker, at most ten times a second.

use router::replay::bench_support::DecisionBenchmark;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const TOKENS: usize = 8192;
const WORKERS: [u64; 4] = [16, 128, 1024, 4096];
const DECISIONS: usize = 20_000;
/// About a tenth of a second of decisions.
const BETWEEN_REPORTS: usize = 1_000;

/// Counts allocations and their bytes.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed to the system allocator unchanged; counting touches no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
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

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    if !json {
        println!(
            "{:>7} {:>12} {:>14} {:>14} {:>9} {:>16} {:>9} {:>13} {:>9}",
            "workers",
            "hash p50",
            "+ lookup p50",
            "decision p50",
            "p99",
            "new prompt p50",
            "p99",
            "allocations",
            "bytes"
        );
    }
    let only = std::env::args().skip_while(|argument| argument != "--workers").nth(1);
    let only: Option<u64> = only.map(|workers| workers.parse().expect("--workers takes a number"));
    for workers in WORKERS.into_iter().filter(|workers| only.is_none_or(|only| only == *workers)) {
        let router = DecisionBenchmark::new(workers, TOKENS, true);
        let [hash, _] = quantiles(&router, || timed(|| router.hash()));
        let [lookup, _] = quantiles(&router, || timed(|| router.lookup()));
        let [p50, p99] = quantiles(&router, || timed(|| router.decide()));
        let nth = Cell::new(0);
        let [new_p50, new_p99] = quantiles(&router, || router.decide_new(nth.replace(nth.get() + 1)));
        let router = DecisionBenchmark::new(workers, TOKENS, false);
        (0..DECISIONS / 10).for_each(|_| drop(router.decide()));
        router.report();
        let before = (ALLOCATIONS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
        (0..DECISIONS).for_each(|_| drop(black_box(router.decide())));
        let of_each = |now: u64, before: u64| (now - before) as f64 / DECISIONS as f64;
        let allocations = of_each(ALLOCATIONS.load(Ordering::Relaxed), before.0);
        let bytes = of_each(BYTES.load(Ordering::Relaxed), before.1);
        if json {
            println!(
                "{{\"workers\":{workers},\"hash_p50_s\":{:e},\"hash_lookup_p50_s\":{:e},\"decision_p50_s\":{:e},\
                 \"decision_p99_s\":{:e},\"new_prompt_p50_s\":{:e},\"new_prompt_p99_s\":{:e},\
                 \"allocations\":{allocations:.2},\"bytes\":{bytes:.0}}}",
                hash.as_secs_f64(),
                lookup.as_secs_f64(),
                p50.as_secs_f64(),
                p99.as_secs_f64(),
                new_p50.as_secs_f64(),
                new_p99.as_secs_f64(),
            );
        } else {
            let us = |time: Duration| format!("{:.1} µs", time.as_secs_f64() * 1e6);
            println!(
                "{workers:>7} {:>12} {:>14} {:>14} {:>9} {:>16} {:>9} {allocations:>13.1} {bytes:>9.0}",
                us(hash),
                us(lookup),
                us(p50),
                us(p99),
                us(new_p50),
                us(new_p99)
            );
        }
    }
}

/// Duration of the work, without dropping its result.
fn timed<T>(work: impl Fn() -> T) -> Duration {
    let since = Instant::now();
    let made = black_box(work());
    let took = since.elapsed();
    drop(made);
    took
}

/// Median and p99, after a tenth as many rounds to warm up. Workers report in between, because silent workers change
/// the decision.
fn quantiles(router: &DecisionBenchmark, sample: impl Fn() -> Duration) -> [Duration; 2] {
    let sample = |nth: usize| {
        if nth.is_multiple_of(BETWEEN_REPORTS) {
            router.report();
        }
        sample()
    };
    (0..DECISIONS / 10).map(sample).for_each(drop);
    let mut times: Vec<Duration> = (0..DECISIONS).map(sample).collect();
    times.sort_unstable();
    [times[DECISIONS / 2], times[DECISIONS * 99 / 100]]
}
