//! Continuous batching: which sequences run, step after step.
//!
//! ```text
//!  accepted ─ prepare (match) ─▶ waiting ─ admit ─▶ running ─ step ─▶ … ─▶ finished
//!                                   ▲                 │
//!                                   ▲└──── preempt ────┘   (no free block: the youngest goes)
//!                           output  │                 │
//!                           is read └──── paused ◀────┘   (its output is not read; fails after a while)
//! ```
//!
//! Blocks from below come up all the while. In its place in the batch a sequence first waits for them, as long as that
//! pays, and has no rows: nobody feels it. Then it computes from the front, and skips what has come.
//!
//! One task owns all of it. A step computes off the async threads, in the engine's turn; between two steps the batch may
//! change in any way, because no row's result depends on its batch mates.

use super::batch::{self, Candidate, Rows};
use super::sequence::Sequence;
use super::stats::Vitals;
use super::step::{self, Part};
use crate::engine::{Error, Finish, Output, Work};
use crate::handoff::Ticket;
use crate::llama::model::Arena;
use crate::llama::runtime::Runtime;
use crate::llama::settings::{Settings, Unread};
use crate::metrics::EngineMetrics;
use crate::plane::{Load, WorkerId};
use kvbm::BlockManager;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

/// How soon a blocked scheduler looks again: blocks come free, and clients come back, without telling it.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// For how long one that could not run otherwise waits, beside pins, for blocks that hand-overs and loads hold: those take as long as
/// it takes to copy them.
pub(in crate::llama) const MOMENT: Duration = Duration::from_secs(1);

/// What a scheduler works with.
pub(in crate::llama) struct Resources {
    pub(in crate::llama) worker: WorkerId,
    pub(in crate::llama) runtime: Arc<Runtime>,
    pub(in crate::llama) arena: Arc<Arena>,
    pub(in crate::llama) manager: BlockManager,
    pub(in crate::llama) settings: Settings,
    pub(in crate::llama) vitals: Arc<Vitals>,
    pub(in crate::llama) metrics: EngineMetrics,
}

pub(in crate::llama) struct Scheduler {
    worker: WorkerId,
    runtime: Arc<Runtime>,
    arena: Arc<Arena>,
    manager: BlockManager,
    settings: Settings,
    vitals: Arc<Vitals>,
    metrics: EngineMetrics,
    /// Dropped with the scheduler, which tells everyone that the engine is dead.
    load: watch::Sender<Load>,
    inbox: mpsc::Receiver<Sequence>,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    /// Those whose output is not read, the longest paused first. They have neither a place in the batch nor blocks.
    paused: VecDeque<Sequence>,
    /// Somebody has left the batch since those who wait were last asked.
    left: bool,
}

impl Scheduler {
    pub(in crate::llama) fn new(
        resources: Resources,
        load: watch::Sender<Load>,
        inbox: mpsc::Receiver<Sequence>,
    ) -> Self {
        let Resources { worker, runtime, arena, manager, settings, vitals, metrics } = resources;
        Self {
            worker,
            runtime,
            arena,
            manager,
            settings,
            vitals,
            metrics,
            load,
            inbox,
            waiting: VecDeque::new(),
            running: Vec::new(),
            paused: VecDeque::new(),
            left: false,
        }
    }

    /// Runs until the engine is dropped and the last sequence has finished.
    pub(in crate::llama) async fn run(mut self) {
        loop {
            while let Ok(sequence) = self.inbox.try_recv() {
                self.waiting.push_back(sequence);
            }
            self.waiting.retain(|sequence| !sequence.outbox.is_closed());
            let before = self.running.len();
            self.running.retain(|sequence| !sequence.outbox.is_closed());
            self.left |= self.running.len() < before;
            self.pause();
            self.resume();
            self.admit();
            self.ask_again();
            self.catch_up();
            self.report();
            if self.step().await {
                continue;
            }
            let idle = self.waiting.is_empty() && self.running.is_empty() && self.paused.is_empty();
            let next = if idle {
                tokio::select! {
                    biased;
                    next = self.inbox.recv() => next,
                    // A request came, or ended, without ever coming here: others want to know that.
                    () = self.vitals.changed() => continue,
                }
            } else {
                // A closed inbox must not turn the wait into a spin.
                tokio::select! {
                    biased;
                    Some(next) = self.inbox.recv() => Some(next),
                    () = self.vitals.changed() => continue,
                    () = sleep(LOOK_AGAIN) => continue,
                }
            };
            match next {
                Some(sequence) => self.waiting.push_back(sequence),
                None => return,
            }
        }
    }

