//! Servers of one model with different endpoints, and servers that choose the rank of a request themselves.

use super::harness::{Behaviour, FakeEngine, Harness, MODEL, card, prompt, relayed, settle};
use crate::state::Settings;
use futures::future::BoxFuture;
use kvbm::Domain;
use std::sync::Arc;
use std::time::Duration;
use worker::engine::{EndpointKind, Engine, Error, ModelCard, OutputStream, Readiness, Request, Work};
use worker::plane::{Discovery, Instance, Lease, Role, WorkerId};

/// A server with endpoints of this kind only, or of both; or a rank of the server `ranks_of`, which chooses the rank of
/// all requests but chats.
#[derive(Default)]
struct Server {
    only: Option<EndpointKind>,
    /// Its context in tokens; that of [`card`] if it is `None`.
    context: Option<usize>,
    ranks_of: Option<u64>,
    /// The server that it is an engine of.
    probed: Option<u64>,
    /// It refuses all requests of tenants.
    refuses_tenants: bool,
    inner: Option<Arc<FakeEngine>>,
}

impl Server {
    fn only(kind: EndpointKind) -> Self {
        Self { only: Some(kind), ..Self::default() }
    }

    fn inner(&self) -> &FakeEngine {
        self.inner.as_ref().expect("it has joined")
    }
}

impl Engine for Server {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        self.inner().generate(request)
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        self.inner().models()
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }

    fn only_endpoint_kind(&self) -> Option<EndpointKind> {
        self.only
    }

    fn refuses(&self, request: &Request) -> bool {
        self.refuses_tenants && request.domain != Domain::shared()
    }

    fn probed_server(&self) -> Option<u64> {
        self.probed
    }

    fn choosing_server(&self, request: &Request) -> Option<u64> {
        let Work::Relay(http) = &request.work else { return None };
        self.ranks_of.filter(|_| http.target.path() != CHAT)
    }
}

/// Adds a worker of such a server.
async fn join(harness: &Harness, id: u64, server: Server) -> (Arc<FakeEngine>, Lease) {
    let inner = harness.relayed_worker(id).await;
    let card = card(MODEL);
    let context = server.context.unwrap_or(card.context);
    let instance = Instance {
        id: WorkerId(id),
        epoch: inner.log.epoch(),
        role: Role::Both,
        model: Arc::new(ModelCard { is_relayed: true, context, ..card }),
        stores: Vec::new(),
        kv_cache: None,
    };
    let server = Server { inner: Some(inner.clone()), ..server };
    let lease = harness.discovery.register(instance, Arc::new(server)).await.unwrap();
    settle().await;
    (inner, lease)
}

fn asked(path: &'static str, family: u32) -> Request {
    relayed(path, prompt(family, 100))
}

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const EMBED: &str = "/v1/embeddings";

