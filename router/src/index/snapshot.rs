//! The immutable state that a lookup reads (RCU: readers load a pointer to it, writers replace it).
//!
//! Large parts are shared between successive snapshots; the tables change in place. A snapshot is replaced when a chunk
//! of pages is allocated or freed, or a holder joins or leaves. A reader of an old snapshot may miss newer blocks. It
//! never returns a removed block, because it compares the hash at each position that it reads.

use super::bits::Bits;
use super::holder::{Holder, HolderId};
use super::holder_state::{HolderMap, HolderState};
use super::key::Key;
use super::page::{ClockState, Hashes, Head, LINE_HASHES, Page};
use super::position::Position;
use super::sharded_table::Tables;
use super::sync::{Ordering, prefetch};
use std::sync::Arc;
use worker::plane::StoreId;

/// A snapshot of the index.
#[derive(Clone)]
pub(super) struct IndexSnapshot {
    pub(super) tables: Arc<Tables>,
    pub(super) directory: PageDirectory,
    pub(super) holders: Arc<HolderDirectory>,
}

/// All holders of blocks, and which workers can read which stores.
#[derive(Clone, Default)]
pub(super) struct HolderDirectory {
    states: HolderMap<Arc<HolderState>>,
    /// By the index of their [`HolderId`]: workers and estimates, and stores.
    pub(super) workers: Vec<Option<Arc<HolderState>>>,
    pub(super) stores: Vec<Option<Arc<HolderState>>>,
    /// By the index of a store: the workers and estimates that can onboard from it.
    pub(super) readers: Vec<Bits>,
}

/// Pages that were allocated together: their heads side by side, and their hashes.
#[derive(Clone)]
pub(super) struct Chunk {
    heads: Arc<[Head]>,
    hashes: Arc<[Hashes]>,
}

/// All chunks, in groups that successive snapshots share: adding a chunk copies one group and the list of groups.
#[derive(Clone, Default)]
pub(super) struct PageDirectory(Arc<[Arc<ChunkGroup>]>);

type ChunkGroup = [Option<Chunk>; GROUP_CHUNKS];

/// Chunks per group: one million blocks.
const GROUP_CHUNKS: usize = 64;

/// Pages per chunk: 147 KiB for 16,384 blocks.
pub(super) const CHUNK: usize = 256;

/// Bytes of a page.
pub(super) const PAGE_BYTES: usize = size_of::<Head>() + size_of::<Hashes>();

impl Chunk {
    pub(super) fn new() -> Self {
        Self { heads: (0..CHUNK).map(|_| Head::new()).collect(), hashes: (0..CHUNK).map(|_| Hashes::new()).collect() }
    }
}

impl PageDirectory {
    fn chunk(&self, page: u32) -> Option<&Chunk> {
        let at = page as usize / CHUNK;
        self.0.get(at / GROUP_CHUNKS)?[at % GROUP_CHUNKS].as_ref()
    }

    /// A copy with one chunk replaced.
    pub(super) fn with(&self, at: usize, chunk: Option<Chunk>) -> Self {
        let mut groups = self.0.to_vec();
        while groups.len() <= at / GROUP_CHUNKS {
            groups.push(Arc::new(std::array::from_fn(|_| None)));
        }
        Arc::make_mut(&mut groups[at / GROUP_CHUNKS])[at % GROUP_CHUNKS] = chunk;
        Self(groups.into())
    }

    /// Upper bound of the page numbers.
    pub(super) fn pages(&self) -> usize {
        self.0.len() * GROUP_CHUNKS * CHUNK
    }
}

