//! The scheduler's loop: which sequences run, step after step.
//!
//! ```text
//!  accepted ─ prepare (match) ─▶ waiting ─ admit ─▶ running ─ step ─▶ … ─▶ finished
//!                                   ▲                 │
//!                                   ├──── preempt ────┤    (no free block: the youngest is preempted)
//!                           output  │                 │
//!                           is read └──── paused ◀────┘    (its output is not read; fails after a while)
//! ```
//!
//! Onboarding goes on all the time. A sequence in the batch first waits for its blocks, as long as that is quicker than
//! computing them, and has no rows meanwhile. Then it computes from the front, and skips the blocks that have arrived.
//!
//! One task owns all state. A step computes off the async threads, under the runtime's compute permit; between two
//! steps the batch may change in any way, because no row's result depends on the other rows.

use super::batch::{self, Candidate, Rows};
use super::handoffs::HeldHandoffs;
use super::output::Ending;
use super::sequence::Sequence;
use super::stats::EngineStats;
use super::step::{self, StepInput, StepOutput};
use crate::engine::{EndToken, Error, FinishReason, Work};
use crate::handoff::Peers;
use crate::llama::limits::Limits;
use crate::llama::model::KvCache;
use crate::llama::runtime::Runtime;
use crate::llama::settings::Settings;
use crate::metrics::{EngineMetrics, HandoffEnd};
use crate::plane::{Load, WorkerId};
use kvbm::BlockManager;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

/// Poll interval while nothing can run: blocks become free and clients read again without a notification.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How long a sequence that could not run otherwise waits for blocks that handoffs and loads hold, before pins are
/// released: copying those blocks takes less.
pub(in crate::llama) const PIN_RELEASE_DELAY: Duration = Duration::from_secs(1);

/// What the scheduler of one engine uses.
pub(in crate::llama) struct Resources {
    pub(in crate::llama) worker: WorkerId,
    pub(in crate::llama) runtime: Arc<Runtime>,
    pub(in crate::llama) kv_cache: Arc<KvCache>,
    pub(in crate::llama) manager: BlockManager,
    pub(in crate::llama) settings: Settings,
    pub(in crate::llama) limits: Arc<Limits>,
    pub(in crate::llama) stats: Arc<EngineStats>,
    pub(in crate::llama) metrics: EngineMetrics,
    pub(in crate::llama) peers: Peers,
}

pub(in crate::llama) struct Scheduler {
    worker: WorkerId,
    runtime: Arc<Runtime>,
    kv_cache: Arc<KvCache>,
    manager: BlockManager,
    settings: Settings,
    limits: Arc<Limits>,
    stats: Arc<EngineStats>,
    metrics: EngineMetrics,
    peers: Peers,
    /// Dropped with the scheduler, which tells the receivers that the engine has stopped.
    load: watch::Sender<Load>,
    /// Sequences that were accepted and are ready for the queue.
    submitted: mpsc::Receiver<Sequence>,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    /// Sequences whose output is not read, the longest paused first. They are not in the batch and hold no blocks.
    paused: VecDeque<Sequence>,
    handoffs: HeldHandoffs,
    /// A sequence has left the batch since onboarding was last retried for the waiting ones.
    sequence_left: bool,
}

impl Scheduler {
    pub(in crate::llama) fn new(
        resources: Resources,
        load: watch::Sender<Load>,
        submitted: mpsc::Receiver<Sequence>,
    ) -> Self {
        let Resources { worker, runtime, kv_cache, manager, settings, limits, stats, metrics, peers } = resources;
        Self {
            worker,
            runtime,
            kv_cache,
            manager,
            settings,
            limits,
            stats,
            metrics,
            peers,
            load,
            submitted,
            waiting: VecDeque::new(),
            running: Vec::new(),
            paused: VecDeque::new(),
            handoffs: HeldHandoffs::default(),
            sequence_left: false,
        }
    }

