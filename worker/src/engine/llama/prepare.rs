//! What happens to a request before it joins the batch: its prefix is matched, and onboarded from wherever it rests.
//!
//! Each request does this in a task of its own, so a slow tier holds up nobody else.

use super::sequence::Sequence;
use super::vitals::Vitals;
use crate::engine::Work;
use crate::peers::{Peers, Ticket};
use kvbm::Level;
use kvbm::{BlockManager, Onboarded, Recompute};
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Requests that onboard at once. Each may claim G1 blocks for its whole prompt; a tier is saturated by fewer.
const ONBOARDING_MAX: usize = 8;

pub(super) struct Preparer {
    manager: BlockManager,
    peers: Peers,
    vitals: Arc<Vitals>,
    onboarding: Semaphore,
}

impl Preparer {
    pub(super) fn new(manager: BlockManager, peers: Peers, vitals: Arc<Vitals>) -> Self {
        Self { manager, peers, vitals, onboarding: Semaphore::new(ONBOARDING_MAX) }
    }

    /// Gives the sequence all of its prefix that is worth fetching. `None` when the client has gone.
    pub(super) async fn prepare(&self, mut sequence: Sequence) -> Option<Sequence> {
        let closed = sequence.outbox.closed();
        tokio::select! {
            biased;
            () = closed => None,
            () = self.fetch(&mut sequence) => Some(sequence),
        }
    }

    async fn fetch(&self, sequence: &mut Sequence) {
        let tokens = sequence.adopt(self.manager.matched(sequence.wanted()));
        sequence.report_cached(Level::G1, tokens);
        if let Work::Resume(handoff) = &sequence.request.work
            && let Some(ticket) = Ticket::open(handoff)
        {
            self.take_over(sequence, &ticket).await;
        }
        if self.manager.below(sequence.wanted()) > 0 {
            let _permit = self.onboarding.acquire().await;
            let recompute = self.recompute(sequence);
            let onboarded = self.manager.onboard(sequence.wanted(), recompute).await;
            for (level, tokens) in adopt(sequence, onboarded) {
                sequence.report_cached(level, tokens);
            }
        }
    }

    /// Fetches what a prefill worker computed. What it had found cached counts as cached here too.
    async fn take_over(&self, sequence: &mut Sequence, ticket: &Ticket) {
        let Some(peer) = self.peers.find(ticket.peer) else {
            tracing::warn!(peer = %ticket.peer, request = %sequence.request.id, "prefill worker is gone: recomputing");
            return;
        };
        let recompute = self.recompute(sequence);
        let onboarded = self.manager.onboard_from(&peer, sequence.wanted(), recompute).await;
        let before = sequence.computed as u32;
        let handed: usize = adopt(sequence, onboarded).map(|(_, tokens)| tokens).sum();
        sequence.report.handed_over = handed as u32;
        let mut skip = before;
        let mut left = handed as u32;
        for (level, tokens) in &ticket.cached {
            let fresh = tokens.saturating_sub(skip).min(left);
            skip = skip.saturating_sub(*tokens);
            left -= fresh;
            sequence.report_cached(*level, fresh as usize);
        }
    }

    fn recompute(&self, sequence: &Sequence) -> Recompute {
        let block_size = sequence.lineage.block_size as f64;
        Recompute { seconds_per_block: self.vitals.seconds_per_prompt_token().map(|each| each * block_size) }
    }
}

fn adopt(sequence: &mut Sequence, onboarded: Onboarded) -> impl Iterator<Item = (Level, usize)> + use<> {
    let block_size = sequence.lineage.block_size;
    sequence.adopt(onboarded.blocks);
    onboarded.from.into_iter().map(move |(level, blocks)| (level, blocks * block_size))
}
