//! The engine's handle to an onboarding, and the task that loads its blocks or follows another load of them.

use super::job::{LoadJob, Onboarder, Recompute};
use super::load::Loading;
use super::phase::{Phase, WaitStart};
use super::shared::Shared;
use crate::block::{Level, SequenceHash};
use crate::manager::locate::{locate, located_len};
use crate::manager::offload::OffloadWorkers;
use crate::manager::sources::Source;
use crate::pool::CachedBlocks;
use futures::FutureExt;
use spans::Context;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tokio::sync::{Notify, SemaphorePermit};
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

/// A load of one request's blocks into G1. Blocks that have arrived can be found by hash by all requests, and are held
/// by this handle.
///
/// The load begins at once, within a share of G1 that all requests have in common. The engine calls
/// [`Onboarding::start_waiting`] when it could begin to compute: from then on it waits for the leading blocks only as
/// long as that is faster than computing them, and computes while later blocks still arrive. Dropping the handle stops
/// the load.
#[must_use = "dropping it stops the loading"]
pub struct Onboarding {
    offload: Arc<OffloadWorkers>,
    shared: Arc<Shared>,
    task: AbortOnDropHandle<()>,
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

impl Onboarding {
    /// Begins to load `hashes`. `wake` is notified when the engine should not wait any more. `trace` gets the spans.
    pub(in crate::manager) fn start(
        onboarder: Arc<Onboarder>,
        sources: Vec<Source>,
        hashes: Vec<SequenceHash>,
        recompute: Recompute,
        wake: Arc<Notify>,
        trace: Context,
    ) -> Self {
        let shared = Arc::new(Shared::new(wake));
        let (offload, purges) = (onboarder.offload.clone(), onboarder.core.pool.purges());
        let job = LoadJob { onboarder, sources, hashes, recompute, shared: shared.clone(), purges, trace };
        let task = tokio::spawn(async move {
            let proceed = ProceedOnDrop(&job);
            if AssertUnwindSafe(load(&job)).catch_unwind().await.is_err() {
                job.onboarder.core.poison("onboarding");
            }
            drop(proceed);
        });
        Self { offload, shared, task: AbortOnDropHandle::new(task) }
    }

    /// The engine could compute these blocks now, and waits while [`Onboarding::should_wait`].
    pub fn start_waiting(&self) {
        self.shared.start_waiting();
    }

    /// Whether waiting for blocks is expected to be faster than computing them.
    pub fn should_wait(&self) -> bool {
        self.shared.phase() != Phase::Computing
    }

    /// The engine has computed, or is about to compute, `blocks` of the requested blocks, counted from the first.
    pub fn advance(&self, blocks: usize) {
        self.shared.advance(blocks);
    }

    /// The leading blocks that are in G1, held.
    fn result(&self, onboarder: &Onboarder, hashes: &[SequenceHash]) -> Onboarded {
        let blocks = onboarder.core.pool.lookup(hashes);
        let mut from = Vec::new();
        for block in &blocks {
            count(&mut from, self.loaded_from(&block.hash()).unwrap_or(Level::G1));
        }
        Onboarded { blocks, from }
    }

    /// Stops the load, and waits until its task has ended.
    pub(in crate::manager) async fn stop(mut self) {
        self.task.abort();
        // The error of an aborted task.
        let _ = (&mut self.task).await;
    }

    /// Number of blocks that this handle holds.
    pub fn held_blocks(&self) -> usize {
        self.shared.held_blocks()
    }

