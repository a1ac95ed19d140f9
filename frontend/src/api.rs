//! The endpoints of the HTTP API: OpenAI's, vLLM's `/tokenize` and `/detokenize`, and those for operators.
//!
//! `generate` is the path of every request that generates. `chat` and `completions` parse their own fields and encode
//! their responses; `sse` streams them. `relay` passes requests to engines that have the API themselves. `routes`
//! composes endpoints and middleware. `caller` is what the API key of a request allows. `internal` is the API of
//! processes that serve no clients.

mod caller;
mod chat;
mod completions;
mod generate;
mod internal;
mod logprobs;
mod operations;
mod relay;
mod routes;
mod sse;
mod tokenize;

pub use internal::{Health, internal_router};
pub use operations::WORKER_PORT;
pub use routes::{OpenError, Parts, guard_admin, router, router_with};
