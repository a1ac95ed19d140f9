//! The state that a request and its load task share.

use super::phase::{Phase, Wait};
use crate::block::{Level, SequenceHash};
use crate::manager::offload::OffloadWorkers;
use crate::pool::{BlockRef, CachedBlocks};
use crate::table::BlockMap;
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The state that a request and its load task share.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Notified when the engine starts to wait.
    started: Notify,
    /// The engine's; notified when it should stop to wait.
    wake: Arc<Notify>,
}

struct State {
    phase: Phase,
    /// Number of leading blocks that the engine has computed, or is about to.
    computed: usize,
    /// `None` once the handle was dropped: then blocks that arrive are not held.
    held: Option<CachedBlocks>,
    loaded_from: BlockMap<Level>,
    /// The loaded blocks were queued for the tiers that may lack them.
    offloaded: bool,
}

impl Shared {
    pub(super) fn new(wake: Arc<Notify>) -> Self {
        let state = State {
            phase: Phase::default(),
            computed: 0,
            held: Some(CachedBlocks::default()),
            loaded_from: BlockMap::default(),
            offloaded: false,
        };
        Self { state: Mutex::new(state), started: Notify::new(), wake }
    }

    /// The engine could compute the blocks now.
    pub(super) fn start_waiting(&self) {
        self.state.lock().phase.start_waiting(Instant::now());
        self.started.notify_one();
    }

    /// The engine has computed, or is about to compute, so many leading blocks.
    pub(super) fn advance(&self, blocks: usize) {
        let mut state = self.state.lock();
        state.computed = state.computed.max(blocks);
    }

    pub(super) fn phase(&self) -> Phase {
        self.state.lock().phase
    }

    /// Resolves when the engine waits, with the time since when it does.
    pub(super) async fn started(&self) -> Instant {
        loop {
            let since = self.state.lock().phase.waiting_since();
            match since {
                Some(since) => return since,
                None => self.started.notified().await,
            }
        }
    }

    /// The engine is to wait for the head of a plan.
    pub(super) fn wait_for(&self, wait: Wait) {
        self.state.lock().phase.wait_for(wait);
    }

    /// The engine should wait no longer.
    pub(super) fn proceed(&self) {
        if self.state.lock().phase.proceed() {
            self.wake.notify_one();
        }
    }

    pub(super) fn computed(&self) -> usize {
        self.state.lock().computed
    }

    /// Holds blocks until the handle is dropped.
    pub(super) fn hold(&self, blocks: CachedBlocks) {
        let mut state = self.state.lock();
        if let Some(held) = &mut state.held {
            held.extend(blocks);
        }
    }

    /// Releases the blocks; blocks that arrive later are not held.
    pub(super) fn release(&self) {
        let held = self.state.lock().held.take();
        drop(held);
    }

    /// Notes the tiers from which blocks were loaded, before the blocks can be found.
    pub(super) fn record_levels(&self, blocks: impl Iterator<Item = (SequenceHash, Level)>) {
        self.state.lock().loaded_from.extend(blocks);
    }

    /// Queues the loaded blocks for the tiers that may lack them, once. Blocks from G2 are in G2; all others go to G2
    /// and from there to the tiers below.
    pub(super) fn offload(&self, offload: &OffloadWorkers) {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.offloaded, true) {
            return;
        }
        let Some(held) = &state.held else { return };
        let hashes: Vec<_> = held.iter().map(BlockRef::hash).collect();
        offload.push(held, |at| state.loaded_from.get(&hashes[at]).is_some_and(|level| *level != Level::G2));
    }

    pub(super) fn held_blocks(&self) -> usize {
        self.state.lock().held.as_ref().map_or(0, CachedBlocks::len)
    }

    pub(super) fn loaded_from(&self, hash: &SequenceHash) -> Option<Level> {
        self.state.lock().loaded_from.get(hash).copied()
    }
}
