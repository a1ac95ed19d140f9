//! The load: a number of clients, each with a connection of its own, that send one request after the other.

use super::engine::MODEL;
use super::http::{Framing, Head};
use super::process::{Running, Usage};
use super::tokenizer::words;
use anyhow::{Context, Result, bail, ensure};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Time for one request. The longest has 64 tokens at 20 ms.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a failed request, so that a gateway that refuses all is not flooded.
const ERROR_PAUSE: Duration = Duration::from_millis(5);
/// Groups of prompts with the same beginning.
const GROUPS: u64 = 32;

/// What is sent.
#[derive(Clone, Debug)]
pub struct Load {
    /// The addresses, of which each client uses one.
    pub addresses: Vec<SocketAddr>,
    /// Number of clients.
    pub clients: usize,
    /// Whether answers are streams.
    pub stream: bool,
    /// Tokens of an answer.
    pub tokens: usize,
    /// Characters of a prompt; every prompt is another one.
    pub prompt: usize,
    /// Characters at its beginning that it has in common with one in 32 others.
    pub shared: usize,
    /// Time before the measurement, during which the clients start one after the other.
    pub warmup: Duration,
    /// When the measurement ends.
    pub until: Until,
}

/// When a measurement ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// After a time.
    Elapsed(Duration),
    /// After a number of answers.
    Answered(u64),
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Complete answers.
    pub requests: u64,
    /// Events of streams, in complete answers and others.
    pub chunks: u64,
    /// From sending a request to its first event, or to its whole answer; sorted.
    pub first: Vec<Duration>,
    /// Requests that failed, and the first reason.
    pub errors: u64,
    /// The first reason.
    pub error: Option<String>,
    /// CPU time of the gateway.
    pub cpu: Duration,
    /// Memory of the gateway at the end, while all clients are connected.
    pub resident_mib: f64,
}

impl Measured {
    /// CPU time per request in µs.
    pub fn cpu_per_request(&self) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / self.requests.max(1) as f64
    }

    /// CPU time per chunk in µs.
    pub fn cpu_per_chunk(&self) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / self.chunks.max(1) as f64
    }

    /// A quantile of the time to the first token in µs.
    pub fn first_us(&self, quantile: f64) -> Option<f64> {
        let at = (self.first.len() as f64 * quantile).ceil() as usize;
        self.first.get(at.saturating_sub(1)).map(|time| time.as_secs_f64() * 1e6)
    }
}

/// Shared by the clients.
struct Shared {
    load: Load,
    /// Number of the next prompt, different in each run.
    next: AtomicU64,
    is_measuring: AtomicBool,
    chunks: AtomicU64,
    answers: AtomicU64,
}

/// Sends the load, and measures `gateway` meanwhile.
pub async fn run(load: &Load, gateway: Option<&Running>) -> Measured {
    let shared = Arc::new(Shared::new(load));
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for number in 0..load.clients {
        let (shared, stop) = (Arc::clone(&shared), Arc::clone(&stop));
        clients.spawn(async move {
            // Spread, so that paced streams do not tick at the same moment.
            sleep(shared.load.warmup.mul_f64(0.7 * number as f64 / shared.load.clients as f64)).await;
            let mut client = Client::new(number, &shared);
            while !stop.load(Ordering::Relaxed) {
                client.request().await;
            }
            client.measured
        });
    }
    sleep(load.warmup).await;
    let usage = || gateway.map_or(Usage::default(), Running::usage);
    let (before, started) = (usage(), Instant::now());
    shared.is_measuring.store(true, Ordering::Relaxed);
    match load.until {
        Until::Elapsed(time) => sleep(time).await,
        Until::Answered(count) => {
            // A gateway that stops answering must not hold up the run.
            let limit = Duration::from_mins(10);
            while shared.answers.load(Ordering::Relaxed) < count && started.elapsed() < limit {
                sleep(Duration::from_millis(20)).await;
            }
        }
    }
    shared.is_measuring.store(false, Ordering::Relaxed);
    let after = usage();
    stop.store(true, Ordering::Relaxed);
    let mut all = Measured {
        chunks: shared.chunks.load(Ordering::Relaxed),
        cpu: after.cpu.saturating_sub(before.cpu),
        resident_mib: after.resident_mib,
        ..Measured::default()
    };
    while let Some(ended) = clients.join_next().await {
        let one = ended.expect("a client does not panic");
        all.requests += one.requests;
        all.errors += one.errors;
        all.first.extend(one.first);
        all.error = all.error.or(one.error);
    }
    all.first.sort_unstable();
    all
}

