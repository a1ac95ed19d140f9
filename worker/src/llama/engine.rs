//! The engine of one worker: accepts requests and starts the scheduler that serves them.

use super::limits::Limits;
use super::prefetch::Prefetcher;
use super::runtime::{Memory, Runtime};
use super::scheduler::{EngineStats, PrefixLoader, Resources, Scheduler, Sequence, output};
use super::settings::Settings;
use crate::engine::{
    Engine, Error, ModelCard, OutputStream, PrefetchError, Prefetched, PrefixCopy, Readiness, Request, Work,
};
use crate::handoff::Peers;
use crate::metrics::EngineMetrics;
use crate::plane::{Load, WorkerId};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use kvbm::BlockManager;
use std::hash::{BuildHasher, RandomState};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{mpsc, watch};

/// One native engine beside its block manager.
pub struct LlamaEngine {
    /// The model, with the context that fits the engine's memory.
    card: Arc<ModelCard>,
    limits: Arc<Limits>,
    pub(super) stats: Arc<EngineStats>,
    prefix_loader: Arc<PrefixLoader>,
    prefetcher: Prefetcher,
    load: watch::Receiver<Load>,
    submit: mpsc::Sender<Sequence>,
    seeds: Seeds,
}

impl LlamaEngine {
    /// Starts an engine. `manager` manages `memory`. Runs until the engine is dropped and its last stream has ended.
    pub fn start(
        worker: WorkerId,
        runtime: Arc<Runtime>,
        memory: Memory,
        manager: BlockManager,
        peers: Peers,
        metrics: EngineMetrics,
        settings: Settings,
    ) -> Arc<Self> {
        let stats = EngineStats::new();
        let limits = Limits::new(&settings, stats.notifier());
        // Every accepted request fits into the channel: `generate` rejects requests before it can be full. If a limit
        // is raised later, the tasks that prepare requests wait for the scheduler, which empties it in each step.
        let (submit, submitted) = mpsc::channel(settings.max_queued_requests + settings.max_num_seqs);
        let (report, load) = watch::channel(stats.load(&manager, runtime.block_bytes(), settings.max_num_seqs));
        let (block_bytes, card) = (runtime.block_bytes(), fitting(&runtime.card, manager.capacity()));
        let resources = Resources {
            worker,
            runtime,
            kv_cache: memory.0,
            manager: manager.clone(),
            settings,
            limits: Arc::clone(&limits),
            stats: Arc::clone(&stats),
            metrics: metrics.clone(),
            peers: peers.clone(),
        };
        let scheduler = Scheduler::new(resources, report, submitted);
        tokio::spawn(async move {
            if AssertUnwindSafe(scheduler.run()).catch_unwind().await.is_err() {
                tracing::error!(%worker, "engine failed; its requests fail and it accepts no more");
            }
        });
        let prefetcher = Prefetcher::new(manager.clone(), peers.clone(), Arc::clone(&stats), metrics.clone());
        let prefix_loader =
            PrefixLoader::new(manager, peers, Arc::clone(&stats), metrics, block_bytes, settings.handoff.min_idle);
        let prefix_loader = Arc::new(prefix_loader);
        Arc::new(Self { card, limits, stats, prefix_loader, prefetcher, load, submit, seeds: Seeds::default() })
    }

    /// The model. Its context is at most what fits the engine's memory.
    pub fn card(&self) -> &Arc<ModelCard> {
        &self.card
    }

    /// The engine's load as of its last step. The sender is dropped when the engine stops.
    pub fn load(&self) -> watch::Receiver<Load> {
        self.load.clone()
    }

    /// The engine's limits, which can be changed.
    pub fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    /// Rejects a request that cannot be served, before it is accepted.
    fn check(&self, request: &Request) -> Result<(), Error> {
        let card = &self.card;
        if *request.model != *card.id {
            return Err(Error::UnknownModel(request.model.to_string()));
        }
        if let Work::Relay(http) = &request.work {
            let problem = format!("the native engine has no endpoint {}", http.target.path());
            return Err(Error::Invalid { field: "model", problem });
        }
        if request.tokens.len() <= request.generated_tokens {
            return Err(Error::Invalid { field: "prompt", problem: "has no tokens".into() });
        }
        if let Some(token) = request.tokens.iter().find(|token| **token as usize >= card.vocabulary) {
            let problem = format!("token {token} is not in the vocabulary of {}", card.vocabulary);
            return Err(Error::Invalid { field: "prompt", problem });
        }
        // The last token needs room for its successor.
        if request.tokens.len() >= card.context {
            return Err(Error::PromptTooLong { prompt: request.tokens.len(), context: card.context });
        }
        // Those whose prompt another worker computes are counted apart: they join the queue later.
        let is_arriving = matches!(request.work, Work::Resume(_));
        let before = if is_arriving { self.stats.arriving() } else { self.stats.waiting() };
        if before >= self.limits.max_queued_requests() {
            return Err(Error::Overloaded { retry_after: self.stats.drain_time() });
        }
        Ok(())
    }

    fn accept(&self, request: Request) -> OutputStream {
        let (sender, receiver) = output();
        let seed = request.sampling.seed.unwrap_or_else(|| self.seeds.draw());
        let stats = self.stats.accept(request.tokens.len());
        let sequence = Sequence::new(request, &self.card, seed, sender, stats);
        let (prefix_loader, submit) = (Arc::clone(&self.prefix_loader), self.submit.clone());
        tokio::spawn(async move {
            if let Some(sequence) = prefix_loader.load(sequence).await
                && let Err(refused) = submit.send(sequence).await
            {
                refused.0.output.fail(Error::Failed("the engine has stopped".into()));
            }
        });
        receiver.boxed()
    }
}

impl Engine for LlamaEngine {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        async move {
            self.check(&request)?;
            Ok(self.accept(request))
        }
        .boxed()
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        vec![Arc::clone(&self.card)]
    }

    fn readiness(&self) -> Readiness {
        if self.submit.is_closed() {
            return Readiness::NotReady("the engine has stopped".into());
        }
        Readiness::Ready
    }

    fn prefetch(&self, copy: PrefixCopy) -> BoxFuture<'_, Result<Prefetched, PrefetchError>> {
        if self.submit.is_closed() {
            return std::future::ready(Err(PrefetchError::Busy)).boxed();
        }
        async move { self.prefetcher.run(&copy).await }.boxed()
    }
}

/// The card of a model whose requests take at most `blocks` blocks.
fn fitting(card: &Arc<ModelCard>, blocks: usize) -> Arc<ModelCard> {
    let context = card.context.min(blocks * card.block_size);
    if context == card.context { Arc::clone(card) } else { Arc::new(ModelCard { context, ..ModelCard::clone(card) }) }
}

/// Seeds for requests that have none: the only source of randomness in the engine.
struct Seeds {
    start: RandomState,
    drawn: AtomicU64,
}

impl Default for Seeds {
    fn default() -> Self {
        Self { start: RandomState::new(), drawn: AtomicU64::new(0) }
    }
}

impl Seeds {
    fn draw(&self) -> u64 {
        self.start.hash_one(self.drawn.fetch_add(1, Ordering::Relaxed))
    }
}
