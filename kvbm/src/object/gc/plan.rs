//! Which objects are marked, and which are deleted. Pure: collectors that see the same store decide the same.
//!
//! The age of an object is the time since its last use, or since the last use of an object that builds on it. Of
//! objects of the same age, later parts of a chain are marked first, so that a prefix does not lose its head before
//! its tail. Objects that no valid manifest lists are deleted by age only; if an unreadable manifest may list them,
//! they are kept. The manifest with the highest number of a writer is kept as long as another one of that writer is.

use super::age;
use super::inventory::{Contents, Inventory, LiveObject, Manifest, StoredObject, TombstoneList, is_pinned};
use super::policy::{MarkReason, Policy};
use crate::block::{Date, DomainId};
use crate::object::format::layout::{InstanceId, ObjectId};
use object_store::path::Path;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Age at which an object that no manifest lists is deleted. Its writer may still retry the manifest, but by then
/// readers have recomputed the blocks.
const UNLISTED_GRACE: Duration = Duration::from_hours(1);

/// Time until followers know that an object is marked (two reads of the tombstone lists) plus a load. Objects that only
/// their own writer used are deleted after this time, even if the grace period is longer.
const OWN_GRACE: Duration = Duration::from_secs(15);

/// How long an access log counts after its last write. Its process has ended, and objects still in use were read by
/// others since.
const ACCESS_RECORD_LIFETIME: Duration = Duration::from_hours(30 * 24);

#[cfg(test)]
thread_local! {
    /// Number of plans that this thread made.
    pub(in crate::object) static PLANS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// What a garbage collection run does.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::object) struct Plan {
    pub(in crate::object) mark: Vec<(ObjectId, MarkReason)>,
    /// These four in the order of deletion: what readers look at first is deleted first, and tombstone lists after the
    /// objects that they list.
    pub(in crate::object) manifests: Vec<Path>,
    pub(in crate::object) objects: Vec<ObjectId>,
    pub(in crate::object) tombstone_lists: Vec<Path>,
    pub(in crate::object) access_records: Vec<Path>,
    /// Time until the next marked object may be deleted.
    pub(in crate::object) next_deletion: Option<Duration>,
}

/// The passes that bring a store below its capacity.
#[derive(Clone, Copy)]
enum CapacityPass {
    /// Marks objects of domains above their own maximum.
    DomainLimit,
    /// Marks the oldest objects, except guaranteed bytes.
    KeepGuarantees,
    /// Marks the oldest objects.
    All,
}

fn has_elapsed(since: Date, wait: Duration, now: Date) -> bool {
    since.after(wait) <= now
}

