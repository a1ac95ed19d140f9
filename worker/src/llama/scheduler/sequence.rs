//! One request inside the engine: its tokens, its blocks, and its way out.

use super::stats::{Vitals, Waiting};
use super::step::Scored;
use crate::engine::{EndToken, Error, Finish, Logprobs, ModelCard, Output, PromptReport, Request, Tokens, Work};
use crate::llama::model::Sampler;
use kvbm::{
    BlockAttrs, BlockId, BlockManager, BlockRef, CachedBlocks, ChainKey, DomainId, Level, Onboarding, PartialBlock,
};
use kvbm::{Recompute, SequenceHash};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// A request that is waiting, running, or preempted. Dropping it releases its blocks and ends its stream.
pub(in crate::llama) struct Sequence {
    pub(super) request: Request,
    /// Whose blocks they are: the request's domain.
    pub(super) domain: DomainId,
    /// The prompt, then what was generated.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt: usize,
    /// Names of all full blocks of `tokens`.
    pub(super) lineage: Lineage,
    pub(super) blocks: BlockTable,
    /// Blocks that are still on their way into G1.
    pub(super) coming: Option<Coming>,
    /// It let go of blocks that it had, or had coming, for want of room: it asks for them again once there is some.
    pub(super) gave_way: bool,
    /// Since when nothing runs and there is no room for it all the same.
    pub(super) held_up: Option<Instant>,
    /// Since when its output is not read, and nothing more is generated.
    pub(super) unread_since: Option<Instant>,
    /// Leading tokens whose KV rests in `blocks`.
    pub(super) computed: usize,
    /// Tokens of a prompt resumed that were accounted for before they were let go of: found again, they are not counted again.
    pub(super) counted: usize,
    /// Away while a step samples with it.
    pub(super) sampler: Option<Sampler>,
    /// Tokens of the prompt whose logits gave the next token's score.
    pub(super) scored: usize,
    pub(in crate::llama) outbox: Outbox,
    pub(super) report: PromptReport,
    pub(super) accepted: Instant,
    /// When it joined the batch for the first time.
    pub(super) joined: Option<Instant>,
    /// When its first token came.
    pub(super) first_token: Option<Instant>,
    pub(super) waiting: Waiting,
    /// `max_tokens`, or what the context leaves.
    pub(super) limit: usize,
}

impl Sequence {
    /// A request that waits. `seed` decides what the request leaves open, `sender` is the engine's end of its stream.
    pub(in crate::llama) fn new(
        request: Request,
        card: &ModelCard,
        seed: u64,
        sender: mpsc::Sender<Result<Output, Error>>,
        waiting: Waiting,
    ) -> Self {
        let root = ChainKey::root(&request.domain, &card.identity, None);
        let left = card.context - request.tokens.len();
        Self {
            domain: request.domain.id(),
            tokens: request.tokens.to_vec(),
            prompt: request.tokens.len(),
            lineage: Lineage::new(root, card.block_size, &request.tokens),
            blocks: BlockTable::default(),
            coming: None,
            gave_way: false,
            held_up: None,
            unread_since: None,
            counted: 0,
            computed: 0,
            scored: 0,
            sampler: Some(Sampler::new(&request.sampling, seed, &request.tokens)),
            outbox: Outbox::new(sender),
            report: PromptReport::default(),
            accepted: Instant::now(),
            joined: None,
            first_token: None,
            waiting,
            limit: request.stop.max_tokens.map_or(left, |most| left.min(most as usize)),
            request,
        }
    }

    /// Tokens that the engine still has to compute before it can choose the next one (or hand over).
    pub(super) fn pending(&self) -> usize {
        self.goal().saturating_sub(self.computed)
    }

    /// How far the tokens are to be computed: all of them, or for a hand-over the full blocks that another can reuse.
    pub(super) fn goal(&self) -> usize {
        match self.request.work {
            Work::Prefill => self.reusable() * self.lineage.block_size,
            Work::Generate | Work::Resume(_) => self.tokens.len(),
        }
    }

    /// Full blocks of the known tokens that may come from a cache: the last token is always computed, for its logits, and so
    /// is every token of the prompt after which a score is still missing.
    pub(super) fn reusable(&self) -> usize {
        let last = if self.unscored().is_empty() { self.tokens.len() - 1 } else { self.scored };
        last / self.lineage.block_size
    }

    /// The tokens of the prompt with whose logits the next ones are still to be scored.
    fn unscored(&self) -> Range<usize> {
        let wanted = self.request.sampling.prompt_logprobs.is_some() && self.request.work != Work::Prefill;
        if wanted { self.scored..self.prompt - 1 } else { 0..0 }
    }