    /// Runs until the engine is dropped and the last sequence has finished.
    pub(in crate::llama) async fn run(mut self) {
        loop {
            while let Ok(sequence) = self.submitted.try_recv() {
                self.waiting.push_back(sequence);
            }
            let metrics = &self.metrics;
            let is_open = |sequence: &mut Sequence| {
                let is_closed = sequence.output.is_closed();
                if is_closed && sequence.progress.is_some() {
                    metrics.handoff_ended(HandoffEnd::Cancelled);
                }
                !is_closed
            };
            self.waiting.retain_mut(is_open);
            let before = self.running.len();
            self.running.retain_mut(is_open);
            self.sequence_left |= self.running.len() < before;
            self.pause();
            self.resume();
            self.admit();
            self.retry_onboarding();
            self.reuse_new_hits();
            self.report();
            if self.step().await {
                continue;
            }
            let idle = self.waiting.is_empty() && self.running.is_empty() && self.paused.is_empty();
            let next = if idle {
                tokio::select! {
                    biased;
                    next = self.submitted.recv() => next,
                    // A request arrived or ended before it reached the scheduler: the load report changes.
                    () = self.stats.changed() => continue,
                }
            } else {
                // A closed channel must not turn the wait into a busy loop.
                tokio::select! {
                    biased;
                    Some(next) = self.submitted.recv() => Some(next),
                    () = self.stats.changed() => continue,
                    () = sleep(POLL_INTERVAL) => continue,
                }
            };
            match next {
                Some(sequence) => self.waiting.push_back(sequence),
                None => return,
            }
        }
    }

    /// Takes sequences whose output is not read out of the batch, so that others get their slots and blocks.
    fn pause(&mut self) {
        let now = Instant::now();
        let pause_after = self.settings.unread.pause_after;
        for mut sequence in self.running.extract_if(.., |sequence| sequence.unread(now) > pause_after) {
            tracing::debug!(
                request_id = %sequence.request.id, generated_tokens = sequence.generated(),
                "request paused: the client does not read its output"
            );
            self.metrics.paused();
            sequence.phase.event("paused");
            sequence.pause();
            self.paused.push_back(sequence);
            self.sequence_left = true;
        }
    }

    /// Moves paused sequences back to the queue once their output is read, and fails those that are unread for too
    /// long.
    fn resume(&mut self) {
        let now = Instant::now();
        let fail_after = self.settings.unread.fail_after;
        self.paused.retain(|sequence| !sequence.output.is_closed());
        // At most `max_queued_requests` are paused; above that the longest paused fail.
        let mut over = self.paused.len().saturating_sub(self.limits.max_queued_requests());
        let mut read = 0;
        for mut sequence in std::mem::take(&mut self.paused) {
            let unread = sequence.unread(now);
            if unread.is_zero() {
                // In the order in which they were paused, before those that never ran.
                sequence.resume();
                self.waiting.insert(read, sequence);
                read += 1;
            } else if unread >= fail_after || over > 0 {
                tracing::debug!(
                    request_id = %sequence.request.id, unread_s = unread.as_secs_f64(),
                    "request failed: the client did not read its output"
                );
                self.metrics.unread();
                sequence.output.fail(Error::Unread(unread));
            } else {
                self.paused.push_back(sequence);
            }
            over = over.saturating_sub(1);
        }
    }

