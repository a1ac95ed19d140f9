//! Logs that are read over HTTP, and those that cannot be.

use super::*;
use crate::plane::{Event, Events, Lease, PlaneError, RangeAnswer, Source, StoreId, Topic, WorkerId};
use crate::remote::tests::logs::LogProcess;
use crate::remote::{RemoteLogs, Secret};
use futures::FutureExt;
use futures::future::BoxFuture;
use kvbm::{BlockEvent, Epoch, EventLog, Level, SequenceHash, Snapshot};

const STORE: Source = Source::Store(StoreId(1));

mod contract_over_http {
    crate::plane::contract::events_contract!(super::contract_events());
}

/// A worker process, and a frontend that reads its logs: one plane for the contract.
struct Pair {
    worker: Arc<dyn Events>,
    frontend: NatsEvents,
    connection: Arc<Connection>,
    registry: Registry,
    process: LogProcess,
}

impl Pair {
    /// A pair of a deployment with a secret, or without one.
    async fn start(server: &str, secret: Option<&str>) -> Self {
        let settings = settings(server);
        let secret = secret.map(|secret| Secret::new(secret).unwrap());
        let process = LogProcess::start(secret.as_ref()).await;
        let logs = |address| {
            let keys = secret.as_ref().map(Secret::record_keys);
            HttpLogs::new(address, keys, Arc::new(RemoteLogs::new(secret.clone())))
        };
        let worker = NatsEvents::with_http(connect(settings.clone()).await, logs(Some(process.address.clone())));
        let (connection, registry) = open(settings).await.unwrap();
        let frontend = NatsEvents::with_http(Arc::clone(&connection), logs(None));
        let worker = process.server.events(Arc::new(worker));
        Self { worker, frontend, connection, registry, process }
    }

    /// Reads over HTTP and over NATS.
    fn reads(&self) -> (u64, u64) {
        let read = |transport| counter(&self.registry, "blockyard_nats_log_reads_total", transport);
        (read("http"), read("nats"))
    }

    /// Waits until the frontend is answered.
    async fn offered(&self) {
        until("the log is offered", async || self.frontend.snapshot(STORE).await.is_ok()).await;
    }
}

impl Events for Pair {
    fn publish(&self, event: Event) {
        self.worker.publish(event);
    }

    fn subscribe(&self, topic: Topic) -> BoxStream<'static, Event> {
        self.worker.subscribe(topic)
    }

    fn offer(&self, source: Source, log: Arc<EventLog>) -> Lease {
        self.worker.offer(source, log)
    }

    fn range(&self, source: Source, epoch: Epoch, after: u64) -> BoxFuture<'_, RangeAnswer> {
        Box::pin(async move {
            // The worker has handed to NATS what it offers.
            let _ = self.worker.range(NONE, Epoch(0), 0).await;
            self.frontend.range(source, epoch, after).await
        })
    }

    fn snapshot(&self, source: Source) -> BoxFuture<'_, Result<Snapshot, PlaneError>> {
        Box::pin(async move {
            let _ = self.worker.range(NONE, Epoch(0), 0).await;
            self.frontend.snapshot(source).await
        })
    }
}

/// A source that nothing offers.
const NONE: Source = Source::Worker(WorkerId(u64::MAX));

async fn contract_events() -> Option<Pair> {
    Some(Pair::start(&shared()?, Some("0123456789abcdef")).await)
}

/// A log of 200 events with a thousand blocks each: more than a message.
fn log() -> Arc<EventLog> {
    let log = EventLog::new(Epoch(1));
    for event in 0..200_u128 {
        let hash = |block: u128| SequenceHash::from_bytes((event * 1000 + block).to_le_bytes());
        log.announce(BlockEvent::Stored { level: Level::G4, parent: None, blocks: (0..1000).map(hash).collect() });
    }
    Arc::new(log)
}

