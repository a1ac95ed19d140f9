//! Cost of a placement: the estimated time to first token and between tokens, term by term, and the time that it takes
//! from other requests. docs/routing.md derives the terms from the objective.
//!
//! Pure: a prompt and a worker's service times in, seconds out.

use super::prompt::Prompt;
use crate::index::{LEVELS, WorkerOverlap};
use crate::load::{OtherWorkers, PrefillTime, PromptArrivals, ServiceEstimate, StepTime};
use kvbm::Level;

/// What the time between tokens of this request and of others is worth, and how a batch changes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodePricing {
    /// Duration of a step on an average worker.
    pub(crate) step: StepTime,
    /// Duration of computing a prompt on an average worker, once it was measured.
    pub(crate) prefill: Option<PrefillTime>,
    /// Weight of this request's own decode steps: one second more per step costs as much as this many seconds more to
    /// the first token.
    pub(crate) own_steps: f64,
    /// Weight of other sequences: one second of delay of one decoding sequence costs as much as this many seconds more
    /// to the first token.
    pub(crate) others_delay: f64,
    /// Rate at which further prompts arrive.
    pub(crate) arrivals: PromptArrivals,
    /// Blocks that are lost for each one that is used, on the worker that loses least.
    pub(crate) least_lost_share: f32,
}

/// Remaining work for a prompt with a given cached prefix; the same for all workers with equal prefixes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemainingWork {
    pub(crate) prompt: Prompt,
    pub(crate) held: WorkerOverlap,
    /// Tokens per block.
    block_tokens: f64,
    /// Tokens to compute.
    uncached: f64,
    /// Seconds to compute them on an average worker, without the decode steps of the batch; `None` before prompts were
    /// measured.
    compute: Option<f64>,
    /// Decode steps of the batch that run while they are computed.
    steps: f64,
    /// Share of `uncached` that belongs to the shared prefix of the prompt; 0 if that is cached, or there is none.
    pub(crate) shared: f64,
    /// Tokens of prompt and output, and the seconds to compute them on an average worker with nothing cached; `None`
    /// before prompts were measured.
    all_tokens: f64,
    compute_all: Option<f64>,
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
    /// Waiting for a place in the batch.
    pub(crate) batch_wait: f64,
    /// Computing the tokens that are not cached, in steps that the batch shares.
    pub(crate) prefill: f64,
    /// Onboarding cached blocks from slower tiers.
    pub(crate) onboard: f64,
    /// Waiting behind earlier requests to the same tiers.
    pub(crate) tier_queue: f64,
    /// Transferring blocks from the prefill worker, as far as they do not arrive while it computes.
    pub(crate) kv_transfer: f64,
    /// Longer steps because of the sequences that decode on the worker, compared with an idle average worker.
    pub(crate) decode: f64,
    /// Longer steps of these sequences because of this one.
    pub(crate) decode_slowdown: f64,
    /// Delay of later prompts that queue behind this one.
    pub(crate) queue_externality: f64,
    /// Delay of decoding sequences while this prompt is computed.
    pub(crate) decode_stall: f64,
    /// Delay by prompts of the other workers of the same device, and of these prompts by this one.
    pub(crate) shared_device: f64,
    /// Recomputing blocks of other requests, or loading them again, that the memory would hold without this request.
    pub(crate) eviction: f64,
    /// Probability that the worker is full.
    pub(crate) full_probability: f64,
    /// The part of `prefill` without the steps of the batch.
    pub(crate) compute: f64,
    /// The part of `prefill` for which later prompts wait.
    pub(crate) steps_and_compute: f64,
    /// What a further copy of a prefix that many requests share saves them; not above 0.
    pub(crate) replication: f64,
    /// `compute` if other workers of the device wait for it, otherwise 0.
    pub(crate) device_compute: f64,
}

