//! The manager with tiers of all kinds, in virtual time where time matters.

use super::plan::WaitBudget;
use super::{BlockManager, Onboarding, Recompute};
use crate::block::{Block, BlockAttrs, Clock, Date, DomainId, Fingerprint, Level, Retention, SequenceHash};
use crate::event::{Epoch, EventLog};
use crate::metrics::Metrics;
use crate::pool::device::conformance::InMemory;
use crate::pool::{BlockId, CachedBlocks, DeviceBlocks, HostTier};
use crate::tier::conformance::Memory;
use crate::tier::{Faults, Faulty, Loaded, Quotas, StoreError, Tier, Usage, delegate};
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt};
use parking_lot::Mutex;
use prometheus::Registry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

mod host_copy;
mod inbox;
mod never_slower;
mod offload;
mod onboard;
mod purge;
mod reuse;
mod sharing;
mod soak;
mod terms;

const SIZE: usize = 1_000;

fn fingerprint() -> Fingerprint {
    Fingerprint::from_bytes([0xF1; 32])
}

fn hash(n: usize) -> SequenceHash {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(n as u64 + 1).to_le_bytes());
    SequenceHash::from_bytes(bytes)
}

fn hashes(n: usize) -> Vec<SequenceHash> {
    (0..n).map(hash).collect()
}

/// The content of a block: a function of its hash.
fn content(hash: SequenceHash) -> Vec<u8> {
    (0..SIZE).map(|i| hash.as_bytes()[0].wrapping_mul(31) ^ (i * 7) as u8).collect()
}

/// A manager, its device and host tier, and its outputs.
struct Harness {
    device: Arc<InMemory>,
    manager: BlockManager,
    host: Option<HostTier>,
    log: Arc<EventLog>,
    registry: Registry,
}

impl Harness {
    fn new(slots: usize, host: usize, lower: Vec<Arc<dyn Tier>>) -> Self {
        Self::timed(slots, host, lower, &Clock::system())
    }

    fn timed(slots: usize, host: usize, lower: Vec<Arc<dyn Tier>>, clock: &Clock) -> Self {
        let log = log();
        let registry = Registry::new();
        let metrics = Metrics::new(&registry).unwrap();
        let device = InMemory::new(slots, SIZE, fingerprint());
        let bytes = (host * SIZE) as u64;
        let new = || HostTier::with_clock(bytes, SIZE, fingerprint(), log.clone(), &metrics, clock.clone()).unwrap();
        let host = (host > 0).then(new);
        let manager =
            BlockManager::with_clock(device.clone(), host.clone(), lower, log.clone(), metrics, clock.clone());
        Self { device, manager, host, log, registry }
    }

    /// Computes the chain of `range` and registers it.
    fn compute(&self, range: std::ops::Range<usize>) -> CachedBlocks {
        self.compute_for(range, BlockAttrs::default())
    }

    fn compute_for(&self, range: std::ops::Range<usize>, attrs: BlockAttrs) -> CachedBlocks {
        let slots = self.manager.allocate(range.len()).unwrap();
        let full = slots.into_iter().zip(range).map(|(slot, n)| {
            self.device.write(slot.slot(), &content(hash(n)));
            slot.complete(hash(n), n.checked_sub(1).map(hash), attrs)
        });
        self.manager.register_all(full.collect())
    }

    fn assert_sound(&self, blocks: &CachedBlocks) {
        let mut bytes = vec![0; SIZE];
        for block in blocks {
            self.device.read(block.slot(), &mut bytes);
            assert!(bytes == content(block.hash()), "{block:?} holds other bytes");
        }
    }

    fn counter(&self, metric: &str, level: Level) -> u64 {
        counted(&self.registry, metric, level)
    }
}

fn counted(registry: &Registry, metric: &str, level: Level) -> u64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == format!("blockyard_tier_{metric}"));
    let of_level = |m: &&prometheus::proto::Metric| m.get_label().iter().any(|l| l.value() == level.name());
    let found = family.and_then(|family| family.get_metric().iter().find(of_level));
    found.map_or(0, |metric| metric.get_counter().get_value() as u64)
}

fn log() -> Arc<EventLog> {
    Arc::new(EventLog::new(Epoch(1)))
}

/// A tier at some level, with a fixed latency and a time per block.
struct PlacedTier {
    level: Level,
    tier: Arc<dyn Tier>,
    latency: Duration,
    per_block: Duration,
}

fn placed(level: Level, latency_ms: u64, per_block_ms: u64) -> Arc<PlacedTier> {
    let tier = Arc::new(Memory::new(log(), None));
    Arc::new(PlacedTier {
        level,
        tier,
        latency: Duration::from_millis(latency_ms),
        per_block: Duration::from_millis(per_block_ms),
    })
}

impl PlacedTier {
    async fn fill(&self, range: std::ops::Range<usize>) {
        let block = |n: usize| Block::new(hash(n), n.checked_sub(1).map(hash), fingerprint(), content(hash(n)).into());
        self.tier.store(range.map(block).collect()).await;
    }
}

impl Tier for PlacedTier {
    delegate!(tier: holds, store, discard, withdraw, expire_one, expire, usage);

    fn level(&self) -> Level {
        self.level
    }
    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let latency = self.latency;
        let per_block = self.per_block;
        let late = move |(n, loaded)| async move {
            tokio::time::sleep(if n == 0 { latency } else { per_block }).await;
            loaded
        };
        self.tier.load(fingerprint, hashes).enumerate().then(late).boxed()
    }
}

const fn ms(seconds_per_block_ms: u64) -> Recompute {
    Recompute { seconds_per_block: Some(seconds_per_block_ms as f64 / 1e3), deadline: None }
}

const UNTRACED: spans::Context = spans::Context::none();
const UNKNOWN: Recompute = Recompute { seconds_per_block: None, deadline: None };
