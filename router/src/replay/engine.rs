//! A simulated engine: continuous batching with chunked prefill, first come first served, over a block pool.
//!
//! ```text
//!   accept ─▶ waiting ── room for all of it ─▶ (onboarding) ─▶ prefill, in chunks ─▶ decode, a token a step ─▶ gone
//!                                                                  └─ for another: kept, until it has the blocks
//! ```
//! Room for prompt and output is taken at once, so nobody is preempted. Output is nobody's prefix: a trace does not say
//! what became of it. What another has computed is onboarded over both workers' links, one prompt after the other.

use super::lru::Lru;
use super::pool::Pool;
use super::profile::{Link, Profile};
use super::trace::{Asked, BLOCK_TOKENS};
use crate::admission::Stage;
use kvbm::Level;
use std::collections::VecDeque;
use worker::plane::{Load, OnboardSpeed};

/// One worker.
pub(super) struct Engine {
    pool: Pool,
    host: Option<Lru>,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    /// Prompts that were computed for others, until these have their blocks.
    kept: Vec<Sequence>,
    /// Prompt tokens that each of `running` computes in the step under way.
    chunks: Vec<u64>,
    /// Prompt tokens accepted and not yet computed.
    waiting_tokens: u64,
    steps: Steps,
    prefill: Option<f64>,
    decode_step: Option<f64>,
    /// Bytes per second of what came over, its turn at this worker apart.
    peer: Option<f64>,
    /// Until when its link is busy with what comes.
    receives_ns: u64,
    /// Nanoseconds spent in steps.
    pub(super) busy_ns: u64,
}

/// What workers share.
#[derive(Default)]
pub(super) struct Around {
    /// The store that all reach.
    pub(super) store: Option<Lru>,
    /// By worker: until when its link is busy with what goes.
    pub(super) sends_ns: Vec<u64>,
}

/// The step under way; or several, while all that happens is that each sequence gets its next token.
#[derive(Clone, Copy, Default)]
struct Steps {
    began_ns: u64,
    many: u64,
    /// Prompt tokens that are computed, but for the last one of what was handed over: that says nothing of prefill.
    prompts: u64,
    /// Seconds of the first, and how many more each takes than the one before: the context grows.
    first_s: f64,
    growth_s: f64,
}

struct Sequence {
    request: u32,
    part: Stage,
    /// Who computed its prompt, if another did.
    from: Option<usize>,
    /// Prompt tokens computed, or found.
    computed: u64,
    /// Leading blocks that are in the pool, held.
    held: usize,
    /// Blocks of its own.
    private: u64,
    generated: u64,
    /// When its onboarded blocks are there.
    ready_ns: u64,
    /// Of `held`, those that come up from below until then.
    coming: usize,
}

/// A block came to a level, or went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Change {
    pub(super) level: Level,
    pub(super) block: u32,
    pub(super) stored: bool,
}

/// What others learn of a step.
#[derive(Default)]
pub(super) struct Effects {
    pub(super) changes: Vec<Change>,
    /// Requests taken into the batch, and the leading blocks that needed no computing.
    pub(super) admitted: Vec<(u32, u64)>,
    pub(super) first: Vec<u32>,
    /// Prompts that are computed, and decode elsewhere.
    pub(super) handed: Vec<u32>,
    /// Of those, the ones that could not be kept.
    pub(super) lost: Vec<u32>,
    pub(super) finished: Vec<u32>,
    /// Nanoseconds between one token and the next, and how many such there were.
    pub(super) gaps: Vec<(u64, u64)>,
}

/// What a worker does next.
pub(super) enum Turn {
    /// A step, or several, until then.
    Step(u64),
    /// Nothing, until then.
    Wait(u64),
    /// Nothing, until a request comes.
    Rest,
}

/// How much a new measurement counts against the old ones.
const NEWEST: f64 = 0.1;

