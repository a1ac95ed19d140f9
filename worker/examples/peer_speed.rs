//! How fast the memory of a worker is read over HTTP/1.1, compared with raw loopback TCP.
//!
//! ```text
//! cargo run --release -p worker --example peer_speed [-- --json]
//! ```
//!
//! Raw TCP: threads that write the bytes from memory, each to a connection of its own, and as many threads that read
//! them into a buffer of 1 MiB. The peer: a server and a client with as many runtime threads each. Every block is
//! verified (hash, fingerprint, checksum). Its source is host memory (G2), whose checksums are known, or device memory
//! (G1), of which the server computes them. `onboard`: the blocks are also written to the device memory of the client
//! and registered. `mTLS`: server and client show each other certificates, and the bytes are encrypted. All are
//! measured in turns; the results are medians, those of plaintext reads beside their goal.

#[path = "../../transport/src/tests/authority.rs"]
#[expect(clippy::unwrap_used, reason = "shared with tests, where it is allowed")]
mod authority;

use authority::Authority;
use futures::StreamExt;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use kvbm::{
    BlockAttrs, BlockManager, DeviceBlocks, Epoch, EventLog, Fingerprint, HostTier, Metrics, Recompute, SequenceHash,
    Tier,
};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::error::Error as StdError;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;
use tokio::runtime::{Builder, Runtime as Tokio};
use transport::{CertificateMetrics, ClientFiles, ClientTls, Identity, NamedFile, ServerFiles, ServerTls, Socket};
use worker::handoff::Peers;
use worker::llama::{Builtin, ModelSource, Runtime};
use worker::plane::WorkerId;
use worker::remote::{Credentials, RemotePeer, RequestServer};

type Result<T, E = Box<dyn StdError>> = std::result::Result<T, E>;

/// Bytes of each measurement: more than any processor's cache holds.
const BYTES: usize = 192 << 20;
const ROUNDS: usize = 7;
const CONNECTIONS: [usize; 2] = [1, 4];
/// Bytes of one system call of raw TCP.
const RAW_BYTES: usize = 1 << 20;

/// Goal for the ratio of a plaintext read to raw TCP.
const GOAL: f64 = 0.8;

const IN_G1: WorkerId = WorkerId(1);
const IN_G2: WorkerId = WorkerId(2);

/// A manager with room for all blocks, and its device.
struct Memory {
    manager: BlockManager,
    device: Arc<dyn DeviceBlocks>,
}

