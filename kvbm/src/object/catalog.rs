//! What is known of the store: which objects there are, and which block lies where in them.
//!
//! Bounded: beyond a number of blocks the oldest objects are forgotten, which costs hits, never correctness. A block may lie
//! in several objects; it is read from the newest that is known, and from the next when that one goes.

use super::client::unreadable::Unreadable;
use super::format::layout::{ObjectId, Writer};
use super::format::manifest::{Entry, Section};
use crate::block::{DomainId, Fingerprint, Level, SequenceHash};
use crate::event::EventLog;
use crate::log_limit::LogLimit;
use crate::table::NameHasher;
use crate::tier::{Index, Resting};
use object_store::ObjectMeta;
use object_store::path::Path;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::hash::BuildHasherDefault;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Where a block lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    /// Among those that this process knows.
    pub(super) object: i64,
    /// Of its header.
    pub(super) offset: u32,
    /// Payload bytes.
    pub(super) length: u32,
    /// It lies in another object too, or did.
    twice: bool,
    /// From when on it is what is read, in seconds since the catalog began, if another copy was before that. Who has read the other
    /// one then may still say that it is bad, and does not mean this one.
    since: u32,
}

/// An object that is known.
#[derive(Clone)]
pub(super) struct Object {
    pub(super) path: Path,
    pub(super) bytes: u64,
    pub(super) domain: DomainId,
    pub(super) fingerprint: Fingerprint,
    /// As its section says.
    pub(super) idle: Duration,
    blocks: Arc<[Lying]>,
    pub(super) since: Instant,
}

/// An object that is small, and the blocks that are read from it.
pub(super) struct Small {
    pub(super) number: i64,
    pub(super) object: Object,
    pub(super) blocks: Vec<(SequenceHash, Place)>,
}

/// A block in an object.
#[derive(Clone, Copy)]
struct Lying {
    name: SequenceHash,
    offset: u32,
    length: u32,
}

impl Lying {
    /// One of several places, the one that is read from now on.
    fn at(self, object: i64, now: u32) -> Place {
        Place { object, offset: self.offset, length: self.length, twice: true, since: now }
    }
}

/// Seconds after which whoever has read a copy has found out what it is: a request and its repetitions take less.
const FOUND_OUT: u32 = 30;

/// By then the others have learned what was written: they ask every second, and reading takes less than another.
const LEARNED: Duration = Duration::from_secs(3);

/// Objects that are looked up under one lock: some tens of microseconds.
const MEASURED: usize = 512;

/// Blocks that lie in another object than the one that they were read from.
type Homeless = HashSet<(Fingerprint, SequenceHash), BuildHasherDefault<NameHasher>>;

pub(super) struct Catalog {
    pub(super) index: Index<Place>,
    limit: usize,
    began: Instant,
    objects: Mutex<Objects>,
    lost: AtomicU64,
    lost_lines: LogLimit,
    /// Manifests that were not what they were.
    unsound: AtomicU64,
    pub(super) unsound_lines: LogLimit,
    /// Manifests that cannot be read although the store answers.
    pub(super) unreadable: Unreadable,
    /// Bytes of objects that lie in the store and are not known here: about to be deleted, forgotten, or of another version.
    /// Only counted where the store has a capacity.
    unknown_bytes: Option<AtomicU64>,
    /// Other processes that wrote lately.
    active_writers: AtomicUsize,
    /// What this process wrote in the last seconds: others may not know of it yet.
    recent: Mutex<VecDeque<(Instant, u64)>>,
    /// Objects that were looked through for blocks of others.
    #[cfg(test)]
    walked: AtomicU64,
}

/// Numbered by age: what is learned while running counts up, what was there before counts down. No number comes twice: who
/// still reads from one that was forgotten must not meet another.
#[derive(Default)]
struct Objects {
    known: BTreeMap<i64, Object>,
    next: i64,
    first: i64,
    /// Of all of them: a manifest may be read twice, when a round failed in between.
    paths: HashSet<Path>,
    blocks: usize,
    bytes: u64,
}

impl Object {
    fn names(&self) -> impl Iterator<Item = (Fingerprint, SequenceHash)> {
        self.blocks.iter().map(|block| (self.fingerprint, block.name))
    }
}

