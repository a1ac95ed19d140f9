//! A source, and what it holds.

use super::holder_set::Lately;
use super::position::Place;
use super::source::{LEVELS, Seat, Slot};
use kvbm::SetDigest;
use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The source.
pub(super) struct Owner {
    pub(super) slot: Slot,
    ledger: Mutex<Ledger>,
    tallies: [Tally; LEVELS.len()],
    /// Some of what it holds was dropped to save memory.
    forgetful: AtomicBool,
    /// Pages that were forgotten and that its ledger may still name.
    lost: AtomicUsize,
}

/// Where a source's blocks are. The lock on it also orders the changes of one source.
#[derive(Default)]
pub(super) struct Ledger {
    /// By level: pages in which it holds something, and some in which it did before they were forgotten.
    pub(super) pages: [Pages; LEVELS.len()],
    /// Bytes of these when they were last asked for.
    pub(super) bytes: usize,
    /// Where its next new names go, if there is room: the first of these pages, and then the others.
    pub(super) open: Range<u32>,
    /// Where the next block probably lies that it gives up: engines announce one at a time, along a chain.
    pub(super) gone_beside: Option<Place>,
    /// The crowds that it last joined and left.
    pub(super) joined: Lately,
    pub(super) left: Lately,
    /// Set when the source was forgotten while somebody waited for this lock.
    pub(super) retired: bool,
}

/// Numbers of pages.
pub(super) type Pages = HashSet<u32, BuildHasherDefault<Spread>>;

/// A ledger is cleared of forgotten pages when they are more than these, and than one in so many.
const LOST_LEAST: usize = 16;
const LOST_SHARE: usize = 4;

/// How many blocks a source holds at a level, and which, as one number.
#[derive(Default)]
struct Tally {
    blocks: AtomicU64,
    digest: AtomicU64,
}

impl Owner {
    pub(super) fn new(slot: Slot) -> Self {
        let (ledger, tallies) = (Mutex::default(), Default::default());
        Self { slot, ledger, tallies, forgetful: AtomicBool::new(false), lost: AtomicUsize::new(0) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks came: how many, and the sum of their digests.
    pub(super) fn came(&self, seat: Seat, blocks: u64, digest: u64) {
        self.tallies[seat.level()].blocks.fetch_add(blocks, Ordering::Relaxed);
        self.tallies[seat.level()].digest.fetch_add(digest, Ordering::Relaxed);
    }

    /// Blocks went.
    pub(super) fn went(&self, seat: Seat, blocks: u64, digest: u64) {
        self.tallies[seat.level()].blocks.fetch_sub(blocks, Ordering::Relaxed);
        self.tallies[seat.level()].digest.fetch_sub(digest, Ordering::Relaxed);
    }

    /// How many blocks it holds, at all levels.
    pub(super) fn blocks(&self) -> usize {
        self.tallies.iter().map(|tally| tally.blocks.load(Ordering::Relaxed) as usize).sum()
    }

    /// Whether some of what it holds was dropped.
    pub(super) fn set_forgetful(&self, forgetful: bool) {
        self.forgetful.store(forgetful, Ordering::Relaxed);
    }

    pub(super) fn digest(&self, level: usize) -> SetDigest {
        let Tally { blocks, digest } = &self.tallies[level];
        SetDigest { blocks: blocks.load(Ordering::Relaxed), sum: digest.load(Ordering::Relaxed) }
    }

    pub(super) fn is_complete(&self) -> bool {
        !self.forgetful.load(Ordering::Relaxed)
    }

    /// A page in which it held something was forgotten.
    pub(super) fn lose(&self) {
        self.forgetful.store(true, Ordering::Relaxed);
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether so many pages were forgotten that its ledger should be cleared of them; then that is for the caller to do.
    pub(super) fn lost_many(&self, ledger: &Ledger) -> bool {
        let named: usize = ledger.pages.iter().map(HashSet::len).sum();
        let many = self.lost.load(Ordering::Relaxed) > LOST_LEAST + named / LOST_SHARE;
        if many {
            self.lost.store(0, Ordering::Relaxed);
        }
        many
    }
}

impl Ledger {
    /// By how many bytes it has grown since this was last asked, modulo two to the width of a word.
    pub(super) fn growth(&mut self) -> usize {
        // A set has a power of two of buckets, at most 7/8 full, with a control byte each.
        let set = |pages: &Pages| match pages.capacity() {
            0 => 0,
            capacity => (capacity * 8 / 7).next_power_of_two() * (size_of::<u32>() + 1),
        };
        let bytes: usize = self.pages.iter().map(set).sum();
        bytes.wrapping_sub(std::mem::replace(&mut self.bytes, bytes))
    }
}

/// Gives back memory when most of it is spare.
pub(super) fn fit(pages: &mut Pages) {
    if pages.capacity() > 64 && pages.len() * 4 < pages.capacity() {
        pages.shrink_to(pages.len() * 2);
    }
}

/// Hashes numbers of pages, which nobody outside chooses, by one multiplication.
#[derive(Default)]
pub(super) struct Spread(u64);

impl Hasher for Spread {
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
}
