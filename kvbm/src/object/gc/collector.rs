//! Scans a whole store, marks the objects that its policy does not keep, and deletes marked objects after the grace
//! period.
//!
//! Takes no lock: objects are first listed in a tombstone list, and deleted by whichever collector runs after the
//! grace period. Any number of collectors may run at the same time; each continues from what the others did.

use super::cache::ScanCache;
use super::inventory::{AccessRecord, Contents, Inventory, Manifest, StoredObject, TombstoneList};
use super::plan::Plan;
use super::policy::{MarkReason, Policy};
use crate::block::{Date, DomainId};
use crate::object::catalog::Catalog;
use crate::object::client::unreadable::Unreadable;
use crate::object::client::url::{Access, StoreLocation};
use crate::object::client::{Client, RequestCounts, is_too_large};
use crate::object::format::layout::{InstanceId, Layout, ObjectId};
use crate::object::format::{access_log, manifest, tombstones};
use crate::object::reader::PARALLEL_REQUESTS;
use crate::object::settings::OpenError;
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore, PutPayload};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Cached bytes of manifests (of about two million blocks), and of the other small objects.
const MANIFEST_CACHE_BYTES: usize = 128 << 20;
const LIST_CACHE_BYTES: usize = 8 << 20;
/// Maximum bytes of the object with the date of the last run.
const MAX_DATE_BYTES: u64 = 64;
/// A garbage collector of one store. It caches what it read: a second scan reads only what is new.
pub struct Collector {
    pub(super) client: Arc<Client>,
    layout: Layout,
    manifests: ScanCache<Contents>,
    tombstone_lists: ScanCache<Arc<[ObjectId]>>,
    access_records: ScanCache<Arc<[(ObjectId, Duration)]>>,
    /// Manifests, tombstone lists and access logs that cannot be read.
    unreadable: Unreadable,
    /// Instance id of the collecting process if it writes to the store too, otherwise an unused id.
    own: InstanceId,
    is_writer: bool,
    /// The catalog of the tier, and the used bytes above which the headroom is too small.
    headroom_limit: Option<(Weak<Catalog>, u64)>,
}

/// Result of a garbage collection run; of a dry run, what it would do.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct GcReport {
    /// Number of objects in the store.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Objects that the run marked for deletion, by reason; a run after the grace period deletes them.
    pub marked: BTreeMap<MarkReason, ObjectTotals>,
    /// Objects that earlier runs marked, and whose grace period is not over.
    pub already_marked: ObjectTotals,
    /// Deleted objects: their grace period is over, or no manifest lists them.
    pub deleted: ObjectTotals,
    /// Deleted manifests: all their objects were deleted.
    pub deleted_manifests: u64,
    /// Manifests that could not be read although the store answers: their objects are unknown and are kept.
    pub unreadable_manifests: u64,
    /// Time until the next marked object may be deleted.
    #[serde(skip)]
    pub next_deletion: Option<Duration>,
}

/// Number and bytes of some objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ObjectTotals {
    /// Number of objects.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl ObjectTotals {
    fn add(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
    }
}

impl Collector {
    /// Creates a collector of a prefix of a store.
    pub fn open(store: Arc<dyn ObjectStore>, prefix: &str, timeout: Duration) -> Self {
        Self::of_client(Self::client(store, timeout), prefix)
    }

    fn client(store: Arc<dyn ObjectStore>, timeout: Duration) -> Client {
        Client::new(store, timeout, u64::from(std::process::id()))
    }

    fn of_client(client: Client, prefix: &str) -> Self {
        let client = Arc::new(client);
        Self { is_writer: false, ..Self::new(client, Layout::new(prefix), InstanceId::new(), None) }
    }

    /// Creates a collector for a process that writes to the store too.
    pub(in crate::object) fn new(
        client: Arc<Client>,
        layout: Layout,
        own: InstanceId,
        headroom_limit: Option<(Weak<Catalog>, u64)>,
    ) -> Self {
        Self {
            client,
            layout,
            manifests: ScanCache::new(MANIFEST_CACHE_BYTES),
            tombstone_lists: ScanCache::new(LIST_CACHE_BYTES),
            access_records: ScanCache::new(LIST_CACHE_BYTES),
            unreadable: Unreadable::default(),
            own,
            is_writer: true,
            headroom_limit,
        }
    }

