//! Delivered blocks: verified, written into the device and registered, or discarded.

use super::{BlockStatus, Delivered, Loading};
use crate::block::{Corrupt, Header, SequenceHash};
use crate::blocking;
use crate::manager::shared::Core;
use crate::pool::{FullBlock, PartialBlock};
use std::collections::VecDeque;
use tokio::time::Instant;

/// Bytes verified and written per task on a blocking thread: enough to hide the cost of the thread switch, few enough
/// to begin early.
pub(super) const WRITE_BYTES: usize = 4 << 20;

/// Write tasks at the same time: one core's memcpy does not use the memory's bandwidth, two nearly do.
pub(super) const MAX_CONCURRENT_WRITES: usize = 2;

/// The result of writing one delivered block.
pub(super) enum WriteResult {
    Written {
        source: usize,
        index: usize,
        block: FullBlock,
    },
    Corrupt {
        source: usize,
        index: usize,
        why: Corrupt,
    },
    /// The block is intact, but expired.
    Expired {
        source: usize,
        index: usize,
    },
}

impl WriteResult {
    pub(super) fn source(&self) -> usize {
        match self {
            Self::Written { source, .. } | Self::Corrupt { source, .. } | Self::Expired { source, .. } => *source,
        }
    }

    pub(super) fn index(&self) -> usize {
        match self {
            Self::Written { index, .. } | Self::Corrupt { index, .. } | Self::Expired { index, .. } => *index,
        }
    }
}

impl Loading<'_> {
    /// Verifies and writes delivered blocks that the engine has not computed meanwhile, on a blocking thread.
    pub(super) fn write(&mut self) {
        let computed = self.job.shared.computed();
        let mut blocks = std::mem::take(&mut self.delivered);
        for late in blocks.extract_if(.., |delivered| delivered.index < computed) {
            self.job.onboarder.core.metrics.missed(self.level(late.source), 1);
        }
        let core = self.job.onboarder.core.clone();
        let Some(slots) = core.pool.allocate(blocks.len()) else {
            return self.give_up(&blocks);
        };
        self.writing += blocks.len();
        let hashes: Vec<_> = blocks.iter().map(|delivered| self.job.hashes[delivered.index]).collect();
        self.writes.push(blocking::spawn(move || {
            let blocks = blocks.into_iter().zip(hashes).zip(slots);
            blocks.map(|((delivered, hash), slot)| core.write(delivered, hash, slot)).collect()
        }));
    }

    /// Registers written blocks, and handles those that failed.
    pub(super) fn register(&mut self, mut results: Vec<WriteResult>) {
        self.writing -= results.len();
        // In order, so that a run of one chain is announced as one event.
        results.sort_by_key(WriteResult::index);
        let (mut blocks, mut levels) = (Vec::new(), Vec::new());
        for result in results {
            match result {
                WriteResult::Written { source, index, block } => {
                    self.stats[source].registered += 1;
                    blocks.push(block);
                    levels.push((index, self.level(source)));
                }
                WriteResult::Corrupt { source, index, why } => {
                    self.discard_corrupt(source, index, why);
                    self.try_next(source, index);
                }
                WriteResult::Expired { source, index } => {
                    self.discard_expired(source, index);
                    self.try_next(source, index);
                }
            }
        }
        if blocks.is_empty() {
            return;
        }
        for (_, level) in &levels {
            self.job.onboarder.core.metrics.hit(*level, 1);
        }
        self.job.shared.record_levels(levels.iter().map(|(index, level)| (self.job.hashes[*index], *level)));
        // At once, for followers; and blocks of a request that is dropped stay cached.
        let cached = self.job.onboarder.core.pool.register_since(blocks, self.job.purges);
        let mut registered = cached.iter().peekable();
        for (index, _) in levels {
            // Blocks of a domain that was purged meanwhile are not registered.
            let is_registered = registered.next_if(|block| block.hash() == self.job.hashes[index]).is_some();
            self.statuses[index] = if is_registered { BlockStatus::Ready } else { BlockStatus::Unavailable };
        }
        self.job.shared.hold(cached);
        let later = &self.statuses[self.ready_prefix..];
        self.ready_prefix += later.iter().take_while(|status| **status == BlockStatus::Ready).count();
        self.last_arrival = Instant::now();
        self.claim.notify_progress();
    }

    /// Ends the load because there are no free slots: the engine goes on with the blocks that are in G1.
    fn give_up(&mut self, blocks: &[Delivered]) {
        self.cancel();
        self.unrequested.iter_mut().for_each(VecDeque::clear);
        for delivered in blocks {
            self.statuses[delivered.index] = BlockStatus::Unavailable;
        }
        let unrequested = self.statuses.iter_mut().filter(|status| **status == BlockStatus::Unrequested);
        unrequested.for_each(|status| *status = BlockStatus::Unavailable);
        self.claim.release();
    }

    fn discard_expired(&self, source: usize, index: usize) {
        let (tier, core, hash) = (&self.job.sources[source].tier, &self.job.onboarder.core, self.job.hashes[index]);
        core.metrics.expired(tier.level(), tier.expire_one(core.device.fingerprint(), hash));
    }

    pub(super) fn discard_corrupt(&self, source: usize, index: usize, why: Corrupt) {
        let (tier, hash) = (&self.job.sources[source].tier, self.job.hashes[index]);
        self.job.onboarder.core.discard_corrupt(tier, hash, why);
    }
}

impl Core {
    /// Writes a block into the device if it is the requested one. Blocks for the time of the copy.
    pub(super) fn write(&self, delivered: Delivered, hash: SequenceHash, slot: PartialBlock) -> WriteResult {
        let Delivered { source, index, block } = delivered;
        if block.payload.len() != self.device.block_bytes() {
            return WriteResult::Corrupt { source, index, why: Corrupt::Length };
        }
        // One pass over the bytes: they are written before they are verified, into a slot that cannot be found yet.
        let copy = |bytes: &[u8], observe: &mut dyn FnMut(&[u8])| {
            self.device.write_observed(slot.slot(), bytes, observe);
        };
        let verified = block.verify_while_copying(hash, self.device.fingerprint(), copy);
        self.written((source, index), verified.map(|block| *block.header()), slot)
    }

    /// The result of a block that was written, with its header if it is the requested one.
    pub(super) fn written(
        &self,
        (source, index): (usize, usize),
        verified: Result<Header, Corrupt>,
        slot: PartialBlock,
    ) -> WriteResult {
        match verified {
            Ok(header) if header.retention.is_expired(self.clock.now()) => WriteResult::Expired { source, index },
            Ok(header) => {
                let full = slot.complete(header.hash, header.parent, header.attrs());
                let block = full.with_checksum(header.payload_checksum());
                WriteResult::Written { source, index, block }
            }
            Err(why) => WriteResult::Corrupt { source, index, why },
        }
    }
}
