//! A hash table from block hashes to positions, which is read without a lock while one thread writes.
//!
//! Slots form groups of ten, one cache line each, with a 16-bit tag per slot (as in Swiss tables and F14): fifteen bits
//! of the key, and one bit that is set for every used slot. One SIMD-within-a-register comparison of all tags finds the
//! slots that may match, or an empty slot; a false match is rare. An entry is in the group that its key selects (its
//! home), or in one of the following groups if that one is full. Beside the tags each group counts the entries that
//! overflowed it; a reader probes the next group only if there are any. An entry has a position and no hash: the reader
//! compares the hash at that position.
//!
//! **Resizing.** A table is replaced by one of twice or half the size. The bits of a tag are the bits of the key below
//! those that select the group. So the tag decides which of two new groups an entry goes to, without reading its hash;
//! this costs one known bit of the tag. Entries that may have overflowed must be inserted again by hash. If too few
//! bits of the tags are known, all entries must.
//!
//! **Ordering.** A slot is one word. The writer stores the block at a position, then the slot, then the tag, the latter
//! two with release; the reader loads both with acquire. A reader sees a slot without a tag only if it loaded an older
//! tag, and then it compares the hash. Overflow counters are raised before an entry is inserted and lowered after it
//! was removed, and an entry never moves within a table. So a reader finds each entry that is there when it starts and
//! is not removed meanwhile. Writers are serialized by a lock of the caller.

use super::sync::{AtomicU32, AtomicU64, HUGE_PAGE, Ordering, advise_hugepages, prefetch_for_write};
use kvbm::swar::{self, BITS as TAG_BITS, LANES, WORDS};

/// A hash table.
pub(crate) struct Table {
    groups: Vec<Group>,
    /// Size, as a power of two times the smallest size.
    doublings: u32,
    /// Mask of the known bits of a tag.
    known_bits: u32,
}

#[repr(align(64))]
struct Group {
    /// A tag per slot. The remaining bits of the last word are the overflow counter.
    tags: [AtomicU64; WORDS],
    slots: [AtomicU32; SLOTS],
}

/// The content of a new group.
#[derive(Clone, Copy, Default)]
struct GroupBuilder {
    tags: [u64; WORDS],
    slots: [u32; SLOTS],
    len: usize,
}

/// The tags and the overflow counter of a group.
#[derive(Clone, Copy)]
struct Tags([u64; WORDS]);

/// A set of slots of a group, a bit for each.
#[derive(Clone, Copy, PartialEq)]
struct SlotSet(u32);

/// Slots per cache line, beside their tags.
const SLOTS: usize = 10;
/// Bytes per slot, including its part of the tags.
pub(crate) const SLOT_BYTES: f64 = size_of::<Group>() as f64 / SLOTS as f64;
/// Offset of the overflow counter in the last word.
const OVERFLOW_SHIFT: u32 = (SLOTS % LANES) as u32 * TAG_BITS;
/// Groups of the smallest table: multiplied by a power of two this nearly fills huge pages.
const MIN_GROUPS: usize = 63;
/// Bytes per huge page that are left for the allocator's metadata.
const ALLOCATOR_RESERVE: usize = 4096;
/// Tag of an empty slot.
const EMPTY: u32 = 0;
/// All bits of a tag.
const TAG_MASK: u32 = (1 << TAG_BITS) - 1;
/// Smallest number of known bits of a tag. With these, one lookup of an absent hash in eight hundred reads a page in
/// vain.
const MIN_KNOWN_BITS: u32 = 12;

impl SlotSet {
    const NONE: Self = Self(0);

    fn first(self) -> usize {
        (self.0.trailing_zeros() as usize).min(SLOTS - 1)
    }

    fn without_first(self) -> Self {
        Self(self.0 & (self.0 - 1))
    }
}

impl Tags {
    /// Slots with this tag.
    #[inline]
    fn matching(self, tag: u32) -> SlotSet {
        SlotSet(swar::equal_lanes(self.0, tag as u16) & ((1 << SLOTS) - 1))
    }

    /// Empty slots.
    #[inline]
    fn empty(self) -> SlotSet {
        self.matching(EMPTY)
    }

    fn tag(self, at: usize) -> u32 {
        (self.0[at / LANES] >> shift(at)) as u32 & TAG_MASK
    }

    /// Whether no entry has overflowed this group.
    fn has_no_overflow(self) -> bool {
        self.0[WORDS - 1] >> OVERFLOW_SHIFT == 0
    }
}

/// Offset of a slot's tag in its word.
fn shift(at: usize) -> u32 {
    (at % LANES) as u32 * TAG_BITS
}

impl GroupBuilder {
    /// Adds an entry. Returns whether there was space.
    fn push(&mut self, tag: u32, position: u32) -> bool {
        let at = self.len;
        if at < SLOTS {
            self.tags[at / LANES] |= u64::from(tag) << shift(at);
            self.slots[at] = position;
            self.len += 1;
        }
        at < SLOTS
    }
}

