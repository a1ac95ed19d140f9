//! Memory that is used again: what comes fresh from the system costs about as much as what is done with it here.

use bytes::Bytes;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Buffers that wait to be used again.
#[derive(Default)]
pub(crate) struct Buffers {
    idle: Mutex<Vec<Vec<u8>>>,
}

impl Buffers {
    /// Bytes that may wait: a few large reads of a fast device.
    const IDLE: usize = 32 << 20;

    /// A buffer with room for so many bytes, and anything in it.
    pub(crate) fn take(self: &Arc<Self>, room: usize) -> Buffer {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        // Blocks of a tier are nearly all of one size: the last one fits, or none does.
        let bytes = idle.pop_if(|last| last.capacity() >= room).unwrap_or_else(|| Vec::with_capacity(room));
        Buffer { bytes, home: self.clone() }
    }

    fn keep(&self, bytes: Vec<u8>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(bytes);
        let mut taken: usize = idle.iter().map(Vec::capacity).sum();
        // The oldest go: they are of a size that is asked for no more.
        while taken > Self::IDLE {
            taken -= idle.remove(0).capacity();
        }
    }
}

/// A buffer that goes back when it is dropped.
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    home: Arc<Buffers>,
}

impl Buffer {
    /// The bytes; the memory goes back when the last of them is dropped.
    pub(crate) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.home.keep(std::mem::take(&mut self.bytes));
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
    fn memory_is_used_again_once_the_last_holder_is_gone() {
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
    fn what_waits_is_bounded() {
        let buffers = Arc::new(Buffers::default());
        let many: Vec<Buffer> = (0..40).map(|_| buffers.take(1 << 20)).collect();
        drop(many);
        let idle = buffers.idle.lock().unwrap();
        assert!(idle.iter().map(Vec::capacity).sum::<usize>() <= Buffers::IDLE && !idle.is_empty());
    }
}
