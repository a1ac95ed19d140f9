//! Blocks on their way up, for one request: ahead of its turn, while it waits, and while it computes.
//!
//! **Invariant: nothing is waited for without [`super::plan::Patience`].** Dropping an [`Onboarding`] stops its reads; slots
//! of blocks that were not registered go back by themselves.

pub(super) mod load;

use super::Inner;
use super::locate::{extent, locate};
use crate::block::{Level, SequenceHash};
use crate::pool::{CachedBlocks, Held};
use crate::table::ByName;
use futures::FutureExt;
use load::{Job, Loading, Turn};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, SemaphorePermit};
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

/// The blocks of one request on their way into G1. What has arrived is found there by name, by everyone, and held by this.
///
/// It begins at once, within bounds that all requests share, and takes its time. At [`Onboarding::turn`] the engine could
/// begin to compute: from then on it waits for the leading blocks only as long as that pays, and computes while blocks
/// further back still arrive. Dropping it stops what is still under way.
#[must_use = "dropping it stops the loading"]
pub struct Onboarding {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    task: AbortOnDropHandle<()>,
}

/// What the request and its task tell each other.
pub(super) struct Shared {
    state: Mutex<State>,
    turned: Notify,
    /// Told when there is something new for the engine.
    wake: Arc<Notify>,
}

#[derive(Default)]
struct State {
    turn: Option<Instant>,
    /// The engine should not wait.
    go: bool,
    claimed: usize,
    held: CachedBlocks,
    from: ByName<Level>,
    /// What was loaded was offered to the tiers that may not have it.
    offered: bool,
    /// Nobody wants the blocks any more.
    over: bool,
}

impl Onboarding {
    pub(super) fn start(job: impl FnOnce(Arc<Shared>) -> Job, wake: Arc<Notify>) -> Self {
        let shared = Arc::new(Shared { state: Mutex::default(), turned: Notify::new(), wake });
        let job = job(shared.clone());
        let inner = job.inner.clone();
        let task = tokio::spawn(async move {
            let ended = Ended(&job);
            if AssertUnwindSafe(bring(&job)).catch_unwind().await.is_err() {
                job.inner.core.poison("onboarding");
            }
            drop(ended);
        });
        Self { inner, shared, task: AbortOnDropHandle::new(task) }
    }

    /// The engine has a place for the request now.
    pub fn turn(&self) {
        self.shared.lock().turn.get_or_insert_with(Instant::now);
        self.shared.turned.notify_one();
    }

    /// Whether the engine had better wait for blocks than compute.
    pub fn is_worth_waiting(&self) -> bool {
        !self.shared.lock().go
    }

    /// The engine has computed, or is about to, so many of the blocks, counted from the first that was asked for.
    pub fn claim(&self, blocks: usize) {
        let mut state = self.shared.lock();
        state.claimed = state.claimed.max(blocks);
    }

    /// Stops what is still under way.
    pub(super) async fn end(mut self) {
        self.task.abort();
        // An error says that it was stopped.
        let _ = (&mut self.task).await;
    }

    /// Blocks that it holds.
    pub fn held(&self) -> usize {
        self.shared.lock().held.len()
    }

    /// Which tier a block was loaded from; `None` when it was not loaded for this request.
    pub fn from(&self, name: &SequenceHash) -> Option<Level> {
        self.shared.lock().from.get(name).copied()
    }
}

