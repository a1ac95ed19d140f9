//! What a relay must know of a chunk of a streamed answer: whether it carries output, ends the answer, or has the
//! usage.
//!
//! The members in question are read and all others skipped, so that the text of an answer cannot be taken for one of
//! them. [`Relevance::of`] says without reading whether a chunk must be read at all.
//!
//! Known are the streams of chat completions, completions, Responses, Anthropic's messages and Cohere's chat, and the
//! usage in those of SGLang's `/generate`. A chunk of another kind counts as output: it is forwarded at once.

mod scanner;
mod wire;

use memchr::memmem::Finder;
use std::borrow::Cow;
use std::sync::LazyLock;
use wire::{Choices, Wire, WireUsage};
use worker::engine::response_id;

pub(super) use scanner::UsageScanner;

/// What a chunk means for the relay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// What it carries.
    pub kind: Kind,
    /// Whether an answer may end with this chunk.
    pub finished: bool,
    /// The usage of the request so far.
    pub usage: Option<Usage>,
    /// The position of the item in its batch, if the usage is that of one item only.
    pub item: Option<u64>,
    /// A hash of the id of the response, if the event is about one.
    pub response_id: Option<u64>,
}

/// What a chunk carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// No output yet: the role of the message, an announcement, a ping.
    Preamble,
    /// Output, a finish reason, or something unknown.
    Output,
    /// Only the usage: `"choices":[]` and a `usage` object.
    Usage,
    /// `[DONE]`.
    Done,
    /// An error instead of output.
    Error,
}

/// Whether a chunk must be read once output has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Relevance {
    /// One more piece of output.
    Output,
    /// Output, and at its end the [`NULL_USAGE`] that some engines add to each chunk.
    NullUsage,
    /// Anything else.
    Read,
}

// Made once: a search of one chunk takes less time than its preparation.
static CHOICES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""choices":["#));
/// The name of the usage, with its quotes.
static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""usage""#));

/// How engines write an absent usage: the last member of a chunk. In valid JSON these bytes at the end are nothing
/// else: the brace closes the chunk, and a quote after a comma starts a name unless it ends a string, which no name can
/// follow.
pub const NULL_USAGE: &[u8] = br#","usage":null}"#;

/// The tokens that an engine counted. `None` where it does not say.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Usage {
    /// Tokens of the prompt, those from the cache included.
    pub prompt_tokens: Option<u64>,
    /// Tokens of the answer.
    pub completion_tokens: Option<u64>,
    /// Tokens of the prompt that were in the cache.
    pub cached_tokens: Option<u64>,
}

impl Relevance {
    /// Looks at the payload for a few byte strings only.
    ///
    /// `"usage"` with its quotes is a name or a string of just this word; in any other string its quotes are escaped.
    pub fn of(data: &[u8]) -> Self {
        if CHOICES.find(data).is_none() {
            Self::Read
        } else if data.ends_with(NULL_USAGE) {
            Self::NullUsage
        } else if USAGE.find(data).is_none() {
            Self::Output
        } else {
            Self::Read
        }
    }
}

impl Chunk {
    /// Reads the payload of an event.
    pub fn read(data: &[u8]) -> Self {
        if data.trim_ascii() == b"[DONE]" {
            return Self { finished: true, ..Self::unread(Kind::Done) };
        }
        let Ok(wire) = serde_json::from_slice::<Wire<'_>>(data) else {
            return match String::from_utf8_lossy(data) {
                // A text within it may be cut within a character.
                Cow::Owned(text) => Self::read(text.as_bytes()),
                // What is no JSON object is forwarded. It may be the first half of one.
                Cow::Borrowed(_) => Self::unread(Kind::Output),
            };
        };
        let inner = wire.inner();
        let reported = wire.usage.or(inner.usage).or_else(|| wire.end_usage()).filter(|usage| usage.get() != "null");
        let item = wire.item().filter(|_| reported.is_none());
        let usage = reported.or(item.map(|(_, usage)| usage));
        let usage = usage.and_then(|usage| Usage::read(usage.get().as_bytes()));
        let (kind, finished) = if wire.is_error() {
            (Kind::Error, true)
        } else if let Some(choices) = wire.choices {
            of_choices(serde_json::from_str(choices.get()).unwrap_or(Choices::UNKNOWN), reported.is_some())
        } else {
            wire.event_type().map_or((Kind::Output, true), of_event_type)
        };
        Self { kind, finished, usage, item: item.map(|(index, _)| index), response_id: inner.response_id() }
    }

    /// A chunk of which no member is read.
    fn unread(kind: Kind) -> Self {
        Self { kind, finished: false, usage: None, item: None, response_id: None }
    }
}

