//! The memory of a worker, read from another process.

#[path = "../../../../transport/src/tests/authority.rs"]
mod authority;

use super::*;
use crate::engine::Work;
use crate::handoff::{HandoffId, HandoffTicket, OtherProcesses, PeerTicket, Peers, Progress, RemoteMemory};
use crate::llama::tests::harness::unless_stalled;
use crate::plane::WorkerId;
use authority::Authority;
use kvbm::{
    Block, BlockReceiver, Date, Fingerprint, Header, Level, Loaded, PieceReceiver, SequenceHash, StoreError, Tier,
    Usage,
};
use std::collections::BTreeMap;
use tokio::io::AsyncReadExt;
use tokio_util::task::AbortOnDropHandle;
use transport::{CertificateMetrics, ClientFiles, ClientTls, Identity, NamedFile, ServerFiles, ServerTls, Socket};

/// Serves the blocks of `peers` over HTTP/1.1 and counts connections.
async fn serve(peers: Peers, secret: Option<Secret>) -> (String, Arc<AtomicUsize>, JoinHandle<()>) {
    serve_at(TcpListener::bind("127.0.0.1:0").await.unwrap(), peers, secret)
}

fn serve_at(listener: TcpListener, peers: Peers, secret: Option<Secret>) -> (String, Arc<AtomicUsize>, JoinHandle<()>) {
    let (url, connections) = (format!("http://{}", listener.local_addr().unwrap()), Arc::new(AtomicUsize::new(0)));
    let server = RequestServer::new(secret.map(|secret| secret.required_at(&url)), peers);
    let counted = Arc::clone(&connections);
    let accepting = tokio::spawn(async move {
        let mut tasks = tokio::task::JoinSet::new();
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            counted.fetch_add(1, Ordering::SeqCst);
            let server = Arc::clone(&server);
            tasks.spawn(answer(Socket::Left(socket), server));
        }
    });
    (url, connections, accepting)
}

/// Answers the requests of a connection.
async fn answer(socket: Socket, server: Arc<RequestServer>) {
    let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
        let server = Arc::clone(&server);
        async move {
            let (head, body) = request.into_parts();
            let mut path = head.uri.path().split('/').skip(2);
            let worker = path.next().unwrap_or_default().to_owned();
            if let (Some("handoffs"), Some(handoff)) = (path.next(), path.next()) {
                return Ok(server.respond_progress(handoff, &head.headers));
            }
            Ok::<_, Infallible>(server.respond_blocks(&worker, &head.headers, body).await)
        }
    });
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service).await;
}

/// Yields each requested block but every third, and then, if it is to, nothing more for ever.
struct Memory {
    ends: bool,
}

fn fingerprint() -> Fingerprint {
    Fingerprint::from_bytes([7; 32])
}

fn block(hash: SequenceHash) -> Block {
    let payload = vec![hash.as_bytes()[0]; 300_000];
    Block::new(hash, None, fingerprint(), payload.into())
}

fn hashes(count: u8) -> Vec<SequenceHash> {
    (0..count).map(|n| SequenceHash::from_bytes([n; 16])).collect()
}

impl Tier for Memory {
    fn level(&self) -> Level {
        Level::Peer
    }

    fn holds(&self, _: Fingerprint, hashes: &[SequenceHash]) -> usize {
        hashes.len()
    }

