//! Follows the manifests of other writers: finds writers by listing, and reads the next manifest of each by its
//! number.
//!
//! The work of a poll is bounded for any size of the store: one list of writers, a bounded number of requests for next
//! manifests, and the new manifests; every few polls also the tombstone lists. A corrupt manifest is skipped, and so
//! is one that cannot be read although the store serves reads (`unreadable`); neither fails the poll. Numbers may be
//! missing where manifests were deleted, so the manifests of an inactive writer are listed now and then, from its next
//! number on. No load waits for the follower.

use super::catalog::{Catalog, object_paths};
use super::client::health::StoreHealth;
use super::client::unreadable::Unreadable;
use super::client::{Client, is_too_large};
use super::format::layout::{InstanceId, Layout, ObjectId};
use super::format::manifest::{self, Section};
use super::format::tombstones;
use super::reader::PARALLEL_REQUESTS;
use crate::transform::crypt::{KeyError, MetadataKeys};
use bytes::Bytes;
use futures::stream::{self, StreamExt};
use object_store::path::Path;
use object_store::{Error, ObjectMeta};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

/// Blocks of another process are found within two seconds: one until the next poll, one to read.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Writers polled in one poll: the most recently active ones, and as many of the others in rotation.
const MAX_POLLED_WRITERS: usize = 32;
/// Manifests of one writer that are read in one poll; the next poll continues.
const MAX_MANIFESTS_PER_POLL: usize = 256;
/// How often the manifests of an inactive writer are listed, and how many such lists a poll makes: about as many as
/// lists of writers.
const LIST_INTERVAL: Duration = Duration::from_mins(1);
const LISTS_PER_POLL: usize = 1;
/// Polls between two reads of the tombstone lists: seconds, while the grace period is minutes.
const POLLS_PER_TOMBSTONE_READ: u64 = 5;
/// After this time without a successful poll, the next manifest of a writer may have been deleted, so every writer is
/// listed. Less than the grace period of deletions.
const STALE_AFTER: Duration = Duration::from_mins(1);

/// A writer with a manifest within this time is active: likely to write again.
const ACTIVE_WINDOW: Duration = Duration::from_mins(1);

/// Keeps a catalog up to date with the store.
pub(super) struct Follower {
    client: Arc<Client>,
    layout: Layout,
    own: InstanceId,
    catalog: Arc<Catalog>,
    writers: BTreeMap<InstanceId, WriterCursor>,
    /// Objects that are marked for deletion, by collector.
    tombstones: BTreeMap<InstanceId, HashSet<ObjectId>>,
    polls: u64,
    unreadable_tombstones: Unreadable,
    /// When a poll last succeeded.
    last_success: Instant,
    health: watch::Sender<StoreHealth>,
    /// The keys that manifests must be authenticated with, if any.
    keys: Option<Arc<MetadataKeys>>,
    /// Whether all manifests of before the start were read.
    initialized: bool,
    rotation: usize,
}

/// How far the manifests of a writer were read.
#[derive(Clone, Copy)]
struct WriterCursor {
    next: u64,
    last_manifest_at: Instant,
    /// When its manifests were last listed.
    listed_at: Option<Instant>,
}

impl WriterCursor {
    /// The cursor of a new writer.
    fn new() -> Self {
        Self { next: 0, last_manifest_at: Instant::now(), listed_at: None }
    }

    fn advance_past(&mut self, number: u64) {
        (self.next, self.last_manifest_at) = (number + 1, Instant::now());
    }

    fn is_list_due(&self) -> bool {
        self.listed_at.is_none_or(|listed| listed.elapsed() >= LIST_INTERVAL)
    }
}

/// Result of reading a manifest.
enum ManifestRead {
    Valid(Vec<Section>),
    Corrupt,
    /// The manifest does not exist.
    Absent,
    /// The manifest cannot be read although the store serves reads.
    Unreadable,
}

