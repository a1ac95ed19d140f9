//! Application of events to pages and tables. The caller holds the lock on the holder's pages.
//!
//! **Invariant.** If a table has an entry for a hash, the page has the hash at the entry's position. A hash is
//! therefore written to its page before the entry is inserted, and the entry is removed before the position is used
//! again. In between, readers treat the block as absent.

use super::Index;
use super::bits::{each, ones};
use super::holder::HolderLevel;
use super::holder_state::{HolderPages, HolderState, shrink};
use super::holders::Holders;
use super::page::{ClockState, PAGE_BLOCKS, Page};
use super::page_run::PageRun;
use super::position::Position;
use super::removals::Removals;
use super::run::Run;
use super::sharded_table::{BATCH, WriteBatch};
use kvbm::SetDigest;
use std::sync::atomic::Ordering;

/// Number of hashes that are prefetched at once.
const PREFETCH: usize = 128;
/// A fully used page with at most this many live blocks is repacked.
const SPARSE: u32 = PAGE_BLOCKS / 4;

impl Index {
    /// Adds these blocks to a holder at a level.
    pub(super) fn store_blocks(
        &self,
        state: &HolderState,
        pages: &mut HolderPages,
        holder_level: HolderLevel,
        run: Run<'_>,
    ) {
        let mut rest = run;
        while !rest.hashes.is_empty() {
            let (mut part, later) = rest.split(rest.hashes.len().min(BATCH));
            rest = later;
            if !part.chained {
                let snapshot = self.snapshot.load();
                part.hashes.iter().for_each(|hash| snapshot.prefetch(*hash));
            }
            let mut refused = Vec::new();
            while !part.hashes.is_empty() {
                let known = self.add_to_known(state, pages, holder_level, part.hashes);
                part = part.split(known).1;
                let (new, later) = part.split(self.leading_new_blocks(part));
                refused.extend(self.insert(state, pages, holder_level, new));
                part = later;
            }
            if !refused.is_empty() {
                self.store_blocks(state, pages, holder_level, Run::unchained(&refused));
            }
        }
    }

    /// Number of new blocks at the start of the run. If a block is new, the blocks that follow it in the chain almost
    /// always are too; the tables refuse those that are not.
    fn leading_new_blocks(&self, run: Run<'_>) -> usize {
        if run.chained {
            return run.hashes.len();
        }
        let snapshot = self.snapshot.load();
        run.hashes.iter().take_while(|hash| snapshot.find(**hash).is_none()).count()
    }

    /// Removes these blocks from a holder at a level.
    pub(super) fn remove_blocks(
        &self,
        state: &HolderState,
        pages: &mut HolderPages,
        holder_level: HolderLevel,
        hashes: &[u64],
    ) {
        let mut snapshot = self.snapshot.load();
        // `predicted`: predicted position of the next hash, right if the pages of the chain are contiguous.
        let (mut at, mut prefetched, mut predicted) = (0, 0, pages.next_removal.take());
        while at < hashes.len() {
            if pages.removals.must_be_reclaimed_before(PAGE_BLOCKS as usize, BATCH) {
                self.reclaim_removals(state, pages);
                // Blocks may have moved to new pages.
                snapshot = self.snapshot.load();
            }
            let guess = predicted.take();
            if guess.is_none() && at >= prefetched {
                prefetched = hashes.len().min(at + PREFETCH);
                hashes[at..prefetched].iter().for_each(|hash| snapshot.prefetch(*hash));
                snapshot.prefetch_pages(&hashes[at..prefetched]);
            }
            let Some((position, page)) = snapshot.find_with_guess(guess, hashes[at], state.id) else {
                at += 1;
                continue;
            };
            let _guard = page.lock();
            let Some(page_run) = PageRun::of(page, position, &hashes[at..]) else {
                // The block was removed meanwhile, or the guess was wrong; then the table is asked.
                at += usize::from(guess.is_none());
                continue;
            };
            if let Some(next) = page_run.predicted.map(Position::page).filter(|next| *next != position.page())
                && let Some(next) = snapshot.page(next)
            {
                next.prefetch();
            }
            // While another holder inserts into this page, its table entries may still be refused, so only this one
            // hash counts.
            let whole = page.clock() != ClockState::Pinned || page.is_owned_by(state.id);
            let page_run = if whole { page_run } else { PageRun::single(position.offset()) };
            let dead = self.take(state, pages, holder_level, (position.page(), page), page_run.bits);
            if dead != 0 {
                pages.removals.push(position.page(), dead);
            }
            (at, predicted) = (at + page_run.len, page_run.predicted);
        }
        pages.next_removal = predicted;
        if pages.removals.should_be_reclaimed() {
            self.reclaim_removals(state, pages);
        }
        shrink(&mut pages.by_level[holder_level.level()]);
        if state.digests.at(holder_level.level()).blocks == 0 {
            self.release_if_empty(state, pages);
        }
    }

