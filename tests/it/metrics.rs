//! `docs/metrics.md` lists exactly the metrics that processes expose.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use crate::layers::{SOURCES, lines_where};
use crate::process::client;
use blockyard::config::{Budget, ByteSize, Config, Listen, Purpose, SharedFlash, Sources};
use blockyard::node::{Node, Process, RefusedRequests};
use blockyard::reload::{FileStamp, Reload};
use kvbm::object::StoreLocation;
use prometheus::proto::MetricType;
use prometheus::{IntGauge, Registry};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use transport::CertificateMetrics;
use worker::plane::nats;
use worker::remote::SecretMetrics;

const PAGE: &str = include_str!("../../docs/metrics.md");

/// A metric's type and labels.
type Shape = (String, BTreeSet<String>);

/// The rows of the page's tables: `| name | type | labels | unit | meaning |`.
fn documented() -> BTreeMap<String, Shape> {
    let row = |line: &str| {
        let cells: Vec<String> =
            line.strip_prefix("| `")?.split('|').map(|cell| cell.trim().replace('`', "")).collect();
        let [name, kind, labels, unit, meaning]: [String; 5] = cells.get(..5)?.to_vec().try_into().ok()?;
        assert!(!unit.is_empty() && !meaning.is_empty(), "{line}");
        let labels = labels.split(',').map(|label: &str| label.trim().to_owned()).filter(|label| !label.is_empty());
        Some((name, (kind, labels.collect())))
    };
    PAGE.lines().filter_map(row).collect()
}

/// What the registry exposes now.
fn exposed(registry: &Registry) -> BTreeMap<String, Shape> {
    let shape = |family: &prometheus::proto::MetricFamily| {
        let kind = match family.get_field_type() {
            MetricType::COUNTER => "counter",
            MetricType::GAUGE => "gauge",
            MetricType::HISTOGRAM => "histogram",
            MetricType::SUMMARY | MetricType::UNTYPED => "other",
        };
        let labels = family.get_metric().iter().flat_map(prometheus::proto::Metric::get_label);
        (kind.to_owned(), labels.map(|label| label.name().to_owned()).collect())
    };
    registry.gather().iter().map(|family| (family.name().to_owned(), shape(family))).collect()
}

/// A configuration that turns on every component with metrics.
fn config(data: &Path, shared: &Path, flash: &Path) -> Config {
    let budget = |mib: u64| Budget::Bytes(ByteSize(mib << 20));
    let mut config = Config::with_cache(data);
    config.model = "tiny".parse().unwrap();
    config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
    (config.tiers.g1, config.tiers.g2, config.tiers.g3) = (budget(32), budget(32), budget(64));
    config.tiers.g4.url = Some(StoreLocation::Folder(shared.into()));
    config.tiers.g3_5 = Some(SharedFlash { path: flash.into(), capacity: ByteSize(1 << 30), max_age: None });
    config
}

/// The metrics that frontends and workers in processes of their own have besides.
fn register_cluster(registry: &Registry) {
    nats::Metrics::new(registry).unwrap();
    CertificateMetrics::new("cluster", registry).unwrap();
    SecretMetrics::new(registry).unwrap();
    RefusedRequests::new(registry).unwrap();
}

