//! G4, and a pod's folder above it: blocks in an object store that several processes share, many in one object.
//!
//! ```text
//!   store ─▶ pack ─▶ object ─▶ manifest ─▶ known, announced, answered
//!   load  ─▶ known places ─▶ ranges of neighbours, in parallel ─▶ stream
//!   every second ─▶ writers, their next manifests ─▶ known, announced
//! ```
//!
//! *At rest* means: the store acknowledged the object and the manifest that names it. Nothing rests on conditional writes
//! or locks: each process writes under a name of its own, and nothing that was written changes. An object that is gone,
//! or is another than it was, costs its blocks: a miss, counted, and forgotten. Deleting is a collector's, now and then
//! (`gc`) or by hand. A discard is of the copy that was read, and holds for the life of the process; after that the block is
//! verified, and discarded, again.

mod access_log;
mod catalog;
mod client;
mod follower;
mod format;
pub mod gc;
mod measure;
#[cfg(test)]
mod tests;
mod writer;

pub use client::Counts;
pub use client::health::Standing;
pub use client::url::{Access, Cloud, Credentials, Endpoint, Invalid, Location};
pub use gc::collector::{Amount, Collector, Report, Verification};
pub use gc::compact::Compaction;
pub use gc::schedule::{Outcome, Upkeep};

use crate::block::{Block, Corrupt, Date, Fingerprint, Header, Level, SequenceHash};
use crate::event::{Census, EventLog};
use crate::permissions;
use crate::tier::coalesce::{self, Run, Wanted};
use crate::tier::{Claims, Division, Gate, LoadError, Loaded, Pass, Shares, StoreError, Tier, Usage};
use crate::transform::crypt::MetadataKeys;
use access_log::Uses;
use bytes::Bytes;
use catalog::Catalog;
use client::Client;
use follower::Follower;
use format::layout::{FOLDERS, Layout, ObjectId, Writer};
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, StreamExt};
use measure::Meter;
use object_store::local::LocalFileSystem;
use object_store::{Error, ObjectStore};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use writer::{Job, Packer};

/// Requests of one load, or of one round of learning, at once: stores reach their bandwidth through parallel requests.
const PARALLEL: usize = 16;
/// Requests of all loads at once, in turns of their domains: more would only wait in the network, where nobody says whose
/// turn it is.
const REQUESTS: usize = 64;
/// One ranged read: at a store's 50 ms and 100 MB/s of one stream, most of the time is bytes.
const RANGE: u64 = 4 << 20;
/// So many large blocks are read in one request, where a load is long enough that as many requests as may be are under way;
/// and what such a request reads at most.
const RANGE_BLOCKS: u64 = 16;
const RANGE_MOST: u64 = 32 << 20;
/// Bytes of all loads that are being read at once: what arrives stays in memory until its whole range is there.
const READING: u64 = 512 << 20;
/// What an object of large blocks takes at most: some seconds to write, and half of the queue.
const OBJECT_MOST: u64 = 128 << 20;
/// Reading over so much that nobody asked for takes less than another request.
const GAP: u64 = 512 << 10;
/// Blocks that wait for their object, or are under way, in bytes: of small blocks dozens of objects; of large ones an object that
/// is written and one that fills.
const QUEUE: usize = 256 << 20;

/// How objects are made, and how much of the store is kept in mind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Where it stands in the order of tiers. Default G4.
    pub level: Level,
    /// Bytes at which an object is written. Default 8 MiB: requests per block stay far below one.
    pub object_bytes: u64,
    /// Blocks that an object holds at least before it is written, up to 128 MiB: what its requests are divided by when blocks
    /// are large. Default 64.
    pub object_blocks: usize,
    /// Blocks of the store that are known at most, about 100 bytes of memory each; beyond that the oldest objects are
    /// forgotten. Default 4 million.
    pub known_blocks: usize,
    /// Bytes that may rest there, what is about to be deleted and what is being written included: nothing is stored beyond them
    /// until a collector has deleted some. Of what is left each process takes no more at a time than its share among those that
    /// wrote lately, since it learns after a second what the others wrote. Default: as many as there is room for.
    pub capacity: Option<u64>,
    /// After which one request has failed, and is made again. Default 10 s: 4 MiB in that time is slower than any
    /// recomputing.
    pub request_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            level: Level::G4,
            object_bytes: 8 << 20,
            object_blocks: 64,
            known_blocks: 4_000_000,
            capacity: None,
            request_timeout: Duration::from_secs(10),
        }
    }
}

