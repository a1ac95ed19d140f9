mod tenants;

use super::*;
use futures::StreamExt;
use http::Method;
use http::uri::PathAndQuery;
use serde_json::json;
use std::net::SocketAddr;
use upstream::relay::fake::{FakeEngine, Script};
use worker::engine::{Domain, EndpointKind, Engine, Error, HttpRequest, Output, Request, Work};
use worker::plane::local::{LocalDiscovery, LocalEvents};
use worker::plane::{Discovery, Instance, Membership, WorkerId};

/// Time for what happens within milliseconds on an idle machine.
const TIMEOUT: Duration = Duration::from_mins(1);
const QUICK: Intervals = Intervals {
    resolve: Duration::from_millis(20),
    retry: Duration::from_millis(20),
    recheck: Duration::from_millis(20),
    // The registered servers are counted.
    collect: TIMEOUT.saturating_mul(60),
    takeover: TIMEOUT.saturating_mul(60),
};

/// Upstreams, the answer of the resolver, and what discovery reports.
struct Harness {
    upstreams: Upstreams,
    answer: Arc<Mutex<Result<Vec<IpAddr>, &'static str>>>,
    changes: futures::stream::BoxStream<'static, Membership>,
}

impl Harness {
    fn new() -> Self {
        Self::with(QUICK)
    }

    fn with(intervals: Intervals) -> Self {
        let answer: Arc<Mutex<Result<Vec<IpAddr>, &'static str>>> = Arc::new(Mutex::new(Err("no such name")));
        let current = Arc::clone(&answer);
        let lookup: Lookup = Arc::new(move |_| {
            let answer = current.lock().clone().map_err(std::io::Error::other);
            Box::pin(std::future::ready(answer))
        });
        Self::with_lookup(intervals, lookup, answer)
    }

    fn with_lookup(
        intervals: Intervals,
        lookup: Lookup,
        answer: Arc<Mutex<Result<Vec<IpAddr>, &'static str>>>,
    ) -> Self {
        let discovery = Arc::new(LocalDiscovery::default());
        let changes = discovery.watch();
        let planes = Planes { discovery, events: Arc::new(LocalEvents::default()) };
        let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
        let tokenizers = Arc::new(Tokenizers::new(BTreeMap::new(), &prometheus::Registry::new()).unwrap());
        Self { upstreams: Upstreams::with(planes, lookup, tokenizers, metrics, intervals), answer, changes }
    }

    fn apply(&self, urls: &[&str]) {
        self.apply_for(urls, false);
    }

    fn apply_for(&self, urls: &[&str], has_tenants: bool) {
        let configured: Vec<Upstream> = urls.iter().map(|url| Upstream::new(url.parse().unwrap())).collect();
        self.upstreams.apply(Upstreams::check(&configured, has_tenants).unwrap());
    }

    /// Waits until these are the problems.
    async fn has_problems(&self, problems: &[&str]) {
        let are_there = async {
            while self.upstreams.problems() != problems {
                sleep(QUICK.retry).await;
            }
        };
        timeout(TIMEOUT, are_there).await.unwrap_or_else(|_| panic!("{:?}", self.upstreams.problems()));
    }

    async fn next(&mut self) -> Membership {
        timeout(TIMEOUT, self.changes.next()).await.expect("a change in time").unwrap()
    }

    async fn joined(&mut self) -> (Arc<Instance>, Arc<dyn Engine>) {
        match self.next().await {
            Membership::Joined(instance, engine) => (instance, engine),
            Membership::Left(id, _) => panic!("{id} left"),
        }
    }

    /// What takes the place of `former`. The end of that may come later, or not at all if the new one has its id.
    async fn replaced(&mut self, former: &Instance) -> Arc<Instance> {
        let (mut joined, mut left) = (None, false);
        loop {
            match self.next().await {
                Membership::Joined(instance, _) => {
                    left |= instance.id == former.id;
                    joined = Some(instance);
                }
                Membership::Left(id, epoch) => {
                    assert_eq!((id, epoch), (former.id, former.epoch));
                    left = true;
                }
            }
            if left && let Some(joined) = joined.take() {
                return joined;
            }
        }
    }

