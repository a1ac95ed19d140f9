//! The seam to G1: the memory that the engine owns.
//!
//! kvbm decides *which* slot holds *which* block; only the engine knows what the bytes inside a slot mean.

#[cfg(any(test, feature = "contract"))]
pub mod conformance;

use crate::block::Fingerprint;

/// A slot of device memory that holds one block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BlockId(pub u32);

/// Device memory cut into equal slots, owned by an engine.
///
/// # Contract
/// - `capacity`, `block_bytes` and `fingerprint` MUST NOT change during the life of the value.
/// - `read` after `write` of the same slot MUST return the same bytes; slots MUST NOT overlap.
/// - `read_seen` and `write_seen` MUST show `seen` every byte that they copy, once and in order, in pieces of any size.
/// - `read` and `write` MAY block for the time of the copy; they are called off the async threads.
/// - The caller MUST NOT write a slot that anybody else reads or writes at the same time. kvbm keeps this by ownership: a
///   slot is written only through a `PartialBlock`, and read by others only once it is cached.
pub trait DeviceBlocks: Send + Sync + 'static {
    /// How many slots there are.
    fn capacity(&self) -> usize;

    /// Bytes in one slot.
    fn block_bytes(&self) -> usize;

    /// Whose bytes these are.
    fn fingerprint(&self) -> Fingerprint;

    /// Copies a slot out. `into` is exactly `block_bytes` long.
    fn read(&self, slot: BlockId, into: &mut [u8]);

    /// Copies a slot in. `from` is exactly `block_bytes` long.
    fn write(&self, slot: BlockId, from: &[u8]);

    /// [`read`](Self::read), while `seen` looks at the bytes: best at each piece when it is in the processor's cache anyway.
    /// [`copy_seen`] does so where slots are plain memory.
    fn read_seen(&self, slot: BlockId, into: &mut [u8], seen: &mut dyn FnMut(&[u8])) {
        self.read(slot, into);
        seen(into);
    }

    /// [`write`](Self::write), while `seen` looks at the bytes, likewise.
    fn write_seen(&self, slot: BlockId, from: &[u8], seen: &mut dyn FnMut(&[u8])) {
        self.write(slot, from);
        seen(from);
    }
}

/// Copies between pieces of memory of one length, while `seen` looks at the bytes. With a checksum for `seen`, that takes no
/// longer than the copy alone: what reads ahead is the sum, and the copy finds its bytes in the first-level cache.
///
/// # Panics
/// When the lengths differ.
pub fn copy_seen(from: &[u8], into: &mut [u8], seen: &mut dyn FnMut(&[u8])) {
    /// Much less, and the sum is slow; twice as much, and the system's `memcpy` takes a way that is.
    const PIECE: usize = 4 << 10;
    assert_eq!(from.len(), into.len(), "one block on both sides");
    for (from, into) in from.chunks(PIECE).zip(into.chunks_mut(PIECE)) {
        seen(from);
        into.copy_from_slice(from);
    }
}