impl Engine {
    pub(super) fn new(profile: &Profile) -> Self {
        Self {
            pool: Pool::new(profile.blocks()),
            host: profile.host.map(|store| Lru::new(store.capacity_bytes / profile.block_bytes())),
            waiting: VecDeque::new(),
            running: Vec::new(),
            kept: Vec::new(),
            chunks: Vec::new(),
            waiting_tokens: 0,
            steps: Steps::default(),
            prefill: None,
            decode_step: None,
            peer: None,
            receives_ns: 0,
            busy_ns: 0,
        }
    }

    /// Whether a request could ever be served.
    pub(super) fn fits(profile: &Profile, asked: &Asked) -> bool {
        blocks_of(asked) <= profile.blocks()
    }

    /// A part of a request comes. `from`: who computed its prompt, if another did.
    pub(super) fn accept(&mut self, request: u32, asked: &Asked, part: Stage, from: Option<usize>) {
        // What was computed elsewhere is on its way.
        let computed = if part == Stage::Decode { asked.input - 1 } else { 0 };
        self.waiting_tokens += asked.input - computed;
        self.waiting.push_back(Sequence {
            request,
            part,
            from,
            computed,
            held: 0,
            private: 0,
            generated: 0,
            ready_ns: 0,
            coming: 0,
        });
    }

    /// Who decodes what was computed here has the blocks: they need not be kept any more.
    pub(super) fn release(&mut self, request: u32, asked: &Asked) {
        if let Some(at) = self.kept.iter().position(|kept| kept.request == request) {
            let kept = self.kept.remove(at);
            self.pool.leave(&asked.blocks[..kept.held], kept.private);
        }
    }

    /// Two who decode, and keep what the other waits for, would wait for ever: the prompt that was kept for the longest goes.
    fn give_up(&mut self, requests: &[Asked]) -> Option<u32> {
        let decodes = self.waiting.iter().any(|sequence| sequence.part != Stage::Prefill);
        let request = self.kept.first().filter(|_| decodes && self.running.is_empty())?.request;
        self.release(request, &requests[request as usize]);
        Some(request)
    }

    /// A prompt will not come over. Whether it is computed here: it is, unless its blocks are on their way.
    pub(super) fn lost(&mut self, request: u32, asked: &Asked) -> bool {
        let Some(sequence) = self.waiting.iter_mut().find(|sequence| sequence.request == request) else { return false };
        (sequence.part, sequence.from) = (Stage::Whole, None);
        self.waiting_tokens += asked.input - 1;
        sequence.computed = 0;
        true
    }

    /// Takes in whom there is room for, and decides about the next step.
    pub(super) fn turn(
        &mut self,
        now_ns: u64,
        requests: &[Asked],
        profile: &Profile,
        around: &mut Around,
        effects: &mut Effects,
    ) -> Turn {
        // Nobody takes room before there is a part of a step for him: until then it serves as cache.
        let mut budget = self.budget(now_ns, requests, profile);
        while budget > 0
            && self.running.len() < profile.max_num_seqs
            && let Some(next) = self.waiting.front()
        {
            let asked = &requests[next.request as usize];
            let (matched, blocks, part) = (self.pool.matched(&asked.blocks), next.blocks(asked), next.part);
            let Some(gone) = self.pool.take(&asked.blocks[..matched], blocks) else {
                let Some(lost) = self.give_up(requests) else { break };
                effects.lost.push(lost);
                continue;
            };
            let Some(mut sequence) = self.waiting.pop_front() else { break };
            // Its turn comes once both links are free.
            let turn = |free_ns: u64| free_ns.saturating_sub(now_ns) as f64 / 1e9;
            let own = turn(self.receives_ns);
            let over = profile
                .peer
                .zip(sequence.from)
                .map(|(link, from)| Link { latency_s: link.latency_s + own.max(turn(around.sends_ns[from])), ..link });
            let (coming, seconds) = self.below(profile, around.store.as_ref(), over, &asked.blocks[matched..]);
            self.demote(&gone, &mut around.store, effects);
            sequence.held = matched;
            sequence.coming = coming;
            sequence.private = blocks - matched as u64;
            self.waiting_tokens += sequence.computed;
            sequence.computed = ((matched + coming) as u64 * BLOCK_TOKENS).min(asked.input - 1);
            sequence.ready_ns = if seconds > 0.0 { now_ns + nanoseconds(seconds) } else { now_ns };
            self.waiting_tokens -= sequence.computed;
            if seconds <= 0.0 {
                budget = budget.saturating_sub(asked.input - sequence.computed);
            }
            match (sequence.from, profile.peer) {
                (Some(from), Some(link)) if coming > 0 => {
                    (self.receives_ns, around.sends_ns[from]) = (sequence.ready_ns, sequence.ready_ns);
                    let bytes = (coming as u64 * profile.block_bytes()) as f64;
                    average(&mut self.peer, bytes / (seconds - own - link.latency_s));
                }
                _ => {}
            }
            // Of a prompt that came over, its prefill worker has said what was found.
            if part != Stage::Decode {
                effects.admitted.push((sequence.request, (matched + coming) as u64));
            }
            self.running.push(sequence);
        }
        self.plan(now_ns, requests, profile, effects)
    }

