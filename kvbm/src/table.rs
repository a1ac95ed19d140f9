//! Tables keyed by block hashes, and what makes large tables fast on the machine.
//!
//! This room owns the hash maps and sets of the crate ([`map`]), the comparison of many small values at once ([`swar`]),
//! and hints for large memory ([`hugepages`]). It promises that a lookup waits for few cache misses. It is synchronous.
//! Not here: what the tables mean; that is the business of the rooms that own them.

pub mod hugepages;
mod map;
pub mod swar;

pub(crate) use map::{Ahead, BATCH, ByName, NameHasher, NameMap, NameSet, Positions};
