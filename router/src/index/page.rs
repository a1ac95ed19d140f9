//! Sixty-four places for names, and who holds the blocks in them.
//!
//! Names lie in the order in which they were announced, and a lookup compares a run of them by its last: a name commits to
//! everything before it. A page's last name stands in its head as well, and so does where the chain goes on after it, and after one
//! other: a lookup that goes through a long prompt reads a line or two of each page, and asks no table. Where it goes on is a
//! hint, true when it was written: whoever follows it compares the name that he finds.
//!
//! A place is used once in a page's life, so a name that a reader found does not turn into another under it. A page is read
//! without waiting, see [`Version`]; it is changed by whose turn it is, see [`Turn`].

use super::bits::ones;
use super::holder_set::{Crowd, Lately};
use super::holders::Holders;
use super::position::Place;
use super::run::Run;
use super::seqlock::{Taken, Turn, Version};
use super::source::{Seat, Slot};
use super::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering, fetch};
use arc_swap::{ArcSwapOption, Guard};
use kvbm::SequenceHash;
use std::sync::Arc;

/// Places of a page: as many as a word has bits.
pub(super) const PLACES: u32 = 64;

/// A page, as it lies in its chunk.
#[derive(Clone, Copy)]
pub(super) struct Page<'a> {
    head: &'a Head,
    names: &'a Names,
}

/// What is known of a page's blocks: one cache line, beside the heads of the pages before and after it.
#[repr(align(64))]
pub(super) struct Head {
    version: Version,
    /// The only holder and its blocks; or that there are several, and where what is said of them lies, as a number that tells one
    /// crowd from another.
    seat: AtomicU32,
    mask: AtomicU64,
    several: ArcSwapOption<Crowd>,
    /// Places whose block somebody holds.
    live: AtomicU64,
    /// Places whose block follows the one before it in a chain, both of them live.
    joins: AtomicU64,
    /// The name in the last place, once there is one.
    last: AtomicU64,
    /// Where the block lies that follows the one in the last place, as far as is known; nowhere is the first place of all.
    next: AtomicU32,
    /// The same of one other place, and which that is.
    turn: AtomicU32,
    turns: AtomicU8,
    /// Places used, from the first on.
    used: AtomicU8,
    warmth: AtomicU8,
    /// Whose turn it is to change any of this.
    turn_of: Turn,
    /// Whose new names go here.
    owner: AtomicU32,
}

/// A page's names.
#[repr(align(64))]
pub(super) struct Names([AtomicU64; PLACES as usize]);

const _: () = assert!(size_of::<Head>() == 64, "a head is one cache line");

/// Whether a page was asked for lately.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Warmth {
    /// Not since the hand came by.
    Cold,
    /// It was.
    Warm,
    /// Its names are being entered; it must stay.
    Settling,
}

/// Names of a cache line.
pub(super) const LINE: usize = 8;

/// What a page has of a prompt.
pub(super) struct Seen {
    /// The leading blocks that follow each other from the place on.
    pub(super) len: u32,
    /// The only holder and its blocks, as in the head.
    pub(super) seat: Seat,
    pub(super) mask: u64,
    /// When there are several. As long as this is here, none but this one has its number.
    pub(super) several: Option<Guard<Option<Arc<Crowd>>>>,
    /// Where the prompt probably goes on.
    pub(super) next: Option<Place>,
}

impl Head {
    pub(super) fn new() -> Self {
        Self {
            version: Version::new(),
            seat: AtomicU32::new(Seat::NOBODY.raw()),
            mask: AtomicU64::new(0),
            several: ArcSwapOption::empty(),
            live: AtomicU64::new(0),
            joins: AtomicU64::new(0),
            last: AtomicU64::new(0),
            next: AtomicU32::new(0),
            turn: AtomicU32::new(0),
            turns: AtomicU8::new(0),
            used: AtomicU8::new(0),
            warmth: AtomicU8::new(0),
            turn_of: Turn::new(),
            owner: AtomicU32::new(u32::MAX),
        }
    }

    /// Brings it near. What it answers means nothing.
    pub(super) fn touch(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }
}

impl Names {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl<'a> Page<'a> {
    pub(super) fn new(head: &'a Head, names: &'a Names) -> Self {
        Self { head, names }
    }

    /// Begins to bring all of it near.
    pub(super) fn fetch(&self) {
        fetch(self.head);
        self.names.0.iter().step_by(LINE).for_each(fetch);
    }

    /// Whether a live block of this name is in this place. True for a moment only, unless the caller holds the page's lock.
    pub(super) fn has(&self, at: u32, name: u64) -> bool {
        self.live() >> at & 1 == 1 && self.name_near(at) == name
    }

    pub(super) fn name(&self, at: u32) -> u64 {
        self.names.0[at as usize].load(Ordering::Relaxed)
    }

    /// The lock under which it is changed. Nobody holds two, unless he can do without the second.
    pub(super) fn turn(&self) -> Taken<'a> {
        self.head.turn_of.take()
    }

