//! Blocks that are verified and written by the task that has read them, while their bytes are in the processor's cache.
//!
//! A tier that reads on several threads offers each block as it arrives ([`Tier::load_into`]), and of a large one each
//! piece ([`pieces`]). A block that is not taken here, because G1 has no free slot or the engine has computed it
//! meanwhile, goes the way of all other blocks.
//!
//! [`Tier::load_into`]: crate::tier::Tier::load_into

mod pieces;

use super::writes::WriteResult;
use super::{Delivered, Loading};
use crate::block::{Block, Header, SequenceHash};
use crate::manager::onboard::shared::Shared;
use crate::manager::shared::Core;
use crate::pool::PartialBlock;
use crate::tier::{BlockReceiver, PieceReceiver};
use parking_lot::{Condvar, Mutex, MutexGuard};
use pieces::Arriving;
use std::collections::BTreeMap;
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
    /// Slots of blocks whose next piece has not arrived yet, by their index in the job.
    arriving: BTreeMap<usize, PartialBlock>,
    is_closed: bool,
}

/// A block, or a piece of one, that is being written, and its result or its slot. It ends also if the copy panics.
struct Writing<'a> {
    written: &'a Written,
    result: Option<WriteResult>,
    arriving: Option<(usize, PartialBlock)>,
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

    /// Accepts no further blocks and pieces, and waits for those that are being written: for the time of a copy, so
    /// that no slot stays allocated.
    fn close(&self) {
        self.stop();
        self.ended.wait_while(&mut self.slots.lock(), |slots| slots.writing > 0);
    }

    /// Accepts no further blocks and pieces, and frees the slots of those that are still arriving.
    pub(super) fn stop(&self) {
        let mut slots = self.slots.lock();
        slots.is_closed = true;
        let arriving = std::mem::take(&mut slots.arriving);
        drop(slots);
        drop(arriving);
    }
}

impl Slots {
    pub(super) fn count(&self) -> usize {
        self.writing + self.arriving.len() + self.results.len()
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut slots = self.written.slots();
        slots.results.extend(self.result.take());
        if !slots.is_closed {
            slots.arriving.extend(self.arriving.take());
        }
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
        let Some(slot) = self.allocate(|slots, slot| {
            slots.writing += 1;
            slot
        }) else {
            return Some(block);
        };
        let mut writing = Writing { written: &self.written, result: None, arriving: None };
        writing.result = Some(self.core.write(Delivered { source: self.source, index, block }, hash, slot));
        drop(writing);
        self.written.arrived.notify_one();
        None
    }

    fn begin(&self, index: usize, header: &Header) -> Option<Box<dyn PieceReceiver>> {
        let &(index, hash) = self.requested.get(index)?;
        if index < self.shared.computed() {
            return None;
        }
        Some(Box::new(Arriving::begin(self, index, header, hash)?))
    }
}

impl Inbox {
    /// Allocates a slot for `keep`, if blocks are still accepted and there is a free one that is plain memory.
    fn allocate<T>(&self, keep: impl FnOnce(&mut Slots, PartialBlock) -> T) -> Option<T> {
        let mut slots = self.written.slots();
        if slots.is_closed {
            return None;
        }
        let slot = self.core.pool.allocate(1)?.pop()?;
        // Copies to other memory than the processor's are not made on async threads.
        self.core.device.bytes(slot.slot())?;
        Some(keep(&mut slots, slot))
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
