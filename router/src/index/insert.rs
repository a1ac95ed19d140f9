//! Placement of new hashes, and the pages that a holder reserves for its next blocks.
//!
//! New hashes go to the page where their chain ends, if it has space after the last block. Otherwise long runs start a
//! new page, so that their successors find space beside them, and short ones are appended to the page that was used
//! last.

use super::Index;
use super::bits::ones;
use super::holder::{HolderId, HolderLevel};
use super::holder_state::{HolderPages, HolderState};
use super::page::{ClockState, PAGE_BLOCKS, Page};
use super::position::Position;
use super::run::Run;
use super::sharded_table::{Entry, WriteBatch};
use super::snapshot::IndexSnapshot;
use super::update::note_added;

/// One page is reserved per this many pages of the holder.
const PAGES_PER_RESERVED_PAGE: usize = 16;
/// Runs of at least this length start a new page.
const NEW_PAGE_MIN: usize = 16;

impl Index {
    /// Appends new hashes to pages and enters them in the tables. Returns the hashes that a concurrent writer entered
    /// first. Hashes for which a table has no space are left out, as evicted ones are.
    pub(super) fn insert(
        &self,
        state: &HolderState,
        pages: &mut HolderPages,
        holder_level: HolderLevel,
        new: Run<'_>,
    ) -> Vec<u64> {
        if new.hashes.is_empty() {
            return Vec::new();
        }
        let mut entries = WriteBatch::new();
        let pinned = self.append_to_pages(state, pages, holder_level, new, &mut entries);
        let same = |hash, position: Position| {
            self.snapshot.load().page(position.page()).is_some_and(|page| page.has(position.offset(), hash))
        };
        let refused = self.sharded_table.insert(&entries, same, |positions| self.hashes_at(positions));
        let snapshot = self.snapshot.load();
        for Entry { position, .. } in refused.known.iter().chain(&refused.full) {
            let Some(page) = snapshot.page(position.page()) else { continue };
            let _guard = page.lock();
            // The entry was refused, so lookups never reached this position and no other holder is a holder of it.
            let dead = self.take(state, pages, holder_level, (position.page(), page), 1 << position.offset());
            page.set_unindexed(dead);
        }
        if !refused.full.is_empty() {
            // The holder has these blocks, and the index does not.
            state.digests.evict(holder_level.level(), 0, 0);
        }
        for number in pinned {
            let Some(page) = snapshot.page(number) else { continue };
            let _guard = page.lock();
            // The page starts cold: lookups mark it hot, and pages without lookups are evicted first.
            page.set_clock(ClockState::Cold);
            self.reclaim_page(number, page);
        }
        refused.known.into_iter().map(|entry| entry.hash).collect()
    }

    /// Appends new hashes to pages, and adds an entry for each of them. Returns the numbers of these pages, which stay
    /// pinned.
    fn append_to_pages(
        &self,
        state: &HolderState,
        pages: &mut HolderPages,
        holder_level: HolderLevel,
        new: Run<'_>,
        entries: &mut WriteBatch,
    ) -> Vec<u32> {
        let mut pinned = Vec::new();
        let mut rest = new;
        // The page where the chain ends, if it has space.
        let mut tail = new.parent.and_then(|parent| self.snapshot.load().find(parent)).map(Position::page);
        while !rest.hashes.is_empty() {
            let beside = tail.take();
            let Some(number) = beside.or_else(|| self.reserved_page(state, pages, rest.hashes.len())) else { break };
            let snapshot = self.snapshot.load();
            // The chunk of the page may have been freed.
            let page = snapshot.page(number);
            let _guard = page.as_ref().map(Page::lock);
            let is_suitable = |page: &Page<'_>| {
                let continues = page.used().checked_sub(1).is_none_or(|last| rest.parent == Some(page.hash(last)));
                let may_append = continues || beside.is_none() && rest.hashes.len() < NEW_PAGE_MIN;
                page.is_owned_by(state.id) && page.used() < PAGE_BLOCKS && may_append
            };
            let Some(page) = page.filter(is_suitable) else {
                if beside.is_none() {
                    pages.reserved.next();
                }
                continue;
            };
            page.set_clock(ClockState::Pinned);
            let (now, later) = rest.split(rest.hashes.len().min((PAGE_BLOCKS - page.used()) as usize));
            let before = page.holders().bytes();
            let links = if now.chained { !1 } else { 0 };
            let first = page.append(holder_level, now, links, &mut pages.last_added);
            self.account_holder_sets(before, page.holders().bytes());
            if let Some(parent) = now.parent.filter(|_| !page.is_linked(first)) {
                link_successor(&snapshot, entries.last(), parent, Position::new(number, first));
            }
            note_added(state, pages, holder_level, number, page, ones(now.hashes.len() as u32) << first);
            (first..).zip(now.hashes).for_each(|(at, hash)| entries.push(*hash, Position::new(number, at)));
            pinned.push(number);
            rest = later;
        }
        pinned
    }

    /// Number of a page that this holder owns, which probably has space. Allocates enough pages for this many hashes if
    /// the holder has none reserved.
    pub(super) fn reserved_page(&self, state: &HolderState, pages: &mut HolderPages, hashes: usize) -> Option<u32> {
        if pages.reserved.is_empty() {
            // A small share of the holder's pages is reserved in advance, so that a long chain is contiguous.
            let wanted = hashes
                .div_ceil(PAGE_BLOCKS as usize)
                .max(state.digests.blocks() / PAGE_BLOCKS as usize / PAGES_PER_RESERVED_PAGE);
            let numbers = self.arena.allocate(wanted, |change| self.set_chunk(change))?;
            let snapshot = self.snapshot.load();
            for number in numbers.clone() {
                let page = snapshot.page(number)?;
                let _guard = page.lock();
                page.set_clock(ClockState::Pinned);
                page.assign_to(state.id);
            }
            pages.reserved = numbers;
        }
        Some(pages.reserved.start)
    }

    /// Frees what is reserved for a holder without blocks.
    pub(super) fn release_if_empty(&self, state: &HolderState, pages: &mut HolderPages) {
        if state.digests.blocks() == 0 {
            self.reclaim(&std::mem::take(&mut pages.removals));
            self.release_reserved_pages(state.id, pages);
        }
    }

    /// Frees the reserved pages of a holder that are still empty.
    pub(super) fn release_reserved_pages(&self, holder_id: HolderId, pages: &mut HolderPages) {
        let snapshot = self.snapshot.load();
        for number in std::mem::take(&mut pages.reserved) {
            let Some(page) = snapshot.page(number) else { continue };
            let _guard = page.lock();
            // Another holder may own the page by now.
            if page.live() == 0 && page.clock() == ClockState::Pinned && page.is_owned_by(holder_id) {
                page.set_clock(ClockState::Cold);
                self.reclaim_page(number, page);
            }
        }
    }
}

/// Notes in the page of a block where its successor is. The block is either the last entry of this batch or an older
/// one.
fn link_successor(snapshot: &IndexSnapshot, entered: Option<&Entry>, block: u64, next: Position) {
    let position = entered.map(|entry| entry.position).or_else(|| snapshot.find(block));
    if let Some((position, page)) = position.and_then(|position| Some((position, snapshot.page(position.page())?))) {
        page.set_successor(position.offset(), next);
    }
}