    /// Tokens of the next step that the batch as it is leaves over.
    fn budget(&self, now_ns: u64, requests: &[Asked], profile: &Profile) -> u64 {
        let wanted = self.running.iter().map(|sequence| match sequence {
            Sequence { generated: 1.., .. } => 1,
            Sequence { ready_ns, .. } if *ready_ns > now_ns => 0,
            Sequence { request, computed, .. } => requests[*request as usize].input - computed,
        });
        profile.max_num_batched_tokens.saturating_sub(wanted.sum())
    }

    /// Shares a step out: a token to everyone who decodes, what is left to prompts in the order in which they came.
    fn plan(&mut self, now_ns: u64, requests: &[Asked], profile: &Profile, effects: &mut Effects) -> Turn {
        let Self { running, chunks, pool, .. } = self;
        let (mut decoding, mut context) = (0, 0);
        for sequence in running.iter().filter(|sequence| sequence.generated > 0) {
            decoding += 1;
            context += sequence.computed + sequence.generated;
        }
        let mut budget = profile.max_num_batched_tokens - decoding;
        let (mut prompts, mut last, mut prefill_s, mut ready_ns) = (0, 0, 0.0, u64::MAX);
        chunks.clear();
        for sequence in running.iter_mut() {
            let asked = &requests[sequence.request as usize];
            let mut chunk = 0;
            if sequence.generated == 0 && sequence.ready_ns > now_ns {
                ready_ns = ready_ns.min(sequence.ready_ns);
            } else if sequence.generated == 0 {
                for _ in 0..std::mem::take(&mut sequence.coming) {
                    sequence.register(&asked.blocks, pool, effects);
                }
                chunk = budget.min(asked.input - sequence.computed);
                prefill_s += profile.prefill_s(chunk, sequence.computed);
                budget -= chunk;
                match (sequence.part, chunk) {
                    (Stage::Decode, 1) => last += 1,
                    _ => prompts += chunk,
                }
            }
            chunks.push(chunk);
        }
        if prompts + last + decoding == 0 {
            return if ready_ns == u64::MAX { Turn::Rest } else { Turn::Wait(ready_ns) };
        }
        let decode_s = decoding as f64 * profile.decode_sequence_s + context as f64 * profile.decode_context_token_s;
        // Nothing else happens before the first of them has its last token, unless somebody comes.
        let left = |sequence: &Sequence| requests[sequence.request as usize].output.saturating_sub(sequence.generated);
        let alike = prompts + last == 0 && ready_ns == u64::MAX;
        let many = if alike { running.iter().map(left).min().unwrap_or(1).max(1) } else { 1 };
        let (first_s, growth_s) =
            (profile.step_base_s + decode_s + prefill_s, decoding as f64 * profile.decode_context_token_s);
        self.steps = Steps { began_ns: now_ns, many, prompts, first_s, growth_s };
        Turn::Step(self.steps.end())
    }

