//! The index of a tier: block hashes per fingerprint, each with a location that the tier interprets.
//!
//! Every change is announced once, in the order of the changes. Events contain hashes without fingerprints, so a hash
//! is announced with its first fingerprint, and its removal with the last one.
//! Nothing here waits or accesses a device.

mod retention;

use crate::block::{BlockRetention, Date, Fingerprint, Level, SequenceHash};
use crate::event::{BlockEvent, EventLog, SetDigest, StoredBatch};
use crate::table::{PrefetchMap, Prefetcher};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use retention::RetentionTable;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A stored block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndexEntry<P> {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) hash: SequenceHash,
    pub(crate) parent: Option<SequenceHash>,
    pub(crate) retention: BlockRetention,
    pub(crate) location: P,
}

/// The index of one tier.
pub(crate) struct Index<P> {
    level: Level,
    log: Arc<EventLog>,
    locations: RwLock<Locations<P>>,
    /// Locked while `locations` is locked, or alone.
    retention: Mutex<RetentionTable>,
}

// One map of hashes per fingerprint, so that entries do not repeat its 32 bytes: fingerprints are few.
type Locations<P> = BTreeMap<Fingerprint, PrefetchMap<P>>;

impl<P: Copy> Index<P> {
    pub(crate) fn new(level: Level, log: Arc<EventLog>) -> Self {
        Self { level, log, locations: RwLock::default(), retention: Mutex::default() }
    }

    /// Length of the longest prefix of `hashes` whose blocks are all in the index.
    pub(crate) fn holds(&self, fingerprint: Fingerprint, hashes: &[SequenceHash]) -> usize {
        self.read().get(&fingerprint).map_or(0, |by_hash| by_hash.prefix_len(hashes))
    }

    /// Location of a block.
    pub(crate) fn get(&self, fingerprint: Fingerprint, hash: SequenceHash) -> Option<P> {
        self.read().get(&fingerprint)?.get(&hash).copied()
    }

    /// Location of each block; `touch` may update the locations that are found.
    pub(crate) fn find(
        &self,
        fingerprint: Fingerprint,
        hashes: &[SequenceHash],
        touch: impl Fn(&mut P),
    ) -> Vec<Option<P>> {
        let mut locations = self.write();
        let Some(by_hash) = locations.get_mut(&fingerprint) else { return vec![None; hashes.len()] };
        let mut ahead = Prefetcher::default();
        let mut find = |at| {
            let location = by_hash.get_mut_batched(&mut ahead, hashes, at)?;
            touch(location);
            Some(*location)
        };
        (0..hashes.len()).map(&mut find).collect()
    }

    /// Updates the locations of those of `blocks` that are in the index.
    pub(crate) fn touch(&self, blocks: impl Iterator<Item = (Fingerprint, SequenceHash)>, mark: impl Fn(&mut P)) {
        let mut locations = self.write();
        for (fingerprint, hash) in blocks {
            locations.get_mut(&fingerprint).and_then(|by_hash| by_hash.get_mut(&hash)).into_iter().for_each(&mark);
        }
    }

    /// Inserts blocks, or replaces the locations of known ones. `update_parent` may update the location of a block's
    /// parent, given the location of the block.
    pub(crate) fn insert(&self, blocks: impl IntoIterator<Item = IndexEntry<P>>, update_parent: impl Fn(&mut P, P)) {
        self.insert_if(|_, _| true, blocks, update_parent);
    }

    /// Inserts blocks like [`Index::insert`], except those of which `replaces(new, known)` rejects the new location.
    pub(crate) fn insert_if(
        &self,
        replaces: impl Fn(&P, &P) -> bool,
        blocks: impl IntoIterator<Item = IndexEntry<P>>,
        update_parent: impl Fn(&mut P, P),
    ) {
        let mut locations = self.write();
        // Dropped before the lock, so that the announcements are in the order of the changes.
        let mut stored = StoredBatch::new(self.level, &self.log);
        for block in blocks {
            let known = locations.values().any(|by_hash| by_hash.contains(&block.hash));
            let by_hash = locations.entry(block.fingerprint).or_default();
            if by_hash.get(&block.hash).is_some_and(|known| !replaces(&block.location, known)) {
                continue;
            }
            by_hash.insert(block.hash, block.location);
            self.retention().insert((block.fingerprint, block.hash), block.retention);
            if let Some(parent) = block.parent.and_then(|parent| by_hash.get_mut(&parent)) {
                update_parent(parent, block.location);
            }
            if !known {
                stored.push(block.hash, block.parent);
            }
        }
    }

