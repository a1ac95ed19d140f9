//! Memory for the payloads of blocks that arrive. A buffer is used again once its payload is dropped.
//!
//! The last one that was given back is used first: its pages are mapped, and the processor's caches have its lines. New
//! memory for each payload would be cleared by the system before each of its bytes is written, and pushes that of other
//! payloads out of the caches before they are verified.
//!
//! Not here: memory of blocks that are kept. They are copied, while they are verified, to where they are kept.

use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};

/// Buffers that are not in use.
pub(super) struct Buffers {
    free: Mutex<Free>,
    max_free_bytes: usize,
}

struct Free {
    /// The last one was given back last.
    buffers: VecDeque<Box<[u8]>>,
    bytes: usize,
}

/// Exclusive memory for one payload. Given back when it is dropped.
pub(super) struct Buffer {
    bytes: Box<[u8]>,
    buffers: &'static Buffers,
}

/// The payload in a buffer.
struct Payload {
    buffer: Buffer,
    length: usize,
}

/// Buffers of all connections of the process. The limit is about what a load has between its connections and G1: twice
/// 4 MiB that are written to G1, as much that waits, and what its connections read.
pub(super) static BUFFERS: Buffers = Buffers::new(32 << 20);

impl Buffers {
    /// Keeps at most this many bytes that are not in use.
    pub(super) const fn new(max_free_bytes: usize) -> Self {
        Self { free: Mutex::new(Free { buffers: VecDeque::new(), bytes: 0 }), max_free_bytes }
    }

    /// A buffer of at least this many bytes, and of at most twice as many. Its content is arbitrary.
    pub(super) fn take(&'static self, bytes: usize) -> Buffer {
        let fitting = bytes..=bytes.saturating_mul(2);
        let found = {
            let mut free = self.free.lock();
            let last = free.buffers.iter().rposition(|buffer| fitting.contains(&buffer.len()));
            let found = last.and_then(|at| free.buffers.remove(at));
            free.bytes -= found.as_ref().map_or(0, |buffer| buffer.len());
            found
        };
        // Zeroed by the system page by page, as it is written to.
        Buffer { bytes: found.unwrap_or_else(|| vec![0; bytes].into_boxed_slice()), buffers: self }
    }

    fn give_back(&self, buffer: Box<[u8]>) {
        let mut dropped = Vec::new();
        let mut free = self.free.lock();
        free.bytes += buffer.len();
        free.buffers.push_back(buffer);
        while free.bytes > self.max_free_bytes
            && let Some(oldest) = free.buffers.pop_front()
        {
            free.bytes -= oldest.len();
            dropped.push(oldest);
        }
        // Memory is returned to the system without the lock.
        drop(free);
    }
}

impl Buffer {
    /// The first `length` bytes, which hold the buffer.
    pub(super) fn freeze(self, length: usize) -> Bytes {
        assert!(length <= self.bytes.len(), "a payload of {length} bytes in {}", self.bytes.len());
        Bytes::from_owner(Payload { buffer: self, length })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.buffers.give_back(std::mem::take(&mut self.bytes));
    }
}

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_buffer_is_used_first_once_nothing_holds_it() {
        static BUFFERS: Buffers = Buffers::new(1000);
        let mut first = BUFFERS.take(100);
        first.fill(1);
        let second = BUFFERS.take(100);
        let at = |buffer: &Buffer| buffer.as_ptr() as usize;
        let (first_at, second_at) = (at(&first), at(&second));
        let (payload, clone) = {
            let payload = first.freeze(90);
            (payload.clone(), payload.slice(80..))
        };
        drop(second);
        assert_eq!((&payload[..], payload.len()), (&[1; 90][..], 90));
        drop(payload);
        let third = BUFFERS.take(90);
        assert_eq!(at(&third), second_at, "a part of the first one is in use");
        drop(clone);
        assert_eq!([at(&BUFFERS.take(49)), at(&BUFFERS.take(50))].map(|at| at == first_at), [false, true]);
    }

    #[test]
    fn few_bytes_are_kept() {
        static BUFFERS: Buffers = Buffers::new(1000);
        let buffers: Vec<Buffer> = (0..20).map(|_| BUFFERS.take(300)).collect();
        drop(buffers);
        drop(BUFFERS.take(1001));
        let free = BUFFERS.free.lock();
        assert!(free.bytes == free.buffers.iter().map(|buffer| buffer.len()).sum::<usize>() && free.bytes <= 1000);
    }
}
