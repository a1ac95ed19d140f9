//! What the planes on NATS cost: bytes of each message, CPU time of the server, of a subscriber and of a router for
//! each message, and the time to read all instances. docs/scale.md computes from these what a large deployment needs.
//!
//! ```text
//! cargo run --release -p router --example plane_cost -- NATS_SERVER [--json]
//! ```
//! Starts the program `NATS_SERVER` on a loopback port and stops it at the end. Publishers and subscribers run in this
//! process, each with a connection of its own. CPU times are those of the server alone (`/proc`), so what else runs on
//! the machine changes them little; rates are not measured, because server and clients share the cores.

use futures::StreamExt;
use futures::future::{BoxFuture, join_all};
use futures::stream::BoxStream;
use kvbm::{BlockEvent, CacheDigest, Epoch, EventLog, Level, SequenceHash};
use prometheus::Registry;
use serde_json::{Value, json};
use std::error::Error as StdError;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};
use worker::engine::{Engine, Error, ModelCard, OutputStream, Readiness, Request, SamplingDefaults};
use worker::plane::local::{LocalDiscovery, LocalEvents};
use worker::plane::nats::{Address, Connection, Metrics, NatsDiscovery, NatsEvents, Settings};
use worker::plane::{
    Discovery, Event, EventBody, Events, Instance, Load, OnboardSpeed, ReservationUpdate, Role, RouterId, Source,
    StoreId, Topic, WorkerId,
};

type Result<T, E = Box<dyn StdError>> = std::result::Result<T, E>;

/// Messages of a measurement: the clock of `/proc` has 10 ms.
const MESSAGES: u64 = 30_000;
/// Messages on the way, so that no subscriber is too slow.
const WINDOW: u64 = 400;
const SUBSCRIBERS: [usize; 3] = [1, 10, 40];
const INSTANCES: u64 = 1000;
const WATCHERS: usize = 10;
const SNAPSHOT_BLOCKS: usize = 200_000;
/// Messages of each worker to the router.
const ROUNDS: u64 = 50;
/// Longer than anything here takes.
const LIMIT: Duration = Duration::from_mins(2);

/// A server, stopped when it is dropped.
struct Server {
    process: Child,
    port: u16,
    monitor: u16,
    _folder: tempfile::TempDir,
}

