//! The [`Engine`] seam: an engine turns a request into a stream of tokens. A model runtime, a worker on another machine
//! and the router are engines. The frontend holds one `Arc<dyn Engine>` and does not know which.

#[cfg(test)]
pub(crate) mod contract;

use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use kvbm::Level;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Parts of a [`Request`], re-exported for crates that do not use kvbm.
pub use kvbm::{Domain, Priority, Retention};

/// Turns requests into streams of tokens.
///
/// # Contract
/// - `generate` MUST reject a request that is recognisably impossible (unknown model, prompt longer than the context)
///   before it resolves; later failures arrive as the last item of the stream.
/// - The stream MUST end with exactly one [`Tokens`] whose `finish` is set, or with an error, or (for
///   [`Work::Prefill`]) with exactly one [`Output::Handoff`], after which it MUST stay open, keeping the blocks
///   alive, until it is dropped.
/// - A stream that is not read MUST NOT delay other requests: the engine stops generating for it, gives its slot in
///   the batch and its memory to other requests, and MAY end it with [`Error::Unread`] after half a minute.
/// - Dropping the future or the stream cancels the request; the engine MUST have stopped computing for it within one
///   step.
/// - The same request with the same seed MUST give the same tokens, whatever else is running.
/// - The kind of an error decides whether the engine is tried again, so it MUST be exact. [`Error::UnknownModel`],
///   [`Error::PromptTooLong`], [`Error::Invalid`], [`Error::DeadlineExceeded`] and [`Error::Unread`] are caused by
///   the request and say nothing about the engine. [`Error::Overloaded`] is back-pressure: the caller waits, and the
///   engine does not count as faulty. [`Error::Unavailable`] and [`Error::Failed`] are faults. An engine that
///   forwards a server's errors MUST map 429 and 503 to `Overloaded`, with the time of `Retry-After` or else one
///   second; `Unavailable` is a server that cannot be reached.
pub trait Engine: Send + Sync + 'static {
    /// Starts a request.
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>>;

    /// The models that are served now. Never fails because one of several engines is unavailable.
    fn models(&self) -> Vec<Arc<ModelCard>>;

    /// Whether requests can be served now.
    fn readiness(&self) -> Readiness;

    /// What does not work although requests are served, as text for an operator. Answers may be slower, but none is
    /// wrong.
    fn degraded(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The stream of one request. Dropping it cancels the request.
pub type OutputStream = BoxStream<'static, Result<Output, Error>>;

/// Whether an engine can serve.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Readiness {
    /// Requests are served.
    Ready,
    /// Requests are not served now; the reason, as text for an operator.
    NotReady(String),
}

/// One piece of work.
#[derive(Clone, Debug)]
pub struct Request {
    /// Identifies the request in logs and traces.
    pub id: Arc<str>,
    /// The model's id, as in its [`ModelCard`].
    pub model: Arc<str>,
    /// The prompt.
    pub tokens: Arc<[u32]>,
    /// The cache domain of the prompt's blocks.
    pub domain: Domain,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// When to stop.
    pub stop: StopConditions,
    /// Which part of the work the engine does.
    pub work: Work,
    /// Tenant, session, priority, deadline and retention.
    pub attributes: RequestAttributes,
    /// Whether the router explains its decision in [`Tokens::explain`].
    pub explain: bool,
    /// The group of choices that this request belongs to, when its client wants more than one for the prompt.
    pub group: Option<RequestGroup>,
}

/// Identifies a group of choices; unique in this process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GroupId(u64);

/// One choice in a group: the requests for the choices of one prompt (`n` of the `OpenAI` API).
///
/// Choice 0 is sent first, and the others once it has its first output, so that they find the prompt's blocks cached. A
/// router reserves capacity for all of them with choice 0, and admits the others with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestGroup {
    id: GroupId,
    choices: u32,
    index: u32,
}

impl RequestGroup {
    /// Choice 0 of a new group of this many choices.
    pub fn new(choices: u32) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { id: GroupId(NEXT.fetch_add(1, Ordering::Relaxed)), choices, index: 0 }
    }

    /// Another choice of the same group.
    #[must_use]
    pub fn choice(self, index: u32) -> Self {
        Self { index, ..self }
    }

    /// The group.
    pub fn id(self) -> GroupId {
        self.id
    }

    /// Number of choices in the group.
    pub fn choices(self) -> u32 {
        self.choices
    }

    /// Position of this choice in the group, from 0.
    pub fn index(self) -> u32 {
        self.index
    }
}

impl Request {
    /// Number of choices to reserve capacity for with this request, itself included.
    pub fn choices(&self) -> u32 {
        self.group.filter(|group| group.index == 0).map_or(1, |group| group.choices)
    }

