//! The instances that a follower of the bucket knows, and when one of them counts as gone. Pure, except that it calls
//! the connector.
//!
//! ```text
//!                  record              deletion, or expiry or no renewal while messages come
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
//! Leases may differ, as while their length is changed in one process after the other. What a worker has time for is
//! measured by the lifetime of its own record. A silence is measured by the shortest of them, or by the lease of this
//! process if that is longer: workers with long leases renew rarely.
//!
//! The server reports an expiry only if no older value is left in the key: one without an expiry, which a client other
//! than a worker wrote, hides it. So the view ends a lease itself whose renewals do not arrive, by the clock of this
//! process, later than the server would: half a lease after the expiry of the last record. A shorter freeze of the
//! process cannot delay a renewal by more, and after a longer one there was a silence. While no message arrives it
//! waits: it may be NATS that does not answer.
//!
//! A record that cannot be used says nothing about the worker in whose place it stands: something else has written it,
//! and the worker writes its own again with its next renewal. A new list may show nothing else of a worker that is
//! gone, so the view ends its lease one lease after the first record that could not be used, also in a silence.

use super::{Address, Connector};
use crate::engine::Engine;
use crate::plane::{Instance, Membership, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

pub(super) struct View {
    entries: BTreeMap<WorkerId, Entry>,
    leases: Leases,
    connector: Connector,
    /// The lease of this process.
    lease: Duration,
    /// When a message of the bucket last arrived; `None` before the first.
    last_message: Option<Instant>,
    /// Since then an expired instance may renew for as long as its lease.
    grace_since: Option<Instant>,
    /// The keys seen since a list began; `None` when it is complete.
    listed: Option<BTreeSet<WorkerId>>,
}

struct Entry {
    instance: Arc<Instance>,
    address: Address,
    engine: Arc<dyn Engine>,
    /// The lifetime of its last record.
    lease: Duration,
    /// Its lease has expired, and the grace goes on.
    is_expired: bool,
    /// When its lease ends, while a record that cannot be used stands in the place of its own.
    lease_ends: Option<Instant>,
    /// When its lease ends unless it is renewed, if messages arrive then.
    renew_by: Instant,
}

/// The leases of all instances, and how many instances have each.
#[derive(Default)]
struct Leases(BTreeMap<Duration, usize>);

/// Longest lifetime of a record that counts, in leases of this process: another process may be configured with a longer
/// one by mistake, and a client with the permissions of a worker can write any.
const MAX_LEASES: u32 = 10;

impl Leases {
    fn add(&mut self, lease: Duration) {
        *self.0.entry(lease).or_default() += 1;
    }

    fn remove(&mut self, lease: Duration) {
        let Some(count) = self.0.get_mut(&lease) else { return };
        *count -= 1;
        if *count == 0 {
            self.0.remove(&lease);
        }
    }

    fn shortest(&self) -> Option<Duration> {
        self.0.keys().next().copied()
    }
}

impl View {
    pub(super) fn new(connector: Connector, lease: Duration) -> Self {
        Self {
            entries: BTreeMap::new(),
            leases: Leases::default(),
            connector,
            lease,
            last_message: None,
            grace_since: None,
            listed: None,
        }
    }

    /// A message of the bucket has arrived. To be called before the message is applied.
    pub(super) fn message_received(&mut self, now: Instant) {
        if self.is_silent(now) {
            self.grace_since = Some(now);
        }
        self.last_message = Some(now);
    }

    /// A list of all keys of the bucket follows. If it is not the first one, the connection to NATS was lost before, or
    /// the bucket was created again.
    pub(super) fn begin_list(&mut self, now: Instant) {
        self.listed = Some(BTreeSet::new());
        if self.last_message.replace(now).is_some() {
            self.grace_since = Some(now);
        }
    }

    /// The number of instances.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Time in which instances renew, if there are any: the shortest of their leases, or the lease of this process if
    /// that is longer.
    pub(super) fn renewed_within(&self) -> Duration {
        self.leases.shortest().map_or(self.lease, |shortest| shortest.max(self.lease))
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

    /// The record of an instance, which is valid for `lifetime`. Nothing has changed if it was renewed.
    pub(super) fn registered(
        &mut self,
        instance: Instance,
        address: Address,
        lifetime: Duration,
        now: Instant,
    ) -> Option<Membership> {
        self.mark_listed(instance.id);
        let is_same = |known: &&Entry| known.instance.epoch == instance.epoch && known.address == address;
        let known = self.entries.get(&instance.id).filter(is_same);
        if known.is_some_and(|known| *known.instance == instance) {
            self.renewed(instance.id, lifetime, now);
            return None;
        }
        let engine = known.map_or_else(|| (self.connector)(&instance, &address), |known| Arc::clone(&known.engine));
        let (instance, lease) = (Arc::new(instance), self.lease_of(lifetime));
        let entry = Entry {
            instance: Arc::clone(&instance),
            address,
            engine: Arc::clone(&engine),
            lease,
            is_expired: false,
            lease_ends: None,
            renew_by: self.renew_by(lease, now),
        };
        self.leases.add(lease);
        if let Some(former) = self.entries.insert(instance.id, entry) {
            self.leases.remove(former.lease);
        }
        Some(Membership::Joined(instance, engine))
    }

    /// The record of an instance as before. Returns whether the instance is known.
    pub(super) fn renewed(&mut self, id: WorkerId, lifetime: Duration, now: Instant) -> bool {
        self.mark_listed(id);
        let lease = self.lease_of(lifetime);
        let renew_by = self.renew_by(lease, now);
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        self.leases.add(lease);
        self.leases.remove(entry.lease);
        (entry.lease, entry.renew_by) = (lease, renew_by);
        (entry.is_expired, entry.lease_ends) = (false, None);
        true
    }

    fn lease_of(&self, lifetime: Duration) -> Duration {
        lifetime.min(self.lease * MAX_LEASES)
    }

    fn renew_by(&self, lease: Duration, now: Instant) -> Instant {
        now + lease + lease.max(self.lease) / 2
    }

    /// A record that cannot be used, in the place of that of a worker.
    pub(super) fn unusable(&mut self, id: WorkerId, now: Instant) {
        self.mark_listed(id);
        if let Some(entry) = self.entries.get_mut(&id).filter(|entry| !entry.is_expired) {
            // Further ones do not extend the lease.
            entry.lease_ends = entry.lease_ends.or(Some(now + entry.lease));
        }
    }

    /// A worker deregistered, or another process whose record cannot be used has taken its place.
    pub(super) fn removed(&mut self, id: WorkerId) -> Option<Membership> {
        self.mark_listed(id);
        let entry = self.entries.remove(&id)?;
        self.leases.remove(entry.lease);
        Some(Membership::Left(id, entry.instance.epoch))
    }

    /// The lease of a worker expired.
    pub(super) fn expired(&mut self, id: WorkerId, now: Instant) -> Option<Membership> {
        self.mark_listed(id);
        let is_in_grace = self.entries.get(&id).is_some_and(|entry| self.is_in_grace(entry, now));
        if !is_in_grace {
            return self.removed(id);
        }
        if let Some(entry) = self.entries.get_mut(&id) {
            tracing::info!(
                worker = %id,
                "lease expired; no message of any worker came over NATS for half a lease before, or the connection to \
                 NATS is new, so the worker has one more lease to renew its own"
            );
            entry.is_expired = true;
            entry.lease_ends = None;
        }
        None
    }

    /// When [`due`](Self::due) has something to do.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let of = |entry: &Entry| {
            let end = self.grace_end(entry);
            let renew_by = end.map_or(entry.renew_by, |end| end.max(entry.renew_by));
            [entry.lease_ends, if entry.is_expired { end } else { Some(renew_by) }]
        };
        self.entries.values().flat_map(of).flatten().min()
    }

    /// The instances that have not renewed in time, or within the grace, or within a lease whose record cannot be used.
    /// To be called while NATS is connected.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Membership> {
        let mut left = self.end_leases(now);
        let expired = self.ids(|entry| entry.is_expired && !self.is_in_grace(entry, now));
        left.extend(expired.into_iter().filter_map(|id| self.removed(id)));
        left.extend(self.end_unrenewed(now));
        left
    }

    fn end_unrenewed(&mut self, now: Instant) -> Vec<Membership> {
        let is_over = |entry: &Entry| !entry.is_expired && now >= entry.renew_by && !self.is_in_grace(entry, now);
        let over = self.ids(is_over);
        if self.is_silent(now) {
            for id in &over {
                if let Some(entry) = self.entries.get_mut(id) {
                    entry.renew_by = now + entry.lease;
                }
            }
            return Vec::new();
        }
        for id in &over {
            tracing::info!(worker = %id, "the worker has not renewed its lease in time, and counts as gone");
        }
        over.into_iter().filter_map(|id| self.removed(id)).collect()
    }

    fn end_leases(&mut self, now: Instant) -> Vec<Membership> {
        let over = self.ids(|entry| entry.lease_ends.is_some_and(|end| now >= end));
        // Without other messages it may be NATS that does not answer.
        if !over.is_empty() && self.is_silent(now) {
            self.grace_since = Some(now);
        }
        over.into_iter().filter_map(|id| self.expired(id, now)).collect()
    }

    fn ids(&self, of: impl Fn(&Entry) -> bool) -> Vec<WorkerId> {
        self.entries.iter().filter(|(_, entry)| of(entry)).map(|(id, _)| *id).collect()
    }

    /// Until when an instance may renew although its lease has expired.
    fn grace_end(&self, entry: &Entry) -> Option<Instant> {
        self.grace_since.map(|since| since + entry.lease)
    }

    fn is_in_grace(&self, entry: &Entry, now: Instant) -> bool {
        self.grace_end(entry).is_some_and(|end| now < end)
    }

    /// Whether the last message came more than half a lease ago.
    fn is_silent(&self, now: Instant) -> bool {
        self.last_message.is_some_and(|last| now - last > self.renewed_within() / 2)
    }

    fn mark_listed(&mut self, id: WorkerId) {
        if let Some(listed) = &mut self.listed {
            listed.insert(id);
        }
    }
}

#[cfg(test)]
mod tests;
