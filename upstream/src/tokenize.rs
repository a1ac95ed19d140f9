//! Asks a server for the tokens of a prompt: `POST /tokenize`, as vLLM has it.
//!
//! The request bypasses the router, because it takes no place in the server's batch.

use crate::ask::{self, AnswerLimits, ServerAnswer};
use crate::relay::client::Client;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::{HeaderValue, StatusCode};
use serde::Deserialize;
use std::time::Duration;
use worker::engine::{Tokenize, TokenizeError};

/// Limits of an answer: the ids of a million tokens. A server that takes longer is too busy for the prompt as well.
const ANSWER: AnswerLimits = AnswerLimits { bytes: 8 << 20, time: Duration::from_secs(2) };
/// Maximum size of the part of an error response that is logged.
const MAX_REASON: usize = 300;

/// The tokenizer of one server.
#[derive(Clone)]
pub struct TokenizeClient {
    client: Client,
    api_key: Option<HeaderValue>,
    url: String,
    is_vllm: bool,
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
    /// Their number. llama.cpp's endpoint of this name does not say it: it takes other fields, and has no tokens for
    /// these.
    count: Option<usize>,
}

impl TokenizeClient {
    /// The tokenizer of the server behind `client`, whose `url` is its name in log lines.
    pub fn new(client: Client, api_key: Option<HeaderValue>, url: String) -> Self {
        Self { client, api_key, url, is_vllm: false }
    }

    /// The same, of a server that is vLLM or not.
    #[must_use]
    pub fn of_vllm(self, is_vllm: bool) -> Self {
        Self { is_vllm, ..self }
    }

    async fn ask(&self, request: Bytes) -> Result<Vec<u32>, TokenizeError> {
        let failed = |error: String| TokenizeError::Failed(format!("/tokenize: {error}"));
        let answer = ask::post(&self.client, self.api_key.as_ref(), "/tokenize", request, ANSWER).await;
        let ServerAnswer { status, body, .. } = answer.map_err(|error| failed(error.to_string()))?;
        match status {
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => {
                Err(TokenizeError::Unsupported)
            }
            StatusCode::TOO_MANY_REQUESTS => Err(failed(status.to_string())),
            status if status.is_client_error() => {
                let reason = String::from_utf8_lossy(&body[..body.len().min(MAX_REASON)]);
                Err(TokenizeError::Refused(format!("{status}: {reason}")))
            }
            status if !status.is_success() => Err(failed(status.to_string())),
            _ => {
                let answer: Result<Tokenized, _> = serde_json::from_slice(&body);
                let answer = answer.map_err(|error| failed(error.to_string()))?;
                answer.count.map(|_| answer.tokens).ok_or(TokenizeError::Unsupported)
            }
        }
    }
}

impl Tokenize for TokenizeClient {
    fn name(&self) -> &str {
        &self.url
    }

    fn tokenize(&self, request: Bytes) -> BoxFuture<'_, Result<Vec<u32>, TokenizeError>> {
        self.ask(request).boxed()
    }

    fn converts_as_vllm(&self) -> bool {
        self.is_vllm
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::client::Settings;
    use crate::relay::fake::{FakeEngine, Script};
    use crate::relay::headers;
    use serde_json::json;

    #[tokio::test]
    async fn an_answer_is_its_tokens_or_why_there_are_none() {
        let answers = [(200, json!({ "count": 2, "tokens": [7, 70_000] })), (404, json!({})), (400, json!("odd"))];
        let scripts = answers.iter().map(|(status, body)| Script::json(*status, body));
        let of_llama_cpp = Script::json(200, &json!({ "tokens": [] }));
        let last = [Script::json(500, &json!({})), Script::json(200, &json!({ "tokens": [-1] })), Script::close()];
        let server = FakeEngine::start(scripts.chain([of_llama_cpp]).chain(last)).await.unwrap();
        let client = Client::new(&server.uri(), &Settings::default()).unwrap();
        let tokenizer = TokenizeClient::new(client, headers::bearer("key"), "server".to_owned());
        assert!(!tokenizer.converts_as_vllm() && tokenizer.clone().of_vllm(true).converts_as_vllm());
        let ask = || tokenizer.tokenize(Bytes::from_static(b"{\"prompt\":\"a\"}"));
        assert_eq!(ask().await, Ok(vec![7, 70_000]));
        assert_eq!(ask().await, Err(TokenizeError::Unsupported));
        assert_eq!(ask().await, Err(TokenizeError::Refused("400 Bad Request: \"odd\"".to_owned())));
        assert_eq!(ask().await, Err(TokenizeError::Unsupported), "of llama.cpp");
        for _ in 0..3 {
            assert!(matches!(ask().await, Err(TokenizeError::Failed(_))));
        }
        let asked = &server.requests()[0];
        assert_eq!((asked.uri.path(), &asked.body[..]), ("/tokenize", &b"{\"prompt\":\"a\"}"[..]));
        assert_eq!(
            (&asked.headers["authorization"], &asked.headers["content-type"]),
            (&HeaderValue::from_static("Bearer key"), &HeaderValue::from_static("application/json"))
        );
    }
}
