//! A process of workers: the native engine and its tiers, for frontends in other processes.
//!
//! ```text
//!   frontends ── POST /workers/<id>/generate ──▶ RequestServer ─▶ worker … worker      planes on NATS
//!            ── POST /workers/<id>/prefetch ──▶   └────────────▶ copy of a prefix ahead of demand
//!            ── GET /logs/<kind>/<id>/<epoch>/… ──▶   └────────▶ log: which blocks a worker or store has
//!   decode workers ── POST /workers/<id>/blocks ──▶      └──────▶ memory of the worker
//!                  ── GET /workers/<id>/handoffs/<id> ──▶  └────▶ progress of a prefill
//! ```
//!
//! Shutdown deregisters the workers first, so that routers choose others. Then workers of other processes copy prefixes
//! from them. The HTTP server is closed last.

use super::banner::{Banner, ExampleCertificate, Serves, WorkerFacts, worker_warnings};
use super::cache_audit::CacheAudit;
use super::drain_copies::OtherWorkers;
use super::health::Health;
use super::http_server::{self, HttpServer, listen};
use super::native::Native;
use super::planes::{self, NatsPlanes};
use super::refused_requests::{Refusal, RefusedRequests};
use super::scope::Scope;
use super::shutdown_timeout::{self, AT_ONCE, REQUEST_SHARE, request_share, request_time};
use super::usage::CacheUsage;
use super::{HttpProcess, Process, check, flush_spans, register_process_metrics};
use crate::config::{Config, Purpose};
use crate::otlp::{self, Exporter};
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, Response, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use frontend::{ClientCertificate, internal_router, peer_address};
use prometheus::Registry;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use transport::CertificateMetrics;
use worker::engine::Readiness;
use worker::handoff::{OtherProcesses, Peers};
use worker::llama::Limits;
use worker::plane::WorkerId;
use worker::plane::nats::{Address, NatsDiscovery};
use worker::remote::{Credentials, RemotePeer, RequestServer};
use worker::serve::{Cordon, Planes};

/// The workers of a process. Dropping it stops them at once; [`Process::shutdown`] stops them in order.
#[must_use = "dropping a node stops it"]
pub struct WorkerNode {
    process: HttpProcess,
    health: Arc<WorkerHealth>,
    native: Native,
    discovery: Arc<NatsDiscovery>,
    requests: Arc<RequestServer>,
    /// The URL at which other processes reach this one.
    url: String,
    shutdown_timeout: Duration,
    /// Sends the spans of the process, if there is a collector.
    exporter: Option<Exporter>,
}

/// What `/ready` says: 200 while a worker is registered, or is about to be.
#[derive(Default)]
struct WorkerHealth {
    registered: AtomicBool,
    /// Set once the workers run.
    cordons: OnceLock<Vec<(WorkerId, Cordon)>>,
    tiers: Health,
}

/// Time for the last outputs to reach frontends after the last request has finished or was ended, within the shutdown
/// timeout. A response that is not read until then is cut off.
const LAST_OUTPUTS: Duration = Duration::from_secs(1);

impl WorkerNode {
    /// Starts the workers, and resolves when they are registered.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        let listener = listen(&config.cluster.listen, "--listen ").await?;
        let address = listener.local_addr()?;
        let has_tls = config.cluster.tls.cert_file.is_some();
        let requires_certificate = config.cluster.tls.client_ca_file.is_some();
        let needs_key = config.cluster.secret_file.is_some() || requires_certificate;
        for warning in worker_warnings(address, needs_key, has_tls) {
            tracing::warn!(%address, "{warning}");
        }
        check(config, Purpose::Worker).await?;
        let registry = Registry::new();
        register_process_metrics(&registry)?;
        let health = Arc::new(WorkerHealth::default());
        // The certificate of the API is not that of a worker.
        let settings = frontend::Settings { tls_cert_file: None, tls_key_file: None, ..config.frontend.clone() };
        let (server, settings) = http_server::server(settings, &registry)?;
        let certificates = CertificateMetrics::new("cluster", &registry)?;
        health.tiers.watch_certificates(certificates.clone());
        let (url, credentials) = (advertised(config, address), planes::credentials(config, &certificates, &registry)?);
        let server = match config.cluster.tls.server()? {
            Some(files) => server.with_tls(files, certificates)?,
            None => server,
        };
        let peers = peers(url.clone(), credentials.clone());
        let (tracer, exporter) = otlp::start(config, Purpose::Worker, &address.to_string(), &registry)?;
        let required = credentials.secret.as_ref().map(|secret| secret.required_at(&url));
        let requests = RequestServer::traced(required, peers.clone(), tracer.clone());
        let refused = Arc::new(RefusedRequests::new(&registry)?);
        let routes = routes(requests.clone(), refused, requires_certificate);
        let app = internal_router(routes, Arc::clone(&health) as _, registry.clone(), &settings);
        // From here on an early return closes the HTTP server.
        let http = HttpServer::start(server, listener, app);