#[tokio::test(start_paused = true)]
async fn requests_go_to_servers_with_their_endpoint() {
    let harness = Harness::new(Settings::default());
    let (generates, _lease) = join(&harness, 1, Server::only(EndpointKind::Generate)).await;
    let (pools, _lease) = join(&harness, 2, Server::only(EndpointKind::Pooling)).await;
    for family in 0..4 {
        harness.answer(asked(CHAT, family)).await.unwrap();
        assert_eq!((generates.requests(), pools.requests()), (family as usize + 1, family as usize));
        harness.answer(asked(EMBED, 10 + family)).await.unwrap();
        assert_eq!((generates.requests(), pools.requests()), (family as usize + 1, family as usize + 1));
    }
    // An endpoint that any server may have.
    for family in 20..24 {
        harness.answer(asked("/tokenize", family)).await.unwrap();
    }
    assert!(generates.requests() > 4 && pools.requests() > 4);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_fails_is_not_replaced_by_one_without_the_endpoint() {
    let harness = Harness::new(Settings::default());
    let (generates, _lease) = join(&harness, 1, Server::only(EndpointKind::Generate)).await;
    let (pools, _lease) = join(&harness, 2, Server::only(EndpointKind::Pooling)).await;
    pools.set_behaviour(Behaviour::Refuse(Error::Failed("out of memory".into())));
    for family in 0..5 {
        let error = harness.answer(asked(EMBED, family)).await.unwrap_err();
        assert_eq!(error.to_string(), Error::Failed("out of memory".into()).to_string());
    }
    assert_eq!((generates.requests(), pools.requests()), (0, 5), "also while its circuit breaker is open");
    harness.router.cordon(WorkerId(2)).unwrap();
    assert!(harness.answer(asked(EMBED, 9)).await.is_err(), "nor while it is cordoned");
    assert_eq!(generates.requests(), 0);
}

#[tokio::test(start_paused = true)]
async fn without_a_server_that_has_the_endpoint_one_of_the_others_answers() {
    let harness = Harness::new(Settings::default());
    let (generates, lease) = join(&harness, 1, Server::only(EndpointKind::Generate)).await;
    harness.answer(asked(EMBED, 1)).await.unwrap();
    assert_eq!(generates.requests(), 1);
    let (unknown, _lease) = join(&harness, 2, Server::default()).await;
    for family in 2..6 {
        harness.answer(asked(EMBED, family)).await.unwrap();
    }
    assert_eq!((generates.requests(), unknown.requests()), (1, 4), "its endpoints are not known");
    drop(lease);
    harness.discovery.expire(WorkerId(1));
    settle().await;
    harness.answer(asked(CHAT, 7)).await.unwrap();
    assert_eq!(unknown.requests(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_tenant_is_not_sent_to_a_server_that_refuses_it_while_another_takes_it() {
    let harness = Harness::new(Settings::default());
    let refusing = Server { refuses_tenants: true, ..Server::default() };
    let (refuses, _lease) = join(&harness, 1, refusing).await;
    let tenant = |family| Request { domain: Domain::derived(b"s", "ann"), ..asked("/v1/messages", family) };
    harness.answer(tenant(1)).await.unwrap();
    assert_eq!(refuses.requests(), 1, "alone it gets the request, for the error");
    let (takes, _lease) = join(&harness, 2, Server::default()).await;
    for family in 2..10 {
        harness.answer(tenant(family)).await.unwrap();
    }
    assert_eq!((refuses.requests(), takes.requests()), (1, 8));
    harness.router.cordon(WorkerId(2)).unwrap();
    harness.answer(asked("/v1/messages", 20)).await.unwrap();
    assert_eq!(refuses.requests(), 2, "a request without a tenant is not refused");
    let error = harness.answer(tenant(21)).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable(_)), "also while the other is cordoned: {error}");
    harness.router.uncordon(WorkerId(2)).unwrap();
    takes.set_behaviour(Behaviour::Refuse(Error::Failed("out of memory".into())));
    assert!(harness.answer(tenant(22)).await.is_err(), "also when the other fails");
    assert_eq!(refuses.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_request_for_a_stored_object_goes_to_its_server_only() {
    let harness = Harness::new(Settings::default());
    let of = |server| Server { probed: Some(server), context: Some(1000), ..Server::default() };
    let (one, lease) = join(&harness, 1, of(7)).await;
    let (other, _lease) = join(&harness, 2, of(8)).await;
    let mut request = relayed(RESPONSES, prompt(1, 100));
    request.attributes.server = Some(7);
    for _ in 0..4 {
        harness.answer(request.clone()).await.unwrap();
    }
    let long = Request { tokens: prompt(1, 2000).tokens, ..request.clone() };
    harness.answer(long).await.unwrap();
    assert_eq!((one.requests(), other.requests()), (5, 0));
    one.set_behaviour(Behaviour::Refuse(Error::Failed("out of memory".into())));
    for _ in 0..5 {
        let error = harness.answer(request.clone()).await.unwrap_err();
        assert_eq!(error, Error::Failed("out of memory".into()), "also while its circuit breaker is open");
    }
    harness.router.cordon(WorkerId(1)).unwrap();
    let error = harness.answer(request.clone()).await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable(why) if why.contains("cordoned")), "{error}");
    assert_eq!(other.requests(), 0);
    drop(lease);
    harness.discovery.expire(WorkerId(1));
    settle().await;
    harness.answer(request).await.unwrap();
    assert_eq!(other.requests(), 1, "it answers that it does not have the object");
}

#[tokio::test(start_paused = true)]
async fn a_slow_server_is_not_replaced_by_one_without_the_object() {
    let harness = Arc::new(Harness::new(Settings::default()));
    let of = |server| Server { probed: Some(server), ..Server::default() };
    let (one, _lease) = join(&harness, 1, of(7)).await;
    let (other, _lease) = join(&harness, 2, of(8)).await;
    one.set_behaviour(Behaviour::Hang);
    let mut request = asked(RESPONSES, 1);
    request.attributes.server = Some(7);
    let asking = harness.clone();
    let mut answer = tokio::spawn(async move { asking.answer(request).await });
    assert!(tokio::time::timeout(Duration::from_mins(2), &mut answer).await.is_err(), "it waits");
    assert_eq!((one.requests(), other.requests()), (1, 0));
    answer.abort();
}

#[tokio::test(start_paused = true)]
async fn a_slow_server_is_not_replaced_by_one_without_the_endpoint() {
    let harness = Arc::new(Harness::new(Settings::default()));
    let (_, _lease) = join(&harness, 1, Server::only(EndpointKind::Generate)).await;
    let (pools, _lease) = join(&harness, 2, Server::only(EndpointKind::Pooling)).await;
    pools.set_behaviour(Behaviour::Hang);
    let asking = harness.clone();
    let mut answer = tokio::spawn(async move { asking.answer(asked(EMBED, 1)).await });
    assert!(tokio::time::timeout(Duration::from_mins(2), &mut answer).await.is_err(), "it waits");
    assert_eq!(pools.requests(), 1);
    answer.abort();
}

#[tokio::test(start_paused = true)]
async fn no_rank_is_assumed_where_the_server_chooses_it() {
    let (predicted, actual) =
        ("blockyard_router_prefix_predicted_tokens_total", "blockyard_router_prefix_actual_tokens_total");
    for path in [CHAT, RESPONSES] {
        let harness = Harness::new(Settings::default());
        let rank = || Server { ranks_of: Some(7), ..Server::default() };
        let (one, _lease) = join(&harness, 1, rank()).await;
        let (two, _lease) = join(&harness, 2, rank()).await;
        let (other, _lease) = join(&harness, 3, Server::default()).await;
        for worker in [&one, &two, &other] {
            worker.cache_blocks(&[]);
        }
        harness.router.cordon(WorkerId(3)).unwrap();
        let mut text = Request { tokens: prompt(1, 1600).tokens, ..asked(path, 1) };
        text.attributes.has_estimated_tokens = true;
        harness.answer(text.clone()).await.unwrap();
        harness.router.uncordon(WorkerId(3)).unwrap();
        let decision = harness.explain(text).await;
        let rows = decision["candidates"].as_array().unwrap();
        let mut cached: Vec<_> = rows.iter().map(|row| 1600 - row["uncached_tokens"].as_u64().unwrap()).collect();
        cached.sort_unstable();
        let sums = [harness.metric(predicted), harness.metric(actual)];
        if path == CHAT {
            assert_eq!((cached, sums), (vec![0, 0, 1584], [1584; 2]));
        } else {
            assert_eq!((cached, sums), (vec![0, 1584, 1584], [0; 2]), "either rank may have it");
        }
        assert_eq!(other.requests(), 0, "the requests stay with the server");
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_reports_no_more_cached_tokens_than_its_context() {
    let harness = Harness::new(Settings::default());
    let (server, _lease) = join(&harness, 1, Server { context: Some(1000), ..Server::default() }).await;
    server.cache_blocks(&[]);
    let mut text = Request { tokens: prompt(1, 1600).tokens, ..asked(CHAT, 1) };
    text.attributes.has_estimated_tokens = true;
    harness.answer(text.clone()).await.unwrap();
    harness.answer(text).await.unwrap();
    assert_eq!(harness.metric("blockyard_router_prefix_predicted_tokens_total"), 1584);
    assert_eq!(harness.metric("blockyard_router_prefix_actual_tokens_total"), 1000, "it said 1,584");
}

/// The length of a relayed prompt is an estimate.
#[tokio::test(start_paused = true)]
async fn a_prompt_that_seems_too_long_is_sent_to_a_server_with_the_longest_context() {
    let harness = Harness::new(Settings::default());
    let (short, _lease) = join(&harness, 1, Server { context: Some(1000), ..Server::default() }).await;
    let (long, _lease) = join(&harness, 2, Server { context: Some(5000), ..Server::default() }).await;
    for (family, tokens) in [(1, 2000), (2, 5000), (3, 50_000)] {
        harness.answer(relayed(CHAT, prompt(family, tokens))).await.unwrap();
    }
    assert_eq!((short.requests(), long.requests()), (0, 3));
}

/// vLLM refuses a prompt that leaves no room for `max_tokens`.
#[tokio::test(start_paused = true)]
async fn a_request_is_sent_to_a_server_that_has_room_for_its_longest_output() {
    let harness = Harness::new(Settings::default());
    let (short, _lease) = join(&harness, 1, Server { context: Some(1000), ..Server::default() }).await;
    let (long, _lease) = join(&harness, 2, Server { context: Some(5000), ..Server::default() }).await;
    let answer = async |family, max_tokens| {
        let mut request = relayed(CHAT, prompt(family, 600));
        request.stop.max_tokens = Some(max_tokens);
        harness.answer(request).await.unwrap();
    };
    for family in 0..4 {
        answer(family, 401).await;
    }
    assert_eq!((short.requests(), long.requests()), (0, 4));
    // What has room on each of them or on none goes to any.
    for family in 10..14 {
        answer(family, 400).await;
        answer(10 + family, 50_000).await;
    }
    assert!(short.requests() >= 2, "{} and {}", short.requests(), long.requests());
    // It is a preference: some servers end the output instead.
    harness.router.cordon(WorkerId(2)).unwrap();
    let before = short.requests();
    answer(30, 401).await;
    assert_eq!(short.requests(), before + 1);
}
