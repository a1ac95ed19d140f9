//! WebSocket connections (RFC 6455) to a server of a model: the handshake, then bytes in both directions.
//!
//! **Bytes pass only after the server has switched too.** Any other answer is relayed as a response, and the connection
//! of the client stays one of HTTP, so no bytes of a client reach a server as a request that was not checked here.
//!
//! The messages are not read: their tokens, and the models that they name, are not known. Not here: other protocols.
//! With `h2c` a client could send requests past all checks, so the header `Upgrade` is ignored for these, as RFC 9110
//! allows. Nor over HTTP/2: extended CONNECT (RFC 8441) is not announced, so clients use a connection of HTTP/1.1.

use super::{Contents, Incoming, MAX_TOKENS_UNKNOWN, engine_request, generate, relayed};
use crate::api::caller;
use crate::api::generate::explained;
use crate::api::operations;
use crate::error::Error;
use crate::http::{ConnectionInfo, RequestContext, Shutdown, Upgrade};
use crate::output::{BodyKind, OutputText, RelayMeter};
use crate::params::scheduling;
use crate::state::AppState;
use axum::body::Body;
use axum::extract::Query;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::request::Parts;
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, Version};
use axum::response::Response;
use bytes::Bytes;
use futures::future::{BoxFuture, Either, select};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};
use serde::Deserialize;
use std::future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::time::{Instant, sleep_until, timeout};
use worker::engine::{ModelCard, RelayReport, Switched, Work};

/// The protocol.
const WEBSOCKET: &str = "websocket";

/// Bytes that are read at a time, for each direction: a fifth of a second of speech (16-bit samples at 16 kHz in
/// base64), and more than a message of text.
const BUFFER: usize = 8 << 10;

/// Time that one side has to end the connection after the other one has ended it. A side that was sent a close frame
/// does so at once.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// What a handshake must be.
const HANDSHAKE: &str = "A WebSocket connection begins with a GET request over HTTP/1.1 that has the headers \
                         'connection: upgrade' and 'upgrade: websocket', and no body. Over HTTP/2 none can be opened.";

/// How a connection has ended.
enum End {
    /// A side has closed it.
    Closed,
    /// The client is gone.
    ClientLeft,
    Failed(Error),
}

/// Which side of a direction has failed.
enum Broken {
    Source(io::Error),
    Target(io::Error),
}

/// What has passed over a connection. Dropping it notes the bytes for the log line of the request.
struct Passed {
    context: Arc<RequestContext>,
    received: Direction,
    sent: Direction,
    /// When bytes passed last.
    latest: Mutex<Instant>,
    open: IntGauge,
}

struct Direction {
    bytes: AtomicU64,
    counter: IntCounter,
}

/// What is read of the query of a handshake.
#[derive(Deserialize)]
struct NamedModel {
    model: Option<String>,
}

/// Whether a request is the beginning of a WebSocket connection. Without its header it would be another request.
pub(super) fn is_asked(headers: &HeaderMap) -> bool {
    lists(headers, &UPGRADE, WEBSOCKET)
}

/// Whether one of the comma-separated lists in the headers of this name has `token`.
fn lists(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|listed| listed.trim().eq_ignore_ascii_case(token))
}

