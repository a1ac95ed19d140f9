//! Huge pages and locked memory for large allocations.
//!
//! These are best-effort hints: they never change what memory holds, and a refusal costs speed only. Without huge
//! pages, nearly every random access to a table of many megabytes costs a page table walk. Without locked pages, an
//! access may cost a read from swap.

use std::io;

/// Bytes of a huge page. Smaller allocations are left alone.
pub const HUGE_PAGE: usize = 2 << 20;
/// Upper bound of the bytes that the allocator uses for its own header beside a large allocation.
#[cfg(target_os = "linux")]
const ALLOCATOR_HEADER: usize = 4096;

/// Asks for huge pages by `madvise`, where `/sys/kernel/mm/transparent_hugepage/enabled` permits it. Call it before the
/// memory is touched.
pub fn advise_hugepages<T>(memory: *const [T]) {
    #[cfg(target_os = "linux")]
    if let Some((start, bytes)) = whole_pages(memory) {
        // SAFETY: this advice leaves the content of the pages unchanged, no matter to which allocation they belong.
        let answer = unsafe { libc::madvise(start.cast_mut().cast(), bytes, libc::MADV_HUGEPAGE) };
        if answer != 0 {
            tracing::debug!(error = %io::Error::last_os_error(), bytes, "huge pages are not available");
        }
    }
}

/// Locks each page in memory once it was touched, until [`munlock`]. Fails above the process's limit (`ulimit -l`).
pub(crate) fn mlock<T>(memory: *const [T]) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    // SAFETY: locking a page leaves its content unchanged.
    return match unsafe { libc::mlock2(memory.cast(), bytes(memory), libc::MLOCK_ONFAULT) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    #[cfg(not(target_os = "linux"))]
    Err(io::ErrorKind::Unsupported.into())
}

/// Unlocks pages. Call it before locked memory is freed.
pub(crate) fn munlock<T>(memory: *const [T]) {
    #[cfg(target_os = "linux")]
    // SAFETY: as for `mlock`. An error means that no page was locked.
    unsafe {
        libc::munlock(memory.cast(), bytes(memory))
    };
}

fn bytes<T>(memory: *const [T]) -> usize {
    memory.len() * size_of::<T>()
}

/// Start and length of the whole huge pages within an allocation, which may include the allocator's header beside it.
#[cfg(target_os = "linux")]
fn whole_pages<T>(memory: *const [T]) -> Option<(*const u8, usize)> {
    let start = memory.cast::<u8>();
    let (from, to) = (start.addr(), start.addr() + bytes(memory));
    let first = if from % HUGE_PAGE < ALLOCATOR_HEADER {
        from / HUGE_PAGE * HUGE_PAGE
    } else {
        from.next_multiple_of(HUGE_PAGE)
    };
    let end = (to + ALLOCATOR_HEADER) / HUGE_PAGE * HUGE_PAGE;
    (first < end).then(|| (start.with_addr(first), end - first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_leave_the_content_of_memory_unchanged() {
        let memory = vec![7_u64; 5 << 20];
        advise_hugepages(memory.as_slice());
        let locked = mlock(memory.as_slice());
        assert!(memory.iter().all(|word| *word == 7));
        if locked.is_ok() {
            munlock(memory.as_slice());
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn only_whole_huge_pages_within_the_memory_are_advised() {
        let memory = vec![0_u8; 3 * HUGE_PAGE];
        let (start, bytes) = whole_pages(memory.as_slice()).unwrap();
        assert!(start.addr().is_multiple_of(HUGE_PAGE) && bytes.is_multiple_of(HUGE_PAGE) && bytes >= 2 * HUGE_PAGE);
        let range = memory.as_ptr_range();
        assert!(range.start.addr() < start.addr() + ALLOCATOR_HEADER);
        assert!(start.addr() + bytes < range.end.addr() + ALLOCATOR_HEADER);
        assert!(whole_pages(&raw const memory[..HUGE_PAGE - 2 * ALLOCATOR_HEADER]).is_none(), "no whole page");
    }
}
