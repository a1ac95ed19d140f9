//! What one key may do, and what it has used of its limits.

use super::bucket::TokenBucket;
use super::file::KeyEntry;
use crate::error::Error;
use std::num::NonZero;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// The names of the two limits of a key, in messages and labels.
const REQUESTS: &str = "requests";
const TOKENS: &str = "tokens";

/// A key in use.
pub(crate) struct Key {
    /// The name in the key file, for the log.
    pub(crate) name: Arc<str>,
    /// The tenant of its requests.
    pub(crate) tenant: Option<Arc<str>>,
    /// The models that it may use; `None`: all.
    models: Option<Vec<String>>,
    requests: Option<TokenBucket>,
    tokens: Option<TokenBucket>,
    /// Its WebSocket connections end when this is cancelled.
    ended: CancellationToken,
}

/// A limit of a key, and what is used of it.
pub(crate) struct KeyLimit {
    /// What is limited.
    pub(crate) of: &'static str,
    pub(crate) per_minute: u32,
    /// What was taken and is not refilled yet. It may exceed the limit.
    pub(crate) used: f64,
}

impl Key {
    /// A key without limits.
    pub(super) fn unlimited(name: &str) -> Self {
        let ended = CancellationToken::new();
        Self { name: name.into(), tenant: None, models: None, requests: None, tokens: None, ended }
    }

    /// The key of an entry. `previous` is the same key before the file changed: a limit that is the same keeps what was
    /// used of it.
    pub(super) fn new(entry: &KeyEntry, previous: Option<&Self>) -> Self {
        let bucket = |limit: Option<NonZero<u32>>, previous: Option<&TokenBucket>| {
            let limit = limit?.get();
            let previous = previous.filter(|bucket| bucket.per_minute() == limit);
            Some(previous.map_or_else(|| TokenBucket::new(limit), TokenBucket::clone))
        };
        Self {
            name: entry.name.as_str().into(),
            tenant: entry.tenant.as_deref().map(Arc::from),
            models: entry.models.clone(),
            requests: bucket(entry.requests_per_minute, previous.and_then(|key| key.requests.as_ref())),
            tokens: bucket(entry.tokens_per_minute, previous.and_then(|key| key.tokens.as_ref())),
            ended: previous.map(|key| &key.ended).filter(|ended| !ended.is_cancelled()).cloned().unwrap_or_default(),
        }
    }

    /// Why the key cannot open WebSocket connections, whose messages are not read.
    pub(crate) fn websocket_problem(&self) -> Option<&'static str> {
        if self.models.is_some() {
            Some("it may use some models only, and messages on the connection can name others")
        } else if self.tokens.is_some() {
            Some("it has a limit of tokens per minute, and the tokens of the connection are not known")
        } else {
            None
        }
    }

    /// Ends the WebSocket connections that were opened with the key.
    pub(super) fn end_websockets(&self) {
        self.ended.cancel();
    }

    /// Resolves when the key can have no WebSocket connection any more.
    pub(crate) async fn websockets_end(&self) {
        self.ended.cancelled().await;
    }

    /// Whether the key may use only some models.
    pub(crate) fn has_models(&self) -> bool {
        self.models.is_some()
    }

    /// Whether the key may use a model.
    pub(crate) fn allows(&self, model: &str) -> bool {
        self.models.as_ref().is_none_or(|models| models.iter().any(|name| name == model))
    }

    /// Counts a request against the limit of requests.
    pub(crate) fn take_request(&self) -> Result<(), Error> {
        take(self.requests.as_ref(), 1, REQUESTS)
    }

    /// Takes the tokens of a prompt from the limit of tokens.
    pub(crate) fn take_prompt(&self, tokens: u64) -> Result<(), Error> {
        take(self.tokens.as_ref(), tokens, TOKENS)
    }

    /// The limits of the key.
    pub(crate) fn limits(&self) -> impl Iterator<Item = KeyLimit> {
        let limit = |of: &'static str, bucket: Option<&TokenBucket>| {
            bucket.map(|bucket| KeyLimit { of, per_minute: bucket.per_minute(), used: bucket.used() })
        };
        [limit(REQUESTS, self.requests.as_ref()), limit(TOKENS, self.tokens.as_ref())].into_iter().flatten()
    }

    /// Corrects what was taken for a request to what it has used.
    pub(crate) fn settle(&self, taken: u64, used: u64) {
        if let Some(bucket) = &self.tokens {
            bucket.charge(used as f64 - taken as f64);
        }
    }
}

fn take(bucket: Option<&TokenBucket>, amount: u64, what: &'static str) -> Result<(), Error> {
    let Some(bucket) = bucket else { return Ok(()) };
    let limited = |wait| Error::RateLimited { what, per_minute: bucket.per_minute(), wait };
    bucket.try_take(amount).map_err(limited)
}
