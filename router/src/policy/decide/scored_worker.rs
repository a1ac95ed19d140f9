//! A worker with the terms of its cost for a request.

use crate::fleet::{Worker, WorkerEntry};
use crate::index::WorkerOverlap;
use crate::load::{Demand, WorkerSnapshot};
use crate::policy::composition::Features;
use crate::policy::cost::Cost;
use crate::policy::disaggregate::ServingMode;
use crate::policy::inputs::cacheable;
use crate::policy::prompt::Prompt;
use std::sync::Arc;

/// A worker with its cost.
pub(crate) struct ScoredWorker<'a> {
    /// Index of the worker's entry in the pool.
    pub(crate) at: usize,
    pub(crate) entry: &'a WorkerEntry,
    /// The prefix of the prompt that the worker has cached.
    pub(crate) held: WorkerOverlap,
    pub(crate) snapshot: WorkerSnapshot,
    pub(crate) prompt: Prompt,
    /// Cost with prefill and decode on this worker.
    pub(crate) aggregated: Cost,
    /// Cost with prefill on another worker.
    pub(crate) disaggregated: Option<Cost>,
    pub(crate) serving_mode: ServingMode,
    /// Whether the time of its prefill was measured and is not a default.
    pub(super) is_prefill_measured: bool,
}

impl<'a> ScoredWorker<'a> {
    pub(crate) fn worker(&self) -> &'a Arc<Worker> {
        &self.entry.worker
    }

    /// The cost under the chosen serving mode.
    pub(crate) fn cost(&self) -> Cost {
        match (self.serving_mode, self.disaggregated) {
            (ServingMode::Disaggregated, Some(disaggregated)) => disaggregated,
            _ => self.aggregated,
        }
    }

    /// The inputs of a composition.
    pub(crate) fn features(&self) -> Features<'_> {
        let Self { prompt, held, snapshot: WorkerSnapshot { estimate, stats, .. }, .. } = self;
        Features { cost: self.cost(), prompt: *prompt, held: *held, estimate, stats }
    }

    /// Demand of the request on the worker that decodes.
    pub(crate) fn demand(&self) -> Demand {
        let here = self.serving_mode == ServingMode::Aggregated;
        let prefill_tokens = if here { self.uncached() } else { 0 };
        let blocks = self.prompt.blocks.saturating_sub(u64::from(self.held.in_g1()));
        let context_tokens = self.prompt.tokens + (self.prompt.output_tokens / 2.0) as u64;
        let (timed_tokens, prefill_micros) = if here { self.timed() } else { (0, 0) };
        let prompts = u64::from(here);
        Demand { prefill_tokens, timed_tokens, prefill_micros, prompts, blocks, sequences: 1, context_tokens }
    }

    /// Demand of the prompt on a worker that only prefills.
    pub(crate) fn prefill_demand(&self) -> Demand {
        let blocks = self.prompt.tokens.div_ceil(self.prompt.block_size);
        let (timed_tokens, prefill_micros) = self.timed();
        Demand {
            prefill_tokens: self.uncached(),
            timed_tokens,
            prefill_micros,
            prompts: 1,
            blocks,
            ..Demand::default()
        }
    }

    /// Prompt tokens to compute, and the microseconds for which later prompts wait for them. Both are 0 before prompts
    /// were measured: a time from a default speed would stay in the sums after the real speed is known.
    fn timed(&self) -> (u64, u64) {
        if !self.is_prefill_measured {
            return (0, 0);
        }
        (self.uncached(), (self.aggregated.steps_and_compute * 1e6).round() as u64)
    }

    /// Prompt tokens that are not cached on this worker.
    pub(crate) fn uncached(&self) -> u64 {
        self.prompt.uncached(self.held)
    }

    /// Prompt tokens that are cached on this worker.
    pub(crate) fn cached(&self) -> u64 {
        u64::from(self.held.total()) * self.prompt.block_size
    }

    /// Full prompt blocks that are not cached on this worker.
    pub(crate) fn missing(&self) -> u64 {
        cacheable(self.prompt.tokens, self.prompt.block_size).saturating_sub(u64::from(self.held.total()))
    }
}
