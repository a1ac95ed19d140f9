//! A hash table from block hashes to positions, which is read without a lock while one thread writes, and which grows
//! and shrinks in place, one bucket at a time (linear hashing, Litwin 1980).
//!
//! A bucket is a memory page of [groups](Group). The key selects a bucket, and a group in it (its home). An entry is in
//! its home or, if that is full, in one of the following groups of the bucket, around its end. Each group counts the
//! entries that overflowed it; a reader probes the next group only if there are any.
//!
//! **Size.** A table at level *n* has 2^*n* buckets, and some more: the buckets before `split` were divided in two, of
//! which the second is 2^*n* buckets further. Once all are divided, the level rises. The lowest *n* address bits of a
//! key are its bucket at level *n*. See [`resize`](super::resize) for the division of a bucket.
//!
//! **Tags.** A tag has sixteen address bits of the key. Among the first [`TAG_LEVELS`] of them is the bit that decides
//! where the entry goes when its bucket is divided, so that is known without reading its hash. The bits before that one
//! are the same in the whole bucket. Where they would become too many, each entry gets a tag of later bits when its
//! bucket is divided: the window of a bucket's tags depends on its level.
//!
//! **Ordering.** Overflow counters are raised before an entry is inserted and lowered after it was removed. An entry
//! moves only while its bucket is divided or merged, which the state says from before the first change until after the
//! last. It is then at its new place before it is gone from the old one, so a reader looks at the old place, then at
//! the new one. A reader that finds nothing loads the state again, and starts again if the state has changed: a reader
//! that sees an entry gone sees the state that announced the move. So a reader finds each entry that is there when it
//! starts and is not removed meanwhile. Writers are serialized by a lock of the caller.

use super::group::{EMPTY, Group, SLOTS, SlotSet, TAG_MASK};
use super::sync::{
    AtomicU64, BUCKET_BITS, CacheLine, HUGE_PAGE, LazyLines, NoAddresses, Ordering, TAG_LEVELS, prefetch_for_write,
};

/// A hash table. Alone on its cache lines: readers of other tables do not wait for changes of its state.
#[repr(align(128))]
pub(crate) struct Table {
    state: AtomicU64,
    lines: LazyLines,
}

/// Number of buckets, and whether one of them is being divided or merged. Every value is used once.
///
/// From the lowest bit: `split`; the level; the first address bits of tags at this level and at the next one; the
/// motion; a version.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct State(u64);

/// What is being done to the bucket [`State::split`].
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Motion {
    None,
    Dividing,
    Merging,
}

/// Where a key belongs in a table of some size: the number of its home, counted through all buckets, and its tag.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(super) home: u32,
    pub(super) tag: u32,
}

/// Outcome of an insertion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Inserted {
    /// The entry is in the table now.
    New,
    /// The table has an entry with the same key for the same block.
    Known,
    /// The bucket is full. Good hashes never fill one.
    Full,
}

/// Groups per bucket.
pub(crate) const GROUPS: usize = 1 << BUCKET_BITS;
/// Slots per bucket.
pub(crate) const BUCKET_SLOTS: usize = GROUPS * SLOTS;
/// Bytes per bucket.
pub(crate) const BUCKET_BYTES: usize = GROUPS * size_of::<CacheLine>();
/// Largest level: eight tables then have a billion entries, and have reserved 16 GiB of addresses.
pub(super) const MAX_LEVEL: u32 = 19;
/// The bit that is set in a tag without address bits, since 0 is the tag of empty slots. It never decides.
const HIGHEST_TAG_BIT: u32 = TAG_MASK / 2 + 1;
/// Buckets that become accessible at once: a huge page.
const STEP: usize = HUGE_PAGE / BUCKET_BYTES;
/// Buckets of the first huge page that have small pages: those of most small tables.
const SMALL_PAGES: usize = STEP / 4 * 3;

/// The address bits of a key. The best mixed ones come first: its highest bits, after those of the group.
#[inline]
fn address(key: u64) -> u64 {
    (key << BUCKET_BITS).swap_bytes()
}

