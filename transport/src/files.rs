//! Certificates, keys and authorities in files in PEM format.

use rustls::client::verify_server_name;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use rustls::{InconsistentKeys, RootCertStore};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::PathBuf;
use webpki::EndEntityCert;

/// Maximum size of a file: a chain has a few certificates of a few KiB, a bundle of all public authorities 200 KiB.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// A file, and the key of the configuration that names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedFile {
    /// The key.
    pub key: &'static str,
    /// The file.
    pub path: PathBuf,
}

/// The certificate of this process with those that signed it, and its key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    pub(crate) certificate: NamedFile,
    pub(crate) key: NamedFile,
}

/// A certificate with those that signed it, as far as its file has them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CertificateChain(Vec<CertificateDer<'static>>);

/// Why certificates cannot be used.
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
    #[error("{key} is not the key of the first certificate in {certificate}; expected the files of one pair")]
    Mismatch {
        /// The key of the configuration that names the certificate.
        certificate: &'static str,
        /// The one that names the key.
        key: &'static str,
    },
    /// Only one of two files is named.
    #[error("{0} and {1} belong together; set both, or none")]
    Incomplete(&'static str, &'static str),
    /// The library refuses the files.
    #[error("{0}: {1}")]
    Unusable(String, String),
}

impl CertificateChain {
    /// Whether a certificate of the chain is its own issuer: then a client that trusts this file trusts the
    /// certificate. `false` for those that cannot be read.
    pub fn is_self_signed(&self) -> bool {
        let of_itself =
            |certificate| EndEntityCert::try_from(certificate).is_ok_and(|parsed| parsed.issuer() == parsed.subject());
        self.0.iter().any(of_itself)
    }

    /// Whether the certificate is for this host name or address.
    pub fn is_for(&self, host: &str) -> bool {
        let parsed = self.0.first().and_then(|certificate| ParsedCertificate::try_from(certificate).ok());
        let name = ServerName::try_from(host).ok();
        parsed.zip(name).is_some_and(|(parsed, name)| verify_server_name(&parsed, &name).is_ok())
    }
}

/// A certificate with its chain, and its key.
pub(crate) type Pair = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl Identity {
    /// The pair of two files; `None` if neither is named.
    pub fn of(
        (certificate, certificate_path): (&'static str, Option<PathBuf>),
        (key, key_path): (&'static str, Option<PathBuf>),
    ) -> Result<Option<Self>, TlsError> {
        match (certificate_path, key_path) {
            (Some(certificate_path), Some(key_path)) => Ok(Some(Self {
                certificate: NamedFile { key: certificate, path: certificate_path },
                key: NamedFile { key, path: key_path },
            })),
            (None, None) => Ok(None),
            _ => Err(TlsError::Incomplete(certificate, key)),
        }
    }

    /// Checks that the files have a certificate and its key, for a library that reads them itself. Blocks.
    pub fn check(&self) -> Result<(), TlsError> {
        let (chain, key) = self.load()?;
        CertifiedKey::from_der(chain, key, &default_provider()).map(drop).map_err(|error| self.error(&error))
    }

    /// Reads the certificate and those that signed it. Blocks.
    pub fn chain(&self) -> Result<CertificateChain, TlsError> {
        let chain = self.certificate.certificates(
            "PEM with `-----BEGIN CERTIFICATE-----`: the certificate of this process, then those that signed it",
        );
        chain.map(CertificateChain)
    }

    pub(crate) fn load(&self) -> Result<Pair, TlsError> {
        let CertificateChain(chain) = self.chain()?;
        let key = PrivateKeyDer::from_pem_slice(&self.key.read()?)
            .map_err(|_| self.key.content("PEM with `-----BEGIN PRIVATE KEY-----`, not encrypted"))?;
        Ok((chain, key))
    }

    /// The error of the library for a pair.
    pub(crate) fn error(&self, error: &rustls::Error) -> TlsError {
        let (certificate, key) = (self.certificate.key, self.key.key);
        match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => TlsError::Mismatch { certificate, key },
            other => TlsError::Unusable(format!("{certificate}, {key}"), other.to_string()),
        }
    }

    pub(crate) fn files(&self) -> [NamedFile; 2] {
        [self.certificate.clone(), self.key.clone()]
    }
}

impl NamedFile {
    /// Checks that the file has authorities, for a library that reads it itself. Blocks.
    pub fn check_authorities(&self) -> Result<(), TlsError> {
        self.authorities().map(drop)
    }

    /// The authorities in the file.
    pub(crate) fn authorities(&self) -> Result<RootCertStore, TlsError> {
        let expected = "PEM with `-----BEGIN CERTIFICATE-----`: the authorities that sign the certificates of others";
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates(expected)? {
            roots.add(certificate).map_err(|_| self.content(expected))?;
        }
        Ok(roots)
    }

    fn certificates(&self, expected: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let chain = CertificateDer::pem_slice_iter(&self.read()?).collect::<Result<Vec<_>, _>>();
        chain.ok().filter(|chain| !chain.is_empty()).ok_or_else(|| self.content(expected))
    }

    fn content(&self, expected: &'static str) -> TlsError {
        TlsError::Content { key: self.key, path: self.path.clone(), expected }
    }

    fn read(&self) -> Result<Vec<u8>, TlsError> {
        let failed = |source| TlsError::Io { key: self.key, path: self.path.clone(), source };
        // Opening a pipe would wait for its writer.
        let metadata = fs::metadata(&self.path).map_err(failed)?;
        if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
            return Err(self.content("a regular file of at most 1 MiB"));
        }
        let mut content = Vec::new();
        File::open(&self.path).map_err(failed)?.take(MAX_FILE_BYTES).read_to_end(&mut content).map_err(failed)?;
        Ok(content)
    }
}