    /// A request for exactly `tokens` tokens after a prompt, sampled greedily and past end-of-sequence tokens: for
    /// tests and measurements.
    pub fn greedy(id: &str, model: &str, prompt: &[u32], tokens: u32) -> Self {
        Self {
            id: id.into(),
            model: model.into(),
            tokens: prompt.into(),
            domain: Domain::shared(),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            stop: StopConditions { max_tokens: Some(tokens), ignore_eos: true, ..StopConditions::default() },
            work: Work::Generate,
            attributes: RequestAttributes::default(),
            explain: false,
            group: None,
        }
    }
}

/// Measures the time to first token (TTFT) of a request on the machine's clock. Returns when the stream has ended.
pub async fn measure_ttft(engine: &dyn Engine, request: Request) -> Result<Duration, Error> {
    let began = std::time::Instant::now();
    let mut stream = engine.generate(request).await?;
    let mut first = None;
    while let Some(output) = stream.next().await {
        output?;
        first.get_or_insert_with(|| began.elapsed());
    }
    first.ok_or_else(|| Error::Failed("the stream was empty".into()))
}

/// Tenant, session, priority, deadline and retention of a request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RequestAttributes {
    /// The tenant that the fair queue counts the request for; empty: none.
    pub tenant: Arc<str>,
    /// The conversation, or another unit that the client names, that this request belongs to.
    pub session: Option<Arc<str>>,
    /// The order of service when not all requests can be served at once.
    pub priority: Priority,
    /// The time after which the first token is no longer worth computing.
    pub deadline: Option<Instant>,
    /// How long the prompt's blocks are kept.
    pub retention: Retention,
}

/// Which part of the work an engine does.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Work {
    /// Prefill and decode.
    #[default]
    Generate,
    /// Compute the prompt's blocks only, and hand them off.
    Prefill,
    /// Decode, from blocks that another engine computed.
    Resume(Handoff),
}

/// Where prefilled blocks are found; opaque to all but engines of one kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Handoff(pub Bytes);

/// How the next token is chosen. The choice is a function of seed and position.
#[derive(Clone, PartialEq, Debug)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus sampling: the smallest set of tokens with this probability; 1 is off.
    pub top_p: f32,
    /// Only the `k` likeliest tokens; `None` is off.
    pub top_k: Option<u32>,
    /// Only tokens at least this fraction as likely as the likeliest; 0 is off.
    pub min_p: f32,
    /// Makes the choice reproducible. An engine picks a random seed for `None`.
    pub seed: Option<u64>,
    /// Subtracted from the logit of a token per time it was generated; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted once from the logit of a token that was generated; 0 is off.
    pub presence_penalty: f32,
    /// Divides (or multiplies, when negative) the logit of a token in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Report the chosen token's log-probability, and those of this many alternatives.
    pub logprobs: Option<u8>,
    /// Report the log-probability of each prompt token given those before it, and those of this many alternatives. They
    /// are computed, not cached: the prompt's blocks are not taken from a cache, and [`PromptReport`] shows that.
    pub prompt_logprobs: Option<u8>,
}

impl Default for Sampling {
    /// OpenAI's defaults: temperature 1, everything else off.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            seed: None,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

/// When a request ends. Not here: stop *strings*. The frontend, which has the text, drops the stream for them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StopConditions {
    /// Generate at most this many tokens; `None`: up to the context. With 0 only the prompt is computed.
    pub max_tokens: Option<u32>,
    /// Generate at least this many tokens before an end-of-sequence or stop token may be chosen.
    pub min_tokens: u32,
    /// End at these tokens, in addition to the model's end-of-sequence tokens.
    pub stop_tokens: Vec<u32>,
    /// Do not end at the model's end-of-sequence tokens.
    pub ignore_eos: bool,
}

/// One item of a stream.
#[derive(Clone, Debug)]
pub enum Output {
    /// Tokens that the engine generated.
    Tokens(Tokens),
    /// Bytes that the engine formatted for the client, with the token ids in them when known.
    Frame(Bytes, Option<Vec<u32>>),
    /// The prompt's blocks can be fetched, for as long as the stream is kept.
    Handoff(Handoff),
}

/// The tokens of one or more steps.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Tokens {
    /// In order, without an end-of-sequence or stop token that ended the request.
    pub ids: Vec<u32>,
    /// One per id when requested, else empty.
    pub logprobs: Vec<Logprobs>,
    /// Set on the last item.
    pub finish: Option<FinishReason>,
    /// Set with `finish` when a token ended the request and the engine reports it.
    pub end: Option<EndToken>,
    /// On the first item when requested: those of the prompt's tokens from the second on; else empty.
    pub prompt_logprobs: Vec<Logprobs>,
    /// Set on the first item: how much of the prompt was cached and computed.
    pub prompt: Option<PromptReport>,
    /// Set on the first item when requested: the router's decision, as one line of JSON.
    pub explain: Option<Arc<str>>,
}

