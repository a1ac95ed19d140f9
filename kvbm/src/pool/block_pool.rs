//! The slots of one tier, and the operations on the blocks in them. Lookups by hash are in `lookup`.

use super::handles::{BlockRef, CachedBlocks};
use super::slot::{FullBlock, PartialBlock, Slot};
use super::state::Shared;
use crate::block::{BlockAttrs, BlockRetention, Clock, DomainId, Level, SequenceHash};
use crate::event::{EventLog, SetDigest, StoredBatch};
use crate::metrics::MemoryMetrics;
use crate::tier::TierQuotas;
use std::sync::Arc;

/// How many blocks ahead [`BlockPool::register`] prefetches.
const PREFETCH_DISTANCE: usize = 4;

/// A handle to one pool; clones share it.
#[derive(Clone)]
pub(crate) struct BlockPool(pub(super) Arc<Shared>);

impl BlockPool {
    /// `capacity` empty slots. Events name `level`, counts go to `metrics`, and expiry follows `clock`.
    pub(crate) fn new(level: Level, capacity: usize, log: Arc<EventLog>, metrics: MemoryMetrics, clock: Clock) -> Self {
        Self(Arc::new(Shared::new(level, capacity, log, metrics, clock)))
    }

    /// Counts and bounds domains separately from now on.
    ///
    /// # Panics
    /// When there are blocks already.
    pub(crate) fn set_quotas(&self, division: TierQuotas) {
        let mut state = self.0.lock();
        state.index.set_bounds(&division.bounds);
        state.division = division;
    }

    /// Number of slots.
    pub(crate) fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// Number of slots that `allocate` could return now.
    pub(crate) fn available(&self) -> usize {
        let state = self.0.lock_and_expire();
        state.free.len() + state.index.evictable()
    }

    /// Number of slots in use: by blocks that can be found by hash, or by blocks that are still being filled.
    pub(crate) fn occupied(&self) -> usize {
        self.0.capacity - self.0.lock_and_expire().free.len()
    }

    /// Number of blocks that can be found by hash.
    pub(crate) fn resident(&self) -> usize {
        self.0.lock_and_expire().index.len()
    }

    /// The set of blocks that can be found by hash. Reads each slot under the lock: for rare diagnostics.
    pub(crate) fn set_digest(&self) -> SetDigest {
        self.0.lock_and_expire().index.hashes().collect()
    }

    /// `n` empty slots, or `None`. Evicts cached blocks that are not held when the free slots do not suffice.
    pub(crate) fn allocate(&self, n: usize) -> Option<Vec<PartialBlock>> {
        let mut slots = Vec::with_capacity(n.min(self.0.capacity));
        let mut state = self.0.lock_and_expire();
        if state.free.len() + state.index.evictable() < n {
            return None;
        }
        let spare = state.free.len().saturating_sub(n);
        slots.extend(state.free.drain(spare..).rev());
        let mut evicted = Vec::new();
        while slots.len() < n {
            let (slot, hash) = state.index.evict().expect("every evictable block can be evicted, leaves first");
            state.retention.remove(slot);
            slots.push(slot);
            evicted.push(hash);
        }
        state.announce_removed(evicted);
        drop(state);
        // Copies of blocks that are filled together are fastest in address order.
        slots.sort_unstable();
        Some(slots.into_iter().map(|id| PartialBlock(Slot { pool: Some(self.0.clone()), id })).collect())
    }

    /// Registers blocks without holding them. Frees duplicates, and blocks of domains that were purged after `since`
    /// [purges](Self::purges).
    pub(crate) fn insert_loaded(&self, blocks: Vec<FullBlock>, since: u64) {
        drop(self.register_since(blocks, since));
    }

    /// Makes blocks findable by hash, in order. For a hash that is resident already, returns that block and frees the
    /// duplicate.
    pub(crate) fn register(&self, blocks: Vec<FullBlock>) -> CachedBlocks {
        self.register_since(blocks, u64::MAX)
    }

