//! The [`BlockManager`]: one engine's blocks, from device memory down through the tiers and up again.
//!
//! This room owns the movement of blocks between tiers: `offload` (blocks on their way down), `onboard` (on their way up),
//! [`plan`] (which loads are worth it), `throughput` (how fast each tier is) and `peer` (the memory of another manager).
//! It promises that a hit is never slower than a miss. Not here: which slot holds what ([`crate::pool`]), and how a tier
//! stores ([`crate::tier`]).
//!
//! **When a background task panics**, the manager is poisoned: it says so at level error, and from then on answers as if
//! there were no tiers below G1. Serving goes on, slower; nothing that the task may have left half done is used.

mod expiry;
mod inflight;
mod locate;
mod offload;
mod onboard;
mod peer;
mod plan;
mod throughput;

pub use onboard::Onboarding;

use crate::block::{Clock, Custody, DomainId, Level, Retention, SequenceHash};
use crate::event::{Census, EventLog};
use crate::log_limit::LogLimit;
use crate::metrics::Metrics;
use crate::pool::{CachedBlock, CachedBlocks, DeviceBlocks, FullBlock, Held, HostTier, PartialBlock, Pool};
use crate::tier::{Shares, Tier, Usage};
use inflight::Coming;
use locate::{Source, extent, locate};
use offload::{Lane, Offer, Offers};
use onboard::load::Job;
use peer::Peer;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// One engine's blocks: G1 in the engine's own memory, and the tiers below it. Clones share it; when the last one is
/// dropped, what is on its way down is dropped too ([`BlockManager::flush`] waits for it).
#[derive(Clone)]
pub struct BlockManager(Arc<Inner>);

struct Inner {
    core: Arc<Core>,
    /// One per tier, in the order of `core.tiers`.
    lanes: Vec<Lane>,
    sources: Vec<Source>,
    coming: Coming,
    _sweeper: AbortOnDropHandle<()>,
    /// Blocks of G1 that may be loaded into before their engine's turn, and how many there are of them.
    ahead: Semaphore,
    ahead_max: usize,
    /// Tiers that are not ours but were loaded from, while they live.
    strangers: Mutex<Vec<Stranger>>,
}

/// One in so many blocks of G1 may belong to requests that do not run yet: they must not push out those that do.
const AHEAD: usize = 4;

type Stranger = (Weak<dyn Tier>, Arc<throughput::Gauge>);

/// What the manager shares with its tasks and its peers.
pub(crate) struct Core {
    pub(crate) device: Arc<dyn DeviceBlocks>,
    pub(crate) pool: Pool,
    pub(crate) host: Option<HostTier>,
    /// Fastest first, G2 included.
    pub(crate) tiers: Vec<Arc<dyn Tier>>,
    pub(crate) metrics: Metrics,
    clock: Clock,
    poisoned: AtomicBool,
    /// Blocks found unsound, and tiers found silent, may be many.
    quarantines: LogLimit,
    silences: LogLimit,
}

/// What recomputing costs, as measured by the engine, and what is at stake.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Recompute {
    /// Seconds to compute one block; `None` while nothing was measured.
    pub seconds_per_block: Option<f64>,
    /// When the last of the blocks must be there, loaded or computed, if they are to be of use.
    pub by: Option<Instant>,
}

/// The blocks that an onboarding brought.
#[derive(Debug, Default)]
#[must_use = "dropping it lets the blocks be evicted"]
pub struct Onboarded {
    /// The leading names asked for, in order, held.
    pub blocks: CachedBlocks,
    /// How many of them came from where, in order.
    pub from: Vec<(Level, usize)>,
}

/// What was measured of a tier, onboarding.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Speed {
    /// Which tier.
    pub level: Level,
    /// Until the first block is there.
    pub latency: Duration,
    /// Of blocks, once they flow, verification and writing included.
    pub bytes_per_second: f64,
    /// Blocks that loads wait for now: whoever asks comes after them.
    pub queued: u64,
}

impl BlockManager {
    /// A manager of `device`'s slots, with an optional G2 and the tiers below it, fastest first. G1's events go to `log`
    /// (G2's to the log that it was made with, usually the same). Must be called inside a tokio runtime.
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

