//! Settings of the C library's allocator, which apply to the whole process. Other systems and libraries have none.

use crate::blocking;

/// Size in bytes from which an allocation is returned to the system when it is freed. Larger than what requests of
/// usual sizes allocate, so that these do not wait for the system; smaller than the parts of a body of several MiB.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE: libc::c_int = 1 << 20;

/// Returns large allocations to the system when they are freed. By default glibc stops doing so for sizes up to 32 MiB
/// once one of that size has been freed; each thread's heap then keeps the memory of large request bodies. To be called
/// before other threads start.
pub fn return_large_allocations() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` reads its two integers, and no other thread allocates yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
    }
}

/// Returns freed memory of the heaps to the system, on a blocking thread: pieces of less than 1 MiB stay in the heaps
/// when they are freed. It takes milliseconds for some hundred MiB. Must be called within a runtime.
pub fn return_freed() {
    blocking::spawn(return_freed_now);
}

fn return_freed_now() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` locks each heap while it returns pages that have no allocation.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    #[test]
    fn large_allocations_stay_out_of_the_heap() {
        // SAFETY: `mallinfo2` only reads counters of the allocator.
        let mapped = || unsafe { libc::mallinfo2() }.hblkhd;
        super::return_large_allocations();
        // Without the call, glibc would keep allocations up to this size in the heap from here on.
        drop(std::hint::black_box(vec![1u8; 30 << 20]));
        let before = mapped();
        let body = std::hint::black_box(vec![1u8; 15 << 20]);
        assert!(mapped() >= before + (15 << 20));
        drop(body);
    }

    #[test]
    fn small_pieces_are_returned_on_demand() {
        let resident = || std::fs::read_to_string("/proc/self/statm").unwrap();
        let resident = || resident().split(' ').nth(1).unwrap().parse::<usize>().unwrap() * page_bytes();
        // Those that stay keep the heap from shrinking at its end.
        let mut pieces: Vec<_> = (0..4000).map(|_| std::hint::black_box(vec![1u8; 32 << 10])).collect();
        let last = pieces.pop();
        drop(pieces);
        let before = resident();
        super::return_freed_now();
        let returned = before.saturating_sub(resident());
        assert!(returned > 64 << 20, "{returned} of 128 MiB");
        drop(last);
    }

    fn page_bytes() -> usize {
        // SAFETY: `sysconf` only returns a constant of the system.
        unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
    }
}
