//! The store that all workers share, in memory: what an object store does, without its delays. Blocks of one hash and
//! several fingerprints are kept apart there; here the first is kept, and the others are not.

use futures::future::{self, BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, StreamExt};
use kvbm::{
    Block, BlockEvent, Date, EventLog, Fingerprint, Level, Loaded, SequenceHash, SetDigest, StoreError, Tier, Usage,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Blocks of a bounded number. The oldest block without children goes first.
pub(super) struct SharedStore {
    log: Arc<EventLog>,
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    blocks: BTreeMap<SequenceHash, Stored>,
    count: u64,
}

struct Stored {
    block: Block,
    number: u64,
    children: u32,
}

impl State {
    fn find(&self, fingerprint: Fingerprint, hash: &SequenceHash) -> Option<&Block> {
        let block = self.blocks.get(hash).map(|stored| &stored.block);
        block.filter(|block| block.header.fingerprint == fingerprint)
    }
}

impl SharedStore {
    pub(super) fn new(log: Arc<EventLog>, capacity: usize) -> Arc<Self> {
        Arc::new(Self { log, capacity, state: Mutex::default() })
    }

    /// Number of its last event.
    pub(super) fn latest(&self) -> u64 {
        *self.log.latest().borrow()
    }

    pub(super) fn set_digest(&self) -> SetDigest {
        self.state.lock().blocks.keys().copied().collect()
    }

    /// Removes a block, as a garbage collection does. Returns it.
    pub(super) fn remove(&self, nth: u64) -> Option<SequenceHash> {
        let mut state = self.state.lock();
        let count = state.blocks.len() as u64;
        let hash = state.blocks.keys().nth(nth.checked_rem(count)? as usize).copied()?;
        self.take(&mut state, hash);
        Some(hash)
    }

    fn take(&self, state: &mut State, hash: SequenceHash) {
        if let Some(taken) = state.blocks.remove(&hash) {
            let parent = taken.block.header.parent.and_then(|parent| state.blocks.get_mut(&parent));
            if let Some(parent) = parent {
                parent.children -= 1;
            }
            self.log.announce(BlockEvent::Removed { level: Level::G4, blocks: vec![hash] });
        }
    }
}

impl Tier for SharedStore {
    fn level(&self) -> Level {
        Level::G4
    }

    fn holds(&self, fingerprint: Fingerprint, hashes: &[SequenceHash]) -> usize {
        let state = self.state.lock();
        hashes.iter().take_while(|hash| state.find(fingerprint, hash).is_some()).count()
    }

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let state = self.state.lock();
        let find = |hash: SequenceHash| Ok(state.find(fingerprint, &hash).cloned());
        let found: Vec<Loaded> = hashes.into_iter().map(find).enumerate().collect();
        stream::iter(found).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let mut state = self.state.lock();
        let results = blocks.iter().map(|_| Ok(())).collect();
        for block in blocks {
            let (hash, parent) = (block.header.hash, block.header.parent);
            if state.blocks.contains_key(&hash) {
                continue;
            }
            state.count += 1;
            let number = state.count;
            if let Some(parent) = parent.and_then(|parent| state.blocks.get_mut(&parent)) {
                parent.children += 1;
            }
            let children = state.blocks.values().filter(|other| other.block.header.parent == Some(hash)).count() as u32;
            state.blocks.insert(hash, Stored { block, number, children });
            self.log.announce(BlockEvent::Stored { level: Level::G4, parent, blocks: vec![hash] });
            while state.blocks.len() > self.capacity {
                let leaves = state.blocks.iter().filter(|(_, stored)| stored.children == 0);
                let Some(oldest) = leaves.min_by_key(|(_, stored)| stored.number).map(|(hash, _)| *hash) else { break };
                self.take(&mut state, oldest);
            }
        }
        future::ready(results).boxed()
    }

    fn discard(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        let mut state = self.state.lock();
        if state.find(fingerprint, &hash).is_some() {
            self.take(&mut state, hash);
        }
    }

    fn expire(&self, now: Date) -> usize {
        let mut state = self.state.lock();
        let is_expired = |stored: &Stored| stored.block.header.retention.is_expired(now);
        let expired: Vec<_> =
            state.blocks.iter().filter(|(_, stored)| is_expired(stored)).map(|(hash, _)| *hash).collect();
        for hash in &expired {
            self.take(&mut state, *hash);
        }
        expired.len()
    }

    fn usage(&self) -> Usage {
        let blocks = self.state.lock().blocks.len() as u64;
        Usage { blocks, bytes: blocks, capacity: Some(self.capacity as u64) }
    }
}