    /// [`BlockManager::new`] with another clock than the machine's.
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
        let pool = Pool::new(Level::G1, device.capacity(), log, metrics.memory(Level::G1), clock.clone());
        let first: Option<Arc<dyn Tier>> = host.clone().map(|host| Arc::new(host) as _);
        let tiers: Vec<_> = first.into_iter().chain(lower).collect();
        let (quarantines, silences) = (LogLimit::default(), LogLimit::default());
        let poisoned = AtomicBool::new(false);
        let core = Arc::new(Core { device, pool, host, tiers, metrics, clock, poisoned, quarantines, silences });
        let source = |tier: &Arc<dyn Tier>| Source { tier: tier.clone(), gauge: Arc::default() };
        let sources = core.tiers.iter().map(source).collect();
        let own = usize::from(core.host.is_some());
        let below: Vec<Lane> = (own..core.tiers.len()).map(|tier| Lane::to_tier(core.clone(), tier)).collect();
        let offers = || below.iter().map(|lane| lane.offers().clone()).collect();
        let to_host = core.host.is_some().then(|| Lane::to_host(core.clone(), offers()));
        let lanes = to_host.into_iter().chain(below).collect();
        let ahead_max = (core.pool.capacity() / AHEAD).min(Semaphore::MAX_PERMITS);
        let (coming, strangers, ahead) = (Coming::default(), Mutex::default(), Semaphore::new(ahead_max));
        let sweeper = expiry::spawn(&core);
        Self(Arc::new(Inner { core, lanes, sources, coming, _sweeper: sweeper, ahead, ahead_max, strangers }))
    }

    /// Keeps to what domains are promised of G1, and to their weights on the way down. To be called before there are any
    /// blocks. G2 is told by itself ([`HostTier::with_shares`]).
    ///
    /// # Panics
    /// When there are.
    #[must_use]
    pub fn with_shares(self, shares: &Shares) -> Self {
        let core = &self.0.core;
        core.pool.divide(shares.at(Level::G1, core.device.block_bytes() as u64));
        self.0.lanes.iter().for_each(|lane| lane.offers().weigh(shares));
        self
    }

    /// `n` empty slots, or none at all. Gives up cached blocks that nobody holds, leaves before parents, the least
    /// recently used first.
    pub fn allocate(&self, n: usize) -> Option<Vec<PartialBlock>> {
        self.0.core.pool.allocate(n)
    }

    /// What a block of `domain` that is full now carries of what its request asked for.
    pub fn custody(&self, domain: DomainId, retention: &Retention) -> Custody {
        Custody { domain, keep: retention.from(self.0.core.clock.now()) }
    }

    /// Gives a block to everyone and queues it for the tiers below. When its name is cached already, that block is
    /// returned and the duplicate freed.
    pub fn register(&self, block: FullBlock) -> CachedBlock {
        self.register_all(vec![block]).into_iter().next().expect("registering one block returns one block")
    }

    /// [`BlockManager::register`] of many blocks under one lock; a run of one chain is announced as one event.
    pub fn register_all(&self, blocks: Vec<FullBlock>) -> CachedBlocks {
        let cached = self.0.core.pool.register(blocks);
        self.0.offload(&cached, |_| true);
        cached
    }

    /// The leading `names` that are in G1, held.
    pub fn matched(&self, names: &[SequenceHash]) -> CachedBlocks {
        let held = self.0.core.pool.matched(names);
        self.0.core.metrics.hit(Level::G1, held.len());
        self.0.core.metrics.missed(Level::G1, names.len() - held.len());
        held
    }

    /// Keeps blocks that are in memory for longer, if `retention` asks for more than they have: for a request that found
    /// what another computed. Of two requests the more generous decides.
    pub fn renew(&self, names: &[SequenceHash], retention: &Retention) {
        let core = &self.0.core;
        let keep = retention.from(core.clock.now());
        let changed = core.pool.renew(names.iter().copied(), keep);
        if changed.is_empty() {
            return;
        }
        if let Some(host) = &core.host {
            host.renew(&changed.iter().map(|(name, _)| *name).collect::<Vec<_>>(), keep);
        }
        let fresh = changed.iter().filter(|(_, before)| keep.store && !before.keep.store);
        let offer = |&(name, Custody { domain, .. }): &(SequenceHash, Custody)| Offer { name, domain };
        self.0.offer(&fresh.map(offer).collect::<Vec<_>>());
    }

    /// Blocks of G1 that pins keep, those that they build on not counted.
    pub fn pinned(&self) -> usize {
        self.0.core.pool.pinned()
    }

    /// Lets G1 give up pinned blocks too: for who could not run at all otherwise.
    pub fn unpin(&self) {
        self.0.core.pool.unpin();
    }

    /// The same for a request that was looked up before and asks again: no miss is counted.
    pub fn found(&self, names: &[SequenceHash]) -> CachedBlocks {
        let held = self.0.core.pool.matched(names);
        self.0.core.metrics.hit(Level::G1, held.len());
        held
    }

    /// The first of `names` that is in G1, whatever is missing before it.
    pub fn next(&self, names: &[SequenceHash]) -> Option<usize> {
        self.0.core.pool.next(names)
    }

    /// How many leading `names` some tier below G1 holds and could be asked for now. Does not wait.
    pub fn below(&self, names: &[SequenceHash]) -> usize {
        extent(&locate(&self.0.core, self.0.sources(), names, Instant::now()))
    }

    /// Begins to bring `names`, which follow what the caller holds, into G1: verified, from all tiers at once. `wake` is
    /// notified when waiting for them ends. `None`: no tier has the first of them.
    pub fn begin(&self, names: &[SequenceHash], recompute: Recompute, wake: Arc<Notify>) -> Option<Onboarding> {
        let is_below = names.first().is_some_and(|first| self.below(&[*first]) > 0);
        is_below.then(|| self.0.begin(self.0.sources().to_vec(), names.to_vec(), recompute, wake))
    }

    /// Brings leading `names`, which follow what the caller holds, into G1, for no longer than computing them would take
    /// (plus a tenth of a second when a tier turns out not to answer).
    pub async fn onboard(&self, names: &[SequenceHash], recompute: Recompute) -> Onboarded {
        self.0.onboard(self.0.sources().to_vec(), names, recompute).await
    }

    /// The same from one tier, which need not be one of ours: a peer, at hand-over.
    pub async fn onboard_from(&self, tier: &Arc<dyn Tier>, names: &[SequenceHash], recompute: Recompute) -> Onboarded {
        let source = Source { tier: tier.clone(), gauge: self.0.gauge(tier) };
        self.0.onboard(vec![source], names, recompute).await
    }

    /// This manager's G1 and G2 as a tier that others may read, for as long as a handle to the manager lives.
    pub fn peer(&self) -> Arc<dyn Tier> {
        Arc::new(Peer::new(&self.0.core))
    }

    /// What makes all blocks of a domain in G1 and G2 misses, and those that are being loaded or are on their way down. It holds
    /// nothing of the manager. Requests that run keep the blocks that they hold, and what they compute afterwards counts as new.
    ///
    /// Managers that read from each other are to be purged twice, each time all of them: what one of them had read from
    /// another before that one was purged goes the second time.
    pub fn purger(&self) -> impl Fn(DomainId) -> usize + Send + Sync + use<> {
        let core = Arc::downgrade(&self.0.core);
        move |domain| core.upgrade().map_or(0, |core| core.purge(domain))
    }

    /// Slots that [`BlockManager::allocate`] could hand out now.
    pub fn available(&self) -> usize {
        self.0.core.pool.available()
    }

    /// All slots of G1.
    pub fn capacity(&self) -> usize {
        self.0.core.pool.capacity()
    }

    /// How full G1 is, and G2 if there is one. In G1 the blocks that running requests fill count too.
    pub fn usage(&self) -> Vec<(Level, Usage)> {
        let Core { pool, device, host, .. } = &*self.0.core;
        let block = device.block_bytes() as u64;
        // A block that is being filled is not resident yet; a resident one may be in use.
        let blocks = pool.occupied() as u64;
        let capacity = Some(pool.capacity() as u64 * block);
        let host = host.iter().map(|host| (Level::G2, host.usage()));
        [(Level::G1, Usage { blocks, bytes: blocks * block, capacity })].into_iter().chain(host).collect()
    }

    /// Which blocks rest in G1, and in G2 if there is one. Looks at each: for whoever wants to know, now and then.
    pub fn census(&self) -> Vec<(Level, Census)> {
        let Core { pool, host, .. } = &*self.0.core;
        let host = host.iter().map(|host| (Level::G2, host.census()));
        [(Level::G1, pool.census())].into_iter().chain(host).collect()
    }

    /// What was measured of each level so far, fastest level first; levels that were never loaded from are missing.
    pub fn speeds(&self) -> Vec<Speed> {
        let bytes = self.0.core.device.block_bytes() as f64;
        let strangers = self.0.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        let strangers = strangers.iter().map(|(tier, gauge)| (tier.upgrade().map(|tier| tier.level()), gauge));
        let own = self.0.sources.iter().map(|source| (Some(source.tier.level()), &source.gauge));
        let speed = |(level, gauge): (Option<Level>, &Arc<throughput::Gauge>)| {
            let (latency, per_block) = gauge.last()?;
            // One block at a time was all we saw: it took the latency.
            let per_block = if per_block > 0.0 { per_block } else { latency };
            let (latency, queued) = (Duration::from_secs_f64(latency), gauge.queued());
            let speed = |level| Speed { level, latency, bytes_per_second: bytes / per_block, queued };
            level.filter(|_| per_block > 0.0).map(speed)
        };
        let mut speeds: Vec<Speed> = own.chain(strangers).filter_map(speed).collect();
        speeds.sort_by_key(|speed| speed.level);
        speeds.dedup_by_key(|speed| speed.level);
        speeds
    }

    /// Resolves when every block accepted for offloading rests in every tier, or failed to.
    pub async fn flush(&self) {
        let (host, below) = self.0.lanes.split_at(usize::from(self.0.core.host.is_some()));
        // What G2's lane is done with was offered to those below it.
        for stage in [host, below] {
            futures::future::join_all(stage.iter().map(|lane| lane.offers().flush())).await;
        }
    }
}

