//! HTTP/2 to an engine: all requests on one connection, which has a task of its own.

use super::connect::Socket;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use std::error::Error as _;
use std::time::Duration;

/// Interval of PING frames, and time for their answers: without them a dead connection is never noticed. An engine
/// whose event loop is blocked for less than this stays connected.
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Sends requests on one connection. A clone shares it.
pub(super) type Sender = SendRequest<Full<Bytes>>;

/// The connection, if there is one. Of several that are made at the same time, the last one is kept; the others end
/// with their requests.
#[derive(Default, Debug)]
pub(super) struct Shared(Mutex<Option<Sender>>);

impl Shared {
    /// The connection, if it can take a request.
    pub(super) fn get(&self) -> Option<Sender> {
        let mut shared = self.0.lock();
        if shared.as_ref().is_some_and(Sender::is_closed) {
            *shared = None;
        }
        shared.clone()
    }

    /// Takes no further requests on the connection. Those that run on it go on.
    pub(super) fn forget(&self) {
        *self.0.lock() = None;
    }

    /// Begins HTTP/2 on a new connection.
    pub(super) async fn begin(&self, socket: Socket) -> hyper::Result<Sender> {
        let mut builder = Builder::new(TokioExecutor::new());
        builder.timer(TokioTimer::new()).adaptive_window(true);
        builder.keep_alive_interval(PING_INTERVAL).keep_alive_timeout(PING_TIMEOUT);
        let (sender, connection) = builder.handshake(TokioIo::new(socket)).await?;
        // Its errors are those of its requests.
        tokio::spawn(async move { drop(connection.await) });
        *self.0.lock() = Some(sender.clone());
        Ok(sender)
    }
}

/// Sends a request. An error that [`is_canceled`](hyper::Error::is_canceled) means that it was not sent.
pub(super) async fn send(mut sender: Sender, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
    sender.ready().await?;
    sender.send_request(request).await
}

/// Whether the engine says that it has not processed the request, because it has refused the stream (RFC 9113, section
/// 8.7) or closes the connection and names an earlier stream as the last one (section 6.8).
pub(super) fn is_unprocessed(error: &hyper::Error) -> bool {
    let is_refused = |error: &h2::Error| error.is_remote() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
    is_going_away(error) || cause(error).is_some_and(is_refused)
}

/// Whether it is the second of these. A stream that the engine may have processed fails with another error when the
/// connection ends.
pub(super) fn is_going_away(error: &hyper::Error) -> bool {
    cause(error).is_some_and(|error| error.is_remote() && error.is_go_away())
}

fn cause(error: &hyper::Error) -> Option<&h2::Error> {
    error.source()?.downcast_ref()
}
