//! G2: blocks in host memory, in one arena of fixed size.
//!
//! A slot is filled directly from the device or from another tier's bytes, and read without a copy: the [`Bytes`] that
//! [`HostTier`] returns are the slot itself, which is not reused while they live. Slots and eviction are those of
//! [`BlockPool`], as for the device.
//!
//! Host memory is not trusted more than a disk: a block has the header and checksum that it got when it was copied
//! here, and the reader that onboards it verifies it.

mod arena;

use super::device::{BlockId, copy_observed};
use super::{BlockPool, BlockRef, BlockUse, CachedBlock, CachedBlocks, FullBlock, PartialBlock};
use crate::block::{
    Block, BlockAttrs, BlockRetention, Clock, Date, DomainId, Fingerprint, Header, Level, SequenceHash,
};
use crate::blocking;
use crate::event::{EventLog, SetDigest};
use crate::metrics::Metrics;
use crate::tier::{Loaded, Quotas, StoreError, Tier, Usage};
use arena::Arena;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use std::sync::Arc;
use std::{fmt, io};

/// What was copied from the device.
pub(crate) struct DeviceCopies {
    /// The blocks that are resident now.
    pub(crate) resident: Vec<SequenceHash>,
    /// The blocks whose bytes have changed since their checksum was noted. They were not copied.
    pub(crate) corrupt: Vec<SequenceHash>,
}

/// Host memory as a tier. Clones share it.
#[derive(Clone)]
pub struct HostTier {
    pool: BlockPool,
    arena: Arc<Arena>,
    fingerprint: Fingerprint,
}

impl HostTier {
    /// A smaller arena is not worth a log line, nor a part of the process's limit of locked memory.
    const MIN_MLOCK_BYTES: u64 = 64 << 20;

    /// Room for `capacity_bytes / block_bytes` blocks, all with the engine's `fingerprint`.
    ///
    /// The address space is reserved at once; pages are touched only as blocks arrive. Changes are announced in `log`
    /// at [`Level::G2`]. Fails when the system refuses the memory.
    pub fn new(
        capacity_bytes: u64,
        block_bytes: usize,
        fingerprint: Fingerprint,
        log: Arc<EventLog>,
        metrics: &Metrics,
    ) -> io::Result<Self> {
        Self::with_clock(capacity_bytes, block_bytes, fingerprint, log, metrics, Clock::system())
    }

    /// [`HostTier::new`] with another clock than the system's.
    pub fn with_clock(
        capacity_bytes: u64,
        block_bytes: usize,
        fingerprint: Fingerprint,
        log: Arc<EventLog>,
        metrics: &Metrics,
        clock: Clock,
    ) -> io::Result<Self> {
        let slots = capacity_bytes.checked_div(block_bytes as u64).unwrap_or(0) as usize;
        let pool = BlockPool::new(Level::G2, slots, log, metrics.memory(Level::G2), clock);
        let arena = Arc::new(Arena::new(pool.capacity(), block_bytes)?);
        if capacity_bytes >= Self::MIN_MLOCK_BYTES {
            match arena.mlock() {
                Ok(()) => tracing::info!(capacity_bytes, "G2 memory is pinned"),
                Err(error) => tracing::info!(capacity_bytes, %error, "cannot pin G2 memory"),
            }
        }
        Ok(Self { pool, arena, fingerprint })
    }

    /// Sets the quotas of domains in G2.
    ///
    /// # Panics
    /// When there are blocks already.
    #[must_use]
    pub fn with_quotas(self, quotas: &Quotas) -> Self {
        self.pool.set_quotas(quotas.for_tier(Level::G2, self.arena.slot_bytes() as u64));
        self
    }

    pub(crate) fn set_digest(&self) -> SetDigest {
        self.pool.set_digest()
    }

    pub(crate) fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    pub(crate) fn block_bytes(&self) -> usize {
        self.arena.slot_bytes()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.pool.capacity()
    }

    /// Splits `hashes` into resident and missing ones.
    pub(crate) fn partition(&self, hashes: &[SequenceHash]) -> (Vec<SequenceHash>, Vec<SequenceHash>) {
        self.pool.partition(hashes)
    }

    /// The uses of all resident blocks: loads, not lookups.
    pub(crate) fn uses(&self) -> Vec<BlockUse> {
        self.pool.uses()
    }

