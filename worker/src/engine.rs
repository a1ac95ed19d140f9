//! An [`Engine`] turns a request into a stream of tokens. Everything that serves is an `Engine`: a model runtime, a worker
//! on another machine, the router. The front door holds one `Arc<dyn Engine>` and never learns which.

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

/// Parts of a [`Request`], for those who know engines and no blocks.
pub use kvbm::{Domain, Priority, Retention};

/// Turns requests into streams of tokens.
///
/// # Contract
/// - `generate` MUST refuse what it can see to be impossible (unknown model, prompt longer than the context) before it
///   resolves; what goes wrong later arrives as the stream's last item.
/// - The stream MUST end with exactly one [`Tokens`] whose `finish` is set, or with an error, or (for
///   [`Work::Prefill`]) with exactly one [`Output::Handoff`], after which it MUST stay open, keeping the blocks alive,
///   until it is dropped.
/// - A stream that is not read MUST NOT hold up other requests: the engine stops generating for it, gives its place in the batch and
///   its memory to them, and MAY end it with [`Error::Unread`] after half a minute.
/// - Dropping the future or the stream cancels the request; the engine MUST have stopped computing for it within one step.
/// - The same request with the same seed MUST give the same tokens, whatever else is running.
/// - An error MUST say whose it is, for that decides whether the engine is asked again: the request's own
///   ([`Error::UnknownModel`], [`Error::PromptTooLong`], [`Error::Invalid`], [`Error::Late`], [`Error::Unread`]) say nothing about the engine;
///   [`Error::Overloaded`] is back-pressure, which is obeyed and held against nobody; [`Error::Unavailable`] and
///   [`Error::Failed`] are faults. An engine that passes on what a server says MUST take its 429 and its 503 for
///   `Overloaded`, for as long as `Retry-After` says or else for a second; `Unavailable` is one that nobody reaches.
pub trait Engine: Send + Sync + 'static {
    /// Starts a request.
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>>;

    /// What is served here now. Never fails because one of many is down.
    fn models(&self) -> Vec<Arc<ModelCard>>;

    /// Whether requests can be served now.
    fn readiness(&self) -> Readiness;

    /// What does not work although requests are served, in words for an operator: answers may be slower, none is wrong.
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
    /// Not now, and why, in words for an operator.
    NotReady(String),
}

/// One piece of work.
#[derive(Clone, Debug)]
pub struct Request {
    /// Names the request in logs and traces; unique enough for a person.
    pub id: Arc<str>,
    /// The model's id, as in its [`ModelCard`].
    pub model: Arc<str>,
    /// The prompt.
    pub tokens: Arc<[u32]>,
    /// Whose cache the prompt's blocks belong to.
    pub domain: Domain,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// When to stop.
    pub stop: StopRule,
    /// What is wanted of the engine.
    pub work: Work,
    /// Who asks, how urgently, and how long the blocks are to be kept.
    pub terms: Terms,
    /// The client wants the router's decision explained in [`Tokens::explain`].
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

    /// Asks for so many tokens after a prompt, the likeliest each, whether or not the model would end before: for tests and
    /// measurements.
    pub fn greedy(id: &str, model: &str, prompt: &[u32], tokens: u32) -> Self {
        Self {
            id: id.into(),
            model: model.into(),
            tokens: prompt.into(),
            domain: Domain::shared(),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            stop: StopRule { max_tokens: Some(tokens), ignore_eos: true, ..StopRule::default() },
            work: Work::Generate,
            terms: Terms::default(),
            explain: false,
            group: None,
        }
    }
}

/// How long a request takes to its first output, on the machine's clock. Returns when the stream has ended.
pub async fn time_to_first(engine: &dyn Engine, request: Request) -> Result<Duration, Error> {
    let began = std::time::Instant::now();
    let mut stream = engine.generate(request).await?;
    let mut first = None;
    while let Some(output) = stream.next().await {
        output?;
        first.get_or_insert_with(|| began.elapsed());
    }
    first.ok_or_else(|| Error::Failed("the stream was empty".into()))
}

/// Who asks, how urgently, and how long the blocks are to be kept.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Terms {
    /// Who is to get a fair share; empty: nobody in particular.
    pub tenant: Arc<str>,
    /// What this request belongs together with: a conversation, or whatever a client names as one.
    pub session: Option<Arc<str>>,
    /// Whose turn it is when not all can be served at once.
    pub priority: Priority,
    /// When the first token is no longer worth computing.
    pub deadline: Option<Instant>,
    /// How long the blocks are to be kept.
    pub retention: Retention,
}

/// What is wanted of an engine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Work {
    /// Prefill and decode.
    #[default]
    Generate,
    /// Only compute the prompt's blocks, and hand them over.
    Prefill,
    /// Decode from blocks that another engine computed.
    Resume(Handoff),
}

/// Where prefilled blocks are to be had; opaque to everyone but the engines of one kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Handoff(pub Bytes);

/// How the next token is chosen. Sampling is a function of seed and position.
#[derive(Clone, PartialEq, Debug)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus; 1 is off.
    pub top_p: f32,
    /// Only the k likeliest; `None` is off.
    pub top_k: Option<u32>,
    /// Only tokens at least this fraction as likely as the likeliest; 0 is off.
    pub min_p: f32,
    /// Fixes the choice. An engine that gets `None` draws one.
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
    /// Report the log-probability of each token of the prompt after those before it, and those of this many alternatives.
    /// They come from computing the prompt: cached blocks are not used for it, and [`PromptReport`] says so.
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

