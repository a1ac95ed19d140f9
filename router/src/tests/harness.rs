//! A router over the local planes, with engines whose behaviour a test controls.

use crate::Router;
use crate::state::Settings;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{StreamExt, stream};
use kvbm::{BlockEvent, ChainKey, Domain, Epoch, EventLog, Fingerprint, Level, SequenceHash};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use worker::engine::{
    Engine, Error, FinishReason, Handoff, HttpRequest, ModelCard, Output, OutputStream, PrefetchError, Prefetched,
    PrefixCopy, PromptReport, Readiness, Request, RequestAttributes, Sampling, StopConditions, Tokens, Work,
};
use worker::plane::local::{Link, LocalDiscovery, LocalEvents};
use worker::plane::{
    DeviceId, Discovery, Event, EventBody, Events, Instance, KvCache, Lease, Load, Role, RouterId, Source, StoreId,
    WorkerId,
};

pub(crate) const BLOCK: usize = 16;
pub(crate) const MODEL: &str = "toy";
/// Reported prefill speed: a prompt of 1,000 tokens takes a second.
pub(crate) const SPEED: f64 = 1000.0;

/// Behaviour of a fake engine.
#[derive(Clone)]
pub(crate) enum Behaviour {
    Serve,
    /// Requests have no output for this long, and are then served. Health checks are served at once.
    ServeAfter(Duration),
    Refuse(Error),
    /// Health checks are served, and requests are not.
    RefuseRequests(Error),
    /// The stream yields this error instead of an output.
    Break(Error),
    /// The stream yields a token, and then this error.
    BreakLater(Error),
    /// The stream yields two tokens, and then this error.
    Drain(Error),
    /// The stream ends without an output.
    End,
    /// The stream never yields an output.
    Hang,
    /// A prefill hands off at once and ends in this way when its time is over; a decode waits for as long.
    HandOff(PrefillEnd),
}

/// How a prefill ends that has handed off.
#[derive(Clone)]
pub(crate) enum PrefillEnd {
    Complete,
    Fails(Error),
    Hangs,
}

pub(crate) struct FakeEngine {
    card: Arc<ModelCard>,
    pub(crate) behaviour: Mutex<Behaviour>,
    pub(crate) received: Mutex<Vec<Work>>,
    /// First tokens of the prompts.
    firsts: Mutex<Vec<u32>>,
    /// Number of health checks.
    pub(crate) probes: AtomicUsize,
    /// The server that health checks are of.
    pub(crate) server: Mutex<Option<u64>>,
    /// Number of open streams.
    pub(crate) open: Arc<AtomicUsize>,
    pub(crate) log: Arc<EventLog>,
    /// Cached blocks; `None` for an engine that caches nothing.
    cache: Arc<Mutex<Cache>>,
    source: Source,
    /// The address of its process, if several workers share one.
    pub(crate) shared_address: Mutex<Option<String>>,
    /// Copies of prefixes that the router ordered.
    pub(crate) copies: Mutex<Vec<PrefixCopy>>,
    /// How it answers these. A copy takes a second.
    pub(crate) copy_answer: Mutex<Result<Prefetched, PrefetchError>>,
}

type Cache = Option<HashSet<SequenceHash>>;

/// Adds a prompt to the cache and reports how much of it was cached.
fn compute(cache: &Mutex<Cache>, request: &Request) -> PromptReport {
    let mut cache = cache.lock();
    let Some(cache) = cache.as_mut() else { return PromptReport::default() };
    let mut blocks = names(request);
    // The last token is always computed.
    blocks.truncate((request.tokens.len() - 1) / BLOCK);
    let found = blocks.iter().take_while(|block| cache.contains(*block)).count();
    cache.extend(blocks);
    PromptReport { cached: vec![(Level::G1, (found * BLOCK) as u32)], ..PromptReport::default() }
}

