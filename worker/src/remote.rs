//! Requests to a worker in another process: an [`Engine`](crate::engine::Engine) on one side of HTTP/2, the engines of
//! a process on the other.
//!
//! ```text
//!   router ──▶ RemoteEngine ── POST /workers/<id>/generate ──▶ RequestServer ──▶ engine of the worker
//!                 ▲                                                 │
//!                 └────── outputs, as many per frame as are ready ◀─┘
//! ```
//!
//! A request is one HTTP/2 stream. Dropping the stream of outputs resets it, and the worker stops computing. An output
//! that is not read fills the window of its stream, and the worker stops generating for it. The address of a worker is
//! found by [discovery](crate::plane::Discovery).
//!
//! A decode worker reads the blocks of a prefill worker from its memory: [`RemotePeer`], a tier over HTTP/1.1. Which of
//! them are computed it reads from `GET /workers/<id>/handoffs/<handoff>`, a response that grows.
//!
//! A router has a worker copy a prefix ahead of demand with `POST /workers/<id>/prefetch`, whose response comes when
//! that is done. A worker of a version without it is not asked again for minutes.
//!
//! A frontend reads the log of a worker's blocks, as a snapshot or a range, from `GET /logs/<kind>/<id>/<epoch>/…`:
//! [`RemoteLogs`] on one side, [`RequestServer::events`] on the other. Where, it learns over NATS.
//!
//! Not here: accepting connections (the HTTP server of the program does), retries and time limits (the router's).

#![forbid(unsafe_code)]

mod blocks;
mod client;
mod connect;
mod log_server;
mod logs;
mod peer;
mod progress;
mod secret;
mod served;
mod server;
mod wire;

pub use client::{RemoteEngine, RemoteLogs};
pub use connect::Credentials;
pub use peer::RemotePeer;
pub use secret::{RequiredMac, Secret, SecretError, SecretMetrics};
pub use server::{RequestServer, ResponseBody};

/// Number of the protocol of requests and outputs, and of how requests show that their sender knows the secret. It
/// changes with every incompatible change of one of them; a request with another number is refused.
pub const PROTOCOL: u8 = 3;

/// The text of a response with status 401. The client of a request may get it: what to change is in the log only.
const NO_SECRET: &str = "the request has no MAC made with a secret that the worker accepts";

/// The same text of a worker with protocol number 2 or lower, which requires the secret itself.
const FORMER_NO_SECRET: &str = "the request has no secret that the worker accepts";

/// The header with the number of the protocol.
const PROTOCOL_HEADER: &str = "x-blockyard-protocol";

#[cfg(test)]
pub(crate) mod tests;