    /// Removes all blocks of a holder at a level.
    pub(super) fn clear_level(&self, state: &HolderState, pages: &mut HolderPages, holder_level: HolderLevel) {
        let numbers: Vec<u32> = std::mem::take(&mut pages.by_level[holder_level.level()]).into_iter().collect();
        let snapshot = self.snapshot.load();
        let mut removals = std::mem::take(&mut pages.removals);
        for number in numbers {
            if removals.must_be_reclaimed_before(PAGE_BLOCKS as usize, BATCH) {
                self.reclaim(&removals);
                removals.clear();
            }
            if let Some(page) = snapshot.page(number) {
                let _guard = page.lock();
                let dead = self.take(state, pages, holder_level, (number, page), u64::MAX);
                if dead != 0 {
                    removals.push(number, dead);
                }
            }
        }
        self.reclaim(&removals);
        self.release_if_empty(state, pages);
    }

    /// Hashes of all blocks of a holder at a level.
    pub(super) fn hashes(&self, pages: &HolderPages, holder_level: HolderLevel) -> Vec<u64> {
        let snapshot = self.snapshot.load();
        let mut hashes = Vec::new();
        for number in &pages.by_level[holder_level.level()] {
            let Some(page) = snapshot.page(*number) else { continue };
            let _guard = page.lock();
            let mask = page.holders().mask(holder_level);
            hashes.extend(each(mask).map(|at| page.hash(at)));
        }
        hashes
    }

    /// Adds a holder to known blocks, up to the first unknown one. Returns their number.
    fn add_to_known(
        &self,
        state: &HolderState,
        pages: &mut HolderPages,
        holder_level: HolderLevel,
        hashes: &[u64],
    ) -> usize {
        let (mut known, mut next) = (0, None);
        while known < hashes.len() {
            let snapshot = self.snapshot.load();
            let Some((position, page)) = snapshot.find_with_guess(next, hashes[known], state.id) else { break };
            let number = position.page();
            let _guard = page.lock();
            // While another holder inserts into this page, a hash counts only if the table has an entry for it.
            let entered = page.clock() != ClockState::Pinned || page.is_owned_by(state.id);
            let is = |at: u32, hash: u64| {
                page.has(at, hash) && (entered || self.snapshot.load().find(hash) == Some(Position::new(number, at)))
            };
            let here =
                (position.offset()..PAGE_BLOCKS).zip(&hashes[known..]).take_while(|(at, hash)| is(*at, **hash)).count();
            let mut holders = page.holders();
            let before = holders.bytes();
            let added = holders.add(holder_level, ones(here as u32) << position.offset(), &mut pages.last_added);
            if added != 0 {
                self.account_holder_sets(before, holders.bytes());
                page.set_holders(holders);
                note_added(state, pages, holder_level, number, page, added);
            }
            page.mark_hot();
            known += here;
            next = (position.offset() + here as u32).checked_sub(1).and_then(|last| page.successor(last));
        }
        known
    }

    /// Hashes at positions that are in the tables.
    pub(super) fn hashes_at(&self, positions: &[u32]) -> Vec<u64> {
        let snapshot = self.snapshot.load();
        let hash = |position: Position| snapshot.page(position.page()).map_or(0, |page| page.hash(position.offset()));
        positions.iter().map(|position| hash(Position(*position))).collect()
    }

