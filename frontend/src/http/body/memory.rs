//! Memory for the bodies of all requests, and which uploads end when it is short.
//!
//! A client that sends most of a large body and then little more would hold memory for as long as the limits of its
//! upload allow. So an upload must keep a rate, which grows with the memory that it holds. When memory is short, those
//! that are behind this rate end, first those that have held most memory for the longest time. Not here: the minimum
//! rate of all uploads, which applies at any time (`upload`).

use crate::error::Error;
use crate::settings::Settings;
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

/// First bytes of a body that are not charged to [`BodyMemory`], so that small requests are never rejected for lack of
/// it. The number of connections bounds their memory.
pub(super) const FREE_BYTES: usize = 64 << 10;

/// `Retry-After` without memory: most bodies are processed within a second.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Maximum time by which an upload may be behind its rate when memory is short. A mobile line that loses several
/// packets in a row, or changes its cell, pauses for as long.
const MAX_LATE: Duration = Duration::from_secs(3);

/// Bytes per second that an upload with little memory must send while memory is short: half of a slow mobile line.
const SMALL_BODY_RATE: f64 = 50e3;

/// Bytes per second that an upload with much memory must send: half of a line of 1 MB/s.
const LARGE_BODY_RATE: f64 = 500e3;

/// Time in which an upload must send what it holds at its rate. It lets a body of the default maximum of 16 MiB have
/// [`LARGE_BODY_RATE`], and one of 1.6 MB [`SMALL_BODY_RATE`].
const UPLOAD_TIME: Duration = Duration::from_secs(32);

/// Time to wait for the memory of uploads that were ended to make room. Their tasks need microseconds, unless the
/// server has no CPU time for them.
const MAX_EVICTION_TIME: Duration = Duration::from_millis(100);

/// Memory for the bodies of all requests that are being read or processed, in bytes.
pub(crate) struct BodyMemory {
    free: Arc<Semaphore>,
    uploads: Mutex<Uploads>,
    /// Notified when an upload has ended.
    ended: Notify,
}

/// The uploads that hold memory and have not arrived completely.
#[derive(Default)]
struct Uploads {
    next: u64,
    open: HashMap<u64, Arc<Upload>>,
}

/// A share of the memory, which grows with a body that arrives. The memory is released before the upload counts as
/// ended, so the fields have this order.
pub(super) struct MemoryShare<'a> {
    memory: &'a BodyMemory,
    held: Option<OwnedSemaphorePermit>,
    /// `None` while nothing is charged.
    upload: Option<OpenUpload<'a>>,
}

/// Keeps an upload in the list of its memory, until it is dropped.
struct OpenUpload<'a> {
    id: u64,
    upload: Arc<Upload>,
    memory: &'a BodyMemory,
}

#[derive(Default)]
struct Upload {
    progress: Mutex<Progress>,
    /// Notified when the upload must end.
    evicted: Notify,
}

#[derive(Default)]
struct Progress {
    /// Bytes that are charged.
    held: usize,
    /// Time by which the upload was behind its rate when the server last waited for its client. Bytes that arrive early
    /// do not count for later ones.
    late: Duration,
    /// Since when the server has waited for the client.
    waits_since: Option<Instant>,
    is_evicted: bool,
}

