//! The prefix index: which worker and which store holds which blocks, at each level. KV events update it, every routing
//! decision reads it.
//!
//! ```text
//!   block hash ──▶ sharded_table: hash tables, one per shard ──▶ position ──▶ page: 64 hashes in chain order,
//!                                                                             a 64-bit mask per holder (one bitmap for
//!                                                                             holders with equal masks),
//!                                                                             the likely position of the successor
//! ```
//!
//! The index knows a block by 64 bits of its hash. It is a hint: a collision costs a recomputed prefix, never a wrong
//! token. A block has one position, however many holders hold it; a block that a holder lacks is a zero bit in that
//! holder's mask. Lookups take no lock and do not wait: they read one `IndexSnapshot` (RCU), and each page under its
//! seqlock. Events of one holder are applied in order. Events of different holders are applied concurrently; they
//! contend for a page, or for a shard while its table is resized.
//!
//! **Trust.** An event states that each of its blocks follows the one before it, and a lookup relies on this: if the
//! last block of a run matches the prompt, the lookup counts the whole run. A holder that publishes wrong chains gets
//! wrong hints for the blocks that it stored first.
//!
//! Not here: sequence numbers and epochs. `control::feed` decides which event to apply.

mod arena;
mod bits;
mod evict;
mod holder;
mod holder_digests;
mod holder_set;
mod holder_state;
mod holders;
mod insert;
mod key;
mod lookup;
mod overlap;
mod page;
mod partition;
mod position;
mod run;
mod seqlock;
mod sharded_table;
mod snapshot;
mod span;
mod spin_lock;
mod sync;
mod table;
mod update;
mod worker_overlap;

#[cfg(test)]
mod batch_tests;
#[cfg(test)]
mod loom;
#[cfg(test)]
mod tests;

pub(crate) use holder::LEVELS;
pub use holder::{Holder, HolderId};
pub use overlap::Overlap;
pub use worker_overlap::WorkerOverlap;

use arc_swap::ArcSwap;
use arena::{Arena, ChunkChange};
use holder::HolderLevel;
use holder_state::HolderState;
use kvbm::{BlockEvent, Level, SequenceHash, SetDigest};
use lookup::Lookup;
use parking_lot::Mutex;
use run::Run;
use sharded_table::ShardedTable;
use snapshot::{HolderDirectory, IndexSnapshot, PageDirectory};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use table::Table;
use worker::plane::{StoreId, WorkerId};

/// The prefix index.
pub struct Index {
    snapshot: ArcSwap<IndexSnapshot>,
    /// Held while `snapshot` is replaced.
    update_lock: Mutex<()>,
    sharded_table: ShardedTable,
    arena: Arena,
    bytes: Bytes,
    memory_limit: AtomicUsize,
    /// The next page that the clock visits.
    clock_hand: Mutex<u32>,
    evicted_pages: AtomicU64,
}

/// Bytes of shared structures. They have a cache line of their own because lookups read the fields beside them.
/// Counters that change with every event are kept per holder and per shard instead.
#[derive(Default)]
#[repr(align(128))]
struct Bytes {
    tables: AtomicUsize,
    holder_sets: AtomicUsize,
    holder_pages: AtomicUsize,
}

impl Bytes {
    /// Bytes in use except those of pages and tables.
    fn other(&self) -> usize {
        self.holder_sets.load(Ordering::Relaxed) + self.holder_pages.load(Ordering::Relaxed)
    }
}

impl Default for Index {
    fn default() -> Self {
        Self::new()
    }
}

impl Index {
    /// Default memory limit of a router's index: enough for more than a hundred million blocks.
    pub const DEFAULT_MEMORY_LIMIT: usize = 4 << 30;
    /// Smallest useful limit. Memory is allocated in chunks of pages and whole tables, so a smaller index would evict
    /// blocks before any request asks for them.
    pub const MIN_MEMORY_LIMIT: usize = 1 << 20;

    /// An index without a memory limit.
    pub fn new() -> Self {
        Self::with_memory_limit(usize::MAX)
    }

    /// An index that evicts cold pages (clock eviction) to stay below a number of bytes.
    pub fn with_memory_limit(bytes: usize) -> Self {
        let sharded_table = ShardedTable::new();
        let snapshot = IndexSnapshot {
            tables: sharded_table.tables(),
            directory: PageDirectory::default(),
            holders: Arc::default(),
        };
        let table_bytes = snapshot.tables.iter().map(|table| table.bytes()).sum();
        Self {
            snapshot: ArcSwap::from_pointee(snapshot),
            update_lock: Mutex::default(),
            sharded_table,
            arena: Arena::new(),
            bytes: Bytes { tables: AtomicUsize::new(table_bytes), ..Bytes::default() },
            memory_limit: AtomicUsize::new(bytes),
            clock_hand: Mutex::default(),
            evicted_pages: AtomicU64::new(0),
        }
    }

