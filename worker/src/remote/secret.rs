//! The secret that the processes of a deployment share. A worker rejects requests without it, and no process connects
//! to a worker whose record in discovery is not signed with it.
//!
//! Its file has a secret per line. The first one is sent and signs records; each of them is accepted. So a secret is
//! replaced without a rejected request: while some processes send the former secret and others the new one, all accept
//! both. Changes of the file are followed. A file that cannot be used changes nothing.

use crate::plane::nats::{RecordKey, RecordKeys};
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use parking_lot::RwLock;
use prometheus::{IntCounterVec, Opts, Registry};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch;
use transport::{WatchedFiles, read_text};

/// The secret that a process sends, and those that it accepts. Clones share them, and see each change.
#[derive(Clone)]
pub struct Secret(Arc<InEffect>);

/// Counts changes of the file with the secret. Clones share the counter.
#[derive(Clone)]
pub struct SecretMetrics(IntCounterVec);

/// Why a file cannot be the one with the secret.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SecretError {
    /// It cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// It has no secret.
    #[error("it has no secret: `openssl rand -hex 32` makes one")]
    Empty,
    /// It has more lines than a rotation needs.
    #[error("it has {0} secrets, one per line; expected at most {MAX_SECRETS}")]
    TooMany(usize),
    /// A secret is so short that it can be guessed.
    #[error(
        "the secret in line {line} is too short ({characters} of at least {MIN_CHARACTERS} characters): `openssl rand \
         -hex 32` makes one"
    )]
    TooShort {
        /// The line, from 1 on.
        line: usize,
        /// Number of its characters.
        characters: usize,
    },
    /// A header cannot carry a secret.
    #[error("the secret in line {line} has characters other than visible ASCII ones")]
    NotAscii {
        /// The line, from 1 on.
        line: usize,
    },
}

struct InEffect {
    secrets: RwLock<Secrets>,
    record_keys: watch::Sender<Vec<RecordKey>>,
    /// `None`: the secret does not change.
    file: Option<(PathBuf, SecretMetrics)>,
}

struct Secrets {
    /// The header with the first one.
    sent: HeaderValue,
    /// Hashes of the headers with each of them.
    accepted: Vec<blake3::Hash>,
}

/// The scheme before the secret in its header.
const SCHEME: &str = "Bearer ";

/// A shorter secret can be guessed: 16 hexadecimal digits have 64 bits.
const MIN_CHARACTERS: usize = 16;

/// A rotation needs two. A third is that of another rotation, which begins before the last step of the first.
const MAX_SECRETS: usize = 3;

/// Largest file: secrets of a few hundred characters have less than a tenth of it.
const MAX_FILE_BYTES: u64 = 16 << 10;

impl SecretMetrics {
    /// Declares the metric, once per registry.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let help = "Changes of the file with the secret of the deployment, by outcome: applied or rejected.";
        let reloads = IntCounterVec::new(Opts::new("blockyard_cluster_secret_reloads_total", help), &["outcome"])?;
        registry.register(Box::new(reloads.clone()))?;
        // An alert computes the increase, and an increase from no series is not seen.
        for outcome in ["applied", "rejected"] {
            reloads.with_label_values(&[outcome]);
        }
        Ok(Self(reloads))
    }
}

impl Secret {
    /// The secrets of a file's text, which do not change. Empty lines and spaces around a secret do not count.
    pub fn new(text: &str) -> Result<Self, SecretError> {
        Self::of(text, None)
    }

    /// The secrets of a file, whose changes are followed. Blocks while it reads the file; must be called within a
    /// runtime.
    pub fn open(path: &Path, metrics: SecretMetrics) -> Result<Self, SecretError> {
        let watched = WatchedFiles::now(vec![path.to_owned()]);
        let secret = Self::of(&read(path)?, Some((path.to_owned(), metrics)))?;
        watched.spawn(&secret.0, InEffect::reload);
        Ok(secret)
    }

