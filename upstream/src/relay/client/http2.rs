//! HTTP/2 to an engine: all requests on one connection, which has a task of its own.
//!
//! The window of the connection has room for what all of its streams may send, so an answer whose client does not read
//! it holds no other answer up, and does not end the connection.

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

/// Bytes that the engine may send on a stream before they are read. At 256 KiB an answer of megabytes, such as that of
/// a batch of embeddings, arrives with 2.5 MB/s from an engine that is 100 ms away, and 4,096 answers that are not read
/// take 1 GiB.
const STREAM_WINDOW: u32 = 256 << 10;
/// The same for a connection: the largest there is (RFC 9113, section 6.9.1), because each stream has a limit. The `h2`
/// crate adds up by how much each unread frame is shorter than 256 bytes, as one with a token is, and ends the
/// connection when the sum exceeds half of this window. Frames of 64 bytes do not reach it on 1,365 streams.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

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
        builder.timer(TokioTimer::new());
        builder.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
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
