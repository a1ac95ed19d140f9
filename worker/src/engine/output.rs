//! What an engine returns: tokens, why they end, and how much of the prompt was cached.

use super::{Handoff, RelayReport, RelayRest, ResponseHead};
use bytes::Bytes;
use kvbm::Level;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// One item of a stream.
#[derive(Clone, Debug)]
pub enum Output {
    /// Tokens that the engine generated.
    Tokens(Tokens),
    /// The prompt's blocks can be fetched as they are computed, for as long as the stream is kept.
    Handoff(Handoff),
    /// All of the prompt's blocks are computed.
    Prefilled,
    /// Status and headers of a relayed response.
    Head(Box<ResponseHead>),
    /// A part of the body of a relayed response, for the client as it is.
    Body(Bytes),
    /// The relayed stream breaks off: the request with which another engine continues it. The next item is the error.
    Rest(Box<RelayRest>),
    /// The end of a relayed response.
    End(RelayReport),
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

impl Tokens {
    /// Number of generated tokens, as `usage` counts them: with the one that ended the request.
    pub fn generated(&self) -> usize {
        let has_end = matches!(self.finish, Some(FinishReason::Stop | FinishReason::StopToken(_)));
        self.ids.len() + usize::from(has_end)
    }
}

/// Log-probabilities (natural logarithm) at one position, from the distribution before temperature and filters.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Logprobs {
    /// Log-probability of the chosen token.
    pub chosen: f32,
    /// The rank of the chosen token: 1 is the likeliest.
    pub rank: u32,
    /// The likeliest tokens, likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// The token that ended a request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
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
