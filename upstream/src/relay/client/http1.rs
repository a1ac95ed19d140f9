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

pub(super) use head::MAX_HEAD;

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
/// Maximum number of heads of an answer that announce another one (1xx). Engines send none or one; an endless row of
/// them would keep a thread and a request busy.
const MAX_INTERIM: usize = 16;

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
    /// mean that the engine has got the request, even if all of it was sent.
    Closed { error: io::Error, is_sent: bool },
    /// The head of the answer, or what came with it of the body, is not one of HTTP.
    Malformed(io::Error),
    /// The head of the answer broke off.
    BrokenOff(io::Error),
}

/// The answer to a request to switch to another protocol.
#[derive(Debug)]
pub(super) enum Upgrade {
    /// The engine has switched: the connection is one of HTTP no more.
    Switched {
        headers: HeaderMap,
        /// What came after the head.
        received: Bytes,
        socket: Socket,
    },
    /// The engine has answered without switching.
    Answered(Response<Body>),
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

/// What was received of the heads of an answer.
#[derive(Default, Debug)]
struct Heads {
    /// The start of a head that arrives in parts.
    partial: BytesMut,
    /// Heads that announced another one (1xx), which are not kept.
    interim: usize,
    /// Bytes of those.
    interim_bytes: usize,
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
    let (head, first) = read_head(&mut connection, &method, None).await?;
    Ok(response(connection, head, first, pool))
}

/// Sends a request to switch to `protocol`, which has no body. Only after a response that says so the connection has
/// switched; any other answer is one of HTTP.
pub(super) async fn upgrade(
    socket: Socket,
    request: Outgoing,
    protocol: &str,
    pool: Arc<Pool>,
) -> Result<Upgrade, Failed> {
    let Outgoing { method, head, body } = request;
    let mut connection = Connection { socket, head, body, sending: Sending::Unsent };
    let (mut head, received) = read_head(&mut connection, &method, Some(protocol)).await?;
    if head.status != StatusCode::SWITCHING_PROTOCOLS {
        // A server that has switched all the same must not get the request of another client.
        head.keeps_alive = false;
        return Ok(Upgrade::Answered(response(connection, head, received, pool)));
    }
    // What is left of the request would be the first bytes of the other protocol.
    if connection.sending != Sending::Sent {
        return Err(Failed::Malformed(malformed("another protocol began before the request had arrived")));
    }
    Ok(Upgrade::Switched { headers: head.headers, received, socket: connection.socket })
}

/// Sends a request and reads the head of its answer, and the start of the body. Only with a `protocol` the answer may
/// say that the connection switches; then the start is that of the other protocol.
async fn read_head(
    connection: &mut Connection,
    method: &Method,
    protocol: Option<&str>,
) -> Result<(AnswerHead, Bytes), Failed> {
    let mut heads = Heads::default();
    loop {
        let received = poll_fn(|context| {
            connection.poll_send(context);
            connection.poll_read(context, |received| {
                if received.is_empty() { None } else { Some(heads.take(received, method, protocol)) }
            })
        });
        let failed = match received.await {
            Ok(Some(Ok(Some(whole)))) => return Ok(whole),
            Ok(Some(Ok(None))) => continue,
            Ok(Some(Err(malformed))) => return Err(Failed::Malformed(malformed)),
            Ok(None) => io::ErrorKind::UnexpectedEof.into(),
            Err(error) => error,
        };
        let is_sent = connection.sending == Sending::Sent;
        return Err(if heads.are_empty() {
            Failed::Closed { error: failed, is_sent }
        } else {
            Failed::BrokenOff(failed)
        });
    }
}

fn response(connection: Connection, head: AnswerHead, first: Bytes, pool: Arc<Pool>) -> Response<Body> {
    let mut body =
        Body { connection: Some(connection), framing: head.framing, first, keeps_alive: head.keeps_alive, pool };
    body.end_if_complete();
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    response
}

impl Heads {
    /// Nothing was received.
    fn are_empty(&self) -> bool {
        self.partial.is_empty() && self.interim == 0
    }

    /// The final head and the start of the body, if `received` completes them.
    fn take(
        &mut self,
        received: &mut [u8],
        method: &Method,
        protocol: Option<&str>,
    ) -> io::Result<Option<(AnswerHead, Bytes)>> {
        if self.partial.is_empty() {
            let (head, end) = self.read(received, method, protocol)?;
            let rest = &mut received[end..];
            if let Some(head) = head {
                return first_part(head, rest).map(Some);
            }
            self.partial.extend_from_slice(rest);
            return Ok(None);
        }
        let mut partial = std::mem::take(&mut self.partial);
        partial.extend_from_slice(received);
        let (head, end) = self.read(&partial, method, protocol)?;
        if let Some(head) = head {
            return first_part(head, &mut partial[end..]).map(Some);
        }
        partial.advance(end);
        self.partial = partial;
        Ok(None)
    }

