//! One request inside the engine: its tokens, its blocks, its report and its output.

use super::blocks::{BlockTable, HashChain};
use super::output::OutputSender;
use super::stats::{EngineStats, RequestStats};
use super::step::PromptScores;
use crate::engine::{Logprobs, ModelCard, PromptReport, Request, Work};
use crate::handoff::{HandoffProgress, Peers};
use crate::llama::model::Sampler;
use crate::plane::WorkerId;
use kvbm::{
    BlockManager, BlockRef, CachedBlocks, ChainKey, DomainId, Level, Onboarding, Recompute, SequenceHash, Tier,
};
use spans::{Kind, Span};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// A request that is waiting, running, or preempted. Dropping it releases its blocks and ends its stream.
pub(in crate::llama) struct Sequence {
    pub(super) request: Request,
    /// The cache domain of the request; its blocks belong to this domain.
    pub(super) domain: DomainId,
    /// The prompt's tokens, then the generated ones.
    pub(super) tokens: Vec<u32>,
    /// Number of prompt tokens.
    pub(super) prompt: usize,
    /// Hashes of all full blocks of `tokens`.
    pub(super) chain: HashChain,
    pub(super) blocks: BlockTable,
    /// The onboarding of blocks from lower tiers that are not in G1 yet.
    pub(super) onboarding: Option<ActiveOnboarding>,
    /// The sequence gave up blocks, or their onboarding, because memory was short; it onboards them again once a
    /// sequence has left the batch.
    pub(super) yielded: bool,
    /// The hand-over of a prefill, once its first blocks are computed.
    pub(super) progress: Option<HandoffProgress>,
    /// The memory of the prefill worker that has handed over blocks.
    pub(super) peer: Option<Arc<dyn Tier>>,
    /// When another worker had computed the prompt, until the first step.
    pub(super) prefilled_elsewhere: Option<Instant>,
    /// Since when nothing runs and the blocks of this sequence still do not fit.
    pub(super) blocked_since: Option<Instant>,
    /// Since when the output has been unread and nothing more is generated.
    pub(super) unread_since: Option<Instant>,
    /// Leading tokens whose KV is in `blocks`.
    pub(super) computed: usize,
    /// Leading tokens of a resumed prompt that were counted in the report before their blocks were given up. They are
    /// not counted again when they are found again.
    pub(super) reported_tokens: usize,
    /// Maximum cached tokens in the report. The others were computed for this request, here or by a prefill worker,
    /// even if they come from a tier that the prefill worker has stored them in.
    max_cached: usize,
    /// `None` while a step samples with it.
    pub(super) sampler: Option<Sampler>,
    /// Prompt tokens whose logits have given the log-probability of the token after them.
    pub(super) scored: usize,
    pub(in crate::llama) output: OutputSender,
    pub(super) report: PromptReport,
    pub(super) accepted: Instant,
    /// When the sequence joined the batch for the first time.
    pub(super) joined: Option<Instant>,
    /// When the first token was generated.
    pub(super) first_token: Option<Instant>,
    pub(super) stats: RequestStats,
    /// Tokens that may be generated: `max_tokens`, at most what the context leaves.
    pub(super) limit: usize,
    /// The span of the phase: queue, prefill or decode.
    pub(super) phase: Span,
}

impl Sequence {
    /// A waiting sequence. `seed` applies where the request has none; `output` is the engine's end of the stream.
    pub(in crate::llama) fn new(
        request: Request,
        card: &ModelCard,
        seed: u64,
        output: OutputSender,
        stats: RequestStats,
    ) -> Self {
        let root = ChainKey::root(&request.domain, &card.identity, None);
        let prompt = request.tokens.len() - request.generated_tokens;
        let left = card.context - prompt;
        let mut sampler = Sampler::new(&request.sampling, seed, &request.tokens[..prompt]);
        sampler.count(&request.tokens[prompt..]);
        Self {
            domain: request.domain.id(),
            tokens: request.tokens.to_vec(),
            prompt,
            chain: HashChain::new(root, card.block_size, &request.tokens),
            blocks: BlockTable::default(),
            onboarding: None,
            yielded: false,
            progress: None,
            peer: None,
            prefilled_elsewhere: None,
            blocked_since: None,
            unread_since: None,
            reported_tokens: 0,
            max_cached: prompt,
            computed: 0,
            scored: 0,
            sampler: Some(sampler),
            output,
            report: PromptReport::default(),
            accepted: Instant::now(),
            joined: None,
            first_token: None,
            stats,
            phase: request.attributes.trace.span("engine queue", Kind::Internal),
            limit: request.stop.max_tokens.map_or(left, |most| left.min(most as usize)),
            request,
        }
    }

