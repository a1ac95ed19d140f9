//! HTTP/2 to an engine: many requests on a connection, which has a task of its own.
//!
//! **A request waits for no other one.** The engine's limit of streams is not reached: a connection that is full gets a
//! second one beside it. The window of a connection has room for what all of its streams may send, so an answer whose
//! client does not read it holds no other answer up, and does not end the connection.

use super::connect::Socket;
use super::http1::MAX_HEAD;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

/// Interval of PING frames, and time for their answers: without them a dead connection is never noticed. An engine
/// whose event loop is blocked for less than this stays connected.
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Streams on a connection. RFC 9113 (section 6.5.2) recommends that servers allow no fewer; 128 are usual. A stream
/// beyond the server's limit would wait in this process until another one ends.
pub(super) const MAX_STREAMS: usize = 100;
/// Bytes that the engine may send on a stream before they are read. At 256 KiB an answer of megabytes, such as that of
/// a batch of embeddings, arrives with 2.5 MB/s from an engine that is 100 ms away, and 4,096 answers that are not read
/// take 1 GiB.
const STREAM_WINDOW: u32 = 256 << 10;
/// The same for a connection: the largest there is (RFC 9113, section 6.9.1), because each stream has a limit. The `h2`
/// crate adds up by how much each unread frame is shorter than 256 bytes, as one with a token is, and ends the
/// connection when the sum exceeds half of this window. 100 streams do not reach it if their frames have 7
/// bytes or more.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

type Sender = SendRequest<Full<Bytes>>;

/// The connections that take further requests, and those that are full; the one that was made last is at the end. Of
/// several that are made at the same time, the last one is kept; the others end with their requests.
#[derive(Default, Debug)]
pub(super) struct Shared(Mutex<Vec<Connection>>);

#[derive(Debug)]
struct Connection {
    sender: Sender,
    /// Each stream has a clone.
    streams: Arc<()>,
}

/// A stream of a connection on which a request may be sent.
pub(super) struct Stream {
    sender: Sender,
    place: Place,
}

/// The place of a stream on its connection, which it has until this is dropped.
#[derive(Debug)]
pub(super) struct Place(Arc<()>);

impl Shared {
    /// A stream of a connection that is there, if one can take a request.
    pub(super) fn get(&self) -> Option<Stream> {
        let mut connections = self.0.lock();
        connections.retain(|connection| !connection.sender.is_closed());
        let stream = connections.iter().rev().find(|connection| connection.has_room()).map(Connection::stream);
        if stream.is_some() {
            // Those that were needed for more requests than there are now.
            connections.retain(|connection| connection.streams() > 0);
        }
        stream
    }

    /// Begins HTTP/2 on a new connection.
    pub(super) async fn begin(&self, socket: Socket) -> hyper::Result<Stream> {
        let mut builder = Builder::new(TokioExecutor::new());
        builder.timer(TokioTimer::new());
        builder.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
        // The same as for HTTP/1.1. A longer head ends its stream, and one four times as long the connection.
        builder.max_header_list_size(u32::try_from(MAX_HEAD).expect("64 KiB"));
        builder.keep_alive_interval(PING_INTERVAL).keep_alive_timeout(PING_TIMEOUT);
        let (sender, connection) = builder.handshake(TokioIo::new(socket)).await?;
        // Its errors are those of its requests.
        tokio::spawn(async move { drop(connection.await) });
        let connection = Connection { sender, streams: Arc::default() };
        let stream = connection.stream();
        let mut connections = self.0.lock();
        connections.retain(|connection| !connection.has_room());
        connections.push(connection);
        Ok(stream)
    }

    /// Sends a request. An error that [`is_canceled`](hyper::Error::is_canceled) means that it was not sent.
    pub(super) async fn send(
        &self,
        stream: Stream,
        request: Request<Full<Bytes>>,
    ) -> hyper::Result<Response<(Incoming, Place)>> {
        let Stream { mut sender, place } = stream;
        sender.ready().await?;
        let outcome = sender.send_request(request).await;
        if outcome.as_ref().is_err_and(is_going_away) {
            // The engine closes the connection. Requests that run on it go on.
            self.0.lock().retain(|connection| !Arc::ptr_eq(&connection.streams, &place.0));
        }
        Ok(outcome?.map(|body| (body, place)))
    }
}

impl Connection {
    /// The number of its streams.
    fn streams(&self) -> usize {
        Arc::strong_count(&self.streams) - 1
    }

    fn has_room(&self) -> bool {
        self.streams() < MAX_STREAMS
    }

    fn stream(&self) -> Stream {
        Stream { sender: self.sender.clone(), place: Place(Arc::clone(&self.streams)) }
    }
}

/// Whether the engine says that it has not processed the request, because it has refused the stream (RFC 9113, section
/// 8.7) or closes the connection and names an earlier stream as the last one (section 6.8).
pub(super) fn is_unprocessed(error: &hyper::Error) -> bool {
    let is_refused = |error: &h2::Error| error.is_remote() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
    is_going_away(error) || cause(error).is_some_and(is_refused)
}

/// Whether this process has ended the stream or the connection, because what the engine sent is not valid, or has a
/// head that is too long. The `h2` crate does not say which.
pub(super) fn is_malformed(error: &hyper::Error) -> bool {
    cause(error).is_some_and(h2::Error::is_library)
}

/// Whether it is the second of these. A stream that the engine may have processed fails with another error when the
/// connection ends.
fn is_going_away(error: &hyper::Error) -> bool {
    cause(error).is_some_and(|error| error.is_remote() && error.is_go_away())
}

fn cause(error: &hyper::Error) -> Option<&h2::Error> {
    error.source()?.downcast_ref()
}
