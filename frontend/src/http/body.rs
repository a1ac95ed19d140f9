//! Reads a request's JSON body within a size limit and a share of the memory for all bodies.
//!
//! Not here: the minimum upload rate, and the rest of a body that is rejected (`upload`).

mod memory;

pub(crate) use memory::BodyMemory;

use super::upload::{is_cut_off, is_stopped, is_too_slow};
use crate::error::Error;
use crate::settings::Settings;
use axum::body::{Body, HttpBody};
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use memory::FREE_BYTES;
use tokio::sync::OwnedSemaphorePermit;

/// A complete body and its share of the memory.
pub(crate) struct BufferedBody {
    pub(crate) bytes: Bytes,
    pub(crate) memory: Option<OwnedSemaphorePermit>,
}

/// Reads a JSON body within the limits of `settings`, charged to `memory`.
pub(crate) async fn read(
    headers: &HeaderMap,
    body: Body,
    settings: &Settings,
    memory: &BodyMemory,
) -> Result<BufferedBody, Error> {
    check_content_type(headers)?;
    check_content_encoding(headers)?;
    read_any(body, settings, memory).await
}

/// Reads a body of any type within the limits of `settings`, charged to `memory`.
pub(crate) async fn read_any(body: Body, settings: &Settings, memory: &BodyMemory) -> Result<BufferedBody, Error> {
    let mut share = memory.share();
    let most = settings.max_body.as_usize();
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    // Before the first read, which would have the client send it (`Expect: 100-continue`).
    if announced > most {
        return Err(Error::TooLarge(most));
    }
    // Room for what is announced, as far as it is not charged to the memory.
    let announced = announced.min(FREE_BYTES);
    let mut stream = body.into_data_stream();
    // Most bodies arrive in one piece, which is not copied.
    let (mut first, mut collected) = (Bytes::new(), BytesMut::new());
    while let Some(chunk) = share.receive(stream.next()).await? {
        let chunk = chunk.map_err(|error| {
            if is_too_slow(&error) {
                Error::TooSlow { pause: settings.body_timeout.0, min_rate: settings.min_body_rate.as_usize() }
            } else if is_stopped(&error) {
                Error::ShuttingDown
            } else if is_cut_off(&error) {
                Error::ClientClosed
            } else {
                Error::Malformed(format!("The request body could not be read: {error}."))
            }
        })?;
        let length = first.len() + collected.len() + chunk.len();
        if length > most {
            return Err(Error::TooLarge(most));
        }
        share.grow(length).await?;
        if length == chunk.len() {
            first = chunk;
            continue;
        }
        if !first.is_empty() {
            collected.reserve(announced.max(length));
            collected.extend_from_slice(&std::mem::take(&mut first));
        }
        collected.extend_from_slice(&chunk);
    }
    let bytes = if first.is_empty() { collected.freeze() } else { first };
    Ok(BufferedBody { bytes, memory: share.finish() })
}

/// Rejects compressed bodies: a compressed body can expand a thousandfold.
pub(crate) fn check_content_encoding(headers: &HeaderMap) -> Result<(), Error> {
    let codings = headers.get_all(CONTENT_ENCODING).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
    let compressed =
        codings.map(|coding| coding.trim().to_ascii_lowercase()).find(|c| !matches!(&c[..], "" | "identity"));
    compressed.map_or(Ok(()), |coding| Err(Error::ContentEncoding(coding)))
}

/// Accepts JSON types, no type, and the type that `curl -d` sends by default.
fn check_content_type(headers: &HeaderMap) -> Result<(), Error> {
    let Some(value) = headers.get(CONTENT_TYPE).filter(|value| *value != "application/json") else { return Ok(()) };
    let text = String::from_utf8_lossy(value.as_bytes());
    let essence = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match essence.as_str() {
        "" | "application/json" | "application/x-www-form-urlencoded" => Ok(()),
        other if other.starts_with("application/") && other.ends_with("+json") => Ok(()),
        _ => Err(Error::ContentType(essence)),
    }
}
