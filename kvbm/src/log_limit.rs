//! Rate limit for log messages that may repeat thousands of times: one per interval, with the number of suppressed
//! ones.

use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// Permits one message per interval.
#[derive(Default)]
pub(crate) struct LogLimit(Mutex<State>);

#[derive(Default)]
struct State {
    last: Option<Instant>,
    suppressed: u64,
}

impl LogLimit {
    /// Short enough to see that a fault persists, long enough that the messages do not fill a disk.
    const INTERVAL: Duration = Duration::from_secs(30);

    /// Call it before each message. Returns the number of messages suppressed since the last one, or `None` when this
    /// one is suppressed.
    pub(crate) fn pass(&self) -> Option<u64> {
        // No panic can occur under this lock.
        let mut state = self.0.lock();
        if state.last.is_some_and(|last| last.elapsed() < Self::INTERVAL) {
            state.suppressed += 1;
            return None;
        }
        state.last = Some(Instant::now());
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_message_passes_per_interval_and_counts_the_others() {
        let limit = LogLimit::default();
        assert_eq!([limit.pass(), limit.pass(), limit.pass()], [Some(0), None, None]);
        tokio::time::advance(LogLimit::INTERVAL).await;
        assert_eq!([limit.pass(), limit.pass()], [Some(2), None]);
    }
}
