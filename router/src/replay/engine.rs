//! A simulated engine: continuous batching with chunked prefill, first come first served, over a block pool.
//!
//! ```text
//!   accept ─▶ waiting ─ allocation ─▶ (onboarding) ─▶ prefill, in chunks ─▶ decode, a token per step ─▶ finished
//!                                                           └─ prefill stage: retained until transferred
//! ```
//! Blocks for prompt and output are allocated at once, so no sequence is preempted. Output blocks are never reused as a
//! prefix, because a trace does not identify them. A prompt from a prefill worker is onboarded over the links of both
//! workers, which transfer one prompt at a time.

mod host_copy;
mod sequence;
mod steps;

use self::sequence::{Sequence, blocks_needed};
use self::steps::{Steps, nanoseconds};
use super::lru::Lru;
use super::options::QueueOrder;
use super::pool::Pool;
use super::profile::{Link, Profile};
use super::trace::{BLOCK_TOKENS, RequestSpec};
use crate::admission::Stage;
use crate::hash::NumberMap;
use kvbm::Level;
use std::collections::VecDeque;
use worker::plane::{Load, OnboardSpeed};

/// One worker.
#[derive(Clone)]
pub(super) struct Engine {
    order: QueueOrder,
    /// Requests taken from the queue.
    taken: u64,
    pool: Pool,
    host: Option<Lru>,
    /// Blocks of `host` that were copied there ahead of demand and that no request has used, with the copy of each.
    unused_copied: NumberMap<u32, u32>,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    /// Prompts computed for other workers, oldest first, until these have received the blocks.
    retained: Vec<Sequence>,
    /// Prompt tokens that each sequence of `running` computes in the current step.
    chunks: Vec<u64>,
    /// Prompt tokens that are accepted and not computed yet.
    waiting_tokens: u64,
    steps: Steps,
    prefill_tokens_per_second: Option<f64>,
    decode_step_s: Option<f64>,
    /// Measured bandwidth of transfers from other workers, without the time in which they waited for this worker's
    /// link.
    peer_bytes_per_second: Option<f64>,
    /// Time at which the link is free to receive.
    receive_link_free_ns: u64,
    /// Nanoseconds spent in steps.
    pub(super) busy_ns: u64,
}

/// State that workers share.
#[derive(Default)]
pub(super) struct Environment {
    /// The shared store (G4), if there is one.
    pub(super) store: Option<Lru>,
    /// Time at which each worker's link is free to send, by worker.
    pub(super) send_link_free_ns: Vec<u64>,
}

/// A block was stored in a tier, or removed from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockChange {
    pub(super) level: Level,
    pub(super) block: u32,
    pub(super) stored: bool,
}

/// What a step changed outside the engine.
#[derive(Default)]
pub(super) struct Effects {
    pub(super) changes: Vec<BlockChange>,
    /// Requests that joined the batch, with the number of leading blocks that were cached or onboarded.
    pub(super) admitted: Vec<(u32, u64)>,
    /// For each block that a request onboards and that was copied ahead of demand: the copy.
    pub(super) used_copies: Vec<u32>,
    pub(super) first_tokens: Vec<u32>,
    /// Requests whose prompt is computed and which decode on another worker.
    pub(super) prefilled: Vec<u32>,
    /// Requests whose retained prompt was dropped to free memory.
    pub(super) dropped: Vec<u32>,
    pub(super) finished: Vec<u32>,
    /// Time between tokens, in nanoseconds, and the number of tokens with this time.
    pub(super) inter_token_gaps: Vec<(u64, u64)>,
}

/// What a worker does next.
pub(super) enum Schedule {
    /// Runs one or several steps until this time.
    RunUntil(u64),
    /// Waits for onboarding until this time.
    WaitUntil(u64),
    /// Waits for a request.
    Idle,
}

/// Oldest requests of a queue among which k-LPM looks for the longest prefix: more would make a step of a long queue
/// slow to simulate.
const LPM_WINDOW: usize = 128;
/// Weight of a new measurement in a moving average.
const EWMA_WEIGHT: f64 = 0.1;

impl Engine {
    pub(super) fn new(profile: &Profile, order: QueueOrder) -> Self {
        Self {
            order,
            taken: 0,
            pool: Pool::new(profile.blocks()),
            host: profile.host.map(|store| Lru::new(store.capacity_bytes / profile.block_bytes())),
            unused_copied: NumberMap::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            retained: Vec::new(),
            chunks: Vec::new(),
            waiting_tokens: 0,
            steps: Steps::default(),
            prefill_tokens_per_second: None,
            decode_step_s: None,
            peer_bytes_per_second: None,
            receive_link_free_ns: 0,
            busy_ns: 0,
        }
    }

