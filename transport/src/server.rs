//! TLS of a server: its certificate, and the handshake of a connection.

use crate::expiry::CertificateExpiry;
use crate::files::{Identity, NamedFile, TlsError};
use crate::reloadable::{CertificateMetrics, Loaded, Reloadable};
use crate::socket::Socket;
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::server::WebPkiClientVerifier;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

/// The first byte of a TLS connection: a record with a handshake message (RFC 8446, 5.1).
const HANDSHAKE: u8 = 22;

/// Time for a client whose certificate is refused to close the connection.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of bytes of such a client that are read.
const MAX_UNREAD_BYTES: usize = 64 << 10;

/// The files of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerFiles {
    /// Its certificate and key.
    pub identity: Identity,
    /// The authorities that may sign the certificates of its clients. A client that shows another certificate is
    /// rejected; whether one that shows none is, the caller decides
    /// ([`has_certificate`](crate::has_certificate)). `None`: clients are not asked for one.
    pub clients: Option<NamedFile>,
}

/// The certificate in effect.
pub struct ServerTls(Arc<Reloadable<ServerConfig>>);

/// Why a connection has no TLS.
pub enum AcceptError {
    /// It speaks HTTP without TLS.
    Http(TcpStream),
    /// The client has shown a certificate that is not accepted, with the reason.
    Refused(String),
    /// The handshake failed, or the client has left.
    Failed,
}

impl ServerTls {
    /// The files, whose changes are followed. Must be called within a runtime.
    pub fn open(files: ServerFiles, metrics: CertificateMetrics) -> Result<Self, TlsError> {
        let named = files.identity.files().into_iter().chain(files.clients.clone()).collect();
        Reloadable::open(named, move || files.load(), metrics).map(Self)
    }

    /// The handshake. Its time is limited by the caller.
    pub async fn accept(&self, socket: TcpStream) -> Result<Socket, AcceptError> {
        let mut first = [0];
        match socket.peek(&mut first).await {
            Ok(1) if first[0] == HANDSHAKE => {}
            // The first letter of a method.
            Ok(1) if first[0].is_ascii_uppercase() => return Err(AcceptError::Http(socket)),
            _ => return Err(AcceptError::Failed),
        }
        let (error, socket) = match TlsAcceptor::from(self.0.current()).accept(socket).into_fallible().await {
            Ok(stream) => return Ok(Socket::Right(Box::new(stream.into()))),
            Err(failed) => failed,
        };
        tracing::debug!(%error, "TLS handshake failed");
        match error.get_ref().and_then(|inner| inner.downcast_ref()) {
            Some(refused @ rustls::Error::InvalidCertificate(_)) => {
                let refused = AcceptError::Refused(refused.to_string());
                linger(socket).await;
                Err(refused)
            }
            _ => Err(AcceptError::Failed),
        }
    }
}

/// Closes a connection after its client has had time to read why. A client of TLS 1.3 sends its request before it knows
/// that its certificate is refused; closing with bytes unread resets the connection, and the alert would be lost.
async fn linger(mut socket: TcpStream) {
    let read = async {
        let (mut left, mut part) = (MAX_UNREAD_BYTES, [0; 4096]);
        // Fails if the client has left.
        let _ = socket.shutdown().await;
        while let Ok(count) = socket.read(&mut part).await
            && count > 0
            && count < left
        {
            left -= count;
        }
    };
    let _ = timeout(LINGER_TIMEOUT, read).await;
}

impl ServerFiles {
    /// Checks that the files can be used, and returns when the certificate expires. Blocks.
    pub fn check(&self) -> Result<Option<CertificateExpiry>, TlsError> {
        self.load().map(|loaded| loaded.expiry)
    }

    fn load(&self) -> Result<Loaded<ServerConfig>, TlsError> {
        let (chain, key) = self.identity.load()?;
        let expiry = CertificateExpiry::of(&chain);
        // The provider is named here, so the process need not install one.
        let provider = Arc::new(default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().map_err(|error| self.identity.error(&error))?;
        let builder = match &self.clients {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let roots = Arc::new(file.authorities()?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).allow_unauthenticated();
                let unusable = |error: rustls::server::VerifierBuilderError| {
                    TlsError::Unusable(file.key.to_owned(), error.to_string())
                };
                builder.with_client_cert_verifier(verifier.build().map_err(unusable)?)
            }
        };
        let config = builder.with_single_cert(chain, key);
        let mut config = config.map_err(|error| self.identity.error(&error))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Loaded { value: config, expiry })
    }
}
