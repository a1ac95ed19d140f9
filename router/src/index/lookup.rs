//! A lookup: follows a prompt from page to page. [`Partition`] counts the holders of each page.

use super::Index;
use super::overlap::Overlap;
use super::page::{PAGE_BLOCKS, PageRead};
use super::partition::{MatchedRange, Partition};
use super::position::Position;
use super::snapshot::IndexSnapshot;
use super::sync::prefetch;
use super::worker_overlap::WorkerOverlaps;
use kvbm::SequenceHash;

/// How many pages ahead heads are prefetched, assuming that pages of a chain are contiguous.
const PREFETCH_PAGES: u32 = 8;
/// The same after a jump: the prompt may diverge soon.
const FIRST_HEADS_AHEAD: u32 = 2;
/// Blocks from one full page to the next.
const PAGE_STRIDE: usize = PAGE_BLOCKS as usize;
/// A block may move between finding and reading it; then it is looked up again.
const FIND_ATTEMPTS: usize = 3;

/// A lookup in progress.
pub(super) struct Lookup<'a> {
    snapshot: &'a IndexSnapshot,
    hashes: &'a [SequenceHash],
    overlaps: &'a mut WorkerOverlaps,
    partition: &'a mut Partition,
    /// Number of blocks done.
    at: usize,
    /// The page after the last one whose head was prefetched.
    prefetched: u32,
    /// Number of heads to prefetch.
    heads_ahead: u32,
}

impl Index {
    /// How much of a prompt each worker can reuse.
    pub fn overlap(&self, hashes: &[SequenceHash]) -> Overlap {
        let mut overlap = Overlap::default();
        self.overlap_into(hashes, &mut overlap);
        overlap
    }

    /// Like [`overlap`](Self::overlap), but reuses the memory of an earlier result.
    pub fn overlap_into(&self, hashes: &[SequenceHash], overlap: &mut Overlap) {
        Lookup::new(&self.snapshot.load(), hashes, overlap).run();
    }
}

impl<'a> Lookup<'a> {
    pub(super) fn new(snapshot: &'a IndexSnapshot, hashes: &'a [SequenceHash], out: &'a mut Overlap) -> Self {
        let Overlap { overlaps, partition } = out;
        overlaps.reset(partition.begin(snapshot.holders.workers.len()));
        Self { snapshot, hashes, overlaps, partition, at: 0, prefetched: 0, heads_ahead: 0 }
    }

    /// Follows the prompt until the next block has no holder.
    pub(super) fn run(mut self) {
        self.follow_chain();
        self.partition.end(self.overlaps);
    }

    fn follow_chain(&mut self) {
        self.hashes.iter().skip(PAGE_STRIDE - 1).step_by(PAGE_STRIDE).take(PREFETCH_PAGES as usize).for_each(prefetch);
        let mut successor = None;
        while self.at < self.hashes.len() {
            let Some((position, read)) = successor.take().or_else(|| self.find_page()) else { return };
            self.at += read.len as usize;
            let (times, next) = self.skip_equal_pages(position, &read);
            // The successor is read before this page is counted, so that its cache lines arrive meanwhile.
            successor = next.and_then(|position| self.read(position));
            let matched = MatchedRange { at: position.offset(), len: read.len, times };
            if !self.partition.count(&read, matched, &self.snapshot.holders.readers, self.overlaps) {
                return;
            }
        }
    }

    /// Number of pages, from this one on, that are full, match the prompt and have the same holders, and the successor
    /// of the last of them. Comparing a full page takes one read of its head.
    fn skip_equal_pages(&mut self, position: Position, read: &PageRead) -> (u32, Option<Position>) {
        let (mut times, mut next) = (1, read.next);
        if position.offset() != 0 || read.len != PAGE_BLOCKS {
            return (times, next);
        }
        while let Some(position) = next.filter(|position| position.offset() == 0)
            && let Some(end) = self.hashes.get(self.at + PAGE_STRIDE - 1)
            && let Some(page) = self.snapshot.page(position.page())
            && let Some(next_successor) = page.equal_successor(read, end.short())
        {
            self.prefetch_ahead(position);
            page.mark_hot();
            self.at += PAGE_STRIDE;
            (times, next) =
                (times + 1, Some(next_successor).filter(|next_successor| *next_successor != Position::NONE));
        }
        (times, next)
    }

    /// Prefetches what is probably read after a page that has the next block of the prompt: the heads of its
    /// neighbours. After a jump to a page that is no neighbour it prefetches few, then twice as many per page.
    fn prefetch_ahead(&mut self, position: Position) {
        let next = position.page() + 1;
        let pages = ((self.hashes.len() - self.at).div_ceil(PAGE_STRIDE) as u32).saturating_sub(1);
        if (next..=next + PREFETCH_PAGES).contains(&self.prefetched) {
            self.heads_ahead = (2 * self.heads_ahead).min(PREFETCH_PAGES);
        } else {
            (self.prefetched, self.heads_ahead) = (next, FIRST_HEADS_AHEAD);
        }
        let end = next + self.heads_ahead.min(pages);
        (self.prefetched..end).for_each(|page| self.snapshot.prefetch_head(page));
        self.prefetched = self.prefetched.max(end);
        if let Some(hash) = self.hashes.get(self.at + (PREFETCH_PAGES as usize + 1) * PAGE_STRIDE - 1) {
            prefetch(hash);
        }
    }

    /// Reads the page at a predicted position; `None` if it does not match the prompt.
    fn read(&mut self, position: Position) -> Option<(Position, PageRead)> {
        let hashes = self.hashes.get(self.at..).filter(|hashes| !hashes.is_empty())?;
        let page = self.snapshot.page(position.page())?;
        self.prefetch_ahead(position);
        let read = page.read(position.offset(), hashes).filter(|read| read.len > 0)?;
        if let Some(holder_set) = read.holder_set.as_deref().and_then(Option::as_ref) {
            holder_set.prefetch();
        }
        page.mark_hot();
        Some((position, read))
    }

    /// Looks up the page of the next block in the tables, and reads it.
    fn find_page(&mut self) -> Option<(Position, PageRead)> {
        for _ in 0..FIND_ATTEMPTS {
            let position = self.snapshot.find(self.hashes[self.at].short())?;
            let Some(page) = self.snapshot.page(position.page()) else { continue };
            self.prefetch_ahead(position);
            let read = page.read(position.offset(), &self.hashes[self.at..])?;
            if read.len > 0 {
                page.mark_hot();
                return Some((position, read));
            }
        }
        None
    }
}