    /// [`BlockPool::register`] of blocks whose bytes were read after `since` [purges](Self::purges): frees, and does
    /// not return, blocks of domains that were purged later.
    pub(crate) fn register_since(&self, mut blocks: Vec<FullBlock>, since: u64) -> CachedBlocks {
        // Declared before the lock is taken, so dropped after it is released: freeing duplicates takes the lock, and
        // events are delivered without it.
        let mut duplicates = Vec::new();
        let mut stored = StoredBatch::new(self.0.level, &self.0.log);
        let mut state = self.0.lock_and_expire();
        if since < state.purges {
            duplicates
                .extend(blocks.extract_if(.., |block| state.is_purged(block.attrs.domain, since)).map(|b| b.slot));
        }
        let mut cached: Vec<_> = blocks.iter().map(|block| BlockRef { id: block.slot.id, hash: block.hash }).collect();
        cached.iter().take(PREFETCH_DISTANCE).for_each(|block| state.index.prefetch_insert(&block.hash));
        for (at, block) in blocks.into_iter().enumerate() {
            if let Some(next) = cached.get(at + PREFETCH_DISTANCE) {
                state.index.prefetch_insert(&next.hash);
            }
            let FullBlock { slot, hash, parent, attrs, checksum } = block;
            debug_assert!(slot.is_of(&self.0), "a block of another pool");
            if let Some(id) = state.index.find(hash) {
                cached[at].id = id;
                duplicates.push(slot);
                state.extend_retention(id, attrs.retention);
            } else {
                stored.push(hash, parent);
                let slot = slot.keep();
                state.insert(slot, hash, parent, attrs);
                if let Some(checksum) = checksum {
                    state.note_checksum(slot, checksum);
                }
            }
            state.index.hold(cached[at].id);
        }
        stored.queue();
        state.count_rejected_pins();
        state.evict_over_limits();
        drop(state);
        CachedBlocks::new(&self.0, cached)
    }

    /// Removes all blocks of a domain, held ones included, and returns their number. Blocks that were read before and
    /// are [registered](Self::register_since) later are freed.
    pub(crate) fn purge(&self, domain: DomainId) -> usize {
        let mut state = self.0.lock();
        state.purges += 1;
        let now = state.purges;
        state.purged.insert(domain, now);
        let removed: Vec<_> = state.retention.of_domain(domain).into_iter().map(|slot| state.remove(slot)).collect();
        let count = removed.len();
        state.announce_removed(removed);
        count
    }

    /// Number of purges so far. A reader notes it before it reads blocks, and passes it on when it registers them.
    pub(crate) fn purges(&self) -> u64 {
        self.0.lock().purges
    }

    /// Whether a domain was purged after `since` purges.
    pub(crate) fn is_purged(&self, domain: DomainId, since: u64) -> bool {
        self.0.lock().is_purged(domain, since)
    }

    /// Removes a block. Guards that hold it keep its slot.
    pub(crate) fn discard(&self, hash: SequenceHash) {
        let mut state = self.0.lock();
        if let Some(slot) = state.index.find(hash) {
            state.remove(slot);
            state.announce_removed(vec![hash]);
        }
    }

    /// Extends the retention of resident blocks where `retention` asks for more than they have. Returns the changed
    /// blocks with their former attributes.
    pub(crate) fn extend_retention(
        &self,
        hashes: impl IntoIterator<Item = SequenceHash>,
        retention: BlockRetention,
    ) -> Vec<(SequenceHash, BlockAttrs)> {
        let mut state = self.0.lock_and_expire();
        if retention == BlockRetention::default() && state.retention.is_default() {
            return Vec::new();
        }
        let extend = |hash| {
            let slot = state.index.find(hash)?;
            Some((hash, state.extend_retention(slot, retention)?))
        };
        let changed = hashes.into_iter().filter_map(extend).collect();
        state.count_rejected_pins();
        changed
    }

    /// Number of pinned blocks.
    pub(crate) fn pinned(&self) -> usize {
        self.0.lock_and_expire().retention.pins()
    }

    /// Ends all pins, so that a request can run that would find no memory otherwise.
    pub(crate) fn unpin(&self) {
        let mut state = self.0.lock();
        let pinned = state.retention.unpin_all();
        self.0.metrics.rejected_pins.inc_by(pinned.len() as u64);
        for slot in pinned {
            state.index.release(slot);
        }
    }

    /// Removes expired blocks and ends pins that are due. Returns the number of removed blocks.
    pub(crate) fn expire(&self) -> usize {
        let before = self.0.lock().index.len();
        before - self.0.lock_and_expire().index.len().min(before)
    }

    /// Every block that can be found by hash.
    #[cfg(test)]
    pub(crate) fn hashes(&self) -> Vec<SequenceHash> {
        self.0.lock().index.hashes().collect()
    }
}