    async fn left(&mut self) -> WorkerId {
        match self.next().await {
            Membership::Left(id, _) => id,
            Membership::Joined(instance, _) => panic!("{} joined", instance.model.id),
        }
    }
}

fn models(ids: &[&str]) -> Script {
    let listed = ids.iter().map(|id| json!({ "id": id, "parent": id.contains("lora").then_some("org/m") }));
    Script::json(200, &json!({ "data": listed.collect::<Vec<_>>() }))
}

async fn server(address: SocketAddr) -> FakeEngine {
    let server = FakeEngine::start_at(address, []).await.unwrap();
    server.set_page("/v1/models", models(&["org/m"]));
    server
}

async fn any_server() -> FakeEngine {
    server(([127, 0, 0, 1], 0).into()).await
}

fn request() -> Request {
    let http = HttpRequest {
        body: r#"{"model":"org/m","prompt":"hello","stream":true}"#.into(),
        is_stream: true,
        ..HttpRequest::post("/v1/completions")
    };
    Request { work: Work::Relay(Arc::new(http)), ..Request::greedy("r", "org/m", &[1, 2], 4) }
}

#[tokio::test]
async fn each_address_of_a_name_is_a_server_while_it_is_listed() {
    let one = any_server().await;
    let port = one.address().port();
    let other = server(([127, 0, 0, 2], port).into()).await;
    let [first, second] = [one.address().ip(), other.address().ip()];
    let mut harness = Harness::new();
    harness.apply(&[&format!("http://engines.test:{port}")]);
    *harness.answer.lock() = Ok(vec![first]);
    let (one_instance, _engine) = harness.joined().await;
    *harness.answer.lock() = Ok(vec![first, second]);
    let (other_instance, engine) = harness.joined().await;
    assert_ne!(one_instance.id, other_instance.id);
    let host = format!("engines.test:{port}");
    assert_eq!(engine.address(), Some(format!("http://{host}/ at 127.0.0.2")));
    assert!(other.requests().iter().all(|request| request.headers["host"] == *host), "the name stays");

    // A name that cannot be resolved keeps its servers, and a server that is gone finishes its requests.
    *harness.answer.lock() = Err("no such name");
    let stream = Script::completion(&["a", "b"], None).paced(Duration::from_millis(200));
    other.set_page("/v1/completions", stream);
    let mut outputs = engine.generate(request()).await.unwrap();
    assert!(matches!(outputs.next().await, Some(Ok(Output::Head(_)))));
    let problem = "the name cannot be resolved, and the servers that are known are kept: no such name";
    harness.has_problems(&[&format!("upstream http://{host}/: {problem}")]).await;
    sleep(QUICK.resolve * 5).await;
    *harness.answer.lock() = Ok(vec![first]);
    harness.has_problems(&[]).await;
    assert_eq!(harness.left().await, other_instance.id);
    let rest: Vec<_> = timeout(TIMEOUT, outputs.collect()).await.unwrap();
    assert!(matches!(rest.last(), Some(Ok(Output::End(report))) if !report.failed), "{rest:?}");

    *harness.answer.lock() = Ok(vec![first, second]);
    let (again, _engine) = harness.joined().await;
    assert_eq!(again.id, other_instance.id);
    assert!(again.epoch > other_instance.epoch);
    assert_eq!(harness.upstreams.known(&format!("http://{host}/")).servers, 2);
    harness.upstreams.stop().await;
}

