//! Requests and blocks between two processes over the network: what HTTP does.

use super::network::Node;
use super::world::{Rng, World};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use kvbm::{Block, Date, Fingerprint, Level, LoadError, Loaded, SequenceHash, StoreError, Tier, Usage};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use worker::engine::{Engine, Error, ModelCard, Output, OutputStream, Readiness, Request};
use worker::handoff::{HandoffId, Progress, ProgressStream, RemoteMemory};
use worker::plane::WorkerId;

/// A process that is not reached for this long, on an open connection or a new one, counts as gone: the sum of interval
/// and timeout of pings, and the timeout of connecting.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A worker's engine, as a router in another process sees it.
pub(super) struct LinkEngine {
    world: Arc<World>,
    router: Node,
    worker: Node,
    engine: Arc<dyn Engine>,
    /// The worker's process was killed.
    dead: CancellationToken,
    rng: Mutex<Rng>,
}

impl LinkEngine {
    pub(super) fn new(
        world: &Arc<World>,
        router: Node,
        worker: Node,
        engine: Arc<dyn Engine>,
        dead: CancellationToken,
        number: u64,
    ) -> Self {
        let rng = Mutex::new(world.rng("link", number));
        Self { world: world.clone(), router, worker, engine, dead, rng }
    }
}

/// One request over a link.
struct Exchange {
    world: Arc<World>,
    router: Node,
    worker: Node,
    dead: CancellationToken,
    rng: Rng,
    rest: Option<OutputStream>,
}

impl Exchange {
    /// Carries one message between both.
    async fn carry(&mut self, timeout: Duration) -> Result<(), Error> {
        let delay = self.world.network.delay(&mut self.rng);
        tokio::time::sleep(delay).await;
        let reached = self.world.network.reached(self.router, self.worker);
        tokio::time::timeout(timeout, reached)
            .await
            .map_err(|_| Error::Unavailable(format!("{} does not answer", self.worker)))
    }

    async fn next(&mut self) -> Option<Result<Output, Error>> {
        let mut rest = self.rest.take()?;
        let reset = || Err(Error::Unavailable(format!("{} reset the connection", self.worker)));
        let item = tokio::select! {
            biased;
            item = rest.next() => item,
            () = self.dead.cancelled() => Some(reset()),
        };
        // The end of a stream whose process was killed may come first.
        let item = if item.is_none() && self.dead.is_cancelled() { reset() } else { item? };
        match self.carry(PING_TIMEOUT).await {
            Ok(()) => {
                self.rest = item.is_ok().then_some(rest);
                Some(item)
            }
            Err(error) => Some(Err(error)),
        }
    }
}

impl Engine for LinkEngine {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        let (rng, is_new) = {
            let mut rng = self.rng.lock();
            let number = rng.next();
            (self.world.rng("exchange", number), rng.chance(0.3))
        };
        let mut exchange = Exchange {
            world: self.world.clone(),
            router: self.router,
            worker: self.worker,
            dead: self.dead.clone(),
            rng,
            rest: None,
        };
        let engine = self.engine.clone();
        Box::pin(async move {
            exchange.carry(if is_new { CONNECT_TIMEOUT } else { PING_TIMEOUT }).await?;
            let refused = || Error::Unavailable(format!("{} refuses the connection", self.worker));
            if self.dead.is_cancelled() {
                return Err(refused());
            }
            let answer = self.dead.run_until_cancelled(engine.generate(request)).await.ok_or_else(refused)?;
            exchange.carry(PING_TIMEOUT).await?;
            exchange.rest = Some(answer?);
            let items = stream::unfold(exchange, |mut exchange| async move {
                let item = exchange.next().await?;
                Some((item, exchange))
            });
            Ok(items.boxed())
        })
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        self.engine.models()
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

/// A tier in another process: the shared store, or the memory of a worker.
pub(super) struct LinkTier {
    world: Arc<World>,
    from: Node,
    to: Node,
    level: Level,
    /// `None`: the memory of the worker that is `to` now.
    tier: Option<Arc<dyn Tier>>,
    rng: Mutex<Rng>,
}

impl LinkTier {
    /// The shared store.
    pub(super) fn to_store(world: &Arc<World>, from: Node, tier: Arc<dyn Tier>, life: u64) -> Arc<dyn Tier> {
        let rng = Mutex::new(world.rng(&format!("store of {from}"), life));
        Arc::new(Self { world: world.clone(), from, to: Node::Store, level: tier.level(), tier: Some(tier), rng })
    }