/// The first address bit of the tags in a bucket of this level.
pub(super) fn first_tag_bit(level: u32) -> u32 {
    ((level + 1) / TAG_LEVELS * TAG_LEVELS).saturating_sub(1)
}

impl State {
    const LEVEL: u32 = MAX_LEVEL;
    const TAG_BIT: u32 = Self::LEVEL + Self::BITS;
    const NEXT_TAG_BIT: u32 = Self::TAG_BIT + Self::BITS;
    const MOTION: u32 = Self::NEXT_TAG_BIT + Self::BITS;
    const VERSION: u32 = Self::MOTION + 2;
    /// Bits of the number of an address bit.
    const BITS: u32 = 5;

    fn field(self, shift: u32) -> u32 {
        (self.0 >> shift) as u32 & ((1 << Self::BITS) - 1)
    }

    /// The number of address bits of a bucket that was not divided.
    #[inline]
    pub(super) fn level(self) -> u32 {
        self.field(Self::LEVEL)
    }

    /// The first bucket that was not divided, or is being divided or merged.
    #[inline]
    pub(super) fn split(self) -> u64 {
        self.0 & ((1 << MAX_LEVEL) - 1)
    }

    #[inline]
    pub(super) fn motion(self) -> Motion {
        match self.0 >> Self::MOTION & 3 {
            0 => Motion::None,
            1 => Motion::Dividing,
            _ => Motion::Merging,
        }
    }

    /// Number of buckets, without one that is only being filled or cleared.
    pub(super) fn buckets(self) -> usize {
        ((1 << self.level()) + self.split()) as usize
    }

    /// The place of a key.
    #[inline]
    pub(crate) fn place(self, key: u64) -> Place {
        let (address, size) = (address(key), 1 << self.level());
        let undivided = address & (size - 1);
        let divided = undivided < self.split();
        let bucket = if divided { address & (2 * size - 1) } else { undivided };
        Place::new(key, bucket, self.field(if divided { Self::NEXT_TAG_BIT } else { Self::TAG_BIT }))
    }

    /// The state that follows this one.
    fn then(self, level: u32, split: u64, motion: Motion) -> Self {
        let version = (self.0 >> Self::VERSION) + 1;
        let tag_bits = u64::from(first_tag_bit(level)) << Self::TAG_BIT
            | u64::from(first_tag_bit(level + 1)) << Self::NEXT_TAG_BIT;
        let motion = (motion as u64) << Self::MOTION;
        Self(version << Self::VERSION | motion | tag_bits | u64::from(level) << Self::LEVEL | split)
    }
}

impl Place {
    #[inline]
    fn new(key: u64, bucket: u64, first_tag_bit: u32) -> Self {
        let tag = (address(key) >> first_tag_bit) as u32 & TAG_MASK;
        let tag = if tag == EMPTY { HIGHEST_TAG_BIT } else { tag };
        Self { home: (bucket << BUCKET_BITS | key >> (u64::BITS - BUCKET_BITS)) as u32, tag }
    }

    /// The place of a key in a table where all buckets have this level.
    pub(super) fn at_level(key: u64, level: u32) -> Self {
        Self::new(key, address(key) & ((1 << level) - 1), first_tag_bit(level))
    }

    fn bucket(self) -> usize {
        self.home as usize / GROUPS
    }
}

impl Table {
    /// An empty table.
    pub(crate) fn new() -> Result<Self, NoAddresses> {
        Self::up_to(1 << MAX_LEVEL)
    }

    /// An empty table that reserves addresses for at most so many buckets.
    pub(super) fn up_to(buckets: usize) -> Result<Self, NoAddresses> {
        let state = State(0).then(0, 0, Motion::None);
        Ok(Self { state: AtomicU64::new(state.0), lines: LazyLines::reserve(GROUPS * buckets, GROUPS)? })
    }

    /// Number of buckets.
    pub(crate) fn buckets(&self) -> usize {
        self.state(Ordering::Relaxed).buckets()
    }

    /// The level, and the share of the buckets that were divided beyond it.
    pub(crate) fn size(&self) -> (u32, f64) {
        let state = self.state(Ordering::Relaxed);
        (state.level(), state.split() as f64 / (1_u64 << state.level()) as f64)
    }

