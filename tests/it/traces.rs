//! Spans of one process: of a gateway before scripted servers, and of the native engine with its tiers.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use crate::collector::Collector;
use crate::process::client;
use blockyard::config::{Budget, ByteSize, Config, Listen, Tracing, Upstream};
use blockyard::node::{Node, Process};
use prometheus::proto::MetricFamily;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use upstream::relay::fake::{FakeEngine, Recorded, Script};

const MODEL: &str = "org/m";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// Requests of which one reaches a server of two: fewer than one run in a million fails by chance.
const REQUESTS: usize = 20;

fn answer() -> Script {
    let usage = json!({ "prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22 });
    let choice = json!({ "index": 0, "message": { "role": "assistant", "content": "hi" }, "finish_reason": "stop" });
    Script::json(200, &json!({ "id": "x", "object": "chat.completion", "choices": [choice], "usage": usage }))
}

async fn server(scripts: impl IntoIterator<Item = Script>) -> FakeEngine {
    let server = FakeEngine::start(scripts).await.unwrap();
    let models = json!({ "object": "list", "data": [{ "id": MODEL, "max_model_len": 4096 }] });
    server.set_page("/v1/models", Script::json(200, &models));
    // Health checks take no script.
    server.set_page("/health", Script::json(200, &json!({})));
    server
}

fn tracing_to(endpoint: &str, sample_ratio: f64) -> Tracing {
    Tracing { endpoint: Some(endpoint.to_owned()), sample_ratio, ..Tracing::default() }
}

/// A gateway that knows all of these servers.
async fn gateway(servers: &[&FakeEngine], tracing: Tracing) -> Node {
    let upstreams = servers.iter().map(|server| Upstream::new(server.uri())).collect();
    let mut config = Config { upstreams, tracing, ..Config::with_cache(Path::new("/nonexistent")) };
    config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
    let node = Node::start(&config).await.unwrap();
    while metric(&node, "blockyard_router_workers") < servers.len() as f64 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    node
}

/// The sum of a metric over its labels.
fn metric(node: &Node, name: &str) -> f64 {
    let families = node.registry().gather();
    let series = families.iter().filter(|family| family.name() == name).flat_map(MetricFamily::get_metric);
    series.map(|series| series.get_gauge().get_value() + series.get_counter().get_value()).sum()
}

async fn chat(node: &Node, traceparent: Option<&str>) -> reqwest::Response {
    let body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hello" }] });
    let request = client().post(format!("http://{}/v1/chat/completions", node.address())).json(&body);
    let request = request.header("x-blockyard-explain", "1");
    match traceparent {
        Some(context) => request.header("traceparent", context).header("tracestate", "a=1"),
        None => request,
    }
    .send()
    .await
    .unwrap()
}

fn posted(server: &FakeEngine) -> Vec<Recorded> {
    server.requests().into_iter().filter(|request| request.method == "POST").collect()
}

#[tokio::test]
async fn a_server_gets_the_trace_and_the_request_id() {
    let collector = Collector::start().await;
    let server = server([answer(), answer(), answer()]).await;
    let node = gateway(&[&server], tracing_to(collector.url(), 0.0)).await;
    let sampled = format!("00-{TRACE}-{PARENT}-01");
    let response = chat(&node, Some(&sampled)).await;
    let explained: Value = serde_json::from_str(response.headers()["x-blockyard-explain"].to_str().unwrap()).unwrap();
    assert_eq!(explained["trace_id"], TRACE);
    let id = response.headers()["x-request-id"].clone();
    let trace = collector.trace(TRACE, &["POST /v1/chat/completions", "attempt"]).await;
    let root = trace.child(PARENT, "POST /v1/chat/completions");
    assert_eq!((root.text("gen_ai.operation.name"), root.number("gen_ai.usage.input_tokens")), ("chat", 20));
    let attempt = trace.child(&root.id, "attempt");
    assert_eq!(attempt.text("gen_ai.request.model"), MODEL);
    let sent = posted(&server);
    assert_eq!(sent[0].headers["traceparent"], format!("00-{TRACE}-{}-01", attempt.id));
    assert_eq!((&sent[0].headers["tracestate"], &sent[0].headers["x-request-id"]), (&"a=1".parse().unwrap(), &id));

    // A trace that is not recorded is passed on as such, and so is the decision about a new one.
    let not_sampled = format!("00-{TRACE}-{PARENT}-00");
    for context in [Some(not_sampled.as_str()), None] {
        let response = chat(&node, context).await;
        assert!(!response.headers()["x-blockyard-explain"].to_str().unwrap().contains("trace_id"));
    }
    let sent: Vec<String> =
        posted(&server).iter().map(|request| request.headers["traceparent"].to_str().unwrap().to_owned()).collect();
    assert!(sent[1].starts_with(&format!("00-{TRACE}-")) && sent[1].ends_with("-00"), "{sent:?}");
    assert!(!sent[2].contains(TRACE) && sent[2].ends_with("-00"), "{sent:?}");
    node.shutdown().await;
    assert!(collector.spans().iter().all(|span| span.parent.is_some() && span.trace == TRACE));
    assert_eq!(collector.spans().iter().filter(|span| span.name == "attempt").count(), 1);
}

#[tokio::test]
async fn without_tracing_the_client_s_trace_passes_unchanged() {
    let server = server([answer()]).await;
    let node = gateway(&[&server], Tracing::default()).await;
    let context = format!("00-{TRACE}-{PARENT}-01");
    assert!(chat(&node, Some(&context)).await.status().is_success());
    let sent = posted(&server);
    assert_eq!(
        (&sent[0].headers["traceparent"], &sent[0].headers["tracestate"]),
        (&context.parse().unwrap(), &"a=1".parse().unwrap())
    );
    node.shutdown().await;
}

#[tokio::test]
async fn a_retry_is_a_second_attempt_in_the_same_trace() {
    let collector = Collector::start().await;
    let busy = || Script::json(503, &json!({ "error": { "message": "busy" } }));
    let failing = server((0..REQUESTS).map(|_| busy())).await;
    let working = server((0..REQUESTS).map(|_| answer())).await;
    let node = gateway(&[&failing, &working], tracing_to(collector.url(), 1.0)).await;
    // Equal servers are chosen at random.
    for _ in 0..REQUESTS {
        assert!(chat(&node, None).await.status().is_success());
        if metric(&node, "blockyard_router_retries_total") > 0.0 {
            break;
        }
    }
    node.shutdown().await;
    let spans = collector.spans();
    let failed = spans.iter().find(|span| span.name == "attempt" && span.failed).expect("one reached the busy server");
    let trace = collector.trace(&failed.trace, &[]).await;
    let root = trace.0.iter().find(|span| span.parent.is_none()).unwrap();
    let mut attempts: Vec<_> = trace.children(&root.id).filter(|span| span.name == "attempt").collect();
    attempts.sort_by_key(|span| span.number("blockyard.attempt"));
    assert_eq!(attempts.iter().map(|span| span.failed).collect::<Vec<_>>(), [true, false], "{trace:#?}");
    assert_ne!(attempts[0].text("blockyard.worker"), attempts[1].text("blockyard.worker"));
    assert!(!root.failed && trace.children(&root.id).filter(|span| span.name == "route").count() == 2);
}

#[tokio::test]
async fn requests_are_served_while_the_collector_is_away() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = server((0..4).map(|_| answer())).await;
    let node = gateway(&[&server], tracing_to(&format!("http://{closed}"), 1.0)).await;
    for _ in 0..4 {
        assert!(chat(&node, None).await.status().is_success());
    }
    let registry = node.registry().clone();
    node.shutdown().await;
    let families = registry.gather();
    let counted = |name: &str| {
        let family = families.iter().find(|family| family.name() == name).unwrap();
        family.get_metric().iter().map(|series| series.get_counter().get_value()).sum::<f64>()
    };
    assert!(counted("blockyard_tracing_spans_exported_total") < 1.0);
    assert!(counted("blockyard_tracing_spans_dropped_total") >= 4.0 * 3.0, "request, route and attempt of each");
}

#[tokio::test(flavor = "multi_thread")]
async fn loads_and_stores_of_blocks_are_spans() {
    let collector = Collector::start().await;
    let data = tempfile::tempdir().unwrap();
    let budget = |mib: u64| Budget::Bytes(ByteSize(mib << 20));
    let mut config = Config { workers: "both:1".parse().unwrap(), ..Config::with_cache(data.path()) };
    config.model = "tiny".parse().unwrap();
    config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
    (config.tiers.g1, config.tiers.g2, config.tiers.g3) = (budget(32), budget(32), budget(64));
    config.tracing = tracing_to(collector.url(), 1.0);
    let prompt: Vec<u32> = (0..640).map(|n| 10 + n * 7 % 500).collect();
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0});
    let ask = async |node: &Node| {
        let url = format!("http://{}/v1/completions", node.address());
        assert!(client().post(url).json(&body).send().await.unwrap().status().is_success());
    };
    let node = Node::start(&config).await.unwrap();
    ask(&node).await;
    node.shutdown().await;
    let offloaded = collector.spans();
    let offload = offloaded.iter().find(|span| span.name == "offload").unwrap();
    assert_eq!((offload.text("blockyard.tier"), offload.parent.as_ref()), ("g3", None));
    assert!(offload.number("blockyard.blocks") > 0 && offload.number("blockyard.bytes") > 0);
    assert!(offloaded.iter().all(|span| span.name != "onboard"));

    // A new process has the blocks on its disk only. On a busy machine blocks that load too slowly are computed.
    loop {
        let node = Node::start(&config).await.unwrap();
        ask(&node).await;
        node.shutdown().await;
        if collector.spans().iter().any(|span| span.name == "onboard" && span.number("blockyard.blocks") > 0) {
            break;
        }
    }
    let spans = collector.spans();
    let onboard = spans.iter().find(|span| span.name == "onboard" && span.number("blockyard.blocks") > 0).unwrap();
    assert_eq!(onboard.text("blockyard.tier"), "g3");
    let trace = collector.trace(&onboard.trace, &["POST /v1/completions", "prefill", "decode"]).await;
    let attempt = trace.0.iter().find(|span| Some(&span.id) == onboard.parent.as_ref()).unwrap();
    assert_eq!(attempt.name, "attempt");
    assert!(trace.child(&attempt.id, "prefill").number("gen_ai.usage.cache_read.input_tokens") > 0);
}
