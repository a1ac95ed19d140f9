//! Which blocks rest in a tier, and where: names per fingerprint, each with a place that the tier understands.
//!
//! Every change of what the index would say is announced, once, in the order of the changes. Events carry names only, so
//! a name is announced when its first fingerprint comes and removed when its last one goes.
//! Nothing here waits or touches a device.

mod retention;

use crate::block::{BlockRetention, Date, Fingerprint, Level, SequenceHash};
use crate::event::{BlockEvent, EventLog, SetDigest, StoredBatch};
use crate::table::{PrefetchMap, Prefetcher};
use retention::Terms;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A block that has come to rest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resting<P> {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) name: SequenceHash,
    pub(crate) parent: Option<SequenceHash>,
    pub(crate) retention: BlockRetention,
    pub(crate) place: P,
}

/// The index of one tier.
pub(crate) struct Index<P> {
    level: Level,
    log: Arc<EventLog>,
    spaces: RwLock<Spaces<P>>,
    /// Only locked by who has the other lock, or needs nothing else.
    terms: Mutex<Terms>,
}

// Few fingerprints, many names: the names of each stand in a map of their own, so that an entry does not repeat 32 bytes.
type Spaces<P> = BTreeMap<Fingerprint, PrefetchMap<P>>;

impl<P: Copy> Index<P> {
    pub(crate) fn new(level: Level, log: Arc<EventLog>) -> Self {
        Self { level, log, spaces: RwLock::default(), terms: Mutex::default() }
    }

