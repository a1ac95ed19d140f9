//! Sixty-four places for names, and who holds the blocks in them.
//!
//! Names lie in the order in which they were announced, so a run of a chain takes a few cache lines, and a lookup compares it by
//! its last name: a name commits to everything before it. A place is used once in a page's life, so a name that a reader
//! found does not turn into another under it. A page is read without waiting, see [`Version`]; it is changed by whoever
//! holds its lock, see [`super::arena`].

use super::holders::{Crowd, Holders};
use super::seat::{Seat, Slot};
use super::sync::{AtomicU32, AtomicU64, Ordering};
use super::version::Version;
use arc_swap::{ArcSwapOption, Guard};
use kvbm::SequenceHash;
use std::sync::Arc;

/// Places of a page: as many as a word has bits.
pub(super) const PLACES: u32 = 64;

/// The page. Its head is one cache line.
#[repr(align(64))]
pub(super) struct Page {
    version: Version,
    /// The only holder and its blocks, or that there are several.
    seat: AtomicU32,
    mask: AtomicU64,
    several: ArcSwapOption<Crowd>,
    /// Places whose block somebody holds.
    live: AtomicU64,
    /// Places whose block follows the one before it in a chain, both of them live.
    joins: AtomicU64,
    /// Whose new names go here.
    owner: AtomicU32,
    /// Places used, from the first on.
    used: AtomicU32,
    warmth: AtomicU32,
    names: [AtomicU64; PLACES as usize],
}

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

/// What a page has of a prompt.
pub(super) struct Seen {
    /// The leading blocks that follow each other from the place on.
    pub(super) len: u32,
    pub(super) seat: Seat,
    pub(super) mask: u64,
    /// When there are several.
    pub(super) several: Option<Guard<Option<Arc<Crowd>>>>,
}

/// Its first `len` bits.
pub(super) fn ones(len: u32) -> u64 {
    if len >= u64::BITS { u64::MAX } else { (1 << len) - 1 }
}

/// The places whose bits are set, the first first.
pub(super) fn each(mut bits: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let at = (bits != 0).then(|| bits.trailing_zeros())?;
        bits &= bits - 1;
        Some(at)
    })
}

impl Page {
    pub(super) fn new() -> Self {
        Self {
            version: Version::new(),
            seat: AtomicU32::new(Seat::NOBODY.raw()),
            mask: AtomicU64::new(0),
            several: ArcSwapOption::empty(),
            live: AtomicU64::new(0),
            joins: AtomicU64::new(0),
            owner: AtomicU32::new(u32::MAX),
            used: AtomicU32::new(0),
            warmth: AtomicU32::new(0),
            names: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Whether a live block of this name is in this place. True for a moment only, unless the caller holds the page's lock.
    pub(super) fn has(&self, at: u32, name: u64) -> bool {
        self.name(at) == name && self.live() >> at & 1 == 1
    }

    pub(super) fn name(&self, at: u32) -> u64 {
        self.names[at as usize].load(Ordering::Relaxed)
    }

    pub(super) fn live(&self) -> u64 {
        self.live.load(Ordering::Acquire)
    }

    pub(super) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Brings near what a lookup will want. What it answers means nothing.
    pub(super) fn touch(&self, at: u32) -> u64 {
        self.live.load(Ordering::Relaxed) ^ self.name(at) ^ self.name(PLACES - 1)
    }

    /// How far the prompt goes on in this page from a place on, and who holds that. `None`: it is being changed by somebody
    /// who does not come to an end.
    pub(super) fn look(&self, at: u32, prompt: &[SequenceHash]) -> Option<Seen> {
        self.version.look(|| {
            let len = self.run(at, prompt);
            let seat = Seat::from_raw(self.seat.load(Ordering::Relaxed));
            let several = (seat == Seat::SEVERAL).then(|| self.several.load());
            Seen { len, seat, mask: self.mask.load(Ordering::Relaxed), several }
        })
    }

    fn run(&self, from: u32, prompt: &[SequenceHash]) -> u32 {
        let (live, joins) = (self.live.load(Ordering::Relaxed), self.joins.load(Ordering::Relaxed));
        let longest = (PLACES - from).min(prompt.len() as u32);
        let is = |len: u32| self.name(from + len) == prompt[len as usize].short();
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
            while differs - alike > 1 {
                let middle = alike.midpoint(differs);
                if is(len + middle) { alike = middle } else { differs = middle }
            }
            return len + alike + 1;
        }
        len
    }

    pub(super) fn warmth(&self) -> Warmth {
        match self.warmth.load(Ordering::Relaxed) {
            0 => Warmth::Cold,
            1 => Warmth::Warm,
            _ => Warmth::Settling,
        }
    }

    pub(super) fn set_warmth(&self, warmth: Warmth) {
        self.warmth.store(warmth as u32, Ordering::Relaxed);
    }

    /// Notes that it was asked for; writes nothing when that is known.
    pub(super) fn warm(&self) {
        if self.warmth() == Warmth::Cold {
            self.set_warmth(Warmth::Warm);
        }
    }
}

/// Changes: the caller holds the page's lock.
impl Page {
    pub(super) fn is_of(&self, owner: Slot) -> bool {
        self.owner.load(Ordering::Relaxed) == owner.raw()
    }

