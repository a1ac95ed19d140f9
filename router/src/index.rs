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
//! token. A block has one position, however many sources hold it; a block that a holder lacks is a zero bit in that
//! holder's mask. Lookups take no lock and do not wait: they read one `IndexSnapshot` (RCU), and each page under its
//! seqlock. Events of one source are applied in order. Events of different sources are applied concurrently; they
//! contend for a page, or for a shard while its table is resized.
//!
//! **Trust.** An event states that each of its blocks follows the one before it, and a lookup relies on this: if the
//! last block of a run matches the prompt, the lookup counts the whole run. A source that publishes wrong chains gets
//! wrong hints for the blocks that it stored first.
//!
//! Not here: sequence numbers and epochs. `control::feed` decides which event to apply.

mod arena;
mod bits;
mod evict;
mod holder_set;
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
mod source;
mod source_digests;
mod source_state;
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

pub use overlap::Overlap;
pub(crate) use source::LEVELS;
pub use source::SourceId;
pub use worker_overlap::WorkerOverlap;

use arc_swap::ArcSwap;
use arena::{Arena, ChunkChange};
use kvbm::{BlockEvent, Level, SequenceHash, SetDigest};
use lookup::Lookup;
use parking_lot::Mutex;
use run::Run;
use sharded_table::ShardedTable;
use snapshot::{IndexSnapshot, PageDirectory, Sources};
use source::SourceLevel;
use source_state::SourceState;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use table::Table;
use worker::plane::{Source, StoreId, WorkerId};

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
/// Counters that change with every event are kept per source and per shard instead.
#[derive(Default)]
#[repr(align(128))]
struct Bytes {
    tables: AtomicUsize,
    holder_sets: AtomicUsize,
    source_pages: AtomicUsize,
}