    /// What is to be scored in a part of the tokens.
    pub(super) fn scored_in(&self, part: Range<usize>) -> Scored {
        let unscored = self.unscored();
        let rows = unscored.start.max(part.start)..unscored.end.min(part.end);
        if rows.is_empty() {
            return Scored::default();
        }
        Scored {
            tokens: self.tokens[rows.start + 1..=rows.end].to_vec(),
            rows: rows.start - part.start..rows.end - part.start,
            alternatives: self.request.sampling.prompt_logprobs.unwrap_or(0),
        }
    }

    /// Takes in the scores of a part.
    pub(super) fn add_scores(&mut self, scores: Vec<Logprobs>) {
        self.scored += scores.len();
        self.outbox.unsent.prompt_logprobs.extend(scores);
    }

    /// Names of the blocks that the sequence could use and does not hold yet.
    pub(super) fn wanted(&self) -> &[SequenceHash] {
        &self.lineage.names[self.blocks.cached.len()..self.reusable().max(self.blocks.cached.len())]
    }

    /// Tokens generated so far.
    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Shares the blocks that are full now, on the request's terms.
    pub(super) fn share(&mut self, manager: &BlockManager) {
        if self.computed / self.lineage.block_size > self.blocks.cached.len() {
            let attrs = manager.attrs(self.domain, &self.request.terms.retention);
            self.blocks.share(self.computed, &self.lineage, attrs, manager);
        }
    }

    /// Takes blocks found in a cache, which continue what it holds, and has them kept as the request asks. Never called with
    /// rows computed past the held blocks.
    pub(super) fn adopt(&mut self, found: CachedBlocks, manager: &BlockManager) -> usize {
        let tokens = found.len() * self.lineage.block_size;
        let held = self.blocks.cached.len();
        manager.extend_retention(&self.lineage.names[held..held + found.len()], &self.request.terms.retention);
        self.blocks.adopt(found);
        self.computed += tokens;
        self.waiting.computed(tokens);
        tokens
    }

    /// Has those of the blocks that it still wants come up which rest below.
    pub(super) fn fetch(&mut self, manager: &BlockManager, vitals: &Vitals) {
        self.gave_way = false;
        let onboarding = manager.start_onboarding(self.wanted(), self.recompute(vitals), vitals.changes());
        self.coming = onboarding.map(|onboarding| Coming { onboarding, first: self.blocks.len() });
    }

