//! Device memory of a chosen block size: one anonymous mapping, like the KV memory of the native engine.

use kvbm::device::copy_observed;
use kvbm::{BlockId, DeviceBlocks, Fingerprint};
use memmap2::{MmapMut, MmapRaw};
use std::io;

/// Plain memory as a device.
pub(super) struct Device {
    memory: MmapRaw,
    blocks: usize,
    block_bytes: usize,
}

impl Device {
    /// Fails when the address space cannot be reserved.
    pub(super) fn new(blocks: usize, block_bytes: usize) -> io::Result<Self> {
        let memory = MmapMut::map_anon((blocks * block_bytes).max(1))?;
        #[cfg(target_os = "linux")]
        // Without huge pages only the time of page-table walks is longer.
        let _ = memory.advise(memmap2::Advice::HugePage);
        Ok(Self { memory: memory.into(), blocks, block_bytes })
    }

    fn at(&self, slot: BlockId) -> *mut u8 {
        assert!((slot.0 as usize) < self.blocks, "{slot:?} is outside the memory");
        // SAFETY: the slot is within the mapping.
        unsafe { self.memory.as_mut_ptr().add(slot.0 as usize * self.block_bytes) }
    }

    fn slot(&self, slot: BlockId) -> &[u8] {
        // SAFETY: the bytes are initialised, and by the contract of the trait the slot is not written now.
        unsafe { std::slice::from_raw_parts(self.at(slot), self.block_bytes) }
    }
}

impl DeviceBlocks for Device {
    fn capacity(&self) -> usize {
        self.blocks
    }

    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn fingerprint(&self) -> Fingerprint {
        Fingerprint::from_bytes([7; 32])
    }

    fn read(&self, slot: BlockId, into: &mut [u8]) {
        into.copy_from_slice(self.slot(slot));
    }

    fn write(&self, slot: BlockId, from: &[u8]) {
        self.write_observed(slot, from, &mut |_| {});
    }

    fn bytes(&self, slot: BlockId) -> Option<&[u8]> {
        Some(self.slot(slot))
    }

    fn write_part(&self, slot: BlockId, at: usize, from: &[u8], observe: &mut dyn FnMut(&[u8])) -> bool {
        assert!(at + from.len() <= self.block_bytes, "a part is within its slot");
        // SAFETY: the range is within the slot, whose bytes are initialised, and by the contract the caller owns it.
        copy_observed(from, unsafe { std::slice::from_raw_parts_mut(self.at(slot).add(at), from.len()) }, observe);
        true
    }

    fn read_observed(&self, slot: BlockId, into: &mut [u8], observe: &mut dyn FnMut(&[u8])) {
        copy_observed(self.slot(slot), into, observe);
    }

    fn write_observed(&self, slot: BlockId, from: &[u8], observe: &mut dyn FnMut(&[u8])) {
        // SAFETY: the bytes are initialised, and by the contract of the trait the caller owns the slot.
        copy_observed(from, unsafe { std::slice::from_raw_parts_mut(self.at(slot), self.block_bytes) }, observe);
    }
}