    /// Somebody came: of several steps those that have not begun are off. When the one under way ends, if that is sooner than
    /// was said.
    pub(super) fn cut(&mut self, now_ns: u64) -> Option<u64> {
        let (before, end) = (self.steps.many, self.steps.ends().position(|end| end >= now_ns)?);
        self.steps.many = end as u64 + 1;
        (self.steps.many < before).then(|| self.steps.end())
    }

    /// The steps that `turn` decided on have ended.
    pub(super) fn stepped(&mut self, now_ns: u64, requests: &[Asked], store: &mut Option<Lru>, effects: &mut Effects) {
        let steps = self.steps;
        self.busy_ns += now_ns - steps.began_ns;
        let decoding = self.running.iter().filter(|sequence| sequence.generated > 0).count() as u64;
        for step in (0..steps.many).map(|nth| steps.seconds(nth)) {
            if steps.prompts > 0 {
                average(&mut self.prefill, steps.prompts as f64 / step);
            } else {
                average(&mut self.decode_step, step);
            }
            // Who decodes gets a token in every step.
            effects.gaps.push((nanoseconds(step), decoding));
        }
        let Self { running, kept, chunks, pool, waiting_tokens, .. } = self;
        for (sequence, chunk) in running.iter_mut().zip(chunks.iter()) {
            let asked = &requests[sequence.request as usize];
            if sequence.generated > 0 {
                sequence.generated += steps.many;
                continue;
            }
            if *chunk == 0 {
                continue;
            }
            sequence.computed += chunk;
            *waiting_tokens -= chunk;
            while (sequence.held as u64 + 1) * BLOCK_TOKENS <= sequence.computed
                || (sequence.computed == asked.input && sequence.held < asked.blocks.len())
            {
                sequence.register(&asked.blocks, pool, effects);
            }
            if sequence.computed < asked.input {
                continue;
            }
            if sequence.part == Stage::Prefill {
                effects.handed.push(sequence.request);
            } else {
                sequence.generated = 1;
                effects.first.push(sequence.request);
            }
        }
        for sequence in running.extract_if(.., |sequence| sequence.is_over(&requests[sequence.request as usize])) {
            if sequence.part == Stage::Prefill {
                kept.push(sequence);
            } else {
                pool.leave(&requests[sequence.request as usize].blocks[..sequence.held], sequence.private);
                effects.finished.push(sequence.request);
            }
        }
        // What was computed also goes down at once, so that nothing is lost when it has to leave the device.
        let fresh: Vec<u32> =
            effects.changes.iter().filter(|c| c.level == Level::G1 && c.stored).map(|c| c.block).collect();
        self.offload(&fresh, store, effects);
    }

    /// How it is doing, as an engine would say it.
    pub(super) fn load(&self, profile: &Profile) -> Load {
        let coming = self.running.iter().filter(|it| it.from.is_some()).map(|it| it.coming as u64).sum();
        let peer =
            profile.peer.map(|link| Link { bytes_per_second: self.peer.unwrap_or(link.bytes_per_second), ..link });
        let speed = |(level, link): (Level, Option<Link>)| {
            let Link { bytes_per_second, latency_s: latency_seconds } = link?;
            let queued_blocks = if level == Level::Peer { coming } else { 0 };
            Some(OnboardSpeed { level, latency_seconds, bytes_per_second, queued_blocks })
        };
        let [host, shared] = [profile.host, profile.shared].map(|store| store.map(|store| store.link()));
        let links = [(Level::G2, host), (Level::G3, shared), (Level::Peer, peer)];
        Load {
            number: 0,
            waiting_tokens: self.waiting_tokens,
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            sequences_max: profile.max_num_seqs as u32,
            active_blocks: self.pool.in_use(),
            total_blocks: profile.blocks(),
            prefill_tokens_per_second: self.prefill,
            decode_step_seconds: self.decode_step,
            block_bytes: profile.block_bytes(),
            onboard: links.into_iter().filter_map(speed).collect(),
        }
    }

