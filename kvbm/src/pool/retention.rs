//! What was asked for the blocks of one pool, by slot, and what of it falls due when.
//!
//! Pure: the pool says what time it is, and carries out what falls due. A pinned block is held, by the pool itself: so it
//! stays, what precedes it stays, and what can be allocated is still counted exactly. Pins are bounded, since a pool that
//! is full of them serves nobody.

use crate::block::{Custody, Date, DomainId, Keep};
use crate::table::hugepages;
use std::collections::BTreeSet;

/// The terms of a pool's blocks.
pub(super) struct Keeping {
    slots: Vec<Kept>,
    /// When something changes for a slot: once each, at the earliest.
    due: BTreeSet<(Date, u32)>,
    /// Blocks for which anything was asked.
    special: usize,
    pins: usize,
    pins_max: usize,
}

#[derive(Clone, Copy, Default)]
struct Kept {
    custody: Custody,
    resident: bool,
    pinned: bool,
}

/// What became of a wish to pin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pin {
    /// There was none, or it was granted before.
    Unchanged,
    /// The block is to be held.
    Granted,
    /// There are too many.
    Refused,
}

/// What fell due.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Due {
    /// The block is to be held no more.
    Unpinned(u32),
    /// The block is to go.
    Expired(u32),
}

impl Kept {
    fn is_special(&self) -> bool {
        self.resident && self.custody.keep != Keep::default()
    }

    fn due(&self) -> Option<Date> {
        let Keep { expires, pinned, .. } = self.custody.keep;
        let unpin = pinned.filter(|_| self.pinned);
        unpin.into_iter().chain(expires).min()
    }
}

impl Keeping {
    /// Pins may take half of a pool: what is left is as much as the others are sure to need.
    const PINNED_SHARE: usize = 2;

    pub(super) fn new(capacity: usize) -> Self {
        let mut slots = Vec::with_capacity(capacity);
        hugepages::enlarge(slots.spare_capacity_mut());
        slots.resize(capacity, Kept::default());
        Self { slots, due: BTreeSet::new(), special: 0, pins: 0, pins_max: capacity / Self::PINNED_SHARE }
    }

    /// The terms of the block in a slot.
    pub(super) fn of(&self, slot: u32) -> Custody {
        self.slots[slot as usize].custody
    }

    /// The slots in which blocks of a domain rest. Looks at each slot.
    pub(super) fn of_domain(&self, domain: DomainId) -> Vec<u32> {
        let rests = |slot: &u32| {
            let kept = &self.slots[*slot as usize];
            kept.resident && kept.custody.domain == domain
        };
        (0..self.slots.len() as u32).filter(rests).collect()
    }

    /// A block comes to rest.
    pub(super) fn enter(&mut self, slot: u32, custody: Custody) -> Pin {
        let kept = Kept { custody, resident: true, pinned: false };
        self.special += usize::from(kept.is_special());
        self.slots[slot as usize] = kept;
        self.change(slot, custody.keep)
    }

    /// A block that rests gets other terms.
    pub(super) fn change(&mut self, slot: u32, keep: Keep) -> Pin {
        let kept = &mut self.slots[slot as usize];
        let before = kept.due();
        self.special -= usize::from(kept.is_special());
        kept.custody.keep = keep;
        self.special += usize::from(kept.is_special());
        let pin = match keep.pinned {
            Some(_) if kept.pinned => Pin::Unchanged,
            Some(_) if self.pins < self.pins_max => Pin::Granted,
            Some(_) => Pin::Refused,
            None => Pin::Unchanged,
        };
        if pin == Pin::Granted {
            kept.pinned = true;
            self.pins += 1;
        }
        self.reschedule(slot, before);
        pin
    }

    /// A block goes. Whether it was pinned, and so is to be released.
    pub(super) fn leave(&mut self, slot: u32) -> bool {
        let kept = &mut self.slots[slot as usize];
        let (before, pinned) = (kept.due(), kept.pinned);
        self.special -= usize::from(kept.is_special());
        kept.resident = false;
        kept.pinned = false;
        self.pins -= usize::from(pinned);
        self.reschedule(slot, before);
        pinned
    }

    /// Blocks that are pinned.
    pub(super) fn pins(&self) -> usize {
        self.pins
    }

    /// Takes the pins off: those blocks are to be released.
    pub(super) fn unpin_all(&mut self) -> Vec<u32> {
        let pinned: Vec<u32> = (0..self.slots.len() as u32).filter(|slot| self.slots[*slot as usize].pinned).collect();
        for slot in &pinned {
            self.unpin(*slot);
        }
        pinned
    }

    /// Whether nothing was asked for any block.
    pub(super) fn is_plain(&self) -> bool {
        self.special == 0
    }

    /// Whether anything will ever fall due.
    pub(super) fn awaits(&self) -> bool {
        !self.due.is_empty()
    }

    /// The next thing that fell due up to now. A block that expires is to [leave](Self::leave) before the next is asked for.
    pub(super) fn next_due(&mut self, now: Date) -> Option<Due> {
        let &(_, slot) = self.due.first().filter(|(date, _)| *date <= now)?;
        if self.of(slot).keep.is_over(now) {
            return Some(Due::Expired(slot));
        }
        self.unpin(slot);
        Some(Due::Unpinned(slot))
    }

    fn unpin(&mut self, slot: u32) {
        let kept = &mut self.slots[slot as usize];
        let before = kept.due();
        kept.pinned = false;
        self.pins -= 1;
        self.reschedule(slot, before);
    }

    fn reschedule(&mut self, slot: u32, before: Option<Date>) {
        let kept = &self.slots[slot as usize];
        let after = kept.due().filter(|_| kept.resident);
        if let Some(date) = before {
            self.due.remove(&(date, slot));
        }
        self.due.extend(after.map(|date| (date, slot)));
    }
}