/// Opens a connection to a server of the model that the query names, else of `default`. `is_empty`: the request has no
/// body.
pub(super) async fn respond(
    state: &Arc<AppState>,
    mut parts: Parts,
    is_empty: bool,
    default: &Arc<ModelCard>,
) -> Result<Response, Error> {
    let context = RequestContext::of(&parts.extensions);
    let shutdown = Shutdown::of(&parts.extensions);
    // It may stay open for hours, and another server can have it now.
    if shutdown.is_announced() {
        return Err(Error::ShuttingDown);
    }
    let is_handshake = is_empty
        && parts.method == Method::GET
        && parts.version == Version::HTTP_11
        && lists(&parts.headers, &CONNECTION, "upgrade");
    let client = parts.extensions.remove::<OnUpgrade>().filter(|_| is_handshake);
    let client = client.ok_or_else(|| Error::unsupported("upgrade", HANDSHAKE))?;
    check_key(&context)?;
    let named = match named_model(&parts.uri)? {
        Some(id) => caller::model(state, &context, &id)?,
        None => Arc::clone(default),
    };
    if !named.is_relayed {
        return Err(operations::no_route(&parts.method, &parts.uri));
    }
    let permit = state.work.acquire(0, None).await;
    let incoming = Incoming::read(state, &named, parts, Bytes::new(), Contents::Other, permit).await?;
    let Incoming { card, tenant, domain, parts, body, mut routing, .. } = incoming;
    let deadline = scheduling::header_deadline(&parts.headers)?;
    routing.attributes.deadline = deadline.map(|within| context.arrived + within);
    let connection = ConnectionInfo::of(&parts.extensions).map(|connection| &connection.choices);
    // The server computes as much for it as for one choice.
    let running = state.choices.start(1, connection, &tenant)?;
    routing.attributes.tenant = tenant;
    let name: Arc<str> = named.id.as_str().into();
    let mut meter = RelayMeter::new(Arc::clone(&context), &name, OutputText::None, MAX_TOKENS_UNKNOWN as u32, None);
    let mut request = engine_request(&context, card.id.as_str().into(), domain, parts, body, routing);
    if let Work::Relay(http) = &mut request.work {
        let http = Arc::make_mut(http);
        http.upgrade = Some(WEBSOCKET);
        // The server does not know an alias.
        if named.id != card.id {
            http.target = renamed(&http.target, &card.id);
        }
    }
    let max_time = state.settings.max_request_time.map(|time| time.0);
    let mut ends: BoxFuture<'static, Error> = Box::pin(shutdown.ends(context.arrived, max_time));
    let started = tokio::select! {
        biased;
        started = generate(state, request) => started,
        error = &mut ends => Err(error),
    };
    let (mut head, outputs) = started.inspect_err(|_| meter.mark_failed())?;
    let Some(server) = head.tunnel.take().and_then(|tunnel| tunnel.take()) else {
        return relayed(*head, outputs, meter, context, ends, running).await;
    };
    let head = *head;
    meter.head(&head, BodyKind::Other);
    context.stream_started();
    let idle = state.settings.idle_timeout.0;
    let rest = async move {
        let passed = Passed::new(Arc::clone(&context));
        // Released before the connection counts as ended.
        let _held = (outputs, running);
        let end = tokio::select! {
            biased;
            end = pass(client, server, &passed, idle) => end,
            error = ends => End::Failed(error),
            () = key_ends(&context) => End::Failed(Error::WebSocketKeyEnded),
        };
        match end {
            End::Closed => {
                meter.finish(RelayReport::default());
                context.tunnel_finished();
            }
            End::ClientLeft => {}
            End::Failed(error) => {
                meter.mark_failed();
                context.stream_failed(&error);
            }
        }
    };
    let mut response = Response::new(Body::empty());
    (*response.status_mut(), *response.headers_mut()) = (head.status, head.headers);
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(UPGRADE, HeaderValue::from_static(WEBSOCKET));
    response.extensions_mut().insert(Upgrade::new(rest));
    Ok(explained(response, head.explain))
}

/// Whether the key allows what is not read here.
fn check_key(context: &RequestContext) -> Result<(), Error> {
    let problem = context.key().and_then(|key| key.websocket_problem());
    problem.map_or(Ok(()), |problem| Err(Error::WebSocketNotAllowed(problem)))
}

/// Resolves when the key of a connection was removed, or changed so that it could not open one.
async fn key_ends(context: &RequestContext) {
    match context.key() {
        Some(key) => key.websockets_end().await,
        None => future::pending().await,
    }
}

/// The model that the query names, as OpenAI's clients do.
fn named_model(uri: &Uri) -> Result<Option<String>, Error> {
    let query = Query::<NamedModel>::try_from_uri(uri).map_err(|error| Error::Malformed(error.body_text()))?;
    Ok(query.0.model.filter(|model| !model.is_empty()))
}

/// The target with this model in its query.
fn renamed(target: &PathAndQuery, model: &str) -> PathAndQuery {
    let Some(query) = target.query() else { return target.clone() };
    let mut renamed = target.path().to_owned();
    for (position, pair) in query.split('&').enumerate() {
        renamed.push(if position == 0 { '?' } else { '&' });
        if !is_model(pair.split('=').next().unwrap_or_default()) {
            renamed.push_str(pair);
            continue;
        }
        renamed.push_str("model=");
        for byte in model.bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
                renamed.push(char::from(byte));
            } else {
                renamed.push_str(&format!("%{byte:02X}"));
            }
        }
    }
    PathAndQuery::try_from(renamed).unwrap_or_else(|_| target.clone())
}

/// Whether this is the name of the model in a query, also with percent-encoded bytes.
fn is_model(name: &str) -> bool {
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    let mut rest = name.as_bytes();
    for expected in b"model" {
        let (byte, length) = match rest {
            [b'%', high, low, ..] => (digit(high).zip(digit(low)).map(|(high, low)| (high * 16 + low) as u8), 3),
            [byte, ..] => (Some(*byte), 1),
            [] => return false,
        };
        if byte != Some(*expected) {
            return false;
        }
        rest = &rest[length..];
    }
    rest.is_empty()
}