impl Inner {
    /// None when poisoned.
    fn sources(&self) -> &[Source] {
        if self.core.is_poisoned() { &[] } else { &self.sources }
    }

    /// What is not to be stored stays where it is. `which`: of the blocks, by position.
    fn offload(&self, blocks: &CachedBlocks, which: impl Fn(usize) -> bool) {
        let custody = blocks.custody();
        let wanted = |at: &usize| which(*at) && custody[*at].keep.store;
        let stored = blocks.iter().enumerate().filter(|(at, _)| wanted(at));
        let offer = |(at, held): (usize, &Held)| Offer { name: held.name(), domain: custody[at].domain };
        self.offer(&stored.map(offer).collect::<Vec<_>>());
    }

    /// Into G2 first, whose lane offers them on; without a G2 to every tier.
    fn offer(&self, offers: &[Offer]) {
        if self.core.is_poisoned() {
            return;
        }
        let first = if self.core.host.is_some() { 1 } else { self.lanes.len() };
        self.lanes.iter().take(first).map(Lane::offers).for_each(|lane: &Offers| lane.offer(&self.core, offers));
    }

    fn begin(
        self: &Arc<Self>,
        sources: Vec<Source>,
        names: Vec<SequenceHash>,
        recompute: Recompute,
        wake: Arc<Notify>,
    ) -> Onboarding {
        let (inner, purges) = (self.clone(), self.core.pool.purges());
        Onboarding::start(|shared| Job { inner, sources, names, recompute, shared, purges }, wake)
    }

