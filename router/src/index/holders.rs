//! Who holds one block, in the form that suits how many they are.

use super::bits::Bits;
use super::{LEVELS, Slot};
use kvbm::Level;

/// A source at a level: where a block can rest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Seat(u32);

impl Seat {
    /// `None` for a level that is not indexed.
    pub(super) fn new(slot: Slot, level: Level) -> Option<Self> {
        let level = LEVELS.iter().position(|at| *at == level)?;
        Some(Self(slot.0 << 2 | level as u32))
    }

    pub(super) const fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    pub(super) const fn raw(self) -> u32 {
        self.0
    }

    pub(super) fn slot(self) -> u32 {
        self.0 >> 2
    }

    /// The position of the level in [`LEVELS`].
    pub(super) fn level(self) -> usize {
        (self.0 & 3) as usize
    }
}

/// Two or more seats. A block with a single holder, the common case, does not come here.
pub(super) enum Holders {
    /// Up to five, in place: a worker's G1 and G2, its store, and a replica of that.
    Few { len: u8, seats: [Seat; FEW] },
    /// Up to [`SOME`], sorted.
    #[expect(clippy::box_collection, reason = "a bare Vec would make every Holders a third larger")]
    Some(Box<Vec<Seat>>),
    /// A hot prefix: a bit per slot and level.
    Many(Box<[Bits; LEVELS.len()]>),
}

/// What fits beside the tag into 24 bytes.
const FEW: usize = 5;
/// From here on bits are smaller than a list even with a thousand slots, and quicker to walk.
const SOME: usize = 48;

impl Holders {
    pub(super) fn pair(a: Seat, b: Seat) -> Self {
        Self::Few { len: 2, seats: [a, b, a, a, a] }
    }

    pub(super) fn insert(&mut self, seat: Seat) {
        match self {
            Self::Few { len, seats } => {
                if seats[..*len as usize].contains(&seat) {
                    return;
                }
                if let Some(free) = seats.get_mut(*len as usize) {
                    *free = seat;
                    *len += 1;
                } else {
                    let mut list = Vec::with_capacity(2 * FEW);
                    list.extend_from_slice(seats);
                    list.push(seat);
                    list.sort_unstable();
                    *self = Self::Some(Box::new(list));
                }
            }
            Self::Some(list) => {
                let Err(at) = list.binary_search(&seat) else { return };
                if list.len() < SOME {
                    list.insert(at, seat);
                } else {
                    let mut levels: Box<[Bits; LEVELS.len()]> = Box::default();
                    list.iter().chain([&seat]).for_each(|seat| levels[seat.level()].set(seat.slot()));
                    *self = Self::Many(levels);
                }
            }
            Self::Many(levels) => levels[seat.level()].set(seat.slot()),
        }
    }

    /// Takes a seat out; the one that is left when only one is.
    pub(super) fn remove(&mut self, seat: Seat) -> Option<Seat> {
        match self {
            Self::Few { len, seats } => {
                let held = &mut seats[..*len as usize];
                if let Some(at) = held.iter().position(|other| *other == seat) {
                    held.swap(at, *len as usize - 1);
                    *len -= 1;
                }
                (*len == 1).then_some(seats[0])
            }
            Self::Some(list) => {
                if let Ok(at) = list.binary_search(&seat) {
                    list.remove(at);
                }
                // Two below the limit, so that one seat that comes and goes does not copy the list each time.
                if list.len() <= FEW - 2 {
                    let mut seats = [list[0]; FEW];
                    seats[..list.len()].copy_from_slice(list);
                    *self = Self::Few { len: list.len() as u8, seats };
                }
                None
            }
            Self::Many(levels) => {
                levels[seat.level()].unset(seat.slot());
                if levels.iter().map(Bits::len).sum::<usize>() <= SOME / 2 {
                    let mut list: Vec<Seat> = Vec::with_capacity(SOME);
                    for (level, slots) in levels.iter().enumerate() {
                        list.extend(slots.iter().map(|slot| Seat(slot << 2 | level as u32)));
                    }
                    list.sort_unstable();
                    *self = Self::Some(Box::new(list));
                }
                None
            }
        }
    }

    /// Bytes beyond its own 24.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Few { .. } => 0,
            Self::Some(list) => size_of::<Vec<Seat>>() + list.capacity() * size_of::<Seat>(),
            Self::Many(levels) => size_of_val(&**levels) + levels.iter().map(Bits::bytes).sum::<usize>(),
        }
    }
}
