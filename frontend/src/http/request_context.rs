//! Observability of each request: its id, a span, its metrics and one log line.
//!
//! The [`RequestContext`] lives until the last byte of the response is written or discarded, so a stream counts as in
//! flight while it runs. The log line has all facts about the request as fields of its own, so that log stores can
//! filter by them without spans.

use super::request_id;
use super::server::{ConnectionInfo, Shutdown};
use crate::error::{CLIENT_CLOSED, Error, ErrorForm, LoggedError};
use crate::keys::Key;
use crate::metrics::{Metrics, ModelMetrics, UsedTokens};
use axum::extract::{MatchedPath, Request};
use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use parking_lot::{Mutex, MutexGuard};
use spans::{Kind, LogLimit, Tracer};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::time::Instant;
use tracing::{Instrument, Span};
use worker::engine::Attempts;

/// The request's id, in requests and responses.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Maximum log lines per second of rejected requests, of cancelled ones, and of failed ones: enough to find a client's
/// request, too few to fill a disk under an attack.
const MAX_LINES_PER_SECOND: u32 = 20;

/// Maximum number of characters of a path in a log line.
const MAX_LOGGED_PATH: usize = 200;

/// Routes of scrapes and health checks, which do not count as in flight: an idle server shows none.
const NOT_IN_FLIGHT: [&str; 6] = ["/metrics", "/live", "/ready", "/health", "/ping", "/version"];

/// Pages without a route that gateways in front of this server ask for every few seconds, to find out which engine it
/// is. Their 404 is the expected answer.
const PROBES: [&str; 5] = ["/kv_event_sources", "/openapi.json", "/get_server_info", "/server_info", "/props"];

/// One request, from its arrival to the last byte of its response.
pub(crate) struct RequestContext {
    /// The client's `x-request-id`, or a generated id.
    pub(crate) id: Arc<str>,
    pub(crate) span: Span,
    /// The span of the trace, until the last byte of the response.
    trace: spans::Span,
    pub(crate) arrived: Instant,
    /// The route; `None` for a path without one.
    route: Option<MatchedPath>,
    /// The beginning of a path without a route, for the log line.
    path: Option<Box<str>>,
    /// How the client expects errors.
    pub(crate) error_form: ErrorForm,
    /// Whether it counts as in flight.
    is_counted: bool,
    /// Whether it asks for one of the [`PROBES`].
    is_probe: bool,
    /// The shutdown of the server; `None` within this process.
    shutdown: Option<Shutdown>,
    pub(crate) metrics: Arc<Metrics>,
    /// The metrics of its model.
    model: OnceLock<Arc<ModelMetrics>>,
    /// The API key of the request.
    key: OnceLock<Arc<Key>>,
    /// Prompt tokens that were taken from the key's limit.
    taken: AtomicU64,
    /// The workers that may have computed it; empty if its tokens are not counted for a key or a tenant.
    attempts: OnceLock<Attempts>,
    /// The response's status; 0 before there is one.
    status: AtomicU16,
    /// The response is a stream that has not ended.
    streaming: AtomicBool,
    /// Fields of the log line that become known during the request.
    log_fields: Mutex<LogFields>,
    log_limits: Arc<LogLimits>,
}

/// State of the middleware [`observe`].
pub(crate) struct Observer {
    metrics: Arc<Metrics>,
    log_limits: Arc<LogLimits>,
    tracer: Tracer,
}

impl Observer {
    pub(crate) fn new(metrics: Metrics, tracer: Tracer) -> Self {
        Self { metrics: Arc::new(metrics), log_limits: Arc::default(), tracer }
    }
}

/// Rate limits of log lines of requests that were not served.
struct LogLimits {
    rejected: LogLimit,
    /// Requests whose client closed the connection.
    cancelled: LogLimit,
    failed: LogLimit,
}

impl Default for LogLimits {
    fn default() -> Self {
        let limit = || LogLimit::new(MAX_LINES_PER_SECOND, Duration::from_secs(1));
        Self { rejected: limit(), cancelled: limit(), failed: limit() }
    }
}

