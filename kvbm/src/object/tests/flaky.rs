//! A store in memory that counts its requests, fails or hangs when told, and may have a clock of its own.

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
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, UNIX_EPOCH};

/// What happens to requests whose path contains a word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mood {
    Fails,
    Hangs,
    /// Reads are denied, as of an object in cold storage or under a disabled key; it is listed and written as ever.
    Denied,
    /// The write happens, but the answer is an error.
    FailsAfterwards,
    /// The next one fails; then all is well.
    FailsOnce,
    /// The next one hangs; then all is well.
    HangsOnce,
}

#[derive(Debug, Default)]
pub(super) struct Flaky {
    inner: InMemory,
    mood: Mutex<Option<(String, Mood)>>,
    requests: Arc<AtomicU64>,
    puts: AtomicU64,
    reads: AtomicU64,
    given_up: Arc<AtomicU64>,
    clock: OnceLock<Clock>,
    dates: Dates,
}

/// When each object was written, by the store's own clock.
type Dates = Arc<Mutex<HashMap<Path, Duration>>>;

fn dated(dates: &Dates, meta: ObjectMeta) -> ObjectMeta {
    let date = dates.lock().unwrap().get(&meta.location).map(|date| (UNIX_EPOCH + *date).into());
    ObjectMeta { last_modified: date.unwrap_or(meta.last_modified), ..meta }
}

/// An upload whose parts count as the requests that they are.
#[derive(Debug)]
struct Counted {
    inner: Box<dyn MultipartUpload>,
    requests: Arc<AtomicU64>,
}

#[async_trait::async_trait]
impl MultipartUpload for Counted {
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

/// An upload of which no part arrives.
#[derive(Debug)]
struct Broken(Arc<AtomicU64>);

#[async_trait::async_trait]
impl MultipartUpload for Broken {
    fn put_part(&mut self, _part: PutPayload) -> UploadPart {
        Box::pin(async { Err(down()) })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        Err(down())
    }

    async fn abort(&mut self) -> Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Flaky {
    pub(super) fn set(&self, mood: Option<(&str, Mood)>) {
        *self.mood.lock().unwrap() = mood.map(|(word, mood)| (word.to_owned(), mood));
    }

    /// Dates what is written from now on by another clock than the machine's.
    pub(super) fn date_by(&self, clock: &Clock) {
        self.clock.set(clock.clone()).unwrap();
    }

    /// Uploads in parts that were given up, rather than left lying.
    pub(super) fn given_up(&self) -> u64 {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Objects that were written whole.
    pub(super) fn puts(&self) -> u64 {
        self.puts.load(Ordering::Relaxed)
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Requests to read, of all of them.
    pub(super) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    async fn meet(&self, path: &str) -> Result<()> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let mood = self.mood(path);
        if matches!(mood, Some(Mood::FailsOnce | Mood::HangsOnce)) {
            self.set(None);
        }
        match mood {
            Some(Mood::Fails | Mood::FailsOnce) => Err(down()),
            Some(Mood::Hangs | Mood::HangsOnce) => future::pending().await,
            _ => Ok(()),
        }
    }

    fn mood(&self, path: &str) -> Option<Mood> {
        self.mood.lock().unwrap().as_ref().filter(|(word, _)| path.contains(word)).map(|(_, mood)| *mood)
    }
}

fn down() -> Error {
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
            self.meet(path.as_ref()).await?;
            self.puts.fetch_add(1, Ordering::Relaxed);
            let put = self.inner.put_opts(path, payload, options).await?;
            if let Some(clock) = self.clock.get() {
                let date = Duration::from_secs(u64::from(crate::block::Date::encode(Some(clock.now()))));
                self.dates.lock().unwrap().insert(path.clone(), date);
            }
            if self.mood(path.as_ref()) == Some(Mood::FailsAfterwards) { Err(down()) } else { Ok(put) }
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
            match self.mood(path.as_ref()) {
                None | Some(Mood::Denied) => {
                    let inner = self.inner.put_multipart_opts(path, options).await?;
                    Ok(Box::new(Counted { inner, requests: self.requests.clone() }) as Box<dyn MultipartUpload>)
                }
                Some(_) => Ok(Box::new(Broken(self.given_up.clone())) as Box<dyn MultipartUpload>),
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
            self.meet(path.as_ref()).await?;
            if self.mood(path.as_ref()) == Some(Mood::Denied) {
                let source = "InvalidObjectState: the object is archived".into();
                return Err(Error::PermissionDenied { path: path.to_string(), source });
            }
            let found = self.inner.get_opts(path, options).await?;
            Ok(GetResult { meta: dated(&self.dates, found.meta.clone()), ..found })
        })
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        // As a store does that takes a thousand of them at once.
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.inner.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        match self.mood(prefix.map_or("", AsRef::as_ref)) {
            Some(Mood::Fails) => futures::stream::once(async { Err(down()) }).boxed(),
            Some(Mood::Hangs) => futures::stream::pending().boxed(),
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
            self.meet(prefix.map_or("", AsRef::as_ref)).await?;
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
