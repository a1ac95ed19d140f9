//! Memory in use, and eviction of pages to stay within the limit.
//!
//! Clock eviction (second chance): a hand visits all pages in turn; it skips a hot page once and marks it cold, and
//! evicts a cold one. Evicted blocks count as not held until their holder announces them again or sends a snapshot, so
//! lookups may underestimate but are never wrong.

use super::Index;
use super::holder_state::{HolderPages, HolderState, shrink};
use super::holders::Holders;
use super::page::{ClockState, Page};
use super::removals::Removals;
use super::sharded_table::ENTRY_BYTES;
use super::snapshot::PAGE_BYTES;
use super::update::digest_sum;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Pages that are evicted between two updates of the tables.
const BATCH: usize = 8;

/// Bytes of shared structures. They have a cache line of their own because lookups read the fields beside them.
/// Counters that change with every event are kept per holder and per shard instead.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Bytes {
    pub(super) holder_sets: AtomicUsize,
    pub(super) holder_pages: AtomicUsize,
}

impl Bytes {
    /// Bytes in use except those of pages and tables.
    fn other(&self) -> usize {
        self.holder_sets.load(Ordering::Relaxed) + self.holder_pages.load(Ordering::Relaxed)
    }
}

impl Index {
    /// Changes the memory limit and evicts pages if the index exceeds it.
    pub fn set_memory_limit(&self, bytes: usize) {
        self.memory_limit.store(bytes, Ordering::Relaxed);
        self.evict_to_limit();
    }

    /// Number of pages evicted so far to stay within the memory limit.
    pub fn evicted_pages(&self) -> u64 {
        self.evicted_pages.load(Ordering::Relaxed)
    }

    /// Allocated bytes, including unused space in tables and chunks.
    pub fn bytes(&self) -> usize {
        self.arena.bytes() + self.sharded_table.bytes() + self.bytes.other()
    }

    /// Evicts pages until the index is within its limit or is empty. Returns the number of evicted pages.
    pub(super) fn evict_to_limit(&self) -> usize {
        if self.is_within_limit() {
            return 0;
        }
        // A concurrent call evicts on behalf of this one.
        let Some(mut hand) = self.clock_hand.try_lock() else { return 0 };
        let (mut evicted, mut removed) = (0, Removals::default());
        let pages = self.snapshot.load().directory.pages();
        // What remains may be tables and sets of pages only, which eviction does not free.
        let enough = |removed: &Removals| self.is_within_limit() || self.sharded_table.entries() <= removed.blocks();
        // After one full turn every page was cold once.
        for _ in 0..2 * pages {
            if removed.pages().len() == BATCH || enough(&removed) {
                self.reclaim(&removed);
                removed.clear();
                if enough(&removed) {
                    break;
                }
            }
            *hand = (*hand + 1) % pages.max(1) as u32;
            evicted += usize::from(self.evict_page(*hand, &mut removed));
        }
        self.reclaim(&removed);
        self.evicted_pages.fetch_add(evicted as u64, Ordering::Relaxed);
        evicted
    }

    /// Evicts a page unless it is hot or pinned.
    fn evict_page(&self, number: u32, removed: &mut Removals) -> bool {
        let snapshot = self.snapshot.load();
        let Some(page) = snapshot.page(number) else { return false };
        match page.clock() {
            ClockState::Pinned => return false,
            ClockState::Hot => {
                page.mark_cold();
                return false;
            }
            ClockState::Cold => {}
        }
        let _guard = page.lock();
        if page.live() == 0 || page.clock() == ClockState::Pinned {
            return false;
        }
        self.remove_holders(page);
        removed.push(number, page.set_holders(Holders::Empty));
        true
    }

    /// Removes the blocks of a page from the counters of its holders. Their page sets still contain the page until
    /// [`account_pages`](Self::account_pages).
    fn remove_holders(&self, page: Page<'_>) {
        let (snapshot, holders) = (self.snapshot.load(), page.holders());
        self.bytes.holder_sets.fetch_sub(holders.bytes(), Ordering::Relaxed);
        for (holder_level, mask) in holders.to_vec() {
            if let Some(state) = snapshot.holders.by_id(holder_level.holder_id()) {
                state.digests.evict(holder_level.level(), u64::from(mask.count_ones()), digest_sum(page, mask));
                state.note_evicted_page();
            }
        }
    }

    fn is_within_limit(&self) -> bool {
        let limit = self.memory_limit.load(Ordering::Relaxed);
        limit == usize::MAX || self.used_bytes() <= limit
    }

    /// Bytes in use. Tables count as allocated, and at least with what their entries need.
    fn used_bytes(&self) -> usize {
        let entries = self.sharded_table.entries() * ENTRY_BYTES;
        self.arena.used() * PAGE_BYTES + entries.max(self.sharded_table.bytes()) + self.bytes.other()
    }

    /// Updates the byte counter after a change of a holder's page sets, and prunes evicted pages if there are many.
    pub(super) fn account_pages(&self, state: &HolderState, pages: &mut HolderPages) {
        if state.should_prune(pages) {
            let snapshot = self.snapshot.load();
            for holder_level in state.id.levels() {
                let holds = |number: &u32| {
                    snapshot.page(*number).is_some_and(|page| {
                        let _guard = page.lock();
                        page.holders().mask(holder_level) != 0
                    })
                };
                let level_pages = &mut pages.by_level[holder_level.level()];
                level_pages.retain(holds);
                shrink(level_pages);
            }
        }
        let growth = pages.growth();
        if growth != 0 {
            self.bytes.holder_pages.fetch_add(growth, Ordering::Relaxed);
        }
    }
}
