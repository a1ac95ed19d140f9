//! Streams of vLLM that another server can continue: which requests have one, and the request for the rest.
//!
//! The rest of a stream is a completion of the prompt's tokens and those that were sent (`/v1/completions` takes token
//! ids), with the limit reduced. **Its text is the same only if the next token depends on nothing but the tokens before
//! it**, wherever the prompt ends. So a request is followed if it is greedy, has one choice, and has no other fields
//! than the known ones below. vLLM's API has no state of a generator, so sampling with a seed cannot be continued.
//!
//! Not here: the tokens and the chunks (`relay::transcript`), and on which server a stream is continued (the router).

use crate::relay::splice::{Splice, each_member};
use crate::relay::transcript::{Api, Broken, Transcript};
use http::Method;
use http::uri::PathAndQuery;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use worker::engine::{Continuation, HttpRequest, RelayRest, Request, UNKNOWN_CONTEXT};

/// The endpoint for the rest of all streams.
const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// vLLM's limit of a completion that names none.
const COMPLETION_TOKENS: usize = 16;

/// Maximum size of the fields that are kept of a request until its stream ends. Without the prompt they have less than
/// 1 KB, or some 10 KB with a bias for many tokens.
const MAX_KEPT: usize = 64 << 10;

/// Why a stream is not continued.
const NO_OBJECT: &str = "the body is no JSON object";
const NO_LIMIT: &str = "its limit of tokens is not known";

/// What a field of a request means for the rest of its stream.
enum Field {
    /// The rest has it too.
    Kept,
    /// It is about the prompt or the limit, of which the rest has its own.
    Replaced,
    /// Only these values, as JSON, leave the next token a matter of those before it. The rest needs none of them.
    Only(&'static [&'static str]),
    /// A list of strings that end the output, if each is one character: others may begin before the rest does.
    Stop,
}

impl Field {
    /// `None`: a field that is not known.
    fn of(api: Api, name: &[u8]) -> Option<Self> {
        Some(match name {
            // They have no influence on a greedy choice, or the same one on each token: a repetition penalty counts the
            // tokens of the prompt and of the output alike.
            b"model"
            | b"stream"
            | b"stream_options"
            | b"stream_interval"
            | b"user"
            | b"cache_salt"
            | b"extra_key"
            | b"priority"
            | b"seed"
            | b"top_p"
            | b"top_k"
            | b"min_p"
            | b"logit_bias"
            | b"allowed_token_ids"
            | b"stop_token_ids"
            | b"ignore_eos"
            | b"skip_special_tokens"
            | b"include_stop_str_in_output"
            | b"session_id"
            | b"repetition_penalty"
            | b"temperature" => Self::Kept,
            b"stop" => Self::Stop,
            b"messages"
            | b"prompt"
            | b"max_tokens"
            | b"max_completion_tokens"
            | b"add_special_tokens"
            | b"add_generation_prompt"
            | b"continue_final_message"
            | b"chat_template"
            | b"chat_template_kwargs"
            | b"documents"
            | b"reasoning_effort"
            | b"include_reasoning"
            | b"parallel_tool_calls"
            | b"request_id"
            | b"metadata"
            | b"store"
            | b"service_tier"
            | b"prompt_cache_key"
            | b"safety_identifier" => Self::Replaced,
            b"logprobs" if api == Api::Chat => Self::Only(&["false"]),
            b"n" | b"best_of" => Self::Only(&["1"]),
            b"presence_penalty" | b"frequency_penalty" | b"min_tokens" | b"top_logprobs" => Self::Only(&["0", "0.0"]),
            b"echo" | b"use_beam_search" | b"watermarking" => Self::Only(&["false"]),
            b"return_token_ids" => Self::Only(&["true", "false"]),
            b"spaces_between_special_tokens" => Self::Only(&["true"]),
            b"length_penalty" => Self::Only(&["1", "1.0"]),
            b"tools" | b"bad_words" => Self::Only(&["[]"]),
            b"tool_choice" => Self::Only(&[r#""none""#]),
            _ => return None,
        })
    }

    fn allows(&self, value: &[u8]) -> bool {
        match self {
            Self::Kept | Self::Replaced => true,
            Self::Only(values) => values.iter().any(|allowed| allowed.as_bytes() == value),
            Self::Stop => are_characters(value),
        }
    }
}

/// A stream that is followed.
pub(crate) struct Followed {
    /// What the request for the rest needs of the request, or why there is none.
    kept: Result<Box<Kept>, &'static str>,
    request_id: Arc<str>,
    /// Tokens of its prompt that another server has generated.
    generated_before: usize,
    /// The context of the model.
    context: usize,
    /// The server for an operator.
    server: Option<String>,
    /// The log says that the server sends no token ids.
    has_warned: Arc<AtomicBool>,
    /// It has an output, and has not broken off.
    is_running: bool,
}

/// What is kept of a request for as long as its stream lasts. The prompt, which may have megabytes, is not.
struct Kept {
    /// The request for the rest, without its prompt and its limit of tokens.
    http: HttpRequest,
    /// How many tokens the request may generate. `None`: as many as the context has room for.
    limit: Option<usize>,
}

impl Followed {
    /// The stream of `request`, which is for `http`. `has_warned`: the same for all streams of a server.
    pub(crate) fn new(
        http: &HttpRequest,
        request: &Request,
        context: usize,
        server: Option<String>,
        has_warned: Arc<AtomicBool>,
    ) -> Self {
        let (kept, request_id) = (Kept::of(http).map(Box::new), Arc::clone(&request.id));
        let generated_before = request.generated_tokens;
        Self { kept, request_id, generated_before, context, server, has_warned, is_running: false }
    }

    /// The first output has come.
    pub(crate) fn began(&mut self, lacks_ids: bool) {
        self.is_running = true;
        if lacks_ids && !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                upstream = self.server.as_deref(),
                "the server sends no token ids, so its streams are not continued on another server if it fails; update \
                 vLLM to a version with return_token_ids, or remove continue_streams from [[upstreams]]"
            );
        }
    }