        let NatsPlanes { discovery, events, connection } =
            planes::open(config, Some(Address(url.clone())), credentials, &registry).await?;
        health.tiers.watch_nats(Arc::downgrade(&connection));
        let planes =
            Planes { discovery: requests.discovery(Arc::clone(&discovery) as _), events: requests.events(events) };
        let native = Native::start(config, planes, Scope::of(&url), (peers, tracer), &health.tiers, &registry).await?;
        // Set once: here only.
        let _ = health.cordons.set(native.cordons());
        health.registered.store(true, Ordering::Relaxed);
        for (worker, cordon) in native.cordons() {
            tracing::info!(%worker, role = %cordon.role(), "worker registered");
        }
        let audit = Arc::new(CacheAudit { router: None, workers: native.managers(), stores: native.stores.digests() });
        registry.register(Box::new(CacheUsage::of(Arc::downgrade(&audit), native.stores.weak())?))?;
        let facts = WorkerFacts {
            native: native.facts.clone(),
            ids: native.managers().into_iter().map(|(id, _)| id).collect(),
            url: url.clone(),
            nats: config.nats.servers.clone(),
            prefix: config.nats.prefix.clone(),
        };
        // The banner of workers has no example.
        let certificate = ExampleCertificate::default();
        let banner = Banner { address, has_tls, certificate, needs_key, serves: Serves::Workers(Box::new(facts)) };
        Ok(Self {
            process: HttpProcess { banner, registry, http, audit, reload: Arc::clone(&health.tiers.reload) },
            health,
            native,
            discovery,
            requests,
            url,
            shutdown_timeout: shutdown_timeout::of_worker(config),
            exporter,
        })
    }

    /// The limits of the engine of each worker.
    pub fn limits(&self) -> Vec<Arc<Limits>> {
        self.native.limits()
    }

    /// Takes each worker out of service and back.
    pub fn cordons(&self) -> Vec<(WorkerId, Cordon)> {
        self.native.cordons()
    }
}

impl Process for WorkerNode {
    fn process(&self) -> &HttpProcess {
        &self.process
    }

    async fn failed(&mut self) -> anyhow::Error {
        self.process.http.failed().await
    }

    fn shutdown_notice(&self, _announced: bool) -> String {
        let request_time = request_time(self.shutdown_timeout);
        format!("shutting down: the workers get no new requests, {request_time}; {AT_ONCE}")
    }

    /// Routers learn over NATS that the workers leave, so there is no time to wait for.
    async fn announce_shutdown(&mut self) {
        self.process.http.announce_shutdown();
    }

    async fn shutdown(mut self) {
        let now = Instant::now();
        let deadline = now + self.shutdown_timeout;
        self.health.registered.store(false, Ordering::Relaxed);
        // Not those that are cordoned, whose line was written then.
        for (worker, _) in self.native.cordons().into_iter().filter(|(_, cordon)| cordon.is_registered()) {
            tracing::info!(%worker, "worker is being deregistered; its running requests finish");
        }
        let (end_requests, requests) = (now + self.shutdown_timeout.mul_f64(REQUEST_SHARE), self.requests);
        let others = OtherWorkers { discovery: Arc::clone(&self.discovery), url: self.url };
        let stores = self.native.drain(end_requests, deadline, Some(others), || requests.end_requests()).await;
        if timeout_at(deadline, self.discovery.wait_until_deregistered()).await.is_err() {
            tracing::warn!("NATS does not answer; the workers leave when their leases expire");
        }
        let limit = format!(
            "they get {}, and up to {} s for the last outputs; raise shutdown_timeout for longer requests",
            request_share(self.shutdown_timeout),
            LAST_OUTPUTS.as_secs_f64()
        );
        let last_outputs = LAST_OUTPUTS.min(deadline.saturating_duration_since(Instant::now()));
        self.process.http.close(last_outputs, limit).await;
        drop(self.process.audit);
        stores.close(deadline).await;
        flush_spans(self.exporter, deadline).await;
    }
}

