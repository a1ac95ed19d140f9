//! The conformance suite of [`DeviceBlocks`], for the tests of implementations.

use super::{BlockId, DeviceBlocks, copy_observed};
use crate::block::Fingerprint;
use parking_lot::Mutex;
use std::sync::Arc;

/// Overwrites every slot.
///
/// # Panics
/// When `device` breaks the contract; the message names the rule.
pub fn check(device: &dyn DeviceBlocks) {
    let facts = || (device.capacity(), device.block_bytes(), device.fingerprint());
    let before = facts();
    let (capacity, size, _) = before;
    assert!(capacity > 0 && size > 0, "a device has slots, and slots have bytes");

    // A different pattern in every slot, written in a mixed order: shows overlaps and misplaced slots.
    let pattern =
        |slot: usize| -> Vec<u8> { (0..size).map(|i| (slot * 31 + i * 7 + (i >> 8) * 13 + 1) as u8).collect() };
    let mixed = (0..capacity).filter(|slot| slot % 2 == 1).chain((0..capacity).filter(|slot| slot % 2 == 0));
    for slot in mixed {
        device.write(BlockId(slot as u32), &pattern(slot));
    }
    let mut bytes = vec![0; size];
    for slot in 0..capacity {
        device.read(BlockId(slot as u32), &mut bytes);
        assert!(bytes == pattern(slot), "slot {slot} returns what was last written to it, and no other slot's bytes");
        assert!(device.bytes(BlockId(slot as u32)).is_none_or(|same| same == bytes), "slot {slot} has the same bytes");
    }

    // The observer sees the copied bytes, from the first to the last.
    let mut observed = Vec::new();
    let first = BlockId(0);
    device.write_observed(first, &pattern(1), &mut |piece| observed.extend_from_slice(piece));
    assert!(observed == pattern(1), "what is written is observed, once and in order");
    observed.clear();
    device.read_observed(first, &mut bytes, &mut |piece| observed.extend_from_slice(piece));
    assert!(bytes == pattern(1) && observed == bytes, "what is read is observed, once and in order");

    // Parts, which need not be aligned.
    if device.write_part(first, 0, &[], &mut |_| {}) {
        let (begin, end) = (&pattern(2)[..size / 3], &pattern(2)[size / 3..]);
        observed.clear();
        assert!(device.write_part(first, 0, begin, &mut |piece| observed.extend_from_slice(piece)));
        assert!(device.write_part(first, begin.len(), end, &mut |piece| observed.extend_from_slice(piece)));
        device.read(first, &mut bytes);
        assert!(bytes == pattern(2) && observed == bytes, "parts that follow each other are the whole");
        device.read(BlockId(capacity as u32 - 1), &mut bytes);
        assert!(capacity == 1 || bytes == pattern(capacity - 1), "a part is within its slot");
    }

    // The first and the last byte belong to the slot.
    let middle = BlockId((capacity / 2) as u32);
    for at in [0, size - 1] {
        let mut changed = pattern(middle.0 as usize);
        changed[at] ^= 0xff;
        device.write(middle, &changed);
        device.read(middle, &mut bytes);
        assert!(bytes == changed, "byte {at} of a slot is kept");
    }

    // Different slots at the same time, from different threads.
    std::thread::scope(|scope| {
        for worker in 0..2 {
            scope.spawn(move || {
                let mut bytes = vec![0; size];
                for slot in (worker..capacity).step_by(2) {
                    device.write(BlockId(slot as u32), &pattern(slot + 1));
                    device.read(BlockId(slot as u32), &mut bytes);
                    assert!(bytes == pattern(slot + 1), "slots are independent between threads");
                }
            });
        }
    });
    assert!(facts() == before, "capacity, block_bytes and fingerprint never change");
}

/// Plain memory as a device: the smallest implementation, for tests of what uses the interface.
pub struct InMemory {
    slots: Vec<Mutex<Vec<u8>>>,
    block_bytes: usize,
    fingerprint: Fingerprint,
}

impl InMemory {
    /// Zeroed slots.
    pub fn new(capacity: usize, block_bytes: usize, fingerprint: Fingerprint) -> Arc<Self> {
        let slots = (0..capacity).map(|_| Mutex::new(vec![0; block_bytes])).collect();
        Arc::new(Self { slots, block_bytes, fingerprint })
    }

    fn slot(&self, slot: BlockId) -> &Mutex<Vec<u8>> {
        &self.slots[slot.0 as usize]
    }
}

impl DeviceBlocks for InMemory {
    fn capacity(&self) -> usize {
        self.slots.len()
    }

    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    fn read(&self, slot: BlockId, into: &mut [u8]) {
        into.copy_from_slice(&self.slot(slot).lock());
    }

    fn write(&self, slot: BlockId, from: &[u8]) {
        // `try_lock`: a second user of a slot that is being written breaks the rule, and panics here.
        self.slot(slot).try_lock().expect("a slot that is written has no other user").copy_from_slice(from);
    }

    fn write_part(&self, slot: BlockId, at: usize, from: &[u8], observe: &mut dyn FnMut(&[u8])) -> bool {
        let mut into = self.slot(slot).try_lock().expect("a slot that is written has no other user");
        copy_observed(from, &mut into[at..][..from.len()], observe);
        true
    }

    fn read_observed(&self, slot: BlockId, into: &mut [u8], observe: &mut dyn FnMut(&[u8])) {
        copy_observed(&self.slot(slot).lock(), into, observe);
    }

    fn write_observed(&self, slot: BlockId, from: &[u8], observe: &mut dyn FnMut(&[u8])) {
        let mut into = self.slot(slot).try_lock().expect("a slot that is written has no other user");
        copy_observed(from, &mut into, observe);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_memory_keeps_the_contract() {
        check(&*InMemory::new(9, 300, Fingerprint::from_bytes([1; 32])));
    }

    /// Two slots share a byte.
    struct Overlapping(Mutex<Vec<u8>>);

    impl DeviceBlocks for Overlapping {
        fn capacity(&self) -> usize {
            2
        }
        fn block_bytes(&self) -> usize {
            10
        }
        fn fingerprint(&self) -> Fingerprint {
            Fingerprint::from_bytes([1; 32])
        }
        fn read(&self, slot: BlockId, into: &mut [u8]) {
            let at = slot.0 as usize * 9;
            into.copy_from_slice(&self.0.lock()[at..at + 10]);
        }
        fn write(&self, slot: BlockId, from: &[u8]) {
            let at = slot.0 as usize * 9;
            self.0.lock()[at..at + 10].copy_from_slice(from);
        }
    }

    #[test]
    #[should_panic(expected = "no other slot's bytes")]
    fn slots_that_overlap_are_found_out() {
        check(&Overlapping(Mutex::new(vec![0; 19])));
    }
}
