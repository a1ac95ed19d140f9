//! One trace and one request id over all processes that serve a request.

use super::*;
use crate::collector::{CollectedSpan, Collector, Trace};

/// A client's trace, and the span in which it sends the request.
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// Asks for 24 tokens within a trace, which the client records or not.
async fn ask(frontend: &Process, prompt: &[u32], id: &str, flags: &str) -> Value {
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0});
    let request = client().post(format!("{}/v1/completions", frontend.client.url)).json(&body);
    let request = request.header("traceparent", format!("00-{TRACE}-{PARENT}-{flags}")).header("x-request-id", id);
    request.send().await.unwrap().json().await.unwrap()
}

/// The lines of a process's log about a request that was served.
fn lines_of(log: &str, id: &str) -> Vec<Value> {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["request_id"] == id && line["message"] == "request finished").collect()
}

/// Ends a process in order, and returns its log.
fn stopped(process: Process) -> String {
    process.signal("TERM");
    let (status, log) = process.wait();
    assert!(status.success(), "{status}:\n{log}");
    log
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_spans_the_frontend_the_prefill_and_the_decode_worker() {
    let Some(cluster) = Cluster::new() else { return };
    let collector = Collector::start().await;
    let endpoint = format!("tracing.endpoint={}", collector.url());
    let common = ["--set", &endpoint, "--set", "tracing.sample_ratio=0", "--set", "log.format=json"];
    let (first, second) = (cluster.seat("a"), cluster.seat("b"));
    let of_role = |role| [&["--workers", role], &common[..]].concat();
    let (first_role, second_role) = (of_role("prefill:1"), of_role("decode:1"));
    let (prefill, decode) =
        tokio::join!(cluster.worker_at(&first, &first_role), cluster.worker_at(&second, &second_role));
    let frontend = cluster.frontend_with(&[&["--set", "router.disaggregation=always"], &common[..]].concat()).await;
    until_workers(&frontend, 2).await;
    // Neither the client nor the ratio asks for these.
    assert!(ask(&frontend, &prompt(0), "not-sampled", "00").await["choices"].is_array());
    assert!(frontend.client.complete(&prompt(1)).await.is_ok());
    // A hand-over that does not begin in time is abandoned, and the prompt computed.
    let mut id = String::new();
    for seed in 2.. {
        let before = decode.client.metric("blockyard_tier_transfer_bytes_total", "tier=\"peer\"").await;
        id = format!("request-{seed}");
        assert!(ask(&frontend, &prompt(seed), &id, "01").await["choices"].is_array());
        if decode.client.metric("blockyard_tier_transfer_bytes_total", "tier=\"peer\"").await > before {
            break;
        }
    }
    let names = ["POST /v1/completions", "hand-over", "decode", "prefill"];
    let of_request = |spans: &[CollectedSpan]| {
        let root = spans
            .iter()
            .find(|span| span.attributes.get("blockyard.request_id") == Some(&json!(id)) && span.name == names[0]);
        root.cloned()
    };
    let (root, trace) = loop {
        let trace = collector.trace(TRACE, &names).await;
        let is_complete = |root: &CollectedSpan| trace.children(&root.id).any(|span| span.name == "attempt");
        match of_request(&trace.0).filter(is_complete) {
            Some(root) if decoded(&trace, &root) => break (root, trace),
            _ => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    assert_eq!((root.parent.as_deref(), root.service.as_str()), (Some(PARENT), "blockyard-frontend"));
    assert_eq!((root.text("gen_ai.request.model"), root.number("gen_ai.usage.input_tokens")), ("tiny", 300));
    assert_eq!((root.number("gen_ai.usage.output_tokens"), root.number("http.response.status_code")), (24, 200));
    let route = trace.child(&root.id, "route");
    assert_eq!(route.number("blockyard.routing.candidates"), 1, "one worker decodes");
    assert!(
        route.attributes.contains_key("blockyard.prefill_worker") && route.attributes.contains_key("blockyard.worker")
    );
    let attempt = trace.child(&root.id, "attempt");
    let leg = trace.child(&attempt.id, "remote prefill");
    let prefilled = trace.child(&leg.id, "worker request");
    assert_eq!((prefilled.service.as_str(), prefilled.text("blockyard.work")), ("blockyard-worker", "prefill"));
    let _ = (trace.child(&prefilled.id, "engine queue"), trace.child(&prefilled.id, "prefill"));
    let decoding = trace.child(&attempt.id, "worker request");
    assert_eq!((decoding.service.as_str(), decoding.text("blockyard.work")), ("blockyard-worker", "resume"));
    assert_ne!(decoding.text("blockyard.worker"), prefilled.text("blockyard.worker"));
    assert!(trace.child(&decoding.id, "hand-over").number("blockyard.bytes") > 0);
    assert_eq!(trace.child(&decoding.id, "decode").number("gen_ai.usage.output_tokens"), 24);

    // The same ids are in the logs of all three.
    for log in [stopped(frontend), stopped(prefill), stopped(decode)] {
        let lines = lines_of(&log, &id);
        assert_eq!(lines.len(), 1, "{id}:\n{log}");
        assert_eq!(lines[0]["trace_id"], TRACE);
        assert!(lines_of(&log, "not-sampled").iter().all(|line| line["trace_id"].is_null()));
    }
    assert!(
        collector.spans().iter().all(|span| span.trace == TRACE || span.name == "offload"),
        "nothing else is recorded"
    );
}

/// Whether the spans of both workers have arrived.
fn decoded(trace: &Trace, root: &CollectedSpan) -> bool {
    let below = |parents: Vec<&CollectedSpan>, name: &str| -> Vec<CollectedSpan> {
        let children = parents.iter().flat_map(|parent| trace.children(&parent.id));
        children.filter(|span| span.name == name).cloned().collect()
    };
    let attempts = below(vec![root], "attempt");
    let decoding = below(attempts.iter().collect(), "worker request");
    let legs = below(attempts.iter().collect(), "remote prefill");
    let prefilling = below(legs.iter().collect(), "worker request");
    !below(decoding.iter().collect(), "decode").is_empty() && !below(prefilling.iter().collect(), "prefill").is_empty()
}

#[tokio::test(flavor = "multi_thread")]
async fn request_ids_are_in_the_log_of_workers_without_tracing() {
    let Some(cluster) = Cluster::new() else { return };
    let worker = cluster.worker_at(&cluster.seat("a"), &["--set", "log.format=json"]).await;
    let frontend = cluster.frontend_with(&["--set", "log.format=json"]).await;
    until_workers(&frontend, 1).await;
    let named = ask(&frontend, &prompt(1), "from-the-client", "01").await;
    assert!(named["choices"].is_array(), "{named}");
    let body = json!({"model": "tiny", "prompt": prompt(2), "max_tokens": 3});
    let response = client().post(format!("{}/v1/completions", frontend.client.url)).json(&body).send().await.unwrap();
    let generated = response.headers()["x-request-id"].to_str().unwrap().to_owned();
    assert!(response.status().is_success());
    for log in [stopped(frontend), stopped(worker)] {
        let [line] = &lines_of(&log, &generated)[..] else { panic!("{generated}:\n{log}") };
        assert_eq!((&line["prompt_tokens"], &line["completion_tokens"]), (&json!(300), &json!(3)));
        let [line] = &lines_of(&log, "from-the-client")[..] else { panic!("{log}") };
        assert!(line["trace_id"].is_null());
    }
}
