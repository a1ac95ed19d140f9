//! A token bucket: a limit per minute that allows short bursts.
//!
//! The bucket holds at most one minute's worth, and fills at a constant rate. What is taken may exceed what it holds,
//! when the amount is known only later. Its level is then below zero, and further requests wait until it has filled.

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// A level that is below the amount by less than this is a rounding error of the time.
const ROUNDING: f64 = 1e-6;

/// The bucket of one limit of one key. Clones share it.
#[derive(Clone)]
pub(super) struct TokenBucket {
    per_minute: u32,
    state: Arc<Mutex<State>>,
}

#[derive(Clone, Copy)]
struct State {
    level: f64,
    at: Instant,
}

impl TokenBucket {
    /// A full bucket.
    pub(super) fn new(per_minute: u32) -> Self {
        let state = State { level: per_minute.into(), at: Instant::now() };
        Self { per_minute, state: Arc::new(Mutex::new(state)) }
    }

    pub(super) fn per_minute(&self) -> u32 {
        self.per_minute
    }

    /// Takes an amount if the bucket holds it. More than the bucket can ever hold is taken when it is full. The error
    /// is the time after which it can be taken.
    pub(super) fn try_take(&self, amount: u64) -> Result<(), Duration> {
        let mut state = self.state.lock();
        self.fill(&mut state);
        let needed = (amount as f64).min(self.capacity());
        let missing = needed - state.level;
        if missing > ROUNDING {
            return Err(Duration::try_from_secs_f64(missing / self.per_second()).unwrap_or(Duration::MAX));
        }
        state.level -= amount as f64;
        Ok(())
    }

    /// Takes an amount whatever the bucket holds, or returns a negative one.
    pub(super) fn charge(&self, amount: f64) {
        let mut state = self.state.lock();
        self.fill(&mut state);
        state.level = (state.level - amount).min(self.capacity());
    }

    /// What was taken and is not refilled yet: more than the limit while the level is below zero.
    pub(super) fn used(&self) -> f64 {
        let mut state = self.state.lock();
        self.fill(&mut state);
        self.capacity() - state.level
    }

    fn fill(&self, state: &mut State) {
        let now = Instant::now();
        let filled = state.level + now.saturating_duration_since(state.at).as_secs_f64() * self.per_second();
        *state = State { level: filled.min(self.capacity()), at: now };
    }

    fn capacity(&self) -> f64 {
        self.per_minute.into()
    }

    fn per_second(&self) -> f64 {
        self.capacity() / 60.0
    }
}

#[cfg(test)]
mod tests {
    use super::TokenBucket;
    use std::time::Duration;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_followed_by_the_constant_rate() {
        let bucket = TokenBucket::new(60);
        for _ in 0..60 {
            assert_eq!(bucket.try_take(1), Ok(()));
        }
        assert_eq!(bucket.try_take(1).map_err(|wait| wait.as_millis()), Err(1000));
        advance(Duration::from_millis(500)).await;
        assert_eq!(bucket.try_take(1).map_err(|wait| wait.as_millis()), Err(500));
        advance(Duration::from_millis(500)).await;
        assert_eq!(bucket.try_take(1), Ok(()));
        advance(Duration::from_hours(1)).await;
        let taken = (0..100).filter(|_| bucket.try_take(1).is_ok()).count();
        assert_eq!(taken, 60, "it holds one minute's worth");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_charged_later_is_waited_for() {
        let bucket = TokenBucket::new(600);
        assert_eq!(bucket.try_take(100), Ok(()));
        bucket.charge(1100.0);
        assert_eq!(bucket.try_take(0).map_err(|wait| wait.as_secs()), Err(60), "600 tokens below zero");
        assert!((bucket.used() - 1200.0).abs() < 0.01, "{} of 600", bucket.used());
        bucket.charge(-600.0);
        assert_eq!(bucket.try_take(0), Ok(()), "the level is zero");
        assert!((bucket.used() - 600.0).abs() < 0.01, "{} of 600", bucket.used());
        bucket.charge(-10_000.0);
        assert!(bucket.try_take(600).is_ok() && bucket.try_take(1).is_err(), "what is returned does not overflow");
    }

    #[tokio::test(start_paused = true)]
    async fn more_than_it_holds_is_taken_from_a_full_bucket() {
        let bucket = TokenBucket::new(60);
        assert_eq!(bucket.try_take(120), Ok(()));
        assert_eq!(bucket.try_take(120).map_err(|wait| wait.as_secs()), Err(120));
        advance(Duration::from_mins(2)).await;
        assert_eq!(bucket.try_take(120), Ok(()));
    }
}