    fn load(&self, _: Fingerprint, hashes: Vec<SequenceHash>) -> futures::stream::BoxStream<'static, Loaded> {
        let count = if self.ends { hashes.len() } else { hashes.len() / 2 };
        let found = |(at, hash): (usize, SequenceHash)| (at, Ok((hash.as_bytes()[0] % 3 != 2).then(|| block(hash))));
        let loaded = stream::iter(hashes.into_iter().enumerate().take(count).map(found));
        if self.ends { loaded.boxed() } else { loaded.chain(stream::pending()).boxed() }
    }

    fn store(&self, _: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        async { Vec::new() }.boxed()
    }

    fn discard(&self, _: Fingerprint, _: SequenceHash) {}

    fn expire(&self, _: Date) -> usize {
        0
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

fn memory(ends: bool) -> Peers {
    let peers = Peers::default();
    peers.insert(WorkerId(1), Arc::new(Memory { ends }));
    peers
}

#[tokio::test]
async fn every_block_arrives_once_over_a_few_connections() {
    let (url, connections, _accepting) = serve(memory(true), Some(secret("0123456789abcdef"))).await;
    let peer = RemotePeer::new(WorkerId(1), &url, Some(secret("0123456789abcdef")));
    for _ in 0..3 {
        let mut loaded: Vec<Loaded> = peer.load(fingerprint(), hashes(20)).collect().await;
        loaded.sort_by_key(|(index, _)| *index);
        assert_eq!(loaded.len(), 20);
        for ((index, block), hash) in loaded.into_iter().zip(hashes(20)) {
            let block = block.unwrap();
            assert_eq!(block.is_some(), index % 3 != 2, "block {index}");
            if let Some(block) = block {
                block.verify(hash, fingerprint()).unwrap();
            }
        }
    }
    // One for each eight blocks, and the same for all loads.
    assert_eq!(connections.load(Ordering::SeqCst), 3);
    let many: Vec<Loaded> = peer.load(fingerprint(), hashes(250)).collect().await;
    assert_eq!((many.len(), connections.load(Ordering::SeqCst)), (250, 4));
}

/// Takes every other block.
#[derive(Default)]
struct TakesEven(parking_lot::Mutex<Vec<(usize, Block)>>);

impl BlockReceiver for TakesEven {
    fn take(&self, index: usize, block: Block) -> Option<Block> {
        if index % 2 == 1 {
            return Some(block);
        }
        self.0.lock().push((index, block));
        None
    }
}

#[tokio::test]
async fn a_block_is_yielded_unless_it_was_taken_when_it_arrived() {
    let (url, ..) = serve(memory(true), None).await;
    let peer = RemotePeer::new(WorkerId(1), &url, None);
    let receiver = Arc::new(TakesEven::default());
    let yielded: Vec<Loaded> = peer.load_into(fingerprint(), hashes(40), Arc::clone(&receiver) as _).collect().await;
    let taken = std::mem::take(&mut *receiver.0.lock());
    let mut indexes: Vec<usize> = yielded.iter().map(|(index, _)| *index).collect();
    assert!(yielded.iter().all(|(index, block)| (index % 2 == 1 || index % 3 == 2) && block.is_ok()));
    assert!(taken.iter().all(|(index, _)| index % 2 == 0 && index % 3 != 2));
    indexes.extend(taken.iter().map(|(index, _)| *index));
    indexes.sort_unstable();
    assert_eq!(indexes, (0..40).collect::<Vec<_>>(), "each once");
    for (index, block) in taken {
        block.verify(hashes(40)[index], fingerprint()).unwrap();
    }
}

/// Takes every other block in pieces, but no more than so many bytes of one.
struct TakesPieces {
    at_most: usize,
    taken: Arc<parking_lot::Mutex<BTreeMap<usize, Vec<u8>>>>,
}

struct Pieces {
    index: usize,
    at_most: usize,
    bytes: Vec<u8>,
    taken: Arc<parking_lot::Mutex<BTreeMap<usize, Vec<u8>>>>,
}

impl BlockReceiver for TakesPieces {
    fn take(&self, _: usize, block: Block) -> Option<Block> {
        Some(block)
    }

    fn begin(&self, index: usize, header: &Header) -> Option<Box<dyn PieceReceiver>> {
        assert_eq!(header.hash, hashes(40)[index]);
        let (at_most, taken) = (self.at_most, Arc::clone(&self.taken));
        index.is_multiple_of(2).then(|| Box::new(Pieces { index, at_most, bytes: Vec::new(), taken }) as _)
    }
}

impl PieceReceiver for Pieces {
    fn write(&mut self, bytes: &[u8]) -> bool {
        self.bytes.extend_from_slice(bytes);
        self.bytes.len() <= self.at_most
    }

    fn end(self: Box<Self>) {
        let before = self.taken.lock().insert(self.index, self.bytes);
        assert!(before.is_none(), "block {} was taken twice", self.index);
    }
}

#[tokio::test]
async fn large_blocks_are_taken_in_pieces_and_the_others_are_yielded() {
    let (url, ..) = serve(memory(true), None).await;
    let peer = RemotePeer::new(WorkerId(1), &url, None);
    let receiver = TakesPieces { at_most: usize::MAX, taken: Arc::default() };
    let taken = Arc::clone(&receiver.taken);
    let yielded: Vec<Loaded> = peer.load_into(fingerprint(), hashes(40), Arc::new(receiver)).collect().await;
    let taken = taken.lock();
    for (index, bytes) in &*taken {
        assert!(*bytes == block(hashes(40)[*index]).payload, "block {index}");
    }
    let mut indexes: Vec<usize> = yielded.iter().map(|(index, _)| *index).chain(taken.keys().copied()).collect();
    indexes.sort_unstable();
    assert_eq!(indexes, (0..40).collect::<Vec<_>>(), "each once");
    assert!(yielded.iter().all(|(index, block)| (index % 2 == 1 || index % 3 == 2) && block.is_ok()));
}

#[tokio::test]
async fn a_receiver_that_needs_no_more_pieces_ends_the_load() {
    let (url, ..) = serve(memory(true), None).await;
    let peer = RemotePeer::new(WorkerId(1), &url, None);
    let receiver = TakesPieces { at_most: 100_000, taken: Arc::default() };
    let taken = Arc::clone(&receiver.taken);
    let yielded: Vec<Loaded> = peer.load_into(fingerprint(), hashes(8), Arc::new(receiver)).collect().await;
    assert!(yielded.is_empty() && taken.lock().is_empty(), "the first block is not taken, and nothing follows");
}

#[tokio::test(start_paused = true)]
async fn while_packets_to_a_peer_are_lost_only_the_first_load_waits() {
    // Once the queue of connections that were not accepted is full, the kernel answers no attempt.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut queued = Vec::new();
    while let Ok(connection) = std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
        queued.push(connection);
    }
    let peer = RemotePeer::new(WorkerId(1), &format!("http://{address}"), None);
    let waited = async || {
        let began = tokio::time::Instant::now();
        let loaded: Vec<Loaded> = peer.load(fingerprint(), hashes(1)).collect().await;
        assert!(loaded.len() == 1 && loaded[0].1.is_err());
        began.elapsed()
    };
    assert!(waited().await >= Duration::from_secs(2));
    for _ in 0..3 {
        for _ in 0..3 {
            assert!(waited().await < Duration::from_secs(1));
        }
        tokio::time::advance(Duration::from_secs(6)).await;
    }
}