struct OpenStream(Arc<AtomicUsize>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl FakeEngine {
    pub(crate) fn requests(&self) -> usize {
        self.received.lock().len()
    }

    pub(crate) fn works(&self) -> Vec<Work> {
        self.received.lock().clone()
    }

    /// Families of the received prompts, in order.
    pub(crate) fn families(&self) -> Vec<u32> {
        self.firsts.lock().iter().map(|token| token / 1_000_000).collect()
    }

    pub(crate) fn set_behaviour(&self, behaviour: Behaviour) {
        *self.behaviour.lock() = behaviour;
    }

    /// Turns the cache on, with these blocks in it.
    pub(crate) fn cache_blocks(&self, blocks: &[SequenceHash]) {
        self.cache.lock().get_or_insert_default().extend(blocks);
    }

    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

impl Engine for FakeEngine {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        let asked = &*request.id != "probe";
        if asked {
            self.received.lock().push(request.work.clone());
            self.firsts.lock().push(request.tokens[0]);
        } else {
            self.probes.fetch_add(1, Ordering::SeqCst);
        }
        let (behaviour, silent) = match self.behaviour.lock().clone() {
            Behaviour::RefuseRequests(error) if asked => (Behaviour::Refuse(error), Duration::ZERO),
            Behaviour::RefuseRequests(_) => (Behaviour::Serve, Duration::ZERO),
            Behaviour::ServeAfter(time) => (Behaviour::Serve, if asked { time } else { Duration::ZERO }),
            other => (other, Duration::ZERO),
        };
        self.open.fetch_add(usize::from(asked), Ordering::SeqCst);
        let open = asked.then(|| OpenStream(self.open.clone()));
        let cache = self.cache.clone();
        Box::pin(async move {
            if let Behaviour::Refuse(error) = behaviour {
                return Err(error);
            }
            let tokens = |ids, prompt, finish| Ok(Output::Tokens(Tokens { ids, prompt, finish, ..Tokens::default() }));
            let takes = silent + Duration::from_secs_f64(request.tokens.len() as f64 / SPEED);
            let items = async move {
                let is_resumed = matches!(request.work, Work::Resume(_));
                let hands_off = matches!(behaviour, Behaviour::HandOff(_));
                // A prefill that has handed off takes its time afterwards, a decode waits for it.
                if if hands_off { request.work != Work::Prefill } else { !is_resumed } {
                    tokio::time::sleep(takes).await;
                }
                let report = compute(&cache, &request);
                // The output is 1, 2; another engine may have generated a part of it.
                let next = request.generated_tokens as u32 + 1;
                let pause = |item| async move {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    item
                };
                match (behaviour, request.work) {
                    (Behaviour::Serve, Work::Prefill) => {
                        let handoff = Handoff(Bytes::from(format!("{} tokens", request.tokens.len())));
                        stream::iter([Ok(Output::Handoff(handoff)), Ok(Output::Prefilled)])
                            .chain(stream::pending())
                            .boxed()
                    }
                    (Behaviour::HandOff(end), Work::Prefill) => {
                        let handoff = Handoff(Bytes::from(format!("{} tokens", request.tokens.len())));
                        let later = async move {
                            tokio::time::sleep(takes).await;
                            match end {
                                PrefillEnd::Complete => Ok(Output::Prefilled),
                                PrefillEnd::Fails(error) => Err(error),
                                PrefillEnd::Hangs => std::future::pending().await,
                            }
                        };
                        let items = stream::iter([Ok(Output::Handoff(handoff))]).chain(stream::once(later));
                        items.chain(stream::pending()).boxed()
                    }
                    (Behaviour::Serve | Behaviour::HandOff(_), _) => {
                        let mut items: Vec<_> = (next..=2).map(|id| tokens(vec![id], None, None)).collect();
                        items.push(tokens(vec![], None, Some(FinishReason::Length)));
                        if let Ok(Output::Tokens(first)) = &mut items[0] {
                            first.prompt = Some(report);
                        }
                        stream::iter(items).then(pause).boxed()
                    }
                    (Behaviour::BreakLater(error), _) => {
                        stream::iter([tokens(vec![next], Some(report), None), Err(error)]).then(pause).boxed()
                    }
                    (Behaviour::Drain(error), _) => {
                        let (first, second) =
                            (tokens(vec![next], Some(report), None), tokens(vec![next + 1], None, None));
                        stream::iter([first, second, Err(error)]).then(pause).boxed()
                    }
                    (Behaviour::Break(error), _) => stream::iter([Err(error)]).boxed(),
                    (Behaviour::End, _) => stream::empty().boxed(),
                    (
                        Behaviour::Hang
                        | Behaviour::Refuse(_)
                        | Behaviour::RefuseRequests(_)
                        | Behaviour::ServeAfter(_),
                        _,
                    ) => stream::pending().boxed(),
                }
            };
            Ok(stream::once(items)
                .flatten()
                .map(move |item| {
                    let _held = &open;
                    item
                })
                .boxed())
        })
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        vec![self.card.clone()]
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }

    fn address(&self) -> Option<String> {
        self.shared_address.lock().clone().or_else(|| Some(format!("http://{}:8000", self.source)))
    }

    fn probed_server(&self) -> Option<u64> {
        *self.server.lock()
    }

    fn prefetch(&self, copy: PrefixCopy) -> BoxFuture<'_, Result<Prefetched, PrefetchError>> {
        self.copies.lock().push(copy);
        let answer = self.copy_answer.lock().clone();
        Box::pin(async move {
            if answer.is_ok() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            answer
        })
    }
}