    /// The size. It changes only under the writers' lock.
    #[inline]
    pub(crate) fn state(&self, order: Ordering) -> State {
        State(self.state.load(order))
    }

    /// Replaces the state. The caller holds the writers' lock.
    pub(super) fn set_state(&self, level: u32, split: u64, motion: Motion) {
        let next = self.state(Ordering::Relaxed).then(level, split, motion);
        self.state.store(next.0, Ordering::Release);
    }

    /// Makes a new bucket accessible. Returns whether the system permits that.
    pub(super) fn ensure(&self, bucket: usize) -> bool {
        if bucket == SMALL_PAGES && self.lines.len() == STEP * GROUPS {
            self.lines.collapse(0..self.lines.len());
        }
        self.lines.allow((bucket + 1).next_multiple_of(STEP) * GROUPS)
    }

    /// Gives back the memory of the unused buckets from this one on: those of its huge page, if it is the first there.
    pub(super) fn release_from(&self, bucket: usize) {
        if bucket.is_multiple_of(STEP) || bucket < STEP && bucket.is_power_of_two() {
            self.lines.release(bucket * GROUPS..(bucket + 1).next_multiple_of(STEP) * GROUPS);
        }
    }

    /// The groups of a bucket.
    #[inline]
    pub(super) fn bucket(&self, bucket: usize) -> &[CacheLine] {
        &self.lines[bucket * GROUPS..][..GROUPS]
    }

