//! Collects new blocks for an event log: consecutive blocks of one chain become one event.

use super::{BlockEvent, EventLog};
use crate::block::{Level, SequenceHash};

/// Groups pushed blocks into runs of one chain, and announces each run when the next one begins. The last run is
/// announced by [`queue`](Self::queue) or on drop.
pub(crate) struct StoredBatch<'a> {
    level: Level,
    log: &'a EventLog,
    /// Parent of the first of `blocks`.
    parent: Option<SequenceHash>,
    /// The current run.
    blocks: Vec<SequenceHash>,
}

impl<'a> StoredBatch<'a> {
    pub(crate) fn new(level: Level, log: &'a EventLog) -> Self {
        Self { level, log, parent: None, blocks: Vec::new() }
    }

    pub(crate) fn push(&mut self, hash: SequenceHash, parent: Option<SequenceHash>) {
        if parent.is_none() || self.blocks.last().copied() != parent {
            self.queue();
            self.parent = parent;
        }
        self.blocks.push(hash);
    }

    /// Queues the current run, so that later events follow it.
    pub(crate) fn queue(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        self.log.queue(BlockEvent::Stored { level: self.level, parent: self.parent, blocks });
    }
}

impl Drop for StoredBatch<'_> {
    fn drop(&mut self) {
        self.queue();
        self.log.flush();
    }
}
