//! Claims of blocks that are queued or being written, so that none is written twice at the same time.

use crate::block::{Fingerprint, SequenceHash};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

type Key = (Fingerprint, SequenceHash);

/// The claimed blocks of a tier.
#[derive(Clone, Default)]
pub(crate) struct WriteClaims(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Claimed blocks, with the number of the claim and the token that is cancelled when it ends.
    claimed: HashMap<Key, (u64, CancellationToken)>,
    next: u64,
}

impl WriteClaims {
    /// Claims a block. If it is claimed already: the token that is cancelled when that claim ends.
    pub(crate) fn claim(&self, fingerprint: Fingerprint, hash: SequenceHash) -> Result<WriteClaim, CancellationToken> {
        let key = (fingerprint, hash);
        let mut state = self.lock();
        let State { claimed, next } = &mut *state;
        match claimed.entry(key) {
            Entry::Occupied(other) => Err(other.get().1.clone()),
            Entry::Vacant(free) => {
                let number = *next;
                *next += 1;
                free.insert((number, CancellationToken::new()));
                Ok(WriteClaim { claims: self.clone(), key, number })
            }
        }
    }

    /// Ends the claim of a writer that does not answer any more.
    pub(crate) fn revoke(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        let removed = self.lock().claimed.remove(&(fingerprint, hash));
        if let Some((_, token)) = removed {
            token.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change under this lock is one insertion or removal.
        self.0.lock()
    }
}

/// The exclusive right to write a block. Drop ends the claim and wakes the tasks that wait for it.
#[must_use]
pub(crate) struct WriteClaim {
    claims: WriteClaims,
    key: Key,
    number: u64,
}

impl Drop for WriteClaim {
    fn drop(&mut self) {
        let removed = match self.claims.lock().claimed.entry(self.key) {
            // After a revocation another writer may have claimed the block.
            Entry::Occupied(claimed) if claimed.get().0 == self.number => Some(claimed.remove()),
            _ => None,
        };
        if let Some((_, token)) = removed {
            token.cancel();
        }
    }
}