    /// How many of `names`, counted from the first, rest here.
    pub(crate) fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        self.read().get(&fingerprint).map_or(0, |space| space.prefix_len(names))
    }

    /// Where a block rests.
    pub(crate) fn get(&self, fingerprint: Fingerprint, name: SequenceHash) -> Option<P> {
        self.read().get(&fingerprint)?.get(&name).copied()
    }

    /// Where each of `names` rests; `touch` may leave a mark on each place that is found.
    pub(crate) fn find(
        &self,
        fingerprint: Fingerprint,
        names: &[SequenceHash],
        touch: impl Fn(&mut P),
    ) -> Vec<Option<P>> {
        let mut spaces = self.write();
        let Some(space) = spaces.get_mut(&fingerprint) else { return vec![None; names.len()] };
        let mut ahead = Prefetcher::default();
        let mut find = |at| {
            let place = space.get_mut_batched(&mut ahead, names, at)?;
            touch(place);
            Some(*place)
        };
        (0..names.len()).map(&mut find).collect()
    }

    /// Leaves a mark on the place of each of `blocks` that is here.
    pub(crate) fn touch(&self, blocks: impl Iterator<Item = (Fingerprint, SequenceHash)>, mark: impl Fn(&mut P)) {
        let mut spaces = self.write();
        for (fingerprint, name) in blocks {
            spaces.get_mut(&fingerprint).and_then(|space| space.get_mut(&name)).into_iter().for_each(&mark);
        }
    }

    /// Adds blocks, or moves those that are there to their new place. `follow` may leave a mark on the place of a block's
    /// parent, given the place of the block.
    pub(crate) fn insert(&self, blocks: impl IntoIterator<Item = Resting<P>>, follow: impl Fn(&mut P, P)) {
        let mut spaces = self.write();
        // Dropped, and so announced, before the lock is.
        let mut stored = StoredBatch::new(self.level, &self.log);
        for block in blocks {
            let known = spaces.values().any(|space| space.contains(&block.name));
            let space = spaces.entry(block.fingerprint).or_default();
            space.insert(block.name, block.place);
            self.terms().enter((block.fingerprint, block.name), block.retention);
            if let Some(parent) = block.parent.and_then(|parent| space.get_mut(&parent)) {
                follow(parent, block.place);
            }
            if !known {
                stored.push(block.name, block.parent);
            }
        }
    }

    /// Gives a block another place, if its place is still what the caller thinks.
    pub(crate) fn relocate(&self, fingerprint: Fingerprint, name: SequenceHash, still: impl Fn(&P) -> bool, place: P) {
        let mut spaces = self.write();
        if let Some(known) = spaces.get_mut(&fingerprint).and_then(|space| space.get_mut(&name))
            && still(known)
        {
            *known = place;
        }
    }

    /// Forgets those of `blocks` whose place is what the caller thinks, and says how many.
    pub(crate) fn remove(
        &self,
        blocks: impl IntoIterator<Item = (Fingerprint, SequenceHash)>,
        still: impl Fn(&P) -> bool,
    ) -> usize {
        let mut spaces = self.write();
        let mut gone = Vec::new();
        let mut removed = 0;
        for (fingerprint, name) in blocks {
            let Some(space) = spaces.get_mut(&fingerprint) else { continue };
            if !space.get(&name).is_some_and(&still) {
                continue;
            }
            space.remove(&name);
            self.terms().leave((fingerprint, name));
            removed += 1;
            if space.is_empty() {
                spaces.remove(&fingerprint);
            }
            if !spaces.values().any(|space| space.contains(&name)) {
                gone.push(name);
            }
        }
        self.log.announce(BlockEvent::Removed { level: self.level, blocks: gone });
        removed
    }

    /// Forgets every block whose place is like this. Looks at each.
    pub(crate) fn remove_all(&self, is_like_this: impl Fn(&P) -> bool) {
        let found: Vec<(Fingerprint, SequenceHash)> = {
            let spaces = self.read();
            let of = |(fingerprint, space): (&Fingerprint, &PrefetchMap<P>)| {
                let like_this = space.hashes().filter(|name| space.get(name).is_some_and(&is_like_this));
                like_this.map(|name| (*fingerprint, name)).collect::<Vec<_>>()
            };
            spaces.iter().flat_map(of).collect()
        };
        self.remove(found, is_like_this);
    }

    /// Forgets blocks that are over by `now`, and says how many.
    pub(crate) fn expire(&self, now: Date) -> usize {
        let over = self.terms().over(now);
        // One that comes again meanwhile, to be kept longer, goes with them: a miss more.
        if over.is_empty() { 0 } else { self.remove(over, |_| true) }
    }

    /// Whether a block was pinned when [`Index::expire`] last looked.
    pub(crate) fn is_pinned(&self, fingerprint: Fingerprint, name: SequenceHash) -> bool {
        self.terms().is_pinned((fingerprint, name))
    }

    /// How many blocks rest here, each fingerprint counted.
    pub(crate) fn len(&self) -> usize {
        self.read().values().map(PrefetchMap::len).sum()
    }

    /// Which names rest here, whatever their fingerprints. Looks at each: for whoever wants to know, now and then.
    pub(crate) fn set_digest(&self) -> SetDigest {
        let spaces = self.read();
        let before = |at: usize, name: &SequenceHash| spaces.values().take(at).any(|space| space.contains(name));
        let all = spaces.values().enumerate().flat_map(|(at, space)| space.hashes().map(move |name| (at, name)));
        all.filter(|(at, name)| !before(*at, name)).map(|(_, name)| name).collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, Spaces<P>> {
        // A panic under this lock can only lose an announcement of a block that is there: a hint less.
        self.spaces.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn terms(&self) -> MutexGuard<'_, Terms> {
        self.terms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Spaces<P>> {
        self.spaces.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Epoch;

    fn name(n: u8) -> SequenceHash {
        SequenceHash::from_bytes([n; 16])
    }

    fn resting(space: u8, n: u8, parent: Option<u8>) -> Resting<u8> {
        let fingerprint = Fingerprint::from_bytes([space; 32]);
        Resting { fingerprint, name: name(n), parent: parent.map(name), retention: BlockRetention::default(), place: n }
    }

    fn events(log: &EventLog) -> Vec<BlockEvent> {
        log.after(0, usize::MAX).unwrap().into_iter().map(|numbered| numbered.event).collect()
    }

    #[test]
    fn a_chain_is_one_event_and_a_fork_begins_another() {
        let log = Arc::new(EventLog::new(Epoch(1)));
        let index = Index::new(Level::G3, log.clone());
        index.insert(
            [resting(1, 1, None), resting(1, 2, Some(1)), resting(1, 3, Some(2)), resting(1, 9, Some(1))],
            |_, _| (),
        );
        let stored = |parent: Option<u8>, blocks: &[u8]| BlockEvent::Stored {
            level: Level::G3,
            parent: parent.map(name),
            blocks: blocks.iter().copied().map(name).collect(),
        };
        assert_eq!(events(&log), [stored(None, &[1, 2, 3]), stored(Some(1), &[9])]);
    }

    #[test]
    fn a_name_is_announced_with_its_first_fingerprint_and_removed_with_its_last() {
        let log = Arc::new(EventLog::new(Epoch(1)));
        let index = Index::new(Level::G3, log.clone());
        index.insert([resting(1, 1, None)], |_, _| ());
        index.insert([resting(2, 1, None), resting(1, 1, None)], |_, _| ());
        assert_eq!(events(&log).len(), 1);
        assert_eq!(index.set_digest(), [name(1)].into_iter().collect(), "and counted once");
        let keys = |space: u8| [(Fingerprint::from_bytes([space; 32]), name(1))];
        assert_eq!(index.remove(keys(1), |_| true), 1);
        assert_eq!(events(&log).len(), 1);
        assert_eq!(index.remove(keys(2), |place| *place != 1), 0, "another place: not the block that was meant");
        assert_eq!(index.remove(keys(2), |_| true), 1);
        assert_eq!(events(&log)[1], BlockEvent::Removed { level: Level::G3, blocks: vec![name(1)] });
        assert_eq!(index.len(), 0);
    }

    #[test]
    fn what_is_over_is_forgotten_unless_it_came_again() {
        let log = Arc::new(EventLog::new(Epoch(1)));
        let index = Index::new(Level::G3, log.clone());
        let date = |seconds| Some(Date::from_unix(seconds));
        let until = |n, expires| Resting {
            retention: BlockRetention { expires, ..BlockRetention::default() },
            ..resting(1, n, None)
        };
        index.insert([until(1, date(10)), until(2, date(10)), until(3, date(20)), until(4, None)], |_, _| ());
        index.insert([until(2, date(30))], |_, _| ());
        assert_eq!((index.expire(Date::from_unix(9)), index.expire(Date::from_unix(10))), (0, 1));
        assert_eq!(events(&log).pop(), Some(BlockEvent::Removed { level: Level::G3, blocks: vec![name(1)] }));
        index.remove([(Fingerprint::from_bytes([1; 32]), name(3))], |_| true);
        assert_eq!((index.expire(Date::from_unix(u64::MAX)), index.len()), (1, 1));
    }

    #[test]
    fn a_pin_ends_with_the_sweep_after_its_date() {
        let index = Index::new(Level::G3, Arc::new(EventLog::new(Epoch(1))));
        let retention = BlockRetention { pinned: Some(Date::from_unix(10)), ..BlockRetention::default() };
        index.insert([Resting { retention, ..resting(1, 1, None) }, resting(1, 2, None)], |_, _| ());
        let pinned = |n| index.is_pinned(Fingerprint::from_bytes([1; 32]), name(n));
        assert_eq!((pinned(1), pinned(2)), (true, false));
        index.expire(Date::from_unix(10));
        assert!(!pinned(1));
    }
}
