//! The client of an object store: one method per kind of request, with timeouts, retries, hedged reads and the circuit
//! breaker.

use super::listing::{Folder, Listing, Page};
use super::retry::RetryPolicy;
use crate::folder::OpenedFolder;
use crate::tier::IoHealth;
use bytes::Bytes;
use futures::future::{self, Either};
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    Error, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload,
};
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

/// Attempts per request. A caller that reads gives up early and recomputes; a caller that writes can wait.
const READ_ATTEMPTS: u32 = 3;
const WRITE_ATTEMPTS: u32 = 4;
/// Write bandwidth below which a write fails: adds to the timeout of a request, by size. 1 MB/s is a slow line.
const MIN_WRITE_BYTES_PER_SECOND: f64 = 1e6;
/// Objects from this size on are uploaded in parts, several at a time. A failure of the upload costs at most its
/// parts.
const MULTIPART_THRESHOLD: usize = 16 << 20;
/// The smallest part (S3 accepts none below 5 MiB), and the number of parts of a larger object. A larger object has
/// larger parts, not more of them, so that its number of requests does not grow with its size.
const MIN_PART_BYTES: usize = 8 << 20;
const MAX_PARTS: usize = 3;
/// Objects per bulk delete request: the limit of S3.
const DELETE_BATCH: usize = 1000;
/// Concurrent requests when each deletes one object.
const PARALLEL_DELETES: usize = 16;
/// How long a successful read proves that the store serves reads.
const READ_CHECK_VALIDITY: Duration = Duration::from_secs(1);
/// Consecutive failures that open the circuit breaker. More than the attempts of one request, so that one bad object
/// does not open it.
const FAILURE_THRESHOLD: u64 = 8;

/// Bytes of manifests and lists that are buffered at the same time.
const METADATA_BYTES: u64 = 128 << 20;

pub(in crate::object) struct Client {
    store: Arc<dyn ObjectStore>,
    /// The folder of the store, if it is a local or mounted one.
    folder: Option<Arc<OpenedFolder>>,
    /// Lists the store, if it is a folder.
    listing: Option<Arc<Listing>>,
    metadata: Semaphore,
    request_timeout: Duration,
    policy: Mutex<RetryPolicy>,
    created_at: Instant,
    /// Whether the store has answered a request since then.
    has_answered: AtomicBool,
    consecutive_failures: AtomicU64,
    /// When the last read of a small object was answered.
    last_read_at: Mutex<Option<Instant>>,
    /// Whether blocks and manifests can be written. The writer and the follower update it.
    pub(in crate::object) writes: IoHealth,
    /// Whether the store returns blocks that it has. The reader and the follower update it.
    pub(in crate::object) reads: IoHealth,
    counters: Counters,
}

/// Counts of the requests of a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RequestCounts {
    /// Requests sent, retries and hedged requests included.
    pub requests: u64,
    /// Retries after a failure.
    pub retries: u64,
    /// Hedged requests: second requests for a read that took too long.
    pub hedges: u64,
    /// Hedged requests that were answered before the first request.
    pub hedges_won: u64,
}

/// What is directly below a prefix.
pub(in crate::object) struct Listed {
    pub(in crate::object) objects: Vec<ObjectMeta>,
    pub(in crate::object) common_prefixes: Vec<Path>,
}

#[derive(Default)]
struct Counters {
    requests: AtomicU64,
    retries: AtomicU64,
    hedges: AtomicU64,
    hedges_won: AtomicU64,
}

impl Client {
    pub(in crate::object) fn new(store: Arc<dyn ObjectStore>, request_timeout: Duration, seed: u64) -> Self {
        Self {
            store,
            folder: None,
            listing: None,
            metadata: Semaphore::new(METADATA_BYTES as usize),
            request_timeout,
            policy: Mutex::new(RetryPolicy::new(seed)),
            created_at: Instant::now(),
            has_answered: AtomicBool::new(false),
            consecutive_failures: AtomicU64::new(0),
            last_read_at: Mutex::default(),
            writes: IoHealth::default(),
            reads: IoHealth::default(),
            counters: Counters::default(),
        }
    }