/// Whether a request to this address is answered within a time.
pub async fn answers(address: SocketAddr, within: Duration) -> Result<()> {
    let (warmup, until) = (Duration::ZERO, Until::Answered(1));
    let load =
        Load { addresses: vec![address], clients: 1, stream: false, tokens: 1, prompt: 64, shared: 0, warmup, until };
    let shared = Shared::new(&load);
    let mut client = Client::new(0, &shared);
    timeout(within, client.exchange()).await.unwrap_or_else(|_| timed_out()).map(drop)
}

/// One client.
struct Client<'a> {
    shared: &'a Shared,
    address: SocketAddr,
    socket: Option<TcpStream>,
    measured: Measured,
    buffer: Vec<u8>,
}

impl<'a> Client<'a> {
    fn new(number: usize, shared: &'a Shared) -> Self {
        let address = shared.load.addresses[number % shared.load.addresses.len()];
        Self { shared, address, socket: None, measured: Measured::default(), buffer: Vec::new() }
    }

    /// Sends one request and reads its answer. A failure is counted.
    async fn request(&mut self) {
        let outcome = timeout(REQUEST_TIMEOUT, self.exchange()).await.unwrap_or_else(|_| timed_out());
        let is_measuring = self.shared.is_measuring.load(Ordering::Relaxed);
        match outcome {
            Ok(first) if is_measuring => {
                self.measured.requests += 1;
                self.measured.first.push(first);
                self.shared.answers.fetch_add(1, Ordering::Relaxed);
            }
            Ok(_) => {}
            Err(error) => {
                self.socket = None;
                if is_measuring {
                    self.measured.errors += 1;
                    self.measured.error.get_or_insert_with(|| format!("{error:#}"));
                }
                sleep(ERROR_PAUSE).await;
            }
        }
    }

    /// The time to the first event, or to the end of an answer that is no stream.
    async fn exchange(&mut self) -> Result<Duration> {
        let request = self.shared.next_request(self.address);
        let mut socket = if let Some(socket) = self.socket.take() {
            socket
        } else {
            let socket = TcpStream::connect(self.address).await.context("connect")?;
            socket.set_nodelay(true)?;
            socket
        };
        let sent = Instant::now();
        socket.write_all(&request).await.context("write")?;
        self.buffer.clear();
        let head = loop {
            ensure!(socket.read_buf(&mut self.buffer).await.context("read")? > 0, "closed without an answer");
            if let Some(head) = Head::read(&self.buffer)? {
                break head;
            }
        };
        let status = head.first_line.get(1).map_or("", String::as_str).to_owned();
        let mut framing = head.framing;
        let mut events = Events::default();
        let mut first = None;
        let mut body_start = Vec::new();
        self.buffer.drain(..head.length);
        loop {
            let before = events.count;
            let ended = framing.feed(&self.buffer, |bytes| {
                events.feed(bytes);
                if body_start.len() < 200 {
                    body_start.extend_from_slice(&bytes[..bytes.len().min(200)]);
                }
            })?;
            if events.count > before {
                first.get_or_insert_with(|| sent.elapsed());
                if self.shared.is_measuring.load(Ordering::Relaxed) {
                    self.shared.chunks.fetch_add(events.count - before, Ordering::Relaxed);
                }
            }
            if ended {
                break;
            }
            self.buffer.clear();
            if socket.read_buf(&mut self.buffer).await.context("read")? == 0 {
                ensure!(framing == Framing::None, "the answer broke off");
                break;
            }
        }
        if status != "200" {
            bail!("status {status}: {}", String::from_utf8_lossy(&body_start));
        }
        if self.shared.load.stream {
            ensure!(events.count >= self.shared.load.tokens as u64, "only {} events", events.count);
        }
        if !head.closes && framing != Framing::None {
            self.socket = Some(socket);
        }
        Ok(first.unwrap_or_else(|| sent.elapsed()))
    }
}

