//! A scripted engine for tests: an HTTP server on the loopback interface that answers as vLLM does, or fails as its
//! script says.
//!
//! Each request takes the next [`Script`], except those for a page, which engines serve beside their API, or for a path
//! whose answers are computed.
//! The engine records requests, and counts those that were cancelled: whose connection or stream ended before the
//! answer did.

mod greedy;
mod script;

pub use greedy::Greedy;
pub use script::Script;

use bytes::Bytes;
use futures::stream::{self, Stream};
use http::{HeaderMap, Method, Request, Response, Uri, Version};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use script::Step;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The engine. Dropping it closes its port; open connections go on.
#[derive(Debug)]
pub struct FakeEngine {
    address: SocketAddr,
    connections: Connections,
    /// Whether open connections end too.
    killed: watch::Sender<bool>,
    accepting: JoinHandle<()>,
}

/// Serves connections of one engine.
#[derive(Clone, Debug)]
pub struct Connections(Arc<Shared>);

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Its method.
    pub method: Method,
    /// Its path and query; with HTTP/2 its whole address.
    pub uri: Uri,
    /// Its version of HTTP.
    pub version: Version,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its whole body.
    pub body: Bytes,
    /// Number of the connection that it came on, from 0.
    pub connection: usize,
}

#[derive(Debug)]
struct Shared {
    scripts: Mutex<VecDeque<Script>>,
    /// The answers at these paths.
    pages: Mutex<HashMap<&'static str, Page>>,
    requests: Mutex<Vec<Recorded>>,
    connections: AtomicUsize,
    cancelled: watch::Sender<usize>,
}

/// How requests for a path are answered.
#[derive(Clone)]
enum Page {
    /// All alike.
    Fixed(Script),
    /// By what they ask.
    Computed(Arc<dyn Fn(&Recorded) -> Script + Send + Sync>),
}

/// Pages of every engine, which answer 404 unless another answer is set.
const PAGES: [&str; 5] = ["/kv_event_sources", "/metrics", "/openapi.json", "/server_info", "/version"];

/// Counts a request as cancelled if it is dropped before the answer is complete.
struct Running {
    shared: Arc<Shared>,
    complete: bool,
}

impl FakeEngine {
    /// Starts an engine for these requests. It answers later ones with [`Script::default`].
    pub async fn start(scripts: impl IntoIterator<Item = Script>) -> io::Result<Self> {
        Self::start_at((Ipv4Addr::LOCALHOST, 0).into(), scripts).await
    }

    /// The same at an address of its own, to stand for one of several servers of a name.
    pub async fn start_at(address: SocketAddr, scripts: impl IntoIterator<Item = Script>) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let connections = Connections::new(scripts);
        let accepted = connections.clone();
        let (killed, is_killed) = watch::channel(false);
        let accept = async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (served, killed) = (accepted.clone().serve(socket), end(is_killed.clone()));
                tokio::spawn(async move {
                    tokio::select! {
                        () = served => {}
                        () = killed => {}
                    }
                });
            }
        };
        Ok(Self { address, connections, killed, accepting: tokio::spawn(accept) })
    }

    /// Ends as a process that is killed: open connections end too. When this returns, nothing listens at its address.
    pub async fn kill(mut self) {
        self.killed.send_replace(true);
        self.accepting.abort();
        // The error says that it was aborted.
        let _ = (&mut self.accepting).await;
    }

    /// Its address: `http://127.0.0.1:PORT`.
    pub fn uri(&self) -> Uri {
        let uri = Uri::builder().scheme("http").authority(self.address.to_string()).path_and_query("/");
        uri.build().expect("a socket address is an authority")
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers all requests for this path alike.
    pub fn set_page(&self, path: &'static str, answer: Script) {
        lock(&self.connections.0.pages).insert(path, Page::Fixed(answer));
    }

    /// Answers each request for this path by what it asks.
    pub fn set_answers(&self, path: &'static str, answer: impl Fn(&Recorded) -> Script + Send + Sync + 'static) {
        lock(&self.connections.0.pages).insert(path, Page::Computed(Arc::new(answer)));
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<Recorded> {
        self.connections.requests()
    }

    /// Waits until this many requests were cancelled.
    pub async fn cancelled(&self, count: usize) {
        let mut cancelled = self.connections.0.cancelled.subscribe();
        // The sender lives as long as `self`.
        let _ = cancelled.wait_for(|cancelled| *cancelled >= count).await;
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Connections {
    /// Serves requests with these scripts.
    pub fn new(scripts: impl IntoIterator<Item = Script>) -> Self {
        Self(Arc::new(Shared {
            scripts: Mutex::new(scripts.into_iter().collect()),
            pages: Mutex::new(
                PAGES.map(|path| (path, Page::Fixed(Script::json(404, &serde_json::Value::Null)))).into(),
            ),
            requests: Mutex::default(),
            connections: AtomicUsize::new(0),
            cancelled: watch::Sender::new(0),
        }))
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<Recorded> {
        lock(&self.0.requests).clone()
    }

    /// Serves a connection, HTTP/1.1 or 2, until it ends.
    pub async fn serve(self, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let connection = self.0.connections.fetch_add(1, Ordering::Relaxed);
        let service = service_fn(|request| answer(self.0.clone(), connection, request));
        // A connection ends with an error where the script or the client breaks it off.
        let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(io), service).await;
    }
}

type AnswerBody = StreamBody<std::pin::Pin<Box<dyn Stream<Item = io::Result<Frame<Bytes>>> + Send>>>;

/// Answers one request. An error closes the connection without an answer.
async fn answer(
    shared: Arc<Shared>,
    connection: usize,
    request: Request<Incoming>,
) -> io::Result<Response<AnswerBody>> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let http::request::Parts { method, uri, version, headers, .. } = parts;
    let recorded = Recorded { method, uri, version, headers, body, connection };
    let page = lock(&shared.pages).get(recorded.uri.path()).cloned();
    let script = match page {
        Some(Page::Fixed(script)) => script,
        Some(Page::Computed(answer)) => answer(&recorded),
        None => lock(&shared.scripts).pop_front().unwrap_or_default(),
    };
    lock(&shared.requests).push(recorded);
    let mut running = Running { shared, complete: false };
    tokio::time::sleep(script.delay).await;
    if script.close {
        running.complete = true;
        return Err(io::ErrorKind::ConnectionReset.into());
    }
    let mut response = Response::new(());
    *response.status_mut() = script.status;
    *response.headers_mut() = script.headers;
    let body = stream::unfold((script.steps.into_iter(), running), async |(mut steps, mut running)| {
        loop {
            let frame = match steps.next() {
                Some(Step::Wait(time)) => {
                    tokio::time::sleep(time).await;
                    continue;
                }
                Some(Step::Hang) => std::future::pending().await,
                Some(Step::Send(bytes)) => Ok(Frame::data(bytes)),
                Some(Step::Break) => {
                    running.complete = true;
                    Err(io::ErrorKind::ConnectionReset.into())
                }
                None => {
                    running.complete = true;
                    return None;
                }
            };
            return Some((frame, (steps, running)));
        }
    });
    Ok(response.map(|()| StreamBody::new(Box::pin(body) as _)))
}

/// Waits until the engine is killed. Connections of one that is dropped go on.
async fn end(mut killed: watch::Receiver<bool>) {
    let was_dropped = killed.wait_for(|killed| *killed).await.is_err();
    if was_dropped {
        std::future::pending::<()>().await;
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Page")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.complete {
            self.shared.cancelled.send_modify(|cancelled| *cancelled += 1);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere in a test must not hide behind one here.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
