//! A request at admission: what it asks for, and where it was placed.

use crate::load::Demand;
use crate::policy::OUTPUT_TOKENS;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::Priority;
use worker::plane::WorkerId;

/// The workers that a request was placed on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Route {
    pub(crate) decode: WorkerId,
    /// The prefill worker, if another than `decode` computes the prompt.
    pub(crate) prefill: Option<WorkerId>,
}

/// A request at admission: what it asks for, and where it was placed.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub(crate) model: Arc<str>,
    pub(crate) tenant: Arc<str>,
    pub(crate) priority: Priority,
    /// Latest time of the first token.
    pub(crate) deadline: Option<Instant>,
    /// Latest time in the queue.
    pub(crate) queue_deadline: Instant,
    /// Number of prompt tokens. The limits of the queue and of tenants count these.
    pub(crate) tokens: u64,
    /// Maximum number of output tokens per choice, if the request sets one.
    pub(crate) max_tokens: Option<u32>,
    /// Number of choices that are admitted together.
    pub(crate) choices: u32,
}

/// A request that was placed.
#[derive(Clone, Debug)]
pub(crate) struct QueuedRequest {
    pub(crate) ticket: Ticket,
    /// Latest time to be sent that still meets its deadline.
    pub(crate) start_by: Option<Instant>,
    /// Tokens to compute and to generate. Fair shares count these.
    pub(crate) cost_tokens: u64,
    pub(crate) route: Route,
    /// Reserved on `route.decode` and on `route.prefill`.
    pub(crate) reserved: [Demand; 2],
    /// When it was placed, last time.
    pub(crate) placed: Instant,
}

/// Order among the requests of one tenant and class: requests with a deadline first, the earliest `start_by` first;
/// then by arrival.
pub(super) type OrderKey = (bool, Option<Instant>, u64);

/// Upper limit of an estimate, however wrong it is.
const MIN_SERVICE_SECONDS_MAX: f64 = 1e6;

impl Ticket {
    /// The request as placed on a route, with these reservations. `min_service_seconds`: estimated time to the first
    /// token without any queueing.
    pub(crate) fn placed(
        &self,
        route: Route,
        reserved: [Demand; 2],
        min_service_seconds: f64,
        now: Instant,
    ) -> QueuedRequest {
        let min_service_seconds = Duration::from_secs_f64(min_service_seconds.clamp(0.0, MIN_SERVICE_SECONDS_MAX));
        let output = self.max_tokens.map_or(OUTPUT_TOKENS, |most| OUTPUT_TOKENS.min(most.into()));
        QueuedRequest {
            ticket: self.clone(),
            start_by: self.deadline.map(|deadline| deadline.checked_sub(min_service_seconds).unwrap_or(deadline)),
            cost_tokens: reserved.iter().map(|amount| amount.prefill_tokens).sum::<u64>()
                + output * u64::from(self.choices),
            route,
            reserved,
            placed: now,
        }
    }
}

impl Deref for QueuedRequest {
    type Target = Ticket;

    fn deref(&self) -> &Ticket {
        &self.ticket
    }
}

impl QueuedRequest {
    /// When it is rejected if it still waits.
    pub(super) fn expires_at(&self) -> Instant {
        self.start_by.map_or(self.queue_deadline, |start_by| start_by.min(self.queue_deadline))
    }

    /// Its position among the requests of its tenant and class.
    pub(super) fn order_key(&self, number: u64) -> OrderKey {
        (self.start_by.is_none(), self.start_by, number)
    }

    /// Its reservations by worker.
    pub(super) fn parts(&self) -> impl Iterator<Item = (WorkerId, Demand)> + use<> {
        let [decode, prefill] = self.reserved;
        [(self.route.decode, decode)].into_iter().chain(self.route.prefill.map(|worker| (worker, prefill)))
    }
}