    /// Whether the device memory is large enough for a request.
    pub(super) fn fits(profile: &Profile, spec: &RequestSpec) -> bool {
        blocks_needed(spec) <= profile.blocks()
    }

    /// Adds a stage of a request to the waiting queue. `prefill_worker`: the worker that computed the prompt, if
    /// another one did.
    pub(super) fn accept(&mut self, request: u32, spec: &RequestSpec, stage: Stage, prefill_worker: Option<usize>) {
        // The last token is computed here; the rest is transferred.
        let computed_tokens = if stage == Stage::Decode { spec.input_tokens - 1 } else { 0 };
        self.waiting_tokens += spec.input_tokens - computed_tokens;
        self.waiting.push_back(Sequence {
            request,
            stage,
            prefill_worker,
            computed_tokens,
            registered: 0,
            private_blocks: 0,
            generated_tokens: 0,
            ready_ns: 0,
            onboarding: 0,
        });
    }

    /// The decode worker has received the blocks of a prompt: frees them.
    pub(super) fn release(&mut self, request: u32, spec: &RequestSpec) {
        if let Some(at) = self.retained.iter().position(|retained| retained.request == request) {
            let retained = self.retained.remove(at);
            self.pool.release(&spec.blocks[..retained.registered], retained.private_blocks);
        }
    }

    /// Drops the oldest retained prompt when nothing runs and a request that decodes is waiting. Otherwise two workers
    /// that retain each other's prompts would wait forever.
    fn drop_retained(&mut self, requests: &[RequestSpec]) -> Option<u32> {
        let decodes = self.waiting.iter().any(|sequence| sequence.stage != Stage::Prefill);
        let request = self.retained.first().filter(|_| decodes && self.running.is_empty())?.request;
        self.release(request, &requests[request as usize]);
        Some(request)
    }

    /// A prompt will not be transferred. Returns whether this worker computes it; `false` when its blocks are in
    /// transit.
    pub(super) fn recompute_prompt(&mut self, request: u32, spec: &RequestSpec) -> bool {
        let Some(sequence) = self.waiting.iter_mut().find(|sequence| sequence.request == request) else { return false };
        (sequence.stage, sequence.prefill_worker) = (Stage::Whole, None);
        self.waiting_tokens += spec.input_tokens - 1;
        sequence.computed_tokens = 0;
        true
    }

    /// Admits waiting requests for which blocks are free, and schedules the next step.
    pub(super) fn schedule(
        &mut self,
        now_ns: u64,
        requests: &[RequestSpec],
        profile: &Profile,
        environment: &mut Environment,
        effects: &mut Effects,
    ) -> Schedule {
        // A request allocates blocks only when the step has tokens left for it. Until then they serve as cache.
        let mut free_tokens = self.free_tokens(now_ns, requests, profile);
        while free_tokens > 0
            && self.running.len() < profile.max_num_seqs
            && let Some((at, next)) = self.next_waiting(requests)
        {
            let spec = &requests[next.request as usize];
            let (cached, blocks, stage) = (self.pool.cached_prefix(&spec.blocks), next.blocks(spec), next.stage);
            let Some(evicted) = self.pool.allocate(&spec.blocks[..cached], blocks) else {
                let Some(dropped) = self.drop_retained(requests) else { break };
                effects.dropped.push(dropped);
                continue;
            };
            let Some(mut sequence) = self.waiting.remove(at) else { break };
            self.taken += 1;
            // A transfer starts when both links are free.
            let wait_s = |free_ns: u64| free_ns.saturating_sub(now_ns) as f64 / 1e9;
            let receive_wait_s = wait_s(self.receive_link_free_ns);
            let peer_link = profile.peer.zip(sequence.prefill_worker).map(|(link, from)| Link {
                latency_s: link.latency_s + receive_wait_s.max(wait_s(environment.send_link_free_ns[from])),
                ..link
            });
            let (onboarding, seconds) =
                self.plan_onboarding(profile, environment.store.as_ref(), peer_link, &spec.blocks[cached..]);
            self.use_copied(&spec.blocks[cached..cached + onboarding], effects);
            self.evict(&evicted, &mut environment.store, effects);
            sequence.registered = cached;
            sequence.onboarding = onboarding;
            sequence.private_blocks = blocks - cached as u64;
            self.waiting_tokens += sequence.computed_tokens;
            sequence.computed_tokens = ((cached + onboarding) as u64 * BLOCK_TOKENS).min(spec.input_tokens - 1);
            sequence.ready_ns = if seconds > 0.0 { now_ns + nanoseconds(seconds) } else { now_ns };
            self.waiting_tokens -= sequence.computed_tokens;
            if seconds <= 0.0 {
                free_tokens = free_tokens.saturating_sub(spec.input_tokens - sequence.computed_tokens);
            }
            match (sequence.prefill_worker, profile.peer) {
                (Some(from), Some(link)) if onboarding > 0 => {
                    (self.receive_link_free_ns, environment.send_link_free_ns[from]) =
                        (sequence.ready_ns, sequence.ready_ns);
                    let bytes = (onboarding as u64 * profile.block_bytes()) as f64;
                    update_ewma(&mut self.peer_bytes_per_second, bytes / (seconds - receive_wait_s - link.latency_s));
                }
                _ => {}
            }
            // For a transferred prompt, the prefill worker has reported the hits.
            if stage != Stage::Decode {
                effects.admitted.push((sequence.request, (cached + onboarding) as u64));
            }
            self.running.push(sequence);
        }
        self.plan_step(now_ns, requests, profile, effects)
    }

