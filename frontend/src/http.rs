//! HTTP below the endpoints: connections, access checks, request bodies, request ids and log lines.
//!
//! Not here: the routes (`api`), and the mapping of errors to statuses (`error`).

pub(crate) mod access;
pub(crate) mod body;
pub(crate) mod request_context;
mod request_id;
mod server;
pub(crate) mod upload;

pub(crate) use body::Memory as BodyMemory;
pub(crate) use request_context::{Ticket, panicked};
pub(crate) use server::Arrival;
pub use server::{Server, Shutdown};
