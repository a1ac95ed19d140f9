//! Which source of a load holds which blocks.

use super::plan::{TierRun, TierSpeed};
use super::shared::Core;
use super::sources::Source;
use crate::block::SequenceHash;
use std::ops::Range;
use tokio::time::Instant;

/// Sources (by index) of consecutive ranges of blocks, from 0 on.
pub(super) type Located = Vec<(usize, Range<usize>)>;

/// The leading `hashes` that sources hold, each at the first (fastest) source that holds it.
pub(super) fn locate(core: &Core, sources: &[Source], hashes: &[SequenceHash], now: Instant) -> Located {
    let fingerprint = core.device.fingerprint();
    let available: Vec<usize> =
        (0..sources.len()).filter(|source| sources[*source].throughput.is_available(now)).collect();
    let holds = |source: usize, hashes: &[SequenceHash]| sources[source].tier.holds(fingerprint, hashes);
    let mut located: Located = Vec::new();
    let mut at = 0;
    while at < hashes.len() {
        let found = available.iter().enumerate().map(|(rank, source)| (rank, *source, holds(*source, &hashes[at..])));
        let Some((rank, source, count)) = found.into_iter().find(|(.., count)| *count > 0) else { break };
        // A slower tier's run ends where a faster one holds the next block.
        let faster = &available[..rank];
        let end =
            (at + 1..at + count).find(|next| faster.iter().any(|source| holds(*source, &hashes[*next..=*next]) > 0));
        let end = end.unwrap_or(at + count);
        located.push((source, at..end));
        at = end;
    }
    located
}

/// Number of leading hashes that were located.
pub(super) fn located_len(located: &Located) -> usize {
    located.last().map_or(0, |(_, range)| range.end)
}

/// The located ranges as input of the plan. `speed`: of a source.
pub(super) fn tier_runs(located: &Located, speed: impl Fn(usize) -> TierSpeed) -> Vec<TierRun> {
    let run =
        |(source, range): &(usize, Range<usize>)| TierRun { tier: *source, blocks: range.len(), speed: speed(*source) };
    located.iter().map(run).collect()
}
