//! All that a lookup reads, as of one moment: taken once, and then read without asking anybody.
//!
//! What is large is shared between one body and the next: a body is replaced when a table or the list of pages has grown, or
//! somebody joined or left. A reader of an old one may miss what came since; it never reads what is gone, for what it finds
//! under a name is checked to have that name.

use super::Owner;
use super::bits::Bits;
use super::locator::{Key, SHARDS};
use super::page::Page;
use super::seat::Slot;
use super::table::Table;
use std::collections::BTreeMap;
use std::sync::Arc;
use worker::plane::{Source, StoreId};

/// The body.
#[derive(Clone)]
pub(super) struct Body {
    pub(super) tables: [Arc<Table>; SHARDS],
    pub(super) chunks: Arc<Vec<Option<Arc<[Page]>>>>,
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

/// A block's place: its page, and where in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place(pub(super) u32);

/// Pages are taken from the system this many at a time: 147 KiB, room for 16,384 blocks.
pub(super) const CHUNK: usize = 256;

/// Names of a cache line.
const LINE: usize = 8;

impl Place {
    pub(super) fn new(page: u32, at: u32) -> Self {
        Self(page << 6 | at)
    }

    pub(super) fn page(self) -> u32 {
        self.0 >> 6
    }

    pub(super) fn at(self) -> u32 {
        self.0 & 63
    }
}

impl Body {
    pub(super) fn page(&self, number: u32) -> Option<&Page> {
        self.chunks.get(number as usize / CHUNK)?.as_ref()?.get(number as usize % CHUNK)
    }

    /// Where a block is. True for a moment only.
    pub(super) fn find(&self, name: u64) -> Option<Place> {
        let key = Key::of(name);
        let is = |place| self.page(Place(place).page()).is_some_and(|page| page.has(Place(place).at(), name));
        self.tables[key.shard].find(key.tag, is).map(Place)
    }

    /// Brings near what the tables say of these names: all at once, since looking takes waiting for memory, not work.
    pub(super) fn bring_near(&self, names: &[u64]) {
        let near =
            names.iter().map(|name| Key::of(*name)).fold(0, |sum, key| sum ^ self.tables[key.shard].touch(key.tag));
        std::hint::black_box(near);
    }

    /// Brings near what the pages have of a run of names that [`bring_near`](Self::bring_near) was called for.
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

    /// Everybody.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Owner>> {
        self.owners.values()
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
