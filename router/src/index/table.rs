//! Where blocks are, by a part of their name: a hash table that is read while it is written.
//!
//! Slots lie in groups of nine, one cache line each, with marks: for each slot twenty bits of the tag of what is in it, and one
//! that there is something. So three words say which slots are worth a look, and which is free; that a mark is right and the
//! entry wrong is rare. An entry lies in the group that its tag says, or when that is full, in one of those after it. How many
//! went past a group is a number beside its marks: a reader goes on to the next group only where somebody did. An entry is a
//! place and no name, since the place has the name: whoever asks compares it there.
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

use super::sync::{AtomicU32, AtomicU64, LARGE, Ordering, enlarge, fetch_mut};

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
    marks: [AtomicU64; WORDS],
    slots: [AtomicU32; SLOTS],
    /// Entries further on that should be here or before.
    past: AtomicU32,
}

/// What a group begins with.
#[derive(Clone, Copy, Default)]
struct Draft {
    marks: [u64; WORDS],
    slots: [u32; SLOTS],
    len: usize,
}

/// The marks of a group.
#[derive(Clone, Copy)]
struct Marks([u64; WORDS]);

/// Some slots of a group, a bit for each: which one is next nobody can guess, so nothing branches on it. Bit 21·n + w stands
/// for mark n of word w.
#[derive(Clone, Copy, PartialEq)]
struct Slots(u64);

/// Slots that a cache line holds, beside their marks.
const SLOTS: usize = WORDS * LANES;
const WORDS: usize = 3;
/// Marks in a word.
const LANES: usize = 3;
/// Bits of a mark.
const MARK: u32 = 21;
/// Groups of the smallest table: times a power of two, that nearly fills large pages.
const LEAST: usize = 63;
/// Bytes of large pages that are left to the allocator for what it notes beside them.
const SPARED: usize = 4096;
/// The lowest bit of each mark: that there is an entry.
const LOW: u64 = 1 | 1 << MARK | 1 << (2 * MARK);
/// The highest.
const HIGH: u64 = LOW << (MARK - 1);
/// The slot that a bit of [`Slots`] stands for.
const SLOT_OF: [u8; 64] = {
    let mut slots = [0; 64];
    let mut slot = 0;
    while slot < SLOTS {
        slots[slot % LANES * MARK as usize + slot / LANES] = slot as u8;
        slot += 1;
    }
    slots
};
/// The mark of a slot without an entry.
const EMPTY: u32 = 0;
/// All bits of a mark.
const ALL: u32 = (1 << MARK) - 1;
/// Bits that are known of a mark in the worst case: one entry in five hundred is looked at in vain then.
const KNOWN_LEAST: u32 = 12;

impl Slots {
    const NONE: Self = Self(0);

    /// Those whose mark has its highest bit set in these words.
    fn of([one, two, three]: [u64; WORDS]) -> Self {
        let down = MARK - 1;
        Self(one >> down | two >> (down - 1) | three >> (down - 2))
    }

    fn first(self) -> usize {
        SLOT_OF[self.0.trailing_zeros() as usize % 64].into()
    }

    fn but_first(self) -> Self {
        Self(self.0 & (self.0 - 1))
    }
}

impl Marks {
    /// Slots that have a mark, and perhaps one that has another, behind one that has it.
    fn perhaps(self, mark: u32) -> Slots {
        let all = u64::from(mark) * LOW;
        let of = |at: usize| {
            let word = self.0[at] ^ all;
            word.wrapping_sub(LOW) & !word & self.0[at] << (MARK - 1) & HIGH
        };
        Slots::of(std::array::from_fn(of))
    }

    /// Slots that are empty; right about whether there is one, and about the first.
    fn empty(self) -> Slots {
        let of = |at: usize| self.0[at].wrapping_sub(LOW) & !self.0[at] & HIGH;
        Slots::of(std::array::from_fn(of))
    }

    fn mark(self, at: usize) -> u32 {
        (self.0[at / LANES] >> (at % LANES * MARK as usize)) as u32 & ALL
    }
}

