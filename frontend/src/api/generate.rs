//! The way of every request that generates, whatever its shape: read, understand, start, then answer whole or as a stream.

use super::sse::{self, Chunks};
use crate::error::{CONTEXT, Error};
use crate::http::{Shutdown, Ticket, body};
use crate::limits::OfConnection;
use crate::model::{Model, too_long};
use crate::output::{FinishReason, Generation, Order, Piece, StopReason, TokenLogprobs};
use crate::params::{Controls, Delivery, Fields, scheduling};
use crate::state::Gate;
use async_openai::types::chat::CompletionUsage;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use std::fmt::Write;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio_util::sync::CancellationToken;
use worker::engine::Logprobs;

/// Asks for the router's decision, and carries it back.
const EXPLAIN: HeaderName = HeaderName::from_static("x-blockyard-explain");
/// Clients and proxies refuse heads of more than 8 to 16 KiB.
const EXPLAIN_BYTES_MAX: usize = 6 << 10;

/// A shape of request and answer.
pub(crate) trait Endpoint: Chunks + Sized {
    /// What the ids of its answers begin with.
    const ID: &'static str;
    /// Its route.
    const PATH: &'static str;
    /// What its prompt is called.
    const PROMPT: &'static str;

    /// Checks every field, and makes the prompts.
    ///
    /// Stops early when the client is gone.
    fn understand(
        fields: Fields,
        model: &Arc<Model>,
        envelope: Envelope,
        gone: &CancellationToken,
    ) -> Result<Understood<Self>, Error>;

    /// The answer in one piece.
    fn whole(self, choices: Vec<Choice>, usage: CompletionUsage) -> Response;
}

/// What a request turned out to ask for.
pub(crate) struct Understood<E> {
    pub(crate) prompts: Vec<Arc<[u32]>>,
    pub(crate) controls: Controls,
    /// Fields that are not known.
    pub(crate) unknown: u64,
    /// Writes the answer.
    pub(crate) endpoint: E,
}

/// What every part of an answer repeats.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

/// A choice that has ended.
#[derive(Default)]
pub(crate) struct Choice {
    pub(crate) text: String,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) end_logprobs: Option<TokenLogprobs>,
    pub(crate) prompt_logprobs: Vec<Logprobs>,
    pub(crate) ids: Vec<u32>,
}

/// Answers a request.
pub(crate) async fn answer<E: Endpoint>(State(gate): State<Arc<Gate>>, request: Request) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    let ticket = parts.extensions.get::<Arc<Ticket>>().expect("the outermost layer inserts a ticket").clone();
    let shutdown = parts.extensions.get::<Shutdown>().cloned().unwrap_or_default();

    let tenant = urgency::tenant(&parts.headers, gate.settings.tenant_header.as_ref())?;
    ticket.of_tenant(&tenant);
    let deadline = urgency::deadline_of(&parts.headers)?;
    let body = body::read(&parts.headers, body, &gate.settings, &gate.bodies).await?;
    let body::Held { bytes, share } = body;
    let turn = gate.lanes.turn(bytes.len(), share).await;
    let mut fields = turn.run(move || Fields::parse(&bytes)).await?;
    let id = fields.text("model")?.ok_or_else(|| fields.missing("model"))?;
    let model = gate.models.get(&*gate.engine, &id).await?;

    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let envelope = Envelope { id: format!("{}{}", E::ID, ticket.id), created, model: id };
    let asked = model.clone();
    // When the client goes away, this future is dropped, and the work learns of it.
    let gone = CancellationToken::new();
    let _when_dropped = gone.clone().drop_guard();
    let Understood { prompts, mut controls, unknown, endpoint } =
        turn.run(move || E::understand(fields, &asked, envelope, &gone)).await?;
    drop(turn);
    gate.metrics.unknown_fields.with_label_values(&[E::PATH]).inc_by(unknown);
    // A header is the word of whoever runs the client; the fields may be a library's.
    controls.session = urgency::session_of(&parts.headers).or(controls.session);

    let (explain, delivery) = (wants_explanation(&parts.headers), controls.delivery);
    let deadline = deadline.into_iter().chain(controls.deadline).min().map(|within| ticket.arrived + within);
    let domain = controls.cache_salts.iter().fold(gate.domains.of(&tenant), |domain, salt| domain.salted(salt));
    let count = prompts.len() * controls.n as usize;
    let running = gate.choices.start(count, parts.extensions.get::<OfConnection>(), &tenant)?;
    let order = Order { model, prompts, controls, tenant, domain, deadline, explain, running };
    let respond = async {
        let generation = Generation::start(&gate.engine, order, ticket.clone()).await?;
        match delivery {
            Delivery::Whole => whole(generation, endpoint).await,
            Delivery::Stream { .. } => streamed(generation, endpoint, explain, ticket, shutdown.clone()).await,
        }
    };
    tokio::select! {
        biased;
        response = respond => response.map_err(|error: Error| error.about(E::PROMPT)),
        () = shutdown.cut() => Err(Error::ShuttingDown),
    }
}

