//! The tiers that the workers of this process share: G3 on local disks, G3.5 in a shared folder, G4 in an object store.

use super::cache_audit::DigestOf;
use super::gc::{GcMetrics, g3_5_gc_scheduler, gc_scheduler};
use super::health::Health;
use super::scope::Scope;
use super::sizes::Disk;
use super::store_metrics::StoreMetrics;
use super::transforms::Transforms;
use super::workers::epoch_now;
use crate::config::{ByteSize, Config};
use crate::process::machine;
use anyhow::{Context, bail};
use futures::future::join_all;
use kvbm::crypt::MetadataKeys;
use kvbm::object::{Access, GcScheduler, StoreHealth, StoreLocation};
use kvbm::{Block, DiskTier, EventLog, Fingerprint, Header, Level, ObjectTier, Quotas, Tier, disk, object};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use worker::plane::{Source, StoreId};
use worker::serve::{EventPublisher, Planes};

/// The shared tiers, fastest first. The events of each are published under its own store id.
#[derive(Default)]
pub(super) struct Stores {
    all: Vec<Store>,
    disk: Weak<DiskTier>,
    shared: Vec<Weak<ObjectTier>>,
    /// Garbage collection, compaction and spilling; stopped when the stores are dropped.
    tasks: Vec<AbortOnDropHandle<()>>,
}

/// The settings of a store that other processes share.
struct Shared {
    /// The key of the configuration that names the store.
    key: &'static str,
    at: StoreLocation,
    settings: object::Settings,
}

struct Store {
    id: StoreId,
    tier: Arc<dyn Tier>,
    digest: DigestOf,
    _publisher: EventPublisher,
}

/// Limit of the time that the start waits for a tier to list its blocks. Blocks that are listed later are recomputed
/// until then.
const CATCH_UP_MAX: Duration = Duration::from_secs(2);
/// Limit of the time that the start waits for the owner of a log to be known: that of an owner that is closing, and as
/// much for a folder that answers slowly.
const OWNER_TIMEOUT: Duration = Duration::from_secs(2);
/// Minimum time for closing G3, if requests have used up the shutdown timeout.
const CLOSE_MIN: Duration = Duration::from_secs(1);

impl Stores {
    /// Opens the configured tiers, lists their blocks, and publishes them as events. `block_bytes` is the size of one
    /// block of the engine.
    pub(super) async fn open(
        config: &Config,
        disks: &[Disk],
        shares: &Quotas,
        (planes, scope): (&Planes, &Scope),
        transforms: &Transforms,
        block_bytes: u64,
        registry: &Registry,
    ) -> anyhow::Result<Self> {
        let gc_metrics = GcMetrics::new(registry)?;
        let mut stores = Self::default();
        if !disks.is_empty() {
            let log = Arc::new(EventLog::new(epoch_now()));
            let tier = open_disk(disks.to_vec(), shares.clone(), Arc::clone(&log), transforms.metadata()).await?;
            tier.set_max_block_bytes(Header::max_stored_bytes(block_bytes));
            if timeout(CATCH_UP_MAX, tier.recovered()).await.is_err() {
                tracing::info!("G3 is still being scanned; blocks that are not found yet are recomputed");
            }
            stores.disk = Arc::downgrade(&tier);
            let folders: Vec<&Path> = disks.iter().map(|disk| disk.folder.as_path()).collect();
            let weak = Arc::downgrade(&tier);
            let digest = Arc::new(move || weak.upgrade().map(|tier| tier.set_digest()));
            stores.add(scope.store(&folders_name("g3", &folders)), transforms.wrap(tier), digest, log, planes);
        }
        let requests = config.tiers.g4.request_timeout.0;
        if let Some(flash) = &config.tiers.g3_5 {
            let capacity = Some(flash.capacity.0);
            let settings =
                object::Settings { level: Level::G3_5, capacity, request_timeout: requests, ..Default::default() };
            let shared = Shared { key: "tiers.g3_5.path", at: StoreLocation::Folder(flash.path.clone()), settings };
            let tier = stores.share(&shared, shares, config, (planes, scope), transforms).await?;
            tier.set_max_block_bytes(Header::max_stored_bytes(block_bytes));
            stores.start_gc(&gc_metrics, &tier, &shared.at, g3_5_gc_scheduler(config, flash)?);
            if config.tiers.g4.url.as_ref().is_some_and(|shared| same_place(&flash.path, shared)) {
                bail!("tiers.g3_5.path and tiers.g4.url are the same folder; expected two different ones");
            }
        }
        if let Some(location) = &config.tiers.g4.url {
            let capacity = config.tiers.g4.capacity.map(|budget| budget.0);
            let settings = object::Settings { capacity, request_timeout: requests, ..Default::default() };
            let shared = Shared { key: "tiers.g4.url", at: location.clone(), settings };
            let tier = stores.share(&shared, shares, config, (planes, scope), transforms).await?;
            tier.set_max_block_bytes(Header::max_stored_bytes(block_bytes));
            if let Some(scheduler) = gc_scheduler(config)? {
                stores.start_gc(&gc_metrics, &tier, location, scheduler);
            }
        }
        if let (Some(disk), Some(next)) = (stores.disk.upgrade(), stores.shared.first().and_then(Weak::upgrade)) {
            stores.tasks.push(spill(&disk, &next, config.tiers.encryption.is_some()));
        }
        Ok(stores)
    }