    /// Takes sequences whose output is not read out of the batch: their places and blocks are for those that are read.
    fn pause(&mut self) {
        let now = Instant::now();
        let place = self.settings.unread.place;
        for mut sequence in self.running.extract_if(.., |sequence| sequence.unread(now) > place) {
            tracing::debug!(
                request_id = %sequence.request.id, generated_tokens = sequence.generated(),
                "request paused: the client does not read its output"
            );
            self.metrics.paused();
            sequence.pause();
            self.paused.push_back(sequence);
            self.left = true;
        }
    }

    /// Lets paused sequences wait for a place again once their output is read, and fails those that wait for it in vain.
    fn resume(&mut self) {
        let now = Instant::now();
        let Unread { limit, .. } = self.settings.unread;
        self.paused.retain(|sequence| !sequence.outbox.is_closed());
        // As many may be paused as may wait; then those go that were paused first.
        let mut over = self.paused.len().saturating_sub(self.settings.max_queued_requests);
        let mut read = 0;
        for mut sequence in std::mem::take(&mut self.paused) {
            let unread = sequence.unread(now);
            if unread.is_zero() {
                // In the order in which they were paused, before those that never ran.
                sequence.resume();
                self.waiting.insert(read, sequence);
                read += 1;
            } else if unread >= limit || over > 0 {
                tracing::debug!(
                    request_id = %sequence.request.id, unread_s = unread.as_secs_f64(),
                    "request failed: the client did not read its output"
                );
                self.metrics.unread();
                sequence.outbox.fail(Error::Unread(unread));
            } else {
                self.paused.push_back(sequence);
            }
            over = over.saturating_sub(1);
        }
    }

    /// Lets waiting sequences into the batch, first come, first served, while their blocks fit.
    fn admit(&mut self) {
        while self.running.len() < self.settings.max_num_seqs
            && let Some(mut sequence) = self.waiting.pop_front()
        {
            self.reuse(&mut sequence);
            // One that fills the memory ends with its next token.
            let need =
                self.blocks(sequence.goal() + 1).min(self.manager.capacity()).saturating_sub(sequence.blocks.len());
            // Each running sequence may want its next block before it finishes.
            let room = need + self.running.len();
            if !self.running.is_empty() {
                sequence.held_up = None;
            } else if self.manager.available() < room {
                // Nothing that runs will free a block; what merely waits must not hold any.
                self.waiting.iter_mut().for_each(Sequence::release);
                if self.manager.available() < room {
                    // Nor what came up for itself, behind a block that did not: what is whole below is fetched again.
                    sequence.coming = None;
                }
                let pinned_out = self.manager.capacity() - self.manager.pinned() < room;
                let since = *sequence.held_up.get_or_insert_with(Instant::now);
                if self.manager.available() < room && (pinned_out || since.elapsed() >= MOMENT) {
                    // Nor may what is merely to be kept stop what could not run at all.
                    self.manager.unpin();
                }
            }
            if !self.makes_room(room) {
                self.waiting.push_front(sequence);
                return;
            }
            if sequence.coming.is_none() {
                // It was sent back to wait, or gave way to another, and lost what it had: below it still is.
                sequence.fetch(&self.manager, &self.vitals);
            }
            sequence.take_turn();
            sequence.held_up = None;
            if sequence.generated() == 0 {
                sequence.report.queued = sequence.accepted.elapsed();
            }
            if sequence.joined.is_none() {
                // A preempted sequence joins again; its queue time is that of the first time.
                sequence.joined = Some(Instant::now());
                self.metrics.joined(sequence.accepted.elapsed());
            }
            self.running.push(sequence);
            self.vitals.entered(!self.waiting.is_empty());
        }
    }

