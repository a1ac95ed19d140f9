//! Where blocks are, by a part of their name: a hash table that is read while it is written.
//!
//! Slots lie in groups of twelve, one cache line each, with marks: a byte for each slot, eight bits of the tag of what is in
//! it, or that it is empty. So two words say which slots are worth a look, and which is free. An entry lies in the group that
//! its tag says, or when that is full, in one of those after it. How many went past a group is a byte beside its marks: a
//! reader goes on to the next group only where somebody did. An entry is a place and no name, since the place has the name:
//! whoever asks compares it there, and who lays out a larger table reads it there.
//!
//! **Ordering.** A slot is one word. It is stored, after what it points to was written, and then its mark, with release; both
//! are loaded with acquire. A slot without a mark is read by nobody, or by one who saw an older mark and compares the name.
//! What an entry goes past counts it from before it is there until after it was taken, and entries never move within a table:
//! one that is there when a reader starts, and is not taken meanwhile, is found. Writers take turns by a lock of their own.
//! Look here in vain for growing: a full table is replaced by a larger one.

use super::sync::{AtomicU32, AtomicU64, Ordering};

/// The table.
pub(crate) struct Table(Box<[Group]>);

#[repr(align(64))]
struct Group {
    marks: [AtomicU64; 2],
    slots: [AtomicU32; SLOTS],
}

/// The marks of a group. Asked for slots, they answer with a bit for each, the top one of its byte: which slot it is nobody can
/// guess, so nothing here branches on it.
#[derive(Clone, Copy)]
struct Marks([u64; 2]);

/// Slots that a cache line holds, beside their marks.
const SLOTS: usize = 12;
/// The lowest bit of each byte.
const LOW: u64 = 0x0101_0101_0101_0101;
/// The highest, of those of slots.
const HIGH: [u64; 2] = [LOW << 7, (LOW << 7) >> 32];
/// The mark of a slot without an entry.
const EMPTY: u8 = 0;
/// In the second word: one more that went past a group. The count stays where it can grow no more: nobody knows then how many
/// they are.
const PAST: u64 = 1 << 32;
const PAST_MOST: u64 = 0xff << 32;

/// The mark of a tag. Its upper bits say which group it is in. No mark differs from [`EMPTY`] in the lowest bit alone.
fn mark(tag: u32) -> u8 {
    (tag as u8).max(2)
}

impl Marks {
    /// Slots that have a mark, and perhaps one that has not, behind one that has.
    fn perhaps(self, mark: u8) -> u128 {
        let all = u64::from(mark) * LOW;
        Self(self.0.map(|word| word ^ all)).empty()
    }

    /// Slots that are empty; right about whether there is one, and about the first.
    fn empty(self) -> u128 {
        let [low, high] = std::array::from_fn(|at| self.0[at].wrapping_sub(LOW) & !self.0[at] & HIGH[at]);
        u128::from(high) << 64 | u128::from(low)
    }

    /// Whether no entry that should be here lies further on.
    fn ends(self) -> bool {
        self.0[1] < PAST
    }

    /// One more went past, or one fewer.
    fn past(self, more: bool) -> u64 {
        match self.0[1] & PAST_MOST {
            PAST_MOST => self.0[1],
            _ if more => self.0[1] + PAST,
            _ => self.0[1] - PAST,
        }
    }

    fn of(self, at: usize) -> u8 {
        (self.0[at / 8] >> (at % 8 * 8)) as u8
    }
}

impl Group {
    fn marks(&self, order: Ordering) -> Marks {
        Marks([self.marks[0].load(order), self.marks[1].load(order)])
    }

    /// The first slot of these whose place is `wanted`, and that place.
    fn first(&self, mut slots: u128, mut wanted: impl FnMut(u32) -> bool) -> Option<(usize, u32)> {
        while slots != 0 {
            let at = position(slots);
            let place = self.slots[at].load(Ordering::Acquire);
            if wanted(place) {
                return Some((at, place));
            }
            slots &= slots - 1;
        }
        None
    }

    /// Puts an entry into the first empty slot.
    fn put(&self, marks: Marks, tag: u32, place: u32) {
        let at = position(marks.empty());
        self.slots[at].store(place, Ordering::Release);
        self.set_mark(at, mark(tag));
    }

    fn set_mark(&self, at: usize, mark: u8) {
        let (word, shift) = (&self.marks[at / 8], at % 8 * 8);
        let others = word.load(Ordering::Relaxed) & !(0xff << shift);
        word.store(others | u64::from(mark) << shift, Ordering::Release);
    }

    fn set_past(&self, more: bool) {
        self.marks[1].store(self.marks(Ordering::Relaxed).past(more), Ordering::Release);
    }
}

/// The first slot of some.
fn position(slots: u128) -> usize {
    slots.trailing_zeros() as usize / 8
}

