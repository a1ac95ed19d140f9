//! The program as a gateway of servers with OpenAI's API, here scripted ones.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::process::client;
use blockyard::config::{Alias, Config, Deployment, HttpVersion, KvEvents, Listen, Upstream};
use blockyard::node::{Node, Process};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, LOCATION, RETRY_AFTER};
use serde_json::{Value, json};
use std::num::NonZero;
use std::path::Path;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use upstream::kv_events::fake::FakePublisher;
use upstream::relay::chunk::Usage;
use upstream::relay::fake::{FakeEngine, Recorded, Script};

/// Time for what happens within seconds on an idle machine.
const TIMEOUT: Duration = Duration::from_mins(1);

fn models() -> Script {
    lists("org/m")
}

fn lists(model: &str) -> Script {
    Script::json(200, &json!({ "object": "list", "data": [{ "id": model, "max_model_len": 4096 }] }))
}

/// A server that lists its model, and follows the scripts for other requests.
async fn server(scripts: impl IntoIterator<Item = Script>) -> FakeEngine {
    let server = FakeEngine::start(scripts).await.unwrap();
    server.set_page("/v1/models", models());
    // Health checks take no script.
    server.set_page("/health", Script::json(200, &json!({})));
    server
}

struct Gateway {
    node: Node,
    url: String,
    http: reqwest::Client,
}

impl Gateway {
    async fn start(servers: &[&FakeEngine]) -> Self {
        Self::of(servers.iter().map(|server| Upstream::new(server.uri())).collect()).await
    }

    async fn of(upstreams: Vec<Upstream>) -> Self {
        Self::with(Config { upstreams, ..Config::with_cache(Path::new("/nonexistent")) }).await
    }

