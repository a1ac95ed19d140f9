//! The last event of a holder that the index includes. Lock-free: the task that applies the events of the holder writes
//! it, diagnostics read it.

use super::Index;
use super::holder::Holder;
use kvbm::{CacheDigest, Epoch};
use std::sync::atomic::{AtomicU64, Ordering};

/// Epoch and number; number 0 before the first event.
#[derive(Default)]
pub(super) struct LastEvent {
    epoch: AtomicU64,
    number: AtomicU64,
}

impl Index {
    /// Notes that the blocks of a holder in the index are now those after this event of its source. Called after the
    /// change itself: until then a reader may see the new blocks with the former number.
    pub(crate) fn note_event(&self, holder: Holder, epoch: Epoch, number: u64) {
        let snapshot = self.snapshot.load();
        let Some(state) = snapshot.holders.get(holder) else { return };
        state.last_event.epoch.store(epoch.0, Ordering::Relaxed);
        state.last_event.number.store(number, Ordering::Relaxed);
    }

    /// The last event of a holder that the index includes, and the digest of its blocks. `None` for an unknown holder.
    pub(crate) fn last_event(&self, holder: Holder) -> Option<(Epoch, u64, Option<CacheDigest>)> {
        let state = self.holder_state(holder)?;
        let LastEvent { epoch, number } = &state.last_event;
        let (epoch, number) = (epoch.load(Ordering::Relaxed), number.load(Ordering::Relaxed));
        Some((Epoch(epoch), number, state.digests.all()))
    }

    /// Digest of the indexed blocks of a holder at all levels, to be compared with that of its source; `None` if the
    /// index evicted some, and for an unknown holder.
    pub(crate) fn cache_digest(&self, holder: Holder) -> Option<CacheDigest> {
        self.holder_state(holder)?.digests.all()
    }
}
