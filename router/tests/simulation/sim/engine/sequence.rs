//! One request in a simulated engine: its tokens, its blocks, and its output.

use super::Speed;
use super::model::{Attention, Device};
use super::stats::Accepted;
use kvbm::{
    BlockManager, BlockRef, CachedBlocks, ChainKey, DomainId, Level, Onboarding, PartialBlock, Recompute, SequenceHash,
    Tier,
};
use spans::Context;
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::{Notify, mpsc};
use worker::engine::{Error, FinishReason, ModelCard, Output, PromptReport, Request, Tokens, Work};
use worker::handoff::{HandoffProgress, Peers};
use worker::plane::WorkerId;

pub(super) struct Sequence {
    pub(super) request: Request,
    pub(super) domain: DomainId,
    /// The prompt, then what was generated.
    tokens: Vec<u32>,
    prompt: usize,
    chain: ChainKey,
    hashes: Vec<SequenceHash>,
    block_size: usize,
    /// Full blocks, and then those that are being filled.
    held: CachedBlocks,
    filling: VecDeque<PartialBlock>,
    /// Leading tokens whose KV is in the blocks.
    computed: usize,
    onboarding: Option<Onboarding>,
    /// The memory of its prefill worker.
    pub(super) peer: Option<Arc<dyn Tier>>,
    /// How far a prefill is, for the decode worker. `None`: nothing is computed yet.
    progress: Option<HandoffProgress>,
    report: Option<PromptReport>,
    limit: usize,
    pub(super) output: mpsc::Sender<Result<Output, Error>>,
    _accepted: Accepted,
}

/// A complete prefill whose blocks wait for the decode worker. The request is done here.
pub(super) struct Prefilled {
    pub(super) output: mpsc::Sender<Result<Output, Error>>,
    pub(super) progress: HandoffProgress,
    pub(super) blocks: CachedBlocks,
}

impl Sequence {
    pub(super) fn new(
        request: Request,
        card: &ModelCard,
        output: mpsc::Sender<Result<Output, Error>>,
        accepted: Accepted,
    ) -> Self {
        let prompt = request.tokens.len() - request.generated_tokens;
        let limit = request.stop.max_tokens.map_or(card.context - prompt, |most| most as usize);
        let mut sequence = Self {
            domain: request.domain.id(),
            tokens: request.tokens.to_vec(),
            prompt,
            chain: ChainKey::root(&request.domain, &card.identity, None),
            hashes: Vec::new(),
            block_size: card.block_size,
            held: CachedBlocks::default(),
            filling: VecDeque::new(),
            computed: 0,
            onboarding: None,
            peer: None,
            progress: None,
            report: Some(PromptReport::default()),
            limit: limit.min(card.context - prompt),
            output,
            request,
            _accepted: accepted,
        };
        sequence.hash();
        sequence
    }

    fn hash(&mut self) {
        let hashed = self.hashes.len() * self.block_size;
        for block in self.tokens[hashed..].chunks_exact(self.block_size) {
            self.hashes.push(self.chain.push(block));
        }
    }

    pub(super) fn is_prefill(&self) -> bool {
        matches!(self.request.work, Work::Prefill)
    }

    /// Blocks that may come from a cache. The last token is always computed.
    fn reusable(&self) -> usize {
        (self.tokens.len() - 1) / self.block_size
    }

    /// Tokens to compute before the next token is chosen, or before the hand-over.
    pub(super) fn pending(&self) -> usize {
        let goal = if self.is_prefill() { self.reusable() * self.block_size } else { self.tokens.len() };
        goal.saturating_sub(self.computed)
    }

    pub(super) fn missing(&self) -> &[SequenceHash] {
        &self.hashes[self.held.len()..self.reusable().max(self.held.len())]
    }

    pub(super) fn blocks(&self) -> usize {
        self.held.len() + self.filling.len()
    }

    /// Blocks that all known tokens take.
    pub(super) fn need(&self) -> usize {
        self.tokens.len().div_ceil(self.block_size)
    }

    pub(super) fn attach(&mut self, found: CachedBlocks, level: Level) {
        let tokens = found.len() * self.block_size;
        if tokens > 0 && self.filling.is_empty() && self.computed == self.held.len() * self.block_size {
            self.held.extend(found);
            self.computed += tokens;
            if let Some(report) = &mut self.report {
                let open = (self.prompt as u32).saturating_sub(report.cached_tokens());
                report.cached.push((level, open.min(tokens as u32)));
            }
        }
    }

    /// Attaches blocks that were handed over. Those that the prefill worker found cached, `cached` tokens, count as
    /// cached here too. `None`: that is not known.
    pub(super) fn attach_handed_over(&mut self, blocks: CachedBlocks, cached_before: usize, cached: Option<u32>) {
        let [found, before] = [blocks.len(), cached_before.min(blocks.len())].map(|len| (len * self.block_size) as u32);
        self.computed += found as usize;
        self.held.extend(blocks);
        if let Some(report) = &mut self.report {
            let elsewhere = cached.unwrap_or_default().saturating_sub(before).min(found - before);
            report.cached.extend([(Level::G1, before), (Level::Peer, elsewhere)]);
            report.handed_over = found - before;
        }
    }

    pub(super) fn recompute(&self, speed: &Speed) -> Recompute {
        let seconds = speed.prompt_token.as_secs_f64() * self.block_size as f64;
        Recompute { seconds_per_block: Some(seconds), deadline: self.request.attributes.deadline }
    }