#[tokio::test]
async fn a_new_list_changes_only_what_differs() {
    let (one, other) = (any_server().await, any_server().await);
    let [a, b] = [&one, &other].map(|server| server.uri().to_string());
    let mut harness = Harness::new();
    harness.apply(&[&a]);
    let (first, _) = harness.joined().await;
    harness.apply(&[&b, &a]);
    let (second, _) = harness.joined().await;
    harness.apply(&[&b]);
    assert_eq!(harness.left().await, first.id);
    harness.apply(&[&b, &a]);
    let (again, _) = harness.joined().await;
    assert_eq!((again.id, again.epoch > first.epoch), (first.id, true), "the other was not touched");
    assert_ne!(second.id, first.id);
}

#[tokio::test]
async fn servers_that_leave_serve_until_those_in_their_place_are_registered() {
    let (one, other) = (any_server().await, any_server().await);
    let [a, b] = [&one, &other].map(|server| server.uri().to_string());
    let mut harness = Harness::new();
    harness.apply(&[&a]);
    let (first, _) = harness.joined().await;
    let known = |harness: &Harness| [&a, &b].map(|url| harness.upstreams.known(url).servers);
    let mut answered = harness.upstreams.shared.known.subscribe();
    let _ = timeout(TIMEOUT, answered.wait_for(|known| known.len() == 1)).await.expect("an answer in time");

    // The same server with another table has the same id, which the later epoch takes over.
    let changed = Upstream { max_requests: std::num::NonZero::new(1), ..Upstream::new(a.parse().unwrap()) };
    harness.upstreams.apply(Upstreams::check(&[changed], false).unwrap());
    let (again, _) = harness.joined().await;
    assert_eq!((again.id, again.epoch > first.epoch), (first.id, true));
    let _ = timeout(TIMEOUT, answered.wait_for(|known| known.len() == 1)).await.expect("an answer in time");

    harness.apply(&[&b]);
    let (second, _) = harness.joined().await;
    assert_ne!(second.id, first.id);
    assert_eq!(harness.left().await, first.id);
    let is_other = |known: &BTreeMap<ServerKey, Vec<String>>| known.keys().map(|(url, _)| url).eq([&b]);
    let _ = timeout(TIMEOUT, answered.wait_for(is_other)).await.expect("an answer in time");
    assert_eq!(known(&harness), [0, 1]);
}

#[tokio::test]
async fn a_server_that_does_not_answer_takes_the_place_of_others_after_a_limit() {
    let (server, dead) = (any_server().await, any_server().await);
    let unused = dead.uri().to_string();
    dead.kill().await;
    let mut harness = Harness::with(Intervals { takeover: QUICK.retry, ..QUICK });
    harness.apply(&[&server.uri().to_string()]);
    let (first, _) = harness.joined().await;
    harness.apply(&[&unused]);
    assert_eq!(harness.left().await, first.id);
}

#[tokio::test]
async fn a_server_that_has_never_answered_is_a_problem() {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut harness = Harness::new();
    harness.apply(&[&format!("http://{address}"), "http://engines.test:8000"]);
    let count = async |harness: &Harness, count: usize| {
        let is_there = async {
            while harness.upstreams.problems().len() != count {
                sleep(QUICK.retry).await;
            }
        };
        timeout(TIMEOUT, is_there).await.expect("the problems in time");
    };
    count(&harness, 2).await;
    let problems = harness.upstreams.problems();
    let dead = format!("upstream http://{address}/ has not answered since the start: ");
    let unknown = "upstream http://engines.test:8000/: the name cannot be resolved: no such name";
    assert!(problems[0].starts_with(&dead) && problems[1] == unknown, "{problems:?}");
    let server = server(address).await;
    let _ = harness.joined().await;
    count(&harness, 1).await;
    server.set_page("/v1/models", Script::json(503, &json!({})));
    sleep(QUICK.recheck * 5).await;
    assert_eq!(harness.upstreams.problems(), [unknown], "health checks are of servers that have answered");
    harness.apply(&[]);
    count(&harness, 0).await;
}

