//! Looks through a whole store, and removes from it what a policy does not want to stay, or what is not sound.
//!
//! Takes no lock: what goes is named in a list of removals first, and deleted by whoever comes after the grace. Any number of
//! collectors may be at work; what one did, the next one finds done. A collector that ends in between leaves nothing wrong
//! behind, only work.

use super::cache::Known;
use super::{Contents, Manifest, Note, Plan, Policy, Removal, Stored, Survey, Why};
use crate::block::{Date, DomainId, Header, KeyId};
use crate::object::catalog::Catalog;
use crate::object::client::unreadable::Unreadable;
use crate::object::client::{Client, is_too_large};
use crate::object::format::layout::{Layout, ObjectId, Writer};
use crate::object::format::{manifest, tombstones};
use crate::object::{Access, Counts, Location, OpenError, PARALLEL, access_log, block};
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore, PutPayload};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// What is kept of what was read, from one pass to the next: manifests of two million blocks; the others are small.
const KNOWN: [usize; 3] = [128 << 20, 8 << 20, 8 << 20];
/// Bytes of the date of a collection at most.
const COLLECTED: u64 = 64;
/// Objects read at once when all are read: the memory that they take is theirs.
const READ: usize = 4;

/// Collects what need not stay in a store. Remembers what it has read: a second pass reads what is new.
pub struct Collector {
    client: Arc<Client>,
    layout: Layout,
    manifests: Known<Contents>,
    removals: Known<Arc<[ObjectId]>>,
    notes: Known<Arc<[(ObjectId, Duration)]>>,
    /// Manifests, lists and notes that the store did not hand out.
    unreadable: Unreadable,
    /// The process that collects, if it writes too, or a name that no other has.
    own: Writer,
    is_writer: bool,
    /// What a tier knows of the store, and above how many bytes there is little room left.
    near: Option<(Weak<Catalog>, u64)>,
}

/// Result of a garbage collection run; of a dry run, what it would do.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Report {
    /// Number of objects in the store.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Objects that the run marked for deletion, by reason; a run after the grace period deletes them.
    #[serde(rename = "marked")]
    pub condemned: BTreeMap<Why, Amount>,
    /// Deleted objects: their grace period is over, or no manifest lists them.
    pub deleted: Amount,
    /// Deleted manifests: all their objects were deleted.
    #[serde(rename = "deleted_manifests")]
    pub manifests: u64,
    /// Manifests that could not be read although the store answers: their objects are unknown and are kept.
    #[serde(rename = "unreadable_manifests")]
    pub unreadable: u64,
    /// After how long the next object that is named as going may be deleted.
    #[serde(skip)]
    pub next: Option<Duration>,
}

/// Some objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Amount {
    /// How many.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Result of reading all objects.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Verification {
    /// Objects that were read.
    pub objects: u64,
    /// Blocks that match their checksums.
    pub valid_blocks: u64,
    /// Valid blocks whose data key is not available here.
    pub undecryptable_blocks: u64,
    /// Blocks that do not match their checksums.
    pub corrupt_blocks: u64,
    /// Objects that a manifest lists and the store does not have.
    pub missing_objects: u64,
    /// Manifests that do not match their checksums.
    pub corrupt_manifests: u64,
    /// Manifests that could not be read although the store answers.
    pub unreadable_manifests: u64,
    /// Objects with corrupt blocks, and missing objects, that were marked for deletion.
    pub marked_objects: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
    }
}

impl Collector {
    /// Looks through a prefix of a store.
    pub fn open(store: Arc<dyn ObjectStore>, prefix: &str, timeout: Duration) -> Self {
        let seed = u64::from(std::process::id());
        let client = Arc::new(Client::new(store, timeout, seed));
        Self { is_writer: false, ..Self::new(client, Layout::new(prefix), Writer::new(), None) }
    }

    /// Collects for a process that writes too.
    pub(in crate::object) fn new(
        client: Arc<Client>,
        layout: Layout,
        own: Writer,
        near: Option<(Weak<Catalog>, u64)>,
    ) -> Self {
        let [manifests, removals, notes] = KNOWN;
        let (manifests, removals, notes) = (Known::new(manifests), Known::new(removals), Known::new(notes));
        let unreadable = Unreadable::default();
        Self { client, layout, manifests, removals, notes, unreadable, own, is_writer: true, near }
    }

    /// Whether there is so little room left that somebody should collect soon.
    pub(in crate::object) fn is_near_capacity(&self) -> bool {
        let near = |(catalog, above): &(Weak<Catalog>, u64)| Some(catalog.upgrade()?.taken() > *above);
        self.near.as_ref().and_then(near).unwrap_or(false)
    }

