//! G2: blocks in host memory, one copy each, in one arena of fixed size.
//!
//! A slot is filled straight from the device or from another tier's bytes, and read without a copy: the [`Bytes`] that
//! [`HostTier`] hands out are the slot itself, which is not reused while they live. Which slot holds what, and what goes
//! when all are taken, is the same [`Pool`] as the device's.
//!
//! Host memory is believed no more than a disk: a block carries the header it was sealed with, and whoever onboards it
//! verifies it.

mod arena;

use super::device::BlockId;
use super::{CachedBlock, CachedBlocks, Held, PartialBlock, Pool};
use crate::block::{Block, Clock, Custody, Date, DomainId, Fingerprint, Header, Keep, Level, SequenceHash};
use crate::event::{Census, EventLog};
use crate::metrics::Metrics;
use crate::tier::{Loaded, Shares, StoreError, Tier, Usage};
use arena::Arena;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use std::fmt;
use std::sync::Arc;

/// Host memory as a tier. Clones share it.
#[derive(Clone)]
pub struct HostTier {
    pool: Pool,
    arena: Arc<Arena>,
    fingerprint: Fingerprint,
}

impl HostTier {
    /// Less is not worth a word in the log, nor a part of what a process may pin.
    const PIN_BYTES_MIN: u64 = 64 << 20;

    /// As many blocks of `block_bytes` as fit into `capacity_bytes`, all of one engine's `fingerprint`.
    ///
    /// The memory is reserved at once and touched only as blocks arrive. What comes and goes is announced in `log` at
    /// [`Level::G2`].
    pub fn new(
        capacity_bytes: u64,
        block_bytes: usize,
        fingerprint: Fingerprint,
        log: Arc<EventLog>,
        metrics: &Metrics,
    ) -> Self {
        Self::with_clock(capacity_bytes, block_bytes, fingerprint, log, metrics, Clock::system())
    }

    /// [`HostTier::new`] with another clock than the machine's.
    pub fn with_clock(
        capacity_bytes: u64,
        block_bytes: usize,
        fingerprint: Fingerprint,
        log: Arc<EventLog>,
        metrics: &Metrics,
        clock: Clock,
    ) -> Self {
        let slots = capacity_bytes.checked_div(block_bytes as u64).unwrap_or(0) as usize;
        let pool = Pool::new(Level::G2, slots, log, metrics.memory(Level::G2), clock);
        let arena = Arc::new(Arena::new(pool.capacity(), block_bytes));
        if capacity_bytes >= Self::PIN_BYTES_MIN {
            match arena.pin() {
                Ok(()) => tracing::info!(capacity_bytes, "G2 memory is pinned"),
                Err(error) => tracing::info!(capacity_bytes, %error, "cannot pin G2 memory"),
            }
        }
        Self { pool, arena, fingerprint }
    }

    /// Keeps to what domains are promised of G2. To be called before there are any blocks.
    ///
    /// # Panics
    /// When there are.
    #[must_use]
    pub fn with_shares(self, shares: &Shares) -> Self {
        self.pool.divide(shares.at(Level::G2, self.arena.slot_bytes() as u64));
        self
    }

