//! TCP connections, with TLS or without, of clients and servers, and the certificates that they use.
//!
//! ```text
//!   ServerTls ─ accept  ─┐                      ┌─ Identity: a certificate and its key
//!                        ├─ Socket  Reloadable ─┤─ the authorities that sign the certificates of others
//!   ClientTls ─ connect ─┘                      └─ both are read again when their files change
//! ```
//!
//! Files are named with the key of the configuration that names them, so each error says what to change.
//!
//! ```no_run
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! use transport::{CertificateMetrics, ClientFiles, ClientTls, NamedFile};
//! let authorities = NamedFile { key: "cluster.tls.ca_file", path: "ca.pem".into() };
//! let metrics = CertificateMetrics::new("cluster", &prometheus::Registry::new())?;
//! let tls = ClientTls::open(ClientFiles { authorities, identity: None }, metrics)?;
//! let tcp = tokio::net::TcpStream::connect("10.0.0.7:8100").await?;
//! let socket = tls.connect(tcp, "10.0.0.7", b"h2").await?;
//! # Ok(())
//! # }
//! ```
//!
//! Not here: HTTP, time limits, and which peer a process connects to.

#![forbid(unsafe_code)]

mod client;
mod expiry;
mod files;
mod reloadable;
mod server;
mod socket;
#[cfg(test)]
mod tests;
mod watch;

pub use client::{ClientFiles, ClientTls};
pub use expiry::CertificateExpiry;
pub use files::{CertificateChain, Identity, NamedFile, TlsError};
pub use reloadable::CertificateMetrics;
pub use server::{AcceptError, ServerFiles, ServerTls};
pub use socket::{Socket, has_certificate, is_buffered, is_out_of_files, tcp};
pub use watch::{WatchedFiles, open_regular, read_bytes, read_text};
