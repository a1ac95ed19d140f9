//! Who holds which block, per worker and tier: exact, fed by events, asked by every decision.
//!
//! ```text
//!   name ──▶ sharded_table: tables, a shard each ──▶ place ──▶ page: 64 names in the order of their chains,
//!                                                              a word of bits per holder, one set of holders
//!                                                              where many are alike,
//!                                                              and where the chain goes on: most likely the page beside it
//! ```
//!
//! A block is known by 64 bits of its name: the index is a hint, and a collision costs a recomputed prefix, never a wrong
//! token. It has one place, whoever holds it; a hole in what somebody holds is a bit. Lookups take no lock and wait for
//! nobody: they read one `Body`, and pages by their version. Changes of one source come in order; those of different sources
//! go on side by side, and wait for each other for the length of a page, or while a table grows.
//!
//! **Trust.** An event says of its blocks that each follows the one before it. A lookup believes that: where the last of a run
//! is the prompt's, it takes all of them for the prompt's. A source that lies makes wrong hints of what it stored first.
//!
//! Look here in vain for numbers and epochs: which event may be applied is the feed's business.

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
mod source_state;
mod span;
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
pub use source::Slot;
pub use worker_overlap::Held;

use arc_swap::ArcSwap;
use arena::{Arena, Change};
use kvbm::{BlockEvent, Level, SequenceHash, SetDigest};
use lookup::Walk;
use run::Run;
use sharded_table::Locator;
use snapshot::{Body, Roll, Shelves};
use source::Seat;
use source_state::Owner;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use table::Table;
use worker::plane::{Source, StoreId, WorkerId};

/// Who holds what.
pub struct Index {
    body: ArcSwap<Body>,
    /// Held while the body is replaced.
    changing: Mutex<()>,
    locator: Locator,
    arena: Arena,
    bytes: Bytes,
    budget: AtomicUsize,
    /// The page at which forgetting goes on.
    hand: Mutex<u32>,
    forgotten: AtomicU64,
}

/// Bytes, on a cache line of their own: lookups read beside it. What every event changes is counted where it is changed, by source
/// and by shard.
#[derive(Default)]
#[repr(align(128))]
struct Bytes {
    tables: AtomicUsize,
    crowds: AtomicUsize,
    ledgers: AtomicUsize,
}

impl Bytes {
    /// Bytes beside those of the pages and the tables.
    fn apart(&self) -> usize {
        self.crowds.load(Ordering::Relaxed) + self.ledgers.load(Ordering::Relaxed)
    }
}

impl Default for Index {
    fn default() -> Self {
        Self::new()
    }
}

impl Index {
    /// What a router's index may take: a hundred million blocks and more.
    pub const BUDGET: usize = 4 << 30;
    /// Less is of no use: what is known comes and goes in pages and tables, and the index would forget before anybody asks.
    pub const BUDGET_LEAST: usize = 1 << 20;

    /// An index without a limit.
    pub fn new() -> Self {
        Self::with_budget(usize::MAX)
    }

    /// An index that forgets what it was asked for longest ago rather than take more than so many bytes.
    pub fn with_budget(bytes: usize) -> Self {
        let locator = Locator::new();
        let body = Body { tables: locator.tables(), shelves: Shelves::default(), roll: Arc::default() };
        let table_bytes = body.tables.iter().map(|table| table.bytes()).sum();
        Self {
            body: ArcSwap::from_pointee(body),
            changing: Mutex::default(),
            locator,
            arena: Arena::new(),
            bytes: Bytes { tables: AtomicUsize::new(table_bytes), ..Bytes::default() },
            budget: AtomicUsize::new(bytes),
            hand: Mutex::default(),
            forgotten: AtomicU64::new(0),
        }
    }

    /// Forgets, from now on, what was asked for longest ago rather than take more than so many bytes.
    pub fn set_budget(&self, bytes: usize) {
        self.budget.store(bytes, Ordering::Relaxed);
        self.trim();
    }

