//! Certificates of servers with TLS, and of the authorities that sign them.
//!
//! Not here: connections for requests (`relay`), which check certificates in the same way.

use http::Uri;
use hyper_rustls::ConfigBuilderExt;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// The authorities of a file, which may sign the certificate of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Authorities(Vec<CertificateDer<'static>>);

/// Maximum bytes that are read of a file. The authorities of an operating system have 300 KB.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// Time for TCP and TLS. Requests have 2 s; a check may take longer.
const TIMEOUT: Duration = Duration::from_secs(5);

impl Authorities {
    /// Reads a file in PEM format with one certificate or several.
    pub fn read(path: &Path) -> io::Result<Self> {
        // Opening a pipe would wait for its writer.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::other("expected a regular file"));
        }
        let mut text = Vec::new();
        File::open(path)?.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
        let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
        let certificates = parsed.map_err(|error| io::Error::other(format!("not in PEM format: {error}")))?;
        if certificates.is_empty() {
            return Err(io::Error::other("no certificate in PEM format (BEGIN CERTIFICATE)"));
        }
        let mut roots = RootCertStore::empty();
        for certificate in &certificates {
            roots.add(certificate.clone()).map_err(|error| io::Error::other(format!("not a certificate: {error}")))?;
        }
        Ok(Self(certificates))
    }

    /// The store of certificates that TLS checks with.
    pub fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(self.0.iter().cloned());
        roots
    }
}

/// The certificates of the server at these addresses, its own first; `None` without TLS, and for certificates that are
/// not accepted. `roots`: the authorities that may sign them; `None`: those of the operating system.
pub async fn certificates(
    url: &Uri,
    addresses: &[IpAddr],
    roots: Option<RootCertStore>,
) -> Option<Vec<CertificateDer<'static>>> {
    if url.scheme_str() != Some("https") {
        return None;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().ok()?;
    let tls = match roots {
        Some(roots) => tls.with_root_certificates(roots),
        None => tls.with_native_roots().ok()?,
    };
    let connector = TlsConnector::from(Arc::new(tls.with_no_client_auth()));
    let host = url.host()?.trim_start_matches('[').trim_end_matches(']');
    let name = ServerName::try_from(host.to_owned()).ok()?;
    let port = url.port_u16().unwrap_or(443);
    let addresses: Vec<SocketAddr> = addresses.iter().map(|address| SocketAddr::new(*address, port)).collect();
    let shown = async {
        let socket = TcpStream::connect(&addresses[..]).await.ok()?;
        let connection = connector.connect(name, socket).await.ok()?;
        connection.get_ref().1.peer_certificates().map(<[_]>::to_vec)
    };
    timeout(TIMEOUT, shown).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::ServerConfig;
    use rustls::pki_types::PrivateKeyDer;
    use rustls::pki_types::pem::PemObject;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    #[tokio::test]
    async fn certificates_are_those_of_the_server_if_they_are_accepted() {
        let certificate = CertificateDer::from_pem_slice(include_bytes!("relay/client/tests/localhost.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_slice(include_bytes!("relay/client/tests/localhost.key")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let tls = tls.with_no_client_auth().with_single_cert(vec![certificate.clone()], key).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                // A client that refuses the certificate leaves.
                drop(acceptor.accept(socket).await);
            }
        });
        let mut roots = RootCertStore::empty();
        roots.add(certificate.clone()).unwrap();
        let shown = async |url: &str, roots: &RootCertStore| {
            certificates(&url.parse().unwrap(), &[[127, 0, 0, 1].into()], Some(roots.clone())).await
        };
        let url = format!("https://localhost:{port}/base");
        assert_eq!(shown(&url, &roots).await, Some(vec![certificate]));
        assert_eq!(shown(&url, &RootCertStore::empty()).await, None);
        assert_eq!(shown(&url.replace("https", "http"), &roots).await, None);
        assert_eq!(shown(&url.replace("localhost", "other.test"), &roots).await, None, "another name");
    }
}