impl Table {
    pub(crate) fn new(slots: usize) -> Self {
        let group = || Group {
            marks: std::array::from_fn(|_| AtomicU64::new(0)),
            slots: std::array::from_fn(|_| AtomicU32::new(0)),
        };
        Self((0..slots.div_ceil(SLOTS).max(1)).map(|_| group()).collect())
    }

    /// Slots in all.
    pub(crate) fn slots(&self) -> usize {
        self.0.len() * SLOTS
    }

    /// Bytes in all.
    pub(crate) fn bytes(&self) -> usize {
        self.0.len() * size_of::<Group>()
    }

    /// The group that an entry should be in. Tags in order have groups in order, so a table is copied front to back.
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.0.len() as u64) >> 32) as usize
    }

    /// Brings the entry's cache line near. What it answers means nothing.
    pub(crate) fn touch(&self, tag: u32) -> u64 {
        self.0[self.home(tag)].marks[0].load(Ordering::Relaxed)
    }

    /// The first place under a tag that is `wanted`.
    pub(crate) fn find(&self, tag: u32, mut wanted: impl FnMut(u32) -> bool) -> Option<u32> {
        for group in self.from(tag) {
            let marks = group.marks(Ordering::Acquire);
            if let Some((_, place)) = group.first(marks.perhaps(mark(tag)), &mut wanted) {
                return Some(place);
            }
            if marks.ends() {
                return None;
            }
        }
        None
    }

    /// Adds an entry unless one under its tag is the `same`. Whether it was added. The caller holds the writers' lock, and sees
    /// to it that there is an empty slot.
    #[inline]
    pub(crate) fn enter(&self, tag: u32, place: u32, same: impl FnMut(u32) -> bool) -> bool {
        let group = &self.0[self.home(tag)];
        let marks = group.marks(Ordering::Relaxed);
        // Nobody went past it, and none is like it, most of the time.
        if marks.ends() && marks.perhaps(mark(tag)) == 0 && marks.empty() != 0 {
            group.put(marks, tag, place);
            return true;
        }
        self.enter_slowly(tag, place, same)
    }

    #[inline(never)]
    fn enter_slowly(&self, tag: u32, place: u32, mut same: impl FnMut(u32) -> bool) -> bool {
        if self.find(tag, &mut same).is_some() {
            return false;
        }
        for group in self.from(tag) {
            let marks = group.marks(Ordering::Relaxed);
            if marks.empty() != 0 {
                group.put(marks, tag, place);
                return true;
            }
            group.set_past(true);
        }
        unreachable!("the caller keeps a slot empty")
    }

    /// Points an entry elsewhere. The caller holds the writers' lock.
    pub(crate) fn point(&self, tag: u32, from: u32, to: u32) {
        if let Some((group, at, _)) = self.slot(tag, from) {
            group.slots[at].store(to, Ordering::Release);
        }
    }

    /// Removes an entry. Whether it was there. The caller holds the writers' lock.
    #[inline]
    pub(crate) fn take(&self, tag: u32, place: u32) -> bool {
        let group = &self.0[self.home(tag)];
        let marks = group.marks(Ordering::Relaxed);
        match group.first(marks.perhaps(mark(tag)), |here| here == place) {
            Some((at, _)) => group.set_mark(at, EMPTY),
            None => return !marks.ends() && self.take_further(tag, place),
        }
        true
    }

    #[inline(never)]
    fn take_further(&self, tag: u32, place: u32) -> bool {
        let Some((group, at, past)) = self.slot(tag, place) else { return false };
        group.set_mark(at, EMPTY);
        self.from(tag).take(past).for_each(|group| group.set_past(false));
        true
    }

    /// Calls for the place of every entry.
    pub(crate) fn for_each(&self, mut each: impl FnMut(u32)) {
        for group in &self.0 {
            let marks = group.marks(Ordering::Relaxed);
            for at in (0..SLOTS).filter(|at| marks.of(*at) != EMPTY) {
                each(group.slots[at].load(Ordering::Relaxed));
            }
        }
    }

    /// Where an entry is, and how many groups it went past.
    #[inline]
    fn slot(&self, tag: u32, place: u32) -> Option<(&Group, usize, usize)> {
        for (past, group) in self.from(tag).enumerate() {
            let marks = group.marks(Ordering::Relaxed);
            if let Some((at, _)) = group.first(marks.perhaps(mark(tag)), |here| here == place) {
                return Some((group, at, past));
            }
            if marks.ends() {
                return None;
            }
        }
        None
    }

    /// The groups in which an entry may lie, in that order.
    fn from(&self, tag: u32) -> impl Iterator<Item = &Group> {
        let home = self.home(tag);
        self.0[home..].iter().chain(&self.0[..home])
    }
}
