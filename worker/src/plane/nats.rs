//! The planes on NATS, for frontends and workers in separate processes. The only module that uses `async_nats`.
//!
//! ```text
//!   Connection ── one per process; reconnects by itself, its state is a metric
//!     ├── NatsDiscovery   a JetStream key-value bucket: one record per worker, kept by a lease
//!     └── NatsEvents      core NATS: a subject per source; logs answer with the URL at which they can be read
//! ```
//!
//! While NATS cannot be reached, the view of the instances stays as it was, subscriptions stay open, and requests for
//! logs fail with `Unavailable`. Afterwards leases are renewed, the view is compared with the bucket, and missing
//! events are requested from their sources. docs/nats.md describes subjects, records and permissions.
//!
//! Not here: the requests of clients, and HTTP. The engine of a remote worker comes from the [`Connector`], snapshots
//! and ranges of its log come from a [`LogReader`].

#![forbid(unsafe_code)]

mod attempts;
mod authentication;
mod bucket;
mod codec;
mod connection;
mod credentials;
mod discovery;
mod events;
mod http_logs;
mod lease_health;
mod metrics;
mod outbox;
mod record;
mod registrar;
mod requests;
mod responder;
mod settings;
mod subjects;
mod subscriptions;
mod texts;
mod tls;
mod transfers;
mod view;
mod watcher;

pub use authentication::{RecordKey, RecordKeys};
pub use connection::Connection;
pub use discovery::NatsDiscovery;
pub use events::NatsEvents;
pub use http_logs::{HttpLogs, LogReadError, LogReader};
pub use metrics::Metrics;
pub use settings::{ClientCertificate, Credentials, Process, Settings, Tls};

use super::Instance;
use crate::engine::Engine;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Number of the protocol of records, events and requests. It changes with every incompatible change of one of them;
/// a message with another number is refused.
pub const PROTOCOL: u8 = 1;

/// The target under which the client library of NATS logs. It repeats an error with each attempt to connect. This
/// module logs the state of the connection itself, and each cause once.
pub const LIBRARY_LOG_TARGET: &str = "async_nats";

/// The URL of a worker's endpoint for requests.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Address(pub String);

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Makes the engine of a remote worker. It is called once for each epoch of an instance, and must not wait: an engine
/// connects with its first request.
pub type Connector = Arc<dyn Fn(&Instance, &Address) -> Arc<dyn Engine> + Send + Sync>;

/// Why NATS cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConnectError {
    /// A setting has a wrong value.
    #[error("nats.{key}: {problem}")]
    Setting {
        /// The setting.
        key: &'static str,
        /// What is wrong, and what is expected.
        problem: String,
    },
    /// A file that a setting names cannot be read.
    #[error("{key} = {path:?}: {error}")]
    File {
        /// The setting.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// The error.
        error: String,
    },
    /// A file of TLS cannot be used.
    #[error("{0}")]
    TlsFile(String),
    /// A server refused the connection: credentials, or TLS.
    #[error("NATS at {servers} refuses the connection: {problem}")]
    Refused {
        /// The configured servers.
        servers: String,
        /// What the server or the TLS library says.
        problem: String,
    },
    /// No server answered in time.
    #[error("NATS at {servers} cannot be reached: {problem}; start nats-server -js, or set --nats")]
    Unreachable {
        /// The configured servers.
        servers: String,
        /// The last error.
        problem: String,
    },
    /// The server cannot expire single keys.
    #[error("NATS at {server} has version {version}; 2.11 or later is needed")]
    OldServer {
        /// The configured servers, and the name of the connected one if it has one.
        server: String,
        /// Its version.
        version: String,
    },
    /// The server accepts smaller messages than events can be.
    #[error("NATS at {server} limits messages to {limit} bytes (max_payload); {needed} are needed")]
    SmallMessages {
        /// The configured servers, and the name of the connected one if it has one.
        server: String,
        /// Its limit in bytes.
        limit: usize,
        /// The smallest limit that works, in bytes.
        needed: usize,
    },
    /// The key-value bucket of the instances is not there and cannot be created, or has a wrong configuration.
    #[error("NATS key-value bucket {bucket}: {problem}")]
    Bucket {
        /// Name of the bucket.
        bucket: String,
        /// What is wrong, and what to do about it.
        problem: String,
    },
}

#[cfg(test)]
mod tests;