    /// The tiers, fastest first.
    pub(super) fn tiers(&self) -> Vec<Arc<dyn Tier>> {
        self.all.iter().map(|store| Arc::clone(&store.tier)).collect()
    }

    /// Weak references to the tiers, fastest first.
    pub(super) fn weak(&self) -> Vec<Weak<dyn Tier>> {
        self.all.iter().map(|store| Arc::downgrade(&store.tier)).collect()
    }

    /// The store ids, in the same order.
    pub(super) fn ids(&self) -> Vec<StoreId> {
        self.all.iter().map(|store| store.id).collect()
    }

    /// The functions that compute the digest of each tier.
    pub(super) fn digests(&self) -> Vec<(StoreId, Level, DigestOf)> {
        self.all.iter().map(|store| (store.id, store.tier.level(), Arc::clone(&store.digest))).collect()
    }

    /// The levels of the tiers.
    pub(super) fn levels(&self) -> Vec<Level> {
        self.all.iter().map(|store| store.tier.level()).collect()
    }

    /// Whether the store of a tier is known not to answer, or has not answered for seconds since it was opened.
    pub(super) fn is_unavailable(&self, level: Level) -> bool {
        self.shared.iter().filter_map(Weak::upgrade).any(|tier| tier.level() == level && tier.is_unavailable())
    }

    /// Whether the tier is the SSD log, and no folder of it can be written to now.
    pub(super) fn is_unwritable(&self, level: Level) -> bool {
        let fails = |path: &disk::PathState| path.failure.is_some() || path.write_failure.is_some();
        self.disk.upgrade().is_some_and(|disk| disk.level() == level && disk.paths().iter().all(fails))
    }

    /// Reports failed tiers to `health`.
    pub(super) fn watch(&self, health: &Health) {
        health.watch_disk(Weak::clone(&self.disk));
        health.watch_shared(self.shared.clone());
    }

    /// Registers the metrics of the shared tiers, except their usage (`usage.rs`).
    pub(super) fn observe(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        if !self.shared.is_empty() {
            registry.register(Box::new(StoreMetrics::of(self.shared.clone())?))?;
        }
        registry.register(Box::new(DiskHealth::of(Weak::clone(&self.disk))?))
    }

    /// Closes G3: resolves when what it accepted is written, its segments are sealed and its folders are free for
    /// another process, or at `deadline`.
    pub(super) async fn close(self, deadline: Instant) {
        let disk = self.disk.upgrade();
        drop(self);
        let Some(disk) = disk else { return };
        // At least a moment: sealing a segment takes milliseconds, and saves the next start a scan.
        let deadline = deadline.max(Instant::now() + CLOSE_MIN);
        if timeout_at(deadline, disk.close()).await.is_err() {
            tracing::warn!(
                "G3 was still being written after the shutdown timeout; the next start scans its last segments"
            );
        }
    }

