//! TLS of a client: the authorities that it trusts, its own certificate, and the handshake of a connection.

use crate::expiry::CertificateExpiry;
use crate::files::{Identity, NamedFile, TlsError};
use crate::reloadable::{CertificateMetrics, Loaded, Reloadable};
use crate::socket::Socket;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig, Error};
use std::io;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// The files of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientFiles {
    /// The authorities that may sign the certificates of servers.
    pub authorities: NamedFile,
    /// Its own certificate and key, for servers that ask for one.
    pub identity: Option<Identity>,
}

/// The certificates in effect.
pub struct ClientTls {
    config: Arc<Reloadable<ClientConfig>>,
    files: ClientFiles,
}

impl ClientTls {
    /// The files, whose changes are followed. Must be called within a runtime.
    pub fn open(files: ClientFiles, metrics: CertificateMetrics) -> Result<Self, TlsError> {
        let identity = files.identity.iter().flat_map(Identity::files);
        let named = identity.chain([files.authorities.clone()]).collect();
        let loaded = files.clone();
        Ok(Self { config: Reloadable::open(named, move || loaded.load(), metrics)?, files })
    }

    /// The handshake with the server of this host name or address. Its time is limited by the caller.
    pub async fn connect(&self, tcp: TcpStream, host: &str, protocol: &[u8]) -> io::Result<Socket> {
        let name = ServerName::try_from(host.trim_start_matches('[').trim_end_matches(']').to_owned());
        let name = name.map_err(|_| io::Error::other(format!("{host:?} is no name of a host")))?;
        let mut config = ClientConfig::clone(&self.config.current());
        config.alpn_protocols = vec![protocol.to_vec()];
        match TlsConnector::from(Arc::new(config)).connect(name, tcp).await {
            Ok(stream) => Ok(Socket::Right(Box::new(stream.into()))),
            Err(error) => Err(io::Error::new(error.kind(), self.explain(&error).unwrap_or_else(|| error.to_string()))),
        }
    }

    /// What to change about an error of an established connection: a server checks the certificate of its client after
    /// the handshake. HTTP libraries pass on its text only. `None` for other errors.
    pub fn explain_alert(&self, error: &str) -> Option<String> {
        let (_, alert) = error.split_once("received fatal alert: ")?;
        let NamedFile { key, path } = &self.files.identity.as_ref()?.certificate;
        Some(if alert.starts_with("CertificateExpired") {
            format!("the certificate of this process has expired; renew {key} = \"{}\"", path.display())
        } else {
            format!("the server refuses the certificate of this process, {key} = \"{}\" ({alert})", path.display())
        })
    }

    /// What to change about an error of the handshake; `None` for other errors.
    fn explain(&self, error: &io::Error) -> Option<String> {
        let tls = error.get_ref()?.downcast_ref::<Error>()?;
        let of_server = "the certificate of the server";
        let NamedFile { key, path } = &self.files.authorities;
        Some(match tls {
            Error::InvalidCertificate(error) => match error {
                // The other: an authority of the same name with another key.
                CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                    format!("{of_server} is signed by no authority in {key} = \"{}\"", path.display())
                }
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                    format!("{of_server} has expired; renew it there ({tls})")
                }
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                    format!("{of_server} is not valid yet; compare the clocks of the machines ({tls})")
                }
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                    format!("{of_server} is not for this host; add it to the subjectAltName ({tls})")
                }
                _ => format!("{of_server} is refused ({tls})"),
            },
            Error::InvalidMessage(_) => format!("the server speaks no TLS there; its URL begins with https:// ({tls})"),
            _ => return self.explain_alert(&tls.to_string()),
        })
    }
}

impl ClientFiles {
    /// Checks that the files can be used, and returns when the certificate of this process expires. Blocks.
    pub fn check(&self) -> Result<Option<CertificateExpiry>, TlsError> {
        self.load().map(|loaded| loaded.expiry)
    }

    fn load(&self) -> Result<Loaded<ClientConfig>, TlsError> {
        let unusable = |error: Error| TlsError::Unusable(self.authorities.key.to_owned(), error.to_string());
        // The provider is named here, so the process need not install one.
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions().map_err(unusable)?;
        let builder = builder.with_root_certificates(self.authorities.authorities()?);
        let Some(identity) = &self.identity else {
            return Ok(Loaded { value: builder.with_no_client_auth(), expiry: None });
        };
        let (chain, key) = identity.load()?;
        let expiry = CertificateExpiry::of(&chain);
        let config = builder.with_client_auth_cert(chain, key).map_err(|error| identity.error(&error))?;
        Ok(Loaded { value: config, expiry })
    }
}
