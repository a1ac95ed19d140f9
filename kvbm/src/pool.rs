//! The slots of one tier of memory (the device's, the host's), and the phases of the blocks in them.
//!
//! ```text
//!   allocate ──▶ PartialBlock ──complete──▶ FullBlock ──register──▶ CachedBlock ──downgrade──▶ WeakBlock
//!                    │ drop                    │ drop                 │ last drop                 │ upgrade, while
//!                    ▼                         ▼                      ▼                           ▼ still resident
//!                  free                      free              stays cached, evictable        CachedBlock
//! ```
//!
//! A transition consumes the phase before it, and dropping is the only release. `allocate` hands out free slots first,
//! then those of cached blocks that nobody holds, leaves before parents ([`crate::evict`]). What comes and goes by name is
//! announced under the pool's lock, so that events have the order of what happened. What expired goes, and pins end, as
//! soon as anybody looks ([`keeping`]).
//!
//! Look here in vain for bytes: a pool decides who may touch a slot, and never does so itself.

mod held;
mod keeping;

use crate::announce::Stored;
use crate::device::BlockId;
use crate::event::{BlockEvent, EventLog, Level};
use crate::evict::{Removed, Residents};
use crate::metrics::MemoryMetrics;
use crate::names::BATCH;
use crate::shares::Division;
use crate::{Census, Clock, Custody, Date, Keep, SequenceHash};
pub use held::{CachedBlock, CachedBlocks, Held, WeakBlock};
use keeping::{Due, Keeping, Pin};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

struct State {
    free: Vec<u32>,
    residents: Residents,
    division: Division,
    keeping: Keeping,
    /// Pins that there was no room for, since they were last counted.
    pins_refused: u64,
}

impl Pool {
    /// `capacity` empty slots. Blocks are announced as resting at `level`, counted in `metrics`, and kept by `clock`.
    pub(crate) fn new(level: Level, capacity: usize, log: Arc<EventLog>, metrics: MemoryMetrics, clock: Clock) -> Self {
        let capacity = capacity.min(u32::MAX as usize);
        // Popped from the end: slot 0 goes first, so that lazily touched memory is touched from the front.
        let free = (0..capacity as u32).rev().collect();
        let keeping = Keeping::new(capacity);
        let state = Mutex::new(State {
            free,
            residents: Residents::new(capacity),
            division: Division::default(),
            keeping,
            pins_refused: 0,
        });
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
        {
            let mut state = self.0.settled();
            if state.free.len() + state.residents.idle() < n {
                return None;
            }
            let spare = state.free.len().saturating_sub(n);
            slots.extend(state.free.drain(spare..).rev());
            let mut gone = Vec::new();
            while slots.len() < n {
                let (slot, name) = state.residents.evict().expect("every idle block can be given up, leaves first");
                state.keeping.leave(slot);
                slots.push(slot);
                gone.push(name);
            }
            self.0.removed(gone);
        }
        // What is filled together is copied fastest in the order in which it lies.
        slots.sort_unstable();
        Some(slots.into_iter().map(|id| PartialBlock(Slot { pool: Some(self.0.clone()), id })).collect())
    }

    /// Gives blocks to everyone, in order, and holds them for nobody. Duplicates are freed.
    pub(crate) fn deposit(&self, blocks: Vec<FullBlock>) {
        drop(self.register(blocks));
    }

    /// Gives blocks to everyone, in order. Where a name is here already, that block is returned and the duplicate freed.
    pub(crate) fn register(&self, blocks: Vec<FullBlock>) -> CachedBlocks {
        let mut duplicates = Vec::new();
        let mut cached = Vec::with_capacity(blocks.len());
        let mut state = self.0.settled();
        let mut stored = self.0.stored();
        for block in blocks {
            let FullBlock { slot, name, parent, custody } = block;
            debug_assert!(slot.is_of(&self.0), "a block of another pool");
            let id = if let Some(id) = state.residents.find(name) {
                duplicates.push(slot);
                state.renew(id, custody.keep);
                id
            } else {
                let id = state.enter(slot, name, parent, custody);
                self.0.metrics.blocks.inc();
                stored.push(name, parent);
                id
            };
            state.residents.hold(id);
            cached.push(Held { id, name });
        }
        // Announced under the lock; duplicates go free after it, because they go back through it.
        drop(stored);
        self.0.count_refused(&mut state);
        self.0.shed(&mut state);
        drop(state);
        CachedBlocks::new(&self.0, cached)
    }

    /// The leading `names` that are here, held, and used once more.
    pub(crate) fn matched(&self, names: &[SequenceHash]) -> CachedBlocks {
        let mut held = Vec::with_capacity(names.len());
        // In batches, so that nobody waits for the lock for long; what is held already keeps what precedes it.
        'all: for start in (0..names.len()).step_by(BATCH) {
            let residents = &mut self.0.settled().residents;
            for at in start..names.len().min(start + BATCH) {
                let Some(id) = residents.find_of(names, at) else { break 'all };
                residents.hold(id);
                residents.used(id);
                held.push(Held { id, name: names[at] });
            }
        }
        CachedBlocks::new(&self.0, held)
    }

