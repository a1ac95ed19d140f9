//! A large block that is verified and written piece by piece, while the bytes of each are in the processor's cache.
//!
//! Between two pieces its slot is kept with those of the load ([`super::Slots`]), so that a load that stops frees it at
//! once, and does not wait for a network.

use super::{Inbox, Writing, Written};
use crate::block::{Header, PieceVerifier, SequenceHash};
use crate::manager::shared::Core;
use crate::pool::PartialBlock;
use crate::tier::PieceReceiver;
use std::sync::Arc;

/// A block of which not all pieces have arrived.
pub(super) struct Arriving {
    core: Arc<Core>,
    written: Arc<Written>,
    source: usize,
    index: usize,
    verifier: PieceVerifier,
    /// Number of bytes that were written.
    at: usize,
}

impl Arriving {
    /// A block of the engine, with a slot that can be written in parts. `None`: the block is taken as a whole, or
    /// refused then.
    pub(super) fn begin(inbox: &Inbox, index: usize, header: &Header, hash: SequenceHash) -> Option<Self> {
        let device = &inbox.core.device;
        if header.length != device.block_bytes() as u64 {
            return None;
        }
        let verifier = PieceVerifier::new(header, hash, device.fingerprint()).ok()?;
        let can_be_written = |slot: &PartialBlock| device.write_part(slot.slot(), 0, &[], &mut |_| {});
        inbox.allocate(|slots, slot| {
            let is_kept = can_be_written(&slot);
            if is_kept {
                slots.arriving.insert(index, slot);
            }
            is_kept.then_some(())
        })??;
        let (core, written) = (Arc::clone(&inbox.core), Arc::clone(&inbox.written));
        Some(Self { core, written, source: inbox.source, index, verifier, at: 0 })
    }
}

impl Written {
    /// The slot of a block whose next piece has arrived, to be given back or received. `None`: the load has stopped.
    fn take_arriving(&self, index: usize) -> Option<(PartialBlock, Writing<'_>)> {
        let mut slots = self.slots();
        let slot = slots.arriving.remove(&index)?;
        slots.writing += 1;
        Some((slot, Writing { written: self, result: None, arriving: None }))
    }
}

impl PieceReceiver for Arriving {
    fn write(&mut self, bytes: &[u8]) -> bool {
        let Some((slot, mut writing)) = self.written.take_arriving(self.index) else { return false };
        let verifier = &mut self.verifier;
        self.core.device.write_part(slot.slot(), self.at, bytes, &mut |piece| verifier.update(piece));
        self.at += bytes.len();
        writing.arriving = Some((self.index, slot));
        true
    }

    fn end(self: Box<Self>) {
        let Some((slot, mut writing)) = self.written.take_arriving(self.index) else { return };
        let verified = self.verifier.clone().verify();
        writing.result = Some(self.core.written((self.source, self.index), verified, slot));
        drop(writing);
        self.written.arrived.notify_one();
    }
}

impl Drop for Arriving {
    /// Frees the slot if the rest does not arrive.
    fn drop(&mut self) {
        let slot = self.written.slots().arriving.remove(&self.index);
        drop(slot);
    }
}
