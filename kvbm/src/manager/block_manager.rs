//! The facade of the room: [`BlockManager`].

use super::expiry;
use super::host_copy::{Copied, NoRoom, copy_to_host};
use super::locate::{locate, located_len};
use super::offload::{OffloadRequest, OffloadWorkers};
use super::onboard::{Onboarded, Onboarder, Onboarding, Recompute, onboard, prefetch};
use super::peer::Peer;
use super::reuse::{ReusedPrefixes, reused_prefixes};
use super::shared::Core;
use super::sources::{Source, Sources, Speed};
use crate::block::{BlockAttrs, Clock, DomainId, Level, Retention, SequenceHash};
use crate::blocking;
use crate::event::{EventLog, SetDigest};
use crate::metrics::Metrics;
use crate::pool::{BlockPool, CachedBlock, CachedBlocks, DeviceBlocks, FullBlock, HostTier, PartialBlock};
use crate::tier::{Quotas, Tier, Usage};
use spans::{Context, LogLimit, Tracer};
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// One engine's blocks: G1 in the engine's own memory, and the tiers below it. Clones share the state. When the last
/// clone is dropped, queued offloads are dropped too ([`BlockManager::flush`] waits for them).
#[derive(Clone)]
pub struct BlockManager(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) core: Arc<Core>,
    offload: Arc<OffloadWorkers>,
    sources: Sources,
    onboarder: Arc<Onboarder>,
    _expiry: AbortOnDropHandle<()>,
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
        for tier in &tiers {
            metrics.start_series(tier.level());
        }
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
            tracer: OnceLock::new(),
        });
        let offload = Arc::new(OffloadWorkers::new(core.clone()));
        Self(Arc::new(Inner {
            _expiry: expiry::spawn(&core),
            sources: Sources::new(&core.tiers),
            onboarder: Arc::new(Onboarder::new(core.clone(), offload.clone())),
            offload,
            core,
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
        self.0.offload.set_weights(quotas);
        self
    }

    /// Records offloads to tiers below G2 as traces of their own.
    #[must_use]
    pub fn with_tracer(self, tracer: Tracer) -> Self {
        // Set once, before there are blocks.
        let _ = self.0.core.tracer.set(tracer);
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
        self.0.offload.push(&cached, |_| true);
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
        self.0.offload.push_requests(&newly_stored.map(request).collect::<Vec<_>>());
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
    /// is notified when the engine should not wait any more. `trace` gets a span per tier. `None`: no tier holds the
    /// first of them.
    pub fn start_onboarding(
        &self,
        hashes: &[SequenceHash],
        recompute: Recompute,
        wake: Arc<Notify>,
        trace: &Context,
    ) -> Option<Onboarding> {
        self.start_onboarding_with(None, hashes, recompute, wake, trace)
    }

    /// [`BlockManager::start_onboarding`] from a tier of another manager, if there is one, and the own tiers.
    pub fn start_onboarding_with(
        &self,
        other: Option<&Arc<dyn Tier>>,
        hashes: &[SequenceHash],
        recompute: Recompute,
        wake: Arc<Notify>,
        trace: &Context,
    ) -> Option<Onboarding> {
        let first = hashes.get(..1)?;
        let (core, mut sources) = (&self.0.core, self.0.sources().to_vec());
        // The memory of another manager is slower than the own one, and faster than what is below.
        let at = sources.iter().take_while(|source| source.tier.level() == Level::G2).count();
        sources.splice(at..at, other.map(|tier| self.0.sources.of_tier(tier)));
        let is_below = located_len(&locate(core, &sources, first, Instant::now())) > 0;
        let onboarder = self.0.onboarder.clone();
        is_below.then(|| Onboarding::start(onboarder, sources, hashes.to_vec(), recompute, wake, trace.clone()))
    }

    /// Holds the leading `hashes` that are in G1, for a request whose hits and misses are counted. Counts nothing.
    pub fn hold(&self, hashes: &[SequenceHash]) -> CachedBlocks {
        self.0.core.pool.lookup(hashes)
    }

    /// Loads leading `hashes`, which follow the blocks that the caller holds, into G1, for no longer than computing
    /// them would take (plus `WaitBudget::BASE` when a tier turns out not to answer).
    pub async fn onboard(&self, hashes: &[SequenceHash], recompute: Recompute) -> Onboarded {
        onboard(&self.0.onboarder, self.0.sources().to_vec(), hashes, recompute, Context::none()).await
    }

    /// [`BlockManager::onboard`] from one tier, which may be another manager's: a peer, at hand-over. `trace` gets a
    /// span.
    pub async fn onboard_from(
        &self,
        tier: &Arc<dyn Tier>,
        hashes: &[SequenceHash],
        recompute: Recompute,
        trace: &Context,
    ) -> Onboarded {
        onboard(&self.0.onboarder, vec![self.0.sources.of_tier(tier)], hashes, recompute, trace.clone()).await
    }

    /// Loads leading `hashes`, which follow the blocks that the caller holds, into G1 from one tier, for a request that
    /// another engine computes meanwhile: it takes as long as the tier does. Blocks that have arrived stay cached when
    /// the future is dropped.
    pub async fn prefetch_from(&self, tier: &Arc<dyn Tier>, hashes: &[SequenceHash], trace: &Context) -> Onboarded {
        prefetch(&self.0.onboarder, vec![self.0.sources.of_tier(tier)], hashes, trace.clone()).await
    }

    /// Copies leading `hashes` that are neither in G1 nor in G2 into G2: from `other`, a tier of another manager, and
    /// from the own tiers below G2. It takes no slot of G1, and copies only while `may_copy` and while no load of a
    /// request waits for one of these tiers. It takes as long as that takes. Blocks that were copied stay when the
    /// future is dropped.
    pub async fn copy_to_host(
        &self,
        other: Option<&Arc<dyn Tier>>,
        hashes: &[SequenceHash],
        may_copy: impl Fn() -> bool,
    ) -> Result<Copied, NoRoom> {
        let below = self.0.sources().iter().filter(|source| source.tier.level() != Level::G2).cloned();
        let sources: Vec<Source> = other.map(|tier| self.0.sources.of_tier(tier)).into_iter().chain(below).collect();
        copy_to_host(&self.0.core, &sources, hashes, may_copy).await
    }

    /// This manager's G1 and G2 as a tier that others may read. It is empty once the last handle to the manager is
    /// dropped.
    pub fn peer(&self) -> Arc<dyn Tier> {
        Arc::new(Peer::new(&self.0.core))
    }

    /// The prefixes in G1 and G2 that requests have used again. Reads each slot: for a worker that stops.
    pub async fn reused_prefixes(&self) -> ReusedPrefixes {
        let core = Arc::clone(&self.0.core);
        let prefixes = blocking::spawn(move || reused_prefixes(&core));
        // The error of a runtime that shuts down.
        prefixes.await.unwrap_or_default()
    }

    /// Whether the object store has all of `hashes`, as far as is known, and answers.
    pub fn is_in_object_store(&self, hashes: &[SequenceHash]) -> bool {
        let (fingerprint, now) = (self.0.core.device.fingerprint(), Instant::now());
        let stores = self.0.sources().iter().filter(|source| source.tier.level() == Level::G4);
        let mut available = stores.filter(|source| source.throughput.is_available(now));
        available.any(|source| source.tier.holds(fingerprint, hashes) == hashes.len())
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
        self.0.sources.speeds(self.0.core.device.block_bytes())
    }

    /// Resolves when every block queued for offloading is stored in every tier, or has failed.
    pub async fn flush(&self) {
        self.0.offload.flush().await;
    }

    /// Resolves when every block queued for the tiers of one level is stored there, or has failed. So a caller need not
    /// wait for a tier that does not answer.
    pub async fn flush_level(&self, level: Level) {
        self.0.offload.flush_level(level).await;
    }
}

impl Inner {
    /// Empty when the manager is poisoned.
    fn sources(&self) -> &[Source] {
        if self.core.is_poisoned() { &[] } else { self.sources.own() }
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
