//! Conversations over engines with a cache: how many prompt tokens cache-aware routing saves.

use super::harness::{BLOCK, Harness, card, names, prompt, settle};
use crate::hash::splitmix64;
use crate::policy::Policy;
use crate::state::Settings;
use futures::future::{BoxFuture, join_all};
use futures::{StreamExt, stream};
use kvbm::{BlockEvent, Epoch, EventLog, Level, SequenceHash};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use worker::engine::{Engine, Error, FinishReason, Handoff, ModelCard, Output, OutputStream, PromptReport, Readiness};
use worker::engine::{Request, Tokens, Work};
use worker::plane::local::LocalEvents;
use worker::plane::{Discovery, Event, EventBody, Events, Instance, Lease, Load, Role, Source, WorkerId};

/// Prompt tokens per second: a small model on two cores.
const SPEED: f64 = 6000.0;

/// Seconds per decode step with this many sequences.
fn step(sequences: u32) -> f64 {
    0.003 + 0.001 * f64::from(sequences)
}

/// An engine with an unlimited cache. It computes prompts one after another, and decodes in steps.
struct CachingEngine {
    id: WorkerId,
    events: Arc<LocalEvents>,
    log: Arc<EventLog>,
    cache: Mutex<HashSet<SequenceHash>>,
    turn: tokio::sync::Mutex<()>,
    waiting: AtomicU64,
    running: AtomicU32,
    computed: AtomicU64,
}

impl CachingEngine {
    async fn join(harness: &Harness, id: u64, role: Role) -> (Arc<Self>, [Lease; 2]) {
        let engine = Arc::new(Self {
            id: WorkerId(id),
            events: harness.events.clone(),
            log: Arc::new(EventLog::new(Epoch(1))),
            cache: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            waiting: AtomicU64::new(0),
            running: AtomicU32::new(0),
            computed: AtomicU64::new(0),
        });
        let instance = Instance {
            id: WorkerId(id),
            epoch: Epoch(1),
            role,
            model: Arc::new(card(super::harness::MODEL)),
            stores: vec![],
            kv_cache: None,
        };
        let offer = harness.events.offer(Source::Worker(engine.id), engine.log.clone());
        let lease = harness.discovery.register(instance, Arc::new(Handle(engine.clone()))).await.unwrap();
        settle().await;
        engine.report();
        settle().await;
        (engine, [offer, lease])
    }

    fn publish(&self, body: EventBody) {
        self.events.publish(Event { source: Source::Worker(self.id), epoch: Epoch(1), body });
    }

    fn report(&self) {
        let running = self.running.load(Ordering::SeqCst);
        self.publish(EventBody::Load(Load {
            number: *self.log.latest().borrow(),
            waiting_tokens: self.waiting.load(Ordering::SeqCst),
            running,
            prefill_tokens_per_second: Some(SPEED),
            decode_step_seconds: Some(step(running.max(1))),
            block_bytes: 1000,
            ..Load::default()
        }));
    }

    fn keep(&self, blocks: &[SequenceHash]) {
        let new: Vec<_> = blocks.iter().copied().filter(|block| self.cache.lock().insert(*block)).collect();
        if !new.is_empty() {
            let event = BlockEvent::Stored { level: Level::G1, parent: None, blocks: new };
            self.log.announce(event.clone());
            self.publish(EventBody::Block { number: *self.log.latest().borrow(), event });
        }
    }

    /// Waits for its turn and computes the uncached part of a prompt. Returns the number of cached tokens.
    async fn prefill(&self, request: &Request) -> u32 {
        let blocks = names(request);
        let tokens = request.tokens.len() as u64;
        let cached = || {
            let cache = self.cache.lock();
            let run = blocks.iter().take_while(|block| cache.contains(*block)).count();
            (run * BLOCK).min(tokens as usize - 1) as u64
        };
        let waits = tokens - cached();
        self.waiting.fetch_add(waits, Ordering::SeqCst);
        self.report();
        let turn = self.turn.lock().await;
        let cached = cached();
        tokio::time::sleep(Duration::from_secs_f64((tokens - cached) as f64 / SPEED)).await;
        self.computed.fetch_add(tokens - cached, Ordering::SeqCst);
        self.keep(&blocks);
        self.waiting.fetch_sub(waits, Ordering::SeqCst);
        self.report();
        drop(turn);
        cached as u32
    }
}

/// The `Engine` of a [`CachingEngine`].
struct Handle(Arc<CachingEngine>);