    /// Lists the store by the files of its folder, apart from those that no object can be.
    pub(in crate::object) fn listed_in(self, folder: &std::path::Path) -> Self {
        Self { listing: Some(Arc::new(Listing::new(folder.to_owned()))), ..self }
    }

    /// Makes requests fail while the folder of the store is not in its place.
    pub(in crate::object) fn in_folder(self, folder: OpenedFolder) -> Self {
        Self { folder: Some(Arc::new(folder)), ..self }
    }

    pub(in crate::object) fn request_counts(&self) -> RequestCounts {
        let Counters { requests, retries, hedges, hedges_won } = &self.counters;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        RequestCounts {
            requests: read(requests),
            retries: read(retries),
            hedges: read(hedges),
            hedges_won: read(hedges_won),
        }
    }

    /// Writes a whole object.
    pub(in crate::object) async fn put(&self, path: &Path, payload: PutPayload) -> Result<(), Error> {
        self.check_circuit()?;
        self.with_retries(WRITE_ATTEMPTS, || self.put_once(path, payload.clone())).await
    }

    /// Reads a range of an object of blocks.
    pub(in crate::object) async fn get_range(&self, path: &Path, range: Range<u64>) -> Result<Bytes, Error> {
        self.check_circuit()?;
        self.with_retries(READ_ATTEMPTS, || self.get_range_hedged(path, range.clone())).await
    }

    /// Reads a whole small object. If it has more than `max_bytes`, it is not buffered, and the error
    /// satisfies [`is_too_large`].
    pub(in crate::object) async fn get(&self, path: &Path, max_bytes: u64) -> Result<Bytes, Error> {
        self.get_with_retries(READ_ATTEMPTS, path, max_bytes).await
    }