    /// Makes an unused page somebody's.
    pub(super) fn hand_to(&self, owner: Slot) {
        self.owner.store(owner.raw(), Ordering::Relaxed);
        self.used.store(0, Ordering::Relaxed);
    }

    /// Nobody's again, unless there is a live block in it, or will be. Whether it was somebody's.
    pub(super) fn retire(&self) -> bool {
        let retires = self.live() == 0 && self.in_use() && self.warmth() != Warmth::Settling;
        if retires {
            self.owner.store(u32::MAX, Ordering::Relaxed);
            self.set_warmth(Warmth::Cold);
        }
        retires
    }

    fn in_use(&self) -> bool {
        self.owner.load(Ordering::Relaxed) != u32::MAX
    }

    /// Whether a live block here follows the live one before it.
    pub(super) fn joins_at(&self, at: u32) -> bool {
        self.joins.load(Ordering::Relaxed) >> at & 1 == 1
    }

    pub(super) fn holders(&self) -> Holders {
        match Seat::from_raw(self.seat.load(Ordering::Relaxed)) {
            Seat::NOBODY => Holders::Nobody,
            Seat::SEVERAL => self.several.load_full().map_or(Holders::Nobody, Holders::Several),
            seat => Holders::One(seat, self.mask.load(Ordering::Relaxed)),
        }
    }

    /// Whether somebody holds exactly these blocks, and nobody else any.
    pub(super) fn is_held_by(&self, seat: Seat, blocks: u64) -> bool {
        self.seat.load(Ordering::Relaxed) == seat.raw() && self.mask.load(Ordering::Relaxed) == blocks
    }

    /// Appends names, all held by one. The first follows the name `after`, and each of the others the one before it where
    /// `joins` has its bit. Answers with the first place.
    pub(super) fn append(&self, seat: Seat, names: &[u64], after: Option<u64>, joins: u64) -> u32 {
        let first = self.used();
        let bits = ones(names.len() as u32) << first;
        let mut holders = self.holders();
        holders.add(seat, bits);
        let live = self.live() | bits;
        let follows = first > 0 && live >> (first - 1) & 1 == 1 && after == Some(self.name(first - 1));
        let joins = (joins & !1 | u64::from(follows)) << first & bits;
        self.version.change(|| {
            for (place, name) in self.names[first as usize..].iter().zip(names) {
                place.store(*name, Ordering::Relaxed);
            }
            self.joins.store(self.joins.load(Ordering::Relaxed) | joins, Ordering::Relaxed);
            self.used.store(first + names.len() as u32, Ordering::Relaxed);
            self.live.store(live, Ordering::Release);
            self.seat(holders);
        });
        first
    }

    /// Sets who holds what. Places that nobody holds are dead from now on; answers with those that were live.
    pub(super) fn set_holders(&self, holders: Holders) -> u64 {
        let live = self.live();
        let dead = live & !holders.union();
        self.version.change(|| {
            self.live.store(live & !dead, Ordering::Release);
            self.joins.store(self.joins.load(Ordering::Relaxed) & !(dead | dead << 1), Ordering::Relaxed);
            self.seat(holders);
        });
        dead
    }

    fn seat(&self, holders: Holders) {
        let (seat, mask, several) = match holders {
            Holders::Nobody => (Seat::NOBODY, 0, None),
            Holders::One(seat, mask) => (seat, mask, None),
            Holders::Several(crowd) => (Seat::SEVERAL, 0, Some(crowd)),
        };
        if several.is_some() || self.seat.load(Ordering::Relaxed) == Seat::SEVERAL.raw() {
            self.several.store(several);
        }
        self.seat.store(seat.raw(), Ordering::Relaxed);
        self.mask.store(mask, Ordering::Relaxed);
    }
}
