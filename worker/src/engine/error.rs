//! Why a request was rejected or failed.

use super::ErrorResponse;
use std::sync::Arc;
use std::time::Duration;

/// A request was rejected or failed. The frontend maps it to an HTTP status.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The model is not served here.
    #[error("model `{0}` does not exist")]
    UnknownModel(String),
    /// The prompt, or prompt and requested tokens, do not fit the context.
    #[error("prompt of {prompt} tokens exceeds the context of {context} tokens")]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens that fit, prompt and output together.
        context: usize,
    },
    /// A parameter of the request is not supported or invalid.
    #[error("{field}: {problem}")]
    Invalid {
        /// The request's field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The queue is full. The client may try again after the given time.
    #[error("overloaded, try again in {} s", .retry_after.as_secs())]
    Overloaded {
        /// The estimated time until a request is accepted again.
        retry_after: Duration,
    },
    /// The first token cannot be computed before the request's deadline.
    #[error("the deadline cannot be met")]
    DeadlineExceeded,
    /// The output was not read for this time.
    #[error("the output was not read for {} s", .0.as_secs())]
    Unread(Duration),
    /// No engine is reachable that serves the model. An engine that is reachable but cannot serve now is overloaded
    /// instead.
    #[error("unavailable: {0}")]
    Unavailable(String),
    /// The engine failed.
    #[error("engine failed: {0}")]
    Failed(String),
    /// The server that the request was relayed to answered with an error status. The client gets the response as it is.
    #[error("the engine answered with status {}", .0.status)]
    Relayed(Arc<ErrorResponse>),
}