    /// What its blocks cost to compute, and by when they are wanted.
    pub(super) fn recompute(&self, vitals: &Vitals) -> Recompute {
        let seconds = vitals.seconds_per_prompt_token().map(|each| each * self.lineage.block_size as f64);
        // Less than another block is computed after them. Once the first token is out, nothing is late any more.
        let last = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).unwrap_or_default();
        let deadline = self.request.terms.deadline.filter(|_| self.report_is_open());
        Recompute { seconds_per_block: seconds, deadline: deadline.map(|by| by.checked_sub(last).unwrap_or(by)) }
    }

    /// The sequence has a place in the batch: from now on it waits for blocks only as long as that pays.
    pub(super) fn take_turn(&mut self) {
        if let Some(coming) = &self.coming {
            coming.onboarding.start_waiting();
        }
    }

    /// Whether waiting for blocks is better than computing them.
    pub(super) fn awaits_blocks(&self) -> bool {
        self.coming.as_ref().is_some_and(|coming| coming.onboarding.should_wait())
    }

    /// Takes over what is in G1 of the blocks that it still wants, and says in its report where they were found.
    pub(super) fn reuse(&mut self, manager: &BlockManager) {
        let found = manager.lookup_again(self.wanted());
        let levels: Vec<Level> = found.iter().map(|block| self.level_of(block)).collect();
        let known = self.counted.saturating_sub(self.computed) / self.lineage.block_size;
        for run in levels[known.min(levels.len())..].chunk_by(|a, b| a == b) {
            self.report_cached(run[0], run.len() * self.lineage.block_size);
        }
        self.adopt(found, manager);
        self.settle();
    }

    /// Lets go of what was to come when nothing of it is wanted any more.
    pub(super) fn settle(&mut self) {
        if self.coming.is_some() && self.wanted().is_empty() {
            self.coming = None;
        }
    }

    fn level_of(&self, block: &BlockRef) -> Level {
        self.coming.as_ref().and_then(|coming| coming.onboarding.loaded_from(&block.hash())).unwrap_or(Level::G1)
    }

    /// How many rows may be computed before the next block that came up meanwhile.
    pub(super) fn gap(&self, manager: &BlockManager) -> usize {
        if self.coming.is_none() {
            return usize::MAX;
        }
        // The next block was not there a moment ago, or is half computed: it is computed in any case.
        let size = self.lineage.block_size;
        let next = self.wanted().get(1..).and_then(|wanted| manager.next_cached(wanted));
        next.map_or(usize::MAX, |blocks| (1 + blocks) * size - self.computed % size)
    }

    /// The blocks of the next `rows` need not come any more.
    pub(super) fn claim(&self, rows: usize) {
        if let Some(coming) = &self.coming {
            let blocks = (self.computed + rows).div_ceil(self.lineage.block_size);
            coming.onboarding.advance(blocks.saturating_sub(coming.first));
        }
    }

    /// Counts adopted tokens in the prompt's report, while it is still open.
    pub(super) fn report_cached(&mut self, level: Level, tokens: usize) {
        let left = (self.prompt as u32).saturating_sub(self.report.cached_tokens());
        let tokens = (tokens as u32).min(left);
        if tokens > 0 && self.outbox.report_due {
            self.report.cached.push((level, tokens));
        }
    }

    /// Whether the first token is still to come.
    pub(super) fn report_is_open(&self) -> bool {
        self.outbox.report_due
    }

    /// What was not cached was computed.
    pub(super) fn close_report(&mut self) {
        self.report.computed = self.prompt as u32 - self.report.cached_tokens();
    }

    /// Forgets all blocks, to start over from what the caches still hold.
    pub(super) fn release(&mut self) {
        self.blocks = BlockTable::default();
        self.coming = None;
        self.gave_way = true;
        self.waiting.again(self.computed);
        if matches!(self.request.work, Work::Resume(_)) {
            self.counted = self.counted.max(self.computed);
        } else if self.report_is_open() {
            // What is found again is counted again.
            self.report.cached.clear();
        }
        self.computed = 0;
    }

    /// For how long its output has not been read.
    pub(super) fn unread(&mut self, now: Instant) -> Duration {
        // What there is room for by now goes out first.
        self.outbox.flush();
        if !self.outbox.is_stalled() {
            self.unread_since = None;
        }
        let since = self.outbox.is_stalled().then(|| *self.unread_since.get_or_insert(now));
        since.map_or(Duration::ZERO, |since| now - since)
    }

    /// Gives up its blocks and stops counting as work that waits.
    pub(super) fn pause(&mut self) {
        self.release();
        self.waiting.computed(usize::MAX);
    }

    /// Counts as work again.
    pub(super) fn resume(&mut self) {
        self.waiting.again(self.goal());
    }

    /// Device blocks that it holds, or more: those that came up meanwhile may count twice.
    pub(super) fn holds(&self) -> usize {
        self.blocks.len() + self.coming.as_ref().map_or(0, |coming| coming.onboarding.held_blocks())
    }

    /// Lets go of what it holds while it merely waits, what is still to come first. `false` when that is nothing.
    pub(super) fn give_way(&mut self) -> bool {
        let comes = self.coming.take().is_some();
        if !comes && self.blocks.len() == 0 {
            return false;
        }
        if comes {
            self.gave_way = true;
        } else {
            self.release();
        }
        true
    }
}

/// Blocks on their way into G1, and the place of the first of them in the sequence.
pub(super) struct Coming {
    pub(super) onboarding: Onboarding,
    pub(super) first: usize,
}

/// The names of a growing sequence's full blocks.
pub(super) struct Lineage {
    key: ChainKey,
    pub(super) block_size: usize,
    pub(super) names: Vec<SequenceHash>,
}

impl Lineage {
    pub(super) fn new(root: ChainKey, block_size: usize, tokens: &[u32]) -> Self {
        let mut lineage = Self { key: root, block_size, names: Vec::with_capacity(tokens.len() / block_size + 1) };
        lineage.extend(tokens);
        lineage
    }

    /// Names the blocks that became full. `tokens` are all tokens of the sequence.
    pub(super) fn extend(&mut self, tokens: &[u32]) {
        let named = self.names.len() * self.block_size;
        for block in tokens[named..].chunks_exact(self.block_size) {
            let name = self.key.push(block);
            self.names.push(name);
        }
    }
}

/// Which slots hold the sequence's KV: shared full blocks, then blocks that it fills alone.
#[derive(Default)]
pub(super) struct BlockTable {
    pub(super) cached: CachedBlocks,
    filling: VecDeque<PartialBlock>,
}

