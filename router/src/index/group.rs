//! A group of ten slots of a hash table: one cache line.
//!
//! Each slot has a tag of 16 bits of the key (as in Swiss tables and F14), which is not 0 if the slot is used. One
//! SIMD-within-a-register comparison of all tags finds the slots that may match, or an empty slot; a false match is
//! rare. Beside the tags a group counts the entries that overflowed it to a following group. A slot has a position and
//! no hash: the reader compares the hash at that position.
//!
//! **Ordering.** A slot is one word. The writer stores the block at a position, then the slot, then the tag, the latter
//! two with release; the reader loads both with acquire. A reader sees a slot without a tag only if it loaded an older
//! tag, and then it compares the hash.

use super::sync::{CacheLine, Ordering};
use kvbm::swar::{self, BITS as TAG_BITS, LANES, WORDS};

/// A group.
#[derive(Clone, Copy)]
pub(crate) struct Group<'a>(pub(crate) &'a CacheLine);

/// The tags and the overflow counter of a group.
#[derive(Clone, Copy)]
pub(crate) struct Tags([u64; WORDS]);

/// A set of slots of a group, a bit for each.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct SlotSet(u32);

/// Slots per cache line, beside their tags.
pub(crate) const SLOTS: usize = 10;
/// Tag of an empty slot.
pub(crate) const EMPTY: u32 = 0;
/// All bits of a tag.
pub(crate) const TAG_MASK: u32 = (1 << TAG_BITS) - 1;
/// Offset of the overflow counter in the last word.
const OVERFLOW_SHIFT: u32 = (SLOTS % LANES) as u32 * TAG_BITS;

impl SlotSet {
    pub(crate) const NONE: Self = Self(0);

    #[inline]
    pub(crate) fn first(self) -> usize {
        (self.0.trailing_zeros() as usize).min(SLOTS - 1)
    }

    #[inline]
    fn without_first(self) -> Self {
        Self(self.0 & (self.0 - 1))
    }

    /// The numbers of the slots, in ascending order.
    #[inline]
    pub(crate) fn slots(mut self) -> impl Iterator<Item = usize> {
        std::iter::from_fn(move || {
            let first = (self != Self::NONE).then(|| self.first())?;
            self = self.without_first();
            Some(first)
        })
    }
}

impl Tags {
    /// Slots with this tag.
    #[inline]
    pub(crate) fn matching(self, tag: u32) -> SlotSet {
        SlotSet(swar::equal_lanes(self.0, tag as u16) & ((1 << SLOTS) - 1))
    }

    /// Empty slots.
    #[inline]
    pub(crate) fn empty(self) -> SlotSet {
        self.matching(EMPTY)
    }

    /// Used slots.
    #[inline]
    pub(crate) fn used(self) -> SlotSet {
        SlotSet(!self.empty().0 & ((1 << SLOTS) - 1))
    }

    /// The tag of a slot.
    #[inline]
    pub(crate) fn tag(self, at: usize) -> u32 {
        (self.0[at / LANES] >> shift(at)) as u32 & TAG_MASK
    }

    /// Whether no entry has overflowed this group.
    #[inline]
    pub(crate) fn has_no_overflow(self) -> bool {
        self.0[WORDS - 1] >> OVERFLOW_SHIFT == 0
    }
}

/// Offset of a slot's tag in its word.
fn shift(at: usize) -> u32 {
    (at % LANES) as u32 * TAG_BITS
}

impl Group<'_> {
    /// The tags.
    #[inline]
    pub(crate) fn tags(self, order: Ordering) -> Tags {
        Tags(std::array::from_fn(|at| self.0.words[at].load(order)))
    }

    /// The position in a slot.
    #[inline]
    pub(crate) fn position(self, at: usize) -> u32 {
        self.0.halves[at].load(Ordering::Acquire)
    }

    /// The first of these slots whose position is `wanted`, and the position.
    #[inline]
    pub(crate) fn first(self, slots: SlotSet, mut wanted: impl FnMut(u32) -> bool) -> Option<(usize, u32)> {
        slots.slots().find_map(|at| {
            let position = self.position(at);
            wanted(position).then_some((at, position))
        })
    }

    /// Stores an entry in an empty slot.
    #[inline]
    pub(crate) fn put(self, at: usize, tag: u32, position: u32) {
        self.set_position(at, position);
        self.set_tag(at, tag);
    }

    /// Changes the position of an entry.
    #[inline]
    pub(crate) fn set_position(self, at: usize, position: u32) {
        self.0.halves[at].store(position, Ordering::Release);
    }

    /// Changes the tag of a slot.
    // The word is loaded again on purpose: indexing the loaded tags would go through memory and stall.
    #[inline]
    pub(crate) fn set_tag(self, at: usize, tag: u32) {
        let word = &self.0.words[at / LANES];
        let others = word.load(Ordering::Relaxed) & !(u64::from(TAG_MASK) << shift(at));
        word.store(others | u64::from(tag) << shift(at), Ordering::Release);
    }

    /// The positions of all entries.
    pub(crate) fn positions(self) -> impl Iterator<Item = u32> {
        self.tags(Ordering::Relaxed).used().slots().map(move |slot| self.position(slot))
    }

    /// Moves the entries whose tags have this bit to an empty group: they are there before they are gone from here.
    // Without branches, since half of them would be mispredicted. Slots without a tag have positions that are not read.
    pub(crate) fn divide(self, bit: u32, to: Group<'_>) {
        let tags = self.tags(Ordering::Relaxed);
        let (mut stay, mut moved, mut positions, mut len) = (tags.0, [0_u16; WORDS * LANES], [0; SLOTS + 1], 0);
        for slot in 0..SLOTS {
            let tag = tags.tag(slot);
            let moves = tag >> bit & 1;
            (moved[len], positions[len]) = ((tag * moves) as u16, self.0.halves[slot].load(Ordering::Relaxed));
            stay[slot / LANES] &= !(u64::from(moves * TAG_MASK) << shift(slot));
            len += moves as usize;
        }
        to.0.halves.iter().zip(positions).for_each(|(half, position)| half.store(position, Ordering::Release));
        for (word, lanes) in to.0.words.iter().zip(moved.chunks_exact(LANES)) {
            let value = lanes.iter().rev().fold(0, |value, lane| value << TAG_BITS | u64::from(*lane));
            word.store(value, Ordering::Release);
        }
        self.0.words.iter().zip(stay).for_each(|(word, value)| word.store(value, Ordering::Release));
    }

    /// Increments or decrements the overflow counter.
    pub(crate) fn count_overflow(self, more: bool) {
        let word = &self.0.words[WORDS - 1];
        let (last, one) = (word.load(Ordering::Relaxed), 1 << OVERFLOW_SHIFT);
        word.store(if more { last + one } else { last - one }, Ordering::Release);
    }
}