impl frontend::Health for WorkerHealth {
    fn readiness(&self) -> Readiness {
        let Some(cordons) = self.cordons.get().filter(|_| self.registered.load(Ordering::Relaxed)) else {
            let problem = self.tiers.registration_problem();
            return Readiness::NotReady(problem.unwrap_or_else(|| "the workers are not registered".to_owned()));
        };
        let problems: Vec<_> = cordons.iter().filter_map(out_of_service).collect();
        if problems.len() < cordons.len() {
            Readiness::Ready
        } else if cordons.iter().all(|(_, cordon)| cordon.is_cordoned()) {
            Readiness::NotReady("every worker of the process is cordoned".to_owned())
        } else {
            Readiness::NotReady(problems.join(" | "))
        }
    }

    fn degraded(&self) -> Vec<String> {
        let problems = self.cordons.get().into_iter().flatten().filter_map(out_of_service);
        problems.chain(self.tiers.degraded()).collect()
    }
}

/// Why routers send a worker no requests. `None` while it is registered, or is about to be.
fn out_of_service((id, cordon): &(WorkerId, Cordon)) -> Option<String> {
    if cordon.is_cordoned() {
        Some(format!("worker {id} is cordoned"))
    } else if cordon.is_superseded() {
        Some(format!(
            "worker {id} is not registered: another process serves it; give each process a URL of its own \
             (cluster.advertise), or stop the other process"
        ))
    } else {
        None
    }
}

/// The answer to a request without a client certificate where one is required.
const NO_CERTIFICATE: &str = "the request came without a client certificate, and the worker requires one \
    (cluster.tls.client_ca_file); set cluster.tls.cert_file and cluster.tls.key_file of the process that sent it";

/// The URL at which frontends reach this process.
fn advertised(config: &Config, address: SocketAddr) -> String {
    config.cluster.advertise.clone().unwrap_or_else(|| format!("{}://{address}", config.cluster.scheme()))
}

/// The endpoints for frontends and other workers. Requests that lack the secret or a required client certificate are
/// refused and counted.
fn routes(requests: Arc<RequestServer>, refused: Arc<RefusedRequests>, requires_certificate: bool) -> Router {
    Router::new()
        .route("/workers/{worker}/generate", post(generate))
        .route("/workers/{worker}/blocks", post(blocks))
        .route("/workers/{worker}/prefetch", post(prefetch))
        .route("/workers/{worker}/handoffs/{handoff}", get(progress))
        .route("/logs/{*log}", get(log))
        .with_state(requests)
        .route_layer(from_fn(move |request: Request, next: Next| {
            let refused = Arc::clone(&refused);
            async move {
                let peer = peer_address(request.extensions());
                let is_known = request.extensions().get::<ClientCertificate>().is_some();
                if requires_certificate && !is_known {
                    refused.refused(Refusal::Certificate, peer);
                    return (StatusCode::UNAUTHORIZED, NO_CERTIFICATE).into_response();
                }
                let response = next.run(request).await;
                // The only reason of the request server for this status.
                if response.status() == StatusCode::UNAUTHORIZED {
                    refused.refused(Refusal::Secret, peer);
                }
                response
            }
        }))
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

async fn prefetch(
    State(requests): State<Arc<RequestServer>>,
    Path(worker): Path<String>,
    request: Request,
) -> Response<Body> {
    let (head, body) = request.into_parts();
    requests.respond_prefetch(&worker, &head.headers, body).await.map(Body::new)
}

async fn progress(
    State(requests): State<Arc<RequestServer>>,
    Path((_, handoff)): Path<(String, String)>,
    request: Request,
) -> Response<Body> {
    requests.respond_progress(&handoff, request.headers()).map(Body::new)
}

async fn log(
    State(requests): State<Arc<RequestServer>>,
    Path(log): Path<String>,
    headers: HeaderMap,
) -> Response<Body> {
    requests.respond_log(&log, &headers).await.map(Body::new)
}

/// The workers of all processes, as sources of prefilled blocks.
fn peers(url: String, credentials: Credentials) -> Peers {
    let connect = Box::new(move |worker, url: &str| Arc::new(RemotePeer::new(worker, url, credentials.clone())) as _);
    Peers::with_other_processes(OtherProcesses { url, connect })
}

#[cfg(test)]
mod tests;