impl Inventory {
    /// Applies a policy.
    pub(in crate::object) fn plan(&self, policy: &Policy, now: Date) -> Plan {
        #[cfg(test)]
        PLANS.set(PLANS.get() + 1);
        let mark = self.select_marked(policy, now);
        let marked_at = self.marked_at();
        let read_by_others = self.read_by_others();
        let grace = |id: &ObjectId| match self.own {
            Some(own) if id.writer == own && !read_by_others.contains(id) => policy.grace.min(OWN_GRACE),
            _ => policy.grace,
        };
        let too_old =
            |modified: Date| policy.max_age.is_some_and(|age| has_elapsed(modified, age.max(UNLISTED_GRACE), now));
        let listed: BTreeSet<ObjectId> = self.listed().map(|live| live.id).collect();
        // Invalid and unreadable manifests may list further objects of their writers.
        let invalid = self.writers_with(|contents| matches!(contents, Contents::Invalid));
        let unreadable = self.writers_with(|contents| matches!(contents, Contents::Unreadable));
        let is_deleted = |(id, stored): &(&ObjectId, &StoredObject)| match marked_at.get(id) {
            Some(since) => has_elapsed(*since, grace(id), now),
            None if listed.contains(id) => false,
            None if unreadable.contains(&id.writer) => false,
            None if invalid.contains(&id.writer) => too_old(stored.modified),
            None => has_elapsed(stored.modified, policy.grace.max(UNLISTED_GRACE), now),
        };
        let objects: Vec<ObjectId> = self.objects.iter().filter(is_deleted).map(|(id, _)| *id).collect();
        let deleted: BTreeSet<ObjectId> = objects.iter().copied().collect();
        let is_kept = |id: &ObjectId| self.objects.contains_key(id) && !deleted.contains(id);
        let (unused, kept) = self.split_manifests(|manifest| match &manifest.contents {
            Contents::Sections(_) => {
                has_elapsed(manifest.modified, policy.grace, now) && !manifest.objects().any(|(id, _)| is_kept(&id))
            }
            Contents::Invalid => too_old(manifest.modified),
            Contents::Unreadable => false,
        });
        let still_listed: BTreeSet<ObjectId> =
            kept.iter().flat_map(|manifest| manifest.objects()).map(|(id, _)| id).collect();
        let is_done = |list: &&TombstoneList| {
            let needed = |id: &ObjectId| is_kept(id) || still_listed.contains(id);
            has_elapsed(list.modified, policy.grace, now) && !list.objects.iter().any(needed)
        };
        let lifetime = ACCESS_RECORD_LIFETIME.max(policy.max_age.unwrap_or_default());
        let outdated = self.access_records.iter().filter(|record| has_elapsed(record.modified, lifetime, now));
        let waiting = marked_at.iter().filter(|(id, _)| is_kept(id));
        let waiting = waiting.map(|(id, since)| since.after(grace(id)).since(now));
        Plan {
            next_deletion: waiting.chain(mark.iter().map(|(id, _)| grace(id))).min(),
            mark,
            manifests: unused.into_iter().map(|manifest| manifest.path.clone()).collect(),
            objects,
            tombstone_lists: self.tombstone_lists.iter().filter(is_done).map(|list| list.path.clone()).collect(),
            access_records: outdated.map(|record| record.path.clone()).collect(),
        }
    }

    /// The manifests to delete, and the others.
    fn split_manifests(&self, is_unused: impl Fn(&Manifest) -> bool) -> (Vec<&Manifest>, Vec<&Manifest>) {
        // A process that starts later continues from the highest number that it finds.
        let with_manifests: BTreeSet<InstanceId> =
            self.manifests.iter().filter(|manifest| !is_unused(manifest)).map(|manifest| manifest.writer).collect();
        let mut highest: BTreeMap<InstanceId, u64> = BTreeMap::new();
        for manifest in &self.manifests {
            let highest = highest.entry(manifest.writer).or_default();
            *highest = manifest.number.max(*highest);
        }
        let is_last = |manifest: &Manifest| {
            with_manifests.contains(&manifest.writer) && highest.get(&manifest.writer) == Some(&manifest.number)
        };
        self.manifests.iter().partition(|manifest| is_unused(manifest) && !is_last(manifest))
    }

    /// The objects that other processes have read.
    fn read_by_others(&self) -> BTreeSet<ObjectId> {
        self.access_records
            .iter()
            .filter(|record| Some(record.reader) != self.own)
            .flat_map(|record| record.used.iter().map(|(object, _)| *object))
            .collect()
    }

    /// When each marked object was first marked.
    fn marked_at(&self) -> BTreeMap<ObjectId, Date> {
        let mut marked_at: BTreeMap<ObjectId, Date> = BTreeMap::new();
        for list in &self.tombstone_lists {
            for object in list.objects.iter() {
                let first = marked_at.entry(*object).or_insert(list.modified);
                *first = list.modified.min(*first);
            }
        }
        marked_at
    }

    fn writers_with(&self, matches: impl Fn(&Contents) -> bool) -> BTreeSet<InstanceId> {
        let manifests = self.manifests.iter().filter(|manifest| matches(&manifest.contents));
        manifests.map(|manifest| manifest.writer).collect()
    }

