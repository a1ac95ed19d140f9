//! The state of a pool, which its handles and guards share, and its lock.

use super::evict::{EvictionIndex, Removed};
use super::retention::{Due, PinOutcome, RetentionTable};
use crate::block::{BlockAttrs, BlockRetention, Clock, Date, DomainId, Level, SequenceHash};
use crate::event::{BlockEvent, EventLog};
use crate::metrics::MemoryMetrics;
use crate::tier::TierQuotas;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::hint::spin_loop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// What the handles of a pool and the guards of its blocks share.
pub(super) struct Shared {
    pub(super) level: Level,
    pub(super) capacity: usize,
    pub(super) log: Arc<EventLog>,
    pub(super) metrics: MemoryMetrics,
    pub(super) clock: Clock,
    state: Mutex<State>,
}

/// The slots, the index of the blocks in them, and their retention.
pub(super) struct State {
    pub(super) free: Vec<u32>,
    pub(super) index: EvictionIndex,
    pub(super) division: TierQuotas,
    pub(super) retention: RetentionTable,
    /// The checksums of the blocks' bytes by slot, where they are known. Empty until one is.
    checksums: Vec<Option<u64>>,
    /// Rejected pins that are not in the metric yet.
    pub(super) rejected_pins: u64,
    /// Number of purges, and for each purged domain the number of its last purge.
    pub(super) purges: u64,
    pub(super) purged: HashMap<DomainId, u64>,
}

impl State {
    fn new(capacity: usize) -> Self {
        Self {
            // Popped from the end: slot 0 is used first, so memory is touched from the front.
            free: (0..capacity as u32).rev().collect(),
            index: EvictionIndex::new(capacity),
            division: TierQuotas::default(),
            retention: RetentionTable::new(capacity),
            checksums: Vec::new(),
            rejected_pins: 0,
            purges: 0,
            purged: HashMap::new(),
        }
    }

    /// Whether a domain was purged after `since` purges.
    pub(super) fn is_purged(&self, domain: DomainId, since: u64) -> bool {
        since < self.purges && self.purged.get(&domain).is_some_and(|last| *last > since)
    }

    /// Makes the block in the slot findable by hash.
    pub(super) fn insert(&mut self, slot: u32, hash: SequenceHash, parent: Option<SequenceHash>, attrs: BlockAttrs) {
        if let Some(former) = self.checksums.get_mut(slot as usize) {
            *former = None;
        }
        self.index.insert(slot, (hash, parent), attrs.retention.priority, self.division.group(attrs.domain));
        let pin = self.retention.insert(slot, attrs);
        self.pin(slot, pin);
    }

    /// The checksum of the bytes in a slot, if it is known.
    pub(super) fn checksum(&self, slot: u32) -> Option<u64> {
        self.checksums.get(slot as usize).copied().flatten()
    }

    /// Notes the checksum of the bytes in a slot, whose block is held or was just inserted. The first one stays: bytes
    /// with another one have changed.
    pub(super) fn note_checksum(&mut self, slot: u32, checksum: u64) {
        if self.checksums.len() <= slot as usize {
            self.checksums.resize(slot as usize + 1, None);
        }
        self.checksums[slot as usize].get_or_insert(checksum);
    }

    /// Extends the retention of a block. Returns its former attributes if they changed.
    pub(super) fn extend_retention(&mut self, slot: u32, retention: BlockRetention) -> Option<BlockAttrs> {
        let before = self.retention.of(slot);
        let merged = before.retention.merge(retention);
        if merged == before.retention {
            return None;
        }
        let pin = self.retention.update(slot, merged);
        self.pin(slot, pin);
        self.index.set_priority(slot, merged.priority);
        Some(before)
    }

    fn pin(&mut self, slot: u32, pin: PinOutcome) {
        match pin {
            PinOutcome::Unchanged => {}
            PinOutcome::Granted => self.index.hold(slot),
            PinOutcome::Rejected => self.rejected_pins += 1,
        }
    }

