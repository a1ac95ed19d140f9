//! The engine of a simulated worker: continuous batching over a real block manager. Time is virtual, KV and tokens are
//! those of the [model](super::model).

mod arrival;
mod handoffs;
mod scheduler;
mod sequence;
mod stats;

use super::model;
use super::network::Node;
use super::world::World;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use kvbm::{BlockManager, Level};
use scheduler::Scheduler;
use sequence::Sequence;
use stats::Stats;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use worker::engine::{Engine, Error, ModelCard, OutputStream, Readiness, Request, Work};
use worker::handoff::{HandoffTicket, Peers};
use worker::plane::{Load, WorkerId};

/// What an engine uses.
#[derive(Clone)]
pub(super) struct Parts {
    pub(super) world: Arc<World>,
    pub(super) worker: WorkerId,
    pub(super) device: Arc<model::Device>,
    pub(super) manager: BlockManager,
    pub(super) peers: Peers,
    pub(super) speed: Speed,
    /// The process was killed.
    pub(super) dead: CancellationToken,
}

/// Limits and speeds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speed {
    pub(super) max_num_seqs: usize,
    pub(super) max_queued_requests: usize,
    pub(super) chunk_tokens: usize,
    pub(super) prompt_token: Duration,
    pub(super) step: Duration,
}

pub(super) struct SimEngine {
    card: Arc<ModelCard>,
    parts: Parts,
    stats: Arc<Stats>,
    submit: mpsc::UnboundedSender<Sequence>,
    load: watch::Receiver<Load>,
}

impl SimEngine {
    pub(super) fn start(parts: Parts) -> Arc<Self> {
        let (submit, inbox) = mpsc::unbounded_channel();
        let stats = Arc::new(Stats::default());
        let (report, load) = watch::channel(stats.load(&parts));
        let (scheduler, dead) = (Scheduler::new(parts.clone(), stats.clone(), inbox, report), parts.dead.clone());
        tokio::spawn(async move { dead.run_until_cancelled(scheduler.run()).await });
        Arc::new(Self { card: parts.device.variant.card(), parts, stats, submit, load })
    }

    pub(super) fn load(&self) -> watch::Receiver<Load> {
        self.load.clone()
    }

    /// Number of requests that were accepted and have not ended.
    pub(super) fn requests(&self) -> usize {
        self.stats.accepted()
    }

    fn check(&self, request: &Request) -> Result<(), Error> {
        let Parts { manager, speed, .. } = &self.parts;
        if *request.model != *self.card.id {
            return Err(Error::UnknownModel(request.model.to_string()));
        }
        if request.tokens.len() <= request.generated_tokens {
            return Err(Error::Invalid { field: "prompt", problem: "has no tokens".into() });
        }
        let context = self.card.context.min(manager.capacity() * self.card.block_size);
        if request.tokens.len() >= context {
            return Err(Error::PromptTooLong { prompt: request.tokens.len(), context });
        }
        if self.stats.waiting() >= speed.max_queued_requests {
            return Err(Error::Overloaded { retry_after: Duration::from_secs(1) });
        }
        Ok(())
    }
}

impl Engine for SimEngine {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        Box::pin(async move {
            self.check(&request)?;
            // Every output of the request fits, so that the scheduler never waits for its reader.
            let outputs = request.stop.max_tokens.unwrap_or_default() as usize + 2;
            let (output, outputs) = mpsc::channel(outputs);
            self.parts.world.accepts(self.parts.worker, &request);
            let sequence = Sequence::new(request, &self.card, output, self.stats.accept());
            let (parts, submit) = (self.parts.clone(), self.submit.clone());
            tokio::spawn(async move {
                let dead = parts.dead.clone();
                let closed = sequence.output.clone();
                tokio::select! {
                    biased;
                    () = dead.cancelled() => {}
                    () = closed.closed() => {}
                    sequence = load_prefix(parts, sequence) => {
                        // A scheduler that was killed needs no more requests.
                        let _ = submit.send(sequence);
                    }
                }
            });
            Ok(stream::unfold(outputs, |mut outputs| async move { Some((outputs.recv().await?, outputs)) }).boxed())
        })
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        vec![self.card.clone()]
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

/// Attaches the cached prefix of a request, and that of its prefill worker, before it is queued.
async fn load_prefix(parts: Parts, mut sequence: Sequence) -> Sequence {
    let Parts { world, worker, manager, peers, .. } = &parts;
    world.network.thawed(Node::Worker(worker.0)).await;
    let found = manager.lookup(sequence.missing());
    let ticket = match &sequence.request.work {
        Work::Resume(handoff) => HandoffTicket::decode(handoff),
        _ => None,
    };
    match ticket.and_then(|ticket| peers.find(&ticket)) {
        Some(handed) => {
            let cached_before = found.len();
            // Not held while the others arrive.
            drop(found);
            arrival::take_over(&parts, &mut sequence, handed, cached_before).await;
        }
        None => sequence.attach(found, Level::G1),
    }
    sequence
}
