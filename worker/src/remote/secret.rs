//! The secret that the processes of a deployment share. It is never sent: a request has a message authentication code
//! (MAC) of the URL of the process that it goes to, made with a key that is derived from the secret. A worker rejects
//! requests without such a MAC of its own URL.
//!
//! Other processes say where a request goes: discovery, or a request that names the worker whose memory has blocks. A
//! process at an address that should not have been named receives a MAC that no other process accepts, and learns no
//! secret. This matters while a secret is replaced, when the sender of the address may know the former one only.
//!
//! The file has a secret per line. The first one makes the MACs of requests and signs records; those of each are
//! accepted. So a secret is replaced without a rejected request: while some processes use the former secret and others
//! the new one, all accept both. Changes of the file are followed. A file that cannot be used changes nothing.
//!
//! Not here: freshness. A MAC that was read on a network without TLS can be sent to the same process again.

use crate::plane::nats::{RecordKey, RecordKeys};
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue, Uri};
use parking_lot::RwLock;
use prometheus::{IntCounterVec, Opts, Registry};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch;
use transport::{WatchedFiles, read_text};

/// The secret that a process uses, and those that it accepts. Clones share them, and see each change.
#[derive(Clone)]
pub struct Secret(Arc<InEffect>);

/// What a process requires of requests: a MAC of its URL, made with a secret that it accepts.
pub struct RequiredMac {
    secret: Secret,
    /// As [`process_at`] names it.
    process: String,
}

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
    /// A secret has characters that files of other encodings have as other bytes.
    #[error("the secret in line {line} has characters other than visible ASCII ones")]
    NotAscii {
        /// The line, from 1 on.
        line: usize,
    },
}

struct InEffect {
    /// The keys that belong to the secrets, at least one, in the order of the lines.
    mac_keys: RwLock<Vec<MacKey>>,
    record_keys: watch::Sender<Vec<RecordKey>>,
    /// `None`: the secret does not change.
    file: Option<(PathBuf, SecretMetrics)>,
}

/// Makes the MACs of requests.
struct MacKey([u8; blake3::KEY_LEN]);

/// The scheme before the MAC in its header, and a space.
const SCHEME: &str = "Blockyard-MAC ";

/// Separates this key from other uses of the secret. It names the construction, and changes with it.
const CONTEXT: &str = "blockyard 2026-11 MAC of requests to a worker";

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
        let (mac_keys, record_keys) = parse(text)?;
        let record_keys = watch::Sender::new(record_keys);
        Ok(Self(Arc::new(InEffect { mac_keys: RwLock::new(mac_keys), record_keys, file })))
    }

    /// The header `authorization` of requests to the process at a URL. No process at another URL accepts it.
    pub fn header(&self, url: &str) -> HeaderValue {
        let mac = self.0.mac_keys.read().first().expect("there is at least one key").mac(&process_at(url));
        let header = HeaderValue::try_from(format!("{SCHEME}{}", mac.to_hex()));
        let mut header = header.expect("hexadecimal digits are visible ASCII characters");
        header.set_sensitive(true);
        header
    }

    /// What the process at a URL requires of requests. The URL is the one that it has in discovery.
    pub fn required_at(&self, url: &str) -> RequiredMac {
        RequiredMac { secret: self.clone(), process: process_at(url) }
    }
}

impl RequiredMac {
    /// Whether a request has an accepted MAC. MACs are compared in constant time.
    pub(super) fn is_in(&self, headers: &HeaderMap) -> bool {
        let presented = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
        let digits = presented.and_then(|presented| presented.strip_prefix(SCHEME.as_bytes()));
        let Some(Ok(mac)) = digits.map(blake3::Hash::from_hex) else { return false };
        self.secret.0.mac_keys.read().iter().any(|key| mac == key.mac(&self.process))
    }
}

impl MacKey {
    fn derive(secret: &str) -> Self {
        Self(blake3::derive_key(CONTEXT, secret.as_bytes()))
    }

    /// The MAC of requests to a process, as [`process_at`] names it.
    fn mac(&self, process: &str) -> blake3::Hash {
        blake3::keyed_hash(&self.0, process.as_bytes())
    }
}

/// The process at a URL: `http://host:port` or `https://host:port` in lower case, because one URL can be written in
/// several ways. A text that is no URL, and so is not connected to, stays as it is.
fn process_at(url: &str) -> String {
    let uri: Option<Uri> = url.parse().ok();
    match uri.as_ref().map(|uri| (uri.scheme_str(), uri.authority())) {
        Some((Some(scheme), Some(authority))) => {
            let authority = authority.as_str();
            let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
            format!("{scheme}://{host}").to_ascii_lowercase()
        }
        _ => url.to_owned(),
    }
}

