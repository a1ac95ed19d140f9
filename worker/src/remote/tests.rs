//! Both sides over real sockets.

mod frames;
mod frozen;
pub(crate) mod logs;
mod peers;
mod prefetch;

use super::*;
use crate::engine::contract::{self, collect, request};
use crate::engine::{Engine, Error, Output, OutputStream, Readiness, Request, Tokens};
use crate::handoff::Peers;
use crate::llama::tests::harness::{Harness, Shape};
use crate::plane::local::LocalDiscovery;
use crate::plane::nats::Address;
use crate::plane::{Instance, Lease};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use http::{HeaderMap, HeaderValue};
use http_body_util::{BodyExt, Full};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// An engine of one model, whose streams this function makes.
struct Streams<F>(F);

impl<F: Fn() -> OutputStream + Send + Sync + 'static> Engine for Streams<F> {
    fn generate(&self, _request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        async { Ok((self.0)()) }.boxed()
    }

    fn models(&self) -> Vec<Arc<crate::engine::ModelCard>> {
        vec![crate::plane::contract::instance(1, 1).model]
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

/// Counts of an engine that generates one token each time it is polled, without end.
#[derive(Clone, Default)]
struct Endless {
    generated: Arc<AtomicUsize>,
    running: Arc<AtomicUsize>,
}

/// Counts a running stream until dropped.
struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Endless {
    fn engine(&self) -> Arc<dyn Engine> {
        let Self { generated, running } = self.clone();
        Arc::new(Streams(move || {
            running.fetch_add(1, Ordering::SeqCst);
            let (running, generated) = (Running(Arc::clone(&running)), Arc::clone(&generated));
            let tokens = stream::repeat_with(move || {
                let _ = &running;
                let id = generated.fetch_add(1, Ordering::SeqCst) as u32;
                Ok(Output::Tokens(Tokens { ids: vec![id], ..Tokens::default() }))
            });
            tokens.boxed()
        }))
    }
}

/// A process with one registered worker, and an engine for it in another process.
struct Pair {
    remote: RemoteEngine,
    address: Address,
    instance: Instance,
    lease: Lease,
    server: Arc<RequestServer>,
    accepting: JoinHandle<()>,
}

impl Pair {
    async fn of(engine: Arc<dyn Engine>, ours: Option<Secret>, theirs: Option<Secret>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address(format!("http://{}", listener.local_addr().unwrap()));
        let server = RequestServer::new(ours.map(|ours| ours.required_at(&address.0)), Peers::default());
        let model = engine.models().swap_remove(0);
        let instance = Instance { model, ..crate::plane::contract::instance(7, 1) };
        let lease =
            server.discovery(Arc::new(LocalDiscovery::default())).register(instance.clone(), engine).await.unwrap();
        let accepting = tokio::spawn(accept(listener, Arc::clone(&server)));
        Self { remote: RemoteEngine::new(&instance, &address, theirs), address, instance, lease, server, accepting }
    }

    async fn open(engine: Arc<dyn Engine>) -> Self {
        Self::of(engine, None, None).await
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Answers the requests for workers and logs over HTTP/2.
async fn accept(listener: TcpListener, server: Arc<RequestServer>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let (socket, _) = listener.accept().await.unwrap();
        let server = Arc::clone(&server);
        connections.spawn(async move {
            let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
                let server = Arc::clone(&server);
                async move {
                    let (head, body) = request.into_parts();
                    if let Some(log) = head.uri.path().strip_prefix("/logs/") {
                        return Ok(server.respond_log(log, &head.headers).await);
                    }
                    let mut path = head.uri.path().split('/').skip(2);
                    let worker = path.next().unwrap_or_default().to_owned();
                    if path.next() == Some("prefetch") {
                        return Ok(server.respond_prefetch(&worker, &head.headers, body).await);
                    }
                    Ok::<_, Infallible>(server.respond(&worker, &head.headers, body).await)
                }
            });
            let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            let _ = builder.serve_connection(TokioIo::new(socket), service).await;
        });
    }
}

fn secret(text: &str) -> Secret {
    Secret::new(text).unwrap()
}

async fn failure(engine: &RemoteEngine) -> String {
    match engine.generate(request(engine, &[1], 1)).await {
        Err(Error::Unavailable(text)) => text,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it was accepted"),
    }
}

