//! When the memory of blocks that have left the index is returned to the system.
//!
//! The C library keeps freed pieces for later allocations. An index that has lost many blocks at once has no use for
//! that memory, and other processes may need it.

use std::time::Duration;
use tokio::time::Instant;

/// Blocks whose memory is worth the time: some tens of MiB. Returning it takes milliseconds, in which other threads may
/// wait for the allocator.
const MIN_BLOCKS: usize = 100_000;
/// Shortest time between two returns: workers of a fleet often leave one after the other.
const INTERVAL: Duration = Duration::from_mins(1);

/// Blocks that have left the index with their workers since the last return.
#[derive(Default)]
pub(super) struct FreedBlocks {
    blocks: usize,
    returned_at: Option<Instant>,
}

impl FreedBlocks {
    pub(super) fn add(&mut self, blocks: usize) {
        self.blocks += blocks;
    }

    /// Whether their memory is to be returned now. Then none are left.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        let is_due = self.blocks > MIN_BLOCKS && self.returned_at.is_none_or(|at| now.duration_since(at) >= INTERVAL);
        if is_due {
            *self = Self { blocks: 0, returned_at: Some(now) };
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_many_blocks_is_returned_once_a_minute() {
        let (start, mut freed) = (Instant::now(), FreedBlocks::default());
        freed.add(MIN_BLOCKS);
        assert!(!freed.take(start), "too few");
        freed.add(1);
        assert!(freed.take(start));
        freed.add(MIN_BLOCKS + 1);
        assert!(!freed.take(start + INTERVAL / 2));
        assert!(freed.take(start + INTERVAL), "those of before are not forgotten");
        assert!(!freed.take(start + 2 * INTERVAL));
    }
}
