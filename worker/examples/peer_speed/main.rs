//! How fast the memory of a worker is read over HTTP/1.1, compared with raw loopback TCP.
//!
//! ```text
//! cargo run --release -p worker --example peer_speed [-- --block-kib 72 --block-kib 2048] [--json]
//! ```
//!
//! Raw TCP: threads that write the bytes from memory, each to a connection of its own, and as many threads that read
//! them into a buffer of 1 MiB, which stays in the cache, or, as "bytes kept", into as much memory as there are bytes.
//! The peer: a server and a client with as many runtime threads each. Every block is verified (hash, fingerprint,
//! checksum) by the task that reads it, as in onboarding. Its source is host memory (G2), whose checksums are known, or
//! device memory (G1), of which the server computes them at the first read of a block: "first" and "again". `onboard`:
//! the blocks are also written to the device memory of the client and registered. `copy`: into the host memory of the
//! client, which is what a worker that stops has others do. `mTLS`: server and client show each
//! other certificates, and the bytes are encrypted. All are measured in turns; the results are medians, those of
//! plaintext reads beside their goal. The processor time is that of both sides: with all cores busy, it decides.
//! All is repeated for several sizes of blocks: those of the built-in model `small`, and those of real models.

#[path = "../../../transport/src/tests/authority.rs"]
#[expect(clippy::unwrap_used, reason = "shared with tests, where it is allowed")]
mod authority;
mod device;

use authority::Authority;
use device::Device;
use futures::StreamExt;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use kvbm::{
    Block, BlockAttrs, BlockManager, BlockReceiver, DeviceBlocks, Epoch, EventLog, Fingerprint, Header, HostTier,
    Metrics, PieceReceiver, PieceVerifier, SequenceHash, Tier,
};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::error::Error as StdError;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;
use tokio::runtime::{Builder, Runtime as Tokio};
use transport::{CertificateMetrics, ClientFiles, ClientTls, Identity, NamedFile, ServerFiles, ServerTls, Socket};
use worker::handoff::Peers;
use worker::plane::WorkerId;
use worker::remote::{Credentials, RemotePeer, RequestServer};

type Result<T, E = Box<dyn StdError>> = std::result::Result<T, E>;

/// Bytes of each measurement: more than any processor's cache holds.
const BYTES: usize = 192 << 20;
const ROUNDS: usize = 7;
const CONNECTIONS: [usize; 2] = [1, 4];
/// Sizes of blocks in KiB, unless others are named: `small`, and models with 32 and 128 KiB for each token.
const BLOCK_KIB: [usize; 3] = [72, 512, 2048];
/// Bytes of one system call of raw TCP.
const RAW_BYTES: usize = 1 << 20;

/// Goal for the ratio of a plaintext read to raw TCP.
const GOAL: f64 = 0.8;

const IN_G1: WorkerId = WorkerId(1);
const IN_G2: WorkerId = WorkerId(2);

/// A manager with room for all blocks, its device, and its host memory if there is one.
struct Memory {
    manager: BlockManager,
    device: Arc<dyn DeviceBlocks>,
    host: Option<HostTier>,
}

impl Memory {
    /// `host`: how many times as many blocks host memory has.
    fn new(block: usize, blocks: usize, host: u64) -> Result<Self> {
        let metrics = Metrics::new(&prometheus::Registry::new())?;
        let device = Arc::new(Device::new(blocks, block)?) as Arc<dyn DeviceBlocks>;
        let (log, bytes) = (Arc::new(EventLog::new(Epoch(1))), (blocks * block) as u64);
        let new = || HostTier::new(host * bytes, block, device.fingerprint(), log.clone(), &metrics);
        let host = (host > 0).then(new).transpose()?;
        let manager = BlockManager::new(Arc::clone(&device), host.clone(), Vec::new(), log.clone(), metrics);
        Ok(Self { manager, device, host })
    }

