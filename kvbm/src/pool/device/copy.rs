//! Copies of blocks between memories that are larger than the processor's caches.
//!
//! The target is written with streaming (non-temporal) stores where the processor has them: its lines are not read
//! before they are overwritten, and do not evict others from the caches. A block is read again much later, if at all.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Bytes that are observed before they are copied: they stay in the first-level cache. Smaller pieces make a checksum
/// slower: each one reduces its state.
const PIECE: usize = 32 << 10;

/// Copies between slices of one length and passes the bytes to `observe`. With a checksum as the observer this takes
/// little longer than the copy alone: the copy finds the bytes in the first-level cache.
///
/// # Panics
/// When the lengths differ.
pub fn copy_observed(from: &[u8], into: &mut [u8], observe: &mut dyn FnMut(&[u8])) {
    assert_eq!(from.len(), into.len(), "one block on both sides");
    // From here on, whole lines: a checksum of bytes that begin or end within a line is slower.
    let aligned = from.as_ptr().align_offset(LINE).min(from.len());
    let ((from_head, from), (into_head, into)) = (from.split_at(aligned), into.split_at_mut(aligned));
    if !from_head.is_empty() {
        observe(from_head);
        into_head.copy_from_slice(from_head);
    }
    for (from, into) in from.chunks(PIECE).zip(into.chunks_mut(PIECE)) {
        observe(from);
        copy_streaming(from, into);
    }
}

/// Copies between slices of one length, past the caches.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[expect(clippy::cast_ptr_alignment, reason = "the loads need no alignment, and the target is aligned")]
fn copy_streaming(from: &[u8], into: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    let before = into.as_ptr().align_offset(LINE).min(into.len());
    let ((from_before, from), (into_before, into)) = (from.split_at(before), into.split_at_mut(before));
    into_before.copy_from_slice(from_before);
    let ((from_lines, from_after), (into_lines, into_after)) = (from.as_chunks::<LINE>(), into.as_chunks_mut::<LINE>());
    for (from, into) in from_lines.iter().zip(into_lines) {
        let (from, into) = (from.as_ptr().cast::<__m128i>(), into.as_mut_ptr().cast::<__m128i>());
        // SAFETY: both are as long as a line of four vectors, `into` is exclusive, and it is aligned to a line because
        // it follows `before`. SSE2 is part of x86-64.
        unsafe {
            let line = [0, 1, 2, 3].map(|at| _mm_loadu_si128(from.add(at)));
            for (at, vector) in line.into_iter().enumerate() {
                _mm_stream_si128(into.add(at), vector);
            }
        }
    }
    into_after.copy_from_slice(from_after);
    // SAFETY: part of x86-64. Streaming stores are not ordered with others: without the fence, a thread that gets the
    // block later might not see them.
    unsafe { _mm_sfence() };
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn copy_streaming(from: &[u8], into: &mut [u8]) {
    into.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The copy of `length` bytes at these offsets, what was observed, and where each observed piece begins.
    fn copied(length: usize, from_offset: usize, into_offset: usize) -> (Vec<u8>, Vec<u8>, Vec<*const u8>) {
        let from: Vec<u8> = (0..from_offset + length).map(|at| (at * 31 + at / 251) as u8).collect();
        let mut into = vec![0; into_offset + length + 1];
        let (mut observed, mut begins) = (Vec::new(), Vec::new());
        copy_observed(&from[from_offset..], &mut into[into_offset..][..length], &mut |piece| {
            observed.extend_from_slice(piece);
            begins.push(piece.as_ptr());
        });
        assert_eq!(into[into_offset + length], 0, "nothing is written behind the target");
        assert!(into[..into_offset].iter().all(|byte| *byte == 0), "nothing is written before the target");
        assert_eq!(observed, from[from_offset..]);
        (into[into_offset..][..length].to_vec(), observed, begins)
    }

    #[test]
    fn every_byte_is_copied_and_observed_once_and_in_order() {
        for length in [0, 1, 15, 63, 64, 65, 127, 300, PIECE - 1, PIECE + 100, 3 * PIECE] {
            for (from_offset, into_offset) in [(0, 0), (1, 0), (0, 1), (17, 40), (63, 5)] {
                let (copied, observed, _) = copied(length, from_offset, into_offset);
                assert!(copied == observed, "{length} bytes from {from_offset} into {into_offset}");
            }
        }
    }

    #[test]
    fn all_pieces_but_the_first_begin_at_a_cache_line() {
        let (_, _, begins) = copied(3 * PIECE, 7, 0);
        assert!(begins.len() > 2 && begins[1..].iter().all(|begin| begin.align_offset(LINE) == 0));
    }
}
