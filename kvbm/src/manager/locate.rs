//! Tiers to load from: what is known of each, and which of them holds what.

use super::Core;
use super::plan::{Known, Stretch};
use super::throughput::Gauge;
use crate::block::SequenceHash;
use crate::tier::Tier;
use std::ops::Range;
use std::sync::Arc;
use tokio::time::Instant;

/// A tier to load from, and what is known of its speed.
#[derive(Clone)]
pub(super) struct Source {
    pub(super) tier: Arc<dyn Tier>,
    pub(super) gauge: Arc<Gauge>,
}

/// Which names come from where: consecutive ranges that begin at 0.
pub(super) type Located = Vec<(usize, Range<usize>)>;

/// The leading `names` that sources hold, each at the first source in order (the fastest) that does.
pub(super) fn locate(core: &Core, sources: &[Source], names: &[SequenceHash], now: Instant) -> Located {
    let fingerprint = core.device.fingerprint();
    let awake: Vec<usize> = (0..sources.len()).filter(|source| sources[*source].gauge.is_awake(now)).collect();
    let holds = |source: usize, names: &[SequenceHash]| sources[source].tier.holds(fingerprint, names);
    let mut located: Located = Vec::new();
    let mut at = 0;
    while at < names.len() {
        let found = awake.iter().enumerate().map(|(rank, source)| (rank, *source, holds(*source, &names[at..])));
        let Some((rank, source, count)) = found.into_iter().find(|(.., count)| *count > 0) else { break };
        // A slower tier's run ends where a faster one has the next block.
        let faster = &awake[..rank];
        let end =
            (at + 1..at + count).find(|next| faster.iter().any(|source| holds(*source, &names[*next..=*next]) > 0));
        let end = end.unwrap_or(at + count);
        located.push((source, at..end));
        at = end;
    }
    located
}

/// How many leading names were located.
pub(super) fn extent(located: &Located) -> usize {
    located.last().map_or(0, |(_, range)| range.end)
}

/// The same for the plan. `known`: of a source.
pub(super) fn stretches(located: &Located, known: impl Fn(usize) -> Known) -> Vec<Stretch> {
    let stretch =
        |(source, range): &(usize, Range<usize>)| Stretch { tier: *source, blocks: range.len(), known: known(*source) };
    located.iter().map(stretch).collect()
}