impl Follower {
    pub(super) fn new(
        client: Arc<Client>,
        layout: Layout,
        own: InstanceId,
        catalog: Arc<Catalog>,
        health: watch::Sender<StoreHealth>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Self {
        Self {
            client,
            layout,
            own,
            catalog,
            writers: BTreeMap::new(),
            tombstones: BTreeMap::new(),
            polls: 0,
            unreadable_tombstones: Unreadable::default(),
            last_success: Instant::now(),
            health,
            keys,
            initialized: false,
            rotation: 0,
        }
    }

    /// Polls periodically. Never returns.
    pub(super) async fn run(mut self) {
        let mut interval = tokio::time::interval(POLL_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let now = self.poll_once().await;
            let before = self.health.send_replace(now.clone());
            // Log changes only, not every poll.
            match (&before, &now) {
                (StoreHealth::Unavailable(_) | StoreHealth::Refused(_), StoreHealth::Ready) => {
                    tracing::info!(store = %self.client, prefix = %self.layout, "the store is reachable again");
                    self.client.writes.outage_ended();
                    self.client.reads.outage_ended();
                }
                // Whether it is tried again depends on the caller that opened the store, which logs that.
                (StoreHealth::Starting, StoreHealth::Unavailable(why) | StoreHealth::Refused(why)) => {
                    tracing::warn!(
                        store = %self.client, prefix = %self.layout, reason = why,
                        "the store is not usable"
                    );
                }
                (StoreHealth::Ready, StoreHealth::Unavailable(why) | StoreHealth::Refused(why)) => {
                    tracing::warn!(
                        store = %self.client, prefix = %self.layout, reason = why,
                        "the store is not usable; retrying every second"
                    );
                }
                _ => {}
            }
        }
    }

    pub(super) async fn poll_once(&mut self) -> StoreHealth {
        let now = match self.poll().await {
            Ok(()) => StoreHealth::Ready,
            Err(error) => StoreHealth::from(&error),
        };
        self.initialized |= now == StoreHealth::Ready;
        now
    }

    async fn poll(&mut self) -> Result<(), Error> {
        let reads_tombstones = self.polls.is_multiple_of(POLLS_PER_TOMBSTONE_READ);
        // Counts failed polls too.
        self.polls += 1;
        // Tombstones are read before the manifests, which still list marked objects. An error here does not stop the
        // poll.
        let mut outcome = if reads_tombstones { self.read_tombstones().await } else { Ok(()) };
        let new_writers = self.new_writers().await?;
        let is_stale = self.initialized && self.last_success.elapsed() > STALE_AFTER;
        if self.initialized {
            self.writers.extend(new_writers.iter().map(|writer| (*writer, WriterCursor::new())));
        } else {
            self.read_history(new_writers).await?;
        }
        let polled = if is_stale {
            self.writers.iter().map(|(writer, cursor)| (*writer, *cursor)).collect()
        } else {
            self.writers_to_poll()
        };
        let mut due: Vec<(InstanceId, Option<Instant>)> = polled
            .iter()
            .filter(|(_, cursor)| cursor.is_list_due())
            .map(|(writer, cursor)| (*writer, cursor.listed_at))
            .collect();
        due.sort_unstable_by_key(|(_, listed)| *listed);
        let list_writer =
            |writer: &InstanceId| is_stale || due.iter().take(LISTS_PER_POLL).any(|(due, _)| due == writer);
        let results: Vec<_> = stream::iter(polled)
            .map(|(writer, cursor)| self.poll_writer(writer, cursor, list_writer(&writer)))
            .buffer_unordered(PARALLEL_REQUESTS)
            .collect()
            .await;
        for (writer, cursor, result) in results {
            self.writers.insert(writer, cursor);
            outcome = outcome.and(result);
        }
        let active = self.writers.values().filter(|cursor| cursor.last_manifest_at.elapsed() < ACTIVE_WINDOW).count();
        self.catalog.set_active_writers(active);
        self.retry_unreadable().await?;
        outcome?;
        self.last_success = Instant::now();
        Ok(())
    }

    /// Removes marked objects from the catalog.
    async fn read_tombstones(&mut self) -> Result<(), Error> {
        let listed = self.client.list(&self.layout.tombstones()).await?;
        let listed: HashSet<InstanceId> =
            listed.objects.iter().filter_map(|meta| meta.location.filename()?.parse().ok()).collect();
        self.tombstones.retain(|collector, _| listed.contains(collector));
        let paths: HashSet<Path> = listed.iter().map(|collector| self.layout.tombstone_list(*collector)).collect();
        self.unreadable_tombstones.retain(|path| paths.contains(path));
        for collector in listed {
            if self.tombstones.contains_key(&collector) {
                continue;
            }
            let path = self.layout.tombstone_list(collector);
            if self.unreadable_tombstones.is_waiting(&path) {
                continue;
            }
            let bytes = match self.client.get(&path, tombstones::MAX_BYTES).await {
                Ok(bytes) => bytes,
                Err(error) if is_too_large(&error) => Bytes::new(),
                // The list was deleted, after its objects.
                Err(Error::NotFound { .. }) => continue,
                Err(error) => {
                    self.client.check_reads(&self.layout.probe(self.own)).await?;
                    self.unreadable_tombstones.record_failure(&path, &error);
                    continue;
                }
            };
            self.unreadable_tombstones.record_success(&path);
            let marked: HashSet<ObjectId> =
                tombstones::decode(collector, &bytes).unwrap_or_default().into_iter().collect();
            self.catalog.remove_marked(|object| marked.contains(&object));
            self.tombstones.insert(collector, marked);
        }
        Ok(())
    }

    fn is_marked(&self, writer: InstanceId, section: &Section) -> bool {
        let object = ObjectId { writer, number: section.object };
        self.tombstones.values().any(|marked| marked.contains(&object))
    }

    /// Writers that were not listed before.
    async fn new_writers(&self) -> Result<Vec<InstanceId>, Error> {
        let listed = self.client.list(&self.layout.manifests()).await?;
        let writers = listed.common_prefixes.iter().filter_map(|path| path.filename()?.parse().ok());
        Ok(writers.filter(|writer| *writer != self.own && !self.writers.contains_key(writer)).collect())
    }

    /// The numbers of a writer's manifests, starting at `from`, sorted.
    async fn numbers(&self, writer: InstanceId, from: u64) -> Result<Vec<u64>, Error> {
        let under = self.layout.manifests_of(writer);
        let after = from.checked_sub(1).map(|last| self.layout.manifest(writer, last));
        let number = |meta: &ObjectMeta| {
            ObjectId::from_path(&meta.location).filter(|id| id.writer == writer).map(|id| id.number)
        };
        let listed = self.client.list_after(&under, after.as_ref()).await?;
        let mut numbers: Vec<u64> = listed.iter().filter_map(number).filter(|number| *number >= from).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Reads the manifests of before the start, newest first, until the catalog is full.
    async fn read_history(&mut self, mut writers: Vec<InstanceId>) -> Result<(), Error> {
        writers.sort_unstable();
        let mut has_room = true;
        for writer in writers.into_iter().rev() {
            let mut numbers = self.numbers(writer, 0).await?;
            let mut cursor = WriterCursor { listed_at: Some(Instant::now()), ..WriterCursor::new() };
            numbers.last().into_iter().for_each(|last| cursor.advance_past(*last));
            if !has_room {
                numbers.clear();
            }
            let mut manifests = stream::iter(numbers.into_iter().rev())
                .map(|number| self.read_manifest(writer, number))
                .buffered(PARALLEL_REQUESTS);
            while let Some(read) = manifests.next().await {
                let ManifestRead::Valid(sections) = read? else { continue };
                let mut sections = sections.iter().rev().filter(|section| !self.is_marked(writer, section));
                has_room =
                    sections.all(|section| self.catalog.insert_oldest(object_paths(&self.layout, writer), section));
                if !has_room {
                    break;
                }
            }
            drop(manifests);
            self.writers.insert(writer, cursor);
        }
        Ok(())
    }

    /// The writers of the next poll.
    fn writers_to_poll(&mut self) -> Vec<(InstanceId, WriterCursor)> {
        let mut writers: Vec<(InstanceId, WriterCursor)> =
            self.writers.iter().map(|(writer, cursor)| (*writer, *cursor)).collect();
        writers.sort_by_key(|(writer, cursor)| (std::cmp::Reverse(cursor.last_manifest_at), *writer));
        let inactive = writers.split_off(writers.len().min(MAX_POLLED_WRITERS));
        let rotation = self.rotation.checked_rem(inactive.len()).unwrap_or(0);
        writers.extend(inactive.iter().cycle().skip(rotation).take(MAX_POLLED_WRITERS.min(inactive.len())));
        self.rotation = rotation + MAX_POLLED_WRITERS;
        writers
    }

    /// Reads a writer's next manifests. Returns the new cursor, and the error that stopped it.
    async fn poll_writer(
        &self,
        writer: InstanceId,
        mut cursor: WriterCursor,
        list: bool,
    ) -> (InstanceId, WriterCursor, Result<(), Error>) {
        let result = self.read_next(writer, &mut cursor, list).await;
        (writer, cursor, result)
    }

    async fn read_next(&self, writer: InstanceId, cursor: &mut WriterCursor, list: bool) -> Result<(), Error> {
        let mut unreadable = false;
        for _ in 0..MAX_MANIFESTS_PER_POLL {
            let path = self.layout.manifest(writer, cursor.next);
            // It may not exist: some stores deny access to objects that do not exist.
            if self.catalog.unreadable.is_waiting(&path) {
                break;
            }
            match self.read_manifest(writer, cursor.next).await? {
                // Without any known number, only a list finds the first one.
                ManifestRead::Absent if cursor.next == 0 => return self.read_listed(writer, cursor).await,
                ManifestRead::Absent => break,
                ManifestRead::Unreadable => {
                    unreadable = true;
                    break;
                }
                read => self.apply(writer, &read),
            }
            cursor.advance_past(cursor.next);
        }
        if unreadable || list { self.read_listed(writer, cursor).await } else { Ok(()) }
    }

    /// Reads the manifests of a writer that exist, with gaps between their numbers.
    async fn read_listed(&self, writer: InstanceId, cursor: &mut WriterCursor) -> Result<(), Error> {
        let numbers = self.numbers(writer, cursor.next).await?;
        // If there are too many for one poll, the next poll lists again.
        cursor.listed_at = (numbers.len() <= MAX_MANIFESTS_PER_POLL).then(Instant::now);
        for number in numbers.into_iter().take(MAX_MANIFESTS_PER_POLL) {
            if !self.catalog.unreadable.is_waiting(&self.layout.manifest(writer, number)) {
                self.apply(writer, &self.read_manifest(writer, number).await?);
            }
            cursor.advance_past(number);
        }
        Ok(())
    }

    /// Retries one of the unreadable manifests.
    async fn retry_unreadable(&self) -> Result<(), Error> {
        let Some(path) = self.catalog.unreadable.next_due() else { return Ok(()) };
        match ObjectId::from_path(&path) {
            Some(ObjectId { writer, number }) => self.apply(writer, &self.read_manifest(writer, number).await?),
            None => self.catalog.unreadable.record_success(&path),
        }
        Ok(())
    }

    fn apply(&self, writer: InstanceId, read: &ManifestRead) {
        let ManifestRead::Valid(sections) = read else { return };
        for section in sections.iter().filter(|section| !self.is_marked(writer, section)) {
            self.catalog.insert_newest(object_paths(&self.layout, writer), section);
        }
    }

    async fn read_manifest(&self, writer: InstanceId, number: u64) -> Result<ManifestRead, Error> {
        let path = self.layout.manifest(writer, number);
        let bytes = match self.client.get(&path, manifest::MAX_BYTES).await {
            Ok(bytes) => bytes,
            Err(Error::NotFound { .. }) => {
                self.catalog.unreadable.record_success(&path);
                return Ok(ManifestRead::Absent);
            }
            // Too large for a manifest, so it is corrupt.
            Err(error) if is_too_large(&error) => Bytes::new(),
            Err(error) => {
                // Fails the poll unless the store serves other reads.
                self.client.check_reads(&self.layout.probe(self.own)).await?;
                self.catalog.unreadable.record_failure(&path, &error);
                return Ok(ManifestRead::Unreadable);
            }
        };
        let is_authentic = match &self.keys {
            Some(keys) => manifest::is_authentic(writer, number, &bytes, keys).await,
            None => Ok(true),
        };
        let is_authentic = match is_authentic {
            Ok(is_authentic) => is_authentic,
            // The tag cannot be verified now.
            Err(error) => {
                self.catalog.unreadable.record_failure(&path, &store_error(error));
                return Ok(ManifestRead::Unreadable);
            }
        };
        self.catalog.unreadable.record_success(&path);
        let sections = manifest::decode(writer, &bytes).filter(|_| is_authentic);
        if sections.is_none() {
            self.catalog.count_corrupt_manifest();
            if let Some(suppressed) = self.catalog.corrupt_manifest_log.admit() {
                tracing::warn!(manifest = %path, suppressed, "manifest is corrupt");
            }
        }
        Ok(sections.map_or(ManifestRead::Corrupt, ManifestRead::Valid))
    }
}

/// Converts an error of the key store.
fn store_error(error: KeyError) -> Error {
    match error {
        KeyError::Store(error) => error,
        error => Error::Generic { store: "keys", source: Box::new(error) },
    }
}
