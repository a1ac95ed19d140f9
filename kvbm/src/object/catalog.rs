//! The catalog of a store: which objects exist, and where in them each block is.
//!
//! Bounded: beyond a maximum number of blocks the oldest objects are dropped from the catalog. This costs hits, never
//! correctness. A block may be in several objects: it is read from the newest known one, and from the next when that
//! one is removed.

use super::client::unreadable::Unreadable;
use super::format::layout::{InstanceId, ObjectId};
use super::format::manifest::{BlockEntry, Section};
use crate::block::{DomainId, Fingerprint, Level, SequenceHash};
use crate::event::EventLog;
use crate::table::BlockHasher;
use crate::tier::{Index, IndexEntry};
use object_store::ObjectMeta;
use object_store::path::Path;
use parking_lot::{Mutex, MutexGuard};
use spans::LogLimit;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::hash::BuildHasherDefault;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Where a block is read from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockLocation {
    /// Number of the object in the catalog.
    pub(super) object: i64,
    /// Offset of the header in the object, in bytes.
    pub(super) offset: u32,
    /// Bytes of the payload.
    pub(super) length: u32,
    /// Whether the block is, or was, in another object too.
    has_copies: bool,
    /// When this copy replaced another one, in seconds since the catalog was created; 0 if it replaced none. A reader
    /// that loaded the previous copy may still report that one as corrupt.
    relocated_at: u32,
}

/// An object in the catalog.
#[derive(Clone)]
pub(super) struct Object {
    pub(super) path: Path,
    pub(super) bytes: u64,
    pub(super) domain: DomainId,
    pub(super) fingerprint: Fingerprint,
    /// For how long its blocks had not been used when it was written.
    pub(super) idle: Duration,
    blocks: Arc<[ObjectBlock]>,
    pub(super) learned_at: Instant,
}

/// A small object, and the blocks that are read from it.
pub(super) struct SmallObject {
    pub(super) number: i64,
    pub(super) object: Object,
    pub(super) blocks: Vec<(SequenceHash, BlockLocation)>,
}

/// A block in an object.
#[derive(Clone, Copy)]
struct ObjectBlock {
    hash: SequenceHash,
    offset: u32,
    length: u32,
}

impl ObjectBlock {
    /// Its location from now on, as one of several copies.
    fn at(self, object: i64, now: u32) -> BlockLocation {
        BlockLocation { object, offset: self.offset, length: self.length, has_copies: true, relocated_at: now }
    }
}

/// Seconds after which every read of a previous copy has finished. A request with its retries takes less.
const STALE_READ_SECONDS: u32 = 30;

/// Time until other processes know a new object: they poll every second, and reading a manifest takes less than
/// another.
const PROPAGATION_TIME: Duration = Duration::from_secs(3);

/// Objects that are looked up under one lock: some tens of microseconds.
const RECONCILE_BATCH: usize = 512;

/// Blocks whose object was removed or is corrupt, and that have a copy in another object.
type Orphans = HashSet<(Fingerprint, SequenceHash), BuildHasherDefault<BlockHasher>>;

pub(super) struct Catalog {
    pub(super) index: Index<BlockLocation>,
    max_blocks: usize,
    created_at: Instant,
    objects: Mutex<Objects>,
    missing: AtomicU64,
    missing_object_log: LogLimit,
    /// Number of corrupt manifests.
    corrupt: AtomicU64,
    pub(super) corrupt_manifest_log: LogLimit,
    /// Manifests that cannot be read although the store serves reads.
    pub(super) unreadable: Unreadable,
    /// Bytes of objects in the store that are not in the catalog: marked for deletion, dropped for lack of memory, or
    /// of another version. Counted only if the store has a capacity.
    unknown_bytes: Option<AtomicU64>,
    /// Number of other processes that wrote recently.
    active_writers: AtomicUsize,
    /// Bytes that this process wrote in the last seconds, which other processes may not know of.
    recent: Mutex<VecDeque<(Instant, u64)>>,
    /// Number of objects that were searched for copies.
    #[cfg(test)]
    scanned_objects: AtomicU64,
}

/// Objects numbered by age: newly written ones count up, those found in the history count down. Numbers are not
/// reused, so that a reader that still holds the number of a removed object does not get another one.
#[derive(Default)]
struct Objects {
    by_number: BTreeMap<i64, Object>,
    next: i64,
    first: i64,
    /// Paths of all objects. A manifest may be read twice, when a round failed in between.
    paths: HashSet<Path>,
    blocks: usize,
    bytes: u64,
}

impl Object {
    fn block_keys(&self) -> impl Iterator<Item = (Fingerprint, SequenceHash)> {
        self.blocks.iter().map(|block| (self.fingerprint, block.hash))
    }
}

