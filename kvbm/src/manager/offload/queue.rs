//! The queue between the callers that offload to one tier and its worker.

use super::batching::Batcher;
use super::fair_queue::{FairQueue, OffloadRequest};
use crate::tier::Quotas;
use parking_lot::Mutex;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, timeout_at};

/// Queued requests, and flushes that wait for them.
pub(super) struct Queue {
    state: Mutex<State>,
    /// Notified when there is more to take. Only the worker waits for it.
    changed: Notify,
}

struct State {
    fair: FairQueue,
    /// Flushes that wait until all requests below a number are done, in order.
    flushes: Vec<(u64, FlushMark)>,
    /// The worker has ended.
    closed: bool,
}

/// Dropped when the requests that a flush waits for are done.
type FlushMark = mpsc::Sender<Infallible>;

/// The requests that a worker handles together.
pub(super) struct Batch {
    pub(super) requests: Vec<OffloadRequest>,
    _flushes: Vec<FlushMark>,
}

/// Closes a queue when it is dropped.
pub(super) struct CloseOnDrop(Arc<Queue>);

impl Queue {
    /// A queue of at most `capacity` requests.
    pub(super) fn new(capacity: usize) -> Self {
        let state = State { fair: FairQueue::new(capacity), flushes: Vec::new(), closed: false };
        Self { state: Mutex::new(state), changed: Notify::new() }
    }

    /// Queues requests, and returns how many were dropped.
    pub(super) fn push(&self, requests: &[OffloadRequest]) -> usize {
        let mut state = self.state.lock();
        if state.closed {
            return requests.len();
        }
        let dropped = state.fair.push(requests);
        drop(state);
        self.changed.notify_one();
        dropped
    }

    pub(super) fn set_weights(&self, quotas: &Quotas) {
        self.state.lock().fair.set_weights(quotas);
    }

    /// Resolves when everything queued now is stored or dropped, or the queue is closed.
    pub(super) async fn flush(&self) {
        let (mark, mut done) = mpsc::channel(1);
        {
            let mut state = self.state.lock();
            if state.closed {
                return;
            }
            let number = state.fair.next_number();
            state.flushes.push((number, mark));
        }
        self.changed.notify_one();
        done.recv().await;
    }

    /// Waits for requests, then for the batch to fill.
    pub(super) async fn next(&self, size: usize, batcher: &mut Batcher) -> Batch {
        while self.state.lock().is_idle() {
            self.changed.notified().await;
        }
        let first = Instant::now();
        batcher.begin(first);
        loop {
            let (waiting, is_flushing) = self.state.lock().status();
            let until = batcher.until(first, waiting);
            // A flush does not wait for a batch to fill.
            if waiting >= size || is_flushing || until == first {
                break;
            }
            if timeout_at(until, self.changed.notified()).await.is_err() {
                break;
            }
        }
        let batch = self.state.lock().take(size);
        batcher.end(Instant::now(), batch.requests.len());
        batch
    }

    /// The guard that a worker holds while it runs.
    pub(super) fn close_on_drop(self: &Arc<Self>) -> CloseOnDrop {
        CloseOnDrop(self.clone())
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.status() == (0, false)
    }

    /// Number of queued requests, and whether a flush waits.
    fn status(&self) -> (usize, bool) {
        (self.fair.len(), !self.flushes.is_empty())
    }

    fn take(&mut self, size: usize) -> Batch {
        let requests = self.fair.take(size);
        let mut flushes = Vec::new();
        if !self.flushes.is_empty() {
            let oldest = self.fair.oldest().unwrap_or(u64::MAX);
            let done = self.flushes.partition_point(|(number, _)| *number <= oldest);
            flushes.extend(self.flushes.drain(..done).map(|(_, mark)| mark));
        }
        Batch { requests, _flushes: flushes }
    }
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.closed = true;
        state.flushes.clear();
    }
}
