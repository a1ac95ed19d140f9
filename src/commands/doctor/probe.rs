//! The completions: a new prompt, the same again, and the same with a salt; and the KV events that follow the first.
//!
//! Beside them the tokens of the gateway's own tokenizers, compared with those of the server.
//!
//! The events are read by the view that `serve` uses, with the hashes of the probe's prompt: it tells which blocks of
//! the prompt the server has announced.

use super::server::Server;
use frontend::{TokenizerComparison, compare_tokenizer};
use kvbm::{ChainKey, Domain, SequenceHash};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use upstream::TokenizeClient;
use upstream::ask::{self, AnswerLimits};
use upstream::kv_events::{Batch, Chain, Change, Endpoint, Event, Root, Sink, Source, View, replays_batches, run};
use upstream::relay::chunk::Usage;
use worker::engine::UNKNOWN_CONTEXT;

/// Blocks of the prompt: several, so that parents are seen too.
const BLOCKS: usize = 3;
/// Limits of the answer to one completion. Its prompt is short, but the server may be busy.
const COMPLETION: AnswerLimits = AnswerLimits { bytes: 4 << 20, time: Duration::from_secs(8) };
/// Limits of the answer with the tokens of a prompt.
const TOKENS: AnswerLimits = AnswerLimits { bytes: 4 << 20, time: Duration::from_secs(3) };
/// Time for the connections to the publishers, which have answered before.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time for a publisher to receive the subscription, which it does after it has accepted the connection and does not
/// acknowledge.
const SUBSCRIPTION_DELAY: Duration = Duration::from_millis(500);
/// Time for the events of a completion. Engines publish them with the step.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of blocks in the view of one rank: those of the probe and of requests beside it.
const MAX_BLOCKS: usize = 1 << 16;
/// Characters of an error that are shown.
const ERROR_CHARS: usize = 300;

/// Words that are one token each in most vocabularies.
const WORDS: [&str; 16] =
    ["the", "of", "and", "to", "in", "is", "it", "for", "on", "with", "as", "was", "at", "by", "from", "that"];

/// The server to probe, and what is sent to it.
pub(super) struct Plan<'a> {
    pub(super) server: &'a Server<'a>,
    /// The data-parallel rank that the completions are for, if they can name one.
    pub(super) rank: Option<u32>,
    /// The publishers that answer, or that of the rank.
    pub(super) sources: &'a [Source],
    /// The block size that the router uses.
    pub(super) block_size: u32,
    /// The larger one of that and the block size that the server says: the prompt must have some of its blocks, too.
    pub(super) largest_block: u32,
    /// Whether one completion has a salt.
    pub(super) salted: bool,
}

/// What a probe of a server has found.
pub(super) struct ProbeResult {
    pub(super) block_size: u32,
    /// Publishers that were followed.
    pub(super) ranks: usize,
    /// The tokens of the prompt as the server says them, or why it does not.
    pub(super) tokens: Result<Vec<u32>, String>,
    /// What the events said.
    pub(super) events: Events,
    /// Replay sockets that do not have a batch which their publisher has just sent.
    pub(super) foreign_replays: Vec<Endpoint>,
    /// The usage of the completions, or why there was none. Those after a failed one are missing.
    pub(super) first: Result<Usage, Refusal>,
    pub(super) second: Option<Result<Usage, Refusal>>,
    /// With a salt, if requests get one.
    pub(super) salted: Option<Result<Usage, Refusal>>,
}

/// Why there was no completion.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Refusal {
    /// The status of the answer; `None` if there was none.
    pub(super) status: Option<u16>,
    pub(super) why: String,
}

/// What the events of all ranks said.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Events {
    /// Connections that were made.
    pub(super) connected: usize,
    /// Events of stored blocks, also of other requests.
    pub(super) stored: u64,
    /// Tokens per block, once a block was announced.
    pub(super) block_size: Option<u32>,
    /// Blocks of the prompt that were announced.
    pub(super) found: HashSet<SequenceHash>,
}