    /// The tier from which a block was loaded; `None` when it was not loaded for this request.
    pub fn loaded_from(&self, hash: &SequenceHash) -> Option<Level> {
        self.shared.loaded_from(hash)
    }
}

impl Drop for Onboarding {
    /// Releases the loaded blocks at once, for requests that need the slots: the task is only aborted later.
    fn drop(&mut self) {
        self.shared.offload(&self.offload);
        self.shared.release();
    }
}

/// Loads leading `hashes` into G1, and waits for no longer than computing them would take.
pub(in crate::manager) async fn onboard(
    onboarder: &Arc<Onboarder>,
    sources: Vec<Source>,
    hashes: &[SequenceHash],
    recompute: Recompute,
    trace: Context,
) -> Onboarded {
    let wake = Arc::new(Notify::new());
    let onboarding = Onboarding::start(onboarder.clone(), sources, hashes.to_vec(), recompute, wake.clone(), trace);
    onboarding.start_waiting();
    while onboarding.should_wait() {
        wake.notified().await;
    }
    let onboarded = onboarding.result(onboarder, hashes);
    onboarding.stop().await;
    onboarded
}

/// Loads leading `hashes` into G1 for a request that another engine computes meanwhile: computing is no alternative, so
/// this takes as long as the tier does. Blocks that have arrived stay cached when the future is dropped.
pub(in crate::manager) async fn prefetch(
    onboarder: &Arc<Onboarder>,
    sources: Vec<Source>,
    hashes: &[SequenceHash],
    trace: Context,
) -> Onboarded {
    let (recompute, wake) = (Recompute::default(), Arc::default());
    let mut onboarding = Onboarding::start(onboarder.clone(), sources, hashes.to_vec(), recompute, wake, trace);
    onboarding.start_waiting();
    // The error of a runtime that shuts down.
    let _ = (&mut onboarding.task).await;
    onboarding.result(onboarder, hashes)
}

/// Adds a block of a level to a list of consecutive blocks per level.
fn count(from: &mut Vec<(Level, usize)>, level: Level) {
    match from.last_mut() {
        Some((last, blocks)) if *last == level => *blocks += 1,
        _ => from.push((level, 1)),
    }
}

/// Lets the engine proceed when the task ends in any way.
struct ProceedOnDrop<'a>(&'a LoadJob);

impl Drop for ProceedOnDrop<'_> {
    fn drop(&mut self) {
        self.0.shared.proceed();
    }
}

/// Claims and loads the job's blocks, or follows another load of the same blocks until it can.
async fn load(job: &LoadJob) {
    let LoadJob { onboarder, hashes, shared, .. } = job;
    let (mut ready, mut start) = (0, None);
    let prefetch = prefetch_permit(job).await;
    loop {
        let held = onboarder.core.pool.lookup(&hashes[ready..]);
        ready += held.len();
        shared.hold(held);
        if start.is_none() {
            start = shared.started().now_or_never().map(|at| WaitStart { at, ready });
        }
        let (located, plan) = if let Some(start) = start {
            let now = Instant::now();
            let (located, plan) = job.plan(ready, 0, now, |source| job.sources[source].throughput.speed(now));
            (located, Some((start, plan)))
        } else {
            // Blocks without a free slot would be read and dropped, by each request that needs them.
            let limit = prefetch.as_ref().map_or(0, SemaphorePermit::num_permits).min(onboarder.core.pool.available());
            let end = hashes.len().min(ready + limit);
            (locate(&onboarder.core, &job.sources, &hashes[ready..end], Instant::now()), None)
        };
        let wanted = &hashes[ready..ready + located_len(&located)];
        let claim = match plan {
            None if wanted.is_empty() => {
                shared.started().await;
                continue;
            }
            Some((_, plan)) if plan.head + plan.tail == 0 => return,
            // Tail blocks that another load claimed are found in G1 when the engine gets there.
            Some((_, plan)) if plan.head == 0 => Ok(onboarder.inflight.claim_rest(wanted)),
            _ => onboarder.inflight.claim(wanted),
        };
        let mut progress = match claim {
            Ok(claim) => {
                let mut loading = Loading::new(job, claim, ready, &located, plan);
                return loading.run().await;
            }
            Err(progress) => progress,
        };
        // Another load brings them: wait as long as for an own load, and take over when the other one ends.
        let limit = plan.map(|(start, plan)| start.limit(plan.budget, ready, Instant::now()));
        tokio::select! {
            biased;
            () = sleep_until(limit.unwrap_or_else(Instant::now)), if limit.is_some() => return,
            _ = shared.started(), if start.is_none() => {}
            _ = progress.changed() => {}
        }
    }
}

/// A share of G1 to load into before the engine is ready, returned when this load ends. `None`: the engine was ready
/// first.
async fn prefetch_permit(job: &LoadJob) -> Option<SemaphorePermit<'_>> {
    let blocks = job.hashes.len().min(job.onboarder.max_prefetch_blocks) as u32;
    tokio::select! {
        biased;
        _ = job.shared.started() => None,
        permit = job.onboarder.prefetch_blocks.acquire_many(blocks) => permit.ok(),
    }
}
