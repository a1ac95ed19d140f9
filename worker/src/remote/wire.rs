//! The encoding of requests and outputs: postcard. A body of outputs is a sequence of them, each after its length.
//!
//! postcard carries no field names or types, so every change of an encoded type needs another protocol number; a golden
//! test fails when one changes.

use crate::engine::{
    Attempts, EndToken, Error, FinishReason, Handoff, Logprobs, Output, PeerMemory, PrefetchError, Prefetched,
    PrefixCopy, PromptReport, Request, RequestAttributes, Sampling, StopConditions, Tokens, Work,
};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use kvbm::{Domain, Level, Priority, Retention, SequenceHash};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Why bytes cannot be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the message is not valid")]
pub(super) struct Invalid;

/// A request cannot be sent to another process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NotSent;

/// A request without what only the router uses: the group of choices, the explanation.
#[derive(Serialize, Deserialize)]
struct WireRequest {
    id: Arc<str>,
    model: Arc<str>,
    tokens: Arc<[u32]>,
    generated_tokens: usize,
    /// Tenant key and root of the cache domain.
    domain: ([u8; 32], [u8; 32]),
    sampling: Sampling,
    stop: StopConditions,
    work: WireWork,
    tenant: Arc<str>,
    session: Option<Arc<str>>,
    priority: Priority,
    /// Time left until the deadline when the request was sent. Clocks of machines differ.
    remaining: Option<Duration>,
    retention: WireRetention,
}

#[derive(Serialize, Deserialize)]
enum WireWork {
    Generate,
    Prefill,
    Resume(Vec<u8>),
}

#[derive(Serialize, Deserialize)]
struct WireRetention {
    ttl: Option<Duration>,
    pin: Option<Duration>,
    store: bool,
    priority: Priority,
}

#[derive(Serialize, Deserialize)]
enum WireOutput {
    Tokens(WireTokens),
    Handoff(Vec<u8>),
    Failed(WireError),
    Prefilled,
}

#[derive(Serialize, Deserialize)]
struct WireTokens {
    ids: Vec<u32>,
    logprobs: Vec<Logprobs>,
    finish: Option<FinishReason>,
    end: Option<EndToken>,
    prompt_logprobs: Vec<Logprobs>,
    prompt: Option<WireReport>,
}

#[derive(Serialize, Deserialize)]
struct WireReport {
    cached: Vec<(Level, u32)>,
    computed: u32,
    handed_over: u32,
    queued: Duration,
}

#[derive(Serialize, Deserialize)]
struct WirePrefixCopy {
    blocks: Arc<[SequenceHash]>,
    peer: Option<Vec<u8>>,
}

#[derive(Serialize, Deserialize)]
enum WireError {
    UnknownModel(String),
    PromptTooLong { prompt: u64, context: u64 },
    Invalid { field: String, problem: String },
    Overloaded { retry_after: Duration },
    DeadlineExceeded,
    Unread(Duration),
    Unavailable(String),
    Failed(String),
}

/// Bytes of the length before each output.
const LENGTH_BYTES: usize = 4;

/// Largest accepted output. The log-probabilities of a prompt of a million tokens with five alternatives have 50 MB.
const MAX_OUTPUT_BYTES: usize = 256 << 20;

/// The fields that engines name in [`Error::Invalid`], which is a `&'static str`.
const FIELDS: [&str; 2] = ["model", "prompt"];

