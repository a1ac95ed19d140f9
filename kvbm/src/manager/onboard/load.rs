//! One load under way: streams of all tiers at once, verified and written on blocking threads, given to everyone at once.
//!
//! ```text
//!   Ahead ──the engine's turn──▶ Waiting ──the head is there, or patience ends──▶ Computing
//!   the head is loaded,          the head is loaded,                              what is left is loaded from the end,
//!   for as long as it takes      for as long as it pays                           until the engine meets it
//! ```
//!
//! While the engine waits, the plan is made anew every [`Patience::GRACE`] with what the tiers have shown meanwhile: of one
//! that nobody had measured, or that has become slow, the rest may better come from the end.
//!
//! What one tier fails to deliver is asked of the next. Dropping a load stops its reads, and still learns from them: a tier
//! that hangs is found out even by clients who do not wait for it.

mod requests;
mod writes;

use super::Shared;
use crate::block::{Block, Level, SequenceHash};
use crate::manager::inflight::Bringing;
use crate::manager::locate::{Located, Source, extent, locate, stretches};
use crate::manager::plan::{Known, Patience, Plan};
use crate::manager::{Inner, Recompute};
use futures::stream::{BoxStream, FuturesUnordered, SelectAll, StreamExt};
use requests::{Answer, Watch};
use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use writes::{WRITE_BYTES, WRITES, Written};

/// A wait without an end.
const FOREVER: Duration = Duration::from_hours(24 * 365);

/// One load under way.
pub(in crate::manager) struct Loading<'a> {
    job: &'a Job,
    phase: Phase,
    start: Instant,
    streams: SelectAll<BoxStream<'static, Answer>>,
    writes: FuturesUnordered<JoinHandle<Vec<Written>>>,
    /// Blocks in them.
    writing: usize,
    /// Loaded, waiting for a hop.
    queue: Vec<Item>,
    places: Vec<Place>,
    /// Leading blocks that are there.
    lead: usize,
    /// When the last block came.
    news: Instant,
    /// Per source, in order: what it is yet to be asked for.
    todo: Vec<VecDeque<usize>>,
    /// Per source: the same, because another failed.
    wanted: Vec<Vec<usize>>,
    seen: Vec<Watch>,
    bringing: Bringing<'a>,
}

/// What is to be brought, for whom.
pub(in crate::manager) struct Job {
    pub(in crate::manager) inner: Arc<Inner>,
    pub(in crate::manager) sources: Vec<Source>,
    pub(in crate::manager) names: Vec<SequenceHash>,
    pub(in crate::manager) recompute: Recompute,
    pub(in crate::manager) shared: Arc<Shared>,
    /// How often a domain of G1 was purged when the blocks were asked for: later ones count for what comes.
    pub(in crate::manager) purges: u64,
}

impl Job {
    /// Where the names from `lead` on are, and what to do about it, given what is `known` of the sources and the
    /// room. That of the `coming` blocks among them is taken, by themselves.
    pub(in crate::manager) fn plan(
        &self,
        lead: usize,
        coming: usize,
        now: Instant,
        known: impl Fn(usize) -> Known,
    ) -> (Located, Plan) {
        let located = locate(&self.inner.core, &self.sources, &self.names[lead..], now);
        let Recompute { seconds_per_block: cost, by } = self.recompute;
        // What no tier holds is computed in any case, after what some do.
        let beyond = (self.names.len() - lead - extent(&located)) as f64 * cost.unwrap_or(0.0);
        let left = by.map(|by| seconds_until(by, now) - beyond);
        let mut plan = crate::manager::plan::plan(&stretches(&located, known), cost, left);
        let room = self.inner.core.pool.available() + coming;
        plan.head = plan.head.min(room);
        plan.tail = plan.tail.min(room - plan.head);
        (located, plan)
    }
}

/// Negative when it has passed.
fn seconds_until(then: Instant, now: Instant) -> f64 {
    then.saturating_duration_since(now).as_secs_f64() - now.saturating_duration_since(then).as_secs_f64()
}

/// When the engine could begin to compute, and how many blocks were there then.
#[derive(Clone, Copy)]
pub(in crate::manager) struct Turn {
    pub(in crate::manager) since: Instant,
    pub(in crate::manager) had: usize,
}

impl Turn {
    /// Until when to wait for more than the first `lead` blocks, the last of which came at `news`.
    pub(in crate::manager) fn limit(&self, patience: Patience, lead: usize, news: Instant) -> Instant {
        self.since + patience.limit(lead - self.had, news.saturating_duration_since(self.since))
    }
}

enum Phase {
    /// The engine is busy with others.
    Ahead,
    /// The engine waits for the blocks before `goal`.
    /// At `review` the plan is made anew.
    Waiting { turn: Turn, goal: usize, patience: Patience, review: Instant },
    /// The engine computes.
    Computing,
}

/// What is known of one block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Nobody was asked.
    Unasked,
    /// That source is to deliver it.
    Asked(usize),
    There,
    /// Nobody has it.
    Lost,
}

struct Item {
    source: usize,
    index: usize,
    block: Block,
}

impl<'a> Loading<'a> {
    /// Begins to bring what was located from `lead` on: all of it, or with a `plan`, what that says.
    pub(in crate::manager) fn new(
        job: &'a Job,
        bringing: Bringing<'a>,
        lead: usize,
        located: &Located,
        plan: Option<(Turn, Plan)>,
    ) -> Self {
        let (start, sources) = (Instant::now(), job.sources.len());
        let mut places = vec![Place::Unasked; job.names.len()];
        places[..lead].fill(Place::There);
        let mut loading = Self {
            job,
            phase: Phase::Ahead,
            start,
            streams: SelectAll::new(),
            writes: FuturesUnordered::new(),
            writing: 0,
            queue: Vec::new(),
            places,
            lead,
            news: start,
            todo: vec![VecDeque::new(); sources],
            wanted: vec![Vec::new(); sources],
            seen: vec![Watch::default(); sources],
            bringing,
        };
        loading.intend(lead, located);
        if let Some((turn, plan)) = plan {
            loading.keep_to(turn, plan, lead + extent(located));
        }
        loading
    }

