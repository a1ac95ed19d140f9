//! The engines and the logs of this process, for requests of other processes.

use super::blocks::{self, BlockFrames};
use super::log_server::{LogServer, NotRead};
use super::logs::{self, LogRequest};
use super::progress::ProgressFrames;
use super::served::ServedRequest;
use super::wire;
use super::{NO_SECRET, PROTOCOL, PROTOCOL_HEADER, RequiredMac};
use crate::engine::{Engine, Error, OutputStream, PrefetchError};
use crate::handoff::{HandoffId, Peers};
use crate::plane::{Discovery, Events, Instance, Lease, Membership, PlaneError, WorkerId};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Limited};
use parking_lot::Mutex;
use spans::Tracer;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::error::Error as StdError;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Answers requests for the engines and the logs of this process.
pub struct RequestServer {
    engines: Mutex<BTreeMap<WorkerId, Registered>>,
    /// The memory of the workers, for workers of other processes.
    peers: Peers,
    logs: LogServer,
    required: Option<RequiredMac>,
    tracer: Tracer,
    /// Cancelled when running requests are to end.
    ending: CancellationToken,
}

/// A registered engine.
#[derive(Clone)]
struct Registered {
    /// Number of the registration that inserted it.
    registration: u64,
    engine: Arc<dyn Engine>,
    /// Cancelled when the registration ends.
    ended: CancellationToken,
}

/// Registers workers at another discovery, and serves them while their leases live.
struct Served {
    server: Arc<RequestServer>,
    inner: Arc<dyn Discovery>,
    registrations: Mutex<u64>,
}

/// The body of a response.
pub struct ResponseBody(Content);

enum Content {
    Text(Option<Bytes>),
    /// The outputs of a request, until the process ends it.
    Outputs(OutputStream, Pin<Box<WaitForCancellationFutureOwned>>, Box<ServedRequest>),
    Blocks(BlockFrames),
    Progress(ProgressFrames),
    Log(mpsc::Receiver<Bytes>),
    Ended,
}

/// The text of a response to a request for a worker that is not registered.
const NO_ENGINE: &str = "no worker with this id takes requests here";

/// Largest request: a prompt of ten million tokens.
const MAX_REQUEST_BYTES: usize = 64 << 20;

/// Largest request for blocks: a million blocks.
const MAX_BLOCKS_BYTES: usize = 16 << 20;

/// A frame is sent when it has this many bytes, even if more outputs are ready: a quarter of a stream's window.
const MAX_FRAME_BYTES: usize = 2 << 10;

impl RequestServer {
    /// A server for requests with the required MAC; `None`: for all requests. The blocks of workers in `peers` can be
    /// read.
    pub fn new(required: Option<RequiredMac>, peers: Peers) -> Arc<Self> {
        Self::traced(required, peers, Tracer::off())
    }

    /// The same, with spans in the traces of requests.
    pub fn traced(required: Option<RequiredMac>, peers: Peers, tracer: Tracer) -> Arc<Self> {
        let ending = CancellationToken::new();
        Arc::new(Self { engines: Mutex::default(), peers, logs: LogServer::new(), required, tracer, ending })
    }

    /// Ends running requests with an error, so that their engines stop and frontends continue them on other workers.
    pub fn end_requests(&self) {
        self.ending.cancel();
    }

    /// A discovery that registers workers at `inner`, and lets requests reach their engines while they are registered.
    pub fn discovery(self: &Arc<Self>, inner: Arc<dyn Discovery>) -> Arc<dyn Discovery> {
        Arc::new(Served { server: Arc::clone(self), inner, registrations: Mutex::default() })
    }

    /// Events that are published at `inner`, and logs that are offered there and can be read here.
    pub fn events(&self, inner: Arc<dyn Events>) -> Arc<dyn Events> {
        Arc::new(self.logs.events(inner))
    }

