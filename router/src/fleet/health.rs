//! Health of a worker: a circuit breaker, and the back-pressure that the worker asked for. Pure: the time is passed in.
//!
//! ```text
//!          three consecutive faults, half of the last sixteen, or a hang
//!   Closed ──────────────────────────────────────────────────────▶ Open ◀── no answer: open longer ───┐
//!     ▲ ▲                                                           │ open time over: a probe is sent │
//!     │ └───────────────── an output ───────────────────────────────┤                                 │
//!     └────────── the probe is answered, or an output ─────────── HalfOpen ───────────────────────────┘
//! ```
//! A health check that computes nothing does not show that requests are served. Where requests have opened the breaker,
//! it leads to a trial, and the first request decides:
//!
//! ```text
//!   HalfOpen ── the check is answered ──▶ AwaitsTrial ── wait over: a request is sent ──▶ InTrial
//!                                            │   ▲                                          │ │
//!   Closed ◀─── five minutes of good checks ─┘   └────────── it fails: wait longer ─────────┘ │
//!     ▲                                                                                       │
//!     └──────────────────────────────────── an output ────────────────────────────────────────┘
//! ```
//! A health check that fails opens the breaker in each state. The next good one then closes it: the server could not be
//! reached, and that is why its requests failed.
//!
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
    /// Openings by requests and failed trials since the last output, or since health checks were good for
    /// [`REPAIRED_AFTER`]; each doubles the time before a trial.
    request_openings: u32,
    /// Requests have opened the breaker, and a request may be tried from then on.
    trial_from: Option<Instant>,
    /// First of the good health checks since the last fault of a request or a check.
    good_checks_since: Option<Instant>,
    /// Start of the last health check, if it has failed and no request has had a first output since.
    failed_check: Option<Instant>,
    /// End of the back-pressure that the worker asked for.
    busy_until: Option<Instant>,
    /// Start of the last probe.
    last_probe: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Breaker {
    #[default]
    Closed,
    /// A probe is due then.
    Open(Instant),
    /// A probe is running.
    HalfOpen,
    /// The health check is good, and no request has been tried yet.
    AwaitsTrial,
    /// A request is tried.
    InTrial,
}

/// What a good health check shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Check {
    /// The worker has computed a token.
    Computes,
    /// The server answers, and may fail every request.
    Answers,
}

/// What an outcome says about the health of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HealthSignal {
    /// The worker works.
    Healthy,
    /// Nothing: the request was wrong, or this process can open no connection, and another worker would return the same
    /// error.
    Neutral,
    /// The worker asks for no requests for this long.
    Busy(Duration),
    /// The worker failed.
    Fault,
    /// The worker did not answer within the longest expected time, or answers nothing.
    TimedOut,
}

/// Consecutive faults that open the breaker: one request that no engine survives is tried on three workers, and must
/// not open the breakers of all.
const CONSECUTIVE_FAULTS: u32 = 3;
/// Faults among the last sixteen outcomes that open the breaker: a worker that fails every other request costs a retry
/// each.
pub(super) const RECENT_FAULTS: u32 = 8;
/// First open time: long enough for a dead process to be found by its lease, short enough for a short disturbance.
const FIRST_OPEN: Duration = Duration::from_millis(250);
/// Longest open time: the interval of probes of a worker that keeps failing.
const MAX_OPEN: Duration = Duration::from_secs(8);
/// Longest time before another request is tried on a server that answers health checks and fails requests. Each trial
/// costs a client a retry.
const MAX_TRIAL_WAIT: Duration = Duration::from_mins(1);
/// Openings that a failed trial counts as. The check before it was good, so that only requests show the fault: the time
/// grows fast enough to be longer than the interval of rare requests.
const FAILED_TRIAL: u32 = 2;
/// A trial without an outcome, as of a client that disconnects, keeps other requests away for this long. Longer than
/// most first outputs take.
const TRIAL_TIME: Duration = Duration::from_secs(30);
/// Good health checks for this long without a fault count as an output: a server that was repaired and gets no requests
/// is not listed for ever.
pub(super) const REPAIRED_AFTER: Duration = Duration::from_mins(5);
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
            | Error::Unread(_)
            | Error::OutOfFiles => Self::Neutral,
            Error::Overloaded { retry_after } => Self::Busy(*retry_after),
            Error::Unavailable(_) | Error::NoAnswer(_) | Error::Failed(_) => Self::Fault,
            Error::Unresponsive(_) => Self::TimedOut,
            Error::Relayed(response) => match response.kind {
                ErrorKind::Request => Self::Neutral,
                ErrorKind::Busy(wait) => Self::Busy(wait),
                ErrorKind::Fault => Self::Fault,
            },
        }
    }

    /// Whether the worker failed or did not answer.
    pub(crate) fn is_failure(self) -> bool {
        matches!(self, Self::Fault | Self::TimedOut)
    }
}