/// A router, its planes and its workers.
pub(crate) struct Harness {
    pub(crate) discovery: Arc<LocalDiscovery>,
    pub(crate) events: Arc<LocalEvents>,
    pub(crate) router: Arc<Router>,
    pub(crate) registry: prometheus::Registry,
    leases: Mutex<Vec<Lease>>,
}

impl Harness {
    pub(crate) fn new(settings: Settings) -> Self {
        Self::over(settings, Link::default())
    }

    pub(crate) fn over(settings: Settings, link: Link) -> Self {
        let (discovery, events, registry) =
            (Arc::new(LocalDiscovery::default()), Arc::new(LocalEvents::new(link)), prometheus::Registry::new());
        let router: Result<_, crate::Error> =
            Router::new(RouterId(0), discovery.clone(), events.clone(), settings, &registry);
        Self { discovery, events, router: router.unwrap(), registry, leases: Mutex::default() }
    }

    /// Adds a worker and its first load report.
    pub(crate) async fn worker(&self, id: u64, role: Role) -> Arc<FakeEngine> {
        self.join(id, role, MODEL, 1, &[]).await
    }

    /// Adds a worker that is a server with tokens of its own.
    pub(crate) async fn relayed_worker(&self, id: u64) -> Arc<FakeEngine> {
        self.join_with(id, Role::Both, ModelCard { is_relayed: true, ..card(MODEL) }, 1, &[]).await
    }

    pub(crate) async fn join(&self, id: u64, role: Role, model: &str, epoch: u64, stores: &[u64]) -> Arc<FakeEngine> {
        self.join_with(id, role, card(model), epoch, stores).await
    }

    pub(crate) async fn join_with(
        &self,
        id: u64,
        role: Role,
        card: ModelCard,
        epoch: u64,
        stores: &[u64],
    ) -> Arc<FakeEngine> {
        let (id, epoch) = (WorkerId(id), Epoch(epoch));
        let stores = stores.iter().map(|store| StoreId(*store)).collect();
        self.join_as(Instance { id, epoch, role, model: Arc::new(card), stores, kv_cache: None }).await
    }

    /// Adds a worker of which this is the fingerprint.
    pub(crate) async fn worker_with_fingerprint(&self, id: u64, role: Role, fingerprint: u8) -> Arc<FakeEngine> {
        let fingerprint = Fingerprint::from_bytes([fingerprint; 32]);
        self.worker_with_cache(id, role, KvCache { fingerprint, blocks: 100, host_blocks: 0, device: None }).await
    }

    /// Adds a worker that computes on a device.
    pub(crate) async fn worker_on_device(&self, id: u64, device: u64) -> Arc<FakeEngine> {
        let (fingerprint, device) = (Fingerprint::from_bytes([0; 32]), Some(DeviceId(device)));
        self.worker_with_cache(id, Role::Both, KvCache { fingerprint, blocks: 10_000, host_blocks: 0, device }).await
    }

    async fn worker_with_cache(&self, id: u64, role: Role, kv_cache: KvCache) -> Arc<FakeEngine> {
        let (id, epoch, model) = (WorkerId(id), Epoch(1), Arc::new(card(MODEL)));
        self.join_as(Instance { id, epoch, role, model, stores: vec![], kv_cache: Some(kv_cache) }).await
    }

    async fn join_as(&self, instance: Instance) -> Arc<FakeEngine> {
        let source = Source::Worker(instance.id);
        let engine = Arc::new(FakeEngine {
            card: Arc::clone(&instance.model),
            behaviour: Mutex::new(Behaviour::Serve),
            received: Mutex::default(),
            firsts: Mutex::default(),
            probes: AtomicUsize::new(0),
            server: Mutex::default(),
            open: Arc::default(),
            log: Arc::new(EventLog::new(instance.epoch)),
            cache: Arc::default(),
            source,
            shared_address: Mutex::default(),
            copies: Mutex::default(),
            copy_answer: Mutex::new(Err(PrefetchError::Unsupported)),
        });
        let offer = self.events.offer(source, engine.log.clone());
        let lease = self.discovery.register(instance, engine.clone()).await.unwrap();
        self.leases.lock().extend([offer, lease]);
        settle().await;
        self.report(&engine, Load::default());
        settle().await;
        engine
    }

    /// Ends the leases of all workers.
    pub(crate) fn all_leave(&self) {
        self.leases.lock().clear();
    }

    /// Records an event in the worker's log, and publishes it if `arrives`.
    pub(crate) fn announce(&self, engine: &FakeEngine, event: BlockEvent, arrives: bool) {
        engine.log.announce(event.clone());
        let number = *engine.log.latest().borrow();
        if arrives {
            let body = EventBody::Block { number, event };
            self.events.publish(Event { source: engine.source, epoch: engine.log.epoch(), body });
        }
    }

