//! Scheduling parameters in headers and fields: tenant, priority, deadline, session.
//!
//! The tenant comes from the header of a trusted proxy, only if the settings name that header. Not here: cache domains
//! and retention of blocks ([`cache`](super::cache)).

use super::fields::{Fields, integer, mistyped};
use crate::error::Error;
use crate::keys::{MAX_NAME_BYTES, is_name};
use crate::settings::TenantHeader;
use axum::http::{HeaderMap, HeaderName};
use serde_json::Value;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use worker::engine::Priority;

/// The session, for routers with session affinity.
const SESSION: HeaderName = HeaderName::from_static("x-session-id");
/// Milliseconds within which the first token must be generated.
const DEADLINE: HeaderName = HeaderName::from_static("x-blockyard-deadline-ms");
/// Range of deadlines in milliseconds, up to a day.
const DEADLINE_MS: RangeInclusive<i64> = 1..=86_400_000;

/// The request's tenant; empty if there is none.
pub(crate) fn tenant(headers: &HeaderMap, tenant_header: Option<&TenantHeader>) -> Result<Arc<str>, Error> {
    let Some(TenantHeader(name)) = tenant_header else { return Ok(Arc::default()) };
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(Arc::default()) };
    match value.to_str() {
        // A second value does not come from the proxy.
        Ok(tenant) if values.next().is_none() && is_name(tenant) => Ok(tenant.into()),
        _ => {
            let message = format!(
                "Invalid header '{name}': expected one name of at most {MAX_NAME_BYTES} letters, digits or \
                 '-_.:/+=@'."
            );
            Err(Error::invalid(name.as_str(), "invalid_value", message))
        }
    }
}

/// The deadline in the headers, from the arrival of the request.
pub(crate) fn header_deadline(headers: &HeaderMap) -> Result<Option<Duration>, Error> {
    let Some(value) = headers.get(DEADLINE) else { return Ok(None) };
    let text = String::from_utf8_lossy(value.as_bytes());
    let value = serde_json::from_str(text.trim()).unwrap_or_else(|_| Value::from(&*text));
    integer(DEADLINE.as_str(), &value, DEADLINE_MS).map(|ms| Some(millis(ms)))
}

/// Takes the field `deadline_ms`.
pub(crate) fn take_deadline(fields: &mut Fields) -> Result<Option<Duration>, Error> {
    Ok(fields.integer("deadline_ms", DEADLINE_MS)?.map(millis))
}

/// The session in the headers.
pub(crate) fn header_session(headers: &HeaderMap) -> Option<Arc<str>> {
    headers.get(SESSION).and_then(|value| value.to_str().ok()).filter(|session| !session.is_empty()).map(Arc::from)
}

/// The session in fields that are not taken.
pub(crate) fn peek_session(fields: &Fields) -> Option<Arc<str>> {
    let text = |name: &str| serde_json::from_slice::<String>(fields.peek(name)?.bytes()).ok();
    ["prompt_cache_key", "user"].into_iter().filter_map(text).find(|session| !session.is_empty()).map(Arc::from)
}

/// Takes the session: OpenAI's `prompt_cache_key`, or `user`, which it replaces.
pub(crate) fn take_session(fields: &mut Fields) -> Result<Option<Arc<str>>, Error> {
    let key = fields.text("prompt_cache_key")?;
    let user = fields.text("user")?;
    Ok([key, user].into_iter().flatten().find(|session| !session.is_empty()).map(Arc::from))
}

/// Takes the priority: a name, or a number as in vLLM, where a lower number is served earlier and 0 is the default.
pub(crate) fn take_priority(fields: &mut Fields) -> Result<Priority, Error> {
    match fields.value("priority")? {
        None => Ok(Priority::Normal),
        Some(Value::String(name)) => match name.as_str() {
            "low" => Ok(Priority::Low),
            "normal" => Ok(Priority::Normal),
            "high" => Ok(Priority::High),
            _ => {
                let message = format!(
                    "Invalid value: '{name}'. Supported values of 'priority' are: 'low', 'normal', 'high', and \
                     integers."
                );
                Err(Error::invalid("priority", "invalid_value", message))
            }
        },
        Some(number @ Value::Number(_)) => Ok(match integer("priority", &number, i64::MIN..=i64::MAX)? {
            ..0 => Priority::High,
            0 => Priority::Normal,
            1.. => Priority::Low,
        }),
        Some(other) => Err(mistyped("priority", "a string or an integer", &other)),
    }
}

fn millis(ms: i64) -> Duration {
    Duration::from_millis(ms.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn the_error_of_a_deadline_in_a_header_says_what_the_header_is() {
        let deadline = |value: &[u8]| {
            let headers = HeaderMap::from_iter([(DEADLINE, HeaderValue::from_bytes(value).unwrap())]);
            header_deadline(&headers).map_err(|error| error.to_string())
        };
        assert_eq!(deadline(b" 250 "), Ok(Some(Duration::from_millis(250))));
        for text in [&b"abc"[..], b"", b"5s", b"\xff"] {
            let error = deadline(text).unwrap_err();
            assert!(error.contains("expected an integer, but got a string instead"), "{error}");
        }
        assert!(deadline(b"0.5").unwrap_err().contains("but got a decimal instead"));
    }

    #[test]
    fn a_session_is_the_cache_key_or_the_user() {
        let of = |body: &str| {
            take_session(&mut Fields::parse(&body.to_owned().into()).unwrap()).map_err(|error| error.to_string())
        };
        let peeked = |body: &str| peek_session(&Fields::parse(&body.to_owned().into()).unwrap());
        for (body, session) in [
            (r#"{"user":"ada","prompt_cache_key":"talk 7"}"#, Some("talk 7")),
            (r#"{"user":"ada","prompt_cache_key":""}"#, Some("ada")),
            ("{}", None),
        ] {
            assert_eq!((of(body), peeked(body)), (Ok(session.map(Arc::from)), session.map(Arc::from)));
        }
        assert!(of(r#"{"user":7}"#).is_err());
        let headers = HeaderMap::from_iter([(SESSION, "talk 8".parse().unwrap())]);
        assert_eq!(header_session(&headers), Some("talk 8".into()));
    }
}
