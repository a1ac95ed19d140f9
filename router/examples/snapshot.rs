//! Measures how long a large snapshot takes, and what it delays:
//!
//! ```text
//! cargo run --release -p router --example snapshot [-- --blocks N]
//! ```
//! A worker with N blocks (default: two million), a quarter of them also in G2, joins a router that follows another
//! worker's events on a runtime with one thread. The program measures each part of the snapshot by itself. Then, while
//! the snapshot is requested, made and applied, it measures the longest time in which the runtime ran no other task,
//! and the longest time in which no event of the other worker was applied.

use futures::FutureExt;
use futures::future::BoxFuture;
use kvbm::{BlockEvent, Epoch, EventLog, Level, SequenceHash};
use prometheus::Registry;
use router::index::{Holder, Index};
use router::{Router, Settings};
use std::sync::Arc;
use std::time::{Duration, Instant};
use worker::engine::{Engine, Error, ModelCard, OutputStream, Readiness, Request};
use worker::plane::local::{LocalDiscovery, LocalEvents};
use worker::plane::{Discovery, Event, EventBody, Events, Instance, Role, RouterId, Source, WorkerId};

/// Blocks of one chain: a prompt of some thousand tokens.
const CHAIN: usize = 256;
const HEARTBEAT: Duration = Duration::from_millis(1);

/// An engine that serves no request.
struct Mute(Arc<ModelCard>);

impl Engine for Mute {
    fn generate(&self, _: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        async { Err(Error::Unavailable("it is mute".into())) }.boxed()
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        vec![self.0.clone()]
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

fn main() {
    let blocks = std::env::args().skip_while(|argument| argument != "--blocks").nth(1);
    let blocks = blocks.map_or(2_000_000, |blocks| blocks.parse().expect("--blocks takes a number"));
    let log = Arc::new(filled(blocks));
    alone(&log);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("a runtime starts").block_on(together(log));
}

fn filled(blocks: usize) -> EventLog {
    let log = EventLog::new(Epoch(1));
    let mut seed = 7_u64;
    let mut name = || {
        let mut half = || {
            seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            ((seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (seed >> 27)).to_le_bytes()
        };
        SequenceHash::from_bytes([half(), half()].concat().try_into().expect("two halves of eight bytes"))
    };
    for chain in 0..blocks / CHAIN {
        let blocks: Vec<SequenceHash> = (0..CHAIN).map(|_| name()).collect();
        if chain % 4 == 0 {
            log.announce(BlockEvent::Stored { level: Level::G2, parent: None, blocks: blocks.clone() });
        }
        log.announce(BlockEvent::Stored { level: Level::G1, parent: None, blocks });
    }
    log
}

fn alone(log: &EventLog) {
    let holder = Holder::Worker(WorkerId(1));
    let index = Index::new();
    index.join(WorkerId(1), &[]);
    let (snapshot, making) = timed(|| log.snapshot());
    let ((), setting) = timed(|| index.replace(holder, &snapshot.runs));
    let ((), again) = timed(|| index.replace(holder, &snapshot.runs));
    let ((), forgetting) = timed(|| index.clear(holder));
    println!("snapshot of {} blocks in {} runs", snapshot.blocks().count(), snapshot.runs.len());
    println!("  laid out in {making:?}, set in {setting:?}, once more in {again:?}, cleared in {forgetting:?}");
}

async fn together(log: Arc<EventLog>) {
    let (discovery, bus, registry) =
        (Arc::new(LocalDiscovery::default()), Arc::new(LocalEvents::default()), Registry::new());
    let router: Result<Arc<Router>, _> =
        Router::new(RouterId(1), discovery.clone(), bus.clone(), Settings::default(), &registry);
    let _router = router.expect("a router starts");
    let other = Arc::new(EventLog::new(Epoch(1)));
    let mut leases = vec![join(&discovery, &bus, 2, &other).await];
    let stalled = tokio::spawn(async {
        let (mut longest, began) = (Duration::ZERO, Instant::now());
        while began.elapsed() < Duration::from_secs(8) {
            let slept = Instant::now();
            tokio::time::sleep(HEARTBEAT).await;
            longest = longest.max(slept.elapsed().saturating_sub(2 * HEARTBEAT));
        }
        longest
    });
    // A thread of its own, independent of the runtime.
    let watched = std::thread::spawn({
        let (bus, registry) = (bus.clone(), registry.clone());
        move || watch(&bus, &registry, &other)
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = Instant::now();
    let large = log.digest().0;
    leases.push(join(&discovery, &bus, 1, &log).await);
    let announced = (blocks(&log) * 5 / 4) as f64;
    let taken = loop {
        if gauge(&registry, "blockyard_router_index_entries") >= announced {
            break before.elapsed();
        }
        assert!(before.elapsed() < Duration::from_secs(6), "it was never taken");
        tokio::time::sleep(HEARTBEAT).await;
    };
    println!("a worker with {large} events and that many blocks joins: known after {taken:?}");
    let (waited, lost) = watched.join().expect("the watch ends");
    println!("  the runtime did nothing else for {:?}", stalled.await.expect("the task does not panic"));
    println!("  no event of another was applied for {waited:?}; {lost} gaps");
}

/// Announces a block of another worker every millisecond. Returns the longest time in which none was applied, and the
/// number of detected gaps.
fn watch(bus: &LocalEvents, registry: &Registry, log: &EventLog) -> (Duration, f64) {
    let (mut longest, mut applied, mut since) = (Duration::ZERO, 0.0, Instant::now());
    for number in 1..=6000_u64 {
        let mut name = [0; 16];
        name[..8].copy_from_slice(&number.to_le_bytes());
        let event = BlockEvent::Stored { level: Level::G1, parent: None, blocks: vec![SequenceHash::from_bytes(name)] };
        log.announce(event.clone());
        let body = EventBody::Block { number, event };
        bus.publish(Event { source: Source::Worker(WorkerId(2)), epoch: Epoch(1), body });
        std::thread::sleep(HEARTBEAT);
        let now = events(registry, "applied");
        if now > applied {
            longest = longest.max(since.elapsed());
            (applied, since) = (now, Instant::now());
        }
    }
    (longest, events(registry, "gap"))
}

async fn join(
    discovery: &LocalDiscovery,
    bus: &LocalEvents,
    id: u64,
    log: &Arc<EventLog>,
) -> [worker::plane::Lease; 2] {
    let model = Arc::new(ModelCard { vocabulary: 10, ..ModelCard::new("m", 1 << 20, 16) });
    let offer = bus.offer(Source::Worker(WorkerId(id)), log.clone());
    let (id, epoch, stores) = (WorkerId(id), Epoch(1), vec![]);
    let instance = Instance { id, epoch, role: Role::Both, model: model.clone(), stores, kv_cache: None };
    let lease = discovery.register(instance, Arc::new(Mute(model))).await.expect("a discovery in memory registers");
    [offer, lease]
}

fn blocks(log: &EventLog) -> usize {
    // Four chains are five events.
    log.digest().0 as usize / 5 * 4 * CHAIN
}

fn gauge(registry: &Registry, name: &str) -> f64 {
    let families = registry.gather();
    families.iter().find(|family| family.name() == name).map_or(0.0, |f| f.get_metric()[0].get_gauge().get_value())
}

fn events(registry: &Registry, outcome: &str) -> f64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == "blockyard_router_index_events_total");
    let mut of = family.iter().flat_map(|family| family.get_metric());
    of.find(|m| m.get_label()[0].value() == outcome).map_or(0.0, |m| m.get_counter().get_value())
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let began = Instant::now();
    let done = work();
    (done, began.elapsed())
}