/// Fields of the log line that become known during the request.
#[derive(Default)]
pub(crate) struct LogFields {
    pub(crate) tenant: Option<Arc<str>>,
    /// The worker of the first choice.
    pub(crate) worker: Option<Arc<str>>,
    pub(crate) prompt_tokens: Option<usize>,
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) completion_tokens: u32,
    /// The finish reason of the first choice.
    pub(crate) finish_reason: Option<&'static str>,
    /// Time to the first token in seconds.
    pub(crate) ttft_s: Option<f64>,
    /// Bytes of a WebSocket connection from its client, and to it.
    pub(crate) received_bytes: Option<u64>,
    pub(crate) sent_bytes: Option<u64>,
    pub(crate) error: Option<LoggedError>,
}

impl RequestContext {
    /// The context of a request.
    pub(crate) fn of(extensions: &Extensions) -> Arc<Self> {
        let context = extensions.get::<Arc<Self>>();
        Arc::clone(context.expect("the outermost layer inserts a request context"))
    }

    /// Records the model and the number of prompt tokens of a parsed request, for its log line and its span.
    pub(crate) fn set_prompt(&self, model: &Arc<str>, prompt_tokens: usize) {
        self.log_fields().prompt_tokens = Some(prompt_tokens);
        self.record_model(model);
    }

    /// [`set_prompt`](Self::set_prompt) of a request that has output, which counts its prompt. The prompts of rejected
    /// requests are not computed, so they are not counted.
    pub(crate) fn record_prompt(&self, model: &Arc<str>, prompt_tokens: usize) {
        self.log_fields().prompt_tokens = Some(prompt_tokens);
        let metrics = self.record_model(model);
        metrics.prompt_tokens.inc_by(prompt_tokens as u64);
        metrics.prompt_length.observe(prompt_tokens as f64);
    }

    /// Records the model of a request, of which it has one. Returns its metrics.
    pub(crate) fn record_model(&self, model: &Arc<str>) -> &Arc<ModelMetrics> {
        self.model.get_or_init(|| self.metrics.of_model(model))
    }

    /// Records the API key of the request.
    pub(crate) fn set_key(&self, key: Arc<Key>) {
        // Set once: a request is authenticated once.
        let _ = self.key.set(key);
    }

    /// The API key of the request; `None` if requests need none.
    pub(crate) fn key(&self) -> Option<&Arc<Key>> {
        self.key.get()
    }

