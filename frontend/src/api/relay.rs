//! Requests for models whose engine is a server with the same API: they pass as bytes, and so do the responses.
//!
//! Only what routing needs is read: the prompt, `stream`, the number of choices, the limit of tokens, priority, session
//! and salt. Nothing else is checked, and a field of an unexpected type counts as absent here: what it means is the
//! engine's business. Not here: changes of the body and the headers on the way to the engine, which the engine makes.

mod engine_tokens;
mod estimate;

use super::caller;
use super::generate::{explained, wants_explanation};
use crate::error::Error;
use crate::http::{RequestContext, Shutdown, body};
use crate::limits::{ConnectionChoices, RunningChoices, WorkPermit};
use crate::output::RelayMeter;
use crate::params::{CHOICES_MAX, Fields, scheduling};
use crate::state::AppState;
use axum::body::Body;
use axum::extract::{Request as AxumRequest, State};
use axum::http::request::Parts;
use axum::http::uri::PathAndQuery;
use axum::response::Response;
use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use worker::engine::{
    self, HttpRequest, ModelCard, Output, OutputStream, RelayReport, Request, RequestAttributes, RequestGroup,
    Sampling, StopConditions, Work,
};

/// Endpoints outside of `/v1/` that answer a request and change nothing.
const WITHOUT_VERSION: [&str; 10] = [
    "/tokenize",
    "/detokenize",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/pooling",
    "/classify",
    "/invocations",
    "/generate",
    "/encode",
];

/// Endpoints that compute no tokens, and so count none against the limit of a key.
const TOKENIZE: [&str; 2] = ["/tokenize", "/detokenize"];

/// Fields of this program, which engines do not know.
const PRIVATE_FIELDS: [&str; 2] = ["cache", "deadline_ms"];

/// A request whose body was read.
pub(super) struct Incoming {
    pub(super) parts: Parts,
    pub(super) body: Bytes,
    /// The body's share of the memory for bodies.
    pub(super) memory: Option<OwnedSemaphorePermit>,
    /// What routing reads of the body; the default if it is no JSON object.
    pub(super) routing: Routing,
}

impl Incoming {
    /// Reads what routing needs of the fields of a body.
    pub(super) async fn read(
        parts: Parts,
        body: Bytes,
        fields: Option<Fields>,
        permit: WorkPermit,
    ) -> Result<Self, Error> {
        let routing = match fields {
            Some(fields) => permit.run(move || Ok(Routing::read(fields))).await?,
            None => Routing::default(),
        };
        Ok(Self { parts, body, memory: permit.into_memory(), routing })
    }
}

/// What routing reads of a request.
#[derive(Default)]
pub(super) struct Routing {
    /// The tokens of the prompt, estimated unless the request has their ids.
    tokens: Arc<[u32]>,
    has_token_ids: bool,
    is_stream: bool,
    /// Number of choices; 0 for a request that generates nothing.
    choices: u32,
    max_tokens: Option<u32>,
    /// Time from the request's arrival within which the first token must be generated.
    deadline: Option<Duration>,
    attributes: RequestAttributes,
    /// Salts of the cache domain.
    salts: Vec<String>,
}

/// The handler of every route that this program does not have. Without a relayed model it answers that there is no such
/// route.
pub(super) async fn fallback(State(state): State<Arc<AppState>>, request: AxumRequest) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    let context = RequestContext::of(&parts.extensions);
    let relayed: Vec<_> = state.engine.models().into_iter().filter(|card| card.is_relayed).collect();
    if relayed.is_empty() || !is_public(parts.uri.path()) {
        return Err(Error::NoRoute { method: parts.method.to_string(), path: parts.uri.path().into() });
    }
    let body::BufferedBody { bytes, memory } = body::read_any(body, &state.settings, &state.body_memory).await?;
    let permit = state.work.acquire(bytes.len(), memory).await;
    let unparsed = bytes.clone();
    let mut fields = permit.run(move || Ok(Fields::parse(&unparsed).ok())).await?;
    let model = fields.as_mut().and_then(|fields| fields.text("model").ok().flatten());
    let card = match model {
        Some(id) => caller::model(&state, &context, &id)?,
        // The engine may read a model where it is not read here: in a form, or in the path.
        None if context.key().is_some_and(|key| key.has_models()) => return Err(Error::ModelNotNamed),
        // Requests that name no model say nothing that depends on one.
        None => Arc::clone(&relayed[0]),
    };
    if !card.is_relayed {
        return Err(Error::NoRoute { method: parts.method.to_string(), path: parts.uri.path().into() });
    }
    let incoming = Incoming::read(parts, bytes, fields, permit).await?;
    respond(&state, incoming, card).await
}

/// Whether clients may use an engine's endpoint. Others change the engine for all clients: they load adapters, flush
/// caches, or put it to sleep. A path that an engine could read as another one is not public.
fn is_public(path: &str) -> bool {
    let is_ambiguous = path.contains(['%', '\\', ';']) || path.split('/').any(|part| matches!(part, "." | ".."));
    let changes_the_engine = path.starts_with("/v1/load_lora") || path.starts_with("/v1/unload_lora");
    !is_ambiguous && ((path.starts_with("/v1/") && !changes_the_engine) || WITHOUT_VERSION.contains(&path))
}