    /// The live objects to mark, with the reasons, in the order of their ids.
    fn select_marked(&self, policy: &Policy, now: Date) -> Vec<(ObjectId, MarkReason)> {
        let live: Vec<LiveObject<'_>> = self.live().collect();
        let best = age::best_copies(&live, now);
        let last_use = age::last_use(&live, &best);
        let duplicates = age::duplicates(&live, &best, now);
        // Objects that will be duplicates once all followers know the better copy do not count towards the capacity.
        let soon = now.after(age::PROPAGATION_TIME);
        let soon_duplicates = age::duplicates(&live, &age::best_copies(&live, soon), soon);
        let mut marked = BTreeMap::new();
        let mut candidates = Vec::new();
        for (index, (live, &last_use)) in live.iter().zip(&last_use).enumerate() {
            let entries = &live.section.entries;
            if entries.iter().all(|entry| entry.retention().is_expired(now)) {
                marked.insert(live.id, MarkReason::Expired);
            } else if duplicates.contains(&index) {
                marked.insert(live.id, MarkReason::Duplicate);
            } else if soon_duplicates.contains(&index) || entries.iter().any(|entry| is_pinned(entry, now)) {
                // Kept in any case.
            } else if policy.max_age.is_some_and(|age| last_use.after(age) <= now) {
                marked.insert(live.id, MarkReason::MaxAge);
            } else {
                candidates.push((last_use, Reverse(live.stored.modified), Reverse(live.id), live));
            }
        }
        candidates.sort_unstable_by_key(|(last_use, modified, id, _)| (*last_use, *modified, *id));
        let mut domain_bytes: BTreeMap<DomainId, u64> = BTreeMap::new();
        let counted = live.iter().enumerate().filter(|(index, _)| !soon_duplicates.contains(index));
        for live in counted.map(|(_, live)| live).filter(|live| !marked.contains_key(&live.id)) {
            *domain_bytes.entry(live.section.domain).or_default() += live.stored.bytes;
        }
        let candidates: Vec<&LiveObject<'_>> = candidates.into_iter().map(|(.., live)| live).collect();
        self.mark_for_capacity(policy, &candidates, domain_bytes, &mut marked);
        marked.into_iter().collect()
    }

    /// Marks the least recently used of the candidates until the store and its domains are within their capacity.
    /// `candidates`: in the order of their last use; `domain_bytes`: those of live objects that are not marked.
    fn mark_for_capacity(
        &self,
        policy: &Policy,
        candidates: &[&LiveObject<'_>],
        mut domain_bytes: BTreeMap<DomainId, u64>,
        marked: &mut BTreeMap<ObjectId, MarkReason>,
    ) {
        // Objects that no valid manifest lists take space too, until they are deleted.
        let listed: BTreeSet<ObjectId> = self.listed().map(|live| live.id).collect();
        let already_marked = self.marked();
        let unlisted = self.objects.iter().filter(|(id, _)| !listed.contains(id) && !already_marked.contains(id));
        let mut total = domain_bytes.values().sum::<u64>() + unlisted.map(|(_, stored)| stored.bytes).sum::<u64>();
        for pass in [CapacityPass::DomainLimit, CapacityPass::KeepGuarantees, CapacityPass::All] {
            for live in candidates {
                let domain = live.section.domain;
                let quota = policy.quotas.get(&domain).copied().unwrap_or_default();
                let own = domain_bytes.entry(domain).or_default();
                let bytes = live.stored.bytes;
                let is_over =
                    |headroom| policy.capacity.is_some_and(|capacity| total > capacity.saturating_sub(headroom));
                let marks = match pass {
                    CapacityPass::DomainLimit => quota.maximum.is_some_and(|maximum| *own > maximum),
                    CapacityPass::KeepGuarantees => {
                        is_over(policy.headroom) && *own >= quota.guaranteed.saturating_add(bytes)
                    }
                    CapacityPass::All => is_over(0),
                };
                if marks && marked.insert(live.id, MarkReason::Capacity).is_none() {
                    *own -= bytes;
                    total -= bytes;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
