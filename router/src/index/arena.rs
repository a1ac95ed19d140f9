//! Which pages are in use, and the locks under which they are changed.
//!
//! Pages are numbered. The lowest free one is taken first, so that those at the end fall free together and go back to the
//! system, a chunk at a time. The first page is never used: the tables need its places' numbers for themselves.

use super::body::CHUNK;
use super::page::Page;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The pages.
pub(super) struct Arena {
    free: Mutex<Free>,
    turns: Box<[Mutex<()>]>,
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
    Came(usize, Arc<[Page]>),
    Went(usize),
}

/// Page locks. Two writers seldom want the same.
const TURNS: usize = 512;
/// Places are 32 bits: 64 million pages, four billion blocks.
const CHUNKS_MAX: usize = (1 << 26) / CHUNK;

/// Pages that lie together are in use together: their locks lie apart.
fn turn_of(page: u32) -> usize {
    page.wrapping_mul(0x9e37_79b9) as usize >> (u32::BITS - TURNS.ilog2())
}

impl Arena {
    pub(super) fn new() -> Self {
        let turns = (0..TURNS).map(|_| Mutex::default()).collect();
        Self { free: Mutex::default(), turns, used: AtomicUsize::new(0), chunks: AtomicUsize::new(0) }
    }

    /// The lock under which a page is changed. Nobody holds two, unless he can do without the second.
    pub(super) fn turn(&self, page: u32) -> MutexGuard<'_, ()> {
        self.turns[turn_of(page)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, if nobody has it and `other`'s is not it.
    pub(super) fn try_turn(&self, page: u32, other: u32) -> Option<MutexGuard<'_, ()>> {
        let apart = turn_of(page) != turn_of(other);
        apart.then(|| self.turns[turn_of(page)].try_lock().ok()).flatten()
    }

    /// A page that nobody uses; `None` when there are no more numbers. `change` hears of a new chunk before the page is given.
    pub(super) fn take(&self, change: impl FnOnce(Change)) -> Option<u32> {
        let mut free = self.free();
        let chunk = (free.first..free.chunks.len())
            .find(|chunk| free.chunks[*chunk].is_some_and(|vacant| vacant.used < CHUNK))
            .or_else(|| free.chunks.iter().position(Option::is_none))
            .unwrap_or(free.chunks.len());
        if chunk == CHUNKS_MAX {
            return None;
        }
        if chunk == free.chunks.len() {
            free.chunks.push(None);
        }
        free.first = chunk;
        let fresh = free.chunks[chunk].is_none();
        if fresh {
            change(Change::Came(chunk, (0..CHUNK).map(|_| Page::new()).collect()));
            self.chunks.fetch_add(1, Ordering::Relaxed);
        }
        let vacant = free.chunks[chunk].get_or_insert_with(|| Vacant::whole(chunk));
        let first_use = vacant.is_spare(chunk);
        let at = vacant.take();
        if first_use && !fresh {
            free.spare -= 1;
        }
        self.used.fetch_add(1, Ordering::Relaxed);
        Some((chunk * CHUNK + at) as u32)
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
        self.chunks.load(Ordering::Relaxed) * CHUNK * size_of::<Page>()
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Vacant {
    fn whole(chunk: usize) -> Self {
        let mut vacant = Self { bits: [u64::MAX; CHUNK / 64], used: 0 };
        if chunk == 0 {
            vacant.take();
        }
        vacant
    }

    fn is_spare(&self, chunk: usize) -> bool {
        self.used == usize::from(chunk == 0)
    }

    fn take(&mut self) -> usize {
        let word = self.bits.iter().position(|bits| *bits != 0).expect("it has a free page");
        let at = self.bits[word].trailing_zeros() as usize;
        self.bits[word] &= self.bits[word] - 1;
        self.used += 1;
        word * 64 + at
    }

    fn give(&mut self, at: usize) {
        self.bits[at / 64] |= 1 << (at % 64);
        self.used -= 1;
    }
}