    /// The next request of the queue, with its position.
    fn next_waiting(&self, requests: &[RequestSpec]) -> Option<(usize, &Sequence)> {
        let cached = |sequence: &Sequence| self.pool.cached_prefix(&requests[sequence.request as usize].blocks);
        let at = match self.order {
            QueueOrder::KLpm(k) if !self.taken.is_multiple_of(k.get().into()) => {
                let window = self.waiting.iter().take(LPM_WINDOW).enumerate().rev();
                // The oldest of equals.
                window.max_by_key(|(_, sequence)| cached(sequence)).map_or(0, |(at, _)| at)
            }
            _ => 0,
        };
        Some((at, self.waiting.get(at)?))
    }

    /// Tokens that the current batch leaves free in the next step.
    fn free_tokens(&self, now_ns: u64, requests: &[RequestSpec], profile: &Profile) -> u64 {
        let wanted = self.running.iter().map(|sequence| match sequence {
            Sequence { generated_tokens: 1.., .. } => 1,
            Sequence { ready_ns, .. } if *ready_ns > now_ns => 0,
            Sequence { request, computed_tokens, .. } => requests[*request as usize].input_tokens - computed_tokens,
        });
        profile.max_num_batched_tokens.saturating_sub(wanted.sum())
    }

    /// Plans a step: one token for each decoding sequence, and the remaining tokens for prompts in order of arrival.
    fn plan_step(
        &mut self,
        now_ns: u64,
        requests: &[RequestSpec],
        profile: &Profile,
        effects: &mut Effects,
    ) -> Schedule {
        let Self { running, chunks, pool, .. } = self;
        let (mut decoding, mut context) = (0, 0);
        for sequence in running.iter().filter(|sequence| sequence.generated_tokens > 0) {
            decoding += 1;
            context += sequence.computed_tokens + sequence.generated_tokens;
        }
        let mut free_tokens = profile.max_num_batched_tokens - decoding;
        let (mut prompt_tokens, mut last_tokens, mut prefill_s, mut ready_ns) = (0, 0, 0.0, u64::MAX);
        chunks.clear();
        for sequence in running.iter_mut() {
            let spec = &requests[sequence.request as usize];
            let mut chunk = 0;
            if sequence.generated_tokens == 0 && sequence.ready_ns > now_ns {
                ready_ns = ready_ns.min(sequence.ready_ns);
            } else if sequence.generated_tokens == 0 {
                for _ in 0..std::mem::take(&mut sequence.onboarding) {
                    sequence.register(&spec.blocks, pool, effects);
                }
                chunk = free_tokens.min(spec.input_tokens - sequence.computed_tokens);
                prefill_s += profile.prefill_s(chunk, sequence.computed_tokens);
                free_tokens -= chunk;
                match (sequence.stage, chunk) {
                    (Stage::Decode, 1) => last_tokens += 1,
                    _ => prompt_tokens += chunk,
                }
            }
            chunks.push(chunk);
        }
        if prompt_tokens + last_tokens + decoding == 0 {
            return if ready_ns == u64::MAX { Schedule::Idle } else { Schedule::WaitUntil(ready_ns) };
        }
        let decode_s = decoding as f64 * profile.decode_sequence_s + context as f64 * profile.decode_context_token_s;
        // With decoding sequences only, nothing changes until one of them ends or a request arrives.
        let left = |sequence: &Sequence| {
            requests[sequence.request as usize].output_tokens.saturating_sub(sequence.generated_tokens)
        };
        let decode_only = prompt_tokens + last_tokens == 0 && ready_ns == u64::MAX;
        let count = if decode_only { running.iter().map(left).min().unwrap_or(1).max(1) } else { 1 };
        let (first_s, growth_s) =
            (profile.step_base_s + decode_s + prefill_s, decoding as f64 * profile.decode_context_token_s);
        self.steps = Steps { began_ns: now_ns, count, prompt_tokens, first_s, growth_s };
        Schedule::RunUntil(self.steps.end())
    }

