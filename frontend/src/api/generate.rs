//! The path of every request that generates: read the body, parse it, start the generation, then respond in full or as
//! a stream.

use super::caller;
use super::relay::{self, Contents, Incoming};
use super::sse::{self, ChunkHead, ChunkWriter};
use crate::error::{CONTEXT, Error};
use crate::http::{ConnectionInfo, RequestContext, Shutdown, body};
use crate::model::{EncodeJob, ServedModel, prompt_too_long};
use crate::output::{ChoiceDelta, FinishReason, Generation, GenerationRequest, StopReason, TokenLogprobs};
use crate::params::{Delivery, Fields, GenerationParams, peek_salts, scheduling};
use crate::state::AppState;
use async_openai::types::chat::CompletionUsage;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use futures::future::BoxFuture;
use serde::Serialize;
use spans::Kind;
use std::fmt::Write;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use worker::engine::Logprobs;

/// In a request: asks for the router's decision. In the response: the decision as JSON.
const EXPLAIN: HeaderName = HeaderName::from_static("x-blockyard-explain");
/// Maximum size of the explanation in bytes: clients and proxies reject response heads of more than 8 to 16 KiB.
const MAX_EXPLAIN_BYTES: usize = 6 << 10;

/// An endpoint that generates: the format of its requests and responses.
pub(crate) trait Endpoint: ChunkWriter + Sized {
    /// Prefix of the ids of its responses.
    const ID: &'static str;
    /// The route, also the `endpoint` label of metrics.
    const PATH: &'static str;
    /// The field that holds the prompt, as errors name it.
    const PROMPT: &'static str;

    /// Checks every field and tokenizes the prompts.
    ///
    /// Returns `Error::ClientClosed` when `job` is cancelled while it tokenizes.
    fn parse(
        fields: Fields,
        model: &Arc<ServedModel>,
        envelope: Envelope,
        job: &EncodeJob,
    ) -> Result<Parsed<Self>, Error>;

    /// The response of a request that does not stream.
    fn full_response(self, choices: Vec<CompletedChoice>, usage: CompletionUsage) -> Response;
}

/// A parsed request.
pub(crate) struct Parsed<E> {
    pub(crate) prompts: Vec<Arc<[u32]>>,
    pub(crate) params: GenerationParams,
    /// Number of unknown top-level fields, which were ignored.
    pub(crate) unknown: u64,
    /// Writes the response.
    pub(crate) endpoint: E,
}

/// Fields that every response and every chunk repeats.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

/// The fields of an [`Envelope`] as JSON has them.
#[derive(Serialize)]
struct EnvelopeFields<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
}

/// OpenAI's response of a request that does not stream.
#[derive(Serialize)]
pub(crate) struct FullResponse<'a, C> {
    #[serde(flatten)]
    envelope: EnvelopeFields<'a>,
    choices: Vec<C>,
    usage: CompletionUsage,
}

impl Envelope {
    fn fields(&self, object: &'static str) -> EnvelopeFields<'_> {
        EnvelopeFields { id: &self.id, object, created: self.created, model: &self.model }
    }

    /// The beginning of the chunks of a stream.
    pub(crate) fn chunk_head(&self, object: &'static str) -> ChunkHead {
        ChunkHead::new(&self.fields(object))
    }

    /// The response with these choices.
    pub(crate) fn full_response<C>(
        &self,
        object: &'static str,
        choices: Vec<C>,
        usage: CompletionUsage,
    ) -> FullResponse<'_, C> {
        FullResponse { envelope: self.fields(object), choices, usage }
    }
}

/// A choice with all of its output, for a response that does not stream.
#[derive(Default)]
pub(crate) struct CompletedChoice {
    pub(crate) text: String,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) end_logprobs: Option<TokenLogprobs>,
    pub(crate) prompt_logprobs: Vec<Logprobs>,
    pub(crate) ids: Vec<u32>,
}

/// The handler of an endpoint that generates.
pub(crate) async fn handle<E: Endpoint>(
    State(state): State<Arc<AppState>>,
    request: Request,
) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    let context = RequestContext::of(&parts.extensions);
    let shutdown = Shutdown::of(&parts.extensions);

    let tenant = caller::tenant(&state, &context, &parts.headers)?;
    let deadline = scheduling::header_deadline(&parts.headers)?;
    let body = body::read(&parts.headers, body, &state.settings, &state.body_memory).await?;
    let body::BufferedBody { bytes, memory } = body;
    let permit = state.work.acquire(bytes.len(), memory).await;
    let unparsed = bytes.clone();
    let mut fields = permit.scan(move || Fields::parse(&unparsed)).await?;
    let card = match caller::named_model(&context, &mut fields)? {
        Some(id) => caller::model(&state, &context, &id)?,
        None => caller::only_model(&state, &context).ok_or_else(|| fields.missing("model"))?,
    };
    if card.is_relayed {
        let incoming = Incoming::read(&state, &card, parts, bytes, Contents::Json(fields), permit).await?;
        return relay::respond(&state, incoming, card).await;
    }
    let model = state.models.get(&*state.engine, &card).await?;

    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let envelope = Envelope { id: format!("{}{}", E::ID, context.id), created, model: card.id.clone() };
    let model_to_parse = model.clone();
    // When the client disconnects, this future is dropped, which cancels the parsing.
    let tenant_domain = state.domains.of(&tenant);
    let job = EncodeJob::new(peek_salts(&fields).fold(tenant_domain.clone(), |domain, salt| domain.salted(&salt)));
    let _cancel_on_drop = job.cancel_on_drop();
    let mut span = context.trace().span("tokenize", Kind::Internal);
    let Parsed { prompts, mut params, unknown, endpoint } =
        permit.run(move || E::parse(fields, &model_to_parse, envelope, &job)).await?;
    span.set("gen_ai.usage.input_tokens", prompts.iter().map(|tokens| tokens.len()).sum::<usize>());
    drop(span);
    drop(permit);
    state.metrics.unknown_fields.with_label_values(&[E::PATH]).inc_by(unknown);
    // The header wins: proxies and operators set it, while a client library may fill the fields.
    params.session = scheduling::header_session(&parts.headers).or(params.session);

    let explain = wants_explanation(&parts.headers);
    let delivery = params.delivery;
    let deadline = deadline.into_iter().chain(params.deadline).min().map(|within| context.arrived + within);
    let domain = params.cache_salts.iter().fold(tenant_domain, |domain, salt| domain.salted(salt));
    let count = prompts.len() * params.n as usize;
    let connection = ConnectionInfo::of(&parts.extensions).map(|connection| &connection.choices);
    let running = state.choices.start(count, connection, &tenant)?;
    context.take_prompt(prompts.iter().map(|tokens| tokens.len()).sum())?;
    let request = GenerationRequest { model, prompts, params, tenant, domain, deadline, explain, running };
    let (arrived, max_time) = (context.arrived, state.settings.max_request_time.map(|time| time.0));
    let respond = async {
        let generation = Generation::start(&state.engine, request, context.clone()).await?;
        match delivery {
            Delivery::Full => full_response(generation, endpoint).await,
            Delivery::Stream { .. } => {
                let ends = Box::pin(shutdown.ends(arrived, max_time));
                streamed_response(generation, endpoint, explain, context, ends).await
            }
        }
    };
    tokio::select! {
        biased;
        response = respond => response.map_err(|error: Error| error.with_prompt_field(E::PROMPT)),
        error = shutdown.ends(arrived, max_time) => Err(error),
    }
}

