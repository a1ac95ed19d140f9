//! Blocks on their way down: one [`Lane`] per tier, bounded, in batches, away from the async threads.
//!
//! ```text
//!   register ──▶ lane to G2 ──▶ copied from the device, sealed ──┬──▶ lane to G3 ──▶ stored, from G2's memory
//!                                                                └──▶ lane to G4 ──▶ stored, from G2's memory
//! ```
//!
//! A lane queues names, not blocks: what waits pins nothing, and an allocation never waits for a slow disk. A block that
//! was given up before its turn is dropped and counted, like one for which there was no room. It is held only while its
//! batch is copied or stored. Cache domains take turns, and each pays for its own flood ([`fair_queue`]).
//!
//! A lane that panics poisons the manager ([`Core::poison`]).

mod batching;
mod fair_queue;
mod queue;

use super::Core;
use crate::block::{Block, Level};
use crate::metrics::Direction;
use crate::pool::HostTier;
use crate::table::NameSet;
use crate::tier::{Shares, StoreError, Tier};
use batching::Linger;
pub(super) use fair_queue::Offer;
use futures::FutureExt;
use queue::Queue;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{self, Instant};
use tokio_util::task::AbortOnDropHandle;

/// The way to one tier. Dropping it stops the work.
pub(super) struct Lane {
    offers: Offers,
    _task: AbortOnDropHandle<()>,
}

/// Where blocks are offered for one tier.
#[derive(Clone)]
pub(super) struct Offers {
    level: Level,
    queue: Arc<Queue>,
}

/// A store that takes longer has failed: the lane goes on without its blocks.
const STORE_LIMIT: Duration = Duration::from_mins(1);

/// A busy tier is offered the same blocks this often, with doubling pauses: six seconds in all.
const TRIES: u32 = 7;
const PAUSE: Duration = Duration::from_millis(100);

impl Lane {
    /// The lane to G2, whose blocks go on to the lanes below it.
    pub(super) fn to_host(core: Arc<Core>, below: Vec<Offers>) -> Self {
        Self::spawn(&core.clone(), Level::G2, async move |queue| {
            let size = Linger::No.batch_blocks(&core);
            loop {
                let batch = queue.next(size, &mut Linger::No).await;
                let copying = core.clone();
                let kept = blocking(move || copying.copy_to_host(batch.offers)).await;
                for below in &below {
                    below.offer(&core, &kept);
                }
            }
        })
    }

    /// The lane to a tier below, `core.tiers[tier]`.
    pub(super) fn to_tier(core: Arc<Core>, tier: usize) -> Self {
        let level = core.tiers[tier].level();
        Self::spawn(&core.clone(), level, async move |queue| {
            let (mut failing, mut linger) = (false, Linger::at(level));
            let size = linger.batch_blocks(&core);
            loop {
                let batch = queue.next(size, &mut linger).await;
                let wanted = batch.offers.len();
                let failed = core.store_in(tier, batch.offers).await;
                // An outage is told twice, at its beginning and its end; the counter tells how much it cost.
                match &failed {
                    Some(error) if !failing => {
                        tracing::warn!(tier = %level, blocks = wanted, %error, "cannot store blocks");
                    }
                    None if failing => tracing::info!(tier = %level, "storing blocks works again"),
                    _ => {}
                }
                failing = failed.is_some();
            }
        })
    }

    pub(super) fn offers(&self) -> &Offers {
        &self.offers
    }

    fn spawn<F>(core: &Arc<Core>, level: Level, work: impl FnOnce(Arc<Queue>) -> F) -> Self
    where
        F: Future<Output = Infallible> + Send + 'static,
    {
        // As many as can be read from memory: a longer queue would hold names of blocks that are gone.
        let host = core.host.as_ref().map_or(0, HostTier::capacity);
        let queue = Arc::new(Queue::new(core.pool.capacity().max(host).max(1)));
        let (work, core, closes) = (work(queue.clone()), core.clone(), queue.closed_on_drop());
        let task = tokio::spawn(async move {
            if AssertUnwindSafe(work).catch_unwind().await.is_err() {
                core.poison(level.name());
            }
            drop(closes);
        });
        Self { offers: Offers { level, queue }, _task: AbortOnDropHandle::new(task) }
    }
}