    /// The request for the rest of the stream, once it has failed.
    pub(crate) fn take_rest(&mut self, broken: Result<Broken, &'static str>) -> Option<RelayRest> {
        if !std::mem::take(&mut self.is_running) {
            return None;
        }
        let kept = || self.kept.as_ref().map_err(|why| *why);
        let rest = broken.and_then(|broken| kept()?.rest(self.generated_before, self.context, &broken));
        if let Err(why) = rest {
            let (request_id, upstream) = (&self.request_id, self.server.as_deref());
            tracing::info!(%request_id, upstream, why, "the stream has broken off and cannot be continued");
        }
        rest.ok()
    }
}

/// The transcript of the stream of a request, if another server can continue it.
pub(crate) fn followed(http: &HttpRequest, request: &Request) -> Option<Box<Transcript>> {
    let api = api(http)?;
    if !http.is_stream || http.method != Method::POST || request.group.is_some() {
        return None;
    }
    let (mut is_greedy, mut keeps_ids, mut is_known) = (false, false, true);
    let scanned = each_member(&http.body, |name, value| {
        let is_private = http.private_fields.iter().any(|field| field.as_bytes() == name);
        is_known &= is_private || value == b"null" || Field::of(api, name).is_some_and(|field| field.allows(value));
        match name {
            b"temperature" => is_greedy = matches!(value, b"0" | b"0.0"),
            b"return_token_ids" => keeps_ids = value == b"true",
            _ => {}
        }
    });
    (scanned.is_ok() && is_known && is_greedy).then(|| Box::new(Transcript::new(api, keeps_ids)))
}

/// The transcript of a stream that a request continues. `None`: it was broken off by another program.
pub(crate) fn continued(continuation: &Continuation, request: &Request) -> Option<Box<Transcript>> {
    let mut broken: Broken = serde_json::from_slice(&continuation.0).ok()?;
    let length = request.tokens.len().checked_sub(request.generated_tokens)?;
    let (prompt, generated) = request.tokens.split_at(length);
    (broken.prompt, broken.generated) = (prompt.to_vec(), generated.to_vec());
    Some(Box::new(Transcript::continuing(broken)))
}

