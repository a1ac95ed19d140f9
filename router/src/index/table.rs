//! Where blocks are, by a part of their name: a hash table that is read while it is written.
//!
//! Slots lie in groups of ten, one cache line each, with marks: for each slot fifteen bits of the tag of what is in it, and one
//! that there is something. They are compared all at once, so few instructions say which slots are worth a look, and which is
//! free; that a mark is right and the entry wrong is rare. An entry lies in the group that its tag says, or when that is full, in
//! one of those after it. How many went past a group is a number beside its marks: a reader goes on to the next group only where
//! somebody did. An entry is a place and no name, since the place has the name: whoever asks compares it there.
//!
//! **Growing.** A full table is replaced by one twice as large. The bits of a mark are those of the tag below the ones that say
//! which group, so a mark says which of two groups an entry goes to, and nobody reads the entry's name for that; but one bit of
//! each mark is not known then. Entries that may have gone past their group, and all of them once too few bits are known, have
//! to be entered anew by who knows their names.
//!
//! **Ordering.** A slot is one word. It is stored, after what it points to was written, and then its mark, with release; both
//! are loaded with acquire. A slot without a mark is read by nobody, or by one who saw an older mark and compares the name.
//! What an entry goes past counts it from before it is there until after it was taken, and entries never move within a table:
//! one that is there when a reader starts, and is not taken meanwhile, is found. Writers take turns by a lock of their own.

use super::sync::{AtomicU32, AtomicU64, HUGE_PAGE, Ordering, advise_hugepages, prefetch_for_write};
use kvbm::swar::{self, BITS as MARK, LANES, WORDS};

/// The table.
pub(crate) struct Table {
    groups: Vec<Group>,
    /// How often it is twice as large as the smallest.
    doublings: u32,
    /// The bits of a mark that are known.
    known: u32,
}

#[repr(align(64))]
struct Group {
    /// A mark for each slot. Behind them, in the last word, the number of entries further on that should be here or before.
    marks: [AtomicU64; WORDS],
    slots: [AtomicU32; SLOTS],
}

/// What a group begins with.
#[derive(Clone, Copy, Default)]
struct Draft {
    marks: [u64; WORDS],
    slots: [u32; SLOTS],
    len: usize,
}

/// The marks of a group, and how many entries went past it.
#[derive(Clone, Copy)]
struct Marks([u64; WORDS]);

/// Some slots of a group, a bit for each.
#[derive(Clone, Copy, PartialEq)]
struct Slots(u32);

/// Slots that a cache line holds, beside their marks.
const SLOTS: usize = 10;
/// What a slot takes with its part of the group.
pub(crate) const SLOT_BYTES: f64 = size_of::<Group>() as f64 / SLOTS as f64;
/// Where the number of those further on begins, in the last word.
const PAST: u32 = (SLOTS % LANES) as u32 * MARK;
/// Groups of the smallest table: times a power of two, that nearly fills large pages.
const LEAST: usize = 63;
/// Bytes of large pages that are left to the allocator for what it notes beside them.
const SPARED: usize = 4096;
/// The mark of a slot without an entry.
const EMPTY: u32 = 0;
/// All bits of a mark.
const ALL: u32 = (1 << MARK) - 1;
/// Bits that are known of a mark in the worst case: one name in eight hundred that is not there is looked for in vain then.
const KNOWN_LEAST: u32 = 12;

impl Slots {
    const NONE: Self = Self(0);

    fn first(self) -> usize {
        (self.0.trailing_zeros() as usize).min(SLOTS - 1)
    }

    fn but_first(self) -> Self {
        Self(self.0 & (self.0 - 1))
    }
}

impl Marks {
    /// Slots that have a mark.
    #[inline]
    fn with(self, mark: u32) -> Slots {
        Slots(swar::equal_lanes(self.0, mark as u16) & ((1 << SLOTS) - 1))
    }

    /// Slots that are empty.
    #[inline]
    fn empty(self) -> Slots {
        self.with(EMPTY)
    }

    fn mark(self, at: usize) -> u32 {
        (self.0[at / LANES] >> shift(at)) as u32 & ALL
    }

    /// Whether no entry that should be here lies further on.
    fn ends(self) -> bool {
        self.0[WORDS - 1] >> PAST == 0
    }
}

/// Where a slot's mark begins in its word.
fn shift(at: usize) -> u32 {
    (at % LANES) as u32 * MARK
}

