//! Which headers cross the gateway.
//!
//! Everything passes that has no reason not to: trace context, `user-agent`, headers that only an engine knows. Reasons
//! are that a header belongs to one connection (RFC 9110, section 7.6.1), that the client of the next connection sets
//! it itself, or that it is between the client and the gateway.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

/// Headers of one connection, besides those that `Connection` names.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Request headers that end at the gateway.
const OF_THE_GATEWAY: [HeaderName; 7] = [
    // The connection to the engine has its own.
    header::HOST,
    header::CONTENT_LENGTH,
    header::EXPECT,
    // A compressed stream could not be read. Engines compress nothing by default.
    header::ACCEPT_ENCODING,
    // Keys of the gateway's clients, as OpenAI, Anthropic and Azure call them. An engine must not learn them.
    header::AUTHORIZATION,
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("api-key"),
];

/// Prefix of the headers between the client and the gateway.
const PRIVATE: &str = "x-blockyard-";

/// Prefix of the headers of Amazon's model hosting. vLLM's `/invocations` takes the model from one of them, in place of
/// the one in the body, for which the request was checked and routed.
const SAGEMAKER: &str = "x-amzn-sagemaker-";

/// The data-parallel rank that is to serve a request, as vLLM and SGLang read it.
const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// The id of a request, which vLLM takes over.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Whether a relayed body is that of the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body {
    /// Byte for byte.
    Unchanged,
    /// Its length may differ.
    Changed,
}

/// The value of `Authorization` for an engine's API key. `None` if the key has characters that no header may have.
pub fn bearer(key: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {key}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// The headers of a request to an engine.
pub fn request(client: &HeaderMap, authorization: Option<&HeaderValue>) -> HeaderMap {
    let ends_here = |name: &HeaderName| {
        OF_THE_GATEWAY.contains(name) || [PRIVATE, SAGEMAKER].iter().any(|prefix| name.as_str().starts_with(prefix))
    };
    let mut headers = passed(client, ends_here);
    if let Some(value) = authorization {
        headers.insert(header::AUTHORIZATION, value.clone());
    }
    headers
}

/// Names the request as the gateway does in its log, in place of ids that the gateway did not accept.
pub fn set_request_id(headers: &mut HeaderMap, id: &str) {
    let mut sent = headers.get_all(REQUEST_ID).iter();
    let is_named = sent.next().is_some_and(|first| first == id) && sent.next().is_none();
    if !is_named && let Ok(id) = HeaderValue::from_str(id) {
        headers.insert(REQUEST_ID, id);
    }
}

/// Names the data-parallel rank that is to serve a request, in place of one that the client names.
pub fn set_rank(headers: &mut HeaderMap, rank: u32) {
    headers.insert(RANK, rank.into());
}

/// Asks the engine to switch its connection to another protocol.
pub fn set_upgrade(headers: &mut HeaderMap, protocol: &'static str) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(protocol));
}

/// The headers of an answer to the client.
pub fn response(engine: HeaderMap, body: Body) -> HeaderMap {
    let ends_here = |name: &HeaderName| {
        (body == Body::Changed && name == header::CONTENT_LENGTH) || name.as_str().starts_with(PRIVATE)
    };
    // Most answers have only headers that pass.
    if engine.keys().any(|name| HOP_BY_HOP.contains(name) || ends_here(name)) {
        passed(&engine, ends_here)
    } else {
        engine
    }
}

fn passed(headers: &HeaderMap, ends_here: impl Fn(&HeaderName) -> bool) -> HeaderMap {
    let connection = headers.get_all(header::CONNECTION);
    let named = |name: &HeaderName| {
        let mut lists = connection.iter().filter_map(|list| list.to_str().ok());
        lists.any(|list| list.split(',').any(|token| token.trim().eq_ignore_ascii_case(name.as_str())))
    };
    let mut passed = HeaderMap::with_capacity(headers.len() + 1);
    for (name, value) in headers {
        if !HOP_BY_HOP.contains(name) && !ends_here(name) && !named(name) {
            passed.append(name, value.clone());
        }
    }
    passed
}

#[cfg(test)]
mod tests;