impl IndexSnapshot {
    pub(super) fn page(&self, number: u32) -> Option<Page<'_>> {
        let chunk = self.directory.chunk(number)?;
        let at = number as usize % CHUNK;
        Some(Page::new(chunk.heads.get(at)?, chunk.hashes.get(at)?))
    }

    /// Prefetches the head of a page.
    pub(super) fn prefetch_head(&self, number: u32) {
        if let Some(head) = self.directory.chunk(number).and_then(|chunk| chunk.heads.get(number as usize % CHUNK)) {
            prefetch(head);
        }
    }

    /// Position of a block. It may change at any time.
    pub(super) fn find(&self, hash: u64) -> Option<Position> {
        let key = Key::of(hash);
        self.tables[key.shard].find(key.bits, |position| self.has(Position(position), hash)).map(Position)
    }

    /// Whether a live block with this hash is at a position. This may change at any time.
    pub(super) fn has(&self, position: Position, hash: u64) -> bool {
        self.page(position.page()).is_some_and(|page| page.has(position.offset(), hash))
    }

    /// Position of a block and its page, checking a guessed position first. A guess is not used in a page where another
    /// holder is inserting: the table may still reject that entry in favour of a concurrent one.
    pub(super) fn find_with_guess(
        &self,
        guess: Option<Position>,
        hash: u64,
        holder_id: HolderId,
    ) -> Option<(Position, Page<'_>)> {
        let here = |position: Position| Some((position, self.page(position.page())?));
        let guessed = guess.and_then(here).filter(|(position, page)| {
            page.has(position.offset(), hash) && (page.clock() != ClockState::Pinned || page.is_owned_by(holder_id))
        });
        guessed.or_else(|| here(self.find(hash)?))
    }

    /// Prefetches the table entry of a hash.
    pub(super) fn prefetch(&self, hash: u64) {
        let key = Key::of(hash);
        let table = &self.tables[key.shard];
        table.prefetch(table.state(Ordering::Acquire).place(key.bits));
    }

    /// Loads the page lines of hashes whose table entries were [prefetched](Self::prefetch).
    pub(super) fn prefetch_pages(&self, run: &[u64]) {
        let pages = run.iter().step_by(LINE_HASHES).filter_map(|hash| {
            let key = Key::of(*hash);
            let position = Position(self.tables[key.shard].find(key.bits, |_| true)?);
            Some(self.page(position.page())?.load_line(position.offset()))
        });
        std::hint::black_box(pages.fold(0, |sum, page| sum ^ page));
    }
}

impl HolderDirectory {
    pub(super) fn get(&self, holder: Holder) -> Option<&Arc<HolderState>> {
        self.states.get(&holder)
    }

    pub(super) fn by_id(&self, holder_id: HolderId) -> Option<&Arc<HolderState>> {
        let holder_ids = if holder_id.is_store() { &self.stores } else { &self.workers };
        holder_ids.get(holder_id.index())?.as_ref()
    }

    /// Registers a holder, unless it is registered.
    pub(super) fn register(&mut self, holder: Holder) -> HolderId {
        if let Some(state) = self.states.get(&holder) {
            return state.id;
        }
        let store = matches!(holder, Holder::Store(_));
        let holder_ids = if store { &mut self.stores } else { &mut self.workers };
        let number = holder_ids.iter().position(Option::is_none).unwrap_or_else(|| {
            holder_ids.push(None);
            holder_ids.len() - 1
        });
        let holder_id = if store { HolderId::store(number) } else { HolderId::worker(number) };
        let state = Arc::new(HolderState::new(holder_id));
        holder_ids[number] = Some(state.clone());
        self.states.insert(holder, state);
        self.readers.resize(self.stores.len(), Bits::default());
        holder_id
    }

    /// Removes a holder from the map. Its id is in use until [`release`](Self::release).
    pub(super) fn unregister(&mut self, holder: Holder) -> Option<Arc<HolderState>> {
        self.states.remove(&holder)
    }

    pub(super) fn release(&mut self, holder_id: HolderId) {
        if holder_id.is_store() {
            self.stores[holder_id.index()] = None;
            self.readers[holder_id.index()] = Bits::default();
        } else {
            self.workers[holder_id.index()] = None;
            self.readers.iter_mut().for_each(|workers| workers.unset(holder_id.index() as u32));
        }
    }

    /// Stores that no worker can read, in no particular order.
    pub(super) fn unreferenced_stores(&self) -> Vec<StoreId> {
        let unreferenced = |(holder, state): (&Holder, &Arc<HolderState>)| match holder {
            Holder::Store(store) if self.readers[state.id.index()].is_empty() => Some(*store),
            _ => None,
        };
        self.states.iter().filter_map(unreferenced).collect()
    }
}