impl Bytes {
    /// Bytes in use except those of pages and tables.
    fn other(&self) -> usize {
        self.holder_sets.load(Ordering::Relaxed) + self.source_pages.load(Ordering::Relaxed)
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
            sources: Arc::default(),
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
    pub fn join(&self, worker: WorkerId, stores: &[StoreId]) -> SourceId {
        self.update_sources(|sources| register(sources, worker, stores))
    }

    /// Adds several workers with the same stores in one update.
    pub fn join_all(&self, workers: impl Iterator<Item = WorkerId>, stores: &[StoreId]) -> Vec<SourceId> {
        self.update_sources(|sources| workers.map(|worker| register(sources, worker, stores)).collect())
    }

    /// Removes a worker and its blocks. Returns the stores that no other worker can read.
    pub fn leave(&self, worker: WorkerId) -> Vec<StoreId> {
        self.forget(Source::Worker(worker));
        self.snapshot.load().sources.unreferenced_stores()
    }

    /// Removes a source and its blocks, in time proportional to the number of its blocks and of all sources.
    pub fn forget(&self, source: Source) {
        let Some(state) = self.update_sources(|sources| sources.unregister(source)) else { return };
        let mut pages = state.lock();
        pages.unregistered = true;
        for source_level in source_levels(state.id) {
            self.clear_level(&state, &mut pages, source_level);
        }
        self.release_open_pages(state.id, &mut pages);
        self.account_pages(&state, &mut pages);
        drop(pages);
        self.update_sources(|sources| sources.release(state.id));
    }

    /// Removes all blocks of a source.
    pub fn clear(&self, source: Source) {
        let Some(state) = self.source_state(source) else { return };
        let mut pages = state.lock();
        for source_level in source_levels(state.id) {
            self.clear_level(&state, &mut pages, source_level);
        }
        self.account_pages(&state, &mut pages);
        state.digests.set_complete();
    }

    /// Applies an event. Events of unknown sources are ignored.
    pub fn apply(&self, source: Source, event: &BlockEvent) {
        let Some(state) = self.source_state(source) else { return };
        let mut pages = state.lock();
        let (BlockEvent::Stored { level, .. } | BlockEvent::Removed { level, .. } | BlockEvent::Cleared { level }) =
            event;
        let Some(source_level) = SourceLevel::new(state.id, *level).filter(|_| !pages.unregistered) else { return };
        match event {
            BlockEvent::Stored { parent, blocks, .. } => {
                let hashes: Vec<u64> = blocks.iter().map(SequenceHash::short).collect();
                let after = parent.as_ref().map(SequenceHash::short);
                self.store_blocks(&state, &mut pages, source_level, Run { hashes: &hashes, after, chained: true });
            }
            BlockEvent::Removed { blocks, .. } => {
                let hashes: Vec<u64> = blocks.iter().map(SequenceHash::short).collect();
                self.remove_blocks(&state, &mut pages, source_level, &hashes);
            }
            BlockEvent::Cleared { .. } => self.clear_level(&state, &mut pages, source_level),
        }
        self.account_pages(&state, &mut pages);
        drop(pages);
        self.evict_to_limit();
    }

    /// Sets the blocks of a source from a snapshot. Only the difference is applied, so readers never see an empty
    /// source.
    pub fn replace(&self, source: Source, runs: &[kvbm::Run]) {
        let Some(state) = self.source_state(source) else { return };
        let mut pages = state.lock();
        if pages.unregistered {
            return;
        }
        state.digests.set_complete();
        for level in LEVELS {
            let Some(source_level) = SourceLevel::new(state.id, level) else { continue };
            let wanted = || runs.iter().filter(|run| run.level == level);
            let keep: HashSet<u64> = wanted().flat_map(|run| &run.blocks).map(SequenceHash::short).collect();
            let held = self.hashes(&pages, source_level);
            let stale: Vec<u64> = held.into_iter().filter(|hash| !keep.contains(hash)).collect();
            self.remove_blocks(&state, &mut pages, source_level, &stale);
            for run in wanted() {
                let hashes: Vec<u64> = run.blocks.iter().map(SequenceHash::short).collect();
                let after = run.parent.as_ref().map(SequenceHash::short);
                self.store_blocks(&state, &mut pages, source_level, Run { hashes: &hashes, after, chained: true });
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

    /// Number of pairs of a block and a source level that holds it. Reads the counters of all sources.
    pub fn entries(&self) -> usize {
        let Sources { workers, stores, .. } = &*self.snapshot.load().sources;
        workers.iter().chain(stores).flatten().map(|state| state.digests.blocks()).sum()
    }

    /// Digest of the indexed blocks of a source at a level. `None` for an unknown source, or a level that is not
    /// indexed.
    pub fn digest(&self, source: Source, level: Level) -> Option<SetDigest> {
        let at = LEVELS.iter().position(|other| *other == level)?;
        Some(self.source_state(source)?.digests.at(at))
    }

    /// Whether the index has all blocks that a source has announced. If not, it evicted some to stay within its memory
    /// limit, and [`digest`](Self::digest) cannot be compared with the digest of the source. Call it after `digest`:
    /// blocks may be evicted meanwhile.
    pub fn is_complete(&self, source: Source) -> bool {
        self.source_state(source).is_some_and(|state| state.digests.is_complete())
    }

    /// Number of pages evicted so far to stay within the memory limit.
    pub fn evicted_pages(&self) -> u64 {
        self.evicted_pages.load(Ordering::Relaxed)
    }

    /// Allocated bytes, including unused space in tables and chunks.
    pub fn bytes(&self) -> usize {
        self.arena.bytes() + self.bytes.tables.load(Ordering::Relaxed) + self.bytes.other()
    }

    fn source_state(&self, source: Source) -> Option<Arc<SourceState>> {
        self.snapshot.load().sources.get(source).cloned()
    }

    /// Replaces the list of sources.
    fn update_sources<T>(&self, apply: impl FnOnce(&mut Sources) -> T) -> T {
        self.update(|snapshot| {
            let mut sources = Sources::clone(&snapshot.sources);
            let outcome = apply(&mut sources);
            snapshot.sources = Arc::new(sources);
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

/// Registers a worker, and that it can read these stores and no others.
fn register(sources: &mut Sources, worker: WorkerId, stores: &[StoreId]) -> SourceId {
    let source_id = sources.register(Source::Worker(worker));
    let number = source_id.index() as u32;
    sources.readers.iter_mut().for_each(|workers| workers.unset(number));
    for store in stores {
        let at = sources.register(Source::Store(*store)).index();
        sources.readers[at].set(number);
    }
    source_id
}

/// One source at each level.
fn source_levels(source_id: SourceId) -> impl Iterator<Item = SourceLevel> {
    LEVELS.into_iter().filter_map(move |level| SourceLevel::new(source_id, level))
}
