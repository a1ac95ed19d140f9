//! `run` against a fake publisher that speaks ZMTP by the code of these tests. `tests/python/test_kv_events.py` has the
//! tests against libzmq.

use super::codec::{self, Decoder, Received};
use super::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// A call of a sink.
#[derive(PartialEq, Debug)]
enum Call {
    Connected,
    Disconnected,
    NewEpoch,
    Stale,
    Undecodable,
    /// A batch, with its timestamp.
    Batch(u32),
}

struct Recorder(mpsc::UnboundedSender<Call>);

impl Recorder {
    fn tell(&self, call: Call) {
        // The test may have ended.
        let _ = self.0.send(call);
    }
}

impl Sink for Recorder {
    fn connected(&mut self) {
        self.tell(Call::Connected);
    }
    fn disconnected(&mut self) {
        self.tell(Call::Disconnected);
    }
    fn new_epoch(&mut self) {
        self.tell(Call::NewEpoch);
    }
    fn stale(&mut self) {
        self.tell(Call::Stale);
    }
    fn undecodable(&mut self, _: &WireError) {
        self.tell(Call::Undecodable);
    }
    fn batch(&mut self, batch: Batch) {
        self.tell(Call::Batch(batch.timestamp as u32));
    }
}

/// The result of what should take milliseconds, or on a paused clock a few heartbeats.
async fn in_time<T>(future: impl Future<Output = T>) -> T {
    timeout_at(Instant::now() + Duration::from_secs(50), future).await.expect("in time")
}

/// One accepted connection of the fake publisher.
struct Peer {
    stream: TcpStream,
    decoder: Decoder,
}

impl Peer {
    /// Accepts a connection without a handshake.
    async fn raw(listener: &TcpListener) -> Self {
        let (stream, _) = in_time(listener.accept()).await.unwrap();
        Self { stream, decoder: Decoder::default() }
    }

