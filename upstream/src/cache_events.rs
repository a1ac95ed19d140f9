//! The KV events of one server in the event logs of its models, so that the router's index follows the server's cache.
//!
//! ```text
//!   rank 0 ── kv_events::run ──▶ Rank, View ──┐                ┌──▶ EventLog of the model
//!   rank 1 ── kv_events::run ──▶ Rank, View ──┴──▶ CacheEvents ┴──▶ EventLog of an adapter
//! ```
//!
//! - **A cache is that of one data-parallel rank**, if requests can name the rank that is to serve them. Else the
//!   server decides, and all of its ranks are one cache: a block counts as cached while any rank has it, so a
//!   prediction is too high when the request goes to another rank.
//! - **A restart of the engine removes all of its blocks from the same log.** The epoch of the log stays: it is that of
//!   the worker's registration, and a new registration would lose what the router knows of running requests and of the
//!   worker's health, although nothing but the cache has changed.
//! - **Lost events remove all blocks too.** A block that is missing from the index costs a cache hit, but for a
//!   block that the engine no longer has, requests are sent to the wrong engine. Blocks that the engine keeps stay
//!   unknown until it stores them again; meanwhile the router notices that the hits differ from the events, and
//!   estimates the cache.
//! - **Blocks of unknown adapters and salts are ignored**, and counted with all other ignored blocks.

use crate::kv_events::{Batch, Chain, Change, Ignored, Medium, Root, Sink, Source, View, WireError, run};
use crate::metrics::Metrics;
use crate::salts::Salts;
use kvbm::{BlockEvent, ChainKey, Domain, EventLog, Level, SequenceHash};
use parking_lot::{Mutex, MutexGuard, RwLock};
use spans::LogLimit;
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::hash::{Hash, Hasher};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// A model of the server, or an adapter of it.
pub struct ModelLog {
    /// The identity on its card, from which the router computes block hashes.
    pub identity: String,
    /// Name of the adapter; `None` for the model itself.
    pub adapter: Option<String>,
    /// Gets the events.
    pub log: Arc<EventLog>,
}

/// The cache of one rank of a server, or of all of its ranks.
pub struct CacheEvents {
    /// URL and rank of the server, for logs.
    server: String,
    /// Kept to the end: the changes of ranks name models by their position.
    models: RwLock<Vec<ModelLog>>,
    salts: Arc<Salts>,
    block_size: u32,
    /// Notified when the engine has restarted.
    restarted: Arc<Notify>,
    metrics: Metrics,
    /// The ranks that have a block, one bit for each. `None`: there is one rank, and the logs have its blocks.
    held: Option<Mutex<HashMap<(Level, ModelHash), u64>>>,
    /// The ranks whose batches cannot be decoded, with the reason.
    undecodable: Mutex<BTreeMap<usize, String>>,
}

/// The hash of a block, and which of the server's models it is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ModelHash {
    model: u32,
    hash: SequenceHash,
}

impl Hash for ModelHash {
    /// One word, because the hash of a block is random in each, and differs between models.
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash.short());
    }
}

/// Maximum number of ranks of one server that are followed. A node has eight or sixteen devices.
const MAX_RANKS: usize = u64::BITS as usize;
/// Maximum number of blocks of one rank: 16 million tokens with blocks of 16. They take up to 350 MiB in a view, the
/// union of the ranks and the event log.
const MAX_BLOCKS: usize = 1 << 20;
/// Ignored blocks are logged at most this often.
const REPORT_INTERVAL: Duration = Duration::from_mins(1);
/// Batches in a row that cannot be decoded until this counts as a state of the publisher.
const UNDECODABLE_BATCHES: u32 = 3;

impl CacheEvents {
    /// The cache of a server whose models have cards with this block size, with as many ranks. It has no model yet.
    pub fn new(
        server: String,
        salts: Arc<Salts>,
        block_size: u32,
        ranks: usize,
        restarted: Arc<Notify>,
        metrics: Metrics,
    ) -> Self {
        let (models, held, undecodable) = (RwLock::default(), (ranks > 1).then(Mutex::default), Mutex::default());
        Self { server, models, salts, block_size, restarted, metrics, held, undecodable }
    }

    /// Why the KV events of the server say nothing of its cache; `None` while batches are decoded, or none arrives.
    pub fn problem(&self) -> Option<String> {
        let undecodable = self.undecodable.lock();
        let error = undecodable.values().next()?;
        Some(format!("upstream {}: its KV events cannot be decoded, so its cache is not known: {error}", self.server))
    }

    /// Adds a model, or replaces the log of an adapter that was loaded again. Blocks that it had before stay in the
    /// former log.
    pub fn set_model(&self, model: ModelLog) {
        let models = &mut *self.models.write();
        match models.iter_mut().find(|known| known.adapter == model.adapter) {
            Some(known) => *known = model,
            None => models.push(model),
        }
    }