/// When a request ends. Stop *strings* are the front door's, which sees text: it drops the stream.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StopRule {
    /// Generate at most this many; `None`: up to the context. With 0 only the prompt is computed.
    pub max_tokens: Option<u32>,
    /// Generate at least this many before an end-of-sequence or stop token may be chosen.
    pub min_tokens: u32,
    /// End at these too, besides the model's own end-of-sequence tokens.
    pub stop_tokens: Vec<u32>,
    /// Go on past the model's end-of-sequence tokens.
    pub ignore_eos: bool,
}

/// One item of a stream.
#[derive(Clone, Debug)]
pub enum Output {
    /// Tokens that the engine generated.
    Tokens(Tokens),
    /// The engine's own bytes for the client, with the token ids in them when known.
    Frame(Bytes, Option<Vec<u32>>),
    /// The prompt's blocks are ready to be fetched, for as long as the stream is kept.
    Handoff(Handoff),
}

/// Tokens, one or more steps' worth.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Tokens {
    /// In order. An end-of-sequence or stop token that ended the request is not among them.
    pub ids: Vec<u32>,
    /// One per id when asked for, else empty.
    pub logprobs: Vec<Logprobs>,
    /// Set on the last item.
    pub finish: Option<Finish>,
    /// Set beside `finish` when a token ended the request and the engine says which.
    pub end: Option<EndToken>,
    /// On the first item, of the prompt's tokens from the second on, when asked for; else empty.
    pub prompt_logprobs: Vec<Logprobs>,
    /// Set on the first item: what the prompt cost.
    pub prompt: Option<PromptReport>,
    /// Set on the first item when asked for: why the request went where it went, as one line of JSON.
    pub explain: Option<Arc<str>>,
}

/// Log-probabilities at one position, natural logarithm, from the distribution before temperature and cuts.
#[derive(Clone, PartialEq, Debug)]
pub struct Logprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// One more than the number of likelier tokens.
    pub rank: u32,
    /// The likeliest tokens, likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// The token that ended a request.
#[derive(Clone, PartialEq, Debug)]
pub struct EndToken {
    /// An end-of-sequence or stop token.
    pub id: u32,
    /// When asked for.
    pub logprobs: Option<Logprobs>,
}

/// Why a stream ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// An end-of-sequence token.
    Stop,
    /// One of the request's own stop tokens.
    StopToken(u32),
    /// `max_tokens`, or the end of the context.
    Length,
}

/// What a prompt cost: how much of it was computed, and where the rest came from.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct PromptReport {
    /// Prompt tokens that nobody computed for this request, and where their blocks were found.
    pub cached: Vec<(Level, u32)>,
    /// Prompt tokens that were computed for this request, by whichever worker.
    pub computed: u32,
    /// Prompt tokens whose blocks came from a prefill worker's memory, whether it computed or found them.
    pub handed_over: u32,
    /// From the engine's acceptance to the first step that had the request in it.
    pub queued: Duration,
    /// The worker that answers, where a router chose one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<Arc<str>>,
}

impl PromptReport {
    /// Prompt tokens that nobody computed for this request, from all tiers.
    pub fn cached_tokens(&self) -> u32 {
        self.cached.iter().map(|(_, tokens)| tokens).sum()
    }
}

/// A request was refused or failed. The HTTP status is the front door's business.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// Nobody here serves this model.
    #[error("model `{0}` does not exist")]
    UnknownModel(String),
    /// Prompt and wanted tokens do not fit the model.
    #[error("prompt of {prompt} tokens exceeds the context of {context} tokens")]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens that fit, prompt and output together.
        context: usize,
    },
    /// The request asks for something that this engine cannot do.
    #[error("{field}: {problem}")]
    Invalid {
        /// The request's field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// Too much is waiting. Try again after the time.
    #[error("overloaded, try again in {} s", .retry_after.as_secs())]
    Overloaded {
        /// When a place is likely free.
        retry_after: Duration,
    },
    /// The first token would come after the request's deadline.
    #[error("the deadline cannot be met")]
    Late,
    /// The stream's output was not read for so long.
    #[error("the output was not read for {} s", .0.as_secs())]
    Unread(Duration),
    /// Nobody is there who could serve it. Whoever is there and cannot now is overloaded.
    #[error("unavailable: {0}")]
    Unavailable(String),
    /// The engine failed.
    #[error("engine failed: {0}")]
    Failed(String),
}

/// A model as its clients see it: what it is called, what fits, and how text becomes tokens.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// The id that clients send.
    pub id: String,
    /// Names the weights in block names: two cards with the same identity share an index.
    pub identity: String,
    /// When the model was made or loaded, seconds since 1970.
    pub created: u64,
    /// Prompt and output tokens together.
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
    /// What the model's makers recommend where a request does not say how to sample.
    #[serde(default)]
    pub sampling: SamplingDefaults,
    /// Weights made up, text meaningless: said to people who ask.
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
