//! Health of a worker: a circuit breaker, and the back-pressure that the worker asked for. Pure: the time is passed in.
//!
//! ```text
//!          three consecutive faults, half of the last sixteen, or a hang
//!   Closed ──────────────────────────────────────────────────────▶ Open ◀── no answer: open longer ───┐
//!     ▲ ▲                                                           │ open time over: a probe is sent │
//!     │ └───────────────── an output ───────────────────────────────┤                                 │
//!     └────────── the probe is answered, or an output ─────────── HalfOpen ───────────────────────────┘
//! ```
//! Errors caused by the client neither open nor close the breaker. Back-pressure is obeyed and is no fault. An open
//! breaker lowers a worker's rank; it never excludes the last worker.

use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{Error, ErrorKind};

/// Health of a worker.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Health {
    breaker: Breaker,
    /// Consecutive faults since the last output.
    consecutive_faults: u32,
    /// The last sixteen outcomes, the newest in the lowest bit; 1 is a fault.
    recent: u16,
    /// Openings since the last output, or since a health check found the breaker closed and no fault; each doubles the
    /// open time.
    openings: u32,
    /// End of the back-pressure that the worker asked for.
    busy_until: Option<Instant>,
    /// Start of the last probe.
    probed: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Breaker {
    #[default]
    Closed,
    /// A probe is due then.
    Open(Instant),
    /// A probe is running.
    HalfOpen,
}

/// What an outcome says about the health of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HealthSignal {
    /// The worker works.
    Healthy,
    /// Nothing: the request was wrong, and another worker would return the same error.
    Neutral,
    /// The worker asks for no requests for this long.
    Busy(Duration),
    /// The worker failed.
    Fault,
    /// The worker did not answer within the longest expected time.
    Hung,
}

/// Consecutive faults that open the breaker: one request that no engine survives is tried on three workers, and must
/// not open the breakers of all.
const CONSECUTIVE_FAULTS: u32 = 3;
/// Faults among the last sixteen outcomes that open the breaker: a worker that fails every other request costs a retry
/// each.
const RECENT_FAULTS: u32 = 8;
/// First open time: long enough for a dead process to be found by its lease, short enough for a short disturbance.
const FIRST_OPEN: Duration = Duration::from_millis(250);
/// Longest open time: the interval of probes of a worker that keeps failing.
const MAX_OPEN: Duration = Duration::from_secs(8);
/// Openings in a row after which a worker is down: its requests failed, and so did two health checks, the second after
/// half a second more.
const DOWN_AFTER: u32 = 3;
/// Longest back-pressure that is obeyed.
const BUSY_MAX: Duration = Duration::from_mins(1);
/// Ejection until the breaker is closed: a year stands for no end.
const UNTIL_CLOSED: Duration = Duration::from_hours(24 * 365);

impl HealthSignal {
    /// Classifies an error, by the contract of [`Engine`](worker::engine::Engine).
    pub(crate) fn of(error: &Error) -> Self {
        match error {
            Error::UnknownModel(_)
            | Error::PromptTooLong { .. }
            | Error::Invalid { .. }
            | Error::DeadlineExceeded
            | Error::Unread(_) => Self::Neutral,
            Error::Overloaded { retry_after } => Self::Busy(*retry_after),
            Error::Unavailable(_) | Error::Failed(_) => Self::Fault,
            Error::Relayed(response) => match response.kind {
                ErrorKind::Request => Self::Neutral,
                ErrorKind::Busy(wait) => Self::Busy(wait),
                ErrorKind::Fault => Self::Fault,
            },
        }
    }
}

impl Health {
    /// Records the outcome of a request.
    pub(crate) fn note(&mut self, signal: HealthSignal, now: Instant) {
        match signal {
            HealthSignal::Neutral => {}
            HealthSignal::Busy(wait) => self.busy(wait, now),
            HealthSignal::Healthy => {
                self.recent <<= 1;
                (self.consecutive_faults, self.openings, self.breaker) = (0, 0, Breaker::Closed);
            }
            // An open breaker ignores the outcomes of requests that were sent before.
            HealthSignal::Fault | HealthSignal::Hung if self.breaker != Breaker::Closed => {}
            HealthSignal::Hung => self.open(now),
            HealthSignal::Fault => {
                self.recent = self.recent << 1 | 1;
                self.consecutive_faults += 1;
                if self.consecutive_faults >= CONSECUTIVE_FAULTS || self.recent.count_ones() >= RECENT_FAULTS {
                    self.open(now);
                }
            }
        }
    }

    /// Records the start of a probe.
    pub(crate) fn probe(&mut self, now: Instant) {
        self.probed = Some(now);
        if matches!(self.breaker, Breaker::Open(_)) {
            self.breaker = Breaker::HalfOpen;
        }
    }

    /// Records the result of a probe. An answer closes the breaker, but resets the open time only if the breaker has
    /// stayed closed without a fault since the answer before.
    pub(crate) fn probed(&mut self, signal: HealthSignal, now: Instant) {
        match signal {
            HealthSignal::Healthy | HealthSignal::Busy(_) => {
                if let HealthSignal::Busy(wait) = signal {
                    self.busy(wait, now);
                }
                if self.breaker != Breaker::Closed {
                    (self.consecutive_faults, self.recent, self.breaker) = (0, 0, Breaker::Closed);
                } else if self.consecutive_faults == 0 {
                    self.openings = 0;
                }
                // Else the faults stay counted: a server may answer health checks and fail every request.
            }
            // Neither opens nor closes: the next probe is due after the same open time.
            HealthSignal::Neutral if self.breaker == Breaker::HalfOpen => {
                self.breaker = Breaker::Open(now + self.open_time());
            }
            HealthSignal::Neutral => {}
            HealthSignal::Fault | HealthSignal::Hung => self.open(now),
        }
    }

    /// Whether a probe is due: the open time is over, or the breaker is closed and the last probe was before `since`.
    pub(crate) fn wants_probe(&self, since: Instant, now: Instant) -> bool {
        match self.breaker {
            Breaker::Open(until) => until <= now,
            Breaker::HalfOpen => false,
            Breaker::Closed => self.probed.is_none_or(|at| at <= since),
        }
    }

    /// Whether the breaker is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.breaker == Breaker::Closed
    }

    /// Whether the breaker is open and health checks have failed since it opened.
    pub(crate) fn is_down(&self) -> bool {
        !self.is_closed() && self.openings >= DOWN_AFTER
    }

    /// End of the ejection, as far as it is known.
    pub(crate) fn ejected_until(&self) -> Option<Instant> {
        match self.breaker {
            Breaker::Closed => self.busy_until,
            Breaker::Open(until) => Some(until + UNTIL_CLOSED),
            Breaker::HalfOpen => self.probed.map(|at| at + UNTIL_CLOSED),
        }
    }

    fn open(&mut self, now: Instant) {
        self.openings += 1;
        self.breaker = Breaker::Open(now + self.open_time());
    }

    fn open_time(&self) -> Duration {
        FIRST_OPEN.saturating_mul(1 << self.openings.saturating_sub(1).min(5)).min(MAX_OPEN)
    }

    fn busy(&mut self, wait: Duration, now: Instant) {
        let until = now + wait.min(BUSY_MAX);
        self.busy_until = Some(self.busy_until.map_or(until, |previous| previous.max(until)));
    }
}

#[cfg(test)]
mod tests;