    pub(crate) fn census(&self) -> Census {
        self.pool.census()
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

    /// Which of `names` are here, and which are not.
    pub(crate) fn sort(&self, names: &[SequenceHash]) -> (Vec<SequenceHash>, Vec<SequenceHash>) {
        self.pool.sort(names)
    }

    /// Keeps copies of the device's blocks, whose bytes `read` writes straight into their slots and shows on the way, and
    /// names those that are here now. Blocks for the time of the copies. All slots are taken in one go, and what forms a
    /// chain is announced as one event; only when they are not to be had at once is there one after the other.
    ///
    /// `since`: how often a domain was [purged](Self::purges) when the blocks were looked up.
    pub(crate) fn fill(
        &self,
        blocks: &CachedBlocks,
        since: u64,
        read: impl Fn(BlockId, &mut [u8], &mut dyn FnMut(&[u8])),
    ) -> Vec<SequenceHash> {
        let (parents, custody) = (blocks.parents(), blocks.custody());
        let each = || blocks.iter().zip(parents.iter().copied().zip(custody.iter().copied()));
        let copy = |block: &Held, (parent, custody), slot: &mut PartialBlock| {
            self.arena.write(slot, |bytes| {
                Header::seal_along(block.name(), parent, self.fingerprint, custody, bytes.len(), |seen| {
                    read(block.slot(), bytes, seen);
                })
            });
        };
        // What they follow must not make room for them.
        let held = self.pool.present(&parents.iter().copied().flatten().collect::<Vec<_>>());
        if let Some(slots) = self.pool.allocate(blocks.len()) {
            let full = each().zip(slots).map(|((block, terms), mut slot)| {
                copy(block, terms, &mut slot);
                slot.complete(block.name(), terms.0, terms.1)
            });
            self.pool.deposit(full.collect(), since);
            return blocks.iter().map(Held::name).collect();
        }
        drop(held);
        let kept = each().filter(|(block, (parent, custody))| {
            self.keep(block.name(), *parent, *custody, since, |slot| copy(block, (*parent, *custody), slot)).is_ok()
        });
        kept.map(|(block, _)| block.name()).collect()
    }

    /// Blocks without a copy of their bytes, kept in place while they are held. Not counted as a use: see
    /// [`Tier::load`].
    pub(crate) fn get(&self, names: &[SequenceHash]) -> Vec<Option<Block>> {
        self.blocks(self.pool.found(names))
    }

    fn blocks(&self, held: Vec<Option<CachedBlock>>) -> Vec<Option<Block>> {
        held.into_iter().map(|held| held.map(|held| self.block(held))).collect()
    }

    /// Keeps blocks that are here for longer, if `keep` asks for more than they have.
    pub(crate) fn renew(&self, names: &[SequenceHash], keep: Keep) {
        let changed: Vec<SequenceHash> =
            self.pool.renew(names.iter().copied(), keep).into_iter().map(|(n, _)| n).collect();
        for held in self.pool.found(&changed).into_iter().flatten() {
            self.arena.keep(&held, held.custody().keep);
        }
    }

    /// Denies all blocks of a domain, and says how many there were.
    pub(crate) fn purge(&self, domain: DomainId) -> usize {
        self.pool.purge(domain)
    }

    /// How often a domain was purged so far.
    pub(crate) fn purges(&self) -> u64 {
        self.pool.purges()
    }

    /// Lets go what is over.
    pub(crate) fn sweep(&self) -> usize {
        self.pool.sweep()
    }

    #[cfg(test)]
    pub(crate) fn names(&self) -> Vec<SequenceHash> {
        self.pool.names()
    }

    fn put(&self, block: &Block) -> Result<(), StoreError> {
        let Block { header, payload } = block;
        if header.fingerprint != self.fingerprint || payload.len() > self.arena.slot_bytes() {
            return Err(StoreError::Io(std::io::Error::other("the block has another engine's fingerprint")));
        }
        self.keep(header.name, header.parent, header.custody(), u64::MAX, |slot| {
            self.arena.write(slot, |bytes| {
                bytes[..payload.len()].copy_from_slice(payload);
                *header
            });
        })
    }

    fn keep(
        &self,
        name: SequenceHash,
        parent: Option<SequenceHash>,
        custody: Custody,
        since: u64,
        fill: impl FnOnce(&mut PartialBlock),
    ) -> Result<(), StoreError> {
        if self.pool.holds(&[name]) == 1 {
            return Ok(());
        }
        // A block must not displace the one that it follows, unless there is no other.
        let held = parent.map(|parent| self.pool.found(&[parent]));
        let slots = self.pool.allocate(1).or_else(|| {
            drop(held);
            self.pool.allocate(1)
        });
        let Some(mut slot) = slots.and_then(|mut slots| slots.pop()) else {
            // Every block is being read: soon some will not be.
            return Err(if self.pool.capacity() == 0 { StoreError::Full } else { StoreError::Busy });
        };
        fill(&mut slot);
        self.pool.deposit(vec![slot.complete(name, parent, custody)], since);
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

    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        if fingerprint == self.fingerprint { self.pool.holds(names) } else { 0 }
    }

    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let ours = fingerprint == self.fingerprint;
        let found = if ours { self.blocks(self.pool.used(&names)) } else { vec![None; names.len()] };
        stream::iter(found.into_iter().map(Ok).enumerate()).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let host = self.clone();
        let copy = move || blocks.iter().map(|block| host.put(block)).collect();
        Box::pin(async { tokio::task::spawn_blocking(copy).await.expect("copying in memory does not panic") })
    }

    fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        if fingerprint == self.fingerprint {
            self.pool.discard(name);
        }
    }

    fn expire(&self, _: Date) -> usize {
        // By its own clock, as with everything that it is asked.
        self.sweep()
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
