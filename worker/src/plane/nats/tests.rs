//! The planes on a real NATS server: the contract suites, and what only a network does.
//!
//! `make test` starts a server (`tests/servers/run.py`) and passes its address and its program in the environment;
//! without them these tests print that they were skipped. Tests that stop servers, or need a configuration of their
//! own, start the program themselves.

mod access;
mod captured_log;
mod http_logs;
mod messages;
mod operator;
mod outages;
mod processes;
mod server;
mod unusable_servers;

use super::*;
use crate::plane::{Discovery, Membership, contract};
use futures::StreamExt;
use futures::stream::BoxStream;
use prometheus::Registry;
use server::Server;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

mod discovery {
    crate::plane::contract::discovery_contract!(super::contract_discovery());
}

mod events {
    crate::plane::contract::events_contract!(super::contract_events());
}

async fn contract_discovery() -> Option<NatsDiscovery> {
    Some(discovery_of(&connect(settings(&shared()?)).await))
}

async fn contract_events() -> Option<NatsEvents> {
    Some(NatsEvents::new(connect(settings(&shared()?)).await))
}

/// The URL of the server that `make test` started, which tests share.
fn shared() -> Option<String> {
    variable("WORKER_TEST_NATS")
}

fn variable(name: &str) -> Option<String> {
    let value = std::env::var(name).ok();
    if value.is_none() {
        // Not `eprintln`: the test harness captures it.
        let _ = writeln!(std::io::stderr(), "SKIPPED: no NATS server in {name}; `make test` starts one");
    }
    value
}

fn with_short_connect_timeout(settings: Settings) -> Settings {
    Settings { connect_timeout: Duration::from_millis(600), ..settings }
}

async fn refused(settings: Settings) -> ConnectError {
    match open(settings).await {
        Ok(_) => panic!("it connected"),
        Err(error) => error,
    }
}

/// Settings with a prefix and a bucket of their own.
fn settings(server: &str) -> Settings {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Test processes share the server.
    let name = format!("t{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    Settings { prefix: name.clone(), bucket: name, ..only(server) }
}

/// Settings with the default prefix and bucket.
fn only(server: &str) -> Settings {
    Settings { servers: vec![server.to_owned()], ..Settings::default() }
}

/// Settings with the shortest lease.
fn short_lease(settings: Settings) -> Settings {
    Settings { lease: Duration::from_secs(2), ..settings }
}

async fn open(settings: Settings) -> Result<(Arc<Connection>, Registry), ConnectError> {
    let registry = Registry::new();
    let metrics = Metrics::new(&registry).unwrap();
    Ok((Connection::open(settings, metrics).await?, registry))
}

async fn connect(settings: Settings) -> Arc<Connection> {
    open(settings).await.unwrap().0
}

fn address() -> Address {
    Address("http://127.0.0.1:9".to_owned())
}

/// Discovery whose engines reject every request.
fn discovery_of(connection: &Arc<Connection>) -> NatsDiscovery {
    discovery_with_keys(connection, None)
}

/// The same of a deployment with a secret.
fn discovery_with_keys(connection: &Arc<Connection>, keys: Option<RecordKeys>) -> NatsDiscovery {
    NatsDiscovery::new(Arc::clone(connection), address(), Arc::new(|_, _| contract::engine()), keys)
}

/// A watcher in another process, which has begun.
async fn watch(settings: Settings) -> BoxStream<'static, Membership> {
    let discovery = discovery_of(&connect(settings).await);
    let watch = discovery.watch();
    discovery.wait_until_deregistered().await;
    watch
}

/// Whether nothing arrives for a while.
async fn is_quiet<T>(stream: &mut BoxStream<'static, T>, time: Duration) -> bool {
    tokio::time::timeout(time, stream.next()).await.is_err()
}

/// The value of a counter with this label.
fn counter(registry: &Registry, name: &str, label: &str) -> u64 {
    let families = registry.gather();
    let metrics =
        families.iter().filter(|family| family.name() == name).flat_map(prometheus::proto::MetricFamily::get_metric);
    let of = metrics.filter(|metric| label.is_empty() || metric.get_label().iter().any(|pair| pair.value() == label));
    of.map(|metric| metric.get_counter().get_value() as u64).sum()
}

/// The value of a gauge without labels.
fn gauge(registry: &Registry, name: &str) -> i64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name).expect("it is registered");
    family.get_metric()[0].get_gauge().get_value() as i64
}

/// Waits until a condition holds; panics when it does not.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_mins(1);
    while !holds().await {
        assert!(tokio::time::Instant::now() < deadline, "it never happened: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