async fn full_response<E: Endpoint>(mut generation: Generation, endpoint: E) -> Result<Response, Error> {
    let mut choices: Vec<CompletedChoice> = (0..generation.choices()).map(|_| CompletedChoice::default()).collect();
    let mut explanation = None;
    while let Some(delta) = generation.next().await {
        let delta = delta?;
        let choice = &mut choices[delta.choice];
        choice.text.push_str(&delta.text);
        choice.logprobs.extend(delta.logprobs);
        choice.finish = delta.finish;
        choice.stop_reason = delta.stop_reason;
        choice.end_logprobs = delta.end_logprobs;
        choice.prompt_logprobs.extend(delta.prompt_logprobs);
        choice.ids.extend(delta.ids);
        explanation = explanation.or(delta.explain);
    }
    let usage = generation.usage();
    Ok(explained(endpoint.full_response(choices, usage), explanation))
}

/// Sends the head of a stream when the engine has accepted the request, or with the first output when the head carries
/// the router's decision.
async fn streamed_response<E: Endpoint>(
    mut generation: Generation,
    endpoint: E,
    explain: bool,
    context: Arc<RequestContext>,
    ends: BoxFuture<'static, Error>,
) -> Result<Response, Error> {
    let mut ready: Vec<ChoiceDelta> = Vec::new();
    while explain && !ready.iter().any(|delta| delta.choice == 0) {
        let Some(delta) = generation.next().await else { break };
        ready.push(delta?);
    }
    let explanation = ready.iter_mut().find_map(|delta| delta.explain.take());
    Ok(explained(sse::response(generation, ready, endpoint, context, ends), explanation))
}

pub(super) fn wants_explanation(headers: &HeaderMap) -> bool {
    headers.get(EXPLAIN).is_some_and(|value| matches!(value.as_bytes(), b"1" | b"true"))
}

pub(super) fn explained(mut response: Response, explanation: Option<Arc<str>>) -> Response {
    if let Some(explanation) = explanation {
        response.headers_mut().insert(EXPLAIN, header(&explanation));
    }
    response
}

/// JSON as a header value: other characters than ASCII are escaped; a JSON text over the maximum is replaced by its
/// size.
fn header(json: &str) -> HeaderValue {
    let mut ascii = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            ' '..='~' => ascii.push(c),
            c => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| {
                write!(ascii, "\\u{unit:04x}").expect("writing to a string does not fail");
            }),
        }
    }
    let too_long = ascii.len() > MAX_EXPLAIN_BYTES;
    let value = if too_long { format!("{{\"omitted_bytes\":{}}}", ascii.len()) } else { ascii };
    HeaderValue::try_from(value).expect("printable ASCII is a header value")
}

/// Rejects a prompt and `max_tokens` that together exceed the model's context of `context` tokens, in OpenAI's words.
pub(crate) fn check_fits_context(
    param: &str,
    prompt: usize,
    params: &GenerationParams,
    context: usize,
) -> Result<(), Error> {
    // A prompt that fills the context leaves no position for an output token, even with `max_tokens` 0.
    let wanted = params.stop.max_tokens.unwrap_or(1).max(1) as usize;
    if prompt + wanted <= context {
        return Ok(());
    }
    if prompt >= context {
        return Err(prompt_too_long(param, context, &prompt.to_string()));
    }
    let requested = prompt + wanted;
    let message = format!(
        "This model's maximum context length is {context} tokens. However, you requested {requested} tokens ({prompt} \
         in the {param}, {wanted} in the completion). Please reduce the length of the {param} or completion."
    );
    Err(Error::invalid(param, CONTEXT, message))
}

/// Rejects an empty prompt: the model needs at least one token to continue.
pub(crate) fn check_not_empty(param: &str, prompt: &[u32]) -> Result<(), Error> {
    if prompt.is_empty() {
        return Err(Error::invalid(param, "invalid_value", format!("Invalid '{param}': it has no tokens.")));
    }
    Ok(())
}
