//! The byte stream of a connection: reports reads and writes to [`Activity`], and adds a body to hyper's own error
//! responses.
//!
//! hyper responds to a request head that it cannot parse with a bare status line and calls no service, so OpenAI's
//! error object can be added only here. Not here: HTTP/2, whose errors are frames.

use super::activity::Activity;
use crate::error::Error;
use crate::http::request_id;
use axum::http::StatusCode;
use bytes::{Buf, Bytes};
use spans::LogLimit;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use transport::{Socket, is_buffered};

/// Maximum bytes of hyper's own error responses: a status line and up to three short headers.
const BARE_HEAD_BYTES: usize = 256;

/// A client's connection. On drop it returns the socket to its [`Activity`], for a lingering close.
pub(super) struct Stream {
    /// `None` only during drop.
    socket: Option<Socket>,
    activity: Arc<Activity>,
    max_headers: usize,
    /// Unwritten bytes of the response that replaces one of hyper's own.
    replacement: Bytes,
    /// Rate limit of log lines of rejected requests.
    rejected_lines: Arc<LogLimit>,
}

impl Stream {
    pub(super) fn new(
        socket: Socket,
        activity: Arc<Activity>,
        max_headers: usize,
        rejected_lines: Arc<LogLimit>,
    ) -> Self {
        Self { socket: Some(socket), activity, max_headers, replacement: Bytes::new(), rejected_lines }
    }

    fn socket(&mut self) -> Pin<&mut Socket> {
        Pin::new(self.socket.as_mut().expect("the socket is taken only on drop"))
    }

    /// Whether `bytes` are hyper's own error response. If so, the replacement is prepared.
    fn replaces(&mut self, bytes: &[u8]) -> bool {
        let Some(status) = bare_error(bytes).filter(|_| !self.activity.has_switched()) else { return false };
        let error = Error::from_head_status(status, self.max_headers);
        self.replacement = error_response(&error, &self.rejected_lines);
        self.activity.linger();
        true
    }

    fn poll_replacement(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.replacement.is_empty() {
            let rest = self.replacement.clone();
            let wrote = self.reporting(|socket| socket.poll_write(cx, &rest));
            self.replacement.advance(ready!(wrote)?);
        }
        Poll::Ready(Ok(()))
    }

    fn reporting(
        &mut self,
        write: impl FnOnce(Pin<&mut Socket>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let outcome = write(self.socket());
        match &outcome {
            Poll::Pending => self.activity.write_blocked(),
            Poll::Ready(wrote) => self.activity.write_progressed(*wrote.as_ref().unwrap_or(&0)),
        }
        outcome
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(socket) = self.socket.take() {
            self.activity.return_stream(socket);
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(self.socket().poll_read(cx, buf))?;
        if buf.filled().len() > before {
            self.activity.received(&buf.filled()[before..]);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.replaces(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        ready!(self.poll_replacement(cx))?;
        self.reporting(|socket| socket.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(first) = slices.iter().find(|slice| !slice.is_empty())
            && self.replaces(first)
        {
            return Poll::Ready(Ok(first.len()));
        }
        ready!(self.poll_replacement(cx))?;
        self.reporting(|socket| socket.poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_replacement(cx))?;
        let flushed = self.socket().poll_flush(cx);
        if is_buffered(&self.socket()) {
            match flushed {
                Poll::Pending => self.activity.write_blocked(),
                Poll::Ready(_) => self.activity.write_progressed(0),
            }
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_replacement(cx))?;
        self.socket().poll_shutdown(cx)
    }
}

/// A complete error response for a request whose head is rejected. Writes its log line.
pub(super) fn error_response(error: &Error, lines: &LogLimit) -> Bytes {
    let status = error.status();
    let id = request_id::generate();
    if let Some(suppressed) = lines.admit() {
        tracing::info!(
            request_id = &*id,
            status = status.as_u16(),
            code = error.body().code(),
            %error,
            suppressed = Some(suppressed).filter(|lines| *lines > 0),
            "request rejected"
        );
    }
    let body = serde_json::to_string(&error.body()).expect("an error object has string keys");
    let head = format!(
        "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\
         x-request-id: {id}\r\n\r\n",
        status.as_u16(),
        status.canonical_reason().unwrap_or_default(),
        body.len(),
    );
    (head + &body).into()
}

/// The status, if `bytes` are a response by hyper itself: a head without a body and without `x-request-id`.
fn bare_error(bytes: &[u8]) -> Option<StatusCode> {
    if bytes.len() > BARE_HEAD_BYTES || !bytes.starts_with(b"HTTP/1.1 4") {
        return None;
    }
    let head = std::str::from_utf8(bytes).ok()?.strip_prefix("HTTP/1.1 ")?;
    let status = head.get(..3)?.parse::<StatusCode>().ok()?;
    let of_head = matches!(status.as_u16(), 400 | 414 | 431);
    let empty = head.ends_with("\r\n\r\n") && head.contains("content-length: 0\r\n");
    let bare = of_head && empty && !head.contains("x-request-id:");
    bare.then_some(status)
}
