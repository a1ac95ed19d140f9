//! Access checks of every request: shutdown, reserved connections, number of headers, transfer codings, and requests of
//! web pages.
//!
//! A web page in a browser can send requests to any port of the same machine, and read the responses by DNS rebinding.
//! Three checks prevent this: `Host` must name this server; `Origin` must be this server's or one of `cors_origins`;
//! and a request that the browser marks as cross-site is rejected. Clients other than browsers send neither `Origin`
//! nor `Sec-Fetch-Site`.

use super::server::ConnectionInfo;
use crate::error::Error;
use crate::settings::{Origin, Settings};
use axum::extract::{MatchedPath, Request};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, CONNECTION, HOST, ORIGIN, TRANSFER_ENCODING, VARY,
};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version};
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;

/// Maximum URL length in bytes, as in most servers: far longer than any route, for query strings that proxies add.
const MAX_URL_BYTES: usize = 8 << 10;
/// Maximum number of headers: that of hyper for HTTP/1.1, which has none for HTTP/2. The error names it.
const MAX_HEADERS: usize = 100;
/// Seconds for which browsers cache the response to a preflight. Chromium caps it at 7200.
const PREFLIGHT_SECONDS: &str = "7200";

/// Methods that pages may use at the routes of this server.
const OWN_METHODS: &str = "GET, POST, OPTIONS";
/// Methods that pages may use at paths without a route, where requests are relayed with any of them.
const RELAYED_METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const REQUEST_PRIVATE_NETWORK: HeaderName = HeaderName::from_static("access-control-request-private-network");
const ALLOW_PRIVATE_NETWORK: HeaderName = HeaderName::from_static("access-control-allow-private-network");
/// Response headers that scripts may read beyond those of the Fetch standard.
const EXPOSED: &str = "x-request-id, retry-after, x-blockyard-explain";

/// Which requests are served, by host, origin and number of headers.
#[derive(Clone, Debug)]
pub(crate) struct AccessRules {
    /// Names of this server besides its addresses and `localhost`, in lower case.
    pub(crate) hosts: Vec<String>,
    /// Origins of other sites whose pages may use this server.
    pub(crate) origins: Vec<Origin>,
    /// Maximum bytes of the headers, for the error. The protocol layer checks it.
    pub(crate) max_headers: usize,
}

/// Middleware: rejects requests that `access` does not allow, and responds to preflight requests.
pub(crate) async fn check(
    access: &AccessRules,
    request: Request,
    next: impl AsyncFnOnce(Request) -> Response,
) -> Response {
    let (page, response) = access.begin(&request);
    let response = match response {
        Some(response) => response,
        None => next(request).await,
    };
    page.finish(response)
}

/// The same, for requests on connections of the API; see [`Admission`].
///
/// One layer, because a layer around a handler has a copy of its request.
pub(crate) async fn check_and_admit(
    access: &AccessRules,
    request: Request,
    next: impl AsyncFnOnce(Request) -> Response,
) -> Response {
    let (page, response) = access.begin(&request);
    if let Some(response) = response {
        return page.finish(response);
    }
    let admission = Admission::of(&request);
    let response = match admission.rejection(&request) {
        Some(error) => error.into_response(),
        None => next(request).await,
    };
    page.finish(admission.finish(response))
}

/// The page in a browser that a request comes from, if it is one of another site that may use this server.
struct Page<'a> {
    access: &'a AccessRules,
    allowed_origin: Option<HeaderValue>,
}

impl Page<'_> {
    fn finish(self, mut response: Response) -> Response {
        let headers = response.headers_mut();
        if let Some(origin) = self.allowed_origin {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
        }
        if !self.access.origins.is_empty() {
            headers.append(VARY, HeaderValue::from_static("origin"));
        }
        response
    }
}

/// Rejects new requests once the listener is closed, and everything but health checks and metrics on reserved
/// connections. Until then a server that shuts down serves requests of those that have not noticed yet.
struct Admission {
    is_closed: bool,
    is_reserved: bool,
    /// The next request must go to another server, or use another connection.
    ends_connection: bool,
}