    /// Whether the store is so full that a run should start soon.
    pub(in crate::object) fn is_near_capacity(&self) -> bool {
        let is_above = |(catalog, limit): &(Weak<Catalog>, u64)| Some(catalog.upgrade()?.used_bytes() > *limit);
        self.headroom_limit.as_ref().and_then(is_above).unwrap_or(false)
    }

    /// Creates a collector of a store at a location. A folder that does not exist is an error.
    pub fn open_location(location: &StoreLocation, access: &Access, timeout: Duration) -> Result<Self, OpenError> {
        match location {
            StoreLocation::Folder(folder) => {
                let store = LocalFileSystem::new_with_prefix(folder).map_err(io::Error::from)?;
                Ok(Self::of_client(Self::client(Arc::new(store), timeout).listed_in(folder), ""))
            }
            StoreLocation::Cloud { cloud, prefix, .. } => {
                let client_error = |error: Error| OpenError::Client { why: error.to_string(), advice: cloud.advice() };
                let client = location.client(access, timeout).map_err(client_error)?;
                let client = client.ok_or_else(|| io::Error::other("a folder has no client"))?;
                Ok(Self::open(client, prefix.as_ref(), timeout))
            }
        }
    }

    /// Counts of the requests so far.
    pub fn request_counts(&self) -> RequestCounts {
        self.client.request_counts()
    }

    /// Lists the store, and reads all small objects that are new. `progress` is called with the number of manifests
    /// read so far and their total number.
    pub async fn scan(&self, progress: impl Fn(u64, u64)) -> io::Result<Arc<Inventory>> {
        // Manifests before objects: objects are written before their manifests, so an object that is not listed then
        // is missing.
        let listed = self.list(self.layout.manifests(), &self.manifests).await?;
        let (total, mut read) = (listed.len() as u64, 0);
        let mut reading = stream::iter(listed).map(|meta| self.read_manifest(meta)).buffered(PARALLEL_REQUESTS);
        let mut manifests = Vec::new();
        while let Some(manifest) = reading.try_next().await? {
            manifests.extend(manifest);
            read += 1;
            progress(read, total);
        }
        drop(reading);
        let listed = self.list(self.layout.access_logs(), &self.access_records).await?;
        let reading = stream::iter(listed).map(|meta| self.read_access_log(meta)).buffered(PARALLEL_REQUESTS);
        let access_records = reading.try_filter_map(async |record| Ok(record)).try_collect().await?;
        let listed = self.list(self.layout.tombstones(), &self.tombstone_lists).await?;
        let reading = stream::iter(listed).map(|meta| self.read_tombstones(meta)).buffered(PARALLEL_REQUESTS);
        let tombstone_lists = reading.try_filter_map(async |list| Ok(list)).try_collect().await?;
        let listed = self.client.list_all(&self.layout.objects()).await?;
        let stored = |meta: ObjectMeta| {
            let id = ObjectId::from_path(&meta.location)?;
            Some((id, StoredObject { modified: modified(&meta), bytes: meta.size, path: meta.location }))
        };
        let objects = listed.into_iter().filter_map(stored).collect();
        let own = self.is_writer.then_some(self.own);
        Ok(Arc::new(Inventory { manifests, objects, tombstone_lists, access_records, own }))
    }

    /// Lists the objects under a prefix, and removes from the cache what does not exist any more.
    async fn list<T: Clone>(&self, prefix: Path, cache: &ScanCache<T>) -> io::Result<Vec<ObjectMeta>> {
        let listed = self.client.list_all(&prefix).await?;
        cache.retain(&listed.iter().map(|meta| meta.location.clone()).collect());
        Ok(listed)
    }

    /// What a run at `now` would do.
    pub fn dry_run(&self, inventory: &Inventory, policy: &Policy, now: Date) -> GcReport {
        summarize(inventory, &inventory.plan(policy, now))
    }

