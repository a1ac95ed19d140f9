//! Retention of the blocks of one pool, by slot: expiry and pins, and when the next of them is due.
//!
//! Pure: the pool passes the time in and carries out what is due. The pool itself holds a pinned block, so it and its
//! ancestors stay, and the count of evictable blocks stays exact. The number of pins is bounded, since a pool full of
//! pinned blocks cannot serve requests.

use crate::block::{BlockAttrs, BlockRetention, Date, DomainId};
use crate::table::hugepages;
use std::collections::BTreeSet;

/// Retention of a pool's blocks.
pub(super) struct RetentionTable {
    slots: Vec<SlotRetention>,
    /// The next change of each slot, by date.
    due: BTreeSet<(Date, u32)>,
    /// Number of blocks with other than default retention.
    non_default: usize,
    pins: usize,
    max_pins: usize,
}

#[derive(Clone, Copy, Default)]
struct SlotRetention {
    attrs: BlockAttrs,
    resident: bool,
    pinned: bool,
}

/// The result of a request to pin a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PinOutcome {
    /// No pin was requested, or the block is pinned already.
    Unchanged,
    /// The caller is to hold the block.
    Granted,
    /// The limit of pins is reached.
    Rejected,
}

/// A change that is due.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Due {
    /// The caller is to release the block.
    Unpinned(u32),
    /// The caller is to remove the block.
    Expired(u32),
}

impl SlotRetention {
    fn is_non_default(&self) -> bool {
        self.resident && self.attrs.retention != BlockRetention::default()
    }

    fn due(&self) -> Option<Date> {
        let BlockRetention { expires, pinned, .. } = self.attrs.retention;
        let unpin = pinned.filter(|_| self.pinned);
        unpin.into_iter().chain(expires).min()
    }
}

impl RetentionTable {
    /// Pins may take half of a pool; running requests need the rest.
    const PIN_DIVISOR: usize = 2;

    pub(super) fn new(capacity: usize) -> Self {
        let mut slots = Vec::with_capacity(capacity);
        hugepages::advise_hugepages(slots.spare_capacity_mut());
        slots.resize(capacity, SlotRetention::default());
        Self { slots, due: BTreeSet::new(), non_default: 0, pins: 0, max_pins: capacity / Self::PIN_DIVISOR }
    }

    /// Attributes of the block in a slot.
    pub(super) fn of(&self, slot: u32) -> BlockAttrs {
        self.slots[slot as usize].attrs
    }

    /// The slots with blocks of a domain. Scans all slots.
    pub(super) fn of_domain(&self, domain: DomainId) -> Vec<u32> {
        let of_domain = |slot: &u32| {
            let entry = &self.slots[*slot as usize];
            entry.resident && entry.attrs.domain == domain
        };
        (0..self.slots.len() as u32).filter(of_domain).collect()
    }

    /// Adds a block.
    pub(super) fn insert(&mut self, slot: u32, attrs: BlockAttrs) -> PinOutcome {
        let entry = SlotRetention { attrs, resident: true, pinned: false };
        self.non_default += usize::from(entry.is_non_default());
        self.slots[slot as usize] = entry;
        self.update(slot, attrs.retention)
    }

    /// Changes the retention of a resident block.
    pub(super) fn update(&mut self, slot: u32, retention: BlockRetention) -> PinOutcome {
        let entry = &mut self.slots[slot as usize];
        let before = entry.due();
        self.non_default -= usize::from(entry.is_non_default());
        entry.attrs.retention = retention;
        self.non_default += usize::from(entry.is_non_default());
        let pin = match retention.pinned {
            Some(_) if entry.pinned => PinOutcome::Unchanged,
            Some(_) if self.pins < self.max_pins => PinOutcome::Granted,
            Some(_) => PinOutcome::Rejected,
            None => PinOutcome::Unchanged,
        };
        if pin == PinOutcome::Granted {
            entry.pinned = true;
            self.pins += 1;
        }
        self.reschedule(slot, before);
        pin
    }

    /// Removes a block. True: it was pinned, and the caller is to release it.
    pub(super) fn remove(&mut self, slot: u32) -> bool {
        let entry = &mut self.slots[slot as usize];
        let (before, pinned) = (entry.due(), entry.pinned);
        self.non_default -= usize::from(entry.is_non_default());
        entry.resident = false;
        entry.pinned = false;
        self.pins -= usize::from(pinned);
        self.reschedule(slot, before);
        pinned
    }

    /// Number of pinned blocks.
    pub(super) fn pins(&self) -> usize {
        self.pins
    }

    /// Ends all pins. The caller is to release the returned slots.
    pub(super) fn unpin_all(&mut self) -> Vec<u32> {
        let pinned: Vec<u32> = (0..self.slots.len() as u32).filter(|slot| self.slots[*slot as usize].pinned).collect();
        for slot in &pinned {
            self.unpin(*slot);
        }
        pinned
    }

    /// Whether all blocks have the default retention.
    pub(super) fn is_default(&self) -> bool {
        self.non_default == 0
    }

    /// Whether any expiry or end of a pin is scheduled.
    pub(super) fn has_deadlines(&self) -> bool {
        !self.due.is_empty()
    }

    /// The next change that is due by `now`. The caller [removes](Self::remove) an expired block before the next call.
    pub(super) fn next_due(&mut self, now: Date) -> Option<Due> {
        let &(_, slot) = self.due.first().filter(|(date, _)| *date <= now)?;
        if self.of(slot).retention.is_expired(now) {
            return Some(Due::Expired(slot));
        }
        self.unpin(slot);
        Some(Due::Unpinned(slot))
    }

    fn unpin(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        let before = entry.due();
        entry.pinned = false;
        self.pins -= 1;
        self.reschedule(slot, before);
    }

    fn reschedule(&mut self, slot: u32, before: Option<Date>) {
        let entry = &self.slots[slot as usize];
        let after = entry.due().filter(|_| entry.resident);
        if let Some(date) = before {
            self.due.remove(&(date, slot));
        }
        self.due.extend(after.map(|date| (date, slot)));
    }
}