    /// Replaces the location of a block if `is_expected` accepts the current one.
    pub(crate) fn relocate(
        &self,
        fingerprint: Fingerprint,
        hash: SequenceHash,
        is_expected: impl Fn(&P) -> bool,
        location: P,
    ) {
        let mut locations = self.write();
        if let Some(known) = locations.get_mut(&fingerprint).and_then(|by_hash| by_hash.get_mut(&hash))
            && is_expected(known)
        {
            *known = location;
        }
    }

    /// Removes those of `blocks` whose location `is_expected` accepts, and returns their number.
    pub(crate) fn remove(
        &self,
        blocks: impl IntoIterator<Item = (Fingerprint, SequenceHash)>,
        is_expected: impl Fn(&P) -> bool,
    ) -> usize {
        let mut locations = self.write();
        let mut unannounced = Vec::new();
        let mut removed = 0;
        for (fingerprint, hash) in blocks {
            let Some(by_hash) = locations.get_mut(&fingerprint) else { continue };
            if !by_hash.get(&hash).is_some_and(&is_expected) {
                continue;
            }
            by_hash.remove(&hash);
            self.retention().remove((fingerprint, hash));
            removed += 1;
            if by_hash.is_empty() {
                locations.remove(&fingerprint);
            }
            if !locations.values().any(|by_hash| by_hash.contains(&hash)) {
                unannounced.push(hash);
            }
        }
        self.log.announce(BlockEvent::Removed { level: self.level, blocks: unannounced });
        removed
    }

    /// Removes every block whose location matches. Scans the whole index.
    pub(crate) fn remove_all(&self, matches: impl Fn(&P) -> bool) {
        let found: Vec<(Fingerprint, SequenceHash)> = {
            let locations = self.read();
            let of = |(fingerprint, by_hash): (&Fingerprint, &PrefetchMap<P>)| {
                let matching = by_hash.hashes().filter(|hash| by_hash.get(hash).is_some_and(&matches));
                matching.map(|hash| (*fingerprint, hash)).collect::<Vec<_>>()
            };
            locations.iter().flat_map(of).collect()
        };
        self.remove(found, matches);
    }

    /// Removes blocks that are expired at `now`, and returns their number.
    pub(crate) fn expire(&self, now: Date) -> usize {
        let expired = self.retention().expired(now);
        // A block that is stored again in between, with a later date, is removed as well: one more miss.
        if expired.is_empty() { 0 } else { self.remove(expired, |_| true) }
    }

    /// Whether a block was pinned at the last call of [`Index::expire`].
    pub(crate) fn is_pinned(&self, fingerprint: Fingerprint, hash: SequenceHash) -> bool {
        self.retention().is_pinned((fingerprint, hash))
    }

    /// Number of blocks, counted per fingerprint.
    pub(crate) fn len(&self) -> usize {
        self.read().values().map(PrefetchMap::len).sum()
    }

    /// Number of blocks whose location matches, counted per fingerprint. Scans the whole index.
    pub(crate) fn count(&self, matches: impl Fn(&P) -> bool) -> usize {
        self.read().values().flat_map(PrefetchMap::values).filter(|location| matches(location)).count()
    }

    /// Digest of the distinct hashes under all fingerprints. Scans the whole index.
    pub(crate) fn set_digest(&self) -> SetDigest {
        let locations = self.read();
        let before = |at: usize, hash: &SequenceHash| locations.values().take(at).any(|by_hash| by_hash.contains(hash));
        let all = locations.values().enumerate().flat_map(|(at, by_hash)| by_hash.hashes().map(move |hash| (at, hash)));
        all.filter(|(at, hash)| !before(*at, hash)).map(|(_, hash)| hash).collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, Locations<P>> {
        // A panic under this lock can only lose the announcement of a stored block, which is a hint.
        self.locations.read()
    }

    fn retention(&self) -> MutexGuard<'_, RetentionTable> {
        self.retention.lock()
    }

