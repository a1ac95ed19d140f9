//! Retry policy: how often a request is repeated, and when a slow read is hedged. Pure: times and the seed are inputs.
//!
//! - Retries: exponential backoff with full jitter (Brooker, "Exponential Backoff And Jitter", 2015), limited by a
//!   retry budget: each response adds a fifth of a retry.
//! - Hedged requests (Dean and Barroso, "The Tail at Scale", 2013): a read that takes longer than the 99th percentile
//!   of its size class is sent a second time, at most one read in twenty.
//!
//! Why not the retries of `object_store` (0.14.2): its `RetryConfig` only applies inside its HTTP clients, so a
//! mounted folder (`LocalFileSystem`) has none; each request counts its own attempts, with no budget across requests;
//! the jitter comes from an unseeded generator; and its attempts are invisible to the circuit breaker and to the retry
//! metrics. `url.rs` therefore sets `max_retries: 0`.

use crate::table::splitmix::SplitMix64;
use std::time::Duration;

/// Upper bound of the first pause, and of the longest one.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// Retry budget: retries that are allowed without any response, and number of responses that allow one more. A store
/// that fails half of its requests receives a fifth more requests, not twice as many.
const RETRY_BURST: u32 = 20;
const RESPONSES_PER_RETRY: u32 = 5;
/// Hedged requests that are allowed in a row, and number of reads that allow one more.
const HEDGE_BURST: u32 = 4;
const READS_PER_HEDGE: u32 = 20;
/// Reads over which the 99th percentile is measured, and the fewest that give one.
const LATENCY_WINDOW: usize = 200;
const MIN_SAMPLES: usize = 50;
/// The shortest hedge delay. A second request does not make a faster read any faster.
const MIN_HEDGE_DELAY: Duration = Duration::from_millis(20);
/// Size classes with a latency window each: up to 64 KiB, then five classes, each four times as large, the last one
/// unbounded.
const SIZE_CLASSES: usize = 6;

pub(in crate::object) struct RetryPolicy {
    /// Responses not yet spent on retries.
    retry_credit: u32,
    /// Reads not yet spent on hedged requests.
    hedge_credit: u32,
    rng: SplitMix64,
    latencies: [LatencyWindow; SIZE_CLASSES],
}

/// The last durations in seconds, a ring buffer.
#[derive(Default)]
struct LatencyWindow {
    seconds: Vec<f32>,
    next: usize,
}

impl RetryPolicy {
    pub(in crate::object) fn new(seed: u64) -> Self {
        Self {
            retry_credit: RETRY_BURST * RESPONSES_PER_RETRY,
            hedge_credit: 0,
            rng: SplitMix64::new(seed),
            latencies: Default::default(),
        }
    }

    /// Counts a response of the store.
    pub(in crate::object) fn record_response(&mut self) {
        self.retry_credit = (self.retry_credit + 1).min(RETRY_BURST * RESPONSES_PER_RETRY);
    }

    /// The pause before the `nth` retry of a request, or `None` when the retry budget is spent.
    pub(in crate::object) fn backoff(&mut self, nth: u32) -> Option<Duration> {
        self.retry_credit = self.retry_credit.checked_sub(RESPONSES_PER_RETRY)?;
        let bound = BACKOFF_MIN.saturating_mul(1 << nth.min(16)).min(BACKOFF_MAX);
        Some(bound.mul_f64(self.rng.uniform()))
    }

    /// Counts the start of a read.
    pub(in crate::object) fn record_read(&mut self) {
        self.hedge_credit = (self.hedge_credit + 1).min(HEDGE_BURST * READS_PER_HEDGE);
    }

    /// Records how long a successful read of `bytes` took.
    pub(in crate::object) fn record_latency(&mut self, bytes: u64, time: Duration) {
        let window = &mut self.latencies[size_class(bytes)];
        if window.seconds.len() < LATENCY_WINDOW {
            window.seconds.push(time.as_secs_f32());
        } else {
            window.seconds[window.next] = time.as_secs_f32();
            window.next = (window.next + 1) % LATENCY_WINDOW;
        }
    }

