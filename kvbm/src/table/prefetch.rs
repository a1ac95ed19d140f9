//! Prefetch instructions: they begin to load a cache line before it is needed. They change nothing that a program can
//! see.

/// Begins to load the first cache line of `target` for reading.
pub fn prefetch<T>(target: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint without visible effect; every x86-64 processor has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(target).cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint without visible effect; every aarch64 processor has it.
    unsafe {
        std::arch::asm!(
            "prfm pldl1keep, [{}]",
            in(reg) std::ptr::from_ref(target),
            options(nostack, readonly, preserves_flags)
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = target;
}

/// Begins to load the first cache line of `target` for writing. A line that was loaded for reading may be shared with
/// another core; the first write then waits until this core owns it.
pub fn prefetch_for_write<T>(target: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint without visible effect. Processors without `prefetchw` execute it as a no-op.
    unsafe {
        std::arch::asm!(
            "prefetchw [{}]",
            in(reg) std::ptr::from_ref(target),
            options(nostack, readonly, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    prefetch(target);
}