    /// A request arrived: cancels the steps that have not begun. Returns the end of the current step if it is earlier
    /// than planned.
    pub(super) fn interrupt(&mut self, now_ns: u64) -> Option<u64> {
        let (before, end) = (self.steps.count, self.steps.ends().position(|end| end >= now_ns)?);
        self.steps.count = end as u64 + 1;
        (self.steps.count < before).then(|| self.steps.end())
    }

    /// Ends the steps that `schedule` planned.
    pub(super) fn complete_steps(
        &mut self,
        now_ns: u64,
        requests: &[RequestSpec],
        store: &mut Option<Lru>,
        effects: &mut Effects,
    ) {
        let steps = self.steps;
        self.busy_ns += now_ns - steps.began_ns;
        let decoding = self.running.iter().filter(|sequence| sequence.generated_tokens > 0).count() as u64;
        for step in (0..steps.count).map(|nth| steps.seconds(nth)) {
            if steps.prompt_tokens > 0 {
                update_ewma(&mut self.prefill_tokens_per_second, steps.prompt_tokens as f64 / step);
            } else {
                update_ewma(&mut self.decode_step_s, step);
            }
            // Each decoding sequence gets one token per step.
            effects.inter_token_gaps.push((nanoseconds(step), decoding));
        }
        let Self { running, retained, chunks, pool, waiting_tokens, .. } = self;
        for (sequence, chunk) in running.iter_mut().zip(chunks.iter()) {
            let spec = &requests[sequence.request as usize];
            if sequence.generated_tokens > 0 {
                sequence.generated_tokens += steps.count;
                continue;
            }
            if *chunk == 0 {
                continue;
            }
            sequence.computed_tokens += chunk;
            *waiting_tokens -= chunk;
            while (sequence.registered as u64 + 1) * BLOCK_TOKENS <= sequence.computed_tokens
                || (sequence.computed_tokens == spec.input_tokens && sequence.registered < spec.blocks.len())
            {
                sequence.register(&spec.blocks, pool, effects);
            }
            if sequence.computed_tokens < spec.input_tokens {
                continue;
            }
            if sequence.stage == Stage::Prefill {
                effects.prefilled.push(sequence.request);
            } else {
                sequence.generated_tokens = 1;
                effects.first_tokens.push(sequence.request);
            }
        }
        for sequence in running.extract_if(.., |sequence| sequence.is_finished(&requests[sequence.request as usize])) {
            if sequence.stage == Stage::Prefill {
                retained.push(sequence);
            } else {
                pool.release(
                    &requests[sequence.request as usize].blocks[..sequence.registered],
                    sequence.private_blocks,
                );
                effects.finished.push(sequence.request);
            }
        }
        // Computed blocks are offloaded at once, so that evicting them from device memory needs no copy.
        let computed_blocks: Vec<u32> =
            effects.changes.iter().filter(|c| c.level == Level::G1 && c.stored).map(|c| c.block).collect();
        self.offload(&computed_blocks, store, effects);
    }

