//! A rate limit of log lines.

use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// Admits a number of lines per interval and counts the suppressed ones.
pub(crate) struct LogLimit {
    lines: u32,
    interval: Duration,
    window: Mutex<Window>,
}

struct Window {
    began: Option<Instant>,
    used: u32,
    suppressed: u64,
}

impl LogLimit {
    /// A limit of `lines` per `interval`.
    pub(crate) const fn new(lines: u32, interval: Duration) -> Self {
        Self { lines, interval, window: Mutex::new(Window { began: None, used: 0, suppressed: 0 }) }
    }

    /// `Some` if a line may be written now, with the number of lines suppressed since the previous one.
    pub(crate) fn admit(&self) -> Option<u64> {
        let mut window = self.window.lock();
        if window.began.is_none_or(|began| began.elapsed() >= self.interval) {
            (window.began, window.used) = (Some(Instant::now()), 0);
        }
        if window.used < self.lines {
            window.used += 1;
            Some(std::mem::take(&mut window.suppressed))
        } else {
            window.suppressed += 1;
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::LogLimit;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn lines_beyond_the_rate_are_counted() {
        let limit = LogLimit::new(2, Duration::from_secs(1));
        let admitted: Vec<_> = (0..5).map(|_| limit.admit()).collect();
        assert_eq!(admitted, [Some(0), Some(0), None, None, None]);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(limit.admit(), Some(3));
    }
}
