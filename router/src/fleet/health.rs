//! A worker's standing with those who send to it: a breaker, and the back-pressure that it asked for. Pure: the time is
//! passed in.
//!
//! ```text
//!          three faults in a row, half of the last sixteen, or hung
//!   Closed ──────────────────────────────────────────────────────▶ Open ◀── no answer: rests longer ──┐
//!     ▲ ▲                                                           │ has rested: a probe goes out    │
//!     │ └───────────────── an output ───────────────────────────────┤                                 │
//!     └────────── the probe is answered, or an output ─────────── HalfOpen ───────────────────────────┘
//! ```
//! What a client did wrong says nothing about a worker: it neither opens nor closes. Back-pressure is obeyed, and is no
//! fault. An open breaker steers; it never refuses the last worker.

use std::time::Duration;
use tokio::time::Instant;
use worker::engine::Error;

/// A worker's standing.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Health {
    breaker: Breaker,
    /// Faults since the last output.
    in_a_row: u32,
    /// The last outcomes, the newest in the lowest bit; 1 is a fault.
    recent: u16,
    /// Openings since the last output: each rests longer.
    openings: u32,
    /// It has too much to do until then.
    busy_until: Option<Instant>,
    /// When a probe last went out.
    probed: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Breaker {
    #[default]
    Closed,
    /// It rests until then.
    Open(Instant),
    /// A probe is out.
    HalfOpen,
}

/// What an outcome says about a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// It works.
    Well,
    /// Nothing: the request was wrong. Another worker would say the same.
    Neutral,
    /// It has too much to do for so long.
    Busy(Duration),
    /// It is not well.
    Fault,
    /// Nothing came of it for longer than anybody could expect.
    Hung,
}

/// Faults in a row that open: one request that no engine survives is tried on three workers, and must not take all of them.
const IN_A_ROW: u32 = 3;
/// Of the last sixteen outcomes, faults that open: a worker that serves every other request costs the others a retry each.
const OF_SIXTEEN: u32 = 8;
/// After the first opening: long enough for a process to be found dead by its lease, short enough for a hiccup.
const FIRST: Duration = Duration::from_millis(250);
/// A worker that keeps failing is asked this often whether it still does.
const LONGEST: Duration = Duration::from_secs(8);
/// Nobody promises for longer.
const BUSY_MAX: Duration = Duration::from_mins(1);
/// Until somebody closes it.
const OPEN_END: Duration = Duration::from_hours(24 * 365);

impl Verdict {
    /// Reads an error, as the contract of [`Engine`](worker::engine::Engine) has it.
    pub(crate) fn of(error: &Error) -> Self {
        match error {
            Error::UnknownModel(_)
            | Error::PromptTooLong { .. }
            | Error::Invalid { .. }
            | Error::DeadlineExceeded
            | Error::Unread(_) => Self::Neutral,
            Error::Overloaded { retry_after } => Self::Busy(*retry_after),
            Error::Unavailable(_) | Error::Failed(_) => Self::Fault,
        }
    }
}

impl Health {
    /// Notes how a request went.
    pub(crate) fn note(&mut self, verdict: Verdict, now: Instant) {
        match verdict {
            Verdict::Neutral => {}
            Verdict::Busy(wait) => self.busy(wait, now),
            Verdict::Well => {
                self.recent <<= 1;
                (self.in_a_row, self.openings, self.breaker) = (0, 0, Breaker::Closed);
            }
            // Who is left alone already is not judged again by what was sent to it before.
            Verdict::Fault | Verdict::Hung if self.breaker != Breaker::Closed => {}
            Verdict::Hung => self.open(now),
            Verdict::Fault => {
                self.recent = self.recent << 1 | 1;
                self.in_a_row += 1;
                if self.in_a_row >= IN_A_ROW || self.recent.count_ones() >= OF_SIXTEEN {
                    self.open(now);
                }
            }
        }
    }

    /// Notes that a probe went out.
    pub(crate) fn probe(&mut self, now: Instant) {
        self.probed = Some(now);
        if matches!(self.breaker, Breaker::Open(_)) {
            self.breaker = Breaker::HalfOpen;
        }
    }

    /// Notes what came of a probe. An answer closes, though only an output of a request makes forget what was.
    pub(crate) fn probed(&mut self, verdict: Verdict, now: Instant) {
        match verdict {
            Verdict::Well | Verdict::Busy(_) => {
                if let Verdict::Busy(wait) = verdict {
                    self.busy(wait, now);
                }
                (self.in_a_row, self.recent, self.breaker) = (0, 0, Breaker::Closed);
            }
            // It neither opens nor closes: the next probe is due when this one's rest has passed.
            Verdict::Neutral if self.breaker == Breaker::HalfOpen => self.breaker = Breaker::Open(now + self.rest()),
            Verdict::Neutral => {}
            Verdict::Fault | Verdict::Hung => self.open(now),
        }
    }

    /// Whether a probe is due: it has rested, or it is closed and was last probed before `since`.
    pub(crate) fn wants_probe(&self, since: Instant, now: Instant) -> bool {
        match self.breaker {
            Breaker::Open(until) => until <= now,
            Breaker::HalfOpen => false,
            Breaker::Closed => self.probed.is_none_or(|at| at <= since),
        }
    }

    /// Whether its breaker is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.breaker == Breaker::Closed
    }

    /// Until when it is better left alone, as far as is known.
    pub(crate) fn rests_until(&self) -> Option<Instant> {
        match self.breaker {
            Breaker::Closed => self.busy_until,
            Breaker::Open(until) => Some(until + OPEN_END),
            Breaker::HalfOpen => self.probed.map(|at| at + OPEN_END),
        }
    }

    fn open(&mut self, now: Instant) {
        self.openings += 1;
        self.breaker = Breaker::Open(now + self.rest());
    }

    fn rest(&self) -> Duration {
        FIRST.saturating_mul(1 << self.openings.saturating_sub(1).min(5)).min(LONGEST)
    }

    fn busy(&mut self, wait: Duration, now: Instant) {
        let until = now + wait.min(BUSY_MAX);
        self.busy_until = Some(self.busy_until.map_or(until, |before| before.max(until)));
    }
}

#[cfg(test)]
mod tests;