/// Encodes a request. Relayed requests have an HTTP request for a server of another program, and cannot be sent.
pub(super) fn encode_request(request: &Request, now: Instant) -> Result<Bytes, NotSent> {
    // The trace context is in the headers, and the attempts are counted by the process that sends the request. Only
    // relayed requests name objects of servers.
    let RequestAttributes {
        tenant,
        session,
        priority,
        deadline,
        retention,
        has_estimated_tokens: _,
        has_stop_strings: _,
        server: _,
        trace: _,
        attempts: _,
    } = &request.attributes;
    let Retention { ttl, pin, store, priority: eviction } = *retention;
    let wire = WireRequest {
        id: Arc::clone(&request.id),
        model: Arc::clone(&request.model),
        tokens: Arc::clone(&request.tokens),
        generated_tokens: request.generated_tokens,
        domain: request.domain.secret_parts(),
        sampling: request.sampling.clone(),
        stop: request.stop.clone(),
        work: match &request.work {
            Work::Generate => WireWork::Generate,
            Work::Prefill => WireWork::Prefill,
            Work::Resume(Handoff(bytes)) => WireWork::Resume(bytes.to_vec()),
            Work::Relay(_) => return Err(NotSent),
        },
        tenant: Arc::clone(tenant),
        session: session.clone(),
        priority: *priority,
        remaining: deadline.map(|deadline| deadline.saturating_duration_since(now)),
        retention: WireRetention { ttl, pin, store, priority: eviction },
    };
    Ok(postcard::to_allocvec(&wire).expect("encoding into memory does not fail").into())
}

pub(super) fn decode_request(bytes: &[u8], now: Instant) -> Result<Request, Invalid> {
    let wire: WireRequest = all(bytes)?;
    let WireRetention { ttl, pin, store, priority: eviction } = wire.retention;
    // A time that the clock cannot represent is no deadline.
    let deadline = wire.remaining.and_then(|remaining| now.checked_add(remaining));
    Ok(Request {
        id: wire.id,
        model: wire.model,
        tokens: wire.tokens,
        generated_tokens: wire.generated_tokens,
        domain: Domain::of_secret_parts(wire.domain),
        sampling: wire.sampling,
        stop: wire.stop,
        work: match wire.work {
            WireWork::Generate => Work::Generate,
            WireWork::Prefill => Work::Prefill,
            WireWork::Resume(bytes) => Work::Resume(Handoff(bytes.into())),
        },
        attributes: RequestAttributes {
            tenant: wire.tenant,
            session: wire.session,
            priority: wire.priority,
            deadline,
            retention: Retention { ttl, pin, store, priority: eviction },
            has_estimated_tokens: false,
            has_stop_strings: false,
            server: None,
            trace: spans::Context::default(),
            attempts: Attempts::default(),
        },
        explain: false,
        group: None,
    })
}

/// Appends an output of a stream with its length.
pub(super) fn encode_output(output: Result<Output, Error>, into: &mut BytesMut) {
    let wire =
        match output {
            Ok(Output::Tokens(tokens)) => WireOutput::Tokens(WireTokens {
                ids: tokens.ids,
                logprobs: tokens.logprobs,
                finish: tokens.finish,
                end: tokens.end,
                prompt_logprobs: tokens.prompt_logprobs,
                prompt: tokens.prompt.map(|PromptReport { cached, computed, handed_over, queued, worker: _ }| {
                    WireReport { cached, computed, handed_over, queued }
                }),
            }),
            Ok(Output::Handoff(Handoff(bytes))) => WireOutput::Handoff(bytes.to_vec()),
            Ok(Output::Prefilled) => WireOutput::Prefilled,
            Ok(Output::Head(_) | Output::Body(_) | Output::Rest(_) | Output::End(_)) => {
                WireOutput::Failed(WireError::Failed("the engine relays, and other processes cannot use it".to_owned()))
            }
            Err(error) => WireOutput::Failed(WireError::of(&error)),
        };
    let encoded = postcard::to_allocvec(&wire).expect("encoding into memory does not fail");
    into.reserve(LENGTH_BYTES + encoded.len());
    into.put_u32_le(encoded.len() as u32);
    into.put_slice(&encoded);
}

