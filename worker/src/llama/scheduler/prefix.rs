//! What happens to a request before it joins the queue: its prefix is matched, and what rests below begins to come up.
//!
//! Each request does this in a task of its own, so a slow peer holds up nobody else; blocks from the tiers go on coming
//! while the request waits in the queue, and later ones while it computes.

use super::sequence::Sequence;
use super::stats::Vitals;
use crate::engine::Work;
use crate::handoff::{Peers, Ticket};
use kvbm::{BlockManager, Level, Onboarded};
use std::sync::Arc;

/// Prepares the requests of one engine.
pub(in crate::llama) struct Preparer {
    manager: BlockManager,
    peers: Peers,
    vitals: Arc<Vitals>,
}

impl Preparer {
    pub(in crate::llama) fn new(manager: BlockManager, peers: Peers, vitals: Arc<Vitals>) -> Self {
        Self { manager, peers, vitals }
    }

    /// Gives the sequence all of its prefix that is worth fetching. `None` when the client has gone.
    pub(in crate::llama) async fn prepare(&self, mut sequence: Sequence) -> Option<Sequence> {
        let closed = sequence.outbox.closed();
        tokio::select! {
            biased;
            () = closed => None,
            () = self.fetch(&mut sequence) => Some(sequence),
        }
    }

    async fn fetch(&self, sequence: &mut Sequence) {
        let tokens = sequence.adopt(self.manager.lookup(sequence.wanted()), &self.manager);
        sequence.report_cached(Level::G1, tokens);
        if let Work::Resume(handoff) = &sequence.request.work
            && let Some(ticket) = Ticket::open(handoff)
        {
            self.take_over(sequence, &ticket).await;
        }
        sequence.fetch(&self.manager, &self.vitals);
    }

    /// Fetches what a prefill worker computed. What it had found cached counts as cached here too.
    async fn take_over(&self, sequence: &mut Sequence, ticket: &Ticket) {
        let Some(peer) = self.peers.find(ticket.peer) else {
            tracing::warn!(
                peer = %ticket.peer, request_id = %sequence.request.id,
                "prefill worker is not reachable; recomputing the prompt"
            );
            return;
        };
        let recompute = sequence.recompute(&self.vitals);
        let onboarded = self.manager.onboard_from(&peer, sequence.wanted(), recompute).await;
        let before = sequence.computed as u32;
        let handed: usize = self.adopt(sequence, onboarded).map(|(_, tokens)| tokens).sum();
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

    fn adopt(&self, sequence: &mut Sequence, onboarded: Onboarded) -> impl Iterator<Item = (Level, usize)> + use<> {
        let block_size = sequence.lineage.block_size;
        sequence.adopt(onboarded.blocks, &self.manager);
        onboarded.from.into_iter().map(move |(level, blocks)| (level, blocks * block_size))
    }
}
