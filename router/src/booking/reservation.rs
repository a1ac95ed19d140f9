//! The reservation of a worker's capacity, a guard.

use super::inflight::InflightPrefix;
use super::outbox::{ReplicaOutbox, ReplicatedReservation};
use crate::fleet::Worker;
use crate::load::{Demand, ExpectedOutput, WorkerLoad};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::time::Instant;

/// Load of a request that counts on a worker from the decision on, so that the next decision sees it.
#[must_use = "dropping a booking frees what it booked"]
pub(crate) struct Booking {
    load: Arc<WorkerLoad>,
    number: u64,
    amount: Demand,
    /// Output tokens generated so far.
    generated: AtomicU64,
    /// The prefix that the request will leave in the worker's cache.
    _prefix: InflightPrefix,
    /// The same reservation in other routers.
    replicated: ReplicatedReservation,
}

impl Booking {
    pub(crate) fn new(
        member: &Worker,
        amount: Demand,
        cached_tokens: Option<u64>,
        output: ExpectedOutput,
        prefix: InflightPrefix,
        outbox: &Arc<ReplicaOutbox>,
        now: Instant,
    ) -> Self {
        let replicated = outbox.placed(member.id(), amount, &prefix);
        let load = member.load.clone();
        let (number, generated) = (load.book(amount, cached_tokens, output, now), AtomicU64::default());
        Self { load, number, amount, generated, _prefix: prefix, replicated }
    }

    /// The request waits behind all that are placed later: it reserves nothing until [`Self::resume`].
    pub(crate) fn suspend(&self) {
        self.load.rebook(self.number, Demand::default());
        self.replicated.revised(0);
    }

    /// The request will be sent: it reserves again what it was booked with.
    pub(crate) fn resume(&self) {
        if self.load.rebook(self.number, self.amount) {
            self.replicated.revised(self.amount.prefill_tokens);
        }
    }

    /// The request has left the admission queue. It is sent once its prompt is computed elsewhere.
    pub(crate) fn dequeued(&self) {
        self.replicated.dequeued();
    }

    /// The request is sent now.
    pub(crate) fn sent(&self, now: Instant) {
        self.load.sent(self.number, now);
        self.replicated.sent();
    }

    /// The worker itself will compute this many tokens of the prompt, because the remote prefill has failed.
    pub(crate) fn revise(&self, prefill_tokens: u64) {
        self.load.revise(self.number, prefill_tokens);
        self.replicated.revised(prefill_tokens);
    }

    /// The first output has arrived.
    pub(crate) fn started(&self, now: Instant) {
        self.load.started(self.number, now);
        self.replicated.started();
    }

    /// Output tokens have arrived.
    pub(crate) fn add_output(&self, tokens: usize) {
        self.generated.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// Output tokens so far.
    pub(crate) fn output_tokens(&self) -> u64 {
        self.generated.load(Ordering::Relaxed)
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.load.release(self.number, self.output_tokens(), Instant::now());
    }
}
