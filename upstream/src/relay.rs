//! Relays a client's HTTP request to an engine that speaks the same API, and its answer back.
//!
//! ```text
//!   client's body ── Splice ──▶ Client ──▶ engine
//!                                            │
//!   client ◀── Relay ◀── Chunk ◀── Splitter ◀┘
//! ```
//!
//! Bytes that need no change are neither decoded nor copied. The chunks of a stream that another server could continue
//! are read on their way by a [`Transcript`].
//!
//! An example: ask for the usage, and keep it from the client.
//!
//! ```no_run
//! use bytes::Bytes;
//! use futures::StreamExt;
//! use http::{HeaderMap, Method, uri::PathAndQuery};
//! use upstream::relay::client::Settings;
//! use upstream::relay::stream::UsageInStream;
//! use upstream::relay::{Client, Item, Splice, headers};
//!
//! # async fn example(body: Bytes, from_client: HeaderMap) -> Result<(), Box<dyn std::error::Error>> {
//! let mut splice = Splice::scan(body)?;
//! splice.set("cache_salt", r#""tenant-a""#);
//! splice.set_in("stream_options", "include_usage", "true")?;
//!
//! let client = Client::new(&"http://engine:8000".parse()?, &Settings::default())?;
//! let path = PathAndQuery::from_static("/v1/chat/completions");
//! let headers = headers::request(&from_client, headers::bearer("key-of-the-engine").as_ref());
//! let mut answer = client.relay(Method::POST, &path, headers, splice.finish(), UsageInStream::Strip).await?;
//! while let Some(item) = answer.next().await {
//!     match item? {
//!         Item::Head(head) => println!("{}", head.status),
//!         Item::Frame(bytes) => println!("{bytes:?}"),
//!         Item::End(report) => println!("{:?}", report.usage),
//!     }
//! }
//! # Ok(())
//! # }
//! ```

pub mod chunk;
pub mod client;
pub mod error;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod headers;
pub mod splice;
pub mod sse;
pub mod stream;
pub mod transcript;

pub use client::Client;
pub use error::RelayError;
pub use splice::Splice;
pub use stream::{Item, Relay};
pub use transcript::Transcript;
