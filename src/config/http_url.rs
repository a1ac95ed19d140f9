//! Checks that the URLs of HTTP servers have in common.

use http::Uri;
use http::uri::Authority;

/// The first problem of a URL that requests are sent to; `Ok` if its scheme, host and port can be used.
pub(super) fn check(url: &Uri) -> Result<(), &'static str> {
    if !matches!(url.scheme_str(), Some("http" | "https")) {
        return Err("no http:// or https:// at the start");
    }
    let authority = url.authority().map_or("", Authority::as_str);
    let host_and_port = authority.rsplit_once('@').map_or(authority, |(_, rest)| rest);
    let host = url.host().unwrap_or_default();
    if host.is_empty() {
        return Err("no host");
    }
    // Without this check a port that is none would become that of the scheme.
    let has_port = host_and_port.len() > host.len();
    if has_port && url.port_u16().is_none_or(|port| port == 0) {
        return Err("the port is not a number from 1 to 65535");
    }
    Ok(())
}

/// Whether the URL has a user or a password.
pub(super) fn has_user(url: &Uri) -> bool {
    url.authority().is_some_and(|authority| authority.as_str().contains('@'))
}