impl RemainingWork {
    /// `average`: duration of computing a prompt on an average worker, once it was measured; `shared_blocks`: length
    /// of the shared prefix of the prompt.
    pub(crate) fn of(prompt: Prompt, held: WorkerOverlap, average: Option<PrefillTime>, shared_blocks: u32) -> Self {
        let slower = (1..LEVELS.len()).fold(0, |bits, at| bits | u32::from(held.per_level()[at] > 0) << at);
        let all_tokens = (prompt.blocks * prompt.block_size) as f64;
        let (uncached, missing) = (prompt.uncached(held) as f64, shared_blocks.saturating_sub(held.total()));
        Self {
            prompt,
            held,
            block_tokens: prompt.block_size as f64,
            uncached,
            compute: average.map(|average| average.compute(uncached, prompt.tokens as f64 - uncached)),
            steps: average.map_or(0.0, |average| average.per_token_steps) * uncached,
            shared: (f64::from(missing) * prompt.block_size as f64 / uncached).min(1.0),
            all_tokens,
            compute_all: average.map(|average| average.compute(all_tokens, 0.0)),
            slower,
        }
    }

    /// Seconds to compute the first blocks of the prompt on an average worker; `None` before prompts were measured.
    pub(crate) fn average_compute_of(&self, blocks: u32) -> Option<f64> {
        Some(self.compute_all? * f64::from(blocks) * self.block_tokens / self.all_tokens)
    }

    /// Seconds to compute the tokens on an average worker, or their number before prompts were measured.
    pub(crate) fn average_compute(&self) -> f64 {
        self.compute.unwrap_or(self.uncached)
    }
}

impl Cost {
    /// Cost of prefill and decode on one worker, without the stall of its decode.
    #[expect(clippy::inline_always, reason = "a thousand times per decision, and every figure stays in a register")]
    #[inline(always)]
    pub(crate) fn aggregated(work: &RemainingWork, estimate: &ServiceEstimate, pricing: &DecodePricing) -> Self {
        let (mut onboard, mut tier_queue) = (0.0, 0.0);
        let mut slower = work.slower;
        while slower != 0 {
            let at = slower.trailing_zeros() as usize;
            slower &= slower - 1;
            let blocks = work.held.per_level()[at];
            // Onboarding stops where recomputing is faster, so it never costs more.
            let recompute = f64::from(blocks) * work.block_tokens * estimate.seconds_per_token;
            let alone = estimate.transfer(LEVELS[at], blocks).min(recompute);
            onboard += alone;
            tier_queue += estimate.backlog(LEVELS[at]).min(recompute - alone);
        }
        let compute = estimate.compute(work.compute, work.uncached);
        let step = estimate.step(&pricing.step);
        let first_steps = pricing.prefill.map_or(0.0, |prefill| prefill.first_steps);
        let steps_and_compute = compute + work.steps * step;
        let wait = estimate.capacity_wait(work.prompt.blocks, work.held.in_g1());
        let (decode, decode_slowdown) = pricing.decode(&work.prompt, estimate, wait.full_probability);
        Self {
            queue: estimate.queue,
            memory_wait: wait.memory,
            batch_wait: wait.batch,
            prefill: steps_and_compute + first_steps * step,
            onboard,
            tier_queue,
            decode,
            decode_slowdown,
            eviction: estimate.eviction(
                work.prompt.blocks,
                estimate.compute(work.compute_all, work.all_tokens),
                pricing.least_lost_share,
            ),
            full_probability: wait.full_probability,
            compute,
            steps_and_compute,
            queue_externality: queue_externality(
                steps_and_compute,
                estimate.queue,
                estimate.prompts,
                &pricing.arrivals,
            ),
            ..Self::default()
        }
    }