impl Settings {
    /// Whether an object with so much in it is to be written.
    fn is_full(&self, blocks: usize, bytes: u64) -> bool {
        bytes >= self.object_bytes && (blocks >= self.object_blocks || bytes >= OBJECT_MOST)
    }
}

/// A store cannot even be asked.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A folder that cannot be made or read.
    #[error(transparent)]
    Folder(#[from] io::Error),
    /// Something that the client needs is missing or wrong.
    #[error("{why}; {advice}")]
    Client {
        /// In the client's words.
        why: String,
        /// What would be right.
        advice: &'static str,
    },
}

/// Blocks under a prefix of an object store.
pub struct ObjectTier {
    settings: Settings,
    writer: Writer,
    client: Arc<Client>,
    catalog: Arc<Catalog>,
    turns: Arc<Turns>,
    jobs: mpsc::Sender<Job>,
    /// Workers of one process share the tier, and often offer the same blocks.
    claims: Claims,
    room: Arc<Semaphore>,
    standing: watch::Receiver<Standing>,
    /// Whether it is known how much lies there, where that matters.
    measured: watch::Receiver<bool>,
    layout: Layout,
    uses: Arc<Uses>,
    /// Payload bytes of a block that is loaded, at most.
    max_block: AtomicU64,
    _tasks: Vec<AbortOnDropHandle<()>>,
}