    /// Whether so many blocks are there for who is first. Those behind hold what they found or had brought up meanwhile: if that
    /// is what is missing, they give it up, the last first.
    fn makes_room(&mut self, blocks: usize) -> bool {
        let mut short = blocks.saturating_sub(self.manager.available());
        if short <= self.waiting.iter().map(Sequence::holds).sum() {
            for sequence in self.waiting.iter_mut().rev() {
                if short > 0 && sequence.holds() > 0 {
                    short = short.saturating_sub(sequence.holds());
                    sequence.release();
                }
            }
        }
        self.manager.available() >= blocks
    }

    /// Who left made room, if not enough for all: those that had to give blocks up have them come again while they wait, as
    /// new requests do. Once for each who leaves, since what runs may need the room again.
    fn ask_again(&mut self) {
        if std::mem::take(&mut self.left) {
            for sequence in self.waiting.iter_mut().filter(|sequence| sequence.gave_way) {
                sequence.fetch(&self.manager, &self.vitals);
            }
        }
    }

    /// Running prompts take over blocks that others have computed since, and hand-overs that are complete leave.
    fn catch_up(&mut self) {
        let mut running = std::mem::take(&mut self.running);
        for sequence in &mut running {
            if sequence.pending() > 1 {
                self.reuse(sequence);
            }
        }
        for sequence in running {
            if sequence.request.work == Work::Prefill && sequence.pending() == 0 {
                self.hand_over(sequence);
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
        self.vitals.set_running(self.running.len(), self.paused.len(), blocks);
        // Those whose prompts are prepared wait as well.
        self.metrics.set_sequences(self.running.len(), self.vitals.waiting(), self.paused.len());
        let load = self.vitals.load(&self.manager, self.runtime.block_bytes(), self.settings.max_num_seqs);
        self.load.send_if_modified(|last| {
            let changed = *last != load;
            *last = load;
            changed
        });
    }

    /// Computes one step. `false` when there was nothing to compute.
    async fn step(&mut self) -> bool {
        // Prompts are computed in whole blocks.
        let budget = self.settings.max_prefill_chunk_tokens.max(self.block_size());
        let chosen = batch::choose(&self.candidates(), budget, self.block_size());
        let rows = self.secure_blocks(chosen);
        if rows.is_empty() {
            return false;
        }
        let parts = rows.iter().map(|rows| self.part(*rows)).collect();
        let prompt_rows = rows.iter().filter(|rows| rows.count > 1).map(|rows| rows.count).sum();
        let started = Instant::now();
        let done = {
            let _turn = self.runtime.turn().await;
            let (runtime, arena) = (Arc::clone(&self.runtime), Arc::clone(&self.arena));
            tokio::task::spawn_blocking(move || step::compute(&runtime.model, &arena, parts)).await
        };
        let done = match done {
            Ok(done) => done,
            // The engine dies with its step: every stream ends with an error, and readiness says so.
            Err(died) => std::panic::resume_unwind(died.into_panic()),
        };
        self.vitals.stepped(prompt_rows, started.elapsed());
        self.metrics.stepped(prompt_rows, started.elapsed());
        let mut finished = Vec::new();
        for (rows, done) in rows.iter().zip(done) {
            if let Some(finish) = self.advance(*rows, done) {
                finished.push((rows.index, finish));
            }
        }
        self.left |= !finished.is_empty();
        for (index, finish) in finished.into_iter().rev() {
            let sequence = self.running.remove(index);
            self.metrics.decoded(sequence.first_token.map(|at| at.elapsed()).unwrap_or_default());
            sequence.outbox.finish(finish, &sequence.report);
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
                next: sequence.lineage.names.get(sequence.computed / size).copied(),
                gap: sequence.gap(&self.manager),
                stalled: sequence.outbox.is_stalled() || sequence.awaits_blocks(),
            })
            .collect()
    }

    /// Gives each chosen sequence the blocks that its rows fill. When there are none left, the youngest sequence gives up
    /// its own and waits again.
    fn secure_blocks(&mut self, chosen: Vec<Rows>) -> Vec<Rows> {
        let mut secured = Vec::with_capacity(chosen.len());
        'next: for rows in chosen {
            while rows.index < self.running.len() {
                let sequence = &self.running[rows.index];
                let need = self.blocks(sequence.computed + rows.count).saturating_sub(sequence.blocks.len());
                if let Some(blocks) = self.manager.allocate(need) {
                    self.running[rows.index].blocks.extend(blocks);
                    self.running[rows.index].claim(rows.count);
                    secured.push(rows);
                    continue 'next;
                }
                // What those have who merely wait goes first.
                if !self.waiting.iter_mut().rev().any(Sequence::give_way) {
                    self.preempt();
                }
            }
        }
        secured
    }

