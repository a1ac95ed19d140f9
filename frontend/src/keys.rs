//! API keys: the file of their hashes, what each key may do, and its limits.
//!
//! ```text
//!   KeyFile ── names, hashes, limits ─▶ ApiKeys: hash ─▶ Key ── admits requests, charges tokens
//! ```
//! Not here: how a request is authenticated, and which endpoints need a key (`http::authenticate`).

mod bucket;
mod file;
mod hash;
mod key;
mod live;

pub use file::{KeyEntry, KeyFile, KeyFileError};
pub(crate) use hash::MAX_KEY_BYTES;
pub use hash::{ApiKey, KeyHash};
pub(crate) use key::{Key, KeyLimit};
pub(crate) use live::ApiKeys;

use axum::http::HeaderName;

/// Headers of the key besides `Authorization`, as clients of Azure and Anthropic send it.
pub(crate) static KEY_HEADERS: [HeaderName; 2] =
    [HeaderName::from_static("api-key"), HeaderName::from_static("x-api-key")];

/// Maximum length of a tenant's name, and of a key's.
pub(crate) const MAX_NAME_BYTES: usize = 64;

/// Whether a text is a valid name of a tenant, or of a key: it appears in headers, logs and labels.
pub(crate) fn is_name(text: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(&byte);
    text.len() <= MAX_NAME_BYTES && text.bytes().all(is_valid)
}
