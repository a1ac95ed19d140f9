//! A name, as the tables know it: which shard it is in, and what it is compared by there.

/// Shards: two writers seldom meet in one, none is long in growing, and a table is soon so large that it has large pages.
pub(super) const SHARDS: usize = 1 << SHARD_BITS;
const SHARD_BITS: u32 = 3;

/// A name, as the tables know it. Multiplying spreads names that are no hashes.
#[derive(Clone, Copy)]
pub(super) struct Key {
    pub(super) shard: usize,
    pub(super) tag: u64,
}

impl Key {
    pub(super) fn of(name: u64) -> Self {
        let spread = name.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { shard: (spread >> (64 - SHARD_BITS)) as usize, tag: spread << SHARD_BITS }
    }
}
