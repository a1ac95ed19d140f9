//! The tiers in memory: G1, the device's memory, and G2, the host's.
//!
//! This room owns the slots of such a tier and the phases of the blocks in them ([`Pool`]), the choice of what to evict
//! (`evict`), the seam to the engine's memory ([`device`]) and the host tier ([`HostTier`]).
//! Not here: when blocks move between tiers. That is `manager`.
//!
//! The phases:
//!
//! ```text
//!   allocate ──▶ PartialBlock ──complete──▶ FullBlock ──register──▶ CachedBlock ──downgrade──▶ WeakBlock
//!                    │ drop                    │ drop                 │ last drop                 │ upgrade, while
//!                    ▼                         ▼                      ▼                           ▼ still resident
//!                  free                      free              stays cached, evictable        CachedBlock
//! ```
//!
//! A transition consumes the phase before it, and dropping is the only release. `allocate` hands out free slots first,
//! then those of cached blocks that nobody holds, leaves before parents ([`evict`]). What comes and goes by name is
//! announced under the pool's lock, so that events have the order of what happened. What expired goes, and pins end, as
//! soon as anybody looks ([`pins`]).
//!
//! Look here in vain for bytes: a pool decides who may touch a slot, and never does so itself.

pub mod device;
mod evict;
mod handles;
mod host;
mod lookup;
mod pins;
mod slot;
mod state;

pub use device::{BlockId, DeviceBlocks};
pub use handles::{CachedBlock, CachedBlocks, Held, WeakBlock};
pub use host::HostTier;
pub use slot::{FullBlock, PartialBlock};

use crate::block::{Clock, Custody, DomainId, Keep, Level, SequenceHash};
use crate::event::{Census, EventLog, Stored};
use crate::metrics::MemoryMetrics;
use crate::tier::Division;
use slot::Slot;
use state::State;
use std::sync::{Arc, Mutex};

/// So many blocks before its turn what registering a block reads begins to come.
const AHEAD: usize = 4;

/// A handle to one pool; clones share it.
#[derive(Clone)]
pub(crate) struct Pool(Arc<Shared>);

struct Shared {
    level: Level,
    capacity: usize,
    log: Arc<EventLog>,
    metrics: MemoryMetrics,
    clock: Clock,
    state: Mutex<State>,
}

impl Pool {
    /// `capacity` empty slots. Blocks are announced as resting at `level`, counted in `metrics`, and kept by `clock`.
    pub(crate) fn new(level: Level, capacity: usize, log: Arc<EventLog>, metrics: MemoryMetrics, clock: Clock) -> Self {
        let capacity = capacity.min(u32::MAX as usize);
        let state = Mutex::new(State::new(capacity));
        Self(Arc::new(Shared { level, capacity, log, metrics, clock, state }))
    }

    /// Counts domains apart from now on, before there are any blocks.
    pub(crate) fn divide(&self, division: Division) {
        let mut state = self.0.lock();
        state.residents.divide(&division.bounds);
        state.division = division;
    }

    /// All slots.
    pub(crate) fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// Slots that `allocate` could hand out now.
    pub(crate) fn available(&self) -> usize {
        let state = self.0.settled();
        state.free.len() + state.residents.idle()
    }

    /// Slots that hold a block, be it found by name or still being filled.
    pub(crate) fn occupied(&self) -> usize {
        self.0.capacity - self.0.settled().free.len()
    }

    /// Blocks that can be found by name.
    pub(crate) fn resident(&self) -> usize {
        self.0.settled().residents.len()
    }

    /// Which blocks those are. Looks at each slot under the lock: for whoever wants to know, now and then.
    pub(crate) fn census(&self) -> Census {
        self.0.settled().residents.names().collect()
    }

    /// `n` empty slots, or none at all. Gives up cached blocks that nobody holds when free slots do not suffice.
    pub(crate) fn allocate(&self, n: usize) -> Option<Vec<PartialBlock>> {
        let mut slots = Vec::with_capacity(n.min(self.0.capacity));
        let mut state = self.0.settled();
        if state.free.len() + state.residents.idle() < n {
            return None;
        }
        let spare = state.free.len().saturating_sub(n);
        slots.extend(state.free.drain(spare..).rev());
        let mut gone = Vec::new();
        while slots.len() < n {
            let (slot, name) = state.residents.evict().expect("every idle block can be evicted, leaves first");
            state.keeping.leave(slot);
            slots.push(slot);
            gone.push(name);
        }
        state.removed(gone);
        drop(state);
        // What is filled together is copied fastest in the order in which it lies.
        slots.sort_unstable();
        Some(slots.into_iter().map(|id| PartialBlock(Slot { pool: Some(self.0.clone()), id })).collect())
    }

