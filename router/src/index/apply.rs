//! KV events and snapshots of a holder, as updates of its blocks.

use super::Index;
use super::holder::{Holder, HolderLevel, LEVELS};
use super::run::Run;
use kvbm::{BlockEvent, SequenceHash};
use std::cell::Cell;
use std::collections::HashSet;

impl Index {
    /// Removes all blocks of a holder.
    pub fn clear(&self, holder: Holder) {
        let Some(state) = self.holder_state(holder) else { return };
        let mut pages = state.lock();
        state.digests.start_replacing();
        for holder_level in state.id.levels() {
            self.clear_level(&state, &mut pages, holder_level);
        }
        self.account_pages(&state, &mut pages);
        state.digests.finish_replacing();
    }

    /// Applies an event. Events of unknown holders are ignored.
    pub fn apply(&self, holder: Holder, event: &BlockEvent) {
        let snapshot = self.snapshot.load();
        let Some(state) = snapshot.holders.get(holder) else { return };
        let mut pages = state.lock();
        let (BlockEvent::Stored { level, .. } | BlockEvent::Removed { level, .. } | BlockEvent::Cleared { level }) =
            event;
        let Some(holder_level) = HolderLevel::new(state.id, *level).filter(|_| !pages.unregistered) else { return };
        match event {
            BlockEvent::Stored { parent, blocks, .. } => {
                let parent = parent.as_ref().map(SequenceHash::short);
                with_short_hashes(blocks, |hashes| {
                    self.store_blocks(state, &mut pages, holder_level, Run { hashes, parent, chained: true });
                });
            }
            BlockEvent::Removed { blocks, .. } => {
                with_short_hashes(blocks, |hashes| self.remove_blocks(state, &mut pages, holder_level, hashes));
            }
            BlockEvent::Cleared { .. } => self.clear_level(state, &mut pages, holder_level),
        }
        self.account_pages(state, &mut pages);
        drop(pages);
        self.evict_to_limit();
    }

    /// Sets the blocks of a holder from a snapshot. Only the difference is applied, so readers never see an empty
    /// holder.
    pub fn replace(&self, holder: Holder, runs: &[kvbm::Run]) {
        let Some(state) = self.holder_state(holder) else { return };
        let mut pages = state.lock();
        if pages.unregistered {
            return;
        }
        state.digests.start_replacing();
        for level in LEVELS {
            let Some(holder_level) = HolderLevel::new(state.id, level) else { continue };
            let wanted = || runs.iter().filter(|run| run.level == level);
            let keep: HashSet<u64> = wanted().flat_map(|run| &run.blocks).map(SequenceHash::short).collect();
            let held = self.hashes(&pages, holder_level);
            let stale: Vec<u64> = held.into_iter().filter(|hash| !keep.contains(hash)).collect();
            self.remove_blocks(&state, &mut pages, holder_level, &stale);
            for run in wanted() {
                let parent = run.parent.as_ref().map(SequenceHash::short);
                with_short_hashes(&run.blocks, |hashes| {
                    self.store_blocks(&state, &mut pages, holder_level, Run { hashes, parent, chained: true });
                });
            }
        }
        state.digests.finish_replacing();
        self.account_pages(&state, &mut pages);
        drop(pages);
        self.evict_to_limit();
    }
}

thread_local! {
    /// Buffer for the hashes of an event, empty while an event uses it.
    static HASHES_BUFFER: Cell<Vec<u64>> = const { Cell::new(Vec::new()) };
}

/// Largest buffer that a thread keeps: the blocks of a prompt of a million tokens.
const MAX_BUFFERED: usize = 1 << 16;

/// Calls a function with the hashes by which the index knows these blocks. Allocates no memory for most events.
fn with_short_hashes(blocks: &[SequenceHash], with: impl FnOnce(&[u64])) {
    let mut hashes = HASHES_BUFFER.take();
    hashes.clear();
    hashes.extend(blocks.iter().map(SequenceHash::short));
    with(&hashes);
    if hashes.capacity() <= MAX_BUFFERED {
        HASHES_BUFFER.set(hashes);
    }
}
