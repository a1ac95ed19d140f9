//! The logs of a process, read from another one.

use super::*;
use crate::plane::local::LocalEvents;
use crate::plane::nats::{LogReadError, LogReader};
use crate::plane::{Source, StoreId};
use kvbm::{BlockEvent, Epoch, EventLog, Level, SequenceHash};
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;

const STORE: Source = Source::Store(StoreId(1));

/// A process that serves logs to others.
pub(crate) struct LogProcess {
    pub(crate) address: Address,
    pub(crate) server: Arc<RequestServer>,
    _accepting: AbortOnDropHandle<()>,
}

impl LogProcess {
    pub(crate) async fn start(secret: Option<&Secret>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address(format!("http://{}", listener.local_addr().unwrap()));
        let required = secret.map(|secret| secret.required_at(&address.0));
        let server = RequestServer::new(required, Peers::default());
        let accepting = tokio::spawn(accept(listener, Arc::clone(&server)));
        Self { address, server, _accepting: AbortOnDropHandle::new(accepting) }
    }
}

/// A log of events with this many blocks each.
fn log(events: u64, blocks: u64) -> Arc<EventLog> {
    let log = EventLog::new(Epoch(1));
    for event in 0..events {
        let hash = |block| SequenceHash::from_bytes(u128::from(event * blocks + block).to_le_bytes());
        log.announce(BlockEvent::Stored { level: Level::G4, parent: None, blocks: (0..blocks).map(hash).collect() });
    }
    Arc::new(log)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_and_a_range_arrive_unchanged() {
    let process = LogProcess::start(None).await;
    let (log, at, reader) = (log(5000, 40), || process.address.clone(), RemoteLogs::new(None));
    let lease = process.server.events(Arc::new(LocalEvents::default())).offer(STORE, Arc::clone(&log));
    assert_eq!(reader.snapshot(at(), STORE, Epoch(1)).await, Ok(log.snapshot()));
    assert_eq!(reader.range(at(), STORE, Epoch(1), 4900).await, Ok(log.after(4900, 100).ok()));
    assert_eq!(reader.range(at(), STORE, Epoch(1), 5000).await, Ok(Some(vec![])), "there are no later events");
    assert_eq!(reader.range(at(), STORE, Epoch(1), 0).await, Ok(None), "not all events are kept");
    assert_eq!(reader.snapshot(at(), STORE, Epoch(2)).await, Err(LogReadError::NotServed));
    drop(lease);
    assert_eq!(reader.snapshot(at(), STORE, Epoch(1)).await, Err(LogReadError::NotServed));
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_without_the_secret_are_rejected() {
    let (ours, other) = (secret("0123456789abcdef"), secret("another-secret-of-16"));
    let process = LogProcess::start(Some(&ours)).await;
    let log = log(1, 1);
    let _lease = process.server.events(Arc::new(LocalEvents::default())).offer(STORE, Arc::clone(&log));
    for theirs in [Some(other), None] {
        let read = RemoteLogs::new(theirs).snapshot(process.address.clone(), STORE, Epoch(1)).await;
        let expected = format!("status 401: {NO_SECRET}");
        assert_eq!(read, Err(LogReadError::Unreachable(expected)));
    }
    let read = RemoteLogs::new(Some(ours)).snapshot(process.address.clone(), STORE, Epoch(1)).await;
    assert_eq!(read, Ok(log.snapshot()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_is_dropped_makes_room_for_others() {
    let process = LogProcess::start(None).await;
    let log = EventLog::new(Epoch(1));
    // Few blocks at many levels, so that the snapshot is made at once.
    for level in [Level::G1, Level::G2, Level::G3, Level::G4] {
        let blocks = (0..4000_u128).map(|n| SequenceHash::from_bytes(n.to_le_bytes())).collect();
        log.announce(BlockEvent::Stored { level, parent: None, blocks });
    }
    let _lease = process.server.events(Arc::new(LocalEvents::default())).offer(STORE, Arc::new(log));
    let socket = TcpStream::connect(&process.address.0["http://".len()..]).await.unwrap();
    let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    // A quarter of the response, which is not read.
    builder.initial_stream_window_size(65_535);
    let (mut sender, connection) = builder.handshake(TokioIo::new(socket)).await.unwrap();
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    // More than are sent at a time.
    for _ in 0..12 {
        let mut request = http::Request::new(Full::<Bytes>::default());
        *request.uri_mut() = format!("{}/logs/store/1/1/snapshot", process.address.0).parse().unwrap();
        *request.headers_mut() = with_protocol(&PROTOCOL.to_string());
        assert_eq!(sender.send_request(request).await.unwrap().status(), 200);
    }
}