    fn preempt(&mut self) {
        let Some(mut youngest) = self.running.pop() else { return };
        if self.blocks(youngest.goal()) > self.manager.capacity() {
            // Too long for the memory, even alone: this is as far as it goes.
            youngest.outbox.flush();
            let report = youngest.report.clone();
            self.metrics.decoded(youngest.first_token.map(|at| at.elapsed()).unwrap_or_default());
            youngest.outbox.finish(Finish::Length, &report);
            self.left = true;
            return;
        }
        self.metrics.preempted();
        tracing::debug!(
            request_id = %youngest.request.id, computed_tokens = youngest.computed,
            "request preempted: no free KV block"
        );
        youngest.release();
        self.waiting.push_front(youngest);
    }

    fn part(&mut self, rows: Rows) -> Part {
        let sequence = &mut self.running[rows.index];
        let end = sequence.computed + rows.count;
        let last = end == sequence.tokens.len() && sequence.request.work != Work::Prefill && sequence.limit > 0;
        Part {
            tokens: sequence.tokens[sequence.computed..end].to_vec(),
            start: sequence.computed,
            table: sequence.blocks.slots(),
            sampler: if last { sequence.sampler.take() } else { None },
            position: end,
            scored: sequence.scored_in(sequence.computed..end),
            banned: if last { self.runtime.banned(&sequence.request.stop, end - sequence.prompt) } else { Vec::new() },
        }
    }

    /// Takes in what a step made of one sequence.
    fn advance(&mut self, rows: Rows, done: step::Done) -> Option<Finish> {
        let sequence = &mut self.running[rows.index];
        let prompt_left = sequence.prompt.saturating_sub(sequence.computed);
        self.metrics.computed(rows.count.min(prompt_left));
        sequence.computed += rows.count;
        sequence.waiting.computed(rows.count);
        sequence.add_scores(done.scored);
        sequence.share(&self.manager);
        sequence.settle();
        let only_prompt = sequence.limit == 0 && sequence.pending() == 0 && sequence.request.work != Work::Prefill;
        if done.next.is_none() && !only_prompt {
            return None;
        }
        if sequence.report_is_open() {
            sequence.close_report();
            self.metrics.prompt_cached(&sequence.report);
        }
        if sequence.first_token.is_none() {
            sequence.first_token = Some(Instant::now());
            self.metrics.prefilled(sequence.joined.map(|at| at.elapsed()).unwrap_or_default());
        }
        let Some((sampler, token, logprobs)) = done.next else { return Some(Finish::Length) };
        sequence.sampler = Some(sampler);
        if let Some(finish) = self.runtime.ends(&sequence.request.stop, token) {
            sequence.outbox.end_with(token, logprobs);
            return Some(finish);
        }
        self.metrics.generated();
        sequence.tokens.push(token);
        sequence.lineage.extend(&sequence.tokens);
        sequence.outbox.push(token, logprobs, &sequence.report);
        if sequence.generated() >= sequence.limit {
            return Some(Finish::Length);
        }
        sequence.outbox.flush();
        None
    }

    /// Tells the router where the blocks are, and keeps them until the stream is dropped.
    fn hand_over(&self, mut sequence: Sequence) {
        sequence.close_report();
        self.metrics.prompt_cached(&sequence.report);
        self.metrics.prefilled(sequence.joined.map(|at| at.elapsed()).unwrap_or_default());
        let ticket = Ticket { peer: self.worker, cached: sequence.report.cached.clone() };
        sequence.outbox.hand_over(Output::Handoff(ticket.seal()));
        // Only the blocks are kept: the request waits for nothing here any more.
        let Sequence { outbox, blocks, .. } = sequence;
        tokio::spawn(async move {
            outbox.closed().await;
            drop(blocks);
        });
    }

    fn block_size(&self) -> usize {
        self.runtime.card.block_size
    }

    fn blocks(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size())
    }
}
