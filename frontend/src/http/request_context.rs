//! What is seen of each request: its id, a span, its metrics and one line of log. The [`Ticket`] lives until the last byte of
//! the response was written or given up, so that a stream counts as in flight for as long as it runs.
//!
//! The line has everything that is known of the request as fields of its own, so that log stores can filter by them without
//! looking into spans.

use super::request_id;
use crate::error::{Error, Refused};
use crate::limits::LogLimit;
use crate::metrics::Metrics;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::time::Instant;
use tracing::{Instrument, Span};

/// Names the request, in both directions.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// What nginx logs for a client that went away; nobody ever receives it.
const CLIENT_CLOSED: u16 = 499;
/// Lines of requests that failed, per second and kind: enough to find a client's request, too few to fill a disk under an
/// attack.
const FAILED_LINES: u32 = 20;

/// Routes of scrapes and health checks: an idle server shows no request in flight while it is being watched.
const OPERATIONS: [&str; 6] = ["/metrics", "/live", "/ready", "/health", "/ping", "/version"];

/// One request, from its arrival to its last byte.
pub(crate) struct Ticket {
    /// The client's `x-request-id`, or one of ours.
    pub(crate) id: Arc<str>,
    pub(crate) span: Span,
    pub(crate) arrived: Instant,
    endpoint: String,
    /// Whether it counts as in flight.
    is_counted: bool,
    pub(crate) metrics: Metrics,
    model: OnceLock<Arc<str>>,
    /// What was answered; 0 as long as nothing was.
    status: AtomicU16,
    /// The body is still being streamed.
    streaming: AtomicBool,
    /// What the line of log says besides.
    details: Mutex<Details>,
    lines: Arc<Lines>,
}

/// The middleware's state.
#[derive(Clone)]
pub(crate) struct Observer {
    metrics: Metrics,
    lines: Arc<Lines>,
}

impl Observer {
    pub(crate) fn new(metrics: Metrics) -> Self {
        Self { metrics, lines: Arc::default() }
    }
}

/// How many lines requests may leave that were not served.
struct Lines {
    refused: LogLimit,
    failed: LogLimit,
}

impl Default for Lines {
    fn default() -> Self {
        let limit = || LogLimit::new(FAILED_LINES, Duration::from_secs(1));
        Self { refused: limit(), failed: limit() }
    }
}

/// What becomes known of a request on its way.
#[derive(Default)]
pub(crate) struct Details {
    pub(crate) tenant: Option<Arc<str>>,
    /// Of its first choice.
    pub(crate) worker: Option<Arc<str>>,
    pub(crate) prompt_tokens: Option<usize>,
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) completion_tokens: u32,
    /// Of its first choice.
    pub(crate) finish_reason: Option<&'static str>,
    pub(crate) ttft_s: Option<f64>,
    pub(crate) error: Option<Refused>,
}

impl Ticket {
    /// The model was found, and the prompt has this many tokens.
    pub(crate) fn accepted(&self, model: &Arc<str>, prompt_tokens: usize) {
        self.details().prompt_tokens = Some(prompt_tokens);
        self.metrics.prompt_tokens.with_label_values(&[model]).inc_by(prompt_tokens as u64);
        self.metrics.prompt_length.with_label_values(&[model]).observe(prompt_tokens as f64);
        // Set once: a request has one model.
        let _ = self.model.set(model.clone());
    }

    /// A stream has begun: the status that was answered holds only if it ends well.
    pub(crate) fn stream_begins(&self) {
        self.streaming.store(true, Ordering::Relaxed);
    }

    /// The stream has ended well.
    pub(crate) fn stream_ends(&self) {
        self.ends(StatusCode::OK);
    }

    /// The stream has ended with an error.
    pub(crate) fn stream_fails(&self, error: &Error) {
        self.details().error = Some(error.into());
        self.ends(error.status());
    }

    /// For whom the request is.
    pub(crate) fn of_tenant(&self, tenant: &Arc<str>) {
        self.details().tenant = Some(tenant.clone()).filter(|tenant| !tenant.is_empty());
    }

    fn ends(&self, status: StatusCode) {
        self.status.store(status.as_u16(), Ordering::Relaxed);
        self.streaming.store(false, Ordering::Relaxed);
    }