impl Kept {
    /// What is kept of a request, or why its stream cannot be continued.
    fn of(http: &HttpRequest) -> Result<Self, &'static str> {
        let api = api(http).ok_or("another endpoint")?;
        let mut splice = Splice::scan(http.body.clone()).map_err(|_| NO_OBJECT)?;
        if splice.get("messages").is_some_and(|messages| !are_text(&messages)) {
            return Err("its messages have other parts than text");
        }
        let limit = limit(api, &splice)?;
        let mut removed = Vec::new();
        let scanned = each_member(&http.body, |name, _| {
            if matches!(Field::of(api, name), Some(Field::Replaced | Field::Only(_))) {
                removed.push(String::from_utf8_lossy(name).into_owned());
            }
        });
        scanned.map_err(|_| NO_OBJECT)?;
        for name in removed {
            splice.remove(&name);
        }
        let body = splice.finish();
        if body.len() > MAX_KEPT {
            return Err("its fields besides the prompt are too long");
        }
        let target = PathAndQuery::from_static(COMPLETIONS);
        Ok(Self { http: HttpRequest { target, body, continues: None, ..http.clone() }, limit })
    }

    /// The request for the rest of the stream, or why there is none. `generated_before`: tokens in its prompt that
    /// another server had generated. `context`: that of the model.
    fn rest(&self, generated_before: usize, context: usize, broken: &Broken) -> Result<RelayRest, &'static str> {
        let (prompt, generated) = (&broken.prompt, &broken.generated);
        let room = context.saturating_sub(prompt.len());
        let limit = match self.limit {
            Some(limit) => limit,
            // Greater than any context that is known.
            None if room > UNKNOWN_CONTEXT / 2 => return Err(NO_LIMIT),
            None => room,
        };
        let left = limit.saturating_add(generated_before).saturating_sub(generated.len());
        if left == 0 {
            return Err("all of its tokens were sent");
        }
        let tokens = [&prompt[..], generated].concat();
        let mut splice = Splice::scan(self.http.body.clone()).map_err(|_| NO_OBJECT)?;
        splice.set("prompt", serde_json::to_string(&tokens).expect("numbers are JSON"));
        splice.set("max_tokens", left.to_string());
        let continuation = serde_json::to_vec(broken).expect("numbers and strings are JSON");
        Ok(RelayRest {
            tokens: tokens.into(),
            generated_tokens: generated.len(),
            http: HttpRequest {
                body: splice.finish(),
                continues: Some(Continuation(continuation.into())),
                ..self.http.clone()
            },
        })
    }
}

fn api(http: &HttpRequest) -> Option<Api> {
    match http.target.path() {
        CHAT => Some(Api::Chat),
        COMPLETIONS => Some(Api::Completions),
        _ => None,
    }
}

/// How many tokens a request may generate. `None`: as many as the context has room for.
fn limit(api: Api, splice: &Splice) -> Result<Option<usize>, &'static str> {
    let number = |name: &str| match splice.get(name) {
        Some(json) => serde_json::from_slice::<Option<usize>>(&json).map_err(|_| NO_LIMIT),
        None => Ok(None),
    };
    let max_tokens = number("max_tokens")?;
    match api {
        Api::Completions => Ok(Some(max_tokens.unwrap_or(COMPLETION_TOKENS))),
        Api::Chat => Ok(number("max_completion_tokens")?.or(max_tokens)),
    }
}

/// Whether a value is a string, or a list of strings, of at most one character each.
fn are_characters(value: &[u8]) -> bool {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Stop {
        One(String),
        Several(Vec<String>),
    }
    let is_character = |text: &String| text.chars().count() <= 1;
    match serde_json::from_slice(value) {
        Ok(Stop::One(text)) => is_character(&text),
        Ok(Stop::Several(texts)) => texts.iter().all(is_character),
        Err(_) => false,
    }
}

/// Whether messages consist of text. The tokens of images and the like stand for more than they say.
fn are_text(messages: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Message<'a> {
        #[serde(borrow, default)]
        content: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Part<'a> {
        #[serde(borrow, default)]
        r#type: Option<&'a RawValue>,
    }
    let is_text = |content: &RawValue| {
        let json = content.get();
        let parts = || serde_json::from_str::<Vec<Part<'_>>>(json);
        json.starts_with('"')
            || parts()
                .is_ok_and(|parts| parts.iter().all(|part| part.r#type.is_some_and(|kind| kind.get() == r#""text""#)))
    };
    let messages = serde_json::from_slice::<Vec<Message<'_>>>(messages);
    messages.is_ok_and(|messages| messages.iter().all(|message| message.content.is_none_or(is_text)))
}

#[cfg(test)]
mod tests;