impl Engine for Handle {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        let engine = self.0.clone();
        let answer = async move {
            let mut report = PromptReport::default();
            if let Work::Resume(_) = request.work {
                engine.keep(&names(&request));
            } else {
                report.cached = vec![(Level::G1, engine.prefill(&request).await)];
            }
            if request.work == Work::Prefill {
                let handoff = Output::Handoff(Handoff(bytes::Bytes::new()));
                return stream::iter([Ok(handoff), Ok(Output::Prefilled)]).chain(stream::pending()).boxed();
            }
            engine.running.fetch_add(1, Ordering::SeqCst);
            engine.report();
            let max = request.stop.max_tokens.unwrap_or(1);
            stream::unfold((engine, 0, Some(report)), move |(engine, made, report)| async move {
                if made > max {
                    return None;
                }
                let running = engine.running.load(Ordering::SeqCst);
                tokio::time::sleep(Duration::from_secs_f64(step(running))).await;
                if made == max {
                    engine.running.fetch_sub(1, Ordering::SeqCst);
                    engine.report();
                }
                let finish = (made == max).then_some(FinishReason::Length);
                let tokens = Tokens { ids: vec![made], prompt: report, finish, ..Tokens::default() };
                Some((Ok(Output::Tokens(tokens)), (engine, made + 1, None)))
            })
            .boxed()
        };
        Box::pin(async { Ok(stream::once(answer).flatten().boxed()) })
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        vec![]
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

const SYSTEM: u32 = 1024;
const TURN: u32 = 160;
const TURNS: u32 = 10;
const CONVERSATIONS: u32 = 8;

/// Runs conversations of ten turns that share a system prompt and start one after another. Returns the number of
/// computed prompt tokens, as a multiple of the minimum.
async fn conversations(policy: Policy, roles: &[Role], seed: u64) -> f64 {
    let harness = Harness::new(Settings { policy: policy.clone(), seed, ..Settings::default() });
    let (mut engines, mut leases) = (Vec::new(), Vec::new());
    for (id, role) in (1..).zip(roles) {
        let (engine, lease) = CachingEngine::join(&harness, id, *role).await;
        engines.push(engine);
        leases.push(lease);
    }
    let heartbeat = async {
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            for engine in &engines {
                engine.report();
            }
        }
    };
    let started: Vec<_> = (0..=CONVERSATIONS).map(|_| tokio::sync::Notify::new()).collect();
    started[0].notify_one();
    let talk = |conversation: u32| {
        let (harness, started) = (&harness, &started);
        async move {
            started[conversation as usize].notified().await;
            let mut tokens: Vec<u32> = (0..SYSTEM).collect();
            for turn in 0..TURNS {
                let think = splitmix64(seed ^ u64::from(conversation * TURNS + turn)) % 200;
                tokio::time::sleep(Duration::from_millis(think)).await;
                tokens.extend((0..TURN).map(|at| 1_000_000 * (conversation + 1) + turn * 1000 + at));
                let mut request = prompt(0, 0);
                request.tokens = tokens.clone().into();
                request.stop.max_tokens = Some(8);
                harness.answer(request).await.unwrap();
                started[conversation as usize + 1].notify_one();
            }
        }
    };
    let all = join_all((0..CONVERSATIONS).map(talk));
    tokio::select! {
        _ = all => {}
        () = heartbeat => {}
    }
    let each: Vec<u64> = engines.iter().map(|engine| engine.computed.load(Ordering::SeqCst)).collect();
    let times = each.iter().sum::<u64>() as f64 / f64::from(SYSTEM + CONVERSATIONS * TURNS * TURN);
    println!("{policy:?}, seed {seed}: {times:.3} times the least possible, {each:?} tokens");
    times
}

async fn worst(policy: Policy, roles: &[Role]) -> f64 {
    let mut worst = 0.0_f64;
    for seed in 0..8 {
        worst = worst.max(conversations(policy.clone(), roles, seed).await);
    }
    worst
}

#[tokio::test(start_paused = true)]
async fn conversations_return_to_their_blocks() {
    let two = [Role::Decode, Role::Decode];
    let (kv, turns) = (worst(Policy::Kv, &two).await, worst(Policy::RoundRobin, &two).await);
    // The system prompt on the second worker is 7 % by itself, and a conversation leaves a worker that decodes all
    // others.
    assert!(kv <= 1.2, "{kv:.2} times the least possible");
    assert!(turns > 1.5, "round robin: {turns:.2}");
}

#[tokio::test(start_paused = true)]
async fn disaggregated_conversations_compute_little_more() {
    let kv = worst(Policy::Kv, &[Role::Prefill, Role::Decode, Role::Decode]).await;
    assert!(kv <= 1.2, "{kv:.2} times the least possible");
}
