//! Requests for models whose engine is a server with the same API: they pass as bytes, and so do the responses.
//!
//! Only what routing needs is read: the prompt, `stream`, `stream_options.include_usage`, the number of choices, the
//! limit of tokens, priority, session and salt. Nothing else is checked, and a field of an unexpected type counts as
//! absent here: what it means is the engine's business. Not here: changes of the body and the headers on the way to the
//! engine, which the engine makes.

mod contents;
mod estimate;
mod form;
mod prompt;
mod prompt_reader;
mod public_path;
mod response_body;
mod stored;
mod websocket;

use super::caller;
use super::generate::{explained, wants_explanation};
use super::operations;
use crate::error::Error;
use crate::http::{ConnectionInfo, RequestContext, Shutdown, body};
use crate::limits::{RunningChoices, WorkPermit};
use crate::model::EncodeJob;
use crate::output::{BodyKind, OutputText, RelayMeter};
use crate::params::{CHOICES_MAX, Fields, peek_salts, scheduling};
use crate::state::AppState;
use axum::body::{Body, HttpBody};
use axum::extract::{Request as AxumRequest, State};
use axum::http::Method;
use axum::http::request::Parts;
use axum::http::uri::PathAndQuery;
use axum::response::Response;
use bytes::Bytes;
pub(super) use contents::Contents;
use contents::MediaType;
use futures::StreamExt;
use futures::future::BoxFuture;
use prompt_reader::PromptReader;
use public_path::is_public;
use response_body::{ReadAhead, Relay, RelayBody, kind_of, read_ahead};
use spans::{Kind, Span};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use worker::engine::{
    Conversation, Domain, EndpointKind, HttpRequest, ModelCard, Output, OutputStream, Request, RequestAttributes,
    RequestGroup, ResponseHead, Sampling, StopConditions, UNKNOWN_CONTEXT, Work, computes_tokens, is_inference,
};

/// Endpoints whose answers may have the text of the output several times: of `verbose_json` each segment and word.
const TRANSCRIBE: [&str; 2] = ["/v1/audio/transcriptions", "/v1/audio/translations"];

/// The endpoint whose output is sound.
const SPEECH: &str = "/v1/audio/speech";

/// Tokens that a request may have for a model whose context is not known: as many as the longest contexts.
const MAX_TOKENS_UNKNOWN: usize = 1 << 20;

/// Fields of this program, which engines do not know.
const PRIVATE_FIELDS: [&str; 2] = ["cache", "deadline_ms"];

/// A request whose body was read.
pub(super) struct Incoming {
    /// The model that serves it: another than it names if that is an alias.
    card: Arc<ModelCard>,
    tenant: Arc<str>,
    /// The cache domain of the tenant.
    domain: Domain,
    pub(super) parts: Parts,
    pub(super) body: Bytes,
    /// The body's share of the memory for bodies.
    pub(super) memory: Option<OwnedSemaphorePermit>,
    /// What routing reads of the body; the default if it is no JSON object.
    pub(super) routing: Routing,
}

