//! Holders of the blocks of a page: a 64-bit mask for each holder.

use super::holder::HolderLevel;
use super::holder_set::{HolderSet, InternCache};
use std::sync::Arc;

/// The holders of a page.
#[derive(Clone)]
pub(super) enum Holders {
    /// No holder.
    Empty,
    /// One holder and its blocks: the common case.
    One(HolderLevel, u64),
    /// Two or more holders.
    Many(Arc<HolderSet>),
}

impl Holders {
    /// Adds blocks to a holder. Returns the bits that were not set before.
    pub(super) fn add(&mut self, holder_level: HolderLevel, bits: u64, cache: &mut InternCache) -> u64 {
        match self {
            _ if bits == 0 => 0,
            Self::Empty => {
                *self = Self::One(holder_level, bits);
                bits
            }
            Self::One(holder, mask) if *holder == holder_level => {
                let added = bits & !*mask;
                *mask |= bits;
                added
            }
            Self::One(holder, mask) => {
                *self = Self::Many(cache.intern(HolderSet::pair((*holder, *mask), (holder_level, bits))));
                bits
            }
            Self::Many(holder_set) => {
                let had = holder_set.mask(holder_level);
                if bits & !had != 0 {
                    *holder_set = cache.intern(holder_set.with_mask(holder_level, had | bits));
                }
                bits & !had
            }
        }
    }

    /// Removes blocks from a holder. Returns the bits that were set before.
    pub(super) fn take(&mut self, holder_level: HolderLevel, bits: u64, cache: &mut InternCache) -> u64 {
        match self {
            Self::One(holder, mask) if *holder == holder_level => {
                let taken = *mask & bits;
                *mask &= !bits;
                if *mask == 0 {
                    *self = Self::Empty;
                }
                taken
            }
            Self::Empty | Self::One(..) => 0,
            Self::Many(holder_set) => {
                let had = holder_set.mask(holder_level);
                if had & bits != 0 {
                    let fewer = holder_set.with_mask(holder_level, had & !bits);
                    *self = match fewer.single() {
                        Some((holder_level, mask)) => Self::One(holder_level, mask),
                        None => Self::Many(cache.intern(fewer)),
                    };
                }
                had & bits
            }
        }
    }

    /// The blocks of one holder.
    pub(super) fn mask(&self, holder_level: HolderLevel) -> u64 {
        match self {
            Self::One(holder, mask) if *holder == holder_level => *mask,
            Self::Empty | Self::One(..) => 0,
            Self::Many(holder_set) => holder_set.mask(holder_level),
        }
    }

    /// Blocks that have a holder.
    pub(super) fn union(&self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::One(_, mask) => *mask,
            Self::Many(holder_set) => holder_set.union(),
        }
    }

    /// Each holder with its mask.
    pub(super) fn to_vec(&self) -> Vec<(HolderLevel, u64)> {
        match self {
            Self::Empty => Vec::new(),
            Self::One(holder_level, mask) => vec![(*holder_level, *mask)],
            Self::Many(holder_set) => holder_set.iter().collect(),
        }
    }

    /// Bytes outside the page.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Empty | Self::One(..) => 0,
            Self::Many(holder_set) => holder_set.bytes(),
        }
    }
}