    /// One run: marks objects by the policy, and deletes those whose grace period is over at `now`.
    pub async fn collect(&self, inventory: &Arc<Inventory>, policy: &Policy, now: Date) -> io::Result<GcReport> {
        let planned_inventory = inventory.clone();
        let planned_policy = policy.clone();
        // A plan over millions of blocks would block an async thread.
        let planned = tokio::task::spawn_blocking(move || planned_inventory.plan(&planned_policy, now));
        let plan = planned.await.map_err(io::Error::other)?;
        let report = summarize(inventory, &plan);
        self.mark(plan.mark.iter().map(|(id, _)| *id).collect()).await?;
        self.delete(plan.manifests).await?;
        let objects = plan.objects.iter().filter_map(|id| inventory.objects.get(id));
        self.delete(objects.map(|stored| stored.path.clone()).collect()).await?;
        self.delete(plan.tombstone_lists).await?;
        self.delete(plan.access_records).await?;
        Ok(report)
    }

    /// Announces a run and returns its date, or `None` if another process started one within `interval`. The date is
    /// the earlier one of `now` and the store's clock, which dates the objects, so that a clock that is ahead shortens
    /// no grace period. The announcement only saves work: two processes may start at the same time, and a date in the
    /// future is ignored.
    pub async fn try_start(&self, interval: Duration, now: Date) -> io::Result<Option<Date>> {
        let path = self.layout.last_gc();
        let last = match self.client.get(&path, MAX_DATE_BYTES).await {
            Ok(date) => std::str::from_utf8(&date).ok().and_then(|date| date.trim().parse().ok()).map(Date::from_unix),
            Err(Error::NotFound { .. }) => None,
            Err(error) if is_too_large(&error) => None,
            Err(error) => return Err(error.into()),
        };
        if last.is_some_and(|last| last <= now && last.after(interval) > now) {
            return Ok(None);
        }
        self.client.put(&path, PutPayload::from(format!("{}\n", Date::encode(Some(now))))).await?;
        Ok(Some(now.min(modified(&self.client.head(&path).await?))))
    }

    /// Marks all objects of a domain. A run after the grace period deletes them.
    pub async fn mark_domain(&self, inventory: &Inventory, domain: DomainId) -> io::Result<ObjectTotals> {
        let mut totals = ObjectTotals::default();
        let objects: Vec<_> = inventory.live().filter(|live| live.section.domain == domain).collect();
        for live in &objects {
            totals.add(live.stored.bytes);
        }
        self.mark(objects.into_iter().map(|live| live.id).collect()).await?;
        Ok(totals)
    }

    pub(super) async fn mark(&self, objects: Vec<ObjectId>) -> io::Result<()> {
        for objects in objects.chunks(tombstones::MAX_ENTRIES) {
            let id = InstanceId::new();
            let bytes = Bytes::from(tombstones::encode(id, objects));
            self.client.put(&self.layout.tombstone_list(id), PutPayload::from(bytes)).await?;
        }
        Ok(())
    }

    async fn delete(&self, paths: Vec<Path>) -> io::Result<()> {
        Ok(self.client.delete_all(paths).await?)
    }

    /// Reads a manifest, unless it is cached. `None` if another collector deleted it, or if its path is not in our
    /// layout.
    async fn read_manifest(&self, meta: ObjectMeta) -> io::Result<Option<Manifest>> {
        let Some(ObjectId { writer, number }) = ObjectId::from_path(&meta.location) else { return Ok(None) };
        let manifest =
            |contents| Manifest { modified: modified(&meta), path: meta.location.clone(), writer, number, contents };
        if let Some(contents) = self.manifests.get(&meta) {
            return Ok(Some(manifest(contents)));
        }
        let bytes = match self.read_object(&meta, manifest::MAX_BYTES).await? {
            Read::Bytes(bytes) => bytes,
            Read::Missing => return Ok(None),
            Read::Unreadable => return Ok(Some(manifest(Contents::Unreadable))),
        };
        let sections = manifest::decode(writer, &bytes);
        let contents = sections.map_or(Contents::Invalid, |sections| Contents::Sections(sections.into()));
        self.manifests.insert(meta.clone(), contents.clone(), bytes.len());
        Ok(Some(manifest(contents)))
    }