    /// Each of `names`, held if it is here, and used once more.
    pub(crate) fn used(&self, names: &[SequenceHash]) -> Vec<Option<CachedBlock>> {
        let held = self.found(names);
        let mut state = self.0.lock();
        held.iter().flatten().for_each(|block| state.residents.used(block.slot().0));
        drop(state);
        held
    }

    /// Each of `names`, held if it is here, which is no use: blocks are copied without being asked for. One call for a chain, from its root on, costs far less than one per block: a
    /// hold walks up to the first ancestor that is held.
    pub(crate) fn found(&self, names: &[SequenceHash]) -> Vec<Option<CachedBlock>> {
        let mut held: Vec<Option<Held>> = Vec::with_capacity(names.len());
        for batch in names.chunks(BATCH) {
            let mut state = self.0.settled();
            let before = held.len();
            let found = state.residents.find_each(batch).zip(batch);
            held.extend(found.map(|(id, name)| Some(Held { id: id?, name: *name })));
            held[before..].iter().flatten().for_each(|block| state.residents.hold(block.id));
        }
        held.into_iter().map(|held| held.map(|block| CachedBlock::new(self.0.clone(), block))).collect()
    }

    /// Those of `names` that are here, in order, held by one guard, which is no use either.
    pub(crate) fn present(&self, names: &[SequenceHash]) -> CachedBlocks {
        let mut held = Vec::with_capacity(names.len());
        for batch in names.chunks(BATCH) {
            let mut state = self.0.settled();
            let before = held.len();
            let found = state.residents.find_each(batch).zip(batch);
            held.extend(found.filter_map(|(id, name)| Some(Held { id: id?, name: *name })));
            held[before..].iter().for_each(|block| state.residents.hold(block.id));
        }
        CachedBlocks::new(&self.0, held)
    }

    /// Which of `names` are here, and which are not.
    pub(crate) fn sort(&self, names: &[SequenceHash]) -> (Vec<SequenceHash>, Vec<SequenceHash>) {
        let [mut here, mut missing] = [Vec::with_capacity(names.len()), Vec::new()];
        for batch in names.chunks(BATCH) {
            for (found, name) in self.0.settled().residents.find_each(batch).zip(batch) {
                if found.is_some() { here.push(*name) } else { missing.push(*name) }
            }
        }
        (here, missing)
    }

    /// How many leading `names` are here.
    pub(crate) fn holds(&self, names: &[SequenceHash]) -> usize {
        let mut here = 0;
        for batch in names.chunks(BATCH) {
            let found = self.0.settled().residents.find_each(batch).take_while(Option::is_some).count();
            here += found;
            if found < batch.len() {
                break;
            }
        }
        here
    }

    /// The first of `names` that is here.
    pub(crate) fn next(&self, names: &[SequenceHash]) -> Option<usize> {
        let within = |(batch, names): (usize, &[SequenceHash])| {
            let found = self.0.lock().residents.find_each(names).position(|found| found.is_some());
            found.map(|at| batch * BATCH + at)
        };
        names.chunks(BATCH).enumerate().find_map(within)
    }

    /// Denies a block from now on. Whoever holds it keeps it.
    pub(crate) fn discard(&self, name: SequenceHash) {
        let mut state = self.0.lock();
        if let Some(slot) = state.residents.find(name) {
            state.remove(slot);
            self.0.removed(vec![name]);
        }
    }

    /// Keeps blocks that are here for longer, if `keep` asks for more than they have. Names those that changed, and says
    /// how they were kept before.
    pub(crate) fn renew(&self, names: impl IntoIterator<Item = SequenceHash>, keep: Keep) -> Vec<(SequenceHash, Keep)> {
        let mut state = self.0.settled();
        if keep == Keep::default() && state.keeping.is_plain() {
            return Vec::new();
        }
        let renew = |name| {
            let slot = state.residents.find(name)?;
            Some((name, state.renew(slot, keep)?))
        };
        let changed = names.into_iter().filter_map(renew).collect();
        self.0.count_refused(&mut state);
        changed
    }

