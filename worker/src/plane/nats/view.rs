//! The instances that a follower of the bucket knows, and when one of them counts as gone. Pure, except that it calls
//! the connector.
//!
//! ```text
//!                  record                          deletion, or expiry while messages come
//!    (unknown) ────────────▶ present ───────────────────────────────────────────────────────▶ left
//!                              ▲  │ expiry after a silence of NATS                              ▲
//!                       record │  ▼                                          end of the grace    │
//!                            expired ───────────────────────────────────────────────────────────┘
//! ```
//!
//! The server judges expiry by its own clock. After an outage of NATS, or while a cluster had no leader, every lease
//! has expired although the workers live: they could not renew. So an expiry counts at once only while messages of the
//! bucket keep arriving. After a silence of half a lease, and after a new connection, expired instances have a grace of
//! one lease to renew. A fleet whose only worker dies is silent too: its end is noticed after two leases.
//!
//! A record that cannot be used says nothing about the worker in whose place it stands: something else has written it,
//! and the worker writes its own again with its next renewal. It may have no expiry, so the view ends the lease itself,
//! one lease after the first record that could not be used.

use super::{Address, Connector};
use crate::engine::Engine;
use crate::plane::{Instance, Membership, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

pub(super) struct View {
    entries: BTreeMap<WorkerId, Entry>,
    connector: Connector,
    lease: Duration,
    /// When a message of the bucket last arrived; `None` before the first.
    last_message: Option<Instant>,
    /// Until then an expired instance may renew.
    grace_until: Option<Instant>,
    /// The keys seen since a list began; `None` when it is complete.
    listed: Option<BTreeSet<WorkerId>>,
}

struct Entry {
    instance: Arc<Instance>,
    address: Address,
    engine: Arc<dyn Engine>,
    /// Its lease has expired, and the grace goes on.
    is_expired: bool,
    /// When its lease ends, while a record that cannot be used stands in the place of its own.
    lease_ends: Option<Instant>,
}

impl Entry {
    fn renew(&mut self) {
        self.is_expired = false;
        self.lease_ends = None;
    }
}

impl View {
    pub(super) fn new(connector: Connector, lease: Duration) -> Self {
        Self { entries: BTreeMap::new(), connector, lease, last_message: None, grace_until: None, listed: None }
    }

    /// A message of the bucket has arrived. To be called before the message is applied.
    pub(super) fn message_received(&mut self, now: Instant) {
        if self.is_silent(now) {
            self.grace_until = Some(now + self.lease);
        }
        self.last_message = Some(now);
    }

    /// A list of all keys of the bucket follows. If it is not the first one, the connection to NATS was lost before, or
    /// the bucket was created again.
    pub(super) fn begin_list(&mut self, now: Instant) {
        self.listed = Some(BTreeSet::new());
        if self.last_message.replace(now).is_some() {
            self.grace_until = Some(now + self.lease);
        }
    }

    pub(super) fn is_listing(&self) -> bool {
        self.listed.is_some()
    }

    /// All keys of the bucket were applied: the others have expired.
    pub(super) fn end_list(&mut self, now: Instant) -> Vec<Membership> {
        let Some(listed) = self.listed.take() else { return Vec::new() };
        let absent: Vec<_> = self.entries.keys().filter(|id| !listed.contains(id)).copied().collect();
        absent.into_iter().filter_map(|id| self.expired(id, now)).collect()
    }

    /// The record of an instance. Nothing has changed if it was renewed.
    pub(super) fn registered(&mut self, instance: Instance, address: Address) -> Option<Membership> {
        self.mark_listed(instance.id);
        let known = self.entries.get_mut(&instance.id);
        let known = known.filter(|known| known.instance.epoch == instance.epoch && known.address == address);
        let engine = match known {
            Some(known) => {
                known.renew();
                if *known.instance == instance {
                    return None;
                }
                Arc::clone(&known.engine)
            }
            None => (self.connector)(&instance, &address),
        };
        let instance = Arc::new(instance);
        let entry = Entry {
            instance: Arc::clone(&instance),
            address,
            engine: Arc::clone(&engine),
            is_expired: false,
            lease_ends: None,
        };
        self.entries.insert(instance.id, entry);
        Some(Membership::Joined(instance, engine))
    }

    /// The record of an instance as before. Returns whether the instance is known.
    pub(super) fn renewed(&mut self, id: WorkerId) -> bool {
        self.mark_listed(id);
        self.entries.get_mut(&id).map(Entry::renew).is_some()
    }

    /// A record that cannot be used, in the place of that of a worker.
    pub(super) fn unusable(&mut self, id: WorkerId, now: Instant) {
        self.mark_listed(id);
        let end = now + self.lease;
        if let Some(entry) = self.entries.get_mut(&id).filter(|entry| !entry.is_expired) {
            // Further ones do not extend the lease.
            entry.lease_ends = entry.lease_ends.or(Some(end));
        }
    }

    /// A worker deregistered, or another process whose record cannot be used has taken its place.
    pub(super) fn removed(&mut self, id: WorkerId) -> Option<Membership> {
        self.mark_listed(id);
        self.entries.remove(&id).map(|entry| Membership::Left(id, entry.instance.epoch))
    }

    /// The lease of a worker expired.
    pub(super) fn expired(&mut self, id: WorkerId, now: Instant) -> Option<Membership> {
        self.mark_listed(id);
        if self.grace_until.is_none_or(|until| now >= until) {
            return self.removed(id);
        }
        if let Some(entry) = self.entries.get_mut(&id) {
            tracing::info!(
                worker = %id,
                "lease expired; no message of any worker came over nats for half a lease before, or the connection to \
                 nats is new, so the worker has one more lease to renew its own"
            );
            entry.is_expired = true;
            entry.lease_ends = None;
        }
        None
    }

    /// When [`due`](Self::due) has something to do.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let grace = self.grace_until.filter(|_| self.entries.values().any(|entry| entry.is_expired));
        self.entries.values().filter_map(|entry| entry.lease_ends).chain(grace).min()
    }

    /// The instances that have not renewed within the grace, or within a lease whose record cannot be used. To be
    /// called while NATS is connected.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Membership> {
        let mut left = self.end_leases(now);
        if self.grace_until.is_some_and(|until| now < until) {
            return left;
        }
        let expired = self.ids(|entry| entry.is_expired);
        left.extend(expired.into_iter().filter_map(|id| self.removed(id)));
        left
    }

    fn end_leases(&mut self, now: Instant) -> Vec<Membership> {
        let over = self.ids(|entry| entry.lease_ends.is_some_and(|end| now >= end));
        // Without other messages it may be NATS that does not answer.
        if !over.is_empty() && self.is_silent(now) {
            self.grace_until = Some(now + self.lease);
        }
        over.into_iter().filter_map(|id| self.expired(id, now)).collect()
    }

    fn ids(&self, of: impl Fn(&Entry) -> bool) -> Vec<WorkerId> {
        self.entries.iter().filter(|(_, entry)| of(entry)).map(|(id, _)| *id).collect()
    }

    /// Whether the last message came more than half a lease ago.
    fn is_silent(&self, now: Instant) -> bool {
        self.last_message.is_some_and(|last| now - last > self.lease / 2)
    }

    fn mark_listed(&mut self, id: WorkerId) {
        if let Some(listed) = &mut self.listed {
            listed.insert(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::Role;
    use crate::plane::contract::{engine, instance};
    use kvbm::Epoch;
    use std::sync::atomic::{AtomicU32, Ordering};

    const LEASE: Duration = Duration::from_secs(6);

    /// A view, the time at which it began, and the number of engines that were made.
    fn view() -> (View, Instant, Arc<AtomicU32>) {
        let made = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&made);
        let connector: Connector = Arc::new(move |_, _| {
            counter.fetch_add(1, Ordering::Relaxed);
            engine()
        });
        (View::new(connector, LEASE), Instant::now(), made)
    }

    fn address() -> Address {
        Address("http://host:1".into())
    }

    fn joined(change: Option<Membership>) -> Option<(u64, u64)> {
        change.map(|change| match change {
            Membership::Joined(instance, _) => (instance.id.0, instance.epoch.0),
            Membership::Left(id, _) => panic!("{id} left"),
        })
    }

    fn left(changes: impl IntoIterator<Item = Membership>) -> Vec<(u64, u64)> {
        let left = |change| match change {
            Membership::Left(id, Epoch(epoch)) => (id.0, epoch),
            Membership::Joined(instance, _) => panic!("{} joined", instance.id),
        };
        changes.into_iter().map(left).collect()
    }

    #[test]
    fn a_renewal_changes_nothing_and_a_role_keeps_the_engine() {
        let (mut view, _, made) = view();
        assert_eq!(joined(view.registered(instance(1, 1), address())), Some((1, 1)));
        assert_eq!(joined(view.registered(instance(1, 1), address())), None);
        let prefill = Instance { role: Role::Prefill, ..instance(1, 1) };
        assert_eq!(joined(view.registered(prefill, address())), Some((1, 1)));
        assert_eq!(made.load(Ordering::Relaxed), 1);
        assert_eq!(joined(view.registered(instance(1, 2), address())), Some((1, 2)));
        assert_eq!(made.load(Ordering::Relaxed), 2, "a new epoch is another process");
        assert_eq!(left(view.removed(WorkerId(1))), [(1, 2)]);
        assert!(view.removed(WorkerId(1)).is_none(), "it left once");
    }

    #[test]
    fn an_expiry_counts_at_once_while_messages_arrive() {
        let (mut view, start, _) = view();
        view.registered(instance(1, 1), address());
        for second in 1..=6 {
            view.message_received(start + Duration::from_secs(second));
        }
        assert_eq!(left(view.expired(WorkerId(1), start + LEASE)), [(1, 1)]);
        assert_eq!(view.next_due(), None);
    }

    #[test]
    fn after_a_silence_expired_instances_may_renew() {
        let (mut view, start, made) = view();
        view.message_received(start);
        for id in 1..=3 {
            view.registered(instance(id, 1), address());
        }
        let back = start + Duration::from_mins(1);
        view.message_received(back);
        for id in 1..=3 {
            assert!(view.expired(WorkerId(id), back).is_none(), "there is no storm of departures");
        }
        assert!(view.renewed(WorkerId(1)) && !view.renewed(WorkerId(4)));
        assert_eq!(left(view.removed(WorkerId(2))), [(2, 1)], "a deletion counts at once");
        let end = view.next_due().unwrap();
        assert_eq!(end, back + LEASE);
        assert_eq!(left(view.due(end - Duration::from_secs(1))), []);
        assert_eq!(left(view.due(end)), [(3, 1)]);
        assert_eq!((view.next_due(), made.load(Ordering::Relaxed)), (None, 3));
    }

    #[test]
    fn a_record_that_cannot_be_used_leaves_a_known_worker_its_lease() {
        let (mut view, start, made) = view();
        let at = |seconds| start + Duration::from_secs(seconds);
        for id in 1..=3 {
            view.registered(instance(id, 1), address());
        }
        for second in 0..=6 {
            view.message_received(at(second));
            // Of the first: again and again. Of one that is not known: nothing happens.
            for id in [1, 4] {
                view.unusable(WorkerId(id), at(second));
            }
            assert_eq!(view.next_due(), Some(start + LEASE), "more of them do not extend the lease");
        }
        view.unusable(WorkerId(2), at(4));
        assert!(view.renewed(WorkerId(2)), "its own record is there again");
        view.unusable(WorkerId(3), at(4));
        assert_eq!(joined(view.registered(instance(3, 1), address())), None);
        assert_eq!(left(view.due(at(5))), []);
        assert_eq!(left(view.due(at(6))), [(1, 1)]);
        assert_eq!((view.next_due(), made.load(Ordering::Relaxed)), (None, 3), "the others stay");
    }

    #[test]
    fn after_a_silence_a_worker_without_a_usable_record_may_renew() {
        let (mut view, start, _) = view();
        view.registered(instance(1, 1), address());
        view.registered(instance(2, 1), address());
        view.message_received(start);
        for id in [1, 2] {
            view.unusable(WorkerId(id), start);
        }
        assert_eq!(left(view.due(start + LEASE)), [], "no message came, so NATS may not answer");
        view.unusable(WorkerId(1), start + LEASE);
        assert!(view.renewed(WorkerId(2)));
        assert_eq!(view.next_due(), Some(start + LEASE * 2));
        assert_eq!(left(view.due(start + LEASE * 2)), [(1, 1)]);
        assert_eq!(view.next_due(), None);
    }

    #[test]
    fn a_new_list_ends_instances_that_are_not_in_it() {
        let (mut view, start, _) = view();
        view.message_received(start);
        view.registered(instance(1, 1), address());
        view.registered(instance(2, 1), address());
        view.begin_list(start);
        view.registered(instance(1, 1), address());
        assert_eq!(left(view.end_list(start)), [], "it may register again");
        assert_eq!(left(view.due(start + LEASE)), [(2, 1)]);
    }
}
