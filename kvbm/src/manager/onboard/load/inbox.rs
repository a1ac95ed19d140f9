//! Blocks that are verified and written by the task that has read them, while their bytes are in the processor's cache.
//!
//! A tier that reads on several threads offers each block as it arrives ([`Tier::load_into`]). A block that is not
//! taken here, because G1 has no free slot or the engine has computed it meanwhile, goes the way of all other blocks.
//!
//! [`Tier::load_into`]: crate::tier::Tier::load_into

use super::writes::WriteResult;
use super::{Delivered, Loading};
use crate::block::{Block, SequenceHash};
use crate::manager::onboard::shared::Shared;
use crate::manager::shared::Core;
use crate::pool::PartialBlock;
use crate::tier::BlockReceiver;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use tokio::sync::Notify;

/// Largest block that is written on the thread that has read it: 0.2 to 0.5 ms of copying. Larger ones would delay the
/// other tasks of an async thread.
const MAX_BLOCK_BYTES: usize = 2 << 20;

/// What was written and is not received yet.
#[derive(Default)]
pub(super) struct Written {
    slots: Mutex<Slots>,
    /// A block was written.
    ended: Condvar,
    arrived: Notify,
}

/// Slots of G1 that were allocated for blocks of open calls.
#[derive(Default)]
pub(super) struct Slots {
    results: Vec<WriteResult>,
    /// Blocks that are being written.
    writing: usize,
    is_closed: bool,
}

/// A block that is being written, and its result. It ends also if the copy panics.
struct Writing<'a> {
    written: &'a Written,
    result: Option<WriteResult>,
}

impl Written {
    /// Resolves when blocks were written since the last call.
    pub(super) async fn notified(&self) {
        self.arrived.notified().await;
    }

    /// The slots, of which none is allocated or received while the guard is held.
    pub(super) fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock()
    }

    /// Accepts no further blocks, and waits for those that are being written: for the time of a copy, so that no slot
    /// stays allocated.
    fn close(&self) {
        let mut slots = self.slots.lock();
        slots.is_closed = true;
        self.ended.wait_while(&mut slots, |slots| slots.writing > 0);
    }
}

impl Slots {
    pub(super) fn count(&self) -> usize {
        self.writing + self.results.len()
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut slots = self.written.slots();
        slots.results.extend(self.result.take());
        slots.writing -= 1;
        self.written.ended.notify_all();
    }
}

/// Writes the blocks of one call.
struct Inbox {
    core: Arc<Core>,
    shared: Arc<Shared>,
    written: Arc<Written>,
    source: usize,
    /// Index in the job and hash of each requested block.
    requested: Vec<(usize, SequenceHash)>,
}

impl BlockReceiver for Inbox {
    fn take(&self, index: usize, block: Block) -> Option<Block> {
        let Some(&(index, hash)) = self.requested.get(index) else { return Some(block) };
        if block.payload.len() > MAX_BLOCK_BYTES || index < self.shared.computed() {
            return Some(block);
        }
        let Some(slot) = self.allocate() else { return Some(block) };
        let mut writing = Writing { written: &self.written, result: None };
        writing.result = Some(self.core.write(Delivered { source: self.source, index, block }, hash, slot));
        drop(writing);
        self.written.arrived.notify_one();
        None
    }
}

impl Inbox {
    /// A slot, if blocks are still accepted and there is a free one that is plain memory. To be followed by
    /// [`Writing`].
    fn allocate(&self) -> Option<PartialBlock> {
        let mut slots = self.written.slots();
        if slots.is_closed {
            return None;
        }
        let slot = self.core.pool.allocate(1)?.pop()?;
        // Copies to other memory than the processor's are not made on async threads.
        self.core.device.bytes(slot.slot())?;
        slots.writing += 1;
        Some(slot)
    }
}

impl Loading<'_> {
    /// Writes blocks of a call as they arrive.
    pub(super) fn inbox(&self, source: usize, indices: &[usize], hashes: &[SequenceHash]) -> Arc<dyn BlockReceiver> {
        let requested = indices.iter().copied().zip(hashes.iter().copied()).collect();
        let (core, shared) = (Arc::clone(&self.job.onboarder.core), Arc::clone(&self.job.shared));
        Arc::new(Inbox { core, shared, written: Arc::clone(&self.written), source, requested })
    }

    /// Registers what was written since the last call.
    pub(super) fn register_written(&mut self) {
        self.receive_written();
        let results = std::mem::take(&mut self.arrived);
        if !results.is_empty() {
            self.register(results);
        }
    }

    /// Stops to accept blocks of the open calls. Those that were written before are registered later.
    pub(super) fn close_inboxes(&mut self) {
        self.written.close();
        self.receive_written();
        self.written = Arc::default();
    }

    fn receive_written(&mut self) {
        let results = std::mem::take(&mut self.written.slots().results);
        for result in &results {
            self.count_answer(result.source());
        }
        self.writing += results.len();
        self.arrived.extend(results);
    }
}
