//! Cost of a placement: the estimated time to first token, term by term, and the time that it takes from other
//! requests.
//!
//! Pure: a prompt and a worker's service times in, seconds out.

use crate::index::{LEVELS, WorkerOverlap};
use crate::load::ServiceEstimate;
use kvbm::Level;

/// The properties of a prompt that its cost depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Prompt {
    /// Length in tokens.
    pub(crate) tokens: u64,
    /// Tokens per block.
    pub(crate) block_size: u64,
    /// Blocks for the prompt and its expected output.
    pub(crate) blocks: u64,
}

/// Remaining work for a prompt with a given cached prefix; the same for all workers with equal prefixes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemainingWork {
    prompt: Prompt,
    pub(crate) held: WorkerOverlap,
    /// Tokens to compute.
    uncached: f64,
    /// A bit for each tier below G1 with blocks to onboard.
    slower: u32,
}

/// Cost in seconds, by term.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Cost {
    /// Computing prompts that are queued before this one.
    pub(crate) queue: f64,
    /// Waiting until blocks are free.
    pub(crate) memory_wait: f64,
    /// Computing the tokens that are not cached.
    pub(crate) prefill: f64,
    /// Onboarding cached blocks from slower tiers.
    pub(crate) onboard: f64,
    /// Waiting behind earlier requests to the same tiers.
    pub(crate) tier_queue: f64,
    /// Transferring blocks from the prefill worker.
    pub(crate) kv_transfer: f64,
    /// Sharing steps with the sequences that decode on the worker.
    pub(crate) decode: f64,
    /// Delay of later prompts that queue behind this one.
    pub(crate) queue_externality: f64,
    /// Delay of decoding sequences while this prompt is computed.
    pub(crate) decode_stall: f64,
}

/// Expected output tokens of a request, for memory and admission cost, unless it asks for fewer: most answers are
/// shorter, and blocks are allocated as they fill.
pub(crate) const OUTPUT_TOKENS: u64 = 256;
/// Decode steps whose delay by other sequences counts. With fewer, a batch of dozens looks as good as an idle worker;
/// with many more, a long cached prefix is given up for a slightly smaller batch.
const DECODE_STEPS: f64 = 4.0;
/// Upper bound in seconds of the wait for blocks: by then the engine has preempted or rejected a request.
const MEMORY_WAIT_MAX: f64 = 60.0;

impl Prompt {
    /// Tokens that are not in `held`. At least one: the last token is always computed, for its logits.
    pub(crate) fn uncached(&self, held: WorkerOverlap) -> u64 {
        self.tokens.saturating_sub(u64::from(held.total()) * self.block_size).max(1)
    }

    /// Blocks for the output alone.
    pub(crate) fn output_blocks(&self) -> u64 {
        self.blocks.saturating_sub(self.tokens.div_ceil(self.block_size))
    }
}

impl RemainingWork {
    pub(crate) fn of(prompt: Prompt, held: WorkerOverlap) -> Self {
        let slower = (1..LEVELS.len()).fold(0, |bits, at| bits | u32::from(held.per_level()[at] > 0) << at);
        Self { prompt, held, uncached: prompt.uncached(held) as f64, slower }
    }
}

impl Cost {
    /// Cost of prefill and decode on one worker. `weight` scales the delay of other requests.
    #[expect(clippy::inline_always, reason = "a thousand times per decision, and every figure stays in a register")]
    #[inline(always)]
    pub(crate) fn aggregated(work: &RemainingWork, estimate: &ServiceEstimate, weight: f64) -> Self {
        let (mut onboard, mut tier_queue) = (0.0, 0.0);
        let mut slower = work.slower;
        while slower != 0 {
            let at = slower.trailing_zeros() as usize;
            slower &= slower - 1;
            let blocks = u64::from(work.held.per_level()[at]);
            // Onboarding stops where recomputing is faster, so it never costs more.
            let recompute = (blocks * work.prompt.block_size) as f64 * estimate.token;
            let alone = estimate.transfer(LEVELS[at], blocks).min(recompute);
            onboard += alone;
            tier_queue += estimate.backlog(LEVELS[at]).min(recompute - alone);
        }
        Self {
            queue: estimate.queue,
            memory_wait: memory_wait(work, estimate),
            prefill: work.uncached * estimate.token,
            onboard,
            tier_queue,
            decode: weight * DECODE_STEPS * estimate.batch,
            ..Self::default()
        }
    }