    pub(crate) fn details(&self) -> MutexGuard<'_, Details> {
        self.details.lock().expect("no code panics while it holds this lock")
    }

    /// Writes the line of log.
    fn log(&self, status: u16) {
        let details = self.details();
        let Details { tenant, worker, prompt_tokens, cached_tokens, completion_tokens, finish_reason, ttft_s, error } =
            &*details;
        let model = self.model.get();
        macro_rules! line {
            ($level:ident, $suppressed:expr, $message:literal) => {
                tracing::$level!(
                    parent: None,
                    request_id = &*self.id,
                    endpoint = self.endpoint,
                    status,
                    model = model.map(|model| &**model),
                    tenant = tenant.as_deref(),
                    worker = worker.as_deref(),
                    prompt_tokens,
                    cached_tokens,
                    completion_tokens = model.map(|_| *completion_tokens),
                    finish_reason,
                    ttft_s,
                    duration_s = self.arrived.elapsed().as_secs_f64(),
                    code = error.as_ref().and_then(|error| error.code),
                    error = error.as_ref().map(|error| &*error.message),
                    suppressed = Some($suppressed).filter(|lines| *lines > 0),
                    $message
                )
            };
        }
        match status {
            // A probe asks every few seconds, and an answer of no is not a failure.
            503 if matches!(self.endpoint.as_str(), "/ready" | "/health" | "/ping") => line!(debug, 0, "not ready"),
            // The server's own fault; the others above it say that it cannot serve now.
            500 => {
                if let Some(suppressed) = self.lines.failed.admit() {
                    line!(error, suppressed, "request failed");
                }
            }
            501.. => {
                if let Some(suppressed) = self.lines.failed.admit() {
                    line!(warn, suppressed, "request failed");
                }
            }
            400.. => {
                if let Some(suppressed) = self.lines.refused.admit() {
                    line!(info, suppressed, "request rejected");
                }
            }
            _ if model.is_some() => line!(info, 0, "request finished"),
            _ => line!(debug, 0, "request finished"),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let cut = self.streaming.load(Ordering::Relaxed);
        let status = Some(self.status.load(Ordering::Relaxed)).filter(|s| *s != 0 && !cut).unwrap_or(CLIENT_CLOSED);
        if self.is_counted {
            self.metrics.in_flight.dec();
        }
        self.metrics.requests.with_label_values(&[self.endpoint.as_str(), &status.to_string()]).inc();
        if let Some(model) = self.model.get() {
            self.metrics.duration.with_label_values(&[model]).observe(self.arrived.elapsed().as_secs_f64());
        }
        self.log(status);
    }
}

/// The outermost layer: gives every request its ticket, every response its id, and turns a panic into an answer.
pub(crate) async fn observe(State(observer): State<Observer>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let endpoint = request.extensions().get::<MatchedPath>().map_or("unmatched", MatchedPath::as_str).to_owned();
    let span = tracing::info_span!("request", request_id = %id, %endpoint);
    let is_counted = !OPERATIONS.contains(&endpoint.as_str());
    if is_counted {
        observer.metrics.in_flight.inc();
    }
    let ticket = Arc::new(Ticket {
        id: id.clone(),
        span: span.clone(),
        arrived: Instant::now(),
        endpoint,
        is_counted,
        metrics: observer.metrics.clone(),
        model: OnceLock::new(),
        status: AtomicU16::new(0),
        streaming: AtomicBool::new(false),
        details: Mutex::default(),
        lines: observer.lines.clone(),
    });
    request.extensions_mut().insert(ticket.clone());
    let answer = AssertUnwindSafe(next.run(request)).catch_unwind().instrument(span).await;
    let mut response = answer.unwrap_or_else(|_| panicked().into_response());
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if let Some(error) = response.extensions_mut().remove::<Refused>() {
        ticket.details().error = Some(error);
    }
    ticket.status.store(response.status().as_u16(), Ordering::Relaxed);
    response
}

/// What a client is told of a bug of ours. The panic's own message went to the log.
pub(crate) fn panicked() -> Error {
    tracing::error!("a request handler panicked; this is a bug");
    Error::Failed("internal error; the log has the details".into())
}

/// The client's id if it is fit for a log line and a header, else one of ours.
fn request_id(headers: &HeaderMap) -> Arc<str> {
    let sane = |id: &&str| {
        (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:/+=".contains(&b))
    };
    let theirs = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(sane);
    theirs.map_or_else(|| name::unique().into(), Arc::from)
}
