//! What happens before a request joins the queue: prefix match in G1, transfer from a prefill worker, start of
//! onboarding from lower tiers.
//!
//! Each request does this in a task of its own, so a slow peer delays no other request. Onboarding goes on while the
//! request waits in the queue, and for later blocks while it computes.

use super::sequence::Sequence;
use super::stats::EngineStats;
use crate::engine::Work;
use crate::handoff::{HandoffTicket, Peers};
use kvbm::{BlockManager, Level, Onboarded};
use std::sync::Arc;

/// Finds the cached prefixes of the requests of one engine.
pub(in crate::llama) struct PrefixLoader {
    manager: BlockManager,
    peers: Peers,
    stats: Arc<EngineStats>,
}

impl PrefixLoader {
    pub(in crate::llama) fn new(manager: BlockManager, peers: Peers, stats: Arc<EngineStats>) -> Self {
        Self { manager, peers, stats }
    }

    /// Attaches the cached prefix and starts onboarding of the rest. Returns `None` when the client has closed the
    /// stream.
    pub(in crate::llama) async fn load(&self, mut sequence: Sequence) -> Option<Sequence> {
        let closed = sequence.output.closed();
        tokio::select! {
            biased;
            () = closed => None,
            () = self.attach_prefix(&mut sequence) => Some(sequence),
        }
    }

    async fn attach_prefix(&self, sequence: &mut Sequence) {
        let ticket = match &sequence.request.work {
            Work::Resume(handoff) => HandoffTicket::decode(handoff),
            Work::Generate | Work::Prefill | Work::Relay(_) => None,
        };
        if let Some(ticket) = &ticket {
            sequence.limit_cached(ticket);
        }
        let tokens = sequence.attach(self.manager.lookup(sequence.missing_hashes()), &self.manager);
        sequence.report_cached(Level::G1, tokens);
        if let Some(ticket) = ticket {
            self.onboard_from_peer(sequence, &ticket).await;
        }
        sequence.start_onboarding(&self.manager, &self.stats);
    }

    /// Loads the blocks that a prefill worker computed. What that worker found cached counts as cached here too.
    async fn onboard_from_peer(&self, sequence: &mut Sequence, ticket: &HandoffTicket) {
        let Some(peer) = self.peers.find(ticket) else {
            tracing::warn!(
                peer = %ticket.peer, request_id = %sequence.request.id,
                trace_id = sequence.request.attributes.trace.trace_id().map(tracing::field::display),
                "prefill worker is not reachable; recomputing the prompt"
            );
            return;
        };
        let recompute = sequence.recompute(&self.stats);
        let trace = &sequence.request.attributes.trace;
        let onboarded = self.manager.onboard_from(&peer, sequence.missing_hashes(), recompute, trace).await;
        let before = sequence.computed as u32;
        let handed: usize = self.attach(sequence, onboarded).map(|(_, tokens)| tokens).sum();
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

    fn attach(&self, sequence: &mut Sequence, onboarded: Onboarded) -> impl Iterator<Item = (Level, usize)> + use<> {
        let block_size = sequence.chain.block_size;
        sequence.attach(onboarded.blocks, &self.manager);
        onboarded.from.into_iter().map(move |(level, blocks)| (level, blocks * block_size))
    }
}
