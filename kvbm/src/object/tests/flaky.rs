//! A store in memory that counts requests, injects faults, and may have its own clock.

use crate::block::Clock;
use futures::future;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, UNIX_EPOCH};

/// The fault of requests whose path contains a word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fault {
    Fails,
    Hangs,
    /// Reads are denied, as for an object in cold storage or under a disabled key. Lists and writes work.
    Denied,
    /// The write happens, but the response is an error.
    FailsAfterwards,
    /// The next request fails, the following ones work.
    FailsOnce,
    /// The next request hangs, the following ones work.
    HangsOnce,
}

#[derive(Debug, Default)]
pub(super) struct Flaky {
    inner: InMemory,
    fault: Mutex<Option<(String, Fault)>>,
    requests: Arc<AtomicU64>,
    puts: AtomicU64,
    reads: AtomicU64,
    aborted_uploads: Arc<AtomicU64>,
    clock: OnceLock<Clock>,
    dates: Dates,
}

/// When each object was written, by the store's clock.
type Dates = Arc<Mutex<HashMap<Path, Duration>>>;

fn dated(dates: &Dates, meta: ObjectMeta) -> ObjectMeta {
    let date = dates.lock().get(&meta.location).map(|date| (UNIX_EPOCH + *date).into());
    ObjectMeta { last_modified: date.unwrap_or(meta.last_modified), ..meta }
}

/// An upload that counts its parts as requests.
#[derive(Debug)]
struct CountingUpload {
    inner: Box<dyn MultipartUpload>,
    requests: Arc<AtomicU64>,
}

#[async_trait::async_trait]
impl MultipartUpload for CountingUpload {
    fn put_part(&mut self, part: PutPayload) -> UploadPart {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.inner.put_part(part)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.inner.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}

/// An upload whose parts all fail.
#[derive(Debug)]
struct FailingUpload(Arc<AtomicU64>);

#[async_trait::async_trait]
impl MultipartUpload for FailingUpload {
    fn put_part(&mut self, _part: PutPayload) -> UploadPart {
        Box::pin(async { Err(unavailable()) })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        Err(unavailable())
    }

    async fn abort(&mut self) -> Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Flaky {
    pub(super) fn set_fault(&self, fault: Option<(&str, Fault)>) {
        *self.fault.lock() = fault.map(|(word, fault)| (word.to_owned(), fault));
    }

    /// Uses another clock than the machine's for the dates of new objects.
    pub(super) fn use_clock(&self, clock: &Clock) {
        self.clock.set(clock.clone()).unwrap();
    }

    /// Multipart uploads that were aborted.
    pub(super) fn aborted_uploads(&self) -> u64 {
        self.aborted_uploads.load(Ordering::Relaxed)
    }

    /// Objects written in one request.
    pub(super) fn puts(&self) -> u64 {
        self.puts.load(Ordering::Relaxed)
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Read requests.
    pub(super) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    async fn inject_fault(&self, path: &str) -> Result<()> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let fault = self.fault(path);
        if matches!(fault, Some(Fault::FailsOnce | Fault::HangsOnce)) {
            self.set_fault(None);
        }
        match fault {
            Some(Fault::Fails | Fault::FailsOnce) => Err(unavailable()),
            Some(Fault::Hangs | Fault::HangsOnce) => future::pending().await,
            _ => Ok(()),
        }
    }

    fn fault(&self, path: &str) -> Option<Fault> {
        self.fault.lock().as_ref().filter(|(word, _)| path.contains(word)).map(|(_, fault)| *fault)
    }
}

fn unavailable() -> Error {
    Error::Generic { store: "flaky", source: "down".into() }
}

impl fmt::Display for Flaky {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("flaky")
    }
}

type Boxed<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

impl ObjectStore for Flaky {
    fn put_opts<'life0, 'life1, 'out>(
        &'life0 self,
        path: &'life1 Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Boxed<'out, Result<PutResult>>
    where
        'life0: 'out,
        'life1: 'out,
        Self: 'out,
    {
        Box::pin(async move {
            self.inject_fault(path.as_ref()).await?;
            self.puts.fetch_add(1, Ordering::Relaxed);
            let put = self.inner.put_opts(path, payload, options).await?;
            if let Some(clock) = self.clock.get() {
                let date = Duration::from_secs(u64::from(crate::block::Date::encode(Some(clock.now()))));
                self.dates.lock().insert(path.clone(), date);
            }
            if self.fault(path.as_ref()) == Some(Fault::FailsAfterwards) { Err(unavailable()) } else { Ok(put) }
        })
    }

    fn put_multipart_opts<'life0, 'life1, 'out>(
        &'life0 self,
        path: &'life1 Path,
        options: PutMultipartOptions,
    ) -> Boxed<'out, Result<Box<dyn MultipartUpload>>>
    where
        'life0: 'out,
        'life1: 'out,
        Self: 'out,
    {
        Box::pin(async move {
            self.requests.fetch_add(1, Ordering::Relaxed);
            match self.fault(path.as_ref()) {
                None | Some(Fault::Denied) => {
                    let inner = self.inner.put_multipart_opts(path, options).await?;
                    Ok(Box::new(CountingUpload { inner, requests: self.requests.clone() }) as Box<dyn MultipartUpload>)
                }
                Some(_) => Ok(Box::new(FailingUpload(self.aborted_uploads.clone())) as Box<dyn MultipartUpload>),
            }
        })
    }

    fn get_opts<'life0, 'life1, 'out>(
        &'life0 self,
        path: &'life1 Path,
        options: GetOptions,
    ) -> Boxed<'out, Result<GetResult>>
    where
        'life0: 'out,
        'life1: 'out,
        Self: 'out,
    {
        Box::pin(async move {
            self.reads.fetch_add(1, Ordering::Relaxed);
            self.inject_fault(path.as_ref()).await?;
            if self.fault(path.as_ref()) == Some(Fault::Denied) {
                let source = "InvalidObjectState: the object is archived".into();
                return Err(Error::PermissionDenied { path: path.to_string(), source });
            }
            let found = self.inner.get_opts(path, options).await?;
            Ok(GetResult { meta: dated(&self.dates, found.meta.clone()), ..found })
        })
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        // Counts one request, like a store with bulk deletes.
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.inner.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        match self.fault(prefix.map_or("", AsRef::as_ref)) {
            Some(Fault::Fails) => futures::stream::once(async { Err(unavailable()) }).boxed(),
            Some(Fault::Hangs) => futures::stream::pending().boxed(),
            _ => {
                let dates = self.dates.clone();
                self.inner.list(prefix).map_ok(move |meta| dated(&dates, meta)).boxed()
            }
        }
    }

    fn list_with_delimiter<'life0, 'life1, 'out>(
        &'life0 self,
        prefix: Option<&'life1 Path>,
    ) -> Boxed<'out, Result<ListResult>>
    where
        'life0: 'out,
        'life1: 'out,
        Self: 'out,
    {
        Box::pin(async move {
            self.inject_fault(prefix.map_or("", AsRef::as_ref)).await?;
            self.inner.list_with_delimiter(prefix).await
        })
    }

    fn copy_opts<'life0, 'life1, 'life2, 'out>(
        &'life0 self,
        from: &'life1 Path,
        to: &'life2 Path,
        options: CopyOptions,
    ) -> Boxed<'out, Result<()>>
    where
        'life0: 'out,
        'life1: 'out,
        'life2: 'out,
        Self: 'out,
    {
        self.inner.copy_opts(from, to, options)
    }
}
