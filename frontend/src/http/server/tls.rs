//! TLS: the certificate and its key, which follow their files, and the handshake of a connection.

use super::expiry::CertificateExpiry;
use super::socket::Socket;
use crate::metrics::ConnectionMetrics;
use crate::settings::Settings;
use crate::watch::WatchedFiles;
use parking_lot::{Mutex, RwLock};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{InconsistentKeys, ServerConfig};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;

/// Maximum size of a certificate file or a key file: a chain has a few certificates of a few KiB.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Time between two warnings of a certificate that expires soon: enough for an alert on the log, few enough to read.
const WARN_INTERVAL: Duration = Duration::from_hours(24);
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
    expiry: Mutex<Option<CertificateExpiry>>,
    metrics: ConnectionMetrics,
}

/// A pair that can be used.
struct Loaded {
    config: ServerConfig,
    expiry: Option<CertificateExpiry>,
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

/// Checks that the files of `settings` can be used, if there are any, and returns when the certificate expires. Blocks.
pub fn check_tls(settings: &Settings) -> Result<Option<CertificateExpiry>, TlsError> {
    match Files::of(settings)? {
        Some(files) => files.load().map(|loaded| loaded.expiry),
        None => Ok(None),
    }
}

impl Tls {
    /// The files of `settings`, whose changes are followed; `None` if there are none. Must be called within a runtime.
    pub(super) fn open(settings: &Settings, metrics: &ConnectionMetrics) -> Result<Option<Arc<Self>>, TlsError> {
        let Some(files) = Files::of(settings)? else { return Ok(None) };
        let watched = WatchedFiles::now(vec![files.certificate.clone(), files.key.clone()]);
        let Loaded { config, expiry } = files.load()?;
        let (config, metrics) = (RwLock::new(Arc::new(config)), metrics.clone());
        let tls = Arc::new(Self { files, config, expiry: Mutex::default(), metrics });
        tls.set_expiry(expiry);
        watched.spawn(&tls, Self::reload);
        let weak = Arc::downgrade(&tls);
        tokio::spawn(async move {
            loop {
                sleep(WARN_INTERVAL).await;
                let Some(tls) = Weak::upgrade(&weak) else { return };
                tls.warn();
            }
        });
        Ok(Some(tls))
    }

    fn set_expiry(&self, expiry: Option<CertificateExpiry>) {
        *self.expiry.lock() = expiry;
        let file = self.files.certificate.display().to_string();
        let timestamp = self.metrics.certificate_expiry.with_label_values(&[&file]);
        timestamp.set(expiry.map_or(0, |expiry| expiry.timestamp()));
        self.warn();
    }

    /// Warns if the certificate expires soon.
    fn warn(&self) {
        let (expiry, now, certificate) = (*self.expiry.lock(), SystemTime::now(), self.files.certificate.display());
        let Some(expiry) = expiry.filter(|expiry| expiry.warn_from <= now) else { return };
        if expiry.at <= now {
            tracing::error!(%certificate, "the TLS certificate has expired: clients refuse it; renew it");
        } else {
            let days = expiry.days_left(now);
            tracing::warn!(%certificate, days, "the TLS certificate expires in {days} days; renew it");
        }
    }

    fn reload(&self) {
        let outcome = match self.files.load() {
            Ok(Loaded { config, expiry }) => {
                *self.config.write() = Arc::new(config);
                tracing::info!(certificate = %self.files.certificate.display(), "TLS certificate reloaded");
                self.set_expiry(expiry);
                "applied"
            }
            Err(error) => {
                tracing::error!(%error, "TLS certificate not reloaded; the previous one stays in effect");
                "rejected"
            }
        };
        self.metrics.certificate_reloads.with_label_values(&[outcome]).inc();
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
        handshake.map(|stream| Socket::Right(Box::new(stream))).map_err(|error| {
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

    fn load(&self) -> Result<Loaded, TlsError> {
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
        let expiry = CertificateExpiry::of(&chain);
        // The provider is named here, so the process need not install one.
        let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Unusable)?;
        let config = builder.with_no_client_auth().with_single_cert(chain, key);
        let mut config = config.map_err(|error| match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => TlsError::Mismatch,
            other => TlsError::Unusable(other),
        })?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Loaded { config, expiry })
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
