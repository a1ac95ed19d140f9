//! Who holds which block, per worker and tier: exact, fed by events, asked by every decision.
//!
//! A block is known by 64 bits of its name: the index is a hint, and a collision costs a recomputed prefix, never a wrong
//! token. Blocks lie in shards, each behind a short lock, so that readers wait for no more than one block's change. What
//! each source holds is kept beside, so that a source is removed in time proportional to what it held.
//!
//! Look here in vain for numbers and epochs: which event may be applied is the feed's business.

mod bits;
mod holders;
mod overlap;
mod shard;

#[cfg(test)]
mod tests;

pub(crate) use overlap::{Held, Overlap};

use bits::Bits;
use holders::Seat;
use kvbm::{BlockEvent, Level, SequenceHash};
use shard::{Names, Shard};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use worker::plane::{Source, StoreId, WorkerId};

/// The levels that are indexed: a peer's memory is indexed as that peer's own.
pub(crate) const LEVELS: [Level; 4] = [Level::G1, Level::G2, Level::G3, Level::G4];

/// A dense number for a source, reused once it is forgotten.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Slot(u32);

/// Who holds what.
pub(crate) struct Index {
    shards: Box<[RwLock<Shard>]>,
    sources: RwLock<Sources>,
    memberships: AtomicUsize,
}

/// Everyone who holds blocks, and who reaches whom.
#[derive(Default)]
struct Sources {
    owners: BTreeMap<Source, Arc<Owner>>,
    free: Vec<Slot>,
    slots: usize,
    /// Slots of workers.
    workers: Bits,
    /// By slot: the workers that onboard from this store. Empty for workers.
    reach: Vec<Bits>,
}

/// A source and what it holds.
struct Owner {
    slot: Slot,
    ledger: Mutex<Ledger>,
}

/// What a source holds, per level. The lock on it also orders the changes of one source.
#[derive(Default)]
struct Ledger {
    held: [Names; LEVELS.len()],
    /// Set when the source was forgotten while somebody waited for this lock.
    retired: bool,
}

impl Index {
    /// Two bits more than the cores of a large router: two threads rarely want the same shard.
    const SHARDS: usize = 256;

    pub(crate) fn new() -> Self {
        let shards = (0..Self::SHARDS).map(|_| RwLock::default()).collect();
        Self { shards, sources: RwLock::default(), memberships: AtomicUsize::new(0) }
    }

    /// Makes room for a worker that reaches `stores`. A worker that is there keeps its blocks and gets the new stores.
    pub(crate) fn join(&self, worker: WorkerId, stores: &[StoreId]) -> Slot {
        let mut sources = self.sources.write().unwrap_or_else(PoisonError::into_inner);
        let slot = sources.seat(Source::Worker(worker));
        sources.workers.set(slot.0);
        sources.reach.iter_mut().for_each(|workers| workers.unset(slot.0));
        for store in stores {
            let at = sources.seat(Source::Store(*store));
            sources.reach[at.0 as usize].set(slot.0);
        }
        slot
    }

    /// Forgets a worker, with what it held. Answers with the stores that nobody reaches any more.
    pub(crate) fn leave(&self, worker: WorkerId) -> Vec<StoreId> {
        self.forget(Source::Worker(worker));
        let sources = self.sources.read().unwrap_or_else(PoisonError::into_inner);
        let lonely = |(source, owner): (&Source, &Arc<Owner>)| match source {
            Source::Store(store) if sources.reach[owner.slot.0 as usize].is_empty() => Some(*store),
            _ => None,
        };
        sources.owners.iter().filter_map(lonely).collect()
    }

    /// Forgets a source, with what it held.
    pub(crate) fn forget(&self, source: Source) {
        let owner = self.sources.write().unwrap_or_else(PoisonError::into_inner).owners.remove(&source);
        let Some(owner) = owner else { return };
        let mut ledger = owner.lock();
        ledger.retired = true;
        self.empty(&owner, &mut ledger);
        drop(ledger);
        self.sources.write().unwrap_or_else(PoisonError::into_inner).vacate(owner.slot);
    }

    /// Forgets what a source held.
    pub(crate) fn clear(&self, source: Source) {
        if let Some(owner) = self.owner(source) {
            self.empty(&owner, &mut owner.lock());
        }
    }

    /// Notes a change. Changes of sources that nobody announced or reaches are ignored.
    pub(crate) fn apply(&self, source: Source, event: &BlockEvent) {
        let Some(owner) = self.owner(source) else { return };
        let mut ledger = owner.lock();
        if ledger.retired {
            return;
        }
        match event {
            BlockEvent::Stored { level, blocks, .. } => {
                let Some(seat) = Seat::new(owner.slot, *level) else { return };
                for block in blocks {
                    self.add(&mut ledger, seat, block.short());
                }
            }
            BlockEvent::Removed { level, blocks } => {
                let Some(seat) = Seat::new(owner.slot, *level) else { return };
                for block in blocks {
                    self.take(&mut ledger, seat, block.short());
                }
                ledger.held[seat.level()].fit();
            }
            BlockEvent::Cleared { level } => {
                let Some(seat) = Seat::new(owner.slot, *level) else { return };
                let held = std::mem::take(&mut ledger.held[seat.level()]);
                self.vacate(seat, &held);
            }
        }
    }

