//! The interface to G1: the memory that the engine owns.
//!
//! kvbm decides *which* slot holds *which* block; only the engine knows the meaning of the bytes in a slot.

#[cfg(any(test, feature = "contract"))]
pub mod conformance;
mod copy;

use crate::block::Fingerprint;
pub use copy::copy_observed;

/// A slot of device memory that holds one block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BlockId(pub u32);

/// Device memory cut into equal slots, owned by an engine.
///
/// # Contract
/// - `capacity`, `block_bytes` and `fingerprint` MUST NOT change during the life of the value.
/// - `read` after `write` of the same slot MUST return the same bytes; slots MUST NOT overlap.
/// - `read_observed` and `write_observed` MUST pass every byte that they copy to `observe`, once and in order, in
///   pieces of any size.
/// - `bytes` MUST return the bytes that `read` would copy, or nothing, for all slots alike.
/// - `write_part` MUST copy where it returns `true`, and do so for all slots and parts alike. Parts of a slot that
///   follow each other MUST have the effect of one `write_observed`.
/// - `read` and `write` MAY block for the time of the copy; they are called off the async threads. Only where `bytes`
///   returns the slot, a block of a few MiB may be written on one.
/// - The caller MUST NOT write a slot that another thread reads or writes at the same time. kvbm keeps this by
///   ownership: a slot is written only through a `PartialBlock`, and read by others only once it is cached.
pub trait DeviceBlocks: Send + Sync + 'static {
    /// Number of slots.
    fn capacity(&self) -> usize;

    /// Bytes in one slot.
    fn block_bytes(&self) -> usize;

    /// The fingerprint of the engine that computes these bytes.
    fn fingerprint(&self) -> Fingerprint;

    /// Copies a slot out. `into` is exactly `block_bytes` long.
    fn read(&self, slot: BlockId, into: &mut [u8]);

    /// Copies a slot in. `from` is exactly `block_bytes` long.
    fn write(&self, slot: BlockId, from: &[u8]);

    /// The bytes of a slot, where slots are plain memory: they can be sent without a copy. The caller reads them only
    /// while it holds the block.
    fn bytes(&self, _slot: BlockId) -> Option<&[u8]> {
        None
    }

    /// [`read`](Self::read) that passes the bytes to `observe`, best piece by piece while they are in the processor's
    /// cache. [`copy_observed`] does so where slots are plain memory.
    fn read_observed(&self, slot: BlockId, into: &mut [u8], observe: &mut dyn FnMut(&[u8])) {
        self.read(slot, into);
        observe(into);
    }

    /// Copies a part of a slot in, from the byte `at` on, and passes it to `observe`, likewise. `false`: nothing was
    /// copied, because slots are not plain memory.
    fn write_part(&self, _slot: BlockId, _at: usize, _from: &[u8], _observe: &mut dyn FnMut(&[u8])) -> bool {
        false
    }

    /// [`write`](Self::write) that passes the bytes to `observe`, likewise.
    fn write_observed(&self, slot: BlockId, from: &[u8], observe: &mut dyn FnMut(&[u8])) {
        self.write(slot, from);
        observe(from);
    }
}
