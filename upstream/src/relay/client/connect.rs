//! Makes connections.

use super::{ClientError, Protocol, Settings};
use futures::future::{BoxFuture, FutureExt};
use http::Uri;
use http::uri::Scheme;
use hyper_rustls::ConfigBuilderExt;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tower_service::Service;
pub(super) use transport::Socket;

/// Idle time before TCP sends keep-alive packets. They show that the machine of an engine has failed while a request
/// waits for its answer.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);

/// Connects within a time limit.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    tcp: HttpConnector<Resolver>,
    /// `None` without TLS.
    tls: Option<Arc<ClientConfig>>,
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
        // Without TLS no certificate is needed, and a container may have none.
        let tls = if *scheme == Scheme::HTTP { None } else { Some(tls(settings)?) };
        Ok(Self { tcp, tls, protocol: settings.protocol, timeout: settings.connect_timeout })
    }

    /// A new connection to the host of a URI.
    pub(super) async fn connect(&self, uri: Uri) -> Result<Connected, Box<dyn Error + Send + Sync>> {
        let (has_negotiated_http2, socket) = self.in_time(self.open(uri, self.tls.clone())).await?;
        let is_http2 = self.protocol == Protocol::Http2 || has_negotiated_http2;
        Ok(if is_http2 { Connected::Http2(socket) } else { Connected::Http1(socket) })
    }

    /// Whether all connections are to speak HTTP/2.
    pub(super) fn is_http2_only(&self) -> bool {
        self.protocol == Protocol::Http2
    }

    /// A new connection for HTTP/1.1. With TLS nothing else is offered.
    pub(super) async fn connect_http1(&self, uri: Uri) -> Result<Socket, Box<dyn Error + Send + Sync>> {
        let tls = self.tls.as_ref().map(|tls| {
            let mut tls = ClientConfig::clone(tls);
            tls.alpn_protocols = vec![b"http/1.1".to_vec()];
            Arc::new(tls)
        });
        let (_, socket) = self.in_time(self.open(uri, tls)).await?;
        Ok(socket)
    }

    async fn in_time<T>(
        &self,
        connecting: impl Future<Output = Result<T, Box<dyn Error + Send + Sync>>>,
    ) -> Result<T, Box<dyn Error + Send + Sync>> {
        timeout(self.timeout, connecting).await.map_err(|_| format!("not connected after {:?}", self.timeout))?
    }

    /// The socket, and whether HTTP/2 was negotiated.
    async fn open(
        &self,
        uri: Uri,
        tls: Option<Arc<ClientConfig>>,
    ) -> Result<(bool, Socket), Box<dyn Error + Send + Sync>> {
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
        let tcp = self.tcp.clone().call(uri).await?.into_inner();
        let Some(tls) = tls else { return Ok((false, Socket::Left(tcp))) };
        let stream = TlsConnector::from(tls).connect(ServerName::try_from(host)?, tcp).await?;
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        Ok((is_http2, Socket::Right(Box::new(stream.into()))))
    }
}

fn tls(settings: &Settings) -> Result<Arc<ClientConfig>, ClientError> {
    // The provider is named here, so the process need not install one.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let config = match &settings.roots {
        Some(roots) => config.with_root_certificates(roots.clone()),
        None => config.with_native_roots().map_err(ClientError::Roots)?,
    };
    let mut config = config.with_no_client_auth();
    config.alpn_protocols = match settings.protocol {
        Protocol::Negotiated => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        Protocol::Http2 => vec![b"h2".to_vec()],
    };
    Ok(Arc::new(config))
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
