//! The tokens of a prompt, from the engine that will compute it.

use bytes::Bytes;
use futures::future::BoxFuture;

/// An engine that tokenizes prompts for others. Its answer costs it no place in a batch.
pub trait Tokenize: Send + Sync + 'static {
    /// The engine's name in log lines.
    fn name(&self) -> &str;

    /// The tokens of the prompt in the body of a request to vLLM's `/tokenize`. The implementation limits the time and
    /// the size of the answer.
    fn tokenize(&self, request: Bytes) -> BoxFuture<'_, Result<Vec<u32>, TokenizeError>>;

    /// Whether the engine makes chats of requests of Anthropic's Messages API and of OpenAI's Responses API as vLLM
    /// does. Others do it in ways of their own, so that the tokens of such requests are not known.
    fn converts_as_vllm(&self) -> bool {
        false
    }
}

/// Why an engine returns no tokens.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TokenizeError {
    /// The engine has no such endpoint.
    #[error("the engine has no /tokenize")]
    Unsupported,
    /// The engine rejected this prompt.
    #[error("the engine refused the prompt: {0}")]
    Refused(String),
    /// The engine failed, or took too long.
    #[error("{0}")]
    Failed(String),
}