    async fn onboard(
        self: &Arc<Self>,
        sources: Vec<Source>,
        names: &[SequenceHash],
        recompute: Recompute,
    ) -> Onboarded {
        let wake = Arc::new(Notify::new());
        let onboarding = self.begin(sources, names.to_vec(), recompute, wake.clone());
        onboarding.turn();
        while onboarding.is_worth_waiting() {
            wake.notified().await;
        }
        let blocks = self.core.pool.matched(names);
        let mut from = Vec::new();
        for block in &blocks {
            count(&mut from, onboarding.from(&block.name()).unwrap_or(Level::G1), 1);
        }
        onboarding.end().await;
        Onboarded { blocks, from }
    }

    fn gauge(&self, tier: &Arc<dyn Tier>) -> Arc<throughput::Gauge> {
        if let Some(source) = self.sources.iter().find(|source| Arc::ptr_eq(&source.tier, tier)) {
            return source.gauge.clone();
        }
        let mut strangers = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        strangers.retain(|(known, _)| known.strong_count() > 0);
        if let Some((_, gauge)) = strangers.iter().find(|(known, _)| known.ptr_eq(&Arc::downgrade(tier))) {
            return gauge.clone();
        }
        let gauge = Arc::default();
        strangers.push((Arc::downgrade(tier), Arc::clone(&gauge)));
        gauge
    }
}

impl Core {
    fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Relaxed)
    }

    fn purge(&self, domain: DomainId) -> usize {
        // G2 is filled from G1.
        self.pool.purge(domain) + self.host.as_ref().map_or(0, |host| host.purge(domain))
    }

    /// A task died. See the module's text.
    fn poison(&self, task: &str) {
        self.poisoned.store(true, Ordering::Relaxed);
        tracing::error!(task, "a transfer task panicked; tiers below G1 are disabled");
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

#[cfg(test)]
mod tests;
