//! Makes connections, and marks those that have answered.

use super::{ClientError, Protocol, Settings};
use futures::future::{BoxFuture, FutureExt};
use http::Uri;
use http::uri::Scheme;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore};
use std::error::Error;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tower_service::Service;

/// Finds out that the machine of an engine is gone while a request waits for its answer.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);

/// Connects within a time limit.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    inner: HttpsConnector<HttpConnector<Resolver>>,
    timeout: Duration,
}

/// Finds the addresses of the engine's host.
#[derive(Clone, Debug)]
enum Resolver {
    /// As all programs of this machine do, at each connection.
    System(GaiResolver),
    /// They are known.
    Fixed(Arc<[IpAddr]>),
}

/// Whether a connection has answered a request. It comes with each answer and each error of the connection.
#[derive(Clone, Default, Debug)]
pub(super) struct Answered(Arc<AtomicBool>);

/// A connection that carries its [`Answered`].
pub(super) struct Marked {
    io: MaybeHttpsStream<TokioIo<TcpStream>>,
    answered: Answered,
}

impl Answered {
    // The flag orders nothing else.
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Connector {
    pub(super) fn new(scheme: &Scheme, settings: &Settings) -> Result<Self, ClientError> {
        let mut tcp = HttpConnector::new_with_resolver(Resolver::new(&settings.addresses));
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(TCP_KEEPALIVE));
        tcp.enforce_http(false);
        // The provider is named here, so the process need not install one.
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let tls = match &settings.roots {
            Some(roots) => tls.with_root_certificates(roots.clone()),
            // Without TLS no certificate is needed, and a container may have none.
            None if *scheme == Scheme::HTTP => tls.with_root_certificates(RootCertStore::empty()),
            None => tls.with_native_roots().map_err(ClientError::Roots)?,
        };
        let builder = HttpsConnectorBuilder::new().with_tls_config(tls.with_no_client_auth()).https_or_http();
        let inner = match settings.protocol {
            Protocol::Negotiated => builder.enable_all_versions().wrap_connector(tcp),
            Protocol::Http2 => builder.enable_http2().wrap_connector(tcp),
        };
        Ok(Self { inner, timeout: settings.connect_timeout })
    }
}

impl Resolver {
    fn new(addresses: &[IpAddr]) -> Self {
        if addresses.is_empty() { Self::System(GaiResolver::new()) } else { Self::Fixed(addresses.into()) }
    }
}

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::System(resolver) => resolver.poll_ready(context),
            Self::Fixed(_) => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, name: Name) -> Self::Future {
        match self {
            Self::System(resolver) => {
                let found = resolver.call(name);
                async move { Ok(found.await?.collect::<Vec<_>>().into_iter()) }.boxed()
            }
            // The connector sets the port.
            Self::Fixed(addresses) => {
                let addresses: Vec<_> = addresses.iter().map(|address| SocketAddr::new(*address, 0)).collect();
                async move { Ok(addresses.into_iter()) }.boxed()
            }
        }
    }
}

impl Service<Uri> for Connector {
    type Response = Marked;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = BoxFuture<'static, Result<Marked, Self::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let limit = self.timeout;
        let connect = tokio::time::timeout(limit, self.inner.call(uri));
        let connect = async move {
            let io = connect.await.map_err(|_| format!("not connected after {limit:?}"))??;
            Ok(Marked { io, answered: Answered::default() })
        };
        connect.boxed()
    }
}

impl Connection for Marked {
    fn connected(&self) -> Connected {
        self.io.connected().extra(self.answered.clone())
    }
}

impl Read for Marked {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl Write for Marked {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
    }
}