/// Waits until a condition holds; panics when it does not.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_mins(1);
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "it never happened: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_remote_engine_keeps_the_contract() {
    let harness = Harness::new(Shape::default());
    let pair = Pair::open(Arc::clone(&harness.engine) as Arc<dyn Engine>).await;
    let remote = RemoteEngine::new(&pair.instance, &pair.address, None);
    contract::check(Arc::new(remote)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_stream_stops_the_engine() {
    let endless = Endless::default();
    let pair = Pair::open(endless.engine()).await;
    let mut outputs = pair.remote.generate(request(&pair.remote, &[1], 1)).await.unwrap();
    assert!(outputs.next().await.unwrap().is_ok());
    drop(outputs);
    until("the engine stops", || endless.running.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_is_not_read_delays_no_other() {
    let endless = Endless::default();
    let pair = Pair::open(endless.engine()).await;
    let mut unread = Vec::new();
    // More than fit on one connection.
    for _ in 0..120 {
        unread.push(pair.remote.generate(request(&pair.remote, &[1], 1)).await.unwrap());
    }
    let (generated, before) = (&endless.generated, AtomicUsize::new(usize::MAX));
    // All windows are full when nothing is generated for a while.
    until("generation stops", || {
        std::thread::sleep(Duration::from_millis(200));
        before.swap(generated.load(Ordering::SeqCst), Ordering::SeqCst) == generated.load(Ordering::SeqCst)
    })
    .await;
    let read = pair.remote.generate(request(&pair.remote, &[1], 1)).await.unwrap();
    assert_eq!(read.take(20_000).filter(|output| futures::future::ready(output.is_ok())).count().await, 20_000);
    until("the others are kept", || endless.running.load(Ordering::SeqCst) == 120).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn little_is_generated_for_a_stream_that_is_not_read() {
    let endless = Endless::default();
    let pair = Pair::open(endless.engine()).await;
    let _unread = pair.remote.generate(request(&pair.remote, &[1], 1)).await.unwrap();
    let (generated, before) = (&endless.generated, AtomicUsize::new(usize::MAX));
    until("generation stops", || {
        std::thread::sleep(Duration::from_millis(200));
        before.swap(generated.load(Ordering::SeqCst), Ordering::SeqCst) == generated.load(Ordering::SeqCst)
    })
    .await;
    let generated = generated.load(Ordering::SeqCst);
    assert!(generated < 2000, "{generated} tokens");
}

#[tokio::test(flavor = "multi_thread")]
async fn short_outputs_that_are_not_read_do_not_end_the_connection() {
    let generated = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&generated);
    // One token at a time, as an engine generates them, so each is a frame of its own.
    let engine = Streams(move || {
        let counted = Arc::clone(&counted);
        let tokens = stream::repeat_with(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(Output::Tokens(Tokens { ids: vec![1], ..Tokens::default() }))
        });
        tokens
            .then(async |output| {
                tokio::task::yield_now().await;
                output
            })
            .boxed()
    });
    let pair = Pair::open(Arc::new(engine)).await;
    let mut unread = Vec::new();
    for _ in 0..8 {
        unread.push(pair.remote.generate(request(&pair.remote, &[1], 1)).await.unwrap());
    }
    let before = AtomicUsize::new(usize::MAX);
    until("all windows are full", || {
        std::thread::sleep(Duration::from_millis(200));
        before.swap(generated.load(Ordering::SeqCst), Ordering::SeqCst) == generated.load(Ordering::SeqCst)
    })
    .await;
    for outputs in unread {
        let read = outputs.take(20_000).filter(|output| futures::future::ready(output.is_ok()));
        assert_eq!(read.count().await, 20_000);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_ends_fails_its_streams_and_is_found_again() {
    let endless = Endless::default();
    let mut pair = Pair::open(endless.engine()).await;
    let mut outputs = pair.remote.generate(request(&pair.remote, &[1], 1)).await.unwrap();
    assert!(outputs.next().await.unwrap().is_ok());
    pair.accepting.abort();
    let mut last = None;
    while let Some(output) = outputs.next().await {
        last = Some(output);
    }
    assert!(matches!(last, Some(Err(Error::Failed(_)))), "{last:?}");
    until("the port is free", || std::net::TcpListener::bind(&pair.address.0["http://".len()..]).is_ok()).await;
    assert!(failure(&pair.remote).await.contains("w7"));
    let server = RequestServer::new(None, Peers::default());
    let listener = TcpListener::bind(&pair.address.0["http://".len()..]).await.unwrap();
    let discovery = server.discovery(Arc::new(LocalDiscovery::default()));
    pair.lease = discovery.register(pair.instance.clone(), endless.engine()).await.unwrap();
    pair.accepting = tokio::spawn(accept(listener, server));
    let mut outputs = pair.remote.generate(request(&pair.remote, &[1], 1)).await.unwrap();
    assert!(outputs.next().await.unwrap().is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_without_the_secret_are_rejected() {
    let (ours, other) = ("0123456789abcdef", "another-secret-of-16");
    for (theirs, accepted) in [(Some(secret(ours)), true), (Some(secret(other)), false), (None, false)] {
        let endless = Endless::default();
        let pair = Pair::of(endless.engine(), Some(secret(ours)), theirs).await;
        if accepted {
            assert!(pair.remote.generate(request(&pair.remote, &[1], 1)).await.is_ok());
        } else {
            assert!(failure(&pair.remote).await.ends_with(&format!("status 401: {NO_SECRET}")));
            assert_eq!(endless.generated.load(Ordering::SeqCst), 0);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_left_takes_no_requests() {
    let mut pair = Pair::open(Endless::default().engine()).await;
    let mut running = pair.remote.generate(request(&pair.remote, &[1], 1)).await.unwrap();
    pair.lease = Lease::new(|| ());
    assert!(failure(&pair.remote).await.contains("status 404"));
    assert!(running.next().await.unwrap().is_ok(), "running requests go on");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_the_process_ends_are_not_computed_further() {
    let endless = Endless::default();
    let pair = Pair::open(endless.engine()).await;
    let mut outputs = pair.remote.generate(request(&pair.remote, &[1], 1)).await.unwrap();
    assert!(outputs.next().await.unwrap().is_ok());
    pair.server.end_requests();
    let mut last = None;
    while let Some(output) = outputs.next().await {
        last = Some(output);
    }
    assert!(matches!(&last, Some(Err(Error::Failed(text))) if text.contains("shutdown_timeout")), "{last:?}");
    until("the engine stops", || endless.running.load(Ordering::SeqCst) == 0).await;
    let later = pair.remote.generate(request(&pair.remote, &[1], 1)).await;
    assert!(matches!(later.err(), Some(Error::Failed(_))), "a late request is not computed");
}

/// The response of each endpoint to a request with these headers.
async fn responses(server: &RequestServer, headers: &HeaderMap) -> [(&'static str, http::Response<ResponseBody>); 5] {
    let empty = || Full::new(Bytes::new());
    [
        ("generate", server.respond("7", headers, empty()).await),
        ("prefetch", server.respond_prefetch("7", headers, empty()).await),
        ("blocks", server.respond_blocks("7", headers, empty()).await),
        ("handoffs", server.respond_progress("7", headers)),
        ("logs", server.respond_log("worker/7/1/snapshot", headers).await),
    ]
}

fn with_protocol(number: &str) -> HeaderMap {
    HeaderMap::from_iter([(PROTOCOL_HEADER.parse().unwrap(), HeaderValue::from_str(number).unwrap())])
}

#[tokio::test]
async fn another_protocol_number_is_refused_by_its_number() {
    let server = RequestServer::new(None, Peers::default());
    let (former, next) = ((PROTOCOL - 1).to_string(), (PROTOCOL + 1).to_string());
    for protocol in ["0", &former, &next, "x"] {
        for (endpoint, response) in responses(&server, &with_protocol(protocol)).await {
            assert_eq!(response.status(), 400, "{endpoint}");
            let text = response.into_body().collect().await.unwrap().to_bytes();
            let expected = format!("protocol number {protocol}, this worker {PROTOCOL}; use the same version");
            assert!(String::from_utf8_lossy(&text).contains(&expected), "{endpoint}: {text:?}");
        }
    }
    for (endpoint, response) in responses(&server, &with_protocol(&PROTOCOL.to_string())).await {
        assert_eq!(response.status(), 404, "{endpoint}: no worker, no hand-over and no log is there");
    }
}

/// A process with another protocol number may authenticate in another way. It gets the reason, not a 401.
#[tokio::test]
async fn a_stated_protocol_number_is_checked_before_the_secret() {
    let server = RequestServer::new(Some(secret("0123456789abcdef").required_at("http://host:1")), Peers::default());
    let bearer = (http::header::AUTHORIZATION, HeaderValue::from_static("Bearer 0123456789abcdef"));
    let stated = |number: u8| with_protocol(&number.to_string());
    let cases =
        [(stated(PROTOCOL - 1), 400), (stated(PROTOCOL + 1), 400), (stated(PROTOCOL), 401), (HeaderMap::new(), 401)];
    for (mut headers, status) in cases {
        headers.extend([bearer.clone()]);
        for (endpoint, response) in responses(&server, &headers).await {
            assert_eq!(response.status(), status, "{endpoint}: {headers:?}");
        }
    }
}

#[test]
fn an_operator_sees_the_address_of_a_worker() {
    let address = |url: &str| {
        let instance = crate::plane::contract::instance(1, 1);
        RemoteEngine::new(&instance, &Address(url.to_owned()), None).address()
    };
    assert_eq!(address("http://10.0.0.1:8100").as_deref(), Some("http://10.0.0.1:8100"));
    for url in ["http://ann:secret@10.0.0.1:8100", "nowhere"] {
        assert_eq!(address(url), None, "{url}");
    }
}

#[tokio::test]
async fn a_wrong_address_is_an_error_of_the_request() {
    let user = "http://ann:hidden@127.0.0.1:1";
    for address in ["", "host", "ftp://host:1", "http://host", "https://host:1", "http://127.0.0.1:1", user] {
        let instance = crate::plane::contract::instance(7, 1);
        let remote = RemoteEngine::new(&instance, &Address(address.to_owned()), None);
        let text = failure(&remote).await;
        assert!(text.contains("worker w7") && !text.contains("hidden"), "{address}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_requests_name_the_engine_s_reason() {
    let harness = Harness::new(Shape::default());
    let pair = Pair::open(Arc::clone(&harness.engine) as Arc<dyn Engine>).await;
    let all = collect(pair.remote.generate(request(&pair.remote, &[1, 2, 3], 4)).await.unwrap()).await.unwrap();
    assert_eq!(all.ids.len(), 4);
    let empty = pair.remote.generate(request(&pair.remote, &[], 1)).await;
    assert!(matches!(empty.err(), Some(Error::Invalid { field: "prompt", .. })));
}
