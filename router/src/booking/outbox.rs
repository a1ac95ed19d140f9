//! Changes of this router's reservations that the other routers have not been sent yet, and ends of reservations that
//! are sent again: a lost end would leave a reservation at the other routers for a minute.

use super::inflight::InflightPrefix;
use crate::load::Demand;
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
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
    /// Numbers of the reservations that ended last, in that order, and how many heartbeats still repeat it.
    ended: VecDeque<(u64, u8)>,
    has_peers: bool,
}

/// One reservation as other routers see it; dropping it tells them that it has ended.
pub(crate) struct ReplicatedReservation {
    outbox: Arc<ReplicaOutbox>,
    number: u64,
}

/// Maximum number of changes kept for the next message. When there are more, the event plane is behind; further changes
/// are dropped. The other routers learn of them from the workers' load reports, and of ends from the next heartbeats.
const CHANGES_MAX: usize = 4096;
/// Number of heartbeats that repeat an end. Another router that receives no message for three seconds removes all
/// reservations of this one, so repeats for four seconds cover shorter gaps.
const REPEATS: u8 = 4;
/// Maximum number of ends in a heartbeat, the latest ones: a thousand a second, each repeated [`REPEATS`] times, in
/// 45 kB at most. The smallest limit of a message on NATS is 64 kB.
const ENDED_MAX: usize = 4096;

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

    /// Takes all unsent changes, and adds the latest ends. An end may be in both, which has no effect on a receiver.
    pub(crate) fn take_heartbeat(&self) -> Vec<ReservationUpdate> {
        let mut pending = self.lock();
        let mut changes = std::mem::take(&mut pending.changes);
        changes.extend(pending.ended.iter().map(|(number, _)| ReservationUpdate::Released(*number)));
        pending.ended.retain_mut(|(_, left)| {
            *left -= 1;
            *left > 0
        });
        changes
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
        if let ReservationUpdate::Released(number) = change {
            if self.ended.len() == ENDED_MAX {
                self.ended.pop_front();
            }
            self.ended.push_back((number, REPEATS));
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use ReservationUpdate::Released;

    fn outbox() -> Arc<ReplicaOutbox> {
        let outbox = ReplicaOutbox::new();
        outbox.set_has_peers(true);
        outbox
    }

    fn ended(outbox: &Arc<ReplicaOutbox>, number: u64) {
        drop(ReplicatedReservation { outbox: outbox.clone(), number });
    }

    #[test]
    fn an_end_is_repeated_in_the_next_heartbeats() {
        let outbox = outbox();
        ended(&outbox, 1);
        assert_eq!(outbox.take(), [Released(1)]);
        for _ in 0..REPEATS {
            assert_eq!(outbox.take(), [], "repeated in heartbeats only");
            assert_eq!(outbox.take_heartbeat(), [Released(1)]);
        }
        assert_eq!(outbox.take_heartbeat(), []);
    }

    #[test]
    fn a_heartbeat_has_the_latest_ends_even_if_they_were_not_sent() {
        let outbox = outbox();
        let all = (CHANGES_MAX + 10) as u64;
        (0..all).for_each(|number| ended(&outbox, number));
        assert_eq!(outbox.take(), (0..CHANGES_MAX as u64).map(Released).collect::<Vec<_>>());
        let latest: Vec<_> = (all - ENDED_MAX as u64..all).map(Released).collect();
        assert_eq!(outbox.take_heartbeat(), latest);
    }
}
