//! What the API description of a server (`/openapi.json`) says: whether the server keeps the caches of salts apart, and
//! whether it lacks a kind of endpoints.
//!
//! vLLM and recent SGLang have a field `cache_salt`. Most other servers ignore fields that they do not know, so an
//! answer to a request with a salt would prove nothing.
//!
//! vLLM describes the endpoints that its model has: those that generate, or those of pooling models.

use crate::ask::{Page, page};
use crate::relay::client::Client;
use http::HeaderValue;
use memchr::memmem;
use worker::engine::EndpointKind;

/// What a server says of its API.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ApiDescription {
    /// Requests have the field `cache_salt`.
    pub has_cache_salt: bool,
    /// The only kind of endpoints that it describes. `None`: both, or neither.
    pub only: Option<EndpointKind>,
}

impl ApiDescription {
    /// The description of a server; an empty one if it has none. `None`: it does not answer.
    pub async fn ask(client: &Client, api_key: Option<&HeaderValue>) -> Option<Self> {
        match page(client, api_key, "/openapi.json").await {
            Page::Body(description) => Some(Self::read(&description)),
            // Tenants must not share a cache because a description could not be read.
            Page::Absent | Page::TooLarge => Some(Self::default()),
            Page::Failed => None,
        }
    }

    fn read(description: &[u8]) -> Self {
        let has = |name: &str| memmem::find(description, format!("\"{name}\"").as_bytes()).is_some();
        let has_kind = |kind: EndpointKind| kind.paths().iter().any(|path| has(path));
        let only = match (has_kind(EndpointKind::Generate), has_kind(EndpointKind::Pooling)) {
            (true, false) => Some(EndpointKind::Generate),
            (false, true) => Some(EndpointKind::Pooling),
            (true, true) | (false, false) => None,
        };
        Self { has_cache_salt: has("cache_salt"), only }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_description_says_which_endpoints_there_are() {
        let read = |paths: &[&str]| {
            let paths = paths.iter().map(|path| ((*path).to_owned(), json!({ "post": {} })));
            let paths = paths.collect::<serde_json::Map<_, _>>();
            ApiDescription::read(json!({ "openapi": "3.1.0", "paths": paths }).to_string().as_bytes()).only
        };
        assert_eq!(read(&["/health", "/v1/chat/completions", "/tokenize"]), Some(EndpointKind::Generate));
        assert_eq!(read(&["/health", "/v1/embeddings", "/tokenize"]), Some(EndpointKind::Pooling));
        assert_eq!(read(&["/v1/chat/completions/render", "/score"]), Some(EndpointKind::Pooling));
        assert_eq!(read(&["/v1/completions", "/v1/embeddings"]), None);
        assert_eq!(read(&["/v1/models"]), None);
    }
}
