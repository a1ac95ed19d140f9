//! A request at admission: what it asks for, and where it was placed.

use crate::load::Demand;
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
    /// Time of the first token by `router.slo.ttft`; `None` without one, and for a request with a deadline, which takes
    /// its place.
    pub(crate) target: Option<Instant>,
    /// Latest time in the queue.
    pub(crate) queue_deadline: Instant,
    /// Number of prompt tokens. The limits of the queue and of tenants count these.
    pub(crate) tokens: u64,
    /// Number of choices that are admitted together.
    pub(crate) choices: u32,
}

/// A request that was placed.
#[derive(Clone, Debug)]
pub(crate) struct QueuedRequest {
    pub(crate) ticket: Ticket,
    /// Latest time to be sent to an idle worker that still meets its deadline or target.
    pub(crate) start_by: Option<Instant>,
    /// It can no longer meet its target, and has no `start_by`. It reserves nothing until it is sent, because it goes
    /// after the requests that are placed later.
    pub(crate) is_late: bool,
    /// Tokens to compute and to generate. Fair shares count these.
    pub(crate) cost_tokens: u64,
    pub(crate) route: Route,
    /// Reserved on `route.decode` and on `route.prefill`.
    pub(crate) reserved: [Demand; 2],
    /// When it was placed, last time.
    pub(crate) placed: Instant,
}

/// Order among the requests of one tenant and class: requests with a `start_by` first, the earliest first; then by
/// arrival.
pub(super) type OrderKey = (bool, Option<Instant>, u64);

/// Upper limit of an estimate, however wrong it is.
const MIN_SERVICE_SECONDS_MAX: f64 = 1e6;

impl Ticket {
    /// When the first token should be there.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.deadline.or(self.target)
    }

    /// The request as placed on a route, with these reservations. `output_tokens`: expected of each choice;
    /// `min_service_seconds`: estimated time to the first token without any queueing.
    pub(crate) fn placed(
        &self,
        route: Route,
        reserved: [Demand; 2],
        output_tokens: u64,
        min_service_seconds: f64,
        now: Instant,
    ) -> QueuedRequest {
        let min_service_seconds = Duration::from_secs_f64(min_service_seconds.clamp(0.0, MIN_SERVICE_SECONDS_MAX));
        let cost_tokens = reserved.iter().map(|amount| amount.prefill_tokens).sum::<u64>();
        let start_by = self.until().map(|until| until.checked_sub(min_service_seconds).unwrap_or(now));
        let is_late = self.target.is_some() && start_by.is_some_and(|start_by| start_by <= now);
        QueuedRequest {
            ticket: self.clone(),
            start_by: start_by.filter(|_| !is_late),
            is_late,
            cost_tokens: cost_tokens + output_tokens * u64::from(self.choices),
            route,
            reserved: if is_late { [Demand::default(); 2] } else { reserved },
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
        let start_by = self.start_by.filter(|_| self.target.is_none());
        start_by.map_or(self.queue_deadline, |start_by| start_by.min(self.queue_deadline))
    }

    /// When it will be late, if it still waits.
    pub(super) fn late_from(&self) -> Option<Instant> {
        self.start_by.filter(|_| self.target.is_some())
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
