//! Storage of wrapped keys: small objects that never change.
//!
//! ```text
//!   PREFIX/DOMAIN/KEY.MASTER     the data key KEY of a domain, wrapped by the master key MASTER
//!   PREFIX/DOMAIN/KEY.shredded   the data key KEY is shredded, even if wrapped copies of it exist
//!   PREFIX/shreds/DOMAIN.NUMBER  a notice to running processes that a domain was shredded; kept for a few days
//! ```
//!
//! Each writer creates objects of its own, so no conditional writes are needed: two processes that create the first key
//! of a domain at the same time create two keys, and both are valid.

use super::KeyError;
use super::cipher::random;
use super::key_source::unhex;
use super::master_key::{MasterKeyId, WRAPPED};
use crate::block::{DomainId, KeyId};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

const SHREDDED: &str = "shredded";
const NOTICES: &str = "shreds";
/// Age at which notices are removed. A process that was suspended for longer has dropped its keys in other ways.
const NOTICE_AGE: Duration = Duration::from_hours(7 * 24);
/// Maximum number of notices that are read.
const MAX_NOTICES: usize = 1 << 16;
/// Maximum number of entries that are read.
const MAX_ENTRIES: usize = 1 << 20;
/// Concurrent requests while a domain is shredded or all keys are rewrapped.
pub(super) const PARALLEL: usize = 8;
/// Maximum duration of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of steps in which a request waits for its timeout.
const TIMEOUT_STEPS: u32 = 10;

/// The store of wrapped keys.
pub(super) struct KeyStore {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
}

/// The fact about a data key that one object records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct KeyEntry {
    pub(super) domain: DomainId,
    pub(super) key: KeyId,
    pub(super) state: KeyState,
}

/// A notice that a domain was shredded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct ShredNotice {
    pub(super) domain: DomainId,
    number: [u8; 8],
}

/// Kind of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeyState {
    Wrapped(MasterKeyId),
    Shredded,
}

impl KeyStore {
    pub(super) fn new(store: Arc<dyn ObjectStore>, prefix: Path) -> Self {
        Self { store, prefix }
    }

    /// All entries, or those of one domain.
    pub(super) async fn list(&self, domain: Option<DomainId>) -> Result<Vec<KeyEntry>, KeyError> {
        let prefix = match domain {
            Some(domain) => self.prefix.clone().join(domain.to_string()),
            None => self.prefix.clone(),
        };
        let entry = |meta: ObjectMeta| async move { Ok(entry(&meta.location)) };
        let listed = self.store.list(Some(&prefix)).try_filter_map(entry).take(MAX_ENTRIES);
        with_timeout(listed.try_collect()).await
    }

    /// The notices of the last days.
    pub(super) async fn notices(&self) -> Result<Vec<ShredNotice>, KeyError> {
        let prefix = self.prefix.clone().join(NOTICES);
        let notice = |meta: ObjectMeta| async move { Ok(notice(&meta.location)) };
        with_timeout(self.store.list(Some(&prefix)).try_filter_map(notice).take(MAX_NOTICES).try_collect()).await
    }

    /// Writes a notice that a domain was shredded, and removes old notices.
    pub(super) async fn notify(&self, domain: DomainId) -> Result<(), KeyError> {
        let prefix = self.prefix.clone().join(NOTICES);
        let number = u64::from_le_bytes(random()?);
        let path = prefix.clone().join(format!("{domain}.{number:016x}"));
        with_timeout(self.store.put(&path, Bytes::new().into())).await?;
        let listed: Vec<ObjectMeta> =
            with_timeout(self.store.list(Some(&prefix)).take(MAX_NOTICES).try_collect()).await?;
        // Ages by the store's clock: the notice just written is the newest.
        let now = listed.iter().map(|meta| meta.last_modified).max().unwrap_or_default();
        let old = |meta: &&ObjectMeta| (now - meta.last_modified).to_std().is_ok_and(|age| age > NOTICE_AGE);
        for meta in listed.iter().filter(old) {
            match with_timeout(self.store.delete(&meta.location)).await {
                Err(KeyError::Store(Error::NotFound { .. })) => {}
                removed => removed?,
            }
        }
        Ok(())
    }

