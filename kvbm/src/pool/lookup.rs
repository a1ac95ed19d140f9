//! Lookups of blocks by hash: with or without a hold, with or without counting a use; and the counted uses.

use super::BlockPool;
use super::evict::BlockUse;
use super::handles::{BlockRef, CachedBlock, CachedBlocks};
use crate::block::SequenceHash;
use crate::table::{BATCH, Prefetcher};

/// Blocks that are read under one lock when all are read: tens of microseconds.
const SCAN_BATCH: usize = 1024;

impl BlockPool {
    /// Holds the resident prefix of `hashes`, and counts a use of each block.
    pub(crate) fn lookup(&self, hashes: &[SequenceHash]) -> CachedBlocks {
        let mut held = Vec::with_capacity(hashes.len());
        let mut prefetcher = Prefetcher::default();
        // In batches, so that the lock is not held for long; blocks that are held already keep their ancestors.
        'all: for start in (0..hashes.len()).step_by(BATCH) {
            let mut state = self.0.lock_and_expire();
            let index = &mut state.index;
            // The block before may have been discarded between two batches.
            let mut before = None;
            for at in start..hashes.len().min(start + BATCH) {
                let Some(id) = index.find_ahead(&mut prefetcher, hashes, at) else { break 'all };
                index.acquire(id, before);
                before = Some((id, hashes[at]));
                held.push(BlockRef { id, hash: hashes[at] });
            }
        }
        CachedBlocks::new(&self.0, held)
    }

    /// Holds each of `hashes` that is resident, and counts a use.
    pub(crate) fn get_and_use(&self, hashes: &[SequenceHash]) -> Vec<Option<CachedBlock>> {
        let held = self.get_each(hashes);
        let mut state = self.0.lock();
        held.iter().flatten().for_each(|block| state.index.record_use(block.slot().0));
        drop(state);
        held
    }

    /// Holds each of `hashes` that is resident, without counting a use: for copies that no request asked for. For a
    /// chain, one call from the root on costs far less than one call per block: a hold walks up to the first held
    /// ancestor.
    pub(crate) fn get_each(&self, hashes: &[SequenceHash]) -> Vec<Option<CachedBlock>> {
        let mut held: Vec<Option<BlockRef>> = Vec::with_capacity(hashes.len());
        for batch in hashes.chunks(BATCH) {
            let mut state = self.0.lock_and_expire();
            let first_new = held.len();
            let found = state.index.find_each(batch).zip(batch);
            held.extend(found.map(|(id, hash)| Some(BlockRef { id: id?, hash: *hash })));
            held[first_new..].iter().flatten().for_each(|block| state.index.hold(block.id));
        }
        held.into_iter().map(|held| held.map(|block| CachedBlock::new(self.0.clone(), block))).collect()
    }

    /// Holds those of `hashes` that are resident with one guard, in order, without counting a use.
    pub(crate) fn get_present(&self, hashes: &[SequenceHash]) -> CachedBlocks {
        let mut held = Vec::with_capacity(hashes.len());
        for batch in hashes.chunks(BATCH) {
            let mut state = self.0.lock_and_expire();
            let first_new = held.len();
            let found = state.index.find_each(batch).zip(batch);
            held.extend(found.filter_map(|(id, hash)| Some(BlockRef { id: id?, hash: *hash })));
            held[first_new..].iter().for_each(|block| state.index.hold(block.id));
        }
        CachedBlocks::new(&self.0, held)
    }

    /// Splits `hashes` into resident and missing ones.
    pub(crate) fn partition(&self, hashes: &[SequenceHash]) -> (Vec<SequenceHash>, Vec<SequenceHash>) {
        let [mut resident, mut missing] = [Vec::with_capacity(hashes.len()), Vec::new()];
        for batch in hashes.chunks(BATCH) {
            for (found, hash) in self.0.lock_and_expire().index.find_each(batch).zip(batch) {
                if found.is_some() { resident.push(*hash) } else { missing.push(*hash) }
            }
        }
        (resident, missing)
    }

    /// Length of the resident prefix of `hashes`.
    pub(crate) fn holds(&self, hashes: &[SequenceHash]) -> usize {
        let mut resident = 0;
        for batch in hashes.chunks(BATCH) {
            let found = self.0.lock_and_expire().index.find_each(batch).take_while(Option::is_some).count();
            resident += found;
            if found < batch.len() {
                break;
            }
        }
        resident
    }

    /// The index of the first of `hashes` that is resident.
    pub(crate) fn next_resident(&self, hashes: &[SequenceHash]) -> Option<usize> {
        let within = |(batch, hashes): (usize, &[SequenceHash])| {
            let found = self.0.lock().index.find_each(hashes).position(|found| found.is_some());
            found.map(|at| batch * BATCH + at)
        };
        hashes.chunks(BATCH).enumerate().find_map(within)
    }

    /// The uses of all blocks that can be found by hash. In batches, so that the lock is not held for long: blocks may
    /// come and go meanwhile.
    pub(crate) fn uses(&self) -> Vec<BlockUse> {
        let mut uses = Vec::with_capacity(self.resident());
        for start in (0..self.0.capacity).step_by(SCAN_BATCH) {
            uses.extend(self.0.lock_and_expire().index.uses(start..start + SCAN_BATCH));
        }
        uses
    }

    /// The estimated uses of blocks that were evicted, or were never here.
    pub(crate) fn former_uses(&self, hashes: &[SequenceHash]) -> Vec<u8> {
        let mut uses = Vec::with_capacity(hashes.len());
        for batch in hashes.chunks(SCAN_BATCH) {
            let state = self.0.lock();
            uses.extend(batch.iter().map(|hash| state.index.former_uses(hash)));
        }
        uses
    }
}
