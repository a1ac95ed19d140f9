//! The [`Engine`] interface: an engine turns a request into a stream of tokens. A model runtime, a worker on another
//! machine and the router are engines. The frontend holds one `Arc<dyn Engine>` and does not know which.

mod attempts;
#[cfg(test)]
pub(crate) mod contract;
mod error;
mod model_card;
mod output;
mod prefetch;
mod relay;
mod request;
mod tokenize;

pub use attempts::Attempts;
pub use error::Error;
/// Parts of a [`Request`], re-exported for crates that do not use kvbm.
pub use kvbm::{Domain, Priority, Retention};
pub use model_card::{ModelCard, SamplingDefaults, UNKNOWN_CONTEXT};
pub use output::{EndToken, FinishReason, Logprobs, Output, PromptReport, Tokens};
pub use prefetch::{PeerMemory, PrefetchError, Prefetched, PrefixCopy};
pub use relay::{
    Continuation, Duplex, EndpointKind, ErrorKind, ErrorResponse, HttpRequest, RelayProgress, RelayReport, RelayRest,
    ResponseHead, Switched, Tunnel, below_collection, computes_tokens, is_inference, may_be_repeated, response_id,
};
pub use request::{
    Conversation, GroupId, Handoff, Request, RequestAttributes, RequestGroup, Sampling, StopConditions, Work,
};
pub use tokenize::{Tokenize, TokenizeError};

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use std::sync::Arc;
use std::time::Duration;