/// Sends the completions.
pub(super) async fn send(plan: &Plan<'_>) -> ProbeResult {
    let server = plan.server;
    let model = server.models.first().map(|model| model.card.id.clone()).unwrap_or_default();
    let context = server.models.first().map_or(UNKNOWN_CONTEXT, |model| model.card.context);
    let (prompt, tokens) = prompt(plan, &model, context).await;
    let blocks: Arc<[SequenceHash]> = match &tokens {
        Ok(tokens) => hashes(tokens, plan.block_size).into(),
        Err(_) => Arc::default(),
    };
    let (sender, mut events) = watch::channel(Events::default());
    let sender = Arc::new(sender);
    let (mut following, mut compared) = (JoinSet::new(), JoinSet::new());
    for source in plan.sources {
        if let Some(replay) = source.replay.clone() {
            let source = source.clone();
            compared.spawn(async move {
                let is_same = replays_batches(&source, &replay).await;
                is_same.is_ok_and(|is_same| !is_same).then_some(replay)
            });
        }
        // Without a replay only what comes from now on is read.
        let source = Source { replay: None, ..source.clone() };
        let view = View::new(PromptChain, plan.block_size, MAX_BLOCKS);
        let rank = Rank { view, changes: Vec::new(), blocks: Arc::clone(&blocks), events: Arc::clone(&sender) };
        following.spawn(run(source, rank));
    }
    if !plan.sources.is_empty() {
        let all = events.wait_for(|events| events.connected >= plan.sources.len());
        // Those that are connected are followed all the same.
        let _ = timeout(CONNECT_TIMEOUT, all).await;
        sleep(SUBSCRIPTION_DELAY).await;
    }
    let first = completion(plan, &model, &prompt, None).await;
    if first.is_ok() && !plan.sources.is_empty() {
        let is_complete = |events: &Events| {
            let other_size = events.block_size.is_some_and(|size| size != plan.block_size);
            other_size || (!blocks.is_empty() && events.found.len() == blocks.len())
        };
        let _ = timeout(EVENTS_TIMEOUT, events.wait_for(is_complete)).await;
    }
    let seen = events.borrow().clone();
    drop(following);
    // While the other completions run.
    let compared_until = Instant::now() + EVENTS_TIMEOUT;
    let (mut second, mut salted) = (None, None);
    if first.is_ok() {
        second = Some(completion(plan, &model, &prompt, None).await);
        if plan.salted {
            salted = Some(completion(plan, &model, &prompt, Some(&nonce())).await);
        }
    }
    let mut foreign_replays = Vec::new();
    // A publisher that has sent nothing leaves nothing to compare.
    while seen.stored > 0
        && let Ok(Some(replay)) = timeout_at(compared_until, compared.join_next()).await
    {
        foreign_replays.extend(replay.ok().flatten());
    }
    let (block_size, ranks) = (plan.block_size, plan.sources.len());
    ProbeResult { block_size, ranks, tokens, events: seen, foreign_replays, first, second, salted }
}

/// A prompt that no other request has, of [`BLOCKS`] blocks and a part of one, or what fits into the context; and its
/// tokens.
async fn prompt(plan: &Plan<'_>, model: &str, context: usize) -> (String, Result<Vec<u32>, String>) {
    let block_size = plan.largest_block as usize;
    // Half of the context leaves space for vocabularies that have more tokens than words.
    let wanted = (BLOCKS * block_size + block_size / 2).min(context / 2);
    let start = format!("{} ", nonce());
    let text = |words: usize| {
        let words: Vec<&str> = WORDS.iter().copied().cycle().take(words).collect();
        format!("{start}{}", words.join(" "))
    };
    let mut words = wanted;
    let mut prompt = text(words);
    let mut tokens = tokenize(plan.server, model, &prompt).await;
    if let Ok(all) = &tokens
        && all.len() > context.saturating_sub(1)
    {
        words = words * context / (2 * all.len());
        prompt = text(words);
        tokens = tokenize(plan.server, model, &prompt).await;
    }
    (prompt, tokens)
}

async fn tokenize(server: &Server<'_>, model: &str, prompt: &str) -> Result<Vec<u32>, String> {
    let body = json!({ "model": model, "prompt": prompt });
    let asked = ask::post(&server.client, server.api_key.as_ref(), "/tokenize", body.to_string().into(), TOKENS);
    let answer = asked.await.map_err(|error| error.to_string())?;
    if !answer.status.is_success() {
        return Err(format!("/tokenize answers {}", answer.status));
    }
    let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let tokens = body["tokens"]
        .as_array()
        .map(|tokens| tokens.iter().map(|token| u32::try_from(token.as_u64()?).ok()).collect::<Option<Vec<u32>>>());
    // llama.cpp has an endpoint of this name that takes other fields.
    let tokens = tokens.flatten().filter(|tokens: &Vec<u32>| !tokens.is_empty());
    tokens.ok_or_else(|| "/tokenize answers no `tokens`".to_owned())
}

