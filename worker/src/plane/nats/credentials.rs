//! What this process authenticates with at NATS. The file with it is read at each connection: the server ends a
//! connection whose credentials it no longer accepts, and the next one has those that are in the file by then.
//!
//! Not here: TLS (`tls`). The client library reads the files of TLS itself, also at each connection.

use super::ConnectError;
use super::settings::Credentials;
use async_nats::{Auth, AuthError, ConnectOptions};
use nkeys::KeyPair;
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::task::spawn_blocking;
use transport::read_text;

/// The file of credentials.
struct CredentialsFile {
    credentials: Credentials,
    path: PathBuf,
    last: Mutex<LastUsable>,
}

/// The last text of the file with usable credentials.
struct LastUsable {
    text: String,
    /// What is in the file now cannot be used.
    is_stale: bool,
}

/// Largest file. A JWT with many permissions has a few KiB.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Options of connections that authenticate with these credentials. Blocks while it reads their file.
pub(super) fn options(credentials: &Credentials) -> Result<ConnectOptions, ConnectError> {
    let Some(path) = credentials.file() else { return Ok(ConnectOptions::new()) };
    let file = Arc::new(CredentialsFile::open(credentials.clone(), path.to_owned())?);
    Ok(ConnectOptions::with_auth_callback(move |nonce: Vec<u8>| {
        let file = Arc::clone(&file);
        async move {
            let auth = spawn_blocking(move || file.auth(&nonce)).await;
            auth.map_err(AuthError::new)?.map_err(AuthError::new)
        }
    }))
}

/// Checks that the file has usable credentials. Blocks while it reads the file.
pub(super) fn check(credentials: &Credentials) -> Result<(), ConnectError> {
    let Some(path) = credentials.file() else { return Ok(()) };
    CredentialsFile::open(credentials.clone(), path.to_owned()).map(drop)
}

impl CredentialsFile {
    /// Fails if the file has no usable credentials: at the start there are no former ones.
    fn open(credentials: Credentials, path: PathBuf) -> Result<Self, ConnectError> {
        let text = read(credentials.key(), &path)?;
        match auth(&credentials, &text, &[]) {
            Ok(_) => Ok(Self { credentials, path, last: Mutex::new(LastUsable { text, is_stale: false }) }),
            Err(expected) => Err(ConnectError::File { key: credentials.key(), path, error: expected.to_owned() }),
        }
    }

    /// What a connection authenticates with, whose server sent this nonce.
    fn auth(&self, nonce: &[u8]) -> Result<Auth, String> {
        let read = read(self.credentials.key(), &self.path).map_err(|error| error.to_string()).and_then(|text| {
            let auth = auth(&self.credentials, &text, nonce);
            auth.map(|auth| (text, auth)).map_err(|expected| format!("{}: {expected}", self.path.display()))
        });
        let mut last = self.last.lock();
        match read {
            Ok((text, auth)) => {
                *last = LastUsable { text, is_stale: false };
                Ok(auth)
            }
            Err(error) => {
                // Once, and not at each attempt to connect.
                if !std::mem::replace(&mut last.is_stale, true) {
                    tracing::warn!(error, "the credentials for NATS cannot be read; the previous ones stay in use");
                }
                auth(&self.credentials, &last.text, nonce).map_err(str::to_owned)
            }
        }
    }
}

/// The text of a file with credentials, without the newline at its end. `key`: the setting that names the file.
fn read(key: &'static str, path: &Path) -> Result<String, ConnectError> {
    let failed = |error: String| ConnectError::File { key, path: path.to_owned(), error };
    let text = read_text(path, MAX_FILE_BYTES).map_err(|error| failed(error.to_string()))?;
    match text.trim() {
        "" => Err(failed("the file is empty".to_owned())),
        text => Ok(text.to_owned()),
    }
}

/// What the text of a file authenticates with. The error is what was expected.
fn auth(credentials: &Credentials, text: &str, nonce: &[u8]) -> Result<Auth, &'static str> {
    let mut auth = Auth::new();
    match credentials {
        Credentials::Anonymous => {}
        Credentials::UserPassword { user, .. } => {
            auth.username = Some(user.clone());
            auth.password = Some(text.to_owned());
        }
        Credentials::Token(_) => auth.token = Some(text.to_owned()),
        Credentials::Nkey(_) => {
            let (key, signature) = sign(text, nonce).ok_or("expected the seed of an nkey, SU…")?;
            auth.nkey = Some(key);
            auth.signature = Some(signature);
        }
        Credentials::CredentialsFile(_) => {
            let expected = "expected a credentials file with a JWT and the seed of a user";
            let (jwt, seed) = jwt_and_seed(text).ok_or(expected)?;
            let (_, signature) = sign(seed, nonce).ok_or(expected)?;
            auth.jwt = Some(jwt.to_owned());
            auth.signature = Some(signature);
        }
    }
    Ok(auth)
}

