//! Who asks, and how urgently: what a request says of itself beside others, in its headers and its fields.
//!
//! A tenant is what a proxy in front says it is, and only if the configuration names the header. Whose cache a prompt
//! belongs to, and how long blocks are kept, is decided in [`cache`](crate::cache).

use super::fields::{Fields, integer, mistyped};
use crate::error::Error;
use crate::settings::TenantHeader;
use axum::http::{HeaderMap, HeaderName};
use serde_json::Value;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use worker::engine::Priority;

/// Names a conversation, for those who route by it.
const SESSION: HeaderName = HeaderName::from_static("x-session-id");
/// Milliseconds until the first token is of no more use.
const DEADLINE: HeaderName = HeaderName::from_static("x-blockyard-deadline-ms");
/// A day: who waits longer does not wait.
const DEADLINE_MS: RangeInclusive<i64> = 1..=86_400_000;
/// A name and a number behind it; longer ones are no names.
const TENANT_BYTES_MAX: usize = 64;

/// For whom a request is; empty: nobody in particular.
pub(crate) fn tenant(headers: &HeaderMap, named_by: Option<&TenantHeader>) -> Result<Arc<str>, Error> {
    let Some(TenantHeader(name)) = named_by else { return Ok("".into()) };
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok("".into()) };
    let sane = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(&byte);
    match value.to_str() {
        // A second one was sent by somebody else than the proxy.
        Ok(tenant) if values.next().is_none() && tenant.len() <= TENANT_BYTES_MAX && tenant.bytes().all(sane) => {
            Ok(tenant.into())
        }
        _ => {
            let message = format!(
                "Invalid header '{name}': expected one name of at most {TENANT_BYTES_MAX} letters, digits or '-_.:/+=@'."
            );
            Err(Error::invalid(name.as_str(), "invalid_value", message))
        }
    }
}

/// The deadline in the headers.
pub(crate) fn deadline_of(headers: &HeaderMap) -> Result<Option<Duration>, Error> {
    let Some(value) = headers.get(DEADLINE) else { return Ok(None) };
    let said = value.to_str().ok().and_then(|text| serde_json::from_str(text.trim()).ok());
    integer(DEADLINE.as_str(), &said.unwrap_or(Value::Bool(false)), DEADLINE_MS).map(|ms| Some(millis(ms)))
}

/// The deadline among the fields.
pub(crate) fn take_deadline(fields: &mut Fields) -> Result<Option<Duration>, Error> {
    Ok(fields.integer("deadline_ms", DEADLINE_MS)?.map(millis))
}

/// What the headers say that a request belongs together with.
pub(crate) fn session_of(headers: &HeaderMap) -> Option<Arc<str>> {
    headers.get(SESSION).and_then(|value| value.to_str().ok()).filter(|session| !session.is_empty()).map(Arc::from)
}

/// What the fields say: OpenAI's `prompt_cache_key`, or the `user` that it replaces.
pub(crate) fn take_session(fields: &mut Fields) -> Result<Option<Arc<str>>, Error> {
    let (key, user) = (fields.text("prompt_cache_key")?, fields.text("user")?);
    Ok([key, user].into_iter().flatten().find(|session| !session.is_empty()).map(Arc::from))
}

/// The priority: by name, or a number as vLLM has it, where less is sooner and 0 is what says nothing.
pub(crate) fn take_priority(fields: &mut Fields) -> Result<Priority, Error> {
    match fields.value("priority")? {
        None => Ok(Priority::Normal),
        Some(Value::String(name)) => match name.as_str() {
            "low" => Ok(Priority::Low),
            "normal" => Ok(Priority::Normal),
            "high" => Ok(Priority::High),
            _ => {
                let message = format!(
                    "Invalid value: '{name}'. Supported values of 'priority' are: 'low', 'normal', 'high', and integers."
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

    #[test]
    fn a_session_is_the_cache_key_or_the_user() {
        let of = |body: &str| {
            take_session(&mut Fields::parse(&body.to_owned().into()).unwrap()).map_err(|error| error.to_string())
        };
        assert_eq!(of(r#"{"user":"ada","prompt_cache_key":"talk 7"}"#), Ok(Some("talk 7".into())));
        assert_eq!(of(r#"{"user":"ada","prompt_cache_key":""}"#), Ok(Some("ada".into())));
        assert_eq!(of("{}"), Ok(None));
        assert!(of(r#"{"user":7}"#).is_err());
        let headers = HeaderMap::from_iter([(SESSION, "talk 8".parse().unwrap())]);
        assert_eq!(session_of(&headers), Some("talk 8".into()));
    }
}