    /// The memory of another worker.
    pub(super) fn to_peer(world: &Arc<World>, from: Node, peer: WorkerId, life: u64) -> Arc<dyn RemoteMemory> {
        let rng = Mutex::new(world.rng(&format!("peer {peer} of {from}"), life));
        Arc::new(Self { world: world.clone(), from, to: Node::Worker(peer.0), level: Level::Peer, tier: None, rng })
    }

    fn tier(&self) -> Option<Arc<dyn Tier>> {
        let Node::Worker(peer) = self.to else { return self.tier.clone() };
        self.world.memories.lock().get(&WorkerId(peer)).map(|memory| memory.tier.clone())
    }

    async fn carry(&self) -> io::Result<()> {
        let delay = self.world.network.delay(&mut self.rng.lock());
        carry(&self.world, self.from, self.to, delay).await
    }
}

async fn carry(world: &World, from: Node, to: Node, delay: Duration) -> io::Result<()> {
    tokio::time::sleep(delay).await;
    let reached = tokio::time::timeout(PING_TIMEOUT, world.network.reached(from, to)).await;
    reached.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))
}

impl Tier for LinkTier {
    fn level(&self) -> Level {
        self.level
    }

    fn holds(&self, fingerprint: Fingerprint, hashes: &[SequenceHash]) -> usize {
        // What a peer holds is not known here.
        self.tier.as_ref().map_or(hashes.len(), |tier| tier.holds(fingerprint, hashes))
    }

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let (world, from, to, tier) = (self.world.clone(), self.from, self.to, self.tier());
        let delays = {
            let mut rng = self.rng.lock();
            [world.network.delay(&mut rng), world.network.delay(&mut rng)]
        };
        let loading = async move {
            let count = hashes.len();
            let failed = move || {
                let timed_out = || LoadError::Io(io::ErrorKind::TimedOut.into());
                (0..count).map(move |index| (index, Err(timed_out()))).collect::<Vec<Loaded>>()
            };
            let (Some(tier), Ok(())) = (tier, carry(&world, from, to, delays[0]).await) else { return failed() };
            let loaded = tier.load(fingerprint, hashes).collect::<Vec<Loaded>>().await;
            if carry(&world, to, from, delays[1]).await.is_err() {
                return failed();
            }
            loaded
        };
        stream::once(loading).flat_map(stream::iter).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        Box::pin(async move {
            let failed =
                |count: usize| (0..count).map(|_| Err(StoreError::Io(io::ErrorKind::TimedOut.into()))).collect();
            let count = blocks.len();
            let (Some(tier), Ok(())) = (self.tier(), self.carry().await) else { return failed(count) };
            let stored = tier.store(blocks).await;
            // What is stored stays stored although its writer does not learn it.
            if self.carry().await.is_err() { failed(count) } else { stored }
        })
    }

    fn discard(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        if let Some(tier) = &self.tier {
            tier.discard(fingerprint, hash);
        }
    }

    fn expire(&self, now: Date) -> usize {
        self.tier.as_ref().map_or(0, |tier| tier.expire(now))
    }

    fn usage(&self) -> Usage {
        self.tier.as_ref().map(|tier| tier.usage()).unwrap_or_default()
    }
}

/// The progress of a prefill on another worker, over the network.
struct Following {
    world: Arc<World>,
    from: Node,
    to: Node,
    rng: Rng,
    /// `None`: the request for it has not arrived.
    progress: Option<ProgressStream>,
}

impl Following {
    async fn carry(&mut self) -> Option<()> {
        let delay = self.world.network.delay(&mut self.rng);
        carry(&self.world, self.from, self.to, delay).await.ok()
    }

    /// `None`: the prefill has ended, or its worker is dead or not reached.
    async fn next(&mut self, handoff: HandoffId) -> Option<Progress> {
        let mut progress = if let Some(progress) = self.progress.take() {
            progress
        } else {
            self.carry().await?;
            let Node::Worker(peer) = self.to else { return None };
            let memory = self.world.memories.lock().get(&WorkerId(peer)).cloned()?;
            memory.handoffs.follow(handoff)?
        };
        let next = tokio::select! {
            biased;
            next = progress.next() => next?,
            () = self.world.network.lost(self.from, self.to, PING_TIMEOUT) => return None,
        };
        self.carry().await?;
        self.progress = Some(progress);
        Some(next)
    }
}

impl RemoteMemory for LinkTier {
    fn progress(&self, handoff: HandoffId) -> ProgressStream {
        let number = self.rng.lock().next();
        let (world, rng) = (self.world.clone(), self.world.rng("progress", number));
        let following = Following { world, from: self.from, to: self.to, rng, progress: None };
        stream::unfold(following, move |mut following| async move {
            let next = following.next(handoff).await?;
            Some((next, following))
        })
        .boxed()
    }
}
