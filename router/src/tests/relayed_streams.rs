//! Relayed streams that break off: which are continued on another server, and what the client gets.

use super::failed;
use super::harness::{Harness, MODEL, card, prompt, relayed, settle};
use crate::state::Settings;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use worker::engine::{
    Continuation, Engine, Error, HttpRequest, ModelCard, Output, OutputStream, Readiness, RelayReport, RelayRest,
    Request, RequestAttributes, Work,
};
use worker::plane::{Discovery, Instance, Lease, Role, WorkerId};

const COMPLETIONS: &str = "/v1/completions";

/// What a server does with streams.
#[derive(Clone, Copy)]
struct Streams {
    /// They can be continued, and those of others are.
    continues: bool,
    /// Those that it continues break off too.
    always_breaks: bool,
}

/// A server whose streams break off after one part, except for those that it continues.
struct Server {
    streams: Streams,
    received: Mutex<Vec<Request>>,
}

impl Engine for Server {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        let Work::Relay(http) = &request.work else { unreachable!("it is relayed") };
        let is_continued = http.continues.is_some();
        let part = if is_continued { "b" } else { "a" };
        let mut items = vec![Ok(Output::Head(Box::default())), Ok(Output::Body(Bytes::from_static(part.as_bytes())))];
        if is_continued && !self.streams.always_breaks {
            let report = RelayReport { completion_tokens: Some(9), ..RelayReport::default() };
            items.push(Ok(Output::End(report)));
        } else {
            if self.streams.continues {
                let continues = Some(Continuation(Bytes::new()));
                let http = HttpRequest { continues, body: Bytes::new(), ..HttpRequest::clone(http) };
                let tokens = [1, 2, 3, 7, 8].into();
                items.push(Ok(Output::Rest(Box::new(RelayRest { tokens, generated_tokens: 2, http }))));
            }
            items.push(Err(failed()));
        }
        self.received.lock().push(request);
        std::future::ready(Ok(stream::iter(items).boxed())).boxed()
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        vec![Arc::new(card(MODEL))]
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }

    fn refuses(&self, request: &Request) -> bool {
        matches!(&request.work, Work::Relay(http) if http.continues.is_some()) && !self.streams.continues
    }

    fn continues_streams(&self) -> bool {
        self.streams.continues
    }

    fn probe(&self) -> BoxFuture<'_, Result<(), Error>> {
        std::future::ready(Ok(())).boxed()
    }
}

async fn join(harness: &Harness, id: u64, streams: Streams) -> (Arc<Server>, Lease) {
    let epoch = harness.relayed_worker(id).await.log.epoch();
    let model = Arc::new(ModelCard { is_relayed: true, ..card(MODEL) });
    let instance = Instance { id: WorkerId(id), epoch, role: Role::Both, model, stores: Vec::new(), kv_cache: None };
    let server = Arc::new(Server { streams, received: Mutex::default() });
    let lease = harness.discovery.register(instance, server.clone()).await.unwrap();
    settle().await;
    (server, lease)
}

/// What the client gets of a stream: the kinds of its outputs and its text, and how it ends.
async fn answer(harness: &Harness, request: Request) -> (String, Result<RelayReport, Error>) {
    let mut stream = harness.ask(request).await.unwrap();
    let mut got = String::new();
    loop {
        match stream.next().await.expect("the stream has an end") {
            Ok(Output::Head(_)) => got.push_str("head "),
            Ok(Output::Body(part)) => got.push_str(std::str::from_utf8(&part).unwrap()),
            Ok(Output::End(report)) => return (got, Ok(report)),
            Err(error) => return (got, Err(error)),
            Ok(other) => panic!("{other:?}"),
        }
    }
}

fn asked() -> Request {
    let attributes = RequestAttributes {
        deadline: Some(tokio::time::Instant::now() + Duration::from_mins(1)),
        has_estimated_tokens: true,
        ..RequestAttributes::default()
    };
    Request { attributes, explain: true, ..relayed(COMPLETIONS, prompt(1, 100)) }
}

const CONTINUES: Streams = Streams { continues: true, always_breaks: false };

#[tokio::test(start_paused = true)]
async fn a_stream_is_continued_with_the_request_that_its_engine_names() {
    let harness = Harness::new(Settings::default());
    let (one, _lease) = join(&harness, 1, CONTINUES).await;
    let (other, _other_lease) = join(&harness, 2, CONTINUES).await;
    let report = RelayReport { completion_tokens: Some(9), ..RelayReport::default() };
    assert_eq!(answer(&harness, asked()).await, ("head ab".to_owned(), Ok(report)));
    let received: Vec<Request> = [&one, &other].iter().flat_map(|server| server.received.lock().clone()).collect();
    let is_rest = |request: &&Request| matches!(&request.work, Work::Relay(http) if http.continues.is_some());
    let rest = received.iter().find(is_rest).unwrap();
    assert_eq!((received.len(), &rest.tokens[..], rest.generated_tokens), (2, &[1, 2, 3, 7, 8][..], 2));
    assert!(rest.attributes.deadline.is_none() && !rest.attributes.has_estimated_tokens && !rest.explain);
    assert_eq!(harness.metric("blockyard_router_stream_moves_total"), 1);
    assert_eq!([harness.load(1), harness.load(2)], [(0, 0, 0); 2]);
}

#[tokio::test(start_paused = true)]
async fn the_body_of_a_request_is_not_kept_for_as_long_as_its_stream() {
    let harness = Harness::new(Settings::default());
    let (server, _lease) = join(&harness, 1, CONTINUES).await;
    let body = Bytes::from(b"{}".repeat(100));
    let mut request = asked();
    let Work::Relay(http) = &mut request.work else { unreachable!("it is relayed") };
    Arc::make_mut(http).body = body.clone();
    let mut stream = harness.ask(request).await.unwrap();
    assert!(matches!(stream.next().await, Some(Ok(Output::Head(_)))));
    let received: Vec<Request> = std::mem::take(&mut *server.received.lock());
    assert!(matches!(&received[0].work, Work::Relay(http) if http.body == body), "the server has got it");
    drop(received);
    assert!(body.is_unique());
    drop(stream);
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_breaks_off_on_every_server_ends_with_the_error() {
    let harness = Harness::new(Settings::default());
    let mut servers = Vec::new();
    for id in 1..=5 {
        servers.push(join(&harness, id, Streams { always_breaks: true, ..CONTINUES }).await);
    }
    assert_eq!(answer(&harness, asked()).await, ("head abb".to_owned(), Err(failed())));
    let sent: usize = servers.iter().map(|(server, _)| server.received.lock().len()).sum();
    assert_eq!(sent, 3, "moved twice");
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_no_other_server_continues_ends_with_its_error() {
    let without = Streams { continues: false, ..CONTINUES };
    for streams in [[CONTINUES, without], [without, CONTINUES], [without, without]] {
        let harness = Harness::new(Settings::default());
        let (one, _lease) = join(&harness, 1, streams[0]).await;
        let (other, _other_lease) = join(&harness, 2, streams[1]).await;
        assert_eq!(answer(&harness, asked()).await, ("head a".to_owned(), Err(failed())));
        assert_eq!(one.received.lock().len() + other.received.lock().len(), 1);
    }
}
