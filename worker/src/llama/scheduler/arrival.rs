//! Takes over the blocks of a prompt from the worker that computes it, while it still computes.
//!
//! Each time more blocks are computed there, they are loaded into G1 here. They are not held until the prefill is
//! complete: a worker that needs the memory for running requests evicts them, and they are loaded again later. So a
//! request that does not run yet takes no memory from those that do, and the prefill worker waits for nothing.
//!
//! A prefill that fails or makes no progress is not waited for: the blocks that have arrived are used, the others are
//! loaded from other tiers or computed.

use super::sequence::Sequence;
use super::stats::EngineStats;
use crate::handoff::{HandedBlocks, Progress, ProgressStream};
use crate::metrics::{ArrivalOutcome, EngineMetrics, HandoffPhase};
use futures::stream::Fuse;
use futures::{FutureExt, StreamExt};
use kvbm::{BlockManager, CachedBlocks, Level, Onboarded, SequenceHash, Tier};
use std::collections::HashSet;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// What all prompts that arrive at one engine share.
pub(super) struct ArrivalContext {
    pub(super) manager: BlockManager,
    pub(super) stats: Arc<EngineStats>,
    pub(super) metrics: EngineMetrics,
    pub(super) block_bytes: usize,
    /// The shortest limit of a prefill without progress.
    pub(super) min_idle: Duration,
}

/// The blocks of one prompt that another worker computes.
pub(super) struct Arrival<'a> {
    context: &'a ArrivalContext,
    sequence: &'a mut Sequence,
    memory: Arc<dyn Tier>,
    progress: Fuse<ProgressStream>,
    /// A change of the progress that came during a load, and when it came. `None` in it: the progress has ended.
    pending_progress: Option<(Option<Progress>, Instant)>,
    /// Number of leading blocks that were cached here before.
    cached_before: usize,
    /// Blocks that came from the other worker.
    handed_over: HashSet<SequenceHash>,
}

/// A load that is not counted yet. If its request is cancelled, the blocks that have arrived are counted when it is
/// dropped: also those behind one that has not, since blocks are loaded at the same time.
struct Uncounted<'a> {
    context: &'a ArrivalContext,
    hashes: &'a [SequenceHash],
    phase: HandoffPhase,
    /// Number of the blocks that were in G1 before.
    before: usize,
    is_over: bool,
}

impl<'a> Uncounted<'a> {
    fn new(context: &'a ArrivalContext, hashes: &'a [SequenceHash], phase: HandoffPhase) -> Self {
        Self { context, hashes, phase, before: cached(&context.manager, hashes), is_over: false }
    }

    /// The load has ended, and is counted by its result.
    fn over(mut self) {
        self.is_over = true;
    }
}

impl Drop for Uncounted<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            let arrived = cached(&self.context.manager, self.hashes).saturating_sub(self.before);
            self.context.metrics.received(self.phase, arrived * self.context.block_bytes);
        }
    }
}

/// Number of these blocks that are in G1.
fn cached(manager: &BlockManager, hashes: &[SequenceHash]) -> usize {
    let (mut count, mut rest) = (0, hashes);
    while let Some(at) = manager.next_cached(rest) {
        count += 1;
        rest = &rest[at + 1..];
    }
    count
}

/// How a prefill on another worker ended.
enum PrefillEnd {
    /// The prompt tokens that it found cached, by tier.
    Complete(Vec<(Level, u32)>),
    Failed,
    Stalled(Duration),
}

impl<'a> Arrival<'a> {
    /// `cached_before`: number of leading blocks that are cached here.
    pub(super) fn new(
        context: &'a ArrivalContext,
        sequence: &'a mut Sequence,
        HandedBlocks { memory, progress }: HandedBlocks,
        cached_before: usize,
    ) -> Self {
        let (progress, handed_over) = (progress.fuse(), HashSet::new());
        Self { context, sequence, memory, progress, pending_progress: None, cached_before, handed_over }
    }

    /// Loads the blocks as they are computed, and attaches them to the sequence when all are, or when the prefill has
    /// failed.
    pub(super) async fn take_over(mut self) {
        let (mut loaded, mut last_progress) = (self.cached_before, Instant::now());
        let end = loop {
            let limit = self.idle_limit().saturating_sub(last_progress.elapsed());
            let Ok((progress, at)) = timeout(limit, self.latest()).await else {
                break PrefillEnd::Stalled(last_progress.elapsed());
            };
            last_progress = at;
            match progress {
                Some(Progress::Computing { blocks }) => {
                    let blocks = (blocks as usize).min(self.sequence.missing_hashes().len());
                    // A block that is missing or corrupt is not asked for again until the prefill is complete.
                    if blocks > loaded && self.load_ahead(loaded..blocks).await > 0 {
                        loaded = blocks;
                    }
                }
                Some(Progress::Complete { cached }) => break PrefillEnd::Complete(cached),
                None => break PrefillEnd::Failed,
            }
        };
        let request_id = Arc::clone(&self.sequence.request.id);
        let trace_id = self.sequence.request.attributes.trace.trace_id().map(tracing::field::display);
        let outcome = match end {
            PrefillEnd::Complete(cached) => {
                self.complete(cached).await;
                self.sequence.prefilled_elsewhere = Some(last_progress);
                ArrivalOutcome::Complete
            }
            PrefillEnd::Failed => {
                tracing::warn!(
                    %request_id, trace_id, "prefill on another worker failed; the rest of the prompt is computed"
                );
                self.attach_arrived();
                ArrivalOutcome::Failed
            }
            PrefillEnd::Stalled(idle) => {
                tracing::warn!(
                    %request_id, trace_id, idle_s = idle.as_secs_f64(),
                    "prefill on another worker makes no progress; the rest of the prompt is computed"
                );
                self.attach_arrived();
                ArrivalOutcome::Stalled
            }
        };
        self.context.metrics.arrived(outcome);
    }