    /// Follows the publishers of the server's ranks until it is dropped.
    pub async fn follow(self: Arc<Self>, sources: Vec<Source>) -> Infallible {
        let cache = self;
        let mut ranks = JoinSet::new();
        if sources.len() > MAX_RANKS {
            tracing::warn!(upstream = %cache.server, ranks = sources.len(), "only {MAX_RANKS} ranks are followed");
        }
        for (rank, source) in sources.into_iter().take(MAX_RANKS).enumerate() {
            tracing::debug!(upstream = %cache.server, rank, publisher = %source.live, "following kv events");
            ranks.spawn(run(source, Rank::new(Arc::clone(&cache), rank)));
        }
        match ranks.join_next().await {
            Some(Err(error)) if error.is_panic() => resume_unwind(error.into_panic()),
            Some(Ok(never)) => match never {},
            _ => std::future::pending().await,
        }
    }

    /// Announces changes of one rank.
    fn announce(&self, rank: usize, changes: &mut Vec<Change<ModelHash>>) {
        // Held to the end, so that the logs get the changes of all ranks in the order in which they were made.
        let mut held = self.held.as_ref().map(|held| Held { blocks: held.lock(), bit: 1 << rank });
        for change in changes.drain(..) {
            match change {
                Change::Stored { medium, parent, blocks } => {
                    let Some(level) = level(medium) else { continue };
                    if let Some(held) = &mut held {
                        held.insert(level, &blocks);
                    }
                    let Some(ModelHash { model, .. }) = blocks.first().copied() else { continue };
                    let parent = parent.map(|parent| parent.hash);
                    let blocks = blocks.iter().map(|block| block.hash).collect();
                    self.models.read()[model as usize].log.announce(BlockEvent::Stored { level, parent, blocks });
                }
                Change::Removed { medium, mut blocks } => {
                    let Some(level) = level(medium) else { continue };
                    if let Some(held) = &mut held {
                        blocks.retain(|block| held.remove(level, *block));
                    }
                    self.removed(level, blocks);
                }
                Change::Cleared { medium } => {
                    let Some(level) = level(medium) else { continue };
                    match &mut held {
                        Some(held) => self.removed(level, held.clear(level)),
                        None => {
                            for model in self.models.read().iter() {
                                model.log.announce(BlockEvent::Cleared { level });
                            }
                        }
                    }
                }
            }
        }
    }

    /// Announces that no rank has these blocks any more.
    fn removed(&self, level: Level, mut blocks: Vec<ModelHash>) {
        blocks.sort_by_key(|block| block.model);
        for blocks in blocks.chunk_by(|one, other| one.model == other.model) {
            let models = self.models.read();
            let log = &models[blocks[0].model as usize].log;
            log.announce(BlockEvent::Removed { level, blocks: blocks.iter().map(|block| block.hash).collect() });
        }
    }
}

/// The blocks of all ranks while one of them changes.
struct Held<'a> {
    blocks: MutexGuard<'a, HashMap<(Level, ModelHash), u64>>,
    /// The rank that changes.
    bit: u64,
}

impl Held<'_> {
    fn insert(&mut self, level: Level, blocks: &[ModelHash]) {
        for block in blocks {
            *self.blocks.entry((level, *block)).or_default() |= self.bit;
        }
    }

    /// Removes a block of the rank. Returns whether no rank has it now.
    fn remove(&mut self, level: Level, block: ModelHash) -> bool {
        let Some(ranks) = self.blocks.get_mut(&(level, block)) else { return false };
        *ranks &= !self.bit;
        *ranks == 0 && self.blocks.remove(&(level, block)).is_some()
    }

    /// Removes all blocks of the rank. Returns those that no rank has now.
    fn clear(&mut self, level: Level) -> Vec<ModelHash> {
        let (mut blocks, bit) = (Vec::new(), self.bit);
        self.blocks.retain(|(at, block), ranks| {
            if *at == level && *ranks == bit {
                blocks.push(*block);
                return false;
            }
            if *at == level {
                *ranks &= !bit;
            }
            true
        });
        blocks
    }
}

/// Storage that engines share is G4, as the store that workers of this program share.
fn level(medium: Medium) -> Option<Level> {
    match medium {
        Medium::G1 => Some(Level::G1),
        Medium::G2 => Some(Level::G2),
        Medium::G3 => Some(Level::G3),
        Medium::Shared => Some(Level::G4),
        Medium::Unknown => None,
    }
}

/// Block hashes as the router computes them for a request.
struct RequestChain(Arc<CacheEvents>);

impl Chain for RequestChain {
    type Key = (u32, ChainKey);
    type Hash = ModelHash;

    fn root(&self, root: Root<'_>) -> Option<Self::Key> {
        let models = self.0.models.read();
        let model = models.iter().position(|model| model.adapter.as_deref() == root.lora)?;
        let domain = root.salt.map_or_else(|| Some(Domain::shared()), |salt| self.0.salts.domain(salt))?;
        Some((model as u32, ChainKey::root(&domain, &models[model].identity, None)))
    }

    fn child(&self, (model, parent): &Self::Key, tokens: &[u32]) -> Self::Key {
        let mut key = *parent;
        key.push(tokens);
        (*model, key)
    }

    fn hash(&self, (model, key): &Self::Key) -> ModelHash {
        ModelHash { model: *model, hash: key.hash() }
    }
}