impl Offers {
    /// Queues the blocks, and counts those that are forgotten for want of room.
    pub(super) fn offer(&self, core: &Core, offers: &[Offer]) {
        core.metrics.offload_dropped(self.level, self.queue.push(offers));
    }

    /// Weighs domains by what they are promised, from now on.
    pub(super) fn weigh(&self, shares: &Shares) {
        self.queue.weigh(shares);
    }

    /// Resolves when everything queued so far is done or forgotten, or the lane is gone.
    pub(super) async fn flush(&self) {
        self.queue.flush().await;
    }
}

/// Runs on a blocking thread; a panic there is a panic here.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime is shutting down, and so is this task.
            Err(_) => std::future::pending().await,
        },
    }
}

impl Core {
    /// Copies blocks from the device into G2 and seals them. Answers with those that are there now.
    fn copy_to_host(&self, mut offers: Vec<Offer>) -> Vec<Offer> {
        let Some(host) = &self.host else { return offers };
        let wanted = offers.len();
        let names: Vec<_> = offers.iter().map(|offer| offer.name).collect();
        let (mut kept, missing) = host.sort(&names);
        // Before the blocks are looked up: what is purged meanwhile must not come back.
        let since = host.purges();
        let (start, before) = (Instant::now(), kept.len());
        let held = self.pool.present(&missing);
        kept.extend(host.fill(&held, since, |slot, into, seen| self.device.read_seen(slot, into, seen)));
        self.metrics.offload_dropped(Level::G2, wanted - kept.len());
        if kept.len() > before {
            let bytes = (kept.len() - before) * self.device.block_bytes();
            self.metrics.moved(Level::G2, Direction::Offload, bytes as u64, start.elapsed());
        }
        if kept.len() < wanted {
            let kept: NameSet = kept.into_iter().collect();
            offers.retain(|offer| kept.contains(&offer.name));
        }
        offers
    }

    /// Stores blocks that the tier does not hold, from memory. The last error, if there was one.
    async fn store_in(self: &Arc<Self>, tier: usize, offers: Vec<Offer>) -> Option<StoreError> {
        let (tier, fingerprint) = (self.tiers[tier].clone(), self.device.fingerprint());
        let mut names: Vec<_> = offers.iter().map(|offer| offer.name).collect();
        names.retain(|name| tier.holds(fingerprint, &[*name]) == 0);
        // Before the blocks are read: what is purged meanwhile must not be stored any more.
        let since = self.pool.purges();
        let (reading, wanted) = (self.clone(), names.len());
        let blocks: Vec<Block> = blocking(move || reading.in_memory(&names).into_iter().flatten().collect()).await;
        self.metrics.offload_dropped(tier.level(), wanted - blocks.len());
        if blocks.is_empty() {
            return None;
        }
        let start = Instant::now();
        let current = |block: &Block| !self.pool.is_purged(block.header.domain, since);
        let (stored, refused, error) = match time::timeout(STORE_LIMIT, store(&*tier, blocks.clone(), current)).await {
            Ok(answer) => answer,
            Err(late) => (0, blocks.len(), Some(StoreError::Io(late.into()))),
        };
        self.metrics.offload_dropped(tier.level(), refused);
        self.metrics.moved(tier.level(), Direction::Offload, stored, start.elapsed());
        error
    }
}

/// Offers blocks until the tier is no longer busy, as long as they are `current`. Bytes stored, blocks not stored, and why.
async fn store(
    tier: &dyn Tier,
    mut blocks: Vec<Block>,
    current: impl Fn(&Block) -> bool,
) -> (u64, usize, Option<StoreError>) {
    let (mut bytes, mut refused, mut failure) = (0, 0, None);
    for attempt in 0..TRIES {
        if attempt > 0 {
            time::sleep(PAUSE * 2_u32.pow(attempt - 1)).await;
        }
        refused += blocks.extract_if(.., |block| !current(block)).count();
        let answers = tier.store(blocks.clone()).await;
        let mut busy = Vec::new();
        for (block, answer) in blocks.into_iter().zip(answers) {
            match answer {
                Ok(()) => bytes += block.header.length,
                Err(StoreError::Busy) => busy.push(block),
                Err(error) => {
                    refused += 1;
                    failure = Some(error);
                }
            }
        }
        blocks = busy;
        if blocks.is_empty() {
            return (bytes, refused, failure);
        }
    }
    (bytes, refused + blocks.len(), Some(failure.unwrap_or(StoreError::Busy)))
}
