//! Where blocks are, by a part of their name: a hash table that is read while it is written.
//!
//! Slots lie in groups of eight, one cache line each. An entry lies in the group that its tag says, or when that is full, in
//! one of those after it. A reader goes on to the next group only from a group without an empty slot, so a slot is emptied
//! only in a group that has another empty one; elsewhere it is marked as a grave, which keeps readers going.
//!
//! **Ordering.** A slot is one word, so an entry is there whole or not at all. It is stored with release after what it points
//! to was written, and loaded with acquire. Entries never move within a table: one that is there when a reader starts, and
//! is not taken meanwhile, is found. Writers take turns by a lock of their own. Look here in vain for growing: a full table
//! is replaced by a larger one.

use super::sync::{AtomicU64, Ordering};

/// The table.
pub(crate) struct Table(Box<[Group]>);

#[repr(align(64))]
struct Group([AtomicU64; GROUP]);

/// What became of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Taken {
    /// It is empty.
    Emptied,
    /// It is a grave.
    Buried,
    /// There was no such entry.
    Absent,
}

/// What became of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Entered {
    /// It is in a slot that was empty.
    Fresh,
    /// It is in a grave's slot.
    OnGrave,
    /// The same was there.
    Refused,
}

/// Slots that a cache line holds.
const GROUP: usize = 8;
const EMPTY: u64 = 0;
/// No entry has this value: the first page is never used, see [`super::arena`].
const GRAVE: u64 = 1;

fn entry(tag: u32, place: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(place)
}

impl Table {
    pub(crate) fn new(slots: usize) -> Self {
        let group = || Group(std::array::from_fn(|_| AtomicU64::new(EMPTY)));
        Self((0..slots.div_ceil(GROUP).max(1)).map(|_| group()).collect())
    }

    /// Slots in all.
    pub(crate) fn slots(&self) -> usize {
        self.0.len() * GROUP
    }

    /// The group that an entry should be in. Tags in order have groups in order, so a table is copied front to back.
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.0.len() as u64) >> 32) as usize
    }

    /// Brings the entry's cache line near. What it answers means nothing.
    pub(crate) fn touch(&self, tag: u32) -> u64 {
        self.0[self.home(tag)].0[0].load(Ordering::Relaxed)
    }

    /// The first place under a tag that is `wanted`.
    pub(crate) fn find(&self, tag: u32, mut wanted: impl FnMut(u32) -> bool) -> Option<u32> {
        let home = self.home(tag);
        for group in self.0[home..].iter().chain(&self.0[..home]) {
            let mut ends = false;
            for slot in &group.0 {
                let value = slot.load(Ordering::Acquire);
                if (value >> 32) as u32 == tag && value > GRAVE && wanted(value as u32) {
                    return Some(value as u32);
                }
                ends |= value == EMPTY;
            }
            if ends {
                return None;
            }
        }
        None
    }

    /// Adds an entry unless one under its tag is the `same`. Whether it was added, and took a grave's slot. The caller holds the
    /// writers' lock, and sees to it that there is an empty slot.
    pub(crate) fn enter(&self, tag: u32, place: u32, mut same: impl FnMut(u32) -> bool) -> Entered {
        let home = self.home(tag);
        let mut free: Option<(&AtomicU64, u64)> = None;
        for group in self.0[home..].iter().chain(&self.0[..home]) {
            let mut ends = false;
            for slot in &group.0 {
                let value = slot.load(Ordering::Relaxed);
                if value <= GRAVE {
                    ends |= value == EMPTY;
                    free = free.or(Some((slot, value)));
                } else if (value >> 32) as u32 == tag && same(value as u32) {
                    return Entered::Refused;
                }
            }
            if ends {
                break;
            }
        }
        let (slot, value) = free.expect("the caller keeps a slot empty");
        slot.store(entry(tag, place), Ordering::Release);
        if value == GRAVE { Entered::OnGrave } else { Entered::Fresh }
    }

    /// Points an entry elsewhere. The caller holds the writers' lock.
    pub(crate) fn point(&self, tag: u32, from: u32, to: u32) {
        if let Some((_, slot)) = self.slot(tag, from) {
            slot.store(entry(tag, to), Ordering::Release);
        }
    }

    /// Removes an entry. The caller holds the writers' lock.
    pub(crate) fn take(&self, tag: u32, place: u32) -> Taken {
        let Some((group, slot)) = self.slot(tag, place) else { return Taken::Absent };
        let ends = group.0.iter().any(|slot| slot.load(Ordering::Relaxed) == EMPTY);
        slot.store(if ends { EMPTY } else { GRAVE }, Ordering::Release);
        if ends { Taken::Emptied } else { Taken::Buried }
    }

    /// Every entry, as tag and place.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (u32, u32)> {
        let values = self.0.iter().flat_map(|group| &group.0).map(|slot| slot.load(Ordering::Relaxed));
        values.filter(|value| *value > GRAVE).map(|value| ((value >> 32) as u32, value as u32))
    }

    fn slot(&self, tag: u32, place: u32) -> Option<(&Group, &AtomicU64)> {
        let home = self.home(tag);
        for group in self.0[home..].iter().chain(&self.0[..home]) {
            let mut ends = false;
            for slot in &group.0 {
                let value = slot.load(Ordering::Relaxed);
                if value == entry(tag, place) {
                    return Some((group, slot));
                }
                ends |= value == EMPTY;
            }
            if ends {
                return None;
            }
        }
        None
    }
}