/// Turns requests into streams of tokens.
///
/// # Contract
/// - `generate` MUST reject a request that is recognisably impossible (unknown model, prompt longer than the context)
///   before it resolves; later failures arrive as the last item of the stream.
/// - The stream MUST end with exactly one [`Tokens`] whose `finish` is set, or with an error, or (for
///   [`Work::Prefill`]) with exactly one [`Output::Handoff`], as soon as blocks can be fetched, and exactly one
///   [`Output::Prefilled`], after which it MUST stay open until it is dropped. Until then the engine keeps the blocks,
///   unless they are not fetched for long or other requests need their memory.
/// - A [`Work::Resume`] MUST wait for blocks that are still being computed, and MUST compute them when that prefill
///   fails or makes no progress.
/// - For [`Work::Relay`] the stream MUST be one [`Output::Head`], then [`Output::Body`], then one [`Output::End`], or
///   an error at any point. `Head` MUST NOT come before the response has output: a chunk that only names a role is
///   none. Until then another engine may be tried. A response with an error status, or a redirect, is
///   [`Error::Relayed`]. After a `Head` with a [`Tunnel`] nothing follows: the stream stays open until it is dropped,
///   and holds what the engine has reserved for the request.
/// - `End` MUST come as soon as the response is known to be whole. Of a stream whose server says so before it ends its
///   body, further `Body` MAY follow it, and the stream MUST end within seconds then, without an error.
/// - Before an error after the `Head`, an engine that [continues streams](Self::continues_streams) MAY send one
///   [`Output::Rest`]. Another one that gets the request in it MUST send the rest of the stream, with a `Head` before
///   it and an `End` that reports of the whole response, and MUST fail if its text would not be the same.
/// - A stream that is not read MUST NOT delay other requests: the engine stops generating for it, gives its slot in
///   the batch and its memory to other requests, and MAY end it with [`Error::Unread`] after half a minute.
/// - Dropping the future or the stream cancels the request; the engine MUST have stopped computing for it within one
///   step.
/// - The same request with the same seed MUST give the same tokens, whatever else is running, also when another engine
///   has generated the first of them.
/// - `prefetch` MUST NOT delay requests, and MUST NOT evict blocks that requests use: the engine declines what it has
///   no room for, and gives way while requests wait. Dropping the future MUST stop the copy.
/// - The kind of an error decides whether the engine is tried again, so it MUST be exact. [`Error::UnknownModel`],
///   [`Error::PromptTooLong`], [`Error::Invalid`], [`Error::DeadlineExceeded`] and [`Error::Unread`] are caused by
///   the request and say nothing about the engine, and [`Error::OutOfFiles`] is caused by this process.
///   [`Error::Overloaded`] is back-pressure: the caller waits, and the engine does not count as faulty.
///   [`Error::Unavailable`], [`Error::NoAnswer`], [`Error::Unresponsive`] and [`Error::Failed`] are faults. An
///   [`Error::Relayed`] says its kind: 429 and 503 are back-pressure, with the time of `Retry-After` or else one
///   second; other statuses below 500, and 501, are caused by the request. `Unavailable` is a server that cannot be
///   reached, `NoAnswer` one that got the request and closed the connection, and `Unresponsive` one that answers
///   nothing: any other request to it would wait, too.
/// - An engine that sends requests to other engines MUST count them in [`RequestAttributes::attempts`].
pub trait Engine: Send + Sync + 'static {
    /// Starts a request.
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>>;

    /// The models that are served now, base models before adapters. Never fails because one of several engines is
    /// unavailable.
    fn models(&self) -> Vec<Arc<ModelCard>>;

    /// Why a model that was served until recently is not served now, although it is expected back. `None` for models
    /// that are served, and for names that are unknown.
    fn absence(&self, _model: &str) -> Option<String> {
        None
    }

    /// Whether a model that is served gets requests now: `false` if all of its workers are cordoned or fail.
    fn is_available(&self, _model: &str) -> bool {
        true
    }

    /// The model that is to serve a conversation under this name, if the name stands for other models. Each of these
    /// has tokens of its own, so it is chosen before the prompt of a relayed request is tokenized, and the request
    /// names it.
    fn resolve(&self, _name: &str, _conversation: &Conversation<'_>) -> Option<Arc<ModelCard>> {
        None
    }

    /// Whether requests can be served now.
    fn readiness(&self) -> Readiness;

    /// The only kind of endpoints that the engine has for relayed requests. `None`: it may have any. A request for the
    /// other kind is sent to it only if the model has no engine for that.
    fn only_endpoint_kind(&self) -> Option<EndpointKind> {
        None
    }

    /// Whether the engine refuses a relayed request: one of a cache domain other than the shared one, because it cannot
    /// keep the caches of domains apart at this endpoint, or one for the rest of a stream, because it does not continue
    /// streams. The request is sent to it only if all engines of the model refuse it: then for the error.
    fn refuses(&self, _request: &Request) -> bool {
        false
    }

    /// Whether relayed streams of the engine may be continued by other engines, and it continues those of others.
    fn continues_streams(&self) -> bool {
        false
    }

    /// Where the engine is, for an operator: the URL of its server or process, without credentials. `None`: in this
    /// process.
    fn address(&self) -> Option<String> {
        None
    }

    /// The server that chooses which of its engines computes a request, as a number that these engines share. `None`:
    /// this engine computes it.
    fn choosing_server(&self, _request: &Request) -> Option<u64> {
        None
    }

    /// The server whose health [`probe`](Self::probe) checks, as a number that its engines share: one check is for all
    /// of them, and computes no token. Objects that it stores are those of all its engines. `None`: a check is of this
    /// engine only.
    fn probed_server(&self) -> Option<u64> {
        None
    }

    /// Checks that requests are computed, with the least work that shows it: a request for one token.
    fn probe(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async {
            let Some(card) = self.models().into_iter().next() else {
                return Err(Error::Unavailable("the engine serves no model".to_owned()));
            };
            // One token never fills a block, so no cache keeps anything of it.
            let prompt = [card.eos.first().copied().unwrap_or(0)];
            let mut stream = self.generate(Request::greedy("probe", &card.id, &prompt, 1)).await?;
            match stream.next().await {
                Some(output) => output.map(drop),
                None => Err(Error::Failed("the stream ended without an output".to_owned())),
            }
        })
    }

    /// Copies a prefix into the engine's host memory before a request needs it, and resolves when that is done.
    fn prefetch(&self, _copy: PrefixCopy) -> BoxFuture<'_, Result<Prefetched, PrefetchError>> {
        Box::pin(std::future::ready(Err(PrefetchError::Unsupported)))
    }

    /// The engine may be in a process that is frozen, or whose machine is gone: discovery says that it has left, or an
    /// answer is late. Its running requests may go on: a worker that drains, or cannot renew its lease, finishes them.
    /// An engine in another process checks at once whether that process still answers, and fails the requests if it
    /// does not. MUST NOT wait.
    fn check_process(&self) {}

    /// What does not work although requests are served, as text for an operator. Answers may be slower, but none is
    /// wrong.
    fn degraded(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The stream of one request. Dropping it cancels the request.
pub type OutputStream = BoxStream<'static, Result<Output, Error>>;

/// Whether an engine can serve.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Readiness {
    /// Requests are served.
    Ready,
    /// Requests are not served now; the reason, as text for an operator.
    NotReady(String),
}

/// Measures the time to first token (TTFT) of a request on the machine's clock. Returns when the stream has ended.
pub async fn measure_ttft(engine: &dyn Engine, request: Request) -> Result<Duration, Error> {
    let began = std::time::Instant::now();
    let mut stream = engine.generate(request).await?;
    let mut first = None;
    while let Some(output) = stream.next().await {
        output?;
        first.get_or_insert_with(|| began.elapsed());
    }
    first.ok_or_else(|| Error::Failed("the stream was empty".into()))
}
