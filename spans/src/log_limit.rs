//! A rate limit of log lines that may repeat thousands of times a second.

use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// Admits a number of lines per interval and counts the suppressed ones.
pub struct LogLimit {
    lines: u32,
    interval: Duration,
    window: Mutex<Window>,
}

struct Window {
    began: Option<Instant>,
    used: u32,
    suppressed: u64,
}

/// Interval of the default limit: short enough to see that a fault persists, long enough that the lines do not fill a
/// disk.
const INTERVAL: Duration = Duration::from_secs(30);

impl LogLimit {
    /// A limit of `lines` per `interval`.
    pub const fn new(lines: u32, interval: Duration) -> Self {
        Self { lines, interval, window: Mutex::new(Window { began: None, used: 0, suppressed: 0 }) }
    }

    /// Call it before each line. `Some` if the line may be written, with the number of lines suppressed since the
    /// previous one.
    pub fn admit(&self) -> Option<u64> {
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

impl Default for LogLimit {
    /// One line in half a minute.
    fn default() -> Self {
        Self::new(1, INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lines_beyond_the_rate_are_counted() {
        let limit = LogLimit::new(2, Duration::from_secs(1));
        let admitted: Vec<_> = (0..5).map(|_| limit.admit()).collect();
        assert_eq!(admitted, [Some(0), Some(0), None, None, None]);
        tokio::time::advance(Duration::from_millis(999)).await;
        assert_eq!(limit.admit(), None);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!([limit.admit(), limit.admit(), limit.admit()], [Some(4), Some(0), None]);
        tokio::time::advance(Duration::from_mins(1)).await;
        assert_eq!([limit.admit(), limit.admit(), limit.admit()], [Some(1), Some(0), None]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_default_is_one_line_in_an_interval() {
        let limit = LogLimit::default();
        assert_eq!([limit.admit(), limit.admit(), limit.admit()], [Some(0), None, None]);
        tokio::time::advance(INTERVAL).await;
        assert_eq!([limit.admit(), limit.admit()], [Some(2), None]);
    }
}