fn timed_out() -> Result<Duration> {
    bail!("no whole answer within {} s", REQUEST_TIMEOUT.as_secs())
}

impl Shared {
    fn new(load: &Load) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            load: load.clone(),
            next: AtomicU64::new(now.as_micros() as u64),
            is_measuring: AtomicBool::new(false),
            chunks: AtomicU64::new(0),
            answers: AtomicU64::new(0),
        }
    }

    /// A request with a prompt that no other has.
    fn next_request(&self, address: SocketAddr) -> Vec<u8> {
        let Load { stream, tokens, prompt, shared, .. } = self.load;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let own = format!("#{number:020} ");
        let text = words(number % GROUPS, shared) + &own + &words(number, prompt.saturating_sub(shared + own.len()));
        let messages = format!(r#"[{{"role":"user","content":"{text}"}}]"#);
        let body = format!(r#"{{"model":"{MODEL}","messages":{messages},"max_tokens":{tokens},"stream":{stream}}}"#);
        let length = body.len();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
             authorization: Bearer sk-bench\r\ncontent-length: {length}\r\n\r\n"
        );
        (head + &body).into_bytes()
    }
}

/// Counts the events of a stream, however it is cut: each ends with an empty line.
#[derive(Default)]
struct Events {
    count: u64,
    ends_line: bool,
}

impl Events {
    fn feed(&mut self, bytes: &[u8]) {
        for byte in bytes {
            match byte {
                b'\n' if self.ends_line => {
                    self.count += 1;
                    self.ends_line = false;
                }
                b'\n' => self.ends_line = true,
                b'\r' => {}
                _ => self.ends_line = false,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::engine::Engine;
    use super::*;
    use tokio::net::TcpListener;

    #[test]
    fn events_are_counted_however_they_are_cut() {
        let stream = b"data: a\n\ndata: b\r\n\r\ndata: [DONE]\n\n";
        for cut in 0..stream.len() {
            let mut events = Events::default();
            events.feed(&stream[..cut]);
            events.feed(&stream[cut..]);
            assert_eq!(events.count, 3, "{cut}");
        }
    }

    #[test]
    fn prompts_of_a_group_begin_alike_and_all_differ() {
        assert_eq!(words(3, 64), words(3, 64));
        assert_ne!(words(3, 64), words(4, 64));
        assert_eq!(words(3, 64).len(), 64);
    }

    #[tokio::test]
    async fn every_answer_of_an_engine_is_complete() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let engine = Arc::new(Engine::new(Arc::default(), None).await.unwrap());
        tokio::spawn(engine.serve(listener));
        for stream in [true, false] {
            let load = Load {
                addresses: vec![address],
                clients: 2,
                stream,
                tokens: 5,
                prompt: 200,
                shared: 100,
                warmup: Duration::from_millis(1),
                until: Until::Answered(20),
            };
            let measured = run(&load, None).await;
            assert!(measured.requests >= 20 && measured.errors == 0, "{measured:?}");
            assert_eq!(measured.first.len() as u64, measured.requests);
            assert_eq!(measured.chunks > 0, stream);
            assert!(measured.first_us(0.5) <= measured.first_us(0.99));
        }
    }
}
