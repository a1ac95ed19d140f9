//! Servers that publish KV events, and prompts that are routed by them.

use super::{Gateway, TIMEOUT, chat, completions, models, server, tokenizer_folder};
use blockyard::config::{Config, KvEvents, KvSockets, Upstream};
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use std::num::NonZero;
use std::path::Path;
use std::time::Duration;
use tokio::time::sleep;
use upstream::kv_events::fake::FakePublisher;
use upstream::relay::fake::{FakeEngine, Script};

/// Messages of vLLM with blocks of 32 tokens: three blocks of the tokens from 100 on, their continuation, the same with
/// a salt, and others.
pub(crate) const MESSAGES: &str = include_str!("../../../upstream/tests/fixtures/kv_events/vllm-0.32.0-int-hashes.hex");

pub(crate) fn publish(publisher: &FakePublisher, message: &str) {
    let [topic, number, batch] = frames(message);
    publisher.publish([&topic, &number, &batch]);
}

/// The frames of a message in hexadecimal digits.
fn frames(message: &str) -> [Vec<u8>; 3] {
    let digit = |hex: &str, at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    let frame = |hex: &str| (0..hex.len()).step_by(2).map(|at| digit(hex, at)).collect::<Vec<u8>>();
    let frames: Vec<Vec<u8>> = message.split(' ').map(frame).collect();
    frames.try_into().unwrap()
}

/// Prompt tokens of a completion that are predicted to be cached.
async fn predicted(gateway: &Gateway, prompt: impl IntoIterator<Item = u32>) -> u64 {
    predicted_of(gateway, "org/m", prompt).await
}

async fn predicted_of(gateway: &Gateway, model: &str, prompt: impl IntoIterator<Item = u32>) -> u64 {
    decision_of(gateway, model, prompt).await["cached_tokens"].as_u64().unwrap()
}

/// The decision about a completion.
async fn decision(gateway: &Gateway, prompt: impl IntoIterator<Item = u32>) -> Value {
    decision_of(gateway, "org/m", prompt).await
}

async fn decision_of(gateway: &Gateway, model: &str, prompt: impl IntoIterator<Item = u32>) -> Value {
    let body = json!({ "model": model, "prompt": Vec::from_iter(prompt), "max_tokens": 1 }).to_string();
    let answer = gateway.post("/v1/completions", &body).await;
    assert_eq!(answer.status(), 200);
    serde_json::from_str(answer.headers()["x-blockyard-explain"].to_str().unwrap()).unwrap()
}

