//! Where wrapped keys rest: small objects, none of which ever changes.
//!
//! ```text
//!   PREFIX/DOMAIN/KEY.MASTER     the data key KEY of a domain, wrapped by the master key of that number
//!   PREFIX/DOMAIN/KEY.shredded   the data key KEY is gone for good, whatever else is found of it
//! ```
//!
//! Each writer makes objects of its own, so nothing rests on conditional writes: two that make a first key for the same
//! domain at once make two keys, and both are good.

use super::KeyError;
use super::master::MasterId;
use super::source::unhex;
use crate::{DomainId, KeyId};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

const SHREDDED: &str = "shredded";
/// Requests at once while a domain is shredded or all keys are wrapped anew.
pub(super) const PARALLEL: usize = 8;
/// A request that takes longer has failed.
const REQUEST: Duration = Duration::from_secs(10);
const TURNS: u32 = 10;

/// The place.
pub(super) struct Shelf {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
}

/// What one object says of a data key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) domain: DomainId,
    pub(super) key: KeyId,
    pub(super) state: State,
}

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Wrapped(MasterId),
    Shredded,
}

impl Shelf {
    pub(super) fn new(store: Arc<dyn ObjectStore>, prefix: Path) -> Self {
        Self { store, prefix }
    }

    /// Everything, or everything of one domain.
    pub(super) async fn list(&self, domain: Option<DomainId>) -> Result<Vec<Entry>, KeyError> {
        let prefix = match domain {
            Some(domain) => self.prefix.clone().join(domain.to_string()),
            None => self.prefix.clone(),
        };
        let entry = |meta: ObjectMeta| async move { Ok(entry(&meta.location)) };
        within(self.store.list(Some(&prefix)).try_filter_map(entry).try_collect()).await
    }

    /// `None` when it is gone.
    pub(super) async fn get(&self, domain: DomainId, key: KeyId, master: MasterId) -> Result<Option<Bytes>, KeyError> {
        let path = self.path(Entry { domain, key, state: State::Wrapped(master) });
        let got = within(async { self.store.get(&path).await?.bytes().await }).await;
        match got {
            Err(KeyError::Store(Error::NotFound { .. })) => Ok(None),
            got => got.map(Some),
        }
    }

    /// Resolves when it rests as durably as the store promises.
    pub(super) async fn put(&self, entry: Entry, bytes: Bytes) -> Result<(), KeyError> {
        within(self.store.put(&self.path(entry), bytes.into())).await.map(drop)
    }

    /// Removing what is not there is fine.
    pub(super) async fn remove(&self, entries: Vec<Entry>) -> Result<(), KeyError> {
        let removing: Vec<_> = entries.into_iter().map(|entry| self.remove_one(entry)).collect();
        stream::iter(removing).buffer_unordered(PARALLEL).try_collect().await
    }

    async fn remove_one(&self, entry: Entry) -> Result<(), KeyError> {
        match within(self.store.delete(&self.path(entry))).await {
            Err(KeyError::Store(Error::NotFound { .. })) => Ok(()),
            removed => removed,
        }
    }

    fn path(&self, Entry { domain, key, state }: Entry) -> Path {
        let name = match state {
            State::Wrapped(master) => format!("{key}.{master}"),
            State::Shredded => format!("{key}.{SHREDDED}"),
        };
        self.prefix.clone().join(domain.to_string()).join(name)
    }
}

/// `None` for what is no key.
fn entry(path: &Path) -> Option<Entry> {
    let mut parts = path.as_ref().rsplit('/');
    let (key, state) = parts.next()?.split_once('.')?;
    let state = match state {
        SHREDDED => State::Shredded,
        master => State::Wrapped(MasterId::from_bytes(unhex(master)?)),
    };
    Some(Entry { domain: DomainId::from_bytes(unhex(parts.next()?)?), key: KeyId::from_bytes(unhex(key)?), state })
}

/// Waits for an answer, in short turns: who was stopped meanwhile, or slept with the machine, has waited for one of them.
async fn within<T>(request: impl Future<Output = object_store::Result<T>>) -> Result<T, KeyError> {
    let mut request = pin!(request);
    for _ in 0..TURNS {
        if let Ok(answer) = tokio::time::timeout(REQUEST / TURNS, request.as_mut()).await {
            return Ok(answer?);
        }
    }
    Err(KeyError::Silent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test(start_paused = true)]
    async fn who_slept_has_not_waited_and_who_waits_gives_up() {
        let (answer, answered) = oneshot::channel();
        let asking = tokio::spawn(within(async { Ok(answered.await.unwrap_or(0)) }));
        tokio::task::yield_now().await;
        tokio::time::advance(REQUEST * 6).await;
        tokio::task::yield_now().await;
        answer.send(7).unwrap();
        assert_eq!(asking.await.unwrap().unwrap(), 7);
        let began = tokio::time::Instant::now();
        assert!(matches!(within(std::future::pending::<object_store::Result<()>>()).await, Err(KeyError::Silent)));
        assert_eq!(began.elapsed(), REQUEST);
    }
}
