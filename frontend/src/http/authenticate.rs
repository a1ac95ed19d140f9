//! Authentication of requests by API key, before their body is read.
//!
//! Not here: the keys and their limits (`keys`), and preflight requests, which browsers send without a key and `access`
//! answers.

use super::RequestContext;
use crate::error::Error;
use crate::keys::{ApiKeys, KEY_HEADERS, MAX_KEY_BYTES};
use crate::settings::TenantHeader;
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// Paths that need no key: load balancers and orchestrators have none.
const HEALTH: [&str; 4] = ["/live", "/ready", "/health", "/ping"];

/// State of the middleware [`authenticate`].
pub(crate) struct Authentication {
    pub(crate) keys: Arc<ApiKeys>,
    /// `/metrics` needs a key too.
    pub(crate) metrics_need_key: bool,
    /// The header in which clients may name a tenant.
    pub(crate) tenant_header: Option<TenantHeader>,
}

/// Middleware: rejects requests without a known key, and those beyond the key's limit of requests.
pub(crate) async fn authenticate(
    authentication: &Authentication,
    mut request: Request,
    next: impl AsyncFnOnce(Request) -> Response,
) -> Response {
    let path = request.uri().path();
    if HEALTH.contains(&path) || (path == "/metrics" && !authentication.metrics_need_key) {
        return next(request).await;
    }
    let presented = presented(request.headers());
    let key = presented.and_then(|key| authentication.keys.find(key).ok_or(Error::WrongKey));
    let admitted = key.and_then(|key| {
        RequestContext::of(request.extensions()).set_key(Arc::clone(&key));
        key.take_request()
    });
    if let Err(error) = admitted {
        return error.into_response();
    }
    // Nothing behind this point needs the key, or may log it or pass it on.
    request.headers_mut().remove(AUTHORIZATION);
    for name in &KEY_HEADERS {
        request.headers_mut().remove(name);
    }
    // The tenant of a key wins. Another gateway behind this one must not believe the header of the client.
    let has_tenant = RequestContext::of(request.extensions()).key().is_some_and(|key| key.tenant.is_some());
    if let Some(TenantHeader(name)) = authentication.tenant_header.as_ref().filter(|_| has_tenant) {
        request.headers_mut().remove(name);
    }
    next(request).await
}

/// The key of a request. Several headers may have it, but not different ones: a proxy and this server must not mean
/// different clients.
fn presented(headers: &HeaderMap) -> Result<&[u8], Error> {
    let bearer = headers.get_all(AUTHORIZATION).iter().filter_map(|value| bearer(value.as_bytes()));
    let others = KEY_HEADERS.iter().flat_map(|name| headers.get_all(name)).map(|value| value.as_bytes().trim_ascii());
    let mut keys = bearer.chain(others);
    let key = keys.next().filter(|key| !key.is_empty()).ok_or(Error::NoKey)?;
    if keys.any(|other| other != key) {
        return Err(Error::SeveralKeys);
    }
    if key.len() > MAX_KEY_BYTES { Err(Error::WrongKey) } else { Ok(key) }
}

/// The token of an `Authorization` header with the scheme `Bearer`, whose case does not matter (RFC 9110, 11.1). Other
/// schemes are not for this server.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer";
    let (scheme, token) = value.split_at_checked(SCHEME.len())?;
    let is_separated = token.first().is_none_or(|byte| matches!(byte, b' ' | b'\t'));
    (scheme.eq_ignore_ascii_case(SCHEME) && is_separated).then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderName;

    fn of(headers: &[(&'static str, &str)]) -> Result<String, Error> {
        let pairs = headers.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()));
        let mut all = HeaderMap::new();
        pairs.for_each(|(name, value)| {
            all.append(name, value);
        });
        presented(&all).map(|key| String::from_utf8(key.to_vec()).unwrap())
    }

    #[test]
    fn the_key_is_found_where_clients_send_it() {
        for headers in [
            &[("authorization", "Bearer k1")][..],
            &[("authorization", "bearer   k1 ")],
            &[("authorization", "BEARER\tk1")],
            &[("api-key", "k1")],
            &[("x-api-key", " k1")],
            &[("authorization", "Basic dTpw"), ("x-api-key", "k1")],
            &[("authorization", "Bearer k1"), ("x-api-key", "k1"), ("api-key", "k1")],
        ] {
            assert_eq!(of(headers), Ok("k1".to_owned()), "{headers:?}");
        }
    }

    #[test]
    fn a_request_without_one_key_is_rejected() {
        let long = "k".repeat(MAX_KEY_BYTES + 1);
        let cases: [(&[(&'static str, &str)], Error); 11] = [
            (&[], Error::NoKey),
            (&[("authorization", "Bearer")], Error::NoKey),
            (&[("authorization", "Bearer ")], Error::NoKey),
            (&[("authorization", "Bearerk1")], Error::NoKey),
            (&[("authorization", "k1")], Error::NoKey),
            (&[("authorization", "Basic dTpw")], Error::NoKey),
            (&[("x-api-key", "")], Error::NoKey),
            (&[("authorization", "Bearer k1"), ("authorization", "Bearer k2")], Error::SeveralKeys),
            (&[("authorization", "Bearer k1"), ("x-api-key", "k2")], Error::SeveralKeys),
            (&[("authorization", "Bearer k1"), ("x-api-key", "")], Error::SeveralKeys),
            (&[("x-api-key", &long)], Error::WrongKey),
        ];
        for (headers, expected) in cases {
            assert_eq!(of(headers), Err(expected), "{headers:?}");
        }
    }
}
