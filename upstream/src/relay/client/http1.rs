//! HTTP/1.1 to an engine: one request on one connection, and its answer.
//!
//! **A connection has no task of its own.** Its socket is read by the task that waits for the answer. For a relayed
//! answer that is the task that writes to the client. So an event of the socket wakes one task, and a chunk crosses no
//! channel and no thread.
//!
//! **An idle or waiting connection has no buffer.** A thread reads into one buffer of its own, and the frame of a body
//! is a copy of what was read, joined over the chunks of HTTP. Many streams are open and few bytes arrive at a time.
//!
//! Not here: making connections (`connect`), and which one a request gets (`pool`, and the client).

mod framing;
mod head;

use super::connect::Socket;
use super::pool::Pool;
use bytes::{Buf, Bytes, BytesMut};
use framing::Framing;
use head::AnswerHead;
use http::{HeaderMap, Method, Response, StatusCode};
use http_body::{Frame, SizeHint};
use std::cell::RefCell;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that are read at a time: more than an engine writes between two wake-ups of the gateway.
const READ: usize = 32 << 10;

thread_local! {
    /// What a thread reads into.
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ].into());
}

/// A request as bytes. A clone shares them.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    method: Method,
    head: Bytes,
    body: Bytes,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failed {
    /// The connection ended, and nothing of an answer had arrived. Where the connection was idle before, that need not
    /// mean that the engine has got the request.
    Closed(io::Error),
    /// The head of the answer broke off, or is not one of HTTP.
    BrokenOff(io::Error),
}

/// The body of an answer. Dropping it before its end closes the connection, which cancels the request.
#[derive(Debug)]
pub(super) struct Body {
    /// `None` once the body has ended or failed.
    connection: Option<Connection>,
    framing: Framing,
    /// Arrived with the head.
    first: Bytes,
    /// Another request may follow.
    keeps_alive: bool,
    pool: Arc<Pool>,
}

/// A connection with a request that may not be sent completely yet: an engine may answer before it has read all.
#[derive(Debug)]
struct Connection {
    socket: Socket,
    head: Bytes,
    body: Bytes,
    sending: Sending,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sending {
    /// Bytes of the request are left, or they are in a buffer of TLS.
    Unsent,
    Sent,
    /// The request could not be sent completely.
    Broken,
}

impl Outgoing {
    /// A request for a path with its query, which may come in two parts. `host`: the value of the `Host` header.
    pub(super) fn new(method: Method, target: [&str; 2], host: &str, headers: &HeaderMap, body: Bytes) -> Self {
        let head = head::request(&method, target, host, headers, body.len());
        Self { method, head, body }
    }
}

/// Sends a request and returns the answer once its head is there. Its connection goes to `pool` at its end.
pub(super) async fn send(socket: Socket, request: Outgoing, pool: Arc<Pool>) -> Result<Response<Body>, Failed> {
    let Outgoing { method, head, body } = request;
    let mut connection = Connection { socket, head, body, sending: Sending::Unsent };
    // A head that arrives in parts.
    let mut partial = BytesMut::new();
    let (mut head, first) = loop {
        let received = poll_fn(|context| {
            connection.poll_send(context);
            connection.poll_read(context, |received| {
                if received.is_empty() { None } else { Some(take_head(&mut partial, received, &method)) }
            })
        });
        let failed = match received.await {
            Ok(Some(Ok(Some(whole)))) => break whole,
            Ok(Some(Ok(None))) => continue,
            Ok(Some(Err(malformed))) => return Err(Failed::BrokenOff(malformed)),
            Ok(None) => io::ErrorKind::UnexpectedEof.into(),
            Err(error) => error,
        };
        return Err(if partial.is_empty() { Failed::Closed(failed) } else { Failed::BrokenOff(failed) });
    };
    let mut body =
        Body { connection: Some(connection), framing: head.framing, first, keeps_alive: head.keeps_alive, pool };
    body.end_if_complete();
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    *response.headers_mut() = std::mem::take(&mut head.headers);
    Ok(response)
}

/// The head of an answer and the start of its body, if `received` completes them.
fn take_head(partial: &mut BytesMut, received: &mut [u8], method: &Method) -> io::Result<Option<(AnswerHead, Bytes)>> {
    if partial.is_empty()
        && let Some((head, rest)) = final_head(received, method)?
    {
        return first_part(head, &mut received[rest..]).map(Some);
    }
    partial.extend_from_slice(received);
    let Some((head, rest)) = final_head(partial, method)? else { return Ok(None) };
    first_part(head, &mut partial[rest..]).map(Some)
}

/// The head and where it ends, without those that announce another one (1xx).
fn final_head(received: &[u8], method: &Method) -> io::Result<Option<(AnswerHead, usize)>> {
    let mut start = 0;
    while let Some(head) = head::answer(&received[start..], method)? {
        start += head.length;
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "another protocol was not asked for"));
        }
        if !head.status.is_informational() {
            return Ok(Some((head, start)));
        }
    }
    Ok(None)
}

