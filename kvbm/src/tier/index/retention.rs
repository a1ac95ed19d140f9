//! Retention of the blocks of an index: an entry for each block with an expiry or a pin, usually few. Pure.

use crate::block::{BlockRetention, Date, Fingerprint, SequenceHash};
use crate::table::BlockHasher;
use std::collections::{BTreeSet, HashMap};
use std::hash::BuildHasherDefault;

type Key = (Fingerprint, SequenceHash);

pub(super) struct RetentionTable {
    blocks: HashMap<Key, BlockRetention, BuildHasherDefault<BlockHasher>>,
    /// Expiry dates, the earliest first.
    expiries: BTreeSet<(Date, Key)>,
    /// Time of the last call of [`Self::expired`].
    now: Date,
}

impl Default for RetentionTable {
    fn default() -> Self {
        Self { blocks: HashMap::default(), expiries: BTreeSet::new(), now: Date::from_unix(0) }
    }
}

impl RetentionTable {
    /// Sets the retention of a block.
    pub(super) fn insert(&mut self, key: Key, retention: BlockRetention) {
        self.remove(key);
        if retention.expires.is_some() || retention.pinned.is_some() {
            self.blocks.insert(key, retention);
            self.expiries.extend(retention.expires.map(|end| (end, key)));
        }
    }

    /// Removes a block.
    pub(super) fn remove(&mut self, key: Key) {
        if !self.blocks.is_empty()
            && let Some(retention) = self.blocks.remove(&key)
            && let Some(end) = retention.expires
        {
            self.expiries.remove(&(end, key));
        }
    }

    /// The blocks that are expired at `now`. The caller [removes](Self::remove) each of them.
    pub(super) fn expired(&mut self, now: Date) -> Vec<Key> {
        self.now = now;
        self.expiries.iter().take_while(|(end, _)| *end <= now).map(|(_, key)| *key).collect()
    }

    /// Whether a block was pinned at the last call of [`Self::expired`].
    pub(super) fn is_pinned(&self, key: Key) -> bool {
        self.blocks.get(&key).and_then(|retention| retention.pinned).is_some_and(|until| until > self.now)
    }
}