impl Incoming {
    /// Chooses the model of a request that names `card`, reads what routing needs of the fields of its body, and
    /// tokenizes the prompt with the model's local tokenizer, if it has one. A request that was relayed here before is
    /// refused.
    pub(super) async fn read(
        state: &AppState,
        card: &Arc<ModelCard>,
        mut parts: Parts,
        mut body: Bytes,
        contents: Contents,
        permit: WorkPermit,
    ) -> Result<Self, Error> {
        state.via.add(&mut parts.headers)?;
        let context = RequestContext::of(&parts.extensions);
        let tenant = caller::tenant(state, &context, &parts.headers)?;
        let session = scheduling::header_session(&parts.headers);
        let session = session.or_else(|| match &contents {
            Contents::Json(fields) => scheduling::peek_session(fields),
            Contents::Form(_) | Contents::Other => None,
        });
        let place = stored::place(&state.stored_objects, &tenant, parts.uri.path(), &contents);
        let conversation = Conversation {
            request: &context.id,
            tenant: &tenant,
            session: session.as_deref(),
            served_by: place.as_ref().map(|place| &*place.model),
            body: &body,
        };
        let (named, resolved) = (&card.id, state.engine.resolve(&card.id, &conversation));
        let card = resolved.unwrap_or_else(|| Arc::clone(card));
        let domain = state.domains.of(&tenant);
        let mut routing = match contents {
            Contents::Json(fields) => {
                let has_exact_blocks = card.has_exact_blocks;
                let tokenizers = state.tokenizers.of(&card).filter(|of| of.local.is_some() || has_exact_blocks);
                if let Some(tokenizers) = tokenizers {
                    let (path, is_tokenized) = (parts.uri.path().to_owned(), tokenizers.local.is_some());
                    // When the client disconnects, this future is dropped, which cancels the work.
                    let salted = peek_salts(&fields).fold(domain.clone(), |domain, salt| domain.salted(&salt));
                    let job = EncodeJob::new(salted);
                    let _cancel_on_drop = job.cancel_on_drop();
                    let reader = PromptReader { path, fields, tokenizers, has_exact_blocks, job };
                    let mut span = is_tokenized.then(|| context.trace().span("tokenize", Kind::Internal));
                    let routing = reader.read(&body, &permit).await?;
                    if let Some(span) = &mut span {
                        routing.describe(span);
                    }
                    routing
                } else {
                    permit.scan(move || Ok(Routing::read(fields, None))).await?
                }
            }
            // The engine does not know an alias.
            Contents::Form(form) if form.name == *named && form.name != card.id => {
                let (form_body, name) = (body, card.id.clone());
                body = permit.run(move || Ok(form.renamed(&form_body, &name))).await?;
                Routing::default()
            }
            Contents::Form(_) | Contents::Other => Routing::default(),
        };
        routing.attributes.session = session;
        routing.attributes.server = place.map(|place| place.server);
        Ok(Self { card, tenant, domain, parts, body, memory: permit.into_memory(), routing })
    }
}

/// What routing reads of a request.
#[derive(Default)]
pub(super) struct Routing {
    /// The tokens of the prompt.
    tokens: Arc<[u32]>,
    source: TokenSource,
    /// The body of the request to `/tokenize`, if a server is to be asked for the tokens.
    tokenize_body: Option<Bytes>,
    is_stream: bool,
    /// The client asks for the usage at the end of the stream.
    wants_usage: bool,
    /// Number of choices; 0 for a request that generates nothing.
    choices: u32,
    /// Number of choices without the limit of those that routing distinguishes.
    outputs: usize,
    max_tokens: Option<u32>,
    /// Time from the request's arrival within which the first token must be generated.
    deadline: Option<Duration>,
    attributes: RequestAttributes,
    /// Salts of the cache domain.
    salts: Vec<String>,
}

/// Where the tokens of a prompt come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum TokenSource {
    /// The client's request has their ids.
    Client,
    /// The local tokenizer.
    Local,
    /// The engine was asked.
    Engine,
    /// They are estimated from the text.
    #[default]
    Estimate,
}

impl TokenSource {
    /// The label of a metric.
    fn label(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Local => "local",
            Self::Engine => "engine",
            Self::Estimate => "estimate",
        }
    }
}

impl Routing {
    fn describe(&self, span: &mut Span) {
        describe_tokens(span, &self.tokens, self.source);
    }
}

/// Adds the tokens of a prompt to the span in which they were found.
fn describe_tokens(span: &mut Span, tokens: &[u32], source: TokenSource) {
    span.set("gen_ai.usage.input_tokens", tokens.len());
    span.set("blockyard.tokens.source", source.label());
}

