//! The worker of one tier: takes batches from its queue, and copies or stores their blocks.

use super::batching::Batcher;
use super::fair_queue::OffloadRequest;
use super::queue::Queue;
use crate::block::{Block, Level};
use crate::blocking;
use crate::manager::shared::Core;
use crate::metrics::Direction;
use crate::pool::HostTier;
use crate::table::BlockSet;
use crate::tier::{Change, IoHealth, Quotas, StoreError, Tier};
use futures::FutureExt;
use spans::Kind;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{self, Instant};
use tokio_util::task::AbortOnDropHandle;

/// The task that offloads to one tier, and its queue. Dropping it stops the task.
pub(super) struct OffloadWorker {
    queue: OffloadQueue,
    _task: AbortOnDropHandle<()>,
}

/// A handle to the offload queue of one tier.
#[derive(Clone)]
pub(super) struct OffloadQueue {
    level: Level,
    queue: Arc<Queue>,
}

/// What the storing of a batch says about writes to the tier.
#[derive(Debug)]
pub(in crate::manager) enum BatchOutcome {
    /// Nothing: no block was written and none was refused. The tier has them already, or memory has them no more.
    Unwritten,
    /// Every block that was offered was written.
    Written,
    /// At least one block was not written.
    Failed(StoreError),
}

impl BatchOutcome {
    /// Records the outcome. A batch without a write neither begins nor ends an outage.
    pub(in crate::manager) fn record(&self, writes: &IoHealth) -> Change {
        match self {
            Self::Unwritten => Change::Same,
            Self::Written => writes.succeeded(),
            Self::Failed(error) => writes.failed(writes.begin(), error.to_string()),
        }
    }
}

/// A store that takes longer has failed: the worker goes on without its blocks.
const STORE_TIMEOUT: Duration = Duration::from_mins(1);

/// Number of attempts to store in a busy tier, and the first pause between them; pauses double, to six seconds in all.
const STORE_ATTEMPTS: u32 = 7;
const FIRST_PAUSE: Duration = Duration::from_millis(100);

impl OffloadWorker {
    /// The worker of G2, which queues its blocks for the workers `below`.
    pub(super) fn to_host(core: Arc<Core>, below: Vec<OffloadQueue>) -> Self {
        Self::spawn(&core.clone(), Level::G2, async move |queue| {
            let size = Batcher::Immediate.batch_blocks(&core);
            loop {
                let batch = queue.next(size, &mut Batcher::Immediate).await;
                let copying = core.clone();
                let stored = blocking(move || copying.copy_to_host(batch.requests)).await;
                for below in &below {
                    below.push(&core, &stored);
                }
            }
        })
    }

    /// The worker of a tier below, `core.tiers[tier]`.
    pub(super) fn to_tier(core: Arc<Core>, tier: usize) -> Self {
        let level = core.tiers[tier].level();
        Self::spawn(&core.clone(), level, async move |queue| {
            let (writes, mut batcher) = (IoHealth::default(), Batcher::at(level));
            let size = batcher.batch_blocks(&core);
            loop {
                let batch = queue.next(size, &mut batcher).await;
                let wanted = batch.requests.len();
                let outcome = core.store_in(tier, batch.requests).await;
                // Logged at the beginning and at the end of an outage; the counter shows the number of lost blocks.
                if outcome.record(&writes) == Change::Changed {
                    match &outcome {
                        BatchOutcome::Failed(error) => {
                            tracing::warn!(tier = %level, blocks = wanted, %error, "cannot store blocks");
                        }
                        BatchOutcome::Written => tracing::info!(tier = %level, "storing blocks works again"),
                        BatchOutcome::Unwritten => {}
                    }
                }
            }
        })
    }

    pub(super) fn queue(&self) -> &OffloadQueue {
        &self.queue
    }

    fn spawn<F>(core: &Arc<Core>, level: Level, work: impl FnOnce(Arc<Queue>) -> F) -> Self
    where
        F: Future<Output = Infallible> + Send + 'static,
    {
        // As many as fit into memory: a longer queue would contain hashes of evicted blocks.
        let host = core.host.as_ref().map_or(0, HostTier::capacity);
        let queue = Arc::new(Queue::new(core.pool.capacity().max(host).max(1)));
        let (work, core, close_on_drop) = (work(queue.clone()), core.clone(), queue.close_on_drop());
        let task = tokio::spawn(async move {
            if AssertUnwindSafe(work).catch_unwind().await.is_err() {
                core.poison(level.name());
            }
            drop(close_on_drop);
        });
        Self { queue: OffloadQueue { level, queue }, _task: AbortOnDropHandle::new(task) }
    }
}

impl OffloadQueue {
    pub(super) fn level(&self) -> Level {
        self.level
    }

    /// Queues blocks, and counts those that are dropped because the queue is full.
    pub(super) fn push(&self, core: &Core, requests: &[OffloadRequest]) {
        core.metrics.offload_dropped(self.level, self.queue.push(requests));
    }

    /// Sets the weights of domains that queue from now on.
    pub(super) fn set_weights(&self, quotas: &Quotas) {
        self.queue.set_weights(quotas);
    }