#[tokio::test]
async fn every_block_arrives_over_tls() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let authorities = NamedFile { key: "ca_file", path: authority.write(&folder.path().join("ca.pem")) };
    let identity = |name: &str| {
        let [certificate, key] = authority.sign(folder.path(), name, &["127.0.0.1"], false);
        Identity::of(("cert_file", Some(certificate)), ("key_file", Some(key))).unwrap()
    };
    let metrics = || CertificateMetrics::new("peers", &prometheus::Registry::new()).unwrap();
    let files = ServerFiles { identity: identity("server").unwrap(), clients: Some(authorities.clone()) };
    let server_tls = ServerTls::open(files, metrics()).unwrap();
    let client_tls = ClientTls::open(ClientFiles { identity: identity("client"), authorities }, metrics()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let _accepting = AbortOnDropHandle::new(tokio::spawn(async move {
        let server = RequestServer::new(None, memory(true));
        while let Ok((socket, _)) = listener.accept().await {
            if let Ok(socket) = server_tls.accept(socket).await {
                tokio::spawn(answer(socket, Arc::clone(&server)));
            }
        }
    }));
    let peer = RemotePeer::new(WorkerId(1), &url, Credentials { secret: None, tls: Some(Arc::new(client_tls)) });
    let loaded: Vec<Loaded> = peer.load(fingerprint(), hashes(40)).collect().await;
    let found: Vec<_> = loaded.into_iter().filter_map(|(at, block)| Some((at, block.unwrap()?))).collect();
    assert_eq!(found.len(), 27, "all but every third");
    for (at, block) in found {
        block.verify(hashes(40)[at], fingerprint()).unwrap();
    }
}

#[tokio::test]
async fn each_block_that_cannot_be_read_is_an_error_once() {
    let (url, _, accepting) = serve(memory(false), Some(secret("0123456789abcdef"))).await;
    let gone = RemotePeer::new(WorkerId(1), "http://127.0.0.1:1", None);
    let wrong = RemotePeer::new(WorkerId(1), &url, Some(secret("fedcba9876543210")));
    let absent = RemotePeer::new(WorkerId(2), &url, Some(secret("0123456789abcdef")));
    for peer in [gone, wrong, absent] {
        let loaded: Vec<Loaded> = peer.load(fingerprint(), hashes(5)).collect().await;
        assert!(loaded.len() == 5 && loaded.iter().all(|(_, block)| block.is_err()));
    }
    let peer = RemotePeer::new(WorkerId(1), &url, Some(secret("0123456789abcdef")));
    let mut loads = peer.load(fingerprint(), hashes(20));
    let mut indexes = Vec::new();
    for _ in 0..10 {
        let (index, block) = loads.next().await.unwrap();
        assert!(block.is_ok());
        indexes.push(index);
    }
    // The process ends in mid-transfer.
    accepting.abort();
    while let Some((index, block)) = loads.next().await {
        assert!(block.is_err());
        indexes.push(index);
    }
    indexes.sort_unstable();
    assert_eq!(indexes, (0..20).collect::<Vec<_>>());
}

