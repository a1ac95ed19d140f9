//! TLS: the certificate and its key, which follow their files, and the handshake of a connection.

use super::socket::Socket;
use crate::settings::Settings;
use crate::watch::WatchedFiles;
use parking_lot::RwLock;
use prometheus::IntCounterVec;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{InconsistentKeys, ServerConfig};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

/// Maximum size of a certificate file or a key file: a chain has a few certificates of a few KiB.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The first byte of a TLS connection: a record with a handshake message (RFC 8446, 5.1).
const HANDSHAKE: u8 = 22;
const CERTIFICATE: &str = "frontend.tls_cert_file";
const KEY: &str = "frontend.tls_key_file";

/// Why certificate and key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{key} = {path:?}: {source}")]
    Io {
        /// The key of the configuration.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file has not what is expected.
    #[error("{key} = {path:?}: expected {expected}")]
    Content {
        /// The key of the configuration.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// What is expected.
        expected: &'static str,
    },
    /// The key is that of another certificate.
    #[error("{KEY} is not the key of the first certificate in {CERTIFICATE}; expected the files of one pair")]
    Mismatch,
    /// The files of the pair are not both named.
    #[error("{CERTIFICATE} and {KEY} belong together; set both, or none")]
    Incomplete,
    /// The library refuses the pair.
    #[error("{CERTIFICATE}, {KEY}: {0}")]
    Unusable(rustls::Error),
}

/// The certificate in effect.
pub(super) struct Tls {
    files: Files,
    config: RwLock<Arc<ServerConfig>>,
    /// Counts changes of the files by outcome.
    reloads: IntCounterVec,
}

struct Files {
    certificate: PathBuf,
    key: PathBuf,
}

/// A connection that did not begin with TLS.
pub(super) enum NoTls {
    /// It speaks HTTP.
    Http(TcpStream),
    /// The handshake failed, or the client has left.
    Failed,
}

/// Checks that the files of `settings` can be used, if there are any. Blocks.
pub fn check_tls(settings: &Settings) -> Result<(), TlsError> {
    match Files::of(settings)? {
        Some(files) => files.load().map(drop),
        None => Ok(()),
    }
}

impl Tls {
    /// The files of `settings`, whose changes are followed; `None` if there are none. Must be called within a runtime.
    pub(super) fn open(settings: &Settings, reloads: &IntCounterVec) -> Result<Option<Arc<Self>>, TlsError> {
        let Some(files) = Files::of(settings)? else { return Ok(None) };
        let watched = WatchedFiles::now(vec![files.certificate.clone(), files.key.clone()]);
        let config = RwLock::new(Arc::new(files.load()?));
        let tls = Arc::new(Self { files, config, reloads: reloads.clone() });
        watched.spawn(&tls, Self::reload);
        Ok(Some(tls))
    }

    fn reload(&self) {
        let outcome = match self.files.load() {
            Ok(config) => {
                *self.config.write() = Arc::new(config);
                tracing::info!(certificate = %self.files.certificate.display(), "TLS certificate reloaded");
                "applied"
            }
            Err(error) => {
                tracing::error!(%error, "TLS certificate not reloaded; the previous one stays in effect");
                "rejected"
            }
        };
        self.reloads.with_label_values(&[outcome]).inc();
    }

    /// The handshake. Its time is limited by the caller.
    pub(super) async fn accept(&self, socket: TcpStream) -> Result<Socket, NoTls> {
        let mut first = [0];
        match socket.peek(&mut first).await {
            Ok(1) if first[0] == HANDSHAKE => {}
            // The first letter of a method.
            Ok(1) if first[0].is_ascii_uppercase() => return Err(NoTls::Http(socket)),
            _ => return Err(NoTls::Failed),
        }
        let config = Arc::clone(&self.config.read());
        let handshake = TlsAcceptor::from(config).accept(socket).await;
        handshake.map(|stream| Socket::Tls(Box::new(stream))).map_err(|error| {
            tracing::debug!(%error, "TLS handshake failed");
            NoTls::Failed
        })
    }
}

impl Files {
    fn of(settings: &Settings) -> Result<Option<Self>, TlsError> {
        match (&settings.tls_cert_file, &settings.tls_key_file) {
            (Some(certificate), Some(key)) => Ok(Some(Self { certificate: certificate.clone(), key: key.clone() })),
            (None, None) => Ok(None),
            _ => Err(TlsError::Incomplete),
        }
    }

    fn load(&self) -> Result<ServerConfig, TlsError> {
        let no_certificate = || TlsError::Content {
            key: CERTIFICATE,
            path: self.certificate.clone(),
            expected: "PEM with `-----BEGIN CERTIFICATE-----`: the server's certificate, then those that signed it",
        };
        let text = read(CERTIFICATE, &self.certificate)?;
        let chain = CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>();
        let chain = chain.ok().filter(|chain| !chain.is_empty()).ok_or_else(no_certificate)?;
        let text = read(KEY, &self.key)?;
        let key = PrivateKeyDer::from_pem_slice(&text).map_err(|_| TlsError::Content {
            key: KEY,
            path: self.key.clone(),
            expected: "PEM with `-----BEGIN PRIVATE KEY-----`, not encrypted",
        })?;
        // The provider is named here, so the process need not install one.
        let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Unusable)?;
        let config = builder.with_no_client_auth().with_single_cert(chain, key);
        let mut config = config.map_err(|error| match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => TlsError::Mismatch,
            other => TlsError::Unusable(other),
        })?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}

fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |source| TlsError::Io { key, path: path.into(), source };
    // Opening a pipe would wait for its writer.
    let metadata = fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
        return Err(TlsError::Content { key, path: path.into(), expected: "a regular file of at most 1 MiB" });
    }
    let mut content = Vec::new();
    File::open(path).map_err(failed)?.take(MAX_FILE_BYTES).read_to_end(&mut content).map_err(failed)?;
    Ok(content)
}