impl ObjectTier {
    /// Opens a prefix of a store, which may be away now: what is there is learned, and announced, in the background.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn open(store: Arc<dyn ObjectStore>, prefix: &str, settings: Settings, events: Arc<EventLog>) -> Arc<Self> {
        Self::sealed(store, prefix, settings, events, None)
    }

    /// The same with manifests that are sealed by `keys`: one without a sound seal is refused, and counted.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn sealed(
        store: Arc<dyn ObjectStore>,
        prefix: &str,
        settings: Settings,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Arc<Self> {
        let (layout, writer) = (Layout::new(prefix), Writer::new());
        let catalog =
            Arc::new(Catalog::new(settings.level, settings.known_blocks, settings.capacity.is_some(), events));
        tracing::info!(tier = %settings.level, %store, prefix = %layout, %writer, "object tier opened");
        let (stands, standing) = watch::channel(Standing::Learning);
        let client = Arc::new(Client::new(store, settings.request_timeout, writer.seed()));
        let follower = Follower::new(client.clone(), layout.clone(), writer, catalog.clone(), stands, keys.clone());
        let uses = Arc::new(Uses::new(settings.level, client.clone(), layout.clone(), writer));
        let packer =
            Packer { client: client.clone(), layout: layout.clone(), writer, catalog: catalog.clone(), settings, keys };
        let packer = Arc::new(packer);
        let (measured, is_measured) = watch::channel(settings.capacity.is_none());
        let meter = settings.capacity.map(|capacity| Meter {
            client: client.clone(),
            layout: layout.clone(),
            catalog: catalog.clone(),
            capacity,
            standing: standing.clone(),
            measured,
        });
        // One block in the queue takes at least its header.
        let (jobs, waiting) = mpsc::channel(QUEUE / Header::LEN);
        let tasks = [tokio::spawn(follower.run()), tokio::spawn(packer.run(waiting)), tokio::spawn(uses.clone().run())];
        let tasks = tasks.into_iter().chain(meter.map(|meter| tokio::spawn(meter.run())));
        let tasks = tasks.map(AbortOnDropHandle::new).collect();
        let room = Arc::new(Semaphore::new(QUEUE));
        let reading = Arc::new(Semaphore::new(READING as usize));
        let turns = Arc::new(Turns { gate: Gate::new(REQUESTS, &[]), reading, division: OnceLock::new() });
        let (claims, max_block) = (Claims::default(), AtomicU64::new(Header::MAX_LENGTH));
        let measured = is_measured;
        Arc::new(Self {
            settings,
            writer,
            client,
            catalog,
            turns,
            jobs,
            claims,
            room,
            standing,
            measured,
            layout,
            uses,
            max_block,
            _tasks: tasks,
        })
    }

    /// Opens a folder, local or mounted, as a store. Makes the folder if it is not there. What is in it can be read by its owner
    /// alone, unless the folder is [shared with its group](permissions::is_group_shared).
    pub fn folder(folder: &Path, settings: Settings, events: Arc<EventLog>) -> io::Result<Arc<Self>> {
        Self::sealed_folder(folder, settings, events, None)
    }

    fn sealed_folder(
        folder: &Path,
        settings: Settings,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> io::Result<Arc<Self>> {
        permissions::create_dir_all(folder)?;
        permissions::own_dirs_below(folder, &FOLDERS)?;
        let store = LocalFileSystem::new_with_prefix(folder)?;
        Ok(Self::sealed(Arc::new(store), "", settings, events, keys))
    }

    /// Opens what a URL names, with manifests that are sealed by `keys`, if there are any.
    pub fn at(
        location: &Location,
        access: &Access,
        settings: Settings,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Result<Arc<Self>, OpenError> {
        match location {
            Location::Folder(folder) => Ok(Self::sealed_folder(folder, settings, events, keys)?),
            Location::Cloud { cloud, prefix, .. } => {
                let wrong = |error: Error| OpenError::Client { why: error.to_string(), advice: cloud.advice() };
                let client = location.client(access, settings.request_timeout).map_err(wrong)?;
                let client = client.ok_or_else(|| io::Error::other("a folder has no client"))?;
                Ok(Self::sealed(client, prefix.as_ref(), settings, events, keys))
            }
        }
    }

    /// Keeps to the weights that domains were given when several load at once. To be called before anybody does, once; what may
    /// rest in the store is a collector's to see to.
    pub fn divide(&self, shares: &Shares) {
        let division = shares.at(self.settings.level, 1);
        self.turns.gate.weigh(&division.weights);
        let _ = self.turns.division.set(division);
    }

    /// Reads no block of more than `bytes`, whatever the store says of it: of an engine whose blocks have less. To be called
    /// before anybody loads.
    pub fn limit_blocks(&self, bytes: u64) {
        self.max_block.store(bytes.min(Header::MAX_LENGTH), Ordering::Relaxed);
    }

    /// Waits until what was in the store when the tier was opened is known.
    pub async fn caught_up(&self) {
        // The follower lives as long as the tier; if it died, waiting would not help.
        let _ = self.standing.clone().wait_for(|standing| *standing == Standing::Ready).await;
        let _ = self.measured.clone().wait_for(|measured| *measured).await;
    }

    /// Collects in the same store, with the same client. The tier's own objects that no other process noted a use of are
    /// deleted soon after they were named as going, without the grace; what others wrote is not.
    pub fn collector(&self) -> Collector {
        let near =
            self.settings.capacity.map(|capacity| (Arc::downgrade(&self.catalog), capacity - gc::headroom(capacity)));
        Collector::new(self.client.clone(), self.layout.clone(), self.writer, near)
    }

    /// How the store stands, as soon as it answered or failed to.
    pub async fn settled(&self) -> Standing {
        let mut standing = self.standing.clone();
        let settled = standing.wait_for(|standing| *standing != Standing::Learning).await;
        settled.map_or_else(
            |_| Standing::Away("the task that polls the store has stopped".into()),
            |standing| standing.clone(),
        )
    }

    /// Whether the store answered the last time.
    pub fn is_up(&self) -> bool {
        *self.standing.borrow() == Standing::Ready
    }

    /// Which blocks it knows of. Looks at each: for whoever wants to know, now and then.
    pub fn census(&self) -> Census {
        self.catalog.index.census()
    }

    /// Objects that turned out to be gone, or to be others than they were.
    pub fn lost_objects(&self) -> u64 {
        self.catalog.lost()
    }

    /// Manifests that were not sound, or that another version wrote: what they name is not known here.
    pub fn unsound_manifests(&self) -> u64 {
        self.catalog.skipped()
    }

    /// Manifests that cannot be read although the store answers, and are tried again from time to time.
    pub fn unreadable_manifests(&self) -> usize {
        self.catalog.unreadable.len()
    }

    /// What the requests to the store came to.
    pub fn counts(&self) -> Counts {
        self.client.counts()
    }

    fn offer(&self, block: Block) -> Result<Offered, StoreError> {
        let Header { fingerprint, name, .. } = block.header;
        let claim = match self.claims.claim(fingerprint, name) {
            Ok(claim) => claim,
            Err(other) => return Ok(Offered::Coming(fingerprint, name, other)),
        };
        // After the claim: until then somebody else may have stored it.
        if self.catalog.index.get(fingerprint, name).is_some() {
            return Ok(Offered::There);
        }
        let bytes = Header::LEN as u64 + block.header.length;
        // A block larger than the queue takes all of it.
        let queued = u32::try_from(bytes).map_err(|_| StoreError::Full)?.min(QUEUE as u32);
        let room = self.room.clone().try_acquire_many_owned(queued).map_err(|_| StoreError::Busy)?;
        // With its own bytes under way, so that of several at once none is overlooked.
        self.check_capacity(bytes - u64::from(queued))?;
        let (answer, waiting) = oneshot::channel();
        self.jobs.try_send(Job { block, idle: Duration::ZERO, answer, claim, room }).map_err(
            |refused| match refused {
                mpsc::error::TrySendError::Full(_) => StoreError::Busy,
                mpsc::error::TrySendError::Closed(_) => StoreError::Io(died()),
            },
        )?;
        Ok(Offered::Waits(waiting))
    }

    /// Fails when so many bytes, beside those that wait or are under way, are more than this process may write now.
    fn check_capacity(&self, bytes: u64) -> Result<(), StoreError> {
        let Some(capacity) = self.settings.capacity else { return Ok(()) };
        if !*self.measured.borrow() {
            return Err(StoreError::Busy);
        }
        // What others do not know of yet: all processes together stay within what was left when they last heard of each other.
        let recent = self.catalog.recently_written();
        let unknown = recent + (QUEUE - self.room.available_permits()) as u64;
        let free = (capacity + recent).saturating_sub(self.catalog.taken());
        let share = free / (1 + self.catalog.active_writers() as u64);
        if unknown + bytes > share { Err(StoreError::Full) } else { Ok(()) }
    }

    /// How an offer ends.
    async fn end(&self, offered: Offered) -> Result<(), StoreError> {
        match offered {
            Offered::There => Ok(()),
            Offered::Waits(answer) => answer.await.unwrap_or_else(|_| Err(died().into())),
            Offered::Coming(fingerprint, name, other) => {
                other.cancelled().await;
                self.catalog.index.get(fingerprint, name).map(|_| ()).ok_or(StoreError::Busy)
            }
        }
    }
}

/// What became of a block that was offered.
enum Offered {
    /// It rests already.
    There,
    /// It waits for its object.
    Waits(oneshot::Receiver<writer::Answer>),
    /// Somebody else stores it.
    Coming(Fingerprint, SequenceHash, CancellationToken),
}

/// Whose request comes next, when many load.
struct Turns {
    gate: Arc<Gate>,
    reading: Arc<Semaphore>,
    division: OnceLock<Division>,
}

impl Turns {
    async fn enter(&self, catalog: &Catalog, object: i64, run: &Run) -> (Pass, Option<OwnedSemaphorePermit>) {
        let domain = catalog.object(object).map(|object| object.domain);
        let group = domain.zip(self.division.get()).map_or(0, |(domain, division)| division.group(domain));
        let bytes = run.end() - run.start();
        let pass = self.gate.enter(group, bytes).await;
        // The semaphore is never closed.
        (pass, self.reading.clone().acquire_many_owned(bytes.min(READING) as u32).await.ok())
    }
}

impl Tier for ObjectTier {
    fn level(&self) -> Level {
        self.settings.level
    }

    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        self.catalog.index.holds(fingerprint, names)
    }

    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let (most, mut missing) = (self.max_block.load(Ordering::Relaxed), Vec::new());
        let mut objects: BTreeMap<i64, Vec<Wanted>> = BTreeMap::new();
        for (index, place) in self.catalog.index.find(fingerprint, &names, |_| ()).into_iter().enumerate() {
            let Some(place) = place else {
                missing.push(index);
                continue;
            };
            if u64::from(place.length) > most {
                // No block of the engine that asks.
                self.catalog.spoil(fingerprint, &[names[index]], place.object);
                missing.push(index);
                continue;
            }
            let (offset, length) = (u64::from(place.offset), Header::LEN as u64 + u64::from(place.length));
            objects.entry(place.object).or_default().push(Wanted { index, offset, length });
        }
        let range = range(objects.values().flatten().map(|wanted| wanted.length));
        let parts = objects
            .into_iter()
            .flat_map(|(object, wanted)| coalesce::runs(wanted, GAP, range).into_iter().map(move |run| (object, run)));
        let mut parts: Vec<(i64, Run)> = parts.collect();
        parts.sort_by_key(|(_, run)| run.wanted.iter().map(|wanted| wanted.index).min());
        let reader = Reader {
            client: self.client.clone(),
            catalog: self.catalog.clone(),
            turns: self.turns.clone(),
            uses: self.uses.clone(),
            fingerprint,
            names: names.into(),
        };
        let read = move |(object, run)| {
            let reader = reader.clone();
            async move {
                let _pass = reader.turns.enter(&reader.catalog, object, &run).await;
                stream::iter(reader.load(object, &run).await)
            }
        };
        let misses = stream::iter(missing.into_iter().map(|index| (index, Ok(None))));
        misses.chain(stream::iter(parts).map(read).buffer_unordered(PARALLEL).flatten()).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let offered: Vec<_> = blocks.into_iter().map(|block| self.offer(block)).collect();
        async move {
            let mut answers = Vec::with_capacity(offered.len());
            for offered in offered {
                answers.push(match offered {
                    Ok(offered) => self.end(offered).await,
                    Err(refused) => Err(refused),
                });
            }
            answers
        }
        .boxed()
    }

    fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        self.catalog.discard(fingerprint, name);
    }

    fn lapse(&self, fingerprint: Fingerprint, name: SequenceHash) -> usize {
        // As a sweep does: whichever copy it was that is over.
        self.catalog.index.remove([(fingerprint, name)], |_| true)
    }

    fn expire(&self, now: Date) -> usize {
        self.catalog.index.expire(now)
    }

    fn usage(&self) -> Usage {
        Usage { blocks: self.catalog.index.len() as u64, bytes: self.catalog.taken(), capacity: self.settings.capacity }
    }
}

