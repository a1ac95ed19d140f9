//! Keeps repeated log lines to a bounded rate.

use std::sync::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// Lets some lines of each interval through and counts the others.
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
    /// At most `lines` in each `interval`.
    pub(crate) const fn new(lines: u32, interval: Duration) -> Self {
        Self { lines, interval, window: Mutex::new(Window { began: None, used: 0, suppressed: 0 }) }
    }

    /// Whether a line may be written now, and if so, how many were suppressed since the one before.
    pub(crate) fn admit(&self) -> Option<u64> {
        let mut window = self.window.lock().expect("no code panics while it holds this lock");
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
