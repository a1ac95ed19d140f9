//! New blocks on their way into an event log: those that follow each other in one chain are one event.

use super::{BlockEvent, EventLog};
use crate::block::{Level, SequenceHash};

/// Announces what is pushed, a run of one chain at a time; the last run when it is [queued](Self::queue) or dropped.
pub(crate) struct Stored<'a> {
    level: Level,
    log: &'a EventLog,
    parent: Option<SequenceHash>,
    blocks: Vec<SequenceHash>,
}

impl<'a> Stored<'a> {
    pub(crate) fn new(level: Level, log: &'a EventLog) -> Self {
        Self { level, log, parent: None, blocks: Vec::new() }
    }

    pub(crate) fn push(&mut self, name: SequenceHash, parent: Option<SequenceHash>) {
        if parent.is_none() || self.blocks.last().copied() != parent {
            self.queue();
            self.parent = parent;
        }
        self.blocks.push(name);
    }

    /// What was pushed so far has its place among events from now on.
    pub(crate) fn queue(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        self.log.queue(BlockEvent::Stored { level: self.level, parent: self.parent, blocks });
    }
}

impl Drop for Stored<'_> {
    fn drop(&mut self) {
        self.queue();
        self.log.settle();
    }
}
