//! Whether a worker is better left alone for a while: pure.
//!
//! Faults back off exponentially. Back-pressure is obeyed, and is no fault. What a client did wrong says nothing about a
//! worker. A verdict steers; it never refuses the last worker.

use std::time::Duration;
use tokio::time::Instant;
use worker::engine::Error;

/// A worker's standing with those who send to it.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Health {
    faults: u32,
    rests_until: Option<Instant>,
}

/// What an error says about the worker that it came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Nothing: the request was wrong. Another worker would say the same.
    Neutral,
    /// It has too much to do until then.
    Busy(Duration),
    /// It is not well.
    Fault,
}

/// After the first fault: long enough for a process to be found dead by its lease, short enough for a hiccup.
const FIRST: Duration = Duration::from_millis(250);
/// A worker that keeps failing is asked this often whether it still does.
const LONGEST: Duration = Duration::from_secs(8);

impl Verdict {
    /// Reads an error.
    pub(crate) fn of(error: &Error) -> Self {
        match error {
            Error::UnknownModel(_) | Error::PromptTooLong { .. } | Error::Invalid { .. } | Error::Late => Self::Neutral,
            Error::Overloaded { retry_after } => Self::Busy(*retry_after),
            Error::Unavailable(_) | Error::Failed(_) => Self::Fault,
        }
    }
}

impl Health {
    /// Notes how a request went wrong.
    pub(crate) fn note(&mut self, verdict: Verdict, now: Instant) {
        let rest = match verdict {
            Verdict::Neutral => return,
            Verdict::Busy(wait) => wait.min(LONGEST),
            Verdict::Fault => {
                self.faults += 1;
                FIRST.saturating_mul(1 << (self.faults - 1).min(5)).min(LONGEST)
            }
        };
        self.rests_until = Some(self.rests_until.unwrap_or(now).max(now + rest));
    }

    /// Notes an output: it is well.
    pub(crate) fn well(&mut self) {
        *self = Self::default();
    }

    /// Until when it should be left alone.
    pub(crate) fn rests_until(&self) -> Option<Instant> {
        self.rests_until
    }

    #[cfg(test)]
    fn rests(&self, now: Instant) -> bool {
        self.rests_until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_a_client_did_wrong_is_no_fault_and_back_pressure_is_not_one_either() {
        let (mut health, now) = (Health::default(), Instant::now());
        health.note(Verdict::of(&Error::PromptTooLong { prompt: 2, context: 1 }), now);
        health.note(Verdict::of(&Error::UnknownModel("m".into())), now);
        assert!(!health.rests(now));
        for _ in 0..100 {
            health.note(Verdict::of(&Error::Overloaded { retry_after: Duration::from_secs(1) }), now);
        }
        assert!(health.rests(now) && !health.rests(now + Duration::from_secs(1)), "busy does not add up");
    }

    #[tokio::test(start_paused = true)]
    async fn faults_back_off_and_an_output_forgives() {
        let (mut health, now) = (Health::default(), Instant::now());
        let fault = Verdict::of(&Error::Failed("x".into()));
        health.note(fault, now);
        assert!(health.rests(now) && !health.rests(now + FIRST));
        (0..20).for_each(|_| health.note(fault, now));
        assert!(health.rests(now + FIRST) && !health.rests(now + LONGEST));
        health.well();
        assert!(!health.rests(now));
    }
}