    /// Takes the tokens of the prompt from the key's limit. [`settle`](Self::settle) corrects an estimate.
    pub(crate) fn take_prompt(&self, tokens: usize) -> Result<(), Error> {
        if let Some(key) = self.key() {
            key.take_prompt(tokens as u64)?;
            self.taken.store(tokens as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Replaces an estimate of the prompt's tokens by what they are.
    pub(crate) fn correct_prompt(&self, tokens: usize) {
        if let Some(key) = self.key() {
            key.settle(self.taken.swap(tokens as u64, Ordering::Relaxed), tokens as u64);
        }
    }

    /// For the request to the engine: counts the workers that may compute it, if its tokens are counted.
    pub(crate) fn attempts(&self) -> Attempts {
        if self.key().is_none() && self.log_fields().tenant.is_none() {
            return Attempts::default();
        }
        self.attempts.get_or_init(Attempts::counted).clone()
    }

    /// The tokens that the request has used. One that failed or was redirected before its first token has used its
    /// prompt if a worker may have computed that: a client that chooses the time of the failure, by a deadline, would
    /// compute for nothing. A client that leaves has used its prompt in any case.
    fn used(&self, status: u16) -> UsedTokens {
        let fields = self.log_fields();
        let generated = u64::from(fields.completion_tokens);
        let may_have_computed = || self.attempts.get().is_some_and(Attempts::may_have_computed);
        if status >= 300 && status != CLIENT_CLOSED && generated == 0 && !may_have_computed() {
            return UsedTokens::default();
        }
        let taken = || self.taken.load(Ordering::Relaxed);
        let prompt = fields.prompt_tokens.map_or_else(taken, |tokens| tokens as u64);
        UsedTokens { prompt, cached: fields.cached_tokens.unwrap_or_default().into(), generated }
    }

    /// Whether the request got output. `status`: its final one. A connection that has switched to another protocol
    /// lasts until its client or its server ends it, which says nothing of the model.
    fn has_output(&self, status: u16) -> bool {
        let fields = self.log_fields();
        if fields.sent_bytes.is_some() {
            return false;
        }
        status < 300 || fields.completion_tokens > 0 || fields.ttft_s.is_some()
    }

    /// Charges the key with what the request has used, and counts it for its tenant.
    fn settle(&self, status: u16) {
        let used = self.used(status);
        if let Some(key) = self.key() {
            key.settle(self.taken.load(Ordering::Relaxed), used.prompt + used.generated);
        }
        let Some(tenants) = self.metrics.tenants.as_ref().filter(|_| self.is_counted) else { return };
        let fields = self.log_fields();
        // A request that is rejected early has the tenant of its key only.
        let of_key = self.key().and_then(|key| key.tenant.as_ref());
        if let Some(tenant) = fields.tenant.as_ref().or(of_key) {
            tenants.count(tenant, status, fields.error.as_ref().map(|error| error.rejection), used);
        }
    }

    /// Records the start of a stream. The status is final only when the stream has finished.
    pub(crate) fn stream_started(&self) {
        self.streaming.store(true, Ordering::Relaxed);
    }

    /// Records that the stream ended without an error.
    pub(crate) fn stream_finished(&self) {
        self.set_final_status(StatusCode::OK);
    }

    /// Records that a connection that had switched to another protocol ended without an error.
    pub(crate) fn tunnel_finished(&self) {
        self.set_final_status(StatusCode::SWITCHING_PROTOCOLS);
    }

    /// Records that the stream ended with an error.
    pub(crate) fn stream_failed(&self, error: &Error) {
        self.log_fields().error = Some(error.into());
        self.set_final_status(error.status());
    }

    /// Records the tenant. An empty name means that there is none.
    pub(crate) fn set_tenant(&self, tenant: &Arc<str>) {
        self.log_fields().tenant = Some(tenant.clone()).filter(|tenant| !tenant.is_empty());
    }

    /// The route as it is named in metrics and log lines.
    fn endpoint(&self) -> &str {
        endpoint(self.route.as_ref())
    }

    fn set_final_status(&self, status: StatusCode) {
        self.status.store(status.as_u16(), Ordering::Relaxed);
        self.streaming.store(false, Ordering::Relaxed);
    }

    pub(crate) fn log_fields(&self) -> MutexGuard<'_, LogFields> {
        self.log_fields.lock()
    }

    /// Where spans of the request belong.
    pub(crate) fn trace(&self) -> spans::Context {
        self.trace.context()
    }

    /// Completes the span of the trace. `sent`: the status that the client got.
    fn describe(&mut self, status: u16, sent: u16) {
        if !self.trace.is_recorded() {
            return;
        }
        let (trace, fields) = (&mut self.trace, self.log_fields.get_mut());
        trace.set_some("http.response.status_code", Some(sent).filter(|sent| *sent != 0));
        if let Some(model) = self.model.get() {
            trace.set("gen_ai.request.model", &model.name);
            trace.set_some("gen_ai.usage.input_tokens", fields.prompt_tokens);
            trace.set("gen_ai.usage.output_tokens", fields.completion_tokens);
            trace.set_some("gen_ai.usage.cache_read.input_tokens", fields.cached_tokens);
            trace
                .set_some("gen_ai.response.finish_reasons", fields.finish_reason.map(|reason| vec![reason.to_owned()]));
        }
        trace.set_some("blockyard.time_to_first_token_s", fields.ttft_s);
        trace.set_some("blockyard.worker", fields.worker.as_ref());
        trace.set_some("blockyard.tenant", fields.tenant.as_ref());
        match &fields.error {
            // Of a server, statuses below 500 are no errors, by OpenTelemetry's conventions of HTTP.
            Some(error) if status >= 500 => {
                trace.set("error.type", error.code.map_or_else(|| status.to_string(), str::to_owned));
                trace.fail(&error.message);
            }
            _ if status == CLIENT_CLOSED => trace.set("blockyard.client_disconnected", true),
            _ => {}
        }
    }

    /// Writes the log line.
    fn log(&self, status: u16) {
        let fields = self.log_fields();
        let model = self.model.get();
        macro_rules! line {
            ($level:ident, $suppressed:expr, $message:literal) => {
                tracing::$level!(
                    parent: None,
                    request_id = &*self.id,
                    trace_id = self.trace.trace_id().map(tracing::field::display),
                    endpoint = self.endpoint(),
                    path = self.path.as_deref(),
                    status,
                    model = model.map(|model| &*model.name),
                    key = self.key().map(|key| &*key.name),
                    tenant = fields.tenant.as_deref(),
                    worker = fields.worker.as_deref(),
                    prompt_tokens = fields.prompt_tokens,
                    cached_tokens = fields.cached_tokens,
                    completion_tokens = model.map(|_| fields.completion_tokens),
                    finish_reason = fields.finish_reason,
                    ttft_s = fields.ttft_s,
                    received_bytes = fields.received_bytes,
                    sent_bytes = fields.sent_bytes,
                    duration_s = self.arrived.elapsed().as_secs_f64(),
                    code = fields.error.as_ref().and_then(|error| error.code),
                    error = fields.error.as_ref().map(|error| &*error.message),
                    suppressed = Some($suppressed).filter(|lines| *lines > 0),
                    $message
                )
            };
        }
        match status {
            // Health checks repeat every few seconds, and "not ready" is not a failure.
            503 if matches!(self.endpoint(), "/ready" | "/health" | "/ping") => line!(debug, 0, "not ready"),
            // A defect of the server; higher statuses mean that it cannot serve now.
            500 => {
                if let Some(suppressed) = self.log_limits.failed.admit() {
                    line!(error, suppressed, "request failed");
                }
            }
            501.. => {
                if let Some(suppressed) = self.log_limits.failed.admit() {
                    line!(warn, suppressed, "request failed");
                }
            }
            CLIENT_CLOSED => {
                if let Some(suppressed) = self.log_limits.cancelled.admit() {
                    line!(info, suppressed, "request cancelled");
                }
            }
            404 if self.is_probe => line!(debug, 0, "request rejected"),
            400.. => {
                if let Some(suppressed) = self.log_limits.rejected.admit() {
                    line!(info, suppressed, "request rejected");
                }
            }
            _ if model.is_some() => line!(info, 0, "request finished"),
            _ => line!(debug, 0, "request finished"),
        }
    }
}

impl Drop for RequestContext {
    fn drop(&mut self) {
        let interrupted = self.streaming.load(Ordering::Relaxed);
        let sent = self.status.load(Ordering::Relaxed);
        let status = match Some(sent).filter(|status| *status != 0 && !interrupted) {
            Some(status) => status,
            None if self.shutdown.as_ref().is_some_and(Shutdown::is_abandoned) => {
                let error = Error::ShuttingDown;
                self.log_fields().error = Some((&error).into());
                error.status().as_u16()
            }
            None => CLIENT_CLOSED,
        };
        if self.is_counted {
            self.metrics.in_flight.dec();
        }
        self.settle(status);
        let code = StatusCode::from_u16(status).expect("it is that of a response, or a constant");
        self.metrics.requests.with_label_values(&[self.endpoint(), code.as_str()]).inc();
        // A request that was rejected or cancelled before its first output is short, however slow the others are.
        if let Some(model) = self.model.get().filter(|_| self.has_output(status)) {
            model.duration.observe(self.arrived.elapsed().as_secs_f64());
        }
        self.log(status);
        self.describe(status, sent);
    }
}

/// The outermost middleware: adds a context to every request and its id to every response, and turns a panic into an
/// error response.
pub(crate) async fn observe(
    observer: &Observer,
    mut request: Request,
    next: impl AsyncFnOnce(Request) -> Response,
) -> Response {
    let id = request_id(request.headers());
    let route = request.extensions().get::<MatchedPath>().cloned();
    let endpoint = endpoint(route.as_ref());
    let span = tracing::info_span!("request", request_id = %id, %endpoint);
    let is_counted = !NOT_IN_FLIGHT.contains(&endpoint);
    let is_probe = route.is_none() && request.method() == Method::GET && PROBES.contains(&request.uri().path());
    let logged = || request.uri().path().chars().take(MAX_LOGGED_PATH).collect::<String>().into();
    let path = route.is_none().then(logged);
    let shutdown = ConnectionInfo::of(request.extensions()).map(|connection| connection.shutdown.clone());
    if is_counted {
        observer.metrics.in_flight.inc();
    }
    let trace = if is_counted { begin_trace(&observer.tracer, &request, &id) } else { spans::Span::default() };
    let context = Arc::new(RequestContext {
        id: id.clone(),
        span: span.clone(),
        trace,
        arrived: Instant::now(),
        route,
        path,
        error_form: ErrorForm::of(request.uri().path()),
        is_counted,
        is_probe,
        shutdown,
        metrics: observer.metrics.clone(),
        model: OnceLock::new(),
        key: OnceLock::new(),
        taken: AtomicU64::new(0),
        attempts: OnceLock::new(),
        status: AtomicU16::new(0),
        streaming: AtomicBool::new(false),
        log_fields: Mutex::default(),
        log_limits: observer.log_limits.clone(),
    });
    request.extensions_mut().insert(context.clone());
    let outcome = AssertUnwindSafe(next(request)).catch_unwind().instrument(span).await;
    let mut response = outcome.unwrap_or_else(|_| panicked().into_response());
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if let Some(error) = response.extensions_mut().remove::<Error>() {
        error.write(&mut response, context.error_form);
        context.log_fields().error = Some(LoggedError::from(&error));
    }
    context.status.store(response.status().as_u16(), Ordering::Relaxed);
    response
}

/// The span of a request, within the client's trace if it names one.
fn begin_trace(tracer: &Tracer, request: &Request, id: &Arc<str>) -> spans::Span {
    if !tracer.is_on() {
        return spans::Span::default();
    }
    let mut span = tracer.root("HTTP", Kind::Server, spans::extract(request.headers()));
    if span.is_recorded() {
        let (method, route) = (request.method().as_str(), request.extensions().get::<MatchedPath>());
        let route = route.map(MatchedPath::as_str);
        span.rename(|| [Some(method), route].into_iter().flatten().collect::<Vec<_>>().join(" "));
        span.set("http.request.method", method);
        span.set_some("http.route", route);
        span.set("url.path", request.uri().path());
        span.set("blockyard.request_id", id);
        span.set_some("gen_ai.operation.name", operation(request.uri().path()));
    }
    span
}

/// The name that OpenTelemetry's conventions of generative AI have for an endpoint.
fn operation(path: &str) -> Option<&'static str> {
    match path {
        "/v1/chat/completions" | "/v1/messages" | "/v1/responses" | "/cohere/v2/chat" => Some("chat"),
        "/v1/completions" => Some("text_completion"),
        "/v1/embeddings" => Some("embeddings"),
        _ => None,
    }
}

fn endpoint(route: Option<&MatchedPath>) -> &str {
    route.map_or("unmatched", MatchedPath::as_str)
}

/// The error response for a panic. The panic's own message is in the log.
pub(crate) fn panicked() -> Error {
    tracing::error!("a request handler panicked; this is a bug");
    Error::Failed("internal error; the log has the details".into())
}

/// The client's id if it is valid in a log line and a header, else a generated one.
fn request_id(headers: &HeaderMap) -> Arc<str> {
    let is_valid = |id: &&str| {
        (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:/+=".contains(&b))
    };
    let from_client = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(is_valid);
    from_client.map_or_else(request_id::generate, Arc::from)
}