    async fn accept(listener: &TcpListener, socket_type: &str) -> Self {
        let mut peer = Self::raw(listener).await;
        peer.send(&[&codec::greeting()[..], &codec::ready(socket_type)].concat()).await;
        assert_eq!(peer.receive().await, Received::Ready);
        peer
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    async fn receive(&mut self) -> Received {
        loop {
            if let Some(received) = self.decoder.next().unwrap() {
                return received;
            }
            assert_ne!(in_time(self.stream.read_buf(&mut self.decoder.buffer)).await.unwrap(), 0, "closed");
        }
    }

    async fn message(&mut self) -> Vec<Vec<u8>> {
        match self.receive().await {
            Received::Message(frames) => frames.iter().map(|frame| frame.to_vec()).collect(),
            other => panic!("{other:?} instead of a message"),
        }
    }

    /// Publishes batch `number` of process `process`.
    async fn publish(&mut self, process: u8, number: u64) {
        self.send(&codec::message(&[b"kv", &number.to_be_bytes(), &payload(process, number)])).await;
    }

    /// Whether the other side has closed the connection.
    async fn is_closed(&mut self) -> bool {
        let mut buffer = [0; 1024];
        loop {
            match in_time(self.stream.read(&mut buffer)).await {
                Ok(0) | Err(_) => return true,
                Ok(_) => {}
            }
        }
    }
}

/// A batch without events, whose timestamp tells which one it is.
fn payload(process: u8, number: u64) -> Vec<u8> {
    vec![0x92, 0xcd, process, number as u8, 0x90]
}

fn call(process: u8, number: u64) -> Call {
    Call::Batch(u32::from(process) << 8 | number as u32)
}

struct Fixture {
    live: TcpListener,
    replay: TcpListener,
    call: mpsc::UnboundedReceiver<Call>,
    task: tokio::task::JoinHandle<Infallible>,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fixture {
    async fn new(with_replay: bool) -> Self {
        let live = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let replay = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = |listener: &TcpListener| format!("tcp://{}", listener.local_addr().unwrap()).parse().unwrap();
        let source =
            Source { live: endpoint(&live), replay: with_replay.then(|| endpoint(&replay)), topic: "kv".into() };
        let (sender, call) = mpsc::unbounded_channel();
        let task = tokio::spawn(run(source, Recorder(sender)));
        Self { live, replay, call, task }
    }

    /// Accepts the live connection and its subscription.
    async fn subscriber(&mut self) -> Peer {
        let mut peer = Peer::accept(&self.live, "PUB").await;
        assert_eq!(peer.message().await, [b"\x01kv".to_vec()]);
        self.expect([Call::Connected]).await;
        peer
    }

    /// Answers one request for a replay, which must be from `from` on.
    async fn answer(&mut self, from: u64, process: u8, numbers: impl IntoIterator<Item = u64>) {
        let mut peer = Peer::accept(&self.replay, "ROUTER").await;
        assert_eq!(peer.message().await, [Vec::new(), from.to_be_bytes().to_vec()]);
        for number in numbers {
            let frames: [&[u8]; 4] = [b"", b"kv", &number.to_be_bytes(), &payload(process, number)];
            peer.send(&codec::message(&frames)).await;
        }
        peer.send(&codec::message(&[b"", b"", &[0xff; 8], b""])).await;
    }

    async fn expect(&mut self, expected: impl IntoIterator<Item = Call>) {
        for expected in expected {
            assert_eq!(in_time(self.call.recv()).await, Some(expected));
        }
    }
}

#[tokio::test]
async fn a_late_subscriber_replays_then_follows() {
    let mut fixture = Fixture::new(true).await;
    let mut live = fixture.subscriber().await;
    fixture.answer(0, 1, 0..3).await;
    fixture.expect((0..3).map(|number| call(1, number))).await;
    live.publish(1, 3).await;
    live.publish(1, 4).await;
    fixture.expect([call(1, 3), call(1, 4)]).await;
    live.publish(1, 6).await;
    fixture.answer(5, 1, 5..7).await;
    fixture.expect([call(1, 5), call(1, 6)]).await;
}

#[tokio::test]
async fn a_restarted_publisher_begins_a_new_epoch() {
    let mut fixture = Fixture::new(true).await;
    let live = fixture.subscriber().await;
    fixture.answer(0, 1, 0..3).await;
    fixture.expect((0..3).map(|number| call(1, number))).await;
    drop(live);
    fixture.expect([Call::Disconnected]).await;
    let mut live = fixture.subscriber().await;
    // The new process has published more than the old one.
    fixture.answer(2, 2, 2..5).await;
    fixture.answer(0, 2, 0..5).await;
    fixture.expect([Call::NewEpoch]).await;
    fixture.expect((0..5).map(|number| call(2, number))).await;
    live.publish(2, 5).await;
    fixture.expect([call(2, 5)]).await;
}

#[tokio::test]
async fn blocks_of_a_process_that_has_ended_are_forgotten() {
    let mut fixture = Fixture::new(true).await;
    let live = fixture.subscriber().await;
    fixture.answer(0, 1, 0..3).await;
    fixture.expect((0..3).map(|number| call(1, number))).await;
    let address = fixture.live.local_addr().unwrap();
    fixture.live = TcpListener::bind("127.0.0.1:0").await.unwrap();
    drop(live);
    // The lost connection, and two attempts to connect.
    fixture.expect([Call::Disconnected, Call::NewEpoch, Call::Disconnected, Call::Disconnected]).await;
    fixture.live = TcpListener::bind(address).await.unwrap();
    let _live = fixture.subscriber().await;
    fixture.answer(0, 2, 0..1).await;
    fixture.expect([call(2, 0)]).await;
}

#[tokio::test]
async fn a_gap_is_stale_when_the_replay_socket_is_gone() {
    let mut fixture = Fixture::new(true).await;
    let mut live = fixture.subscriber().await;
    fixture.answer(0, 1, 0..1).await;
    fixture.expect([call(1, 0)]).await;
    live.publish(1, 2).await;
    drop(Peer::raw(&fixture.replay).await);
    fixture.expect([Call::Stale, call(1, 2)]).await;
}

#[tokio::test]
async fn hostile_peers_are_dropped_and_connected_again() {
    let mut fixture = Fixture::new(false).await;
    let shake = [&codec::greeting()[..], &codec::ready("PUB")].concat();
    let huge = [&shake[..], &[2], &(1_u64 << 40).to_be_bytes()].concat();
    let frames = [&shake[..], &codec::message(&[&b""[..]; 9])].concat();
    let no_batch = [&shake[..], &codec::message(&[b"kv", b"1", b""])].concat();
    for (hostile, shakes) in [(&b"HTTP/1.1 400\r\n\r\n"[..], false), (&huge, true), (&frames, true), (&no_batch, true)]
    {
        let mut peer = Peer::raw(&fixture.live).await;
        peer.send(hostile).await;
        assert!(peer.is_closed().await);
        let connected = shakes.then_some(Call::Connected);
        fixture.expect(connected.into_iter().chain([Call::Disconnected])).await;
    }
    let mut live = fixture.subscriber().await;
    live.publish(1, 0).await;
    fixture.expect([call(1, 0)]).await;
}

#[tokio::test]
async fn an_undecodable_batch_is_stale_and_not_the_end() {
    let mut fixture = Fixture::new(false).await;
    let mut live = fixture.subscriber().await;
    live.send(&codec::message(&[b"kv", &0_u64.to_be_bytes(), b"\xc1"])).await;
    live.publish(1, 1).await;
    fixture.expect([Call::Undecodable, Call::Stale, call(1, 1)]).await;
}

#[tokio::test]
async fn heartbeats_of_the_peer_are_answered() {
    let mut fixture = Fixture::new(false).await;
    let mut live = fixture.subscriber().await;
    live.send(b"\x04\x0a\x04PING\0\x01abc").await;
    assert_eq!(live.receive().await, Received::Command);
}

#[tokio::test(start_paused = true)]
async fn a_silent_connection_is_closed() {
    let mut fixture = Fixture::new(false).await;
    let mut live = fixture.subscriber().await;
    let start = Instant::now();
    assert_eq!(live.receive().await, Received::Ping(bytes::Bytes::new()));
    assert!(live.is_closed().await);
    assert!(start.elapsed() >= HEARTBEAT * (MAX_UNANSWERED as u32 + 1));
}

#[tokio::test]
async fn dropping_the_task_closes_the_connection() {
    let mut fixture = Fixture::new(false).await;
    let mut live = fixture.subscriber().await;
    fixture.task.abort();
    assert!(live.is_closed().await);
}

#[test]
fn endpoints_name_a_host_and_a_port() {
    let parse = |text: &str| text.parse::<Endpoint>().map(|endpoint| endpoint.to_string());
    for text in ["tcp://10.0.0.1:5557", "tcp://engine-0.engines:5557", "tcp://[::1]:5557"] {
        assert_eq!(parse(text).as_deref(), Ok(text));
    }
    let refused = ["tcp://*:5557", "tcp://host", "tcp://:1", "tcp://host:0", "ipc:///tmp/socket", "host:5557"];
    for text in refused {
        assert!(parse(text).is_err(), "{text}");
    }
    for (text, own) in [
        ("tcp://*:5557", "tcp://10.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557"),
        ("tcp://[::]:5557", "tcp://10.0.0.1:5557"),
        ("tcp://10.0.0.2:5557", "tcp://10.0.0.2:5557"),
    ] {
        let endpoint = Endpoint::on_host(text, "10.0.0.1").map(|endpoint| endpoint.to_string());
        assert_eq!(endpoint.as_deref(), Ok(own));
    }
    assert!(Endpoint::on_host("ipc:///tmp/socket", "10.0.0.1").is_err());
}

#[tokio::test]
async fn a_replay_socket_answers_that_there_is_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint: Endpoint = format!("tcp://{}", listener.local_addr().unwrap()).parse().unwrap();
    let asked = tokio::spawn(async move { reach_replay(&endpoint).await });
    let mut peer = Peer::accept(&listener, "ROUTER").await;
    assert_eq!(peer.message().await, [Vec::new(), (u64::MAX - 1).to_be_bytes().to_vec()]);
    peer.send(&codec::message(&[b"", b"kv", &u64::MAX.to_be_bytes(), b""])).await;
    assert!(in_time(asked).await.unwrap().is_ok());
}

#[tokio::test]
async fn a_replay_socket_is_compared_with_the_next_batch() {
    let listen = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (publisher, replay) = (listen().await, listen().await);
    let at =
        |listener: &TcpListener| -> Endpoint { format!("tcp://{}", listener.local_addr().unwrap()).parse().unwrap() };
    let source = Source { live: at(&publisher), replay: None, topic: String::new() };
    // What the socket answers: the number and the process of each batch.
    for (batches, expected) in
        [(vec![(6, 1), (7, 1)], true), (vec![(7, 2)], false), (vec![(8, 1)], false), (vec![], false)]
    {
        let (source, endpoint) = (source.clone(), at(&replay));
        let compared = tokio::spawn(async move { replays_batches(&source, &endpoint).await });
        let mut live = Peer::accept(&publisher, "PUB").await;
        live.message().await;
        live.publish(1, 7).await;
        let mut peer = Peer::accept(&replay, "ROUTER").await;
        assert_eq!(peer.message().await, [Vec::new(), 7_u64.to_be_bytes().to_vec()]);
        for (number, process) in &batches {
            let number: u64 = *number;
            peer.send(&codec::message(&[b"", b"kv", &number.to_be_bytes(), &payload(*process, number)])).await;
        }
        peer.send(&codec::message(&[b"", b"kv", &u64::MAX.to_be_bytes(), b""])).await;
        assert_eq!(in_time(compared).await.unwrap().unwrap(), expected, "{batches:?}");
    }
}

#[tokio::test]
async fn what_does_not_speak_zmq_is_told_from_a_closed_port() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let live: Endpoint = format!("tcp://{}", listener.local_addr().unwrap()).parse().unwrap();
    let source = Source { live, replay: None, topic: String::new() };
    let asked = tokio::spawn({
        let source = source.clone();
        async move { reach(&source).await }
    });
    Peer::raw(&listener).await.send(&[b"HTTP/1.1 400 Bad Request\r\n".as_slice(), &[0; 64]].concat()).await;
    assert!(matches!(in_time(asked).await.unwrap(), Err(ReachError::Protocol(_) | ReachError::Connection(_))));
    drop(listener);
    assert!(matches!(in_time(reach(&source)).await, Err(ReachError::Connection(_))));
}