    /// How long to wait without progress: as long as computing the whole prompt here would take.
    fn idle_limit(&self) -> Duration {
        let seconds = self.sequence.recompute(&self.context.stats).seconds_per_block.unwrap_or(0.0);
        let whole = seconds * self.sequence.missing_hashes().len() as f64;
        Duration::try_from_secs_f64(whole).unwrap_or(Duration::MAX).max(self.context.min_idle)
    }

    /// The last change of the progress that has come since the last call, and when it came; waits for one. `None`: the
    /// progress has ended.
    async fn latest(&mut self) -> (Option<Progress>, Instant) {
        let (mut latest, mut at) = match self.pending_progress.take() {
            Some(pending) => pending,
            None => (self.progress.next().await, Instant::now()),
        };
        while let Some(Progress::Computing { .. }) = latest
            && let Some(Some(next)) = self.progress.next().now_or_never()
        {
            (latest, at) = (Some(next), Instant::now());
        }
        (latest, at)
    }

    /// Loads blocks of the prompt while others are computed, until they are here or the prefill ends. Returns how many
    /// leading ones are here; they are not held.
    async fn load_ahead(&mut self, blocks: Range<usize>) -> usize {
        let hashes = self.sequence.missing_hashes()[blocks].to_vec();
        let uncounted = Uncounted::new(self.context, &hashes, HandoffPhase::Prefill);
        let loaded = {
            let trace = &self.sequence.request.attributes.trace;
            let loading = self.context.manager.prefetch_from(&self.memory, &hashes, trace);
            let mut loading = pin!(timeout(self.context.min_idle, loading));
            loop {
                tokio::select! {
                    biased;
                    loaded = &mut loading => break loaded.ok(),
                    next = self.progress.next() => {
                        let has_ended = !matches!(next, Some(Progress::Computing { .. }));
                        self.pending_progress = Some((next, Instant::now()));
                        if has_ended {
                            break None;
                        }
                    }
                }
            }
        };
        uncounted.over();
        let Onboarded { blocks, from } = loaded.unwrap_or_else(|| {
            let blocks = self.context.manager.hold(&hashes);
            let from = vec![(Level::Peer, blocks.len())];
            Onboarded { blocks, from }
        });
        self.count(&hashes, &from, HandoffPhase::Prefill);
        blocks.len()
    }

    /// Counts blocks that came from the other worker.
    fn count(&mut self, hashes: &[SequenceHash], from: &[(Level, usize)], phase: HandoffPhase) {
        let mut at = 0;
        for (level, count) in from {
            if *level == Level::Peer {
                self.context.metrics.received(phase, count * self.context.block_bytes);
                self.handed_over.extend(&hashes[at..at + count]);
            }
            at += count;
        }
    }

    /// The prompt is computed: loads the blocks that are missing, for no longer than computing them would take.
    async fn complete(&mut self, cached: Vec<(Level, u32)>) {
        self.sequence.limit_cached(cached.iter().map(|(_, tokens)| *tokens as usize).sum());
        let (hashes, recompute) =
            (self.sequence.missing_hashes().to_vec(), self.sequence.recompute(&self.context.stats));
        let trace = &self.sequence.request.attributes.trace;
        let uncounted = Uncounted::new(self.context, &hashes, HandoffPhase::AfterPrefill);
        let onboarded = self.context.manager.onboard_from(&self.memory, &hashes, recompute, trace).await;
        uncounted.over();
        let Onboarded { blocks, from } = onboarded;
        self.count(&hashes, &from, HandoffPhase::AfterPrefill);
        self.attach(blocks, &cached);
        // Blocks for which there is no room now are loaded when there is.
        self.sequence.peer = Some(Arc::clone(&self.memory));
    }

    /// Attaches what has arrived. What the other worker found cached is not known.
    fn attach_arrived(&mut self) {
        self.sequence.limit_cached(self.cached_before * self.sequence.chain.block_size);
        let blocks = self.context.manager.hold(self.sequence.missing_hashes());
        self.attach(blocks, &[]);
    }

    /// Attaches blocks, and reports them. What the other worker found cached counts as cached here too.
    fn attach(&mut self, blocks: CachedBlocks, cached: &[(Level, u32)]) {
        let is_handed_over: Vec<bool> = blocks.iter().map(|block| self.handed_over.contains(&block.hash())).collect();
        let before = is_handed_over.iter().take_while(|handed| !**handed).count();
        let handed = is_handed_over.iter().filter(|handed| **handed).count();
        let [before, handed] = [before, handed].map(|blocks| (blocks * self.sequence.chain.block_size) as u32);
        self.sequence.attach(blocks, &self.context.manager);
        self.sequence.report_cached(Level::G1, before as usize);
        self.sequence.report.handed_over = handed;
        let (mut skip, mut left) = (before, handed);
        for (level, tokens) in cached {
            let fresh = tokens.saturating_sub(skip).min(left);
            skip = skip.saturating_sub(*tokens);
            left -= fresh;
            self.sequence.report_cached(*level, fresh as usize);
        }
    }
}