impl Server {
    async fn start(program: &str) -> Result<Self> {
        let (folder, port, monitor) = (tempfile::tempdir()?, free_port()?, free_port()?);
        let arguments = ["-a", "127.0.0.1", "-p", &port.to_string(), "-m", &monitor.to_string(), "-js", "-sd"];
        let mut command = Command::new(program);
        command.args(arguments).arg(folder.path()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn()?;
        let server = Self { process, port, monitor, _folder: folder };
        while server.counts().is_err() {
            sleep(Duration::from_millis(50)).await;
        }
        Ok(server)
    }

    /// Messages and bytes, in and out.
    fn counts(&self) -> Result<[u64; 4]> {
        let mut socket = TcpStream::connect(("127.0.0.1", self.monitor))?;
        socket.write_all(b"GET /varz HTTP/1.0\r\n\r\n")?;
        let mut text = String::new();
        socket.read_to_string(&mut text)?;
        let body = text.split_once("\r\n\r\n").ok_or("no body")?.1;
        let varz: Value = serde_json::from_str(body)?;
        Ok(["in_msgs", "in_bytes", "out_msgs", "out_bytes"].map(|key| varz[key].as_u64().unwrap_or_default()))
    }

    /// CPU time of the server so far.
    fn cpu(&self) -> Result<Duration> {
        process_cpu(&self.process.id().to_string())
    }

    async fn connection(&self) -> Result<Arc<Connection>> {
        let settings = Settings { servers: vec![format!("nats://127.0.0.1:{}", self.port)], ..Settings::default() };
        Ok(Connection::open(settings, Metrics::new(&Registry::new())?).await?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It is ours, and nothing needs its data.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// CPU time of a process so far, or of `self`.
fn process_cpu(process: &str) -> Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    let fields: Vec<&str> = stat.rsplit_once(')').ok_or("no stat")?.1.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
    Ok(Duration::from_millis(ticks * 10))
}

/// CPU time of this thread so far.
fn thread_cpu() -> Result<Duration> {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(Duration::from_nanos(schedstat.split_whitespace().next().ok_or("no schedstat")?.parse()?))
}

/// The next message of a worker: a load report, or new blocks.
fn next(body: &EventBody, worker: u64, last: &mut u64) -> EventBody {
    match body {
        EventBody::Load(load) => EventBody::Load(Load { number: *last, ..load.clone() }),
        EventBody::Block { event: BlockEvent::Stored { level, blocks, .. }, .. } => {
            *last += 1;
            let blocks = hashes(blocks.len(), worker << 32 | *last);
            EventBody::Block { number: *last, event: BlockEvent::Stored { level: *level, parent: None, blocks } }
        }
        other => other.clone(),
    }
}

/// What a router takes to apply messages, without their decoding: CPU microseconds for each. It follows a thousand
/// workers.
fn router() -> Result<Value> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(async {
        let (discovery, plane) = (Arc::new(LocalDiscovery::default()), Arc::new(LocalEvents::default()));
        let settings = router::Settings::default();
        let registry = Registry::new();
        let _router = router::Router::new(RouterId(1), discovery.clone(), plane.clone(), settings, &registry)?;
        let (card, mut kept) = (card(), Vec::new());
        for id in 0..INSTANCES {
            kept.push(plane.offer(Source::Worker(WorkerId(id)), Arc::new(EventLog::new(Epoch(1)))));
            kept.push(discovery.register(instance(id, &card), Arc::new(Mute)).await?);
        }
        sleep(Duration::from_secs(1)).await;
        let (mut numbers, mut micros) = (vec![0_u64; INSTANCES as usize], Vec::new());
        for (name, _, body) in &bodies()[..3] {
            let mut cpu = Duration::ZERO;
            for _ in 0..ROUNDS {
                for (id, last) in (0..).zip(&mut numbers) {
                    let body = next(body, id, last);
                    plane.publish(Event { source: Source::Worker(WorkerId(id)), epoch: Epoch(1), body });
                }
                let before = thread_cpu()?;
                // The feed takes some hundred events at a time.
                for _ in 0..100 {
                    tokio::task::yield_now().await;
                }
                cpu += thread_cpu()?.saturating_sub(before);
            }
            let each = cpu.as_secs_f64() * 1e6 / (ROUNDS * INSTANCES) as f64;
            micros.push(json!({ "message": name, "router_cpu_us": each }));
        }
        // The gauges are set every five seconds.
        sleep(Duration::from_secs(6)).await;
        let families = registry.gather();
        let metrics = |name| families.iter().filter(move |family| family.name() == name);
        let sum = |name| -> f64 {
            let metrics = metrics(name).flat_map(prometheus::proto::MetricFamily::get_metric);
            metrics.map(|metric| metric.get_counter().get_value() + metric.get_gauge().get_value()).sum()
        };
        let applied = sum("blockyard_router_index_events_total");
        let bytes_per_block = sum("blockyard_router_index_bytes") / sum("blockyard_router_index_entries");
        Ok(json!({
            "costs": micros,
            "events_applied": applied,
            "events_sent": 2 * ROUNDS * INSTANCES,
            "index_bytes_per_block": bytes_per_block,
        }))
    })
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn hashes(count: usize, seed: u64) -> Vec<SequenceHash> {
    let mut rng = kvbm::splitmix::SplitMix64::new(seed);
    let mut hash = || {
        let halves = [rng.next_u64().to_le_bytes(), rng.next_u64().to_le_bytes()];
        SequenceHash::from_bytes(std::array::from_fn(|at| halves[at / 8][at % 8]))
    };
    (0..count).map(|_| hash()).collect()
}

/// One message of each kind, as a busy worker or router sends it.
fn bodies() -> Vec<(&'static str, Topic, EventBody)> {
    let speed = |level| OnboardSpeed { level, latency_seconds: 1e-3, bytes_per_second: 3e9, queued_blocks: 20 };
    let load = Load {
        number: 100_000,
        waiting_tokens: 12_000,
        running: 48,
        waiting: 3,
        paused: 0,
        sequences_max: 64,
        active_blocks: 9_000,
        total_blocks: 10_000,
        prefill_tokens_per_second: Some(12_345.6),
        decode_step_seconds: Some(0.0234),
        block_bytes: 2 << 20,
        onboard: vec![speed(Level::G2), speed(Level::G3), speed(Level::G4)],
    };
    let stored = |blocks| {
        let (parent, blocks) = (Some(hashes(1, 9)[0]), hashes(blocks, 1));
        EventBody::Block { number: 100_000, event: BlockEvent::Stored { level: Level::G1, parent, blocks } }
    };
    let removed = BlockEvent::Removed { level: Level::G1, blocks: hashes(1, 2) };
    let number = 100_000;
    let placed = ReservationUpdate::Placed {
        number,
        worker: WorkerId(7_000),
        prefill_tokens: 1_500,
        blocks: 130,
        decodes: true,
        context_tokens: 2_100,
        anchors: hashes(16, 3).iter().map(SequenceHash::short).collect(),
    };
    let small =
        [ReservationUpdate::Sent(number), ReservationUpdate::Started(number), ReservationUpdate::Released(number)];
    let digest = EventBody::Digest { number, digest: CacheDigest::default().with(Level::G1, u64::MAX / 3) };
    vec![
        ("load report", Topic::Cache, EventBody::Load(load)),
        ("stored, 1 block", Topic::Cache, stored(1)),
        ("stored, 32 blocks", Topic::Cache, stored(32)),
        ("removed, 1 block", Topic::Cache, EventBody::Block { number, event: removed }),
        ("digest", Topic::Cache, digest),
        ("placed, prompt of 2,048 tokens", Topic::Reservations, EventBody::Reservations(vec![placed])),
        ("sent, started or released", Topic::Reservations, EventBody::Reservations(vec![small[0].clone()])),
        ("heartbeat of a router", Topic::Reservations, EventBody::Reservations(Vec::new())),
    ]
}

fn source(topic: Topic) -> Source {
    match topic {
        Topic::Cache => Source::Worker(WorkerId(1_234)),
        Topic::Reservations | Topic::RoleRequests => Source::Router(RouterId(0x1234_5678_9abc_def0)),
    }
}

/// Publishes a message many times. Returns bytes of one, and the server's CPU microseconds for each.
async fn publish(
    server: &Server,
    plane: &NatsEvents,
    streams: &mut [BoxStream<'static, Event>],
    topic: Topic,
    body: &EventBody,
    messages: u64,
) -> Result<(f64, f64)> {
    let (before, cpu) = (server.counts()?, server.cpu()?);
    let mut left = messages;
    while left > 0 {
        let now = left.min(WINDOW);
        for _ in 0..now {
            plane.publish(Event { source: source(topic), epoch: Epoch(1), body: body.clone() });
        }
        let reads = streams.iter_mut().map(|stream| stream.by_ref().take(now as usize).count());
        timeout(LIMIT, join_all(reads)).await?;
        left -= now;
    }
    let (after, cpu) = (server.counts()?, server.cpu()?.saturating_sub(cpu));
    let bytes = (after[1] - before[1]) as f64 / (after[0] - before[0]).max(1) as f64;
    Ok((bytes, cpu.as_secs_f64() * 1e6 / messages as f64))
}

async fn events(server: &Server) -> Result<Value> {
    let plane = NatsEvents::new(server.connection().await?);
    let mut sizes = Vec::new();
    for (name, topic, body) in bodies() {
        let mut one = [plane.subscribe(topic)];
        // The subscription reaches the server before the first event.
        sleep(Duration::from_millis(200)).await;
        let (bytes, _) = publish(server, &plane, &mut one, topic, &body, 2_000).await?;
        sizes.push(json!({ "message": name, "payload_bytes": bytes }));
    }
    let mut costs = Vec::new();
    let (_, topic, load) = bodies().swap_remove(0);
    for count in SUBSCRIBERS {
        let mut planes = Vec::new();
        for _ in 0..count {
            planes.push(NatsEvents::new(server.connection().await?));
        }
        let mut streams: Vec<_> = planes.iter().map(|plane| plane.subscribe(topic)).collect();
        sleep(Duration::from_millis(500)).await;
        let cpu = process_cpu("self")?;
        let (_, micros) = publish(server, &plane, &mut streams, topic, &load, MESSAGES).await?;
        let clients = process_cpu("self")?.saturating_sub(cpu).as_secs_f64() * 1e6 / MESSAGES as f64;
        costs.push(json!({
            "subscribers": count,
            "server_cpu_us_per_message": micros,
            "publisher_and_subscribers_cpu_us_per_message": clients,
        }));
    }
    Ok(json!({ "sizes": sizes, "costs": costs }))
}

struct Mute;

impl Engine for Mute {
    fn generate(&self, _: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        Box::pin(async { Err(Error::Unavailable("it is mute".into())) })
    }
    fn models(&self) -> Vec<Arc<ModelCard>> {
        Vec::new()
    }
    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

fn instance(id: u64, card: &Arc<ModelCard>) -> Instance {
    let (id, epoch, stores) = (WorkerId(id), Epoch(1), vec![StoreId(7)]);
    Instance { id, epoch, role: Role::Both, model: card.clone(), stores, kv_cache: None }
}

fn card() -> Arc<ModelCard> {
    Arc::new(ModelCard {
        identity: "f1e2d3c4b5a697887766554433221100f1e2d3c4b5a697887766554433221100".into(),
        created: 1_790_000_000,
        vocabulary: 128_256,
        eos: vec![128_001, 128_008, 128_009],
        sampling: SamplingDefaults { temperature: Some(0.6), top_p: Some(0.9), ..SamplingDefaults::default() },
        ..ModelCard::new("meta-llama/Llama-3.1-8B-Instruct", 131_072, 16)
    })
}

async fn discovery(server: &Server) -> Result<Value> {
    let connector: worker::plane::nats::Connector = Arc::new(|_, _| Arc::new(Mute) as Arc<dyn Engine>);
    let address = Address("http://10.0.0.1:8100".into());
    let plane = |connection| NatsDiscovery::new(connection, address.clone(), connector.clone(), None);
    let workers = plane(server.connection().await?);
    let (card, cpu, before) = (card(), server.cpu()?, server.counts()?);
    let mut leases = Vec::new();
    for id in 0..INSTANCES {
        leases.push(workers.register(instance(id, &card), Arc::new(Mute)).await?);
    }
    let registration_us = server.cpu()?.saturating_sub(cpu).as_secs_f64() * 1e6 / INSTANCES as f64;
    let registered = server.counts()?;
    let record_bytes = (registered[1] - before[1]) as f64 / (registered[0] - before[0]).max(1) as f64;
    // Renewals alone, and then with routers that follow them.
    let mut renewals = Vec::new();
    let mut planes = Vec::new();
    let mut cold_seconds = Vec::new();
    for watchers in [0, WATCHERS] {
        for _ in 0..watchers {
            let router = plane(server.connection().await?);
            let start = Instant::now();
            let mut watch = router.watch();
            timeout(LIMIT, watch.by_ref().take(INSTANCES as usize).count()).await?;
            cold_seconds.push(start.elapsed().as_secs_f64());
            planes.push((router, watch));
        }
        let (cpu, before, since) = (server.cpu()?, server.counts()?, Instant::now());
        sleep(Duration::from_secs(8)).await;
        let (cpu, after, seconds) =
            (server.cpu()?.saturating_sub(cpu), server.counts()?, since.elapsed().as_secs_f64());
        // Every instance renews its lease of six seconds three times in it.
        let count = INSTANCES as f64 * seconds / 2.0;
        renewals.push(json!({
            "watchers": watchers,
            "server_cpu_us_per_renewal": cpu.as_secs_f64() * 1e6 / count,
            "in_messages_per_renewal": (after[0] - before[0]) as f64 / count,
            "in_bytes_per_renewal": (after[1] - before[1]) as f64 / count,
            "out_messages_per_renewal": (after[2] - before[2]) as f64 / count,
            "out_bytes_per_renewal": (after[3] - before[3]) as f64 / count,
        }));
    }
    let cold = cold_seconds.iter().sum::<f64>() / cold_seconds.len().max(1) as f64;
    Ok(json!({
        "instances": INSTANCES,
        "registration_server_cpu_us": registration_us,
        "registration_bytes_per_message": record_bytes,
        "seconds_until_all_instances_are_seen": cold,
        "renewals": renewals,
    }))
}

async fn snapshot(server: &Server) -> Result<Value> {
    let (worker, router) = (NatsEvents::new(server.connection().await?), NatsEvents::new(server.connection().await?));
    let log = Arc::new(EventLog::new(Epoch(1)));
    for (number, chain) in hashes(SNAPSHOT_BLOCKS, 5).chunks(128).enumerate() {
        let parent = None;
        let level = if number % 4 == 0 { Level::G2 } else { Level::G1 };
        log.announce(BlockEvent::Stored { level, parent, blocks: chain.to_vec() });
    }
    let source = Source::Worker(WorkerId(1));
    let _offer = worker.offer(source, log);
    sleep(Duration::from_millis(500)).await;
    let (before, cpu, start) = (server.counts()?, server.cpu()?, Instant::now());
    let snapshot = timeout(LIMIT, router.snapshot(source)).await??;
    let (seconds, after, cpu) = (start.elapsed().as_secs_f64(), server.counts()?, server.cpu()?.saturating_sub(cpu));
    let blocks = snapshot.blocks().count() as f64;
    Ok(json!({
        "blocks": blocks,
        "seconds": seconds,
        "bytes_per_block": (after[3] - before[3]) as f64 / blocks,
        "messages": after[2] - before[2],
        "server_cpu_us_per_block": cpu.as_secs_f64() * 1e6 / blocks,
    }))
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let program = arguments.next().ok_or("usage: plane_cost NATS_SERVER [--json]")?;
    let is_json = arguments.any(|argument| argument == "--json");
    let server = Server::start(&program).await?;
    let applied = std::thread::spawn(|| router().map_err(|error| error.to_string()));
    let applied = applied.join().map_err(|_| "the router's thread panicked")??;
    let all = json!({
        "router": applied,
        "events": events(&server).await?,
        "discovery": discovery(&server).await?,
        "snapshot": snapshot(&server).await?,
    });
    println!("{}", if is_json { all.to_string() } else { serde_json::to_string_pretty(&all)? });
    Ok(())
}
