//! Holders of the blocks of a page: a 64-bit mask for each holder.

use super::holder_set::{HolderSet, InternCache};
use super::source::SourceLevel;
use std::sync::Arc;

/// The holders of a page.
#[derive(Clone)]
pub(super) enum Holders {
    /// No holder.
    Empty,
    /// One holder and its blocks: the common case.
    One(SourceLevel, u64),
    /// Two or more holders.
    Many(Arc<HolderSet>),
}

impl Holders {
    /// Adds blocks to a holder. Returns the bits that were not set before.
    pub(super) fn add(&mut self, source_level: SourceLevel, bits: u64, cache: &mut InternCache) -> u64 {
        match self {
            _ if bits == 0 => 0,
            Self::Empty => {
                *self = Self::One(source_level, bits);
                bits
            }
            Self::One(holder, mask) if *holder == source_level => {
                let added = bits & !*mask;
                *mask |= bits;
                added
            }
            Self::One(holder, mask) => {
                *self = Self::Many(cache.intern(HolderSet::pair((*holder, *mask), (source_level, bits))));
                bits
            }
            Self::Many(holder_set) => {
                let had = holder_set.mask(source_level);
                if bits & !had != 0 {
                    *holder_set = cache.intern(holder_set.with_mask(source_level, had | bits));
                }
                bits & !had
            }
        }
    }

    /// Removes blocks from a holder. Returns the bits that were set before.
    pub(super) fn take(&mut self, source_level: SourceLevel, bits: u64, cache: &mut InternCache) -> u64 {
        match self {
            Self::One(holder, mask) if *holder == source_level => {
                let taken = *mask & bits;
                *mask &= !bits;
                if *mask == 0 {
                    *self = Self::Empty;
                }
                taken
            }
            Self::Empty | Self::One(..) => 0,
            Self::Many(holder_set) => {
                let had = holder_set.mask(source_level);
                if had & bits != 0 {
                    let fewer = holder_set.with_mask(source_level, had & !bits);
                    *self = match fewer.single() {
                        Some((source_level, mask)) => Self::One(source_level, mask),
                        None => Self::Many(cache.intern(fewer)),
                    };
                }
                had & bits
            }
        }
    }

    /// The blocks of one holder.
    pub(super) fn mask(&self, source_level: SourceLevel) -> u64 {
        match self {
            Self::One(holder, mask) if *holder == source_level => *mask,
            Self::Empty | Self::One(..) => 0,
            Self::Many(holder_set) => holder_set.mask(source_level),
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
    pub(super) fn to_vec(&self) -> Vec<(SourceLevel, u64)> {
        match self {
            Self::Empty => Vec::new(),
            Self::One(source_level, mask) => vec![(*source_level, *mask)],
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
