//! Who holds which blocks of a page: a bit per block for each holder, so that a hole is a bit and nothing else.

use super::seat::Seat;
use std::sync::Arc;

/// The holders of a page.
#[derive(Clone)]
pub(super) enum Holders {
    /// Nobody.
    Nobody,
    /// One, with its blocks: the common case.
    One(Seat, u64),
    /// Several.
    Several(Arc<Crowd>),
}

/// Two or more holders, in the order of their seats. It does not change: a change makes another.
pub(super) enum Crowd {
    /// So few that looking at them is one visit to memory.
    Few { len: usize, seats: [Seat; FEW], masks: [u64; FEW] },
    /// More.
    Many { seats: Box<[Seat]>, masks: Box<[u64]> },
}

const FEW: usize = 4;

impl Holders {
    /// Adds blocks of a holder. Answers with those that it did not have.
    pub(super) fn add(&mut self, seat: Seat, bits: u64) -> u64 {
        match self {
            _ if bits == 0 => 0,
            Self::Nobody => {
                *self = Self::One(seat, bits);
                bits
            }
            Self::One(holder, mask) if *holder == seat => {
                let added = bits & !*mask;
                *mask |= bits;
                added
            }
            Self::One(holder, mask) => {
                let mut pair = [(*holder, *mask), (seat, bits)];
                pair.sort_unstable_by_key(|(seat, _)| *seat);
                *self = Self::Several(Arc::new(pair.into_iter().collect()));
                bits
            }
            Self::Several(crowd) => {
                let had = crowd.mask(seat);
                if bits & !had != 0 {
                    *crowd = Arc::new(crowd.with(seat, had | bits));
                }
                bits & !had
            }
        }
    }

    /// Takes blocks from a holder. Answers with those that it had.
    pub(super) fn take(&mut self, seat: Seat, bits: u64) -> u64 {
        match self {
            Self::One(holder, mask) if *holder == seat => {
                let taken = *mask & bits;
                *mask &= !bits;
                if *mask == 0 {
                    *self = Self::Nobody;
                }
                taken
            }
            Self::Nobody | Self::One(..) => 0,
            Self::Several(crowd) => {
                let had = crowd.mask(seat);
                if had & bits != 0 {
                    let fewer = crowd.with(seat, had & !bits);
                    *self = match (fewer.seats(), fewer.masks()) {
                        ([seat], [mask]) => Self::One(*seat, *mask),
                        _ => Self::Several(Arc::new(fewer)),
                    };
                }
                had & bits
            }
        }
    }

    /// The blocks of one holder.
    pub(super) fn mask(&self, seat: Seat) -> u64 {
        match self {
            Self::One(holder, mask) if *holder == seat => *mask,
            Self::Nobody | Self::One(..) => 0,
            Self::Several(crowd) => crowd.mask(seat),
        }
    }

    /// The blocks that anybody holds.
    pub(super) fn union(&self) -> u64 {
        match self {
            Self::Nobody => 0,
            Self::One(_, mask) => *mask,
            Self::Several(crowd) => crowd.masks().iter().fold(0, |union, mask| union | mask),
        }
    }

    /// Each holder with its blocks.
    pub(super) fn to_vec(&self) -> Vec<(Seat, u64)> {
        match self {
            Self::Nobody => Vec::new(),
            Self::One(seat, mask) => vec![(*seat, *mask)],
            Self::Several(crowd) => crowd.iter().collect(),
        }
    }

    /// Bytes beyond those of the page.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Nobody | Self::One(..) => 0,
            Self::Several(crowd) => crowd.bytes(),
        }
    }
}

impl Crowd {
    pub(super) fn iter(&self) -> impl Iterator<Item = (Seat, u64)> {
        self.seats().iter().copied().zip(self.masks().iter().copied())
    }

    pub(super) fn seats(&self) -> &[Seat] {
        match self {
            Self::Few { len, seats, .. } => &seats[..*len],
            Self::Many { seats, .. } => seats,
        }
    }

    pub(super) fn masks(&self) -> &[u64] {
        match self {
            Self::Few { len, masks, .. } => &masks[..*len],
            Self::Many { masks, .. } => masks,
        }
    }

    fn mask(&self, seat: Seat) -> u64 {
        self.seats().binary_search(&seat).map_or(0, |at| self.masks()[at])
    }

    /// The same, but for one holder; without blocks it is none.
    fn with(&self, seat: Seat, mask: u64) -> Self {
        let (seats, masks) = (self.seats(), self.masks());
        let (Ok(at) | Err(at)) = seats.binary_search(&seat);
        let after = at + usize::from(seats.get(at) == Some(&seat));
        let others =
            |range: std::ops::Range<usize>| seats[range.clone()].iter().copied().zip(masks[range].iter().copied());
        let this = (mask != 0).then_some((seat, mask));
        others(0..at).chain(this).chain(others(after..seats.len())).collect()
    }

    fn bytes(&self) -> usize {
        let apart = match self {
            Self::Few { .. } => 0,
            Self::Many { seats, .. } => seats.len() * (size_of::<Seat>() + size_of::<u64>()),
        };
        size_of::<Self>() + 2 * size_of::<usize>() + apart
    }
}

impl FromIterator<(Seat, u64)> for Crowd {
    fn from_iter<I: IntoIterator<Item = (Seat, u64)>>(holders: I) -> Self {
        let mut holders = holders.into_iter();
        let (mut seats, mut masks) = ([Seat::NOBODY; FEW], [0; FEW]);
        for len in 0..FEW {
            let Some(holder) = holders.next() else { return Self::Few { len, seats, masks } };
            (seats[len], masks[len]) = holder;
        }
        let Some(next) = holders.next() else { return Self::Few { len: FEW, seats, masks } };
        let first = seats.into_iter().zip(masks).chain([next]);
        let (seats, masks): (Vec<_>, Vec<_>) = first.chain(holders).unzip();
        Self::Many { seats: seats.into(), masks: masks.into() }
    }
}
