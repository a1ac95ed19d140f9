//! How long the blocks of an index are kept: noted for those for which anything was asked, as a rule few. Pure.

use crate::block::{Date, Fingerprint, Keep, SequenceHash};
use crate::table::NameHasher;
use std::collections::{BTreeSet, HashMap};
use std::hash::BuildHasherDefault;

type Key = (Fingerprint, SequenceHash);

pub(super) struct Terms {
    kept: HashMap<Key, Keep, BuildHasherDefault<NameHasher>>,
    ends: BTreeSet<(Date, Key)>,
    /// As of the last sweep.
    now: Date,
}

impl Default for Terms {
    fn default() -> Self {
        Self { kept: HashMap::default(), ends: BTreeSet::new(), now: Date::from_unix(0) }
    }
}

impl Terms {
    /// A block comes, or comes again.
    pub(super) fn enter(&mut self, key: Key, keep: Keep) {
        self.leave(key);
        if keep.expires.is_some() || keep.pinned.is_some() {
            self.kept.insert(key, keep);
            self.ends.extend(keep.expires.map(|end| (end, key)));
        }
    }

    /// A block goes.
    pub(super) fn leave(&mut self, key: Key) {
        if !self.kept.is_empty()
            && let Some(keep) = self.kept.remove(&key)
            && let Some(end) = keep.expires
        {
            self.ends.remove(&(end, key));
        }
    }

    /// The blocks that are over. The caller lets each of them [leave](Self::leave).
    pub(super) fn over(&mut self, now: Date) -> Vec<Key> {
        self.now = now;
        self.ends.iter().take_while(|(end, _)| *end <= now).map(|(_, key)| *key).collect()
    }

    /// Whether a block was pinned at the last sweep.
    pub(super) fn is_pinned(&self, key: Key) -> bool {
        self.kept.get(&key).and_then(|keep| keep.pinned).is_some_and(|until| until > self.now)
    }
}
