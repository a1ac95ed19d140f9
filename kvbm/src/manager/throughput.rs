//! The measured speed of a tier, the number of blocks that loads wait for, and whether the tier answers at all.

use super::plan::{MeasuredSpeed, TierSpeed, WaitBudget};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::Instant;

/// Measurements of one tier. The time is passed in.
#[derive(Default)]
pub(super) struct TierThroughput {
    state: Mutex<State>,
    /// Number of blocks that loads wait for now.
    queued: AtomicU64,
    /// Number of blocks answered for all loads. Relaxed, like `queued`: these numbers order no other memory.
    answered: AtomicU64,
}

#[derive(Clone, Copy, Default)]
struct State {
    /// Seconds to the first block, smoothed; and when it was last measured.
    latency: Option<(f64, Instant)>,
    /// Blocks after the first and the seconds they took. Both decay alike, so that large loads count for more.
    blocks: f64,
    seconds: f64,
    failures: u32,
    unavailable_until: Option<Instant>,
}

/// What one load has measured of its tier.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct LoadSample {
    /// Time until the first answer; `None`: there was none.
    pub(super) first: Option<Duration>,
    /// Number of blocks answered in `elapsed`, those for other loads included.
    pub(super) blocks: u64,
    /// Time until the last answer, or until the load stopped to listen.
    pub(super) elapsed: Duration,
    /// Number of blocks that other loads waited for at the first request; they were answered first.
    pub(super) queued: u64,
}

impl TierThroughput {
    /// The weight of a new latency, and the decay of old throughput. A change is adopted after about three loads.
    const SMOOTHING: f64 = 0.3;
    /// A measurement decays to none over this time, so that a tier that was slow once is tried again.
    const MAX_AGE: Duration = Duration::from_secs(30);
    /// How long a tier is not used after a first timeout; doubled after each further one, ...
    const BACKOFF: Duration = Duration::from_secs(1);
    /// ... this many times. A retry costs a request no time, but its read may never end.
    const MAX_DOUBLINGS: u32 = 6;

    /// Whether the tier may be asked.
    pub(super) fn is_available(&self, now: Instant) -> bool {
        self.state.lock().unavailable_until.is_none_or(|until| until <= now)
    }

    /// Counts requested blocks.
    pub(super) fn requested(&self, blocks: usize) {
        self.queued.fetch_add(blocks as u64, Relaxed);
    }

    /// Counts an answered block. Returns the number of all answers so far.
    pub(super) fn answered(&self) -> u64 {
        self.queued.fetch_sub(1, Relaxed);
        self.answered.fetch_add(1, Relaxed) + 1
    }

    /// Counts blocks that a load does not wait for any more.
    pub(super) fn cancelled(&self, blocks: usize) {
        self.queued.fetch_sub(blocks as u64, Relaxed);
    }

    /// Number of blocks that loads wait for now.
    pub(super) fn queued(&self) -> u64 {
        self.queued.load(Relaxed)
    }

    /// The speed for a plan: measurements decay with age.
    pub(super) fn speed(&self, now: Instant) -> TierSpeed {
        self.state.lock().speed(self.queued(), now)
    }

    /// [`TierThroughput::speed`] for a load in progress: with its own `sample` so far, and without the `own` blocks
    /// that it waits for.
    pub(super) fn speed_during_load(&self, sample: LoadSample, own: usize, now: Instant) -> TierSpeed {
        self.state.lock().after(sample, now).speed(self.queued().saturating_sub(own as u64), now)
    }

    /// Seconds of latency, and per block, however old: for metrics and load reports.
    pub(super) fn latest(&self) -> Option<(f64, f64)> {
        let state = self.state.lock();
        state.latency.map(|(latency, _)| (latency, state.seconds_per_block()))
    }

    /// Adds the measurements of a load. True: the load timed out, and the tier is not used for a while.
    pub(super) fn record(&self, sample: LoadSample, now: Instant) -> bool {
        let mut state = self.state.lock();
        *state = state.after(sample, now);
        sample.is_timeout()
    }
}

impl LoadSample {
    /// No answer, although the load waited for long enough.
    fn is_timeout(&self) -> bool {
        self.first.is_none() && self.elapsed >= WaitBudget::BASE
    }
}

impl State {
    fn seconds_per_block(&self) -> f64 {
        if self.blocks > 0.0 { self.seconds / self.blocks } else { 0.0 }
    }

    fn speed(&self, queued: u64, now: Instant) -> TierSpeed {
        if self.failures > 0 {
            return TierSpeed::Unresponsive;
        }
        let Some((latency, at)) = self.latency else { return TierSpeed::Unmeasured };
        let left = 1.0 - now.saturating_duration_since(at).as_secs_f64() / TierThroughput::MAX_AGE.as_secs_f64();
        if left <= 0.0 {
            return TierSpeed::Unmeasured;
        }
        let (latency, seconds_per_block) = (latency * left, self.seconds_per_block() * left);
        TierSpeed::Measured(MeasuredSpeed { latency, seconds_per_block, queued: queued as usize })
    }

