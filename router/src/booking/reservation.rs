//! The reservation of a worker's capacity, a guard.

use super::inflight::InflightPrefix;
use super::outbox::{ReplicaOutbox, ReplicatedReservation};
use crate::fleet::Member;
use crate::load::{Amount, Books};
use std::sync::Arc;
use tokio::time::Instant;

/// Load of a request that counts on a worker from the decision on, so that the next decision sees it.
#[must_use = "dropping a booking frees what it booked"]
pub(crate) struct Booking {
    books: Arc<Books>,
    number: u64,
    /// The prefix that the request will leave in the worker's cache.
    _prefix: InflightPrefix,
    /// The same reservation in other routers.
    replicated: ReplicatedReservation,
}

impl Booking {
    pub(crate) fn new(member: &Member, amount: Amount, prefix: InflightPrefix, outbox: &Arc<ReplicaOutbox>) -> Self {
        let replicated = outbox.placed(member.id(), amount, &prefix);
        let books = member.books.clone();
        Self { number: books.book(amount, Instant::now()), books, _prefix: prefix, replicated }
    }

    /// The request has left the admission queue. It is sent once its prompt is computed elsewhere.
    pub(crate) fn dequeued(&self) {
        self.replicated.dequeued();
    }

    /// The request is sent now.
    pub(crate) fn sent(&self) {
        self.books.sent(self.number, Instant::now());
        self.replicated.sent();
    }

    /// The worker will compute this much of the prompt after all.
    pub(crate) fn revise(&self, prefill_tokens: u64) {
        self.books.amend(self.number, prefill_tokens);
        self.replicated.revised(prefill_tokens);
    }

    /// The first output has arrived.
    pub(crate) fn started(&self) {
        self.books.started(self.number);
        self.replicated.started();
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.books.release(self.number, Instant::now());
    }
}
