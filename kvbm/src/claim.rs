//! Which blocks are on their way to rest in a tier, so that none is written twice.

use crate::{Fingerprint, SequenceHash};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};
use tokio_util::sync::CancellationToken;

type Key = (Fingerprint, SequenceHash);

/// The blocks that wait or are being written.
#[derive(Clone, Default)]
pub(crate) struct Claims(Arc<Mutex<HashMap<Key, CancellationToken>>>);

impl Claims {
    /// The right to write a block, or what to wait for when somebody has it.
    pub(crate) fn claim(&self, fingerprint: Fingerprint, name: SequenceHash) -> Result<Claim, CancellationToken> {
        let key = (fingerprint, name);
        match self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(key) {
            Entry::Occupied(other) => Err(other.get().clone()),
            Entry::Vacant(free) => {
                free.insert(CancellationToken::new());
                Ok(Claim { claims: self.clone(), key })
            }
        }
    }
}

/// The right to write a block. Dropping it, when the block rests or does not, lets the others look.
#[must_use]
pub(crate) struct Claim {
    claims: Claims,
    key: Key,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let gone = self.claims.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
        if let Some(token) = gone {
            token.cancel();
        }
    }
}