    /// Cost with prefill on another worker at cost `prefill`, then decode on this worker, which has `held` cached.
    pub(crate) fn disaggregated(
        prefill: &Self,
        work: &RemainingWork,
        estimate: &ServiceEstimate,
        pricing: &DecodePricing,
    ) -> Self {
        let RemainingWork { prompt, held, .. } = work;
        let blocks = (prompt.tokens / prompt.block_size).saturating_sub(u64::from(held.total())) as u32;
        let transfer = estimate.transfer(Level::Peer, blocks);
        // With nothing to transfer there is no wait, and the wait is never longer than recomputing takes.
        let recompute = f64::from(blocks) * work.block_tokens * estimate.seconds_per_token;
        let tier_queue = estimate.backlog(Level::Peer).min((recompute - transfer).max(0.0));
        let decode = Self::aggregated(work, estimate, pricing);
        // The queue of the decode worker advances while the prompt is computed on the prefill worker: only the rest of
        // it counts.
        let left = (decode.busy() - prefill.first_token()).max(0.0);
        let memory_wait = decode.memory_wait.min(left);
        let batch_wait = decode.batch_wait.min(left - memory_wait);
        Self {
            queue: prefill.queue + left - memory_wait - batch_wait,
            memory_wait: prefill.memory_wait + memory_wait,
            batch_wait: prefill.batch_wait + batch_wait,
            kv_transfer: transfer * estimate.handoff_transfer + estimate.handoff_overhead,
            tier_queue: prefill.tier_queue + tier_queue,
            decode: decode.decode,
            decode_slowdown: decode.decode_slowdown,
            decode_stall: 0.0,
            // Both workers keep the blocks, and one of them would in any case.
            eviction: prefill.eviction + decode.eviction + pricing.least_eviction(work, estimate),
            ..*prefill
        }
    }

    /// Total cost.
    pub(crate) fn total(&self) -> f64 {
        let Self { decode, decode_slowdown, decode_stall, queue_externality, .. } = self;
        let caused = decode_slowdown + decode_stall + queue_externality + self.shared_device;
        self.first_token() + decode + caused + self.eviction + self.replication
    }

    /// Counts that the `others` on the device of the worker compute prompts at the same time, each at its share of the
    /// speed. `weight`: at most 1.
    pub(crate) fn share_device(&mut self, others: &OtherWorkers, weight: f64) {
        let OtherWorkers { queue, busy, prompts } = *others;
        // Of the others' queues, what is computed until this prompt is.
        let waits = queue.min(busy * (self.queue + self.steps_and_compute));
        // Their prompts are delayed while they are there, and by no more than this prompt.
        let delays = prompts * self.steps_and_compute.min(queue / busy.max(1.0));
        self.shared_device = weight * (waits + delays);
        self.device_compute = weight * self.compute;
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
        self.queue + self.memory_wait + self.batch_wait
    }
}

impl DecodePricing {
    /// Cost of having one more sequence like this request on a worker: the mean of its cost to the request and of its
    /// cost to another sequence.
    pub(crate) fn per_sequence(&self, prompt: &Prompt) -> f64 {
        let own_context = prompt.tokens as f64 + prompt.output_tokens / 2.0;
        let added = self.step.per_sequence + self.step.per_context_token * own_context;
        added * (self.own_steps + self.others_delay * prompt.output_tokens) / 2.0
    }

    /// Seconds that later requests lose on the worker that loses least.
    fn least_eviction(&self, work: &RemainingWork, estimate: &ServiceEstimate) -> f64 {
        if !self.least_lost_share.is_finite() {
            return 0.0;
        }
        let compute = estimate.compute(work.compute_all, work.all_tokens);
        f64::from(self.least_lost_share) * estimate.reload(work.prompt.blocks, compute)
    }

    /// The request's own longer steps, and those of the sequences beside it.
    #[inline]
    fn decode(&self, prompt: &Prompt, estimate: &ServiceEstimate, full_probability: f64) -> (f64, f64) {
        let step = &self.step;
        let own_steps = self.own_steps + full_probability * prompt.output_tokens;
        let others_delay = self.others_delay + full_probability;
        let (sequences, rest) = (f64::from(estimate.sequences), f64::from(estimate.rest_tokens));
        let own_context = prompt.tokens as f64 + prompt.output_tokens / 2.0;
        let added = step.per_sequence + step.per_context_token * own_context;
        let others = step.per_sequence * sequences + step.per_context_token * f64::from(estimate.context_tokens);
        // Steps in which both this and another sequence are in the batch: the expected minimum of two exponentially
        // distributed lifetimes.
        let share = rest / (prompt.output_tokens + rest);
        let shared_steps = prompt.output_tokens * share;
        let alone = step.base + added;
        let mean_step = alone + others * share;
        let own = own_steps * (mean_step * estimate.step_pace() - alone);
        (own, others_delay * sequences * shared_steps * added * estimate.step_pace())
    }
}