impl Health {
    /// Records the outcome of a request.
    pub(crate) fn record_outcome(&mut self, signal: HealthSignal, now: Instant) {
        match signal {
            HealthSignal::Neutral => self.trial_undecided(now),
            HealthSignal::Busy(wait) => {
                self.trial_undecided(now);
                self.busy(wait, now);
            }
            HealthSignal::Healthy => {
                self.recent <<= 1;
                (self.consecutive_faults, self.openings, self.breaker) = (0, 0, Breaker::Closed);
                (self.request_openings, self.trial_from, self.failed_check) = (0, None, None);
            }
            HealthSignal::Fault | HealthSignal::TimedOut => {
                self.good_checks_since = None;
                self.request_failed(signal, now);
            }
        }
    }

    fn request_failed(&mut self, signal: HealthSignal, now: Instant) {
        match self.breaker {
            Breaker::Closed => {
                if signal == HealthSignal::Fault {
                    self.recent = self.recent << 1 | 1;
                    self.consecutive_faults += 1;
                    if self.consecutive_faults < CONSECUTIVE_FAULTS && self.recent.count_ones() < RECENT_FAULTS {
                        return;
                    }
                }
                self.wait_for_trial(1, now);
                self.open(now);
            }
            Breaker::InTrial => {
                self.wait_for_trial(FAILED_TRIAL, now);
                self.breaker = Breaker::AwaitsTrial;
            }
            // These ignore the outcomes of requests that were sent before.
            Breaker::Open(_) | Breaker::HalfOpen | Breaker::AwaitsTrial => {}
        }
    }

    /// Records that a request is sent: it is the trial, if one is due.
    pub(crate) fn request_sent(&mut self, now: Instant) {
        let is_trial = matches!(self.breaker, Breaker::AwaitsTrial | Breaker::InTrial);
        if is_trial && self.trial_from.is_none_or(|from| from <= now) {
            (self.breaker, self.trial_from) = (Breaker::InTrial, Some(now + TRIAL_TIME));
        }
    }

    /// Records the start of a probe.
    pub(crate) fn probe_started(&mut self, now: Instant) {
        self.last_probe = Some(now);
        if matches!(self.breaker, Breaker::Open(_)) {
            self.breaker = Breaker::HalfOpen;
        }
    }

    /// Records the result of a probe. An answer closes the breaker, or leads to a trial if requests have opened it and
    /// the check computes nothing. It resets the open time only if the breaker has stayed closed since the answer
    /// before, of a check that computes without a fault.
    pub(crate) fn probe_ended(&mut self, check: Check, signal: HealthSignal, now: Instant) {
        match signal {
            HealthSignal::Healthy => self.check_passed(check, now),
            HealthSignal::Busy(wait) => {
                self.busy(wait, now);
                self.check_passed(check, now);
            }
            // Neither opens nor closes: the next probe is due after the same open time.
            HealthSignal::Neutral if self.breaker == Breaker::HalfOpen => {
                self.breaker = Breaker::Open(now + self.open_time());
            }
            HealthSignal::Neutral => {}
            HealthSignal::Fault | HealthSignal::TimedOut => {
                (self.trial_from, self.good_checks_since) = (None, None);
                self.failed_check = self.last_probe.or(Some(now));
                self.open(now);
            }
        }
    }