/// Relays a request for a model, and its response.
pub(super) async fn respond(
    state: &Arc<AppState>,
    incoming: Incoming,
    card: Arc<ModelCard>,
) -> Result<Response, Error> {
    let Incoming { parts, body, memory, mut routing } = incoming;
    let context = RequestContext::of(&parts.extensions);
    let shutdown = parts.extensions.get::<Shutdown>().cloned().unwrap_or_default();
    let tenant = caller::tenant(state, &context, &parts.headers)?;
    let deadline = scheduling::header_deadline(&parts.headers)?;
    routing.attributes.session = scheduling::header_session(&parts.headers).or(routing.attributes.session);
    routing.attributes.deadline =
        deadline.into_iter().chain(routing.deadline).min().map(|within| context.arrived + within);
    let running =
        state.choices.start(routing.choices as usize, parts.extensions.get::<ConnectionChoices>(), &tenant)?;
    if !TOKENIZE.contains(&parts.uri.path()) {
        context.take_prompt(routing.tokens.len())?;
    }
    routing.attributes.tenant = Arc::clone(&tenant);
    let model: Arc<str> = card.id.as_str().into();
    let explain = wants_explanation(&parts.headers);
    let mut request = Request {
        id: Arc::clone(&context.id),
        model: Arc::clone(&model),
        tokens: routing.tokens,
        domain: routing.salts.iter().fold(state.domains.of(&tenant), |domain, salt| domain.salted(salt)),
        sampling: Sampling::default(),
        stop: StopConditions { max_tokens: routing.max_tokens, ..StopConditions::default() },
        work: Work::Relay(Arc::new(HttpRequest {
            method: parts.method,
            target: parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/")),
            headers: parts.headers,
            body,
            is_stream: routing.is_stream,
            private_fields: &PRIVATE_FIELDS,
        })),
        attributes: routing.attributes,
        explain,
        group: (routing.choices > 1).then(|| RequestGroup::new(routing.choices)),
    };
    let mut meter = RelayMeter::new(context.clone(), model, routing.is_stream);
    let start = async {
        if card.has_exact_blocks
            && !routing.has_token_ids
            && let Some(tokens) = engine_tokens::ask(state, &request).await
        {
            request.tokens = tokens;
        }
        let mut outputs = state.engine.generate(request).await?;
        match outputs.next().await {
            Some(Ok(Output::Head(head))) => Ok((*head, outputs)),
            Some(Err(error)) => Err(error.into()),
            _ => Err(Error::Failed("the engine sent no head of a response".into())),
        }
    };
    let started = tokio::select! {
        biased;
        started = start => started,
        () = shutdown.forced() => Err(Error::ShuttingDown),
    };
    let (head, outputs) = started.inspect_err(|_| meter.mark_failed())?;
    drop(memory);
    meter.head(head.worker);
    context.stream_started();
    let relay = Relay { outputs, meter, context, shutdown, is_stream: routing.is_stream, _running: running };
    let mut response = Response::new(Body::from_stream(relay.into_body()));
    (*response.status_mut(), *response.headers_mut()) = (head.status, head.headers);
    Ok(explained(response, head.explain))
}

/// A response that is being relayed.
struct Relay {
    outputs: OutputStream,
    meter: RelayMeter,
    context: Arc<RequestContext>,
    shutdown: Shutdown,
    is_stream: bool,
    _running: RunningChoices,
}

impl Relay {
    /// The body of the response. A stream that fails ends with an event that says why; any other body is cut off.
    fn into_body(self) -> impl futures::Stream<Item = io::Result<Bytes>> + Send + 'static {
        stream::unfold(Some(self), |relay| async move {
            let mut relay = relay?;
            let next = tokio::select! {
                biased;
                next = relay.outputs.next() => next,
                () = relay.shutdown.forced() => Some(Err(engine::Error::Failed("the server is shutting down".into()))),
            };
            match next {
                Some(Ok(Output::Body(bytes))) => {
                    relay.meter.body();
                    // A body with a length is not polled after its last byte, so its end is taken with that.
                    let next = if relay.is_stream { None } else { relay.outputs.next().now_or_never().flatten() };
                    match next {
                        Some(Ok(Output::End(report))) => {
                            relay.finish(report);
                            Some((Ok(bytes), None))
                        }
                        Some(other) => {
                            relay.outputs = stream::iter([other]).chain(relay.outputs).boxed();
                            Some((Ok(bytes), Some(relay)))
                        }
                        None => Some((Ok(bytes), Some(relay))),
                    }
                }
                Some(Ok(Output::End(report))) => {
                    relay.finish(report);
                    None
                }
                Some(Err(error)) => Some((relay.fail(&error.into()), None)),
                _ => Some((relay.fail(&Error::Failed("the engine's response has no end".into())), None)),
            }
        })
    }

    fn finish(&mut self, report: RelayReport) {
        self.meter.finish(report);
        self.context.stream_finished();
    }

    fn fail(&mut self, error: &Error) -> io::Result<Bytes> {
        self.meter.mark_failed();
        self.context.stream_failed(error);
        if !self.is_stream {
            return Err(io::Error::other(error.to_string()));
        }
        let object = serde_json::to_string(&error.body()).expect("an error object has string keys");
        Ok(format!("data: {object}\n\n").into())
    }
}