    async fn with(mut config: Config) -> Self {
        let servers = config.upstreams.len();
        config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
        let node = Node::start(&config).await.unwrap();
        let url = format!("http://{}", node.address());
        let gateway = Self { node, url, http: client() };
        let all_registered = async {
            while gateway.metric("blockyard_router_workers").await < servers {
                sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, all_registered).await.expect("all servers are registered");
        gateway
    }

    async fn post(&self, path: &str, body: &str) -> reqwest::Response {
        let request = self.http.post(format!("{}{path}", self.url)).header(CONTENT_TYPE, "application/json");
        request.header("x-blockyard-explain", "1").body(body.to_owned()).send().await.unwrap()
    }

    /// The sum of a metric over its labels.
    async fn metric(&self, name: &str) -> usize {
        let text = self.http.get(format!("{}/metrics", self.url)).send().await.unwrap().text().await.unwrap();
        let samples = text.lines().filter(|line| line.starts_with(&format!("{name}{{")));
        samples.map(|line| line.rsplit(' ').next().unwrap().parse::<usize>().unwrap()).sum()
    }
}

/// What a server got beside the requests of the gateway itself.
fn completions(server: &FakeEngine) -> Vec<Recorded> {
    server.requests().into_iter().filter(|request| request.method == "POST").collect()
}

fn chat(content: &str, stream: bool) -> String {
    json!({ "model": "org/m", "messages": [{ "role": "user", "content": content }], "stream": stream }).to_string()
}

#[tokio::test]
async fn a_stream_is_what_the_server_sends() {
    let usage = Usage { prompt_tokens: Some(20), completion_tokens: Some(2), cached_tokens: Some(16) };
    let script = Script::chat(&["Hello", " world"], Some(usage));
    let server = server([script.clone(), script.clone()]).await;
    let gateway = Gateway::start(&[&server]).await;
    let asked = r#"{"model":"org/m","messages":[],"stream":true, "stream_options":{"include_usage":true},"x":[1]}"#;
    let answer = gateway.post("/v1/chat/completions", asked).await;
    assert_eq!(answer.status(), 200);
    let decision: Value = serde_json::from_str(answer.headers()["x-blockyard-explain"].to_str().unwrap()).unwrap();
    assert!(decision.is_object());
    assert_eq!(answer.bytes().await.unwrap(), script.body());
    assert_eq!(completions(&server)[0].body, asked, "nothing had to be changed");

    let answer = gateway.post("/v1/chat/completions", &chat("hello", true)).await.text().await.unwrap();
    assert!(!answer.contains("usage") && answer.ends_with("data: [DONE]\n\n"), "{answer}");
    let sent: Value = serde_json::from_slice(&completions(&server)[1].body).unwrap();
    assert_eq!(sent["stream_options"]["include_usage"], true, "the gateway asks for itself");
    assert_eq!(gateway.metric("blockyard_frontend_cached_tokens_total").await, 32);
}

#[tokio::test]
async fn a_server_may_speak_http_2_without_tls() {
    let server = server([Script::chat(&["Hello"], None)]).await;
    let gateway = Gateway::of(vec![Upstream { http: HttpVersion::H2c, ..Upstream::new(server.uri()) }]).await;
    assert_eq!(gateway.post("/v1/chat/completions", &chat("hello", true)).await.status(), 200);
    assert_eq!(completions(&server)[0].version, http::Version::HTTP_2);
}

#[tokio::test]
async fn a_server_may_have_an_authority_of_its_own() {
    // Another gateway is the server with TLS.
    let pem = Path::new("upstream/src/relay/client/tests");
    let server = server([Script::chat(&["Hello"], None)]).await;
    let mut config =
        Config { upstreams: vec![Upstream::new(server.uri())], ..Config::with_cache(Path::new("/nonexistent")) };
    config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
    config.frontend.tls_cert_file = Some(pem.join("localhost.pem"));
    config.frontend.tls_key_file = Some(pem.join("localhost.key"));
    let behind = Node::start(&config).await.unwrap();
    let url: http::Uri = format!("https://localhost:{}", behind.address().port()).parse().unwrap();
    let gateway = Gateway::of(vec![Upstream { ca_file: Some(pem.join("localhost.pem")), ..Upstream::new(url) }]).await;
    assert_eq!(gateway.post("/v1/chat/completions", &chat("hello", true)).await.status(), 200);
    assert_eq!(completions(&server).len(), 1);
}

#[tokio::test]
async fn servers_of_one_model_may_have_different_endpoints() {
    let answer = |text: &str| Script::json(200, &json!({ "object": text }));
    let (generates, pools) = (server([]).await, server([]).await);
    for (server, path) in [(&generates, "/v1/chat/completions"), (&pools, "/v1/embeddings")] {
        server.set_page("/openapi.json", Script::json(200, &json!({ "paths": { path: {} } })));
        server.set_page("/v1/chat/completions", Script::json(404, &json!({ "detail": "Not Found" })));
        server.set_page("/v1/embeddings", Script::json(404, &json!({ "detail": "Not Found" })));
        server.set_page(path, answer(path));
    }
    let gateway = Gateway::start(&[&generates, &pools]).await;
    for number in 0..4 {
        let body = json!({ "model": "org/m", "input": format!("text {number}") }).to_string();
        let embedded = gateway.post("/v1/embeddings", &body).await;
        assert_eq!(embedded.json::<Value>().await.unwrap()["object"], "/v1/embeddings");
        let chatted = gateway.post("/v1/chat/completions", &chat(&format!("text {number}"), false)).await;
        assert_eq!(chatted.json::<Value>().await.unwrap()["object"], "/v1/chat/completions");
    }
    assert_eq!((completions(&generates).len(), completions(&pools).len()), (4, 4));
}

#[tokio::test]
async fn a_stream_of_several_choices_is_not_asked_for_usage() {
    let server = server([Script::chat(&["Hello"], None)]).await;
    let gateway = Gateway::start(&[&server]).await;
    let body = r#"{"model":"org/m","messages":[],"stream":true,"n":2}"#;
    assert_eq!(gateway.post("/v1/chat/completions", body).await.status(), 200);
    assert_eq!(completions(&server)[0].body, body);
}

#[tokio::test]
async fn a_response_with_a_length_is_counted_as_whole() {
    let body =
        json!({ "choices": [], "usage": { "prompt_tokens": 9, "prompt_tokens_details": { "cached_tokens": 8 } } });
    let length: &'static str = body.to_string().len().to_string().leak();
    let server = server([Script::json(200, &body).header(CONTENT_LENGTH, length)]).await;
    let gateway = Gateway::start(&[&server]).await;
    let answer = gateway.post("/v1/chat/completions", &chat("hello", false)).await;
    assert_eq!(answer.headers()[CONTENT_LENGTH], length);
    assert_eq!(answer.json::<Value>().await.unwrap(), body);
    assert_eq!(gateway.metric("blockyard_frontend_cached_tokens_total").await, 8);
}

#[tokio::test]
async fn an_error_of_the_server_passes_as_it_is() {
    let error = json!({ "object": "error", "message": "top_logprobs must be at most 20" });
    let server = server([Script::json(400, &error), Script::json(429, &error).header(RETRY_AFTER, "7")]).await;
    let gateway = Gateway::start(&[&server]).await;
    let refused = gateway.post("/v1/chat/completions", &chat("hello", false)).await;
    assert_eq!((refused.status().as_u16(), refused.json::<Value>().await.unwrap()), (400, error));
    let busy = gateway.post("/v1/chat/completions", &chat("hello", false)).await;
    assert_eq!((busy.status().as_u16(), &busy.headers()[RETRY_AFTER]), (429, &"7".parse().unwrap()));
}

#[tokio::test]
async fn a_redirect_of_the_server_is_an_error() {
    let server = server([]).await;
    let redirect = Script::json(302, &json!({})).header(LOCATION, "http://127.0.0.1:1/");
    server.set_page("/v1/chat/completions", redirect);
    let gateway = Gateway::start(&[&server]).await;
    let answer = gateway.post("/v1/chat/completions", &chat("hello", false)).await;
    assert_eq!((answer.status().as_u16(), answer.headers().get(LOCATION)), (502, None));
    let error = answer.json::<Value>().await.unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("a redirect (status 302)"), "{error}");
}

