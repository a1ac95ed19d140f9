//! What is known of the store: which objects there are, and which block lies where in them.
//!
//! Bounded: beyond a number of blocks the oldest objects are forgotten, which costs hits, never correctness.

use super::layout::{ObjectId, Writer};
use super::manifest::{Entry, Section};
use crate::index::{Index, Resting};
use crate::{DomainId, EventLog, Fingerprint, Level, SequenceHash};
use object_store::path::Path;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where a block lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    /// Among those that this process knows.
    pub(super) object: i32,
    /// Of its header.
    pub(super) offset: u32,
    /// Payload bytes.
    pub(super) length: u32,
}

/// An object that is known.
#[derive(Clone)]
pub(super) struct Object {
    pub(super) path: Path,
    pub(super) bytes: u64,
    pub(super) domain: DomainId,
    fingerprint: Fingerprint,
    names: Arc<[SequenceHash]>,
}

pub(super) struct Catalog {
    pub(super) index: Index<Place>,
    limit: usize,
    objects: Mutex<Objects>,
    lost: AtomicU64,
    /// Manifests that were not what they were.
    unsound: AtomicU64,
    /// Bytes of objects that were forgotten because somebody is about to delete them.
    going: AtomicU64,
}

/// Numbered by age: what is learned while running counts up, what was there before counts down.
#[derive(Default)]
struct Objects {
    known: BTreeMap<i32, Object>,
    blocks: usize,
    bytes: u64,
}

impl Catalog {
    pub(super) fn new(level: Level, limit: usize, events: Arc<EventLog>) -> Self {
        let index = Index::new(level, events);
        Self {
            index,
            limit,
            objects: Mutex::default(),
            lost: AtomicU64::new(0),
            unsound: AtomicU64::new(0),
            going: AtomicU64::new(0),
        }
    }

    /// Adds an object that is newer than all others.
    pub(super) fn add(&self, path: impl Fn(&Section) -> Path, section: &Section) {
        let mut objects = self.lock();
        let number = objects.known.last_key_value().map_or(0, |(last, _)| last + 1);
        self.insert(&mut objects, number, path(section), section);
        while objects.blocks > self.limit && objects.known.len() > 1 {
            let oldest = objects.known.first_key_value().map(|(number, _)| *number);
            oldest.and_then(|oldest| self.remove(&mut objects, oldest));
        }
    }

    /// Adds an object that is older than all others, if there is still room for it.
    pub(super) fn add_older(&self, path: impl Fn(&Section) -> Path, section: &Section) -> bool {
        let mut objects = self.lock();
        if objects.blocks + section.entries.len() > self.limit {
            return false;
        }
        let number = objects.known.first_key_value().map_or(0, |(first, _)| first - 1);
        self.insert(&mut objects, number, path(section), section);
        true
    }

    fn insert(&self, objects: &mut Objects, number: i32, path: Path, section: &Section) {
        let names = section.entries.iter().map(|entry| entry.name).collect();
        let Section { domain, fingerprint, .. } = *section;
        let object = Object { path, bytes: section.bytes(), domain, fingerprint, names };
        objects.blocks += object.names.len();
        objects.bytes += object.bytes;
        objects.known.insert(number, object);
        let resting = |entry: &Entry| Resting {
            fingerprint: section.fingerprint,
            name: entry.name,
            parent: entry.parent,
            keep: entry.keep(),
            place: Place { object: number, offset: entry.offset, length: entry.length },
        };
        self.index.insert(section.entries.iter().map(resting), |_, _| ());
    }

    fn remove(&self, objects: &mut Objects, number: i32) -> Option<Object> {
        let object = objects.known.remove(&number)?;
        objects.blocks -= object.names.len();
        objects.bytes -= object.bytes;
        let names = object.names.iter().map(|name| (object.fingerprint, *name));
        self.index.remove(names, |place| place.object == number);
        Some(object)
    }

