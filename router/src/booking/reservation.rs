//! A place taken on a worker, given back by dropping it.

use super::inflight::Promise;
use super::outbox::{Herald, Notice};
use crate::fleet::Member;
use crate::load::{Amount, Books};
use std::sync::Arc;
use tokio::time::Instant;

/// Load that is booked on a worker from the decision on, so that the next decision sees it.
#[must_use = "dropping a booking frees what it booked"]
pub(crate) struct Booking {
    books: Arc<Books>,
    number: u64,
    /// What the request will leave behind in the cache.
    _promise: Promise,
    /// What other routers are told.
    notice: Notice,
}

impl Booking {
    pub(crate) fn new(member: &Member, amount: Amount, promise: Promise, herald: &Arc<Herald>) -> Self {
        let notice = herald.placed(member.id(), amount, &promise);
        let books = member.books.clone();
        Self { number: books.book(amount, Instant::now()), books, _promise: promise, notice }
    }

    /// The request waits no longer, and goes out once its prompt is computed elsewhere.
    pub(crate) fn going(&self) {
        self.notice.going();
    }

    /// The request goes out now.
    pub(crate) fn sent(&self) {
        self.books.sent(self.number, Instant::now());
        self.notice.sent();
    }

    /// The prompt will be computed here after all.
    pub(crate) fn amend(&self, prefill_tokens: u64) {
        self.books.amend(self.number, prefill_tokens);
        self.notice.amended(prefill_tokens);
    }

    /// The first token is there.
    pub(crate) fn started(&self) {
        self.books.started(self.number);
        self.notice.started();
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.books.release(self.number, Instant::now());
    }
}
