//! Blocks on their way down: one [`Lane`] per tier, bounded, in batches, away from the async threads.
//!
//! ```text
//!   register ──▶ lane to G2 ──▶ copied from the device, sealed ──┬──▶ lane to G3 ──▶ stored, from G2's memory
//!                                                                └──▶ lane to G4 ──▶ stored, from G2's memory
//! ```
//!
//! A lane queues names, not blocks: what waits pins nothing, and an allocation never waits for a slow disk. A block that
//! was given up before its turn is dropped and counted, like one that found the queue full. It is held only while its
//! batch is copied or stored.
//!
//! A lane that panics poisons the manager ([`Core::poison`]).

use super::Core;
use crate::block::Block;
use crate::host::HostTier;
use crate::metrics::Direction;
use crate::tier::{StoreError, Tier};
use crate::{Level, SequenceHash};
use futures::FutureExt;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
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
    jobs: mpsc::Sender<Job>,
}

enum Job {
    Block(SequenceHash),
    /// Dropped when everything before it is done.
    Mark(mpsc::Sender<Infallible>),
}

/// What a lane takes at once.
struct Batch {
    names: Vec<SequenceHash>,
    marks: Vec<mpsc::Sender<Infallible>>,
}

/// Bytes in one batch: what a tier writes in one go, twice the smallest object worth storing.
const BATCH_BYTES: usize = 16 << 20;

/// What a batch for a store that others share may take, of large blocks: one object.
const SHARED_BYTES: usize = 128 << 20;

/// How long a tier's lane waits for a batch to fill. Decoding finishes blocks one by one; a tenth of a second collects
/// them and is far below the two seconds in which others may expect to see them.
const LINGER: Duration = Duration::from_millis(100);

/// A batch for a store that others share costs an object and a manifest, whatever is in it. With so many blocks these are few
/// for each. Smaller ones are bounded: several in a row, as a prompt or a few make them, and then one for each such time, most
/// of it spent waiting for more. So what comes after a pause goes at once, and a trickle goes in batches; a process that dies
/// takes no more than these along, and they can be computed again.
const ENOUGH: usize = 64;
const SMALL: f64 = 8.0;
const TRICKLE: Duration = Duration::from_secs(30);

/// A store that takes longer has failed: the lane goes on without its blocks.
const STORE_LIMIT: Duration = Duration::from_mins(1);

/// A busy tier is offered the same blocks this often, with doubling pauses: six seconds in all.
const TRIES: u32 = 7;
const PAUSE: Duration = Duration::from_millis(100);

impl Lane {
    /// The lane to G2, whose blocks go on to the lanes below it.
    pub(super) fn to_host(core: Arc<Core>, below: Vec<Offers>) -> Self {
        Self::spawn(&core.clone(), Level::G2, async move |mut jobs| {
            let size = Linger::No.batch_blocks(&core);
            while let Some(batch) = next(&mut jobs, size, &mut Linger::No).await {
                let copying = core.clone();
                let kept = blocking(move || copying.copy_to_host(batch.names)).await;
                for below in &below {
                    below.offer(&core, &kept);
                }
            }
        })
    }

    /// The lane to a tier below, `core.tiers[tier]`.
    pub(super) fn to_tier(core: Arc<Core>, tier: usize) -> Self {
        let level = core.tiers[tier].level();
        Self::spawn(&core.clone(), level, async move |mut jobs| {
            let (mut failing, mut linger) = (false, Linger::at(level));
            let size = linger.batch_blocks(&core);
            while let Some(batch) = next(&mut jobs, size, &mut linger).await {
                let wanted = batch.names.len();
                let failed = core.store_in(tier, batch.names).await;
                // An outage is told twice, at its beginning and its end; the counter tells how much it cost.
                match &failed {
                    Some(error) if !failing => tracing::warn!(tier = %level, wanted, %error, "blocks were not stored"),
                    None if failing => tracing::info!(tier = %level, "blocks are stored again"),
                    _ => {}
                }
                failing = failed.is_some();
            }
        })
    }

    pub(super) fn offers(&self) -> &Offers {
        &self.offers
    }

    fn spawn<F>(core: &Arc<Core>, level: Level, work: impl FnOnce(mpsc::Receiver<Job>) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        // As many as can be read from memory: a longer queue would hold names of blocks that are gone.
        let host = core.host.as_ref().map_or(0, HostTier::capacity);
        let (sender, jobs) = mpsc::channel(core.pool.capacity().max(host).max(1));
        let (work, core) = (work(jobs), core.clone());
        let task = tokio::spawn(async move {
            if AssertUnwindSafe(work).catch_unwind().await.is_err() {
                core.poison(level.name());
            }
        });
        Self { offers: Offers { level, jobs: sender }, _task: AbortOnDropHandle::new(task) }
    }
}

impl Offers {
    /// Queues the blocks, or counts those for which there is no room.
    pub(super) fn offer(&self, core: &Core, names: &[SequenceHash]) {
        let refused = match self.jobs.try_reserve_many(names.len()) {
            Ok(places) => {
                places.zip(names).for_each(|(place, name)| place.send(Job::Block(*name)));
                0
            }
            // As many as there is room for.
            Err(_) => names.iter().filter(|name| self.jobs.try_send(Job::Block(**name)).is_err()).count(),
        };
        core.metrics.offload_dropped(self.level, refused);
    }

    /// Resolves when everything queued so far is done, or the lane is gone.
    pub(super) async fn flush(&self) {
        let (mark, mut done) = mpsc::channel(1);
        // An error means that the lane is gone, and the mark with it.
        let _ = self.jobs.send(Job::Mark(mark)).await;
        done.recv().await;
    }
}