impl From<GroupBuilder> for Group {
    fn from(GroupBuilder { tags, slots, .. }: GroupBuilder) -> Self {
        Self { tags: tags.map(AtomicU64::new), slots: slots.map(AtomicU32::new) }
    }
}

impl Group {
    #[inline]
    fn tags(&self, order: Ordering) -> Tags {
        Tags(std::array::from_fn(|at| self.tags[at].load(order)))
    }

    /// The first of these slots whose position is `wanted`, and the position.
    #[inline]
    fn first(&self, mut slots: SlotSet, mut wanted: impl FnMut(u32) -> bool) -> Option<(usize, u32)> {
        while slots != SlotSet::NONE {
            let at = slots.first();
            let position = self.slots[at].load(Ordering::Acquire);
            if wanted(position) {
                return Some((at, position));
            }
            slots = slots.without_first();
        }
        None
    }

    /// Stores an entry in an empty slot.
    fn put(&self, at: usize, tag: u32, position: u32) {
        self.slots[at].store(position, Ordering::Release);
        self.set_tag(at, tag);
    }

    // The word is loaded again on purpose: indexing the loaded tags would go through memory and stall.
    fn set_tag(&self, at: usize, tag: u32) {
        let word = &self.tags[at / LANES];
        let others = word.load(Ordering::Relaxed) & !(u64::from(TAG_MASK) << shift(at));
        word.store(others | u64::from(tag) << shift(at), Ordering::Release);
    }

    /// Increments or decrements the overflow counter.
    fn count_overflow(&self, more: bool) {
        let word = &self.tags[WORDS - 1];
        let (last, one) = (word.load(Ordering::Relaxed), 1 << OVERFLOW_SHIFT);
        word.store(if more { last + one } else { last - one }, Ordering::Release);
    }
}

impl Table {
    /// An empty table of 2^`doublings` times the smallest size.
    pub(crate) fn new(doublings: u32) -> Self {
        let mut table = Self::without_groups(doublings);
        table.groups.extend((0..MIN_GROUPS << doublings).map(|_| Group::from(GroupBuilder::default())));
        table
    }

    fn without_groups(doublings: u32) -> Self {
        let count = MIN_GROUPS << doublings;
        let bytes = count * size_of::<Group>();
        let room = if bytes > HUGE_PAGE / 4 * 3 {
            (bytes.next_multiple_of(HUGE_PAGE) - ALLOCATOR_RESERVE) / size_of::<Group>()
        } else {
            count
        };
        let mut groups = Vec::with_capacity(room.max(count));
        advise_hugepages(groups.spare_capacity_mut());
        Self { groups, doublings, known_bits: TAG_MASK }
    }

    /// A copy of twice the size, or of half the size if this is not the smallest. Calls `rehash` with the positions of
    /// entries that must be inserted by hash.
    pub(crate) fn resized(&self, larger: bool, mut rehash: impl FnMut(u32)) -> Self {
        let mut next = Self::without_groups(if larger { self.doublings + 1 } else { self.doublings - 1 });
        let known_bits =
            if larger { (self.known_bits & !1) << 1 & TAG_MASK } else { self.known_bits >> 1 | 1 << (TAG_BITS - 1) };
        let rehash_all = known_bits.count_ones() < MIN_KNOWN_BITS;
        if !rehash_all {
            next.known_bits = known_bits;
        }
        let has_no_overflow = |group: &Group| group.tags(Ordering::Relaxed).has_no_overflow();
        let mut overflowed = !self.groups.last().is_none_or(has_no_overflow);
        // One group becomes two, or two become one.
        for groups in self.groups.chunks(if larger { 1 } else { 2 }) {
            let mut builders = [GroupBuilder::default(); 2];
            for (side, group) in (0..).zip(groups) {
                let tags = group.tags(Ordering::Relaxed);
                for at in (0..SLOTS).filter(|at| tags.tag(*at) != EMPTY) {
                    let (position, tag) = (group.slots[at].load(Ordering::Relaxed), tags.tag(at));
                    // The bit between the group number and the tag moves from one to the other.
                    let (to, tag) =
                        if larger { (tag >> (TAG_BITS - 1), tag << 1) } else { (0, (side << TAG_BITS | tag) >> 1) };
                    if overflowed || rehash_all || !builders[to as usize].push(tag & next.known_bits | 1, position) {
                        rehash(position);
                    }
                }
                overflowed = !tags.has_no_overflow();
            }
            next.groups.extend(builders.into_iter().take(if larger { 2 } else { 1 }).map(Group::from));
        }
        next
    }

