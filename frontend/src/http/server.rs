//! Accepts connections, serves HTTP on them within limits, and shuts down in stages.
//!
//! ```text
//!   accept ─ admission ─ connection task: TLS, hyper over `Stream`, with a watchdog over `Activity`
//!
//!   running ─ announce ─▶ leaving: /ready gets 503, new requests are served
//!           ─ close ────▶ draining: no listener, running requests finish; aborted at the drain deadline
//! ```
//! Each connection has time limits for its request headers, for idling and for a client that does not read. Not here:
//! the minimum rate of a request's body (`upload`).

mod activity;
mod connection;
mod connections;
mod repoll;
mod stream;

pub(crate) use connection::ConnectionInfo;
pub use connection::{ClientCertificate, peer_address};

use crate::error::Error;
use crate::limits::ConnectionChoices;
use crate::metrics::ConnectionMetrics;
use crate::settings::Settings;
use activity::Timeouts;
use axum::Router;
use axum::http::Extensions;
use connections::{Admission, Connections};
use prometheus::{IntGauge, Registry};
use spans::LogLimit;
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use transport::{CertificateChain, CertificateExpiry, CertificateMetrics, Identity, ServerFiles, ServerTls, TlsError};

/// Time for the last bytes of aborted requests to reach slow clients after the drain deadline.
const LAST_BYTES: Duration = Duration::from_secs(2);
/// Pause after a failed `accept`: without file descriptors it fails immediately until connections end.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Interval of log lines of failed `accept` calls, which repeat ten times per second.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The stages of a shutdown: announced, closed, forced. The owner triggers the first two. Cheap to clone.
#[derive(Clone, Default)]
pub struct Shutdown(Arc<Stages>);

#[derive(Default)]
struct Stages {
    announced: CancellationToken,
    closed: CancellationToken,
    forced: CancellationToken,
    /// Time for running requests after the listener is closed.
    drain: OnceLock<Duration>,
    /// When the shutdown was announced, or the listener was closed without an announcement.
    began: OnceLock<Instant>,
    /// What limits the time of running requests, in words.
    limit: OnceLock<String>,
    /// The owner stopped to wait: requests that end now are ended by the server.
    abandoned: AtomicBool,
}

impl Shutdown {
    /// Makes `/ready` respond 503 from now on. New requests are served, each on a connection that closes afterwards, so
    /// that none fails until load balancers have noticed.
    pub fn announce(&self) {
        let _ = self.0.began.set(Instant::now());
        self.0.announced.cancel();
    }

    /// Closes the listener, and rejects new requests of open connections. Running ones may finish within `drain`; then
    /// they are aborted with an error. Only the first call has an effect.
    pub fn close(&self, drain: Duration) {
        let _ = self.0.drain.set(drain);
        self.announce();
        self.0.closed.cancel();
    }

    /// Says what limits the time of running requests and what to change, for the log line of those that are aborted.
    /// Only the first call has an effect.
    pub fn explain_limit(&self, limit: String) {
        let _ = self.0.limit.set(limit);
    }

    /// Closes the listener without waiting for running requests. Those that are dropped from now on count as ended by
    /// the server, not by their clients.
    pub fn abandon(&self) {
        self.0.abandoned.store(true, Ordering::Relaxed);
        self.close(Duration::ZERO);
    }

    /// Whether requests that are dropped are ended by the server.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.0.abandoned.load(Ordering::Relaxed)
    }

    /// Whether the server shuts down.
    pub(crate) fn is_announced(&self) -> bool {
        self.0.announced.is_cancelled()
    }

    /// The shutdown of the server that has accepted a request, or one that never comes.
    pub(crate) fn of(extensions: &Extensions) -> Self {
        ConnectionInfo::of(extensions).map(|connection| connection.shutdown.clone()).unwrap_or_default()
    }

    /// Resolves when a request that arrived at `arrived` must end before it is complete, with the reason: the drain
    /// deadline has passed, or `max_time` since its arrival.
    pub(crate) fn ends(
        &self,
        arrived: Instant,
        max_time: Option<Duration>,
    ) -> impl Future<Output = Error> + Send + 'static {
        let stages = Arc::clone(&self.0);
        // In a box, because few servers have the limit and each request has this future.
        let over = max_time.map(|max_time| (max_time, Box::pin(sleep_until(arrived + max_time))));
        async move {
            let Some((max_time, over)) = over else {
                stages.forced.cancelled().await;
                return Error::ShuttingDown;
            };
            tokio::select! {
                biased;
                () = stages.forced.cancelled() => Error::ShuttingDown,
                () = over => Error::RequestTimeExceeded(max_time),
            }
        }
    }

    /// Resolves when running requests are aborted, at the drain deadline.
    pub(crate) fn forced(&self) -> impl Future<Output = ()> + Send + 'static {
        self.0.forced.clone().cancelled_owned()
    }

    /// Whether the listener is closed, and new requests are rejected.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.closed.is_cancelled()
    }

    /// Resolves when the listener is closed.
    async fn closed(&self) {
        self.0.closed.cancelled().await;
    }
}