    /// Makes room for a worker that reaches `stores`. A worker that is there keeps its blocks and gets the new stores.
    pub fn join(&self, worker: WorkerId, stores: &[StoreId]) -> Slot {
        self.call(|roll| admit(roll, worker, stores))
    }

    /// The same for many who reach the same stores, all at once.
    pub fn join_all(&self, workers: impl Iterator<Item = WorkerId>, stores: &[StoreId]) -> Vec<Slot> {
        self.call(|roll| workers.map(|worker| admit(roll, worker, stores)).collect())
    }

    /// Forgets a worker, with what it held. Answers with the stores that nobody reaches any more.
    pub fn leave(&self, worker: WorkerId) -> Vec<StoreId> {
        self.forget(Source::Worker(worker));
        self.body.load().roll.lonely()
    }

    /// Forgets a source, with what it held, in time proportional to that, and to the number of sources.
    pub fn forget(&self, source: Source) {
        let Some(owner) = self.call(|roll| roll.strike(source)) else { return };
        let mut ledger = owner.lock();
        ledger.retired = true;
        for seat in seats(owner.slot) {
            self.empty(&owner, &mut ledger, seat);
        }
        self.close(owner.slot, &mut ledger);
        self.weigh(&owner, &mut ledger);
        drop(ledger);
        self.call(|roll| roll.vacate(owner.slot));
    }

    /// Forgets what a source held.
    pub fn clear(&self, source: Source) {
        let Some(owner) = self.owner(source) else { return };
        let mut ledger = owner.lock();
        for seat in seats(owner.slot) {
            self.empty(&owner, &mut ledger, seat);
        }
        self.weigh(&owner, &mut ledger);
        owner.set_forgetful(false);
    }

    /// Notes a change. Changes of sources that nobody announced or reaches are ignored.
    pub fn apply(&self, source: Source, event: &BlockEvent) {
        let Some(owner) = self.owner(source) else { return };
        let mut ledger = owner.lock();
        let (BlockEvent::Stored { level, .. } | BlockEvent::Removed { level, .. } | BlockEvent::Cleared { level }) =
            event;
        let Some(seat) = Seat::new(owner.slot, *level).filter(|_| !ledger.retired) else { return };
        match event {
            BlockEvent::Stored { parent, blocks, .. } => {
                let names: Vec<u64> = blocks.iter().map(SequenceHash::short).collect();
                let after = parent.as_ref().map(SequenceHash::short);
                self.store(&owner, &mut ledger, seat, Run { names: &names, after, chained: true });
            }
            BlockEvent::Removed { blocks, .. } => {
                let names: Vec<u64> = blocks.iter().map(SequenceHash::short).collect();
                self.evict(&owner, &mut ledger, seat, &names);
            }
            BlockEvent::Cleared { .. } => self.empty(&owner, &mut ledger, seat),
        }
        self.weigh(&owner, &mut ledger);
        drop(ledger);
        self.trim();
    }

    /// Sets what a source holds, changing only the difference: readers never see it empty in between.
    pub fn replace(&self, source: Source, runs: &[kvbm::Run]) {
        let Some(owner) = self.owner(source) else { return };
        let mut ledger = owner.lock();
        if ledger.retired {
            return;
        }
        owner.set_forgetful(false);
        for level in LEVELS {
            let Some(seat) = Seat::new(owner.slot, level) else { continue };
            let wanted = || runs.iter().filter(|run| run.level == level);
            let keep: HashSet<u64> = wanted().flat_map(|run| &run.blocks).map(SequenceHash::short).collect();
            let held = self.names(&ledger, seat);
            let stale: Vec<u64> = held.into_iter().filter(|name| !keep.contains(name)).collect();
            self.evict(&owner, &mut ledger, seat, &stale);
            for run in wanted() {
                let names: Vec<u64> = run.blocks.iter().map(SequenceHash::short).collect();
                let after = run.parent.as_ref().map(SequenceHash::short);
                self.store(&owner, &mut ledger, seat, Run { names: &names, after, chained: true });
            }
        }
        self.weigh(&owner, &mut ledger);
        drop(ledger);
        self.trim();
    }

