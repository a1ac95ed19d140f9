//! What an engine is asked for: the prompt, how tokens are chosen and when they end, and which part of the work.

use super::{Attempts, HttpRequest, may_be_repeated};
use bytes::Bytes;
use kvbm::{Domain, Priority, Retention};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::time::Instant;

/// One piece of work.
#[derive(Clone, Debug)]
pub struct Request {
    /// Identifies the request in logs and traces.
    pub id: Arc<str>,
    /// The model's id, as in its [`ModelCard`](super::ModelCard).
    pub model: Arc<str>,
    /// The prompt, and after it the tokens that `generated_tokens` counts.
    pub tokens: Arc<[u32]>,
    /// How many of the last `tokens` another engine has generated for this request, until it failed; else 0. They count
    /// as output: for `max_tokens`, `min_tokens` and penalties, and the engine does not return them again.
    pub generated_tokens: usize,
    /// The cache domain of the prompt's blocks.
    pub domain: Domain,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// When to stop.
    pub stop: StopConditions,
    /// Which part of the work the engine does.
    pub work: Work,
    /// Tenant, session, priority, deadline, retention, server, trace and attempts.
    pub attributes: RequestAttributes,
    /// Whether the router explains its decision in [`Tokens::explain`](super::Tokens::explain).
    pub explain: bool,
    /// The group of choices that this request belongs to, when its client asks for more than one for the prompt.
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

    /// Whether it may be sent to another engine although one may have carried it out.
    pub fn may_be_repeated(&self) -> bool {
        match &self.work {
            Work::Relay(http) => may_be_repeated(&http.method, http.target.path()),
            Work::Generate | Work::Prefill | Work::Resume(_) => true,
        }
    }

    /// A request for exactly `tokens` tokens after a prompt, sampled greedily and past end-of-sequence tokens: for
    /// tests and measurements.
    pub fn greedy(id: &str, model: &str, prompt: &[u32], tokens: u32) -> Self {
        Self {
            id: id.into(),
            model: model.into(),
            tokens: prompt.into(),
            generated_tokens: 0,
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

/// Tenant, session, priority, deadline, retention, server, trace and attempts of a request.
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
    /// The tokens of the request are an estimate, and not those that the engine will compute.
    pub has_estimated_tokens: bool,
    /// The stream is dropped when its text has a stop string, so that a dropped stream may have a whole output.
    pub has_stop_strings: bool,
    /// The [server](super::Engine::probed_server) that stores an object which the request names, such as an earlier
    /// response. Engines of other servers get the request only if the model has none of this server.
    pub server: Option<u64>,
    /// Where spans of the request belong; empty if it is not traced.
    pub trace: spans::Context,
    /// The workers that may have computed the request: what its client is charged depends on them.
    pub attempts: Attempts,
}

/// What tells the requests of one conversation from others, before a prompt is tokenized.
#[derive(Clone, Copy, Debug)]
pub struct Conversation<'a> {
    /// The id of the request.
    pub request: &'a str,
    /// Its tenant; empty: none.
    pub tenant: &'a str,
    /// The session that it names.
    pub session: Option<&'a str>,
    /// The model whose server stores an object that the request names, such as the response before.
    pub served_by: Option<&'a str>,
    /// The client's body, if the request is relayed.
    pub body: &'a [u8],
}

/// Which part of the work an engine does.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Work {
    /// Prefill and decode.
    #[default]
    Generate,
    /// Compute the prompt's blocks only, and hand them off.
    Prefill,
    /// Decode, from blocks that another engine has computed, or still computes.
    Resume(Handoff),
    /// Answer the client's HTTP request. The other fields of the [`Request`] then serve routing: `tokens` may be an
    /// estimate, and of `sampling` and `stop` only what the router needs is set.
    Relay(Arc<HttpRequest>),
}

/// Where prefilled blocks are found; opaque to all but engines of one kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Handoff(pub Bytes);

/// How the next token is chosen. The choice is a function of seed and position.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
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
    /// are computed, not cached: the prompt's blocks are not taken from a cache, and
    /// [`PromptReport`](super::PromptReport) shows that.
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
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
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