impl Memory {
    fn new(runtime: &Runtime, blocks: usize, has_host: bool) -> Result<Self> {
        let metrics = Metrics::new(&prometheus::Registry::new())?;
        let (device, log) = (runtime.memory(blocks)?.device(), Arc::new(EventLog::new(Epoch(1))));
        let (block, bytes) = (runtime.block_bytes(), (blocks * runtime.block_bytes()) as u64);
        let host = has_host.then(|| HostTier::new(2 * bytes, block, device.fingerprint(), log.clone(), &metrics));
        let host = host.transpose()?;
        let manager = BlockManager::new(Arc::clone(&device), host, Vec::new(), log, metrics);
        Ok(Self { manager, device })
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

/// Bytes per second of raw TCP.
fn raw(connections: usize, memory: &Arc<Vec<u8>>) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut threads = Vec::new();
    let share = memory.len() / connections;
    let mut sockets = Vec::new();
    for _ in 0..connections {
        let sending = TcpStream::connect(listener.local_addr()?)?;
        sending.set_nodelay(true)?;
        sockets.push((sending, listener.accept()?.0));
    }
    let began = Instant::now();
    for (nth, (mut sending, mut receiving)) in sockets.into_iter().enumerate() {
        let memory = Arc::clone(memory);
        threads.push(thread::spawn(move || {
            memory[nth * share..][..share].chunks(RAW_BYTES).try_for_each(|bytes| sending.write_all(bytes))
        }));
        threads.push(thread::spawn(move || {
            let mut buffer = vec![0; RAW_BYTES];
            while receiving.read(&mut buffer)? > 0 {}
            Ok(())
        }));
    }
    for thread in threads {
        thread.join().map_err(|_| "a thread panicked")??;
    }
    Ok((share * connections) as f64 / began.elapsed().as_secs_f64())
}

/// Bytes per second of reading and verifying all blocks.
async fn read(peer: Arc<dyn Tier>, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> Result<f64> {
    // On a thread of the runtime, beside the tasks that read.
    let reading = tokio::spawn(async move {
        let (began, mut bytes, mut blocks) = (Instant::now(), 0, peer.load(fingerprint, hashes.clone()));
        while let Some((index, loaded)) = blocks.next().await {
            let block = loaded.map_err(|error| error.to_string())?.ok_or("a block is missing")?;
            bytes += block.payload.len();
            block.check(hashes[index], fingerprint).map_err(|error| error.to_string())?;
        }
        Ok::<_, String>(bytes as f64 / began.elapsed().as_secs_f64())
    });
    Ok(reading.await??)
}

/// Bytes per second of onboarding all blocks.
async fn onboard(peer: &Arc<dyn Tier>, into: &Memory, hashes: &[SequenceHash]) -> Result<f64> {
    into.empty()?;
    // Computing a block takes longer than any transfer.
    let recompute = Recompute { seconds_per_block: Some(1.0), deadline: None };
    let began = Instant::now();
    let onboarded = into.manager.onboard_from(peer, hashes, recompute, &spans::Context::none()).await;
    let took = began.elapsed().as_secs_f64();
    if onboarded.blocks.len() < hashes.len() {
        return Err(format!("{} of {} blocks were loaded", onboarded.blocks.len(), hashes.len()).into());
    }
    Ok((hashes.len() * into.device.block_bytes()) as f64 / took)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The rates with a number of connections and threads, in bytes per second.
fn measure(
    model: &Runtime,
    connections: usize,
    raw_memory: &Arc<Vec<u8>>,
    certificates: &Certificates,
) -> Result<Value> {
    let (server, client) = (runtime(connections)?, runtime(connections)?);
    let hashes = hashes(BYTES / model.block_bytes());
    let (in_g1, in_g2, into) = {
        let _runtime = server.enter();
        let (in_g1, in_g2) = (Memory::new(model, hashes.len(), false)?, Memory::new(model, hashes.len(), true)?);
        let _runtime = client.enter();
        (in_g1, in_g2, Memory::new(model, hashes.len(), false)?)
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
    let mut rates: [Vec<f64>; 5] = Default::default();
    for round in 0..=ROUNDS {
        let measured = client.block_on(async {
            Ok::<_, Box<dyn StdError>>([
                raw(connections, raw_memory)?,
                read(Arc::clone(&g2), fingerprint, hashes.clone()).await?,
                read(Arc::clone(&g1), fingerprint, hashes.clone()).await?,
                onboard(&g2, &into, &hashes).await?,
                read(Arc::clone(&g2_tls), fingerprint, hashes.clone()).await?,
            ])
        })?;
        // The first one connects, and touches memory for the first time.
        if round > 0 {
            rates.iter_mut().zip(measured).for_each(|(rates, measured)| rates.push(measured));
        }
    }
    let ratios = |of: &[f64]| median(of.iter().zip(&rates[0]).map(|(rate, raw)| rate / raw).collect());
    Ok(json!({
        "connections": connections, "block_bytes": model.block_bytes(), "bytes": BYTES,
        "raw": median(rates[0].clone()), "from_g2": median(rates[1].clone()), "from_g1": median(rates[2].clone()),
        "onboard": median(rates[3].clone()), "from_g2_tls": median(rates[4].clone()),
        "from_g2_ratio": ratios(&rates[1]), "from_g1_ratio": ratios(&rates[2]), "onboard_ratio": ratios(&rates[3]),
        "from_g2_tls_ratio": ratios(&rates[4]), "goal_ratio": GOAL,
    }))
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let model = Runtime::open(&ModelSource::Builtin(Builtin::Small), folder.path(), 1, &|_, _| {})?;
    let raw_memory = Arc::new((0..BYTES).map(|at| (at * 31) as u8).collect::<Vec<u8>>());
    let certificates = Certificates::new(folder.path())?;
    let rows = CONNECTIONS.map(|connections| measure(&model, connections, &raw_memory, &certificates));
    let rows = rows.into_iter().collect::<Result<Vec<Value>>>()?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{:#}", json!(rows));
        return Ok(());
    }
    for row in rows {
        let gigabytes = |name: &str| row[name].as_f64().unwrap_or_default() / 1e9;
        println!(
            "{} connections and threads, blocks of {} KiB:",
            row["connections"],
            row["block_bytes"].as_u64().unwrap_or_default() >> 10
        );
        println!("  raw TCP              {:5.2} GB/s", gigabytes("raw"));
        for (what, name, has_goal) in [
            ("read from G2", "from_g2", true),
            ("read from G1", "from_g1", true),
            ("onboard from G2", "onboard", false),
            ("read from G2, mTLS", "from_g2_tls", false),
        ] {
            let ratio = row[format!("{name}_ratio")].as_f64().unwrap_or_default();
            let met = if ratio >= GOAL { "met" } else { "NOT met" };
            let goal = if has_goal { format!(" (goal ≥ {GOAL}: {met})") } else { String::new() };
            println!("  {what:<20} {:5.2} GB/s, {ratio:.2} of raw{goal}", gigabytes(name));
        }
    }
    Ok(())
}
