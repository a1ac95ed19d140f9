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
//! contend for a page, or for a shard of the table.
//!
//! **Trust.** An event states that each of its blocks follows the one before it, and a lookup relies on this: if the
//! last block of a run matches the prompt, the lookup counts the whole run. A holder that publishes wrong chains gets
//! wrong hints for the blocks that it stored first.
//!
//! Not here: sequence numbers and epochs, but for a note of the last event. `control::feed` decides which event to
//! apply.

mod apply;
mod arena;
mod bits;
mod digest;
mod evict;
mod group;
mod holder;
mod holder_digests;
mod holder_set;
mod holder_state;
mod holders;
mod insert;
mod key;
mod last_event;
mod lookup;
mod membership;
mod overlap;
mod page;
mod page_run;
mod partition;
mod position;
mod publish;
mod removals;
mod resize;
mod run;
mod seqlock;
mod sharded_table;
mod snapshot;
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
pub(crate) use sync::NoAddresses;
pub use worker_overlap::WorkerOverlap;

use arc_swap::ArcSwap;
use arena::Arena;
use evict::Bytes;
use parking_lot::Mutex;
use sharded_table::ShardedTable;
use snapshot::{IndexSnapshot, PageDirectory};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

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
    ///
    /// # Panics
    /// If the system has no addresses for it.
    pub fn new() -> Self {
        Self::with_memory_limit(usize::MAX).expect("the system has addresses for an index")
    }

    /// An index that evicts cold pages (clock eviction) to stay below a number of bytes.
    pub fn with_memory_limit(bytes: usize) -> Result<Self, NoAddresses> {
        let sharded_table = ShardedTable::new()?;
        let snapshot = IndexSnapshot {
            tables: sharded_table.tables(),
            directory: PageDirectory::default(),
            holders: Arc::default(),
        };
        Ok(Self {
            snapshot: ArcSwap::from_pointee(snapshot),
            update_lock: Mutex::default(),
            sharded_table,
            arena: Arena::new(),
            bytes: Bytes::default(),
            memory_limit: AtomicUsize::new(bytes),
            clock_hand: Mutex::default(),
            evicted_pages: AtomicU64::new(0),
        })
    }
}