#[test]
fn every_metric_that_the_sources_name_is_on_the_page() {
    let documented = documented();
    let named = |line: &str| {
        let literals = line.split('"').skip(1).step_by(2);
        let is_name = |text: &&str| text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        literals.filter(|text| text.starts_with("blockyard_")).filter(is_name).map(str::to_owned).collect::<Vec<_>>()
    };
    let is_missing = |line: &str| named(line).iter().any(|name| !documented.contains_key(name));
    let missing = lines_where(&SOURCES, |_, line| is_missing(line));
    assert!(missing.is_empty(), "these metrics are not in docs/metrics.md:\n{}", missing.join("\n"));
    let seen = lines_where(&SOURCES, |_, line| !named(line).is_empty());
    assert!(seen.len() > 30, "{} lines name a metric", seen.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_page_agrees_with_a_running_process() {
    let [data, shared, flash] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let config = config(data.path(), shared.path(), flash.path());
    let node = Node::start(&config).await.unwrap();
    let environment = vec![("HOME".into(), "/home/ada".into())];
    let (config, origins) = Config::load(&Sources { environment, ..Sources::default() }).unwrap();
    let set_log = Box::new(|_: &str, _| Ok(()));
    let loaded = (config, origins, FileStamp::of(&Sources::default()));
    let sources = (Sources::default(), Purpose::Serve);
    let shown = Arc::clone(node.reload_state());
    let _reload = Reload::new(sources, loaded, Vec::new(), set_log, node.registry(), shown).unwrap();
    register_cluster(node.registry());
    let before = exposed(node.registry());
    for name in [
        "blockyard_config_reloads_total",
        "blockyard_frontend_certificate_reloads_total",
        "blockyard_frontend_key_reloads_total",
        "blockyard_panics_total",
        "blockyard_router_index_divergences_total",
        "blockyard_tier_corrupt_blocks_total",
        "blockyard_tier_missing_segments_total",
        "blockyard_tier_offload_dropped_blocks_total",
        "blockyard_tier_undecryptable_blocks_total",
    ] {
        assert!(before.contains_key(name), "{name} has a series before anything happens: an alert asks for it");
    }
    let url = format!("http://{}", node.address());
    let body = json!({"model": "tiny", "prompt": "hello ".repeat(300), "max_tokens": 4});
    for _ in 0..2 {
        let answer = client().post(format!("{url}/v1/completions")).json(&body).send().await.unwrap();
        assert!(answer.status().is_success());
    }
    let (documented, exposed) = (documented(), exposed(node.registry()));
    for family in node.registry().gather() {
        assert!(family.help().ends_with('.'), "{}: {}", family.name(), family.help());
    }
    for (name, shape) in &exposed {
        let row = documented.get(name).unwrap_or_else(|| panic!("{name} is not in docs/metrics.md: {shape:?}"));
        assert_eq!(row, shape, "{name}: docs/metrics.md (left) and the process (right) differ");
    }
    for name in documented.keys().filter(|name| !exposed.contains_key(*name)) {
        // A metric without series is not gathered, but its name cannot be registered again.
        let again = node.registry().register(Box::new(IntGauge::new(name, "none").unwrap()));
        assert!(matches!(again, Err(prometheus::Error::AlreadyReg)), "{name} is in docs/metrics.md only");
    }
    for name in [
        "blockyard_build_info",
        "blockyard_tier_usage_ratio",
        "blockyard_tier_capacity_bytes",
        "blockyard_worker_requests_running",
        "blockyard_worker_queue_seconds",
        "blockyard_frontend_choices_finished_total",
    ] {
        assert!(exposed.contains_key(name), "{name} has a series after the first request");
    }
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cache_usage_is_shown_per_tier_and_worker() {
    let [data, shared, flash] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let config = Config { workers: "both:2".parse().unwrap(), ..config(data.path(), shared.path(), flash.path()) };
    let node = Node::start(&config).await.unwrap();
    let body = json!({"model": "tiny", "prompt": "hello ".repeat(300), "max_tokens": 4});
    let url = format!("http://{}/v1/completions", node.address());
    assert!(client().post(url).json(&body).send().await.unwrap().status().is_success());
    let families = node.registry().gather();
    let values = |name: &str| -> BTreeMap<String, f64> {
        let family = families.iter().find(|family| family.name() == name).unwrap();
        let labels = |m: &prometheus::proto::Metric| {
            m.get_label().iter().map(|label| label.value().to_owned()).collect::<Vec<_>>().join(" ")
        };
        family.get_metric().iter().map(|metric| (labels(metric), metric.get_gauge().get_value())).collect()
    };
    let capacity = values("blockyard_tier_capacity_bytes");
    for labels in ["g1 w1", "g1 w2", "g2 w1", "g2 w2"] {
        assert!((0.9..=1.0).contains(&(capacity[labels] / f64::from(32 << 20))), "{labels}: {capacity:?}");
    }
    assert!(capacity.contains_key("g3 shared") && capacity.contains_key("g3_5 shared"), "{capacity:?}");
    assert!(!capacity.contains_key("g4 shared"), "the shared store has no capacity");
    let ratio = values("blockyard_tier_usage_ratio");
    assert!(ratio["g1 w1"] + ratio["g1 w2"] > 0.0, "{ratio:?}");
    assert!(ratio.values().all(|ratio| (0.0..=1.0).contains(ratio)), "{ratio:?}");
    assert!(values("blockyard_tier_active_ratio").values().all(|ratio| (0.0..=1.0).contains(ratio)));
    node.shutdown().await;
}
