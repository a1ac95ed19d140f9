//! One load in progress: concurrent streams of all tiers; blocks are verified and written on blocking threads, or by
//! the tasks that have read them ([`inbox`]), and registered at once. The phases are those of [`super::phase`].
//!
//! While the engine waits, the plan is made again every [`WaitBudget::BASE`] with what the tiers have shown meanwhile:
//! the rest of a tier that was not measured before, or that has become slow, may better be loaded from the end.
//!
//! A block that one tier fails to deliver is requested from the next. Dropping a load stops its reads, and still
//! records the measurements: a tier that hangs is detected even by clients that do not wait for it.

mod inbox;
mod requests;
mod writes;

use super::job::LoadJob;
use super::phase::{Phase, Wait, WaitStart};
use crate::block::{Block, Level};
use crate::manager::inflight::LoadClaim;
use crate::manager::locate::{Located, located_len};
use crate::manager::plan::{Plan, WaitBudget};
use futures::stream::{BoxStream, FuturesUnordered, SelectAll, StreamExt};
use inbox::Written;
use requests::{Answer, SourceStats};
use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use writes::{MAX_CONCURRENT_WRITES, WRITE_BYTES, WriteResult};

/// A timer that does not fire.
const FOREVER: Duration = Duration::from_hours(24 * 365);

/// One load in progress.
pub(super) struct Loading<'a> {
    job: &'a LoadJob,
    begun: Instant,
    streams: SelectAll<BoxStream<'static, Answer>>,
    writes: FuturesUnordered<JoinHandle<Vec<WriteResult>>>,
    /// Number of blocks in `writes` and `arrived`.
    writing: usize,
    /// Blocks that were delivered and are not being written yet.
    delivered: Vec<Delivered>,
    /// Blocks that were written by the tasks that have read them.
    written: Arc<Written>,
    /// Those of them that were received and are not registered yet.
    arrived: Vec<WriteResult>,
    /// The status of each of the job's blocks.
    statuses: Vec<BlockStatus>,
    /// Number of leading blocks that are in G1.
    ready_prefix: usize,
    /// When the last block was registered.
    last_arrival: Instant,
    /// Per source: the blocks to request from it, in order.
    unrequested: Vec<VecDeque<usize>>,
    /// Per source: the blocks to request from it because another source failed.
    retries: Vec<Vec<usize>>,
    /// Per source: what it has answered so far.
    stats: Vec<SourceStats>,
    claim: LoadClaim<'a>,
}

/// The status of one block in a load.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BlockStatus {
    /// Not requested from any source.
    Unrequested,
    /// Requested from this source.
    Requested(usize),
    /// In G1.
    Ready,
    /// No source delivers it.
    Unavailable,
}

/// A block that a source delivered, not verified yet.
struct Delivered {
    source: usize,
    index: usize,
    block: Block,
}

impl<'a> Loading<'a> {
    /// Begins to load the located blocks from `ready` on: all of them, or those of `plan`.
    pub(super) fn new(
        job: &'a LoadJob,
        claim: LoadClaim<'a>,
        ready: usize,
        located: &Located,
        plan: Option<(WaitStart, Plan)>,
    ) -> Self {
        let begun = Instant::now();
        let sources = job.sources.len();
        let mut statuses = vec![BlockStatus::Unrequested; job.hashes.len()];
        statuses[..ready].fill(BlockStatus::Ready);
        let mut loading = Self {
            job,
            begun,
            streams: SelectAll::new(),
            writes: FuturesUnordered::new(),
            writing: 0,
            delivered: Vec::new(),
            written: Arc::default(),
            arrived: Vec::new(),
            statuses,
            ready_prefix: ready,
            last_arrival: begun,
            unrequested: vec![VecDeque::new(); sources],
            retries: vec![Vec::new(); sources],
            stats: vec![SourceStats::default(); sources],
            claim,
        };
        loading.enqueue(ready, located);
        if let Some((start, plan)) = plan {
            loading.follow_plan(start, plan, ready + located_len(located));
        }
        loading
    }

    /// Loads blocks until none is left to load.
    pub(super) async fn run(&mut self) {
        let batch = (WRITE_BYTES / self.job.onboarder.core.device.block_bytes().max(1)).max(1);
        let limit = sleep_until(self.begun + FOREVER);
        tokio::pin!(limit);
        loop {
            self.register_written();
            self.proceed_if_ready();
            self.request();
            if !self.delivered.is_empty() && self.writes.len() < MAX_CONCURRENT_WRITES {
                self.write();
            }
            if self.is_done() {
                return;
            }
            let until = self.limit();
            if limit.deadline() != until {
                limit.as_mut().reset(until);
            }
            tokio::select! {
                biased;
                // First, so that sources that always have an answer do not delay it.
                () = &mut limit => self.on_limit(),
                at = self.job.shared.started(), if self.phase().is_unplanned() => {
                    // From now on the engine waits: plan for the shortest time to its first token.
                    self.replan(WaitStart { at, ready: self.ready_prefix });
                }
                Some(written) = self.writes.next() => match written {
                    Ok(written) => self.register(written),
                    Err(error) => match error.try_into_panic() {
                        Ok(panic) => resume_unwind(panic),
                        // The runtime is shutting down.
                        Err(_) => return,
                    },
                },
                () = self.written.notified(), if !self.streams.is_empty() => {}
                answer = self.streams.next(), if !self.streams.is_empty() && self.delivered.len() < batch => {
                    // `None`: all calls have ended, and the load may be done.
                    if let Some(answer) = answer {
                        self.receive(answer);
                    }
                }
            }
        }
    }