    /// What it would say in a snapshot.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (Level, u32)> {
        let host = self.host.as_ref().map(Lru::blocks).unwrap_or_default();
        self.pool.blocks().into_iter().map(|b| (Level::G1, b)).chain(host.into_iter().map(|b| (Level::G2, b)))
    }

    /// Leading blocks that come up from below or, over a link, from the worker that computed them, and how long that takes: no
    /// more than are quicker to load than to compute.
    fn below(&self, profile: &Profile, shared: Option<&Lru>, over: Option<Link>, blocks: &[u32]) -> (usize, f64) {
        let in_host = |block: u32| self.host.as_ref().is_some_and(|host| host.holds(block));
        let in_shared = |block: u32| shared.is_some_and(|shared| shared.holds(block));
        let links = [profile.host.map(|store| store.link()), over, profile.shared.map(|store| store.link())];
        let (mut from, mut best) = ([0; 3], (0, 0.0));
        for (loaded, block) in (1..).zip(blocks) {
            let nearest = match (in_host(*block), over) {
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

    /// Blocks that left the device. Whatever keeps them below keeps them longer.
    fn demote(&mut self, gone: &[u32], shared: &mut Option<Lru>, effects: &mut Effects) {
        effects.changes.extend(gone.iter().map(|block| Change { level: Level::G1, block: *block, stored: false }));
        self.offload(gone, shared, effects);
    }

    fn offload(&mut self, blocks: &[u32], shared: &mut Option<Lru>, effects: &mut Effects) {
        let mut keep = |store: &mut Lru, level, block| {
            if !store.holds(block) {
                effects.changes.push(Change { level, block, stored: true });
            }
            let gone = store.keep(block);
            effects.changes.extend(gone.map(|block| Change { level, block, stored: false }));
        };
        for block in blocks {
            if let Some(host) = &mut self.host {
                keep(host, Level::G2, *block);
            }
            if let Some(shared) = shared {
                keep(shared, Level::G3, *block);
            }
        }
    }
}

impl Steps {
    fn seconds(&self, nth: u64) -> f64 {
        self.first_s + nth as f64 * self.growth_s
    }

    /// When each ends.
    fn ends(&self) -> impl Iterator<Item = u64> {
        let ends = |at: &mut u64, nth| {
            *at += nanoseconds(self.seconds(nth));
            Some(*at)
        };
        (0..self.many).scan(self.began_ns, ends)
    }

    /// When the last ends.
    fn end(&self) -> u64 {
        self.ends().last().unwrap_or(self.began_ns)
    }
}

impl Sequence {
    /// Blocks that its part of a request needs, output included.
    fn blocks(&self, asked: &Asked) -> u64 {
        if self.part == Stage::Prefill { asked.blocks.len() as u64 } else { blocks_of(asked) }
    }

    /// Whether nothing is left to do here.
    fn is_over(&self, asked: &Asked) -> bool {
        if self.part == Stage::Prefill { self.computed == asked.input } else { self.generated >= asked.output }
    }

    /// Its next block is computed, or has come up.
    fn register(&mut self, blocks: &[u32], pool: &mut Pool, effects: &mut Effects) {
        let parent = self.held.checked_sub(1).map(|at| blocks[at]);
        let block = blocks[self.held];
        if pool.register(block, parent) {
            effects.changes.push(Change { level: Level::G1, block, stored: true });
        }
        self.held += 1;
        self.private -= 1;
    }
}

/// Blocks that a request needs, output included.
fn blocks_of(asked: &Asked) -> u64 {
    // A prompt's last block may be half full, and is named by the trace all the same: output does not go on in it.
    asked.blocks.len() as u64 + asked.output.div_ceil(BLOCK_TOKENS)
}

/// At least one: time goes on.
fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9).max(1.0) as u64
}

fn average(value: &mut Option<f64>, newest: f64) {
    *value = Some(value.map_or(newest, |value| value + NEWEST * (newest - value)));
}
