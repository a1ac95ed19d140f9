//! Large arrays of cache lines whose memory is used only once it is written.
//!
//! An array reserves addresses for all of its lines. A line takes memory from its first write on, together with the
//! other lines of its page, and the memory of a range can be given back. So a table in such an array grows and shrinks
//! in place: no line is copied to a larger array, and no memory is written twice for the first time.

use super::hugepages::{HUGE_PAGE, advise_hugepages};
use std::io;
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// A cache line of atomic words: three of 64 bits and ten of 32.
#[repr(C, align(64))]
pub struct CacheLine {
    /// The words of 64 bits.
    pub words: [AtomicU64; 3],
    /// The words of 32 bits.
    pub halves: [AtomicU32; 10],
}

const _: () = assert!(size_of::<CacheLine>() == 64, "it fills one cache line");

/// An array of cache lines, all zero at first.
pub struct LazyLines {
    lines: NonNull<CacheLine>,
    len: usize,
    /// Lines that may be accessed.
    allowed: AtomicUsize,
    mapping: NonNull<libc::c_void>,
    mapped_bytes: usize,
}

/// The system refuses addresses, or access to them.
#[derive(Debug, thiserror::Error)]
#[error("the system refuses {bytes} bytes of address space{}: {error}", advice(*.limit))]
pub struct NoAddresses {
    /// The smallest number of bytes that was asked for.
    pub bytes: usize,
    /// The limit of the address space of this process in bytes, if there is one.
    pub limit: Option<u64>,
    /// The answer of the system.
    pub error: io::Error,
}

/// What to change in the system.
fn advice(limit: Option<u64>) -> String {
    let advice =
        |limit| format!("; raise the limit, which is {limit} bytes (RLIMIT_AS: ulimit -v, LimitAS= in systemd)");
    limit.map(advice).unwrap_or_default()
}

// SAFETY: the array owns its memory, and all access to the content is through atomics.
unsafe impl Send for LazyLines {}
// SAFETY: as above.
unsafe impl Sync for LazyLines {}

impl LazyLines {
    /// An array of up to `len` lines, which must be a power of two, and fewer where the process may have few addresses
    /// or the system refuses so many: at least `min`. The lines from `min` on have no memory before
    /// [`allow`](Self::allow). Fails if the system has no addresses for `min` lines.
    pub fn reserve(len: usize, min: usize) -> Result<Self, NoAddresses> {
        let limit = address_limit();
        let mut len = within(limit, len).max(min);
        let (kind, nowhere) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, std::ptr::null_mut());
        loop {
            // More than needed, so that the array can start at a huge page.
            let mapped_bytes = len * size_of::<CacheLine>() + HUGE_PAGE;
            // SAFETY: a new mapping at an address that the system chooses affects no other memory.
            let mapping = unsafe { libc::mmap(nowhere, mapped_bytes, libc::PROT_NONE, kind, -1, 0) };
            if let Some(mapping) = NonNull::new(mapping).filter(|mapping| mapping.as_ptr() != libc::MAP_FAILED) {
                let skip = mapping.as_ptr().align_offset(HUGE_PAGE);
                // SAFETY: `skip` is less than a huge page, which the mapping has beyond the lines.
                let lines = unsafe { mapping.byte_add(skip) }.cast::<CacheLine>();
                let lines = Self { lines, len, allowed: AtomicUsize::new(0), mapping, mapped_bytes };
                if lines.allow(min) {
                    return Ok(lines);
                }
            }
            if len <= min {
                return Err(NoAddresses { bytes: mapped_bytes, limit, error: io::Error::last_os_error() });
            }
            len /= 2;
        }
    }

    /// Makes the first `len` lines accessible, with huge pages beyond the first of these. Returns whether they are.
    pub fn allow(&self, len: usize) -> bool {
        let before = self.allowed.load(Ordering::Acquire);
        if len <= before {
            return true;
        }
        let bytes = len * size_of::<CacheLine>();
        // SAFETY: the range is part of this mapping, and its memory is not executed.
        let answer = len <= self.len
            && unsafe { libc::mprotect(self.lines.as_ptr().cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) } == 0;
        if answer {
            self.allowed.fetch_max(len, Ordering::AcqRel);
            let first = before.max(HUGE_PAGE / size_of::<CacheLine>());
            advise_hugepages(std::ptr::from_ref(self.get(first..).unwrap_or_default()));
        }
        answer
    }

    /// Replaces the pages in use of a range by huge pages, where the system can.
    pub fn collapse(&self, range: Range<usize>) {
        let range = &self[range];
        advise_hugepages(range);
        #[cfg(target_os = "linux")]
        {
            // Since Linux 6.1.
            const MADV_COLLAPSE: libc::c_int = 25;
            // SAFETY: this advice leaves the content of the pages unchanged.
            unsafe { libc::madvise(range.as_ptr().cast_mut().cast(), size_of_val(range), MADV_COLLAPSE) };
        }
    }

    /// Gives back the memory of the whole pages of a range, where the system can. Each line there is then zero or as
    /// it was.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        {
            const PAGE: usize = 4096;
            let range = &self[range];
            let start = range.as_ptr().cast::<u8>();
            let first = start.addr().next_multiple_of(PAGE);
            let end = (start.addr() + size_of_val(range)) / PAGE * PAGE;
            if first < end {
                // SAFETY: the range is part of this mapping. Its content is atomics, for which zero is a valid value.
                unsafe { libc::madvise(start.with_addr(first).cast_mut().cast(), end - first, libc::MADV_DONTNEED) };
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }
}

