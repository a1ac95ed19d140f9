//! Buffer of events that arrived before one that they follow. Bounded, because the numbers come from the source.

use kvbm::BlockEvent;
use std::collections::BTreeMap;

/// The events, by number.
#[derive(Default)]
pub(super) struct ReorderBuffer {
    events: BTreeMap<u64, BlockEvent>,
    /// Number of blocks in all buffered events.
    blocks: usize,
}

/// Maximum number of events: the length of a source's log, beyond which a snapshot is needed anyway.
pub(super) const EVENTS_MAX: usize = 4096;
/// Maximum number of block hashes: four megabytes. An event of a long prompt has some hundred.
pub(super) const BLOCKS_MAX: usize = 1 << 18;

impl ReorderBuffer {
    /// Adds an event. Beyond the limits the first events are dropped, which leaves a gap, and so leads to another
    /// request.
    pub(super) fn push(&mut self, number: u64, event: BlockEvent) {
        self.insert(number, event);
        while (self.events.len() > EVENTS_MAX || self.blocks > BLOCKS_MAX)
            && let Some((_, event)) = self.events.pop_first()
        {
            self.blocks -= block_count(&event);
        }
    }

    /// Adds an event without applying the limits.
    pub(super) fn insert(&mut self, number: u64, event: BlockEvent) {
        self.blocks += block_count(&event);
        let former = self.events.insert(number, event);
        self.blocks -= former.as_ref().map_or(0, block_count);
    }

    pub(super) fn take(&mut self, number: u64) -> Option<BlockEvent> {
        let event = self.events.remove(&number)?;
        self.blocks -= block_count(&event);
        Some(event)
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        self.events.contains_key(&number)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    pub(super) fn last(&self) -> Option<u64> {
        self.events.last_key_value().map(|(last, _)| *last)
    }

    /// Drops the events up to a number.
    pub(super) fn discard_up_to(&mut self, number: u64) {
        self.events.retain(|at, _| *at > number);
        self.blocks = self.events.values().map(block_count).sum();
    }
}

fn block_count(event: &BlockEvent) -> usize {
    match event {
        BlockEvent::Stored { blocks, .. } | BlockEvent::Removed { blocks, .. } => blocks.len(),
        BlockEvent::Cleared { .. } => 0,
    }
}