    /// Admits waiting sequences to the batch in order of arrival (FCFS), while their blocks fit.
    fn admit(&mut self) {
        while self.running.len() < self.limits.max_num_seqs()
            && let Some(mut sequence) = self.waiting.pop_front()
        {
            self.reuse(&mut sequence);
            // At most all blocks: the context of the model ends with the memory.
            let need = self.blocks(sequence.goal() + 1).saturating_sub(sequence.blocks.len());
            // Each running sequence may need one more block before it finishes.
            let room = need + self.running.len();
            if !self.running.is_empty() {
                sequence.blocked_since = None;
            } else if self.manager.available() < room {
                // No running sequence will free a block, so waiting ones must not hold any.
                self.waiting.iter_mut().for_each(Sequence::release);
                self.reclaim_from_handoffs(room);
                if self.manager.available() < room {
                    // The sequence itself holds blocks that were onboarded behind one that could not be loaded. They
                    // must not stay, either; the intact ones are loaded again.
                    sequence.onboarding = None;
                }
                let pinned_out = self.manager.capacity() - self.manager.pinned() < room;
                let since = *sequence.blocked_since.get_or_insert_with(Instant::now);
                if self.manager.available() < room && (pinned_out || since.elapsed() >= PIN_RELEASE_DELAY) {
                    // Pinned blocks must not prevent a request that could not run otherwise.
                    self.manager.unpin();
                }
            }
            if !self.reclaim_from_waiting(room) && !self.reclaim_from_handoffs(room) {
                self.waiting.push_front(sequence);
                return;
            }
            if sequence.onboarding.is_none() {
                // The sequence was preempted or yielded its blocks: lower tiers still have them.
                sequence.start_onboarding(&self.manager, &self.stats);
            }
            sequence.start_waiting();
            sequence.blocked_since = None;
            if sequence.generated() == 0 {
                sequence.report.queued = sequence.accepted.elapsed();
            }
            if sequence.joined.is_none() {
                // A preempted sequence joins again; its queue time is that of the first time.
                sequence.joined = Some(Instant::now());
                sequence.enter_phase("prefill");
                self.metrics.joined(sequence.accepted.elapsed());
            }
            self.running.push(sequence);
            self.stats.record_admission(!self.waiting.is_empty());
        }
    }

    /// Whether this many blocks are free for the first waiting sequence. If the blocks that later waiting sequences
    /// hold are enough to make up the shortage, those give them up, the last one first.
    fn reclaim_from_waiting(&mut self, blocks: usize) -> bool {
        let mut short = blocks.saturating_sub(self.manager.available());
        if short <= self.waiting.iter().map(Sequence::held_blocks).sum() {
            for sequence in self.waiting.iter_mut().rev() {
                if short > 0 && sequence.held_blocks() > 0 {
                    short = short.saturating_sub(sequence.held_blocks());
                    sequence.release();
                }
            }
        }
        self.manager.available() >= blocks
    }

    /// Whether this many blocks are free once blocks are released that decode workers have not fetched for a while.
    fn reclaim_from_handoffs(&mut self, blocks: usize) -> bool {
        while self.manager.available() < blocks && self.handoffs.reclaim(PIN_RELEASE_DELAY, &self.metrics) {}
        self.manager.available() >= blocks
    }

    /// A sequence has left and made room: waiting sequences that yielded blocks onboard them again. Once per departure,
    /// since running sequences may need the room.
    fn retry_onboarding(&mut self) {
        if std::mem::take(&mut self.sequence_left) {
            for sequence in self.waiting.iter_mut().filter(|sequence| sequence.yielded) {
                sequence.start_onboarding(&self.manager, &self.stats);
            }
        }
    }

    /// Running prompts attach blocks that others have computed since; prefills that are complete leave.
    fn reuse_new_hits(&mut self) {
        let mut running = std::mem::take(&mut self.running);
        for sequence in &mut running {
            if sequence.pending() > 1 {
                self.reuse(sequence);
            }
        }
        for sequence in running {
            if matches!(sequence.request.work, Work::Prefill) && sequence.pending() == 0 {
                self.hand_off(sequence);
            } else {
                self.running.push(sequence);
            }
        }
    }

    fn reuse(&self, sequence: &mut Sequence) {
        if !sequence.blocks.is_filling() {
            sequence.reuse(&self.manager);
        }
    }

    fn report(&self) {
        let blocks = self.running.iter().map(|sequence| sequence.blocks.len()).sum();
        self.stats.set_running(self.running.len(), self.paused.len(), blocks);
        // Requests whose prefixes are still being matched count as waiting too.
        self.metrics.set_sequences(self.running.len(), self.stats.waiting(), self.paused.len());
        let load = self.stats.load(&self.manager, self.runtime.block_bytes(), self.limits.max_num_seqs());
        self.load.send_if_modified(|last| {
            let changed = *last != load;
            *last = load;
            changed
        });
    }