impl Deref for LazyLines {
    type Target = [CacheLine];

    #[inline]
    fn deref(&self) -> &[CacheLine] {
        // SAFETY: this many lines are accessible until the mapping is dropped, and zero is a valid value of each.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr(), self.allowed.load(Ordering::Acquire)) }
    }
}

impl Drop for LazyLines {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no reference to it is left.
        unsafe { libc::munmap(self.mapping.as_ptr(), self.mapped_bytes) };
    }
}

/// Of the addresses that the process may have, an array takes at most one part in so many: the eight tables of an index
/// leave three quarters of them to memory and stacks.
const LIMIT_PARTS: u64 = 32;

/// The limit of the address space of this process in bytes (`ulimit -v`); `None` if there is no limit.
fn address_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the system writes the limit to this value.
    let answer = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    (answer == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// The number of lines, halved until they take at most their part of this limit.
fn within(limit: Option<u64>, len: usize) -> usize {
    let Some(limit) = limit else { return len };
    let most = limit / LIMIT_PARTS / size_of::<CacheLine>() as u64;
    if len as u64 <= most { len } else { (most + 1).next_power_of_two() as usize / 2 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_limit_of_addresses_is_shared_with_the_rest_of_the_process() {
        assert_eq!(within(None, 1 << 25), 1 << 25);
        // 2 GiB each without a limit.
        let bytes = |limit: u64| within(Some(limit), 1 << 25) * size_of::<CacheLine>();
        assert_eq!(
            [1 << 40, 1 << 36, (1 << 36) - 1, 12 << 30, 0].map(bytes),
            [1 << 31, 1 << 31, 1 << 30, 256 << 20, 0]
        );
    }

    #[test]
    fn addresses_that_the_system_refuses_are_an_error_with_the_limit() {
        // No processor has so many.
        let lines = 1 << 56;
        let mut error = LazyLines::reserve(lines, lines).err().expect("2^62 bytes are refused");
        error.limit = Some(200 << 20);
        let text = error.to_string();
        let bytes = lines * size_of::<CacheLine>() + HUGE_PAGE;
        let start =
            format!("the system refuses {bytes} bytes of address space; raise the limit, which is 209715200 bytes");
        assert!(text.starts_with(&start) && text.contains("(RLIMIT_AS: ulimit -v, LimitAS= in systemd)"), "{text}");
        assert_eq!(error.error.kind(), io::ErrorKind::OutOfMemory);
    }

    #[test]
    fn a_line_is_zero_until_it_is_written_and_may_be_given_back() {
        const HUGE: usize = HUGE_PAGE / size_of::<CacheLine>();
        let lines = LazyLines::reserve(1 << 25, 64).unwrap();
        assert_eq!(lines.len(), 64);
        for len in [64, 3 * HUGE] {
            assert!(lines.allow(len));
            assert_eq!(lines.len(), len);
            let (first, last) = (&lines[0].words[0], &lines[len - 1].halves[9]);
            assert_eq!((first.load(Ordering::Relaxed), last.load(Ordering::Relaxed)), (0, 0));
            first.store(7, Ordering::Relaxed);
            last.store(8, Ordering::Relaxed);
            lines.collapse(0..len.min(HUGE));
            lines.release(1..len);
            assert_eq!(first.load(Ordering::Relaxed), 7, "a page that is not wholly in the range stays");
            lines.release(0..len);
            let left = (first.swap(0, Ordering::Relaxed), last.swap(0, Ordering::Relaxed));
            assert_eq!(left, if cfg!(target_os = "linux") { (0, 0) } else { (7, 8) });
        }
        assert!(!lines.allow(1 << 26), "there are no addresses for more");
    }
}