/// The value of the header `authorization` of the next request, to which there is no answer.
async fn next_authorization(listener: &TcpListener) -> String {
    let (mut socket, _) = listener.accept().await.unwrap();
    let (mut request, mut part) = (Vec::<u8>::new(), [0; 4096]);
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let count = socket.read(&mut part).await.unwrap();
        assert!(count > 0, "the request has ended");
        request.extend_from_slice(&part[..count]);
    }
    let text = String::from_utf8_lossy(&request).into_owned();
    let value = text.lines().find_map(|line| line.strip_prefix("authorization: "));
    value.unwrap_or_else(|| panic!("{text}")).to_owned()
}

/// During a rotation, a process that knows the former secret only may name its own address, in a hand-over or in an
/// order to copy a prefix. It must not learn the new secret, and what it receives must not work elsewhere.
#[tokio::test]
async fn a_peer_that_a_request_names_learns_no_secret() {
    let (former, new) = ("0123456789abcdef", "fedcba9876543210");
    let both = secret(&format!("{new}\n{former}"));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let sent = both.clone();
    let peers = Peers::with_other_processes(OtherProcesses {
        url: "http://127.0.0.1:1".to_owned(),
        connect: Box::new(move |worker, url: &str| Arc::new(RemotePeer::new(worker, url, Some(sent.clone()))) as _),
    });
    let copied = peers.memory(&PeerTicket { peer: WorkerId(8), url: Some(url.clone()) }).unwrap();
    let handoff = HandoffId(1);
    let handed = peers.find(&HandoffTicket { peer: WorkerId(9), url: Some(url.clone()), handoff }).unwrap();
    let reads: [BoxFuture<'static, bool>; 2] = [
        copied.load(fingerprint(), hashes(1)).all(async |(_, block)| block.is_err()).boxed(),
        handed.progress.count().map(|count| count == 0).boxed(),
    ];
    for read in reads {
        let reading = tokio::spawn(read);
        let value = next_authorization(&listener).await;
        assert!(!value.contains(new) && !value.contains(former), "{value}");
        let headers = HeaderMap::from_iter([(http::header::AUTHORIZATION, value.parse::<HeaderValue>().unwrap())]);
        let accepts = |url: &str| both.required_at(url).is_in(&headers);
        assert!(accepts(&url) && !accepts("http://127.0.0.1:1"), "{value}");
        assert!(reading.await.unwrap(), "the blocks are computed");
    }
}

/// A request may name any worker.
#[tokio::test(start_paused = true)]
async fn few_memories_of_other_processes_are_kept() {
    let connected = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connected);
    let url = "http://127.0.0.1:1";
    let peers = Peers::with_other_processes(OtherProcesses {
        url: url.to_owned(),
        connect: Box::new(move |worker, url: &str| {
            counted.fetch_add(1, Ordering::SeqCst);
            Arc::new(RemotePeer::new(worker, url, None)) as _
        }),
    });
    // The number of memories that were made until a worker is read, this one included.
    let made = |worker: u64| {
        assert!(peers.memory(&PeerTicket { peer: WorkerId(worker), url: Some(url.to_owned()) }).is_some());
        connected.load(Ordering::SeqCst)
    };
    for worker in 0..2000 {
        made(worker);
        tokio::time::advance(Duration::from_millis(1)).await;
    }
    assert_eq!(format!("{peers:?}"), "Peers(0 here, 256 elsewhere)");
    assert_eq!((made(1999), made(1744)), (2000, 2000), "the last ones are kept");
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!((made(2000), made(1744), made(1745)), (2001, 2001, 2002), "the least recently used one is forgotten");
    tokio::time::advance(Duration::from_mins(11)).await;
    made(3000);
    assert_eq!(format!("{peers:?}"), "Peers(0 here, 1 elsewhere)", "idle ones are forgotten");
}