    /// Answers `POST /workers/<worker>/generate`.
    pub async fn respond<B>(&self, worker: &str, headers: &HeaderMap, body: B) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes> + Send,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        if let Some((status, why)) = self.refusal(headers) {
            return error(status, &why);
        }
        let Some((id, Registered { engine, .. })) = self.registered(worker) else {
            return error(StatusCode::NOT_FOUND, NO_ENGINE);
        };
        let request = match Limited::new(body, MAX_REQUEST_BYTES).collect().await {
            Ok(body) => wire::decode_request(&body.to_bytes(), Instant::now()),
            Err(problem) => return error(StatusCode::BAD_REQUEST, &problem.to_string()),
        };
        let Ok(mut request) = request else { return error(StatusCode::BAD_REQUEST, "the request cannot be decoded") };
        let mut served = ServedRequest::begin(&self.tracer, headers, id, &mut request);
        let outputs = self.ending.run_until_cancelled(engine.generate(request)).await;
        match outputs.unwrap_or_else(|| Err(ended())) {
            Ok(outputs) => {
                let ending = Box::pin(self.ending.clone().cancelled_owned());
                response(StatusCode::OK, Content::Outputs(outputs, ending, Box::new(served)))
            }
            Err(error) => {
                served.fail(&error);
                response(StatusCode::UNPROCESSABLE_ENTITY, Content::Text(Some(wire::encode_error(&error))))
            }
        }
    }

    /// Answers `POST /workers/<worker>/prefetch`, once the copy has ended. It also ends with the registration of the
    /// worker, which may be about to stop, and when the future is dropped.
    pub async fn respond_prefetch<B>(&self, worker: &str, headers: &HeaderMap, body: B) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes> + Send,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        if let Some((status, why)) = self.refusal(headers) {
            return error(status, &why);
        }
        let Some((_, Registered { engine, ended, .. })) = self.registered(worker) else {
            return error(StatusCode::NOT_FOUND, NO_ENGINE);
        };
        let copy = match Limited::new(body, MAX_BLOCKS_BYTES).collect().await {
            Ok(body) => wire::decode_prefix_copy(&body.to_bytes()),
            Err(problem) => return error(StatusCode::BAD_REQUEST, &problem.to_string()),
        };
        let Ok(copy) = copy else { return error(StatusCode::BAD_REQUEST, "the request cannot be decoded") };
        let prefetched = ended.run_until_cancelled(engine.prefetch(copy)).await;
        let prefetched = prefetched.unwrap_or(Err(PrefetchError::Busy));
        response(StatusCode::OK, Content::Text(Some(wire::encode_prefetched(&prefetched))))
    }

    /// Answers `POST /workers/<worker>/blocks`.
    pub async fn respond_blocks<B>(&self, worker: &str, headers: &HeaderMap, body: B) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes> + Send,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        if let Some((status, why)) = self.refusal(headers) {
            return error(status, &why);
        }
        let Some(memory) = worker.parse().ok().and_then(|id| self.peers.find_local(WorkerId(id))) else {
            return error(StatusCode::NOT_FOUND, "no worker with this id is here");
        };
        let hashes = match Limited::new(body, MAX_BLOCKS_BYTES).collect().await {
            Ok(body) => blocks::decode_request(&body.to_bytes()),
            Err(problem) => return error(StatusCode::BAD_REQUEST, &problem.to_string()),
        };
        match hashes {
            Ok((fingerprint, hashes)) => {
                response(StatusCode::OK, Content::Blocks(BlockFrames::new(memory.load(fingerprint, hashes))))
            }
            Err(problem) => error(StatusCode::BAD_REQUEST, &problem.to_string()),
        }
    }

    /// Answers `GET /workers/<worker>/handoffs/<handoff>`. The response ends with the hand-over.
    pub fn respond_progress(&self, handoff: &str, headers: &HeaderMap) -> Response<ResponseBody> {
        if let Some((status, why)) = self.refusal(headers) {
            return error(status, &why);
        }
        match handoff.parse().ok().and_then(|id| self.peers.follow(HandoffId(id))) {
            Some(progress) => response(StatusCode::OK, Content::Progress(ProgressFrames::new(progress))),
            None => error(StatusCode::NOT_FOUND, "the hand-over has ended"),
        }
    }

    /// Answers `GET /logs/<kind>/<id>/<epoch>/snapshot` and `GET /logs/<kind>/<id>/<epoch>/events/<after>`, where `log`
    /// is what follows `/logs/`. The response is complete if it has the last message.
    pub async fn respond_log(&self, log: &str, headers: &HeaderMap) -> Response<ResponseBody> {
        if let Some((status, why)) = self.refusal(headers) {
            return error(status, &why);
        }
        let Some(request) = LogRequest::parse(log) else { return error(StatusCode::NOT_FOUND, "this names no log") };
        match self.logs.read(request).await {
            Ok(frames) => {
                let mut response = response(StatusCode::OK, Content::Log(frames));
                response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(logs::CONTENT_TYPE));
                response
            }
            Err(NotRead::Absent) => error(StatusCode::NOT_FOUND, "this process does not offer the log"),
            Err(NotRead::Busy) => error(StatusCode::SERVICE_UNAVAILABLE, "other processes read too many logs now"),
        }
    }

    /// A registered worker of this process.
    fn registered(&self, worker: &str) -> Option<(WorkerId, Registered)> {
        let id = WorkerId(worker.parse().ok()?);
        let registered = self.engines.lock().get(&id).cloned()?;
        Some((id, registered))
    }

    /// Why a request is refused: its protocol number or its secret is another one.
    fn refusal(&self, headers: &HeaderMap) -> Option<(StatusCode, String)> {
        let protocol = headers.get(PROTOCOL_HEADER).map(|value| value.to_str().unwrap_or("unreadable"));
        let is_other = protocol.is_some_and(|protocol| protocol != PROTOCOL.to_string());
        // Before the secret: processes with another number may show it in another way.
        if !is_other && self.required.as_ref().is_some_and(|required| !required.is_in(headers)) {
            return Some((StatusCode::UNAUTHORIZED, NO_SECRET.to_owned()));
        }
        let number = protocol.unwrap_or("none");
        let why = || format!("the request has protocol number {number}, this worker {PROTOCOL}; use the same version");
        (is_other || protocol.is_none()).then(|| (StatusCode::BAD_REQUEST, why()))
    }
}

