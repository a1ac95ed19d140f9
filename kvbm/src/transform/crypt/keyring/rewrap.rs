//! Rotation of master keys: wraps all data keys with the first master key.

use super::super::key_store::{KeyEntry, KeyState, PARALLEL};
use super::super::{KeyError, MasterKeyId};
use super::Keyring;
use crate::block::{DomainId, KeyId};
use futures::{StreamExt, TryStreamExt, stream};
use std::collections::BTreeMap;

impl Keyring {
    /// Rewraps all data keys with the first master key, so that the others can be retired. Returns the number of
    /// rewrapped keys.
    pub async fn rewrap(&self) -> Result<usize, KeyError> {
        let _serial = self.serial.lock().await;
        let entries = self.store.list(None).await?;
        self.apply_listing(&entries, None).await?;
        let first = self.known().masters.first();
        let mut wrapped = BTreeMap::<(DomainId, KeyId), Vec<MasterKeyId>>::new();
        for KeyEntry { domain, key, state } in entries {
            if let KeyState::Wrapped(master) = state
                && !self.known().shredded.contains(&(domain, key))
            {
                wrapped.entry((domain, key)).or_default().push(master);
            }
        }
        wrapped.retain(|_, masters| *masters != [first]);
        let rewrapping: Vec<_> =
            wrapped.into_iter().map(|((domain, key), masters)| self.rewrap_one(domain, key, masters, first)).collect();
        let done: Vec<bool> = stream::iter(rewrapping).buffer_unordered(PARALLEL).try_collect().await?;
        let count = done.into_iter().filter(|done| *done).count();
        if count > 0 {
            // Another process may have shredded a key in between; its entry exists by now, and this removes the key
            // again.
            self.apply_listing(&self.store.list(None).await?, None).await?;
            tracing::info!(keys = count, master = %first, "data keys rewrapped with the first master key");
        }
        Ok(count)
    }

    async fn rewrap_one(
        &self,
        domain: DomainId,
        key: KeyId,
        masters: Vec<MasterKeyId>,
        first: MasterKeyId,
    ) -> Result<bool, KeyError> {
        if !masters.contains(&first) {
            match self.fetch(domain, key, &masters).await {
                Ok(Some(data)) => self.store_key(domain, &data).await?,
                Ok(None) => return Ok(false),
                // A key that cannot be unwrapped must not stop the others.
                Err(error @ (KeyError::UnknownMasterKey { .. } | KeyError::Corrupt { .. })) => {
                    tracing::warn!(%error, "cannot rewrap a data key");
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        let old = masters.into_iter().filter(|master| *master != first);
        self.store
            .remove(old.map(|master| KeyEntry { domain, key, state: KeyState::Wrapped(master) }).collect())
            .await?;
        Ok(true)
    }
}