    /// Whether the store serves reads at all. To be called after a read of one object failed: if it does, the failure
    /// concerns that object only. Reads `probe`, a path at which there is no object, unless another read was answered
    /// within the last second.
    pub(in crate::object) async fn check_reads(&self, probe: &Path) -> Result<(), Error> {
        if self.last_read_at().is_some_and(|last| last.elapsed() < READ_CHECK_VALIDITY) {
            return Ok(());
        }
        match self.get_with_retries(1, probe, 0).await {
            Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) if is_too_large(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn get_with_retries(&self, attempts: u32, path: &Path, max_bytes: u64) -> Result<Bytes, Error> {
        let read = self.with_retries(attempts, || self.with_default_timeout(self.get_bounded(path, max_bytes))).await;
        if matches!(read, Ok(_) | Err(Error::NotFound { .. })) {
            *self.last_read_at() = Some(Instant::now());
        }
        read
    }

    /// Reads the first `bytes` of an object.
    pub(in crate::object) async fn get_first(&self, path: &Path, bytes: u64) -> Result<Bytes, Error> {
        if bytes == 0 {
            return Ok(Bytes::new());
        }
        self.with_retries(READ_ATTEMPTS, || self.with_default_timeout(self.store.get_range(path, 0..bytes))).await
    }

    async fn get_bounded(&self, path: &Path, max_bytes: u64) -> Result<Bytes, Error> {
        let found = self.store.get(path).await?;
        let size = found.meta.size.max(found.range.end - found.range.start);
        if size > max_bytes {
            return Err(generic_error(TooLarge { bytes: size, max_bytes }));
        }
        // Bounds the memory of concurrent reads.
        let permits = u32::try_from(size.min(METADATA_BYTES)).unwrap_or(u32::MAX);
        let _permit = self.metadata.acquire_many(permits).await.map_err(generic_error)?;
        if let GetResultPayload::File(..) = found.payload {
            return found.bytes().await;
        }
        let (mut bytes, mut parts) = (Vec::with_capacity(size as usize), found.into_stream());
        while let Some(part) = parts.try_next().await? {
            // A server may send more than it announced.
            if (bytes.len() + part.len()) as u64 > size {
                return Err(generic_error(TooLarge { bytes: (bytes.len() + part.len()) as u64, max_bytes: size }));
            }
            bytes.extend_from_slice(&part);
        }
        Ok(bytes.into())
    }

    /// Reads the metadata of an object. Not retried: the caller examines a read that failed, and that read was
    /// retried.
    pub(in crate::object) async fn head(&self, path: &Path) -> Result<ObjectMeta, Error> {
        self.check_circuit()?;
        self.with_retries(1, || self.with_default_timeout(self.store.head(path))).await
    }

    /// Lists the objects and prefixes directly below a prefix. Not retried: callers list periodically.
    pub(in crate::object) async fn list(&self, prefix: &Path) -> Result<Listed, Error> {
        self.with_retries(1, || self.with_default_timeout(self.list_once(prefix))).await
    }

    async fn list_once(&self, prefix: &Path) -> Result<Listed, Error> {
        if let Some(listing) = &self.listing {
            let Page { folders, objects } = listing.page(Folder::of(prefix)).await.map_err(generic_error)?;
            return Ok(Listed { objects, common_prefixes: folders.into_iter().map(|folder| folder.path).collect() });
        }
        let ListResult { objects, common_prefixes, .. } = self.store.list_with_delimiter(Some(prefix)).await?;
        Ok(Listed { objects, common_prefixes })
    }

    /// Lists the objects directly below a prefix and, if given, after the object `after`. Not retried: callers list
    /// periodically.
    pub(in crate::object) async fn list_after(
        &self,
        prefix: &Path,
        after: Option<&Path>,
    ) -> Result<Vec<ObjectMeta>, Error> {
        let Some(after) = after else { return Ok(self.list(prefix).await?.objects) };
        if self.listing.is_some() {
            let mut listed = self.list(prefix).await?.objects;
            listed.retain(|object| object.location > *after);
            return Ok(listed);
        }
        let listed = || self.store.list_with_offset(Some(prefix), after).try_collect();
        self.with_retries(1, || self.with_default_timeout(listed())).await
    }

    /// Lists all objects below a prefix, at any depth. The timeout applies to each page of the list.
    pub(in crate::object) async fn list_all(&self, prefix: &Path) -> Result<Vec<ObjectMeta>, Error> {
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        self.check_folder().await?;
        if let Some(listing) = &self.listing {
            let (mut pending, mut found) = (vec![Folder::of(prefix)], Vec::new());
            while let Some(folder) = pending.pop() {
                let page = timeout(self.request_timeout, listing.page(folder)).await.map_err(generic_error)?;
                let Page { folders, objects } = page.map_err(generic_error)?;
                pending.extend(folders);
                found.extend(objects);
            }
            return Ok(found);
        }
        let (mut listed, mut found) = (self.store.list(Some(prefix)), Vec::new());
        while let Some(meta) = timeout(self.request_timeout, listed.try_next())
            .await
            .unwrap_or_else(|elapsed| Err(generic_error(elapsed)))?
        {
            found.push(meta);
        }
        Ok(found)
    }

    /// Deletes an object. An object that does not exist is no error.
    pub(in crate::object) async fn delete(&self, path: &Path) -> Result<(), Error> {
        match self.with_retries(WRITE_ATTEMPTS, || self.with_default_timeout(self.store.delete(path))).await {
            Err(Error::NotFound { .. }) => Ok(()),
            result => result,
        }
    }

    /// Deletes objects, with bulk requests where the store supports them. Objects that do not exist are no error.
    pub(in crate::object) async fn delete_all(&self, paths: Vec<Path>) -> Result<(), Error> {
        for paths in paths.chunks(DELETE_BATCH) {
            self.counters.requests.fetch_add(1, Ordering::Relaxed);
            self.check_folder().await?;
            let wanted = stream::iter(paths.to_vec()).map(Ok).boxed();
            let deleted = self.store.delete_stream(wanted).try_for_each_concurrent(None, async |_| Ok(()));
            if !matches!(timeout(self.request_timeout, deleted).await, Ok(Ok(()))) {
                // The store has no bulk deletes, or one of the objects failed or did not exist.
                let deleting = stream::iter(paths.to_vec()).map(async |path| self.delete(&path).await);
                deleting.buffer_unordered(PARALLEL_DELETES).try_collect::<()>().await?;
            }
        }
        Ok(())
    }

    /// Fails while the circuit breaker is open.
    pub(in crate::object) fn check_circuit(&self) -> Result<(), Error> {
        if self.consecutive_failures.load(Ordering::Relaxed) < FAILURE_THRESHOLD {
            return Ok(());
        }
        Err(generic_error("circuit breaker is open: the store does not respond"))
    }

    /// Whether the store has answered nothing since the client was created, at least `time` ago.
    pub(in crate::object) fn has_been_silent_for(&self, time: Duration) -> bool {
        !self.has_answered.load(Ordering::Relaxed) && self.created_at.elapsed() >= time
    }

    async fn with_retries<T, F>(&self, attempts: u32, send: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        for attempt in 1.. {
            let error = match send().await {
                Err(error) if is_retryable(&error) => error,
                result => {
                    self.consecutive_failures.store(0, Ordering::Relaxed);
                    self.has_answered.store(true, Ordering::Relaxed);
                    self.policy().record_response();
                    return result;
                }
            };
            self.consecutive_failures.fetch_add(1, Ordering::Relaxed);
            let pause = if attempt < attempts { self.policy().backoff(attempt) } else { None };
            let Some(pause) = pause else { return Err(error) };
            self.counters.retries.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(
                store = %self.store, %error, retry_after_s = pause.as_secs_f64(),
                "store request failed; retrying"
            );
            sleep(pause).await;
        }
        unreachable!("the last attempt returned")
    }

    /// Reads, and sends a second request when the first one takes longer than the hedge delay. The first success
    /// counts.
    async fn get_range_hedged(&self, path: &Path, range: Range<u64>) -> Result<Bytes, Error> {
        let (bytes, start) = (range.end - range.start, Instant::now());
        let delay = {
            let mut policy = self.policy();
            policy.record_read();
            policy.hedge_delay(bytes)
        };
        let send = || self.with_default_timeout(self.store.get_range(path, range.clone()));
        let first = pin!(send());
        let result = match delay {
            None => first.await,
            Some(delay) => match future::select(first, pin!(sleep(delay))).await {
                Either::Left((result, _)) => result,
                Either::Right(((), first)) if self.policy().try_hedge() => {
                    self.counters.hedges.fetch_add(1, Ordering::Relaxed);
                    match future::select(first, pin!(send())).await {
                        Either::Left((Err(_), second)) => second.await,
                        Either::Left((result, _)) => result,
                        Either::Right((Err(_), first)) => first.await,
                        Either::Right((result, _)) => {
                            self.counters.hedges_won.fetch_add(1, Ordering::Relaxed);
                            result
                        }
                    }
                }
                Either::Right(((), first)) => first.await,
            },
        };
        if result.is_ok() {
            self.policy().record_latency(bytes, start.elapsed());
        }
        result
    }

    async fn put_once(&self, path: &Path, payload: PutPayload) -> Result<(), Error> {
        let bytes = payload.content_length();
        let limit = self.request_timeout + Duration::from_secs_f64(bytes as f64 / MIN_WRITE_BYTES_PER_SECOND);
        if bytes < MULTIPART_THRESHOLD {
            return self.with_timeout(limit, self.store.put(path, payload)).await.map(drop);
        }
        let mut upload = self.with_default_timeout(self.store.put_multipart(path)).await?;
        let parts: Vec<_> = split_parts(payload).into_iter().map(|part| upload.put_part(part)).collect();
        self.counters.requests.fetch_add(parts.len() as u64, Ordering::Relaxed);
        let sent = async {
            stream::iter(parts).buffer_unordered(MAX_PARTS).try_collect::<()>().await?;
            upload.complete().await.map(drop)
        };
        let sent = self.with_timeout(limit, sent).await;
        if sent.is_err() {
            // If the abort fails too, the lifecycle rule of the bucket removes the parts.
            let _ = self.with_default_timeout(upload.abort()).await;
        }
        sent
    }

    fn last_read_at(&self) -> MutexGuard<'_, Option<Instant>> {
        // A plain value that is valid after a panic.
        self.last_read_at.lock()
    }

    async fn with_default_timeout<T>(&self, request: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        self.with_timeout(self.request_timeout, request).await
    }

    async fn with_timeout<T>(
        &self,
        limit: Duration,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        let checked = async {
            self.check_folder().await?;
            request.await
        };
        timeout(limit, checked).await.unwrap_or_else(|elapsed| Err(generic_error(elapsed)))
    }

    /// Fails while the folder of the store is not in its place. A write would create it again, below a removed mount on
    /// the disk of the system; a read would find its objects missing, and remove them from the catalog.
    async fn check_folder(&self) -> Result<(), Error> {
        let Some(folder) = self.folder.clone() else { return Ok(()) };
        let checking = tokio::task::spawn_blocking(move || folder.check());
        let checked = timeout(self.request_timeout, checking).await.map_err(generic_error)?;
        checked.map_err(generic_error)?.map_err(generic_error)
    }

    fn policy(&self) -> MutexGuard<'_, RetryPolicy> {
        // Counters and samples that are valid after a panic.
        self.policy.lock()
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

fn generic_error(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: "store", source: source.into() }
}

/// An object is larger than any valid object of its kind.
#[derive(Debug, thiserror::Error)]
#[error("object has {bytes} bytes, expected at most {max_bytes}")]
struct TooLarge {
    bytes: u64,
    max_bytes: u64,
}

/// Whether an object was not read because of its size.
pub(in crate::object) fn is_too_large(error: &Error) -> bool {
    matches!(error, Error::Generic { source, .. } if source.is::<TooLarge>())
}

/// Whether a retry may succeed. A missing object and a denied request fail again.
fn is_retryable(error: &Error) -> bool {
    matches!(error, Error::Generic { .. } | Error::JoinError { .. }) && !is_too_large(error)
}

/// Splits a payload into at most [`MAX_PARTS`] parts of one size (the last may be smaller), without copying whole
/// chunks.
fn split_parts(payload: PutPayload) -> Vec<PutPayload> {
    let part_bytes = payload.content_length().div_ceil(MAX_PARTS).max(MIN_PART_BYTES);
    let mut parts = Vec::new();
    let mut part = Vec::new();
    let mut left = part_bytes;
    for mut chunk in payload {
        while !chunk.is_empty() {
            let piece = chunk.split_to(chunk.len().min(left));
            left -= piece.len();
            part.push(piece);
            if left == 0 {
                parts.push(std::mem::take(&mut part).into_iter().collect());
                left = part_bytes;
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
    fn parts_have_one_size_and_together_the_whole_payload() {
        let chunk = |n: u8| Bytes::from(vec![n; 3_000_000 + usize::from(n)]);
        let bytes = |payload: PutPayload| Bytes::from(payload).to_vec();
        let third = 9_000_012;
        for (chunks, expected) in
            [(7, vec![MIN_PART_BYTES, MIN_PART_BYTES, 21_000_021 - 2 * MIN_PART_BYTES]), (9, vec![third, third, third])]
        {
            let payload: PutPayload = (0..chunks).map(chunk).collect();
            let parts = split_parts(payload.clone());
            let sizes: Vec<usize> = parts.iter().map(PutPayload::content_length).collect();
            assert_eq!(sizes, expected);
            assert!(parts.into_iter().flat_map(bytes).eq(bytes(payload)));
        }
    }
}
