//! Makes connections.

use super::{ClientError, Protocol, Settings};
use futures::future::{BoxFuture, FutureExt};
use http::Uri;
use http::uri::Scheme;
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore};
use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::either::Either;
use tower_service::Service;

/// A connection: without TLS on the left, with it on the right. It is moved several times per request, so the large
/// state of TLS is boxed.
pub(super) type Socket = Either<TcpStream, Box<TokioIo<MaybeHttpsStream<TokioIo<TcpStream>>>>>;

/// Finds out that the machine of an engine is gone while a request waits for its answer.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);

/// Connects within a time limit.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    inner: HttpsConnector<HttpConnector<Resolver>>,
    protocol: Protocol,
    timeout: Duration,
}

/// A new connection.
pub(super) enum Connected {
    Http1(Socket),
    Http2(Socket),
}

/// Finds the addresses of the engine's host.
#[derive(Clone, Debug)]
enum Resolver {
    /// As all programs of this machine do, at each connection.
    System(GaiResolver),
    /// They are known.
    Fixed(Arc<[IpAddr]>),
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
        Ok(Self { inner, protocol: settings.protocol, timeout: settings.connect_timeout })
    }

    /// A new connection to the host of a URI.
    pub(super) async fn connect(&self, uri: Uri) -> Result<Connected, Box<dyn Error + Send + Sync>> {
        let connecting = timeout(self.timeout, self.inner.clone().call(uri));
        let socket = connecting.await.map_err(|_| format!("not connected after {:?}", self.timeout))??;
        let (has_negotiated_http2, socket) = match socket {
            MaybeHttpsStream::Http(socket) => (false, Socket::Left(socket.into_inner())),
            MaybeHttpsStream::Https(ref tls) => {
                let is_http2 = tls.inner().get_ref().1.alpn_protocol() == Some(b"h2");
                (is_http2, Socket::Right(Box::new(TokioIo::new(socket))))
            }
        };
        let is_http2 = self.protocol == Protocol::Http2 || has_negotiated_http2;
        Ok(if is_http2 { Connected::Http2(socket) } else { Connected::Http1(socket) })
    }
}

/// Whether nothing has arrived on an idle connection, not even its end.
pub(super) fn is_quiet(socket: &mut Socket) -> bool {
    let mut byte = [0];
    // The next user of the connection registers its own waker.
    let mut context = Context::from_waker(Waker::noop());
    Pin::new(socket).poll_read(&mut context, &mut ReadBuf::new(&mut byte)).is_pending()
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
