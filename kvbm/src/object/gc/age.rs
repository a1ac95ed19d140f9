//! The last use of objects, and which objects are duplicates of others. Pure.

use super::inventory::{LiveObject, is_pinned};
use crate::block::{Date, Fingerprint, SequenceHash};
use crate::object::format::layout::ObjectId;
use crate::object::format::manifest::{BlockEntry, Section};
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::time::Duration;

/// Time until followers know a new object, so that deleting an object that it replaces causes no miss.
pub(super) const PROPAGATION_TIME: Duration = Duration::from_mins(1);

pub(super) type BlockKey = (Fingerprint, SequenceHash);

/// When each object, or an object that builds on it, was last written or read. `best` has the copy of each block that
/// is kept: a read of another copy counts as a use of that one.
pub(super) fn last_use(live: &[LiveObject<'_>], best: &HashMap<BlockKey, usize>) -> Vec<Date> {
    // Of several copies of a block, other objects build on the newest.
    let mut holders: HashMap<BlockKey, usize> = HashMap::new();
    for (index, LiveObject { section, stored, .. }) in live.iter().enumerate() {
        for entry in &section.entries {
            let holder = holders.entry((section.fingerprint, entry.hash)).or_insert(index);
            if live[*holder].stored.modified < stored.modified {
                *holder = index;
            }
        }
    }
    holders.extend(best);
    let mut last_use: Vec<Date> = live.iter().map(|live| live.used).collect();
    for live in live {
        for entry in &live.section.entries {
            if let Some(&holder) = holders.get(&(live.section.fingerprint, entry.hash)) {
                last_use[holder] = last_use[holder].max(live.used);
            }
        }
    }
    let mut heap: BinaryHeap<(Date, usize)> = last_use.iter().copied().zip(0..).collect();
    // Newest first, so that each object is visited once with its final date.
    while let Some((date, index)) = heap.pop() {
        if date < last_use[index] {
            continue;
        }
        let section = live[index].section;
        for parent in section.entries.iter().filter_map(|entry| entry.parent) {
            if let Some(&holder) = holders.get(&(section.fingerprint, parent))
                && last_use[holder] < date
            {
                last_use[holder] = date;
                heap.push((date, holder));
            }
        }
    }
    last_use
}

/// Whether an object is complete and known to all followers.
fn is_complete(live: &LiveObject<'_>, now: Date) -> bool {
    live.stored.modified.after(PROPAGATION_TIME) <= now && live.stored.bytes >= live.section.bytes()
}

/// The best copy of each block: the one that is kept and pinned longest, and of those the newest. Collectors that see
/// the same store choose the same.
pub(super) fn best_copies(live: &[LiveObject<'_>], now: Date) -> HashMap<BlockKey, usize> {
    let mut best: HashMap<BlockKey, (u32, Option<Date>, Date, ObjectId, usize)> = HashMap::new();
    for (index, live) in live.iter().enumerate().filter(|(_, live)| is_complete(live, now)) {
        for entry in live.section.entries.iter().filter(|entry| !entry.retention().is_expired(now)) {
            let until = entry.expires.map_or(u32::MAX, |date| Date::encode(Some(date)));
            // Of objects of the same second, the one with the highest number.
            let this = (until, entry.pinned, live.stored.modified, live.id, index);
            let best = best.entry((live.section.fingerprint, entry.hash)).or_insert(this);
            *best = this.max(*best);
        }
    }
    best.into_iter().map(|(key, (.., index))| (key, index)).collect()
}

/// Objects of which every block has a better copy in an object that is kept. Deleting them loses no block, and none
/// before its pin ends.
pub(super) fn duplicates(live: &[LiveObject<'_>], best: &HashMap<BlockKey, usize>, now: Date) -> BTreeSet<usize> {
    let needed: BTreeSet<usize> = best.values().copied().collect();
    let outlives_pin = |section: &Section, entry: &BlockEntry| {
        let better = best.get(&(section.fingerprint, entry.hash)).map(|at| &live[*at].section.entries);
        let mut better = better.into_iter().flatten();
        !is_pinned(entry, now) || better.any(|other| other.hash == entry.hash && other.pinned >= entry.pinned)
    };
    let duplicates = live.iter().enumerate().filter(|(index, live)| {
        let LiveObject { section, .. } = live;
        is_complete(live, now)
            && !needed.contains(index)
            && section.entries.iter().all(|entry| outlives_pin(section, entry))
    });
    duplicates.map(|(index, _)| index).collect()
}