#[tokio::test]
async fn a_name_without_an_answer_of_the_resolver_is_unanswered() {
    let lookup: Lookup = Arc::new(|_| Box::pin(std::future::pending()));
    let mut harness = Harness::with_lookup(QUICK, lookup, Arc::new(Mutex::new(Err("not asked"))));
    let server = any_server().await;
    harness.apply(&["http://engines.test:8000", &server.uri().to_string()]);
    let _ = harness.joined().await;
    timeout(TIMEOUT, harness.upstreams.shared.known.subscribe().wait_for(|known| !known.is_empty()))
        .await
        .expect("the server is known in time")
        .unwrap();
    assert_eq!(harness.upstreams.unanswered(), ["upstream http://engines.test:8000/ has not answered yet"]);
}

#[tokio::test]
async fn a_table_that_cannot_be_used_is_named() {
    let good = Upstream::new("http://127.0.0.1:1".parse().unwrap());
    let wrong = Upstream { api_key_file: Some("/nonexistent/key".into()), ..good.clone() };
    let error = Upstreams::check(&[good, wrong], false).unwrap_err();
    assert!(format!("{error:#}").starts_with("upstreams.1.api_key_file: /nonexistent/key: "), "{error:#}");
    let https = Upstream::new("https://127.0.0.1:1".parse().unwrap());
    let empty = tempfile::NamedTempFile::new().unwrap();
    for (file, problem) in [(Path::new("/nonexistent/ca"), "No such file"), (empty.path(), "BEGIN CERTIFICATE")] {
        let wrong = Upstream { ca_file: Some(file.into()), ..https.clone() };
        let error = format!("{:#}", Upstreams::check(&[wrong], false).unwrap_err());
        let named = format!("upstreams.0.ca_file: {}", file.display());
        assert!(error.starts_with(&named) && error.contains(problem), "{error}");
    }
}

#[tokio::test]
async fn a_server_with_other_models_is_noticed() {
    let server = any_server().await;
    let mut harness = Harness::new();
    harness.apply(&[&server.uri().to_string()]);
    let (base, _) = harness.joined().await;
    server.set_page("/v1/models", models(&["org/m", "lora"]));
    let (adapter, _) = harness.joined().await;
    assert_eq!((base.model.id.as_str(), adapter.model.id.as_str()), ("org/m", "lora"));
    server.set_page("/v1/models", Script::json(503, &json!({})));
    sleep(QUICK.recheck * 5).await;
    server.set_page("/v1/models", models(&["org/m"]));
    assert_eq!(harness.left().await, adapter.id, "the model stays, also while the server does not answer");
    server.set_page("/v1/models", models(&["org/other"]));
    assert_eq!(harness.replaced(&base).await.model.id, "org/other");
    assert_eq!(harness.upstreams.known(&server.uri().to_string()).models, ["org/other"]);
}

#[tokio::test]
async fn a_list_is_registered_up_to_a_limit() {
    let many: Vec<String> = (0..listed::MAX_MODELS + 3).map(|nth| format!("m{nth:04}")).collect();
    let ids: Vec<&str> = ["m\n", ""].into_iter().chain(many.iter().map(String::as_str)).collect();
    let server = any_server().await;
    server.set_page("/v1/models", models(&ids));
    let harness = Harness::new();
    harness.apply(&[&server.uri().to_string()]);
    harness.upstreams.until_known(Instant::now() + TIMEOUT).await;
    assert_eq!(harness.upstreams.known(&server.uri().to_string()).models, many[..listed::MAX_MODELS]);
}

#[tokio::test]
async fn the_start_waits_for_each_server_that_answers_and_for_no_other() {
    let (quick, slow, ended) = (any_server().await, any_server().await, any_server().await);
    slow.set_page("/v1/models", models(&["org/slow"]).after(Duration::from_millis(200)));
    let [quick_url, slow_url, ended_url] = [&quick, &slow, &ended].map(|server| server.uri().to_string());
    ended.kill().await;
    let harness = Harness::new();
    harness.apply(&[&quick_url, &slow_url, &ended_url]);
    harness.upstreams.until_known(Instant::now() + TIMEOUT).await;
    assert_eq!(harness.upstreams.known(&quick_url).models, ["org/m"]);
    assert_eq!(harness.upstreams.known(&slow_url).models, ["org/slow"]);
    assert_eq!(harness.upstreams.known(&ended_url).servers, 0);
}

