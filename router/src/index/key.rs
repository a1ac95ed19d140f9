//! The key of a block hash in the hash tables: its shard, and the bits that are compared within it.

/// Number of shards. Writers seldom contend for one of eight, and each soon is large enough for huge pages.
pub(super) const SHARDS: usize = 1 << SHARD_BITS;
const SHARD_BITS: u32 = 3;

/// A block hash as a table key. Multiplication by the golden ratio (Fibonacci hashing) spreads keys that are not
/// uniform.
#[derive(Clone, Copy)]
pub(super) struct Key {
    pub(super) shard: usize,
    pub(super) bits: u64,
}

impl Key {
    pub(super) fn of(hash: u64) -> Self {
        let spread = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { shard: (spread >> (64 - SHARD_BITS)) as usize, bits: spread << SHARD_BITS }
    }
}