/// How long a lane waits for more than one block.
enum Linger {
    /// Not at all.
    No,
    /// For a moment.
    Briefly,
    /// For a moment while so many small batches are left; then longer.
    Thriftily { left: f64, last: Option<Instant> },
}

impl Linger {
    fn at(level: Level) -> Self {
        match level {
            Level::Pod | Level::G4 => Self::Thriftily { left: SMALL, last: None },
            _ => Self::Briefly,
        }
    }

    fn batch_blocks(&self, core: &Core) -> usize {
        let block = core.device.block_bytes().max(1);
        let bytes = match self {
            Self::Thriftily { .. } => BATCH_BYTES.max((ENOUGH * block).min(SHARED_BYTES)),
            Self::No | Self::Briefly => BATCH_BYTES,
        };
        // At most a quarter of what a batch is read from, so that a small pool stays usable meanwhile.
        let source = core.host.as_ref().map_or(core.pool.capacity(), |host| host.capacity().min(core.pool.capacity()));
        (bytes / block).min(source / 4).max(1)
    }

    /// A batch begins.
    fn begin(&mut self, now: Instant) {
        if let Self::Thriftily { left, last: Some(last) } = self {
            let pause = now.saturating_duration_since(*last);
            *left = (*left + pause.as_secs_f64() / TRICKLE.as_secs_f64()).min(SMALL);
        }
    }

    /// Until when to wait, with so many blocks of which the first came at `first`.
    fn until(&self, first: Instant, blocks: usize) -> Instant {
        match self {
            Self::No => first,
            Self::Thriftily { left, .. } if blocks < ENOUGH => {
                first + LINGER.max(TRICKLE.mul_f64((1.0 - left).max(0.0)))
            }
            Self::Briefly | Self::Thriftily { .. } => first + LINGER,
        }
    }

    /// A batch goes.
    fn end(&mut self, now: Instant, blocks: usize) {
        if let Self::Thriftily { left, last } = self {
            *last = Some(now);
            *left = (*left - f64::from(u8::from(blocks < ENOUGH))).max(0.0);
        }
    }
}

/// Waits for blocks, then for more of them.
async fn next(jobs: &mut mpsc::Receiver<Job>, size: usize, linger: &mut Linger) -> Option<Batch> {
    let mut taken = Vec::with_capacity(size);
    if jobs.recv_many(&mut taken, size).await == 0 {
        return None;
    }
    let first = Instant::now();
    linger.begin(first);
    // Somebody who waits for a mark does not want to linger.
    while taken.len() < size && !taken.iter().any(|job| matches!(job, Job::Mark(_))) {
        let (left, until) = (size - taken.len(), linger.until(first, taken.len()));
        if until == first {
            break;
        }
        match time::timeout_at(until, jobs.recv_many(&mut taken, left)).await {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    let mut batch = Batch { names: Vec::with_capacity(taken.len()), marks: Vec::new() };
    for job in taken {
        match job {
            Job::Block(name) => batch.names.push(name),
            Job::Mark(mark) => batch.marks.push(mark),
        }
    }
    linger.end(Instant::now(), batch.names.len());
    Some(batch)
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
    fn copy_to_host(&self, names: Vec<SequenceHash>) -> Vec<SequenceHash> {
        let Some(host) = &self.host else { return names };
        let wanted = names.len();
        let (mut kept, missing) = host.sort(&names);
        let (start, before) = (Instant::now(), kept.len());
        let held = self.pool.present(&missing);
        kept.extend(host.fill(&held, |slot, into, seen| self.device.read_seen(slot, into, seen)));
        self.metrics.offload_dropped(Level::G2, wanted - kept.len());
        if kept.len() > before {
            let bytes = (kept.len() - before) * self.device.block_bytes();
            self.metrics.moved(Level::G2, Direction::Offload, bytes as u64, start.elapsed());
        }
        kept
    }

    /// Stores blocks that the tier does not hold, from memory. The last error, if there was one.
    async fn store_in(self: &Arc<Self>, tier: usize, mut names: Vec<SequenceHash>) -> Option<StoreError> {
        let (tier, fingerprint) = (self.tiers[tier].clone(), self.device.fingerprint());
        names.retain(|name| tier.holds(fingerprint, &[*name]) == 0);
        let (reading, wanted) = (self.clone(), names.len());
        let blocks: Vec<Block> = blocking(move || reading.in_memory(&names).into_iter().flatten().collect()).await;
        self.metrics.offload_dropped(tier.level(), wanted - blocks.len());
        if blocks.is_empty() {
            return None;
        }
        let start = Instant::now();
        let (stored, refused, error) = match time::timeout(STORE_LIMIT, store(&*tier, blocks.clone())).await {
            Ok(answer) => answer,
            Err(late) => (0, blocks.len(), Some(StoreError::Io(late.into()))),
        };
        self.metrics.offload_dropped(tier.level(), refused);
        self.metrics.moved(tier.level(), Direction::Offload, stored, start.elapsed());
        error
    }
}

/// Offers blocks until the tier is no longer busy. Bytes stored, blocks not stored, and why.
async fn store(tier: &dyn Tier, mut blocks: Vec<Block>) -> (u64, usize, Option<StoreError>) {
    let (mut bytes, mut refused, mut failure) = (0, 0, None);
    for attempt in 0..TRIES {
        if attempt > 0 {
            time::sleep(PAUSE * 2_u32.pow(attempt - 1)).await;
        }
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
