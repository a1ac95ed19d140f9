//! Hash tables keyed by block hashes, and hints that make large tables fast.
//!
//! This room owns the hash maps and sets of the crate ([`map`]), the comparison of many small values in registers
//! ([`swar`]), a mixing function ([`splitmix`]), arrays that grow in place ([`lazy_lines`]), and hints about large
//! memory ([`hugepages`]) and cache prefetching ([`prefetch`]). Everything is synchronous. Not here: what the tables
//! mean; the rooms that own the tables say that.

pub mod hugepages;
pub mod lazy_lines;
mod map;
pub mod prefetch;
pub mod splitmix;
pub mod swar;

pub(crate) use map::{BATCH, BlockHasher, BlockMap, BlockSet, PrefetchMap};
pub use map::{HashIndex, Prefetcher};