    /// Checks that a file can be used. Blocks while it reads the file.
    pub fn check(path: &Path) -> Result<(), SecretError> {
        Self::new(&read(path)?).map(drop)
    }

    /// The keys with which the records of the deployment's workers are signed.
    pub fn record_keys(&self) -> RecordKeys {
        RecordKeys::following(self.0.record_keys.subscribe())
    }

    fn of(text: &str, file: Option<(PathBuf, SecretMetrics)>) -> Result<Self, SecretError> {
        let (secrets, record_keys) = parse(text)?;
        let record_keys = watch::Sender::new(record_keys);
        Ok(Self(Arc::new(InEffect { secrets: RwLock::new(secrets), record_keys, file })))
    }

    pub(super) fn header(&self) -> HeaderValue {
        self.0.secrets.read().sent.clone()
    }

    /// Whether a request has an accepted secret. Hashes are compared in constant time.
    pub(super) fn is_in(&self, headers: &HeaderMap) -> bool {
        let Some(presented) = headers.get(AUTHORIZATION) else { return false };
        let presented = blake3::hash(presented.as_bytes());
        self.0.secrets.read().accepted.contains(&presented)
    }
}

impl InEffect {
    fn reload(&self) {
        let Some((path, SecretMetrics(reloads))) = &self.file else { return };
        let outcome = match read(path).and_then(|text| parse(&text)) {
            Ok((secrets, record_keys)) => {
                let accepted = secrets.accepted.len();
                *self.secrets.write() = secrets;
                self.record_keys.send_replace(record_keys);
                tracing::info!(accepted, "cluster.secret_file reloaded");
                "applied"
            }
            Err(error) => {
                let path = path.display();
                tracing::warn!(%path, %error, "cluster.secret_file not reloaded; the previous secrets stay in effect");
                "rejected"
            }
        };
        reloads.with_label_values(&[outcome]).inc();
    }
}

fn read(path: &Path) -> Result<String, SecretError> {
    read_text(path, MAX_FILE_BYTES).map_err(|error| SecretError::Unreadable(error.to_string()))
}

/// The secrets of a text, and the keys of records that belong to them, in the order of the lines.
fn parse(text: &str) -> Result<(Secrets, Vec<RecordKey>), SecretError> {
    let lines = (1..).zip(text.lines().map(str::trim)).filter(|(_, secret)| !secret.is_empty());
    let (mut headers, mut record_keys) = (Vec::new(), Vec::new());
    for (line, secret) in lines {
        headers.push(header(line, secret)?);
        record_keys.push(RecordKey::derive(secret.as_bytes()));
    }
    if headers.len() > MAX_SECRETS {
        return Err(SecretError::TooMany(headers.len()));
    }
    let sent = headers.first().cloned().ok_or(SecretError::Empty)?;
    let accepted = headers.iter().map(|header| blake3::hash(header.as_bytes())).collect();
    Ok((Secrets { sent, accepted }, record_keys))
}

