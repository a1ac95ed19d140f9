//! Digests of the blocks of one holder, and whether the index has all blocks that the holder has announced. Lock-free.
//!
//! A digest is compared with the holder's own digest, and a difference costs a snapshot. The digest of a holder of
//! which the index evicted blocks, or whose blocks are being replaced, must therefore not be compared.
//!
//! **Ordering.** Announced and removed blocks are counted by the thread that holds the lock on the holder's pages.
//! Evicted blocks are counted by other threads, in counters of their own. An eviction sets the holder incomplete before
//! it counts a block, with a release fence between them. Readers load the counters of evictions first, with acquire,
//! and the completeness last. A reader that saw a counted eviction therefore sees that the holder is incomplete, and
//! the announcement of the evicted block.

use super::holder::LEVELS;
use super::sync::{AtomicU8, AtomicU64, Ordering, fence};
use kvbm::{CacheDigest, SetDigest};

/// The digests of one holder. Levels are given by their index in [`LEVELS`].
pub(super) struct HolderDigests {
    levels: [LevelDigest; LEVELS.len()],
    completeness: AtomicU8,
}

/// Digest of the blocks at one level, see [`SetDigest`]: the announced blocks less the evicted ones, modulo 2⁶⁴.
struct LevelDigest {
    blocks: AtomicU64,
    sum: AtomicU64,
    evicted_blocks: AtomicU64,
    evicted_sum: AtomicU64,
}

/// All announced blocks are there.
const COMPLETE: u8 = 0;
/// Blocks were evicted.
const INCOMPLETE: u8 = 1;
/// The blocks are being replaced, and none was evicted since that began.
const REPLACING: u8 = 2;

impl HolderDigests {
    pub(super) fn new() -> Self {
        let counter = || AtomicU64::new(0);
        let level =
            |_| LevelDigest { blocks: counter(), sum: counter(), evicted_blocks: counter(), evicted_sum: counter() };
        Self { levels: std::array::from_fn(level), completeness: AtomicU8::new(COMPLETE) }
    }

    /// Adds blocks; `sum` is the sum of their terms. The caller holds the lock on the holder's pages.
    pub(super) fn add(&self, level: usize, blocks: u64, sum: u64) {
        let level = &self.levels[level];
        level.blocks.store(level.blocks.load(Ordering::Relaxed).wrapping_add(blocks), Ordering::Relaxed);
        level.sum.store(level.sum.load(Ordering::Relaxed).wrapping_add(sum), Ordering::Relaxed);
    }

    /// Removes blocks that the holder has removed. The caller holds the lock on the holder's pages.
    pub(super) fn remove(&self, level: usize, blocks: u64, sum: u64) {
        self.add(level, blocks.wrapping_neg(), sum.wrapping_neg());
    }

    /// Removes blocks that the holder still has.
    pub(super) fn evict(&self, level: usize, blocks: u64, sum: u64) {
        // A swap, since the exchange in `finish_replacing` must come before or after it.
        self.completeness.swap(INCOMPLETE, Ordering::Relaxed);
        fence(Ordering::Release);
        self.levels[level].evicted_blocks.fetch_add(blocks, Ordering::Relaxed);
        self.levels[level].evicted_sum.fetch_add(sum, Ordering::Relaxed);
    }

    /// From here to [`finish_replacing`](Self::finish_replacing) the blocks of the holder are replaced by all that it
    /// announces.
    pub(super) fn start_replacing(&self) {
        self.completeness.store(REPLACING, Ordering::Relaxed);
    }

    /// All blocks were replaced. The holder is complete unless blocks were evicted meanwhile.
    pub(super) fn finish_replacing(&self) {
        let _ = self.completeness.compare_exchange(REPLACING, COMPLETE, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Whether all announced blocks are there. Callers that compare digests read them before they call this.
    pub(super) fn is_complete(&self) -> bool {
        self.completeness.load(Ordering::Relaxed) == COMPLETE
    }

    /// Digest of the blocks at a level.
    pub(super) fn at(&self, level: usize) -> SetDigest {
        let LevelDigest { blocks, sum, evicted_blocks, evicted_sum } = &self.levels[level];
        let evicted = (evicted_blocks.load(Ordering::Acquire), evicted_sum.load(Ordering::Acquire));
        SetDigest {
            blocks: blocks.load(Ordering::Acquire).wrapping_sub(evicted.0),
            sum: sum.load(Ordering::Acquire).wrapping_sub(evicted.1),
        }
    }

    /// Digest of the blocks at all levels. `None` if blocks were evicted, or are being replaced.
    pub(super) fn all(&self) -> Option<CacheDigest> {
        let levels = LEVELS.into_iter().enumerate();
        let all = levels.fold(CacheDigest::default(), |all, (at, level)| all.with(level, self.at(at).sum));
        self.is_complete().then_some(all)
    }

    /// Number of blocks at all levels.
    pub(super) fn blocks(&self) -> usize {
        (0..LEVELS.len()).map(|level| self.at(level).blocks as usize).sum()
    }
}
