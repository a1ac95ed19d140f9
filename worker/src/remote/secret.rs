//! The secret that the processes of a deployment share. A worker rejects requests without it, and no process connects
//! to a worker whose record in discovery is not signed with it.

use crate::plane::nats::RecordKey;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use std::fmt;

/// A secret that frontends send and workers check.
#[derive(Clone)]
pub struct Secret {
    header: HeaderValue,
    hash: blake3::Hash,
}

/// Why a text cannot be a secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SecretError {
    /// It can be guessed.
    #[error("the secret has {0} characters; at least {MIN_CHARACTERS} are needed: `openssl rand -hex 32` makes one")]
    TooShort(usize),
    /// A header cannot carry it.
    #[error("the secret has characters other than visible ASCII ones")]
    NotAscii,
}

/// The scheme before the secret in its header.
const SCHEME: &str = "Bearer ";

/// A shorter secret can be guessed: 16 hexadecimal digits have 64 bits.
const MIN_CHARACTERS: usize = 16;

impl Secret {
    /// The secret of a file's text; spaces and newlines around it do not count.
    pub fn new(text: &str) -> Result<Self, SecretError> {
        let text = text.trim();
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(SecretError::NotAscii);
        }
        if text.len() < MIN_CHARACTERS {
            return Err(SecretError::TooShort(text.len()));
        }
        let mut header = HeaderValue::try_from(format!("{SCHEME}{text}")).map_err(|_| SecretError::NotAscii)?;
        header.set_sensitive(true);
        Ok(Self { hash: blake3::hash(header.as_bytes()), header })
    }

    /// The key with which the records of the deployment's workers are signed.
    pub fn record_key(&self) -> RecordKey {
        RecordKey::derive(&self.header.as_bytes()[SCHEME.len()..])
    }

    pub(super) fn header(&self) -> HeaderValue {
        self.header.clone()
    }

    /// Whether a request has the secret. Hashes are compared in constant time.
    pub(super) fn is_in(&self, headers: &HeaderMap) -> bool {
        headers.get(AUTHORIZATION).is_some_and(|value| blake3::hash(value.as_bytes()) == self.hash)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_found_in_its_own_header_only() {
        let (ours, other) = (Secret::new("0123456789abcdef\n").unwrap(), Secret::new("0123456789abcdeF").unwrap());
        let with = |secret: &Secret| HeaderMap::from_iter([(AUTHORIZATION, secret.header())]);
        assert!(ours.is_in(&with(&ours)) && !ours.is_in(&with(&other)) && !ours.is_in(&HeaderMap::new()));
        assert!(!format!("{ours:?} {:?}", with(&ours)).contains("0123"), "it is not printed");
    }

    #[test]
    fn secrets_that_can_be_guessed_or_not_sent_are_refused() {
        assert_eq!(Secret::new("short\n").unwrap_err(), SecretError::TooShort(5));
        assert_eq!(Secret::new("0123456789 abcdef").unwrap_err(), SecretError::NotAscii);
        assert_eq!(Secret::new("0123456789äbcdef").unwrap_err(), SecretError::NotAscii);
    }
}