impl Objects {
    fn take(&mut self, number: i64) -> Option<Object> {
        let object = self.known.remove(&number)?;
        self.paths.remove(&object.path);
        self.blocks -= object.blocks.len();
        self.bytes -= object.bytes;
        Some(object)
    }
}

impl Catalog {
    /// Keeps so many blocks in mind. `bounded`: the store has a capacity, so that bytes count that are not known.
    pub(super) fn new(level: Level, limit: usize, bounded: bool, events: Arc<EventLog>) -> Self {
        let index = Index::new(level, events);
        Self {
            index,
            limit,
            began: Instant::now(),
            objects: Mutex::default(),
            lost: AtomicU64::new(0),
            lost_lines: LogLimit::default(),
            unsound_lines: LogLimit::default(),
            unsound: AtomicU64::new(0),
            unreadable: Unreadable::default(),
            unknown_bytes: bounded.then(AtomicU64::default),
            active_writers: AtomicUsize::new(0),
            recent: Mutex::default(),
            #[cfg(test)]
            walked: AtomicU64::new(0),
        }
    }

    /// Adds an object that is newer than all others, unless it is known.
    pub(super) fn add(&self, path: impl Fn(&Section) -> Path, section: &Section) {
        let (mut objects, path) = (self.lock(), path(section));
        if objects.paths.contains(&path) {
            return;
        }
        let number = objects.next;
        objects.next += 1;
        self.insert(&mut objects, number, path, section);
        while objects.blocks > self.limit && objects.known.len() > 1 {
            let Some(oldest) = objects.known.first_key_value().map(|(number, _)| *number) else { return };
            // What is still read from the oldest lies nowhere else.
            if let Some(object) = objects.take(oldest) {
                self.add_unknown(object.bytes);
                self.index.remove(object.names(), |place| place.object == oldest);
            }
        }
    }

    /// Adds an object that is older than all others, if there is still room for it.
    pub(super) fn add_older(&self, path: impl Fn(&Section) -> Path, section: &Section) -> bool {
        let (mut objects, path) = (self.lock(), path(section));
        if objects.paths.contains(&path) {
            return true;
        }
        if objects.blocks + section.entries.len() > self.limit {
            return false;
        }
        objects.first -= 1;
        let number = objects.first;
        self.insert(&mut objects, number, path, section);
        true
    }

    fn insert(&self, objects: &mut Objects, number: i64, path: Path, section: &Section) {
        let lying = |entry: &Entry| Lying { name: entry.name, offset: entry.offset, length: entry.length };
        let Section { domain, fingerprint, idle, .. } = *section;
        let (bytes, blocks) = (section.bytes(), section.entries.iter().map(lying).collect());
        let object = Object { path, bytes, domain, fingerprint, idle, blocks, since: Instant::now() };
        objects.blocks += object.blocks.len();
        objects.bytes += object.bytes;
        objects.paths.insert(object.path.clone());
        objects.known.insert(number, object);
        let names: Vec<SequenceHash> = section.entries.iter().map(|entry| entry.name).collect();
        let before = self.index.find(fingerprint, &names, |place| place.twice = true);
        let now = self.now();
        let newer = |(_, place): &(_, Option<Place>)| place.is_none_or(|place| place.object <= number);
        let fresh = section.entries.iter().zip(before).filter(newer);
        let resting = |(entry, before): (&Entry, Option<Place>)| Resting {
            fingerprint,
            name: entry.name,
            parent: entry.parent,
            keep: entry.keep(),
            place: Place {
                object: number,
                offset: entry.offset,
                length: entry.length,
                twice: before.is_some(),
                since: if before.is_some() { now } else { 0 },
            },
        };
        self.index.insert(fresh.map(resting), |_, _| ());
    }

