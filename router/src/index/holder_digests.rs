//! Digests of the blocks of one holder, and whether the index has all blocks that the holder has announced. Lock-free.
//!
//! A digest is compared with the holder's own digest, and a difference costs a snapshot. The digest of a holder of
//! which the index evicted blocks must therefore not be compared.
//!
//! **Ordering.** An eviction sets the flag before it lowers a digest, with a release fence between them. Readers load
//! the digests with acquire and the flag afterwards. A reader that saw a lowered digest therefore sees the flag.

use super::holder::LEVELS;
use super::sync::{AtomicBool, AtomicU64, Ordering, fence};
use kvbm::SetDigest;

/// The digests of one holder. Levels are given by their index in [`LEVELS`].
pub(super) struct HolderDigests {
    levels: [LevelDigest; LEVELS.len()],
    /// Whether blocks of the holder were evicted.
    incomplete: AtomicBool,
}

/// Digest of the blocks at one level, see [`SetDigest`].
struct LevelDigest {
    blocks: AtomicU64,
    sum: AtomicU64,
}

impl HolderDigests {
    pub(super) fn new() -> Self {
        let level = |_| LevelDigest { blocks: AtomicU64::new(0), sum: AtomicU64::new(0) };
        Self { levels: std::array::from_fn(level), incomplete: AtomicBool::new(false) }
    }

    /// Adds blocks; `sum` is the sum of their terms.
    pub(super) fn add(&self, level: usize, blocks: u64, sum: u64) {
        self.levels[level].blocks.fetch_add(blocks, Ordering::Relaxed);
        self.levels[level].sum.fetch_add(sum, Ordering::Relaxed);
    }

    /// Removes blocks that the holder has removed.
    pub(super) fn remove(&self, level: usize, blocks: u64, sum: u64) {
        self.levels[level].blocks.fetch_sub(blocks, Ordering::Relaxed);
        self.levels[level].sum.fetch_sub(sum, Ordering::Relaxed);
    }

    /// Removes blocks that the holder still has.
    pub(super) fn evict(&self, level: usize, blocks: u64, sum: u64) {
        self.incomplete.store(true, Ordering::Relaxed);
        fence(Ordering::Release);
        self.remove(level, blocks, sum);
    }

    /// The holder announces all of its blocks again, or has none.
    pub(super) fn set_complete(&self) {
        self.incomplete.store(false, Ordering::Relaxed);
    }

    /// Whether no blocks were evicted. Callers that compare digests read them before they call this.
    pub(super) fn is_complete(&self) -> bool {
        !self.incomplete.load(Ordering::Relaxed)
    }

    /// Digest of the blocks at a level.
    pub(super) fn at(&self, level: usize) -> SetDigest {
        let LevelDigest { blocks, sum } = &self.levels[level];
        SetDigest { blocks: blocks.load(Ordering::Acquire), sum: sum.load(Ordering::Acquire) }
    }

    /// Number of blocks at all levels.
    pub(super) fn blocks(&self) -> usize {
        self.levels.iter().map(|digest| digest.blocks.load(Ordering::Relaxed) as usize).sum()
    }
}
