//! What the body of an answer consists of: its headers say it, or else its first bytes.

use http::{HeaderMap, header};

/// What the first bytes of a body say that it consists of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Start {
    Json,
    Events,
    Other,
}

impl Start {
    /// `None`: more bytes are needed.
    pub(super) fn of(start: &[u8]) -> Option<Self> {
        /// The fields of events (the HTML standard). A line that begins with a colon is a comment.
        const FIELDS: [&[u8]; 4] = [b"data:", b"event:", b"id:", b"retry:"];
        match start.trim_ascii_start() {
            [] => None,
            [b'{' | b'[', ..] => Some(Self::Json),
            [b':', ..] => Some(Self::Events),
            start if FIELDS.iter().any(|field| start.starts_with(field)) => Some(Self::Events),
            start if FIELDS.iter().any(|field| field.starts_with(start)) => None,
            _ => Some(Self::Other),
        }
    }
}

/// Whether a body consists of events. A compressed one cannot be read, and passes like any other body.
pub(super) fn is_readable_stream(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let media_type = text(header::CONTENT_TYPE).and_then(|value| value.split(';').next()).unwrap_or_default();
    let is_plain = || text(header::CONTENT_ENCODING).is_none_or(|encoding| encoding.eq_ignore_ascii_case("identity"));
    media_type.trim().eq_ignore_ascii_case("text/event-stream") && is_plain()
}

/// Whether the engine says what a body consists of, or has compressed it.
pub(super) fn has_type(headers: &HeaderMap) -> bool {
    let is_named = headers.get(header::CONTENT_TYPE).is_some_and(|value| !value.is_empty());
    is_named || headers.contains_key(header::CONTENT_ENCODING)
}