#[tokio::test]
async fn a_request_without_output_goes_to_another_server() {
    let role = Script::chat(&["never"], None).broken_after(1);
    let broken = server([Script::close(), role, Script::json(500, &json!({}))]).await;
    let good = server([]).await;
    let gateway = Gateway::start(&[&broken, &good]).await;
    // Until each of the three faults has been met; the circuit breaker opens after the third.
    let met = async {
        let mut asked = 0;
        while completions(&broken).len() < 3 {
            let answer = gateway.post("/v1/chat/completions", &chat(&format!("{asked} hello"), true)).await;
            assert_eq!(answer.status(), 200);
            assert!(answer.text().await.unwrap().ends_with("data: [DONE]\n\n"));
            asked += 1;
        }
    };
    tokio::time::timeout(TIMEOUT, met).await.expect("both servers get requests");
}

#[tokio::test]
async fn requests_without_a_prompt_pass() {
    let files = json!({ "object": "list", "data": [] });
    let server = server([Script::json(200, &files), Script::json(200, &json!("ok"))]).await;
    let gateway = Gateway::start(&[&server]).await;
    let listed = gateway.http.get(format!("{}/v1/files?limit=2", gateway.url)).send().await.unwrap();
    assert_eq!(listed.json::<Value>().await.unwrap(), files);
    let requests = server.requests();
    let asked = requests.iter().find(|request| request.uri.path() == "/v1/files").unwrap();
    assert_eq!((asked.method.as_str(), asked.uri.query()), ("GET", Some("limit=2")));
    let audio = gateway.http.post(format!("{}/v1/audio/transcriptions", gateway.url)).body(vec![0, 159, 146, 150]);
    let answer = audio.header(CONTENT_TYPE, "multipart/form-data; boundary=x").send().await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(completions(&server)[0].body[..], [0, 159, 146, 150]);
}

