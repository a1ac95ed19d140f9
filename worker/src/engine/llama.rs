//! The native engine: Llama-family models from a Hugging Face folder, computed on the CPU with real attention over
//! paged KV blocks.
//!
//! ```text
//!  Request ─▶ prepare ─▶ schedule ─▶ step ─▶ model.forward over the Arena (G1)
//!              │ match, onboard         └─▶ sampling ─▶ stream
//!              └─▶ kvbm
//! ```
//!
//! One [`Runtime`] (weights, compute threads, fair turns) serves any number of [`LlamaEngine`]s in a process.
//!
//! **Invariant**: a row's result depends on nothing but its own inputs: not on chunk size, batch mates, threads or phase.
//! So the KV of a block is the same, bit for bit, whoever computed it, and reuse never changes an answer.

pub(crate) mod arena;
mod attention;
mod builtin;
pub(crate) mod config;
pub(crate) mod folder;
mod kernel;
mod linear;
pub(crate) mod model;
#[cfg(test)]
mod reference;
mod rope;
mod sampling;
pub(crate) mod weights;

mod batch;
mod prepare;
mod runtime;
mod schedule;
mod sequence;
mod step;
mod vitals;

#[cfg(test)]
mod tests;

pub use builtin::{Builtin, BuiltinError};
pub use folder::{FolderError, name as folder_name};
pub use runtime::{ModelSource, OpenError, Runtime, Shape};

use crate::engine::{Engine, Error, ModelCard, Output, OutputStream, PromptReport, Readiness, Request};
use crate::metrics::EngineMetrics;
use crate::peers::Peers;
use crate::plane::{Load, WorkerId};
use arena::Arena;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use kvbm::{BlockManager, ChainKey, DeviceBlocks};
use prepare::Preparer;
use sampling::Sampler;
use schedule::Scheduler;
use sequence::{BlockTable, Lineage, Outbox, Sequence};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use vitals::Vitals;

/// How a native engine batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Prompt tokens computed in one step. Default 512: larger chunks prefill little faster, and a decoding request
    /// waits for the whole chunk.
    pub max_prefill_chunk_tokens: usize,
    /// Sequences in one batch. Default 64: more rows per step cost latency and gain little on a CPU.
    pub max_num_seqs: usize,
    /// Requests accepted beyond those in the batch. Default 1024; more are told to try again later.
    pub max_queued_requests: usize,
    /// What becomes of requests whose output is not read. Not in the configuration.
    #[serde(skip)]
    pub unread: Unread,
}

/// What becomes of a request whose output is not read, once what may be generated ahead of its reader is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unread {
    /// It keeps its place in the batch for so long, and then gives it up with its blocks until its output is read
    /// again.
    pub place: Duration,
    /// It fails after so long.
    pub limit: Duration,
}

impl Default for Unread {
    /// A quarter of a second, since the reader is 72 tokens behind by then. Half a minute: proxies close connections
    /// that stand still after that.
    fn default() -> Self {
        Self { place: Duration::from_millis(250), limit: Duration::from_secs(30) }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_prefill_chunk_tokens: 512, max_num_seqs: 64, max_queued_requests: 1024, unread: Unread::default() }
    }
}

/// G1 of one engine: device memory, to be given to a block manager and then to [`LlamaEngine::start`] with it.
#[derive(Clone)]
pub struct Memory(Arc<Arena>);

impl Memory {
    /// The memory as kvbm sees it.
    pub fn device(&self) -> Arc<dyn DeviceBlocks> {
        Arc::clone(&self.0) as Arc<dyn DeviceBlocks>
    }
}

/// One native engine beside its block manager.
pub struct LlamaEngine {
    runtime: Arc<Runtime>,
    manager: BlockManager,
    settings: Settings,
    vitals: Arc<Vitals>,
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
        let scheduler = Scheduler {
            load: report,
            worker,
            runtime: Arc::clone(&runtime),
            arena: memory.0,
            manager: manager.clone(),
            settings,
            vitals: Arc::clone(&vitals),
            metrics,
            inbox,
            waiting: VecDeque::new(),
            running: Vec::new(),
            paused: VecDeque::new(),
            left: false,
        };
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
        let card = &self.runtime.card;
        let root = ChainKey::root(&request.domain, &card.identity, None);
        let seed = request.sampling.seed.unwrap_or_else(|| self.seeds.draw());
        let left = card.context - request.tokens.len();
        let sequence = Sequence {
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
            waiting: self.vitals.accept(request.tokens.len()),
            limit: request.stop.max_tokens.map_or(left, |most| left.min(most as usize)),
            request,
        };
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