impl Draft {
    /// Adds an entry. Whether there was room.
    fn push(&mut self, mark: u32, place: u32) -> bool {
        let at = self.len;
        if at < SLOTS {
            self.marks[at / LANES] |= u64::from(mark) << shift(at);
            self.slots[at] = place;
            self.len += 1;
        }
        at < SLOTS
    }
}

impl From<Draft> for Group {
    fn from(Draft { marks, slots, .. }: Draft) -> Self {
        Self { marks: marks.map(AtomicU64::new), slots: slots.map(AtomicU32::new) }
    }
}

impl Group {
    #[inline]
    fn marks(&self, order: Ordering) -> Marks {
        Marks(std::array::from_fn(|at| self.marks[at].load(order)))
    }

    /// The first of these slots whose place is `wanted`, and that place.
    #[inline]
    fn first(&self, mut slots: Slots, mut wanted: impl FnMut(u32) -> bool) -> Option<(usize, u32)> {
        while slots != Slots::NONE {
            let at = slots.first();
            let place = self.slots[at].load(Ordering::Acquire);
            if wanted(place) {
                return Some((at, place));
            }
            slots = slots.but_first();
        }
        None
    }

    /// Puts an entry into an empty slot.
    fn put(&self, at: usize, mark: u32, place: u32) {
        self.slots[at].store(place, Ordering::Release);
        self.set_mark(at, mark);
    }

    // The word is loaded once more: chosen from what is known of all of them, it would go through memory, and have others wait.
    fn set_mark(&self, at: usize, mark: u32) {
        let word = &self.marks[at / LANES];
        let others = word.load(Ordering::Relaxed) & !(u64::from(ALL) << shift(at));
        word.store(others | u64::from(mark) << shift(at), Ordering::Release);
    }

    /// One more went past, or one fewer.
    fn set_past(&self, more: bool) {
        let word = &self.marks[WORDS - 1];
        let (last, one) = (word.load(Ordering::Relaxed), 1 << PAST);
        word.store(if more { last + one } else { last - one }, Ordering::Release);
    }
}

impl Table {
    /// An empty table, so many times twice as large as the smallest.
    pub(crate) fn new(doublings: u32) -> Self {
        let mut table = Self::without_groups(doublings);
        table.groups.extend((0..LEAST << doublings).map(|_| Group::from(Draft::default())));
        table
    }

    fn without_groups(doublings: u32) -> Self {
        let count = LEAST << doublings;
        let bytes = count * size_of::<Group>();
        let room = if bytes > HUGE_PAGE / 4 * 3 {
            (bytes.next_multiple_of(HUGE_PAGE) - SPARED) / size_of::<Group>()
        } else {
            count
        };
        let mut groups = Vec::with_capacity(room.max(count));
        advise_hugepages(groups.spare_capacity_mut());
        Self { groups, doublings, known: ALL }
    }

    /// The same entries in another table, twice as large, or half as large if this is not the smallest. `unsure` is called for the
    /// places of those that have to be entered by name.
    pub(crate) fn relaid(&self, larger: bool, mut unsure: impl FnMut(u32)) -> Self {
        let mut next = Self::without_groups(if larger { self.doublings + 1 } else { self.doublings - 1 });
        let known = if larger { (self.known & !1) << 1 & ALL } else { self.known >> 1 | 1 << (MARK - 1) };
        let by_name = known.count_ones() < KNOWN_LEAST;
        if !by_name {
            next.known = known;
        }
        let ends = |group: &Group| group.marks(Ordering::Relaxed).ends();
        let mut past = !self.groups.last().is_none_or(ends);
        // A group becomes two, or two become one.
        for groups in self.groups.chunks(if larger { 1 } else { 2 }) {
            let mut drafts = [Draft::default(); 2];
            for (side, group) in (0..).zip(groups) {
                let marks = group.marks(Ordering::Relaxed);
                for at in (0..SLOTS).filter(|at| marks.mark(*at) != EMPTY) {
                    let (place, mark) = (group.slots[at].load(Ordering::Relaxed), marks.mark(at));
                    // The bit between the number of the group and the mark goes over from the one to the other.
                    let (to, mark) =
                        if larger { (mark >> (MARK - 1), mark << 1) } else { (0, (side << MARK | mark) >> 1) };
                    if past || by_name || !drafts[to as usize].push(mark & next.known | 1, place) {
                        unsure(place);
                    }
                }
                past = !marks.ends();
            }
            next.groups.extend(drafts.into_iter().take(if larger { 2 } else { 1 }).map(Group::from));
        }
        next
    }

    /// Slots in all.
    pub(crate) fn slots(&self) -> usize {
        self.groups.len() * SLOTS
    }

