//! Replacement of the snapshot that lookups read.

use super::Index;
use super::arena::ChunkChange;
use super::holder::Holder;
use super::holder_state::HolderState;
use super::snapshot::IndexSnapshot;
use std::sync::Arc;

impl Index {
    /// The state of a registered holder.
    pub(super) fn holder_state(&self, holder: Holder) -> Option<Arc<HolderState>> {
        self.snapshot.load().holders.get(holder).cloned()
    }

    /// Adds or removes a chunk of pages.
    pub(super) fn set_chunk(&self, change: ChunkChange) {
        self.update(|snapshot| {
            snapshot.directory = match change {
                ChunkChange::Added(at, chunk) => snapshot.directory.with(at, Some(chunk)),
                ChunkChange::Removed(at) => snapshot.directory.with(at, None),
            };
        });
    }

    /// Replaces the snapshot by a changed copy.
    pub(super) fn update<T>(&self, apply: impl FnOnce(&mut IndexSnapshot) -> T) -> T {
        let _guard = self.update_lock.lock();
        let mut snapshot = IndexSnapshot::clone(&self.snapshot.load());
        let outcome = apply(&mut snapshot);
        self.snapshot.store(Arc::new(snapshot));
        outcome
    }
}
