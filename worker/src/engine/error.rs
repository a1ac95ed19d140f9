//! Why a request was rejected or failed.

use super::{ErrorKind, ErrorResponse};
use http::StatusCode;
use spans::LogLimit;
use std::sync::Arc;
use std::time::Duration;

/// Limits the log lines about the limit of open files: each request fails.
static OUT_OF_FILES: LogLimit = LogLimit::new(1, Duration::from_secs(30));

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
    /// The connection to the engine ended after the engine had got the request, and before it answered. It may have
    /// computed the request.
    #[error("no answer: {0}")]
    NoAnswer(String),
    /// The engine's process has answered nothing for seconds, not even a check that computes nothing. It may have
    /// computed the request.
    #[error("unresponsive: {0}")]
    Unresponsive(String),
    /// This process has reached its limit of open files and cannot connect to an engine.
    #[error("no connection to another server can be opened: the limit of open files is reached")]
    OutOfFiles,
    /// The engine failed.
    #[error("engine failed: {0}")]
    Failed(String),
    /// The server that the request was relayed to answered with an error status. The client gets the response as it is.
    #[error("{}", .0.summary())]
    Relayed(Arc<ErrorResponse>),
}

impl Error {
    /// [`OutOfFiles`](Self::OutOfFiles), and a log line that says what to change.
    pub fn out_of_files() -> Self {
        if let Some(suppressed) = OUT_OF_FILES.admit() {
            tracing::error!(
                parent: None,
                suppressed,
                "requests get 503: no connection to another server can be opened, because the limit of open files is \
                 reached; raise it (ulimit -n, LimitNOFILE= in systemd), or lower frontend.max_connections"
            );
        }
        Self::OutOfFiles
    }

    /// Whether the engine has computed nothing for the request: it could not be reached, had no room, or refused the
    /// request. A proxy before a server that cannot be reached answers with 502, and a gateway in a loop with 508.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::UnknownModel(_)
            | Self::PromptTooLong { .. }
            | Self::Invalid { .. }
            | Self::Overloaded { .. }
            | Self::Unavailable(_)
            | Self::OutOfFiles => true,
            Self::DeadlineExceeded | Self::Unread(_) | Self::NoAnswer(_) | Self::Unresponsive(_) | Self::Failed(_) => {
                false
            }
            Self::Relayed(response) => match response.kind {
                ErrorKind::Request | ErrorKind::Busy(_) => true,
                ErrorKind::Fault => {
                    let refusals = [StatusCode::NOT_IMPLEMENTED, StatusCode::BAD_GATEWAY, StatusCode::LOOP_DETECTED];
                    refusals.contains(&response.status)
                }
            },
        }
    }

    /// Whether no server has carried out the request, whatever it asks for. A proxy may answer with 502 after its
    /// server has got the request.
    pub fn is_unprocessed(&self) -> bool {
        let may_be_of_proxy = matches!(self, Self::Relayed(response) if response.status == StatusCode::BAD_GATEWAY);
        self.is_refusal() && !may_be_of_proxy
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderMap;

    #[test]
    fn an_engine_that_fails_may_have_computed_the_request() {
        let relayed = |status: StatusCode, kind| {
            let (headers, body) = (HeaderMap::new(), bytes::Bytes::new());
            Error::Relayed(Arc::new(ErrorResponse { status, headers, body, kind, replaces: None }))
        };
        for (error, expected) in [
            (Error::UnknownModel("m".to_owned()), true),
            (Error::PromptTooLong { prompt: 9, context: 8 }, true),
            (Error::Invalid { field: "prompt", problem: "has no tokens".to_owned() }, true),
            (Error::Overloaded { retry_after: Duration::from_secs(1) }, true),
            (Error::Unavailable("connection refused".to_owned()), true),
            (Error::NoAnswer("connection closed".to_owned()), false),
            (Error::Unresponsive("no answer within 10 s".to_owned()), false),
            (Error::OutOfFiles, true),
            (relayed(StatusCode::BAD_REQUEST, ErrorKind::Request), true),
            (relayed(StatusCode::SERVICE_UNAVAILABLE, ErrorKind::Busy(Duration::from_secs(1))), true),
            (relayed(StatusCode::BAD_GATEWAY, ErrorKind::Fault), true),
            (relayed(StatusCode::LOOP_DETECTED, ErrorKind::Fault), true),
            (relayed(StatusCode::INTERNAL_SERVER_ERROR, ErrorKind::Fault), false),
            (relayed(StatusCode::GATEWAY_TIMEOUT, ErrorKind::Fault), false),
            (Error::DeadlineExceeded, false),
            (Error::Unread(Duration::from_secs(30)), false),
            (Error::Failed("out of memory".to_owned()), false),
        ] {
            assert_eq!(error.is_refusal(), expected, "{error}");
            let is_bad_gateway = matches!(&error, Error::Relayed(answer) if answer.status == StatusCode::BAD_GATEWAY);
            assert_eq!(error.is_unprocessed(), expected && !is_bad_gateway, "{error}");
        }
    }
}
