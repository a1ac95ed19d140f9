//! Log lines about things that may happen thousands of times: one per interval, with how many there were.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Lets one line through per interval.
#[derive(Default)]
pub(crate) struct LogLimit(Mutex<State>);

#[derive(Default)]
struct State {
    last: Option<Instant>,
    held_back: u64,
}

impl LogLimit {
    /// Often enough to see that it goes on, rarely enough that a bad disk does not fill a good one.
    const INTERVAL: Duration = Duration::from_secs(30);

    /// To be asked before each line: how many were held back since the last one, or `None` when this one is.
    pub(crate) fn pass(&self) -> Option<u64> {
        // Both fields are only assigned to.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.last.is_some_and(|last| last.elapsed() < Self::INTERVAL) {
            state.held_back += 1;
            return None;
        }
        state.last = Some(Instant::now());
        Some(std::mem::take(&mut state.held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_line_passes_per_interval_and_counts_the_others() {
        let limit = LogLimit::default();
        assert_eq!([limit.pass(), limit.pass(), limit.pass()], [Some(0), None, None]);
        tokio::time::advance(LogLimit::INTERVAL).await;
        assert_eq!([limit.pass(), limit.pass()], [Some(2), None]);
    }
}
