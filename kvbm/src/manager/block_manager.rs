//! The facade of the room: [`BlockManager`].

use super::expiry;
use super::inflight::InflightLoads;
use super::locate::{Source, locate, located_len};
use super::offload::{OffloadQueue, OffloadRequest, OffloadWorker};
use super::onboard::Onboarding;
use super::onboard::load::LoadJob;
use super::peer::Peer;
use super::shared::Core;
use super::throughput::TierThroughput;
use crate::block::{BlockAttrs, Clock, DomainId, Level, Retention, SequenceHash};
use crate::event::{EventLog, SetDigest};
use crate::log_limit::LogLimit;
use crate::metrics::Metrics;
use crate::pool::{BlockPool, BlockRef, CachedBlock, CachedBlocks, DeviceBlocks, FullBlock, HostTier, PartialBlock};
use crate::tier::{Quotas, Tier, Usage};
use parking_lot::Mutex;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// One engine's blocks: G1 in the engine's own memory, and the tiers below it. Clones share the state. When the last
/// clone is dropped, queued offloads are dropped too ([`BlockManager::flush`] waits for them).
#[derive(Clone)]
pub struct BlockManager(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) core: Arc<Core>,
    /// One per tier, in the order of `core.tiers`.
    offload_workers: Vec<OffloadWorker>,
    sources: Vec<Source>,
    pub(super) inflight: InflightLoads,
    _expiry: AbortOnDropHandle<()>,
    /// Permits for blocks of G1 that may be loaded before their engine is ready, and the number of all permits.
    pub(super) prefetch_blocks: Semaphore,
    pub(super) max_prefetch_blocks: usize,
    /// Measurements of tiers that do not belong to this manager but were loaded from, while they live.
    external_tiers: Mutex<Vec<ExternalTier>>,
}

/// One in this many blocks of G1 may be loaded for requests that do not run yet; more could evict blocks of running
/// ones.
const PREFETCH_DIVISOR: usize = 4;

type ExternalTier = (Weak<dyn Tier>, Arc<TierThroughput>);

/// The cost of computing blocks, as measured by the engine, and the request's deadline.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Recompute {
    /// Seconds to compute one block; `None` while nothing was measured.
    pub seconds_per_block: Option<f64>,
    /// When the last block must be in G1, loaded or computed, for the request to meet its deadline.
    pub deadline: Option<Instant>,
}

/// The result of an onboarding.
#[derive(Debug, Default)]
#[must_use = "dropping it lets the blocks be evicted"]
pub struct Onboarded {
    /// The leading blocks of the request that are in G1, held.
    pub blocks: CachedBlocks,
    /// Number of consecutive blocks per tier that they came from, in order.
    pub from: Vec<(Level, usize)>,
}

/// The measured onboarding speed of a tier.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Speed {
    /// The tier.
    pub level: Level,
    /// Time until the first block.
    pub latency: Duration,
    /// Throughput after the first block, verification and writing included.
    pub bytes_per_second: f64,
    /// Number of blocks that loads wait for now; a new load is served after them.
    pub queued: u64,
}

impl BlockManager {
    /// A manager of `device`'s slots, with an optional G2 and the tiers below it, fastest first. G1's events go to
    /// `log` (G2's to the log that it was made with, usually the same). Must be called inside a tokio runtime.
    ///
    /// # Panics
    /// When `host` was made for another engine's blocks.
    pub fn new(
        device: Arc<dyn DeviceBlocks>,
        host: Option<HostTier>,
        lower: Vec<Arc<dyn Tier>>,
        log: Arc<EventLog>,
        metrics: Metrics,
    ) -> Self {
        Self::with_clock(device, host, lower, log, metrics, Clock::system())
    }