impl Objects {
    fn take(&mut self, number: i64) -> Option<Object> {
        let object = self.by_number.remove(&number)?;
        self.paths.remove(&object.path);
        self.blocks -= object.blocks.len();
        self.bytes -= object.bytes;
        Some(object)
    }
}

impl Catalog {
    /// Creates a catalog of at most `max_blocks` blocks. `has_capacity`: the store is bounded, so unknown bytes are
    /// counted.
    pub(super) fn new(level: Level, max_blocks: usize, has_capacity: bool, events: Arc<EventLog>) -> Self {
        let index = Index::new(level, events);
        Self {
            index,
            max_blocks,
            created_at: Instant::now(),
            objects: Mutex::default(),
            missing: AtomicU64::new(0),
            missing_object_log: LogLimit::default(),
            corrupt_manifest_log: LogLimit::default(),
            corrupt: AtomicU64::new(0),
            unreadable: Unreadable::default(),
            unknown_bytes: has_capacity.then(AtomicU64::default),
            active_writers: AtomicUsize::new(0),
            recent: Mutex::default(),
            #[cfg(test)]
            scanned_objects: AtomicU64::new(0),
        }
    }

    /// Adds an object as the newest one, unless it is in the catalog.
    pub(super) fn insert_newest(&self, path: impl Fn(&Section) -> Path, section: &Section) {
        let (mut objects, path) = (self.lock(), path(section));
        if objects.paths.contains(&path) {
            return;
        }
        let number = objects.next;
        objects.next += 1;
        self.insert(&mut objects, number, path, section);
        while objects.blocks > self.max_blocks && objects.by_number.len() > 1 {
            let Some(oldest) = objects.by_number.first_key_value().map(|(number, _)| *number) else { return };
            // A block that is read from the oldest object has no other copy.
            if let Some(object) = objects.take(oldest) {
                self.add_unknown(object.bytes);
                self.index.remove(object.block_keys(), |location| location.object == oldest);
            }
        }
    }

    /// Adds an object as the oldest one, and returns whether there was room for it.
    pub(super) fn insert_oldest(&self, path: impl Fn(&Section) -> Path, section: &Section) -> bool {
        let (mut objects, path) = (self.lock(), path(section));
        if objects.paths.contains(&path) {
            return true;
        }
        if objects.blocks + section.entries.len() > self.max_blocks {
            return false;
        }
        objects.first -= 1;
        let number = objects.first;
        self.insert(&mut objects, number, path, section);
        true
    }

    fn insert(&self, objects: &mut Objects, number: i64, path: Path, section: &Section) {
        let object_block =
            |entry: &BlockEntry| ObjectBlock { hash: entry.hash, offset: entry.offset, length: entry.length };
        let Section { domain, fingerprint, idle, .. } = *section;
        let (bytes, blocks) = (section.bytes(), section.entries.iter().map(object_block).collect());
        let object = Object { path, bytes, domain, fingerprint, idle, blocks, learned_at: Instant::now() };
        objects.blocks += object.blocks.len();
        objects.bytes += object.bytes;
        objects.paths.insert(object.path.clone());
        objects.by_number.insert(number, object);
        let hashes: Vec<SequenceHash> = section.entries.iter().map(|entry| entry.hash).collect();
        let before = self.index.find(fingerprint, &hashes, |location| location.has_copies = true);
        let now = self.now();
        let newer =
            |(_, location): &(_, Option<BlockLocation>)| location.is_none_or(|location| location.object <= number);
        let entries = section.entries.iter().zip(before).filter(newer);
        let indexed = |(entry, before): (&BlockEntry, Option<BlockLocation>)| IndexEntry {
            fingerprint,
            hash: entry.hash,
            parent: entry.parent,
            retention: entry.retention(),
            location: BlockLocation {
                object: number,
                offset: entry.offset,
                length: entry.length,
                has_copies: before.is_some(),
                relocated_at: if before.is_some() { now } else { 0 },
            },
        };
        self.index.insert(entries.map(indexed), |_, _| ());
    }

    /// Removes objects; `numbers` is sorted. Blocks with a copy in another object are read from there from now on.
    fn remove(&self, objects: &mut Objects, numbers: &[i64]) -> Vec<Object> {
        let (mut unavailable, mut orphans) = (Vec::new(), Orphans::default());
        let mut removed = Vec::with_capacity(numbers.len());
        for (number, object) in numbers.iter().filter_map(|number| Some((*number, objects.take(*number)?))) {
            for key in object.block_keys() {
                match self.index.get(key.0, key.1).filter(|at| at.object == number) {
                    Some(BlockLocation { has_copies: true, .. }) => drop(orphans.insert(key)),
                    Some(_) => unavailable.push(key),
                    None => {}
                }
            }
            removed.push(object);
        }
        let is_removed = |location: &BlockLocation| numbers.binary_search(&location.object).is_ok();
        self.relocate_orphans(objects.by_number.iter().rev(), &mut orphans, is_removed);
        unavailable.extend(orphans);
        self.index.remove(unavailable, is_removed);
        removed
    }