#[tokio::test]
async fn a_client_that_leaves_cancels_the_request_at_the_server() {
    let server = server([Script::chat(&["Hello", " world"], None).hanging_after(2)]).await;
    let gateway = Gateway::start(&[&server]).await;
    let mut answer = gateway.post("/v1/chat/completions", &chat("hello", true)).await;
    assert!(answer.chunk().await.unwrap().is_some());
    drop(answer);
    tokio::time::timeout(TIMEOUT, server.cancelled(1)).await.expect("the server notices");
}

#[tokio::test]
async fn prompts_that_begin_alike_go_to_the_same_server() {
    let (one, other) = (server([]).await, server([]).await);
    let gateway = Gateway::start(&[&one, &other]).await;
    let text = "A block holds the keys and values of sixteen tokens. ".repeat(40);
    let deadline = Instant::now() + TIMEOUT;
    // Servers without KV events are recognised as such after some seconds.
    while gateway.metric("blockyard_router_worker_index_source").await == 0 || !estimated(&gateway).await {
        assert!(Instant::now() < deadline, "the caches of both are estimated");
        for turn in 0..2 {
            gateway.post("/v1/chat/completions", &chat(&format!("{turn}{text}"), false)).await;
        }
        sleep(Duration::from_millis(200)).await;
    }
    let before = (completions(&one).len(), completions(&other).len());
    for turn in 0..6 {
        gateway.post("/v1/chat/completions", &chat(&format!("{text}{turn}"), false)).await;
    }
    let after = (completions(&one).len() - before.0, completions(&other).len() - before.1);
    assert!(after == (6, 0) || after == (0, 6), "{after:?}");
}

/// Whether the caches of both servers are estimated.
async fn estimated(gateway: &Gateway) -> bool {
    let text = gateway.http.get(format!("{}/metrics", gateway.url)).send().await.unwrap().text().await.unwrap();
    let lines = text.lines().filter(|line| line.starts_with("blockyard_router_worker_index_source{"));
    lines.filter(|line| line.contains("estimated") && line.ends_with(" 1")).count() == 2
}

#[tokio::test]
async fn a_name_with_one_address_is_one_server() {
    let server = server([]).await;
    let url = format!("http://localhost:{}", server.address().port()).parse().unwrap();
    let gateway = Gateway::of(vec![Upstream::new(url)]).await;
    assert_eq!(gateway.post("/v1/chat/completions", &chat("hello", true)).await.status(), 200);
    assert_eq!(gateway.metric("blockyard_router_workers").await, 1);
    let banner = gateway.node.banner().as_json();
    assert_eq!(banner["upstreams"][0]["servers"], 1, "localhost may have two addresses of one server");
}

#[tokio::test]
async fn a_server_that_starts_late_is_found() {
    let server = FakeEngine::start([Script::json(503, &json!({})), models()]).await.unwrap();
    let gateway = Gateway::start(&[&server]).await;
    assert_eq!(gateway.post("/v1/chat/completions", &chat("hello", true)).await.status(), 200);
    let text = gateway.node.banner().to_string();
    assert!(text.contains("org/m"), "{text}");
    gateway.node.shutdown().await;
}

/// A gateway of these servers with an alias `chat`.
async fn with_alias(servers: &[&FakeEngine], deployments: &[(&str, u32)]) -> Gateway {
    let deployment = |(model, weight): &(&str, u32)| Deployment { model: (*model).to_owned(), weight: *weight };
    let alias = Alias { deployments: deployments.iter().map(deployment).collect() };
    Gateway::with(Config {
        upstreams: servers.iter().map(|server| Upstream::new(server.uri())).collect(),
        aliases: [("chat".to_owned(), alias)].into(),
        ..Config::with_cache(Path::new("/nonexistent"))
    })
    .await
}