    /// Number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.groups.len() * SLOTS
    }

    /// Bytes of the groups.
    pub(crate) fn bytes(&self) -> usize {
        self.groups.len() * size_of::<Group>()
    }

    /// Whether this is the smallest size.
    pub(crate) fn is_smallest(&self) -> bool {
        self.doublings == 0
    }

    /// The home group of a key, and its tag. Keys in ascending order have home groups in ascending order.
    fn home(&self, key: u64) -> (usize, u32) {
        let position = u128::from(key) * self.groups.len() as u128;
        ((position >> 64) as usize, ((position as u64) >> (u64::BITS - TAG_BITS)) as u32 & self.known_bits | 1)
    }

    /// Prefetches the home group of a key for writing.
    pub(crate) fn prefetch(&self, key: u64) {
        prefetch_for_write(&self.groups[self.home(key).0]);
    }

    /// After [`prefetch`](Self::prefetch): prefetches the next group if inserting the key will probe it.
    pub(crate) fn prefetch_next(&self, key: u64) {
        let home = self.home(key).0;
        let tags = self.groups[home].tags(Ordering::Relaxed);
        if !tags.has_no_overflow() || tags.empty() == SlotSet::NONE {
            prefetch_for_write(self.groups.get(home + 1).unwrap_or(&self.groups[0]));
        }
    }

    /// The first position under a key that is `wanted`.
    pub(crate) fn find(&self, key: u64, mut wanted: impl FnMut(u32) -> bool) -> Option<u32> {
        let (home, tag) = self.home(key);
        for group in self.probe(home) {
            let tags = group.tags(Ordering::Acquire);
            if let Some((_, position)) = group.first(tags.matching(tag), &mut wanted) {
                return Some(position);
            }
            if tags.has_no_overflow() {
                return None;
            }
        }
        None
    }

    /// Inserts an entry unless an entry with the same key is the `same` block. Returns whether it was inserted. The
    /// caller holds the writers' lock and ensures that the table has an empty slot.
    #[inline]
    pub(crate) fn insert(&self, key: u64, position: u32, same: impl FnMut(u32) -> bool) -> bool {
        let (home, tag) = self.home(key);
        let group = &self.groups[home];
        let tags = group.tags(Ordering::Relaxed);
        // The common case: the group has no overflow and no equal tag.
        let empty = tags.empty();
        if tags.has_no_overflow() && tags.matching(tag) == SlotSet::NONE && empty != SlotSet::NONE {
            group.put(empty.first(), tag, position);
            return true;
        }
        self.insert_slow(key, position, same)
    }

    #[inline(never)]
    fn insert_slow(&self, key: u64, position: u32, mut same: impl FnMut(u32) -> bool) -> bool {
        if self.find(key, &mut same).is_some() {
            return false;
        }
        let (home, tag) = self.home(key);
        for group in self.probe(home) {
            let empty = group.tags(Ordering::Relaxed).empty();
            if empty != SlotSet::NONE {
                group.put(empty.first(), tag, position);
                return true;
            }
            group.count_overflow(true);
        }
        unreachable!("the caller keeps a slot empty")
    }

    /// Changes the position of an entry. The caller holds the writers' lock.
    pub(crate) fn relocate(&self, key: u64, from: u32, to: u32) {
        if let Some((group, at, _)) = self.find_slot(key, from) {
            group.slots[at].store(to, Ordering::Release);
        }
    }

    /// Removes an entry. Returns whether it was there. The caller holds the writers' lock.
    #[inline]
    pub(crate) fn remove(&self, key: u64, position: u32) -> bool {
        let (home, tag) = self.home(key);
        let group = &self.groups[home];
        let tags = group.tags(Ordering::Relaxed);
        match group.first(tags.matching(tag), |here| here == position) {
            Some((at, _)) => group.set_tag(at, EMPTY),
            None => return !tags.has_no_overflow() && self.remove_overflowed(key, position),
        }
        true
    }

    #[inline(never)]
    fn remove_overflowed(&self, key: u64, position: u32) -> bool {
        let Some((group, at, overflowed)) = self.find_slot(key, position) else { return false };
        group.set_tag(at, EMPTY);
        self.probe(self.home(key).0).take(overflowed).for_each(|group| group.count_overflow(false));
        true
    }

    /// Group and slot of an entry, and the number of groups that it overflowed.
    #[inline]
    fn find_slot(&self, key: u64, position: u32) -> Option<(&Group, usize, usize)> {
        let (home, tag) = self.home(key);
        for (overflowed, group) in self.probe(home).enumerate() {
            let tags = group.tags(Ordering::Relaxed);
            if let Some((at, _)) = group.first(tags.matching(tag), |here| here == position) {
                return Some((group, at, overflowed));
            }
            if tags.has_no_overflow() {
                return None;
            }
        }
        None
    }

    /// The probe sequence from a home group on.
    fn probe(&self, home: usize) -> impl Iterator<Item = &Group> {
        self.groups[home..].iter().chain(&self.groups[..home])
    }
}