    /// Opens a store that other processes share, and publishes its blocks.
    async fn share(
        &mut self,
        shared: &Shared,
        shares: &Quotas,
        config: &Config,
        (planes, scope): (&Planes, &Scope),
        transforms: &Transforms,
    ) -> anyhow::Result<Arc<ObjectTier>> {
        let log = Arc::new(EventLog::new(epoch_now()));
        let tier = open_shared(shared, config, scope, Arc::clone(&log), transforms).await?;
        tier.set_quotas(shares);
        self.shared.push(Arc::downgrade(&tier));
        let id = scope.store(&shared_name(shared.settings.level, &shared.at));
        let weak = Arc::downgrade(&tier);
        let digest = Arc::new(move || weak.upgrade().map(|tier| tier.set_digest()));
        self.add(id, transforms.wrap(tier.clone()), digest, log, planes);
        Ok(tier)
    }

    /// Starts compaction and garbage collection of a store.
    fn start_gc(&mut self, gc_metrics: &GcMetrics, tier: &Arc<ObjectTier>, at: &StoreLocation, scheduler: GcScheduler) {
        self.tasks.push(gc_metrics.compact(tier, scheduler.interval));
        self.tasks.push(gc_metrics.start(tier, at, scheduler));
    }

    fn add(&mut self, id: StoreId, tier: Arc<dyn Tier>, digest: DigestOf, log: Arc<EventLog>, planes: &Planes) {
        let publisher = EventPublisher::start(Arc::clone(&planes.events), Source::Store(id), log);
        self.all.push(Store { id, tier, digest, _publisher: publisher });
    }
}

/// The metrics of the folders and the log of G3, read when the metrics are scraped. The tier may be dropped while the
/// registry stays. Labels are bounded: a path is a folder that the configuration names.
struct DiskHealth {
    disk: Weak<DiskTier>,
    paths_up: IntGaugeVec,
    paths_writable: IntGaugeVec,
    paths_limited: IntGaugeVec,
    path_failures: IntCounterVec,
    corrupt_ranges: IntCounterVec,
    corrupt_footers: IntCounterVec,
    missing_segments: IntCounterVec,
}

impl DiskHealth {
    fn of(disk: Weak<DiskTier>) -> Result<Self, prometheus::Error> {
        let opts = |name: &str, help: &str| Opts::new(format!("blockyard_tier_{name}"), help);
        let paths_up = opts("path_up", "1 while a folder of the tier is in use, 0 after it failed.");
        let paths_writable = opts(
            "path_writable",
            "1 while blocks are written to a folder of the tier, 0 after a write failed and until one succeeds, and \
             while the folder is not in use.",
        );
        let paths_limited = opts(
            "path_disk_full",
            "1 while the disk of a folder of the tier is full, which keeps its log below its capacity.",
        );
        let path_failures = opts("path_failures_total", "How often a folder of the tier failed.");
        let ranges = opts("corrupt_ranges_total", "Corrupt byte ranges of the log, found by the scan at the start.");
        let footers = opts("corrupt_footers_total", "Corrupt segment footers of the log. Those segments were scanned.");
        let missing = opts(
            "missing_segments_total",
            "Segments of the log whose files disappeared while the log was open. Their blocks were recomputed.",
        );
        Ok(Self {
            disk,
            paths_up: IntGaugeVec::new(paths_up, &["tier", "path"])?,
            paths_writable: IntGaugeVec::new(paths_writable, &["tier", "path"])?,
            paths_limited: IntGaugeVec::new(paths_limited, &["tier", "path"])?,
            path_failures: IntCounterVec::new(path_failures, &["tier", "path"])?,
            corrupt_ranges: IntCounterVec::new(ranges, &["tier"])?,
            corrupt_footers: IntCounterVec::new(footers, &["tier"])?,
            missing_segments: IntCounterVec::new(missing, &["tier"])?,
        })
    }
}