    /// Brings blocks until there is nothing left to bring.
    pub(in crate::manager) async fn run(&mut self) {
        let batch = (WRITE_BYTES / self.job.inner.core.device.block_bytes().max(1)).max(1);
        let limit = sleep_until(self.start + FOREVER);
        tokio::pin!(limit);
        loop {
            self.settle_phase();
            self.ask();
            if !self.queue.is_empty() && self.writes.len() < WRITES {
                self.write();
            }
            if self.is_done() {
                return;
            }
            if matches!(self.phase, Phase::Computing) {
                self.job.shared.go();
            }
            let until = self.limit();
            if limit.deadline() != until {
                limit.as_mut().reset(until);
            }
            tokio::select! {
                biased;
                // First, so that sources which always have something ready do not outrun it.
                () = &mut limit => self.time_is_up(),
                since = self.job.shared.turned(), if matches!(self.phase, Phase::Ahead) => {
                    // The engine is ready for these blocks: from now on every moment counts.
                    self.plan_anew(Turn { since, had: self.lead });
                }
                Some(written) = self.writes.next() => match written {
                    Ok(written) => self.place(written),
                    Err(error) => match error.try_into_panic() {
                        Ok(panic) => resume_unwind(panic),
                        // The runtime is shutting down.
                        Err(_) => return,
                    },
                },
                Some(answer) = self.streams.next(), if self.queue.len() < batch => self.take(answer),
            }
        }
    }

    /// Puts what was located, counted from `lead`, on the sources' lists.
    fn intend(&mut self, lead: usize, located: &Located) {
        let unasked = |index: &usize| self.places[*index] == Place::Unasked;
        for (source, range) in located {
            self.todo[*source].extend((range.start + lead..range.end + lead).filter(unasked));
        }
    }

    /// Keeps to what is best from here on.
    fn plan_anew(&mut self, turn: Turn) {
        let now = Instant::now();
        // Those that are there are held, those that are being written have a slot: neither is room that is missing.
        let there = self.places[self.lead..].iter().filter(|place| **place == Place::There).count();
        let coming = there + self.writing;
        let (located, plan) = self.job.plan(self.lead, coming, now, |source| self.known(source, now));
        let end = self.lead + extent(&located);
        self.todo.iter_mut().for_each(VecDeque::clear);
        let (goal, tail) = (self.lead + plan.head, end - plan.tail);
        if self.places[goal..tail].iter().any(|place| matches!(place, Place::Asked(_))) {
            // More is on its way than is worth loading, in an order that was right while there was time.
            self.recall();
            self.todo.iter_mut().for_each(VecDeque::clear);
        }
        self.intend(self.lead, &located);
        // Ahead of its turn a request may bring no more than its share.
        self.bringing.bring_more(&self.job.names[self.lead..end]);
        self.keep_to(turn, plan, end);
    }

    fn keep_to(&mut self, turn: Turn, plan: Plan, end: usize) {
        let goal = self.lead + plan.head;
        let tail = end - plan.tail;
        self.todo.iter_mut().for_each(|todo| todo.retain(|index| *index < goal || *index >= tail));
        let review = Instant::now() + Patience::GRACE;
        self.phase = Phase::Waiting { turn, goal, patience: plan.patience, review };
    }

    /// From waiting to computing, when there is nothing to wait for.
    fn settle_phase(&mut self) {
        if let Phase::Waiting { goal, .. } = self.phase
            && (self.lead >= goal || self.places[self.lead] == Place::Lost)
        {
            self.phase = Phase::Computing;
        }
    }

    /// The phase's limit has come: of the plan, or of patience.
    fn time_is_up(&mut self) {
        let Phase::Waiting { turn, patience, .. } = self.phase else { return };
        if Instant::now() < turn.limit(patience, self.lead, self.news) {
            return self.plan_anew(turn);
        }
        // Named after those that still owe something.
        for source in (0..self.seen.len()).filter(|source| self.seen[*source].owes()) {
            self.job.inner.core.metrics.deadline_missed(self.level(source));
        }
        if self.seen.iter().any(|seen| seen.answered > 0) {
            // Slow: from now on the last come first. One that has said nothing yet may as well go on saying nothing.
            self.recall();
        }
        self.phase = Phase::Computing;
    }

    /// Until when the phase lasts if nothing happens.
    fn limit(&self) -> Instant {
        match self.phase {
            Phase::Waiting { turn, patience, review, .. } => turn.limit(patience, self.lead, self.news).min(review),
            Phase::Ahead | Phase::Computing => self.start + FOREVER,
        }
    }

    /// Nothing is on its way and nothing is to be asked for; before the engine's turn that may change.
    fn is_done(&self) -> bool {
        let met = self.job.shared.claimed() >= self.places.len();
        let idle = self.streams.is_empty() && self.queue.is_empty() && self.writes.is_empty();
        !matches!(self.phase, Phase::Ahead) && (met || idle)
    }

    fn level(&self, source: usize) -> Level {
        self.job.sources[source].tier.level()
    }
}

impl Drop for Loading<'_> {
    /// Learns, counts, and sends what came down to where it is missing.
    fn drop(&mut self) {
        self.learn();
        self.job.shared.offload(&self.job.inner);
    }
}