    /// How much of a prompt each worker has within reach.
    pub fn overlap(&self, names: &[SequenceHash]) -> Overlap {
        let mut overlap = Overlap::default();
        self.overlap_into(names, &mut overlap);
        overlap
    }

    /// The same, written over a former answer: nothing is allocated.
    pub fn overlap_into(&self, names: &[SequenceHash], overlap: &mut Overlap) {
        Walk::new(&self.body.load(), names, overlap).run();
    }

    /// Pairs of a block and somewhere it rests. All sources are asked.
    pub fn memberships(&self) -> usize {
        let Roll { workers, stores, .. } = &*self.body.load().roll;
        workers.iter().chain(stores).flatten().map(|owner| owner.blocks()).sum()
    }

    /// Digest of the indexed blocks of a source at a level; `None` for an unknown source or a level that is not indexed.
    pub fn digest(&self, source: Source, level: Level) -> Option<SetDigest> {
        let at = LEVELS.iter().position(|other| *other == level)?;
        Some(self.owner(source)?.digest(at))
    }

    /// Whether the index has all blocks that a source has announced. It does not once it evicted some of them to stay within
    /// its memory limit; then [`digest`](Self::digest) cannot be compared with the digest of the source.
    pub fn is_complete(&self, source: Source) -> bool {
        self.owner(source).is_some_and(|owner| owner.is_complete())
    }

    /// Pages forgotten so far, to stay within the budget.
    pub fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }

    /// Bytes that the index has taken for its blocks, spare room included.
    pub fn bytes(&self) -> usize {
        self.arena.bytes() + self.bytes.tables.load(Ordering::Relaxed) + self.bytes.apart()
    }

    fn owner(&self, source: Source) -> Option<Arc<Owner>> {
        self.body.load().roll.owner(source).cloned()
    }

    /// Changes who is there.
    fn call<T>(&self, change: impl FnOnce(&mut Roll) -> T) -> T {
        self.change(|body| {
            let mut roll = Roll::clone(&body.roll);
            let outcome = change(&mut roll);
            body.roll = Arc::new(roll);
            outcome
        })
    }

    fn set_table(&self, shard: usize, table: Arc<Table>) {
        let bytes = table.bytes();
        let former = self.change(|body| std::mem::replace(&mut body.tables[shard], table)).bytes();
        self.bytes.tables.fetch_add(bytes.wrapping_sub(former), Ordering::Relaxed);
    }

    fn set_chunk(&self, change: Change) {
        self.change(|body| {
            body.shelves = match change {
                Change::Came(at, chunk) => body.shelves.with(at, Some(chunk)),
                Change::Went(at) => body.shelves.with(at, None),
            };
        });
    }

    fn change<T>(&self, change: impl FnOnce(&mut Body) -> T) -> T {
        let _turn = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut body = Body::clone(&self.body.load());
        let outcome = change(&mut body);
        self.body.store(Arc::new(body));
        outcome
    }
}

/// A worker's seat, from which it reaches these stores and no others.
fn admit(roll: &mut Roll, worker: WorkerId, stores: &[StoreId]) -> Slot {
    let slot = roll.seat(Source::Worker(worker));
    let number = slot.number() as u32;
    roll.reach.iter_mut().for_each(|workers| workers.unset(number));
    for store in stores {
        let at = roll.seat(Source::Store(*store)).number();
        roll.reach[at].set(number);
    }
    slot
}

/// A source at each level.
fn seats(slot: Slot) -> impl Iterator<Item = Seat> {
    LEVELS.into_iter().filter_map(move |level| Seat::new(slot, level))
}