/// Log lines per second of requests whose head is rejected: as many as of requests that a router rejects.
const REJECTED_LINES_PER_SECOND: u32 = 20;

/// Serves HTTP on listeners within the limits of [`Settings`]. Cheap to clone.
#[derive(Clone)]
pub struct Server {
    limits: Limits,
    metrics: ConnectionMetrics,
    /// Rate limit of log lines of requests that were rejected before they reached a router.
    rejected_lines: Arc<LogLimit>,
    /// `None`: connections have no TLS.
    tls: Option<Arc<ServerTls>>,
    certificates: CertificateMetrics,
}

/// Why a server cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The registry has the metrics of connections already.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// The certificate or its key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// Limits of connections.
#[derive(Clone, Copy)]
struct Limits {
    max_connections: usize,
    max_headers: usize,
    timeouts: Timeouts,
}

impl Server {
    /// A server with the limits of `settings`, and with TLS if they name a certificate. Registers the metrics of
    /// connections; fails if they are registered already. With a certificate it must be called within a runtime, whose
    /// task follows changes of the files.
    pub fn new(settings: &Settings, registry: &Registry) -> Result<Self, ServerError> {
        let limits = Limits {
            max_connections: settings.max_connections,
            max_headers: settings.max_headers.as_usize(),
            timeouts: Timeouts {
                header: settings.header_timeout.0,
                idle: settings.idle_timeout.0,
                write: settings.write_timeout.0,
            },
        };
        let rejected_lines = Arc::new(LogLimit::new(REJECTED_LINES_PER_SECOND, Duration::from_secs(1)));
        let metrics = ConnectionMetrics::new(registry)?;
        let certificates = CertificateMetrics::new("frontend", registry)?;
        let server = Self { limits, metrics, rejected_lines, tls: None, certificates: certificates.clone() };
        match tls_files(settings)? {
            Some(files) => Ok(server.with_tls(files, certificates)?),
            None => Ok(server),
        }
    }

    /// The same server for a port with the certificate of these files.
    pub fn with_tls(self, files: ServerFiles, metrics: CertificateMetrics) -> Result<Self, TlsError> {
        let tls = ServerTls::open(files, metrics.clone())?;
        Ok(Self { tls: Some(Arc::new(tls)), certificates: metrics, ..self })
    }

    /// The metrics and the problems of its certificate.
    pub fn certificates(&self) -> &CertificateMetrics {
        &self.certificates
    }

    /// The same server for a port without TLS.
    #[must_use]
    pub fn without_tls(self) -> Self {
        Self { tls: None, ..self }
    }

    /// Serves until `shutdown` is closed, then accepts no more connections and lets requests finish. Requests that
    /// still run at the drain deadline are aborted, which drops their engine streams.
    pub async fn serve(&self, listener: TcpListener, router: Router, shutdown: Shutdown) -> io::Result<()> {
        let loopback_only = listener.local_addr()?.ip().is_loopback();
        let connections = Arc::new(Connections::new(self.limits.max_connections));
        let tasks = TaskTracker::new();
        let logged = LogLimit::new(1, LOG_INTERVAL);
        loop {
            let accepted = tokio::select! {
                biased;
                () = shutdown.closed() => break,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((socket, _)) => {
                    self.open(socket, &router, &connections, &tasks, &shutdown, loopback_only).await;
                }
                Err(error) => {
                    self.metrics.accept_errors.with_label_values(&[reason(&error)]).inc();
                    // The client disconnected before `accept`; the next one is not affected.
                    if is_of_one_client(&error) {
                        continue;
                    }
                    if let Some(suppressed) = logged.admit() {
                        let open = connections.count();
                        tracing::error!(%error, open_connections = open, suppressed, "cannot accept connections");
                    }
                    connections.evict_longest_waiting();
                    tokio::select! {
                        biased;
                        () = shutdown.closed() => break,
                        () = tokio::time::sleep(ACCEPT_RETRY) => {}
                    }
                }
            }
        }
        drop(listener);
        tasks.close();
        let drain = shutdown.0.drain.get().copied().unwrap_or_default();
        if tokio::time::timeout(drain, tasks.wait()).await.is_ok() {
            return Ok(());
        }
        let began = shutdown.0.began.get().copied().unwrap_or_else(Instant::now);
        let requests = connections.requests();
        // Otherwise only connections are left on which no head of a request has arrived completely.
        if requests > 0 {
            let limit = shutdown.0.limit.get().map(String::as_str);
            tracing::warn!("{}", aborted(requests, began.elapsed(), limit));
        }
        shutdown.0.forced.cancel();
        // Connections that are still open after this are dropped with the runtime.
        let _ = tokio::time::timeout(LAST_BYTES, tasks.wait()).await;
        Ok(())
    }

