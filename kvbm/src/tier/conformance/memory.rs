//! The simplest tier that fulfils the contract, in memory. Tests use it in place of a real tier.

use crate::block::{Block, Date, Fingerprint, Header, Level, SequenceHash};
use crate::event::{BlockEvent, EventLog};
use crate::tier::{Loaded, StoreError, Tier, Usage};
use futures::future::{self, BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, StreamExt};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Blocks in host memory, the oldest first.
pub(crate) struct Memory {
    log: Arc<EventLog>,
    capacity: Option<u64>,
    blocks: Mutex<VecDeque<Block>>,
}

impl Memory {
    pub(crate) fn new(log: Arc<EventLog>, capacity: Option<u64>) -> Self {
        Self { log, capacity, blocks: Mutex::default() }
    }

    fn find(&self, fingerprint: Fingerprint, hash: SequenceHash) -> Option<Block> {
        let is = |block: &&Block| block.header.hash == hash && block.header.fingerprint == fingerprint;
        self.blocks.lock().iter().find(is).cloned()
    }

    /// Changes the blocks, and announces the changes of the set of hashes.
    fn change(&self, change: impl FnOnce(&mut VecDeque<Block>)) {
        let mut blocks = self.blocks.lock();
        let hashes = |blocks: &VecDeque<Block>| -> Vec<_> { blocks.iter().map(|b| b.header.hash).collect() };
        let before = hashes(&blocks);
        change(&mut blocks);
        let after = hashes(&blocks);
        for block in blocks.iter().filter(|block| !before.contains(&block.header.hash)) {
            let parent = block.header.parent;
            let blocks = vec![block.header.hash];
            self.log.announce(BlockEvent::Stored { level: Level::G2, parent, blocks });
        }
        let removed = before.into_iter().filter(|hash| !after.contains(hash)).collect();
        self.log.announce(BlockEvent::Removed { level: Level::G2, blocks: removed });
    }
}

fn bytes(blocks: &VecDeque<Block>) -> u64 {
    blocks.iter().map(|block| block.header.length + Header::LEN as u64).sum()
}

impl Tier for Memory {
    fn level(&self) -> Level {
        Level::G2
    }

    fn holds(&self, fingerprint: Fingerprint, hashes: &[SequenceHash]) -> usize {
        hashes.iter().take_while(|hash| self.find(fingerprint, **hash).is_some()).count()
    }

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let found: Vec<Loaded> = hashes.into_iter().map(|hash| Ok(self.find(fingerprint, hash))).enumerate().collect();
        stream::iter(found).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let store = |block: Block| {
            if self.find(block.header.fingerprint, block.header.hash).is_none() {
                self.change(|blocks| {
                    blocks.push_back(block);
                    while self.capacity.is_some_and(|capacity| bytes(blocks) > capacity) {
                        blocks.pop_front();
                    }
                });
            }
            Ok(())
        };
        future::ready(blocks.into_iter().map(store).collect()).boxed()
    }

    fn discard(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        self.change(|blocks| blocks.retain(|b| b.header.hash != hash || b.header.fingerprint != fingerprint));
    }

    fn expire(&self, now: Date) -> usize {
        let before = self.usage().blocks;
        self.change(|blocks| blocks.retain(|block| !block.header.retention.is_expired(now)));
        (before - self.usage().blocks) as usize
    }

    fn usage(&self) -> Usage {
        let blocks = self.blocks.lock();
        Usage { blocks: blocks.len() as u64, bytes: bytes(&blocks), capacity: self.capacity }
    }
}

mod tests {
    use super::*;
    use crate::event::Epoch;
    use crate::tier::conformance::{self, Subject};

    fn subject(capacity: Option<u64>) -> Subject {
        let log = Arc::new(EventLog::new(Epoch(1)));
        Subject::new(Memory::new(log.clone(), capacity), log)
    }

    conformance::suite!(async || subject(None));

    #[tokio::test]
    async fn the_capacity_is_respected() {
        conformance::older_blocks_are_evicted_within_the_capacity(subject(Some(300_000))).await;
    }
}