    /// Ends the span of the phase, and begins that of the next one.
    pub(super) fn enter_phase(&mut self, name: &'static str) {
        self.phase = self.request.attributes.trace.span(name, Kind::Internal);
    }

    /// Adds to the span of the prefill where the prompt's tokens came from.
    pub(super) fn describe_prefill(&mut self) {
        self.phase.set("gen_ai.usage.input_tokens", self.prompt);
        self.phase.set("gen_ai.usage.cache_read.input_tokens", self.report.cached_tokens());
        self.phase.set("blockyard.handed_over_tokens", self.report.handed_over);
    }

    /// Tokens that are to be computed before the next token can be chosen, or before the handoff.
    pub(super) fn pending(&self) -> usize {
        self.goal().saturating_sub(self.computed)
    }

    /// How many leading tokens are to be computed: all, or for a prefill the full blocks that the decode worker can
    /// reuse.
    pub(super) fn goal(&self) -> usize {
        match self.request.work {
            Work::Prefill => self.reusable() * self.chain.block_size,
            // Relayed requests are rejected when they come in.
            Work::Generate | Work::Resume(_) | Work::Relay(_) => self.tokens.len(),
        }
    }

    /// Full blocks of the known tokens that may come from a cache. The last token is always computed, for its logits,
    /// and so is every prompt token whose log-probability is requested and still missing.
    pub(super) fn reusable(&self) -> usize {
        let last = if self.unscored().is_empty() { self.tokens.len() - 1 } else { self.scored };
        last / self.chain.block_size
    }

    /// The prompt tokens whose logits still have to give the log-probability of the token after them.
    fn unscored(&self) -> Range<usize> {
        let requested = self.request.sampling.prompt_logprobs.is_some() && !matches!(self.request.work, Work::Prefill);
        if requested { self.scored..self.prompt - 1 } else { 0..0 }
    }

    /// The log-probabilities to compute in this part of the tokens.
    pub(super) fn scored_in(&self, part: Range<usize>) -> PromptScores {
        let unscored = self.unscored();
        let rows = unscored.start.max(part.start)..unscored.end.min(part.end);
        if rows.is_empty() {
            return PromptScores::default();
        }
        PromptScores {
            tokens: self.tokens[rows.start + 1..=rows.end].to_vec(),
            rows: rows.start - part.start..rows.end - part.start,
            alternatives: self.request.sampling.prompt_logprobs.unwrap_or(0),
        }
    }

    /// Adds the log-probabilities of one part.
    pub(super) fn add_scores(&mut self, scores: Vec<Logprobs>) {
        self.scored += scores.len();
        self.output.push_prompt_logprobs(scores);
    }

    /// Hashes of the blocks that the sequence could reuse and does not hold yet.
    pub(super) fn missing_hashes(&self) -> &[SequenceHash] {
        &self.chain.hashes[self.blocks.cached.len()..self.reusable().max(self.blocks.cached.len())]
    }

    /// Tokens generated so far.
    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Registers the blocks that are full now, with the request's retention.
    pub(super) fn publish(&mut self, manager: &BlockManager) {
        if self.computed / self.chain.block_size > self.blocks.cached.len() {
            let attrs = manager.attrs(self.domain, &self.request.attributes.retention);
            self.blocks.publish(self.computed, &self.chain, attrs, manager);
        }
    }