/// How much a request of a load reads at most, of blocks of such lengths: more of large ones, as far as enough requests are left to
/// be under way at once.
fn range(lengths: impl Iterator<Item = u64>) -> u64 {
    let (mut all, mut largest) = (0, 0);
    lengths.for_each(|length| (all, largest) = (all + length, length.max(largest)));
    let most = (largest * RANGE_BLOCKS).clamp(RANGE, RANGE_MOST);
    (all / PARALLEL as u64).clamp(RANGE, most)
}

/// What one load reads with.
#[derive(Clone)]
struct Reader {
    client: Arc<Client>,
    catalog: Arc<Catalog>,
    turns: Arc<Turns>,
    uses: Arc<Uses>,
    fingerprint: Fingerprint,
    names: Arc<[SequenceHash]>,
}

impl Reader {
    /// Reads a run of one object. What is gone is a miss; what is not a block is reported and forgotten.
    async fn load(&self, number: i64, run: &Run) -> Vec<Loaded> {
        let Self { client, catalog, .. } = self;
        let indices = || run.wanted.iter().map(|wanted| wanted.index);
        let misses = || indices().map(|index| (index, Ok(None))).collect();
        let Some(object) = catalog.object(number) else { return misses() };
        let bytes = match client.range(&object.path, run.start()..run.end()).await {
            Ok(bytes) if bytes.len() as u64 == run.end() - run.start() => bytes,
            Ok(_) => {
                catalog.lose(number);
                return misses();
            }
            Err(error) => {
                if changed(client, &object, &error).await {
                    catalog.lose(number);
                    return misses();
                }
                let error = io::Error::from(error);
                let again = || LoadError::Io(io::Error::new(error.kind(), error.to_string()));
                return indices().map(|index| (index, Err(again()))).collect();
            }
        };
        if let Some(id) = ObjectId::at(&object.path) {
            self.uses.used(id);
        }
        let answer = |wanted: &Wanted| {
            let start = (wanted.offset - run.start()) as usize;
            (wanted.index, block(&bytes, start, wanted.length as usize).map(Some).map_err(LoadError::Corrupt))
        };
        let answers: Vec<Loaded> = run.wanted.iter().map(answer).collect();
        let bad = answers.iter().filter(|(_, answer)| answer.is_err()).map(|(index, _)| self.names[*index]);
        let bad: Vec<SequenceHash> = bad.collect();
        if !bad.is_empty() {
            catalog.spoil(self.fingerprint, &bad, number);
        }
        answers
    }
}

/// Whether an object that could not be read is gone or no longer what it was, rather than out of reach.
async fn changed(client: &Client, object: &catalog::Object, error: &Error) -> bool {
    if matches!(error, Error::NotFound { .. }) {
        return true;
    }
    match client.head(&object.path).await {
        Ok(meta) => meta.size != object.bytes,
        Err(error) => matches!(error, Error::NotFound { .. }),
    }
}

/// The block in a record. Its checksum is for whoever serves it to verify.
fn block(bytes: &Bytes, start: usize, length: usize) -> Result<Block, Corrupt> {
    let record = bytes.get(start..start + length).ok_or(Corrupt::Length)?;
    let header = Header::decode(record.first_chunk().ok_or(Corrupt::Length)?)?;
    Ok(Block { header, payload: bytes.slice(start + Header::LEN..start + length) })
}

fn died() -> io::Error {
    io::Error::other("the packer task panicked")
}