    /// Drops the copy of a block that was found to be corrupt. Ignored for some seconds after another copy replaced
    /// the one that was read: the report may concern the previous copy, which is dropped already.
    pub(super) fn discard(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        let Some(location) = self.index.get(fingerprint, hash) else { return };
        if location.relocated_at == 0 || self.now() - location.relocated_at > STALE_READ_SECONDS {
            self.mark_corrupt(fingerprint, &[hash], location.object);
        }
    }

    /// Seconds since the catalog was created, plus 1.
    fn now(&self) -> u32 {
        self.created_at.elapsed().as_secs() as u32 + 1
    }

    /// Drops corrupt blocks of an object. A block with a copy in an older object is read from there from now on.
    pub(super) fn mark_corrupt(&self, fingerprint: Fingerprint, hashes: &[SequenceHash], number: i64) {
        let objects = self.lock();
        let is_in_object = |location: &BlockLocation| location.object == number;
        let has_copies = |hash: &SequenceHash| {
            self.index.get(fingerprint, *hash).is_some_and(|location| is_in_object(&location) && location.has_copies)
        };
        let mut orphans = hashes.iter().filter(|hash| has_copies(hash)).map(|hash| (fingerprint, *hash)).collect();
        let older = objects.by_number.range(..number).rev().filter(|(_, object)| object.fingerprint == fingerprint);
        self.relocate_orphans(older, &mut orphans, is_in_object);
        // Blocks that were relocated are not in this object any more and stay.
        self.index.remove(hashes.iter().map(|hash| (fingerprint, *hash)), is_in_object);
    }