#[tokio::test]
async fn a_model_that_a_server_does_not_know_is_asked_about() {
    let server = any_server().await;
    let mut harness = Harness::with(Intervals { recheck: TIMEOUT * 60, ..QUICK });
    harness.apply(&[&server.uri().to_string()]);
    let (former, engine) = harness.joined().await;
    server.set_page("/v1/models", models(&["org/other"]));
    server.set_page("/v1/completions", Script::json(404, &json!({ "error": { "message": "no such model" } })));
    assert!(engine.generate(request()).await.is_err());
    assert_eq!(harness.replaced(&former).await.model.id, "org/other");
}

#[tokio::test]
async fn a_server_that_refuses_the_key_gets_no_requests_until_it_accepts_it() {
    let server = any_server().await;
    let mut harness = Harness::with(Intervals { recheck: TIMEOUT * 60, ..QUICK });
    harness.apply(&[&server.uri().to_string()]);
    let (former, mut engine) = harness.joined().await;
    for status in [401, 403] {
        for path in ["/v1/models", "/v1/completions"] {
            server.set_page(path, Script::json(status, &json!({ "error": "refused" })));
        }
        assert!(engine.generate(request()).await.is_err());
        assert_eq!(harness.left().await, former.id);
        assert_eq!(harness.upstreams.known(&server.uri().to_string()).servers, 0);
        server.set_page("/v1/models", models(&["org/m"]));
        let (again, next) = harness.joined().await;
        assert_eq!(again.id, former.id);
        engine = next;
    }
}

#[tokio::test]
async fn servers_with_equal_facts_are_logged_together() {
    let mut servers = Vec::new();
    for _ in 0..6 {
        servers.push(any_server().await);
    }
    servers[4].set_page("/kv_event_sources", Script::json(200, &json!([{ "endpoint": "tcp://*:1" }])));
    servers[5].set_page("/version", Script::json(200, &json!({ "version": "0.32.0" })));
    let urls: Vec<String> = servers.iter().map(|server| server.uri().to_string()).collect();
    let harness = Harness::new();
    harness.apply(&urls.iter().map(String::as_str).collect::<Vec<_>>());
    harness.upstreams.until_known(Instant::now() + TIMEOUT).await;
    let mut counts = harness.upstreams.shared.registration_log.counts();
    counts.sort_unstable();
    assert_eq!(counts, [(1, 1), (1, 1), (4, 3)], "one with KV events, one of another version, four alike");
}

#[tokio::test]
async fn publishers_and_block_sizes_that_change_register_anew() {
    let server = any_server().await;
    let mut harness = Harness::new();
    harness.apply(&[&server.uri().to_string()]);
    let (first, _) = harness.joined().await;
    assert_eq!((first.model.block_size, first.model.has_exact_blocks), (16, false));
    server.set_page("/kv_event_sources", Script::json(200, &json!([{ "endpoint": "tcp://*:1", "block_size": 32 }])));
    let again = harness.replaced(&first).await;
    assert_eq!((again.id, again.model.block_size, again.model.has_exact_blocks), (first.id, 32, true));
    assert!(again.epoch > first.epoch);
    let is_logged_again = async {
        while harness.upstreams.shared.registration_log.counts() != [(1, 1), (1, 1)] {
            sleep(QUICK.retry).await;
        }
    };
    timeout(TIMEOUT, is_logged_again).await.expect("a line with what has changed");
}