    async fn read_tombstones(&self, meta: ObjectMeta) -> io::Result<Option<TombstoneList>> {
        let Some(id) = meta.location.filename().and_then(|name| name.parse().ok()) else { return Ok(None) };
        let decode = |bytes: &[u8]| tombstones::decode(id, bytes);
        let Some(objects) = self.read_cached(&meta, &self.tombstone_lists, tombstones::MAX_BYTES, decode).await? else {
            return Ok(None);
        };
        Ok(Some(TombstoneList { modified: modified(&meta), path: meta.location, objects }))
    }

    async fn read_access_log(&self, meta: ObjectMeta) -> io::Result<Option<AccessRecord>> {
        let Some(id) = meta.location.filename().and_then(|name| name.parse().ok()) else { return Ok(None) };
        let Some(used) = self
            .read_cached(&meta, &self.access_records, access_log::MAX_BYTES, |bytes| access_log::decode(id, bytes))
            .await?
        else {
            return Ok(None);
        };
        Ok(Some(AccessRecord { modified: modified(&meta), path: meta.location, reader: id, used }))
    }

    /// Reads a list, unless it is cached. An invalid list counts as empty; `None` if it cannot be read.
    async fn read_cached<T>(
        &self,
        meta: &ObjectMeta,
        cache: &ScanCache<Arc<[T]>>,
        max_bytes: u64,
        decode: impl Fn(&[u8]) -> Option<Vec<T>>,
    ) -> io::Result<Option<Arc<[T]>>> {
        if let Some(items) = cache.get(meta) {
            return Ok(Some(items));
        }
        let Read::Bytes(bytes) = self.read_object(meta, max_bytes).await? else { return Ok(None) };
        let items: Arc<[T]> = decode(&bytes).unwrap_or_default().into();
        cache.insert(meta.clone(), items.clone(), bytes.len());
        Ok(Some(items))
    }

    /// Reads a small object. An error means that the store does not serve reads at all. An object that is too large is
    /// read as empty, which no decoder accepts.
    async fn read_object(&self, meta: &ObjectMeta, max_bytes: u64) -> io::Result<Read> {
        let path = &meta.location;
        if self.unreadable.is_waiting(path) {
            return Ok(Read::Unreadable);
        }
        let read = match self.client.get(path, max_bytes).await {
            Ok(bytes) => Read::Bytes(bytes),
            Err(Error::NotFound { .. }) => Read::Missing,
            Err(error) if is_too_large(&error) => Read::Bytes(Bytes::new()),
            Err(error) => {
                self.client.check_reads(&self.layout.probe(self.own)).await?;
                self.unreadable.record_failure(path, &error);
                return Ok(Read::Unreadable);
            }
        };
        self.unreadable.record_success(path);
        Ok(read)
    }
}

/// Result of reading a small object.
enum Read {
    Bytes(Bytes),
    /// Another collector deleted it.
    Missing,
    Unreadable,
}

/// The report of a plan.
fn summarize(inventory: &Inventory, plan: &Plan) -> GcReport {
    let mut report =
        GcReport { objects: inventory.objects.len() as u64, bytes: inventory.bytes(), ..GcReport::default() };
    let bytes = |id: &ObjectId| inventory.objects.get(id).map_or(0, |stored| stored.bytes);
    for (id, why) in &plan.mark {
        report.marked.entry(*why).or_default().add(bytes(id));
    }
    plan.objects.iter().for_each(|id| report.deleted.add(bytes(id)));
    let deleted: BTreeSet<&ObjectId> = plan.objects.iter().collect();
    for id in inventory.marked() {
        if inventory.objects.contains_key(&id) && !deleted.contains(&id) {
            report.already_marked.add(bytes(&id));
        }
    }
    report.deleted_manifests = plan.manifests.len() as u64;
    (report.unreadable_manifests, report.next_deletion) = (inventory.unreadable_manifests(), plan.next_deletion);
    report
}

fn modified(meta: &ObjectMeta) -> Date {
    Date::from_unix(u64::try_from(meta.last_modified.timestamp()).unwrap_or(0))
}