    fn write(&self) -> RwLockWriteGuard<'_, Locations<P>> {
        self.locations.write()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Epoch;

    fn hash(n: u8) -> SequenceHash {
        SequenceHash::from_bytes([n; 16])
    }

    fn entry(id: u8, n: u8, parent: Option<u8>) -> IndexEntry<u8> {
        let fingerprint = Fingerprint::from_bytes([id; 32]);
        IndexEntry {
            fingerprint,
            hash: hash(n),
            parent: parent.map(hash),
            retention: BlockRetention::default(),
            location: n,
        }
    }

    fn events(log: &EventLog) -> Vec<BlockEvent> {
        log.after(0, usize::MAX).unwrap().into_iter().map(|numbered| numbered.event).collect()
    }

    #[test]
    fn a_chain_is_one_event_and_a_fork_begins_another() {
        let log = Arc::new(EventLog::new(Epoch(1)));
        let index = Index::new(Level::G3, log.clone());
        index.insert([entry(1, 1, None), entry(1, 2, Some(1)), entry(1, 3, Some(2)), entry(1, 9, Some(1))], |_, _| ());
        let stored = |parent: Option<u8>, blocks: &[u8]| BlockEvent::Stored {
            level: Level::G3,
            parent: parent.map(hash),
            blocks: blocks.iter().copied().map(hash).collect(),
        };
        assert_eq!(events(&log), [stored(None, &[1, 2, 3]), stored(Some(1), &[9])]);
    }

    #[test]
    fn a_hash_is_announced_once_for_all_its_fingerprints() {
        let log = Arc::new(EventLog::new(Epoch(1)));
        let index = Index::new(Level::G3, log.clone());
        index.insert([entry(1, 1, None)], |_, _| ());
        index.insert([entry(2, 1, None), entry(1, 1, None)], |_, _| ());
        assert_eq!(events(&log).len(), 1);
        assert_eq!(index.set_digest(), [hash(1)].into_iter().collect(), "and counted once");
        let keys = |id: u8| [(Fingerprint::from_bytes([id; 32]), hash(1))];
        assert_eq!(index.remove(keys(1), |_| true), 1);
        assert_eq!(events(&log).len(), 1);
        assert_eq!(
            index.remove(keys(2), |location| *location != 1),
            0,
            "another location: not the block that was meant"
        );
        assert_eq!(index.remove(keys(2), |_| true), 1);
        assert_eq!(events(&log)[1], BlockEvent::Removed { level: Level::G3, blocks: vec![hash(1)] });
        assert_eq!(index.len(), 0);
    }

    #[test]
    fn expired_blocks_are_removed_unless_stored_again() {
        let log = Arc::new(EventLog::new(Epoch(1)));
        let index = Index::new(Level::G3, log.clone());
        let date = |seconds| Some(Date::from_unix(seconds));
        let until = |n, expires| IndexEntry {
            retention: BlockRetention { expires, ..BlockRetention::default() },
            ..entry(1, n, None)
        };
        index.insert([until(1, date(10)), until(2, date(10)), until(3, date(20)), until(4, None)], |_, _| ());
        index.insert([until(2, date(30))], |_, _| ());
        assert_eq!((index.expire(Date::from_unix(9)), index.expire(Date::from_unix(10))), (0, 1));
        assert_eq!(events(&log).pop(), Some(BlockEvent::Removed { level: Level::G3, blocks: vec![hash(1)] }));
        index.remove([(Fingerprint::from_bytes([1; 32]), hash(3))], |_| true);
        assert_eq!((index.expire(Date::from_unix(u64::MAX)), index.len()), (1, 1));
    }

    #[test]
    fn a_pin_ends_with_the_first_expiry_after_its_date() {
        let index = Index::new(Level::G3, Arc::new(EventLog::new(Epoch(1))));
        let retention = BlockRetention { pinned: Some(Date::from_unix(10)), ..BlockRetention::default() };
        index.insert([IndexEntry { retention, ..entry(1, 1, None) }, entry(1, 2, None)], |_, _| ());
        let pinned = |n| index.is_pinned(Fingerprint::from_bytes([1; 32]), hash(n));
        assert_eq!((pinned(1), pinned(2)), (true, false));
        index.expire(Date::from_unix(10));
        assert!(!pinned(1));
    }
}