    /// Starts to serve a connection, or drops it if even the reserved connections are taken.
    async fn open(
        &self,
        socket: TcpStream,
        router: &Router,
        connections: &Arc<Connections>,
        tasks: &TaskTracker,
        shutdown: &Shutdown,
        loopback_only: bool,
    ) {
        let (slot, reserved) = match connections.admit().await {
            Admission::Admitted(slot) => (slot, false),
            Admission::Reserved(slot) => (slot, true),
            Admission::Rejected => {
                self.metrics.closed.with_label_values(&["rejected"]).inc();
                return;
            }
        };
        // Small chunks must be sent immediately, not wait for an acknowledgement (Nagle's algorithm).
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        let info = Arc::new(ConnectionInfo {
            loopback_only,
            reserved,
            allowed_host: OnceLock::new(),
            local: socket.local_addr().ok().map(|local| local.ip()),
            peer: socket.peer_addr().ok(),
            choices: ConnectionChoices::default(),
            shutdown: shutdown.clone(),
        });
        let limits = self.limits;
        let metrics = self.metrics.clone();
        let rejected_lines = Arc::clone(&self.rejected_lines);
        let tls = self.tls.clone();
        let router = router.clone();
        tasks.spawn(async move {
            let _open = Open::new(&metrics.open);
            let serving = connection::run(socket, tls, &slot, router, &info, &limits, &rejected_lines);
            let reason = Box::pin(serving).await;
            metrics.closed.with_label_values(&[reason]).inc();
        });
    }
}

/// The log line for requests that still run at the drain deadline, `after` the beginning of the shutdown.
fn aborted(requests: usize, after: Duration, limit: Option<&str>) -> String {
    let limit = limit.map(|limit| format!(": {limit}")).unwrap_or_default();
    let after = after.as_secs_f64();
    let (plural, are) = if requests == 1 { ("", "is") } else { ("s", "are") };
    format!(
        "{requests} request{plural} still ran {after:.1} s after the signal to stop and {are} ended with an error \
         (503){limit}"
    )
}

/// The certificate of the API's port; `None` if there is none.
fn tls_files(settings: &Settings) -> Result<Option<ServerFiles>, TlsError> {
    let certificate = ("frontend.tls_cert_file", settings.tls_cert_file.clone());
    let key = ("frontend.tls_key_file", settings.tls_key_file.clone());
    Ok(Identity::of(certificate, key)?.map(|identity| ServerFiles { identity, clients: None }))
}

/// The certificate that clients of these settings see; `None` without TLS. Blocks.
pub fn tls_certificate(settings: &Settings) -> Result<Option<CertificateChain>, TlsError> {
    tls_files(settings)?.map(|files| files.identity.chain()).transpose()
}

/// Checks that the files of `settings` can be used, if there are any, and returns when the certificate expires. Blocks.
pub fn check_tls(settings: &Settings) -> Result<Option<CertificateExpiry>, TlsError> {
    tls_files(settings)?.map_or(Ok(None), |files| files.check())
}

/// Counts an open connection until dropped.
struct Open(IntGauge);

impl Open {
    fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Errors of a connection that ended before it was accepted, which `accept` returns.
fn is_of_one_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// The `error` label of a failed `accept`.
fn reason(error: &io::Error) -> &'static str {
    if transport::is_out_of_files(error) {
        "file_descriptors"
    } else if is_of_one_client(error) {
        "connection"
    } else {
        "other"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_aborted_requests_counts_from_the_signal() {
        assert_eq!(
            aborted(50, Duration::from_millis(4800), Some("raise shutdown_timeout")),
            "50 requests still ran 4.8 s after the signal to stop and are ended with an error (503): raise \
             shutdown_timeout"
        );
        assert_eq!(
            aborted(1, Duration::from_secs(1), None),
            "1 request still ran 1.0 s after the signal to stop and is ended with an error (503)"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_shutdown_begins_with_its_announcement() {
        let shutdown = Shutdown::default();
        shutdown.announce();
        tokio::time::advance(Duration::from_secs(5)).await;
        shutdown.close(Duration::from_secs(15));
        let began = shutdown.0.began.get().map(Instant::elapsed);
        assert_eq!((began, shutdown.is_abandoned()), (Some(Duration::from_secs(5)), false));
        shutdown.abandon();
        assert!(shutdown.is_abandoned() && shutdown.is_closed());
    }
}