impl DiskHealth {
    fn counters(&self) -> [&IntCounterVec; 4] {
        [&self.path_failures, &self.corrupt_ranges, &self.corrupt_footers, &self.missing_segments]
    }
}

impl Collector for DiskHealth {
    fn desc(&self) -> Vec<&Desc> {
        let counters = self.counters().into_iter().flat_map(Collector::desc);
        let gauges = [&self.paths_up, &self.paths_writable, &self.paths_limited];
        counters.chain(gauges.into_iter().flat_map(Collector::desc)).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let level = Level::G3.name();
        if let Some(disk) = self.disk.upgrade() {
            let raise = |counter: &IntCounterVec, labels: &[&str], to: u64| {
                let counter = counter.with_label_values(labels);
                counter.inc_by(to.saturating_sub(counter.get()));
            };
            raise(&self.corrupt_ranges, &[level], disk.corrupt_ranges());
            raise(&self.corrupt_footers, &[level], disk.corrupt_footers());
            raise(&self.missing_segments, &[level], disk.missing_segments());
            for path in disk.paths() {
                let folder = path.folder.display().to_string();
                let (is_up, writes) = (path.failure.is_none(), path.write_failure.is_none());
                self.paths_up.with_label_values(&[level, &folder]).set(is_up.into());
                self.paths_writable.with_label_values(&[level, &folder]).set((is_up && writes).into());
                self.paths_limited.with_label_values(&[level, &folder]).set(path.limited_to.is_some().into());
                raise(&self.path_failures, &[level, &folder], path.failures);
            }
        }
        let counters = self.counters().into_iter().flat_map(Collector::collect);
        let gauges = [&self.paths_up, &self.paths_writable, &self.paths_limited];
        counters.chain(gauges.into_iter().flat_map(Collector::collect)).collect()
    }
}

async fn open_disk(
    disks: Vec<Disk>,
    shares: Quotas,
    log: Arc<EventLog>,
    keys: Option<Arc<MetadataKeys>>,
) -> anyhow::Result<Arc<DiskTier>> {
    let settings = |Disk { folder, bytes: capacity_bytes, min_free: min_free_bytes, .. }: Disk| {
        (folder, disk::Settings { capacity_bytes, min_free_bytes, ..disk::Settings::default() })
    };
    let folders: Vec<PathBuf> = disks.iter().map(|disk| disk.folder.clone()).collect();
    let paths: Vec<_> = disks.into_iter().map(settings).collect();
    let opened = tokio::task::spawn_blocking(move || DiskTier::open_in_background(&paths, &shares, log, keys)).await;
    opened.context("opening the G3 log failed")?.map_err(|error| refused(&error, &folders).into())
}

/// Why the SSD log cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("{problem}; {advice}")]
pub(super) struct LogRefused {
    problem: String,
    /// What to change.
    pub(super) advice: String,
}

impl LogRefused {
    fn new(problem: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { problem: problem.into(), advice: advice.into() }
    }
}

/// Checks the sizes of the G3 logs before any of them is opened: also that each takes blocks of `block` bytes.
pub(super) fn check_disks(disks: &[Disk], shares: &Quotas, block: u64) -> Result<(), LogRefused> {
    let folders: Vec<PathBuf> = disks.iter().map(|disk| disk.folder.clone()).collect();
    if let Some(folder) = folders.iter().find(|folder| is_listed_twice(folder, &folders)) {
        return Err(listed_twice(folder));
    }
    disks.iter().try_for_each(|disk| {
        let folder = disk.folder.display();
        let elsewhere = "use another folder (tiers.g3_paths if it is set, else --data-dir), or turn G3 off: \
                         --set tiers.g3=off";
        if let Some(kernel) = machine::kernel_folder(&disk.folder) {
            let kernel = kernel.display();
            let problem = format!("the folder {folder} of G3: {kernel} is a view of the kernel, without files");
            return Err(LogRefused::new(problem, elsewhere));
        }
        // The automatic size is a share of the free space.
        if disk.bytes == 0 {
            let problem = format!("the folder {folder} of G3 cannot be created or has no free space");
            return Err(LogRefused::new(problem, elsewhere));
        }
        let settings = disk::Settings { capacity_bytes: disk.bytes, ..disk::Settings::default() };
        settings.check_block(shares, block).map_err(|error| refused(&error, &folders))
    })
}

