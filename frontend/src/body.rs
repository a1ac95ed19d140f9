//! A request's body: read within a limit of bytes and time, and refused in words when it is not what is read here.

use crate::error::Error;
use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use std::time::Duration;

/// A client that sends nothing for so long is gone, or means harm.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// A body over the limit is read on up to so many times the limit: most clients look for the answer only when they have sent
/// everything, and would see a broken connection instead of it.
const READ_ON: usize = 4;

/// Reads a JSON body of at most `most` bytes.
pub(crate) async fn read(headers: &HeaderMap, body: Body, most: usize) -> Result<Bytes, Error> {
    content_type(headers)?;
    let mut stream = body.into_data_stream();
    let mut collected = BytesMut::new();
    let mut seen = 0usize;
    loop {
        let silent = |_| Error::TooSlow(SILENCE_MAX);
        let Some(chunk) = tokio::time::timeout(SILENCE_MAX, stream.next()).await.map_err(silent)? else { break };
        let chunk = chunk.map_err(|e| Error::Malformed(format!("The request body could not be read: {e}.")))?;
        seen = seen.saturating_add(chunk.len());
        if seen <= most {
            collected.extend_from_slice(&chunk);
        } else {
            collected = BytesMut::new();
        }
        if seen > most.saturating_mul(READ_ON) {
            break;
        }
    }
    if seen > most { Err(Error::TooLarge(most)) } else { Ok(collected.freeze()) }
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
