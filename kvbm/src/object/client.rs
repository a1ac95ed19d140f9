//! What the tier asks of a store: put, read, look, list, delete. Each within a time, repeated where that may help, counted.
//!
//! ```text
//!   request ─▶ attempt ──answer──▶            a read that takes too long ─▶ a second request, the first answer counts
//!                 ▲  └─failure──▶ pause ─┐
//!                 └──────────────────────┘    within the budget of `Pace`
//! ```
//!
//! A store that failed many times in a row is *away*: reads and writes of blocks fail at once, so that nobody waits for
//! it, until the follower, which goes on asking every second, got an answer.

pub(super) mod health;
pub(super) mod retry;
pub(super) mod unreadable;
pub(super) mod url;

use bytes::Bytes;
use futures::future::{self, Either};
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    Error, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload,
};
use retry::Pace;
use std::fmt;
use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

/// Attempts in all: whoever reads has given up after more, whoever writes has time.
const READS: u32 = 3;
const WRITES: u32 = 4;
/// What a write may take beyond one request's time, per byte: a megabyte in a second is a slow line.
const WRITE_BYTES_PER_SECOND: f64 = 1e6;
/// From this size on an object is sent in parts, several at once, and a failure costs no more than them.
const MULTIPART: usize = 16 << 20;
/// A part at least: S3 takes no smaller ones than 5 MiB. A larger object goes in so many larger parts, all at once, so that
/// what it costs does not grow with it.
const PART: usize = 8 << 20;
const PARTS: usize = 3;
/// Objects deleted in one request: what S3 takes.
const DELETED: usize = 1000;
/// Requests at once when each deletes one.
const DELETING: usize = 16;
/// For how long an answered read shows that the store serves.
const FRESH: Duration = Duration::from_secs(1);
/// Failures in a row after which the store is away: more than one request's attempts, so that one bad object is not it.
const AWAY: u64 = 8;

/// Bytes of manifests, lists and notes that are read at once.
const METADATA: u64 = 128 << 20;

pub(super) struct Client {
    store: Arc<dyn ObjectStore>,
    metadata: Semaphore,
    limit: Duration,
    pace: Mutex<Pace>,
    failures: AtomicU64,
    /// When the last read of a small object was answered.
    last_read: Mutex<Option<Instant>>,
    counts: Counters,
}

/// What the requests of a tier came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Requests that were sent, repetitions and second ones included.
    pub requests: u64,
    /// Requests that were made again after a failure.
    pub retries: u64,
    /// Second requests for a read that took too long.
    pub hedges: u64,
    /// How many of those were answered first.
    pub hedges_won: u64,
}

#[derive(Default)]
struct Counters {
    requests: AtomicU64,
    retries: AtomicU64,
    hedges: AtomicU64,
    hedges_won: AtomicU64,
}

impl Client {
    pub(super) fn new(store: Arc<dyn ObjectStore>, limit: Duration, seed: u64) -> Self {
        let pace = Mutex::new(Pace::new(seed));
        let (failures, last_read) = (AtomicU64::new(0), Mutex::default());
        let metadata = Semaphore::new(METADATA as usize);
        Self { store, metadata, limit, pace, failures, last_read, counts: Counters::default() }
    }

    pub(super) fn counts(&self) -> Counts {
        let Counters { requests, retries, hedges, hedges_won } = &self.counts;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counts { requests: read(requests), retries: read(retries), hedges: read(hedges), hedges_won: read(hedges_won) }
    }

    /// Writes an object, whole.
    pub(super) async fn put(&self, path: &Path, payload: PutPayload) -> Result<(), Error> {
        self.present()?;
        self.repeated(WRITES, || self.put_once(path, payload.clone())).await
    }

    /// Reads a range of an object of blocks.
    pub(super) async fn range(&self, path: &Path, range: Range<u64>) -> Result<Bytes, Error> {
        self.present()?;
        self.repeated(READS, || self.hedged(path, range.clone())).await
    }

    /// Reads a small object whole. One of more than `most` bytes is an error that [`is_too_large`], and no memory is taken for it.
    pub(super) async fn get(&self, path: &Path, most: u64) -> Result<Bytes, Error> {
        self.get_repeated(READS, path, most).await
    }