    fn check_passed(&mut self, check: Check, now: Instant) {
        self.failed_check = None;
        let good_for = now.saturating_duration_since(*self.good_checks_since.get_or_insert(now));
        if check == Check::Computes || good_for >= REPAIRED_AFTER {
            (self.request_openings, self.trial_from) = (0, None);
        }
        match self.breaker {
            // Else the faults stay counted: a worker may answer health checks and fail every request.
            Breaker::Closed => {
                if check == Check::Answers || self.consecutive_faults == 0 {
                    self.openings = 0;
                }
            }
            Breaker::InTrial if self.trial_from.is_some() => {}
            Breaker::Open(_) | Breaker::HalfOpen | Breaker::AwaitsTrial if self.trial_from.is_some() => {
                (self.consecutive_faults, self.recent, self.openings) = (0, 0, 0);
                self.breaker = Breaker::AwaitsTrial;
            }
            Breaker::Open(_) | Breaker::HalfOpen | Breaker::AwaitsTrial | Breaker::InTrial => {
                // If requests had failed before the server became unreachable, the next fault opens the breaker again.
                let faults = if self.request_openings > 0 { CONSECUTIVE_FAULTS - 1 } else { 0 };
                (self.consecutive_faults, self.recent, self.breaker) = (faults, 0, Breaker::Closed);
            }
        }
    }

    /// Whether a probe is due: the open time is over, or the breaker is not open and the last probe was before `since`.
    pub(crate) fn wants_probe(&self, since: Instant, now: Instant) -> bool {
        match self.breaker {
            Breaker::Open(until) => until <= now,
            Breaker::HalfOpen => false,
            Breaker::Closed | Breaker::AwaitsTrial | Breaker::InTrial => self.last_probe.is_none_or(|at| at <= since),
        }
    }

    /// When the next probe is due, if one was sent before and none is running. `interval`: between two probes while the
    /// breaker is not open.
    pub(crate) fn probe_due(&self, interval: Duration) -> Option<Instant> {
        match self.breaker {
            Breaker::Open(until) => Some(until),
            Breaker::HalfOpen => None,
            Breaker::Closed | Breaker::AwaitsTrial | Breaker::InTrial => self.last_probe.map(|at| at + interval),
        }
    }

    /// Whether the breaker is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.breaker == Breaker::Closed
    }

    /// Whether the breaker is open, so that its next health check decides.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.breaker, Breaker::Open(_) | Breaker::HalfOpen)
    }

    /// Start of the last health check, if it has failed and no request has had a first output since.
    pub(crate) fn failed_check(&self) -> Option<Instant> {
        self.failed_check
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
            Breaker::HalfOpen => self.last_probe.map(|at| at + UNTIL_CLOSED),
            Breaker::AwaitsTrial | Breaker::InTrial => self.trial_from.max(self.busy_until),
        }
    }

    fn open(&mut self, now: Instant) {
        self.openings += 1;
        self.breaker = Breaker::Open(now + self.open_time());
    }

    fn open_time(&self) -> Duration {
        FIRST_OPEN.saturating_mul(1 << self.openings.saturating_sub(1).min(5)).min(MAX_OPEN)
    }

    /// Lets no request be tried until the time is over that this failure extends.
    fn wait_for_trial(&mut self, openings: u32, now: Instant) {
        self.request_openings = self.request_openings.saturating_add(openings);
        let wait = FIRST_OPEN.saturating_mul(1 << self.request_openings.saturating_sub(1).min(8));
        self.trial_from = Some(now + wait.min(MAX_TRIAL_WAIT));
    }

    /// The request in trial says nothing of the server: another one may be tried at once.
    fn trial_undecided(&mut self, now: Instant) {
        if self.breaker == Breaker::InTrial {
            (self.breaker, self.trial_from) = (Breaker::AwaitsTrial, Some(now));
        }
    }

    fn busy(&mut self, wait: Duration, now: Instant) {
        let until = now + wait.min(BUSY_MAX);
        self.busy_until = Some(self.busy_until.map_or(until, |previous| previous.max(until)));
    }
}

#[cfg(test)]
mod tests;
