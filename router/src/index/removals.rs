//! Removed blocks that still have table entries.
//!
//! A removed block is dead at once: its page says so, and no lookup returns it. Its table entry is removed later,
//! together with those of other blocks. So each shard is locked once for many entries, and their cache lines are
//! prefetched, also when an engine announces every evicted block by an event of its own. Until then the page notes that
//! the entry exists, and the page is not freed.

/// Pages with dead blocks that have table entries.
#[derive(Default)]
pub(super) struct Removals {
    /// Page number and dead positions.
    pages: Vec<(u32, u64)>,
    blocks: usize,
}

/// Removals that are kept from one event to the next: enough to overlap the cache misses of their entries, and less
/// than one percent of the blocks of a worker with 16,384.
const MAX_KEPT: usize = 64;
/// Maximum number of pages. They cannot be freed meanwhile.
const MAX_PAGES: usize = 32;

impl Removals {
    pub(super) fn push(&mut self, page: u32, dead: u64) {
        self.blocks += dead.count_ones() as usize;
        match self.pages.last_mut() {
            Some((last, blocks)) if *last == page => *blocks |= dead,
            _ => self.pages.push((page, dead)),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Pages, in the order of their first removal.
    pub(super) fn pages(&self) -> &[(u32, u64)] {
        &self.pages
    }

    /// Whether the entries should be removed before the next event.
    pub(super) fn should_be_reclaimed(&self) -> bool {
        self.blocks >= MAX_KEPT || self.pages.len() >= MAX_PAGES
    }

    /// Whether the entries must be removed before `blocks` more are pushed, to have at most `limit`.
    pub(super) fn must_be_reclaimed_before(&self, blocks: usize, limit: usize) -> bool {
        self.blocks + blocks > limit || self.pages.len() >= MAX_PAGES
    }

    pub(super) fn clear(&mut self) {
        self.pages.clear();
        self.blocks = 0;
    }
}
