//! Events that came before one that they follow. Bounded: a source that numbers them as it likes does not decide what a router
//! keeps.

use kvbm::BlockEvent;
use std::collections::BTreeMap;

/// The events, by their numbers.
#[derive(Default)]
pub(super) struct Held {
    events: BTreeMap<u64, BlockEvent>,
    /// That these name.
    blocks: usize,
}

/// As many as a log keeps: whoever lacks more takes a snapshot anyway.
pub(super) const EVENTS_MAX: usize = 4096;
/// And no more names than four megabytes hold: an event of a long prompt has some hundred.
pub(super) const BLOCKS_MAX: usize = 1 << 18;

impl Held {
    /// Keeps an event until it is its turn. Of too many the first go, which leaves a gap, and so another question.
    pub(super) fn keep(&mut self, number: u64, event: BlockEvent) {
        self.put(number, event);
        while (self.events.len() > EVENTS_MAX || self.blocks > BLOCKS_MAX)
            && let Some((_, event)) = self.events.pop_first()
        {
            self.blocks -= named(&event);
        }
    }

    /// Keeps an event whose turn it is soon.
    pub(super) fn put(&mut self, number: u64, event: BlockEvent) {
        self.blocks += named(&event);
        let former = self.events.insert(number, event);
        self.blocks -= former.as_ref().map_or(0, named);
    }

    pub(super) fn take(&mut self, number: u64) -> Option<BlockEvent> {
        let event = self.events.remove(&number)?;
        self.blocks -= named(&event);
        Some(event)
    }

    pub(super) fn has(&self, number: u64) -> bool {
        self.events.contains_key(&number)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    pub(super) fn last(&self) -> Option<u64> {
        self.events.last_key_value().map(|(last, _)| *last)
    }

    /// Drops those up to a number.
    pub(super) fn pass(&mut self, number: u64) {
        self.events.retain(|at, _| *at > number);
        self.blocks = self.events.values().map(named).sum();
    }
}

fn named(event: &BlockEvent) -> usize {
    match event {
        BlockEvent::Stored { blocks, .. } | BlockEvent::Removed { blocks, .. } => blocks.len(),
        BlockEvent::Cleared { .. } => 0,
    }
}