/// The first decision that predicts this number of cached tokens.
async fn until_predicted(gateway: &Gateway, prompt: impl IntoIterator<Item = u32> + Clone, cached: u64) -> Value {
    let all = async {
        loop {
            let decision = decision(gateway, prompt.clone()).await;
            if decision["cached_tokens"] == cached {
                break decision;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, all).await.expect("the events arrive")
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
    let sent = gateway.metric("blockyard_router_requests_total");
    server
        .set_page("/tokenize", Script::json(200, &json!({ "count": 100, "tokens": (100..200).collect::<Vec<u32>>() })));
    let answer = gateway.post("/v1/chat/completions", &chat("hello", true)).await;
    let decision: Value = serde_json::from_str(answer.headers()["x-blockyard-explain"].to_str().unwrap()).unwrap();
    assert_eq!(decision["cached_tokens"], 96);
    let asked = server.requests().into_iter().rfind(|request| request.uri.path() == "/tokenize").unwrap();
    let asked: Value = serde_json::from_slice(&asked.body).unwrap();
    assert_eq!(asked, json!({ "model": "org/m", "messages": [{ "role": "user", "content": "hello" }] }));
    assert_eq!(gateway.metric("blockyard_router_requests_total"), sent + 1, "a question is no request");
    // A server that does not say them answers all the same.
    server.set_page("/tokenize", Script::json(404, &json!({})));
    assert_eq!(gateway.post("/v1/chat/completions", &chat("hello", true)).await.status(), 200);
}

#[tokio::test]
async fn prompts_of_other_endpoints_go_where_the_blocks_of_their_tokens_are() {
    let publishers = [FakePublisher::start().await.unwrap(), FakePublisher::start().await.unwrap()];
    let servers = [server([]).await, server([]).await];
    for (server, publisher) in servers.iter().zip(&publishers) {
        let model = json!({ "id": "org/m", "owned_by": "vllm", "max_model_len": 4096 });
        server.set_page("/v1/models", Script::json(200, &json!({ "data": [model] })));
        let source = json!([{ "endpoint": format!("tcp://*:{}", publisher.port()), "block_size": 32 }]);
        server.set_page("/kv_event_sources", Script::json(200, &source));
        let tokens = json!({ "count": 100, "tokens": (100..200).collect::<Vec<u32>>() });
        server.set_page("/tokenize", Script::json(200, &tokens));
    }
    let gateway = Gateway::start(&[&servers[0], &servers[1]]).await;
    publish(&publishers[1], MESSAGES.lines().next().unwrap());
    let holder = until_predicted(&gateway, 100..200, 96).await["chosen"].clone();
    let sent = || servers.iter().flat_map(FakeEngine::requests).collect::<Vec<_>>();
    let asked = || {
        let asked = sent().into_iter().filter(|request| request.uri.path() == "/tokenize");
        asked.map(|request| serde_json::from_slice(&request.body).unwrap()).collect::<Vec<Value>>()
    };
    let user = json!({ "role": "user", "content": "hello" });
    let system = json!({ "role": "system", "content": "brief" });
    let text = json!([{ "type": "text", "text": "hello", "cache_control": { "type": "ephemeral" } }]);
    for (path, body, expected) in [
        (
            "/v1/messages",
            json!({ "model": "org/m", "max_tokens": 9, "system": "brief",
                "messages": [{ "role": "user", "content": text }] }),
            json!({ "model": "org/m", "messages": [system, user] }),
        ),
        (
            "/v1/responses",
            json!({ "model": "org/m", "input": "hello" }),
            json!({ "model": "org/m", "messages": [user], "add_special_tokens": true }),
        ),
        (
            "/v1/embeddings",
            json!({ "model": "org/m", "input": ["hello"] }),
            json!({ "model": "org/m", "prompt": "hello" }),
        ),
    ] {
        let body = body.to_string();
        let answer = gateway.post(path, &body).await;
        let decision: Value = serde_json::from_str(answer.headers()["x-blockyard-explain"].to_str().unwrap()).unwrap();
        drop(answer.bytes().await.unwrap());
        assert_eq!((&decision["chosen"], &decision["cached_tokens"]), (&holder, &json!(96)), "{path}");
        assert!(asked().contains(&expected), "{path}: {:?}", asked());
        assert!(sent().iter().any(|request| request.uri.path() == path && request.body == body), "{path}: unchanged");
    }
    let engine = "blockyard_frontend_relayed_prompts_total{model=\"org/m\",tokens=\"engine\"} 3";
    let metrics = gateway.http.get(format!("{}/metrics", gateway.url)).send().await.unwrap().text().await.unwrap();
    assert!(metrics.lines().any(|line| line == engine), "{engine}");
    // What the server has of an earlier response is not in the request.
    let continued = json!({ "model": "org/m", "input": "hello", "previous_response_id": "resp_1" }).to_string();
    assert_eq!(gateway.post("/v1/responses", &continued).await.status(), 200);
    assert_eq!(asked().len(), 3);
}

#[tokio::test]
async fn published_blocks_are_predicted_under_all_names_of_the_model() {
    let publisher = FakePublisher::start().await.unwrap();
    let server = server([]).await;
    let name = |id: &str| json!({ "id": id, "root": "/srv/m", "max_model_len": 4096 });
    server.set_page("/v1/models", Script::json(200, &json!({ "data": [name("org/m"), name("latest")] })));
    let endpoint = format!("tcp://*:{}", publisher.port());
    server.set_page("/kv_event_sources", Script::json(200, &json!([{ "endpoint": endpoint, "block_size": 32 }])));
    let gateway = Gateway::start(&[&server]).await;
    publish(&publisher, MESSAGES.lines().next().unwrap());
    until_predicted(&gateway, 100..200, 96).await;
    let under_the_other = async {
        while gateway.metric("blockyard_router_workers") < 2 {
            sleep(Duration::from_millis(10)).await;
        }
        while predicted_of(&gateway, "latest", 100..200).await != 96 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, under_the_other).await.expect("the events arrive");
}

/// A server at a port, with a publisher at another; 0: any port.
async fn publishing_server(port: u16, publisher_port: u16) -> (FakeEngine, FakePublisher) {
    let server = FakeEngine::start_at((Ipv4Addr::LOCALHOST, port).into(), []).await.unwrap();
    let publisher = FakePublisher::start_at(publisher_port, None).await.unwrap();
    server.set_page("/v1/models", models());
    server.set_page("/health", Script::json(200, &json!({})));
    let source = json!([{ "endpoint": format!("tcp://*:{}", publisher.port()), "block_size": 32 }]);
    server.set_page("/kv_event_sources", Script::json(200, &source));
    (server, publisher)
}

#[tokio::test]
async fn the_index_follows_a_server_that_is_killed_and_started_again() {
    let ((one, publisher), (other, _no_events)) = (publishing_server(0, 0).await, publishing_server(0, 0).await);
    let gateway = Gateway::start(&[&one, &other]).await;
    publish(&publisher, MESSAGES.lines().next().unwrap());
    let killed = until_predicted(&gateway, 100..200, 96).await["chosen"].clone();
    let (port, publisher_port) = (one.address().port(), publisher.port());
    one.kill().await;
    publisher.kill().await;
    for _ in 0..4 {
        assert_ne!(decision(&gateway, 100..200).await["chosen"], killed, "the other server answers");
    }

    let (one, publisher) = publishing_server(port, publisher_port).await;
    // The new process has no blocks. Requests reach it when it is known to be healthy.
    let forgotten = async {
        loop {
            let decision = decision(&gateway, 100..200).await;
            let candidates = decision["candidates"].as_array().unwrap();
            let is_empty = |one: &Value| one["worker"] == killed && one["uncached_tokens"] == 100;
            if !completions(&one).is_empty() && candidates.iter().any(is_empty) {
                break;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, forgotten).await.expect("the blocks of the killed process are forgotten");
    publish(&publisher, MESSAGES.lines().next().unwrap());
    let again = until_predicted(&gateway, 100..200, 96).await;
    assert_eq!(again["chosen"], killed, "it has its place again");
}

#[tokio::test]
async fn what_subscribers_miss_is_replayed() {
    let publisher = FakePublisher::start_at(0, Some(0)).await.unwrap();
    let server = server([]).await;
    let [live, replay] = [publisher.port(), publisher.replay_port().unwrap()];
    let [endpoint, replay_endpoint] = [live, replay].map(|port| format!("tcp://*:{port}"));
    let source = json!([{ "endpoint": endpoint, "replay_endpoint": replay_endpoint, "block_size": 32 }]);
    server.set_page("/kv_event_sources", Script::json(200, &source));
    let mut messages = MESSAGES.lines();
    // Published before the gateway starts.
    publish(&publisher, messages.next().unwrap());
    let gateway = Gateway::start(&[&server]).await;
    until_predicted(&gateway, 100..200, 96).await;
    let longer = (100..200).chain(300..400);
    let [topic, number, batch] = frames(messages.next().unwrap());
    publisher.lose([&topic, &number, &batch]);
    assert_eq!(predicted(&gateway, longer.clone()).await, 96);
    // The next message shows that one is missing.
    publish(&publisher, messages.next().unwrap());
    until_predicted(&gateway, longer.clone(), 192).await;

    // A new process at the same ports, which may have started before the end of the former one was noticed.
    publisher.kill().await;
    let publisher = FakePublisher::start_at(live, Some(replay)).await.unwrap();
    publish(&publisher, MESSAGES.lines().next().unwrap());
    until_predicted(&gateway, longer, 96).await;
    until_predicted(&gateway, 100..200, 96).await;
}

#[tokio::test]
async fn events_are_replayed_once_each_model_has_its_log() {
    let publisher = FakePublisher::start_at(0, Some(0)).await.unwrap();
    let [live, replay] = [publisher.port(), publisher.replay_port().unwrap()];
    let [endpoint, replay_endpoint] = [live, replay].map(|port| format!("tcp://*:{port}"));
    publish(&publisher, MESSAGES.lines().next().unwrap());
    let server = server([]).await;
    let source = json!([{ "endpoint": endpoint, "replay_endpoint": replay_endpoint, "block_size": 32 }]);
    server.set_page("/kv_event_sources", Script::json(200, &source));
    // The comparison of the local tokenizer takes longer than the replay.
    server.set_page("/tokenize", Script::json(404, &json!({})).after(Duration::from_millis(500)));
    let folder = tokenizer_folder();
    let gateway = Gateway::with(Config {
        upstreams: vec![Upstream::new(server.uri())],
        tokenizers: [("org/m".to_owned(), folder.path().to_owned())].into(),
        ..Config::with_cache(Path::new("/nonexistent"))
    });
    let gateway = gateway.await;
    until_predicted(&gateway, 100..200, 96).await;
    assert_eq!(gateway.metric("blockyard_upstream_kv_blocks_ignored_total"), 0, "the cache is not an estimate");
}

/// What SGLang 0.5.23 publishes after a prompt of the tokens 1 to 128 with pages of 64: signed hashes, no fields that
/// have their default, always a rank.
pub(crate) fn sglang_payload() -> Vec<u8> {
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

/// A server that answers as SGLang 0.5.23 does, with pages of 64 tokens. Its first rank publishes at this port.
pub(crate) async fn sglang(port: u16, ranks: u32) -> FakeEngine {
    let server = server([]).await;
    let model =
        json!({ "id": "org/m", "object": "model", "owned_by": "sglang", "root": "org/m", "max_model_len": 4096 });
    server.set_page("/v1/models", Script::json(200, &json!({ "object": "list", "data": [model] })));
    server.set_page("/metrics", Script::events(["sglang:num_running_reqs 0\nsglang:num_queue_reqs 0\n"]));
    // The fields have the names of the real page; its values are those of another server.
    let page = include_str!("../../../upstream/tests/fixtures/server_info/sglang-0.5.23.json");
    let mut info: Value = page.parse().unwrap();
    let config = json!({ "publisher": "zmq", "endpoint": format!("tcp://*:{port}") });
    info["kv_events_config"] = json!(config.to_string());
    (info["dcp_size"], info["dp_size"], info["attn_dp_size"]) = (json!(1), json!(1), json!(ranks));
    info["kv_events"] = json!({
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port, "topic": "", "block_size": 64,
        "dp_size": ranks,
    });
    server.set_page("/server_info", Script::json(200, &info));
    server
}

#[tokio::test]
async fn a_server_like_sglang_says_where_its_events_are() {
    let publisher = FakePublisher::start().await.unwrap();
    let server = sglang(publisher.port(), 1).await;
    let gateway = Gateway::start(&[&server]).await;
    assert_eq!(predicted(&gateway, 1..200).await, 0);
    publisher.publish([&[], &0_u64.to_be_bytes(), &sglang_payload()]);
    until_predicted(&gateway, 1..200, 128).await;
}

#[tokio::test]
async fn a_server_like_sglang_is_routed_by_the_events_at_a_configured_address() {
    let publisher = FakePublisher::start().await.unwrap();
    let server = sglang(1, 1).await;
    let live = format!("tcp://127.0.0.1:{}", publisher.port()).parse().unwrap();
    let kv_events = KvEvents::At(vec![KvSockets { live, replay: None }]);
    let gateway = Gateway::of(vec![Upstream { kv_events, ..Upstream::new(server.uri()) }]).await;
    publisher.publish([&[], &0_u64.to_be_bytes(), &sglang_payload()]);
    until_predicted(&gateway, 1..200, 128).await;
}

/// Two publishers, of which the second has the port after that of the first.
async fn neighbours() -> [FakePublisher; 2] {
    loop {
        let first = FakePublisher::start().await.unwrap();
        if let Ok(second) = FakePublisher::start_at(first.port().saturating_add(1), None).await {
            return [first, second];
        }
    }
}

#[tokio::test]
async fn a_request_goes_to_the_rank_of_sglang_that_has_its_blocks() {
    let publishers = neighbours().await;
    let server = sglang(publishers[0].port(), 2).await;
    let gateway = Gateway::start(&[&server]).await;
    publishers[1].publish([&[], &0_u64.to_be_bytes(), &sglang_payload()]);
    until_predicted(&gateway, 1..200, 128).await;
    for _ in 0..3 {
        assert_eq!(predicted(&gateway, 1..200).await, 128);
        assert_eq!(completions(&server).last().unwrap().headers["x-data-parallel-rank"], "1");
    }
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

/// A server that does not say where it publishes, as vLLM before `/kv_event_sources`.
#[tokio::test]
async fn a_request_goes_to_the_rank_whose_configured_publisher_has_its_blocks() {
    let publishers = [FakePublisher::start().await.unwrap(), FakePublisher::start().await.unwrap()];
    let server = server([]).await;
    let sockets = |publisher: &FakePublisher| {
        let live = format!("tcp://127.0.0.1:{}", publisher.port()).parse().unwrap();
        KvSockets { live, replay: None }
    };
    let kv_events = KvEvents::At(publishers.iter().map(sockets).collect());
    let upstream = Upstream { kv_events, block_size: NonZero::new(32), ..Upstream::new(server.uri()) };
    let gateway = Gateway::of(vec![upstream]).await;
    publish(&publishers[1], MESSAGES.lines().next().unwrap());
    until_predicted(&gateway, 100..200, 96).await;
    for _ in 0..3 {
        assert_eq!(predicted(&gateway, 100..200).await, 96);
        assert_eq!(completions(&server).last().unwrap().headers["x-data-parallel-rank"], "1");
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