/// The error of a request that ends with its process.
fn ended() -> Error {
    Error::Failed("the worker stops, and four fifths of its shutdown_timeout are over".to_owned())
}

fn error(status: StatusCode, why: &str) -> Response<ResponseBody> {
    response(status, Content::Text(Some(Bytes::copy_from_slice(why.as_bytes()))))
}

fn response(status: StatusCode, content: Content) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody(content));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    response
}

impl Discovery for Served {
    fn register(&self, instance: Instance, engine: Arc<dyn Engine>) -> BoxFuture<'_, Result<Lease, PlaneError>> {
        Box::pin(async move {
            let (id, registration) = (instance.id, {
                let mut last = self.registrations.lock();
                *last += 1;
                *last
            });
            // Before it is visible: a request may come as soon as it is.
            let ended = CancellationToken::new();
            let registered = Registered { registration, engine: Arc::clone(&engine), ended: ended.clone() };
            let before = self.server.engines.lock().insert(id, registered);
            let lease = match self.inner.register(instance, engine).await {
                Ok(lease) => lease,
                Err(error) => {
                    let mut engines = self.server.engines.lock();
                    match before {
                        Some(before) => engines.insert(id, before),
                        None => engines.remove(&id),
                    };
                    return Err(error);
                }
            };
            let (server, lost) = (Arc::clone(&self.server), lease.lost());
            Ok(Lease::with_loss(lost, move || {
                drop(lease);
                ended.cancel();
                let mut engines = server.engines.lock();
                // A later registration of the same worker stays.
                if engines.get(&id).is_some_and(|current| current.registration == registration) {
                    engines.remove(&id);
                }
            }))
        })
    }

    fn watch(&self) -> BoxStream<'static, Membership> {
        self.inner.watch()
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    /// The outputs that are ready, as one frame. When the process ends its requests, the last output is an error.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let (outputs, ending, served) = match &mut self.0 {
            Content::Ended => return Poll::Ready(None),
            Content::Text(text) => return Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Content::Blocks(frames) => return frames.poll_next(context).map(|frame| Some(Ok(Frame::data(frame?)))),
            Content::Progress(frames) => return frames.poll_next(context).map(|frame| Some(Ok(Frame::data(frame?)))),
            Content::Log(frames) => return frames.poll_recv(context).map(|frame| Some(Ok(Frame::data(frame?)))),
            Content::Outputs(outputs, ending, served) => (outputs, ending, served),
        };
        let mut encoded = BytesMut::new();
        if ending.as_mut().poll(context).is_ready() {
            let output = Err(ended());
            served.output(&output);
            wire::encode_output(output, &mut encoded);
            self.0 = Content::Ended;
            return Poll::Ready(Some(Ok(Frame::data(encoded.freeze()))));
        }
        let ended = loop {
            match outputs.poll_next_unpin(context) {
                Poll::Ready(Some(output)) => {
                    served.output(&output);
                    wire::encode_output(output, &mut encoded);
                }
                Poll::Ready(None) => break true,
                Poll::Pending => break false,
            }
            if encoded.len() >= MAX_FRAME_BYTES {
                break false;
            }
        };
        if ended {
            self.0 = Content::Ended;
        }
        match (encoded.is_empty(), ended) {
            (false, _) => Poll::Ready(Some(Ok(Frame::data(encoded.freeze())))),
            (true, true) => Poll::Ready(None),
            (true, false) => Poll::Pending,
        }
    }
}
