//! The task that takes ended spans in batches and sends them.

use super::message::{Resource, rejected};
use super::metrics::Metrics;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, StatusCode, Uri};
use http_body_util::{BodyExt, Limited};
use spans::{EndedSpan, SpanQueue};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use upstream::relay::client::Client;

/// Sends the spans of a process. Dropping it stops at once; [`Exporter::flush`] sends what is queued.
pub struct Exporter {
    task: AbortOnDropHandle<()>,
    stop: CancellationToken,
}

/// Where spans are sent.
pub(super) struct Collector {
    pub(super) client: Client,
    pub(super) path: PathAndQuery,
    pub(super) headers: HeaderMap,
    pub(super) url: Uri,
}

struct Export {
    collector: Collector,
    resource: Resource,
    metrics: Metrics,
    /// The last batch was not sent.
    is_failing: bool,
}

/// Why a batch was not accepted.
enum Failure {
    /// It may be sent again.
    Temporary(String),
    Final(String),
}

/// Spans of a message: OpenTelemetry's default. A message has about 300 KB.
const MAX_BATCH: usize = 512;
/// How long a batch waits for more spans. The trace of a request can be looked up this long after its end.
const BATCH_DELAY: Duration = Duration::from_secs(1);
/// The collector is near; OpenTelemetry's default.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Times that a batch is sent, and the first pause between; pauses double. Then the next batch is tried: by then the
/// queue has dropped spans.
const ATTEMPTS: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest response that is read: a number and a message.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// The address of a URL, without its path.
pub(super) fn origin(url: &Uri) -> Uri {
    let mut parts = url.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::from_static("/"));
    Uri::from_parts(parts).expect("the URL has a scheme and an authority")
}

impl Exporter {
    pub(super) fn spawn(queue: SpanQueue, collector: Collector, resource: Resource, metrics: Metrics) -> Self {
        let stop = CancellationToken::new();
        let export = Export { collector, resource, metrics, is_failing: false };
        let task = AbortOnDropHandle::new(tokio::spawn(export.run(queue, stop.clone())));
        Self { task, stop }
    }

    /// Sends the queued spans, for at most this time.
    pub async fn flush(self, limit: Duration) {
        self.stop.cancel();
        if timeout(limit, self.task).await.is_err() {
            tracing::warn!("the collector of spans did not answer before the end; the last spans are lost");
        }
    }
}

impl Export {
    async fn run(mut self, mut queue: SpanQueue, stop: CancellationToken) {
        loop {
            let mut batch = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                batch = queue.next(MAX_BATCH) => batch,
            };
            let deadline = Instant::now() + BATCH_DELAY;
            while batch.len() < MAX_BATCH && !stop.is_cancelled() {
                let more = tokio::select! {
                    biased;
                    () = stop.cancelled() => break,
                    more = timeout_at(deadline, queue.next(MAX_BATCH - batch.len())) => more,
                };
                let Ok(more) = more else { break };
                batch.extend(more);
            }
            self.send(&batch, &stop).await;
        }
        loop {
            let batch = queue.take(MAX_BATCH);
            if batch.is_empty() {
                return;
            }
            self.send(&batch, &stop).await;
        }
    }

    /// Sends a batch, again if that may help. Once the process stops there is no time for pauses.
    async fn send(&mut self, batch: &[EndedSpan], stop: &CancellationToken) {
        let message = Bytes::from(self.resource.message(batch));
        let mut pause = FIRST_PAUSE;
        for attempt in 1..=ATTEMPTS {
            match self.collector.post(message.clone()).await {
                Ok(rejected) => return self.count_sent(batch.len() as u64, rejected),
                Err(Failure::Temporary(why)) if attempt < ATTEMPTS && !stop.is_cancelled() => {
                    self.log_failure(&why);
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = sleep(pause) => {}
                    }
                    pause *= 2;
                }
                Err(Failure::Temporary(why) | Failure::Final(why)) => {
                    self.log_failure(&why);
                    return self.metrics.unsent.inc_by(batch.len() as u64);
                }
            }
        }
    }

    fn count_sent(&mut self, spans: u64, rejected: u64) {
        let rejected = rejected.min(spans);
        self.metrics.exported.inc_by(spans - rejected);
        self.metrics.rejected.inc_by(rejected);
        if std::mem::take(&mut self.is_failing) {
            tracing::info!(endpoint = %self.collector.url, "sending spans works again");
        }
    }

    /// Once per outage; the counters show the number of lost spans.
    fn log_failure(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_failing, true) {
            tracing::warn!(endpoint = %self.collector.url, error = why, "cannot send spans");
        }
    }
}

impl Collector {
    /// Sends a message. Returns the number of spans that were rejected.
    async fn post(&self, message: Bytes) -> Result<u64, Failure> {
        let mut headers = self.headers.clone();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let answer = async {
            let response = self.client.send(Method::POST, &self.path, headers, message).await;
            let (head, body) = response.map_err(|error| Failure::Temporary(error.to_string()))?.into_parts();
            let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await;
            let body = body.map_err(|error| Failure::Temporary(error.to_string()))?.to_bytes();
            match head.status {
                status if status.is_success() => Ok(rejected(&body)),
                status => {
                    let start = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
                    let why = format!("status {}: {}", status.as_u16(), start.trim());
                    Err(if may_be_repeated(status) { Failure::Temporary(why) } else { Failure::Final(why) })
                }
            }
        };
        let late = || Failure::Temporary(format!("no answer within {} s", REQUEST_TIMEOUT.as_secs()));
        timeout(REQUEST_TIMEOUT, answer).await.unwrap_or_else(|_| Err(late()))
    }
}

/// The statuses after which OTLP allows to send a message again.
fn may_be_repeated(status: StatusCode) -> bool {
    matches!(status.as_u16(), 429 | 502 | 503 | 504)
}
