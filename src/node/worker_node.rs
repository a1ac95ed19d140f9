//! A process of workers: the native engine and its tiers, for frontends in other processes.
//!
//! ```text
//!   frontends ── POST /workers/<id>/generate ──▶ RequestServer ─▶ worker … worker      planes on NATS
//!   decode workers ── POST /workers/<id>/blocks ──▶      └──────▶ memory of the worker
//! ```
//!
//! Shutdown deregisters the workers first, so that routers choose others, and closes the HTTP server last.

use super::banner::{Banner, Serves, WorkerFacts};
use super::cache_audit::CacheAudit;
use super::health::Health;
use super::http_server::{self, HttpServer, listen};
use super::native::Native;
use super::planes::{self, NatsPlanes};
use super::scope::Scope;
use super::usage::CacheUsage;
use super::{Process, check, flush_spans, register_process_metrics};
use crate::config::{Config, Purpose};
use crate::otlp::{self, Exporter};
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::Response;
use axum::routing::post;
use frontend::internal_router;
use prometheus::Registry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use worker::engine::Readiness;
use worker::handoff::{OtherProcesses, Peers};
use worker::plane::nats::{Address, NatsDiscovery};
use worker::remote::{RemotePeer, RequestServer, Secret};
use worker::serve::Planes;

/// The workers of a process. Dropping it stops them at once; [`Process::shutdown`] stops them in order.
#[must_use = "dropping a node stops it"]
pub struct WorkerNode {
    banner: Banner,
    http: HttpServer,
    health: Arc<WorkerHealth>,
    native: Native,
    discovery: Arc<NatsDiscovery>,
    /// Read by the metrics.
    audit: Arc<CacheAudit>,
    shutdown_timeout: Duration,
    /// Sends the spans of the process, if there is a collector.
    exporter: Option<Exporter>,
}

/// What `/ready` says: 200 while the workers are registered.
struct WorkerHealth {
    registered: AtomicBool,
    tiers: Health,
}

/// Time for the last outputs to reach frontends after the last request has finished.
const LAST_OUTPUTS: Duration = Duration::from_secs(1);

impl WorkerNode {
    /// Starts the workers, and resolves when they are registered.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        let listener = listen(&config.cluster.listen).await?;
        let address = listener.local_addr()?;
        if !address.ip().is_loopback() && config.cluster.secret_file.is_none() {
            tracing::warn!(%address, "{OPEN_TO_ALL}");
        }
        check(config, Purpose::Worker).await?;
        let registry = Registry::new();
        register_process_metrics(&registry)?;
        let health = Arc::new(WorkerHealth { registered: AtomicBool::new(false), tiers: Health::default() });
        let (server, settings) = http_server::server(config, &registry)?;
        let (url, secret) = (advertised(config, address), planes::secret(config)?);
        let peers = peers(url.clone(), secret.clone());
        let (tracer, exporter) = otlp::start(config, Purpose::Worker, &address.to_string(), &registry)?;
        let requests = RequestServer::traced(secret, peers.clone(), tracer.clone());
        let routes = Router::new()
            .route("/workers/{worker}/generate", post(generate))
            .route("/workers/{worker}/blocks", post(blocks))
            .with_state(requests.clone());
        let app = internal_router(routes, Arc::clone(&health) as _, registry.clone(), &settings);
        // The engine of a remote worker connects without TLS. From here on an early return closes the HTTP server.
        let http = HttpServer::start(server.without_tls(), listener, app);

        let NatsPlanes { discovery, events } = planes::open(config, Address(url.clone()), &registry).await?;
        let planes = Planes { discovery: requests.discovery(Arc::clone(&discovery) as _), events };
        let native = Native::start(config, planes, Scope::of(&url), (peers, tracer), &health.tiers, &registry).await?;
        health.registered.store(true, Ordering::Relaxed);
        let audit = Arc::new(CacheAudit { router: None, workers: native.managers(), stores: native.stores.digests() });
        registry.register(Box::new(CacheUsage::of(Arc::downgrade(&audit), native.stores.weak())?))?;
        let facts = WorkerFacts {
            native: native.facts.clone(),
            ids: native.managers().into_iter().map(|(id, _)| id).collect(),
            url,
            nats: config.nats.servers.clone(),
            prefix: config.nats.prefix.clone(),
        };
        let banner = Banner {
            address,
            has_tls: false,
            needs_key: config.cluster.secret_file.is_some(),
            serves: Serves::Workers(Box::new(facts)),
        };
        Ok(Self {
            banner,
            http,
            health,
            native,
            discovery,
            audit,
            shutdown_timeout: config.shutdown_timeout.0,
            exporter,
        })
    }

    /// The banner that `worker` prints.
    pub fn banner(&self) -> &Banner {
        &self.banner
    }
}

impl Process for WorkerNode {
    async fn failed(&mut self) -> anyhow::Error {
        self.http.failed().await
    }

    /// Routers learn over NATS that the workers leave, so there is no time to wait for.
    async fn announce_shutdown(&mut self) {
        self.http.announce_shutdown();
    }

    async fn shutdown(mut self) {
        let deadline = Instant::now() + self.shutdown_timeout;
        self.health.registered.store(false, Ordering::Relaxed);
        let stores = self.native.drain(deadline).await;
        if timeout_at(deadline, self.discovery.settled()).await.is_err() {
            tracing::warn!("nats does not answer; the workers leave when their leases expire");
        }
        self.http.close(LAST_OUTPUTS).await;
        drop(self.audit);
        stores.close(deadline).await;
        flush_spans(self.exporter, deadline).await;
    }
}

impl frontend::Health for WorkerHealth {
    fn readiness(&self) -> Readiness {
        if self.registered.load(Ordering::Relaxed) {
            Readiness::Ready
        } else {
            Readiness::NotReady("the workers are not registered".to_owned())
        }
    }

    fn degraded(&self) -> Vec<String> {
        self.tiers.degraded()
    }
}

/// The warning for workers that other machines can use without a secret.
const OPEN_TO_ALL: &str = "every machine that reaches this address can use the workers, because they require no \
    secret; set cluster.secret_file to a file with the output of `openssl rand -hex 32`, the same for all frontends \
    and workers, or listen on this machine only: --listen 127.0.0.1:8100";

/// The URL at which frontends reach this process.
fn advertised(config: &Config, address: SocketAddr) -> String {
    config.cluster.advertise.clone().unwrap_or_else(|| format!("http://{address}"))
}

async fn generate(
    State(requests): State<Arc<RequestServer>>,
    Path(worker): Path<String>,
    request: Request,
) -> Response<Body> {
    let (head, body) = request.into_parts();
    requests.respond(&worker, &head.headers, body).await.map(Body::new)
}

async fn blocks(
    State(requests): State<Arc<RequestServer>>,
    Path(worker): Path<String>,
    request: Request,
) -> Response<Body> {
    let (head, body) = request.into_parts();
    requests.respond_blocks(&worker, &head.headers, body).await.map(Body::new)
}

/// The workers of all processes, as sources of prefilled blocks.
fn peers(url: String, secret: Option<Secret>) -> Peers {
    let connect = Box::new(move |worker, url: &str| Arc::new(RemotePeer::new(worker, url, secret.clone())) as _);
    Peers::with_other_processes(OtherProcesses { url, connect })
}
