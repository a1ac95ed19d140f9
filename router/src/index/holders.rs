//! Who holds which blocks of a page: a bit per block for each holder, so that a hole is a bit and nothing else.

use super::holder_set::{Crowd, Lately};
use super::source::Seat;
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

impl Holders {
    /// Adds blocks of a holder. Answers with those that it did not have.
    pub(super) fn add(&mut self, seat: Seat, bits: u64, lately: &mut Lately) -> u64 {
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
                *self = Self::Several(lately.share(Crowd::pair((*holder, *mask), (seat, bits))));
                bits
            }
            Self::Several(crowd) => {
                let had = crowd.mask(seat);
                if bits & !had != 0 {
                    *crowd = lately.share(crowd.with(seat, had | bits));
                }
                bits & !had
            }
        }
    }

    /// Takes blocks from a holder. Answers with those that it had.
    pub(super) fn take(&mut self, seat: Seat, bits: u64, lately: &mut Lately) -> u64 {
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
                    *self = match fewer.only() {
                        Some((seat, mask)) => Self::One(seat, mask),
                        None => Self::Several(lately.share(fewer)),
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
            Self::Several(crowd) => crowd.union(),
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