    /// Takes all pins off: what they keep is needed more by somebody who could not run at all.
    pub(crate) fn unpin(&self) {
        let mut state = self.0.lock();
        let pinned = state.keeping.unpin_all();
        self.0.metrics.pins_refused.inc_by(pinned.len() as u64);
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

impl State {
    /// The block in the slot can be found from now on.
    fn enter(&mut self, slot: Slot, name: SequenceHash, parent: Option<SequenceHash>, custody: Custody) -> u32 {
        let id = slot.keep();
        self.residents.insert(id, (name, parent), custody.keep.priority, self.division.group(custody.domain));
        let pin = self.keeping.enter(id, custody);
        self.pin(id, pin);
        id
    }

    /// Keeps a block for longer. How it was kept before, if that changed.
    fn renew(&mut self, slot: u32, keep: Keep) -> Option<Keep> {
        let before = self.keeping.of(slot).keep;
        let both = before.and(keep);
        if both == before {
            return None;
        }
        let pin = self.keeping.change(slot, both);
        self.pin(slot, pin);
        self.residents.prefer(slot, both.priority);
        Some(before)
    }

    fn pin(&mut self, slot: u32, pin: Pin) {
        match pin {
            Pin::Unchanged => {}
            Pin::Granted => self.residents.hold(slot),
            Pin::Refused => self.pins_refused += 1,
        }
    }

    /// The block in the slot can be found no more.
    fn remove(&mut self, slot: u32) -> SequenceHash {
        if self.keeping.leave(slot) {
            self.residents.release(slot);
        }
        let (name, _) = self.residents.block(slot);
        match self.residents.remove(name) {
            Removed::Vacated(slot) => self.free.push(slot),
            Removed::Absent | Removed::StillHeld => {}
        }
        name
    }

    /// Does what has fallen due, and names what is gone.
    fn settle(&mut self, now: Date) -> Vec<SequenceHash> {
        let mut gone = Vec::new();
        while let Some(due) = self.keeping.next_due(now) {
            match due {
                Due::Unpinned(slot) => _ = self.residents.release(slot),
                Due::Expired(slot) => gone.push(self.remove(slot)),
            }
        }
        gone
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under this lock is a broken invariant, already loud where it happened; drops must not panic again.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state as it is now: nothing in it has expired.
    fn settled(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        // Most pools never hold anything that ends, and need not ask for the time.
        if state.keeping.awaits() {
            let gone = state.settle(self.clock.now());
            self.metrics.expired.inc_by(gone.len() as u64);
            self.removed(gone);
        }
        state
    }

    /// Called under the lock.
    fn count_refused(&self, state: &mut State) {
        self.metrics.pins_refused.inc_by(std::mem::take(&mut state.pins_refused));
    }

    /// Announces new blocks; to be dropped under the lock.
    fn stored(&self) -> Stored<'_> {
        Stored::new(self.level, &self.log)
    }

    /// Frees what domains have above their maximum. Called under the lock, whenever a domain may have got more, or let go
    /// of what it holds.
    fn shed(&self, state: &mut State) {
        let mut gone = Vec::new();
        while let Some((slot, name)) = state.residents.evict_surplus() {
            state.keeping.leave(slot);
            state.free.push(slot);
            gone.push(name);
        }
        if !gone.is_empty() {
            self.removed(gone);
        }
    }

    /// Called under the lock.
    fn removed(&self, blocks: Vec<SequenceHash>) {
        self.metrics.blocks.add(-(blocks.len().cast_signed() as i64));
        self.log.announce(BlockEvent::Removed { level: self.level, blocks });
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let left = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).residents.len();
        self.metrics.blocks.add(-(left.cast_signed() as i64));
    }
}

/// A slot that has one owner and no name.
struct Slot {
    /// `None` once the slot is the index's.
    pool: Option<Arc<Shared>>,
    id: u32,
}

impl Slot {
    fn is_of(&self, pool: &Arc<Shared>) -> bool {
        self.pool.as_ref().is_some_and(|own| Arc::ptr_eq(own, pool))
    }

    /// The slot becomes the index's, which gives it back when it evicts or discards the block.
    fn keep(mut self) -> u32 {
        self.pool = None;
        self.id
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            pool.lock().free.push(self.id);
        }
    }
}

/// A slot that is being filled. Dropping it returns the slot.
#[must_use = "dropping it returns the slot"]
pub struct PartialBlock(Slot);

impl PartialBlock {
    /// Where the bytes go.
    pub fn slot(&self) -> BlockId {
        BlockId(self.0.id)
    }

    /// The slot is full, and its content has a name.
    pub fn complete(self, name: SequenceHash, parent: Option<SequenceHash>, custody: Custody) -> FullBlock {
        FullBlock { slot: self.0, name, parent, custody }
    }
}

/// A full block that only its owner can use. Dropping it returns the slot.
#[must_use = "dropping it returns the slot"]
pub struct FullBlock {
    slot: Slot,
    name: SequenceHash,
    parent: Option<SequenceHash>,
    custody: Custody,
}

impl FullBlock {
    /// Where the bytes are.
    pub fn slot(&self) -> BlockId {
        BlockId(self.slot.id)
    }

    /// What they are.
    pub fn name(&self) -> SequenceHash {
        self.name
    }

    /// What precedes them; `None` at the root.
    pub fn parent(&self) -> Option<SequenceHash> {
        self.parent
    }
}

impl fmt::Debug for PartialBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PartialBlock(slot {})", self.0.id)
    }
}

impl fmt::Debug for FullBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FullBlock({} in slot {})", self.name, self.slot.id)
    }
}

#[cfg(test)]
mod tests;
