//! Reuse of buffers: fresh memory from the system costs about as much time as the transforms themselves.

use bytes::Bytes;
use parking_lot::Mutex;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A pool of buffers.
#[derive(Default)]
pub(crate) struct Buffers {
    idle: Mutex<Vec<Vec<u8>>>,
}

impl Buffers {
    /// Maximum number of idle bytes: a few large reads of a fast device.
    const MAX_IDLE_BYTES: usize = 32 << 20;

    /// A buffer with a capacity of at least `capacity` bytes. Its content is arbitrary.
    pub(crate) fn take(self: &Arc<Self>, capacity: usize) -> Buffer {
        let mut idle = self.idle.lock();
        // Most blocks of a tier have the same size: if the last buffer is too small, the others are, too.
        let bytes = idle.pop_if(|last| last.capacity() >= capacity).unwrap_or_else(|| Vec::with_capacity(capacity));
        Buffer { bytes, pool: self.clone() }
    }

    fn put_back(&self, bytes: Vec<u8>) {
        let mut idle = self.idle.lock();
        idle.push(bytes);
        let mut total: usize = idle.iter().map(Vec::capacity).sum();
        // Frees the oldest: their size is not requested any more.
        while total > Self::MAX_IDLE_BYTES {
            total -= idle.remove(0).capacity();
        }
    }
}

/// A buffer that returns to its pool on drop.
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    pool: Arc<Buffers>,
}

impl Buffer {
    /// Converts into [`Bytes`]; the memory returns to the pool when the last reference is dropped.
    pub(crate) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.put_back(std::mem::take(&mut self.bytes));
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Deref for Buffer {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_reused_after_the_last_reference() {
        let buffers = Arc::new(Buffers::default());
        let mut buffer = buffers.take(1000);
        buffer.extend_from_slice(&[7; 1000]);
        let at = buffer.as_ptr();
        let frozen = buffer.freeze();
        let held = frozen.slice(10..20);
        drop(frozen);
        assert_ne!(buffers.take(1000).as_ptr(), at);
        assert_eq!(held, [7; 10][..]);
        drop(held);
        assert_eq!(buffers.take(900).as_ptr(), at);
    }

    #[test]
    fn idle_memory_is_bounded() {
        let buffers = Arc::new(Buffers::default());
        let many: Vec<Buffer> = (0..40).map(|_| buffers.take(1 << 20)).collect();
        drop(many);
        let idle = buffers.idle.lock();
        assert!(idle.iter().map(Vec::capacity).sum::<usize>() <= Buffers::MAX_IDLE_BYTES && !idle.is_empty());
    }
}
