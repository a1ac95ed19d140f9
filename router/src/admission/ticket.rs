//! What a request brings to the door, and what it takes of the workers on which it was placed.

use crate::load::Amount;
use crate::policy::OUTPUT_TOKENS;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::Priority;
use worker::plane::WorkerId;

/// The workers that a request waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Lane {
    pub(crate) decode: WorkerId,
    /// When its prompt is computed elsewhere.
    pub(crate) prefill: Option<WorkerId>,
}

/// What a request brings to the door, wherever it is placed.
#[derive(Clone, Debug)]
pub(crate) struct Bid {
    pub(crate) model: Arc<str>,
    pub(crate) tenant: Arc<str>,
    pub(crate) priority: Priority,
    /// When its first token is too late.
    pub(crate) deadline: Option<Instant>,
    /// When it has waited for long enough.
    pub(crate) tired: Instant,
    /// Of the prompt: what bounds count.
    pub(crate) tokens: u64,
    /// Output tokens of an answer at most, if it says.
    pub(crate) max_tokens: Option<u32>,
    /// Answers that are to come.
    pub(crate) answers: u32,
}

/// A request at the door, with what it brings.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) bid: Bid,
    /// When it must start to meet its deadline.
    pub(crate) latest: Option<Instant>,
    /// Tokens to be computed and generated: what fairness counts.
    pub(crate) charge: u64,
    pub(crate) lane: Lane,
    /// Booked on the lane's `decode` and `prefill`.
    pub(crate) held: [Amount; 2],
    /// When it was placed.
    pub(crate) placed: Instant,
}

/// Those without a deadline come last, then counts who came first.
pub(super) type Turn = (bool, Option<Instant>, u64);

/// However wrong an estimate.
const TAKES_MAX: f64 = 1e6;

impl Bid {
    /// It was placed on this lane, with so much booked there, where its first token takes so many seconds that no queue can spare.
    pub(crate) fn placed(&self, lane: Lane, held: [Amount; 2], takes: f64, now: Instant) -> Asked {
        let takes = Duration::from_secs_f64(takes.clamp(0.0, TAKES_MAX));
        let output = self.max_tokens.map_or(OUTPUT_TOKENS, |most| OUTPUT_TOKENS.min(most.into()));
        Asked {
            bid: self.clone(),
            latest: self.deadline.map(|deadline| deadline.checked_sub(takes).unwrap_or(deadline)),
            charge: held.iter().map(|held| held.prefill_tokens).sum::<u64>() + output * u64::from(self.answers),
            lane,
            held,
            placed: now,
        }
    }
}

impl Deref for Asked {
    type Target = Bid;

    fn deref(&self) -> &Bid {
        &self.bid
    }
}

impl Asked {
    /// When it waits no longer.
    pub(super) fn end(&self) -> Instant {
        self.latest.map_or(self.tired, |latest| latest.min(self.tired))
    }

    /// Whose turn it is.
    pub(super) fn turn(&self, number: u64) -> Turn {
        (self.latest.is_none(), self.latest, number)
    }

    /// What is booked where.
    pub(super) fn parts(&self) -> impl Iterator<Item = (WorkerId, Amount)> + use<> {
        let [decode, prefill] = self.held;
        [(self.lane.decode, decode)].into_iter().chain(self.lane.prefill.map(|worker| (worker, prefill)))
    }
}
