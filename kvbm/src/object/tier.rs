//! The object tier: opens a store, accepts blocks into the write queue, and loads blocks.

use super::access_log::AccessLog;
use super::catalog::Catalog;
use super::client::health::StoreHealth;
use super::client::url::{Access, StoreLocation};
use super::client::{Client, RequestCounts};
use super::follower::Follower;
use super::format::layout::{FOLDERS, InstanceId, Layout};
use super::gc::{self, Collector};
use super::reader::{ReadQueue, Reader};
use super::settings::{OpenError, Settings};
use super::usage::UsageMeter;
use super::writer::{self, Packer, WriteJob};
use crate::block::{Block, Date, Fingerprint, Header, Level, SequenceHash};
use crate::event::{EventLog, SetDigest};
use crate::folder::OpenedFolder;
use crate::permissions;
use crate::tier::{Loaded, Quotas, StoreError, Tier, Usage, WriteClaims};
use crate::transform::crypt::MetadataKeys;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::{Error, ObjectStore};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// Bytes of blocks that wait to be written or are being written: dozens of objects of small blocks; of large blocks one
/// object that is written and one that fills.
const QUEUE_BYTES: usize = 256 << 20;

/// A store that has answered nothing for so long after it was opened counts as unavailable. The first poll of a store
/// that hangs fails only after two timeouts of requests, 20 s by default, and until then nothing else is known of it. A
/// name server and a connection that have to be tried twice take less.
const FIRST_ANSWER_MAX: Duration = Duration::from_secs(5);

/// Blocks under a prefix of an object store.
pub struct ObjectTier {
    pub(super) settings: Settings,
    pub(super) writer: InstanceId,
    pub(super) client: Arc<Client>,
    pub(super) catalog: Arc<Catalog>,
    read_queue: Arc<ReadQueue>,
    pub(super) jobs: mpsc::Sender<WriteJob>,
    /// Blocks that are being written. Workers of one process share the tier, and often store the same blocks.
    pub(super) claims: WriteClaims,
    /// Free bytes of the write queue.
    pub(super) queue_bytes: Arc<Semaphore>,
    health: watch::Receiver<StoreHealth>,
    /// Whether the bytes in the store are known; true if the store has no capacity.
    is_measured: watch::Receiver<bool>,
    layout: Layout,
    pub(super) access_log: Arc<AccessLog>,
    /// Maximum payload bytes of a block that is loaded.
    max_block_bytes: AtomicU64,
    _tasks: Vec<AbortOnDropHandle<()>>,
}

