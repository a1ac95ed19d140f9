//! What a pool knows, and the lock that it is under.

use super::Shared;
use super::evict::{Removed, Residents};
use super::pins::{Due, Keeping, Pin};
use super::slot::Slot;
use crate::block::{Custody, Date, DomainId, Keep, SequenceHash};
use crate::event::{BlockEvent, EventLog};
use crate::tier::Division;
use std::collections::HashMap;
use std::hint::spin_loop;
use std::ops::{Deref, DerefMut};
use std::sync::{MutexGuard, PoisonError, TryLockError};

pub(super) struct State {
    pub(super) free: Vec<u32>,
    pub(super) residents: Residents,
    pub(super) division: Division,
    pub(super) keeping: Keeping,
    /// Pins that there was no room for, since they were last counted.
    pub(super) pins_refused: u64,
    /// How often a domain was purged, and which of these was the last of each domain.
    pub(super) purges: u64,
    pub(super) purged: HashMap<DomainId, u64>,
}

impl State {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            // Popped from the end: slot 0 goes first, so that lazily touched memory is touched from the front.
            free: (0..capacity as u32).rev().collect(),
            residents: Residents::new(capacity),
            division: Division::default(),
            keeping: Keeping::new(capacity),
            pins_refused: 0,
            purges: 0,
            purged: HashMap::new(),
        }
    }

    /// Whether a domain was purged after `since` purges.
    pub(super) fn is_purged(&self, domain: DomainId, since: u64) -> bool {
        since < self.purges && self.purged.get(&domain).is_some_and(|last| *last > since)
    }

    /// The block in the slot can be found from now on.
    pub(super) fn enter(&mut self, slot: Slot, name: SequenceHash, parent: Option<SequenceHash>, custody: Custody) {
        let id = slot.keep();
        self.residents.insert(id, (name, parent), custody.keep.priority, self.division.group(custody.domain));
        let pin = self.keeping.enter(id, custody);
        self.pin(id, pin);
    }

    /// Keeps a block for longer. How it was kept before, if that changed.
    pub(super) fn renew(&mut self, slot: u32, keep: Keep) -> Option<Custody> {
        let before = self.keeping.of(slot);
        let both = before.keep.and(keep);
        if both == before.keep {
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
    pub(super) fn remove(&mut self, slot: u32) -> SequenceHash {
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

/// The state, alone. What is announced meanwhile gets its place among events at once, and the log has its work with it when
/// the lock is free again.
pub(super) struct Locked<'a> {
    shared: &'a Shared,
    // Dropped before what follows.
    state: MutexGuard<'a, State>,
    told: Told<'a>,
}

/// Events that are the log's to take in, if there are any.
struct Told<'a> {
    log: &'a EventLog,
    any: bool,
}

impl Shared {
    /// How often a lock that is taken is tried again before whoever wants it sleeps, and the pauses in between: a turn under
    /// it takes some microseconds, being woken tens. Each look takes the line that it stands in from who works there.
    const LOOKS: usize = 64;
    const PAUSES: usize = 16;

    pub(super) fn lock(&self) -> Locked<'_> {
        Locked { shared: self, state: self.guard(), told: Told { log: &self.log, any: false } }
    }

    fn guard(&self) -> MutexGuard<'_, State> {
        // A panic under this lock is a broken invariant, already loud where it happened; drops must not panic again.
        for _ in 0..Self::LOOKS {
            match self.state.try_lock() {
                Ok(state) => return state,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => (0..Self::PAUSES).for_each(|_| spin_loop()),
            }
        }
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state as it is now: nothing in it has expired.
    pub(super) fn settled(&self) -> Locked<'_> {
        let mut state = self.lock();
        // Most pools never hold anything that ends, and need not ask for the time.
        if state.keeping.awaits() {
            let gone = state.settle(self.clock.now());
            self.metrics.expired.inc_by(gone.len() as u64);
            state.removed(gone);
        }
        state
    }
}

impl Locked<'_> {
    pub(super) fn count_refused(&mut self) {
        let refused = std::mem::take(&mut self.state.pins_refused);
        self.shared.metrics.rejected_pins.inc_by(refused);
    }

    /// Frees what domains have above their maximum, whenever a domain may have got more, or let go of what it holds.
    pub(super) fn shed(&mut self) {
        let mut gone = Vec::new();
        while let Some((slot, name)) = self.state.residents.evict_surplus() {
            self.state.keeping.leave(slot);
            self.state.free.push(slot);
            gone.push(name);
        }
        self.removed(gone);
    }

    /// Announces that blocks are gone.
    pub(super) fn removed(&mut self, blocks: Vec<SequenceHash>) {
        if !blocks.is_empty() {
            self.told.any = true;
            self.told.log.queue(BlockEvent::Removed { level: self.shared.level, blocks });
        }
    }
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if self.any {
            self.log.settle();
        }
    }
}