#[tokio::test]
async fn a_corrupt_block_is_not_asked_for_again() {
    let peer = RemotePeer::new(WorkerId(1), "http://127.0.0.1:1", None);
    assert_eq!(peer.holds(fingerprint(), &hashes(4)), 4);
    peer.discard(fingerprint(), hashes(4)[2]);
    assert_eq!(peer.holds(fingerprint(), &hashes(4)), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_over_between_processes_changes_nothing() {
    let prompt: Vec<u32> = (0..300).map(|at| at * 7 % 100).collect();
    let alone = Harness::new(Shape::default());
    let expected = collect(alone.engine.generate(request(&*alone.engine, &prompt, 12)).await.unwrap()).await.unwrap();
    let hand_over = async || {
        // Each side knows the other by its URL only.
        let others = |url: &str| OtherProcesses {
            url: url.to_owned(),
            connect: Box::new(|worker, url: &str| Arc::new(RemotePeer::new(worker, url, None)) as _),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let prefill_peers = Peers::with_other_processes(others(&url));
        let (_, _, _accepting) = serve_at(listener, prefill_peers.clone(), None);
        let prefill = Harness::new(Shape { worker: 1, peers: prefill_peers.clone(), ..Shape::default() });
        let peers = Peers::with_other_processes(others("http://127.0.0.1:1"));
        let decode = Harness::new(Shape { worker: 2, peers, ..Shape::default() });
        decode.assume_slow_prefill();
        let ask = |harness: &Harness, work| Request { work, ..request(&*harness.engine, &prompt, 12) };
        let mut prefill_stream = prefill.engine.generate(ask(&prefill, Work::Prefill)).await.unwrap();
        let Some(Ok(Output::Handoff(handoff))) = prefill_stream.next().await else { panic!("no hand-over") };
        let answer = decode.engine.generate(ask(&decode, Work::Resume(handoff))).await.unwrap();
        let answer = collect(answer).await.unwrap();
        assert_eq!(answer.ids, expected.ids);
        assert!(matches!(prefill_stream.next().await, Some(Ok(Output::Prefilled))));
        answer.prompt.unwrap().handed_over
    };
    unless_stalled(async || (hand_over().await == 288).then_some(())).await;
}

#[tokio::test]
async fn a_reader_that_stops_closes_its_connections() {
    let (url, connections, _accepting) = serve(memory(true), None).await;
    let peer = RemotePeer::new(WorkerId(1), &url, None);
    let mut loads = peer.load(fingerprint(), hashes(200));
    assert!(loads.next().await.unwrap().1.is_ok());
    while connections.load(Ordering::SeqCst) < 4 {
        tokio::task::yield_now().await;
    }
    drop(loads);
    let again: Vec<Loaded> = peer.load(fingerprint(), hashes(8)).collect().await;
    assert_eq!((again.len(), connections.load(Ordering::SeqCst)), (8, 5), "the rest of a response is not read");
}

#[tokio::test]
async fn the_progress_of_a_prefill_crosses_processes() {
    let peers = memory(true);
    let (url, _, _accepting) = serve(peers.clone(), Some(secret("0123456789abcdef"))).await;
    let peer = |key: &str| RemotePeer::new(WorkerId(1), &url, Some(secret(key)));
    let (ticket, progress) = peers.begin(WorkerId(1));
    let mut followed = peer("0123456789abcdef").progress(ticket.handoff);
    assert_eq!(followed.next().await, Some(Progress::Computing { blocks: 0 }));
    for blocks in [3, 9] {
        progress.computed(blocks);
        assert_eq!(followed.next().await, Some(Progress::Computing { blocks: blocks as u32 }));
    }
    let refused = peer("fedcba9876543210").progress(ticket.handoff);
    assert_eq!(refused.collect::<Vec<_>>().await, [], "without the secret");
    let complete = Progress::Complete { cached: vec![(Level::G3, 16)] };
    progress.complete(vec![(Level::G3, 16)]);
    assert_eq!(followed.next().await, Some(complete));
    drop(progress);
    assert_eq!(followed.next().await, None);
    let ended = peer("0123456789abcdef").progress(ticket.handoff);
    assert_eq!(ended.collect::<Vec<_>>().await, [], "the hand-over has ended");
}

#[tokio::test]
async fn progress_ends_with_the_prefill_or_its_process() {
    for ends_process in [false, true] {
        let peers = memory(true);
        let (url, _, accepting) = serve(peers.clone(), None).await;
        let (ticket, progress) = peers.begin(WorkerId(1));
        let mut followed = RemotePeer::new(WorkerId(1), &url, None).progress(ticket.handoff);
        progress.computed(2);
        while followed.next().await != Some(Progress::Computing { blocks: 2 }) {}
        if ends_process {
            accepting.abort();
        } else {
            drop(progress);
        }
        assert_eq!(followed.next().await, None);
    }
    let gone = RemotePeer::new(WorkerId(1), "http://127.0.0.1:1", None).progress(HandoffId(1));
    assert_eq!(gone.collect::<Vec<_>>().await, []);
}
