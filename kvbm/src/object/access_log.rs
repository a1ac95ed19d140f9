//! The access log of this process: which objects it read, and how long ago, so that collectors in other processes
//! know.
//!
//! The log is one small object at the process's own path. It is rewritten at most every few minutes and only when it
//! has changed: no lock, no object per block, no request while loading. It is a hint: reads since the last flush, and
//! those of a process that never flushed, are not known to others.

use super::catalog::Object;
use super::client::{Client, is_too_large};
use super::format::access_log::{MAX_BYTES, MAX_ENTRIES, decode, encode};
use super::format::layout::{InstanceId, Layout, ObjectId};
use crate::block::Level;
use bytes::Bytes;
use object_store::{Error, PutPayload};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Minimum time between two flushes, and the resolution of the ages. Objects that may be deleted are hours or days
/// old. On shared flash, which a burst of writes fills in minutes and where a request costs no money, a minute.
const FLUSH_INTERVAL: Duration = Duration::from_mins(10);
const SHARED_FLASH_FLUSH_INTERVAL: Duration = Duration::from_mins(1);

/// The objects that this process read.
pub(super) struct AccessLog {
    client: Arc<Client>,
    layout: Layout,
    reader: InstanceId,
    flush_interval: Duration,
    reads: Mutex<Reads>,
}

#[derive(Default)]
struct Reads {
    /// When each object was last read.
    last: HashMap<ObjectId, Instant>,
    /// Whether `last` changed since the last flush.
    dirty: bool,
}

impl AccessLog {
    pub(super) fn new(level: Level, client: Arc<Client>, layout: Layout, reader: InstanceId) -> Self {
        let flush_interval = if level == Level::G3_5 { SHARED_FLASH_FLUSH_INTERVAL } else { FLUSH_INTERVAL };
        Self { client, layout, reader, flush_interval, reads: Mutex::default() }
    }

    /// Records that an object was read.
    pub(super) fn record(&self, object: ObjectId) {
        let mut reads = self.lock();
        match reads.last.entry(object) {
            // Within the resolution of the log.
            Entry::Occupied(before) if before.get().elapsed() < self.flush_interval => return,
            Entry::Occupied(mut before) => drop(before.insert(Instant::now())),
            Entry::Vacant(first) => drop(first.insert(Instant::now())),
        }
        reads.dirty = true;
    }

    /// How long ago this process last read an object, if it is still in the log.
    pub(super) fn idle_time(&self, object: ObjectId) -> Option<Duration> {
        self.lock().last.get(&object).map(Instant::elapsed)
    }

    /// Reads the access logs of all processes: how long ago each object was last read.
    pub(super) async fn read_all(&self) -> Result<HashMap<ObjectId, Duration>, Error> {
        // This makes the own log the newest one, and its modification date the current time of the store.
        self.write().await?;
        let listed = self.client.list_all(&self.layout.access_logs()).await?;
        let now = listed.iter().map(|meta| meta.last_modified).max().unwrap_or_default();
        let mut idle_times = HashMap::new();
        for meta in listed {
            let Some(reader) = meta.location.filename().and_then(|name| name.parse().ok()) else { continue };
            let log = match self.client.get(&meta.location, MAX_BYTES).await {
                Err(Error::NotFound { .. }) => continue,
                Err(error) if is_too_large(&error) => continue,
                log => log?,
            };
            let since = (now - meta.last_modified).to_std().unwrap_or_default();
            for (object, idle) in decode(reader, &log).into_iter().flatten() {
                let idle = idle + since;
                let least = idle_times.entry(object).or_insert(Duration::MAX);
                *least = idle.min(*least);
            }
        }
        Ok(idle_times)
    }

    /// For how long the blocks of an object have not been used: since the last read in this log or in `idle_times`, or
    /// since they were written.
    pub(super) fn object_idle_time(&self, object: &Object, idle_times: &HashMap<ObjectId, Duration>) -> Duration {
        let written = object.idle + object.learned_at.elapsed();
        let id = ObjectId::from_path(&object.path);
        let read = id.into_iter().flat_map(|id| [self.idle_time(id), idle_times.get(&id).copied()]).flatten();
        read.fold(written, Duration::min)
    }

    /// Flushes periodically. Never returns.
    pub(super) async fn run(self: Arc<Self>) {
        loop {
            tokio::time::sleep(self.flush_interval).await;
            self.flush().await;
        }
    }

    /// Writes the log if it has changed.
    pub(super) async fn flush(&self) {
        if !self.lock().dirty {
            return;
        }
        if let Err(error) = self.write().await {
            tracing::debug!(%error, "cannot write the access log; retrying later");
        }
    }

    async fn write(&self) -> Result<(), Error> {
        let written = self.client.put(&self.layout.access_log(self.reader), PutPayload::from(self.encode())).await;
        if written.is_err() {
            self.lock().dirty = true;
        }
        written.map(drop)
    }

    /// The bytes of the log. Forgets the oldest reads beyond the maximum number of entries.
    fn encode(&self) -> Bytes {
        let mut reads = self.lock();
        reads.dirty = false;
        let mut used: Vec<(ObjectId, Instant)> = reads.last.iter().map(|(object, at)| (*object, *at)).collect();
        used.sort_unstable_by_key(|(object, at)| (std::cmp::Reverse(*at), *object));
        for (object, _) in used.drain(used.len().min(MAX_ENTRIES)..) {
            reads.last.remove(&object);
        }
        let used: Vec<(ObjectId, Duration)> = used.into_iter().map(|(object, at)| (object, at.elapsed())).collect();
        Bytes::from(encode(self.reader, &used))
    }

    fn lock(&self) -> MutexGuard<'_, Reads> {
        // Each change is one insertion, so the state is valid after a panic.
        self.reads.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::memory::InMemory;

    fn object(number: u64) -> ObjectId {
        ObjectId { writer: InstanceId::from_bytes([7; 16]), number }
    }

    #[tokio::test(start_paused = true)]
    async fn frequent_reads_are_logged_rarely_and_the_newest_are_kept() {
        let client = Arc::new(Client::new(Arc::new(InMemory::new()), FLUSH_INTERVAL, 1));
        let log = AccessLog::new(Level::G4, client, Layout::new(""), InstanceId::new());
        let is_dirty = || log.lock().dirty;
        assert!(!is_dirty());
        log.record(object(1));
        assert!(is_dirty());
        log.flush().await;
        tokio::time::advance(FLUSH_INTERVAL / 2).await;
        log.record(object(1));
        assert!(!is_dirty(), "within the resolution");
        tokio::time::advance(FLUSH_INTERVAL / 2).await;
        (0..MAX_ENTRIES as u64).for_each(|number| log.record(object(number + 2)));
        tokio::time::advance(FLUSH_INTERVAL).await;
        let entries = decode(log.reader, &log.encode()).unwrap();
        assert_eq!(entries.len(), MAX_ENTRIES);
        assert!(entries.iter().all(|(read, idle)| *read != object(1) && *idle == FLUSH_INTERVAL));
    }
}