    pub(super) fn object(&self, number: i32) -> Option<Object> {
        self.lock().known.get(&number).cloned()
    }

    /// Forgets an object that turned out to be gone, or to be another than it was.
    pub(super) fn lose(&self, number: i32) {
        if let Some(object) = self.remove(&mut self.lock(), number) {
            self.lost.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(object = %object.path, blocks = object.names.len(), "object lost");
        }
    }

    /// Forgets objects that are about to be deleted, and says how many bytes they take until then.
    pub(super) fn forget(&self, condemned: impl Fn(ObjectId) -> bool) -> u64 {
        let mut objects = self.lock();
        let going = |object: &Object| ObjectId::at(&object.path).is_some_and(&condemned);
        let numbers: Vec<i32> = objects.known.iter().filter(|(_, object)| going(object)).map(|(n, _)| *n).collect();
        numbers.into_iter().filter_map(|number| self.remove(&mut objects, number)).map(|object| object.bytes).sum()
    }

    /// So many bytes are about to be deleted, and still take room.
    pub(super) fn going(&self, bytes: u64) {
        self.going.store(bytes, Ordering::Relaxed);
    }

    /// A manifest turned out not to be one.
    pub(super) fn skip(&self) {
        self.unsound.fetch_add(1, Ordering::Relaxed);
    }

    /// Manifests that were skipped so far.
    pub(super) fn skipped(&self) -> u64 {
        self.unsound.load(Ordering::Relaxed)
    }

    /// Objects that were lost so far.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Bytes of all known objects, those that are about to be deleted included.
    pub(super) fn taken(&self) -> u64 {
        self.lock().bytes + self.going.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Objects> {
        // Sums and map change together, without anything between that could panic.
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names the objects of a writer's sections.
pub(super) fn paths(layout: &super::layout::Layout, writer: Writer) -> impl Fn(&Section) -> Path {
    move |section| layout.blocks(section.domain, section.fingerprint, writer, section.object)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Epoch, Header};

    fn section(object: u64, names: &[u8]) -> Section {
        let entry = |&n: &u8| Entry {
            name: SequenceHash::from_bytes([n; 16]),
            parent: None,
            offset: 0,
            length: 0,
            expires: None,
            pinned: None,
        };
        let entries = names.iter().map(entry).collect();
        Section { domain: DomainId::SHARED, fingerprint: Fingerprint::from_bytes([0; 32]), object, entries }
    }

    fn catalog(limit: usize) -> Catalog {
        Catalog::new(Level::G4, limit, Arc::new(EventLog::new(Epoch(1))))
    }

    fn known(catalog: &Catalog) -> Vec<u8> {
        let held =
            |n: &u8| catalog.index.get(section(0, &[]).fingerprint, SequenceHash::from_bytes([*n; 16])).is_some();
        (0..20).filter(held).collect()
    }

    fn path(section: &Section) -> Path {
        Path::from(section.object.to_string())
    }

    #[test]
    fn the_oldest_objects_are_forgotten_first_whenever_they_were_learned() {
        let catalog = catalog(6);
        assert!(catalog.add_older(path, &section(2, &[3, 4])));
        assert!(catalog.add_older(path, &section(1, &[1, 2])));
        assert!(!catalog.add_older(path, &section(0, &[17, 18, 19])), "no room for the past");
        catalog.add(path, &section(3, &[5, 6]));
        catalog.add(path, &section(4, &[7]));
        assert_eq!(known(&catalog), [3, 4, 5, 6, 7]);
    }

    #[test]
    fn a_lost_object_takes_only_blocks_that_lie_nowhere_else() {
        let catalog = catalog(10);
        catalog.add(path, &section(1, &[1, 2]));
        catalog.add(path, &section(2, &[2, 3]));
        catalog.lose(0);
        assert_eq!(known(&catalog), [2, 3]);
        catalog.lose(0);
        assert_eq!((catalog.lost(), catalog.taken()), (1, Header::LEN as u64));
    }
}