/// Log-probabilities (natural logarithm) at one position, from the distribution before temperature and filters.
#[derive(Clone, PartialEq, Debug)]
pub struct Logprobs {
    /// Log-probability of the chosen token.
    pub chosen: f32,
    /// The rank of the chosen token: 1 is the likeliest.
    pub rank: u32,
    /// The likeliest tokens, likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// The token that ended a request.
#[derive(Clone, PartialEq, Debug)]
pub struct EndToken {
    /// The id of the end-of-sequence or stop token.
    pub id: u32,
    /// Its log-probabilities, when requested.
    pub logprobs: Option<Logprobs>,
}

/// Why a stream ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-sequence token.
    Stop,
    /// One of the request's own stop tokens.
    StopToken(u32),
    /// `max_tokens`, or the end of the context.
    Length,
}

/// How much of a prompt was computed and where the rest came from.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct PromptReport {
    /// Prompt tokens that were not computed for this request, by the tier that held their blocks.
    pub cached: Vec<(Level, u32)>,
    /// Prompt tokens that were computed for this request, on any worker.
    pub computed: u32,
    /// Prompt tokens whose blocks came from a prefill worker's memory, whether it computed or found them.
    pub handed_over: u32,
    /// Time from acceptance by the engine to the first step with this request.
    pub queued: Duration,
    /// The worker that answers, where a router chose it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<Arc<str>>,
}

impl PromptReport {
    /// Prompt tokens that were not computed for this request, over all tiers.
    pub fn cached_tokens(&self) -> u32 {
        self.cached.iter().map(|(_, tokens)| tokens).sum()
    }
}

/// A request was rejected or failed. The frontend maps it to an HTTP status.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The model is not served here.
    #[error("model `{0}` does not exist")]
    UnknownModel(String),
    /// The prompt, or prompt and requested tokens, do not fit the context.
    #[error("prompt of {prompt} tokens exceeds the context of {context} tokens")]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens that fit, prompt and output together.
        context: usize,
    },
    /// A parameter of the request is not supported or invalid.
    #[error("{field}: {problem}")]
    Invalid {
        /// The request's field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The queue is full. The client may try again after the given time.
    #[error("overloaded, try again in {} s", .retry_after.as_secs())]
    Overloaded {
        /// The estimated time until a request is accepted again.
        retry_after: Duration,
    },
    /// The first token cannot be computed before the request's deadline.
    #[error("the deadline cannot be met")]
    DeadlineExceeded,
    /// The output was not read for this time.
    #[error("the output was not read for {} s", .0.as_secs())]
    Unread(Duration),
    /// No engine is reachable that serves the model. An engine that is reachable but cannot serve now is overloaded
    /// instead.
    #[error("unavailable: {0}")]
    Unavailable(String),
    /// The engine failed.
    #[error("engine failed: {0}")]
    Failed(String),
}

/// A model as its clients see it: its id, its limits, its tokenizer and chat template.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// The id that clients send.
    pub id: String,
    /// Identifies the weights in block hashes: two cards with the same identity share an index.
    pub identity: String,
    /// When the model was created or loaded, in seconds since 1970.
    pub created: u64,
    /// Maximum of prompt and output tokens together.
    pub context: usize,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Size of the vocabulary.
    pub vocabulary: usize,
    /// Tokens that end a sequence.
    pub eos: Vec<u32>,
    /// The text of `tokenizer.json`.
    pub tokenizer: Arc<str>,
    /// The Jinja chat template, when the model has one.
    pub chat_template: Option<String>,
    /// Special tokens that templates name: `bos_token`, `eos_token` and the like, with their text.
    pub special_tokens: Vec<(String, String)>,
    /// The model's recommended sampling, for requests that do not set these fields: the fields of
    /// `generation_config.json` that are in [`Sampling`]. `None`: no recommendation.
    #[serde(default)]
    pub sampling: SamplingDefaults,
    /// The weights are random and the text is meaningless; reported to users.
    pub random_weights: bool,
}

/// What the model's makers recommend where a request does not say how to sample: of `generation_config.json` what is in
/// [`Sampling`] too. `None`: they say nothing.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingDefaults {
    /// As in [`Sampling`].
    pub temperature: Option<f32>,
    /// As in [`Sampling`].
    pub top_p: Option<f32>,
    /// As in [`Sampling`].
    pub top_k: Option<u32>,
    /// As in [`Sampling`].
    pub min_p: Option<f32>,
    /// As in [`Sampling`].
    pub repetition_penalty: Option<f32>,
}

impl fmt::Debug for ModelCard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, identity, context, block_size, .. } = self;
        write!(f, "ModelCard({id}, identity {identity}, context {context}, blocks of {block_size})")
    }
}