    /// Attaches cached blocks that continue those it holds, extends their retention as the request asks, and returns
    /// the number of tokens. Never called with rows computed past the held blocks.
    pub(super) fn attach(&mut self, found: CachedBlocks, manager: &BlockManager) -> usize {
        let tokens = found.len() * self.chain.block_size;
        let held = self.blocks.cached.len();
        manager.extend_retention(&self.chain.hashes[held..held + found.len()], &self.request.attributes.retention);
        self.blocks.attach(found);
        self.computed += tokens;
        self.stats.computed(tokens);
        tokens
    }

    /// Starts onboarding of the missing blocks that lower tiers hold.
    pub(super) fn start_onboarding(&mut self, manager: &BlockManager, stats: &EngineStats) {
        self.yielded = false;
        // Once the first token is sent, the prefill worker does not keep the blocks any more.
        let peer = self.peer.as_ref().filter(|_| self.report_is_open());
        let (recompute, wake, trace) = (self.recompute(stats), stats.notifier(), &self.request.attributes.trace);
        let onboarding = manager.start_onboarding_with(peer, self.missing_hashes(), recompute, wake, trace);
        let first_block = self.blocks.len();
        self.onboarding = onboarding.map(|handle| ActiveOnboarding { handle, first_block });
    }

    /// The cost of computing a block instead of loading it, and the deadline of the load.
    pub(super) fn recompute(&self, stats: &EngineStats) -> Recompute {
        let seconds = stats.seconds_per_prompt_token().map(|each| each * self.chain.block_size as f64);
        // Less than one more block is computed after the loaded ones. After the first token no deadline applies.
        let last = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).unwrap_or_default();
        let deadline = self.request.attributes.deadline.filter(|_| self.report_is_open());
        Recompute { seconds_per_block: seconds, deadline: deadline.map(|by| by.checked_sub(last).unwrap_or(by)) }
    }

    /// Called when the sequence joins the batch: from now on it waits for blocks only as long as that is quicker than
    /// computing them.
    pub(super) fn start_waiting(&mut self) {
        if let Some(active) = &self.onboarding {
            active.handle.start_waiting();
        }
    }

    /// Whether waiting for blocks is quicker than computing them.
    pub(super) fn awaits_blocks(&self) -> bool {
        self.onboarding.as_ref().is_some_and(|active| active.handle.should_wait())
    }

    /// Attaches the missing blocks that are in G1 by now, and reports the tiers that they came from.
    pub(super) fn reuse(&mut self, manager: &BlockManager) {
        let found = manager.lookup_again(self.missing_hashes());
        let levels: Vec<Level> = found.iter().map(|block| self.level_of(block)).collect();
        let known = self.reported_tokens.saturating_sub(self.computed) / self.chain.block_size;
        for run in levels[known.min(levels.len())..].chunk_by(|a, b| a == b) {
            self.report_cached(run[0], run.len() * self.chain.block_size);
        }
        self.attach(found, manager);
        self.drop_unneeded_onboarding();
    }

    /// Ends the onboarding when none of its blocks is needed any more.
    pub(super) fn drop_unneeded_onboarding(&mut self) {
        if self.onboarding.is_some() && self.missing_hashes().is_empty() {
            self.onboarding = None;
        }
    }

    fn level_of(&self, block: &BlockRef) -> Level {
        self.onboarding.as_ref().and_then(|active| active.handle.loaded_from(&block.hash())).unwrap_or(Level::G1)
    }

    /// Rows that can be computed before the next block that has been loaded meanwhile.
    pub(super) fn rows_to_next_cached_block(&self, manager: &BlockManager) -> usize {
        if self.onboarding.is_none() {
            return usize::MAX;
        }
        // The next block was not cached just now, or is partly computed: it is computed in any case.
        let size = self.chain.block_size;
        let next = self.missing_hashes().get(1..).and_then(|hashes| manager.next_cached(hashes));
        next.map_or(usize::MAX, |blocks| (1 + blocks) * size - self.computed % size)
    }

    /// Withdraws the blocks of the next `rows` rows from the onboarding, since they are computed now.
    pub(super) fn claim(&self, rows: usize) {
        if let Some(active) = &self.onboarding {
            let blocks = (self.computed + rows).div_ceil(self.chain.block_size);
            active.handle.advance(blocks.saturating_sub(active.first_block));
        }
    }

    /// Limits the cached tokens of the report.
    pub(super) fn limit_cached(&mut self, tokens: usize) {
        self.max_cached = tokens.min(self.prompt);
    }

    /// The hand-over of a prefill, which the first call begins.
    pub(super) fn handoff(&mut self, peers: &Peers, worker: WorkerId) -> &HandoffProgress {
        let output = &self.output;
        self.progress.get_or_insert_with(|| {
            let (ticket, progress) = peers.begin(worker);
            output.send_handoff(ticket.encode());
            progress
        })
    }

    /// Reports the computed blocks of a prefill to the decode worker while more are to be computed. The last ones are
    /// reported with its end, which follows at once: a decode worker that begins to load them gives that load up then,
    /// closes its connections, and begins another one.
    pub(super) fn report_progress(&mut self, peers: &Peers, worker: WorkerId) {
        if self.pending() > 0 {
            let blocks = self.blocks.cached.len();
            self.handoff(peers, worker).computed(blocks);
        }
    }

    /// Counts attached tokens in the prompt's report, until the report is sent.
    pub(super) fn report_cached(&mut self, level: Level, tokens: usize) {
        let left = (self.max_cached as u32).saturating_sub(self.report.cached_tokens());
        let tokens = (tokens as u32).min(left);
        if tokens > 0 && self.output.is_report_due() {
            self.report.cached.push((level, tokens));
        }
    }

    /// Whether the report is still to be sent, which is until the first token.
    pub(super) fn report_is_open(&self) -> bool {
        self.output.is_report_due()
    }

    /// Counts all prompt tokens that were not cached as computed.
    pub(super) fn close_report(&mut self) {
        self.report.computed = self.prompt as u32 - self.report.cached_tokens();
    }

    /// Gives up all blocks. The sequence starts over from what the caches still hold.
    pub(super) fn release(&mut self) {
        self.blocks = BlockTable::default();
        self.onboarding = None;
        self.yielded = true;
        self.stats.add_pending(self.computed);
        if matches!(self.request.work, Work::Resume(_)) {
            self.reported_tokens = self.reported_tokens.max(self.computed);
        } else if self.report_is_open() {
            // Blocks that are found again are counted again.
            self.report.cached.clear();
        }
        self.computed = 0;
    }

    /// For how long the output has not been read.
    pub(super) fn unread(&mut self, now: Instant) -> Duration {
        let is_stalled = self.output.is_stalled();
        if !is_stalled {
            self.unread_since = None;
        }
        let since = is_stalled.then(|| *self.unread_since.get_or_insert(now));
        since.map_or(Duration::ZERO, |since| now - since)
    }

    /// Gives up all blocks and stops counting as pending work.
    pub(super) fn pause(&mut self) {
        self.release();
        self.stats.computed(usize::MAX);
    }

    /// Counts as pending work again.
    pub(super) fn resume(&mut self) {
        self.stats.add_pending(self.goal());
    }

    /// An upper bound of the device blocks that it holds: onboarded blocks may count twice.
    pub(super) fn held_blocks(&self) -> usize {
        self.blocks.len() + self.onboarding.as_ref().map_or(0, |active| active.handle.held_blocks())
    }

    /// Gives up blocks of a waiting sequence, the onboarding first. Returns `false` when there is nothing to give up.
    pub(super) fn yield_blocks(&mut self) -> bool {
        let onboarding = self.onboarding.take().is_some();
        if !onboarding && self.blocks.len() == 0 {
            return false;
        }
        if onboarding {
            self.yielded = true;
        } else {
            self.release();
        }
        true
    }
}

/// A running onboarding, and the index in the sequence of its first block.
pub(super) struct ActiveOnboarding {
    handle: Onboarding,
    first_block: usize,
}

#[cfg(test)]
mod tests;
