//! HTTP below the endpoints: connections, access checks, authentication, request bodies, request ids, loops and log
//! lines.
//!
//! Not here: the routes (`api`), and the mapping of errors to statuses (`error`).

pub(crate) mod access;
pub(crate) mod authenticate;
pub(crate) mod body;
pub(crate) mod request_context;
mod request_id;
mod server;
mod upgrade;
pub(crate) mod upload;
mod via;

pub(crate) use body::BodyMemory;
pub(crate) use request_context::{RequestContext, panicked};
pub(crate) use server::ConnectionInfo;
pub use server::{ClientCertificate, Server, ServerError, Shutdown, check_tls, peer_address, tls_certificate};
pub(crate) use upgrade::Upgrade;
pub(crate) use via::Via;