    /// Removes the block in the slot from the index.
    pub(super) fn remove(&mut self, slot: u32) -> SequenceHash {
        if self.retention.remove(slot) {
            self.index.release(slot);
        }
        let (hash, _) = self.index.block(slot);
        match self.index.remove(hash) {
            Removed::Vacated(slot) => self.free.push(slot),
            Removed::Absent | Removed::StillHeld => {}
        }
        hash
    }

    /// Carries out all changes that are due, and returns the removed blocks.
    fn expire_due(&mut self, now: Date) -> Vec<SequenceHash> {
        let mut removed = Vec::new();
        while let Some(due) = self.retention.next_due(now) {
            match due {
                Due::Unpinned(slot) => _ = self.index.release(slot),
                Due::Expired(slot) => removed.push(self.remove(slot)),
            }
        }
        removed
    }
}

/// The locked state. Events that are queued under the lock are delivered after the lock is released.
pub(super) struct Locked<'a> {
    shared: &'a Shared,
    // Field order: the lock is released before `events` is dropped.
    state: MutexGuard<'a, State>,
    events: QueuedEvents<'a>,
}

/// Whether the log has queued events to deliver.
struct QueuedEvents<'a> {
    log: &'a EventLog,
    any: bool,
}

impl Shared {
    /// Attempts to take the lock before the thread sleeps, and spin hints between two attempts. The lock is held for
    /// microseconds, a wake-up takes tens of them. Each attempt moves the lock's cache line away from the holder, hence
    /// the pauses. `Mutex::lock` alone sleeps too early: under contention its slowest calls take ten times as long.
    const SPINS: usize = 64;
    const SPIN_HINTS: usize = 16;

    pub(super) fn new(level: Level, capacity: usize, log: Arc<EventLog>, metrics: MemoryMetrics, clock: Clock) -> Self {
        let capacity = capacity.min(u32::MAX as usize);
        let state = Mutex::new(State::new(capacity));
        Self { level, capacity, log, metrics, clock, state }
    }

    pub(super) fn lock(&self) -> Locked<'_> {
        Locked { shared: self, state: self.guard(), events: QueuedEvents { log: &self.log, any: false } }
    }

    fn guard(&self) -> MutexGuard<'_, State> {
        // A panic under this lock is a broken invariant that was reported where it happened; a `drop` must not panic
        // again.
        for _ in 0..Self::SPINS {
            if let Some(state) = self.state.try_lock() {
                return state;
            }
            (0..Self::SPIN_HINTS).for_each(|_| spin_loop());
        }
        self.state.lock()
    }

    /// Locks the state, and removes expired blocks and ends due pins first.
    pub(super) fn lock_and_expire(&self) -> Locked<'_> {
        let mut state = self.lock();
        // Most pools have no block with a deadline, and need not read the clock.
        if state.retention.has_deadlines() {
            let removed = state.expire_due(self.clock.now());
            self.metrics.expired.inc_by(removed.len() as u64);
            state.announce_removed(removed);
        }
        state
    }
}

impl Locked<'_> {
    pub(super) fn count_rejected_pins(&mut self) {
        let rejected = std::mem::take(&mut self.state.rejected_pins);
        self.shared.metrics.rejected_pins.inc_by(rejected);
    }

    /// Frees blocks of domains above their maximum. Called when a domain may have got blocks, or released some.
    pub(super) fn evict_over_limits(&mut self) {
        let mut removed = Vec::new();
        while let Some((slot, hash)) = self.state.index.evict_over_limit() {
            self.state.retention.remove(slot);
            self.state.free.push(slot);
            removed.push(hash);
        }
        self.announce_removed(removed);
    }

    /// Announces that blocks were removed.
    pub(super) fn announce_removed(&mut self, blocks: Vec<SequenceHash>) {
        if !blocks.is_empty() {
            self.events.any = true;
            self.events.log.queue(BlockEvent::Removed { level: self.shared.level, blocks });
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

impl Drop for QueuedEvents<'_> {
    fn drop(&mut self) {
        if self.any {
            self.log.flush();
        }
    }
}
