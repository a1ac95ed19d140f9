//! What the index contains of each holder: number of blocks, digests, and whether blocks were evicted.

use super::Index;
use super::holder::{Holder, LEVELS};
use super::snapshot::HolderDirectory;
use kvbm::{Level, SetDigest};

impl Index {
    /// Number of blocks, each counted once per holder and level. Reads the counters of all holders.
    pub fn entries(&self) -> usize {
        let HolderDirectory { workers, stores, .. } = &*self.snapshot.load().holders;
        workers.iter().chain(stores).flatten().map(|state| state.digests.blocks()).sum()
    }

    /// Digest of the indexed blocks of a holder at a level. `None` for an unknown holder, or a level that is not
    /// indexed.
    pub fn digest(&self, holder: Holder, level: Level) -> Option<SetDigest> {
        let at = LEVELS.iter().position(|other| *other == level)?;
        Some(self.holder_state(holder)?.digests.at(at))
    }

    /// Whether the index has all blocks that a holder has announced. If not, it evicted some to stay within its memory
    /// limit, and [`digest`](Self::digest) cannot be compared with the digest of the holder. Call
    /// it after `digest`: blocks may be evicted meanwhile.
    pub fn is_complete(&self, holder: Holder) -> bool {
        self.holder_state(holder).is_some_and(|state| state.digests.is_complete())
    }
}