    /// The same, if nobody has it.
    pub(super) fn try_turn(&self) -> Option<Taken<'a>> {
        self.head.turn_of.try_take()
    }

    pub(super) fn live(&self) -> u64 {
        self.head.live.load(Ordering::Acquire)
    }

    pub(super) fn used(&self) -> u32 {
        self.head.used.load(Ordering::Relaxed).into()
    }

    /// Brings near what is wanted of it from a place on. What it answers means nothing.
    pub(super) fn touch(&self, at: u32) -> u64 {
        self.head.touch() ^ self.name(at)
    }

    /// How far the prompt goes on in this page from a place on, and who holds that. `None`: it is being changed by somebody
    /// who does not come to an end.
    pub(super) fn look(&self, at: u32, prompt: &[SequenceHash]) -> Option<Seen> {
        self.head.version.look(|| {
            let len = self.run(at, prompt);
            let seat = Seat::from_raw(self.head.seat.load(Ordering::Relaxed));
            let several = (seat == Seat::SEVERAL).then(|| self.head.several.load());
            let next = (at + len).checked_sub(1).and_then(|last| self.next(last));
            Seen { len, seat, mask: self.head.mask.load(Ordering::Relaxed), several, next }
        })
    }

    /// Whether a chain fills this page that ends in a name, and is held as what was `seen` is; then where it probably goes on,
    /// or [`Place::NOWHERE`]. `None` as well when the page is being changed.
    #[inline]
    pub(super) fn goes_on_as(&self, seen: &Seen, end: u64) -> Option<Place> {
        let head = self.head;
        let is = |word: &AtomicU64, value: u64| word.load(Ordering::Relaxed) == value;
        let alike = head.version.look_once(|| {
            let held = head.seat.load(Ordering::Relaxed) == seen.seat.raw() && is(&head.mask, seen.mask);
            let joined = head.joins.load(Ordering::Relaxed) | 1 == u64::MAX;
            (held && joined && is(&head.live, u64::MAX) && is(&head.last, end))
                .then(|| Place(head.next.load(Ordering::Relaxed)))
        });
        alike.flatten()
    }

    fn run(&self, from: u32, prompt: &[SequenceHash]) -> u32 {
        let (live, joins) = (self.head.live.load(Ordering::Relaxed), self.head.joins.load(Ordering::Relaxed));
        let longest = (PLACES - from).min(prompt.len() as u32);
        let is = |len: u32| self.name_near(from + len) == prompt[len as usize].short();
        let mut len = 0;
        while len < longest && live >> (from + len) & 1 == 1 {
            let joined = (joins >> (from + len) >> 1).trailing_ones().min(longest - len - 1);
            if is(len + joined) {
                len += joined + 1;
                continue;
            }
            if !is(len) {
                return len;
            }
            // It forks somewhere in between. Names up to there are alike, and none after.
            let (mut alike, mut differs) = (0, joined);
            // Most likely where others went elsewhere before.
            let turn = u32::from(self.head.turns.load(Ordering::Relaxed)).wrapping_sub(from + len);
            if turn < joined && is(len + turn) {
                if !is(len + turn + 1) {
                    return len + turn + 1;
                }
                alike = turn + 1;
            }
            while differs - alike > 1 {
                let middle = alike.midpoint(differs);
                if is(len + middle) { alike = middle } else { differs = middle }
            }
            return len + alike + 1;
        }
        len
    }

    /// The same as [`name`](Self::name), and the last from the head.
    fn name_near(&self, at: u32) -> u64 {
        if at == PLACES - 1 { self.head.last.load(Ordering::Relaxed) } else { self.name(at) }
    }

    /// Where the block probably lies that follows the one in a place, if that is not the next place.
    pub(super) fn next(&self, at: u32) -> Option<Place> {
        let next = match at {
            _ if at == PLACES - 1 => self.head.next.load(Ordering::Relaxed),
            _ if at == u32::from(self.head.turns.load(Ordering::Relaxed)) => self.head.turn.load(Ordering::Relaxed),
            _ => return None,
        };
        Some(Place(next)).filter(|place| *place != Place::NOWHERE)
    }

    /// Notes where the block lies that follows the one in a place. The last place has a note of its own, and one more is kept.
    pub(super) fn goes_on(&self, at: u32, next: Place) {
        if at == PLACES - 1 {
            self.head.next.store(next.0, Ordering::Relaxed);
        } else {
            self.head.turns.store(at as u8, Ordering::Relaxed);
            self.head.turn.store(next.0, Ordering::Relaxed);
        }
    }

    pub(super) fn warmth(&self) -> Warmth {
        match self.head.warmth.load(Ordering::Relaxed) {
            0 => Warmth::Cold,
            1 => Warmth::Warm,
            _ => Warmth::Settling,
        }
    }

    pub(super) fn set_warmth(&self, warmth: Warmth) {
        self.head.warmth.store(warmth as u8, Ordering::Relaxed);
    }

    /// Notes that it was asked for; writes nothing when that is known, or its names are being entered.
    pub(super) fn warm(&self) {
        if self.warmth() == Warmth::Cold {
            self.turn_warmth(Warmth::Cold, Warmth::Warm);
        }
    }

    /// The hand came by.
    pub(super) fn cool(&self) {
        self.turn_warmth(Warmth::Warm, Warmth::Cold);
    }

    /// Without the page's lock: whoever holds it may have said meanwhile that names are being entered, and that stays.
    fn turn_warmth(&self, from: Warmth, to: Warmth) {
        let (from, to) = (from as u8, to as u8);
        let _ = self.head.warmth.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Changes: the caller holds the page's lock.
impl Page<'_> {
    pub(super) fn is_of(&self, owner: Slot) -> bool {
        self.head.owner.load(Ordering::Relaxed) == owner.raw()
    }

    /// Makes an unused page somebody's.
    pub(super) fn hand_to(&self, owner: Slot) {
        self.head.owner.store(owner.raw(), Ordering::Relaxed);
        self.head.used.store(0, Ordering::Relaxed);
        self.goes_on(0, Place::NOWHERE);
        self.goes_on(PLACES - 1, Place::NOWHERE);
    }

    /// Nobody's again, unless there is a live block in it, or will be. Whether it was somebody's.
    pub(super) fn retire(&self) -> bool {
        let retires = self.live() == 0 && self.in_use() && self.warmth() != Warmth::Settling;
        if retires {
            self.head.owner.store(u32::MAX, Ordering::Relaxed);
            self.set_warmth(Warmth::Cold);
        }
        retires
    }

    fn in_use(&self) -> bool {
        self.head.owner.load(Ordering::Relaxed) != u32::MAX
    }

    /// Whether a live block here follows the live one before it.
    pub(super) fn joins_at(&self, at: u32) -> bool {
        self.head.joins.load(Ordering::Relaxed) >> at & 1 == 1
    }

    pub(super) fn holders(&self) -> Holders {
        match Seat::from_raw(self.head.seat.load(Ordering::Relaxed)) {
            Seat::NOBODY => Holders::Nobody,
            Seat::SEVERAL => self.head.several.load_full().map_or(Holders::Nobody, Holders::Several),
            seat => Holders::One(seat, self.head.mask.load(Ordering::Relaxed)),
        }
    }

    /// Whether somebody holds exactly these blocks, and nobody else any.
    pub(super) fn is_held_by(&self, seat: Seat, blocks: u64) -> bool {
        self.head.seat.load(Ordering::Relaxed) == seat.raw() && self.head.mask.load(Ordering::Relaxed) == blocks
    }

    /// Appends names, all held by one. The first follows the name `after`, and each of the others the one before it where
    /// `joins` has its bit. Answers with the first place.
    pub(super) fn append(&self, seat: Seat, Run { names, after, .. }: Run<'_>, joins: u64, lately: &mut Lately) -> u32 {
        let first = self.used();
        let bits = ones(names.len() as u32) << first;
        let mut holders = self.holders();
        holders.add(seat, bits, lately);
        let live = self.live() | bits;
        let follows = first > 0 && live >> (first - 1) & 1 == 1 && after == Some(self.name(first - 1));
        let joins = (joins & !1 | u64::from(follows)) << first & bits;
        self.head.version.change(|| {
            for (place, name) in self.names.0[first as usize..].iter().zip(names) {
                place.store(*name, Ordering::Relaxed);
            }
            self.head.last.store(self.name(PLACES - 1), Ordering::Relaxed);
            self.head.joins.store(self.head.joins.load(Ordering::Relaxed) | joins, Ordering::Relaxed);
            self.head.used.store((first + names.len() as u32) as u8, Ordering::Relaxed);
            self.head.live.store(live, Ordering::Release);
            self.seat(holders);
        });
        first
    }

    /// Sets who holds what. Places that nobody holds are dead from now on; answers with those that were live.
    pub(super) fn set_holders(&self, holders: Holders) -> u64 {
        let live = self.live();
        let dead = live & !holders.union();
        self.head.version.change(|| {
            self.head.live.store(live & !dead, Ordering::Release);
            self.head.joins.store(self.head.joins.load(Ordering::Relaxed) & !(dead | dead << 1), Ordering::Relaxed);
            self.seat(holders);
        });
        dead
    }

    fn seat(&self, holders: Holders) {
        let (seat, mask, several) = match holders {
            Holders::Nobody => (Seat::NOBODY, 0, None),
            Holders::One(seat, mask) => (seat, mask, None),
            Holders::Several(crowd) => (Seat::SEVERAL, Arc::as_ptr(&crowd).addr() as u64, Some(crowd)),
        };
        if several.is_some() || self.head.seat.load(Ordering::Relaxed) == Seat::SEVERAL.raw() {
            self.head.several.store(several);
        }
        self.head.seat.store(seat.raw(), Ordering::Relaxed);
        self.head.mask.store(mask, Ordering::Relaxed);
    }
}
