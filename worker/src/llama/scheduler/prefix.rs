//! What happens before a request joins the queue: prefix match in G1, transfer from a prefill worker, start of
//! onboarding from lower tiers.
//!
//! Each request does this in a task of its own, so a slow peer delays no other request. Onboarding goes on while the
//! request waits in the queue, and for later blocks while it computes.

use super::arrival::{Arrival, ArrivalContext};
use super::sequence::Sequence;
use super::stats::EngineStats;
use crate::engine::Work;
use crate::handoff::{HandoffTicket, Peers};
use crate::metrics::{ArrivalOutcome, EngineMetrics};
use kvbm::{BlockManager, Level};
use std::sync::Arc;
use std::time::Duration;

/// Finds the cached prefixes of the requests of one engine.
pub(in crate::llama) struct PrefixLoader {
    context: ArrivalContext,
    peers: Peers,
}

impl PrefixLoader {
    pub(in crate::llama) fn new(
        manager: BlockManager,
        peers: Peers,
        stats: Arc<EngineStats>,
        metrics: EngineMetrics,
        block_bytes: usize,
        min_idle: Duration,
    ) -> Self {
        Self { context: ArrivalContext { manager, stats, metrics, block_bytes, min_idle }, peers }
    }

    /// Attaches the cached prefix and starts onboarding of the rest. Returns `None` when the client has closed the
    /// stream.
    pub(in crate::llama) async fn load(&self, mut sequence: Sequence) -> Option<Sequence> {
        let closed = sequence.output.closed();
        let is_handed_over = matches!(sequence.request.work, Work::Resume(_));
        tokio::select! {
            biased;
            () = closed => {
                if is_handed_over {
                    self.context.metrics.arrived(ArrivalOutcome::Cancelled);
                }
                None
            }
            () = self.attach_prefix(&mut sequence) => Some(sequence),
        }
    }

    async fn attach_prefix(&self, sequence: &mut Sequence) {
        let found = self.context.manager.lookup(sequence.missing_hashes());
        if let Work::Resume(handoff) = &sequence.request.work {
            let ticket = HandoffTicket::decode(handoff);
            let blocks = ticket.as_ref().and_then(|ticket| self.peers.find(ticket));
            if let Some(blocks) = blocks {
                sequence.stats.start_arriving();
                let cached_before = found.len();
                // Not held while the others arrive.
                drop(found);
                Arrival::new(&self.context, sequence, blocks, cached_before).take_over().await;
                sequence.stats.arrived(sequence.pending());
            } else {
                tracing::warn!(
                    peer = ticket.map(|ticket| tracing::field::display(ticket.peer)), request_id = %sequence.request.id,
                    trace_id = sequence.request.attributes.trace.trace_id().map(tracing::field::display),
                    "prefill worker is not known; recomputing the prompt"
                );
                self.context.metrics.arrived(ArrivalOutcome::Unknown);
                let tokens = sequence.attach(found, &self.context.manager);
                sequence.report_cached(Level::G1, tokens);
            }
        } else {
            let tokens = sequence.attach(found, &self.context.manager);
            sequence.report_cached(Level::G1, tokens);
        }
        sequence.start_onboarding(&self.context.manager, &self.context.stats);
    }
}