    /// Forgets objects, whose numbers come in order; a block of theirs that lies in another one is read from there from now on.
    fn remove(&self, objects: &mut Objects, numbers: &[i64]) -> Vec<Object> {
        let (mut over, mut homeless) = (Vec::new(), Homeless::default());
        let mut removed = Vec::with_capacity(numbers.len());
        for (number, object) in numbers.iter().filter_map(|number| Some((*number, objects.take(*number)?))) {
            for name in object.names() {
                match self.index.get(name.0, name.1).filter(|at| at.object == number) {
                    Some(Place { twice: true, .. }) => drop(homeless.insert(name)),
                    Some(_) => over.push(name),
                    None => {}
                }
            }
            removed.push(object);
        }
        let gone = |place: &Place| numbers.binary_search(&place.object).is_ok();
        self.rehome(objects.known.iter().rev(), &mut homeless, gone);
        over.extend(homeless);
        self.index.remove(over, gone);
        removed
    }

    /// Forgets a block whose copy that was read is not what it was, unless so many seconds ago another copy was read in its place:
    /// that may be the bad one, and it is forgotten already.
    pub(super) fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        let Some(place) = self.index.get(fingerprint, name) else { return };
        if place.since == 0 || self.now() - place.since > FOUND_OUT {
            self.spoil(fingerprint, &[name], place.object);
        }
    }

    /// Seconds since it began, never none.
    fn now(&self) -> u32 {
        self.began.elapsed().as_secs() as u32 + 1
    }

    /// Forgets blocks in an object, where they turned out not to be what they were: from now on each is read from an older one, if
    /// it lies in one too.
    pub(super) fn spoil(&self, fingerprint: Fingerprint, names: &[SequenceHash], number: i64) {
        let (objects, there) = (self.lock(), |place: &Place| place.object == number);
        let twice =
            |name: &SequenceHash| self.index.get(fingerprint, *name).is_some_and(|place| there(&place) && place.twice);
        let mut homeless = names.iter().filter(|name| twice(name)).map(|name| (fingerprint, *name)).collect();
        let older = objects.known.range(..number).rev().filter(|(_, object)| object.fingerprint == fingerprint);
        self.rehome(older, &mut homeless, there);
        // Those that are read from elsewhere now stay.
        self.index.remove(names.iter().map(|name| (fingerprint, *name)), there);
    }

    /// Has blocks read from the first of some objects that holds them too, in one pass; those that lie in none are left.
    fn rehome<'a>(
        &self,
        objects: impl Iterator<Item = (&'a i64, &'a Object)>,
        homeless: &mut Homeless,
        gone: impl Fn(&Place) -> bool,
    ) {
        // Few blocks lie twice: mostly there is nothing to look for.
        for (number, object) in objects {
            if homeless.is_empty() {
                break;
            }
            #[cfg(test)]
            self.walked.fetch_add(1, Ordering::Relaxed);
            for block in object.blocks.iter() {
                if homeless.remove(&(object.fingerprint, block.name)) {
                    self.index.relocate(object.fingerprint, block.name, &gone, block.at(*number, self.now()));
                }
            }
        }
    }

    pub(super) fn object(&self, number: i64) -> Option<Object> {
        self.lock().known.get(&number).cloned()
    }

    /// Objects of fewer bytes that are where their blocks are found, a writer's own and, apart, those of others that are known
    /// for so long and were read; those of each domain and fingerprint in the order in which they were written.
    pub(super) fn small(
        &self,
        writer: Writer,
        left: Duration,
        below: u64,
        read: impl Fn(ObjectId) -> bool,
    ) -> Vec<Vec<Small>> {
        let objects = self.lock();
        let mut groups: BTreeMap<(bool, DomainId, Fingerprint), Vec<Small>> = BTreeMap::new();
        for (&number, object) in objects.known.iter().filter(|(_, object)| object.bytes < below) {
            let Some(id) = ObjectId::at(&object.path) else { continue };
            let own = id.writer == writer;
            if !own && (object.since.elapsed() < left || !read(id)) {
                continue;
            }
            let here = |block: &Lying| {
                let place = self.index.get(object.fingerprint, block.name)?;
                (place.object == number).then_some((block.name, place))
            };
            let blocks: Vec<_> = object.blocks.iter().filter_map(here).collect();
            if !blocks.is_empty() {
                let group = groups.entry((own, object.domain, object.fingerprint)).or_default();
                group.push(Small { number, object: object.clone(), blocks });
            }
        }
        groups.into_values().collect()
    }

    /// Leaves of some small objects what is still found in them: others may have packed the rest meanwhile.
    pub(super) fn still(&self, some: &mut Vec<Small>) {
        some.retain_mut(|Small { number, object, blocks }| {
            let place = |name| self.index.get(object.fingerprint, name);
            blocks.retain(|(name, _)| place(*name).is_some_and(|place| place.object == *number));
            !blocks.is_empty()
        });
    }

    /// Forgets an object that turned out to be gone, or to be another than it was.
    pub(super) fn lose(&self, number: i64) {
        for object in self.remove(&mut self.lock(), &[number]) {
            self.lost.fetch_add(1, Ordering::Relaxed);
            if let Some(suppressed) = self.lost_lines.pass() {
                tracing::warn!(
                    object = %object.path, blocks = object.blocks.len(), suppressed,
                    "object is missing from the store; its blocks are dropped"
                );
            }
        }
    }

    /// Forgets objects that are about to be deleted. Until then they take room.
    pub(super) fn forget(&self, condemned: impl Fn(ObjectId) -> bool) {
        let mut objects = self.lock();
        let going = |object: &Object| ObjectId::at(&object.path).is_some_and(&condemned);
        let numbers: Vec<i64> = objects.known.iter().filter(|(_, object)| going(object)).map(|(n, _)| *n).collect();
        let gone = self.remove(&mut objects, &numbers);
        self.add_unknown(gone.into_iter().map(|object| object.bytes).sum());
    }

    fn add_unknown(&self, bytes: u64) {
        if let Some(unknown) = &self.unknown_bytes {
            unknown.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Bytes of objects that are not known, as far as that is.
    pub(super) fn unknown_bytes(&self) -> u64 {
        self.unknown_bytes.as_ref().map_or(0, |unknown| unknown.load(Ordering::Relaxed))
    }

    /// Takes note of all objects that were listed: what is not known of them takes room all the same. What was forgotten since the
    /// unknown bytes were `before` is added, whether it was listed or not.
    pub(super) fn measured(&self, listed: &[ObjectMeta], before: u64) {
        let Some(unknown) = &self.unknown_bytes else { return };
        let mut bytes = 0;
        // In parts: loads wait for this lock.
        for part in listed.chunks(MEASURED) {
            let objects = self.lock();
            let rest = part.iter().filter(|meta| !objects.paths.contains(&meta.location));
            bytes += rest.map(|meta| meta.size).sum::<u64>();
        }
        // Nothing else takes away from it, so that it is at least what it was before.
        unknown.fetch_add(bytes, Ordering::Relaxed);
        unknown.fetch_sub(before, Ordering::Relaxed);
    }

    /// Notes that this process wrote an object.
    pub(super) fn wrote(&self, bytes: u64) {
        if self.unknown_bytes.is_some() {
            self.lock_recent().push_back((Instant::now(), bytes));
        }
    }

    /// Bytes that this process wrote so lately that others may not know of them.
    pub(super) fn recently_written(&self) -> u64 {
        let mut recent = self.lock_recent();
        while recent.front().is_some_and(|(at, _)| at.elapsed() > LEARNED) {
            recent.pop_front();
        }
        recent.iter().map(|(_, bytes)| bytes).sum()
    }

    fn lock_recent(&self) -> MutexGuard<'_, VecDeque<(Instant, u64)>> {
        // Pushes and pops: nothing to find half done.
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many other processes wrote lately.
    pub(super) fn active_writers(&self) -> usize {
        self.active_writers.load(Ordering::Relaxed)
    }

    pub(super) fn set_active_writers(&self, writers: usize) {
        self.active_writers.store(writers, Ordering::Relaxed);
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

    /// Bytes of all known objects and, where the store has a capacity, of the others that lie there.
    pub(super) fn taken(&self) -> u64 {
        self.lock().bytes + self.unknown_bytes()
    }

    fn lock(&self) -> MutexGuard<'_, Objects> {
        // Sums and map change together, without anything between that could panic.
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names the objects of a writer's sections.
pub(super) fn paths(layout: &super::format::layout::Layout, writer: Writer) -> impl Fn(&Section) -> Path {
    move |section| layout.blocks(section.domain, section.fingerprint, writer, section.object)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Header;
    use crate::event::Epoch;

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
        let (domain, fingerprint) = (DomainId::SHARED, Fingerprint::from_bytes([0; 32]));
        Section { domain, fingerprint, object, idle: Duration::ZERO, entries }
    }

    fn catalog(limit: usize) -> Catalog {
        Catalog::new(Level::G4, limit, true, Arc::new(EventLog::new(Epoch(1))))
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

    #[test]
    fn an_object_that_is_told_of_twice_is_known_once() {
        let catalog = catalog(10);
        catalog.add(path, &section(1, &[1, 2]));
        catalog.add(path, &section(1, &[1, 2]));
        assert!(catalog.add_older(path, &section(1, &[1, 2])));
        assert_eq!(catalog.taken(), Header::LEN as u64);
        catalog.lose(0);
        assert_eq!((known(&catalog), catalog.taken()), (vec![], 0), "there is no second of it");
        catalog.add(path, &section(1, &[1, 2]));
        assert_eq!(known(&catalog), [1, 2], "it is back");
    }

    #[test]
    fn a_block_is_read_from_the_newest_object_and_then_from_the_next() {
        let catalog = catalog(20);
        let at =
            |n| catalog.index.get(section(0, &[]).fingerprint, SequenceHash::from_bytes([n; 16])).map(|at| at.object);
        catalog.add(path, &section(1, &[1, 2]));
        catalog.add(path, &section(2, &[2, 3]));
        assert!(catalog.add_older(path, &section(3, &[1, 2, 3, 4])));
        assert_eq!([1, 2, 3, 4].map(at), [Some(0), Some(1), Some(1), Some(-1)]);
        catalog.lose(1);
        assert_eq!([1, 2, 3, 4].map(at), [Some(0), Some(0), Some(-1), Some(-1)]);
        catalog.lose(-1);
        assert_eq!(known(&catalog), [1, 2]);
    }

    #[test]
    fn only_what_lies_twice_is_looked_for_elsewhere() {
        let catalog = catalog(1_000);
        for object in 0..50 {
            catalog.add(path, &section(object, &[object as u8]));
        }
        assert!(catalog.add_older(path, &section(99, &[7, 8, 60])));
        catalog.lose(9);
        assert_eq!(catalog.walked.load(Ordering::Relaxed), 0, "it lay nowhere else");
        catalog.lose(7);
        assert_eq!(known(&catalog), [vec![0, 1, 2, 3, 4, 5, 6, 7, 8], (10..20).collect()].concat());
        assert_eq!(catalog.walked.load(Ordering::Relaxed), 49);
    }

    #[test]
    fn object_numbers_exceed_32_bits() {
        let (catalog, at) = (catalog(20), section(0, &[]).fingerprint);
        {
            let mut objects = catalog.lock();
            (objects.next, objects.first) = (i64::from(i32::MAX), i64::from(i32::MIN));
        }
        for object in 0..4 {
            catalog.add(path, &section(object, &[object as u8]));
            assert!(catalog.add_older(path, &section(object + 10, &[object as u8 + 10])));
        }
        assert_eq!(known(&catalog), [0, 1, 2, 3, 10, 11, 12, 13]);
        let newest = catalog.index.get(at, SequenceHash::from_bytes([3; 16])).unwrap().object;
        assert_eq!(newest, i64::from(i32::MAX) + 3);
        assert!(catalog.object(newest).is_some());
    }

    #[test]
    fn who_reads_from_an_object_that_is_lost_meets_no_other_under_its_number() {
        let catalog = catalog(10);
        for (object, older) in [(1, false), (2, true)] {
            let add = |object| {
                let section = section(object, &[object as u8]);
                if older {
                    assert!(catalog.add_older(path, &section));
                } else {
                    catalog.add(path, &section);
                }
                catalog.index.get(section.fingerprint, SequenceHash::from_bytes([object as u8; 16])).unwrap().object
            };
            let reading = add(object);
            catalog.lose(reading);
            assert_ne!(add(object + 10), reading);
            assert!(catalog.object(reading).is_none());
        }
    }
}