/// Total delay, in seconds, that a prompt causes to later prompts. The prompt takes `seconds` and waits behind `here`
/// prompts, which take `queue` seconds. It delays by `seconds` every prompt that arrives before the queue is empty, and
/// others on the workers where prompts go instead. Their number is estimated as those that arrive at the mean rate
/// plus, because prompts come in bursts, as many as are queued now.
fn queue_externality(seconds: f64, queue: f64, here: u32, arrivals: &PromptArrivals) -> f64 {
    seconds * (f64::from(here) + arrivals.behind(queue, seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{LoadStats, Measured, Speeds};

    const PROMPT: Prompt = Prompt { tokens: 1000, block_size: 10, blocks: 110, output_tokens: 100.0 };
    /// Steps of 10 ms, 1 ms more for each sequence and for each thousand tokens of context.
    const STEP: StepTime = StepTime { base: 0.01, per_sequence: 0.001, per_context_token: 1e-6 };
    const PRICING: DecodePricing = DecodePricing {
        step: STEP,
        prefill: None,
        own_steps: 20.0,
        others_delay: 0.2,
        arrivals: PromptArrivals::NONE,
        least_lost_share: 0.0,
    };

    fn stats(waiting_tokens: u32) -> LoadStats {
        let speeds = Speeds { prefill: Measured::of(1000.0), block_bytes: Measured::of(1000.0), ..Speeds::default() };
        LoadStats { waiting_tokens, speeds, ..LoadStats::default() }
    }

    fn aggregated(held: [u32; LEVELS.len()], stats: &LoadStats) -> Cost {
        let work = RemainingWork::of(PROMPT, WorkerOverlap::of(held), PRICING.prefill, 0);
        Cost::aggregated(&work, &ServiceEstimate::of(stats), &PRICING)
    }

    #[test]
    fn terms_are_seconds() {
        let cost = aggregated([40, 0, 0, 0, 0], &stats(500));
        let want = Cost {
            queue: 0.5,
            prefill: 0.6,
            compute: 0.6,
            steps_and_compute: 0.6,
            decode: cost.decode,
            ..Cost::default()
        };
        assert!(cost == want && (cost.total() - 1.1).abs() < 1e-9, "{cost:?}");
    }

    #[test]
    fn every_term_is_a_part_of_the_total() {
        type Term = fn(&mut Cost) -> &mut f64;
        let parts: [(&str, Term); 14] = [
            ("queue", |cost| &mut cost.queue),
            ("memory_wait", |cost| &mut cost.memory_wait),
            ("batch_wait", |cost| &mut cost.batch_wait),
            ("prefill", |cost| &mut cost.prefill),
            ("onboard", |cost| &mut cost.onboard),
            ("tier_queue", |cost| &mut cost.tier_queue),
            ("kv_transfer", |cost| &mut cost.kv_transfer),
            ("decode", |cost| &mut cost.decode),
            ("decode_slowdown", |cost| &mut cost.decode_slowdown),
            ("decode_stall", |cost| &mut cost.decode_stall),
            ("queue_externality", |cost| &mut cost.queue_externality),
            ("shared_device", |cost| &mut cost.shared_device),
            ("eviction", |cost| &mut cost.eviction),
            ("replication", |cost| &mut cost.replication),
        ];
        for (name, part) in parts {
            let mut cost = Cost::default();
            *part(&mut cost) = 2.0;
            assert!((cost.total() - 2.0).abs() < 1e-9, "{name}: {cost:?}");
        }
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
            let work = RemainingWork::of(PROMPT, WorkerOverlap::of([held, 0, 0, 0, 0]), None, 0);
            Cost::disaggregated(&Cost::default(), &work, &ServiceEstimate::of(&stats), &PRICING)
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
            let load = LoadStats { active_blocks, total_blocks: 170, sequences: 1, ..stats(waiting) };
            let estimate = ServiceEstimate::of(&load);
            let work = RemainingWork::of(PROMPT, WorkerOverlap::default(), None, 0);
            (Cost::aggregated(&work, &estimate, &PRICING), Cost::disaggregated(&prefill, &work, &estimate, &PRICING))
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
        let cost = |cached, waiting, prompts: u32| {
            let mut cost = aggregated([cached, 0, 0, 0, 0], &stats(waiting));
            let arrivals = PromptArrivals::new(prompts.into(), 0.0, 0.0);
            cost.queue_externality = queue_externality(cost.prefill, cost.queue, prompts, &arrivals);
            cost.total()
        };
        // The cached prefix saves half a second; its worker's queue takes three quarters longer.
        assert!(cost(50, 750, 0) > cost(0, 0, 0), "on an idle fleet it is computed again");
        assert!(cost(50, 4750, 4) < cost(0, 4000, 4), "with requests queued behind it is not");
    }

    #[test]
    fn prompts_share_their_steps_with_the_batch() {
        let prefill = PrefillTime { per_token: 0.001, per_pair: 0.0, per_token_steps: 0.01, first_steps: 1.5 };
        let pricing = DecodePricing { prefill: Some(prefill), ..PRICING };
        let work = RemainingWork::of(PROMPT, WorkerOverlap::of([40, 0, 0, 0, 0]), Some(prefill), 0);
        let cost =
            |sequences| Cost::aggregated(&work, &ServiceEstimate::of(&LoadStats { sequences, ..stats(0) }), &pricing);
        let (idle, busy) = (cost(0), cost(10));
        // Steps take 10 ms without sequences and 20 ms with ten. The prompt has seven and a half, of which one and a
        // half delay no later prompt.
        let is = |value: f64, expected: f64| assert!((value - expected).abs() < 1e-6, "{expected}: {idle:?} {busy:?}");
        is(idle.prefill, 0.675);
        is(busy.prefill, 0.75);
        is(busy.steps_and_compute, 0.72);
        // Sequences stand still for this long.
        is(idle.compute, 0.6);
        is(busy.compute, 0.6);
    }

    #[test]
    fn workers_of_one_device_share_its_speed() {
        let cost = |held, waiting, [queue, busy, prompts]: [f64; 3]| {
            let mut cost = aggregated([held, 0, 0, 0, 0], &stats(waiting));
            cost.share_device(&OtherWorkers { queue, busy, prompts }, 1.0);
            cost
        };
        let is = |cost: Cost, seconds: f64| assert!((cost.shared_device - seconds).abs() < 1e-9, "{cost:?}");
        is(cost(50, 0, [0.0; 3]), 0.0);
        // 500 tokens take half a second. Another worker has one prompt with 0.2 s left: each waits for the other.
        is(cost(50, 0, [0.2, 1.0, 1.0]), 0.4);
        // With 2 s left, half a second of it is computed when this prompt is.
        is(cost(50, 0, [2.0, 1.0, 1.0]), 1.0);
        // Behind a queue of half a second it is a whole second. The other prompt still waits for this one alone.
        is(cost(50, 500, [2.0, 1.0, 1.0]), 1.5);
        // A prefix whose worker has a queue is computed again on a device of its own, but not beside that queue.
        assert!(cost(50, 600, [0.0; 3]).total() > cost(0, 0, [0.0; 3]).total());
        assert!(cost(50, 600, [0.0; 3]).total() < cost(0, 0, [0.6, 1.0, 1.0]).total());
        let mut quarter = aggregated([50, 0, 0, 0, 0], &stats(0));
        quarter.share_device(&OtherWorkers { queue: 2.0, busy: 1.0, prompts: 1.0 }, 0.25);
        is(quarter, 0.25);
        assert!((quarter.device_compute - 0.25 * quarter.compute).abs() < 1e-9, "{quarter:?}");
    }

    #[test]
    fn a_full_prompt_still_computes_one_token() {
        assert_eq!(PROMPT.uncached(WorkerOverlap::of([100, 0, 0, 0, 0])), 1);
    }

    #[test]
    fn blocks_that_a_worker_loses_cost_their_computation() {
        let cost = |lost_share, has_store| {
            let mut lossy = LoadStats { lost_share: Measured::of(lost_share), has_store, ..stats(0) };
            lossy.speeds.set_onboard(Level::G3, 0.01, 1e6);
            aggregated([0; 5], &lossy)
        };
        assert!(cost(0.0, false).eviction.abs() < 1e-9);
        // A quarter of 110 blocks: 275 tokens at 1,000 per second.
        let lost = cost(0.25, false);
        assert!((lost.eviction - 0.275).abs() < 1e-6 && (lost.total() - cost(0.0, false).total() - 0.275).abs() < 1e-6);
        // A store loads a block in one millisecond.
        assert!((cost(0.25, true).eviction - 0.0275).abs() < 1e-6);
    }

    #[test]
    fn with_a_prefill_worker_two_workers_lose_blocks() {
        let load = LoadStats { lost_share: Measured::of(0.5), ..stats(0) };
        let pricing = DecodePricing { least_lost_share: 0.25, ..PRICING };
        let (work, estimate) =
            (RemainingWork::of(PROMPT, WorkerOverlap::default(), None, 0), ServiceEstimate::of(&load));
        let prefill = Cost::aggregated(&work, &estimate, &pricing);
        let cost = Cost::disaggregated(&prefill, &work, &estimate, &pricing);
        // Half of 1,100 tokens on each, less a quarter that the best worker would lose of one copy.
        assert!((prefill.eviction - 0.275).abs() < 1e-6, "{prefill:?}");
        assert!((cost.eviction - 0.825).abs() < 1e-6, "{cost:?}");
    }

    #[test]
    fn a_worker_of_unknown_memory_costs_as_the_one_that_loses_least() {
        let work = RemainingWork::of(PROMPT, WorkerOverlap::default(), None, 0);
        for least_lost_share in [0.25, f32::INFINITY] {
            let pricing = DecodePricing { least_lost_share, ..PRICING };
            let cost = Cost::aggregated(&work, &ServiceEstimate::of(&stats(0)), &pricing);
            assert!(cost.eviction.abs() < 1e-9, "{cost:?}");
        }
    }

    #[test]
    fn sequences_cost_in_both_directions() {
        let cost = |sequences, rest_tokens| {
            let context_tokens = sequences * 2000;
            let rest_tokens = Measured::of(rest_tokens);
            aggregated([100, 0, 0, 0, 0], &LoadStats { sequences, context_tokens, rest_tokens, ..stats(0) })
        };
        assert!(cost(0, 100.0).decode.abs() < 1e-9 && cost(0, 100.0).decode_slowdown.abs() < 1e-9);
        // Each of ten adds 3 ms to a step, in half of the steps; twenty steps count.
        let ten = cost(10, 100.0);
        assert!((ten.decode - 20.0 * 10.0 * 0.003 / 2.0).abs() < 1e-9, "{ten:?}");
        // This one adds 1 + 1.05 ms to fifty steps of each of ten, of which a second is worth 0.2 s.
        assert!((ten.decode_slowdown - 0.2 * 10.0 * 50.0 * 0.00205).abs() < 1e-9, "{ten:?}");
        let ending = cost(10, 10.0);
        assert!(ending.decode < ten.decode / 4.0 && ending.decode_slowdown < ten.decode_slowdown / 4.0, "{ending:?}");
    }
}