    /// The home of a place.
    #[inline]
    fn home(&self, place: Place) -> Group<'_> {
        Group(&self.lines[place.home as usize])
    }

    /// Prefetches the home of a place for writing. The place may be out of date.
    #[inline]
    pub(crate) fn prefetch(&self, place: Place) {
        if let Some(line) = self.lines.get(place.home as usize) {
            prefetch_for_write(line);
        }
    }

    /// After [`prefetch`](Self::prefetch): prefetches the next group if inserting at this place will probe it.
    #[inline]
    pub(crate) fn prefetch_next(&self, place: Place) {
        let tags = self.home(place).tags(Ordering::Relaxed);
        if !tags.has_no_overflow() || tags.empty() == SlotSet::NONE {
            self.probe(place).nth(1).into_iter().for_each(|group| prefetch_for_write(group.0));
        }
    }

    /// The first position under a key that is `wanted`.
    #[inline]
    pub(crate) fn find(&self, key: u64, mut wanted: impl FnMut(u32) -> bool) -> Option<u32> {
        let state = self.state(Ordering::Acquire);
        let found = self.find_at(state.place(key), &mut wanted);
        if found.is_some() || state.motion() == Motion::None && self.state(Ordering::Acquire) == state {
            return found;
        }
        self.find_in_motion(key, state, wanted)
    }

    #[inline(never)]
    fn find_in_motion(&self, key: u64, mut state: State, mut wanted: impl FnMut(u32) -> bool) -> Option<u32> {
        loop {
            let level = state.level();
            let moves = Place::at_level(key, level).bucket() == state.split() as usize;
            let (before, after) = match state.motion() {
                Motion::Dividing if moves => (Place::at_level(key, level), Some(level + 1)),
                Motion::Merging if moves => (Place::at_level(key, level + 1), Some(level)),
                _ => (state.place(key), None),
            };
            let found = self.find_at(before, &mut wanted);
            let found = found.or_else(|| self.find_at(Place::at_level(key, after?), &mut wanted));
            let now = self.state(Ordering::Acquire);
            if found.is_some() || now == state {
                return found;
            }
            state = now;
        }
    }

    #[inline]
    fn find_at(&self, place: Place, mut wanted: impl FnMut(u32) -> bool) -> Option<u32> {
        let home = self.home(place);
        let tags = home.tags(Ordering::Acquire);
        let found = home.first(tags.matching(place.tag), &mut wanted);
        if found.is_some() || tags.has_no_overflow() {
            return found.map(|(_, position)| position);
        }
        for group in self.probe(place).skip(1) {
            let tags = group.tags(Ordering::Acquire);
            if let Some((_, position)) = group.first(tags.matching(place.tag), &mut wanted) {
                return Some(position);
            }
            if tags.has_no_overflow() {
                return None;
            }
        }
        None
    }

    /// Inserts an entry unless an entry with the same key is the `same` block. The caller holds the writers' lock, and
    /// the place is that of the table's present size.
    #[inline]
    pub(crate) fn insert(&self, place: Place, position: u32, same: impl FnMut(u32) -> bool) -> Inserted {
        let group = self.home(place);
        let tags = group.tags(Ordering::Relaxed);
        // The common case: the group has no overflow and no equal tag.
        let empty = tags.empty();
        if tags.has_no_overflow() && tags.matching(place.tag) == SlotSet::NONE && empty != SlotSet::NONE {
            group.put(empty.first(), place.tag, position);
            return Inserted::New;
        }
        self.insert_slow(place, position, same)
    }

    #[inline(never)]
    fn insert_slow(&self, place: Place, position: u32, same: impl FnMut(u32) -> bool) -> Inserted {
        match self.find_at(place, same) {
            Some(_) => Inserted::Known,
            None if self.put(place, position) => Inserted::New,
            None => Inserted::Full,
        }
    }

    /// Stores an entry at its home or in the next group with space. Returns whether there was one. The caller holds the
    /// writers' lock.
    pub(super) fn put(&self, place: Place, position: u32) -> bool {
        let has_space = |group: &Group<'_>| group.tags(Ordering::Relaxed).empty() != SlotSet::NONE;
        let Some(overflowed) = self.probe(place).position(|group| has_space(&group)) else { return false };
        for (at, group) in self.probe(place).enumerate().take(overflowed + 1) {
            if at < overflowed {
                group.count_overflow(true);
            } else {
                group.put(group.tags(Ordering::Relaxed).empty().first(), place.tag, position);
            }
        }
        true
    }

    /// Changes the position of an entry. The caller holds the writers' lock.
    pub(crate) fn relocate(&self, key: u64, from: u32, to: u32) {
        if let Some((group, at, _)) = self.find_slot(self.state(Ordering::Relaxed).place(key), from) {
            group.set_position(at, to);
        }
    }

    /// Removes an entry. Returns whether it was there. As for [`insert`](Self::insert), the caller holds the lock, and
    /// the place is the present one.
    #[inline]
    pub(crate) fn remove(&self, place: Place, position: u32) -> bool {
        let group = self.home(place);
        let tags = group.tags(Ordering::Relaxed);
        match group.first(tags.matching(place.tag), |here| here == position) {
            Some((at, _)) => group.set_tag(at, EMPTY),
            None => return !tags.has_no_overflow() && self.remove_at(place, position),
        }
        true
    }

    /// Removes an entry from its place or the groups that follow it. The caller holds the writers' lock.
    #[inline(never)]
    pub(super) fn remove_at(&self, place: Place, position: u32) -> bool {
        let Some((group, at, overflowed)) = self.find_slot(place, position) else { return false };
        group.set_tag(at, EMPTY);
        self.probe(place).take(overflowed).for_each(|group| group.count_overflow(false));
        true
    }

    /// Changes the tag of an entry. The caller holds the writers' lock.
    pub(super) fn retag(&self, place: Place, position: u32, tag: u32) {
        if let Some((group, at, _)) = self.find_slot(place, position) {
            group.set_tag(at, tag);
        }
    }

    /// Group and slot of an entry, and the number of groups that it overflowed.
    #[inline]
    pub(super) fn find_slot(&self, place: Place, position: u32) -> Option<(Group<'_>, usize, usize)> {
        for (overflowed, group) in self.probe(place).enumerate() {
            let tags = group.tags(Ordering::Relaxed);
            if let Some((at, _)) = group.first(tags.matching(place.tag), |here| here == position) {
                return Some((group, at, overflowed));
            }
            if tags.has_no_overflow() {
                return None;
            }
        }
        None
    }

    /// The groups of a place's bucket, from the home on.
    fn probe(&self, place: Place) -> impl Iterator<Item = Group<'_>> {
        let (before, after) = self.bucket(place.bucket()).split_at(place.home as usize % GROUPS);
        after.iter().chain(before).map(Group)
    }
}
