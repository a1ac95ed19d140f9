//! Middleware for request bodies: enforces a minimum upload rate, and discards the rest of a body that a handler does
//! not read.
//!
//! Many clients read the response only after they have sent the whole request. If the connection closes before, they
//! report a broken pipe instead of the error. So the rest of a body is read and discarded before its response is sent,
//! within limits of bytes and time. A body that has not arrived completely at the drain deadline of a shutdown fails
//! then, so that its request gets an error. Not here: the maximum size that a handler accepts (`body`).

use super::server::Shutdown;
use crate::settings::Settings;
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::header::{CONNECTION, EXPECT};
use axum::http::{HeaderValue, Version};
use axum::response::Response;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;
use std::error::Error;
use std::io;
use std::iter::successors;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

/// Maximum size of a body that is discarded, in multiples of `max_body`.
const DISCARD_FACTOR: usize = 4;
/// Maximum time to discard a body. A slower client gets its response, and then its connection is closed.
const DISCARD_TIME: Duration = Duration::from_secs(10);

/// The minimum rate of uploads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UploadRate {
    /// Maximum time without a byte, and the time that a body has before its first one.
    pub(crate) pause: Duration,
    /// Bytes that a client must send for each second that the server waits. Earlier bytes count for at most `pause`: a
    /// body that was fast once must not idle for hours.
    pub(crate) min_rate: usize,
}

/// State of the middleware [`discard_rest`]: limits of every body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UploadLimits {
    rate: UploadRate,
    /// Bytes of a body that are read and discarded after its handler has responded.
    discarded_bytes: usize,
}

impl UploadLimits {
    pub(crate) fn new(settings: &Settings) -> Self {
        Self {
            rate: UploadRate { pause: settings.body_timeout.0, min_rate: settings.min_body_rate.as_usize() },
            discarded_bytes: settings.max_body.as_usize().saturating_mul(DISCARD_FACTOR),
        }
    }
}

/// The client sends its body too slowly.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the request body arrives too slowly")]
pub(crate) struct TooSlow;

/// The server stopped before the whole body had arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the server is shutting down")]
struct Stopped;

/// Whether a body failed because the server stopped before all of it had arrived.
pub(crate) fn is_stopped(error: &axum::Error) -> bool {
    causes(error).any(<dyn Error>::is::<Stopped>)
}

/// Whether a body failed because it was below the minimum rate.
pub(crate) fn is_too_slow(error: &axum::Error) -> bool {
    causes(error).any(<dyn Error>::is::<TooSlow>)
}

/// Whether a body failed because the client closed the connection before its end.
pub(crate) fn is_cut_off(error: &axum::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|error| matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof))
}

/// An error and its causes.
fn causes(error: &axum::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    let first: &(dyn Error + 'static) = error;
    successors(Some(first), |&error| error.source())
}

/// Middleware around handlers that may respond before they have read the body.
pub(crate) async fn discard_rest(
    limits: &UploadLimits,
    request: Request,
    next: impl AsyncFnOnce(Request) -> Response,
) -> Response {
    if request.body().is_end_stream() {
        return next(request).await;
    }
    let (parts, body) = request.into_parts();
    // With `Expect: 100-continue` the client waits for permission to send; a read would give it.
    let expects_continue = parts.headers.contains_key(EXPECT);
    let http1 = parts.version < Version::HTTP_2;
    let rest = SharedRemainder::default();
    let body = TimedBody::new(body, limits.rate, Shutdown::of(&parts.extensions));
    let upload = HandlerBody { body: Some(body), rest: rest.clone() };
    let mut response = next(Request::from_parts(parts, Body::new(upload))).await;
    let whole = match rest.replace(Remainder::Nothing) {
        Remainder::Nothing => true,
        Remainder::Failed => false,
        Remainder::Body(body) => {
            !(expects_continue && body.received == 0) && body.discard(limits.discarded_bytes).await
        }
    };
    if !whole && http1 {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The rest of a body after its handler, which [`HandlerBody`] puts here when it is dropped.
#[derive(Clone, Default)]
struct SharedRemainder(Arc<Mutex<Remainder>>);

#[derive(Default)]
enum Remainder {
    #[default]
    Nothing,
    /// The body failed and cannot be read any further.
    Failed,
    Body(TimedBody),
}

impl SharedRemainder {
    fn replace(&self, remainder: Remainder) -> Remainder {
        std::mem::replace(&mut *self.0.lock(), remainder)
    }
}

/// The body that a handler sees.
struct HandlerBody {
    /// `None` once the body has ended or failed.
    body: Option<TimedBody>,
    rest: SharedRemainder,
}

impl HttpBody for HandlerBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = std::task::ready!(body.poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            self.body = None;
        }
        if matches!(frame, Some(Err(_))) {
            self.rest.replace(Remainder::Failed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(|body| body.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), |body| body.inner.size_hint())
    }
}

impl Drop for HandlerBody {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.inner.is_end_stream()) {
            self.rest.replace(Remainder::Body(body));
        }
    }
}

/// A body with a minimum rate. Only the time counts during which the server waits for the client.
struct TimedBody {
    inner: Body,
    rate: UploadRate,
    received: usize,
    /// Time for which the server still waits, at most [`UploadRate::pause`]. Each byte that arrives adds to it.
    left: Duration,
    /// Since when the server has waited for the next frame.
    since: Option<Instant>,
    shutdown: Shutdown,
    /// What ends the wait for the next frame; `None` before the first wait.
    waits: Option<Box<Waits>>,
}