impl InEffect {
    fn reload(&self) {
        let Some((path, SecretMetrics(reloads))) = &self.file else { return };
        let outcome = match read(path).and_then(|text| parse(&text)) {
            Ok((mac_keys, record_keys)) => {
                let accepted = mac_keys.len();
                *self.mac_keys.write() = mac_keys;
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

/// The keys of requests and of records that belong to the secrets of a text, in the order of the lines.
fn parse(text: &str) -> Result<(Vec<MacKey>, Vec<RecordKey>), SecretError> {
    let lines = (1..).zip(text.lines().map(str::trim)).filter(|(_, secret)| !secret.is_empty());
    let (mut mac_keys, mut record_keys) = (Vec::new(), Vec::new());
    for (line, secret) in lines {
        check_secret(line, secret)?;
        mac_keys.push(MacKey::derive(secret));
        record_keys.push(RecordKey::derive(secret.as_bytes()));
    }
    match mac_keys.len() {
        0 => Err(SecretError::Empty),
        1..=MAX_SECRETS => Ok((mac_keys, record_keys)),
        secrets => Err(SecretError::TooMany(secrets)),
    }
}

/// Checks the secret of a line.
fn check_secret(line: usize, secret: &str) -> Result<(), SecretError> {
    if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(SecretError::NotAscii { line });
    }
    if secret.len() < MIN_CHARACTERS {
        return Err(SecretError::TooShort { line, characters: secret.len() });
    }
    Ok(())
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

    const URL: &str = "http://10.0.0.7:8100";

    /// The headers of a request to a URL.
    fn headers(secret: &Secret, url: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, secret.header(url))])
    }

    /// Whether the process at `URL` accepts the requests that a process with another secret sends to it.
    fn accepts(ours: &Secret, theirs: &Secret) -> bool {
        ours.required_at(URL).is_in(&headers(theirs, URL))
    }

    #[test]
    fn a_mac_is_accepted_with_its_own_secret_and_at_its_own_url_only() {
        let (ours, other) = (secret("0123456789abcdef\n"), secret("0123456789abcdeF"));
        assert!(accepts(&ours, &ours) && !accepts(&ours, &other));
        let required = ours.required_at(URL);
        assert!(!required.is_in(&HeaderMap::new()));
        for url in ["http://10.0.0.7:8100/", "HTTP://10.0.0.7:8100", "http://ann:pass@10.0.0.7:8100"] {
            assert!(required.is_in(&headers(&ours, url)), "{url:?} is the same process");
            assert!(ours.required_at(url).is_in(&headers(&ours, URL)), "{url:?} is the same process");
        }
        for url in ["http://10.0.0.8:8100", "https://10.0.0.7:8100", "http://10.0.0.7:8100@10.0.0.8:1", ""] {
            assert!(!required.is_in(&headers(&ours, url)), "it was sent to {url:?}");
        }
        let mac = ours.header(URL).to_str().unwrap().strip_prefix(SCHEME).unwrap().to_owned();
        for wrong in [&*mac, "0123456789abcdef", "Bearer 0123456789abcdef", SCHEME, &*format!("{SCHEME}{}", &mac[1..])]
        {
            let headers = HeaderMap::from_iter([(AUTHORIZATION, wrong.parse::<HeaderValue>().unwrap())]);
            assert!(!required.is_in(&headers), "{wrong:?}");
        }
        assert!(!format!("{ours:?} {:?}", headers(&ours, URL)).contains(&mac[..8]), "it is not printed");
    }

    /// A process at an address that only a holder of the former secret names gets nothing of use elsewhere.
    #[test]
    fn no_secret_is_sent() {
        let sent = secret(&format!("{NEW}\n{FORMER}")).header("http://other:1");
        assert!(!sent.to_str().unwrap().contains(NEW) && sent != secret(NEW).header(URL), "{}", sent.to_str().unwrap());
    }

    #[test]
    fn the_first_line_makes_the_macs_and_those_of_each_are_accepted() {
        let both = secret(&format!("\n  {NEW} \r\n\n{FORMER}\n"));
        assert_eq!(both.header(URL), secret(NEW).header(URL));
        assert!(accepts(&both, &secret(NEW)) && accepts(&both, &secret(FORMER)));
        assert!(!accepts(&both, &secret("0123456789abcdeF")));
    }

    /// When this fails, processes of other versions refuse requests of this one: increase `PROTOCOL`, change `CONTEXT`,
    /// and say so in the changelog.
    #[test]
    fn the_mac_is_that_of_the_documented_construction() {
        let key = blake3::derive_key("blockyard 2026-11 MAC of requests to a worker", NEW.as_bytes());
        let expected = format!("Blockyard-MAC {}", blake3::keyed_hash(&key, URL.as_bytes()).to_hex());
        assert_eq!(secret(NEW).header(URL), expected);
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
        let error = refused(&format!("{NEW}\nabcde")).to_string();
        assert!(error.contains("line 2") && !error.contains("abcde"), "it is not printed: {error}");
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
            let accepts = |text| accepts(&clone, &secret(text));
            let keys = ours.0.record_keys.borrow().len();
            (clone.header(URL), accepts(FORMER), accepts(NEW), keys)
        };
        let sent = |text| secret(text).header(URL);
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