    /// Publishes the digest of a worker's blocks.
    pub(crate) fn publish_digest(&self, engine: &FakeEngine) {
        let (number, digest) = engine.log.digest();
        let body = EventBody::Digest { number, digest };
        self.events.publish(Event { source: engine.source, epoch: engine.log.epoch(), body });
    }

    /// Publishes a load report; fills in what every fake engine measures.
    pub(crate) fn report(&self, engine: &FakeEngine, load: Load) {
        let number = *engine.log.latest().borrow();
        let load = Load { number, prefill_tokens_per_second: Some(SPEED), block_bytes: 1000, ..load };
        self.events.publish(Event { source: engine.source, epoch: engine.log.epoch(), body: EventBody::Load(load) });
    }

    pub(crate) async fn ask(&self, request: Request) -> Result<OutputStream, Error> {
        self.router.generate(request).await
    }

    /// Sends a request and collects all tokens.
    pub(crate) async fn answer(&self, request: Request) -> Result<Vec<u32>, Error> {
        let mut stream = self.ask(request).await?;
        let (mut ids, mut reports) = (Vec::new(), 0);
        while let Some(item) = stream.next().await {
            if let Output::Tokens(tokens) = item? {
                ids.extend(tokens.ids);
                reports += u32::from(tokens.prompt.is_some());
            }
        }
        assert_eq!(reports, 1, "a stream has one report of its prompt");
        Ok(ids)
    }

    /// Sends a request and returns the explanation of its placement.
    pub(crate) async fn explain(&self, request: Request) -> serde_json::Value {
        let mut stream = self.ask(Request { explain: true, ..request }).await.unwrap();
        match stream.next().await {
            Some(Ok(Output::Tokens(Tokens { explain: Some(line), .. }))) => serde_json::from_str(&line).unwrap(),
            other => panic!("no explanation in {other:?}"),
        }
    }

    pub(crate) fn metric(&self, name: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name);
        family.map_or(0, |family| family.get_metric().iter().map(|m| m.get_counter().get_value() as u64).sum())
    }

    /// Number of resyncs with this outcome.
    pub(crate) fn resyncs(&self, outcome: &str) -> u64 {
        self.router.core.metrics.resyncs.with_label_values(&[outcome]).get()
    }

    /// Load of a worker, reported and reserved: tokens to prefill, sequences, blocks.
    pub(crate) fn load(&self, id: u64) -> (u64, u64, u64) {
        let fleet = self.router.core.fleet.snapshot();
        let stats = fleet.get(WorkerId(id)).unwrap().load.stats(tokio::time::Instant::now());
        (stats.waiting_tokens.into(), stats.sequences.into(), stats.active_blocks.into())
    }
}

/// Lets all tasks that are ready run.
pub(crate) async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

pub(crate) fn card(id: &str) -> ModelCard {
    ModelCard {
        identity: format!("{id}@1"),
        vocabulary: 1000,
        eos: vec![0],
        random_weights: true,
        has_exact_blocks: true,
        ..ModelCard::new(id, 100_000, BLOCK)
    }
}

/// A prompt of `tokens` tokens. Prompts of one `family` have a common prefix.
pub(crate) fn prompt(family: u32, tokens: usize) -> Request {
    Request {
        id: "r".into(),
        model: MODEL.into(),
        tokens: (0..tokens as u32).map(|at| family.wrapping_mul(1_000_000).wrapping_add(at)).collect(),
        domain: Domain::shared(),
        sampling: Sampling::default(),
        stop: StopConditions::default(),
        work: Work::Generate,
        attributes: RequestAttributes::default(),
        explain: false,
        group: None,
        generated_tokens: 0,
    }
}

/// The request as one for an endpoint of a server of another program, with a stream as its response.
pub(crate) fn relayed(path: &'static str, request: Request) -> Request {
    relayed_as(true, path, request)
}

/// The same with a response that is a stream, or comes whole.
pub(crate) fn relayed_as(is_stream: bool, path: &'static str, request: Request) -> Request {
    let http = HttpRequest { body: "{}".into(), is_stream, ..HttpRequest::post(path) };
    Request { work: Work::Relay(Arc::new(http)), ..request }
}

pub(crate) fn names(request: &Request) -> Vec<SequenceHash> {
    ChainKey::root(&request.domain, &format!("{}@1", request.model), None).hashes(&request.tokens, BLOCK)
}

pub(crate) fn stored(level: Level, blocks: &[SequenceHash]) -> BlockEvent {
    BlockEvent::Stored { level, parent: None, blocks: blocks.to_vec() }
}