    /// Relocates each block to the first of `objects` that contains it, in one pass. `orphans` keeps those without a
    /// copy.
    fn relocate_orphans<'a>(
        &self,
        objects: impl Iterator<Item = (&'a i64, &'a Object)>,
        orphans: &mut Orphans,
        is_removed: impl Fn(&BlockLocation) -> bool,
    ) {
        // Few blocks have copies, so this loop mostly ends at once.
        for (number, object) in objects {
            if orphans.is_empty() {
                break;
            }
            #[cfg(test)]
            self.scanned_objects.fetch_add(1, Ordering::Relaxed);
            for block in object.blocks.iter() {
                if orphans.remove(&(object.fingerprint, block.hash)) {
                    self.index.relocate(object.fingerprint, block.hash, &is_removed, block.at(*number, self.now()));
                }
            }
        }
    }

    pub(super) fn object(&self, number: i64) -> Option<Object> {
        self.lock().by_number.get(&number).cloned()
    }

    /// Objects smaller than `max_bytes` from which blocks are read: those of `writer`, and, in separate groups, those
    /// of other writers that have been known for `min_age` and were read by this process. One group per domain and
    /// fingerprint, in the order in which the objects were written.
    pub(super) fn small_objects(
        &self,
        writer: InstanceId,
        min_age: Duration,
        max_bytes: u64,
        was_read: impl Fn(ObjectId) -> bool,
    ) -> Vec<Vec<SmallObject>> {
        let objects = self.lock();
        let mut groups: BTreeMap<(bool, DomainId, Fingerprint), Vec<SmallObject>> = BTreeMap::new();
        for (&number, object) in objects.by_number.iter().filter(|(_, object)| object.bytes < max_bytes) {
            let Some(id) = ObjectId::from_path(&object.path) else { continue };
            let own = id.writer == writer;
            if !own && (object.learned_at.elapsed() < min_age || !was_read(id)) {
                continue;
            }
            let in_place = |block: &ObjectBlock| {
                let location = self.index.get(object.fingerprint, block.hash)?;
                (location.object == number).then_some((block.hash, location))
            };
            let blocks: Vec<_> = object.blocks.iter().filter_map(in_place).collect();
            if !blocks.is_empty() {
                let group = groups.entry((own, object.domain, object.fingerprint)).or_default();
                group.push(SmallObject { number, object: object.clone(), blocks });
            }
        }
        groups.into_values().collect()
    }

    /// Keeps only the blocks that are still read from these objects. Another process may have rewritten the others.
    pub(super) fn retain_current(&self, small_objects: &mut Vec<SmallObject>) {
        small_objects.retain_mut(|SmallObject { number, object, blocks }| {
            let location = |hash| self.index.get(object.fingerprint, hash);
            blocks.retain(|(hash, _)| location(*hash).is_some_and(|location| location.object == *number));
            !blocks.is_empty()
        });
    }

    /// Removes an object that is missing from the store or has another size.
    pub(super) fn mark_missing(&self, number: i64) {
        for object in self.remove(&mut self.lock(), &[number]) {
            self.missing.fetch_add(1, Ordering::Relaxed);
            if let Some(suppressed) = self.missing_object_log.admit() {
                tracing::warn!(
                    object = %object.path, blocks = object.blocks.len(), suppressed,
                    "object is missing from the store; its blocks are dropped"
                );
            }
        }
    }

    /// Removes objects that are marked for deletion. Their bytes still count until they are deleted.
    pub(super) fn remove_marked(&self, is_marked: impl Fn(ObjectId) -> bool) {
        let mut objects = self.lock();
        let to_remove = |object: &Object| ObjectId::from_path(&object.path).is_some_and(&is_marked);
        let numbers: Vec<i64> =
            objects.by_number.iter().filter(|(_, object)| to_remove(object)).map(|(n, _)| *n).collect();
        let removed = self.remove(&mut objects, &numbers);
        self.add_unknown(removed.into_iter().map(|object| object.bytes).sum());
    }

    fn add_unknown(&self, bytes: u64) {
        if let Some(unknown) = &self.unknown_bytes {
            unknown.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Bytes of objects that are not in the catalog, if these are counted.
    pub(super) fn unknown_bytes(&self) -> u64 {
        self.unknown_bytes.as_ref().map_or(0, |unknown| unknown.load(Ordering::Relaxed))
    }

    /// Recomputes the unknown bytes from a list of all objects. Bytes of objects that were removed from the catalog
    /// since the unknown bytes were `before` are added, whether these objects were listed or not.
    pub(super) fn reconcile(&self, listed: &[ObjectMeta], before: u64) {
        let Some(unknown) = &self.unknown_bytes else { return };
        let mut bytes = 0;
        // In batches, because loads wait for this lock.
        for part in listed.chunks(RECONCILE_BATCH) {
            let objects = self.lock();
            let rest = part.iter().filter(|meta| !objects.paths.contains(&meta.location));
            bytes += rest.map(|meta| meta.size).sum::<u64>();
        }
        // No other code subtracts, so the value is at least `before`.
        unknown.fetch_add(bytes, Ordering::Relaxed);
        unknown.fetch_sub(before, Ordering::Relaxed);
    }

    /// Records that this process wrote an object.
    pub(super) fn record_written(&self, bytes: u64) {
        if self.unknown_bytes.is_some() {
            self.lock_recent().push_back((Instant::now(), bytes));
        }
    }

    /// Bytes that this process wrote so recently that other processes may not know of them.
    pub(super) fn recently_written(&self) -> u64 {
        let mut recent = self.lock_recent();
        while recent.front().is_some_and(|(at, _)| at.elapsed() > PROPAGATION_TIME) {
            recent.pop_front();
        }
        recent.iter().map(|(_, bytes)| bytes).sum()
    }

    fn lock_recent(&self) -> MutexGuard<'_, VecDeque<(Instant, u64)>> {
        // Single pushes and pops, so the queue is valid after a panic.
        self.recent.lock()
    }

    /// Number of other processes that wrote recently.
    pub(super) fn active_writers(&self) -> usize {
        self.active_writers.load(Ordering::Relaxed)
    }

    pub(super) fn set_active_writers(&self, writers: usize) {
        self.active_writers.store(writers, Ordering::Relaxed);
    }

    /// Counts a corrupt manifest.
    pub(super) fn count_corrupt_manifest(&self) {
        self.corrupt.fetch_add(1, Ordering::Relaxed);
    }

    /// Corrupt manifests so far.
    pub(super) fn corrupt_manifests(&self) -> u64 {
        self.corrupt.load(Ordering::Relaxed)
    }

    /// Missing objects so far.
    pub(super) fn missing_objects(&self) -> u64 {
        self.missing.load(Ordering::Relaxed)
    }

    /// Bytes of all objects in the catalog and, if the store has a capacity, of the others in the store.
    pub(super) fn used_bytes(&self) -> u64 {
        self.lock().bytes + self.unknown_bytes()
    }

    fn lock(&self) -> MutexGuard<'_, Objects> {
        // The map and its sums change together, and no code that could panic runs in between.
        self.objects.lock()
    }
}

/// The path of the object of a writer's section.
pub(super) fn object_paths(layout: &super::format::layout::Layout, writer: InstanceId) -> impl Fn(&Section) -> Path {
    move |section| layout.object(section.domain, section.fingerprint, writer, section.object)
}

#[cfg(test)]
mod tests;