    /// Computes one step. `false` when there was nothing to compute.
    async fn step(&mut self) -> bool {
        // Prompts are computed in whole blocks.
        let budget = self.limits.max_prefill_chunk_tokens().max(self.block_size());
        let chosen = batch::choose(&self.candidates(), budget, self.block_size());
        let rows = self.allocate_blocks(chosen);
        if rows.is_empty() {
            return false;
        }
        let inputs = rows.iter().map(|rows| self.step_input(*rows)).collect();
        let prompt_rows = rows.iter().filter(|rows| rows.count > 1).map(|rows| rows.count).sum();
        let started = Instant::now();
        for rows in &rows {
            if let Some(prefilled) = self.running[rows.index].prefilled_elsewhere.take() {
                self.metrics.handed_over(started - prefilled);
            }
        }
        let outputs = {
            let _permit = self.runtime.compute_permit().await;
            let runtime = Arc::clone(&self.runtime);
            let kv_cache = Arc::clone(&self.kv_cache);
            self.runtime.model.run(move || step::compute(&runtime.model, &kv_cache, inputs)).await
        };
        // The engine stops with its step: every stream ends with an error, and readiness says so.
        let outputs = outputs.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        self.stats.record_step(prompt_rows, started.elapsed());
        self.metrics.stepped(prompt_rows, started.elapsed());
        let mut finished = Vec::new();
        for (rows, output) in rows.iter().zip(outputs) {
            // The blocks of a failed step are not published.
            let ending = output.map(|output| self.advance(*rows, output)).transpose();
            finished.extend(ending.map(|ending| (rows.index, ending)));
        }
        self.sequence_left |= !finished.is_empty();
        for (index, ending) in finished.into_iter().rev() {
            let mut sequence = self.running.remove(index);
            sequence.phase.set("gen_ai.usage.output_tokens", sequence.generated());
            match ending {
                Ok(ending) => {
                    self.metrics.decoded(sequence.first_token.map(|at| at.elapsed()).unwrap_or_default());
                    sequence.output.finish(ending, &sequence.report);
                }
                Err(error) => sequence.output.fail(Error::Failed(error.to_string())),
            }
        }
        true
    }

    fn candidates(&self) -> Vec<Candidate> {
        let size = self.block_size();
        self.running
            .iter()
            .map(|sequence| Candidate {
                pending: sequence.pending(),
                offset: sequence.computed % size,
                next_hash: sequence.chain.hashes.get(sequence.computed / size).copied(),
                rows_to_cached_block: sequence.rows_to_next_cached_block(&self.manager),
                stalled: sequence.output.is_stalled() || sequence.awaits_blocks(),
            })
            .collect()
    }

