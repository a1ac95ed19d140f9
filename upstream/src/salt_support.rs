//! Whether a server keeps the caches of salts apart, as its API description says.
//!
//! vLLM and recent SGLang have a field `cache_salt`. Most other servers ignore fields that they do not know, so an
//! answer to a request with a salt would prove nothing.

use crate::ask::{Page, page};
use crate::relay::client::Client;
use http::HeaderValue;
use memchr::memmem;

/// Whether the API description of a server (`/openapi.json`) has the field `cache_salt`. `None`: it does not answer.
pub async fn takes_salts(client: &Client, api_key: Option<&HeaderValue>) -> Option<bool> {
    match page(client, api_key, "/openapi.json").await {
        Page::Body(description) => Some(memmem::find(&description, br#""cache_salt""#).is_some()),
        // Tenants must not share a cache because a description could not be read.
        Page::Absent | Page::TooLarge => Some(false),
        Page::Failed => None,
    }
}