    /// Cost with prefill on another worker at cost `prefill`, then decode on this worker, which has `held` cached.
    pub(crate) fn disaggregated(prefill: &Self, work: &RemainingWork, estimate: &ServiceEstimate, weight: f64) -> Self {
        let RemainingWork { prompt, held, .. } = work;
        let blocks = (prompt.tokens / prompt.block_size).saturating_sub(u64::from(held.total()));
        let transfer = estimate.transfer(Level::Peer, blocks);
        // With nothing to transfer there is no wait, and the wait is never longer than recomputing takes.
        let recompute = (blocks * prompt.block_size) as f64 * estimate.token;
        let tier_queue = estimate.backlog(Level::Peer).min((recompute - transfer).max(0.0));
        let decode = Self::aggregated(work, estimate, weight);
        // The queue of the decode worker advances while the prompt is computed on the prefill worker: only the rest of
        // it counts.
        let left = (decode.busy() - prefill.first_token()).max(0.0);
        let memory_wait = decode.memory_wait.min(left);
        Self {
            queue: prefill.queue + left - memory_wait,
            memory_wait: prefill.memory_wait + memory_wait,
            kv_transfer: transfer + estimate.handoff_overhead,
            tier_queue: prefill.tier_queue + tier_queue,
            decode: decode.decode,
            decode_stall: 0.0,
            ..*prefill
        }
    }

    /// Total cost.
    pub(crate) fn total(&self) -> f64 {
        self.first_token() + self.decode + self.decode_stall + self.queue_externality
    }

    /// The request's own time to first token.
    pub(crate) fn first_token(&self) -> f64 {
        self.busy() + self.prefill + self.onboard + self.tier_queue + self.kv_transfer
    }

    /// The part that does not depend on the cache.
    pub(crate) fn load(&self) -> f64 {
        self.busy() + self.decode
    }

    fn busy(&self) -> f64 {
        self.queue + self.memory_wait
    }
}

/// Delay of later prompts by a prompt of `prefill` seconds. As many prompts are expected to arrive during its wait as
/// are queued now: `here` on this worker, plus the `mean` over all workers. The first alone would send all long prompts
/// to workers without short ones; the second alone lets prompts stay where they queue too long. On an idle fleet the
/// term is 0 and only the request's own first token counts; on a full one it matters that no prefix is computed twice.
pub(crate) fn queue_externality(prefill: f64, here: u32, mean: f64) -> f64 {
    prefill * (f64::from(here) + mean)
}

/// Wait until enough blocks are free. Blocks are freed at the rate of blocks in use over the mean duration of a
/// request.
#[inline]
fn memory_wait(work: &RemainingWork, estimate: &ServiceEstimate) -> f64 {
    if work.prompt.blocks <= u64::from(estimate.free_blocks) { 0.0 } else { wait_for_memory(work, estimate) }
}