/// The public key of a seed, and its signature of a nonce.
fn sign(seed: &str, nonce: &[u8]) -> Option<(String, Vec<u8>)> {
    let key = KeyPair::from_seed(seed).ok()?;
    Some((key.public_key(), key.sign(nonce).ok()?))
}

/// The two values of a credentials file: each is the line between `-----BEGIN …-----` and `------END …------`.
fn jwt_and_seed(text: &str) -> Option<(&str, &str)> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let is_mark = |line: &str, word: &str| line.starts_with("---") && line.contains(word);
    let mut values =
        lines.windows(3).filter(|lines| is_mark(lines[0], "BEGIN") && is_mark(lines[2], "END")).map(|lines| lines[1]);
    Some((values.next()?, values.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn token_file() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        (folder, path)
    }

    fn open(path: &Path) -> Result<CredentialsFile, ConnectError> {
        CredentialsFile::open(Credentials::Token(path.to_owned()), path.to_owned())
    }

    #[test]
    fn credentials_are_read_without_their_newline() {
        let (_folder, path) = token_file();
        fs::write(&path, "\n").unwrap();
        assert!(read("nats.token_file", &path).is_err_and(|error| error.to_string().contains("empty")));
        fs::write(&path, "s3cret\n").unwrap();
        assert_eq!(read("nats.token_file", &path).unwrap(), "s3cret");
    }

    #[test]
    fn a_changed_file_is_used_and_an_unusable_one_is_not() {
        let (_folder, path) = token_file();
        assert!(open(&path).is_err(), "at the start it must be there");
        fs::write(&path, "former\n").unwrap();
        let file = open(&path).unwrap();
        let token = || file.auth(b"").unwrap().token.unwrap();
        let is_stale = || file.last.lock().is_stale;
        assert_eq!((token(), is_stale()), ("former".to_owned(), false));
        fs::write(&path, "new\n").unwrap();
        assert_eq!((token(), is_stale()), ("new".to_owned(), false));
        fs::write(&path, "").unwrap();
        assert_eq!((token(), is_stale()), ("new".to_owned(), true));
        fs::remove_file(&path).unwrap();
        assert_eq!((token(), is_stale()), ("new".to_owned(), true));
        fs::write(&path, "third").unwrap();
        assert_eq!((token(), is_stale()), ("third".to_owned(), false));
    }

    #[test]
    fn an_nkey_signs_what_the_server_sent() {
        let key = KeyPair::new_user();
        let auth = auth(&Credentials::Nkey(PathBuf::new()), &key.seed().unwrap(), b"nonce").unwrap();
        assert_eq!(auth.nkey, Some(key.public_key()));
        key.verify(b"nonce", &auth.signature.unwrap()).unwrap();
    }

    #[test]
    fn a_credentials_file_has_a_jwt_and_a_seed() {
        let key = KeyPair::new_user();
        let text = format!(
            "-----BEGIN NATS USER JWT-----\r\nhead.claims.signature\r\n------END NATS USER JWT------\r\n\r\n\
             ************************* IMPORTANT *************************\r\n\
             NKEY Seed printed below can be used sign and prove identity.\r\n\r\n\
             -----BEGIN USER NKEY SEED-----\r\n{}\r\n------END USER NKEY SEED------",
            key.seed().unwrap()
        );
        let credentials = Credentials::CredentialsFile(PathBuf::new());
        let used = auth(&credentials, &text, b"nonce").unwrap();
        assert_eq!((used.jwt.as_deref(), used.nkey), (Some("head.claims.signature"), None));
        key.verify(b"nonce", &used.signature.unwrap()).unwrap();
        let half = &text[..text.find("IMPORTANT").unwrap()];
        for wrong in ["", half, &*text.replace("\nSU", "\nXX")] {
            assert!(auth(&credentials, wrong, b"nonce").is_err(), "{wrong}");
        }
    }
}
