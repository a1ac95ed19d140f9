//! A request's body: read within a limit of bytes, and refused in words when it is not what is read here. Its pace, and what
//! becomes of the rest of a body that is refused, is `upload`'s.

use crate::Settings;
use crate::error::Error;
use crate::upload::is_too_slow;
use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;

/// Reads a JSON body within the limits of `settings`.
pub(crate) async fn read(headers: &HeaderMap, body: Body, settings: &Settings) -> Result<Bytes, Error> {
    content_type(headers)?;
    let most = settings.body_bytes_max;
    let mut stream = body.into_data_stream();
    let mut collected = BytesMut::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| {
            if is_too_slow(&error) {
                Error::TooSlow { pause: settings.body_timeout.0, min_rate: settings.min_body_bytes_per_second }
            } else {
                Error::Malformed(format!("The request body could not be read: {error}."))
            }
        })?;
        if collected.len() + chunk.len() > most {
            return Err(Error::TooLarge(most));
        }
        collected.extend_from_slice(&chunk);
    }
    Ok(collected.freeze())
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
