//! A rate limit of log lines that may repeat thousands of times a second.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Admits a number of lines per interval and counts the suppressed ones.
#[derive(Debug)]
pub struct LogLimit {
    lines: u32,
    interval: Duration,
    window: Mutex<Window>,
}

#[derive(Debug)]
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

/// Limits the two lines about a fault that may begin and end many times a second: that it began, and that it is over.
///
/// The end is logged exactly if the beginning was. A fault that goes on is logged as soon as the limit admits it, so
/// the last line says what is true.
#[derive(Debug)]
pub struct FaultLog {
    limit: LogLimit,
    is_logged: AtomicBool,
}

/// Beginnings that are logged in an interval: a fault that comes back after its repair is not missed.
const FAULTS: u32 = 2;

impl FaultLog {
    /// Call it at each failure. `Some` if the fault is to be logged now, with the number of failures since the last
    /// line that were not.
    pub fn failed(&self) -> Option<u64> {
        if self.is_logged() {
            return None;
        }
        let suppressed = self.limit.admit()?;
        (!self.is_logged.swap(true, Ordering::Relaxed)).then_some(suppressed)
    }

    /// Call it when the fault is over. Whether that is to be logged.
    pub fn ended(&self) -> bool {
        self.is_logged.swap(false, Ordering::Relaxed)
    }

    /// Whether a fault was logged that is not over.
    pub fn is_logged(&self) -> bool {
        self.is_logged.load(Ordering::Relaxed)
    }
}

impl Default for FaultLog {
    /// Two faults in half a minute.
    fn default() -> Self {
        Self { limit: LogLimit::new(FAULTS, INTERVAL), is_logged: AtomicBool::new(false) }
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

    #[tokio::test(start_paused = true)]
    async fn a_fault_that_comes_and_goes_is_logged_twice_and_its_end_as_often() {
        let faults = FaultLog::default();
        let round = || (faults.failed(), faults.failed(), faults.ended());
        assert_eq!([round(), round()], [(Some(0), None, true); 2]);
        assert_eq!(round(), (None, None, false), "neither is logged");
        assert_eq!(faults.failed(), None);
        tokio::time::advance(INTERVAL).await;
        assert_eq!((faults.failed(), faults.is_logged()), (Some(3), true), "it goes on");
        assert!(faults.ended() && !faults.ended());
    }
}