    /// Looks through what a URL names. A folder that is not there is an error: there would be nothing in it.
    pub fn at(location: &Location, access: &Access, timeout: Duration) -> Result<Self, OpenError> {
        match location {
            Location::Folder(folder) => {
                let store = LocalFileSystem::new_with_prefix(folder).map_err(io::Error::from)?;
                Ok(Self::open(Arc::new(store), "", timeout))
            }
            Location::Cloud { cloud, prefix, .. } => {
                let wrong = |error: Error| OpenError::Client { why: error.to_string(), advice: cloud.advice() };
                let client = location.client(access, timeout).map_err(wrong)?;
                let client = client.ok_or_else(|| io::Error::other("a folder has no client"))?;
                Ok(Self::open(client, prefix.as_ref(), timeout))
            }
        }
    }

    /// What the requests so far came to.
    pub fn counts(&self) -> Counts {
        self.client.counts()
    }

    /// Lists all, and reads what is new of all but the blocks. `progress` hears how many of how many manifests are known.
    pub async fn survey(&self, progress: impl Fn(u64, u64)) -> io::Result<Arc<Survey>> {
        // Manifests before objects: what a manifest names was there before it, so what is missing then is gone.
        let listed = self.list(self.layout.manifests(), &self.manifests).await?;
        let (total, mut read) = (listed.len() as u64, 0);
        let mut reading = stream::iter(listed).map(|meta| self.manifest(meta)).buffered(PARALLEL);
        let mut manifests = Vec::new();
        while let Some(manifest) = reading.try_next().await? {
            manifests.extend(manifest);
            read += 1;
            progress(read, total);
        }
        drop(reading);
        let listed = self.list(self.layout.all_uses(), &self.notes).await?;
        let reading = stream::iter(listed).map(|meta| self.note(meta)).buffered(PARALLEL);
        let notes = reading.try_filter_map(async |note| Ok(note)).try_collect().await?;
        let listed = self.list(self.layout.removals(), &self.removals).await?;
        let reading = stream::iter(listed).map(|meta| self.removal(meta)).buffered(PARALLEL);
        let removals = reading.try_filter_map(async |removal| Ok(removal)).try_collect().await?;
        let listed = self.client.list_all(&self.layout.all_blocks()).await?;
        let stored = |meta: ObjectMeta| {
            let id = ObjectId::at(&meta.location)?;
            Some((id, Stored { modified: modified(&meta), bytes: meta.size, path: meta.location }))
        };
        let objects = listed.into_iter().filter_map(stored).collect();
        let own = self.is_writer.then_some(self.own);
        Ok(Arc::new(Survey { manifests, objects, removals, notes, own }))
    }

    /// What lies under a prefix; what is known of the rest is forgotten.
    async fn list<T: Clone>(&self, under: Path, known: &Known<T>) -> io::Result<Vec<ObjectMeta>> {
        let listed = self.client.list_all(&under).await?;
        known.retain(&listed.iter().map(|meta| meta.location.clone()).collect());
        Ok(listed)
    }

    /// What a pass at `now` would do.
    pub fn would(&self, survey: &Survey, policy: &Policy, now: Date) -> Report {
        report(survey, &survey.plan(policy, now))
    }

    /// One pass: condemns what a policy does not want to stay, and deletes what was condemned so long before `now`.
    pub async fn collect(&self, survey: &Arc<Survey>, policy: &Policy, now: Date) -> io::Result<Report> {
        let (seen, wanted) = (survey.clone(), policy.clone());
        // Looking at millions of blocks is no work for an async thread.
        let planned = tokio::task::spawn_blocking(move || seen.plan(&wanted, now));
        let plan = planned.await.map_err(io::Error::other)?;
        let report = report(survey, &plan);
        self.condemn(plan.condemn.iter().map(|(id, _)| *id).collect()).await?;
        self.delete(plan.manifests).await?;
        let objects = plan.objects.iter().filter_map(|id| survey.objects.get(id));
        self.delete(objects.map(|stored| stored.path.clone()).collect()).await?;
        self.delete(plan.removals).await?;
        self.delete(plan.notes).await?;
        Ok(report)
    }

