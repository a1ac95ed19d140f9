//! Where wrapped keys rest: small objects, none of which ever changes.
//!
//! ```text
//!   PREFIX/DOMAIN/KEY.MASTER     the data key KEY of a domain, wrapped by the master key of that number
//!   PREFIX/DOMAIN/KEY.shredded   the data key KEY is gone for good, whatever else is found of it
//!   PREFIX/shreds/DOMAIN.NUMBER  a notice that a domain was shredded, for processes that run; of a few days at most
//! ```
//!
//! Each writer makes objects of its own, so nothing rests on conditional writes: two that make a first key for the same
//! domain at once make two keys, and both are good.

use super::KeyError;
use super::cipher::random;
use super::key_source::unhex;
use super::master_key::{MasterId, WRAPPED};
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
/// Notices older than this are removed: a process that was asleep for longer has dropped its keys by other ways.
const NOTICE_AGE: Duration = Duration::from_hours(7 * 24);
/// Domains shredded within that time, at most; a listing with more is not read to its end.
const MAX_NOTICES: usize = 1 << 16;
/// Objects of the shelf at most. A listing with more is not one of a shelf.
const MAX_ENTRIES: usize = 1 << 20;
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

/// That a domain was shredded, once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Notice {
    pub(super) domain: DomainId,
    number: [u8; 8],
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
        let listed = self.store.list(Some(&prefix)).try_filter_map(entry).take(MAX_ENTRIES);
        within(listed.try_collect()).await
    }

    /// What was shredded in the last days.
    pub(super) async fn notices(&self) -> Result<Vec<Notice>, KeyError> {
        let prefix = self.prefix.clone().join(NOTICES);
        let notice = |meta: ObjectMeta| async move { Ok(notice(&meta.location)) };
        within(self.store.list(Some(&prefix)).try_filter_map(notice).take(MAX_NOTICES).try_collect()).await
    }

    /// Says that a domain was shredded, and removes what was said long ago.
    pub(super) async fn notify(&self, domain: DomainId) -> Result<(), KeyError> {
        let prefix = self.prefix.clone().join(NOTICES);
        let number = u64::from_le_bytes(random()?);
        let path = prefix.clone().join(format!("{domain}.{number:016x}"));
        within(self.store.put(&path, Bytes::new().into())).await?;
        let listed: Vec<ObjectMeta> = within(self.store.list(Some(&prefix)).take(MAX_NOTICES).try_collect()).await?;
        // By the store's own clock: ours is the newest.
        let now = listed.iter().map(|meta| meta.last_modified).max().unwrap_or_default();
        let old = |meta: &&ObjectMeta| (now - meta.last_modified).to_std().is_ok_and(|age| age > NOTICE_AGE);
        for meta in listed.iter().filter(old) {
            match within(self.store.delete(&meta.location)).await {
                Err(KeyError::Store(Error::NotFound { .. })) => {}
                removed => removed?,
            }
        }
        Ok(())
    }

    /// `None` when it is gone.
    pub(super) async fn get(&self, domain: DomainId, key: KeyId, master: MasterId) -> Result<Option<Bytes>, KeyError> {
        let path = self.path(Entry { domain, key, state: State::Wrapped(master) });
        let reading = async {
            let found = self.store.get(&path).await?;
            // What is too large to be a wrapped key is none, and is not read.
            if found.meta.size > WRAPPED as u64 { Ok(Bytes::new()) } else { found.bytes().await }
        };
        let got = within(reading).await;
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

/// `None` for what is no notice.
fn notice(path: &Path) -> Option<Notice> {
    let (domain, number) = path.filename()?.split_once('.')?;
    Some(Notice { domain: DomainId::from_bytes(unhex(domain)?), number: unhex(number)? })
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