    /// Gives blocks to everyone, in order, and holds them for nobody. Duplicates are freed, and so are blocks of domains that were
    /// purged after `since` [purges](Self::purges).
    pub(crate) fn deposit(&self, blocks: Vec<FullBlock>, since: u64) {
        drop(self.register_since(blocks, since));
    }

    /// Gives blocks to everyone, in order. Where a name is here already, that block is returned and the duplicate freed.
    pub(crate) fn register(&self, blocks: Vec<FullBlock>) -> CachedBlocks {
        self.register_since(blocks, u64::MAX)
    }

    /// The same for blocks whose bytes were read after `since` [purges](Self::purges): those of domains that were purged later are
    /// freed, and not returned.
    pub(crate) fn register_since(&self, mut blocks: Vec<FullBlock>, since: u64) -> CachedBlocks {
        // Declared before the lock is taken, so done with after it: duplicates go free through it, and the log has its work.
        let mut duplicates = Vec::new();
        let mut stored = Stored::new(self.0.level, &self.0.log);
        let mut state = self.0.settled();
        if since < state.purges {
            duplicates
                .extend(blocks.extract_if(.., |block| state.is_purged(block.custody.domain, since)).map(|b| b.slot));
        }
        let mut cached: Vec<_> = blocks.iter().map(|block| Held { id: block.slot.id, name: block.name }).collect();
        cached.iter().take(AHEAD).for_each(|block| state.residents.expect(&block.name));
        for (at, block) in blocks.into_iter().enumerate() {
            if let Some(next) = cached.get(at + AHEAD) {
                state.residents.expect(&next.name);
            }
            let FullBlock { slot, name, parent, custody } = block;
            debug_assert!(slot.is_of(&self.0), "a block of another pool");
            if let Some(id) = state.residents.find(name) {
                cached[at].id = id;
                duplicates.push(slot);
                state.renew(id, custody.keep);
            } else {
                stored.push(name, parent);
                state.enter(slot, name, parent, custody);
            }
            state.residents.hold(cached[at].id);
        }
        stored.queue();
        state.count_refused();
        state.shed();
        drop(state);
        CachedBlocks::new(&self.0, cached)
    }

    /// Denies all blocks of a domain, those that are held included, and says how many there were. What was read before and is
    /// [registered](Self::register_since) later is freed.
    pub(crate) fn purge(&self, domain: DomainId) -> usize {
        let mut state = self.0.lock();
        state.purges += 1;
        let now = state.purges;
        state.purged.insert(domain, now);
        let gone: Vec<_> = state.keeping.of_domain(domain).into_iter().map(|slot| state.remove(slot)).collect();
        let count = gone.len();
        state.removed(gone);
        count
    }

    /// How often a domain was purged so far: what whoever begins to read blocks notes, to say it when registering them.
    pub(crate) fn purges(&self) -> u64 {
        self.0.lock().purges
    }

    /// Whether a domain was purged after `since` purges.
    pub(crate) fn is_purged(&self, domain: DomainId, since: u64) -> bool {
        self.0.lock().is_purged(domain, since)
    }

    /// Denies a block from now on. Whoever holds it keeps it.
    pub(crate) fn discard(&self, name: SequenceHash) {
        let mut state = self.0.lock();
        if let Some(slot) = state.residents.find(name) {
            state.remove(slot);
            state.removed(vec![name]);
        }
    }

    /// Keeps blocks that are here for longer, if `keep` asks for more than they have. Names those that changed, and says
    /// how they were kept before.
    pub(crate) fn renew(
        &self,
        names: impl IntoIterator<Item = SequenceHash>,
        keep: Keep,
    ) -> Vec<(SequenceHash, Custody)> {
        let mut state = self.0.settled();
        if keep == Keep::default() && state.keeping.is_plain() {
            return Vec::new();
        }
        let renew = |name| {
            let slot = state.residents.find(name)?;
            Some((name, state.renew(slot, keep)?))
        };
        let changed = names.into_iter().filter_map(renew).collect();
        state.count_refused();
        changed
    }

    /// Blocks that are pinned.
    pub(crate) fn pinned(&self) -> usize {
        self.0.settled().keeping.pins()
    }

    /// Takes all pins off: what they keep is needed more by somebody who could not run at all.
    pub(crate) fn unpin(&self) {
        let mut state = self.0.lock();
        let pinned = state.keeping.unpin_all();
        self.0.metrics.rejected_pins.inc_by(pinned.len() as u64);
        for slot in pinned {
            state.residents.release(slot);
        }
    }

    /// Lets go what has fallen due, although nobody looks. How many blocks are gone.
    pub(crate) fn sweep(&self) -> usize {
        let before = self.0.lock().residents.len();
        before - self.0.settled().residents.len().min(before)
    }

    /// Every block that can be found by name.
    #[cfg(test)]
    pub(crate) fn names(&self) -> Vec<SequenceHash> {
        self.0.lock().residents.names().collect()
    }
}

#[cfg(test)]
mod tests;