    /// [`BlockManager::new`] with another clock than the system's.
    ///
    /// # Panics
    /// When `host` was made for another engine's blocks.
    pub fn with_clock(
        device: Arc<dyn DeviceBlocks>,
        host: Option<HostTier>,
        lower: Vec<Arc<dyn Tier>>,
        log: Arc<EventLog>,
        metrics: Metrics,
        clock: Clock,
    ) -> Self {
        if let Some(host) = &host {
            let same = host.fingerprint() == device.fingerprint() && host.block_bytes() == device.block_bytes();
            assert!(same, "the host tier is for blocks of this device");
        }
        let pool = BlockPool::new(Level::G1, device.capacity(), log, metrics.memory(Level::G1), clock.clone());
        let first: Option<Arc<dyn Tier>> = host.clone().map(|host| Arc::new(host) as _);
        let tiers: Vec<_> = first.into_iter().chain(lower).collect();
        let core = Arc::new(Core {
            device,
            pool,
            host,
            tiers,
            metrics,
            clock,
            poisoned: AtomicBool::new(false),
            corrupt_log: LogLimit::default(),
            unresponsive_log: LogLimit::default(),
        });
        let source = |tier: &Arc<dyn Tier>| Source { tier: tier.clone(), throughput: Arc::default() };
        let sources = core.tiers.iter().map(source).collect();
        let first_below = usize::from(core.host.is_some());
        let to_tier = |tier| OffloadWorker::to_tier(core.clone(), tier);
        let below: Vec<OffloadWorker> = (first_below..core.tiers.len()).map(to_tier).collect();
        let queues = || below.iter().map(|worker| worker.queue().clone()).collect();
        let to_host = core.host.is_some().then(|| OffloadWorker::to_host(core.clone(), queues()));
        let offload_workers = to_host.into_iter().chain(below).collect();
        let max_prefetch_blocks = (core.pool.capacity() / PREFETCH_DIVISOR).min(Semaphore::MAX_PERMITS);
        Self(Arc::new(Inner {
            _expiry: expiry::spawn(&core),
            core,
            offload_workers,
            sources,
            inflight: InflightLoads::default(),
            prefetch_blocks: Semaphore::new(max_prefetch_blocks),
            max_prefetch_blocks,
            external_tiers: Mutex::default(),
        }))
    }

    /// Sets the quotas of domains in G1, and their weights in the offload queues. For G2 see [`HostTier::with_quotas`].
    ///
    /// # Panics
    /// When there are blocks already.
    #[must_use]
    pub fn with_quotas(self, quotas: &Quotas) -> Self {
        let core = &self.0.core;
        core.pool.set_quotas(quotas.for_tier(Level::G1, core.device.block_bytes() as u64));
        self.0.offload_workers.iter().for_each(|worker| worker.queue().set_weights(quotas));
        self
    }

    /// `n` empty slots, or `None`. Evicts cached blocks that are not held, leaves before parents.
    pub fn allocate(&self, n: usize) -> Option<Vec<PartialBlock>> {
        self.0.core.pool.allocate(n)
    }

    /// The attributes of a block of `domain` that is completed now by a request with this retention.
    pub fn attrs(&self, domain: DomainId, retention: &Retention) -> BlockAttrs {
        BlockAttrs { domain, retention: retention.from(self.0.core.clock.now()) }
    }

    /// Makes a block findable by hash and queues it for the tiers below. For a hash that is cached already, returns
    /// that block and frees the duplicate.
    pub fn register(&self, block: FullBlock) -> CachedBlock {
        self.register_all(vec![block]).into_iter().next().expect("registering one block returns one block")
    }

    /// [`BlockManager::register`] of many blocks under one lock; a run of one chain is announced as one event.
    pub fn register_all(&self, blocks: Vec<FullBlock>) -> CachedBlocks {
        let cached = self.0.core.pool.register(blocks);
        self.0.offload(&cached, |_| true);
        cached
    }

    /// Holds the leading `hashes` that are in G1, and counts hits and misses.
    pub fn lookup(&self, hashes: &[SequenceHash]) -> CachedBlocks {
        let held = self.0.core.pool.lookup(hashes);
        self.0.core.metrics.hit(Level::G1, held.len());
        self.0.core.metrics.missed(Level::G1, hashes.len() - held.len());
        held
    }

    /// Extends the retention of blocks in G1 and G2 where `retention` asks for more than they have: for a request that
    /// found blocks of another request.
    pub fn extend_retention(&self, hashes: &[SequenceHash], retention: &Retention) {
        let core = &self.0.core;
        let retention = retention.from(core.clock.now());
        let changed = core.pool.extend_retention(hashes.iter().copied(), retention);
        if changed.is_empty() {
            return;
        }
        if let Some(host) = &core.host {
            host.extend_retention(&changed.iter().map(|(hash, _)| *hash).collect::<Vec<_>>(), retention);
        }
        let newly_stored = changed.iter().filter(|(_, before)| retention.store && !before.retention.store);
        let request = |&(hash, BlockAttrs { domain, .. }): &(SequenceHash, BlockAttrs)| OffloadRequest { hash, domain };
        self.0.enqueue(&newly_stored.map(request).collect::<Vec<_>>());
    }

    /// Number of pinned blocks in G1, without their ancestors.
    pub fn pinned(&self) -> usize {
        self.0.core.pool.pinned()
    }

    /// Ends all pins in G1, so that a request can run that would find no memory otherwise.
    pub fn unpin(&self) {
        self.0.core.pool.unpin();
    }

