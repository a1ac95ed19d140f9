//! The logs of workers in other processes: each snapshot or range is one response, decoded as it arrives.
//!
//! Reads are rare, so each has a connection of its own and takes no stream of requests. HTTP/2 limits what arrives
//! before it is decoded; dropping a read resets its stream, and the worker stops sending. A process that sends nothing
//! for some time is unreachable: a firewall may drop the packets of connections that it has let through.

use super::connections::{Connections, Stream};
use super::error_body;
use crate::plane::Source;
use crate::plane::nats::{Address, LogReadError, LogReader};
use crate::remote::connect::{Credentials, Endpoint};
use crate::remote::logs::{self, CONTENT_TYPE, LogRequest, Message, Part};
use crate::remote::{PROTOCOL, PROTOCOL_HEADER};
use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use http::header::{self, AUTHORIZATION};
use http::{HeaderValue, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use kvbm::{Epoch, Numbered, Snapshot};
use std::time::Duration;
use tokio::time::timeout;

/// Reads the logs of workers in other processes.
pub struct RemoteLogs {
    credentials: Credentials,
    max_snapshot_bytes: u64,
    silence: MaxSilence,
}

/// Times in which something must arrive.
#[derive(Clone, Copy)]
struct MaxSilence {
    /// Until the head of the response.
    head: Duration,
    /// Until the first bytes of the body, and between two parts of it.
    body: Duration,
}

/// The messages of a response.
struct Messages {
    body: Incoming,
    arrived: BytesMut,
    received: u64,
    max_bytes: u64,
    max_silence: Duration,
    _stream: Stream,
    /// Keeps the connection.
    _connections: Connections,
}

/// The head of a response is sent before the log is read. It may wait two seconds for other responses. The rest of the
/// ten seconds of a router is left for a read over NATS. The body may take as long as making a snapshot of tens of
/// millions of blocks.
const MAX_SILENCE: MaxSilence = MaxSilence { head: Duration::from_secs(3), body: Duration::from_secs(6) };

/// Bytes that arrive before they are decoded: a frame of the server.
const WINDOW: u32 = 64 << 10;

/// Largest accepted snapshot: 32 million blocks.
const MAX_SNAPSHOT_BYTES: u64 = 512 << 20;

/// Largest accepted range: twice 512 events of 1,024 blocks.
const MAX_RANGE_BYTES: u64 = 16 << 20;

impl RemoteLogs {
    /// Reads from processes to which these credentials are shown.
    pub fn new(credentials: impl Into<Credentials>) -> Self {
        Self { credentials: credentials.into(), max_snapshot_bytes: MAX_SNAPSHOT_BYTES, silence: MAX_SILENCE }
    }

    /// The same with another time until the head of a response, for tests.
    #[cfg(test)]
    pub(crate) fn with_head_time(self, head: Duration) -> Self {
        Self { silence: MaxSilence { head, ..self.silence }, ..self }
    }

    async fn open(&self, at: &Address, request: LogRequest, max_bytes: u64) -> Result<Messages, LogReadError> {
        let connections = Connections::new(Endpoint::new(&at.0, self.credentials.clone()), WINDOW);
        let stream = connections.get().await.map_err(|error| LogReadError::Unreachable(error.to_string()))?;
        let sent = send(stream, connections.endpoint(), request);
        let (response, stream) = in_time(self.silence.head, sent).await??;
        let content_type = response.headers().get(header::CONTENT_TYPE);
        match response.status() {
            StatusCode::OK if content_type.is_some_and(|content_type| content_type == CONTENT_TYPE) => Ok(Messages {
                body: response.into_body(),
                arrived: BytesMut::new(),
                received: 0,
                max_bytes,
                max_silence: self.silence.body,
                _stream: stream,
                _connections: connections,
            }),
            StatusCode::OK => Err(LogReadError::Unreachable(format!(
                "the response has the content type {content_type:?} and not {CONTENT_TYPE:?}: the process has another \
                 version, or another server answers at its URL"
            ))),
            StatusCode::NOT_FOUND => Err(LogReadError::NotServed),
            status => {
                let text = in_time(self.silence.head, error_body(response.into_body())).await?.unwrap_or_default();
                let text = String::from_utf8_lossy(&text);
                connections.endpoint().log_refusal(text.trim());
                let problem = format!("status {}: {}", status.as_u16(), text.trim());
                let is_busy = status == StatusCode::SERVICE_UNAVAILABLE;
                Err(if is_busy { LogReadError::Failed(problem) } else { LogReadError::Unreachable(problem) })
            }
        }
    }
}

async fn send(
    stream: Stream,
    endpoint: &Endpoint,
    request: LogRequest,
) -> Result<(http::Response<Incoming>, Stream), LogReadError> {
    let mut message = http::Request::new(Full::new(Bytes::new()));
    *message.uri_mut() = endpoint.uri(&request.path());
    let headers = message.headers_mut();
    headers.insert(PROTOCOL_HEADER, HeaderValue::from(u16::from(PROTOCOL)));
    headers.extend(endpoint.authorization().map(|secret| (AUTHORIZATION, secret)));
    stream.send(message).await.map_err(|error| LogReadError::Unreachable(error.to_string()))
}

impl Messages {
    async fn next(&mut self) -> Result<Message, LogReadError> {
        loop {
            match logs::decode(&mut self.arrived) {
                Ok(Some(message)) => return Ok(message),
                Ok(None) => {}
                Err(error) => return Err(LogReadError::Failed(error.to_string())),
            }
            let frame = match in_time(self.max_silence, self.body.frame()).await? {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Err(LogReadError::Failed(format!("the connection ended: {error}"))),
                None => return Err(LogReadError::Failed("the response ended before its last message".to_owned())),
            };
            let Ok(data) = frame.into_data() else { continue };
            self.received += data.len() as u64;
            if self.received > self.max_bytes {
                let problem = format!("the log has more bytes than the limit of {}", self.max_bytes);
                return Err(LogReadError::Failed(problem));
            }
            self.arrived.extend_from_slice(&data);
        }
    }
}

async fn in_time<T>(time: Duration, arrives: impl Future<Output = T>) -> Result<T, LogReadError> {
    let arrived = timeout(time, arrives).await;
    arrived.map_err(|_| LogReadError::Unreachable(format!("it accepts connections, and sent nothing for {time:?}")))
}

fn out_of_order() -> LogReadError {
    LogReadError::Failed("the messages of the log are not in their order".to_owned())
}

impl LogReader for RemoteLogs {
    fn snapshot(&self, at: Address, source: Source, epoch: Epoch) -> BoxFuture<'_, Result<Snapshot, LogReadError>> {
        Box::pin(async move {
            let request = LogRequest { source, epoch, part: Part::Snapshot };
            let mut messages = self.open(&at, request, self.max_snapshot_bytes).await?;
            let number = match messages.next().await? {
                Message::Snapshot { epoch: of, number } if of == epoch => number,
                _ => return Err(out_of_order()),
            };
            let mut runs = Vec::new();
            loop {
                match messages.next().await? {
                    Message::Run(run) => runs.push(run),
                    Message::End => return Ok(Snapshot { epoch, number, runs }),
                    _ => return Err(out_of_order()),
                }
            }
        })
    }

    fn range(
        &self,
        at: Address,
        source: Source,
        epoch: Epoch,
        after: u64,
    ) -> BoxFuture<'_, Result<Option<Vec<Numbered>>, LogReadError>> {
        Box::pin(async move {
            let request = LogRequest { source, epoch, part: Part::Events { after } };
            let mut messages = self.open(&at, request, MAX_RANGE_BYTES).await?;
            let mut events = Vec::new();
            loop {
                match messages.next().await? {
                    Message::Event(event) => events.push(event),
                    Message::Truncated => return Ok(None),
                    Message::End => return Ok(Some(events)),
                    _ => return Err(out_of_order()),
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::WorkerId;
    use futures::StreamExt;
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use hyper::service::service_fn;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use kvbm::{Level, Run, SequenceHash};
    use std::convert::Infallible;
    use tokio::net::TcpListener;
    use tokio_util::task::AbortOnDropHandle;

    /// Another server, which answers each request in this way, and its URL.
    async fn answering(status: u16, content_type: &'static str, body: Bytes) -> (Address, AbortOnDropHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = Address(format!("http://{}", listener.local_addr().unwrap()));
        let accepting = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let body = body.clone();
                let service = service_fn(move |_: http::Request<Incoming>| {
                    let mut response = http::Response::new(Full::new(body.clone()));
                    *response.status_mut() = StatusCode::from_u16(status).unwrap();
                    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
                    async move { Ok::<_, Infallible>(response) }
                });
                connections.spawn(async move {
                    let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(TokioIo::new(socket), service).await;
                });
            }
        });
        (at, AbortOnDropHandle::new(accepting))
    }

    fn encoded(messages: &[Message]) -> Bytes {
        let mut encoded = BytesMut::new();
        for message in messages {
            logs::encode(message, &mut encoded);
        }
        encoded.freeze()
    }

    async fn snapshot(at: &Address, max_snapshot_bytes: u64) -> Result<Snapshot, LogReadError> {
        let logs = RemoteLogs { max_snapshot_bytes, ..RemoteLogs::new(None) };
        logs.snapshot(at.clone(), Source::Worker(WorkerId(7)), Epoch(1)).await
    }

    #[tokio::test]
    async fn a_response_that_is_not_complete_or_too_large_fails() {
        let blocks = (0..100_u128).map(|n| SequenceHash::from_bytes(n.to_le_bytes())).collect();
        let run = Run { level: Level::G1, parent: None, blocks };
        let first = Message::Snapshot { epoch: Epoch(1), number: 3 };
        let all = [first.clone(), Message::Run(run.clone()), Message::End];
        let (at, _server) = answering(200, CONTENT_TYPE, encoded(&all)).await;
        assert_eq!(snapshot(&at, 2000).await, Ok(Snapshot { epoch: Epoch(1), number: 3, runs: vec![run.clone()] }));
        assert!(matches!(snapshot(&at, 1000).await, Err(LogReadError::Failed(text)) if text.contains("1000")));
        let other_epoch = Message::Snapshot { epoch: Epoch(2), number: 3 };
        for wrong in [
            encoded(&all[..2]),
            encoded(&all[1..]),
            encoded(&[other_epoch, Message::End]),
            encoded(&[first, Message::Truncated]),
            encoded(&all).slice(..500),
            Bytes::from_static(b"no message"),
            Bytes::new(),
        ] {
            let (at, _server) = answering(200, CONTENT_TYPE, wrong).await;
            assert!(matches!(snapshot(&at, 2000).await, Err(LogReadError::Failed(_))));
        }
    }

    #[tokio::test]
    async fn what_a_process_does_not_serve_is_read_in_another_way() {
        let body = || encoded(&[Message::Snapshot { epoch: Epoch(1), number: 3 }, Message::End]);
        let at = async |status, content_type| {
            let (at, _server) = answering(status, content_type, body()).await;
            snapshot(&at, 2000).await.err()
        };
        assert_eq!(at(404, "text/plain").await, Some(LogReadError::NotServed), "an older version");
        for (status, content_type, named) in [
            (200, "text/html", "text/html"),
            (200, "application/vnd.blockyard.log; version=2", "version=2"),
            (401, "text/plain", "status 401"),
        ] {
            let error = at(status, content_type).await;
            assert!(matches!(&error, Some(LogReadError::Unreachable(text)) if text.contains(named)), "{error:?}");
        }
        assert!(matches!(at(503, "text/plain").await, Some(LogReadError::Failed(_))), "it is busy");
        let nowhere = Address("http://127.0.0.1:1".to_owned());
        assert!(matches!(snapshot(&nowhere, 2000).await, Err(LogReadError::Unreachable(_))));
    }

    #[tokio::test]
    async fn a_process_that_accepts_and_sends_nothing_is_unreachable() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        // The kernel accepts.
        let at = Address(format!("http://{}", listener.local_addr().unwrap()));
        let logs = RemoteLogs::new(None).with_head_time(Duration::from_millis(50));
        let source = Source::Worker(WorkerId(7));
        let silent = |error: LogReadError| matches!(error, LogReadError::Unreachable(text) if text.contains("nothing"));
        assert!(logs.snapshot(at.clone(), source, Epoch(1)).await.is_err_and(silent));
        assert!(logs.range(at, source, Epoch(1), 0).await.is_err_and(silent));
    }

    /// As behind a link that drops large packets.
    #[tokio::test]
    async fn a_process_whose_response_stops_is_unreachable() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = Address(format!("http://{}", listener.local_addr().unwrap()));
        let _serving = AbortOnDropHandle::new(tokio::spawn(async move {
            let (socket, _) = listener.accept().await.unwrap();
            let first = encoded(&[Message::Snapshot { epoch: Epoch(1), number: 3 }]);
            let service = service_fn(move |_: http::Request<Incoming>| {
                let first = Ok::<_, Infallible>(Frame::data(first.clone()));
                let body = futures::stream::iter([first]).chain(futures::stream::pending());
                let response = http::Response::builder().header(header::CONTENT_TYPE, CONTENT_TYPE);
                let response = response.body(StreamBody::new(body)).unwrap();
                async move { Ok::<_, Infallible>(response) }
            });
            let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            let _ = builder.serve_connection(TokioIo::new(socket), service).await;
        }));
        let silence = MaxSilence { body: Duration::from_millis(50), ..MAX_SILENCE };
        let logs = RemoteLogs { silence, ..RemoteLogs::new(None) };
        let read = logs.snapshot(at, Source::Worker(WorkerId(7)), Epoch(1)).await;
        assert!(matches!(&read, Err(LogReadError::Unreachable(text)) if text.contains("nothing")), "{read:?}");
    }
}
