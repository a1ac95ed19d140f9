//! A request's body on its way in: bounded in time, and read to its end even if the handler answers before.
//!
//! Many clients look at the response only when they have sent the whole request. When a connection is closed before, they
//! report a broken pipe instead of the error. So what a handler leaves of a body is read and discarded before its response
//! goes out, within a limit of bytes and time. Not here: the limit of bytes that a handler accepts (`body`).

use crate::settings::Settings;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::header::{CONNECTION, EXPECT};
use axum::http::{HeaderValue, Version};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use std::error::Error;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

/// A body that no handler reads is read on up to so many times the largest body that is accepted.
const DISCARD_FACTOR: usize = 4;
/// And for at most so long: a client that needs longer gets its response without, and then sees its connection close.
const DISCARD_TIME: Duration = Duration::from_secs(10);

/// How slowly a client may send a body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// The longest time without a byte, and the time that every body has whatever its size.
    pub(crate) pause: Duration,
    /// Bytes that a client must send per second beyond that time.
    pub(crate) min_rate: usize,
}

/// The middleware's state: limits of every body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UploadLimits {
    pace: Pace,
    /// Bytes of a body that are read and discarded after its handler has answered.
    discarded_bytes: usize,
}

impl UploadLimits {
    pub(crate) fn new(settings: &Settings) -> Self {
        Self {
            pace: Pace { pause: settings.body_timeout.0, min_rate: settings.min_body_rate.as_usize() },
            discarded_bytes: settings.max_body.as_usize().saturating_mul(DISCARD_FACTOR),
        }
    }
}

/// The client sends its body too slowly.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the request body arrives too slowly")]
pub(crate) struct TooSlow;

/// Whether a body ended because of its pace.
pub(crate) fn is_too_slow(error: &axum::Error) -> bool {
    let mut cause: Option<&dyn Error> = Some(error);
    while let Some(error) = cause {
        if error.is::<TooSlow>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// A layer around everything that may answer before it has read the body.
pub(crate) async fn discard_rest(State(limits): State<UploadLimits>, request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    // Such a client waits for permission to send. Reading would give it.
    let asks_first = parts.headers.contains_key(EXPECT);
    let http1 = parts.version < Version::HTTP_2;
    let rest = Rest::default();
    let upload = Upload { body: Some(Paced::new(body, limits.pace)), rest: rest.clone() };
    let mut response = next.run(Request::from_parts(parts, Body::new(upload))).await;
    let whole = match rest.replace(Left::Nothing) {
        Left::Nothing => true,
        Left::Failed => false,
        Left::Body(body) => !(asks_first && body.received == 0) && body.discard(limits.discarded_bytes).await,
    };
    if !whole && http1 {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// What a handler left of a body.
#[derive(Clone, Default)]
struct Rest(Arc<Mutex<Left>>);

#[derive(Default)]
enum Left {
    #[default]
    Nothing,
    /// It cannot be read on.
    Failed,
    Body(Paced),
}

impl Rest {
    fn replace(&self, left: Left) -> Left {
        std::mem::replace(&mut *self.0.lock().expect("no code panics while it holds this lock"), left)
    }
}

/// The body that a handler sees.
struct Upload {
    /// There until it has ended or failed.
    body: Option<Paced>,
    rest: Rest,
}

impl HttpBody for Upload {
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
            self.rest.replace(Left::Failed);
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

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.inner.is_end_stream()) {
            self.rest.replace(Left::Body(body));
        }
    }
}

/// A body that must keep a pace. Only the time counts in which the server waits for the client.
struct Paced {
    inner: Body,
    pace: Pace,
    received: usize,
    waited: Duration,
    /// Since when the server waits for the next frame.
    since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Paced {
    fn new(inner: Body, pace: Pace) -> Self {
        Self { inner, pace, received: 0, waited: Duration::ZERO, since: None, timer: None }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) {
            if let Some(since) = self.since.take() {
                self.waited += since.elapsed();
            }
            let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
            self.received += data.map_or(0, Bytes::len);
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        let earned = Duration::from_secs_f64(self.received as f64 / self.pace.min_rate as f64);
        let left = (self.pace.pause + earned).saturating_sub(self.waited);
        let until = since + left.min(self.pace.pause);
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(until)));
        timer.as_mut().reset(until);
        timer.as_mut().poll(cx).map(|()| Some(Err(TooSlow.into())))
    }

    /// Reads to the end, within the limits. Answers whether the end was reached.
    async fn discard(mut self, most: usize) -> bool {
        let read = async {
            while self.received <= most {
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
    use super::{Pace, Paced, TooSlow};
    use axum::body::Body;
    use bytes::Bytes;
    use futures::{StreamExt, stream};
    use std::convert::Infallible;
    use std::time::Duration;
    use tokio::time::{Instant, sleep};

    /// A body of `pieces` pieces of `size` bytes, each `pause` after the one before.
    fn body(pieces: usize, size: usize, pause: Duration) -> Paced {
        let pieces = stream::iter(0..pieces).then(move |_| async move {
            sleep(pause).await;
            Ok::<_, Infallible>(Bytes::from(vec![b' '; size]))
        });
        Paced::new(Body::from_stream(pieces), Pace { pause: Duration::from_secs(30), min_rate: 1000 })
    }

    async fn read(mut body: Paced) -> Result<usize, TooSlow> {
        while let Some(frame) = std::future::poll_fn(|cx| body.poll_frame(cx)).await {
            frame.map_err(|error| *error.downcast::<TooSlow>().unwrap())?;
        }
        Ok(body.received)
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
        let body = Paced::new(Body::from_stream(pieces), Pace { pause: Duration::from_secs(30), min_rate: 1000 });
        assert_eq!(read(body).await, Err(TooSlow));
        assert_eq!(start.elapsed().as_secs(), 30);
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_the_server_does_not_read_does_not_count() {
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
