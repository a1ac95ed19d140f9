//! The admission queue in a replay: the live [`AdmissionController`], in virtual time, and the requests behind its
//! numbers.

use crate::admission::{AdmissionController, Context, QueuedRequest, Resolution, Settings};
use crate::fleet::FleetSnapshot;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// An admission controller, and the requests that it queues.
pub(super) struct AdmissionDriver {
    limits: Settings,
    /// Target of the time between tokens.
    itl: Option<Duration>,
    controller: AdmissionController,
    /// Queued requests, by permit.
    waiting: HashMap<u64, u32>,
}

/// The outcome for one request.
#[derive(Clone, Copy)]
pub(super) struct AdmissionDecision {
    pub(super) request: u32,
    /// Permit of the request; 0 if it was rejected on arrival.
    pub(super) permit: u64,
    pub(super) resolution: Resolution,
}

impl AdmissionDriver {
    pub(super) fn new(limits: Settings, itl: Option<Duration>) -> Self {
        Self { limits, itl, controller: AdmissionController::default(), waiting: HashMap::new() }
    }

    /// How long a request may be queued.
    pub(super) fn max_queue_time(&self) -> Duration {
        self.limits.max_queue_time.0
    }

    /// A request arrives. Returns the decisions that follow; none for a request that is queued.
    pub(super) fn admit_or_queue(
        &mut self,
        request: u32,
        request_state: &QueuedRequest,
        fleet: &FleetSnapshot,
        now: Instant,
    ) -> Vec<AdmissionDecision> {
        let context = Context { limits: &self.limits, itl: self.itl, fleet, now };
        let admitted = match self.controller.admit_or_queue(context, request_state) {
            Ok(admitted) => admitted,
            Err(rejection) => {
                return vec![AdmissionDecision { request, permit: 0, resolution: Resolution::Reject(rejection) }];
            }
        };
        self.waiting.insert(admitted.number, request);
        let admits = admitted.queue_reason.is_none().then_some((admitted.number, Resolution::Admit));
        self.decisions(admits.into_iter().chain(admitted.shed).collect())
    }

    /// Queues a request again after it has been placed anew.
    pub(super) fn requeue(&mut self, request: u32, permit: u64, request_state: QueuedRequest) {
        self.controller.requeue(&self.limits, permit, request_state);
        self.waiting.insert(permit, request);
    }

    /// Runs the queue after a change. Returns the decisions for queued requests.
    pub(super) fn dispatch_ready(&mut self, fleet: &FleetSnapshot, now: Instant) -> Vec<AdmissionDecision> {
        let resolution = self.controller.dispatch_ready(Context { limits: &self.limits, itl: self.itl, fleet, now });
        self.decisions(resolution)
    }

    /// Returns the permit of a request that has ended.
    pub(super) fn leave(&mut self, permit: u64) {
        self.controller.leave(permit);
    }

    fn decisions(&mut self, resolution: Vec<(u64, Resolution)>) -> Vec<AdmissionDecision> {
        let decision = |(permit, resolution)| {
            Some(AdmissionDecision { request: self.waiting.remove(&permit)?, permit, resolution })
        };
        resolution.into_iter().filter_map(decision).collect()
    }
}