    /// Allocates the blocks that the chosen rows fill. When none is free, waiting sequences yield theirs, then the
    /// youngest running sequence is preempted.
    fn allocate_blocks(&mut self, chosen: Vec<Rows>) -> Vec<Rows> {
        let mut allocated = Vec::with_capacity(chosen.len());
        'next: for rows in chosen {
            while rows.index < self.running.len() {
                let sequence = &self.running[rows.index];
                let need = self.blocks(sequence.computed + rows.count).saturating_sub(sequence.blocks.len());
                if let Some(blocks) = self.manager.allocate(need) {
                    self.running[rows.index].blocks.extend(blocks);
                    self.running[rows.index].claim(rows.count);
                    allocated.push(rows);
                    continue 'next;
                }
                // Waiting sequences yield their blocks first, then hand-overs.
                if !self.waiting.iter_mut().rev().any(Sequence::yield_blocks)
                    && !self.handoffs.reclaim(PIN_RELEASE_DELAY, &self.metrics)
                {
                    self.preempt();
                }
            }
        }
        allocated
    }

    fn preempt(&mut self) {
        let Some(mut youngest) = self.running.pop() else { return };
        self.metrics.preempted();
        tracing::debug!(
            request_id = %youngest.request.id, computed_tokens = youngest.computed,
            "request preempted: no free KV block"
        );
        youngest.phase.event("preempted");
        youngest.release();
        self.waiting.push_front(youngest);
    }

    fn step_input(&mut self, rows: Rows) -> StepInput {
        let sequence = &mut self.running[rows.index];
        let end = sequence.computed + rows.count;
        let last =
            end == sequence.tokens.len() && !matches!(sequence.request.work, Work::Prefill) && sequence.limit > 0;
        StepInput {
            tokens: sequence.tokens[sequence.computed..end].to_vec(),
            start: sequence.computed,
            table: sequence.blocks.slots(),
            sampler: if last { sequence.sampler.take() } else { None },
            position: end,
            scored: sequence.scored_in(sequence.computed..end),
            banned: if last {
                self.runtime.banned_tokens(&sequence.request.stop, end - sequence.prompt)
            } else {
                Vec::new()
            },
        }
    }

    /// Applies the result of a step to one sequence; returns how it ended, if it did.
    fn advance(&mut self, rows: Rows, output: StepOutput) -> Option<Ending> {
        let sequence = &mut self.running[rows.index];
        let prompt_left = sequence.prompt.saturating_sub(sequence.computed);
        self.metrics.computed(rows.count.min(prompt_left));
        sequence.computed += rows.count;
        sequence.stats.computed(rows.count);
        sequence.add_scores(output.scored);
        sequence.publish(&self.manager);
        sequence.drop_unneeded_onboarding();
        if matches!(sequence.request.work, Work::Prefill) {
            sequence.report_progress(&self.peers, self.worker);
        }
        let only_prompt =
            sequence.limit == 0 && sequence.pending() == 0 && !matches!(sequence.request.work, Work::Prefill);
        if output.next.is_none() && !only_prompt {
            return None;
        }
        if sequence.report_is_open() {
            sequence.close_report();
            self.metrics.prompt_cached(&sequence.report);
        }
        if sequence.first_token.is_none() {
            sequence.first_token = Some(Instant::now());
            sequence.describe_prefill();
            sequence.enter_phase("decode");
            self.metrics.prefilled(sequence.joined.map(|at| at.elapsed()).unwrap_or_default());
        }
        let Some((sampler, token, logprobs)) = output.next else {
            return Some(Ending::without_token(FinishReason::Length));
        };
        sequence.sampler = Some(sampler);
        if let Some(finish) = self.runtime.finish_reason(&sequence.request.stop, token) {
            return Some(Ending { finish, token: None, end: Some(EndToken { id: token, logprobs }) });
        }
        self.metrics.generated();
        sequence.tokens.push(token);
        sequence.chain.extend(&sequence.tokens);
        if sequence.generated() >= sequence.limit {
            return Some(Ending { finish: FinishReason::Length, token: Some((token, logprobs)), end: None });
        }
        sequence.output.push(token, logprobs, &sequence.report);
        None
    }

    /// Ends a prefill, and keeps its blocks for the decode worker.
    fn hand_off(&mut self, mut sequence: Sequence) {
        sequence.close_report();
        sequence.describe_prefill();
        self.metrics.prompt_cached(&sequence.report);
        self.metrics.prefilled(sequence.joined.map(|at| at.elapsed()).unwrap_or_default());
        let cached = sequence.report.cached.clone();
        sequence.handoff(&self.peers, self.worker).complete(cached);
        sequence.output.send_prefilled();
        // Only the blocks are kept; the request no longer counts as pending.
        let Sequence { output, blocks, progress, .. } = sequence;
        if let Some(progress) = progress {
            let lease = self.settings.handoff.lease;
            self.handoffs.hold(output, progress, blocks.cached, lease, self.metrics.clone());
        }
    }

    fn block_size(&self) -> usize {
        self.runtime.card.block_size
    }

    fn blocks(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size())
    }
}