#[tokio::test]
async fn pages_of_one_token_are_blocks_only_where_events_are_followed() {
    let server = any_server().await;
    let models = json!({ "data": [{ "id": "org/m", "owned_by": "sglang" }] });
    server.set_page("/v1/models", Script::json(200, &models));
    server.set_page("/server_info", Script::json(200, &json!({ "page_size": 1 })));
    let mut harness = Harness::new();
    harness.apply(&[&server.uri().to_string()]);
    let (estimated, _) = harness.joined().await;
    assert_eq!((estimated.model.block_size, estimated.model.has_exact_blocks), (16, false));
    let config = json!({ "publisher": "zmq", "endpoint": "tcp://*:1" }).to_string();
    server.set_page("/server_info", Script::json(200, &json!({ "page_size": 1, "kv_events_config": config })));
    let followed = harness.replaced(&estimated).await;
    assert_eq!((followed.model.block_size, followed.model.has_exact_blocks), (1, true));
}

#[tokio::test]
async fn all_names_of_the_model_get_its_events() {
    let server = any_server().await;
    let listed = |id: &str, root: &str| json!({ "id": id, "root": root });
    let adapter = json!({ "id": "lora", "root": "/srv/lora", "parent": "alias" });
    let set_models = |models: &[serde_json::Value]| {
        server.set_page("/v1/models", Script::json(200, &json!({ "data": models })));
    };
    let [one, alias, other] = [listed("org/m", "/srv/m"), listed("alias", "/srv/m"), listed("other", "/srv/n")];
    set_models(&[one.clone(), alias, other, adapter]);
    server.set_page("/kv_event_sources", Script::json(200, &json!([{ "endpoint": "tcp://*:1" }])));
    let mut harness = Harness::new();
    harness.apply(&[&server.uri().to_string()]);
    let mut joined = Vec::new();
    for _ in 0..4 {
        joined.push(harness.joined().await.0);
    }
    joined.sort_by(|one, other| one.model.id.cmp(&other.model.id));
    let exact: Vec<_> = joined.iter().map(|of| (of.model.id.as_str(), of.model.has_exact_blocks)).collect();
    assert_eq!(exact, [("alias", true), ("lora", true), ("org/m", true), ("other", false)]);
    // A name that is gone registers the first one anew, because each has a view of the cache of its own.
    set_models(&[one]);
    let (mut left, mut is_back) = (Vec::new(), false);
    let others = joined.iter().filter(|instance| instance.model.id != "org/m");
    while !is_back || !others.clone().all(|instance| left.contains(&instance.id)) {
        match harness.next().await {
            Membership::Left(id, _) => left.push(id),
            Membership::Joined(instance, _) => is_back |= instance.model.id == "org/m",
        }
    }
}

