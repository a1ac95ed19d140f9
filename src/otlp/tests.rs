//! The export against scripted collectors.

use super::message::pairs;
use super::{Unusable, check, start};
use crate::config::{Config, OtelVariables, Purpose, Secret, Tracing};
use prometheus::Registry;
use serde_json::{Value, json};
use spans::{Kind, Tracer};
use std::path::Path;
use std::time::Duration;
use upstream::relay::fake::{FakeEngine, Script};

fn config(endpoint: &str) -> Config {
    let tracing = Tracing { endpoint: Some(endpoint.to_owned()), ..Tracing::default() };
    Config { tracing, ..Config::with_cache(Path::new("/nonexistent")) }
}

fn counted(registry: &Registry, name: &str) -> u64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name).unwrap();
    family.get_metric().iter().map(|metric| metric.get_counter().get_value() as u64).sum()
}

fn record(tracer: &Tracer, count: usize) {
    (0..count).for_each(|_| drop(tracer.root("request", Kind::Server, None)));
}

#[tokio::test]
async fn spans_are_sent_with_resource_and_headers_and_the_last_ones_at_the_end() {
    let collector = FakeEngine::start([Script::json(200, &json!({}))]).await.unwrap();
    let mut config = config(&collector.uri().to_string());
    config.tracing.variables = OtelVariables {
        headers: Some(Secret("x-key=a%20b, other=1".into())),
        resource_attributes: Some("k8s.pod.name=p-1,service.name=ignored".into()),
    };
    let registry = Registry::new();
    let (tracer, exporter) = start(&config, Purpose::Frontend, "host:1", &registry).unwrap();
    let mut span = tracer.root("request", Kind::Server, None);
    span.set("count", 3_u64);
    span.set("ratio", 0.5);
    span.event("first token");
    span.fail(&"broken");
    drop(span);
    exporter.unwrap().flush(Duration::from_secs(30)).await;
    let requests = collector.requests();
    let [request] = &requests[..] else { panic!("{requests:?}") };
    assert_eq!((request.method.as_str(), request.uri.path()), ("POST", "/v1/traces"));
    assert_eq!(
        (&request.headers["x-key"], &request.headers["other"]),
        (&"a b".parse().unwrap(), &"1".parse().unwrap())
    );
    let sent: Value = serde_json::from_slice(&request.body).unwrap();
    let resource = sent["resourceSpans"][0]["resource"]["attributes"].to_string();
    assert!(resource.contains("blockyard-frontend") && resource.contains("host:1") && resource.contains("p-1"));
    assert!(!resource.contains("ignored"));
    let span = &sent["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
    assert_eq!(span["status"], json!({ "code": 2, "message": "broken" }));
    assert_eq!(span["attributes"][0], json!({ "key": "count", "value": { "intValue": "3" } }));
    assert_eq!(span["attributes"][1], json!({ "key": "ratio", "value": { "doubleValue": 0.5 } }));
    assert!(span["traceId"].as_str().unwrap().len() == 32 && span["startTimeUnixNano"].is_string());
    assert!(span["parentSpanId"].is_null() && span["events"][0]["name"] == "first token");
    assert_eq!(counted(&registry, "blockyard_tracing_spans_exported_total"), 1);
}

#[tokio::test]
async fn a_batch_is_sent_again_after_a_busy_answer_and_not_after_a_refusal() {
    let partial = json!({ "partialSuccess": { "rejectedSpans": "1" } });
    let answers = [Script::json(503, &json!({})), Script::json(200, &partial), Script::json(400, &json!({}))];
    let collector = FakeEngine::start(answers).await.unwrap();
    let registry = Registry::new();
    let config = config(&format!("{}custom/path", collector.uri()));
    let (tracer, exporter) = start(&config, Purpose::Serve, "host:1", &registry).unwrap();
    record(&tracer, 512);
    while collector.requests().len() < 2 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    record(&tracer, 4);
    exporter.unwrap().flush(Duration::from_secs(30)).await;
    let paths: Vec<_> = collector.requests().iter().map(|request| request.uri.path().to_owned()).collect();
    assert_eq!(paths, ["/custom/path"; 3]);
    assert_eq!(counted(&registry, "blockyard_tracing_spans_exported_total"), 511);
    assert_eq!(counted(&registry, "blockyard_tracing_spans_dropped_total"), 1 + 4);
}

#[tokio::test]
async fn without_a_collector_spans_are_dropped_and_counted() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let registry = Registry::new();
    let config = config(&format!("http://{closed}"));
    let (tracer, exporter) = start(&config, Purpose::Serve, "host:1", &registry).unwrap();
    record(&tracer, 5000);
    exporter.unwrap().flush(Duration::from_mins(1)).await;
    assert_eq!(counted(&registry, "blockyard_tracing_spans_dropped_total"), 5000);
    assert_eq!(counted(&registry, "blockyard_tracing_spans_exported_total"), 0);
}

#[test]
fn wrong_settings_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("headers");
    let with_file = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let mut config = config("https://collector.example:4318");
        config.tracing.headers_file = Some(file.clone());
        check(&config)
    };
    assert!(with_file("# keys\nauthorization: Bearer x\n\n").is_ok());
    for wrong in ["authorization", "a b: c"] {
        let Unusable { error, fix } = with_file(wrong).unwrap_err();
        assert!(format!("{error:#}").contains("tracing.headers_file"), "{error:#}");
        assert!(fix.contains("tracing.headers_file"), "{fix}");
    }
    let mut config = config("https://collector.example");
    config.tracing.ca_file = Some(folder.path().join("missing"));
    let Unusable { error, fix } = check(&config).unwrap_err();
    assert!(format!("{error:#}").contains("tracing.ca_file") && fix.contains("tracing.ca_file"), "{error:#}: {fix}");
    assert_eq!(pairs("a=1,,b = 2%,=3,c"), [("a".into(), "1".into()), ("b".into(), "2%".into())]);
}
