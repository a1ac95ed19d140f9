//! Which pages are in use.
//!
//! Pages are numbered. Low ones are taken first, so that those at the end fall free together and go back to the system, a chunk
//! at a time; but whoever wants several gets neighbours where there are any, since a lookup goes through them one after the
//! other. The first page is never used: the tables need its places' numbers for themselves.

use super::snapshot::{CHUNK, Chunk, PAGE_BYTES};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The pages.
pub(super) struct Arena {
    free: Mutex<Free>,
    used: AtomicUsize,
    chunks: AtomicUsize,
}

#[derive(Default)]
struct Free {
    /// By chunk; `None` where there is none.
    chunks: Vec<Option<Vacant>>,
    /// No chunk before this one has a free page, if it is there.
    first: usize,
    /// Chunks without a page in use.
    spare: usize,
}

/// The pages of a chunk that nobody uses.
#[derive(Clone, Copy)]
struct Vacant {
    bits: [u64; CHUNK / 64],
    used: usize,
}

/// A chunk came or went.
pub(super) enum Change {
    Came(usize, Chunk),
    Went(usize),
}

/// Pages given at once, at most.
const STRETCH_MOST: usize = 32;
/// Chunks with room among which a stretch is looked for.
const LOOKED_AT: usize = 16;
/// Places are 32 bits: 64 million pages, four billion blocks.
const CHUNKS_MAX: usize = (1 << 26) / CHUNK;

impl Arena {
    pub(super) fn new() -> Self {
        Self { free: Mutex::default(), used: AtomicUsize::new(0), chunks: AtomicUsize::new(0) }
    }

    /// Neighbouring pages that nobody uses, at most so many; `None` when there are no more numbers. `change` hears of a new chunk
    /// before a page of it is given.
    pub(super) fn take(&self, wanted: usize, change: impl FnOnce(Change)) -> Option<Range<u32>> {
        let mut free = self.free();
        let (chunk, at, len) = free.stretch(wanted.min(STRETCH_MOST));
        if chunk == CHUNKS_MAX {
            return None;
        }
        if chunk == free.chunks.len() {
            free.chunks.push(None);
        }
        let fresh = free.chunks[chunk].is_none();
        if fresh {
            change(Change::Came(chunk, Chunk::new()));
            self.chunks.fetch_add(1, Ordering::Relaxed);
        }
        let vacant = free.chunks[chunk].get_or_insert_with(|| Vacant::whole(chunk));
        let first_use = vacant.is_spare(chunk);
        vacant.take(at, len);
        if first_use && !fresh {
            free.spare -= 1;
        }
        self.used.fetch_add(len, Ordering::Relaxed);
        let first = (chunk * CHUNK + at) as u32;
        Some(first..first + len as u32)
    }

    /// Nobody uses these pages any more. One chunk is kept for those to come.
    pub(super) fn give(&self, pages: &[u32], mut change: impl FnMut(Change)) {
        let mut free = self.free();
        for page in pages {
            let (chunk, at) = (*page as usize / CHUNK, *page as usize % CHUNK);
            let Some(vacant) = &mut free.chunks[chunk] else { continue };
            vacant.give(at);
            let spare = vacant.is_spare(chunk);
            free.first = free.first.min(chunk);
            if spare && free.spare > 0 {
                free.chunks[chunk] = None;
                self.chunks.fetch_sub(1, Ordering::Relaxed);
                change(Change::Went(chunk));
            } else {
                free.spare += usize::from(spare);
            }
        }
        self.used.fetch_sub(pages.len(), Ordering::Relaxed);
    }

    /// Pages in use.
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes of all pages, those that nobody uses included.
    pub(super) fn bytes(&self) -> usize {
        self.chunks.load(Ordering::Relaxed) * CHUNK * PAGE_BYTES
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Free {
    /// The chunk, the first and the number of the pages to be taken next. The chunk may be one that is not there.
    fn stretch(&mut self, wanted: usize) -> (usize, usize, usize) {
        let has_room = |chunk: &usize| self.chunks[*chunk].is_some_and(|vacant| vacant.used < CHUNK);
        let mut with_room = (self.first..self.chunks.len()).filter(has_room).peekable();
        let lowest = with_room.peek().copied();
        let mut best = (0, 0, 0);
        for chunk in with_room.take(LOOKED_AT) {
            let (at, len) = self.chunks[chunk].as_ref().map_or((0, 0), |vacant| vacant.stretch(wanted));
            if len > best.2 {
                best = (chunk, at, len);
            }
            if len == wanted {
                break;
            }
        }
        if let Some(lowest) = lowest {
            self.first = lowest;
            return best;
        }
        let absent = self.chunks.iter().position(Option::is_none).unwrap_or(self.chunks.len());
        self.first = absent;
        // The very first page is nobody's.
        let at = usize::from(absent == 0);
        (absent, at, wanted)
    }
}

impl Vacant {
    fn whole(chunk: usize) -> Self {
        let mut vacant = Self { bits: [u64::MAX; CHUNK / 64], used: 0 };
        if chunk == 0 {
            vacant.take(0, 1);
        }
        vacant
    }

    fn is_spare(&self, chunk: usize) -> bool {
        self.used == usize::from(chunk == 0)
    }

    /// The first of `wanted` free pages side by side, or of as many as there are, and their number.
    fn stretch(&self, wanted: usize) -> (usize, usize) {
        let mut best = (0, 0);
        for (word, bits) in (0..).zip(self.bits) {
            // Each step leaves the pages whose next neighbours are free as well, one more of them.
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

    fn give(&mut self, at: usize) {
        self.bits[at / 64] |= 1 << (at % 64);
        self.used -= 1;
    }
}