    /// [`BlockManager::lookup`] for a request that was looked up before: counts no misses.
    pub fn lookup_again(&self, hashes: &[SequenceHash]) -> CachedBlocks {
        let held = self.0.core.pool.lookup(hashes);
        self.0.core.metrics.hit(Level::G1, held.len());
        held
    }

    /// The index of the first of `hashes` that is in G1.
    pub fn next_cached(&self, hashes: &[SequenceHash]) -> Option<usize> {
        self.0.core.pool.next_resident(hashes)
    }

    /// Number of leading `hashes` that available tiers below G1 hold. Does not wait.
    pub fn count_in_tiers(&self, hashes: &[SequenceHash]) -> usize {
        located_len(&locate(&self.0.core, self.0.sources(), hashes, Instant::now()))
    }

    /// Begins to load `hashes`, which follow the blocks that the caller holds, into G1 from all tiers at once. `wake`
    /// is notified when the engine should not wait any more. `None`: no tier holds the first of them.
    pub fn start_onboarding(
        &self,
        hashes: &[SequenceHash],
        recompute: Recompute,
        wake: Arc<Notify>,
    ) -> Option<Onboarding> {
        let is_below = hashes.first().is_some_and(|first| self.count_in_tiers(&[*first]) > 0);
        is_below.then(|| self.0.start_onboarding(self.0.sources().to_vec(), hashes.to_vec(), recompute, wake))
    }

    /// Loads leading `hashes`, which follow the blocks that the caller holds, into G1, for no longer than computing
    /// them would take (plus `WaitBudget::BASE` when a tier turns out not to answer).
    pub async fn onboard(&self, hashes: &[SequenceHash], recompute: Recompute) -> Onboarded {
        self.0.onboard(self.0.sources().to_vec(), hashes, recompute).await
    }

    /// [`BlockManager::onboard`] from one tier, which may be another manager's: a peer, at hand-over.
    pub async fn onboard_from(&self, tier: &Arc<dyn Tier>, hashes: &[SequenceHash], recompute: Recompute) -> Onboarded {
        let source = Source { tier: tier.clone(), throughput: self.0.throughput(tier) };
        self.0.onboard(vec![source], hashes, recompute).await
    }

    /// This manager's G1 and G2 as a tier that others may read. It is empty once the last handle to the manager is
    /// dropped.
    pub fn peer(&self) -> Arc<dyn Tier> {
        Arc::new(Peer::new(&self.0.core))
    }

    /// A function that removes all blocks of a domain from G1 and G2, including those that are being loaded or
    /// offloaded, and returns their number. It does not keep the manager alive. Running requests keep the blocks that
    /// they hold; blocks that they compute later are new.
    ///
    /// Managers that read from each other are to be purged twice, each time all of them: the second purge removes
    /// blocks that one manager had read from another before the other one was purged.
    pub fn purger(&self) -> impl Fn(DomainId) -> usize + Send + Sync + use<> {
        let core = Arc::downgrade(&self.0.core);
        move |domain| core.upgrade().map_or(0, |core| core.purge(domain))
    }

    /// Number of slots that [`BlockManager::allocate`] could return now.
    pub fn available(&self) -> usize {
        self.0.core.pool.available()
    }

    /// Number of slots in G1.
    pub fn capacity(&self) -> usize {
        self.0.core.pool.capacity()
    }

    /// How full G1 is, and G2 if there is one. In G1 this includes blocks that running requests fill.
    pub fn usage(&self) -> Vec<(Level, Usage)> {
        let Core { pool, device, host, .. } = &*self.0.core;
        let block = device.block_bytes() as u64;
        // A block that is being filled is not resident yet; a resident one may be in use.
        let blocks = pool.occupied() as u64;
        let capacity = Some(pool.capacity() as u64 * block);
        let host = host.iter().map(|host| (Level::G2, host.usage()));
        [(Level::G1, Usage { blocks, bytes: blocks * block, capacity })].into_iter().chain(host).collect()
    }

    /// The set of blocks in G1, and in G2 if there is one. Reads each slot: for rare diagnostics.
    pub fn set_digest(&self) -> Vec<(Level, SetDigest)> {
        let Core { pool, host, .. } = &*self.0.core;
        let host = host.iter().map(|host| (Level::G2, host.set_digest()));
        [(Level::G1, pool.set_digest())].into_iter().chain(host).collect()
    }