    fn phase(&self) -> Phase {
        self.job.shared.phase()
    }

    /// Puts located blocks, counted from `ready`, on the lists of their sources.
    fn enqueue(&mut self, ready: usize, located: &Located) {
        let unrequested = |index: &usize| self.statuses[*index] == BlockStatus::Unrequested;
        for (source, range) in located {
            self.unrequested[*source].extend((range.start + ready..range.end + ready).filter(unrequested));
        }
    }

    /// Plans again from here on.
    fn replan(&mut self, start: WaitStart) {
        let now = Instant::now();
        // Blocks in G1 are held, blocks that are being written have a slot: neither needs a free one.
        let ready = self.statuses[self.ready_prefix..].iter().filter(|status| **status == BlockStatus::Ready).count();
        let (located, plan) = {
            // No slot may be allocated for an arriving block between this count and that of the free slots.
            let slots = self.written.slots();
            let owned = ready + self.writing + slots.count();
            self.job.plan(self.ready_prefix, owned, now, |source| self.speed(source, now))
        };
        let end = self.ready_prefix + located_len(&located);
        self.unrequested.iter_mut().for_each(VecDeque::clear);
        let (goal, tail) = (self.ready_prefix + plan.head, end - plan.tail);
        if self.statuses[goal..tail].iter().any(|status| matches!(status, BlockStatus::Requested(_))) {
            // More was requested than is worth loading, in an order for an engine that does not wait.
            self.cancel();
            self.unrequested.iter_mut().for_each(VecDeque::clear);
        }
        self.enqueue(self.ready_prefix, &located);
        // Before the engine waits, a request claims no more than its share of G1.
        self.claim.extend(&self.job.hashes[self.ready_prefix..end]);
        self.follow_plan(start, plan, end);
    }

    fn follow_plan(&mut self, start: WaitStart, plan: Plan, end: usize) {
        let goal = self.ready_prefix + plan.head;
        let tail = end - plan.tail;
        self.unrequested.iter_mut().for_each(|list| list.retain(|index| *index < goal || *index >= tail));
        let review = Instant::now() + WaitBudget::BASE;
        self.job.shared.wait_for(Wait { start, goal, budget: plan.budget, review });
    }

    /// Ends the wait when the head is in G1, or when its next block cannot be loaded.
    fn proceed_if_ready(&mut self) {
        if let Phase::Waiting(Wait { goal, .. }) = self.phase()
            && (self.ready_prefix >= goal || self.statuses[self.ready_prefix] == BlockStatus::Unavailable)
        {
            self.job.shared.proceed();
        }
    }

    /// The plan is to be reviewed, or the wait budget is used up.
    fn on_limit(&mut self) {
        let Phase::Waiting(Wait { start, budget, .. }) = self.phase() else { return };
        if Instant::now() < start.limit(budget, self.ready_prefix, self.last_arrival) {
            return self.replan(start);
        }
        // Counted for each source that has not answered everything.
        for source in (0..self.stats.len()).filter(|source| self.stats[*source].has_outstanding()) {
            self.job.onboarder.core.metrics.deadline_missed(self.level(source));
        }
        if self.stats.iter().any(|stats| stats.answered > 0) {
            // Slow: from now on load from the end. A source that has not answered at all is left to its requests.
            self.cancel();
        }
        self.job.shared.proceed();
    }

    /// When the phase ends without further answers.
    fn limit(&self) -> Instant {
        match self.phase() {
            Phase::Waiting(Wait { start, budget, review, .. }) => {
                start.limit(budget, self.ready_prefix, self.last_arrival).min(review)
            }
            Phase::Prefetching | Phase::Started(_) | Phase::Computing => self.begun + FOREVER,
        }
    }

    /// Whether no block is under way or to be requested. Before the engine waits, the latter may change.
    fn is_done(&self) -> bool {
        let met = self.job.shared.computed() >= self.statuses.len();
        let idle = self.streams.is_empty() && self.delivered.is_empty() && self.writing == 0;
        !self.phase().is_unplanned() && (met || idle)
    }

    fn level(&self, source: usize) -> Level {
        self.job.sources[source].tier.level()
    }
}

impl Drop for Loading<'_> {
    /// Records measurements and counts, and offloads loaded blocks to tiers that lack them.
    fn drop(&mut self) {
        self.written.stop();
        self.record();
        self.job.shared.offload(&self.job.onboarder.offload);
    }
}
