//! Whether the writes of a tier succeed: the error of the last write, until one succeeds.
//!
//! Not here: attempts to write. A tier learns that it can write again from the next block that is offloaded to it, so
//! that no write of a health check takes space or bandwidth.

use parking_lot::Mutex;

/// The outcome of the last write.
#[derive(Debug, Default)]
pub(crate) struct WriteHealth(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    failure: Option<String>,
    /// Number of outages that are over. A write that began before the end of one says nothing about the time after it.
    outages: u64,
}

/// A write that has begun.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(crate) struct Attempt {
    outages: u64,
}

/// Whether the outcome of a write differs from that of the write before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum Change {
    /// It is the first of its kind, so it is worth a line in the log.
    Changed,
    /// The write before had the same outcome, or the outcome does not count.
    Same,
}

impl WriteHealth {
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
        match state.failure.replace(error.into()) {
            None => Change::Changed,
            Some(_) => Change::Same,
        }
    }

    /// A write succeeded.
    pub(crate) fn succeeded(&self) -> Change {
        match self.0.lock().failure.take() {
            Some(_) => Change::Changed,
            None => Change::Same,
        }
    }

    /// An outage of the whole tier is over. The writes that failed in it do not count any more.
    pub(crate) fn outage_ended(&self) {
        let mut state = self.0.lock();
        *state = State { failure: None, outages: state.outages + 1 };
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
        let health = WriteHealth::default();
        assert_eq!((health.failure(), health.succeeded()), (None, Change::Same));
        let failed = |error: &str| health.failed(health.begin(), error);
        assert_eq!((failed("full"), failed("read-only")), (Change::Changed, Change::Same));
        assert_eq!(health.failure().as_deref(), Some("read-only"));
        assert_eq!((health.succeeded(), health.failure()), (Change::Changed, None));
    }

    #[test]
    fn a_write_that_began_in_an_outage_does_not_count_after_it() {
        let health = WriteHealth::default();
        let (first, second) = (health.begin(), health.begin());
        let _ = health.failed(first, "down");
        health.outage_ended();
        assert_eq!((health.failure(), health.failed(second, "down")), (None, Change::Same));
        assert_eq!((health.failure(), health.failed(health.begin(), "denied")), (None, Change::Changed));
    }
}
