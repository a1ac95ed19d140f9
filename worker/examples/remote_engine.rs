//! What a request costs that crosses to a worker in another process: CPU time per token on either side, and the time
//! that it adds to the first token, each beside its goal.
//!
//! `make bench-remote`, or `cargo run --release -p worker --example remote_engine [-- --json]`
//!
//! Frontend and worker are two threads with a runtime each, connected by loopback TCP. The engine emits a token to each
//! of 32 streams every 10 ms, as a batch does. The same streams are read without the connection, on one thread; what
//! the worker's side takes more than that is its cost. CPU times are those of the threads (schedstat), so the kernel's
//! part of sending and receiving is included.

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use std::convert::Infallible;
use std::error::Error as StdError;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use worker::engine::{
    Engine, Error, FinishReason, ModelCard, Output, OutputStream, PromptReport, Readiness, Request, Tokens,
};
use worker::handoff::Peers;
use worker::plane::local::LocalDiscovery;
use worker::plane::nats::Address;
use worker::plane::{Instance, Role, WorkerId};
use worker::remote::{RemoteEngine, RequestServer};

type Result<T, E = Box<dyn StdError>> = std::result::Result<T, E>;

const STREAMS: usize = 32;
const TOKENS: u32 = 500;
const STEP: Duration = Duration::from_millis(10);
const FIRST_TOKENS: usize = 2000;

/// Goals in microseconds: CPU time per token on each side, and the median that is added to the first token.
const GOAL_TOKEN_US: f64 = 5.0;
const GOAL_FIRST_TOKEN_US: f64 = 300.0;

/// Emits one token per step to each stream; a request for one token gets it at once.
struct Steps(watch::Receiver<u32>);

impl Engine for Steps {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        let wanted = request.stop.max_tokens.unwrap_or(1);
        let output = move |nth: u32| {
            let finish = (nth + 1 == wanted).then_some(FinishReason::Length);
            let prompt = (nth == 0).then(PromptReport::default);
            Ok(Output::Tokens(Tokens { ids: vec![nth], finish, prompt, ..Tokens::default() }))
        };
        let steps = WatchStream::from_changes(self.0.clone());
        let stream = if wanted == 1 {
            futures::stream::iter([output(0)]).boxed()
        } else {
            steps.take(wanted as usize).enumerate().map(move |(nth, _)| output(nth as u32)).boxed()
        };
        async { Ok(stream) }.boxed()
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        vec![model()]
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

fn model() -> Arc<ModelCard> {
    Arc::new(ModelCard { vocabulary: 1000, ..ModelCard::new("steps", 100_000, 16) })
}

fn instance() -> Instance {
    let (id, epoch, stores) = (WorkerId(1), kvbm::Epoch(1), Vec::new());
    Instance { id, epoch, role: Role::Both, model: model(), stores, kv_cache: None }
}

/// CPU time of this thread.
fn cpu() -> Result<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(Duration::from_nanos(text.split(' ').next().ok_or("no figure")?.parse()?))
}

/// The CPU time of the thread that runs a runtime.
fn cpu_of(runtime: &tokio::runtime::Handle) -> Result<Duration> {
    let (sender, receiver) = mpsc::channel();
    runtime.spawn(async move { sender.send(cpu().map_err(|error| error.to_string())) });
    Ok(receiver.recv()??)
}

fn runtime() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// The steps of the engine, on this runtime.
fn steps() -> watch::Receiver<u32> {
    let (sender, receiver) = watch::channel(0);
    tokio::spawn(async move {
        let mut steps = tokio::time::interval(STEP);
        while !sender.is_closed() {
            steps.tick().await;
            sender.send_modify(|step| *step += 1);
        }
    });
    receiver
}