    /// How long a read of `bytes` may take before it is hedged; `None` while too few reads of its size were measured.
    pub(in crate::object) fn hedge_delay(&self, bytes: u64) -> Option<Duration> {
        let window = &self.latencies[size_class(bytes)].seconds;
        let mut seconds = Some(window).filter(|seconds| seconds.len() >= MIN_SAMPLES)?.clone();
        let rank = seconds.len() * 99 / 100;
        let (_, percentile, _) = seconds.select_nth_unstable_by(rank, f32::total_cmp);
        Some(Duration::from_secs_f32(*percentile).max(MIN_HEDGE_DELAY))
    }

    /// Takes the permission for one hedged request, if there is one.
    pub(in crate::object) fn try_hedge(&mut self) -> bool {
        let left = self.hedge_credit.checked_sub(READS_PER_HEDGE);
        self.hedge_credit = left.unwrap_or(self.hedge_credit);
        left.is_some()
    }
}

fn size_class(bytes: u64) -> usize {
    (0..SIZE_CLASSES - 1).find(|class| bytes <= (64 << 10) << (2 * class)).unwrap_or(SIZE_CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_grows_with_full_jitter_and_depends_on_the_seed() {
        let pauses = |seed| -> Vec<Duration> {
            let mut policy = RetryPolicy::new(seed);
            (0..8).filter_map(|nth| policy.backoff(nth)).collect()
        };
        assert_eq!(pauses(1), pauses(1));
        assert_ne!(pauses(1), pauses(2));
        let bound = |nth: u32| (BACKOFF_MIN * 2_u32.pow(nth)).min(BACKOFF_MAX);
        let all: Vec<_> = (0..200).map(pauses).collect();
        for nth in 0..8 {
            let at: Vec<Duration> = all.iter().map(|pauses| pauses[nth]).collect();
            assert!(at.iter().all(|pause| *pause <= bound(nth as u32)));
            let low = at.iter().min().unwrap();
            let high = at.iter().max().unwrap();
            assert!(*low < bound(nth as u32) / 10 && *high > bound(nth as u32) * 9 / 10, "{low:?} to {high:?}");
        }
    }

    #[test]
    fn retry_budget_runs_out_and_is_refilled_by_responses() {
        let mut policy = RetryPolicy::new(1);
        assert_eq!((0..100).filter(|_| policy.backoff(1).is_some()).count(), 20);
        (0..10).for_each(|_| policy.record_response());
        assert_eq!((0..100).filter(|_| policy.backoff(1).is_some()).count(), 2, "a fifth of the responses");
    }

    #[test]
    fn hedge_delay_is_the_recent_p99_of_the_size_class() {
        let mut policy = RetryPolicy::new(1);
        assert_eq!(policy.hedge_delay(1 << 20), None, "not measured");
        for n in 0..200 {
            policy.record_latency(1 << 20, Duration::from_millis(if n % 100 == 0 { 900 } else { 100 }));
        }
        assert_eq!(policy.hedge_delay(1 << 20), Some(Duration::from_secs_f32(0.9)));
        assert_eq!(policy.hedge_delay(1_000), None, "another size class");
        for _ in 0..200 {
            policy.record_latency(1 << 20, Duration::from_millis(3));
        }
        assert_eq!(policy.hedge_delay(1 << 20), Some(MIN_HEDGE_DELAY), "the store is fast now");
    }

    #[test]
    fn at_most_one_read_in_twenty_is_hedged() {
        let mut policy = RetryPolicy::new(1);
        let hedged = (0..10_000).filter(|_| {
            policy.record_read();
            policy.try_hedge()
        });
        assert_eq!(hedged.count(), 500);
    }
}