    /// Copies device blocks into slots. `read` writes the bytes of a device block into a slot and passes them to an
    /// observer on the way. Blocks for the time of the copies. All slots are allocated at once, and a chain is
    /// announced as one event; if that allocation fails, blocks are copied one by one.
    ///
    /// The checksum of a copy is that of the bytes that were read. It is compared with the one that is noted for the
    /// device block, and noted where there is none: bytes that have changed since get no valid checksum.
    ///
    /// `since`: the number of [purges](Self::purges) when the blocks were looked up.
    pub(crate) fn copy_from_device(
        &self,
        blocks: &CachedBlocks,
        since: u64,
        read: impl Fn(BlockId, &mut [u8], &mut dyn FnMut(&[u8])),
    ) -> DeviceCopies {
        let (parents, attrs, mut checksums) = (blocks.parents(), blocks.attrs(), blocks.checksums());
        let mut corrupt = Vec::new();
        let each = || blocks.iter().zip(parents.iter().copied().zip(attrs.iter().copied()));
        // Returns whether the bytes are still those of the noted checksum.
        let mut copy = |block: &BlockRef, (parent, attrs), noted: &mut Option<u64>, slot: &mut PartialBlock| {
            let header = self.arena.write(slot, |bytes| {
                Header::new_while_copying(block.hash(), parent, self.fingerprint, attrs, bytes.len(), |observe| {
                    read(block.slot(), bytes, observe);
                })
            });
            let checksum = header.payload_checksum();
            let is_intact = *noted.get_or_insert(checksum) == checksum;
            if !is_intact {
                corrupt.push(block.hash());
            }
            is_intact
        };
        // Hold the parents, so that the allocation does not evict them.
        let held = self.pool.get_present(&parents.iter().copied().flatten().collect::<Vec<_>>());
        if let Some(slots) = self.pool.allocate(blocks.len()) {
            let full = each().zip(&mut checksums).zip(slots).filter_map(|(((block, attributes), noted), mut slot)| {
                let is_intact = copy(block, attributes, noted, &mut slot);
                is_intact.then(|| slot.complete(block.hash(), attributes.0, attributes.1))
            });
            let full: Vec<FullBlock> = full.collect();
            let resident = full.iter().map(FullBlock::hash).collect();
            self.pool.insert_loaded(full, since);
            blocks.note_checksums(&checksums);
            return DeviceCopies { resident, corrupt };
        }
        drop(held);
        let kept = each().zip(&mut checksums).filter_map(|((block, (parent, attrs)), noted)| {
            let fill = |slot: &mut PartialBlock| copy(block, (parent, attrs), noted, slot);
            self.insert_copy(block.hash(), parent, attrs, since, fill).is_ok().then(|| block.hash())
        });
        let resident = kept.collect();
        blocks.note_checksums(&checksums);
        DeviceCopies { resident, corrupt }
    }

    /// Blocks without a copy of their bytes: each holds its slot. Not counted as a use; see [`Tier::load`].
    pub(crate) fn get(&self, hashes: &[SequenceHash]) -> Vec<Option<Block>> {
        self.blocks(self.pool.get_each(hashes))
    }

    fn blocks(&self, held: Vec<Option<CachedBlock>>) -> Vec<Option<Block>> {
        held.into_iter().map(|held| held.map(|held| self.block(held))).collect()
    }

    /// Extends the retention of resident blocks where `retention` asks for more than they have.
    pub(crate) fn extend_retention(&self, hashes: &[SequenceHash], retention: BlockRetention) {
        let changed: Vec<SequenceHash> =
            self.pool.extend_retention(hashes.iter().copied(), retention).into_iter().map(|(n, _)| n).collect();
        for held in self.pool.get_each(&changed).into_iter().flatten() {
            self.arena.set_retention(&held, held.attrs().retention);
        }
    }

    /// Removes all blocks of a domain, and returns their number.
    pub(crate) fn purge(&self, domain: DomainId) -> usize {
        self.pool.purge(domain)
    }

    /// Number of purges so far.
    pub(crate) fn purges(&self) -> u64 {
        self.pool.purges()
    }

    /// Removes blocks that are expired by the pool's own clock, and returns their number.
    pub(crate) fn expire_now(&self) -> usize {
        self.pool.expire()
    }

    #[cfg(test)]
    pub(crate) fn hashes(&self) -> Vec<SequenceHash> {
        self.pool.hashes()
    }

