//! Whether the writes of a tier, or its reads, succeed: the error of the last one, until one succeeds.
//!
//! Not here: attempts to write or read. A tier learns that it can write again from the next block that is offloaded to
//! it, so that no write of a health check takes space or bandwidth.

use parking_lot::Mutex;
use spans::FaultLog;

/// The outcome of the last write, or of the last read. What is said of writes here is true of reads.
#[derive(Debug, Default)]
pub(crate) struct IoHealth(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    failure: Option<String>,
    /// Number of outages that are over. A write that began before the end of one says nothing about the time after it.
    outages: u64,
    /// Limits the log lines: a tier that is nearly full refuses some batches and takes others.
    lines: FaultLog,
}

/// A write that has begun.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(crate) struct Attempt {
    outages: u64,
}

/// Whether the outcome of a write is worth a line in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum Change {
    /// It is the first of its kind: the first failure, or the first success after a failure that was logged.
    Changed,
    /// The write before had the same outcome, the outcome does not count, or there were enough lines.
    Same,
}

impl IoHealth {
    /// A write begins.
    pub(crate) fn begin(&self) -> Attempt {
        Attempt { outages: self.0.lock().outages }
    }

    /// The write failed.
    pub(crate) fn failed(&self, attempt: Attempt, error: impl Into<String>) -> Change {
        let mut state = self.0.lock();
        if attempt.outages < state.outages {
            return Change::Same;
        }
        state.failure = Some(error.into());
        if state.lines.failed().is_some() { Change::Changed } else { Change::Same }
    }

    /// A write succeeded.
    pub(crate) fn succeeded(&self) -> Change {
        let mut state = self.0.lock();
        state.failure = None;
        if state.lines.ended() { Change::Changed } else { Change::Same }
    }

    /// An outage of the whole tier is over. The writes that failed in it do not count any more.
    pub(crate) fn outage_ended(&self) {
        let mut state = self.0.lock();
        state.failure = None;
        state.outages += 1;
        // The end of the outage is logged, and not that of the failed writes.
        state.lines.ended();
    }

    /// The error of the last write, if it failed.
    pub(crate) fn failure(&self) -> Option<String> {
        self.0.lock().failure.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_stands_until_a_write_succeeds() {
        let health = IoHealth::default();
        assert_eq!((health.failure(), health.succeeded()), (None, Change::Same));
        let failed = |error: &str| health.failed(health.begin(), error);
        assert_eq!((failed("full"), failed("read-only")), (Change::Changed, Change::Same));
        assert_eq!(health.failure().as_deref(), Some("read-only"));
        assert_eq!((health.succeeded(), health.failure()), (Change::Changed, None));
    }

    #[test]
    fn a_write_that_began_in_an_outage_does_not_count_after_it() {
        let health = IoHealth::default();
        let (first, second) = (health.begin(), health.begin());
        let _ = health.failed(first, "down");
        health.outage_ended();
        assert_eq!((health.failure(), health.failed(second, "down")), (None, Change::Same));
        assert_eq!((health.failure(), health.failed(health.begin(), "denied")), (None, Change::Changed));
    }

    #[test]
    fn writes_that_fail_and_succeed_in_turn_are_logged_a_few_times() {
        let health = IoHealth::default();
        let turns = (0..100).map(|_| [health.failed(health.begin(), "full"), health.succeeded()]);
        let logged: Vec<_> = turns.map(|turn| turn == [Change::Changed; 2]).collect();
        assert!(logged[0] && logged.iter().filter(|logged| **logged).count() < 10, "{logged:?}");
        let _ = health.failed(health.begin(), "full");
        assert_eq!(health.failure().as_deref(), Some("full"), "whether it is logged or not");
    }
}