impl Draft {
    /// Adds an entry. Whether there was room.
    fn push(&mut self, mark: u32, place: u32) -> bool {
        let at = self.len;
        if at < SLOTS {
            self.marks[at / LANES] |= u64::from(mark) << (at % LANES * MARK as usize);
            self.slots[at] = place;
            self.len += 1;
        }
        at < SLOTS
    }
}

impl From<Draft> for Group {
    fn from(Draft { marks, slots, .. }: Draft) -> Self {
        Self { marks: marks.map(AtomicU64::new), slots: slots.map(AtomicU32::new), past: AtomicU32::new(0) }
    }
}

impl Group {
    fn marks(&self, order: Ordering) -> Marks {
        Marks(std::array::from_fn(|at| self.marks[at].load(order)))
    }

    /// The first of these slots whose place is `wanted`, and that place.
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

    /// Puts an entry into the first empty slot.
    fn put(&self, marks: Marks, mark: u32, place: u32) {
        let at = marks.empty().first();
        self.slots[at].store(place, Ordering::Release);
        self.set_mark(at, mark);
    }

    fn set_mark(&self, at: usize, mark: u32) {
        let (word, shift) = (&self.marks[at / LANES], at % LANES * MARK as usize);
        let others = word.load(Ordering::Relaxed) & !(u64::from(ALL) << shift);
        word.store(others | u64::from(mark) << shift, Ordering::Release);
    }

    /// Whether no entry that should be here lies further on.
    fn ends(&self) -> bool {
        self.past.load(Ordering::Acquire) == 0
    }

    /// One more went past, or one fewer.
    fn set_past(&self, more: bool) {
        let past = self.past.load(Ordering::Relaxed);
        self.past.store(if more { past + 1 } else { past - 1 }, Ordering::Release);
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
        let room =
            if bytes > LARGE / 4 * 3 { (bytes.next_multiple_of(LARGE) - SPARED) / size_of::<Group>() } else { count };
        let mut groups = Vec::with_capacity(room.max(count));
        enlarge(groups.spare_capacity_mut());
        Self { groups, doublings, known: ALL }
    }

    /// The same entries in another table, twice as large, or half as large if this is not the smallest. `unsure` is called for the
    /// places of those that have to be entered by name.
    pub(crate) fn relaid(&self, larger: bool, mut unsure: impl FnMut(u32)) -> Self {
        let mut next = Self::without_groups(if larger { self.doublings + 1 } else { self.doublings - 1 });
        let known = if larger { (self.known & !1) << 1 & ALL } else { self.known >> 1 | 1 << (MARK - 1) };
        let by_name = known.count_ones() <= KNOWN_LEAST;
        if !by_name {
            next.known = known;
        }
        let mut past = !self.groups.last().is_none_or(Group::ends);
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
                past = !group.ends();
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
        fetch_mut(&self.groups[self.home(tag).0]);
    }

    /// Once that is near: begins to bring the next one near, where whoever enters the entry will look at it as well.
    pub(crate) fn fetch_next(&self, tag: u64) {
        let home = self.home(tag).0;
        let group = &self.groups[home];
        if !group.ends() || group.marks(Ordering::Relaxed).empty() == Slots::NONE {
            fetch_mut(self.groups.get(home + 1).unwrap_or(&self.groups[0]));
        }
    }

    /// The first place under a tag that is `wanted`.
    pub(crate) fn find(&self, tag: u64, mut wanted: impl FnMut(u32) -> bool) -> Option<u32> {
        let (home, mark) = self.home(tag);
        for group in self.from(home) {
            let marks = group.marks(Ordering::Acquire);
            if let Some((_, place)) = group.first(marks.perhaps(mark), &mut wanted) {
                return Some(place);
            }
            if group.ends() {
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
        if group.ends() && marks.perhaps(mark) == Slots::NONE && marks.empty() != Slots::NONE {
            group.put(marks, mark, place);
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
            let marks = group.marks(Ordering::Relaxed);
            if marks.empty() != Slots::NONE {
                group.put(marks, mark, place);
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
        match group.first(marks.perhaps(mark), |here| here == place) {
            Some((at, _)) => group.set_mark(at, EMPTY),
            None => return !group.ends() && self.take_further(tag, place),
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
            if let Some((at, _)) = group.first(marks.perhaps(mark), |here| here == place) {
                return Some((group, at, past));
            }
            if group.ends() {
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