    /// Reads whole heads up to the final one. Returns that, if it is complete, and where the last whole head ends.
    fn read(
        &mut self,
        received: &[u8],
        method: &Method,
        protocol: Option<&str>,
    ) -> io::Result<(Option<AnswerHead>, usize)> {
        let mut end = 0;
        while let Some(head) = head::answer(&received[end..], method)? {
            end += head.length;
            if head.status == StatusCode::SWITCHING_PROTOCOLS {
                let is_asked = protocol.is_some_and(|protocol| head.switches_to(protocol));
                let switched = is_asked.then_some((Some(head), end));
                return switched.ok_or_else(|| malformed("another protocol was not asked for"));
            }
            if !head.status.is_informational() {
                return Ok((Some(head), end));
            }
            self.interim += 1;
            self.interim_bytes += head.length;
            if self.interim > MAX_INTERIM || self.interim_bytes > MAX_HEAD {
                return Err(malformed("too many heads of 1xx before the answer"));
            }
        }
        let is_too_long = self.interim_bytes + (received.len() - end) > MAX_HEAD;
        if is_too_long { Err(malformed("the heads of the answer are too long")) } else { Ok((None, end)) }
    }
}

fn first_part(mut head: AnswerHead, rest: &mut [u8]) -> io::Result<(AnswerHead, Bytes)> {
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        return Ok((head, Bytes::copy_from_slice(rest)));
    }
    let decoded = head.framing.decode(rest)?;
    // What follows an answer is none to a request that was not sent.
    head.keeps_alive &= decoded.taken == rest.len();
    Ok((head, Bytes::copy_from_slice(&rest[..decoded.body])))
}

fn malformed(problem: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The status of an answer and the start of its body, received in parts that end at `cuts`.
    fn take(text: &str, cuts: &[usize]) -> io::Result<Option<(u16, Bytes)>> {
        let (mut heads, mut start) = (Heads::default(), 0);
        for end in cuts.iter().copied().chain([text.len()]) {
            let mut received = text.as_bytes()[start..end].to_vec();
            if let Some((head, mut first)) = heads.take(&mut received, &Method::POST, None)? {
                // What comes later is read by the body.
                if first.is_empty() {
                    first = Bytes::copy_from_slice(&text.as_bytes()[end..]);
                }
                return Ok(Some((head.status.as_u16(), first)));
            }
            start = end;
        }
        Ok(None)
    }

    #[test]
    fn heads_are_read_however_they_are_cut() {
        let text = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n\
            HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na";
        let expected = Some((200, Bytes::from_static(b"a")));
        for one in 0..=text.len() {
            for other in one..=text.len() {
                assert_eq!(take(text, &[one, other]).unwrap(), expected, "{one} {other}");
            }
        }
        let bytes: Vec<usize> = (0..text.len()).collect();
        assert_eq!(take(text, &bytes).unwrap(), expected);
    }

    #[test]
    fn only_the_protocol_that_was_asked_for_ends_http() {
        let switched = |headers: &str, protocol: Option<&str>| {
            let mut received = format!("HTTP/1.1 101 Switching Protocols\r\n{headers}\r\nab").into_bytes();
            let taken = Heads::default().take(&mut received, &Method::GET, protocol);
            taken.ok().map(|whole| whole.expect("a whole head").1)
        };
        let (headers, asked) = ("connection: keep-alive, Upgrade\r\nupgrade: WebSocket\r\n", Some("websocket"));
        assert_eq!(switched(headers, asked).unwrap(), "ab", "what follows is of the other protocol");
        assert_eq!(switched(headers, None), None);
        for headers in [
            "connection: upgrade\r\nupgrade: h2c\r\n",
            "connection: upgrade\r\nupgrade: websocket, h2c\r\n",
            "connection: upgrade\r\nupgrade: websocket\r\nupgrade: h2c\r\n",
            "connection: upgrade\r\n",
            "upgrade: websocket\r\n",
            "",
        ] {
            assert_eq!(switched(headers, asked), None, "{headers}");
        }
    }

    #[test]
    fn heads_before_the_final_one_are_few_and_not_kept() {
        let mut heads = Heads::default();
        assert!(heads.are_empty());
        let interim = b"HTTP/1.1 102 Processing\r\n\r\n";
        for _ in 0..MAX_INTERIM {
            assert!(heads.take(&mut interim.to_vec(), &Method::POST, None).unwrap().is_none());
            assert!(heads.partial.is_empty() && !heads.are_empty());
        }
        assert!(heads.take(&mut interim.to_vec(), &Method::POST, None).is_err());
        let long = format!("HTTP/1.1 102 Processing\r\nx: {}\r\n\r\n", "y".repeat(MAX_HEAD / 3));
        assert!(take(&long.repeat(2), &[]).unwrap().is_none());
        assert!(take(&long.repeat(3), &[]).is_err());
        let (whole, cut) = (long.len() * 2, long.len() * 2 + MAX_HEAD / 3);
        assert!(take(&long.repeat(3), &[whole, cut]).is_err(), "together with one that is not complete");
    }
}