#[tokio::test]
async fn snapshots_and_ranges_come_over_http() {
    let Some(server) = shared() else { return };
    for secret in [None, Some("0123456789abcdef")] {
        let pair = Pair::start(&server, secret).await;
        let log = log();
        let _offer = pair.worker.offer(STORE, Arc::clone(&log));
        pair.offered().await;
        let received = || pair.connection.client.statistics().in_bytes.load(Ordering::Relaxed);
        let (before, bytes) = (pair.reads().0, received());
        assert_eq!(pair.frontend.snapshot(STORE).await, Ok(log.snapshot()));
        assert_eq!(pair.frontend.range(STORE, Epoch(1), 0).await, Ok(log.after(0, 200).ok()), "in one answer");
        let bytes = received() - bytes;
        assert!(bytes < 16 << 10, "{bytes} bytes of 6.4 MB came over NATS");
        assert_eq!(pair.reads(), (before + 2, 0));
    }
}

#[tokio::test]
async fn a_log_of_a_process_that_cannot_be_reached_is_read_over_nats() {
    let Some(server) = shared() else { return };
    let pair = Pair::start(&server, None).await;
    // An older process names no URL. A firewall is before another one, and a third one does not serve its log.
    let [older, blocked, without] = [STORE, Source::Store(StoreId(2)), Source::Store(StoreId(3))];
    let settings = pair.connection.settings.clone();
    let offering = async |address: Option<Address>| {
        let logs = HttpLogs::new(address, None, Arc::new(RemoteLogs::new(None)));
        NatsEvents::with_http(connect(settings.clone()).await, logs)
    };
    let processes =
        [offering(None).await, offering(Some(address())).await, offering(Some(pair.process.address.clone())).await];
    for (process, source) in processes.iter().zip([older, blocked, without]) {
        let log = log();
        let _offer = process.offer(source, Arc::clone(&log));
        until("the log is offered", async || pair.frontend.snapshot(source).await.is_ok()).await;
        let before = pair.reads().1;
        assert_eq!(pair.frontend.snapshot(source).await, Ok(log.snapshot()), "{source}");
        assert_eq!(pair.frontend.range(source, Epoch(1), 199).await, Ok(log.after(199, 1).ok()), "{source}");
        assert_eq!(pair.reads(), (0, before + 2), "{source}");
    }
}

#[tokio::test]
async fn no_process_is_asked_at_a_url_that_was_not_signed() {
    let Some(server) = shared() else { return };
    let pair = Pair::start(&server, Some("0123456789abcdef")).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = Address(format!("http://{}", listener.local_addr().unwrap()));
    let asked = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&asked);
    let _accepting = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(async move {
        while listener.accept().await.is_ok() {
            counted.fetch_add(1, Ordering::Relaxed);
        }
    }));
    let logs = HttpLogs::new(Some(address), None, Arc::new(RemoteLogs::new(None)));
    let other = NatsEvents::with_http(connect(pair.connection.settings.clone()).await, logs);
    let log = log();
    let _offer = other.offer(STORE, Arc::clone(&log));
    pair.offered().await;
    assert_eq!(pair.frontend.snapshot(STORE).await, Ok(log.snapshot()));
    assert_eq!((asked.load(Ordering::Relaxed), pair.reads().0), (0, 0));
}

#[tokio::test]
async fn a_log_of_a_process_that_accepts_and_sends_nothing_is_read_over_nats() {
    let Some(server) = shared() else { return };
    let (connection, registry) = open(settings(&server)).await.unwrap();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = Address(format!("http://{}", silent.local_addr().unwrap()));
    let logs = |address, reader: RemoteLogs| HttpLogs::new(address, None, Arc::new(reader));
    let process = logs(Some(address), RemoteLogs::new(None));
    let process = NatsEvents::with_http(connect(connection.settings.clone()).await, process);
    let frontend = logs(None, RemoteLogs::new(None).with_head_time(Duration::from_millis(50)));
    let frontend = NatsEvents::with_http(connection, frontend);
    let log = log();
    let _offer = process.offer(STORE, Arc::clone(&log));
    until("the log is offered", async || frontend.snapshot(STORE).await.is_ok()).await;
    assert_eq!(frontend.snapshot(STORE).await, Ok(log.snapshot()));
    assert_eq!(frontend.range(STORE, Epoch(1), 199).await, Ok(log.after(199, 1).ok()));
    let read = |transport| counter(&registry, "blockyard_nats_log_reads_total", transport);
    assert_eq!((read("http"), read("nats")), (0, 3));
    let (_asked, _) = silent.accept().await.unwrap();
    assert!(silent.accept().now_or_never().is_none(), "it is asked once, and not for a while then");
}