/// Fails if another process has one of the logs open. Called before the model is loaded, which may take minutes. A
/// folder that cannot be read, or does not answer in time, is a matter of opening it.
pub(super) async fn check_owners(disks: &[Disk]) -> Result<(), LogRefused> {
    let folders: Vec<PathBuf> = disks.iter().map(|disk| disk.folder.clone()).collect();
    let owned = |folder: PathBuf| match disk::wait_for_owner(&folder) {
        Err(error @ disk::OpenError::Owned { .. }) => Some(error),
        Ok(()) | Err(_) => None,
    };
    let checks = folders.iter().cloned().map(|folder| tokio::task::spawn_blocking(move || owned(folder)));
    for checked in join_all(checks.map(|check| timeout(OWNER_TIMEOUT, check))).await {
        if let Ok(Ok(Some(error))) = checked {
            return Err(refused(&error, &folders));
        }
    }
    Ok(())
}

/// The error of opening the logs in `folders`, with advice.
fn refused(error: &disk::OpenError, folders: &[PathBuf]) -> LogRefused {
    let larger = |least: u64| {
        // Rounded up, so that the size in the text is accepted.
        let least = least.next_multiple_of(if least < 1 << 20 { 1 << 10 } else { 1 << 20 });
        let least = ByteSize(least);
        format!(
            "set at least {least} (tiers.g3, or the capacity in tiers.g3_paths), or turn G3 off: --set tiers.g3=off"
        )
    };
    match error {
        disk::OpenError::Owned { folder, .. } if is_listed_twice(folder, folders) => listed_twice(folder),
        disk::OpenError::Owned { .. } => LogRefused::new(
            error.to_string(),
            "use another folder (tiers.g3_paths if it is set, else --data-dir), or turn G3 off: --set tiers.g3=off",
        ),
        disk::OpenError::TooSmall { capacity_bytes, least } => LogRefused::new(
            format!("{} is too small for tiers.g3: the log needs more", ByteSize(*capacity_bytes).about()),
            larger(*least),
        ),
        disk::OpenError::BlockTooLarge { capacity_bytes, block_bytes, least } => {
            let [asked, block] = [capacity_bytes, block_bytes].map(|bytes| ByteSize(*bytes).about());
            LogRefused::new(
                format!("{asked} is too small for tiers.g3: one block of the model takes {block}"),
                larger(*least),
            )
        }
        disk::OpenError::Io { path, .. } => LogRefused::new(
            format!("the G3 log cannot be used: {error}"),
            format!(
                "give the user of this process all rights on {}, or use another folder (tiers.g3_paths if it is set, \
                 else --data-dir), or turn G3 off: --set tiers.g3=off",
                path.display()
            ),
        ),
    }
}

fn listed_twice(folder: &Path) -> LogRefused {
    LogRefused::new(
        format!("tiers.g3_paths lists the folder {} twice", folder.display()),
        "remove one of the two entries from tiers.g3_paths",
    )
}

/// Whether several of `folders` are this one, under whatever names.
fn is_listed_twice(folder: &Path, folders: &[PathBuf]) -> bool {
    let identity = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.into());
    folders.iter().filter(|other| identity(other) == identity(folder)).count() > 1
}

/// Capacity of the channel of spilled blocks: about as many blocks of one segment as are worth spilling.
const SPILLED: usize = 64;

