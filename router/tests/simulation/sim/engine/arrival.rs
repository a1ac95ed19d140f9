//! Takes over the blocks of a prompt from the worker that computes it, while it still computes.

use super::Parts;
use super::sequence::Sequence;
use crate::sim::network::Node;
use futures::StreamExt;
use kvbm::Tier;
use spans::Context;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use worker::handoff::{HandedBlocks, Progress};

/// A prefill without progress is not waited for any longer: computing a whole prompt takes less.
const IDLE_LIMIT: Duration = Duration::from_secs(10);

/// Loads the blocks as they are computed. Attaches them when all are, or when the prefill fails or makes no progress.
/// They are not held before that: a request that does not run yet takes no memory from those that do.
///
/// `cached_before`: number of leading blocks that were cached here before.
pub(super) async fn take_over(
    parts: &Parts,
    sequence: &mut Sequence,
    HandedBlocks { memory, mut progress }: HandedBlocks,
    cached_before: usize,
) {
    let Parts { world, worker, manager, speed, .. } = parts;
    let mut loaded = cached_before;
    let end = loop {
        let next = timeout(IDLE_LIMIT, progress.next()).await;
        world.network.thawed(Node::Worker(worker.0)).await;
        match next {
            Ok(Some(Progress::Computing { blocks })) => {
                let blocks = (blocks as usize).min(sequence.missing().len());
                if blocks > loaded && load_ahead(parts, sequence, &memory, loaded..blocks).await > 0 {
                    loaded = blocks;
                }
            }
            Ok(Some(Progress::Complete { cached })) => {
                let recompute = sequence.recompute(speed);
                let onboarded = manager.onboard_from(&memory, sequence.missing(), recompute, &Context::none()).await;
                let cached = cached.iter().map(|(_, tokens)| tokens).sum();
                sequence.attach_handed_over(onboarded.blocks, cached_before, Some(cached));
                sequence.peer = Some(memory);
                break "complete";
            }
            unfinished => {
                let arrived = manager.hold(sequence.missing());
                sequence.attach_handed_over(arrived, cached_before, None);
                break if unfinished.is_ok() { "failed" } else { "without progress" };
            }
        }
    };
    let (id, blocks) = (&sequence.request.id, sequence.blocks());
    world.log(format_args!("{worker} has {blocks} blocks of {id}, {loaded} of them early; its prefill is {end}"));
}

/// Loads blocks of the prompt while others are computed. Returns how many leading ones are here.
async fn load_ahead(parts: &Parts, sequence: &Sequence, memory: &Arc<dyn Tier>, blocks: Range<usize>) -> usize {
    let (hashes, trace) = (&sequence.missing()[blocks], Context::none());
    let loading = parts.manager.prefetch_from(memory, hashes, &trace);
    // Blocks that have arrived stay when the load is dropped.
    timeout(IDLE_LIMIT, loading).await.map_or_else(|_| parts.manager.hold(hashes).len(), |loaded| loaded.blocks.len())
}