#[tokio::test]
async fn an_alias_is_sent_under_the_models_own_name() {
    let answer = json!({ "model": "org/m", "choices": [] });
    let server = server([Script::json(200, &answer)]).await;
    let gateway = with_alias(&[&server], &[("org/m", 1)]).await;
    let body = r#"{"messages":[],  "model" : "chat","top_p":0.10}"#;
    let response = gateway.post("/v1/chat/completions", body).await;
    assert_eq!(response.json::<Value>().await.unwrap(), answer, "the model that answered is named");
    assert_eq!(completions(&server)[0].body, r#"{"messages":[],  "model" : "org/m","top_p":0.10}"#);
    let listed = gateway.http.get(format!("{}/v1/models", gateway.url)).send().await.unwrap();
    let listed: Value = listed.json().await.unwrap();
    let ids: Vec<&str> = listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["chat", "org/m"]);
}

#[tokio::test]
async fn an_alias_in_a_form_is_replaced() {
    let server = server([]).await;
    let gateway = with_alias(&[&server], &[("org/m", 1)]).await;
    let form = |model: &str| {
        let field =
            |header: &str, value: &str| format!("--b\r\nContent-Disposition: form-data; {header}\r\n\r\n{value}\r\n");
        let file = field("name=\"file\"; filename=\"a.wav\"", "RIFF chat");
        format!("{}{file}--b--\r\n", field("name=\"model\"", model))
    };
    for (named, sent) in [("chat", "org/m"), ("org/m", "org/m"), ("other", "other")] {
        let request = gateway.http.post(format!("{}/v1/audio/transcriptions", gateway.url));
        let request = request.header(CONTENT_TYPE, "multipart/form-data; boundary=b").body(form(named));
        assert_eq!(request.send().await.unwrap().status(), 200);
        assert_eq!(completions(&server).last().unwrap().body, form(sent), "{named}");
    }
}

#[tokio::test]
async fn conversations_stay_with_their_deployment() {
    let (one, other) = (server([]).await, server([]).await);
    other.set_page("/v1/models", lists("org/n"));
    let gateway = with_alias(&[&one, &other], &[("org/m", 1), ("org/n", 1), ("org/absent", 8)]).await;
    let mut counts = Vec::new();
    for conversation in 0..20 {
        let mut messages = vec![
            json!({ "role": "system", "content": "Answer briefly." }),
            json!({ "role": "user", "content": format!("question {conversation}") }),
        ];
        for turn in 0..3 {
            let body = json!({ "model": "chat", "messages": messages }).to_string();
            assert_eq!(gateway.post("/v1/chat/completions", &body).await.status(), 200);
            messages.push(json!({ "role": "assistant", "content": "yes" }));
            messages.push(json!({ "role": "user", "content": format!("and {turn}?") }));
        }
        counts.push([completions(&one).len(), completions(&other).len()]);
    }
    assert!(counts.iter().all(|[one, other]| one % 3 == 0 && other % 3 == 0), "{counts:?}");
    assert!(counts.last().unwrap().iter().all(|count| *count > 0), "both get conversations: {counts:?}");
}

/// Messages of vLLM with blocks of 32 tokens: three blocks of the tokens from 100 on, their continuation, the same with
/// a salt, and others.
pub(crate) const MESSAGES: &str = include_str!("../../upstream/tests/fixtures/kv_events/vllm-0.32.0-int-hashes.hex");

pub(crate) fn publish(publisher: &FakePublisher, message: &str) {
    let digit = |hex: &str, at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    let frame = |hex: &str| (0..hex.len()).step_by(2).map(|at| digit(hex, at)).collect::<Vec<u8>>();
    let frames: Vec<Vec<u8>> = message.split(' ').map(frame).collect();
    publisher.publish([&frames[0], &frames[1], &frames[2]]);
}

/// Prompt tokens of a completion that are predicted to be cached.
async fn predicted(gateway: &Gateway, prompt: impl IntoIterator<Item = u32>) -> u64 {
    let body = json!({ "model": "org/m", "prompt": Vec::from_iter(prompt), "max_tokens": 1 }).to_string();
    let answer = gateway.post("/v1/completions", &body).await;
    assert_eq!(answer.status(), 200);
    let decision: Value = serde_json::from_str(answer.headers()["x-blockyard-explain"].to_str().unwrap()).unwrap();
    decision["cached_tokens"].as_u64().unwrap()
}