impl BlockTable {
    fn adopt(&mut self, found: CachedBlocks) {
        debug_assert!(self.filling.is_empty(), "blocks from a cache precede those that are filled");
        self.cached.extend(found);
    }

    /// Blocks in all.
    pub(super) fn len(&self) -> usize {
        self.cached.len() + self.filling.len()
    }

    pub(super) fn is_filling(&self) -> bool {
        !self.filling.is_empty()
    }

    pub(super) fn extend(&mut self, fresh: Vec<PartialBlock>) {
        self.filling.extend(fresh);
    }

    /// The slots in order of position.
    pub(super) fn slots(&self) -> Vec<BlockId> {
        let filling = self.filling.iter().map(PartialBlock::slot);
        self.cached.iter().map(BlockRef::slot).chain(filling).collect()
    }

    /// Shares the blocks that `computed` tokens filled.
    fn share(&mut self, computed: usize, lineage: &Lineage, attrs: BlockAttrs, manager: &BlockManager) {
        let held = self.cached.len();
        let full = (held..computed / lineage.block_size).map(|at| {
            let block = self.filling.pop_front().expect("computed tokens have blocks");
            let parent = at.checked_sub(1).map(|before| lineage.names[before]);
            block.complete(lineage.names[at], parent, attrs)
        });
        let full = full.collect();
        self.cached.extend(manager.register_all(full));
    }
}

/// The engine's end of a stream. Tokens that the client has not taken yet are merged into one item.
pub(in crate::llama) struct Outbox {
    sender: mpsc::Sender<Result<Output, Error>>,
    unsent: Tokens,
    report_due: bool,
}

impl Outbox {
    /// Items under way to a client. With merging behind it, a few suffice to keep the stream moving.
    pub(in crate::llama) const ITEMS: usize = 8;
    /// Tokens merged for a client that does not read, before its sequence pauses: some seconds of reading ahead.
    const MERGED: usize = 64;

    pub(super) fn new(sender: mpsc::Sender<Result<Output, Error>>) -> Self {
        Self { sender, unsent: Tokens::default(), report_due: true }
    }

    /// The client dropped the stream.
    pub(super) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Resolves when the client drops the stream.
    pub(super) fn closed(&self) -> impl Future<Output = ()> + use<> {
        let sender = self.sender.clone();
        async move { sender.closed().await }
    }

    pub(super) fn is_stalled(&self) -> bool {
        self.unsent.ids.len() >= Self::MERGED
    }

    /// Adds a token, and the prompt's report before the first one.
    pub(super) fn push(&mut self, token: u32, logprobs: Option<Logprobs>, report: &PromptReport) {
        self.open(report);
        self.unsent.ids.push(token);
        self.unsent.logprobs.extend(logprobs);
    }

    /// Says which token ends the request.
    pub(super) fn end_with(&mut self, id: u32, logprobs: Option<Logprobs>) {
        self.unsent.end = Some(EndToken { id, logprobs });
    }

    fn open(&mut self, report: &PromptReport) {
        if std::mem::take(&mut self.report_due) {
            self.unsent.prompt = Some(report.clone());
        }
    }

    /// Sends what is there, unless the client is behind: then it is merged with what follows.
    pub(super) fn flush(&mut self) {
        if self.unsent.ids.is_empty() {
            return;
        }
        if let Ok(place) = self.sender.try_reserve() {
            place.send(Ok(Output::Tokens(std::mem::take(&mut self.unsent))));
        }
    }

    /// Sends what is there and ends the stream. The last item must arrive however slowly the client reads, so it waits for
    /// its place in a task of its own.
    pub(super) fn finish(mut self, finish: Finish, report: &PromptReport) {
        self.open(report);
        self.unsent.finish = Some(finish);
        let last = std::mem::take(&mut self.unsent);
        self.send(Ok(Output::Tokens(last)));
    }

    /// Ends the stream with an error.
    pub(in crate::llama) fn fail(self, error: Error) {
        self.send(Err(error));
    }

    /// Sends the hand-over; the stream stays open.
    pub(super) fn hand_over(&self, output: Output) {
        self.send(Ok(output));
    }

    fn send(&self, item: Result<Output, Error>) {
        if let Err(mpsc::error::TrySendError::Full(item)) = self.sender.try_send(item) {
            let sender = self.sender.clone();
            // Ends with the stream: a receiver that is dropped fails the send.
            tokio::spawn(async move { sender.send(item).await });
        }
    }
}
