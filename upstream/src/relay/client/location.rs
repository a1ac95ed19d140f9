//! Redirects of an engine, for a client that must not leave the gateway.
//!
//! No redirect is followed here. A framework redirects to the path with or without a slash at its end (Starlette: 307),
//! which the client finds at the gateway too.

use super::host;
use http::uri::PathAndQuery;
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
    let kept = if REDIRECTS.contains(&status) { at_gateway(&location, engine, prefix, path) } else { None };
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

/// The path and the query of an address of the engine, as the gateway has them. `path`: that of the request, to which
/// the address may be relative.
fn at_gateway(location: &HeaderValue, engine: &str, prefix: &str, path: &str) -> Option<HeaderValue> {
    let text = location.to_str().ok()?;
    // Without its fragment, which is for the client alone.
    let text = text.split('#').next().unwrap_or_default();
    let target: PathAndQuery = if is_relative(text) {
        let directory = if text.starts_with('?') { path } else { &path[..=path.rfind('/')?] };
        format!("{prefix}{directory}{text}").parse().ok()?
    } else {
        let uri: Uri = text.parse().ok()?;
        match (uri.scheme(), uri.authority()) {
            // Two slashes begin the name of another host.
            (None, None) if text.starts_with('/') && !text.starts_with("//") => {}
            // An engine behind a proxy with TLS need not know of that.
            (Some(scheme), Some(authority)) if host(scheme, authority).eq_ignore_ascii_case(engine) => {}
            _ => return None,
        }
        uri.into_parts().path_and_query?
    };
    let path = without_dots(target.path());
    let mut kept = path.strip_prefix(prefix)?.to_owned();
    if let Some(query) = target.query() {
        kept.push('?');
        kept.push_str(query);
    }
    // Browsers read a backslash as a slash.
    let is_path = kept.starts_with('/') && !kept.starts_with("//") && !kept.contains('\\');
    is_path.then(|| HeaderValue::from_str(&kept).ok()).flatten()
}

/// Whether an address is relative to the path of the request: it has no scheme, and does not begin with a slash. An
/// empty one is none, because it would send the client to where it was.
fn is_relative(address: &str) -> bool {
    let first = address.split(['/', '?']).next().unwrap_or_default();
    !address.is_empty() && !address.starts_with('/') && !first.contains(':')
}

/// A path without the segments `.` and `..`, also encoded ones, as clients resolve it (RFC 3986, section 5.2.4). With
/// them the gateway's path could be one that the engine's address before it does not lead to.
fn without_dots(path: &str) -> String {
    let mut kept = Vec::new();
    let mut is_directory = false;
    for segment in path.split('/').skip(1) {
        let decoded = segment.to_ascii_lowercase().replace("%2e", ".");
        is_directory = matches!(&*decoded, "." | "..");
        match &*decoded {
            "." => {}
            ".." => drop(kept.pop()),
            _ => kept.push(segment),
        }
    }
    if is_directory {
        kept.push("");
    }
    format!("/{}", kept.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is kept of an address in the answer to a request for `/v1/a/b`.
    fn kept(location: &str, prefix: &str) -> Option<String> {
        let kept = at_gateway(&HeaderValue::from_str(location).unwrap(), "engine:8000", prefix, "/v1/a/b")?;
        Some(kept.to_str().unwrap().to_owned())
    }

    #[test]
    fn a_redirect_to_the_engine_is_one_to_the_gateway() {
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
            ("//elsewhere/../v1/x", None),
            ("/v1/../..//elsewhere", None),
            ("", None),
        ] {
            assert_eq!(kept(location, "").as_deref(), expected, "{location}");
        }
        for (location, expected) in [
            ("http://engine:8000/base/v1/x", Some("/v1/x")),
            ("/base/v1/x", Some("/v1/x")),
            ("/base//elsewhere", None),
            ("/based/v1/x", None),
            ("/base/../v1/x", None),
            ("/v1/x", None),
        ] {
            assert_eq!(kept(location, "/base").as_deref(), expected, "{location}");
        }
    }

    #[test]
    fn a_relative_redirect_is_resolved_within_the_prefix() {
        for (location, expected) in [
            ("c", "/v1/a/c"),
            ("c/?x=http://y/#z", "/v1/a/c/?x=http://y/"),
            ("?x=y", "/v1/a/b?x=y"),
            ("./c", "/v1/a/c"),
            ("..", "/v1/"),
            ("../c/./d", "/v1/c/d"),
            ("%2E./c", "/v1/c"),
        ] {
            assert_eq!(kept(location, "").as_deref(), Some(expected), "{location}");
            assert_eq!(kept(location, "/base").as_deref(), Some(expected), "{location}");
        }
        assert_eq!(kept("../../c", "").as_deref(), Some("/c"));
        assert_eq!(kept("../../../base/c", "/base").as_deref(), Some("/c"));
        for location in ["../../../c", "%2e%2e/.%2E/../c", "../../../based/c", "..\\c", "mailto:c", "engine:8000"] {
            assert_eq!(kept(location, "/base"), None, "{location}");
        }
        assert_eq!(kept("..//../..//elsewhere/c", ""), None, "it would be read as the name of a host");
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