/// The handler of every route that this program does not have. Without a relayed model it answers that there is no such
/// route.
pub(super) async fn fallback(State(state): State<Arc<AppState>>, request: AxumRequest) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    // A tunnel is no request of the API, and the answer to a trace would have the headers for the engine.
    if [Method::CONNECT, Method::TRACE].contains(&parts.method) {
        return Err(operations::no_method(parts.method, parts.uri).await);
    }
    let context = RequestContext::of(&parts.extensions);
    let relayed: Vec<_> = state.engine.models().into_iter().filter(|card| card.is_relayed).collect();
    if relayed.is_empty() || !is_public(parts.uri.path(), &state.settings.relay_paths) {
        return Err(operations::no_route(&parts.method, &parts.uri));
    }
    if websocket::is_asked(&parts.headers) {
        let is_empty = body.is_end_stream();
        // Boxed, because few requests need it.
        return Box::pin(websocket::respond(&state, parts, is_empty, &relayed[0])).await;
    }
    body::check_content_encoding(&parts.headers)?;
    let media_type = MediaType::of(&parts.headers)?;
    let is_limited = context.key().is_some_and(|key| key.has_models());
    // The engine may read another model from a form than this program reads from the same bytes as JSON.
    if is_limited && !media_type.is_json_or_absent() {
        return Err(Error::ModelNotNamed);
    }
    let body::BufferedBody { bytes, memory } = body::read_any(body, &state.settings, &state.body_memory).await?;
    let permit = state.work.acquire(bytes.len(), memory).await;
    let unparsed = bytes.clone();
    let mut contents = permit.scan(move || Contents::read(&media_type, &unparsed)).await?;
    let model = match &mut contents {
        Contents::Json(fields) => caller::named_model(&context, fields)?,
        Contents::Form(form) => Some(form.name.clone()),
        Contents::Other => None,
    };
    let card = match model {
        Some(id) => caller::model(&state, &context, &id)?,
        // The engine may read another model from a path than this program.
        None if is_limited => return Err(Error::ModelNotNamed),
        // Requests that name no model say nothing that depends on one, but may name an object of a server.
        None => {
            let tenant = caller::tenant(&state, &context, &parts.headers)?;
            let place = stored::place(&state.stored_objects, &tenant, parts.uri.path(), &contents);
            let of_object = |card: &&Arc<ModelCard>| place.as_ref().is_some_and(|place| *place.model == *card.id);
            Arc::clone(relayed.iter().find(of_object).unwrap_or(&relayed[0]))
        }
    };
    if !card.is_relayed {
        return Err(operations::no_route(&parts.method, &parts.uri));
    }
    let incoming = Incoming::read(&state, &card, parts, bytes, contents, permit).await?;
    respond(&state, incoming, card).await
}

/// Whether a request with this method may generate. Some servers take others than POST at the same endpoints: SGLang's
/// `/generate` takes PUT.
fn may_generate(method: &Method) -> bool {
    ![Method::GET, Method::HEAD, Method::DELETE, Method::OPTIONS].contains(method)
}

/// Relays a request that names the model `named`, and its response.
pub(super) async fn respond(
    state: &Arc<AppState>,
    incoming: Incoming,
    named: Arc<ModelCard>,
) -> Result<Response, Error> {
    let Incoming { card, tenant, domain, parts, body, memory, mut routing } = incoming;
    let context = RequestContext::of(&parts.extensions);
    let shutdown = Shutdown::of(&parts.extensions);
    let deadline = scheduling::header_deadline(&parts.headers)?;
    routing.attributes.deadline =
        deadline.into_iter().chain(routing.deadline).min().map(|within| context.arrived + within);
    let connection = ConnectionInfo::of(&parts.extensions).map(|connection| &connection.choices);
    let running = state.choices.start(routing.choices as usize, connection, &tenant)?;
    let path = parts.uri.path();
    // Other endpoints count nothing against the limit of a key.
    let is_charged = computes_tokens(path);
    let output = match path {
        _ if !is_charged || !may_generate(&parts.method) => OutputText::None,
        path if EndpointKind::Pooling.paths().contains(&path) => OutputText::None,
        SPEECH => OutputText::None,
        path if TRANSCRIBE.contains(&path) => OutputText::Text,
        _ => OutputText::All,
    };
    if is_charged {
        context.take_prompt(routing.tokens.len())?;
    }
    let model: Arc<str> = card.id.as_str().into();
    let stored = stored::object(&state.stored_objects, &tenant, &model, &parts);
    routing.attributes.tenant = tenant;
    let name = if named.id == *model { Arc::clone(&model) } else { named.id.as_str().into() };
    let (mut source, tokenize_body) = (routing.source, routing.tokenize_body.take());
    // The inputs of embeddings may be longer than the context together, but have no more tokens than bytes.
    let length = if card.context == UNKNOWN_CONTEXT { MAX_TOKENS_UNKNOWN } else { card.context };
    let most = length.saturating_mul(routing.outputs.max(1)).max(body.len());
    let most = u32::try_from(most).unwrap_or(u32::MAX);
    let mut meter = RelayMeter::new(context.clone(), &name, output, most, stored);
    let mut request = engine_request(&context, model, domain, parts, body, routing);
    let start = async {
        if let Some(body) = &tokenize_body {
            let mut span = context.trace().span("tokenize", Kind::Client);
            if let Some(answer) = state.tokenizers.ask(&card, &request.domain, body).await {
                (request.tokens, source) = (answer, TokenSource::Engine);
                request.attributes.has_estimated_tokens = false;
                describe_tokens(&mut span, &request.tokens, source);
                if is_charged {
                    context.correct_prompt(request.tokens.len());
                }
            }
        }
        if !request.tokens.is_empty() {
            state.metrics.relayed_prompts.with_label_values(&[&*named.id, source.label()]).inc();
        }
        generate(state, request).await
    };
    let max_time = state.settings.max_request_time.map(|time| time.0);
    let mut ends: BoxFuture<'static, Error> = Box::pin(shutdown.ends(context.arrived, max_time));
    let started = tokio::select! {
        biased;
        started = start => started,
        error = &mut ends => Err(error),
    };
    let (head, outputs) = started.inspect_err(|_| meter.mark_failed())?;
    drop(memory);
    relayed(*head, outputs, meter, context, ends, running).await
}

