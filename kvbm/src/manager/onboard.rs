//! Onboarding: the load of one request's blocks into G1, before the engine is ready for them, while it waits, and while
//! it computes ([`phase`]).
//!
//! **Invariant: the engine waits only within a [`WaitBudget`](super::plan::WaitBudget).** Dropping an [`Onboarding`]
//! stops its reads; slots of blocks that were not registered are freed.

pub(super) mod load;
mod phase;

use super::block_manager::Inner;
use super::locate::{locate, located_len};
use crate::block::{Level, SequenceHash};
use crate::pool::{BlockRef, CachedBlocks};
use crate::table::BlockMap;
use futures::FutureExt;
use load::{LoadJob, Loading};
use parking_lot::Mutex;
use phase::{Phase, Wait, WaitStart};
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
/// long as that pays, and computes while later blocks still arrive. Dropping the handle stops the load.
#[must_use = "dropping it stops the loading"]
pub struct Onboarding {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    task: AbortOnDropHandle<()>,
}

/// The state that a request and its load task share.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Notified when the engine starts to wait.
    started: Notify,
    /// The engine's; notified when it should stop to wait.
    wake: Arc<Notify>,
}

struct State {
    phase: Phase,
    /// Number of leading blocks that the engine has computed, or is about to.
    computed: usize,
    /// `None` once the handle was dropped: then blocks that arrive are not held.
    held: Option<CachedBlocks>,
    loaded_from: BlockMap<Level>,
    /// The loaded blocks were queued for the tiers that may lack them.
    offloaded: bool,
}

impl Onboarding {
    pub(super) fn start(job: impl FnOnce(Arc<Shared>) -> LoadJob, wake: Arc<Notify>) -> Self {
        let state = State {
            phase: Phase::default(),
            computed: 0,
            held: Some(CachedBlocks::default()),
            loaded_from: BlockMap::default(),
            offloaded: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), started: Notify::new(), wake });
        let job = job(shared.clone());
        let inner = job.inner.clone();
        let task = tokio::spawn(async move {
            let proceed = ProceedOnDrop(&job);
            if AssertUnwindSafe(load(&job)).catch_unwind().await.is_err() {
                job.inner.core.poison("onboarding");
            }
            drop(proceed);
        });
        Self { inner, shared, task: AbortOnDropHandle::new(task) }
    }

    /// The engine could compute these blocks now, and waits while [`Onboarding::should_wait`].
    pub fn start_waiting(&self) {
        self.shared.state.lock().phase.start_waiting(Instant::now());
        self.shared.started.notify_one();
    }

    /// Whether waiting for blocks is expected to be faster than computing them.
    pub fn should_wait(&self) -> bool {
        self.shared.phase() != Phase::Computing
    }

    /// The engine has computed, or is about to compute, `blocks` of the requested blocks, counted from the first.
    pub fn advance(&self, blocks: usize) {
        let mut state = self.shared.state.lock();
        state.computed = state.computed.max(blocks);
    }

    /// Stops the load, and waits until its task has ended.
    pub(super) async fn stop(mut self) {
        self.task.abort();
        // The error of an aborted task.
        let _ = (&mut self.task).await;
    }

    /// Number of blocks that this handle holds.
    pub fn held_blocks(&self) -> usize {
        self.shared.state.lock().held.as_ref().map_or(0, CachedBlocks::len)
    }

    /// The tier from which a block was loaded; `None` when it was not loaded for this request.
    pub fn loaded_from(&self, hash: &SequenceHash) -> Option<Level> {
        self.shared.state.lock().loaded_from.get(hash).copied()
    }
}

impl Drop for Onboarding {
    /// Releases the loaded blocks at once, for requests that need the slots: the task is only aborted later.
    fn drop(&mut self) {
        self.shared.offload(&self.inner);
        self.shared.release();
    }
}

impl Shared {
    pub(super) fn phase(&self) -> Phase {
        self.state.lock().phase
    }

    /// Resolves when the engine waits, with the time since when it does.
    pub(super) async fn started(&self) -> Instant {
        loop {
            let since = self.state.lock().phase.waiting_since();
            match since {
                Some(since) => return since,
                None => self.started.notified().await,
            }
        }
    }

    /// The engine is to wait for the head of a plan.
    pub(super) fn wait_for(&self, wait: Wait) {
        self.state.lock().phase.wait_for(wait);
    }

    /// The engine should wait no longer.
    pub(super) fn proceed(&self) {
        if self.state.lock().phase.proceed() {
            self.wake.notify_one();
        }
    }

    pub(super) fn computed(&self) -> usize {
        self.state.lock().computed
    }

    /// Holds blocks until the handle is dropped.
    pub(super) fn hold(&self, blocks: CachedBlocks) {
        let mut state = self.state.lock();
        if let Some(held) = &mut state.held {
            held.extend(blocks);
        }
    }

    fn release(&self) {
        let held = self.state.lock().held.take();
        drop(held);
    }

    /// Notes the tiers from which blocks were loaded, before the blocks can be found.
    pub(super) fn record_levels(&self, blocks: impl Iterator<Item = (SequenceHash, Level)>) {
        self.state.lock().loaded_from.extend(blocks);
    }

    /// Queues the loaded blocks for the tiers that may lack them, once. Blocks from G2 are in G2; all others go to G2
    /// and from there to the tiers below.
    pub(super) fn offload(&self, inner: &Inner) {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.offloaded, true) {
            return;
        }
        let Some(held) = &state.held else { return };
        let hashes: Vec<_> = held.iter().map(BlockRef::hash).collect();
        inner.offload(held, |at| state.loaded_from.get(&hashes[at]).is_some_and(|level| *level != Level::G2));
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
    let LoadJob { inner, hashes, shared, .. } = job;
    let (mut ready, mut start) = (0, None);
    let prefetch = prefetch_permit(job).await;
    loop {
        let held = inner.core.pool.lookup(&hashes[ready..]);
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
            // Blocks without a free slot would be read in vain, by each request that wants them.
            let limit = prefetch.as_ref().map_or(0, SemaphorePermit::num_permits).min(inner.core.pool.available());
            let end = hashes.len().min(ready + limit);
            (locate(&inner.core, &job.sources, &hashes[ready..end], Instant::now()), None)
        };
        let wanted = &hashes[ready..ready + located_len(&located)];
        let claim = match plan {
            None if wanted.is_empty() => {
                shared.started().await;
                continue;
            }
            Some((_, plan)) if plan.head + plan.tail == 0 => return,
            // Tail blocks that another load claimed are found in G1 when the engine gets there.
            Some((_, plan)) if plan.head == 0 => Ok(inner.inflight.claim_rest(wanted)),
            _ => inner.inflight.claim(wanted),
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
    let blocks = job.hashes.len().min(job.inner.max_prefetch_blocks) as u32;
    tokio::select! {
        biased;
        _ = job.shared.started() => None,
        permit = job.inner.prefetch_blocks.acquire_many(blocks) => permit.ok(),
    }
}
