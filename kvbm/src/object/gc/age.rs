//! How old objects are, by their last use, and which ones are of no use beside others. Pure.

use super::Live;
use crate::object::layout::ObjectId;
use crate::{Date, Fingerprint, SequenceHash};
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::time::Duration;

/// By then whoever follows a store knows what was written: a deletion of what it replaces leaves no gap.
const LEARNED: Duration = Duration::from_mins(1);

type Key = (Fingerprint, SequenceHash);

/// When each object, or one that builds on it, was last used: written or read from.
pub(super) fn youth(live: &[Live<'_>]) -> Vec<Date> {
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
    let mut youth: Vec<Date> = live.iter().map(|live| live.used).collect();
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

/// Objects whose every block lies elsewhere too, to be kept no shorter, where it is known to whoever follows the store.
///
/// Of the copies of a block one is the best, and its object stays: so no block goes with these, however many go, and
/// collectors that see the same store choose the same.
pub(super) fn copied(live: &[Live<'_>], now: Date) -> BTreeSet<usize> {
    // An object that was cut is no copy.
    let sound =
        |live: &Live<'_>| live.stored.modified.after(LEARNED) <= now && live.stored.bytes >= live.section.bytes();
    let mut best: HashMap<Key, (u32, Date, ObjectId, usize)> = HashMap::new();
    for (index, live) in live.iter().enumerate().filter(|(_, live)| sound(live)) {
        for entry in live.section.entries.iter().filter(|entry| !entry.keep().is_over(now)) {
            let until = entry.expires.map_or(u32::MAX, |date| Date::encode(Some(date)));
            // A writer counts up: of those of one second, the last.
            let this = (until, live.stored.modified, live.id, index);
            let best = best.entry((live.section.fingerprint, entry.name)).or_insert(this);
            *best = this.max(*best);
        }
    }
    let needed: BTreeSet<usize> = best.into_values().map(|(.., index)| index).collect();
    let copies = live.iter().enumerate().filter(|(index, live)| sound(live) && !needed.contains(index));
    copies.map(|(index, _)| index).collect()
}