/// Starts a request at the engine. Returns the head of the response, and what follows it.
async fn generate(state: &AppState, request: Request) -> Result<(Box<ResponseHead>, OutputStream), Error> {
    let mut outputs = state.engine.generate(request).await?;
    match outputs.next().await {
        Some(Ok(Output::Head(head))) => Ok((head, outputs)),
        Some(Err(error)) => Err(error.into()),
        _ => Err(Error::Failed("the engine sent no head of a response".into())),
    }
}

/// The response for the client, which `outputs` follow after its head.
async fn relayed(
    head: ResponseHead,
    mut outputs: OutputStream,
    mut meter: RelayMeter,
    context: Arc<RequestContext>,
    ends: BoxFuture<'static, Error>,
    running: RunningChoices,
) -> Result<Response, Error> {
    let kind = kind_of(&head.headers);
    meter.head(&head, kind);
    let is_stream = kind == BodyKind::Events;
    let ahead = if is_stream { Ok(ReadAhead::default()) } else { read_ahead(&mut outputs).await };
    let ahead = ahead.inspect_err(|_| meter.mark_failed())?;
    context.stream_started();
    let (is_within_event, is_done, running) = (false, false, Some(running));
    let relay = Relay { outputs, ahead, meter, context, ends, is_stream, is_within_event, is_done, running };
    let mut response = Response::new(Body::new(RelayBody::new(relay)));
    (*response.status_mut(), *response.headers_mut()) = (head.status, head.headers);
    Ok(explained(response, head.explain))
}

/// The request for the engine.
fn engine_request(
    context: &RequestContext,
    model: Arc<str>,
    domain: Domain,
    parts: Parts,
    body: Bytes,
    routing: Routing,
) -> Request {
    let Routing { tokens, source, is_stream, wants_usage, choices, max_tokens, attributes, salts, .. } = routing;
    Request {
        id: Arc::clone(&context.id),
        model,
        tokens,
        generated_tokens: 0,
        domain: salts.iter().fold(domain, |domain, salt| domain.salted(salt)),
        sampling: Sampling::default(),
        stop: StopConditions { max_tokens, ..StopConditions::default() },
        explain: wants_explanation(&parts.headers),
        work: Work::Relay(Arc::new(HttpRequest {
            method: parts.method,
            target: parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/")),
            headers: parts.headers,
            body,
            is_stream,
            wants_usage,
            is_metered: context.key().is_some(),
            private_fields: &PRIVATE_FIELDS,
            upgrade: None,
            continues: None,
        })),
        attributes: RequestAttributes {
            has_estimated_tokens: source == TokenSource::Estimate,
            trace: context.trace(),
            attempts: context.attempts(),
            ..attributes
        },
        group: (choices > 1).then(|| RequestGroup::new(choices)),
    }
}