#[cold]
fn wait_for_memory(RemainingWork { prompt, held, .. }: &RemainingWork, estimate: &ServiceEstimate) -> f64 {
    let work = prompt.blocks.saturating_sub(u64::from(held.in_g1()));
    let short = work.saturating_sub(estimate.free_blocks.into()) as f64;
    (estimate.mean_duration * short / f64::from(estimate.active_blocks.max(1))).min(MEMORY_WAIT_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{LoadStats, Measured, Speeds, defaults};

    const PROMPT: Prompt = Prompt { tokens: 1000, block_size: 10, blocks: 110 };

    fn stats(waiting_tokens: u32) -> LoadStats {
        let speeds = Speeds { prefill: Measured::of(1000.0), block_bytes: Measured::of(1000.0), ..Speeds::default() };
        LoadStats { waiting_tokens, speeds, ..LoadStats::default() }
    }

    fn aggregated(held: [u32; LEVELS.len()], stats: &LoadStats) -> Cost {
        Cost::aggregated(&RemainingWork::of(PROMPT, WorkerOverlap::of(held)), &ServiceEstimate::of(stats), 1.0)
    }

    #[test]
    fn terms_are_seconds() {
        let cost = aggregated([40, 0, 0, 0, 0], &stats(500));
        let want = Cost { queue: 0.5, prefill: 0.6, decode: cost.decode, ..Cost::default() };
        assert!(cost == want && (cost.total() - 1.1).abs() < 1e-9, "{cost:?}");
    }

    #[test]
    fn a_slow_tier_never_costs_more_than_a_miss() {
        let mut slow = stats(0);
        slow.speeds.set_onboard(Level::G3, 5.0, 1.0);
        let miss = aggregated([0; 5], &slow);
        let hit = aggregated([0, 0, 50, 0, 0], &slow);
        assert!(hit.total() <= miss.total() + 1e-9, "{hit:?} {miss:?}");
        let quick = aggregated([0, 50, 0, 0, 0], &slow);
        assert!(quick.total() < hit.total());
    }

    #[test]
    fn a_tier_queue_adds_its_wait_up_to_the_cost_of_a_miss() {
        let cost = |queued| {
            let mut stats = LoadStats { queued: [0, queued, 0, 0, 0], ..stats(0) };
            stats.speeds.set_onboard(Level::G3, 0.01, 1e6);
            aggregated([0, 0, 50, 0, 0], &stats)
        };
        let (idle, busy, flooded) = (cost(0), cost(100), cost(1_000_000));
        // One millisecond per block.
        assert!((busy.tier_queue - 0.1).abs() < 1e-6 && (busy.total() - idle.total() - 0.1).abs() < 1e-6, "{busy:?}");
        assert_eq!((idle.tier_queue, idle.onboard), (0.0, busy.onboard), "onboarding itself takes as long");
        assert!((flooded.total() - aggregated([0; 5], &stats(0)).total()).abs() < 1e-9, "{flooded:?}");
    }

    #[test]
    fn a_transfer_queue_adds_its_wait_up_to_recomputing() {
        let cost = |held, queued| {
            let mut stats = LoadStats { queued: [0, 0, 0, 0, queued], ..stats(0) };
            stats.speeds.set_onboard(Level::Peer, 0.01, 1e6);
            let work = RemainingWork::of(PROMPT, WorkerOverlap::of([held, 0, 0, 0, 0]));
            Cost::disaggregated(&Cost::default(), &work, &ServiceEstimate::of(&stats), 1.0)
        };
        let (idle, busy, flooded) = (cost(40, 0), cost(40, 100), cost(40, 1_000_000));
        // One millisecond per block; sixty blocks take 0.6 seconds to compute.
        assert!((busy.tier_queue - 0.1).abs() < 1e-6 && idle.tier_queue == 0.0, "{busy:?}");
        assert!(
            (flooded.tier_queue + flooded.kv_transfer - 0.6 - cost(100, 0).kv_transfer).abs() < 1e-9,
            "{flooded:?}"
        );
        assert!(cost(100, 1_000_000).tier_queue < 1e-9, "nothing is transferred");
    }

    #[test]
    fn the_decode_queue_left_after_the_remote_prefill_counts() {
        let prefill = Cost { queue: 0.5, memory_wait: 0.1, prefill: 1.0, ..Cost::default() };
        let costs = |waiting, active_blocks| {
            let estimate = ServiceEstimate::of(&LoadStats { active_blocks, total_blocks: 170, ..stats(waiting) });
            let work = RemainingWork::of(PROMPT, WorkerOverlap::default());
            (Cost::aggregated(&work, &estimate, 1.0), Cost::disaggregated(&prefill, &work, &estimate, 1.0))
        };
        let is = |cost: &Cost, queue: f64, memory_wait: f64| {
            assert!(
                (cost.queue - queue).abs() < 1e-9 && (cost.memory_wait - memory_wait).abs() < 1e-9,
                "{cost:?}: {queue} {memory_wait}"
            );
        };
        // The prompt is computed after 1.6 seconds.
        is(&costs(1500, 0).1, 0.5, 0.1);
        is(&costs(5000, 0).1, 0.5 + (5.0 - 1.6), 0.1);
        let (here, disaggregated) = costs(1500, 90);
        is(&disaggregated, 0.5, 0.1 + (1.5 + here.memory_wait - 1.6));
        let (here, disaggregated) = costs(5000, 90);
        is(&disaggregated, 0.5 + (5.0 - 1.6), 0.1 + here.memory_wait);
        assert!(
            (disaggregated.first_token() - disaggregated.kv_transfer - here.queue - here.memory_wait).abs() < 1e-9,
            "as long as on this worker"
        );
    }

    #[test]
    fn longer_queues_make_a_cached_prefix_worth_a_longer_wait() {
        let cost = |cached, waiting, prompts| {
            let mut cost = aggregated([cached, 0, 0, 0, 0], &stats(waiting));
            cost.queue_externality = queue_externality(cost.prefill, prompts, prompts as f64);
            cost.total()
        };
        // The cached prefix saves half a second; its worker's queue takes three quarters longer.
        assert!(cost(50, 750, 0) > cost(0, 0, 0), "on an idle fleet it is computed again");
        assert!(cost(50, 4750, 4) < cost(0, 4000, 4), "with requests queued behind it is not");
    }

    #[test]
    fn a_full_prompt_still_computes_one_token() {
        assert_eq!(PROMPT.uncached(WorkerOverlap::of([100, 0, 0, 0, 0])), 1);
    }

    #[test]
    fn a_full_worker_costs_the_wait_for_blocks() {
        let full = LoadStats { active_blocks: 100, total_blocks: 150, ..stats(0) };
        let short = aggregated([0; 5], &full).memory_wait;
        assert!((short - defaults::MEAN_DURATION * 60.0 / 100.0).abs() < 1e-9, "{short}");
        let cached = aggregated([60, 0, 0, 0, 0], &full).memory_wait;
        assert!(cached < 1e-9, "cached blocks need no free blocks");
    }
}