    /// Fills all slots.
    async fn fill(&self, hashes: &[SequenceHash]) -> Result<()> {
        let slots = self.manager.allocate(hashes.len()).ok_or("no free slots")?;
        let mut bytes = vec![0; self.device.block_bytes()];
        let blocks = slots.into_iter().zip(hashes).enumerate().map(|(nth, (slot, hash))| {
            bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 31 + nth * 7) as u8);
            self.device.write(slot.slot(), &bytes);
            slot.complete(*hash, None, BlockAttrs::default())
        });
        drop(self.manager.register_all(blocks.collect()));
        self.manager.flush().await;
        Ok(())
    }

    /// Evicts all blocks from device memory.
    fn empty(&self) -> Result<()> {
        drop(self.manager.allocate(self.manager.capacity()).ok_or("blocks are held")?);
        Ok(())
    }
}

fn hashes(count: usize) -> Vec<SequenceHash> {
    let hash = |nth: u64| [&nth.to_le_bytes()[..], &(nth + 1).to_le_bytes()].concat().try_into().expect("16 bytes");
    (0..count as u64).map(|nth| SequenceHash::from_bytes(hash(nth))).collect()
}

fn runtime(threads: usize) -> Result<Tokio> {
    Ok(Builder::new_multi_thread().worker_threads(threads).enable_all().build()?)
}

/// Certificates of both sides, signed by one authority.
struct Certificates {
    server: ServerFiles,
    client: ClientFiles,
}

impl Certificates {
    fn new(folder: &Path) -> Result<Self> {
        let authority = Authority::new();
        let authorities = NamedFile { key: "ca_file", path: authority.write(&folder.join("ca.pem")) };
        let identity = |name: &str, host: &str| -> Result<Identity> {
            let [certificate, key] = authority.sign(folder, name, &[host], false);
            let identity = Identity::of(("cert_file", Some(certificate)), ("key_file", Some(key)))?;
            Ok(identity.ok_or("both files are named")?)
        };
        let server = ServerFiles { identity: identity("server", "127.0.0.1")?, clients: Some(authorities.clone()) };
        let client = ClientFiles { identity: Some(identity("client", "client")?), authorities };
        Ok(Self { server, client })
    }
}

fn certificate_metrics() -> Result<CertificateMetrics> {
    Ok(CertificateMetrics::new("peer_speed", &prometheus::Registry::new())?)
}

/// Serves `peers` on threads of its own, with TLS if there is a certificate.
fn serve(runtime: &Tokio, peers: Peers, files: Option<ServerFiles>) -> Result<String> {
    let (sender, receiver) = mpsc::channel();
    let metrics = certificate_metrics()?;
    let tls = {
        let _runtime = runtime.enter();
        files.map(|files| ServerTls::open(files, metrics)).transpose()?
    };
    runtime.spawn(async move {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let (scheme, address) =
            (if tls.is_some() { "https" } else { "http" }, listener.local_addr().expect("it has an address"));
        sender.send(format!("{scheme}://{address}")).expect("it waits");
        let server = RequestServer::new(None, peers);
        while let Ok((socket, _)) = listener.accept().await {
            socket.set_nodelay(true).expect("a socket has the option");
            let socket = match &tls {
                None => Socket::Left(socket),
                Some(tls) => match tls.accept(socket).await {
                    Ok(socket) => socket,
                    // The client reports why.
                    Err(_) => continue,
                },
            };
            let server = Arc::clone(&server);
            let service = service_fn(move |request: http::Request<Incoming>| {
                let server = Arc::clone(&server);
                async move {
                    let (head, body) = request.into_parts();
                    let worker = head.uri.path().split('/').nth(2).unwrap_or_default().to_owned();
                    Ok::<_, Infallible>(server.respond_blocks(&worker, &head.headers, body.boxed()).await)
                }
            });
            tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service));
        }
    });
    Ok(receiver.recv()?)
}

/// Bytes per second of raw TCP: a connection for each buffer to read into, of at least `RAW_BYTES`.
fn raw(memory: &[u8], into: &mut [Vec<u8>]) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let connections = into.len();
    let share = memory.len() / connections;
    let mut sockets = Vec::new();
    for _ in 0..connections {
        let sending = TcpStream::connect(listener.local_addr()?)?;
        sending.set_nodelay(true)?;
        sockets.push((sending, listener.accept()?.0));
    }
    let began = Instant::now();
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for (nth, ((mut sending, mut receiving), into)) in sockets.into_iter().zip(into).enumerate() {
            threads.push(scope.spawn(move || {
                memory[nth * share..][..share].chunks(RAW_BYTES).try_for_each(|bytes| sending.write_all(bytes))
            }));
            threads.push(scope.spawn(move || {
                let mut at = 0;
                loop {
                    let read = receiving.read(&mut into[at..at + RAW_BYTES])?;
                    if read == 0 {
                        return Ok(());
                    }
                    at = if at + read + RAW_BYTES <= into.len() { at + read } else { 0 };
                }
            }));
        }
        let joined = |thread: thread::ScopedJoinHandle<'_, io::Result<()>>| -> Result<()> {
            Ok(thread.join().map_err(|_| "a thread panicked")??)
        };
        threads.into_iter().try_for_each(joined)
    })?;
    Ok((share * connections) as f64 / began.elapsed().as_secs_f64())
}