fn first_part(mut head: AnswerHead, rest: &mut [u8]) -> io::Result<(AnswerHead, Bytes)> {
    let decoded = head.framing.decode(rest)?;
    // What follows an answer is none to a request that was not sent.
    head.keeps_alive &= decoded.taken == rest.len();
    Ok((head, Bytes::copy_from_slice(&rest[..decoded.body])))
}

impl Connection {
    /// Sends what is left of the request. An error shows when the answer is read, unless the answer came before it.
    fn poll_send(&mut self, context: &mut Context<'_>) {
        if self.sending == Sending::Unsent
            && let Poll::Ready(outcome) = self.poll_unsent(context)
        {
            self.sending = if outcome.is_ok() { Sending::Sent } else { Sending::Broken };
            // The answer may be a long one, and needs neither.
            (self.head, self.body) = (Bytes::new(), Bytes::new());
        }
    }

    fn poll_unsent(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !(self.head.is_empty() && self.body.is_empty()) {
            let parts = [IoSlice::new(&self.head), IoSlice::new(&self.body)];
            let parts = &parts[usize::from(self.head.is_empty())..];
            let sent = ready!(Pin::new(&mut self.socket).poll_write_vectored(context, parts))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_head = sent.min(self.head.len());
            self.head.advance(of_head);
            self.body.advance(sent - of_head);
        }
        Pin::new(&mut self.socket).poll_flush(context)
    }

    /// Reads once. Nothing was received at the end of the connection.
    fn poll_read<T>(&mut self, context: &mut Context<'_>, take: impl FnOnce(&mut [u8]) -> T) -> Poll<io::Result<T>> {
        BUFFER.with_borrow_mut(|buffer| {
            let mut buffer = ReadBuf::new(buffer);
            ready!(Pin::new(&mut self.socket).poll_read(context, &mut buffer))?;
            Poll::Ready(Ok(take(buffer.filled_mut())))
        })
    }
}

impl Body {
    /// Gives the connection back after the last byte.
    fn end_if_complete(&mut self) {
        if self.framing.has_ended()
            && let Some(connection) = self.connection.take()
            && self.keeps_alive
            && connection.sending == Sending::Sent
        {
            self.pool.put(connection.socket);
        }
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = &mut *self;
        loop {
            if !this.first.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut this.first)))));
            }
            let Some(connection) = &mut this.connection else { return Poll::Ready(None) };
            connection.poll_send(context);
            let framing = &mut this.framing;
            let read = connection.poll_read(context, |received| {
                if received.is_empty() {
                    let is_end = *framing == Framing::UntilClose;
                    return if is_end { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
                }
                let decoded = framing.decode(received)?;
                Ok(Some((Bytes::copy_from_slice(&received[..decoded.body]), decoded.taken == received.len())))
            });
            match ready!(read).flatten() {
                Ok(Some((data, is_all))) => {
                    this.first = data;
                    this.keeps_alive &= is_all;
                    this.end_if_complete();
                }
                Ok(None) => this.connection = None,
                Err(error) => {
                    this.connection = None;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.connection.is_none() && self.first.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        match self.framing {
            Framing::Length(left) => SizeHint::with_exact(left + self.first.len() as u64),
            _ => SizeHint::default(),
        }
    }
}