/// A worker's process, on a thread of its own.
fn worker() -> Result<(tokio::runtime::Handle, Address)> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let runtime = runtime().expect("a runtime starts");
        let handle = runtime.handle().clone();
        runtime.block_on(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
            let address = Address(format!("http://{}", listener.local_addr().expect("it has an address")));
            let server = RequestServer::new(None, Peers::default());
            let discovery = server.discovery(Arc::new(LocalDiscovery::default()));
            let _lease = discovery.register(instance(), Arc::new(Steps(steps()))).await.expect("it registers");
            sender.send((handle, address)).expect("the program waits");
            while let Ok((socket, _)) = listener.accept().await {
                socket.set_nodelay(true).expect("a socket has the option");
                let server = Arc::clone(&server);
                let service = service_fn(move |request: http::Request<Incoming>| {
                    let server = Arc::clone(&server);
                    async move {
                        let (head, body) = request.into_parts();
                        Ok::<_, Infallible>(server.respond("1", &head.headers, body.boxed()).await)
                    }
                });
                let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                tokio::spawn(builder.serve_connection(TokioIo::new(socket), service));
            }
        });
    });
    Ok(receiver.recv()?)
}

/// Reads all streams to their ends.
async fn read_all(engine: &dyn Engine) -> Result<()> {
    let read = |_| async {
        let mut stream = engine.generate(Request::greedy("r", "steps", &[1; 1000], TOKENS)).await?;
        while let Some(output) = stream.next().await {
            output?;
        }
        Ok::<_, Error>(())
    };
    futures::future::try_join_all((0..STREAMS).map(read)).await?;
    Ok(())
}

/// The median time to first token, one request at a time.
async fn first_token(engine: &dyn Engine) -> Result<Duration> {
    let mut times = Vec::new();
    for _ in 0..FIRST_TOKENS {
        let began = Instant::now();
        let mut stream = engine.generate(Request::greedy("r", "steps", &[1; 1000], 1)).await?;
        stream.next().await.ok_or("the stream is empty")??;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

fn main() -> Result<()> {
    let tokens = f64::from(TOKENS) * STREAMS as f64;
    let micros = |from: Duration, to: Duration| to.saturating_sub(from).as_secs_f64() * 1e6 / tokens;
    let (here, (there, address)) = (runtime()?, worker()?);
    let (direct, direct_first) = here.block_on(async {
        let engine = Steps(steps());
        read_all(&engine).await?;
        let before = cpu()?;
        read_all(&engine).await?;
        Ok::<_, Box<dyn StdError>>((micros(before, cpu()?), first_token(&engine).await?))
    })?;
    let (frontend, remote_worker, remote_first) = here.block_on(async {
        let engine = RemoteEngine::new(&instance(), &address, None);
        read_all(&engine).await?;
        let before = (cpu()?, cpu_of(&there)?);
        read_all(&engine).await?;
        let after = (cpu()?, cpu_of(&there)?);
        let first = first_token(&engine).await?;
        Ok::<_, Box<dyn StdError>>((micros(before.0, after.0), micros(before.1, after.1), first))
    })?;
    let added = (remote_first.saturating_sub(direct_first)).as_secs_f64() * 1e6;
    let worker = remote_worker - direct;
    if std::env::args().any(|argument| argument == "--json") {
        println!(
            "{}",
            json!({ "streams": STREAMS, "frontend_us_per_token": frontend, "worker_us_per_token": worker,
                "engine_us_per_token": direct, "added_first_token_us": added,
                "goal_us_per_token": GOAL_TOKEN_US, "goal_added_first_token_us": GOAL_FIRST_TOKEN_US })
        );
        return Ok(());
    }
    let step = STEP.as_millis();
    println!("{:50} {:>10} {:>9}  met", "", "measured", "goal");
    row(&format!("frontend, CPU per token, {STREAMS} streams, every {step} ms"), frontend, GOAL_TOKEN_US);
    row("worker, the same, without its engine", worker, GOAL_TOKEN_US);
    row(&format!("added to the first token, median of {FIRST_TOKENS}"), added, GOAL_FIRST_TOKEN_US);
    println!("The engine took {direct:.2} µs per token. For the first token the prompt has 1,000 tokens.");
    Ok(())
}

/// A line of the table: a value in microseconds, and the goal that it must not exceed.
fn row(what: &str, value: f64, goal: f64) {
    let (goal, met) = (format!("≤ {goal} µs"), if value <= goal { "yes" } else { "NO" });
    println!("{what:50} {value:>7.2} µs {goal:>9}  {met}");
}
