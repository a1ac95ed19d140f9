//! How old objects are, by their last use, and which ones are of no use beside others. Pure.

use super::{Live, is_pinned};
use crate::block::{Date, Fingerprint, SequenceHash};
use crate::object::format::layout::ObjectId;
use crate::object::format::manifest::{Entry, Section};
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::time::Duration;

/// By then whoever follows a store knows what was written: a deletion of what it replaces leaves no gap.
pub(super) const LEARNED: Duration = Duration::from_mins(1);

pub(super) type Key = (Fingerprint, SequenceHash);

/// When each object, or one that builds on it, was last used: written or read from. `best`: of each block, the copy that stays; what was
/// read from another one is a use of that.
pub(super) fn youth(live: &[Live<'_>], best: &HashMap<Key, usize>) -> Vec<Date> {
    // Of several copies of a block, the youngest is the one to build on.
    let mut holders: HashMap<Key, usize> = HashMap::new();
    for (index, Live { section, stored, .. }) in live.iter().enumerate() {
        for entry in &section.entries {
            let holder = holders.entry((section.fingerprint, entry.name)).or_insert(index);
            if live[*holder].stored.modified < stored.modified {
                *holder = index;
            }
        }
    }
    holders.extend(best);
    let mut youth: Vec<Date> = live.iter().map(|live| live.used).collect();
    for live in live {
        for entry in &live.section.entries {
            if let Some(&holder) = holders.get(&(live.section.fingerprint, entry.name)) {
                youth[holder] = youth[holder].max(live.used);
            }
        }
    }
    let mut heap: BinaryHeap<(Date, usize)> = youth.iter().copied().zip(0..).collect();
    // The youngest first, so that each is looked at once with the date that stays.
    while let Some((date, index)) = heap.pop() {
        if date < youth[index] {
            continue;
        }
        let section = live[index].section;
        for parent in section.entries.iter().filter_map(|entry| entry.parent) {
            if let Some(&holder) = holders.get(&(section.fingerprint, parent))
                && youth[holder] < date
            {
                youth[holder] = date;
                heap.push((date, holder));
            }
        }
    }
    youth
}

/// An object that is whole, and known to whoever follows the store.
fn sound(live: &Live<'_>, now: Date) -> bool {
    live.stored.modified.after(LEARNED) <= now && live.stored.bytes >= live.section.bytes()
}

/// Of each block the copy that is kept and pinned longest, and of those the youngest: collectors that see the same store choose
/// the same.
pub(super) fn best(live: &[Live<'_>], now: Date) -> HashMap<Key, usize> {
    let mut best: HashMap<Key, (u32, Option<Date>, Date, ObjectId, usize)> = HashMap::new();
    for (index, live) in live.iter().enumerate().filter(|(_, live)| sound(live, now)) {
        for entry in live.section.entries.iter().filter(|entry| !entry.keep().is_over(now)) {
            let until = entry.expires.map_or(u32::MAX, |date| Date::encode(Some(date)));
            // A writer counts up: of those of one second, the last.
            let this = (until, entry.pinned, live.stored.modified, live.id, index);
            let best = best.entry((live.section.fingerprint, entry.name)).or_insert(this);
            *best = this.max(*best);
        }
    }
    best.into_iter().map(|(key, (.., index))| (key, index)).collect()
}

/// Objects whose every block lies in a better one, which stays: so no block goes with these, however many go, and none before its
/// pin is over.
pub(super) fn copied(live: &[Live<'_>], best: &HashMap<Key, usize>, now: Date) -> BTreeSet<usize> {
    let needed: BTreeSet<usize> = best.values().copied().collect();
    let stays = |section: &Section, entry: &Entry| {
        let there = best.get(&(section.fingerprint, entry.name)).map(|at| &live[*at].section.entries);
        let mut there = there.into_iter().flatten();
        !is_pinned(entry, now) || there.any(|other| other.name == entry.name && other.pinned >= entry.pinned)
    };
    let copies = live.iter().enumerate().filter(|(index, live)| {
        let Live { section, .. } = live;
        sound(live, now) && !needed.contains(index) && section.entries.iter().all(|entry| stays(section, entry))
    });
    copies.map(|(index, _)| index).collect()
}