    /// Whether nobody has begun to collect in the last `every`; then everybody hears that we do, and the answer is the date to
    /// go by: of ours and the store's, by whose clock its objects are dated, the earlier one, so that no grace is cut short by
    /// a clock that is ahead. A hint that spares work: two that ask at the same time may both be told to, and a date from the
    /// future counts for nothing.
    pub async fn turn(&self, every: Duration, now: Date) -> io::Result<Option<Date>> {
        let path = self.layout.collected();
        let last = match self.client.get(&path, COLLECTED).await {
            Ok(said) => std::str::from_utf8(&said).ok().and_then(|said| said.trim().parse().ok()).map(Date::from_unix),
            Err(Error::NotFound { .. }) => None,
            Err(error) if is_too_large(&error) => None,
            Err(error) => return Err(error.into()),
        };
        if last.is_some_and(|last| last <= now && last.after(every) > now) {
            return Ok(None);
        }
        self.client.put(&path, PutPayload::from(format!("{}\n", Date::encode(Some(now))))).await?;
        Ok(Some(now.min(modified(&self.client.head(&path).await?))))
    }

    /// Condemns all objects of a domain; a pass deletes them once the grace is over.
    pub async fn condemn_domain(&self, survey: &Survey, domain: DomainId) -> io::Result<Amount> {
        let mut amount = Amount::default();
        let theirs: Vec<_> = survey.live().filter(|live| live.section.domain == domain).collect();
        for live in &theirs {
            amount.add(live.stored.bytes);
        }
        self.condemn(theirs.into_iter().map(|live| live.id).collect()).await?;
        Ok(amount)
    }

    /// Reads every block that can be asked for. `opens` says whether a block's key is there; with `remove`, objects that
    /// hold an unsound block are condemned, and those that are gone.
    pub async fn verify(
        &self,
        survey: &Survey,
        remove: bool,
        opens: impl AsyncFn(DomainId, KeyId) -> io::Result<bool>,
        progress: impl Fn(u64, u64),
    ) -> io::Result<Verification> {
        let live: Vec<_> = survey.live().collect();
        let total = live.len() as u64;
        let mut bad: Vec<ObjectId> = survey.missing().collect();
        let mut seen = Verification {
            missing_objects: bad.len() as u64,
            corrupt_manifests: survey.manifests_that(|contents| matches!(contents, Contents::Foreign)),
            unreadable_manifests: survey.unreadable(),
            ..Verification::default()
        };
        let read = |live: super::Live<'_>| {
            // What no manifest names is not read.
            let (path, bytes) = (live.stored.path.clone(), live.stored.bytes.min(live.section.bytes()));
            async move {
                match self.client.first(&path, bytes).await {
                    Ok(bytes) => Ok(Some(bytes)),
                    Err(Error::NotFound { .. }) => Ok(None),
                    Err(error) => Err(error),
                }
            }
        };
        let mut reading = stream::iter(live.clone()).map(read).buffered(READ);
        let mut known: BTreeMap<(DomainId, KeyId), bool> = BTreeMap::new();
        for live in live {
            let Some(bytes) = reading.try_next().await? else { break };
            let Some(bytes) = bytes else {
                seen.missing_objects += 1;
                bad.push(live.id);
                continue;
            };
            let before = seen.corrupt_blocks;
            for header in headers(&bytes, live.section) {
                let Some(header) = header else {
                    seen.corrupt_blocks += 1;
                    continue;
                };
                seen.valid_blocks += 1;
                let Some(key) = header.key else { continue };
                let opened = match known.get(&(header.domain, key)) {
                    Some(opened) => *opened,
                    None => opens(header.domain, key).await?,
                };
                known.insert((header.domain, key), opened);
                seen.undecryptable_blocks += u64::from(!opened);
            }
            if seen.corrupt_blocks > before {
                bad.push(live.id);
            }
            seen.objects += 1;
            progress(seen.objects, total);
        }
        if remove {
            seen.marked_objects = bad.len() as u64;
            self.condemn(bad).await?;
        }
        Ok(seen)
    }

    async fn condemn(&self, objects: Vec<ObjectId>) -> io::Result<()> {
        for objects in objects.chunks(tombstones::MOST) {
            let name = Writer::new();
            let bytes = Bytes::from(tombstones::encode(name, objects));
            self.client.put(&self.layout.removal(name), PutPayload::from(bytes)).await?;
        }
        Ok(())
    }

    async fn delete(&self, paths: Vec<Path>) -> io::Result<()> {
        Ok(self.client.delete_all(paths).await?)
    }

    /// Reads a manifest, unless it is known; none when another collector deleted it meanwhile, or when it is not named as one.
    async fn manifest(&self, meta: ObjectMeta) -> io::Result<Option<Manifest>> {
        let Some(ObjectId { writer, number }) = ObjectId::at(&meta.location) else { return Ok(None) };
        let of =
            |contents| Manifest { modified: modified(&meta), path: meta.location.clone(), writer, number, contents };
        if let Some(contents) = self.manifests.get(&meta) {
            return Ok(Some(of(contents)));
        }
        let bytes = match self.read(&meta, manifest::MAX_BYTES).await? {
            Read::Bytes(bytes) => bytes,
            Read::Gone => return Ok(None),
            Read::Unreadable => return Ok(Some(of(Contents::Unreadable))),
        };
        let sections = manifest::decode(writer, &bytes);
        let contents = sections.map_or(Contents::Foreign, |sections| Contents::Sections(sections.into()));
        let manifest = of(contents.clone());
        self.manifests.learn(meta, contents, bytes.len());
        Ok(Some(manifest))
    }

    async fn removal(&self, meta: ObjectMeta) -> io::Result<Option<Removal>> {
        let Some(name) = meta.location.filename().and_then(|name| name.parse().ok()) else { return Ok(None) };
        let decode = |bytes: &[u8]| tombstones::decode(name, bytes);
        let Some(objects) = self.list_in(&meta, &self.removals, tombstones::MAX_BYTES, decode).await? else {
            return Ok(None);
        };
        Ok(Some(Removal { modified: modified(&meta), path: meta.location, objects }))
    }

    async fn note(&self, meta: ObjectMeta) -> io::Result<Option<Note>> {
        let Some(name) = meta.location.filename().and_then(|name| name.parse().ok()) else { return Ok(None) };
        let Some(used) =
            self.list_in(&meta, &self.notes, access_log::MAX_BYTES, |bytes| access_log::decode(name, bytes)).await?
        else {
            return Ok(None);
        };
        Ok(Some(Note { modified: modified(&meta), path: meta.location, reader: name, used }))
    }

    /// Reads a list, unless it is known. One that is not sound says nothing, nor does one that cannot be read.
    async fn list_in<T>(
        &self,
        meta: &ObjectMeta,
        known: &Known<Arc<[T]>>,
        most: u64,
        decode: impl Fn(&[u8]) -> Option<Vec<T>>,
    ) -> io::Result<Option<Arc<[T]>>> {
        if let Some(said) = known.get(meta) {
            return Ok(Some(said));
        }
        let Read::Bytes(bytes) = self.read(meta, most).await? else { return Ok(None) };
        let said: Arc<[T]> = decode(&bytes).unwrap_or_default().into();
        known.learn(meta.clone(), said.clone(), bytes.len());
        Ok(Some(said))
    }

    /// Reads a small object. Fails when the store does not answer, and not when it answers and does not hand out this object. One
    /// that is too large to be what it is named for is read as empty, which nothing sound is.
    async fn read(&self, meta: &ObjectMeta, most: u64) -> io::Result<Read> {
        let path = &meta.location;
        if self.unreadable.is_waiting(path) {
            return Ok(Read::Unreadable);
        }
        let read = match self.client.get(path, most).await {
            Ok(bytes) => Read::Bytes(bytes),
            Err(Error::NotFound { .. }) => Read::Gone,
            Err(error) if is_too_large(&error) => Read::Bytes(Bytes::new()),
            Err(error) => {
                self.client.check_reads(&self.layout.absent(self.own)).await?;
                self.unreadable.failed(path, &error);
                return Ok(Read::Unreadable);
            }
        };
        self.unreadable.resolved(path);
        Ok(read)
    }
}