struct Waits {
    timer: Pin<Box<Sleep>>,
    /// The drain deadline.
    stopped: BoxFuture<'static, ()>,
}

impl TimedBody {
    fn new(inner: Body, rate: UploadRate, shutdown: Shutdown) -> Self {
        Self { inner, rate, received: 0, left: rate.pause, since: None, shutdown, waits: None }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) {
            if let Some(since) = self.since.take() {
                self.left = self.left.saturating_sub(since.elapsed());
            }
            let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
            let bytes = data.map_or(0, Bytes::len);
            self.received += bytes;
            let earned = Duration::from_secs_f64(bytes as f64 / self.rate.min_rate as f64);
            self.left = (self.left + earned).min(self.rate.pause);
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        let until = since + self.left;
        let new = || Box::new(Waits { timer: Box::pin(sleep_until(until)), stopped: self.shutdown.forced().boxed() });
        let waits = self.waits.get_or_insert_with(new);
        if waits.stopped.poll_unpin(cx).is_ready() {
            return Poll::Ready(Some(Err(Stopped.into())));
        }
        waits.timer.as_mut().reset(until);
        waits.timer.as_mut().poll(cx).map(|()| Some(Err(TooSlow.into())))
    }

    /// Reads and discards up to `max` bytes in all. Returns whether the end was reached.
    async fn discard(mut self, max: usize) -> bool {
        let read = async {
            while self.received <= max {
                match std::future::poll_fn(|cx| self.poll_frame(cx)).await {
                    Some(Ok(_)) => {}
                    Some(Err(_)) => return false,
                    None => return true,
                }
            }
            false
        };
        timeout(DISCARD_TIME, read).await.unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::{Shutdown, TimedBody, TooSlow, UploadRate};
    use axum::body::Body;
    use bytes::Bytes;
    use futures::{StreamExt, stream};
    use std::convert::Infallible;
    use std::io;
    use std::time::Duration;
    use tokio::time::{Instant, sleep};

    /// A body of `pieces` pieces of `size` bytes, each `pause` after the one before.
    fn body(pieces: usize, size: usize, pause: Duration) -> TimedBody {
        let pieces = stream::iter(0..pieces).then(move |_| async move {
            sleep(pause).await;
            Ok::<_, Infallible>(Bytes::from(vec![b' '; size]))
        });
        timed(Body::from_stream(pieces))
    }

    fn timed(body: Body) -> TimedBody {
        let rate = UploadRate { pause: Duration::from_secs(30), min_rate: 1000 };
        TimedBody::new(body, rate, Shutdown::default())
    }

    async fn read(mut body: TimedBody) -> Result<usize, TooSlow> {
        while let Some(frame) = std::future::poll_fn(|cx| body.poll_frame(cx)).await {
            frame.map_err(|error| *error.downcast::<TooSlow>().unwrap())?;
        }
        Ok(body.received)
    }

    #[test]
    fn a_body_is_cut_off_by_the_end_of_its_connection() {
        let is_cut_off = |kind| {
            let inner = axum::Error::new(io::Error::from(kind));
            super::is_cut_off(&axum::Error::new(inner))
        };
        assert!(is_cut_off(io::ErrorKind::UnexpectedEof) && is_cut_off(io::ErrorKind::ConnectionReset));
        assert!(!is_cut_off(io::ErrorKind::InvalidInput), "a wrong size of a chunk");
        assert!(!super::is_cut_off(&axum::Error::new(TooSlow)));
    }

    #[tokio::test(start_paused = true)]
    async fn one_byte_every_three_seconds_is_too_slow() {
        let start = Instant::now();
        assert_eq!(read(body(1000, 1, Duration::from_secs(3))).await, Err(TooSlow));
        assert_eq!(start.elapsed().as_secs(), 30);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_at_the_minimum_rate_is_read() {
        assert_eq!(read(body(1000, 3000, Duration::from_secs(3))).await, Ok(3_000_000));
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_bounded_however_much_arrived_before() {
        let start = Instant::now();
        let pieces = stream::iter([Ok::<_, Infallible>(Bytes::from(vec![0; 1 << 20]))]).chain(stream::pending());
        assert_eq!(read(timed(Body::from_stream(pieces))).await, Err(TooSlow));
        assert_eq!(start.elapsed().as_secs(), 30);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_was_fast_once_must_keep_the_rate() {
        let start = Instant::now();
        let first = stream::iter([Ok::<_, Infallible>(Bytes::from(vec![0; 16 << 20]))]);
        let rest = stream::iter(0..1000).then(|_| async {
            sleep(Duration::from_secs(20)).await;
            Ok::<_, Infallible>(Bytes::from_static(b"a"))
        });
        assert_eq!(read(timed(Body::from_stream(first.chain(rest)))).await, Err(TooSlow));
        assert_eq!(start.elapsed().as_secs(), 30, "the first bytes do not count for hours");
    }

    #[tokio::test(start_paused = true)]
    async fn time_without_server_reads_does_not_count() {
        let mut body = body(20, 1, Duration::from_secs(1));
        for _ in 0..20 {
            sleep(Duration::from_mins(1)).await;
            let frame = std::future::poll_fn(|cx| body.poll_frame(cx)).await;
            assert!(frame.is_some_and(|frame| frame.is_ok()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn discarding_ends_at_its_limits() {
        assert!(body(10, 10, Duration::ZERO).discard(100).await);
        assert!(!body(12, 10, Duration::ZERO).discard(100).await, "too many bytes");
        assert!(!body(12, 1, Duration::from_secs(1)).discard(100).await, "too long");
    }
}