impl BodyMemory {
    /// Memory of `max_inflight_bodies`, at least one body of the maximum size.
    pub(crate) fn new(settings: &Settings) -> Self {
        let bytes = settings.max_inflight_bodies.max(settings.max_body).as_usize();
        let free = Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS)));
        Self { free, uploads: Mutex::default(), ended: Notify::new() }
    }

    /// A share for one body.
    pub(super) fn share(&self) -> MemoryShare<'_> {
        MemoryShare { memory: self, held: None, upload: None }
    }

    /// Takes memory. If it is short, uploads that waste more than `own_waste` end. `None`: there is not enough.
    async fn take(&self, bytes: usize, own_waste: u128) -> Option<OwnedSemaphorePermit> {
        let taken = self.take_free(bytes);
        if taken.is_some() {
            return taken;
        }
        let evict = async {
            loop {
                let mut ended = pin!(self.ended.notified());
                // Uploads that end from here on are noticed.
                ended.as_mut().enable();
                let taken = self.take_free(bytes);
                if taken.is_some() || !self.evict(bytes, own_waste) {
                    return taken;
                }
                ended.await;
            }
        };
        timeout(MAX_EVICTION_TIME, evict).await.unwrap_or_else(|_| self.take_free(bytes))
    }

    fn take_free(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        Arc::clone(&self.free).try_acquire_many_owned(bytes).ok()
    }

    /// Ends uploads until there is room for `bytes`: of those that are late and waste more than `own_waste`, the most
    /// wasteful first. Returns whether there will be room; otherwise no upload ends. It scans all uploads that hold
    /// memory, which takes microseconds and happens only when memory is short.
    fn evict(&self, bytes: usize, own_waste: u128) -> bool {
        let uploads = self.uploads.lock();
        let mut room = self.free.available_permits();
        let mut late = Vec::new();
        for upload in uploads.open.values() {
            let progress = upload.progress.lock();
            if progress.is_evicted {
                room += progress.held;
            } else if progress.is_late() && progress.waste() > own_waste {
                late.push((progress.waste(), progress.held, upload));
            }
        }
        late.sort_unstable_by_key(|(waste, ..)| Reverse(*waste));
        let mut chosen = 0;
        while room < bytes {
            let Some((_, held, _)) = late.get(chosen) else { return false };
            room += held;
            chosen += 1;
        }
        late[..chosen].iter().for_each(|(.., upload)| upload.evict());
        true
    }

    fn open(&self) -> OpenUpload<'_> {
        let upload = Arc::<Upload>::default();
        let mut uploads = self.uploads.lock();
        let id = uploads.next;
        uploads.next += 1;
        uploads.open.insert(id, Arc::clone(&upload));
        OpenUpload { id, upload, memory: self }
    }
}

impl MemoryShare<'_> {
    /// Grows the share to a body of `bytes`, or rejects the body. It does not wait for bodies that the server can go on
    /// with: bodies that wait for more memory while they hold some could block one another.
    pub(super) async fn grow(&mut self, bytes: usize) -> Result<(), Error> {
        let held = self.held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = bytes.saturating_sub(FREE_BYTES).saturating_sub(held);
        if more == 0 {
            return Ok(());
        }
        let own_waste = self.upload.as_ref().map_or(0, |open| open.upload.progress.lock().waste());
        let permit = self.memory.take(more, own_waste).await.ok_or(Error::Overloaded(RETRY_AFTER))?;
        match &mut self.held {
            Some(held) => held.merge(permit),
            None => self.held = Some(permit),
        }
        let memory = self.memory;
        self.upload.get_or_insert_with(|| memory.open()).upload.progress.lock().arrived(more);
        Ok(())
    }

    /// Waits for `next`, which the client sends. Fails if the upload must end, because memory is short.
    pub(super) async fn receive<T>(&self, next: impl Future<Output = T>) -> Result<T, Error> {
        let Some(OpenUpload { upload, .. }) = &self.upload else { return Ok(next.await) };
        upload.progress.lock().waits_since = Some(Instant::now());
        tokio::select! {
            biased;
            () = upload.evicted.notified() => Err(Error::UploadEvicted),
            next = next => {
                upload.progress.lock().stop_waiting();
                Ok(next)
            }
        }
    }

    /// The memory of the body, which has arrived completely.
    pub(super) fn finish(self) -> Option<OwnedSemaphorePermit> {
        self.held
    }
}

impl Drop for OpenUpload<'_> {
    fn drop(&mut self) {
        self.memory.uploads.lock().open.remove(&self.id);
        self.memory.ended.notify_waiters();
    }
}

impl Upload {
    fn evict(&self) {
        self.progress.lock().is_evicted = true;
        self.evicted.notify_one();
    }
}

impl Progress {
    /// Charges `bytes` that have arrived.
    fn arrived(&mut self, bytes: usize) {
        self.held += bytes;
        let rate = (self.held as f64 / UPLOAD_TIME.as_secs_f64()).clamp(SMALL_BODY_RATE, LARGE_BODY_RATE);
        self.late = self.late.saturating_sub(Duration::from_secs_f64(bytes as f64 / rate));
    }

    fn stop_waiting(&mut self) {
        self.late = self.late();
        self.waits_since = None;
    }

    /// Time by which the upload is behind its rate.
    fn late(&self) -> Duration {
        self.late + self.waits_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Whether the server waits for a client that is too late.
    fn is_late(&self) -> bool {
        self.waits_since.is_some() && self.late() > MAX_LATE
    }

    /// The memory that the upload holds, times the time by which it is late, in bytes times milliseconds.
    fn waste(&self) -> u128 {
        self.held as u128 * self.late().as_millis()
    }
}

#[cfg(test)]
mod tests;