    /// Changes the memory limit and evicts pages if the index exceeds it.
    pub fn set_memory_limit(&self, bytes: usize) {
        self.memory_limit.store(bytes, Ordering::Relaxed);
        self.evict_to_limit();
    }

    /// Adds a worker that can onboard from `stores`. A known worker keeps its blocks and gets the new list of stores.
    pub fn join(&self, worker: WorkerId, stores: &[StoreId]) -> HolderId {
        self.update_holders(|holders| register(holders, Holder::Worker(worker), stores))
    }

    /// Adds the estimate of a worker's cache, which can onboard from `stores`. As in [`join`](Self::join), a known one
    /// keeps its blocks.
    pub(crate) fn join_estimate(&self, worker: WorkerId, stores: &[StoreId]) -> HolderId {
        self.update_holders(|holders| register(holders, Holder::Estimate(worker), stores))
    }

    /// Adds several workers with the same stores in one update.
    pub fn join_all(&self, workers: impl Iterator<Item = WorkerId>, stores: &[StoreId]) -> Vec<HolderId> {
        self.update_holders(|holders| workers.map(|worker| register(holders, Holder::Worker(worker), stores)).collect())
    }

    /// Removes a worker, its estimate, and the blocks of both. Returns the stores that no other worker can read.
    pub fn leave(&self, worker: WorkerId) -> Vec<StoreId> {
        self.forget(Holder::Estimate(worker));
        self.forget(Holder::Worker(worker));
        self.snapshot.load().holders.unreferenced_stores()
    }

    /// Removes a holder and its blocks, in time proportional to the number of its blocks and of all holders.
    pub fn forget(&self, holder: Holder) {
        let Some(state) = self.update_holders(|holders| holders.unregister(holder)) else { return };
        let mut pages = state.lock();
        pages.unregistered = true;
        for holder_level in holder_levels(state.id) {
            self.clear_level(&state, &mut pages, holder_level);
        }
        self.release_open_pages(state.id, &mut pages);
        self.account_pages(&state, &mut pages);
        drop(pages);
        self.update_holders(|holders| holders.release(state.id));
    }

    /// Removes all blocks of a holder.
    pub fn clear(&self, holder: Holder) {
        let Some(state) = self.holder_state(holder) else { return };
        let mut pages = state.lock();
        for holder_level in holder_levels(state.id) {
            self.clear_level(&state, &mut pages, holder_level);
        }
        self.account_pages(&state, &mut pages);
        state.digests.set_complete();
    }

    /// Applies an event. Events of unknown holders are ignored.
    pub fn apply(&self, holder: Holder, event: &BlockEvent) {
        let Some(state) = self.holder_state(holder) else { return };
        let mut pages = state.lock();
        let (BlockEvent::Stored { level, .. } | BlockEvent::Removed { level, .. } | BlockEvent::Cleared { level }) =
            event;
        let Some(holder_level) = HolderLevel::new(state.id, *level).filter(|_| !pages.unregistered) else { return };
        match event {
            BlockEvent::Stored { parent, blocks, .. } => {
                let hashes: Vec<u64> = blocks.iter().map(SequenceHash::short).collect();
                let after = parent.as_ref().map(SequenceHash::short);
                self.store_blocks(&state, &mut pages, holder_level, Run { hashes: &hashes, after, chained: true });
            }
            BlockEvent::Removed { blocks, .. } => {
                let hashes: Vec<u64> = blocks.iter().map(SequenceHash::short).collect();
                self.remove_blocks(&state, &mut pages, holder_level, &hashes);
            }
            BlockEvent::Cleared { .. } => self.clear_level(&state, &mut pages, holder_level),
        }
        self.account_pages(&state, &mut pages);
        drop(pages);
        self.evict_to_limit();
    }