/// The view of one data-parallel rank.
struct Rank {
    cache: Arc<CacheEvents>,
    number: usize,
    view: View<RequestChain>,
    /// Empty between calls.
    changes: Vec<Change<ModelHash>>,
    /// The ignored blocks that are in the metric already.
    counted: Ignored,
    /// Earliest time of the next log line about ignored blocks.
    log_due: Option<Instant>,
    /// Whether another block size of the engine was logged.
    warned: bool,
    /// Whether the first attempt to connect has ended.
    tried: bool,
    /// Batches since the last one that was decoded.
    undecodable: u32,
    /// Limits the log lines about them.
    undecodable_lines: LogLimit,
    /// Limits the log lines about lost events.
    stale_lines: LogLimit,
}

impl Rank {
    fn new(cache: Arc<CacheEvents>, number: usize) -> Self {
        let view = View::new(RequestChain(Arc::clone(&cache)), cache.block_size, MAX_BLOCKS);
        Self {
            cache,
            number,
            view,
            changes: Vec::new(),
            counted: Ignored::default(),
            log_due: None,
            warned: false,
            tried: false,
            undecodable: 0,
            undecodable_lines: LogLimit::default(),
            stale_lines: LogLimit::default(),
        }
    }

    /// A batch was decoded, or the engine is another one.
    fn decodes(&mut self) {
        if std::mem::take(&mut self.undecodable) >= UNDECODABLE_BATCHES {
            self.cache.undecodable.lock().remove(&self.number);
        }
    }

    fn report(&mut self) {
        let (configured, upstream) = (self.cache.block_size, &self.cache.server);
        if let Some(size) = self.view.engine_block_size().filter(|size| *size != configured && !self.warned) {
            tracing::warn!(
                %upstream, rank = self.number,
                "the engine has blocks of {size} tokens, but {configured} were expected, so its kv events are ignored; \
                 set block_size = {size} in [[upstreams]]"
            );
            self.warned = true;
        }
        let ignored = self.view.ignored();
        if ignored == self.counted {
            return;
        }
        self.cache.metrics.ignored(&ignored, &self.counted);
        self.counted = ignored;
        let now = Instant::now();
        if self.log_due.is_none_or(|due| now >= due) {
            let some = |number: u64| (number > 0).then_some(number);
            tracing::info!(
                %upstream, rank = self.number,
                unknown_parent = some(ignored.unknown_parent),
                unknown_root = some(ignored.unknown_root),
                unknown_block = some(ignored.unknown_block),
                other_block_size = some(ignored.other_block_size),
                misaligned = some(ignored.misaligned),
                other_group = some(ignored.other_group),
                content = some(ignored.content),
                unnamed_adapter = some(ignored.unnamed_adapter),
                unknown_medium = some(ignored.unknown_medium),
                conflict = some(ignored.conflict),
                over_capacity = some(ignored.over_capacity),
                "blocks of kv events that were ignored so far: {}", ignored.in_words()
            );
            self.log_due = Some(now + REPORT_INTERVAL);
        }
    }
}

impl Sink for Rank {
    fn connected(&mut self) {
        self.tried = true;
    }

    fn disconnected(&mut self) {
        if !std::mem::replace(&mut self.tried, true) {
            tracing::warn!(
                upstream = %self.cache.server, rank = self.number,
                "no connection to the publisher of kv events; trying again, and estimating the cache until then"
            );
        }
    }

    fn new_epoch(&mut self) {
        let (upstream, rank) = (&self.cache.server, self.number);
        tracing::info!(%upstream, rank, "the engine ended or restarted; its cache is empty");
        self.view.restart(&mut self.changes);
        self.warned = false;
        self.decodes();
        self.cache.restarted.notify_one();
        self.cache.announce(self.number, &mut self.changes);
    }

    fn stale(&mut self) {
        if let Some(suppressed) = self.stale_lines.admit() {
            let (upstream, rank) = (&self.cache.server, self.number);
            tracing::warn!(%upstream, rank, suppressed, "kv events were lost; the cache is unknown");
        }
        self.view.clear(&mut self.changes);
        self.cache.announce(self.number, &mut self.changes);
    }

    fn undecodable(&mut self, error: &WireError) {
        self.cache.metrics.undecodable_batch();
        self.undecodable = self.undecodable.saturating_add(1);
        if self.undecodable >= UNDECODABLE_BATCHES {
            self.cache.undecodable.lock().insert(self.number, error.to_string());
        }
        if let Some(suppressed) = self.undecodable_lines.admit() {
            tracing::warn!(
                upstream = %self.cache.server, rank = self.number, %error, suppressed,
                "a batch of kv events cannot be decoded; check that kv_events in [[upstreams]] is the address of the \
                 publisher of this server, and that its version is supported"
            );
        }
    }

    fn batch(&mut self, batch: Batch) {
        self.decodes();
        batch.events.iter().for_each(|event| self.view.apply(event, &mut self.changes));
        self.cache.announce(self.number, &mut self.changes);
        self.report();
    }
}

#[cfg(test)]
mod tests;