    /// Whether the store answers reads, asked after that of one object failed: then the failure is that object's own.
    /// `absent` is a name that no object has; it is asked for unless another read was answered within the last second.
    pub(super) async fn check_reads(&self, absent: &Path) -> Result<(), Error> {
        if self.last_read().is_some_and(|last| last.elapsed() < FRESH) {
            return Ok(());
        }
        match self.get_repeated(1, absent, 0).await {
            Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) if is_too_large(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn get_repeated(&self, attempts: u32, path: &Path, most: u64) -> Result<Bytes, Error> {
        let read = self.repeated(attempts, || self.within(self.get_bounded(path, most))).await;
        if matches!(read, Ok(_) | Err(Error::NotFound { .. })) {
            *self.last_read() = Some(Instant::now());
        }
        read
    }

    /// Reads the first bytes of an object, whatever follows them.
    pub(super) async fn first(&self, path: &Path, bytes: u64) -> Result<Bytes, Error> {
        if bytes == 0 {
            return Ok(Bytes::new());
        }
        self.repeated(READS, || self.within(self.store.get_range(path, 0..bytes))).await
    }

    async fn get_bounded(&self, path: &Path, most: u64) -> Result<Bytes, Error> {
        let found = self.store.get(path).await?;
        let size = found.meta.size.max(found.range.end - found.range.start);
        if size > most {
            return Err(failed(TooLarge { bytes: size, most }));
        }
        // Several large ones take turns.
        let room = u32::try_from(size.min(METADATA)).unwrap_or(u32::MAX);
        let _room = self.metadata.acquire_many(room).await.map_err(failed)?;
        if let GetResultPayload::File(..) = found.payload {
            return found.bytes().await;
        }
        let (mut bytes, mut parts) = (Vec::with_capacity(size as usize), found.into_stream());
        while let Some(part) = parts.try_next().await? {
            // A server may send more than it announced.
            if (bytes.len() + part.len()) as u64 > size {
                return Err(failed(TooLarge { bytes: (bytes.len() + part.len()) as u64, most: size }));
            }
            bytes.extend_from_slice(&part);
        }
        Ok(bytes.into())
    }

    /// Looks at an object. Not repeated: it explains a failure, and the read was repeated already.
    pub(super) async fn head(&self, path: &Path) -> Result<ObjectMeta, Error> {
        self.present()?;
        self.repeated(1, || self.within(self.store.head(path))).await
    }

    /// What lies directly below a prefix. Not repeated: whoever lists comes again.
    pub(super) async fn list(&self, prefix: &Path) -> Result<ListResult, Error> {
        self.repeated(1, || self.within(self.store.list_with_delimiter(Some(prefix)))).await
    }

    /// What lies directly below a prefix and, if one is given, after an object there. Not repeated: the next list comes soon.
    pub(super) async fn list_after(&self, prefix: &Path, after: Option<&Path>) -> Result<Vec<ObjectMeta>, Error> {
        let Some(after) = after else { return Ok(self.list(prefix).await?.objects) };
        let listed = || self.store.list_with_offset(Some(prefix), after).try_collect();
        self.repeated(1, || self.within(listed())).await
    }

    /// Everything below a prefix, at any depth. However many there are, no part of the list may take longer than a request.
    pub(super) async fn list_all(&self, prefix: &Path) -> Result<Vec<ObjectMeta>, Error> {
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        let (mut listed, mut found) = (self.store.list(Some(prefix)), Vec::new());
        while let Some(meta) = timeout(self.limit, listed.try_next()).await.unwrap_or_else(|late| Err(failed(late)))? {
            found.push(meta);
        }
        Ok(found)
    }

    /// Deletes an object; one that is gone already is none to complain of.
    pub(super) async fn delete(&self, path: &Path) -> Result<(), Error> {
        match self.repeated(WRITES, || self.within(self.store.delete(path))).await {
            Err(Error::NotFound { .. }) => Ok(()),
            answer => answer,
        }
    }

    /// Deletes objects, many in one request where the store has such requests; those that are gone already are none to complain of.
    pub(super) async fn delete_all(&self, paths: Vec<Path>) -> Result<(), Error> {
        for paths in paths.chunks(DELETED) {
            self.counts.requests.fetch_add(1, Ordering::Relaxed);
            let wanted = stream::iter(paths.to_vec()).map(Ok).boxed();
            let deleted = self.store.delete_stream(wanted).try_for_each_concurrent(None, async |_| Ok(()));
            if !matches!(timeout(self.limit, deleted).await, Ok(Ok(()))) {
                // It has none, or something went wrong with one of them, or was gone.
                let deleting = stream::iter(paths.to_vec()).map(async |path| self.delete(&path).await);
                deleting.buffer_unordered(DELETING).try_collect::<()>().await?;
            }
        }
        Ok(())
    }

    /// Fails while the store is away.
    fn present(&self) -> Result<(), Error> {
        if self.failures.load(Ordering::Relaxed) < AWAY {
            return Ok(());
        }
        Err(failed("the store is away"))
    }

    async fn repeated<T, F>(&self, attempts: u32, ask: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        for attempt in 1.. {
            let error = match ask().await {
                Err(error) if may_pass(&error) => error,
                answer => {
                    self.failures.store(0, Ordering::Relaxed);
                    self.pace().answered();
                    return answer;
                }
            };
            self.failures.fetch_add(1, Ordering::Relaxed);
            let pause = if attempt < attempts { self.pace().pause(attempt) } else { None };
            let Some(pause) = pause else { return Err(error) };
            self.counts.retries.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(
                store = %self.store, %error, retry_after_s = pause.as_secs_f64(),
                "store request failed; retrying"
            );
            sleep(pause).await;
        }
        unreachable!("the last attempt returned")
    }

    /// Reads, and once that takes longer than such reads do, asks a second time; the first answer counts.
    async fn hedged(&self, path: &Path, range: Range<u64>) -> Result<Bytes, Error> {
        let (bytes, start) = (range.end - range.start, Instant::now());
        let patience = {
            let mut pace = self.pace();
            pace.read();
            pace.patience(bytes)
        };
        let ask = || self.within(self.store.get_range(path, range.clone()));
        let first = pin!(ask());
        let answer = match patience {
            None => first.await,
            Some(patience) => match future::select(first, pin!(sleep(patience))).await {
                Either::Left((answer, _)) => answer,
                Either::Right(((), first)) if self.pace().hedge() => {
                    self.counts.hedges.fetch_add(1, Ordering::Relaxed);
                    match future::select(first, pin!(ask())).await {
                        Either::Left((Err(_), second)) => second.await,
                        Either::Left((answer, _)) => answer,
                        Either::Right((Err(_), first)) => first.await,
                        Either::Right((answer, _)) => {
                            self.counts.hedges_won.fetch_add(1, Ordering::Relaxed);
                            answer
                        }
                    }
                }
                Either::Right(((), first)) => first.await,
            },
        };
        if answer.is_ok() {
            self.pace().took(bytes, start.elapsed());
        }
        answer
    }

    async fn put_once(&self, path: &Path, payload: PutPayload) -> Result<(), Error> {
        let bytes = payload.content_length();
        let limit = self.limit + Duration::from_secs_f64(bytes as f64 / WRITE_BYTES_PER_SECOND);
        if bytes < MULTIPART {
            return self.within_time(limit, self.store.put(path, payload)).await.map(drop);
        }
        let mut upload = self.within(self.store.put_multipart(path)).await?;
        let parts: Vec<_> = parts(payload).into_iter().map(|part| upload.put_part(part)).collect();
        self.counts.requests.fetch_add(parts.len() as u64, Ordering::Relaxed);
        let sent = async {
            stream::iter(parts).buffer_unordered(PARTS).try_collect::<()>().await?;
            upload.complete().await.map(drop)
        };
        let sent = self.within_time(limit, sent).await;
        if sent.is_err() {
            // What cannot even be given up is for the bucket's own rule to clear away.
            let _ = self.within(upload.abort()).await;
        }
        sent
    }

    fn last_read(&self) -> MutexGuard<'_, Option<Instant>> {
        // A plain value: nothing to find half done.
        self.last_read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn within<T>(&self, request: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        self.within_time(self.limit, request).await
    }

    async fn within_time<T>(
        &self,
        limit: Duration,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        timeout(limit, request).await.unwrap_or_else(|late| Err(failed(late)))
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        // Sums and samples: whatever a panic left of them is as good.
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

fn failed(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: "store", source: source.into() }
}

/// An object has more bytes than what it should be can have.
#[derive(Debug, thiserror::Error)]
#[error("object has {bytes} bytes, expected at most {most}")]
struct TooLarge {
    bytes: u64,
    most: u64,
}

/// Whether an object was not read because of its size.
pub(super) fn is_too_large(error: &Error) -> bool {
    matches!(error, Error::Generic { source, .. } if source.is::<TooLarge>())
}

/// Whether the same request may fare better: what is not there, or not allowed, stays so.
fn may_pass(error: &Error) -> bool {
    matches!(error, Error::Generic { .. } | Error::JoinError { .. }) && !is_too_large(error)
}

/// The payload cut into parts of one size, but for the last, without copying more than the seams.
fn parts(payload: PutPayload) -> Vec<PutPayload> {
    let most = payload.content_length().div_ceil(PARTS).max(PART);
    let mut parts = Vec::new();
    let (mut part, mut room) = (Vec::new(), most);
    for mut chunk in payload {
        while !chunk.is_empty() {
            let piece = chunk.split_to(chunk.len().min(room));
            room -= piece.len();
            part.push(piece);
            if room == 0 {
                parts.push(std::mem::take(&mut part).into_iter().collect());
                room = most;
            }
        }
    }
    if !part.is_empty() {
        parts.push(part.into_iter().collect());
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_of_one_size_and_nothing_is_lost_between_them() {
        let chunk = |n: u8| Bytes::from(vec![n; 3_000_000 + usize::from(n)]);
        let bytes = |payload: PutPayload| Bytes::from(payload).to_vec();
        let nth = 9_000_012;
        for (chunks, wanted) in [(7, vec![PART, PART, 21_000_021 - 2 * PART]), (9, vec![nth, nth, nth])] {
            let payload: PutPayload = (0..chunks).map(chunk).collect();
            let parts = parts(payload.clone());
            let sizes: Vec<usize> = parts.iter().map(PutPayload::content_length).collect();
            assert_eq!(sizes, wanted);
            assert!(parts.into_iter().flat_map(bytes).eq(bytes(payload)));
        }
    }
}
