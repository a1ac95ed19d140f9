//! A key, and the hash by which it is known.

use ring::digest;
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::io;
use std::str::FromStr;

/// Prefix of generated keys, by which people and scanners of secrets recognise them.
const PREFIX: &str = "by-";
/// Random bytes of a generated key.
const RANDOM_BYTES: usize = 32;
/// Minimum length of a key that a person chose. Shorter ones can be guessed over the network.
const MIN_CHOSEN_BYTES: usize = 16;
/// Maximum length of a key: longer ones are not hashed. Four times a generated key.
pub(crate) const MAX_KEY_BYTES: usize = 256;
/// How the file writes a hash.
const SHA256: &str = "sha256:";

/// A key. It is shown once, when it is created.
pub struct ApiKey(String);

impl ApiKey {
    /// A new key of 256 random bits.
    pub fn generate() -> io::Result<Self> {
        let mut random = [0; RANDOM_BYTES];
        let failed = |_| io::Error::other("the system has no random numbers");
        SystemRandom::new().fill(&mut random).map_err(failed)?;
        Ok(Self(PREFIX.to_owned() + &hex(&random)))
    }

    /// A key that a person chose. The error says what to change.
    pub fn chosen(text: &str) -> Result<Self, String> {
        let length = MIN_CHOSEN_BYTES..=MAX_KEY_BYTES;
        if length.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "expected a key of {MIN_CHOSEN_BYTES} to {MAX_KEY_BYTES} ASCII letters, digits or signs, without spaces; \
             make one with `openssl rand -hex 32`"
        ))
    }

    /// The key itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// The hash of the key.
    pub fn hash(&self) -> KeyHash {
        KeyHash::of(self.0.as_bytes())
    }
}

/// SHA-256 of a key.
///
/// A slow hash for passwords would protect guessable secrets. A generated key has 256 random bits, which cannot be
/// guessed however fast the hash is.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash([u8; digest::SHA256_OUTPUT_LEN]);

impl KeyHash {
    pub(crate) fn of(key: &[u8]) -> Self {
        let digest = digest::digest(&digest::SHA256, key);
        Self(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SHA256}{}", hex(&self.0))
    }
}

/// Logs need no hash, which could be compared with others.
impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash")
    }
}

impl FromStr for KeyHash {
    type Err = &'static str;

    /// The error does not repeat the text: it may be a key that was written in place of its hash.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let digits = text.strip_prefix(SHA256)?.as_bytes();
            let mut bytes = [0; digest::SHA256_OUTPUT_LEN];
            if digits.len() != 2 * bytes.len() {
                return None;
            }
            for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
                let digit = |at: usize| char::from(pair[at]).to_digit(16);
                *byte = (digit(0)? << 4 | digit(1)?) as u8;
            }
            Some(Self(bytes))
        };
        parse().ok_or("expected `sha256:` and 64 hexadecimal digits, as `blockyard key add` writes them")
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |digits, byte| digits + &format!("{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_keys_differ_and_are_known_by_their_hash() {
        let (one, other) = (ApiKey::generate().unwrap(), ApiKey::generate().unwrap());
        assert!(one.reveal().starts_with("by-") && one.reveal().len() == 67);
        assert_ne!(one.hash(), other.hash());
        let written = one.hash().to_string();
        assert_eq!(written.parse(), Ok(one.hash()));
        assert!(!written.contains(&one.reveal()[3..]));
        // FIPS 180-2, appendix B.1.
        let abc = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(KeyHash::of(b"abc").to_string(), abc);
    }

    #[test]
    fn what_is_no_hash_is_refused_without_repeating_it() {
        let digits = "0".repeat(64);
        for text in ["", "by-secret", &digits, &format!("sha256:{digits}0"), &format!("sha256:{}é", &digits[2..])] {
            let error = text.parse::<KeyHash>().unwrap_err();
            assert!(error.contains("64 hexadecimal digits") && !error.contains("by-secret"), "{text}");
        }
    }

    #[test]
    fn a_chosen_key_is_long_and_fits_a_header() {
        assert!(ApiKey::chosen(&"k".repeat(16)).is_ok());
        for wrong in ["", "short", "sixteen letters and spaces", "schlüssel-aus-vielen-zeichen", &"k".repeat(257)] {
            assert!(ApiKey::chosen(wrong).is_err_and(|error| error.contains("openssl rand")), "{wrong}");
        }
    }
}