/// Verifies blocks as they arrive, like onboarding, and drops them.
struct Verified {
    fingerprint: Fingerprint,
    hashes: Vec<SequenceHash>,
    total: Arc<Total>,
}

/// What was verified.
#[derive(Default)]
struct Total {
    blocks: AtomicUsize,
    bytes: AtomicUsize,
}

impl Total {
    fn add(&self, bytes: usize) {
        self.blocks.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl BlockReceiver for Verified {
    fn take(&self, index: usize, block: Block) -> Option<Block> {
        if block.check(self.hashes[index], self.fingerprint).is_err() {
            return Some(block);
        }
        self.total.add(block.payload.len());
        None
    }

    fn begin(&self, index: usize, header: &Header) -> Option<Box<dyn PieceReceiver>> {
        let verifier = PieceVerifier::new(header, self.hashes[index], self.fingerprint).ok()?;
        Some(Box::new(Pieces { verifier, total: Arc::clone(&self.total) }))
    }
}

/// A large block, verified piece by piece.
struct Pieces {
    verifier: PieceVerifier,
    total: Arc<Total>,
}

impl PieceReceiver for Pieces {
    fn write(&mut self, bytes: &[u8]) -> bool {
        self.verifier.update(bytes);
        true
    }

    fn end(self: Box<Self>) {
        if let Ok(header) = self.verifier.verify() {
            self.total.add(header.length as usize);
        }
    }
}

/// Bytes per second of reading and verifying all blocks.
async fn read(peer: Arc<dyn Tier>, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> Result<f64> {
    // On a thread of the runtime, beside the tasks that read.
    let reading = tokio::spawn(async move {
        let (began, total) = (Instant::now(), Arc::<Total>::default());
        let verified = Arc::new(Verified { fingerprint, hashes: hashes.clone(), total: Arc::clone(&total) });
        let mut blocks = peer.load_into(fingerprint, hashes.clone(), verified);
        while let Some((index, loaded)) = blocks.next().await {
            let block = loaded.map_err(|error| error.to_string())?.ok_or("a block is missing")?;
            block.check(hashes[index], fingerprint).map_err(|error| error.to_string())?;
            total.add(block.payload.len());
        }
        if total.blocks.load(Ordering::Relaxed) < hashes.len() {
            return Err("a block is missing".to_owned());
        }
        Ok::<_, String>(total.bytes.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64())
    });
    Ok(reading.await??)
}

/// Bytes per second of onboarding all blocks.
async fn onboard(peer: &Arc<dyn Tier>, into: &Memory, hashes: &[SequenceHash]) -> Result<f64> {
    into.empty()?;
    let began = Instant::now();
    // However long it takes: a busy machine must not make it end before all blocks are there.
    let onboarded = into.manager.prefetch_from(peer, hashes, &spans::Context::none()).await;
    let took = began.elapsed().as_secs_f64();
    if onboarded.blocks.len() < hashes.len() {
        return Err(format!("{} of {} blocks were loaded", onboarded.blocks.len(), hashes.len()).into());
    }
    Ok((hashes.len() * into.device.block_bytes()) as f64 / took)
}

/// Bytes per second of copying all blocks into host memory, as a worker does for one that stops.
async fn copy(peer: &Arc<dyn Tier>, into: &Memory, hashes: &[SequenceHash]) -> Result<f64> {
    let host = into.host.as_ref().ok_or("there is no host memory")?;
    for hash in hashes {
        host.discard(into.device.fingerprint(), *hash);
    }
    let began = Instant::now();
    let copied = into.manager.copy_to_host(Some(peer), hashes, || true).await?;
    let took = began.elapsed().as_secs_f64();
    if copied.blocks < hashes.len() {
        return Err(format!("{} of {} blocks were copied", copied.blocks, hashes.len()).into());
    }
    Ok(copied.bytes as f64 / took)
}

/// One measurement.
struct Sample {
    /// Bytes per second.
    rate: f64,
    /// Seconds of processor time of both sides.
    cpu: f64,
}

async fn sample(rate: impl Future<Output = Result<f64>>) -> Result<Sample> {
    let before = cpu_seconds();
    let rate = rate.await?;
    Ok(Sample { rate, cpu: cpu_seconds() - before })
}

/// Processor time of the process, in ticks of 10 ms. Not a number where the system does not tell it in this way.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program, in parentheses, may have spaces. User and system time are the fields 14 and 15.
    let (_, fields) = stat.rsplit_once(')').unwrap_or_default();
    let ticks: Vec<f64> = fields.split_whitespace().skip(11).take(2).filter_map(|field| field.parse().ok()).collect();
    if ticks.len() == 2 { (ticks[0] + ticks[1]) / 100.0 } else { f64::NAN }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The rates with a number of connections and threads and blocks of so many bytes, in bytes per second.
fn measure(block: usize, connections: usize, raw_memory: &[u8], certificates: &Certificates) -> Result<Value> {
    let (server, client) = (runtime(connections)?, runtime(connections)?);
    let hashes = hashes(BYTES / block);
    let (in_g1, in_g2, into, into_host) = {
        let _runtime = server.enter();
        let (in_g1, in_g2) = (Memory::new(block, hashes.len(), 0)?, Memory::new(block, hashes.len(), 2)?);
        let _runtime = client.enter();
        // A copy takes at most a quarter of host memory.
        (in_g1, in_g2, Memory::new(block, hashes.len(), 0)?, Memory::new(block, hashes.len(), 4)?)
    };
    server.block_on(async {
        in_g1.fill(&hashes).await?;
        in_g2.fill(&hashes).await
    })?;
    in_g2.empty()?;
    let peers = Peers::default();
    peers.insert(IN_G1, in_g1.manager.peer());
    peers.insert(IN_G2, in_g2.manager.peer());
    let url = serve(&server, peers.clone(), None)?;
    let tls_url = serve(&server, peers, Some(certificates.server.clone()))?;
    let tls = {
        let _runtime = client.enter();
        Arc::new(ClientTls::open(certificates.client.clone(), certificate_metrics()?)?)
    };
    let peer = |worker, url: &str, tls| {
        let credentials = Credentials { secret: None, tls };
        Arc::new(RemotePeer::new(worker, url, credentials).with_connections(connections)) as Arc<dyn Tier>
    };
    let (g1, g2, fingerprint) = (peer(IN_G1, &url, None), peer(IN_G2, &url, None), into.device.fingerprint());
    let g2_tls = peer(IN_G2, &tls_url, Some(tls));
    // For raw TCP: memory that stays in the cache, and as much as arrives.
    let (mut cached, mut kept) =
        (vec![vec![0; RAW_BYTES]; connections], vec![vec![0; BYTES / connections]; connections]);
    let mut samples: [Vec<Sample>; 8] = Default::default();
    for round in 0..=ROUNDS {
        // Registered anew, so their checksums are not known.
        in_g1.empty()?;
        server.block_on(in_g1.fill(&hashes))?;
        let measured = client.block_on(async {
            Ok::<_, Box<dyn StdError>>([
                sample(async { raw(raw_memory, &mut cached) }).await?,
                sample(read(Arc::clone(&g2), fingerprint, hashes.clone())).await?,
                sample(read(Arc::clone(&g1), fingerprint, hashes.clone())).await?,
                sample(read(Arc::clone(&g1), fingerprint, hashes.clone())).await?,
                sample(onboard(&g2, &into, &hashes)).await?,
                sample(copy(&g2, &into_host, &hashes)).await?,
                sample(read(Arc::clone(&g2_tls), fingerprint, hashes.clone())).await?,
                sample(async { raw(raw_memory, &mut kept) }).await?,
            ])
        })?;
        // The first one connects, and touches memory for the first time.
        if round > 0 {
            samples.iter_mut().zip(measured).for_each(|(samples, measured)| samples.push(measured));
        }
    }
    let of = |samples: &[Sample], to: &[Sample]| {
        let ratio = median(samples.iter().zip(to).map(|(sample, raw)| sample.rate / raw.rate).collect());
        let rate = median(samples.iter().map(|sample| sample.rate).collect());
        let cpu = samples.iter().map(|sample| sample.cpu).sum::<f64>() / (samples.len() * BYTES) as f64;
        json!({ "bytes_per_second": rate, "ratio": ratio, "cpu_seconds_per_gigabyte": cpu * 1e9 })
    };
    let [raw, from_g2, from_g1, from_g1_again, onboard, copy, from_g2_tls, raw_kept] = &samples;
    Ok(json!({
        "connections": connections, "block_bytes": block, "bytes": BYTES, "goal_ratio": GOAL,
        "raw": of(raw, raw), "from_g2": of(from_g2, raw), "from_g1": of(from_g1, raw),
        "from_g1_again": of(from_g1_again, raw),
        "onboard": of(onboard, raw), "copy": of(copy, raw), "from_g2_tls": of(from_g2_tls, raw),
        "raw_kept": of(raw_kept, raw),
        "onboard_to_raw_kept": of(onboard, raw_kept)["ratio"],
    }))
}

/// What the command line asks for.
struct Arguments {
    block_kib: Vec<usize>,
    is_json: bool,
}

impl Arguments {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut parsed = Self { block_kib: Vec::new(), is_json: false };
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--json" => parsed.is_json = true,
                "--block-kib" => {
                    let kib = arguments.next().ok_or("--block-kib needs a number")?.parse()?;
                    if !(1..=BYTES >> 13).contains(&kib) {
                        return Err(format!("--block-kib {kib} is not between 1 and {}", BYTES >> 13).into());
                    }
                    parsed.block_kib.push(kib);
                }
                other => return Err(format!("unknown argument {other}").into()),
            }
        }
        if parsed.block_kib.is_empty() {
            parsed.block_kib = BLOCK_KIB.to_vec();
        }
        Ok(parsed)
    }
}