    /// Reads a wrapped key; `None` if it does not exist.
    pub(super) async fn get(
        &self,
        domain: DomainId,
        key: KeyId,
        master: MasterKeyId,
    ) -> Result<Option<Bytes>, KeyError> {
        let path = self.path(KeyEntry { domain, key, state: KeyState::Wrapped(master) });
        let reading = async {
            let found = self.store.get(&path).await?;
            // An object that is too large for a wrapped key is not read.
            if found.meta.size > WRAPPED as u64 { Ok(Bytes::new()) } else { found.bytes().await }
        };
        let got = with_timeout(reading).await;
        match got {
            Err(KeyError::Store(Error::NotFound { .. })) => Ok(None),
            got => got.map(Some),
        }
    }

    /// Resolves when the entry is durable.
    pub(super) async fn put(&self, entry: KeyEntry, bytes: Bytes) -> Result<(), KeyError> {
        with_timeout(self.store.put(&self.path(entry), bytes.into())).await.map(drop)
    }

    /// Removes entries. Missing ones are ignored.
    pub(super) async fn remove(&self, entries: Vec<KeyEntry>) -> Result<(), KeyError> {
        let removing: Vec<_> = entries.into_iter().map(|entry| self.remove_one(entry)).collect();
        stream::iter(removing).buffer_unordered(PARALLEL).try_collect().await
    }

    async fn remove_one(&self, entry: KeyEntry) -> Result<(), KeyError> {
        match with_timeout(self.store.delete(&self.path(entry))).await {
            Err(KeyError::Store(Error::NotFound { .. })) => Ok(()),
            removed => removed,
        }
    }

    fn path(&self, KeyEntry { domain, key, state }: KeyEntry) -> Path {
        let name = match state {
            KeyState::Wrapped(master) => format!("{key}.{master}"),
            KeyState::Shredded => format!("{key}.{SHREDDED}"),
        };
        self.prefix.clone().join(domain.to_string()).join(name)
    }
}

/// Parses a path; `None` if it is not an entry.
fn entry(path: &Path) -> Option<KeyEntry> {
    let mut parts = path.as_ref().rsplit('/');
    let (key, state) = parts.next()?.split_once('.')?;
    let state = match state {
        SHREDDED => KeyState::Shredded,
        master => KeyState::Wrapped(MasterKeyId::from_bytes(unhex(master)?)),
    };
    Some(KeyEntry { domain: DomainId::from_bytes(unhex(parts.next()?)?), key: KeyId::from_bytes(unhex(key)?), state })
}

/// Parses a path; `None` if it is not a notice.
fn notice(path: &Path) -> Option<ShredNotice> {
    let (domain, number) = path.filename()?.split_once('.')?;
    Some(ShredNotice { domain: DomainId::from_bytes(unhex(domain)?), number: unhex(number)? })
}

/// Waits for an answer with a timeout, in short steps: while the process or the machine is suspended, at most one step
/// passes.
async fn with_timeout<T>(request: impl Future<Output = object_store::Result<T>>) -> Result<T, KeyError> {
    let mut request = pin!(request);
    for _ in 0..TIMEOUT_STEPS {
        if let Ok(answer) = tokio::time::timeout(REQUEST_TIMEOUT / TIMEOUT_STEPS, request.as_mut()).await {
            return Ok(answer?);
        }
    }
    Err(KeyError::Timeout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test(start_paused = true)]
    async fn suspension_does_not_count_and_waiting_times_out() {
        let (answer, answered) = oneshot::channel();
        let request = tokio::spawn(with_timeout(async { Ok(answered.await.unwrap_or(0)) }));
        tokio::task::yield_now().await;
        tokio::time::advance(REQUEST_TIMEOUT * 6).await;
        tokio::task::yield_now().await;
        answer.send(7).unwrap();
        assert_eq!(request.await.unwrap().unwrap(), 7);
        let began = tokio::time::Instant::now();
        assert!(matches!(
            with_timeout(std::future::pending::<object_store::Result<()>>()).await,
            Err(KeyError::Timeout)
        ));
        assert_eq!(began.elapsed(), REQUEST_TIMEOUT);
    }
}
