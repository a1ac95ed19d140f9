//! The router's waiting room in a replay: the live one's own [`AdmissionController`], on virtual time, and who is behind its numbers.

use crate::admission::{AdmissionController, Context, QueuedRequest, Resolution, Settings};
use crate::fleet::FleetSnapshot;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// The door, and who waits behind it.
pub(super) struct Door {
    limits: Settings,
    controller: AdmissionController,
    /// By number: the requests that wait.
    waiting: HashMap<u64, u32>,
}

/// What a request is told.
#[derive(Clone, Copy)]
pub(super) struct Word {
    pub(super) request: u32,
    /// Its number at the door, if it was let in.
    pub(super) permit: u64,
    pub(super) told: Resolution,
}

impl Door {
    pub(super) fn new(limits: Settings) -> Self {
        Self { limits, controller: AdmissionController::default(), waiting: HashMap::new() }
    }

    /// For how long a request may wait.
    pub(super) fn patience(&self) -> Duration {
        self.limits.max_queue_time.0
    }

    /// A request comes. One that waits is told nothing.
    pub(super) fn enter(
        &mut self,
        request: u32,
        asked: &QueuedRequest,
        roster: &FleetSnapshot,
        now: Instant,
    ) -> Vec<Word> {
        let entrance = match self.controller.admit_or_queue(Context { limits: &self.limits, roster, now }, asked) {
            Ok(entrance) => entrance,
            Err(refusal) => return vec![Word { request, permit: 0, told: Resolution::Reject(refusal) }],
        };
        self.waiting.insert(entrance.number, request);
        let goes = entrance.queue_reason.is_none().then_some((entrance.number, Resolution::Admit));
        self.words(goes.into_iter().chain(entrance.shed).collect())
    }

    /// One that was to be placed anew is back.
    pub(super) fn again(&mut self, request: u32, permit: u64, asked: QueuedRequest) {
        self.controller.requeue(&self.limits, permit, asked);
        self.waiting.insert(permit, request);
    }

    /// Something changed: what those who wait are told.
    pub(super) fn round(&mut self, roster: &FleetSnapshot, now: Instant) -> Vec<Word> {
        let told = self.controller.dispatch_ready(Context { limits: &self.limits, roster, now });
        self.words(told)
    }

    /// A request has ended, or waits no longer.
    pub(super) fn leave(&mut self, permit: u64) {
        self.controller.leave(permit);
    }

    fn words(&mut self, told: Vec<(u64, Resolution)>) -> Vec<Word> {
        let word = |(permit, told)| Some(Word { request: self.waiting.remove(&permit)?, permit, told });
        told.into_iter().filter_map(word).collect()
    }
}