#[tokio::test]
async fn a_rank_that_requests_can_name_is_a_worker() {
    let server = any_server().await;
    let source = |rank: u32| json!({ "data_parallel_rank": rank, "endpoint": "tcp://*:1" });
    // Ranks 2 and 3 of the deployment are the first two of this server.
    server.set_page("/kv_event_sources", Script::json(200, &json!([source(2), source(3)])));
    let mut harness = Harness::new();
    harness.apply(&[&server.uri().to_string()]);
    let (one, other) = (harness.joined().await, harness.joined().await);
    assert_ne!(one.0.id, other.0.id);
    assert!(one.0.model.has_exact_blocks && other.0.model.has_exact_blocks);
    let Work::Relay(http) = request().work else { unreachable!() };
    let mut http = HttpRequest::clone(&http);
    http.headers.insert("x-data-parallel-rank", "7".parse().unwrap());
    for (_, engine) in [&one, &other] {
        let outputs = engine.generate(Request { work: Work::Relay(Arc::new(http.clone())), ..request() }).await;
        assert!(outputs.unwrap().count().await > 1);
    }
    let sent = server.requests().into_iter().filter(|request| request.method == Method::POST);
    let ranks: Vec<_> = sent.map(|request| request.headers["x-data-parallel-rank"].clone()).collect();
    assert_eq!(ranks, ["0", "1"], "the client's rank is replaced");
    // vLLM chooses the rank of this request whatever the header says.
    http.headers.remove("x-data-parallel-rank");
    let of_path = |path: &'static str| {
        let http = HttpRequest { target: PathAndQuery::from_static(path), ..http.clone() };
        Request { work: Work::Relay(Arc::new(http)), ..request() }
    };
    let (chat, response) = (of_path("/v1/chat/completions"), of_path("/v1/responses"));
    assert_eq!([one.1.choosing_server(&chat), other.1.choosing_server(&chat)], [None; 2]);
    assert!(one.1.choosing_server(&response).is_some());
    assert_eq!(one.1.choosing_server(&response), other.1.choosing_server(&response));
    assert!(one.1.generate(response).await.unwrap().count().await > 1);
    let sent = server.requests().into_iter().rfind(|request| request.method == Method::POST).unwrap();
    assert_eq!((sent.uri.path(), sent.headers.get("x-data-parallel-rank")), ("/v1/responses", None));
    server.set_page("/kv_event_sources", Script::json(200, &json!([source(2)])));
    let mut left = Vec::new();
    let alone = loop {
        match harness.next().await {
            Membership::Left(id, _) => left.push(id),
            Membership::Joined(instance, _) => break instance,
        }
    };
    while left.len() < 2 {
        left.push(harness.left().await);
    }
    assert!(!left.contains(&alone.id), "one rank is the server");
}

#[tokio::test]
async fn a_server_has_the_endpoints_that_it_describes_or_that_are_configured() {
    use crate::config::UpstreamRole;
    let server = any_server().await;
    let paths = json!({ "/v1/embeddings": {}, "/score": {} });
    server.set_page("/openapi.json", Script::json(200, &json!({ "paths": paths })));
    for (role, only) in [
        (UpstreamRole::Auto, Some(EndpointKind::Pooling)),
        (UpstreamRole::Both, None),
        (UpstreamRole::Generate, Some(EndpointKind::Generate)),
        (UpstreamRole::Pooling, Some(EndpointKind::Pooling)),
    ] {
        let mut harness = Harness::new();
        let upstream = Upstream { role, ..Upstream::new(server.uri()) };
        harness.upstreams.apply(Upstreams::check(&[upstream], false).unwrap());
        assert_eq!(harness.joined().await.1.only_endpoint_kind(), only, "{role:?}");
    }
}

#[tokio::test]
async fn streams_are_continued_where_that_is_set_unless_the_server_has_no_token_ids() {
    let server = any_server().await;
    for (field, continue_streams, expected) in [
        (Some("return_token_ids"), true, true),
        (Some("return_token_ids"), false, false),
        (Some("logprobs"), true, false),
        (None, true, true),
    ] {
        let page = field.map_or_else(
            || Script::json(404, &json!({})),
            |field| Script::json(200, &json!({ "paths": { "/v1/completions": { "properties": { field: {} } } } })),
        );
        server.set_page("/openapi.json", page);
        let mut harness = Harness::new();
        let upstream = Upstream { continue_streams, ..Upstream::new(server.uri()) };
        harness.upstreams.apply(Upstreams::check(&[upstream], false).unwrap());
        assert_eq!(harness.joined().await.1.continues_streams(), expected, "{field:?}");
    }
}

#[test]
fn a_server_that_never_answers_is_waited_for_a_minute() {
    let (mut unanswered, start) = (UnansweredSince::default(), Instant::now());
    let mut is_over_at =
        |seconds: u64, have_answered: bool| unanswered.is_over(have_answered, start + Duration::from_secs(seconds));
    assert_eq!(
        [(0, false), (50, false), (60, false), (70, false)].map(|(at, all)| is_over_at(at, all)),
        [false, false, true, true]
    );
    assert_eq!(
        [(80, true), (90, false), (140, false), (150, false)].map(|(at, all)| is_over_at(at, all)),
        [true, false, false, true]
    );
}