async fn until_predicted(gateway: &Gateway, prompt: impl IntoIterator<Item = u32> + Clone, cached: u64) {
    let all = async {
        while predicted(gateway, prompt.clone()).await != cached {
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, all).await.expect("the events arrive");
}

#[tokio::test]
async fn published_blocks_are_predicted_as_cached() {
    let publisher = FakePublisher::start().await.unwrap();
    let server = server([]).await;
    let endpoint = format!("tcp://*:{}", publisher.port());
    server.set_page("/kv_event_sources", Script::json(200, &json!([{ "endpoint": endpoint, "topic": "kv" }])));
    let metrics = "vllm:cache_config_info{block_size=\"32\"} 1.0\n";
    server.set_page("/metrics", Script::events([metrics]));
    let gateway = Gateway::of(vec![Upstream { kv_events: KvEvents::Auto, ..Upstream::new(server.uri()) }]).await;
    let mut messages = MESSAGES.lines();
    assert_eq!(predicted(&gateway, 100..200).await, 0);
    publish(&publisher, messages.next().unwrap());
    until_predicted(&gateway, 100..200, 96).await;
    assert_eq!(predicted(&gateway, 101..201).await, 0);
    let longer = (100..200).chain(300..400);
    publish(&publisher, messages.next().unwrap());
    until_predicted(&gateway, longer.clone(), 192).await;
    // The last message clears the cache and stores the first three blocks again.
    messages.for_each(|message| publish(&publisher, message));
    until_predicted(&gateway, longer, 96).await;

    // Text has the tokens that the server says.
    let sent = gateway.metric("blockyard_router_requests_total").await;
    server
        .set_page("/tokenize", Script::json(200, &json!({ "count": 100, "tokens": (100..200).collect::<Vec<u32>>() })));
    let answer = gateway.post("/v1/chat/completions", &chat("hello", true)).await;
    let decision: Value = serde_json::from_str(answer.headers()["x-blockyard-explain"].to_str().unwrap()).unwrap();
    assert_eq!(decision["cached_tokens"], 96);
    let asked = server.requests().into_iter().rfind(|request| request.uri.path() == "/tokenize").unwrap();
    let asked: Value = serde_json::from_slice(&asked.body).unwrap();
    assert_eq!(asked, json!({ "model": "org/m", "messages": [{ "role": "user", "content": "hello" }] }));
    assert_eq!(gateway.metric("blockyard_router_requests_total").await, sent + 1, "a question is no request");
    // A server that does not say them answers all the same.
    server.set_page("/tokenize", Script::json(404, &json!({})));
    assert_eq!(gateway.post("/v1/chat/completions", &chat("hello", true)).await.status(), 200);
}

/// What SGLang 0.5.23 publishes after a prompt of the tokens 1 to 128 with pages of 64: signed hashes, no fields that
/// have their default, always a rank.
fn sglang_payload() -> Vec<u8> {
    let text = |text: &str| [&[0xa0 | text.len() as u8], text.as_bytes()].concat();
    let hash = |hash: i64| [&[0xd3][..], &hash.to_be_bytes()].concat();
    let tokens: Vec<u8> = (1..=127).chain([0xcc, 128]).collect();
    [
        [&[0x93, 0xcb][..], &1.5_f64.to_be_bytes(), &[0x91, 0x87]].concat(),
        [text("type"), text("BlockStored")].concat(),
        [text("block_hashes"), vec![0x92], hash(-5), hash(i64::MIN)].concat(),
        [text("parent_block_hash"), vec![0xc0]].concat(),
        [text("token_ids"), vec![0xdc, 0, 128], tokens].concat(),
        [text("block_size"), vec![64]].concat(),
        [text("lora_id"), vec![0xc0]].concat(),
        [text("medium"), text("GPU"), vec![0]].concat(),
    ]
    .concat()
}

#[tokio::test]
async fn a_server_like_sglang_is_routed_by_its_events() {
    let publisher = FakePublisher::start().await.unwrap();
    let server = server([]).await;
    let models = json!({ "data": [{ "id": "org/m", "owned_by": "sglang", "max_model_len": 4096 }] });
    server.set_page("/v1/models", Script::json(200, &models));
    server.set_page("/metrics", Script::events(["sglang:num_running_reqs 0\nsglang:num_queue_reqs 0\n"]));
    let live = format!("tcp://127.0.0.1:{}", publisher.port()).parse().unwrap();
    let kv_events = KvEvents::At { live, replay: None };
    let upstream = Upstream { kv_events, block_size: NonZero::new(64), ..Upstream::new(server.uri()) };
    let gateway = Gateway::of(vec![upstream]).await;
    assert_eq!(predicted(&gateway, 1..200).await, 0);
    publisher.publish([&[], &0_u64.to_be_bytes(), &sglang_payload()]);
    until_predicted(&gateway, 1..200, 128).await;
}

#[tokio::test]
async fn a_request_goes_to_the_rank_that_has_its_blocks() {
    let publishers = [FakePublisher::start().await.unwrap(), FakePublisher::start().await.unwrap()];
    let server = server([]).await;
    let endpoint = |publisher: &FakePublisher| json!({ "endpoint": format!("tcp://*:{}", publisher.port()) });
    let sources = json!({ "0": endpoint(&publishers[0]), "1": endpoint(&publishers[1]) });
    server.set_page("/kv_event_sources", Script::json(200, &sources));
    server.set_page("/metrics", Script::events(["vllm:cache_config_info{block_size=\"32\"} 1.0\n"]));
    let gateway = Gateway::start(&[&server]).await;
    let mut messages = MESSAGES.lines();
    publish(&publishers[1], messages.next().unwrap());
    until_predicted(&gateway, 100..200, 96).await;
    let rank = || completions(&server).last().unwrap().headers["x-data-parallel-rank"].clone();
    assert_eq!(rank(), "1");
    for _ in 0..3 {
        assert_eq!((predicted(&gateway, 100..200).await, rank()), (96, "1".parse().unwrap()));
    }
}

#[tokio::test]
async fn a_prompt_of_unknown_tokens_is_found_by_its_text() {
    let publisher = FakePublisher::start().await.unwrap();
    let servers = [server([]).await, server([]).await];
    for server in &servers {
        let endpoint = format!("tcp://*:{}", publisher.port());
        server.set_page("/kv_event_sources", Script::json(200, &json!([{ "endpoint": endpoint, "block_size": 32 }])));
    }
    let gateway = Gateway::start(&[&servers[0], &servers[1]]).await;
    let asked = |number: u32| {
        let input = format!("{number} {}", "The keys and values of a block. ".repeat(50));
        json!({ "model": "org/m", "input": input }).to_string()
    };
    let mut chosen = Vec::new();
    for number in [1, 2, 3, 1, 2, 3] {
        let answer = gateway.post("/v1/responses", &asked(number)).await;
        let decision: Value = serde_json::from_str(answer.headers()["x-blockyard-explain"].to_str().unwrap()).unwrap();
        drop(answer.bytes().await.unwrap());
        let index = decision["candidates"][0]["index"].as_str().unwrap().to_owned();
        assert_eq!(index, "estimated: the tokens of the prompt are unknown; compared by its text");
        chosen.push((decision["chosen"].as_str().unwrap().to_owned(), decision["cached_tokens"].as_u64().unwrap()));
    }
    let (first, again) = chosen.split_at(3);
    assert!(
        first.iter().all(|(_, cached)| *cached == 0) && again.iter().all(|(_, cached)| *cached == 384),
        "{chosen:?}"
    );
    assert!(first.iter().zip(again).all(|(first, again)| first.0 == again.0), "{chosen:?}");
}

/// A folder with a tokenizer whose tokens are bytes, and a chat template.
fn tokenizer_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let bytes: serde_json::Map<String, Value> =
        (0..256_u32).map(|byte| (format!("<0x{byte:02X}>"), byte.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [{ "type": "ByteFallback" }, { "type": "Fuse" }] },
        "model": { "type": "BPE", "vocab": bytes, "merges": [], "byte_fallback": true, "unk_token": "<0x00>" },
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({ "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}" });
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

#[tokio::test]
async fn a_local_tokenizer_is_used_if_it_agrees_with_the_server() {
    let folder = tokenizer_folder();
    for (tokenize, used, source) in [
        (Script::json(404, &json!({})), 3, "local"),
        (Script::json(200, &json!({ "count": 3, "tokens": [1, 2, 3] })), 0, "estimate"),
    ] {
        let server = server([]).await;
        server.set_page("/tokenize", tokenize);
        let gateway = Gateway::with(Config {
            upstreams: vec![Upstream::new(server.uri())],
            tokenizers: [("org/m".to_owned(), folder.path().to_owned())].into(),
            ..Config::with_cache(Path::new("/nonexistent"))
        });
        let gateway = gateway.await;
        assert_eq!(gateway.metric("blockyard_frontend_local_tokenizer_used").await, used);
        let text = "sixteen bytes!! ".repeat(4);
        assert_eq!(gateway.post("/v1/chat/completions", &chat(&text, true)).await.status(), 200);
        let counted = format!("blockyard_frontend_relayed_prompts_total{{model=\"org/m\",tokens=\"{source}\"}} 1");
        let metrics = gateway.http.get(format!("{}/metrics", gateway.url)).send().await.unwrap().text().await.unwrap();
        assert!(metrics.lines().any(|line| line == counted), "{counted}");
        let asked = server.requests().into_iter().filter(|request| request.uri.path() == "/tokenize").count();
        assert_eq!(asked, if used == 0 { 8 } else { 1 }, "only when it is registered");
    }
}

#[tokio::test]
async fn each_model_of_an_alias_has_its_own_tokenizer() {
    let folder = tokenizer_folder();
    let (one, other) = (server([]).await, server([]).await);
    other.set_page("/v1/models", lists("org/n"));
    for server in [&one, &other] {
        server.set_page("/tokenize", Script::json(404, &json!({})));
    }
    let deployment = |model: &str| Deployment { model: model.to_owned(), weight: 1 };
    let gateway = Gateway::with(Config {
        upstreams: [&one, &other].map(|server| Upstream::new(server.uri())).into(),
        aliases: [("chat".to_owned(), Alias { deployments: vec![deployment("org/m"), deployment("org/n")] })].into(),
        tokenizers: [("org/n".to_owned(), folder.path().to_owned())].into(),
        ..Config::with_cache(Path::new("/nonexistent"))
    })
    .await;
    for number in 0..20 {
        let body = json!({ "model": "chat", "prompt": format!("conversation {number}") }).to_string();
        assert_eq!(gateway.post("/v1/completions", &body).await.status(), 200);
    }
    let sent = |server| completions(server).iter().filter(|request| request.uri.path() == "/v1/completions").count();
    let metrics = gateway.http.get(format!("{}/metrics", gateway.url)).send().await.unwrap().text().await.unwrap();
    for (source, count) in [("local", sent(&other)), ("estimate", sent(&one))] {
        let counted = format!("blockyard_frontend_relayed_prompts_total{{model=\"chat\",tokens=\"{source}\"}} {count}");
        assert!(count > 0 && metrics.lines().any(|line| line == counted), "{counted}");
    }
}

#[tokio::test]
async fn a_folder_without_a_tokenizer_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Config::with_cache(Path::new("/nonexistent"));
    config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
    config.upstreams = vec![Upstream::new("http://127.0.0.1:9".parse().unwrap())];
    config.tokenizers.insert("org/m".to_owned(), folder.path().to_owned());
    let Err(error) = Node::start(&config).await else { panic!("it started") };
    let error = format!("{error:#}");
    assert!(error.contains("tokenizers.\"org/m\"") && error.contains("tokenizer.json is missing"), "{error}");
}
