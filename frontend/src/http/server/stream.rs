//! The bytes of a connection: reports what moves to [`Activity`], and gives the HTTP layer's own error responses a body.
//!
//! hyper answers a request head that it cannot parse with a bare status line. No service is called for it, so the only
//! place to put OpenAI's error object into that response is here. Not here: HTTP/2, whose errors are frames.

use super::activity::Activity;
use crate::error::Error;
use crate::http::request_id;
use crate::limits::LogLimit;
use axum::http::StatusCode;
use bytes::{Buf, Bytes};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// hyper's own responses are a status line and up to three short headers.
const BARE_HEAD_BYTES: usize = 256;

/// A client's connection. Dropping it gives the socket back to its [`Activity`], so that it can be closed with care.
pub(super) struct Stream {
    /// There until dropped.
    socket: Option<TcpStream>,
    activity: Arc<Activity>,
    max_headers: usize,
    /// What is left of the response that replaces one of hyper's own.
    replacement: Bytes,
    /// Bounds the lines of requests that are refused.
    refused: Arc<LogLimit>,
}

impl Stream {
    pub(super) fn new(socket: TcpStream, activity: Arc<Activity>, max_headers: usize, refused: Arc<LogLimit>) -> Self {
        Self { socket: Some(socket), activity, max_headers, replacement: Bytes::new(), refused }
    }

    fn socket(&mut self) -> Pin<&mut TcpStream> {
        Pin::new(self.socket.as_mut().expect("the socket is there until the stream is dropped"))
    }

    /// Whether `bytes` are hyper's own error response, which is then replaced.
    fn replaces(&mut self, bytes: &[u8]) -> bool {
        let Some(status) = bare_error(bytes) else { return false };
        let error = Error::of_head(status, self.max_headers);
        self.replacement = refuse(&error, &self.refused);
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
        write: impl FnOnce(Pin<&mut TcpStream>) -> Poll<io::Result<usize>>,
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
            self.activity.give_back(socket);
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
        self.socket().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_replacement(cx))?;
        self.socket().poll_shutdown(cx)
    }
}

/// The whole response that says an error, for a request whose head is refused, and its line in the log.
pub(super) fn refuse(error: &Error, lines: &LogLimit) -> Bytes {
    let (status, id) = (error.status(), name::unique());
    if let Some(suppressed) = lines.admit() {
        tracing::info!(
            request_id = id,
            status = status.as_u16(),
            code = error.body().code(),
            %error,
            suppressed = Some(suppressed).filter(|lines| *lines > 0),
            "request rejected"
        );
    }
    let body = serde_json::to_string(&error.body()).expect("an error object has string keys");
    let head = format!(
        "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\nx-request-id: {id}\r\n\r\n",
        status.as_u16(),
        status.canonical_reason().unwrap_or_default(),
        body.len(),
    );
    (head + &body).into()
}

/// The status of a response that hyper wrote by itself: a head without a body and without the request id that all of ours have.
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
