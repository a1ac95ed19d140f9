//! The loop of a simulated engine: which sequences run, step after step.

use super::handoffs::HeldHandoffs;
use super::sequence::Sequence;
use super::stats::{Batch, Stats};
use super::{Parts, Speed};
use crate::sim::network::Node;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::sleep;
use worker::plane::Load;

pub(super) struct Scheduler {
    parts: Parts,
    stats: Arc<Stats>,
    inbox: mpsc::UnboundedReceiver<Sequence>,
    load: watch::Sender<Load>,
    wake: Arc<Notify>,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    handoffs: HeldHandoffs,
}

/// Interval at which the state is looked at again while nothing can run: blocks become free without a notification.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

impl Scheduler {
    pub(super) fn new(
        parts: Parts,
        stats: Arc<Stats>,
        inbox: mpsc::UnboundedReceiver<Sequence>,
        load: watch::Sender<Load>,
    ) -> Self {
        let (waiting, running, handoffs) = (VecDeque::new(), Vec::new(), HeldHandoffs::default());
        Self { parts, stats, inbox, load, wake: Arc::default(), waiting, running, handoffs }
    }

    pub(super) async fn run(mut self) {
        let node = Node::Worker(self.parts.worker.0);
        loop {
            while let Ok(sequence) = self.inbox.try_recv() {
                self.waiting.push_back(sequence);
            }
            self.parts.world.network.thawed(node).await;
            self.drop_abandoned();
            self.admit();
            self.hand_over();
            self.report();
            let rows = self.choose();
            if !rows.is_empty() {
                self.step(&rows).await;
            } else if self.waiting.is_empty() && self.running.is_empty() {
                tokio::select! {
                    biased;
                    next = self.inbox.recv() => match next {
                        Some(sequence) => self.waiting.push_back(sequence),
                        None => return,
                    },
                    // The load is another one.
                    () = self.stats.changed() => {}
                }
            } else {
                tokio::select! {
                    biased;
                    Some(sequence) = self.inbox.recv() => self.waiting.push_back(sequence),
                    () = self.wake.notified() => {}
                    () = sleep(POLL_INTERVAL) => {}
                }
            }
        }
    }

    /// A client that has left stops its request within one step.
    fn drop_abandoned(&mut self) {
        self.waiting.retain(|sequence| !sequence.output.is_closed());
        self.running.retain(|sequence| !sequence.output.is_closed());
    }

    fn admit(&mut self) {
        let Parts { manager, speed, .. } = &self.parts;
        while self.running.len() < speed.max_num_seqs
            && let Some(first) = self.waiting.front()
        {
            let fits = manager.available() + first.blocks() > first.need();
            if !fits && !self.running.is_empty() {
                return;
            }
            if !fits {
                // Others wait with blocks that they found. The first one needs them.
                self.waiting.iter_mut().skip(1).for_each(Sequence::release);
            }
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            sequence.start_onboarding(manager, speed, &self.wake);
            self.running.push(sequence);
        }
    }

    /// Prefills that are complete leave; their blocks are kept for the decode worker.
    fn hand_over(&mut self) {
        let Parts { peers, worker, dead, .. } = &self.parts;
        for sequence in self.running.extract_if(.., |sequence| sequence.is_prefill() && sequence.pending() == 0) {
            if let Some(prefilled) = sequence.hand_over(peers, *worker) {
                self.handoffs.hold(prefilled, dead.clone());
            }
        }
    }

    /// The sequences that compute in the next step, with the number of their tokens.
    fn choose(&mut self) -> Vec<(usize, usize)> {
        let (mut budget, mut rows, mut at) = (self.parts.speed.chunk_tokens, Vec::new(), 0);
        while at < self.running.len() {
            let sequence = &mut self.running[at];
            let pending = sequence.pending();
            let count = if pending <= 1 { pending } else { pending.min(budget) };
            if count == 0 || sequence.awaits_blocks(&self.parts.manager) {
                at += 1;
                continue;
            }
            // Blocks may have been attached.
            let count = count.min(sequence.pending());
            if count == 0 {
                at += 1;
                continue;
            }
            if sequence.secure(count, &self.parts.manager) {
                budget -= if count > 1 { count } else { 0 };
                rows.push((at, count));
                at += 1;
            } else if let Some(holds) = self.waiting.iter_mut().rev().find(|sequence| sequence.blocks() > 0) {
                holds.release();
            } else if !self.handoffs.reclaim() {
                // The youngest gives up its blocks.
                let last = self.running.len() - 1;
                rows.retain(|(row, _)| *row != last);
                let Some(mut youngest) = self.running.pop() else { break };
                if youngest.need() > self.parts.manager.capacity() {
                    youngest.finish();
                } else if self.running.is_empty() {
                    // Pins hold the memory, or hand-overs, which end soon or are reclaimed.
                    self.parts.manager.unpin();
                    self.running.push(youngest);
                    break;
                } else {
                    youngest.release();
                    self.waiting.push_front(youngest);
                }
            }
        }
        rows
    }

    async fn step(&mut self, rows: &[(usize, usize)]) {
        let Speed { prompt_token, step, .. } = self.parts.speed;
        let prompt_tokens: usize = rows.iter().map(|(_, count)| count).filter(|count| **count > 1).sum();
        sleep(step + prompt_token * prompt_tokens as u32).await;
        let Parts { world, worker, device, manager, peers, .. } = &self.parts;
        let node = Node::Worker(worker.0);
        world.network.thawed(node).await;
        let mut ended = Vec::new();
        for (at, count) in rows {
            let sequence = &mut self.running[*at];
            for hash in sequence.compute(*count, device, manager) {
                world.uses(node, hash, sequence.domain);
            }
            if sequence.is_prefill() {
                sequence.report_progress(peers, *worker);
            }
            if sequence.generate(device) {
                ended.push(*at);
            }
        }
        for at in ended.into_iter().rev() {
            self.running.remove(at);
        }
    }

    fn report(&self) {
        let running = self.running.len();
        let blocks = self.running.iter().map(Sequence::blocks).sum();
        let pending_tokens = self.running.iter().chain(&self.waiting).map(Sequence::pending).sum();
        self.stats.set_batch(Batch { running, blocks, pending_tokens });
        let load = self.stats.load(&self.parts);
        self.load.send_if_modified(|last| {
            let changed = *last != load;
            *last = load;
            changed
        });
    }
}
