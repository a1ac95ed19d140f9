//! How long the blocks of an index are kept: noted for those for which anything was asked, as a rule few. Pure.

use crate::block::{BlockRetention, Date, Fingerprint, SequenceHash};
use crate::table::BlockHasher;
use std::collections::{BTreeSet, HashMap};
use std::hash::BuildHasherDefault;

type Key = (Fingerprint, SequenceHash);

pub(super) struct Terms {
    kept: HashMap<Key, BlockRetention, BuildHasherDefault<BlockHasher>>,
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
    pub(super) fn enter(&mut self, key: Key, retention: BlockRetention) {
        self.leave(key);
        if retention.expires.is_some() || retention.pinned.is_some() {
            self.kept.insert(key, retention);
            self.ends.extend(retention.expires.map(|end| (end, key)));
        }
    }

    /// A block goes.
    pub(super) fn leave(&mut self, key: Key) {
        if !self.kept.is_empty()
            && let Some(retention) = self.kept.remove(&key)
            && let Some(end) = retention.expires
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
        self.kept.get(&key).and_then(|retention| retention.pinned).is_some_and(|until| until > self.now)
    }
}
