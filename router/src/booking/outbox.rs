//! Changes of this router's reservations that the other routers have not been sent yet.

use super::inflight::InflightPrefix;
use crate::load::Demand;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use tokio::sync::Notify;
use worker::plane::{ReservationUpdate, WorkerId};

/// The unsent changes.
pub(crate) struct ReplicaOutbox {
    pending: Mutex<Pending>,
    changed: Notify,
}

#[derive(Default)]
struct Pending {
    last: u64,
    changes: Vec<ReservationUpdate>,
    has_peers: bool,
}

/// One reservation as other routers see it; dropping it tells them that it has ended.
pub(crate) struct ReplicatedReservation {
    outbox: Arc<ReplicaOutbox>,
    number: u64,
}

/// Maximum number of changes kept for the next message. When there are more, the event plane is behind; further changes
/// are dropped, and the other routers learn of them from the workers' load reports.
const CHANGES_MAX: usize = 4096;

/// The message to other routers about a new reservation.
pub(crate) fn placed(number: u64, worker: WorkerId, amount: Demand, prefix: &InflightPrefix) -> ReservationUpdate {
    let Demand { prefill_tokens, blocks, sequences, context_tokens, .. } = amount;
    let (decodes, anchors) = (sequences > 0, prefix.anchors().to_vec());
    ReservationUpdate::Placed { number, worker, prefill_tokens, blocks, decodes, context_tokens, anchors }
}

impl ReplicaOutbox {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { pending: Mutex::default(), changed: Notify::new() })
    }

    /// Adds a new reservation.
    pub(crate) fn placed(
        self: &Arc<Self>,
        worker: WorkerId,
        amount: Demand,
        prefix: &InflightPrefix,
    ) -> ReplicatedReservation {
        let mut pending = self.lock();
        pending.last += 1;
        let number = pending.last;
        // The anchors are copied only if there are peers.
        if pending.has_peers {
            pending.send(placed(number, worker, amount, prefix));
            self.changed.notify_one();
        }
        ReplicatedReservation { outbox: self.clone(), number }
    }

    /// Waits for unsent changes.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Takes all unsent changes.
    pub(crate) fn take(&self) -> Vec<ReservationUpdate> {
        std::mem::take(&mut self.lock().changes)
    }

    /// Sets whether there are other routers. Without peers no changes are kept.
    pub(crate) fn set_has_peers(&self, has_peers: bool) {
        self.lock().has_peers = has_peers;
    }

    fn send(&self, change: ReservationUpdate) {
        let mut pending = self.lock();
        if pending.has_peers {
            pending.send(change);
            self.changed.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        // No code under this lock panics.
        self.pending.lock()
    }
}

impl Pending {
    fn send(&mut self, change: ReservationUpdate) {
        if self.changes.len() < CHANGES_MAX {
            self.changes.push(change);
        }
    }
}

impl ReplicatedReservation {
    pub(crate) fn dequeued(&self) {
        self.outbox.send(ReservationUpdate::Dequeued(self.number));
    }

    pub(crate) fn sent(&self) {
        self.outbox.send(ReservationUpdate::Sent(self.number));
    }

    pub(crate) fn revised(&self, prefill_tokens: u64) {
        self.outbox.send(ReservationUpdate::Revised { number: self.number, prefill_tokens });
    }

    pub(crate) fn started(&self) {
        self.outbox.send(ReservationUpdate::Started(self.number));
    }
}

impl Drop for ReplicatedReservation {
    fn drop(&mut self) {
        self.outbox.send(ReservationUpdate::Released(self.number));
    }
}
