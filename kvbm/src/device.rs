//! The seam to G1: the memory that the engine owns.
//!
//! kvbm decides *which* slot holds *which* block; only the engine knows what the bytes inside a slot mean.

#[cfg(any(test, feature = "contract"))]
pub mod contract;

use crate::Fingerprint;

/// A slot of device memory that holds one block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BlockId(pub u32);

/// Device memory cut into equal slots, owned by an engine.
///
/// # Contract
/// - `capacity`, `block_bytes` and `fingerprint` MUST NOT change during the life of the value.
/// - `read` after `write` of the same slot MUST return the same bytes; slots MUST NOT overlap.
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
}
