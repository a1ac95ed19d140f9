//! State of a holder: its id, digests, and the pages that contain its blocks.

use super::holder::{Holder, HolderId, LEVELS};
use super::holder_digests::HolderDigests;
use super::holder_set::InternCache;
use super::last_event::LastEvent;
use super::position::Position;
use super::removals::Removals;
use kvbm::splitmix::splitmix64;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A holder of blocks. Threads update different holders, so each has cache lines of its own (two, because processors
/// prefetch pairs).
#[repr(align(128))]
pub(super) struct HolderState {
    pub(super) id: HolderId,
    pages: Mutex<HolderPages>,
    pub(super) digests: HolderDigests,
    pub(super) last_event: LastEvent,
    /// Number of evicted pages that may still be in its page sets.
    evicted_pages: AtomicUsize,
}

/// The pages that contain blocks of a holder. Its lock also serializes the updates of the holder.
#[derive(Default)]
pub(super) struct HolderPages {
    /// By level: pages with blocks of this holder, and some that were evicted since.
    pub(super) by_level: [PageSet; LEVELS.len()],
    /// Bytes of `by_level` as last accounted.
    pub(super) bytes: usize,
    /// Reserved pages for new blocks; the first is filled first.
    pub(super) reserved: Range<u32>,
    /// Predicted position of the next block to remove: engines evict a chain block by block.
    pub(super) next_removal: Option<Position>,
    /// Removed blocks that still have table entries.
    pub(super) removals: Removals,
    /// The holder sets that this holder was last added to and removed from.
    pub(super) last_added: InternCache,
    pub(super) last_removed: InternCache,
    /// Set when the holder was removed while another thread waited for this lock.
    pub(super) unregistered: bool,
}

/// Page numbers.
pub(super) type PageSet = HashSet<u32, BuildHasherDefault<IndexHasher>>;

/// A map of holders.
pub(super) type HolderMap<T> = HashMap<Holder, T, BuildHasherDefault<IndexHasher>>;

/// Evicted pages are pruned once there are more than `PRUNE_MIN` plus one in `PRUNE_RATIO` of all pages in the sets.
const PRUNE_MIN: usize = 16;
const PRUNE_RATIO: usize = 4;

impl HolderState {
    pub(super) fn new(id: HolderId) -> Self {
        Self {
            id,
            pages: Mutex::default(),
            digests: HolderDigests::new(),
            last_event: LastEvent::default(),
            evicted_pages: AtomicUsize::new(0),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, HolderPages> {
        self.pages.lock()
    }

    /// Notes that a page with blocks of this holder was evicted.
    pub(super) fn note_evicted_page(&self) {
        self.evicted_pages.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether evicted pages should be pruned from the page sets now. If so, the counter is reset and the caller
    /// prunes.
    pub(super) fn should_prune(&self, pages: &HolderPages) -> bool {
        let evicted = self.evicted_pages.load(Ordering::Relaxed);
        let named = || pages.by_level.iter().map(HashSet::len).sum::<usize>();
        let many = evicted > PRUNE_MIN && evicted > PRUNE_MIN + named() / PRUNE_RATIO;
        if many {
            self.evicted_pages.store(0, Ordering::Relaxed);
        }
        many
    }
}

impl HolderPages {
    /// Change of `bytes` since the last call, as a wrapping difference.
    pub(super) fn growth(&mut self) -> usize {
        // A hash set has a power of two of buckets, at most 7/8 full, with one control byte each.
        let set = |pages: &PageSet| match pages.capacity() {
            0 => 0,
            capacity => (capacity * 8 / 7).next_power_of_two() * (size_of::<u32>() + 1),
        };
        let bytes: usize = self.by_level.iter().map(set).sum();
        bytes.wrapping_sub(std::mem::replace(&mut self.bytes, bytes))
    }
}

/// Frees memory if less than a quarter of the capacity is used.
pub(super) fn shrink(pages: &mut PageSet) {
    if pages.capacity() > 64 && pages.len() * 4 < pages.capacity() {
        pages.shrink_to(pages.len() * 2);
    }
}

/// Hashes page numbers by one multiplication, and holders by `SplitMix64`. Neither is chosen by clients, so flooding is
/// no concern.
#[derive(Default)]
pub(super) struct IndexHasher(u64);

impl Hasher for IndexHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.0 = (self.0 ^ u64::from(value)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = splitmix64(self.0 ^ value);
    }
}