/// Compares the local tokenizers of the server's models with the server, on the prompts of the comparison of `serve`.
pub(super) async fn compare_tokenizers(server: &Server<'_>) -> Vec<(String, TokenizerComparison)> {
    let mut compared = Vec::new();
    for model in &server.models {
        let id = &model.card.id;
        let Some(local) = server.gateway.tokenizers.get(id) else { continue };
        let name = server.upstream.shown_url();
        let tokenize = TokenizeClient::new(server.client.clone(), server.api_key.clone(), name);
        compared.push((id.clone(), compare_tokenizer(id, local, &tokenize).await));
    }
    compared
}

async fn completion(plan: &Plan<'_>, model: &str, prompt: &str, salt: Option<&str>) -> Result<Usage, Refusal> {
    const PATH: &str = "/v1/completions";
    let Plan { server: Server { client, api_key, .. }, rank, .. } = plan;
    let mut body = json!({ "model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0 });
    if let Some(salt) = salt {
        body["cache_salt"] = salt.into();
    }
    let body = body.to_string().into();
    let asked = match rank {
        Some(rank) => ask::post_to_rank(client, api_key.as_ref(), *rank, PATH, body, COMPLETION).await,
        None => ask::post(client, api_key.as_ref(), PATH, body, COMPLETION).await,
    };
    let refusal = |status, why: String| Refusal { status, why: why.chars().take(ERROR_CHARS).collect() };
    let answer = asked.map_err(|error| refusal(None, error.to_string()))?;
    let status = Some(answer.status.as_u16());
    if !answer.status.is_success() {
        let body = String::from_utf8_lossy(&answer.body).into_owned();
        return Err(refusal(status, format!("{}: {body}", answer.status)));
    }
    let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    Usage::read(body["usage"].to_string().as_bytes()).ok_or_else(|| refusal(status, "no `usage`".to_owned()))
}

/// Distinguishes the prompts of all runs. Hash maps are seeded by the operating system.
fn nonce() -> String {
    format!("{:016x}", RandomState::new().hash_one(0))
}

/// The hashes of the full blocks of a prompt.
pub(super) fn hashes(tokens: &[u32], block_size: u32) -> Vec<SequenceHash> {
    let mut key = PromptChain::start();
    let blocks = tokens.chunks_exact(block_size as usize);
    blocks
        .map(|block| {
            key.push(block);
            key.hash()
        })
        .collect()
}

/// Hashes of prompts without adapter and salt.
struct PromptChain;

impl PromptChain {
    fn start() -> ChainKey {
        ChainKey::root(&Domain::shared(), "doctor", None)
    }
}

impl Chain for PromptChain {
    type Key = ChainKey;
    type Hash = SequenceHash;

    fn root(&self, root: Root<'_>) -> Option<ChainKey> {
        (root.lora.is_none() && root.salt.is_none()).then(Self::start)
    }

    fn child(&self, parent: &ChainKey, tokens: &[u32]) -> ChainKey {
        let mut key = *parent;
        key.push(tokens);
        key
    }

    fn hash(&self, key: &ChainKey) -> SequenceHash {
        key.hash()
    }
}

/// The view of one rank.
struct Rank {
    view: View<PromptChain>,
    /// A buffer that is reused: empty between calls.
    changes: Vec<Change<SequenceHash>>,
    /// The hashes of the prompt's blocks.
    blocks: Arc<[SequenceHash]>,
    events: Arc<watch::Sender<Events>>,
}

impl Sink for Rank {
    fn connected(&mut self) {
        self.events.send_modify(|events| events.connected += 1);
    }

    fn new_epoch(&mut self) {
        self.view.restart(&mut self.changes);
        self.changes.clear();
    }

    /// Events from before the connection are missing, which does not concern a new prompt.
    fn stale(&mut self) {}

    fn batch(&mut self, batch: Batch) {
        batch.events.iter().for_each(|event| self.view.apply(event, &mut self.changes));
        let stored = batch.events.iter().filter(|event| matches!(event, Event::Stored(_))).count() as u64;
        let announced = self.changes.drain(..).flat_map(|change| match change {
            Change::Stored { blocks, .. } => blocks,
            Change::Removed { .. } | Change::Cleared { .. } => Vec::new(),
        });
        let found: Vec<SequenceHash> = announced.filter(|hash| self.blocks.contains(hash)).collect();
        let block_size = self.view.engine_block_size();
        self.events.send_modify(|events| {
            events.stored += stored;
            events.block_size = events.block_size.or(block_size);
            events.found.extend(found);
        });
    }
}
