//! Which blocks are on their way to rest in a tier, so that none is written twice.

use crate::block::{Fingerprint, SequenceHash};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio_util::sync::CancellationToken;

type Key = (Fingerprint, SequenceHash);

/// The blocks that wait or are being written.
#[derive(Clone, Default)]
pub(crate) struct Claims(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// With the number of the claim.
    claimed: HashMap<Key, (u64, CancellationToken)>,
    next: u64,
}

impl Claims {
    /// The right to write a block, or what to wait for when somebody has it.
    pub(crate) fn claim(&self, fingerprint: Fingerprint, name: SequenceHash) -> Result<Claim, CancellationToken> {
        let key = (fingerprint, name);
        let mut state = self.lock();
        let State { claimed, next } = &mut *state;
        match claimed.entry(key) {
            Entry::Occupied(other) => Err(other.get().1.clone()),
            Entry::Vacant(free) => {
                let number = *next;
                *next += 1;
                free.insert((number, CancellationToken::new()));
                Ok(Claim { claims: self.clone(), key, number })
            }
        }
    }

    /// Takes the right away from a writer that does not answer any more.
    pub(crate) fn revoke(&self, fingerprint: Fingerprint, name: SequenceHash) {
        let gone = self.lock().claimed.remove(&(fingerprint, name));
        if let Some((_, token)) = gone {
            token.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // An insertion or a removal is all that happens under this lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to write a block. Dropping it, when the block rests or does not, lets the others look.
#[must_use]
pub(crate) struct Claim {
    claims: Claims,
    key: Key,
    number: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let gone = match self.claims.lock().claimed.entry(self.key) {
            // Not one that was given to another after this was revoked.
            Entry::Occupied(claimed) if claimed.get().0 == self.number => Some(claimed.remove()),
            _ => None,
        };
        if let Some((_, token)) = gone {
            token.cancel();
        }
    }
}