impl Drop for Onboarding {
    /// Its task hears of it later: what came goes at once, for somebody may want the room.
    fn drop(&mut self) {
        self.shared.offload(&self.inner);
        self.shared.let_go();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resolves at the engine's turn: since when it is.
    pub(super) async fn turned(&self) -> Instant {
        loop {
            let turn = self.lock().turn;
            match turn {
                Some(turn) => return turn,
                None => self.turned.notified().await,
            }
        }
    }

    pub(super) fn claimed(&self) -> usize {
        self.lock().claimed
    }

    /// The engine should wait no longer.
    pub(super) fn go(&self) {
        if !std::mem::replace(&mut self.lock().go, true) {
            self.wake.notify_one();
        }
    }

    /// Holds blocks for the request, while it wants them.
    pub(super) fn keep(&self, blocks: CachedBlocks) {
        let mut state = self.lock();
        if !state.over {
            state.held.extend(blocks);
        }
    }

    fn let_go(&self) {
        let mut state = self.lock();
        state.over = true;
        let held = std::mem::take(&mut state.held);
        drop(state);
        drop(held);
    }

    /// Notes which level blocks come from, before anybody can find them.
    pub(super) fn come_from(&self, blocks: impl Iterator<Item = (SequenceHash, Level)>) {
        self.lock().from.extend(blocks);
    }

    /// Offers what was loaded to the tiers that may not have it, once. What G2 gave is in G2; everything else goes up there too,
    /// and down to where it is not yet.
    pub(super) fn offload(&self, inner: &Inner) {
        let mut state = self.lock();
        if std::mem::replace(&mut state.offered, true) {
            return;
        }
        let names: Vec<_> = state.held.iter().map(Held::name).collect();
        inner.offload(&state.held, |at| state.from.get(&names[at]).is_some_and(|level| *level != Level::G2));
    }
}

/// However the task ends, nobody waits for it.
struct Ended<'a>(&'a Job);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.shared.go();
    }
}

async fn bring(job: &Job) {
    let Job { inner, names, shared, .. } = job;
    let (mut lead, mut turn) = (0, None);
    let room = room(job).await;
    loop {
        let held = inner.core.pool.matched(&names[lead..]);
        lead += held.len();
        shared.keep(held);
        if turn.is_none() {
            turn = shared.turned().now_or_never().map(|since| Turn { since, had: lead });
        }
        let (located, plan) = if let Some(turn) = turn {
            let now = Instant::now();
            let (located, plan) = job.plan(lead, 0, now, |source| job.sources[source].gauge.known(now));
            (located, Some((turn, plan)))
        } else {
            // What there is no room for would be read for nothing, by each who wants it.
            let most = room.as_ref().map_or(0, SemaphorePermit::num_permits).min(inner.core.pool.available());
            let ahead = names.len().min(lead + most);
            (locate(&inner.core, &job.sources, &names[lead..ahead], Instant::now()), None)
        };
        let names = &names[lead..lead + extent(&located)];
        let bringing = match plan {
            None if names.is_empty() => {
                shared.turned().await;
                continue;
            }
            Some((_, plan)) if plan.head + plan.tail == 0 => return,
            // What somebody else brings of the end is met in G1.
            Some((_, plan)) if plan.head == 0 => Ok(inner.coming.bring_rest(names)),
            _ => inner.coming.bring(names),
        };
        let mut steps = match bringing {
            Ok(bringing) => {
                let mut loading = Loading::new(job, bringing, lead, &located, plan);
                return loading.run().await;
            }
            Err(steps) => steps,
        };
        // Somebody else brings them: wait like that one, and take over when it gives up.
        let limit = plan.map(|(turn, plan)| turn.limit(plan.patience, lead, Instant::now()));
        tokio::select! {
            biased;
            () = sleep_until(limit.unwrap_or_else(Instant::now)), if limit.is_some() => return,
            _ = shared.turned(), if turn.is_none() => {}
            _ = steps.changed() => {}
        }
    }
}

/// A share of G1 to load into before the engine's turn, given back when this load ends. `None`: the turn came first.
async fn room(job: &Job) -> Option<SemaphorePermit<'_>> {
    let blocks = job.names.len().min(job.inner.ahead_max) as u32;
    tokio::select! {
        biased;
        _ = job.shared.turned() => None,
        room = job.inner.ahead.acquire_many(blocks) => room.ok(),
    }
}