/// The header with the secret of a line.
fn header(line: usize, secret: &str) -> Result<HeaderValue, SecretError> {
    if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(SecretError::NotAscii { line });
    }
    if secret.len() < MIN_CHARACTERS {
        return Err(SecretError::TooShort { line, characters: secret.len() });
    }
    let header = HeaderValue::try_from(format!("{SCHEME}{secret}"));
    let mut header = header.map_err(|_| SecretError::NotAscii { line })?;
    header.set_sensitive(true);
    Ok(header)
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const FORMER: &str = "0123456789abcdef";
    const NEW: &str = "fedcba9876543210";

    fn secret(text: &str) -> Secret {
        Secret::new(text).unwrap()
    }

    /// The headers of a request that this process sends.
    fn headers(secret: &Secret) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, secret.header())])
    }

    #[test]
    fn a_secret_is_found_in_its_own_header_only() {
        let (ours, other) = (secret("0123456789abcdef\n"), secret("0123456789abcdeF"));
        assert!(ours.is_in(&headers(&ours)) && !ours.is_in(&headers(&other)) && !ours.is_in(&HeaderMap::new()));
        assert!(!format!("{ours:?} {:?}", headers(&ours)).contains("0123"), "it is not printed");
    }

    #[test]
    fn the_first_line_is_sent_and_each_is_accepted() {
        let both = secret(&format!("\n  {NEW} \r\n\n{FORMER}\n"));
        assert_eq!(both.header(), secret(NEW).header());
        assert!(both.is_in(&headers(&secret(NEW))) && both.is_in(&headers(&secret(FORMER))));
        assert!(!both.is_in(&headers(&secret("0123456789abcdeF"))));
        let joined: HeaderValue = format!("Bearer {NEW} {FORMER}").parse().unwrap();
        assert!(!both.is_in(&HeaderMap::from_iter([(AUTHORIZATION, joined)])), "they are no secret together");
    }

    #[test]
    fn texts_without_a_usable_secret_in_each_line_are_refused() {
        let refused = |text: &str| Secret::new(text).unwrap_err();
        assert_eq!([refused(""), refused(" \n\n")], [SecretError::Empty, SecretError::Empty]);
        assert_eq!(refused("short\n"), SecretError::TooShort { line: 1, characters: 5 });
        assert_eq!(refused(&format!("{NEW}\n\nshort")), SecretError::TooShort { line: 3, characters: 5 });
        assert_eq!(refused("0123456789 abcdef"), SecretError::NotAscii { line: 1 });
        assert_eq!(refused("0123456789äbcdef"), SecretError::NotAscii { line: 1 });
        assert_eq!(refused(&format!("{NEW}\n").repeat(4)), SecretError::TooMany(4));
        let error = refused(&format!("{NEW}\nshort")).to_string();
        assert!(error.contains("line 2") && !error.contains("short"), "it is not printed: {error}");
    }

    #[tokio::test]
    async fn a_changed_file_takes_effect_unless_it_cannot_be_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let metrics = SecretMetrics::new(&Registry::new()).unwrap();
        fs::write(&path, FORMER).unwrap();
        let ours = Secret::open(&path, metrics.clone()).unwrap();
        let clone = ours.clone();
        // What is sent, and whether the former and the new secret are accepted.
        let state = || {
            let accepts = |text| clone.is_in(&headers(&secret(text)));
            let keys = ours.0.record_keys.borrow().len();
            (clone.header(), accepts(FORMER), accepts(NEW), keys)
        };
        let sent = |text| secret(text).header();
        assert_eq!(state(), (sent(FORMER), true, false, 1));
        let steps = [
            (format!("{FORMER}\n{NEW}\n"), (sent(FORMER), true, true, 2)),
            (format!("{NEW}\n{FORMER}\n"), (sent(NEW), true, true, 2)),
            (format!("{NEW}\n"), (sent(NEW), false, true, 1)),
        ];
        for (text, expected) in steps {
            fs::write(&path, text).unwrap();
            ours.0.reload();
            assert_eq!(state(), expected);
        }
        for unusable in ["", "short", &*format!("{FORMER}\nshort"), &*"x".repeat(20_000)] {
            fs::write(&path, unusable).unwrap();
            ours.0.reload();
        }
        fs::remove_file(&path).unwrap();
        ours.0.reload();
        assert_eq!(state(), (sent(NEW), false, true, 1), "the last good one stays");
        let count = |outcome| metrics.0.with_label_values(&[outcome]).get();
        assert_eq!((count("applied"), count("rejected")), (3, 5));
    }

    #[test]
    fn a_file_that_is_no_regular_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().to_owned(), folder.path().join("absent")] {
            assert!(matches!(Secret::check(&path), Err(SecretError::Unreadable(_))), "{path:?}");
        }
    }
}