    /// Resolves when everything queued so far is stored or dropped, or when the worker has ended.
    pub(super) async fn flush(&self) {
        self.queue.flush().await;
    }
}

/// Runs `work` on a blocking thread, and passes a panic on.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match blocking::spawn(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime is shutting down, and so is this task.
            Err(_) => std::future::pending().await,
        },
    }
}

impl Core {
    /// Copies blocks from the device into G2, with headers and checksums. Returns the requests whose blocks are in G2
    /// now.
    fn copy_to_host(&self, mut requests: Vec<OffloadRequest>) -> Vec<OffloadRequest> {
        let Some(host) = &self.host else { return requests };
        let wanted = requests.len();
        let hashes: Vec<_> = requests.iter().map(|request| request.hash).collect();
        let (mut stored, missing) = host.partition(&hashes);
        // Before the blocks are looked up: a block purged meanwhile must not be inserted again.
        let since = host.purges();
        let (start, before) = (Instant::now(), stored.len());
        let held = self.pool.get_present(&missing);
        let copies =
            host.copy_from_device(&held, since, |slot, into, observe| self.device.read_observed(slot, into, observe));
        stored.extend(copies.resident);
        for hash in copies.corrupt {
            self.discard_corrupt_in_device(hash);
        }
        self.metrics.offload_dropped(Level::G2, wanted - stored.len());
        if stored.len() > before {
            let bytes = (stored.len() - before) * self.device.block_bytes();
            self.metrics.moved(Level::G2, Direction::Offload, bytes as u64, start.elapsed());
        }
        if stored.len() < wanted {
            let stored: BlockSet = stored.into_iter().collect();
            requests.retain(|request| stored.contains(&request.hash));
        }
        requests
    }

    /// Stores blocks that the tier does not hold, from memory.
    pub(in crate::manager) async fn store_in(
        self: &Arc<Self>,
        tier: usize,
        requests: Vec<OffloadRequest>,
    ) -> BatchOutcome {
        let (tier, fingerprint) = (self.tiers[tier].clone(), self.device.fingerprint());
        let mut hashes: Vec<_> = requests.iter().map(|request| request.hash).collect();
        hashes.retain(|hash| tier.holds(fingerprint, &[*hash]) == 0);
        // Before the blocks are read: a block purged meanwhile must not be stored.
        let since = self.pool.purges();
        let (reading, wanted) = (self.clone(), hashes.len());
        let blocks: Vec<Block> = blocking(move || reading.in_memory(&hashes).into_iter().flatten().collect()).await;
        self.metrics.offload_dropped(tier.level(), wanted - blocks.len());
        let offered = blocks.len();
        if offered == 0 {
            return BatchOutcome::Unwritten;
        }
        let start = Instant::now();
        let mut span = self.tracer.get().map(|tracer| tracer.root("offload", Kind::Internal, None)).unwrap_or_default();
        let current = |block: &Block| !self.pool.is_purged(block.header.domain, since);
        let (stored, rejected, error) = match time::timeout(STORE_TIMEOUT, store(&*tier, blocks.clone(), current)).await
        {
            Ok(answer) => answer,
            Err(elapsed) => (0, offered, Some(StoreError::Io(elapsed.into()))),
        };
        self.metrics.offload_dropped(tier.level(), rejected);
        self.metrics.moved(tier.level(), Direction::Offload, stored, start.elapsed());
        span.set("blockyard.tier", tier.level().name());
        span.set("blockyard.blocks", offered - rejected);
        span.set("blockyard.bytes", stored);
        match error {
            Some(error) => {
                span.fail(&error);
                BatchOutcome::Failed(error)
            }
            None if rejected < offered => BatchOutcome::Written,
            None => BatchOutcome::Unwritten,
        }
    }
}

/// Stores blocks, again while the tier is busy or down, as long as they are `current`. Returns the number of bytes
/// stored, the number of blocks not stored, and the last error.
async fn store(
    tier: &dyn Tier,
    mut blocks: Vec<Block>,
    current: impl Fn(&Block) -> bool,
) -> (u64, usize, Option<StoreError>) {
    let (mut bytes, mut rejected, mut failure, mut refusal) = (0, 0, None, StoreError::Busy);
    for attempt in 0..STORE_ATTEMPTS {
        if attempt > 0 {
            time::sleep(FIRST_PAUSE * 2_u32.pow(attempt - 1)).await;
        }
        rejected += blocks.extract_if(.., |block| !current(block)).count();
        let answers = tier.store(blocks.clone()).await;
        let mut busy = Vec::new();
        for (block, answer) in blocks.into_iter().zip(answers) {
            match answer {
                Ok(()) => bytes += block.header.length,
                Err(error @ (StoreError::Busy | StoreError::Unavailable(_))) => {
                    busy.push(block);
                    refusal = error;
                }
                Err(error) => {
                    rejected += 1;
                    failure = Some(error);
                }
            }
        }
        blocks = busy;
        if blocks.is_empty() {
            return (bytes, rejected, failure);
        }
    }
    (bytes, rejected + blocks.len(), Some(failure.unwrap_or(refusal)))
}