/// Takes the first output from the bytes that arrived; `None` if it has not arrived completely.
pub(super) fn decode_output(arrived: &mut BytesMut) -> Result<Option<Result<Output, Error>>, Invalid> {
    let Some(length) = arrived.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_OUTPUT_BYTES {
        return Err(Invalid);
    }
    if arrived.len() < LENGTH_BYTES + length {
        return Ok(None);
    }
    arrived.advance(LENGTH_BYTES);
    Ok(Some(match all(&arrived.split_to(length))? {
        WireOutput::Tokens(WireTokens { ids, logprobs, finish, end, prompt_logprobs, prompt }) => {
            let prompt = prompt.map(|WireReport { cached, computed, handed_over, queued }| PromptReport {
                cached,
                computed,
                handed_over,
                queued,
                worker: None,
            });
            Ok(Output::Tokens(Tokens { ids, logprobs, finish, end, prompt_logprobs, prompt, explain: None }))
        }
        WireOutput::Handoff(bytes) => Ok(Output::Handoff(Handoff(bytes.into()))),
        WireOutput::Prefilled => Ok(Output::Prefilled),
        WireOutput::Failed(error) => Err(error.into_error()),
    }))
}

pub(super) fn encode_error(error: &Error) -> Bytes {
    postcard::to_allocvec(&WireError::of(error)).expect("encoding into memory does not fail").into()
}

pub(super) fn decode_error(bytes: &[u8]) -> Result<Error, Invalid> {
    all::<WireError>(bytes).map(WireError::into_error)
}

pub(super) fn encode_prefix_copy(copy: &PrefixCopy) -> Bytes {
    let peer = copy.peer.as_ref().map(|PeerMemory(bytes)| bytes.to_vec());
    let wire = WirePrefixCopy { blocks: Arc::clone(&copy.blocks), peer };
    postcard::to_allocvec(&wire).expect("encoding into memory does not fail").into()
}

pub(super) fn decode_prefix_copy(bytes: &[u8]) -> Result<PrefixCopy, Invalid> {
    let WirePrefixCopy { blocks, peer } = all(bytes)?;
    Ok(PrefixCopy { blocks, peer: peer.map(|bytes| PeerMemory(bytes.into())) })
}

pub(super) fn encode_prefetched(prefetched: &Result<Prefetched, PrefetchError>) -> Bytes {
    postcard::to_allocvec(prefetched).expect("encoding into memory does not fail").into()
}

pub(super) fn decode_prefetched(bytes: &[u8]) -> Result<Result<Prefetched, PrefetchError>, Invalid> {
    all(bytes)
}

fn all<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Invalid> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        _ => Err(Invalid),
    }
}

impl WireError {
    fn of(error: &Error) -> Self {
        match error.clone() {
            Error::UnknownModel(model) => Self::UnknownModel(model),
            Error::PromptTooLong { prompt, context } => {
                Self::PromptTooLong { prompt: prompt as u64, context: context as u64 }
            }
            Error::Invalid { field, problem } => Self::Invalid { field: field.to_owned(), problem },
            Error::Overloaded { retry_after } => Self::Overloaded { retry_after },
            Error::DeadlineExceeded => Self::DeadlineExceeded,
            Error::Unread(time) => Self::Unread(time),
            Error::Unavailable(why) => Self::Unavailable(why),
            // For its caller that process has answered.
            Error::NoAnswer(_) | Error::Unresponsive(_) | Error::Relayed(_) => Self::Failed(error.to_string()),
            // A limit of that process, so for its caller it is not available.
            Error::OutOfFiles => Self::Unavailable(error.to_string()),
            Error::Failed(why) => Self::Failed(why),
        }
    }

    fn into_error(self) -> Error {
        match self {
            Self::UnknownModel(model) => Error::UnknownModel(model),
            Self::PromptTooLong { prompt, context } => {
                Error::PromptTooLong { prompt: prompt as usize, context: context as usize }
            }
            Self::Invalid { field, problem } => match FIELDS.iter().find(|known| **known == field) {
                Some(field) => Error::Invalid { field, problem },
                None => Error::Invalid { field: "request", problem: format!("{field}: {problem}") },
            },
            Self::Overloaded { retry_after } => Error::Overloaded { retry_after },
            Self::DeadlineExceeded => Error::DeadlineExceeded,
            Self::Unread(time) => Error::Unread(time),
            Self::Unavailable(why) => Error::Unavailable(why),
            Self::Failed(why) => Error::Failed(why),
        }
    }
}

#[cfg(test)]
mod tests;