    /// Sets the blocks of a holder from a snapshot. Only the difference is applied, so readers never see an empty
    /// holder.
    pub fn replace(&self, holder: Holder, runs: &[kvbm::Run]) {
        let Some(state) = self.holder_state(holder) else { return };
        let mut pages = state.lock();
        if pages.unregistered {
            return;
        }
        state.digests.set_complete();
        for level in LEVELS {
            let Some(holder_level) = HolderLevel::new(state.id, level) else { continue };
            let wanted = || runs.iter().filter(|run| run.level == level);
            let keep: HashSet<u64> = wanted().flat_map(|run| &run.blocks).map(SequenceHash::short).collect();
            let held = self.hashes(&pages, holder_level);
            let stale: Vec<u64> = held.into_iter().filter(|hash| !keep.contains(hash)).collect();
            self.remove_blocks(&state, &mut pages, holder_level, &stale);
            for run in wanted() {
                let hashes: Vec<u64> = run.blocks.iter().map(SequenceHash::short).collect();
                let after = run.parent.as_ref().map(SequenceHash::short);
                self.store_blocks(&state, &mut pages, holder_level, Run { hashes: &hashes, after, chained: true });
            }
        }
        self.account_pages(&state, &mut pages);
        drop(pages);
        self.evict_to_limit();
    }

    /// How much of a prompt each worker can reuse.
    pub fn overlap(&self, hashes: &[SequenceHash]) -> Overlap {
        let mut overlap = Overlap::default();
        self.overlap_into(hashes, &mut overlap);
        overlap
    }

    /// Like [`overlap`](Self::overlap), but reuses the memory of an earlier result.
    pub fn overlap_into(&self, hashes: &[SequenceHash], overlap: &mut Overlap) {
        Lookup::new(&self.snapshot.load(), hashes, overlap).run();
    }

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
    /// limit, and [`digest`](Self::digest) cannot be compared with the digest of the holder. Call it after `digest`:
    /// blocks may be evicted meanwhile.
    pub fn is_complete(&self, holder: Holder) -> bool {
        self.holder_state(holder).is_some_and(|state| state.digests.is_complete())
    }

    /// Number of pages evicted so far to stay within the memory limit.
    pub fn evicted_pages(&self) -> u64 {
        self.evicted_pages.load(Ordering::Relaxed)
    }

    /// Allocated bytes, including unused space in tables and chunks.
    pub fn bytes(&self) -> usize {
        self.arena.bytes() + self.bytes.tables.load(Ordering::Relaxed) + self.bytes.other()
    }

    fn holder_state(&self, holder: Holder) -> Option<Arc<HolderState>> {
        self.snapshot.load().holders.get(holder).cloned()
    }

    /// Replaces the list of holders.
    fn update_holders<T>(&self, apply: impl FnOnce(&mut HolderDirectory) -> T) -> T {
        self.update(|snapshot| {
            let mut holders = HolderDirectory::clone(&snapshot.holders);
            let outcome = apply(&mut holders);
            snapshot.holders = Arc::new(holders);
            outcome
        })
    }

    fn set_table(&self, shard: usize, table: Arc<Table>) {
        let bytes = table.bytes();
        let former = self.update(|snapshot| std::mem::replace(&mut snapshot.tables[shard], table)).bytes();
        self.bytes.tables.fetch_add(bytes.wrapping_sub(former), Ordering::Relaxed);
    }

    fn set_chunk(&self, change: ChunkChange) {
        self.update(|snapshot| {
            snapshot.directory = match change {
                ChunkChange::Added(at, chunk) => snapshot.directory.with(at, Some(chunk)),
                ChunkChange::Removed(at) => snapshot.directory.with(at, None),
            };
        });
    }

    fn update<T>(&self, apply: impl FnOnce(&mut IndexSnapshot) -> T) -> T {
        let _guard = self.update_lock.lock();
        let mut snapshot = IndexSnapshot::clone(&self.snapshot.load());
        let outcome = apply(&mut snapshot);
        self.snapshot.store(Arc::new(snapshot));
        outcome
    }
}

/// Registers a worker or an estimate, and that it can read these stores and no others.
fn register(holders: &mut HolderDirectory, reader: Holder, stores: &[StoreId]) -> HolderId {
    let holder_id = holders.register(reader);
    let number = holder_id.index() as u32;
    holders.readers.iter_mut().for_each(|workers| workers.unset(number));
    for store in stores {
        let at = holders.register(Holder::Store(*store)).index();
        holders.readers[at].set(number);
    }
    holder_id
}

/// One holder at each level.
fn holder_levels(holder_id: HolderId) -> impl Iterator<Item = HolderLevel> {
    LEVELS.into_iter().filter_map(move |level| HolderLevel::new(holder_id, level))
}