impl ObjectTier {
    /// Opens a prefix of a store, which need not be reachable now. The manifests in it are read in the background.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn open(store: Arc<dyn ObjectStore>, prefix: &str, settings: Settings, events: Arc<EventLog>) -> Arc<Self> {
        Self::open_authenticated(store, prefix, settings, events, None)
    }

    /// Like [`open`](Self::open), with manifests that `keys` authenticate. Manifests without a valid tag are
    /// rejected and counted as corrupt.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn open_authenticated(
        store: Arc<dyn ObjectStore>,
        prefix: &str,
        settings: Settings,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Arc<Self> {
        let writer = InstanceId::new();
        let client = Client::new(store, settings.request_timeout, writer.seed());
        Self::open_client(client, writer, prefix, settings, events, keys)
    }

    fn open_client(
        client: Client,
        writer: InstanceId,
        prefix: &str,
        settings: Settings,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Arc<Self> {
        let layout = Layout::new(prefix);
        let catalog =
            Arc::new(Catalog::new(settings.level, settings.known_blocks, settings.capacity.is_some(), events));
        tracing::info!(tier = %settings.level, store = %client, prefix = %layout, %writer, "object tier opened");
        let (set_health, health) = watch::channel(StoreHealth::Starting);
        let client = Arc::new(client);
        let follower = Follower::new(client.clone(), layout.clone(), writer, catalog.clone(), set_health, keys.clone());
        let access_log = Arc::new(AccessLog::new(settings.level, client.clone(), layout.clone(), writer));
        let packer = Arc::new(Packer {
            client: client.clone(),
            layout: layout.clone(),
            writer,
            catalog: catalog.clone(),
            settings,
            keys,
        });
        let (set_measured, is_measured) = watch::channel(settings.capacity.is_none());
        let meter = settings.capacity.map(|capacity| UsageMeter {
            client: client.clone(),
            layout: layout.clone(),
            catalog: catalog.clone(),
            capacity,
            health: health.clone(),
            is_measured: set_measured,
        });
        // A block in the queue takes at least its header.
        let (jobs, queued_jobs) = mpsc::channel(QUEUE_BYTES / Header::LEN);
        let tasks = [
            tokio::spawn(follower.run()),
            tokio::spawn(packer.run(queued_jobs)),
            tokio::spawn(access_log.clone().run()),
        ];
        let tasks = tasks.into_iter().chain(meter.map(|meter| tokio::spawn(meter.run())));
        let tasks = tasks.map(AbortOnDropHandle::new).collect();
        Arc::new(Self {
            settings,
            writer,
            client,
            catalog,
            read_queue: Arc::new(ReadQueue::new()),
            jobs,
            claims: WriteClaims::default(),
            queue_bytes: Arc::new(Semaphore::new(QUEUE_BYTES)),
            health,
            is_measured,
            layout,
            access_log,
            max_block_bytes: AtomicU64::new(Header::MAX_LENGTH),
            _tasks: tasks,
        })
    }

    /// Opens a local or mounted folder as a store, and creates it if it does not exist. Its files are readable by their
    /// owner only, unless the folder is [shared with its group](permissions::is_group_shared). While another folder, or
    /// none, is at its path, the store is unavailable.
    pub fn open_folder(folder: &Path, settings: Settings, events: Arc<EventLog>) -> io::Result<Arc<Self>> {
        Self::open_authenticated_folder(folder, settings, events, None)
    }

    fn open_authenticated_folder(
        folder: &Path,
        settings: Settings,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> io::Result<Arc<Self>> {
        permissions::create_dir_all(folder)?;
        permissions::create_private_dirs_below(folder, &FOLDERS)?;
        let store = LocalFileSystem::new_with_prefix(folder)?;
        let writer = InstanceId::new();
        let client = Client::new(Arc::new(store), settings.request_timeout, writer.seed());
        let client = client.listed_in(folder).in_folder(OpenedFolder::open(folder, &FOLDERS)?);
        Ok(Self::open_client(client, writer, "", settings, events, keys))
    }

    /// Opens the store at a location, with manifests that `keys` authenticate, if any.
    pub fn open_location(
        location: &StoreLocation,
        access: &Access,
        settings: Settings,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Result<Arc<Self>, OpenError> {
        match location {
            StoreLocation::Folder(folder) => Ok(Self::open_authenticated_folder(folder, settings, events, keys)?),
            StoreLocation::Cloud { cloud, prefix, .. } => {
                let client_error = |error: Error| OpenError::Client { why: error.to_string(), advice: cloud.advice() };
                let client = location.client(access, settings.request_timeout).map_err(client_error)?;
                let client = client.ok_or_else(|| io::Error::other("a folder has no client"))?;
                Ok(Self::open_authenticated(client, prefix.as_ref(), settings, events, keys))
            }
        }
    }

    /// Sets the weights of domains for concurrent loads. To be called once, before the first load. Quotas of stored
    /// bytes are applied by garbage collection.
    pub fn set_quotas(&self, quotas: &Quotas) {
        self.read_queue.set_quotas(quotas.for_tier(self.settings.level, 1));
    }

    /// Sets the maximum payload bytes of a block. Larger blocks are corrupt and are not read. To be called before the
    /// first load.
    pub fn set_max_block_bytes(&self, bytes: u64) {
        self.max_block_bytes.store(bytes.min(Header::MAX_LENGTH), Ordering::Relaxed);
    }

    /// Waits until the blocks that were in the store when the tier was opened are known.
    pub async fn wait_until_ready(&self) {
        // The follower lives as long as the tier. If it panicked, waiting would not help.
        let _ = self.health.clone().wait_for(|health| *health == StoreHealth::Ready).await;
        let _ = self.is_measured.clone().wait_for(|is_measured| *is_measured).await;
    }

    /// A garbage collector of the same store, with the same client. It deletes the tier's own objects without the full
    /// grace period if no other process read them.
    pub fn collector(&self) -> Collector {
        let headroom_limit =
            self.settings.capacity.map(|capacity| (Arc::downgrade(&self.catalog), capacity - gc::headroom(capacity)));
        Collector::new(self.client.clone(), self.layout.clone(), self.writer, headroom_limit)
    }

    /// Waits until the store has first responded or failed, and returns its health.
    pub async fn initial_health(&self) -> StoreHealth {
        let mut health = self.health.clone();
        let settled = health.wait_for(|health| *health != StoreHealth::Starting).await;
        settled.map_or_else(
            |_| StoreHealth::Unavailable("the task that polls the store has stopped".into()),
            |health| health.clone(),
        )
    }

    /// Whether the store did not respond to the last poll, or denied access, or has not responded to anything for
    /// several seconds since it was opened. Before that, a store that has not responded yet may.
    pub fn is_unavailable(&self) -> bool {
        matches!(*self.health.borrow(), StoreHealth::Unavailable(_) | StoreHealth::Refused(_))
            || self.client.has_been_silent_for(FIRST_ANSWER_MAX)
    }

    /// Whether the store responded to the last poll.
    pub fn is_available(&self) -> bool {
        *self.health.borrow() == StoreHealth::Ready
    }

    /// Why the store cannot be used, by the last poll; `None` if it responded.
    pub fn outage(&self) -> Option<String> {
        match &*self.health.borrow() {
            StoreHealth::Ready => None,
            StoreHealth::Starting => Some("it has not answered yet".to_owned()),
            StoreHealth::Unavailable(why) | StoreHealth::Refused(why) => Some(why.clone()),
        }
    }

    /// Why the last write of blocks failed, until one succeeds. The blocks in the store may still be read.
    pub fn write_failure(&self) -> Option<String> {
        self.client.writes.failure()
    }

    /// Why the store refused the last read of blocks, until one succeeds: it denies access to their object, for
    /// instance, or has archived it. Such blocks are computed.
    pub fn read_failure(&self) -> Option<String> {
        self.client.reads.failure()
    }

    /// Digest of the blocks in the catalog. Takes time proportional to their number.
    pub fn set_digest(&self) -> SetDigest {
        self.catalog.index.set_digest()
    }

    /// Objects that turned out to be missing or changed when they were read.
    pub fn missing_objects(&self) -> u64 {
        self.catalog.missing_objects()
    }

    /// Manifests that were corrupt or of another version. Their blocks are not known here.
    pub fn corrupt_manifests(&self) -> u64 {
        self.catalog.corrupt_manifests()
    }

    /// Manifests that cannot be read although the store serves reads. They are retried.
    pub fn unreadable_manifests(&self) -> usize {
        self.catalog.unreadable.len()
    }

    /// Counts of the requests to the store.
    pub fn request_counts(&self) -> RequestCounts {
        self.client.request_counts()
    }

    /// Puts a block into the write queue, unless it is stored, being written, or there is no room.
    fn enqueue(&self, block: Block) -> Result<Enqueued, StoreError> {
        let Header { fingerprint, hash, .. } = block.header;
        let claim = match self.claims.claim(fingerprint, hash) {
            Ok(claim) => claim,
            Err(other) => return Ok(Enqueued::InFlight(fingerprint, hash, other)),
        };
        // Checked after the claim: before it, another writer may have stored the block.
        if self.catalog.index.get(fingerprint, hash).is_some() {
            return Ok(Enqueued::Stored);
        }
        let bytes = Header::LEN as u64 + block.header.length;
        // A block larger than the queue takes all of it.
        let queued = u32::try_from(bytes).map_err(|_| StoreError::Full)?.min(QUEUE_BYTES as u32);
        let queue_permit = self.queue_bytes.clone().try_acquire_many_owned(queued).map_err(|_| StoreError::Busy)?;
        // After the permit, so that concurrent calls see each other's bytes.
        self.check_capacity(bytes - u64::from(queued))?;
        let (answer, waiting) = oneshot::channel();
        self.jobs.try_send(WriteJob { block, idle: Duration::ZERO, answer, claim, queue_permit }).map_err(
            |refused| match refused {
                mpsc::error::TrySendError::Full(_) => StoreError::Busy,
                mpsc::error::TrySendError::Closed(_) => StoreError::Io(packer_panicked()),
            },
        )?;
        Ok(Enqueued::Waiting(waiting))
    }

    /// Fails if this process may not write `bytes` in addition to the bytes in its write queue.
    pub(super) fn check_capacity(&self, bytes: u64) -> Result<(), StoreError> {
        let Some(capacity) = self.settings.capacity else { return Ok(()) };
        if !*self.is_measured.borrow() {
            return Err(StoreError::Busy);
        }
        // Bytes that other processes do not know of yet. All processes together stay within what was free when they
        // last read each other's manifests.
        let recent = self.catalog.recently_written();
        let unknown = recent + (QUEUE_BYTES - self.queue_bytes.available_permits()) as u64;
        let free = (capacity + recent).saturating_sub(self.catalog.used_bytes());
        let share = free / (1 + self.catalog.active_writers() as u64);
        if unknown + bytes > share { Err(StoreError::Full) } else { Ok(()) }
    }

    /// Waits until an enqueued block is stored.
    async fn wait_stored(&self, enqueued: Enqueued) -> Result<(), StoreError> {
        match enqueued {
            Enqueued::Stored => Ok(()),
            Enqueued::Waiting(answer) => answer.await.unwrap_or_else(|_| Err(packer_panicked().into())),
            Enqueued::InFlight(fingerprint, hash, other) => {
                other.cancelled().await;
                self.catalog.index.get(fingerprint, hash).map(|_| ()).ok_or(StoreError::Busy)
            }
        }
    }
}

/// State of a block after an attempt to enqueue it.
enum Enqueued {
    /// The block is stored already.
    Stored,
    /// The block is in the write queue.
    Waiting(oneshot::Receiver<writer::StoreResult>),
    /// Another caller is writing the block.
    InFlight(Fingerprint, SequenceHash, CancellationToken),
}

impl Tier for ObjectTier {
    fn level(&self) -> Level {
        self.settings.level
    }

    fn holds(&self, fingerprint: Fingerprint, hashes: &[SequenceHash]) -> usize {
        self.catalog.index.holds(fingerprint, hashes)
    }

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let reader = Reader {
            client: self.client.clone(),
            catalog: self.catalog.clone(),
            queue: self.read_queue.clone(),
            access_log: self.access_log.clone(),
            fingerprint,
            hashes: hashes.into(),
        };
        reader.load(self.max_block_bytes.load(Ordering::Relaxed))
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let enqueued: Vec<_> = blocks.into_iter().map(|block| self.enqueue(block)).collect();
        async move {
            let mut results = Vec::with_capacity(enqueued.len());
            for enqueued in enqueued {
                results.push(match enqueued {
                    Ok(enqueued) => self.wait_stored(enqueued).await,
                    Err(refused) => Err(refused),
                });
            }
            results
        }
        .boxed()
    }

    fn discard(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        self.catalog.discard(fingerprint, hash);
    }

    fn withdraw(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        // The catalog drops the copy; its object stays in the store.
        self.catalog.discard(fingerprint, hash);
    }

    fn expire_one(&self, fingerprint: Fingerprint, hash: SequenceHash) -> usize {
        // Drops the block whichever copy expired, like `expire`.
        self.catalog.index.remove([(fingerprint, hash)], |_| true)
    }

    fn expire(&self, now: Date) -> usize {
        self.catalog.index.expire(now)
    }

    fn usage(&self) -> Usage {
        Usage {
            blocks: self.catalog.index.len() as u64,
            bytes: self.catalog.used_bytes(),
            capacity: self.settings.capacity,
        }
    }
}

fn packer_panicked() -> io::Error {
    io::Error::other("the packer task panicked")
}
