//! What to change when a check before the start has failed, for each kind of error: the key, the file or the variable.
//!
//! Not here: the errors of this crate that say it themselves (`sizes`, `quotas`, `stores`, `otlp`).

use frontend::{KeyFileError, SecretError};
use kvbm::crypt::SourceError;
use kvbm::object::{Cloud, StoreLocation};
use std::io;
use std::path::Path;
use transport::TlsError;

/// For a file that cannot be read, which a key names.
pub(super) fn file(key: &str, path: &Path, error: &io::Error) -> String {
    let path = path.display();
    match error.kind() {
        io::ErrorKind::NotFound => format!("create the file {path}, or correct its path: --set {key}=FILE"),
        io::ErrorKind::PermissionDenied => format!(
            "let the user of this process read {path} (its owner, its mode, and those of its folders), or name another \
             file: --set {key}=FILE"
        ),
        _ => format!("make {path} a file that can be read, or name another file: --set {key}=FILE"),
    }
}

/// For certificates and keys of TLS.
pub(super) fn tls(error: &TlsError) -> String {
    match error {
        TlsError::Io { key, path, source } => file(key, path, source),
        TlsError::Content { key, path, .. } => {
            format!("write what is expected to {}, or name another file: --set {key}=FILE", path.display())
        }
        TlsError::Mismatch { certificate, key } => format!(
            "let {certificate} and {key} name the files of one pair: `openssl x509 -in CERTIFICATE -noout -pubkey` and \
             `openssl pkey -in KEY -pubout` print the same for them"
        ),
        TlsError::Incomplete(certificate, key) => {
            format!("set both, --set {certificate}=FILE --set {key}=FILE, or neither")
        }
        TlsError::Unusable(keys, _) => format!(
            "let {keys} name a certificate and a key of a kind that is supported: ECDSA P-256, or RSA of at least 2048 \
             bits"
        ),
    }
}

/// For the file of API keys.
pub(super) fn api_keys(error: &KeyFileError) -> String {
    match error {
        // The text of the error ends with it, letter for letter.
        KeyFileError::Missing(path) => {
            let path = path.display().to_string();
            format!("create it with the first key: blockyard key add --file {path:?} NAME")
        }
        KeyFileError::Io { path, source } => file("frontend.api_keys_file", path, source),
        KeyFileError::Invalid { path, line: Some(line), .. } => {
            format!("correct or remove line {line} of {}; a running process keeps its keys until then", path.display())
        }
        KeyFileError::Invalid { .. } => {
            "name a file that `blockyard key add` has written: --set frontend.api_keys_file=FILE".to_owned()
        }
    }
}

/// For the secret from which the cache domains of tenants are derived.
pub(super) fn tenant_secret(error: &SecretError) -> String {
    match error {
        SecretError::Io { path, source } => file("frontend.tenant_secret_file", path, source),
        SecretError::TooShort { path, .. } => format!(
            "write a longer secret, the same for all processes: openssl rand -hex 32 > {}; blocks of the former one \
             are not found again",
            path.display()
        ),
    }
}

/// For the master keys of encryption.
pub(super) fn master_keys(error: &SourceError) -> String {
    match error {
        SourceError::File { path, source } => file("tiers.encryption.keys.file", path, source),
        SourceError::Env(name) => format!(
            "set the variable {name} of this process to the master key, the same for all processes that share blocks; \
             `openssl rand -hex 32` makes one"
        ),
        SourceError::Command { program, source } if source.kind() == io::ErrorKind::NotFound => {
            format!("install {program}, or correct its path in tiers.encryption.keys.command")
        }
        SourceError::Command { program, .. } => {
            format!(
                "let {program} (tiers.encryption.keys.command) print the master key and end with status 0 within 10 s"
            )
        }
        SourceError::Empty { .. } | SourceError::Malformed { .. } => {
            "write 64 hex digits for each key there; `openssl rand -hex 32` makes a key".to_owned()
        }
    }
}

/// For a store whose client cannot be made: its credentials are incomplete.
pub(super) fn store(location: &StoreLocation) -> &'static str {
    match location {
        StoreLocation::Folder(_) => "name another folder: --g4 DIR",
        StoreLocation::Cloud { cloud: Cloud::S3, .. } => {
            "set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or neither for the role of the \
             machine"
        }
        StoreLocation::Cloud { cloud: Cloud::Azure, .. } => {
            "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY in the environment (or \
             AZURE_STORAGE_SAS_TOKEN in place of the key), or name the account in the URL: \
             --g4 abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX"
        }
        StoreLocation::Cloud { cloud: Cloud::Google, .. } => {
            "let GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT, not both, name the file of a service \
             account that this process can read, or unset them for the service account of the machine"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_of_a_file_names_its_key_and_what_to_do() {
        let of = |kind: io::ErrorKind| file("frontend.tls_key_file", Path::new("/k"), &io::Error::from(kind));
        assert_eq!(
            of(io::ErrorKind::NotFound),
            "create the file /k, or correct its path: --set frontend.tls_key_file=FILE"
        );
        assert!(of(io::ErrorKind::PermissionDenied).starts_with("let the user of this process read /k ("));
        assert!(of(io::ErrorKind::InvalidData).contains("make /k a file that can be read"));
    }

    #[test]
    fn each_error_of_tls_has_a_fix_of_its_own() {
        let (certificate, key) = ("frontend.tls_cert_file", "frontend.tls_key_file");
        for (error, fix) in [
            (TlsError::Io { key, path: "/k".into(), source: io::ErrorKind::NotFound.into() }, "create the file /k"),
            (TlsError::Content { key, path: "/k".into(), expected: "PEM" }, "write what is expected to /k"),
            (TlsError::Mismatch { certificate, key }, "the files of one pair"),
            (TlsError::Incomplete(certificate, key), "--set frontend.tls_cert_file=FILE --set frontend.tls_key_file="),
            (TlsError::Unusable("a, b".to_owned(), "no".to_owned()), "let a, b name"),
        ] {
            assert!(tls(&error).contains(fix), "{}", tls(&error));
        }
    }

    #[test]
    fn a_master_key_that_is_missing_names_its_source() {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        for (error, fix) in [
            (SourceError::File { path: "/m".into(), source: missing() }, "tiers.encryption.keys.file=FILE"),
            (SourceError::Env("KEYS".to_owned()), "set the variable KEYS"),
            (SourceError::Command { program: "vault".to_owned(), source: missing() }, "install vault"),
            (
                SourceError::Command { program: "vault".to_owned(), source: io::ErrorKind::TimedOut.into() },
                "let vault (tiers",
            ),
            (SourceError::Empty { place: "it".to_owned() }, "64 hex digits"),
        ] {
            assert!(master_keys(&error).contains(fix), "{}", master_keys(&error));
        }
    }
}