    /// The measured speed of each tier, fastest level first, without tiers that were never loaded from.
    pub fn speeds(&self) -> Vec<Speed> {
        let bytes = self.0.core.device.block_bytes() as f64;
        let external_tiers = self.0.external_tiers.lock();
        let external = external_tiers.iter().map(|(tier, throughput)| {
            let level = tier.upgrade().map(|tier| tier.level());
            (level, throughput)
        });
        let own = self.0.sources.iter().map(|source| (Some(source.tier.level()), &source.throughput));
        let speed = |(level, throughput): (Option<Level>, &Arc<TierThroughput>)| {
            let (latency, per_block) = throughput.latest()?;
            // So far each load had one block, which took the latency.
            let per_block = if per_block > 0.0 { per_block } else { latency };
            let (latency, queued) = (Duration::from_secs_f64(latency), throughput.queued());
            let speed = |level| Speed { level, latency, bytes_per_second: bytes / per_block, queued };
            level.filter(|_| per_block > 0.0).map(speed)
        };
        let mut speeds: Vec<Speed> = own.chain(external).filter_map(speed).collect();
        speeds.sort_by_key(|speed| speed.level);
        speeds.dedup_by_key(|speed| speed.level);
        speeds
    }

    /// Resolves when every block queued for offloading is stored in every tier, or has failed.
    pub async fn flush(&self) {
        let (host, below) = self.0.offload_workers.split_at(usize::from(self.0.core.host.is_some()));
        // G2's worker queues its blocks for the workers below it.
        for stage in [host, below] {
            futures::future::join_all(stage.iter().map(|worker| worker.queue().flush())).await;
        }
    }
}

impl Inner {
    /// Empty when the manager is poisoned.
    fn sources(&self) -> &[Source] {
        if self.core.is_poisoned() { &[] } else { &self.sources }
    }

    /// Queues blocks that may be stored. `which`: selects blocks by position.
    pub(super) fn offload(&self, blocks: &CachedBlocks, which: impl Fn(usize) -> bool) {
        let attrs = blocks.attrs();
        let wanted = |at: &usize| which(*at) && attrs[*at].retention.store;
        let stored = blocks.iter().enumerate().filter(|(at, _)| wanted(at));
        let request = |(at, block): (usize, &BlockRef)| OffloadRequest { hash: block.hash(), domain: attrs[at].domain };
        self.enqueue(&stored.map(request).collect::<Vec<_>>());
    }

    /// Queues for G2, whose worker queues for the tiers below; without a G2 for every tier.
    fn enqueue(&self, requests: &[OffloadRequest]) {
        if self.core.is_poisoned() {
            return;
        }
        let first = if self.core.host.is_some() { 1 } else { self.offload_workers.len() };
        let queues = self.offload_workers.iter().take(first).map(OffloadWorker::queue);
        queues.for_each(|queue: &OffloadQueue| queue.push(&self.core, requests));
    }

    fn start_onboarding(
        self: &Arc<Self>,
        sources: Vec<Source>,
        hashes: Vec<SequenceHash>,
        recompute: Recompute,
        wake: Arc<Notify>,
    ) -> Onboarding {
        let inner = self.clone();
        let purges = self.core.pool.purges();
        Onboarding::start(|shared| LoadJob { inner, sources, hashes, recompute, shared, purges }, wake)
    }

    async fn onboard(
        self: &Arc<Self>,
        sources: Vec<Source>,
        hashes: &[SequenceHash],
        recompute: Recompute,
    ) -> Onboarded {
        let wake = Arc::new(Notify::new());
        let onboarding = self.start_onboarding(sources, hashes.to_vec(), recompute, wake.clone());
        onboarding.start_waiting();
        while onboarding.should_wait() {
            wake.notified().await;
        }
        let blocks = self.core.pool.lookup(hashes);
        let mut from = Vec::new();
        for block in &blocks {
            count(&mut from, onboarding.loaded_from(&block.hash()).unwrap_or(Level::G1), 1);
        }
        onboarding.stop().await;
        Onboarded { blocks, from }
    }

    fn throughput(&self, tier: &Arc<dyn Tier>) -> Arc<TierThroughput> {
        if let Some(source) = self.sources.iter().find(|source| Arc::ptr_eq(&source.tier, tier)) {
            return source.throughput.clone();
        }
        let mut external_tiers = self.external_tiers.lock();
        external_tiers.retain(|(known, _)| known.strong_count() > 0);
        if let Some((_, throughput)) = external_tiers.iter().find(|(known, _)| known.ptr_eq(&Arc::downgrade(tier))) {
            return throughput.clone();
        }
        let throughput = Arc::default();
        external_tiers.push((Arc::downgrade(tier), Arc::clone(&throughput)));
        throughput
    }
}

fn count(from: &mut Vec<(Level, usize)>, level: Level, blocks: usize) {
    match from.last_mut() {
        _ if blocks == 0 => {}
        Some((last, count)) if *last == level => *count += blocks,
        _ => from.push((level, blocks)),
    }
}

impl fmt::Debug for BlockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockManager")
            .field("capacity", &self.capacity())
            .field("available", &self.available())
            .finish()
    }
}
