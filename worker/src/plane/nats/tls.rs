//! The files of TLS. The client library reads them at each connection, and reports only that this has failed. It would
//! wait for the writer of a pipe, and read a file of any size. So they are checked before each attempt to connect.
//!
//! Not here: certificates that are well formed and that the other side refuses; only a connection shows it.

use super::settings::{ClientCertificate, Tls};
use std::path::Path;
use tokio::task::spawn_blocking;
use transport::{Identity, NamedFile, TlsError};

/// The names of the settings.
pub(super) const CA_FILE: &str = "nats.ca_file";
pub(super) const CERT_FILE: &str = "nats.cert_file";
pub(super) const KEY_FILE: &str = "nats.key_file";

/// Checks that the files can be used. The error names the file.
pub(super) async fn check(tls: Option<&Tls>) -> Result<(), String> {
    let Some(tls) = tls.cloned() else { return Ok(()) };
    match spawn_blocking(move || check_files(&tls)).await {
        Ok(checked) => checked.map_err(|error| error.to_string()),
        // The check has panicked, or the process ends.
        Err(error) => Err(error.to_string()),
    }
}

/// The files with their settings, for messages.
pub(super) fn files(tls: &Tls) -> Vec<(&'static str, &Path)> {
    let Tls { ca_file, client } = tls;
    let mut files: Vec<_> = ca_file.iter().map(|file| (CA_FILE, file.as_path())).collect();
    if let Some(ClientCertificate { cert_file, key_file }) = client {
        files.extend([(CERT_FILE, cert_file.as_path()), (KEY_FILE, key_file.as_path())]);
    }
    files
}

/// As [`check`]. Blocks while it reads the files.
pub(super) fn check_files(Tls { ca_file, client }: &Tls) -> Result<(), TlsError> {
    if let Some(path) = ca_file {
        NamedFile { key: CA_FILE, path: path.clone() }.check_authorities()?;
    }
    let Some(ClientCertificate { cert_file, key_file }) = client else { return Ok(()) };
    let identity = Identity::of((CERT_FILE, Some(cert_file.clone())), (KEY_FILE, Some(key_file.clone())))?;
    identity.map_or(Ok(()), |identity| identity.check())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    const CERTIFICATE: &str = include_str!("../../../../frontend/tests/fixtures/tls/one.pem");
    const KEY: &str = include_str!("../../../../frontend/tests/fixtures/tls/one.key");
    const OTHER_KEY: &str = include_str!("../../../../frontend/tests/fixtures/tls/two.key");

    #[test]
    fn a_file_that_cannot_be_used_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let (certificate, key) = (file("one.pem", CERTIFICATE), file("one.key", KEY));
        let (empty, other_key) = (file("empty.pem", ""), file("two.key", OTHER_KEY));
        let large = file("large.pem", &CERTIFICATE.repeat((1 << 20) / CERTIFICATE.len() + 1));
        let missing = folder.path().join("missing.pem");
        let check = |ca_file: &PathBuf, cert_file: &PathBuf, key_file: &PathBuf| {
            let client = ClientCertificate { cert_file: cert_file.clone(), key_file: key_file.clone() };
            check_files(&Tls { ca_file: Some(ca_file.clone()), client: Some(client) })
                .map_err(|error| error.to_string())
        };
        assert_eq!(check(&certificate, &certificate, &key), Ok(()));
        let folder = folder.path().to_owned();
        for (ca_file, cert_file, key_file, expected) in [
            (&missing, &certificate, &key, ["nats.ca_file", "missing.pem"]),
            (&empty, &certificate, &key, ["nats.ca_file", "empty.pem"]),
            (&large, &certificate, &key, ["large.pem", "at most 1 MiB"]),
            (&certificate, &key, &key, ["nats.cert_file", "one.key"]),
            (&certificate, &certificate, &folder, ["nats.key_file", "regular file"]),
            (&certificate, &certificate, &empty, ["nats.key_file", "empty.pem"]),
            (&certificate, &certificate, &other_key, ["nats.key_file", "nats.cert_file"]),
        ] {
            let error = check(ca_file, cert_file, key_file).unwrap_err();
            assert!(expected.iter().all(|part| error.contains(part)), "{expected:?}: {error}");
        }
    }
}