/// What reading a small object brought.
enum Read {
    Bytes(Bytes),
    /// Another collector deleted it meanwhile.
    Gone,
    Unreadable,
}

/// What carrying out a plan comes to.
fn report(survey: &Survey, plan: &Plan) -> Report {
    let mut report = Report { objects: survey.objects.len() as u64, bytes: survey.bytes(), ..Report::default() };
    let bytes = |id: &ObjectId| survey.objects.get(id).map_or(0, |stored| stored.bytes);
    for (id, why) in &plan.condemn {
        report.condemned.entry(*why).or_default().add(bytes(id));
    }
    plan.objects.iter().for_each(|id| report.deleted.add(bytes(id)));
    report.manifests = plan.manifests.len() as u64;
    (report.unreadable, report.next) = (survey.unreadable(), plan.next);
    report
}

/// The headers of the blocks in an object; `None` for one that is not the block that its manifest names, unchanged.
fn headers(bytes: &Bytes, section: &manifest::Section) -> impl Iterator<Item = Option<Header>> {
    section.entries.iter().map(|entry| {
        let block = block(bytes, entry.offset as usize, Header::LEN + entry.length as usize).ok()?;
        block.check(entry.name, section.fingerprint).ok()?;
        Some(block.header)
    })
}

fn modified(meta: &ObjectMeta) -> Date {
    Date::from_unix(u64::try_from(meta.last_modified.timestamp()).unwrap_or(0))
}