    /// A slot for a block, which does not displace its parent, unless no other slot can be evicted.
    pub(crate) fn allocate_for(&self, parent: Option<SequenceHash>) -> Result<PartialBlock, StoreError> {
        let held = parent.map(|parent| self.pool.get_each(&[parent]));
        let slots = self.pool.allocate(1).or_else(|| {
            drop(held);
            self.pool.allocate(1)
        });
        let full = if self.pool.capacity() == 0 { StoreError::Full } else { StoreError::Busy };
        // Busy: all slots are being read; some will be free soon.
        slots.and_then(|mut slots| slots.pop()).ok_or(full)
    }

    /// Copies a part of a block into its slot, from the byte `at` on, and passes it to `observe`.
    pub(crate) fn write_part(&self, slot: &mut PartialBlock, at: usize, from: &[u8], observe: &mut dyn FnMut(&[u8])) {
        copy_observed(from, &mut self.arena.bytes(slot)[at..][..from.len()], observe);
    }

    /// Declares a slot full, with the header of what was written into it.
    pub(crate) fn complete(&self, mut slot: PartialBlock, header: &Header) -> FullBlock {
        self.arena.set_header(&mut slot, *header);
        slot.complete(header.hash, header.parent, header.attrs())
    }

    /// Registers blocks that were read after `since` [purges](Self::purges).
    pub(crate) fn insert(&self, blocks: Vec<FullBlock>, since: u64) {
        self.pool.insert_loaded(blocks, since);
    }

    fn store_payload(&self, header: &Header, payload: &[u8], since: u64) -> Result<(), StoreError> {
        if header.fingerprint != self.fingerprint || payload.len() > self.arena.slot_bytes() {
            return Err(StoreError::Io(io::Error::other("the block has another engine's fingerprint")));
        }
        self.insert_copy(header.hash, header.parent, header.attrs(), since, |slot| {
            self.arena.write(slot, |bytes| {
                bytes[..payload.len()].copy_from_slice(payload);
                *header
            });
            true
        })
    }

    /// `fill` returns whether the bytes that it wrote are to be kept.
    fn insert_copy(
        &self,
        hash: SequenceHash,
        parent: Option<SequenceHash>,
        attrs: BlockAttrs,
        since: u64,
        fill: impl FnOnce(&mut PartialBlock) -> bool,
    ) -> Result<(), StoreError> {
        if self.pool.holds(&[hash]) == 1 {
            return Ok(());
        }
        let mut slot = self.allocate_for(parent)?;
        if !fill(&mut slot) {
            return Err(StoreError::Io(io::ErrorKind::InvalidData.into()));
        }
        self.pool.insert_loaded(vec![slot.complete(hash, parent, attrs)], since);
        Ok(())
    }

    fn block(&self, held: CachedBlock) -> Block {
        let header = self.arena.header(&held);
        Block { header, payload: Bytes::from_owner(arena::Reading::new(self.arena.clone(), held, header.length)) }
    }
}

impl Tier for HostTier {
    fn level(&self) -> Level {
        Level::G2
    }

    fn holds(&self, fingerprint: Fingerprint, hashes: &[SequenceHash]) -> usize {
        if fingerprint == self.fingerprint { self.pool.holds(hashes) } else { 0 }
    }

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let is_own = fingerprint == self.fingerprint;
        let found = if is_own { self.blocks(self.pool.get_and_use(&hashes)) } else { vec![None; hashes.len()] };
        stream::iter(found.into_iter().map(Ok).enumerate()).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let host = self.clone();
        let copy =
            move || blocks.iter().map(|block| host.store_payload(&block.header, &block.payload, u64::MAX)).collect();
        Box::pin(async { blocking::spawn(copy).await.expect("copying in memory does not panic") })
    }

    fn discard(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        if fingerprint == self.fingerprint {
            self.pool.discard(hash);
        }
    }

    fn expire(&self, _: Date) -> usize {
        // The pool has a clock of its own.
        self.expire_now()
    }

    fn usage(&self) -> Usage {
        let slot = self.arena.slot_bytes() as u64;
        let blocks = self.pool.resident() as u64;
        Usage { blocks, bytes: blocks * slot, capacity: Some(self.pool.capacity() as u64 * slot) }
    }
}

impl fmt::Debug for HostTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostTier({:?})", self.usage())
    }
}

#[cfg(test)]
mod tests;
