//! Accepting connections, serving HTTP on them within limits, and ending well.
//!
//! ```text
//!   accept ─ admission ─ connection task: hyper over `Stream`, with a watchdog over `Activity`
//!
//!   running ─ announce ─▶ refusing: /ready says no, new requests get 503, the listener is open
//!           ─ close ────▶ draining: no listener, running requests finish; ended at the drain deadline
//! ```
//! Each connection has time limits for its request headers, for idling and for a client that does not read. Not here: the
//! pace of a request's body (`upload`).

mod activity;
mod connection;
mod connections;
mod stream;

pub(crate) use connection::Arrival;

use crate::limits::LogLimit;
use crate::metrics::ConnectionMetrics;
use crate::settings::Settings;
use activity::Timeouts;
use axum::Router;
use axum::extract::Extension;
use connections::{Admission, Connections};
use prometheus::{IntGauge, Registry};
use std::future::Future;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// After requests were ended at the drain deadline, how long their last bytes may take to reach a slow client.
const LAST_BYTES: Duration = Duration::from_secs(2);
/// Without file descriptors `accept` fails at once, again and again; connections end in the meantime.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Failing `accept` calls repeat ten times a second.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The way from serving to the end, for those who decide when. Cheap to clone.
#[derive(Clone, Default)]
pub struct Shutdown {
    announced: CancellationToken,
    closed: CancellationToken,
    cut: CancellationToken,
    /// How long requests may go on once it is closed.
    drain: Arc<OnceLock<Duration>>,
}

impl Shutdown {
    /// From here on new requests are refused and `/ready` says no. The listener stays open, so that a load balancer gets
    /// answers until it has noticed.
    pub fn announce(&self) {
        self.announced.cancel();
    }

    /// Closes the listener. Requests that run may finish within `drain`; what runs longer gets an error and ends. The first
    /// call counts.
    pub fn close(&self, drain: Duration) {
        let _ = self.drain.set(drain);
        self.announced.cancel();
        self.closed.cancel();
    }

    /// Whether new requests are refused.
    pub(crate) fn is_announced(&self) -> bool {
        self.announced.is_cancelled()
    }

    /// Resolves when the drain deadline has passed: what still runs must end.
    pub(crate) fn cut(&self) -> impl Future<Output = ()> + Send + 'static {
        self.cut.clone().cancelled_owned()
    }
}

/// Lines a second for requests whose head is refused: no more than those of requests that a router refuses.
const REFUSED_LINES: u32 = 20;

/// Serves HTTP on listeners, with the limits of the front door. Cheap to clone.
#[derive(Clone)]
pub struct Server {
    limits: Limits,
    metrics: ConnectionMetrics,
    /// Lines of requests that were refused before they reached a router.
    refused: Arc<LogLimit>,
}

/// What a connection may take.
#[derive(Clone, Copy)]
struct Limits {
    max_connections: usize,
    max_headers: usize,
    timeouts: Timeouts,
}

impl Server {
    /// With the limits of `settings`. Registers the metrics of connections; fails when that was done before.
    pub fn new(settings: &Settings, registry: &Registry) -> Result<Self, prometheus::Error> {
        let limits = Limits {
            max_connections: settings.max_connections,
            max_headers: settings.max_headers.as_usize(),
            timeouts: Timeouts {
                header: settings.header_timeout.0,
                idle: settings.idle_timeout.0,
                write: settings.write_timeout.0,
            },
        };
        let refused = Arc::new(LogLimit::new(REFUSED_LINES, Duration::from_secs(1)));
        Ok(Self { limits, metrics: ConnectionMetrics::new(registry)?, refused })
    }

    /// Serves until `shutdown` is closed, then accepts nothing more and lets requests finish. What still runs at the drain
    /// deadline ends; the engine sees its streams dropped.
    pub async fn serve(&self, listener: TcpListener, router: Router, shutdown: Shutdown) -> io::Result<()> {
        let router = router.layer(Extension(shutdown.clone()));
        let loopback_only = listener.local_addr()?.ip().is_loopback();
        let connections = Arc::new(Connections::new(self.limits.max_connections));
        let tasks = TaskTracker::new();
        let logged = LogLimit::new(1, LOG_INTERVAL);
        loop {
            let accepted = tokio::select! {
                biased;
                () = shutdown.closed.cancelled() => break,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((socket, _)) => {
                    self.open(socket, &router, &connections, &tasks, &shutdown, loopback_only);
                }
                Err(error) => {
                    self.metrics.accept_errors.with_label_values(&[reason(&error)]).inc();
                    // The client is gone again: that says nothing about the next.
                    if is_of_one_client(&error) {
                        continue;
                    }
                    if let Some(suppressed) = logged.admit() {
                        let open = connections.count();
                        tracing::error!(%error, open_connections = open, suppressed, "cannot accept connections");
                    }
                    connections.evict_longest_without_request();
                    tokio::select! {
                        biased;
                        () = shutdown.closed.cancelled() => break,
                        () = tokio::time::sleep(ACCEPT_RETRY) => {}
                    }
                }
            }
        }
        drop(listener);
        tasks.close();
        let drain = shutdown.drain.get().copied().unwrap_or_default();
        if tokio::time::timeout(drain, tasks.wait()).await.is_ok() {
            return Ok(());
        }
        tracing::warn!(
            shutdown_timeout_s = drain.as_secs_f64(),
            "requests still run after the shutdown timeout and are aborted"
        );
        shutdown.cut.cancel();
        // What does not take its last bytes in time is dropped with the runtime.
        let _ = tokio::time::timeout(LAST_BYTES, tasks.wait()).await;
        Ok(())
    }

    /// Starts to serve a connection, or drops it where there is no room even for a health check.
    fn open(
        &self,
        socket: TcpStream,
        router: &Router,
        connections: &Arc<Connections>,
        tasks: &TaskTracker,
        shutdown: &Shutdown,
        loopback_only: bool,
    ) {
        let (slot, reserved) = match connections.admit() {
            Admission::Admitted(slot) => (slot, false),
            Admission::Reserved(slot) => (slot, true),
            Admission::Rejected => {
                self.metrics.closed.with_label_values(&["rejected"]).inc();
                return;
            }
        };
        // Small chunks must leave at once, not wait for the acknowledgement of the one before.
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        let arrival = Arrival { loopback_only, reserved, local: socket.local_addr().ok().map(|local| local.ip()) };
        let (limits, metrics, refused) = (self.limits, self.metrics.clone(), Arc::clone(&self.refused));
        let (router, closed) = (router.clone(), shutdown.closed.clone());
        tasks.spawn(async move {
            let _open = Open::new(&metrics.open);
            let serving = connection::run(socket, &slot, router, arrival, &limits, &closed, &refused);
            let reason = Box::pin(serving).await;
            metrics.closed.with_label_values(&[reason]).inc();
        });
    }
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

/// Errors that `accept` passes on from a connection that ended before it was accepted.
fn is_of_one_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// A label for the errors that operators must tell apart.
fn reason(error: &io::Error) -> &'static str {
    /// `EMFILE` and `ENFILE`, the same numbers on every Unix.
    const NO_DESCRIPTORS: [i32; 2] = [24, 23];
    match error.raw_os_error() {
        Some(code) if NO_DESCRIPTORS.contains(&code) => "file_descriptors",
        _ if is_of_one_client(error) => "connection",
        _ => "other",
    }
}