async fn whole<E: Endpoint>(mut generation: Generation, endpoint: E) -> Result<Response, Error> {
    let mut choices: Vec<Choice> = (0..generation.choices()).map(|_| Choice::default()).collect();
    let mut explanation = None;
    while let Some(piece) = generation.next().await {
        let piece = piece?;
        let choice = &mut choices[piece.choice];
        choice.text.push_str(&piece.text);
        choice.logprobs.extend(piece.logprobs);
        choice.finish = piece.finish;
        choice.stop_reason = piece.stop_reason;
        choice.end_logprobs = piece.end_logprobs;
        choice.prompt_logprobs.extend(piece.prompt_logprobs);
        choice.ids.extend(piece.ids);
        explanation = explanation.or(piece.explain);
    }
    let usage = generation.usage();
    Ok(explained(endpoint.whole(choices, usage), explanation))
}

/// The head of a stream goes out when the engine has accepted the request, or, if it shall carry the router's decision, with
/// the first output.
async fn streamed<E: Endpoint>(
    mut generation: Generation,
    endpoint: E,
    explain: bool,
    ticket: Arc<Ticket>,
    shutdown: Shutdown,
) -> Result<Response, Error> {
    let mut ready: Vec<Piece> = Vec::new();
    while explain && !ready.iter().any(|piece| piece.choice == 0) {
        let Some(piece) = generation.next().await else { break };
        ready.push(piece?);
    }
    let explanation = ready.iter_mut().find_map(|piece| piece.explain.take());
    Ok(explained(sse::response(generation, ready, endpoint, ticket, shutdown), explanation))
}

fn wants_explanation(headers: &HeaderMap) -> bool {
    headers.get(EXPLAIN).is_some_and(|value| matches!(value.as_bytes(), b"1" | b"true"))
}

fn explained(mut response: Response, explanation: Option<Arc<str>>) -> Response {
    if let Some(explanation) = explanation {
        response.headers_mut().insert(EXPLAIN, header(&explanation));
    }
    response
}

/// JSON as a header: what is not ASCII is escaped, and what is too long for a head is left out and said to be.
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
    let too_long = ascii.len() > EXPLAIN_BYTES_MAX;
    let value = if too_long { format!("{{\"omitted_bytes\":{}}}", ascii.len()) } else { ascii };
    HeaderValue::try_from(value).expect("printable ASCII is a header value")
}

/// Refuses what does not fit the model's context, in OpenAI's words.
pub(crate) fn fit(param: &str, prompt: usize, controls: &Controls, context: usize) -> Result<(), Error> {
    // A prompt that fills the context alone has no place for the row after its last token.
    let wanted = controls.stop.max_tokens.unwrap_or(1).max(1) as usize;
    if prompt + wanted <= context {
        return Ok(());
    }
    if prompt >= context {
        return Err(too_long(param, context, &prompt.to_string()));
    }
    let asked = prompt + wanted;
    let message = format!(
        "This model's maximum context length is {context} tokens. However, you requested {asked} tokens ({prompt} in the \
         {param}, {wanted} in the completion). Please reduce the length of the {param} or completion."
    );
    Err(Error::invalid(param, CONTEXT, message))
}

/// Refuses an empty prompt: there is nothing to go on from.
pub(crate) fn not_empty(param: &str, prompt: &[u32]) -> Result<(), Error> {
    if prompt.is_empty() {
        return Err(Error::invalid(param, "invalid_value", format!("Invalid '{param}': it has no tokens.")));
    }
    Ok(())
}
