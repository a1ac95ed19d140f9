//! The host tier's memory: one allocation cut into slots, and one header per slot.
//!
//! All `unsafe` code of the tier is here. It relies on the states of blocks: a `PartialBlock` is the only owner of its
//! slot, so `&mut` of it is exclusive access to the bytes; a `CachedBlock` is held while its bytes are read, and a held
//! slot is not allocated again.

use crate::block::{BlockRetention, Header};
use crate::pool::{CachedBlock, PartialBlock};
use crate::table::hugepages;
use parking_lot::Mutex;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Slots of one pool. It must only be used with blocks of that pool.
pub(super) struct Arena {
    /// The allocation; slots begin at the first multiple of [`Arena::ALIGN`] in it.
    memory: NonNull<u8>,
    layout: Layout,
    slots: usize,
    slot_bytes: usize,
    /// Not contended: a header is written before its block can be found, and only copied afterwards.
    headers: Box<[Mutex<Option<Header>>]>,
}

// SAFETY: the arena owns its memory; access to parts of it follows the states of blocks, see `write` and `Reading`.
unsafe impl Send for Arena {}
// SAFETY: as above; a shared reference gives no access without a block that proves the right to it.
unsafe impl Sync for Arena {}

impl Arena {
    /// The page size: what `O_DIRECT` and device drivers require of memory that they read.
    const ALIGN: usize = 4096;

    /// Fails when the system refuses the memory.
    pub(super) fn new(slots: usize, slot_bytes: usize) -> io::Result<Self> {
        let refused = || io::Error::from(io::ErrorKind::OutOfMemory);
        let size = slots.checked_mul(slot_bytes).and_then(|bytes| bytes.checked_add(Self::ALIGN));
        // Aligned here and not by the allocator: for more than 16 bytes the standard allocator zeroes memory itself,
        // which would touch all pages at once. Without an alignment the system returns zeroed pages that are touched on
        // use.
        let layout = size.and_then(|size| Layout::from_size_align(size, 1).ok()).ok_or_else(refused)?;
        let mut headers = Vec::new();
        headers.try_reserve_exact(slots).map_err(|_| refused())?;
        headers.resize_with(slots, || Mutex::new(None));
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc_zeroed(layout) };
        let memory = NonNull::new(memory).ok_or_else(refused)?;
        let arena = Self { memory, layout, slots, slot_bytes, headers: headers.into_boxed_slice() };
        hugepages::advise_hugepages(arena.whole());
        Ok(arena)
    }

    /// Locks the pages into memory, if the system permits it.
    pub(super) fn mlock(&self) -> io::Result<()> {
        hugepages::mlock(self.whole())
    }

    fn whole(&self) -> *const [u8] {
        std::ptr::slice_from_raw_parts(self.memory.as_ptr(), self.layout.size())
    }

    pub(super) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Fills a slot; `fill` returns the header of what it wrote. Returns this header.
    pub(super) fn write(&self, slot: &mut PartialBlock, fill: impl FnOnce(&mut [u8]) -> Header) -> Header {
        let header = fill(self.bytes(slot));
        self.set_header(slot, header);
        header
    }

    /// The bytes of a slot, to be written.
    pub(super) fn bytes<'a>(&'a self, slot: &'a mut PartialBlock) -> &'a mut [u8] {
        let at = self.at(slot.slot().0 as usize);
        // SAFETY: in bounds (`at` checks), initialised (zeroed by the allocation), and exclusive: a `PartialBlock` is
        // the only owner of its slot, the caller has it by `&mut` while the slice lives, and no `Reading` of a slot is
        // left when it is allocated again.
        unsafe { std::slice::from_raw_parts_mut(at, self.slot_bytes) }
    }

    /// Sets the header of what was written into a slot.
    pub(super) fn set_header(&self, slot: &mut PartialBlock, header: Header) {
        *self.headers[slot.slot().0 as usize].lock() = Some(header);
    }

    pub(super) fn header(&self, block: &CachedBlock) -> Header {
        let header = *self.headers[block.slot().0 as usize].lock();
        header.expect("a block is registered after its header was written")
    }

    /// Replaces the retention in the block's header.
    pub(super) fn set_retention(&self, block: &CachedBlock, retention: BlockRetention) {
        let mut header = self.headers[block.slot().0 as usize].lock();
        *header = header.map(|header| header.with_retention(retention));
    }

    fn at(&self, id: usize) -> *mut u8 {
        assert!(id < self.slots, "slot {id} of {}", self.slots);
        let skip = self.memory.as_ptr().align_offset(Self::ALIGN);
        // SAFETY: `skip` is less than `ALIGN`, and the allocation is `slots * slot_bytes + ALIGN` long.
        unsafe { self.memory.as_ptr().add(skip + id * self.slot_bytes) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        hugepages::munlock(self.whole());
        // SAFETY: allocated with this layout, and no reader is left: every `Reading` holds the arena.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) }
    }
}

/// The bytes of a block, in place. Holds the block.
pub(super) struct Reading {
    arena: Arc<Arena>,
    held: CachedBlock,
    length: usize,
}

impl Reading {
    pub(super) fn new(arena: Arc<Arena>, held: CachedBlock, length: u64) -> Self {
        let length = (length as usize).min(arena.slot_bytes);
        Self { arena, held, length }
    }
}

impl AsRef<[u8]> for Reading {
    fn as_ref(&self) -> &[u8] {
        let at = self.arena.at(self.held.slot().0 as usize);
        // SAFETY: in bounds, initialised, and not written: the slot is held, so no `PartialBlock` owns it.
        unsafe { std::slice::from_raw_parts(at, self.length) }
    }
}
