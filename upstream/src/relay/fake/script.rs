//! What the fake engine does with one request.

use crate::relay::chunk::Usage;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use serde_json::{Value, json};
use std::time::Duration;

/// The answer to one request.
#[derive(Clone, Debug)]
pub struct Script {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) steps: Vec<Step>,
    /// Time until the headers of the answer.
    pub(super) delay: Duration,
    /// The connection is closed instead of an answer.
    pub(super) close: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    Send(Bytes),
    Wait(Duration),
    /// The body ends with an error, so the connection is closed.
    Break,
    /// Nothing more happens.
    Hang,
}

impl Default for Script {
    /// A chat of two chunks.
    fn default() -> Self {
        Self::chat(&["Hello", " world"], None)
    }
}

impl Script {
    /// A streamed chat: a chunk with the role, one per text, of which the last has the finish reason, the usage,
    /// `[DONE]`.
    pub fn chat(texts: &[&str], usage: Option<Usage>) -> Self {
        let object = "chat.completion.chunk";
        let chunk = |delta: &Value, finish: Option<&str>| {
            chunk(object, &[json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish})])
        };
        let role = chunk(&json!({"role": "assistant", "content": ""}), None);
        let texts = with_finish(texts).map(|(text, finish)| chunk(&json!({"content": text}), finish));
        Self::chunks(object, std::iter::once(role).chain(texts).collect(), usage)
    }

    /// A streamed completion.
    pub fn completion(texts: &[&str], usage: Option<Usage>) -> Self {
        let object = "text_completion";
        let chunk = |(text, finish)| {
            let choice =
                json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish, "stop_reason": null});
            chunk(object, &[choice])
        };
        Self::chunks(object, with_finish(texts).map(chunk).collect(), usage)
    }

    fn chunks(object: &str, mut chunks: Vec<Value>, usage: Option<Usage>) -> Self {
        if let Some(usage) = usage {
            let mut last = chunk(object, &[]);
            last["usage"] = usage_json(usage);
            chunks.push(last);
        }
        let payloads = chunks.iter().map(Value::to_string).chain(["[DONE]".to_owned()]);
        Self::events(payloads.map(|payload| format!("data: {payload}\n\n")))
    }

    /// A stream of these bytes, each sent by itself.
    pub fn events<T: Into<Bytes>>(events: impl IntoIterator<Item = T>) -> Self {
        let steps = events.into_iter().map(|event| Step::Send(event.into())).collect();
        let (status, headers, delay) = (StatusCode::OK, HeaderMap::new(), Duration::ZERO);
        let script = Self { status, headers, steps, delay, close: false };
        script.header(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")
    }

    /// A body that is no stream.
    pub fn json(status: u16, body: &Value) -> Self {
        Self::events([body.to_string()]).header(header::CONTENT_TYPE, "application/json").status(status)
    }

    /// The connection is closed without an answer.
    pub fn close() -> Self {
        Self { close: true, ..Self::default() }
    }

    /// Sets the status of the answer.
    #[must_use]
    pub fn status(mut self, status: u16) -> Self {
        self.status = StatusCode::from_u16(status).expect("a status is from 100 to 999");
        self
    }

    /// Sets a header of the answer.
    #[must_use]
    pub fn header(mut self, name: HeaderName, value: &'static str) -> Self {
        self.headers.insert(name, HeaderValue::from_static(value));
        self
    }

    /// Waits before the headers of the answer.
    #[must_use]
    pub fn after(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// Waits before each part of the body, so that each arrives by itself.
    #[must_use]
    pub fn paced(mut self, pause: Duration) -> Self {
        self.steps = self.steps.into_iter().flat_map(|step| [Step::Wait(pause), step]).collect();
        self
    }

    /// Adds `"usage":null` to the chunks that have no usage.
    #[must_use]
    pub fn with_null_usage(mut self) -> Self {
        for step in &mut self.steps {
            // The chunk with the usage ends with two braces.
            if let Step::Send(bytes) = step
                && let Some(chunk) = bytes.strip_suffix(b"}\n\n").filter(|chunk| !chunk.ends_with(b"}"))
            {
                *bytes = [chunk, br#","usage":null}"#, b"\n\n"].concat().into();
            }
        }
        self
    }

    /// Sends the first `parts` of the body only, then closes the connection.
    #[must_use]
    pub fn broken_after(self, parts: usize) -> Self {
        self.cut(parts, Some(Step::Break))
    }

    /// Sends the first `parts` of the body only, then nothing more.
    #[must_use]
    pub fn hanging_after(self, parts: usize) -> Self {
        self.cut(parts, Some(Step::Hang))
    }

    /// Sends the first `parts` of the body only, then ends it properly.
    #[must_use]
    pub fn ended_after(self, parts: usize) -> Self {
        self.cut(parts, None)
    }

    /// The bytes of the whole body.
    pub fn body(&self) -> Bytes {
        let bytes = |step: &Step| if let Step::Send(bytes) = step { bytes.clone() } else { Bytes::new() };
        self.steps.iter().map(bytes).collect::<Vec<_>>().concat().into()
    }

    fn cut(mut self, parts: usize, last: Option<Step>) -> Self {
        self.steps.truncate(parts);
        // What was sent must leave before the connection is closed.
        self.steps.push(Step::Wait(Duration::from_millis(20)));
        self.steps.extend(last);
        self
    }
}

fn chunk(object: &str, choices: &[Value]) -> Value {
    let id = "chatcmpl-8f3a6d0e5b7c4912a1d2e3f405162738";
    json!({"id": id, "object": object, "created": 1_760_000_000, "model": "tiny-llama", "choices": choices})
}

/// Each text with its finish reason.
fn with_finish<'a>(texts: &'a [&'a str]) -> impl Iterator<Item = (&'a str, Option<&'static str>)> {
    let finish = |index: usize| (index + 1 == texts.len()).then_some("stop");
    texts.iter().enumerate().map(move |(index, text)| (*text, finish(index)))
}

fn usage_json(usage: Usage) -> Value {
    let total = usage.prompt_tokens.unwrap_or(0) + usage.completion_tokens.unwrap_or(0);
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": total,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": usage.cached_tokens.map(|cached| json!({"cached_tokens": cached})),
    })
}