/// Passes bytes between a client, once its connection has switched, and a server that has.
async fn pass(client: OnUpgrade, server: Switched, passed: &Passed, idle: Duration) -> End {
    let Ok(client) = client.await else { return End::ClientLeft };
    let Switched { received, server } = server;
    let ((from_client, to_client), (from_server, to_server)) = (split(TokioIo::new(client)), split(server));
    let broken_off = |error: io::Error| End::Failed(Error::Failed(format!("the server broke off: {error}")));
    let up = async {
        let copied = copy(from_client, to_server, Bytes::new(), |bytes| passed.note(&passed.received, bytes)).await;
        copied.map_err(|broken| match broken {
            Broken::Source(_) => End::ClientLeft,
            Broken::Target(error) => broken_off(error),
        })
    };
    let down = async {
        let copied = copy(from_server, to_client, received, |bytes| passed.note(&passed.sent, bytes)).await;
        copied.map_err(|broken| match broken {
            Broken::Source(error) => broken_off(error),
            Broken::Target(_) => End::ClientLeft,
        })
    };
    let both = async {
        let up = pin!(up);
        let down = pin!(down);
        match select(up, down).await {
            Either::Left((Ok(()), down)) => drop(timeout(CLOSE_TIMEOUT, down).await),
            Either::Right((Ok(()), up)) => drop(timeout(CLOSE_TIMEOUT, up).await),
            Either::Left((Err(end), _)) | Either::Right((Err(end), _)) => return end,
        }
        End::Closed
    };
    tokio::select! {
        biased;
        end = both => end,
        () = passed.idle_for(idle) => End::Failed(Error::WebSocketIdle(idle)),
    }
}

/// Sends `first` and then what `from` sends, until that ends. Nothing is read while the target does not read.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    first: Bytes,
    note: impl Fn(usize),
) -> Result<(), Broken> {
    let mut buffer = vec![0; BUFFER];
    send(&mut to, &first, &note).await?;
    loop {
        let read = from.read(&mut buffer).await.map_err(Broken::Source)?;
        if read == 0 {
            // The target may be gone, which shows in the other direction.
            let _ = to.shutdown().await;
            return Ok(());
        }
        send(&mut to, &buffer[..read], &note).await?;
    }
}

async fn send(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8], note: &impl Fn(usize)) -> Result<(), Broken> {
    to.write_all(bytes).await.map_err(Broken::Target)?;
    to.flush().await.map_err(Broken::Target)?;
    note(bytes.len());
    Ok(())
}

impl Passed {
    fn new(context: Arc<RequestContext>) -> Self {
        let direction = |name: &str| Direction {
            bytes: AtomicU64::new(0),
            counter: context.metrics.websocket_bytes.with_label_values(&[name]),
        };
        let (received, sent) = (direction("received"), direction("sent"));
        let open = context.metrics.open_websockets.clone();
        open.inc();
        Self { context, received, sent, latest: Mutex::new(Instant::now()), open }
    }

    fn note(&self, direction: &Direction, bytes: usize) {
        direction.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        direction.counter.inc_by(bytes as u64);
        *self.latest.lock() = Instant::now();
    }

    /// Resolves when nothing has passed for this time.
    async fn idle_for(&self, time: Duration) {
        loop {
            let at = *self.latest.lock() + time;
            if at <= Instant::now() {
                return;
            }
            sleep_until(at).await;
        }
    }
}

impl Drop for Passed {
    fn drop(&mut self) {
        self.open.dec();
        let mut fields = self.context.log_fields();
        fields.received_bytes = Some(self.received.bytes.load(Ordering::Relaxed));
        fields.sent_bytes = Some(self.sent.bytes.load(Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_of_a_query_is_replaced() {
        let renamed = |target: &'static str| renamed(&PathAndQuery::from_static(target), "org/m b").to_string();
        assert_eq!(renamed("/v1/realtime?a=1&model=chat&b"), "/v1/realtime?a=1&model=org/m%20b&b");
        assert_eq!(renamed("/v1/realtime?model=chat"), "/v1/realtime?model=org/m%20b");
        assert_eq!(renamed("/v1/realtime?mo%64el=chat&%6d%6Fdel=b"), "/v1/realtime?model=org/m%20b&model=org/m%20b");
        for other in ["?models=a", "?mode=a", "?%6model=a", "?mo%6", "?%2d=model", "?", ""] {
            let target = format!("/v1/realtime{other}");
            let same = super::renamed(&target.parse().unwrap(), "org/m");
            assert_eq!(same.to_string(), target);
        }
        let named = |target: &'static str| named_model(&Uri::from_static(target));
        assert_eq!(named("/v1/realtime?a=%20&model=org%2Fm+b&c"), Ok(Some("org/m b".to_owned())));
        assert_eq!([named("/v1/realtime"), named("/v1/realtime?model=&a")], [Ok(None), Ok(None)]);
        assert_eq!(named("/v1/realtime?mo%64el=a"), Ok(Some("a".to_owned())));
        assert!(named("/v1/realtime?model=a&model=b").is_err(), "servers differ in which they read");
    }
}