    pub(super) fn start_onboarding(&mut self, manager: &BlockManager, speed: &Speed, wake: &Arc<Notify>) {
        self.attach(manager.lookup_again(self.missing()), Level::G1);
        // Once the first token is sent, the prefill worker does not keep the blocks any more.
        let peer = self.peer.as_ref().filter(|_| self.report.is_some());
        let (recompute, wake) = (self.recompute(speed), wake.clone());
        self.onboarding = manager.start_onboarding_with(peer, self.missing(), recompute, wake, &Context::none());
        self.onboarding.iter().for_each(Onboarding::start_waiting);
    }

    /// Whether it waits for blocks. Afterwards those that arrived are attached.
    pub(super) fn awaits_blocks(&mut self, manager: &BlockManager) -> bool {
        let Some(onboarding) = &self.onboarding else { return false };
        if onboarding.should_wait() {
            return true;
        }
        if self.filling.is_empty() {
            let found = manager.lookup_again(self.missing());
            let level = found.iter().next().and_then(|block| onboarding.loaded_from(&block.hash()));
            self.attach(found, level.unwrap_or(Level::G1));
        }
        self.onboarding = None;
        false
    }

    /// Takes slots for the next `count` tokens. `false`: there are none.
    pub(super) fn secure(&mut self, count: usize, manager: &BlockManager) -> bool {
        let need = (self.computed + count).div_ceil(self.block_size).saturating_sub(self.blocks());
        let Some(fresh) = manager.allocate(need) else { return false };
        self.filling.extend(fresh);
        true
    }

    /// Gives up all blocks.
    pub(super) fn release(&mut self) {
        self.held = CachedBlocks::default();
        self.filling.clear();
        self.onboarding = None;
        self.computed = 0;
        if let Some(report) = &mut self.report {
            report.cached.clear();
        }
    }

    /// Computes the next `count` tokens. Returns the hashes of the blocks that became full.
    pub(super) fn compute(&mut self, count: usize, device: &Device, manager: &BlockManager) -> Vec<SequenceHash> {
        self.computed += count;
        let (size, first) = (self.block_size, self.held.len());
        let full = self.computed / size;
        if full == first {
            return Vec::new();
        }
        let attrs = manager.attrs(self.domain, &self.request.attributes.retention);
        let mut attention = self.attention(device);
        let mut blocks = Vec::new();
        for at in first..full {
            let block = self.filling.pop_front().expect("computed tokens have slots");
            let kv = attention.kv(&self.tokens[at * size..(at + 1) * size]);
            kvbm::DeviceBlocks::write(device, block.slot(), &kv);
            attention.read(&kv);
            let parent = at.checked_sub(1).map(|before| self.hashes[before]);
            blocks.push(block.complete(self.hashes[at], parent, attrs));
        }
        self.held.extend(manager.register_all(blocks));
        self.hashes[first..full].to_vec()
    }

    /// Reads all full blocks from the device, as attention does in every step.
    fn attention(&self, device: &Device) -> Attention {
        let mut attention = Attention::new(self.domain, device.variant);
        self.held.iter().map(BlockRef::slot).for_each(|slot| attention.read(&device.at(slot)));
        attention
    }

    /// Generates a token if all tokens are computed. Returns whether the sequence has ended.
    pub(super) fn generate(&mut self, device: &Device) -> bool {
        if self.pending() > 0 || self.is_prefill() {
            return false;
        }
        let seed = self.request.sampling.seed.unwrap_or_default();
        let tail = self.computed / self.block_size * self.block_size;
        let token = self.attention(device).next_token(&self.tokens[tail..], seed);
        self.tokens.push(token);
        self.hash();
        let has_ended = self.tokens.len() - self.prompt >= self.limit;
        self.send(vec![token], has_ended.then_some(FinishReason::Length));
        has_ended
    }

    /// Ends the sequence although there is no memory for another token.
    pub(super) fn finish(&mut self) {
        self.send(Vec::new(), Some(FinishReason::Length));
    }

    fn send(&mut self, ids: Vec<u32>, finish: Option<FinishReason>) {
        let prompt = self.report.take().map(|report| self.closed(report));
        // All outputs fit into the channel; a reader that has left needs none.
        let _ = self.output.try_send(Ok(Output::Tokens(Tokens { ids, finish, prompt, ..Tokens::default() })));
    }

    fn closed(&self, report: PromptReport) -> PromptReport {
        PromptReport { computed: (self.prompt as u32).saturating_sub(report.cached_tokens()), ..report }
    }

    /// Tells the decode worker how many blocks of a prefill are computed. The first report begins the hand-over.
    pub(super) fn report_progress(&mut self, peers: &Peers, worker: WorkerId) -> &HandoffProgress {
        let output = &self.output;
        let progress = self.progress.get_or_insert_with(|| {
            let (ticket, progress) = peers.begin(worker);
            let _ = output.try_send(Ok(Output::Handoff(ticket.encode())));
            progress
        });
        progress.computed(self.held.len());
        progress
    }

    /// Ends a prefill whose blocks are all computed.
    pub(super) fn hand_over(mut self, peers: &Peers, worker: WorkerId) -> Option<Prefilled> {
        let cached = self.report.take().unwrap_or_default().cached;
        self.report_progress(peers, worker).complete(cached);
        let Self { output, progress, held, .. } = self;
        let _ = output.try_send(Ok(Output::Prefilled));
        Some(Prefilled { output, progress: progress?, blocks: held })
    }
}
