//! What is asked of the machine for large memory: large pages, that they stay, and that what is read next comes early.
//!
//! All of it is a wish, which changes nothing of what memory holds; where it is refused everything works as well, only
//! slower. A table of many megabytes that is read here and there costs a walk through page tables with nearly every look,
//! and memory that was swapped out costs a read.

use std::io;

/// The size of large pages, and what smaller memory is not worth asking for.
pub const LARGE: usize = 2 << 20;
/// At most so many bytes beside large memory are the allocator's own.
#[cfg(target_os = "linux")]
const NOTES: usize = 4096;

/// Asks for large pages where they are had for the asking (`/sys/kernel/mm/transparent_hugepage/enabled`). To be called
/// before the memory is touched.
pub fn enlarge<T>(memory: *const [T]) {
    #[cfg(target_os = "linux")]
    if let Some((at, bytes)) = inner(memory) {
        // SAFETY: advice, which leaves everything that memory holds as it is, whosever it is.
        let answer = unsafe { libc::madvise(at.cast_mut().cast(), bytes, libc::MADV_HUGEPAGE) };
        if answer != 0 {
            tracing::debug!(error = %io::Error::last_os_error(), bytes, "huge pages are not available");
        }
    }
}

/// Has pages stay in memory once they were touched, until [`release`]. Refused to who may not lock as much (`ulimit -l`).
pub(crate) fn pin<T>(memory: *const [T]) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    // SAFETY: where pages are changes nothing of what they hold.
    return match unsafe { libc::mlock2(memory.cast(), bytes(memory), libc::MLOCK_ONFAULT) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    #[cfg(not(target_os = "linux"))]
    Err(io::ErrorKind::Unsupported.into())
}

/// Pages may go again. To be called before pinned memory is given back.
pub(crate) fn release<T>(memory: *const [T]) {
    #[cfg(target_os = "linux")]
    // SAFETY: as for `pin`. An error says that nothing was pinned.
    unsafe {
        libc::munlock(memory.cast(), bytes(memory))
    };
}

/// Begins to bring a place into the processor's cache.
pub fn fetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which reads nothing that the program could see; every x86-64 has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: likewise.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) std::ptr::from_ref(place), options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = place;
}

/// Begins to bring a place into the processor's cache that is to be written soon: what is merely read may come in a form
/// that has to be asked for again before the first write.
pub fn fetch_mut<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which reads and writes nothing that the program could see. Processors that do not know it take it for
    // nothing.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) std::ptr::from_ref(place), options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    fetch(place);
}

fn bytes<T>(memory: *const [T]) -> usize {
    memory.len() * size_of::<T>()
}

/// The large pages that lie within some memory, if there are any; what the allocator notes beside it may lie in them as well.
#[cfg(target_os = "linux")]
fn inner<T>(memory: *const [T]) -> Option<(*const u8, usize)> {
    let at = memory.cast::<u8>();
    let (from, to) = (at.addr(), at.addr() + bytes(memory));
    let first = if from % LARGE < NOTES { from / LARGE * LARGE } else { from.next_multiple_of(LARGE) };
    let end = (to + NOTES) / LARGE * LARGE;
    (first < end).then(|| (at.with_addr(first), end - first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_stays_what_it_was_whatever_is_asked_for() {
        let memory = vec![7_u64; 5 << 20];
        enlarge(memory.as_slice());
        let pinned = pin(memory.as_slice());
        assert!(memory.iter().all(|word| *word == 7));
        if pinned.is_ok() {
            release(memory.as_slice());
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn only_whole_pages_within_are_asked_for() {
        let memory = vec![0_u8; 3 * LARGE];
        let (at, bytes) = inner(memory.as_slice()).unwrap();
        assert!(at.addr().is_multiple_of(LARGE) && bytes.is_multiple_of(LARGE) && bytes >= 2 * LARGE);
        let range = memory.as_ptr_range();
        assert!(range.start.addr() < at.addr() + NOTES && at.addr() + bytes < range.end.addr() + NOTES);
        assert!(inner(&raw const memory[..LARGE - 2 * NOTES]).is_none(), "nothing to ask for");
    }
}