fn of_choices(choices: Choices, has_usage: bool) -> (Kind, bool) {
    match choices {
        Choices { output: true, finished, .. } => (Kind::Output, finished),
        Choices { count: 0, .. } if has_usage => (Kind::Usage, true),
        Choices { .. } => (Kind::Preamble, false),
    }
}

/// Of the `type` of an event of Responses, messages and Cohere's chat.
fn of_event_type(name: &str) -> (Kind, bool) {
    match name {
        "message_start"
        | "message-start"
        | "content-start"
        | "ping"
        | "content_block_start"
        | "response.created"
        | "response.queued"
        | "response.in_progress"
        | "response.output_item.added"
        | "response.content_part.added"
        | "response.reasoning_part.added"
        | "response.reasoning_summary_part.added" => (Kind::Preamble, false),
        "content_block_delta"
        | "content_block_stop"
        | "content-delta"
        | "content-end"
        | "tool-plan-delta"
        | "tool-call-start"
        | "tool-call-delta"
        | "tool-call-end"
        | "citation-start"
        | "citation-end" => (Kind::Output, false),
        "response.completed" | "response.incomplete" | "response.cancelled" => (Kind::Output, true),
        name => (Kind::Output, !name.starts_with("response.")),
    }
}

impl Usage {
    /// Reads a `usage` object of any of the APIs.
    pub fn read(json: &[u8]) -> Option<Self> {
        WireUsage::read(json).map(Self::from)
    }

    /// Adds what a later chunk says. Messages have the tokens of the prompt in the first and those of the answer in the
    /// last chunk.
    pub fn update(&mut self, later: Self) {
        self.prompt_tokens = later.prompt_tokens.or(self.prompt_tokens);
        self.completion_tokens = later.completion_tokens.or(self.completion_tokens);
        self.cached_tokens = later.cached_tokens.or(self.cached_tokens);
    }

    /// With the usage of another item of a batch. Its prompt may be another one, or the same for another choice, so the
    /// tokens of the prompts together are not known.
    fn plus_item(self, item: Self) -> Self {
        let both = [self.completion_tokens, item.completion_tokens].into_iter().flatten();
        Self { completion_tokens: both.reduce(u64::saturating_add), prompt_tokens: None, cached_tokens: None }
    }
}

impl From<WireUsage> for Usage {
    fn from(wire: WireUsage) -> Self {
        let WireUsage { prompt_tokens, completion_tokens, input_tokens, output_tokens, .. } = wire;
        // Messages count the tokens from the cache apart, all other APIs within the prompt.
        let apart = [wire.cache_read_input_tokens, wire.cache_creation_input_tokens];
        let input = input_tokens.map(|input| apart.into_iter().flatten().fold(input, u64::saturating_add));
        let prompt_tokens = prompt_tokens.or(input);
        // Some engines say the tokens of the prompt and of both only. Those of embeddings are equal.
        let rest = || wire.total_tokens?.checked_sub(prompt_tokens?);
        Self {
            prompt_tokens,
            completion_tokens: completion_tokens.or(output_tokens).or_else(rest),
            cached_tokens: wire.cached_tokens.or(wire.cache_read_input_tokens),
        }
    }
}

#[cfg(test)]
mod tests;