    /// The state after `sample`.
    fn after(mut self, sample: LoadSample, now: Instant) -> Self {
        let Some(first) = sample.first else {
            // A shorter load may have been ended by something else. Of many loads that time out at once, one counts.
            let unavailable = self.unavailable_until.is_some_and(|until| until > now);
            if sample.is_timeout() && !unavailable {
                self.unavailable_until = Some(now + TierThroughput::BACKOFF * 2_u32.pow(self.failures));
                self.failures = (self.failures + 1).min(TierThroughput::MAX_DOUBLINGS);
            }
            return self;
        };
        self.failures = 0;
        self.unavailable_until = None;
        let fresh = (first.as_secs_f64() - sample.queued as f64 * self.seconds_per_block()).max(0.0);
        let old = self.latency.map_or(fresh, |(latency, _)| latency);
        self.latency = Some((old + TierThroughput::SMOOTHING * (fresh - old), now));
        if sample.blocks > 1 {
            self.blocks = self.blocks * (1.0 - TierThroughput::SMOOTHING) + (sample.blocks - 1) as f64;
            self.seconds =
                self.seconds * (1.0 - TierThroughput::SMOOTHING) + sample.elapsed.saturating_sub(first).as_secs_f64();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn sample(first: Option<u64>, blocks: u64, elapsed: Duration) -> LoadSample {
        LoadSample { first: first.map(ms), blocks, elapsed, queued: 0 }
    }

    #[test]
    fn backoff_doubles_until_the_tier_answers() {
        let throughput = TierThroughput::default();
        let mut now = Instant::now();
        let silent = sample(None, 0, WaitBudget::BASE);
        for seconds in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert!(throughput.is_available(now));
            assert!(throughput.record(silent, now));
            assert!(!throughput.is_available(now + Duration::from_secs(seconds) - ms(1)));
            now += Duration::from_secs(seconds);
            assert_eq!(throughput.speed(now), TierSpeed::Unresponsive, "requested again, and not waited for");
        }
        throughput.record(sample(Some(1), 1, ms(1)), now);
        assert!(matches!(throughput.speed(now), TierSpeed::Measured(_)));
        throughput.record(silent, now);
        assert!(throughput.is_available(now + Duration::from_secs(1)), "it begins anew");
    }

    #[test]
    fn concurrent_timeouts_count_once() {
        let throughput = TierThroughput::default();
        let now = Instant::now();
        for _ in 0..10 {
            throughput.record(sample(None, 0, WaitBudget::BASE), now);
        }
        assert!(throughput.is_available(now + TierThroughput::BACKOFF));
    }

    #[test]
    fn a_short_wait_is_no_timeout() {
        let throughput = TierThroughput::default();
        let now = Instant::now();
        assert!(!throughput.record(sample(None, 0, ms(10)), now));
        assert!(throughput.is_available(now));
        assert_eq!(throughput.speed(now), TierSpeed::Unmeasured);
    }

    #[test]
    fn large_loads_dominate_and_old_measurements_decay() {
        let throughput = TierThroughput::default();
        let now = Instant::now();
        throughput.record(sample(Some(5), 1_001, ms(1_005)), now);
        throughput.record(sample(Some(5), 2, ms(50)), now);
        let TierSpeed::Measured(measured) = throughput.speed(now) else { panic!("it was measured") };
        assert!((measured.seconds_per_block - 0.001).abs() < 0.0001, "{measured:?}");
        assert_eq!(throughput.speed(now + TierThroughput::MAX_AGE), TierSpeed::Unmeasured);
    }

    #[test]
    fn other_loads_count_as_queue_and_not_as_latency() {
        let throughput = TierThroughput::default();
        let now = Instant::now();
        throughput.record(sample(Some(5), 101, ms(105)), now);
        // Requested behind 50 blocks of another load; its own 100 came mixed with another 100.
        throughput.record(LoadSample { first: Some(ms(55)), blocks: 201, elapsed: ms(255), queued: 50 }, now);
        throughput.requested(30);
        throughput.answered();
        throughput.cancelled(9);
        let TierSpeed::Measured(measured) = throughput.speed(now) else { panic!("it was measured") };
        assert!((measured.latency - 0.005).abs() < 1e-6, "{measured:?}");
        assert!((measured.seconds_per_block - 0.001).abs() < 1e-6, "{measured:?}");
        assert_eq!(measured.queued, 20);
    }
}
