//! Allocation of pages.
//!
//! Pages have numbers. Low numbers are allocated first, so that chunks at the end become empty and are returned to the
//! system. An allocation of several pages prefers neighbours, since a lookup reads them one after the other. Page 0 is
//! never allocated: position 0 means "none".

use super::snapshot::{CHUNK, Chunk, PAGE_BYTES};
use parking_lot::{Mutex, MutexGuard};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The page allocator.
pub(super) struct Arena {
    free_list: Mutex<FreeList>,
    used: AtomicUsize,
    chunks: AtomicUsize,
}

#[derive(Default)]
struct FreeList {
    /// Free pages by chunk; `None` for a chunk that is not allocated.
    chunks: Vec<Option<FreePages>>,
    /// No allocated chunk before this one has a free page.
    first_with_free_page: usize,
    /// Number of allocated chunks without a page in use.
    unused_chunks: usize,
}

/// Free pages of a chunk, a bit for each.
#[derive(Clone, Copy)]
struct FreePages {
    bits: [u64; CHUNK / 64],
    used: usize,
}

/// A chunk was allocated or freed.
pub(super) enum ChunkChange {
    Added(usize, Chunk),
    Removed(usize),
}

/// Largest number of pages per allocation.
const MAX_EXTENT: usize = 32;
/// Number of chunks with free pages that are searched for a long enough extent.
const CHUNKS_SEARCHED: usize = 16;
/// A position has 32 bits: 64 million pages, four billion blocks.
const MAX_CHUNKS: usize = (1 << 26) / CHUNK;

impl Arena {
    pub(super) fn new() -> Self {
        Self { free_list: Mutex::default(), used: AtomicUsize::new(0), chunks: AtomicUsize::new(0) }
    }

    /// Allocates at most `wanted` neighbouring pages; `None` if all page numbers are in use. If that needs a new chunk,
    /// `on_change` is called before the pages are returned.
    pub(super) fn allocate(&self, wanted: usize, on_change: impl FnOnce(ChunkChange)) -> Option<Range<u32>> {
        let mut free_list = self.lock();
        let (chunk, at, len) = free_list.find_extent(wanted.min(MAX_EXTENT));
        if chunk == MAX_CHUNKS {
            return None;
        }
        if chunk == free_list.chunks.len() {
            free_list.chunks.push(None);
        }
        let fresh = free_list.chunks[chunk].is_none();
        if fresh {
            on_change(ChunkChange::Added(chunk, Chunk::new()));
            self.chunks.fetch_add(1, Ordering::Relaxed);
        }
        let free_pages = free_list.chunks[chunk].get_or_insert_with(|| FreePages::all_free(chunk));
        let first_use = free_pages.is_unused(chunk);
        free_pages.take(at, len);
        if first_use && !fresh {
            free_list.unused_chunks -= 1;
        }
        self.used.fetch_add(len, Ordering::Relaxed);
        let first = (chunk * CHUNK + at) as u32;
        Some(first..first + len as u32)
    }

    /// Frees pages. One empty chunk is kept for later allocations.
    pub(super) fn release(&self, pages: &[u32], mut on_change: impl FnMut(ChunkChange)) {
        let mut free_list = self.lock();
        for page in pages {
            let (chunk, at) = (*page as usize / CHUNK, *page as usize % CHUNK);
            let Some(free_pages) = &mut free_list.chunks[chunk] else { continue };
            free_pages.release(at);
            let unused = free_pages.is_unused(chunk);
            free_list.first_with_free_page = free_list.first_with_free_page.min(chunk);
            if unused && free_list.unused_chunks > 0 {
                free_list.chunks[chunk] = None;
                self.chunks.fetch_sub(1, Ordering::Relaxed);
                on_change(ChunkChange::Removed(chunk));
            } else {
                free_list.unused_chunks += usize::from(unused);
            }
        }
        self.used.fetch_sub(pages.len(), Ordering::Relaxed);
    }

    /// Number of pages in use.
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes of all chunks.
    pub(super) fn bytes(&self) -> usize {
        self.chunks.load(Ordering::Relaxed) * CHUNK * PAGE_BYTES
    }

    fn lock(&self) -> MutexGuard<'_, FreeList> {
        self.free_list.lock()
    }
}

impl FreeList {
    /// Chunk, first page and length of the extent to allocate next. The chunk may not be allocated yet.
    fn find_extent(&mut self, wanted: usize) -> (usize, usize, usize) {
        let has_free_page = |chunk: &usize| self.chunks[*chunk].is_some_and(|free_pages| free_pages.used < CHUNK);
        let mut with_free_page = (self.first_with_free_page..self.chunks.len()).filter(has_free_page).peekable();
        let lowest = with_free_page.peek().copied();
        let mut best = (0, 0, 0);
        for chunk in with_free_page.take(CHUNKS_SEARCHED) {
            let (at, len) = self.chunks[chunk].as_ref().map_or((0, 0), |free_pages| free_pages.find_extent(wanted));
            if len > best.2 {
                best = (chunk, at, len);
            }
            if len == wanted {
                break;
            }
        }
        if let Some(lowest) = lowest {
            self.first_with_free_page = lowest;
            return best;
        }
        let absent = self.chunks.iter().position(Option::is_none).unwrap_or(self.chunks.len());
        self.first_with_free_page = absent;
        // Page 0 is reserved.
        let at = usize::from(absent == 0);
        (absent, at, wanted)
    }
}

impl FreePages {
    fn all_free(chunk: usize) -> Self {
        let mut free_pages = Self { bits: [u64::MAX; CHUNK / 64], used: 0 };
        if chunk == 0 {
            free_pages.take(0, 1);
        }
        free_pages
    }

    fn is_unused(&self, chunk: usize) -> bool {
        self.used == usize::from(chunk == 0)
    }

    /// First page and length of the first extent of `wanted` free pages, or of the longest extent if none is long
    /// enough.
    fn find_extent(&self, wanted: usize) -> (usize, usize) {
        let mut best = (0, 0);
        for (word, bits) in (0..).zip(self.bits) {
            // Each step keeps the pages that are followed by at least one more free page.
            let (mut firsts, mut len) = (bits, 0);
            while firsts != 0 && len < wanted {
                if len + 1 > best.1 {
                    best = (word * 64 + firsts.trailing_zeros() as usize, len + 1);
                }
                len += 1;
                firsts &= bits >> len;
            }
            if best.1 == wanted {
                break;
            }
        }
        best
    }

    fn take(&mut self, at: usize, len: usize) {
        for at in at..at + len {
            self.bits[at / 64] &= !(1 << (at % 64));
        }
        self.used += len;
    }

    fn release(&mut self, at: usize) {
        self.bits[at / 64] |= 1 << (at % 64);
        self.used -= 1;
    }
}
