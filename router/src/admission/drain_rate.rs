//! The rate at which requests leave the admission queue of one model. It is measured only while requests wait: the
//! rate of requests that pass an empty queue says nothing about the capacity of the workers. Pure: the time is passed
//! in.
//!
//! A window begins and ends with a request that leaves, so that workers which free capacity in bursts are measured
//! over whole bursts. The rate is the ratio of two exponentially decayed sums, tokens and seconds; it is unbiased from
//! the first window on.

use std::time::Duration;
use tokio::time::Instant;

/// A rate in tokens per second, and the sums that it is measured from.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct DrainRate {
    /// Decayed sums over the windows that are complete.
    tokens: f64,
    seconds: f64,
    requests: f64,
    /// Length of the last complete window, in seconds.
    last_seconds: f64,
    window: Option<Window>,
}

/// A window that is being measured.
#[derive(Clone, Copy, Debug)]
struct Window {
    since: Instant,
    tokens: f64,
    requests: f64,
}

/// Shortest window. Several requests of a slow worker leave in it, and a burst at an unmeasured fleet is judged after
/// it.
pub(super) const WINDOW: Duration = Duration::from_secs(1);
/// Factor on the sums when a window is added: about the last ten windows count.
const DECAY: f64 = 0.9;

impl DrainRate {
    /// A request of this cost leaves the queue.
    pub(crate) fn record(&mut self, cost: u64, now: Instant) {
        if let Some(window) = self.window.filter(|window| now - window.since >= WINDOW) {
            self.last_seconds = (now - window.since).as_secs_f64();
            self.tokens = self.tokens * DECAY + window.tokens;
            self.seconds = self.seconds * DECAY + self.last_seconds;
            self.requests = self.requests * DECAY + window.requests;
            self.window = None;
        }
        let window = self.window.get_or_insert(Window { since: now, tokens: 0.0, requests: 0.0 });
        window.tokens += cost as f64;
        window.requests += 1.0;
    }

    /// The queue is empty: ends the window and keeps the estimate, at the weight of one window, because workers may
    /// join and leave meanwhile.
    pub(crate) fn pause(&mut self) {
        self.window = None;
        let keep = WINDOW.as_secs_f64() / self.seconds.max(WINDOW.as_secs_f64());
        (self.tokens, self.seconds, self.requests) = (self.tokens * keep, self.seconds * keep, self.requests * keep);
    }

    /// Tokens per second; `None` before the first measurement. It declines while an open window lasts longer than the
    /// last one did: the workers have slowed down or stopped.
    pub(crate) fn per_second(&self, now: Instant) -> Option<f64> {
        let open = self.window.map_or(0.0, |window| (now - window.since).as_secs_f64());
        (self.tokens > 0.0).then(|| self.tokens / (self.seconds + (open - self.last_seconds).max(0.0)))
    }

    /// Approximate relative standard error of the rate: `1 / sqrt(n)` for `n` requests.
    pub(crate) fn error(&self) -> f64 {
        self.requests.max(1.0).sqrt().recip()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: Instant, seconds: f64) -> Instant {
        start + Duration::from_secs_f64(seconds)
    }

    #[test]
    fn rate_is_known_after_the_first_window() {
        let mut rate = DrainRate::default();
        let start = Instant::now();
        for tenth in 0..10 {
            rate.record(100, at(start, f64::from(tenth) / 10.0));
            assert_eq!(rate.per_second(at(start, 0.95)), None);
        }
        rate.record(100, at(start, 1.0));
        assert_eq!(rate.per_second(at(start, 1.0)), Some(1000.0));
    }

    #[test]
    fn bursts_are_measured_over_whole_bursts() {
        let mut rate = DrainRate::default();
        let start = Instant::now();
        for burst in 0..5 {
            for request in 0..64 {
                rate.record(10, at(start, f64::from(burst) * 6.0 + f64::from(request) / 1000.0));
            }
            let rates = [0.1, 3.0, 5.9].map(|later| rate.per_second(at(start, f64::from(burst) * 6.0 + later)));
            let known = (burst > 0).then_some(640.0 / 6.0);
            assert!(rates.iter().all(|rate| rate.map(f64::round) == known.map(f64::round)), "{rates:?}");
        }
    }

    #[test]
    fn rate_declines_when_no_request_leaves() {
        let mut rate = DrainRate::default();
        let start = Instant::now();
        for second in 0..=10 {
            rate.record(100, at(start, f64::from(second)));
        }
        let of = |seconds| rate.per_second(at(start, seconds)).unwrap();
        assert!((of(10.0) - 100.0).abs() < 1e-9 && (of(11.0) - 100.0).abs() < 1e-9);
        assert!(of(60.0) < 15.0, "{}", of(60.0));
    }

    #[test]
    fn rate_is_kept_while_the_queue_is_empty() {
        let mut rate = DrainRate::default();
        let start = Instant::now();
        rate.record(100, start);
        rate.record(100, at(start, 2.0));
        rate.pause();
        assert_eq!(rate.per_second(at(start, 1000.0)), Some(50.0));
        rate.record(100, at(start, 1000.0));
        assert_eq!(rate.per_second(at(start, 1000.5)), Some(50.0));
        rate.record(900, at(start, 1000.5));
        rate.record(100, at(start, 1001.0));
        let rate = rate.per_second(at(start, 1001.0)).unwrap();
        assert!(rate > 500.0, "{rate}: earlier measurements count as one window");
    }
}