    /// Sets what a source holds, changing only the difference: readers never see it empty in between.
    pub(crate) fn replace(&self, source: Source, blocks: &[(Level, SequenceHash)]) {
        let Some(owner) = self.owner(source) else { return };
        let mut ledger = owner.lock();
        if ledger.retired {
            return;
        }
        let mut wanted: [Names; LEVELS.len()] = Default::default();
        for (level, name) in blocks {
            if let Some(seat) = Seat::new(owner.slot, *level) {
                wanted[seat.level()].insert(name.short());
            }
        }
        for (level, wanted) in LEVELS.into_iter().zip(&wanted) {
            let Some(seat) = Seat::new(owner.slot, level) else { continue };
            let stale: Vec<u64> = ledger.held[seat.level()].iter().filter(|short| !wanted.contains(*short)).collect();
            for short in stale {
                self.take(&mut ledger, seat, short);
            }
            for short in wanted.iter() {
                self.add(&mut ledger, seat, short);
            }
            ledger.held[seat.level()].fit();
        }
    }

    /// How much of a prompt each worker has within reach: see [`Overlap`].
    pub(crate) fn overlap(&self, names: &[SequenceHash]) -> Overlap {
        let sources = self.sources.read().unwrap_or_else(PoisonError::into_inner);
        let mut walk = overlap::Walk::new(&sources.workers, &sources.reach);
        for name in names {
            let short = name.short();
            let shard = self.shard(short).read().unwrap_or_else(PoisonError::into_inner);
            if !walk.step(shard.get(short)) {
                break;
            }
        }
        walk.finish()
    }

    /// Pairs of a block and somewhere it rests.
    pub(crate) fn memberships(&self) -> usize {
        self.memberships.load(Ordering::Relaxed)
    }

    /// Bytes that the index has taken for its blocks, spare room included.
    pub(crate) fn bytes(&self) -> usize {
        let shards = self.shards.iter().map(|shard| shard.read().unwrap_or_else(PoisonError::into_inner).bytes());
        let owners: Vec<_> = {
            let sources = self.sources.read().unwrap_or_else(PoisonError::into_inner);
            sources.owners.values().cloned().collect()
        };
        let ledgers = owners.iter().map(|owner| owner.lock().held.iter().map(Names::bytes).sum::<usize>());
        shards.sum::<usize>() + ledgers.sum::<usize>()
    }

    fn add(&self, ledger: &mut Ledger, seat: Seat, short: u64) {
        if ledger.held[seat.level()].insert(short) {
            self.shard(short).write().unwrap_or_else(PoisonError::into_inner).insert(short, seat);
            self.memberships.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn take(&self, ledger: &mut Ledger, seat: Seat, short: u64) {
        if ledger.held[seat.level()].remove(short) {
            self.shard(short).write().unwrap_or_else(PoisonError::into_inner).remove(short, seat);
            self.memberships.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn empty(&self, owner: &Owner, ledger: &mut Ledger) {
        for level in LEVELS {
            let Some(seat) = Seat::new(owner.slot, level) else { continue };
            let held = std::mem::take(&mut ledger.held[seat.level()]);
            self.vacate(seat, &held);
        }
    }

    fn vacate(&self, seat: Seat, held: &Names) {
        for short in held.iter() {
            self.shard(short).write().unwrap_or_else(PoisonError::into_inner).remove(short, seat);
        }
        self.memberships.fetch_sub(held.len(), Ordering::Relaxed);
    }

    fn owner(&self, source: Source) -> Option<Arc<Owner>> {
        self.sources.read().unwrap_or_else(PoisonError::into_inner).owners.get(&source).cloned()
    }

    fn shard(&self, short: u64) -> &RwLock<Shard> {
        // Bits that the tables inside the shards do not use: they take the lowest and the highest.
        &self.shards[(short >> 40) as usize % Self::SHARDS]
    }
}

impl Owner {
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sources {
    fn seat(&mut self, source: Source) -> Slot {
        if let Some(owner) = self.owners.get(&source) {
            return owner.slot;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots += 1;
            self.reach.push(Bits::default());
            Slot(self.slots as u32 - 1)
        });
        self.owners.insert(source, Arc::new(Owner { slot, ledger: Mutex::default() }));
        slot
    }

    fn vacate(&mut self, slot: Slot) {
        self.workers.unset(slot.0);
        self.reach.iter_mut().for_each(|workers| workers.unset(slot.0));
        self.reach[slot.0 as usize] = Bits::default();
        self.free.push(slot);
    }
}