impl Admission {
    fn of(request: &Request) -> Self {
        let connection = ConnectionInfo::of(request.extensions());
        let is_stopping = connection.is_some_and(|connection| connection.shutdown.is_announced());
        let is_reserved = connection.is_some_and(|connection| connection.reserved);
        Self {
            is_closed: connection.is_some_and(|connection| connection.shutdown.is_closed()),
            is_reserved,
            ends_connection: request.version() < Version::HTTP_2 && (is_stopping || is_reserved),
        }
    }

    fn rejection(&self, request: &Request) -> Option<Error> {
        if request.uri().path_and_query().is_some_and(|path| path.as_str().len() > MAX_URL_BYTES) {
            return Some(Error::UrlTooLong(MAX_URL_BYTES));
        }
        let is_health_check = matches!(request.uri().path(), "/live" | "/ready" | "/health" | "/ping" | "/metrics");
        match self {
            _ if is_health_check => None,
            Self { is_closed: true, .. } => Some(Error::ShuttingDown),
            Self { is_reserved: true, .. } => Some(Error::TooManyConnections),
            _ => None,
        }
    }

    fn finish(self, mut response: Response) -> Response {
        if self.ends_connection {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

impl AccessRules {
    pub(crate) fn new(settings: &Settings) -> Self {
        let hosts = settings.allowed_hosts.iter().map(|host| host.trim_end_matches('.').to_ascii_lowercase()).collect();
        Self { hosts, origins: settings.cors_origins.clone(), max_headers: settings.max_headers.as_usize() }
    }

    /// Checks a request. There is a response already if it is rejected, or a preflight.
    fn begin(&self, request: &Request) -> (Page<'_>, Option<Response>) {
        let origin = request.headers().get(ORIGIN);
        let allowed_origin = origin.filter(|origin| self.allows(origin.as_bytes())).cloned();
        let other_origin = origin.filter(|_| allowed_origin.is_none());
        let response = match self.check(request, other_origin, allowed_origin.is_some()) {
            Err(error) => Some(error.into_response()),
            Ok(()) if allowed_origin.is_some() && is_preflight(request) => Some(preflight(request)),
            Ok(()) => None,
        };
        (Page { access: self, allowed_origin }, response)
    }

    /// Whether pages of an origin may use this server.
    fn allows(&self, origin: &[u8]) -> bool {
        self.origins.iter().any(|Origin(known)| known == "*" || known.as_bytes().eq_ignore_ascii_case(origin))
    }

    /// `origin`: that of the page, unless it is allowed.
    fn check(&self, request: &Request, origin: Option<&HeaderValue>, origin_allowed: bool) -> Result<(), Error> {
        if request.headers().len() > MAX_HEADERS {
            return Err(Error::HeadersTooLarge(self.max_headers));
        }
        check_transfer_codings(request.headers())?;
        let connection = ConnectionInfo::of(request.extensions());
        let header = only_host(request);
        let known = connection.and_then(|connection| connection.allowed_host.get());
        let is_known = header.is_some_and(|header| known.is_some_and(|known| **known == *header));
        if !is_known || origin.is_some() {
            let host = host(request.uri(), request.headers())?;
            // RFC 9112, section 3.2. Requests within this process have none.
            let needs_header = connection.is_some() && request.version() == Version::HTTP_11;
            if needs_header && !request.headers().contains_key(HOST) {
                return Err(Error::Malformed("The request has no Host header.".into()));
            }
            if let (Some(connection), Some(host)) = (connection, &host) {
                if !self.is_own(host.host(), connection) {
                    return Err(Error::HostNotAllowed(host.host().into()));
                }
                if let Some(header) = header {
                    // Copied, because the header is a part of the buffer that the request was read into.
                    connection.allowed_host.get_or_init(|| header.into());
                }
            }
            if let Some(origin) = origin.filter(|origin| !is_same_host(origin.as_bytes(), host.as_ref())) {
                return Err(Error::OriginNotAllowed(String::from_utf8_lossy(origin.as_bytes()).into()));
            }
        }
        let is_cross_site = || request.headers().get(SEC_FETCH_SITE).is_some_and(|site| site == "cross-site");
        if !origin_allowed && is_cross_site() {
            return Err(Error::OriginNotAllowed("a cross-site request".into()));
        }
        Ok(())
    }

    /// Whether a host is a name of this server.
    fn is_own(&self, host: &str, connection: &ConnectionInfo) -> bool {
        let host = host.trim_end_matches('.');
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let address = bare.parse::<IpAddr>().ok();
        let is = |known: &str| [host, bare].into_iter().any(|name| name.eq_ignore_ascii_case(known));
        let listed = self.hosts.iter().any(|known| known == "*" || is(known));
        let loopback = address.map_or_else(|| is_localhost(bare), |address| address.is_loopback());
        // Health checks name the address that they connect to.
        let this = address.is_some() && address == connection.local.map(|local| local.to_canonical());
        listed || loopback || this || (!connection.loopback_only && self.hosts.is_empty())
    }
}

/// Rejects bodies with a transfer coding besides chunked, which the protocol layer would pass on encoded.
fn check_transfer_codings(headers: &HeaderMap) -> Result<(), Error> {
    for value in headers.get_all(TRANSFER_ENCODING) {
        for coding in String::from_utf8_lossy(value.as_bytes()).split(',').map(str::trim) {
            if !coding.is_empty() && !coding.eq_ignore_ascii_case("chunked") {
                return Err(Error::TransferCoding(coding.to_owned()));
            }
        }
    }
    Ok(())
}

/// Whether a name is `localhost` or below it (RFC 6761, 6.3).
fn is_localhost(name: &str) -> bool {
    const LOCALHOST: &str = "localhost";
    let Some((above, last)) = name.len().checked_sub(LOCALHOST.len()).and_then(|at| name.split_at_checked(at)) else {
        return false;
    };
    last.eq_ignore_ascii_case(LOCALHOST) && (above.is_empty() || above.ends_with('.'))
}

/// The `Host` header, if nothing else in the request names a host.
fn only_host(request: &Request) -> Option<&[u8]> {
    let mut named = request.headers().get_all(HOST).iter();
    let first = named.next().filter(|_| request.uri().authority().is_none())?;
    named.next().is_none().then_some(first.as_bytes())
}

/// The host that a request names; `None` for HTTP/1.0 and for requests within this process.
fn host(uri: &Uri, headers: &HeaderMap) -> Result<Option<Authority>, Error> {
    let mut named = headers.get_all(HOST).iter();
    let header = named.next();
    if named.next().is_some() {
        return Err(Error::Malformed("The request has more than one Host header.".into()));
    }
    match (uri.authority(), header) {
        (Some(authority), _) => Ok(Some(authority.clone())),
        (None, Some(host)) => Authority::try_from(host.as_bytes())
            .map(Some)
            .map_err(|_| Error::HostNotAllowed(String::from_utf8_lossy(host.as_bytes()).into())),
        (None, None) => Ok(None),
    }
}

/// Whether an origin's host and port are those of the request's `Host`. The scheme is not compared, because a proxy may
/// terminate TLS.
fn is_same_host(origin: &[u8], host: Option<&Authority>) -> bool {
    let (Ok(origin), Some(host)) = (std::str::from_utf8(origin), host) else { return false };
    let Ok(origin) = origin.parse::<Uri>() else { return false };
    let default = match origin.scheme_str() {
        Some("https") => 443,
        Some("http") => 80,
        _ => return false,
    };
    let ports = (origin.port_u16().unwrap_or(default), host.port_u16().unwrap_or(default));
    origin.host().is_some_and(|name| name.eq_ignore_ascii_case(host.host())) && ports.0 == ports.1
}

fn is_preflight(request: &Request) -> bool {
    request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

fn preflight(request: &Request) -> Response {
    let requested = request.headers();
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    let methods = match request.extensions().get::<MatchedPath>() {
        Some(_) => OWN_METHODS,
        None => RELAYED_METHODS,
    };
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(methods));
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_SECONDS));
    // Allows all headers: SDKs add headers of their own in each version.
    if let Some(names) = requested.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
        headers.append(VARY, HeaderValue::from_static("access-control-request-headers"));
    }
    if requested.get(REQUEST_PRIVATE_NETWORK).is_some_and(|value| value == "true") {
        headers.insert(ALLOW_PRIVATE_NETWORK, HeaderValue::from_static("true"));
    }
    response
}