    /// Bytes in all.
    pub(crate) fn bytes(&self) -> usize {
        self.groups.len() * size_of::<Group>()
    }

    /// Whether it is the smallest.
    pub(crate) fn is_least(&self) -> bool {
        self.doublings == 0
    }

    /// The group that an entry should be in, and its mark. Tags in order have groups in order.
    fn home(&self, tag: u64) -> (usize, u32) {
        let position = u128::from(tag) * self.groups.len() as u128;
        ((position >> 64) as usize, ((position as u64) >> (u64::BITS - MARK)) as u32 & self.known | 1)
    }

    /// Begins to bring the entry's cache line near, for who is going to change it.
    pub(crate) fn fetch(&self, tag: u64) {
        prefetch_for_write(&self.groups[self.home(tag).0]);
    }

    /// Once that is near: begins to bring the next one near, where whoever enters the entry will look at it as well.
    pub(crate) fn fetch_next(&self, tag: u64) {
        let home = self.home(tag).0;
        let marks = self.groups[home].marks(Ordering::Relaxed);
        if !marks.ends() || marks.empty() == Slots::NONE {
            prefetch_for_write(self.groups.get(home + 1).unwrap_or(&self.groups[0]));
        }
    }

    /// The first place under a tag that is `wanted`.
    pub(crate) fn find(&self, tag: u64, mut wanted: impl FnMut(u32) -> bool) -> Option<u32> {
        let (home, mark) = self.home(tag);
        for group in self.from(home) {
            let marks = group.marks(Ordering::Acquire);
            if let Some((_, place)) = group.first(marks.with(mark), &mut wanted) {
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
    pub(crate) fn enter(&self, tag: u64, place: u32, same: impl FnMut(u32) -> bool) -> bool {
        let (home, mark) = self.home(tag);
        let group = &self.groups[home];
        let marks = group.marks(Ordering::Relaxed);
        // Nobody went past it, and none is like it, most of the time.
        let empty = marks.empty();
        if marks.ends() && marks.with(mark) == Slots::NONE && empty != Slots::NONE {
            group.put(empty.first(), mark, place);
            return true;
        }
        self.enter_slowly(tag, place, same)
    }

    #[inline(never)]
    fn enter_slowly(&self, tag: u64, place: u32, mut same: impl FnMut(u32) -> bool) -> bool {
        if self.find(tag, &mut same).is_some() {
            return false;
        }
        let (home, mark) = self.home(tag);
        for group in self.from(home) {
            let empty = group.marks(Ordering::Relaxed).empty();
            if empty != Slots::NONE {
                group.put(empty.first(), mark, place);
                return true;
            }
            group.set_past(true);
        }
        unreachable!("the caller keeps a slot empty")
    }

    /// Points an entry elsewhere. The caller holds the writers' lock.
    pub(crate) fn point(&self, tag: u64, from: u32, to: u32) {
        if let Some((group, at, _)) = self.slot(tag, from) {
            group.slots[at].store(to, Ordering::Release);
        }
    }

    /// Removes an entry. Whether it was there. The caller holds the writers' lock.
    #[inline]
    pub(crate) fn take(&self, tag: u64, place: u32) -> bool {
        let (home, mark) = self.home(tag);
        let group = &self.groups[home];
        let marks = group.marks(Ordering::Relaxed);
        match group.first(marks.with(mark), |here| here == place) {
            Some((at, _)) => group.set_mark(at, EMPTY),
            None => return !marks.ends() && self.take_further(tag, place),
        }
        true
    }

    #[inline(never)]
    fn take_further(&self, tag: u64, place: u32) -> bool {
        let Some((group, at, past)) = self.slot(tag, place) else { return false };
        group.set_mark(at, EMPTY);
        self.from(self.home(tag).0).take(past).for_each(|group| group.set_past(false));
        true
    }

    /// Where an entry is, and how many groups it went past.
    #[inline]
    fn slot(&self, tag: u64, place: u32) -> Option<(&Group, usize, usize)> {
        let (home, mark) = self.home(tag);
        for (past, group) in self.from(home).enumerate() {
            let marks = group.marks(Ordering::Relaxed);
            if let Some((at, _)) = group.first(marks.with(mark), |here| here == place) {
                return Some((group, at, past));
            }
            if marks.ends() {
                return None;
            }
        }
        None
    }

    /// The groups in which an entry may lie, in that order.
    fn from(&self, home: usize) -> impl Iterator<Item = &Group> {
        self.groups[home..].iter().chain(&self.groups[..home])
    }
}