    /// Removes blocks of one page from a holder. The caller holds the page's lock. Returns the positions that have no
    /// holder now; their table entries are to be removed.
    pub(super) fn take(
        &self,
        state: &HolderState,
        pages: &mut HolderPages,
        holder_level: HolderLevel,
        (number, page): (u32, Page<'_>),
        bits: u64,
    ) -> u64 {
        let mut holders = page.holders();
        let before = holders.bytes();
        let taken = holders.take(holder_level, bits, &mut pages.last_removed);
        if taken == 0 {
            return 0;
        }
        let mine = holders.mask(holder_level);
        self.account_holder_sets(before, holders.bytes());
        let dead = page.set_holders(holders);
        state.digests.remove(holder_level.level(), u64::from(taken.count_ones()), digest_sum(page, taken));
        if mine == 0 {
            pages.by_level[holder_level.level()].remove(&number);
        }
        dead
    }

    /// Removes the table entries of a holder's removed blocks, and repacks sparse pages.
    pub(super) fn reclaim_removals(&self, state: &HolderState, pages: &mut HolderPages) {
        let mut removals = std::mem::take(&mut pages.removals);
        self.reclaim(&removals);
        if let Some(((last, _), others)) = removals.pages().split_last() {
            // More blocks of the last page will probably be removed, so it is repacked later.
            let last = *last;
            for (number, _) in others {
                self.repack(state, pages, *number);
            }
            removals.clear();
            removals.push(last, 0);
        }
        pages.removals = removals;
    }

    /// Removes the entries of dead blocks from the tables, and then frees empty pages.
    pub(super) fn reclaim(&self, removals: &Removals) {
        if removals.is_empty() {
            return;
        }
        let snapshot = self.snapshot.load();
        let pages = || {
            let page = |(number, dead): &(u32, u64)| Some((*number, *dead, snapshot.page(*number)?));
            removals.pages().iter().filter_map(page)
        };
        let mut entries = WriteBatch::new();
        for (number, dead, page) in pages() {
            each(dead).for_each(|at| entries.push(page.hash(at), Position::new(number, at)));
        }
        self.sharded_table.remove(&entries, |positions| self.hashes_at(positions));
        let is_free = |(number, dead, page): (u32, u64, Page<'_>)| {
            let _guard = page.lock();
            page.set_unindexed(dead);
            page.try_release().then_some(number)
        };
        let freed: Vec<u32> = pages().filter_map(is_free).collect();
        if !freed.is_empty() {
            self.arena.release(&freed, |change| self.set_chunk(change));
        }
    }

    /// Frees a page unless it is in use. The caller holds its lock.
    pub(super) fn reclaim_page(&self, number: u32, page: Page<'_>) {
        if page.try_release() {
            self.arena.release(&[number], |change| self.set_chunk(change));
        }
    }

    /// Moves the last few blocks of a sparse page to the page that the holder appends to. All of them must belong to
    /// one holder at one level.
    fn repack(&self, state: &HolderState, pages: &mut HolderPages, from: u32) {
        let is_sparse = |page: &Page<'_>| {
            let live = page.live();
            let few = live != 0 && live.count_ones() <= SPARSE && page.used() == PAGE_BLOCKS;
            few && page.clock() != ClockState::Pinned
        };
        // The level at which this holder is the only holder.
        let only_level = |page: Page<'_>| match page.holders() {
            Holders::One(holder_level, _) if holder_level.holder_id() == state.id => Some(holder_level),
            _ => None,
        };
        if !self.snapshot.load().page(from).is_some_and(|page| is_sparse(&page) && only_level(page).is_some()) {
            return;
        }
        if pages.reserved.start == from {
            pages.reserved.next();
        }
        let Some(to) = self.reserved_page(state, pages, 1) else { return };
        let snapshot = self.snapshot.load();
        let (Some(old), Some(new)) = (snapshot.page(from), snapshot.page(to)) else {
            pages.reserved.next();
            return;
        };
        let _guard = old.lock();
        let Some(_second_guard) = new.try_lock() else { return };
        let Some(holder_level) = only_level(old).filter(|_| is_sparse(&old)) else { return };
        let live = old.live();
        if !new.is_owned_by(state.id) || PAGE_BLOCKS - new.used() < live.count_ones() {
            // The next call uses another reserved page.
            pages.reserved.next();
            return;
        }
        let positions: Vec<u32> = each(live).collect();
        let hashes: Vec<u64> = positions.iter().map(|at| old.hash(*at)).collect();
        let before = new.holders().bytes();
        let links = (0..).zip(&positions).fold(0, |links, (to, at)| links | u64::from(old.is_linked(*at)) << to);
        let first = new.append(holder_level, Run::unchained(&hashes), links, &mut pages.last_added);
        self.account_holder_sets(before, new.holders().bytes());
        for (to_at, at) in (first..).zip(&positions) {
            self.sharded_table.relocate(old.hash(*at), Position::new(from, *at), Position::new(to, to_at));
        }
        // The entries have moved.
        let moved = old.set_holders(Holders::Empty);
        old.set_unindexed(moved);
        new.set_clock(old.clock());
        pages.by_level[holder_level.level()].remove(&from);
        pages.by_level[holder_level.level()].insert(to);
        self.reclaim_page(from, old);
    }

    pub(super) fn account_holder_sets(&self, before: usize, after: usize) {
        if before != after {
            self.bytes.holder_sets.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
        }
    }
}

/// Adds blocks of a page to the counters and page set of a holder.
pub(super) fn note_added(
    state: &HolderState,
    pages: &mut HolderPages,
    holder_level: HolderLevel,
    number: u32,
    page: Page<'_>,
    added: u64,
) {
    pages.by_level[holder_level.level()].insert(number);
    state.digests.add(holder_level.level(), u64::from(added.count_ones()), digest_sum(page, added));
}

/// Sum of the digest terms of the blocks at some positions.
pub(super) fn digest_sum(page: Page<'_>, positions: u64) -> u64 {
    each(positions).fold(0, |sum: u64, at| sum.wrapping_add(SetDigest::term(page.hash(at))))
}
