//! The memory of a worker in another process, as a tier to read from: `POST /workers/<id>/blocks` over HTTP/1.1.
//!
//! Blocks are read as they arrive and verified by the caller, like those of any tier. Dropping the stream closes its
//! connection. Not here: which worker holds which blocks (the ticket of a hand-over says so).

use super::blocks::{decode_block, encode_request};
use super::connect::{Credentials, Endpoint};
use super::{PROTOCOL, PROTOCOL_HEADER};
use crate::plane::WorkerId;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use http::header::{AUTHORIZATION, HOST};
use http::{HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use kvbm::{Block, Date, Fingerprint, Header, Level, LoadError, Loaded, SequenceHash, StoreError, Tier, Usage};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::io;
use std::sync::Arc;

/// The memory of a worker in another process.
pub struct RemotePeer(Arc<Memory>);

struct Memory {
    endpoint: Endpoint,
    path: String,
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
    /// Blocks that were found corrupt; they are not asked for again.
    discarded: Mutex<HashSet<SequenceHash>>,
}

/// A response whose blocks are being read.
struct Reading {
    memory: Arc<Memory>,
    connection: Option<SendRequest<Full<Bytes>>>,
    body: Incoming,
    arrived: BytesMut,
    /// Which of the requested blocks have not arrived yet.
    missing: Vec<bool>,
}

/// Bytes that one read of the connection may take: larger reads cost fewer system calls.
const READ_BYTES: usize = 1 << 20;
/// Idle connections that are kept.
const MAX_IDLE: usize = 4;
/// Corrupt blocks that are remembered. When there are more, the memory begins anew.
const MAX_DISCARDED: usize = 1024;
/// Longest text of an error that is read.
const MAX_ERROR_BYTES: usize = 64 << 10;

impl RemotePeer {
    /// The memory of `worker`, whose process listens at `url`. Connects with the first load.
    pub fn new(worker: WorkerId, url: &str, credentials: impl Into<Credentials>) -> Self {
        Self(Arc::new(Memory {
            endpoint: Endpoint::new(url, credentials.into()),
            path: format!("/workers/{}/blocks", worker.0),
            idle: Mutex::default(),
            discarded: Mutex::default(),
        }))
    }
}

impl Memory {
    fn request(&self, body: Bytes) -> io::Result<Request<Full<Bytes>>> {
        let authority = self.endpoint.uri(&self.path).authority().map(|host| HeaderValue::from_str(host.as_str()));
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.path.parse().map_err(io::Error::other)?;
        let headers = request.headers_mut();
        headers.extend(authority.transpose().map_err(io::Error::other)?.map(|host| (HOST, host)));
        headers.insert(PROTOCOL_HEADER, HeaderValue::from(u16::from(PROTOCOL)));
        headers.extend(self.endpoint.authorization().map(|secret| (AUTHORIZATION, secret)));
        Ok(request)
    }

    /// An idle connection, and whether it is new.
    async fn connection(&self) -> io::Result<SendRequest<Full<Bytes>>> {
        while let Some(idle) = { self.idle.lock().pop() } {
            if idle.is_ready() {
                return Ok(idle);
            }
        }
        let socket = self.endpoint.connect(b"http/1.1").await?;
        let mut builder = Builder::new();
        builder.max_buf_size(READ_BYTES);
        let (sender, connection) = builder.handshake(TokioIo::new(socket)).await.map_err(io::Error::other)?;
        // Its errors are those of its requests.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }

    async fn open(self: Arc<Self>, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> io::Result<Reading> {
        let body = encode_request(fingerprint, &hashes);
        let mut connection = self.connection().await?;
        let failed = |error: hyper::Error| io::Error::other(self.endpoint.explain(&error));
        connection.ready().await.map_err(failed)?;
        let response = connection.send_request(self.request(body)?).await.map_err(failed)?;
        if response.status() != StatusCode::OK {
            let status = response.status();
            let text = Limited::new(response.into_body(), MAX_ERROR_BYTES).collect().await;
            let text = text.map(|body| String::from_utf8_lossy(&body.to_bytes()).into_owned()).unwrap_or_default();
            return Err(io::Error::other(format!("status {}: {}", status.as_u16(), text.trim())));
        }
        Ok(Reading {
            memory: self,
            connection: Some(connection),
            body: response.into_body(),
            arrived: BytesMut::new(),
            missing: vec![true; hashes.len()],
        })
    }
}

impl Reading {
    /// The next block; `None` after the last.
    async fn next(&mut self) -> Option<Loaded> {
        loop {
            match decode_block(&mut self.arrived, Header::MAX_LENGTH) {
                Ok(Some((index, block))) if self.missing.get(index) == Some(&true) => {
                    self.missing[index] = false;
                    return Some((index, Ok(block)));
                }
                Ok(None) => {}
                _ => return self.failed(io::ErrorKind::InvalidData.into()),
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.arrived.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => return self.failed(io::Error::other(error)),
                None if self.missing.contains(&true) => return self.failed(io::ErrorKind::UnexpectedEof.into()),
                None => {
                    self.keep_connection();
                    return None;
                }
            }
        }
    }

    /// The error for the next block that did not arrive. The connection is not used again.
    fn failed(&mut self, error: io::Error) -> Option<Loaded> {
        self.connection = None;
        let index = self.missing.iter().position(|missing| *missing)?;
        self.missing[index] = false;
        Some((index, Err(LoadError::Io(error))))
    }

    fn keep_connection(&mut self) {
        if let Some(connection) = self.connection.take() {
            let mut idle = self.memory.idle.lock();
            if idle.len() < MAX_IDLE {
                idle.push(connection);
            }
        }
    }
}

impl Tier for RemotePeer {
    fn level(&self) -> Level {
        Level::Peer
    }

    /// A hint: the worker has said that it holds the blocks of a hand-over.
    fn holds(&self, _: Fingerprint, hashes: &[SequenceHash]) -> usize {
        let discarded = self.0.discarded.lock();
        hashes.iter().take_while(|hash| !discarded.contains(hash)).count()
    }

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let (memory, count) = (Arc::clone(&self.0), hashes.len());
        let opened = async move {
            match memory.open(fingerprint, hashes).await {
                Ok(reading) => stream::unfold(reading, async |mut reading| {
                    let loaded = reading.next().await?;
                    Some((loaded, reading))
                })
                .boxed(),
                Err(error) => {
                    tracing::warn!(%error, "the memory of another worker cannot be read; its blocks are recomputed");
                    let kind = error.kind();
                    stream::iter((0..count).map(move |index| (index, Err(LoadError::Io(kind.into()))))).boxed()
                }
            }
        };
        stream::once(opened).flatten().boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let reject = || Err(StoreError::Io(io::ErrorKind::ReadOnlyFilesystem.into()));
        Box::pin(async move { blocks.iter().map(|_| reject()).collect() })
    }

    fn discard(&self, _: Fingerprint, hash: SequenceHash) {
        let mut discarded = self.0.discarded.lock();
        if discarded.len() >= MAX_DISCARDED {
            discarded.clear();
        }
        discarded.insert(hash);
    }

    fn expire(&self, _: Date) -> usize {
        // The owner expires its blocks.
        0
    }

    /// Unknown here; the owner reports it.
    fn usage(&self) -> Usage {
        Usage::default()
    }
}
