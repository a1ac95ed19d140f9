//! What a streamed token of the native engine costs besides computing it: CPU time of all threads of the server but the
//! compute threads, divided by the tokens.
//!
//! The tokens of a step arrive at the client together. The reference beside it does only the part that no server can
//! avoid: one thread writes as many bytes to as many sockets at the same rate.

use anyhow::{Context, Result, ensure};
use bench::figure::{Figure, Goal};
use bench::options::Options;
use bench::report::circumstances;
use bench::server::{Server, Settings};
use bench::streams::Streams;
use bench::suite;
use bench::threads::Threads;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const ABOUT: &str = "CPU time per streamed token of the native engine, without computing it.";

/// Numbers of streams that are open at the same time, and the goal of each in µs (issue 14).
const STREAMS: [(usize, Goal); 2] = [(1, Goal::None), (32, Goal::AtMost(12.0))];

/// Time of one measurement.
const MEASURED: Duration = Duration::from_secs(4);

/// Time after every stream has begun: the prompts of the last ones are computed, and caches are warm.
const WARM_UP: Duration = Duration::from_secs(1);

/// Tokens of an answer: more than any model computes while it is measured.
const MAX_TOKENS: u32 = 15_000;

/// The threads that compute. Their time belongs to the model.
const COMPUTE: &str = "compute-";

/// Bytes of one event of a chat completion with its chunk header: what `small` sends for most tokens.
const EVENT_BYTES: usize = 240;

/// What one measurement saw.
struct Sample {
    /// CPU time per token in µs.
    cost: f64,
    /// The same for one write of the reference.
    reference: f64,
}

fn main() -> Result<()> {
    let options = Options::from_args(ABOUT)?;
    let data = TempDir::with_prefix("blockyard-bench-")?;
    // Without tiers below G1, so that no thread offloads blocks meanwhile.
    let config = "workers = \"both:1\"\n[tiers]\ng2 = \"off\"\ng3 = \"off\"\n".to_owned();
    let settings = Settings { binary: &options.binary, model: &options.model, data: data.path(), config };
    let server = Server::start(&settings)?;
    let model = server.client.model()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut samples = STREAMS.map(|_| Vec::new());
    for _ in 0..options.repetitions {
        for ((count, _), samples) in STREAMS.iter().zip(&mut samples) {
            let sample = runtime.block_on(measure(&server, &model, *count))?;
            eprintln!("{count} streams: {:.1} µs per token, {:.1} µs per write", sample.cost, sample.reference);
            samples.push(sample);
        }
    }
    server.stop()?;
    let mut figures = Vec::new();
    for ((count, goal), samples) in STREAMS.iter().zip(&samples) {
        let streams = if *count == 1 { "1 stream".to_owned() } else { format!("{count} streams") };
        let median = |value: fn(&Sample) -> f64| median(samples.iter().map(value).collect());
        let cost = median(|sample| sample.cost);
        let ratio = median(|sample| sample.cost / sample.reference);
        figures.push(Figure::of(format!("CPU per token, {streams}"), cost, "µs", *goal));
        let reference = median(|sample| sample.reference);
        figures.push(Figure::of(format!("CPU per write of the reference, {streams}"), reference, "µs", Goal::None));
        figures.push(Figure::ratio(format!("token ÷ write, {streams}"), ratio, Goal::None));
    }
    suite::print(&circumstances(), &figures, &Value::Null, options.json);
    Ok(())
}

/// Measures the server while `count` streams decode, then the reference at the same rate.
async fn measure(server: &Server, model: &str, count: usize) -> Result<Sample> {
    let mut streams = Streams::open(server.address, model, count, MAX_TOKENS).await?;
    tokio::time::sleep(WARM_UP).await;
    let tokens =
        || -> Result<f64> { Ok(server.client.metrics()?.sum("blockyard_frontend_generated_tokens_total", &[])) };
    let (tokens_before, threads_before, started) = (tokens()?, Threads::of(server.id())?, Instant::now());
    tokio::time::sleep(MEASURED).await;
    let (threads_after, elapsed) = (Threads::of(server.id())?, started.elapsed());
    let generated = tokens()? - tokens_before;
    streams.check()?;
    drop(streams);
    ensure!(generated > 0.0, "no token was generated:\n{}", server.log_tail());
    let cpu = threads_after.since(&threads_before, |name| !name.starts_with(COMPUTE));
    let step = elapsed.mul_f64(count as f64 / generated);
    Ok(Sample { cost: micros(cpu) / generated, reference: reference(count, step).await? })
}

/// CPU time in µs of one write, when one thread writes an event to each of `count` sockets in every step.
async fn reference(count: usize, step: Duration) -> Result<f64> {
    let writer = Writer::start(count, step)?;
    let streams = Streams::open(writer.address, "", count, MAX_TOKENS).await?;
    tokio::time::sleep(WARM_UP).await;
    let threads = || Threads::of(std::process::id());
    let (written_before, threads_before) = (writer.written.load(Ordering::Relaxed), threads()?);
    tokio::time::sleep(MEASURED).await;
    let cpu = threads()?.since(&threads_before, |name| name == Writer::NAME);
    let written = writer.written.load(Ordering::Relaxed) - written_before;
    writer.stop()?;
    drop(streams);
    ensure!(written > 0, "the reference wrote nothing");
    Ok(micros(cpu) / written as f64)
}

/// A thread that writes an event to each of its connections in every step.
struct Writer {
    address: SocketAddr,
    written: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl Writer {
    const NAME: &str = "reference";

    fn start(count: usize, step: Duration) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let (written, ends) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (counter, ended) = (Arc::clone(&written), Arc::clone(&ends));
        let run = move || write(&listener, count, step, &counter, &ended);
        let thread = thread::Builder::new().name(Self::NAME.to_owned()).spawn(run)?;
        Ok(Self { address, written, ends, thread })
    }

    fn stop(self) -> Result<()> {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().ok().context("the reference panicked")?
    }
}

fn write(listener: &TcpListener, count: usize, step: Duration, written: &AtomicU64, ends: &AtomicBool) -> Result<()> {
    let event = format!("{:x}\r\ndata: {}\n\n\r\n", EVENT_BYTES - 6, "x".repeat(EVENT_BYTES - 14));
    let mut sockets = Vec::with_capacity(count);
    for _ in 0..count {
        let (mut socket, _) = listener.accept()?;
        socket.set_nodelay(true)?;
        let mut request = [0; 4096];
        ensure!(socket.read(&mut request)? > 0, "a connection without a request");
        socket.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
        sockets.push(socket);
    }
    let mut due = Instant::now();
    while !ends.load(Ordering::Relaxed) {
        for socket in &mut sockets {
            socket.write_all(event.as_bytes())?;
        }
        written.fetch_add(count as u64, Ordering::Relaxed);
        due += step;
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The median; of an even number of values, the lower of the two middle ones.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_reference_writes_to_every_stream() {
        let writer = Writer::start(3, Duration::from_millis(1)).expect("a thread");
        let streams = Streams::open(writer.address, "", 3, 1).await.expect("three streams");
        assert!(writer.written.load(Ordering::Relaxed) >= 3);
        writer.stop().expect("all streams are read");
        drop(streams);
    }
}