fn main() -> Result<()> {
    // As in the program: otherwise memory of large buffers would stay mapped between loads only here.
    kvbm::heap::return_large_allocations();
    let folder = tempfile::tempdir()?;
    let raw_memory: Vec<u8> = (0..BYTES).map(|at| (at * 31) as u8).collect();
    let certificates = Certificates::new(folder.path())?;
    let Arguments { block_kib, is_json } = Arguments::parse(std::env::args().skip(1))?;
    let cases = block_kib.into_iter().flat_map(|kib| CONNECTIONS.map(|connections| (kib << 10, connections)));
    let rows = cases.map(|(block, connections)| measure(block, connections, &raw_memory, &certificates));
    let rows = rows.collect::<Result<Vec<Value>>>()?;
    if is_json {
        println!("{:#}", json!(rows));
        return Ok(());
    }
    for row in rows {
        println!(
            "{} connections and threads, blocks of {} KiB:",
            row["connections"],
            row["block_bytes"].as_u64().unwrap_or_default() >> 10
        );
        for (what, name, has_goal) in [
            ("raw TCP", "raw", false),
            ("read from G2", "from_g2", true),
            ("read from G1, first", "from_g1", true),
            ("read from G1, again", "from_g1_again", true),
            ("onboard from G2", "onboard", false),
            ("copy from G2 to G2", "copy", false),
            ("read from G2, mTLS", "from_g2_tls", false),
            ("raw TCP, bytes kept", "raw_kept", false),
        ] {
            let [rate, ratio, cpu] = ["bytes_per_second", "ratio", "cpu_seconds_per_gigabyte"]
                .map(|value| row[name][value].as_f64().unwrap_or(f64::NAN));
            let met = if ratio >= GOAL { "met" } else { "NOT met" };
            let goal = if has_goal { format!(" (goal ≥ {GOAL}: {met})") } else { String::new() };
            println!("  {what:<20} {:5.2} GB/s, {cpu:.2} s of CPU per GB, {ratio:.2} of raw{goal}", rate / 1e9);
        }
        let ratio = row["onboard_to_raw_kept"].as_f64().unwrap_or(f64::NAN);
        println!("  onboard, which keeps its bytes: {ratio:.2} of raw TCP, bytes kept");
    }
    Ok(())
}
