//! Redirects of an engine, for a client that must not leave the gateway.
//!
//! No redirect is followed here. A framework redirects to the path with or without a slash at its end (Starlette: 307),
//! which the client finds at the gateway too.

use super::host;
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use spans::LogLimit;
use std::time::Duration;

/// Statuses that send a client to the address in `Location`.
const REDIRECTS: [StatusCode; 5] = [
    StatusCode::MOVED_PERMANENTLY,
    StatusCode::FOUND,
    StatusCode::SEE_OTHER,
    StatusCode::TEMPORARY_REDIRECT,
    StatusCode::PERMANENT_REDIRECT,
];

/// Maximum number of characters of a path or an address in a log line.
const MAX_LOGGED: usize = 200;
/// Limits the log lines: each request to a path may be redirected.
static LINES: LogLimit = LogLimit::new(10, Duration::from_secs(1));

/// Replaces `Location` in the headers of a redirect by the path and the query at the gateway if it is one of the
/// engine, which is `engine` in `Host` and whose paths begin with `prefix`. Removes it if not. `path`: that of the
/// request.
pub(super) fn keep_at_gateway(status: StatusCode, headers: &mut HeaderMap, engine: &str, prefix: &str, path: &str) {
    let Some(location) = headers.remove(header::LOCATION) else { return };
    let kept = if REDIRECTS.contains(&status) { at_gateway(&location, engine, prefix) } else { None };
    if let Some(suppressed) = LINES.admit() {
        // A query may have what is not for the log.
        let address = String::from_utf8_lossy(location.as_bytes());
        let address: String = address.split(['?', '#']).next().unwrap_or_default().chars().take(MAX_LOGGED).collect();
        let path: String = path.chars().take(MAX_LOGGED).collect();
        let (status, passes) = (status.as_u16(), kept.is_some());
        tracing::info!(
            engine,
            path,
            location = address,
            status,
            passes,
            suppressed,
            "the server answered with a redirect"
        );
    }
    if let Some(kept) = kept {
        headers.insert(header::LOCATION, kept);
    }
}

/// The path and the query of an address of the engine, as the gateway has them.
fn at_gateway(location: &HeaderValue, engine: &str, prefix: &str) -> Option<HeaderValue> {
    let text = location.to_str().ok()?;
    // Without its fragment, which is for the client alone.
    let text = text.split('#').next().unwrap_or_default();
    let uri: Uri = text.parse().ok()?;
    match (uri.scheme(), uri.authority()) {
        (None, None) if text.starts_with('/') => {}
        // An engine behind a proxy with TLS need not know of that.
        (Some(scheme), Some(authority)) if host(scheme, authority).eq_ignore_ascii_case(engine) => {}
        _ => return None,
    }
    let kept = uri.path_and_query()?.as_str().strip_prefix(prefix)?;
    // Two slashes begin the name of another host, and browsers read a backslash as a slash.
    let is_path = kept.starts_with('/') && !kept.starts_with("//") && !kept.contains('\\');
    is_path.then(|| HeaderValue::from_str(kept).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_to_the_engine_is_one_to_the_gateway() {
        let kept = |location: &str, prefix| {
            let kept = at_gateway(&HeaderValue::from_str(location).unwrap(), "engine:8000", prefix)?;
            Some(kept.to_str().unwrap().to_owned())
        };
        for (location, expected) in [
            ("http://engine:8000/v1/chat/completions", Some("/v1/chat/completions")),
            ("https://ENGINE:8000/v1/x?a=b#c", Some("/v1/x?a=b")),
            ("/v1/x?a", Some("/v1/x?a")),
            ("http://engine:8000", Some("/")),
            ("http://engine/v1/x", None),
            ("http://engine:8001/v1/x", None),
            ("http://elsewhere:8000/v1/x", None),
            ("http://engine:8000@elsewhere/v1/x", None),
            ("//elsewhere/v1/x", None),
            ("http://engine:8000//elsewhere/x", None),
            ("/\\elsewhere/x", None),
            ("ftp://elsewhere/x", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(kept(location, "").as_deref(), expected, "{location}");
        }
        for (location, expected) in [
            ("http://engine:8000/base/v1/x", Some("/v1/x")),
            ("/base/v1/x", Some("/v1/x")),
            ("/base//elsewhere", None),
            ("/based/v1/x", None),
            ("/v1/x", None),
        ] {
            assert_eq!(kept(location, "/base").as_deref(), expected, "{location}");
        }
    }

    #[test]
    fn only_a_redirect_has_a_location_of_the_gateway() {
        let kept = |status: u16, location: &str| {
            let mut headers: HeaderMap = [(header::LOCATION, location.parse().unwrap())].into_iter().collect();
            keep_at_gateway(StatusCode::from_u16(status).unwrap(), &mut headers, "engine", "", "/v1/x/");
            headers.remove(header::LOCATION)
        };
        for status in [301, 302, 303, 307, 308] {
            assert_eq!(kept(status, "http://engine/v1/x").unwrap(), "/v1/x");
            assert_eq!(kept(status, "http://elsewhere/v1/x"), None);
        }
        assert_eq!((kept(300, "/v1/x"), kept(305, "/v1/x")), (None, None));
    }
}
