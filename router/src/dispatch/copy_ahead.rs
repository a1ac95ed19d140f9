//! Orders a further copy of the shared prefix of a request, if one pays. The request does not wait for it.

use crate::booking::PrefixCopies;
use crate::index::Index;
use crate::policy::{Decision, Overlaps};
use crate::state::Core;
use kvbm::SequenceHash;
use tokio::time::Instant;
use worker::engine::PrefixCopy;
use worker::handoff::PeerTicket;

/// Number of copies of the shared prefix that are on the way.
pub(super) fn on_the_way(core: &Core, decision: &Decision<'_>, overlaps: &Overlaps) -> u32 {
    blocks(decision, overlaps).map_or(0, |(_, prefix)| core.copies.receivers(prefix).len() as u32)
}

/// Orders a copy, if one pays. Replay orders its copies here, too.
pub(crate) fn order(copies: &PrefixCopies, index: &Index, decision: &Decision<'_>, overlaps: &Overlaps, now: Instant) {
    let Some((blocks, prefix)) = blocks(decision, overlaps) else { return };
    if !copies.may_order(now) {
        return;
    }
    let (unavailable, receivers) = (copies.unavailable(prefix, now), copies.receivers(prefix));
    // The overlaps of the decision include what running requests will have computed, which cannot be read yet.
    let stored = index.overlap(blocks);
    let Some(planned) = decision.copy_ahead(&stored, &unavailable, &receivers) else { return };
    let peer = planned.from.map(|from| PeerTicket { peer: from.id(), url: from.engine.address() });
    tracing::debug!(
        worker = %planned.to.id(), from = ?peer.as_ref().map(|ticket| ticket.peer), blocks = planned.blocks,
        expected_s = planned.seconds, saved_s = planned.saved,
        "copying a shared prefix ahead of demand"
    );
    let copy = PrefixCopy { blocks: blocks.into(), peer: peer.map(|ticket| ticket.encode()) };
    copies.order(planned.to, prefix, copy);
}

/// The blocks of the shared prefix, and the short hash of the last of them.
fn blocks<'a>(decision: &Decision<'_>, overlaps: &'a Overlaps) -> Option<(&'a [SequenceHash], u64)> {
    // The demand was counted under the first hash scheme.
    let blocks = overlaps.hashes(0).get(..decision.replication()?.shared.blocks as usize)?;
    Some((blocks, blocks.last()?.short()))
}