    /// The load report of this worker. The router's event plane sets `number`.
    pub(super) fn load(&self, profile: &Profile) -> Load {
        let onboarding =
            self.running.iter().filter(|it| it.prefill_worker.is_some()).map(|it| it.onboarding as u64).sum();
        let peer = profile
            .peer
            .map(|link| Link { bytes_per_second: self.peer_bytes_per_second.unwrap_or(link.bytes_per_second), ..link });
        let speed = |(level, link): (Level, Option<Link>)| {
            let Link { bytes_per_second, latency_s: latency_seconds } = link?;
            let queued_blocks = if level == Level::Peer { onboarding } else { 0 };
            Some(OnboardSpeed { level, latency_seconds, bytes_per_second, queued_blocks })
        };
        let [host, shared] = [profile.host, profile.shared].map(|store| store.map(|store| store.link()));
        let links = [(Level::G2, host), (Level::G4, shared), (Level::Peer, peer)];
        Load {
            number: 0,
            waiting_tokens: self.waiting_tokens,
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            paused: 0,
            sequences_max: profile.max_num_seqs as u32,
            active_blocks: self.pool.in_use(),
            total_blocks: profile.blocks(),
            prefill_tokens_per_second: self.prefill_tokens_per_second,
            decode_step_seconds: self.decode_step_s,
            block_bytes: profile.block_bytes(),
            onboard: links.into_iter().filter_map(speed).collect(),
        }
    }

    /// Number of leading blocks that are in device memory.
    pub(super) fn cached_prefix(&self, blocks: &[u32]) -> usize {
        self.pool.cached_prefix(blocks)
    }

    /// Requests that are queued or running.
    pub(super) fn requests(&self) -> impl Iterator<Item = u32> {
        self.waiting.iter().chain(&self.running).map(|sequence| sequence.request)
    }

    /// Blocks by tier, as a snapshot lists them.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (Level, u32)> {
        let host = self.host.as_ref().map(Lru::blocks).unwrap_or_default();
        self.pool.blocks().into_iter().map(|b| (Level::G1, b)).chain(host.into_iter().map(|b| (Level::G2, b)))
    }

    /// The number of leading blocks to onboard from lower tiers or from the prefill worker, and the seconds this takes.
    /// Blocks are onboarded as long as this is faster than computing them.
    fn plan_onboarding(
        &self,
        profile: &Profile,
        shared: Option<&Lru>,
        peer_link: Option<Link>,
        blocks: &[u32],
    ) -> (usize, f64) {
        let in_host = |block: u32| self.host.as_ref().is_some_and(|host| host.contains(block));
        let in_shared = |block: u32| shared.is_some_and(|shared| shared.contains(block));
        let links = [profile.host.map(|store| store.link()), peer_link, profile.shared.map(|store| store.link())];
        let (mut from, mut best) = ([0; 3], (0, 0.0));
        for (loaded, block) in (1..).zip(blocks) {
            let nearest = match (in_host(*block), peer_link) {
                (true, _) => 0,
                (false, Some(_)) => 1,
                (false, None) if in_shared(*block) => 2,
                (false, None) => break,
            };
            from[nearest] += 1;
            let of = |(link, blocks): (&Option<Link>, u64)| link.map_or(0.0, |link| profile.onboard_s(&link, blocks));
            let seconds: f64 = links.iter().zip(from).map(of).sum();
            if seconds < profile.prefill_s(loaded * BLOCK_TOKENS, 0) {
                best = (loaded as usize, seconds);
            }
        }
        best
    }

    /// Reports blocks as evicted from device memory, and marks them as recently used in lower tiers.
    fn evict(&mut self, evicted: &[u32], shared: &mut Option<Lru>, effects: &mut Effects) {
        effects.changes.extend(evicted.iter().map(|block| BlockChange {
            level: Level::G1,
            block: *block,
            stored: false,
        }));
        self.offload(evicted, shared, effects);
    }

    fn offload(&mut self, blocks: &[u32], shared: &mut Option<Lru>, effects: &mut Effects) {
        let mut insert = |store: &mut Lru, level, block| {
            if !store.contains(block) {
                effects.changes.push(BlockChange { level, block, stored: true });
            }
            let evicted = store.insert(block);
            effects.changes.extend(evicted.map(|block| BlockChange { level, block, stored: false }));
            evicted
        };
        for block in blocks {
            if let Some(host) = &mut self.host {
                let evicted = insert(host, Level::G2, *block);
                // A block that was computed here does not need its copy.
                for block in [Some(*block), evicted].into_iter().flatten() {
                    self.unused_copied.remove(&block);
                }
            }
            if let Some(shared) = shared {
                insert(shared, Level::G4, *block);
            }
        }
    }
}

fn update_ewma(value: &mut Option<f64>, sample: f64) {
    *value = Some(value.map_or(sample, |value| value + EWMA_WEIGHT * (sample - value)));
}
