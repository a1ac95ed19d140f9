//! A request's body: read within a limit of bytes, and refused in words when it is not what is read here. Its pace, and what
//! becomes of the rest of a body that is refused, is `upload`'s.

use super::upload::is_too_slow;
use crate::error::Error;
use crate::settings::Settings;
use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A body's first bytes are not charged to [`Memory`]: small requests are never refused for want of it. What they take is bounded by
/// the number of connections.
const FREE: usize = 64 << 10;
/// Bodies are worked on within a second, when there is no queue.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The memory for the bodies of all requests that are read or worked on.
pub(crate) struct Memory(Arc<Semaphore>);

/// A share of it that grows with a body.
struct Share<'a> {
    memory: &'a Memory,
    held: Option<OwnedSemaphorePermit>,
}

impl Memory {
    /// For so many bytes, or one body of the largest size.
    pub(crate) fn new(settings: &Settings) -> Self {
        let bytes = settings.max_inflight_bodies.max(settings.max_body).as_usize();
        Self(Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS))))
    }
}

impl Share<'_> {
    /// Makes room for a body of so many bytes, or refuses it: a body that waited for room would hold what it has, and so would others.
    fn grow(&mut self, bytes: usize) -> Result<(), Error> {
        let held = self.held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = bytes.saturating_sub(FREE).saturating_sub(held);
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        let Ok(permit) = Arc::clone(&self.memory.0).try_acquire_many_owned(more) else {
            return Err(Error::Overloaded(RETRY_AFTER));
        };
        match &mut self.held {
            Some(held) => held.merge(permit),
            None => self.held = Some(permit),
        }
        Ok(())
    }
}

/// A body and its share of the memory.
pub(crate) struct Held {
    pub(crate) bytes: Bytes,
    pub(crate) share: Option<OwnedSemaphorePermit>,
}

/// Reads a JSON body within the limits of `settings` into its share of `memory`.
pub(crate) async fn read(headers: &HeaderMap, body: Body, settings: &Settings, memory: &Memory) -> Result<Held, Error> {
    content_type(headers)?;
    content_encoding(headers)?;
    let mut share = Share { memory, held: None };
    let most = settings.max_body.as_usize();
    let mut stream = body.into_data_stream();
    let mut collected = BytesMut::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| {
            if is_too_slow(&error) {
                Error::TooSlow { pause: settings.body_timeout.0, min_rate: settings.min_body_rate.as_usize() }
            } else {
                Error::Malformed(format!("The request body could not be read: {error}."))
            }
        })?;
        if collected.len() + chunk.len() > most {
            return Err(Error::TooLarge(most));
        }
        share.grow(collected.len() + chunk.len())?;
        collected.extend_from_slice(&chunk);
    }
    Ok(Held { bytes: collected.freeze(), share: share.held })
}

/// Bodies are read as they are: a compressed one could be a thousand times as large as its bytes.
fn content_encoding(headers: &HeaderMap) -> Result<(), Error> {
    let codings = headers.get_all(CONTENT_ENCODING).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
    let compressed =
        codings.map(|coding| coding.trim().to_ascii_lowercase()).find(|c| !matches!(&c[..], "" | "identity"));
    compressed.map_or(Ok(()), |coding| Err(Error::ContentEncoding(coding)))
}

/// JSON under any name; under none; and under what `curl -d` says when it is told nothing.
fn content_type(headers: &HeaderMap) -> Result<(), Error> {
    let Some(value) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    let text = String::from_utf8_lossy(value.as_bytes());
    let essence = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match essence.as_str() {
        "" | "application/json" | "application/x-www-form-urlencoded" => Ok(()),
        other if other.starts_with("application/") && other.ends_with("+json") => Ok(()),
        _ => Err(Error::ContentType(essence)),
    }
}
