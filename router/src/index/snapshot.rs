//! All that a lookup reads, as of one moment: taken once, and then read without asking anybody.
//!
//! What is large is shared between one body and the next: a body is replaced when a table or the list of pages has grown, or
//! somebody joined or left. A reader of an old one may miss what came since; it never reads what is gone, for what it finds
//! under a name is checked to have that name.

use super::bits::Bits;
use super::key::{Key, SHARDS};
use super::page::{Head, LINE, Names, Page, Warmth};
use super::position::Place;
use super::source::Slot;
use super::source_state::Owner;
use super::sync::fetch;
use super::table::Table;
use std::collections::BTreeMap;
use std::sync::Arc;
use worker::plane::{Source, StoreId};

/// The body.
#[derive(Clone)]
pub(super) struct Body {
    pub(super) tables: [Arc<Table>; SHARDS],
    pub(super) shelves: Shelves,
    pub(super) roll: Arc<Roll>,
}

/// Everyone who holds blocks, and who reaches whom.
#[derive(Clone, Default)]
pub(super) struct Roll {
    owners: BTreeMap<Source, Arc<Owner>>,
    /// By number: of workers, of stores.
    pub(super) workers: Vec<Option<Arc<Owner>>>,
    pub(super) stores: Vec<Option<Arc<Owner>>>,
    /// By a store's number: the workers that onboard from it.
    pub(super) reach: Vec<Bits>,
}

/// Pages that came from the system together: their heads side by side, and their names.
#[derive(Clone)]
pub(super) struct Chunk {
    heads: Arc<[Head]>,
    names: Arc<[Names]>,
}

/// All chunks, a shelf of them shared between one body and the next: a new chunk costs a copy of its shelf, and not of the list.
#[derive(Clone, Default)]
pub(super) struct Shelves(Arc<[Arc<Shelf>]>);

type Shelf = [Option<Chunk>; SHELF];

/// Chunks of a shelf: a million blocks.
const SHELF: usize = 64;

/// Pages are taken from the system this many at a time: 147 KiB, room for 16,384 blocks.
pub(super) const CHUNK: usize = 256;

/// Bytes of a page.
pub(super) const PAGE_BYTES: usize = size_of::<Head>() + size_of::<Names>();

impl Chunk {
    pub(super) fn new() -> Self {
        Self { heads: (0..CHUNK).map(|_| Head::new()).collect(), names: (0..CHUNK).map(|_| Names::new()).collect() }
    }
}

impl Shelves {
    fn chunk(&self, page: u32) -> Option<&Chunk> {
        let at = page as usize / CHUNK;
        self.0.get(at / SHELF)?[at % SHELF].as_ref()
    }

    /// The same, but for one chunk.
    pub(super) fn with(&self, at: usize, chunk: Option<Chunk>) -> Self {
        let mut shelves = self.0.to_vec();
        while shelves.len() <= at / SHELF {
            shelves.push(Arc::new(std::array::from_fn(|_| None)));
        }
        Arc::make_mut(&mut shelves[at / SHELF])[at % SHELF] = chunk;
        Self(shelves.into())
    }

    /// More than the number of any page.
    pub(super) fn pages(&self) -> usize {
        self.0.len() * SHELF * CHUNK
    }
}

impl Body {
    pub(super) fn page(&self, number: u32) -> Option<Page<'_>> {
        let chunk = self.shelves.chunk(number)?;
        let at = number as usize % CHUNK;
        Some(Page::new(chunk.heads.get(at)?, chunk.names.get(at)?))
    }

    /// Begins to bring a page's head near.
    pub(super) fn fetch_head(&self, number: u32) {
        if let Some(head) = self.shelves.chunk(number).and_then(|chunk| chunk.heads.get(number as usize % CHUNK)) {
            fetch(head);
        }
    }

    /// Where a block is. True for a moment only.
    pub(super) fn find(&self, name: u64) -> Option<Place> {
        let key = Key::of(name);
        self.tables[key.shard].find(key.tag, |place| self.has(Place(place), name)).map(Place)
    }

    /// Whether a live block of this name is in a place. True for a moment only.
    pub(super) fn has(&self, place: Place, name: u64) -> bool {
        self.page(place.page()).is_some_and(|page| page.has(place.at(), name))
    }

    /// Where a block is, and its page, when it probably lies in a place. What another source is still entering may yet be
    /// refused, since somebody was quicker: there, a guess says nothing.
    pub(super) fn find_near(&self, guess: Option<Place>, name: u64, owner: Slot) -> Option<(Place, Page<'_>)> {
        let here = |place: Place| Some((place, self.page(place.page())?));
        let guessed = guess.and_then(here).filter(|(place, page)| {
            page.has(place.at(), name) && (page.warmth() != Warmth::Settling || page.is_of(owner))
        });
        guessed.or_else(|| here(self.find(name)?))
    }

    /// Begins to bring near what the tables say of a name.
    pub(super) fn fetch(&self, name: u64) {
        let key = Key::of(name);
        self.tables[key.shard].fetch(key.tag);
    }

    /// Brings near what the pages have of a run of names that were [`fetched`](Self::fetch).
    pub(super) fn bring_pages_near(&self, run: &[u64]) {
        let pages = run.iter().step_by(LINE).filter_map(|name| {
            let key = Key::of(*name);
            let place = Place(self.tables[key.shard].find(key.tag, |_| true)?);
            Some(self.page(place.page())?.touch(place.at()))
        });
        std::hint::black_box(pages.fold(0, |sum, page| sum ^ page));
    }
}

impl Roll {
    pub(super) fn owner(&self, source: Source) -> Option<&Arc<Owner>> {
        self.owners.get(&source)
    }

    pub(super) fn by_slot(&self, slot: Slot) -> Option<&Arc<Owner>> {
        let seats = if slot.is_store() { &self.stores } else { &self.workers };
        seats.get(slot.number())?.as_ref()
    }

    /// Seats a source, unless it is there.
    pub(super) fn seat(&mut self, source: Source) -> Slot {
        if let Some(owner) = self.owners.get(&source) {
            return owner.slot;
        }
        let store = matches!(source, Source::Store(_));
        let seats = if store { &mut self.stores } else { &mut self.workers };
        let number = seats.iter().position(Option::is_none).unwrap_or_else(|| {
            seats.push(None);
            seats.len() - 1
        });
        let slot = if store { Slot::store(number) } else { Slot::worker(number) };
        let owner = Arc::new(Owner::new(slot));
        seats[number] = Some(owner.clone());
        self.owners.insert(source, owner);
        self.reach.resize(self.stores.len(), Bits::default());
        slot
    }

    /// Takes a source from the list; it keeps its seat until it is [`vacated`](Self::vacate).
    pub(super) fn strike(&mut self, source: Source) -> Option<Arc<Owner>> {
        self.owners.remove(&source)
    }

    pub(super) fn vacate(&mut self, slot: Slot) {
        if slot.is_store() {
            self.stores[slot.number()] = None;
            self.reach[slot.number()] = Bits::default();
        } else {
            self.workers[slot.number()] = None;
            self.reach.iter_mut().for_each(|workers| workers.unset(slot.number() as u32));
        }
    }

    /// Stores that no worker reaches.
    pub(super) fn lonely(&self) -> Vec<StoreId> {
        let lonely = |(source, owner): (&Source, &Arc<Owner>)| match source {
            Source::Store(store) if self.reach[owner.slot.number()].is_empty() => Some(*store),
            _ => None,
        };
        self.owners.iter().filter_map(lonely).collect()
    }
}
