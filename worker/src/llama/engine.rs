//! The engine of one worker: accepts requests and starts the scheduler that serves them.

use super::runtime::{Memory, Runtime};
use super::scheduler::{Outbox, Preparer, Resources, Scheduler, Sequence, Vitals};
use super::settings::Settings;
use crate::engine::{Engine, Error, ModelCard, Output, OutputStream, Readiness, Request};
use crate::handoff::Peers;
use crate::metrics::EngineMetrics;
use crate::plane::{Load, WorkerId};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use kvbm::BlockManager;
use std::hash::{BuildHasher, RandomState};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{mpsc, watch};

/// One native engine beside its block manager.
pub struct LlamaEngine {
    runtime: Arc<Runtime>,
    manager: BlockManager,
    settings: Settings,
    pub(super) vitals: Arc<Vitals>,
    preparer: Arc<Preparer>,
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
        let vitals = Vitals::new();
        // Every accepted request has its place: `generate` refuses before the channel can be full.
        let (submit, inbox) = mpsc::channel(settings.max_queued_requests + settings.max_num_seqs);
        let (report, load) = watch::channel(vitals.load(&manager, runtime.block_bytes(), settings.max_num_seqs));
        let resources = Resources {
            worker,
            runtime: Arc::clone(&runtime),
            arena: memory.0,
            manager: manager.clone(),
            settings,
            vitals: Arc::clone(&vitals),
            metrics,
        };
        let scheduler = Scheduler::new(resources, report, inbox);
        tokio::spawn(async move {
            if AssertUnwindSafe(scheduler.run()).catch_unwind().await.is_err() {
                tracing::error!(%worker, "engine failed; its requests fail and it accepts no more");
            }
        });
        let preparer = Arc::new(Preparer::new(manager.clone(), peers, Arc::clone(&vitals)));
        Arc::new(Self { runtime, manager, settings, vitals, preparer, load, submit, seeds: Seeds::default() })
    }

    /// How the engine is doing, as of its last step. The sender is gone when the engine is dead.
    pub fn load(&self) -> watch::Receiver<Load> {
        self.load.clone()
    }

    /// Checks what can be checked before a request is accepted.
    fn check(&self, request: &Request) -> Result<(), Error> {
        let card = &self.runtime.card;
        if *request.model != *card.id {
            return Err(Error::UnknownModel(request.model.to_string()));
        }
        if request.tokens.is_empty() {
            return Err(Error::Invalid { field: "prompt", problem: "has no tokens".into() });
        }
        if let Some(token) = request.tokens.iter().find(|token| **token as usize >= card.vocabulary) {
            let problem = format!("token {token} is not in the vocabulary of {}", card.vocabulary);
            return Err(Error::Invalid { field: "prompt", problem });
        }
        // The last token needs a place for its successor, in the context and in device memory.
        let context = card.context.min(self.manager.capacity() * card.block_size);
        if request.tokens.len() >= context {
            return Err(Error::PromptTooLong { prompt: request.tokens.len(), context });
        }
        if self.vitals.waiting() >= self.settings.max_queued_requests {
            return Err(Error::Overloaded { retry_after: self.vitals.drain_time() });
        }
        Ok(())
    }

    fn accept(&self, request: Request) -> OutputStream {
        let (sender, receiver) = mpsc::channel(Outbox::ITEMS);
        let seed = request.sampling.seed.unwrap_or_else(|| self.seeds.draw());
        let waiting = self.vitals.accept(request.tokens.len());
        let sequence = Sequence::new(request, &self.runtime.card, seed, sender, waiting);
        let (preparer, submit) = (Arc::clone(&self.preparer), self.submit.clone());
        tokio::spawn(async move {
            if let Some(sequence) = preparer.prepare(sequence).await
                && let Err(refused) = submit.send(sequence).await
            {
                refused.0.outbox.fail(Error::Failed("the engine has stopped".into()));
            }
        });
        guard_end(receiver)
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
        vec![Arc::clone(&self.runtime.card)]
    }

    fn readiness(&self) -> Readiness {
        if self.submit.is_closed() {
            return Readiness::NotReady("the engine has stopped".into());
        }
        Readiness::Ready
    }
}

/// The receiving end as a stream. One that ends without a last word (its engine died) ends with an error instead.
fn guard_end(receiver: mpsc::Receiver<Result<Output, Error>>) -> OutputStream {
    let next = |state: Option<mpsc::Receiver<_>>| async move {
        let mut receiver = state?;
        let item = receiver
            .recv()
            .await
            .unwrap_or_else(|| Err(Error::Failed("the engine stopped before the request finished".into())));
        let last = match &item {
            Ok(Output::Tokens(tokens)) => tokens.finish.is_some(),
            Ok(_) => false,
            Err(_) => true,
        };
        Some((item, (!last).then_some(receiver)))
    };
    stream::unfold(Some(receiver), next).boxed()
}

/// Seeds for requests that bring none. The one place where chance comes in.
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