/// Spills to `next` the recently used blocks that G3 evicts for lack of space, as they are stored. If encryption is
/// configured, blocks that were stored without encryption are not spilled.
fn spill(disk: &DiskTier, next: &Arc<ObjectTier>, encrypted: bool) -> AbortOnDropHandle<()> {
    let (to, mut spilled) = mpsc::channel(SPILLED);
    let next = Arc::downgrade(next);
    let receiver = Weak::clone(&next);
    disk.spill(move |of, name| receiver.upgrade().is_some_and(|next| next.holds(of, &[name]) == 0), to);
    AbortOnDropHandle::new(tokio::spawn(async move {
        let mut blocks = Vec::new();
        while spilled.recv_many(&mut blocks, SPILLED).await > 0 {
            let Some(next) = next.upgrade() else { return };
            blocks.retain(|block: &Block| !encrypted || block.header.key.is_some());
            let answers = next.store(std::mem::take(&mut blocks)).await;
            let stored = answers.iter().filter(|answer| answer.is_ok()).count();
            tracing::debug!(
                tier = %next.level(), offered = answers.len(), stored,
                "G3 evicted blocks that were used recently; they were offered to the next tier"
            );
        }
    }))
}

/// Endpoint, region and credentials of the object store.
pub(crate) fn access(config: &Config) -> Access {
    let reach = &config.tiers.g4;
    Access { endpoint: reach.endpoint.clone(), region: reach.region.clone(), credentials: config.credentials.clone() }
}

/// Opens a shared store. A store that denies access is an error of the configuration and ends the start, except that of
/// a worker of a deployment: the others serve without the store, and access may be granted again. Without a store that
/// does not answer, the node starts and retries in the background.
async fn open_shared(
    shared: &Shared,
    config: &Config,
    scope: &Scope,
    log: Arc<EventLog>,
    transforms: &Transforms,
) -> anyhow::Result<Arc<ObjectTier>> {
    let Shared { key, at: location, settings } = shared;
    let tier = ObjectTier::open_location(location, &access(config), *settings, log, transforms.metadata())
        .with_context(|| format!("{key} = {location} cannot be used"))?;
    match (timeout(CATCH_UP_MAX, tier.initial_health()).await, location) {
        (Ok(StoreHealth::Refused(why)), StoreLocation::Cloud { cloud, .. }) => match scope {
            Scope::Process => bail!("{key} = {location}: {why}; {}", cloud.advice()),
            Scope::Deployment(_) => {
                let advice = cloud.advice();
                tracing::error!("starting without {location}: {why}; {advice}; retrying every second");
            }
        },
        (Ok(StoreHealth::Ready), _) => {}
        (Err(_), _) => {
            tracing::info!("still reading the manifests of {location}; blocks that are not listed yet are recomputed");
        }
        // The tier has logged that the store is not usable, with the reason.
        (Ok(_), _) => tracing::debug!("starting without {location}; retrying every second"),
    }
    Ok(tier)
}

/// Whether the folder of G3.5 is the store of G4.
pub(super) fn same_place(flash: &Path, shared: &StoreLocation) -> bool {
    shared_name(Level::G3_5, &StoreLocation::Folder(flash.into())) == shared_name(Level::G3_5, shared)
}

/// The name of a store that other processes share.
fn shared_name(level: Level, location: &StoreLocation) -> Fingerprint {
    match location {
        StoreLocation::Folder(folder) => folders_name(level.name(), &[folder]),
        StoreLocation::Cloud { .. } => store_name(level.name(), [("url", location.to_string().as_bytes())]),
    }
}

/// The name of a store in local folders, the same in every process that opens the same folders.
fn folders_name(kind: &str, folders: &[&Path]) -> Fingerprint {
    let folders: Vec<_> = folders.iter().map(|at| at.canonicalize().unwrap_or_else(|_| (*at).into())).collect();
    store_name(kind, folders.iter().map(|folder| ("folder", folder.as_os_str().as_encoded_bytes())))
}

fn store_name<'a>(kind: &'a str, locations: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Fingerprint {
    Fingerprint::of([("store", kind.as_bytes())].into_iter().chain(locations))
}
