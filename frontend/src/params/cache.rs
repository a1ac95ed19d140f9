//! Cache parameters: the retention of a request's blocks (field `cache`) and the cache domains of tenants.

use super::fields::Fields;
use crate::error::Error;
use crate::settings::Settings;
use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;
use transport::read_bytes;
use worker::engine::{Domain, Priority, Retention};

/// Range of `ttl` in seconds, up to a year.
const TTL_SECONDS: RangeInclusive<i64> = 1..=31_536_000;
/// Range of `pin` in seconds, up to a day: pinned blocks take space from other requests. A request can renew the pin.
const PIN_SECONDS: RangeInclusive<i64> = 1..=86_400;
/// Fields with a salt of the request's cache domain.
pub(super) const SALTS: [&str; 2] = ["cache_salt", "extra_key"];
/// Minimum length of the secret. Shorter ones can be guessed.
const MIN_SECRET_BYTES: usize = 16;
/// Maximum size of the file of the secret. Random bytes of 64 KiB are more than any secret needs.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// The salts in fields that are not taken, each with its name, as JSON text.
pub(crate) fn peek_salts(fields: &Fields) -> impl Iterator<Item = String> {
    SALTS.into_iter().filter_map(|name| {
        let salt = fields.peek(name).filter(|salt| !salt.is_null())?;
        Some(format!("{name}={}", String::from_utf8_lossy(salt.bytes())))
    })
}

/// Takes the field `cache`. Unknown fields in it are rejected: a misspelled limit would have no effect.
pub(crate) fn take_retention(fields: &mut Fields) -> Result<Retention, Error> {
    let default = Retention::default();
    let Some(mut cache) = fields.object("cache")? else { return Ok(default) };
    let seconds = |seconds: i64| Duration::from_secs(seconds.unsigned_abs());
    let retention = Retention {
        ttl: cache.integer("ttl", TTL_SECONDS)?.map(seconds),
        pin: cache.integer("pin", PIN_SECONDS)?.map(seconds),
        store: cache.boolean("store")?.unwrap_or(default.store),
        priority: priority(&mut cache)?,
    };
    match cache.first_remaining_path() {
        Some(path) => {
            let message = format!("Unknown parameter: '{path}'.");
            Err(Error::invalid(path, "unknown_parameter", message))
        }
        None => Ok(retention),
    }
}

fn priority(cache: &mut Fields) -> Result<Priority, Error> {
    let Some(name) = cache.text("priority")? else { return Ok(Priority::Normal) };
    match name.as_str() {
        "low" => Ok(Priority::Low),
        "normal" => Ok(Priority::Normal),
        "high" => Ok(Priority::High),
        _ => {
            let message = format!("Invalid value: '{name}'. Supported values are: 'low', 'normal', and 'high'.");
            Err(Error::invalid(cache.path("priority"), "invalid_value", message))
        }
    }
}

/// Derives the cache domains of tenants from their names and a secret.
pub struct CacheDomains {
    secret: Vec<u8>,
    /// The domain of requests without a tenant. To derive it takes longer than to copy it.
    shared: Domain,
}

/// Why the secret of the cache domains cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file cannot be read.
    #[error("frontend.tenant_secret_file = {path:?}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The secret is too short.
    #[error("frontend.tenant_secret_file = {path:?} holds {bytes} bytes; a secret has at least {MIN_SECRET_BYTES}")]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Size of the secret in bytes, without trailing white space.
        bytes: usize,
    },
}

impl CacheDomains {
    /// Reads the secret file, if the settings name one.
    pub fn open(settings: &Settings) -> Result<Self, SecretError> {
        let shared = Domain::shared();
        let Some(path) = settings.tenant_secret_file.clone() else { return Ok(Self { secret: Vec::new(), shared }) };
        match read_bytes(&path, MAX_FILE_BYTES) {
            Ok(text) => {
                let secret = text.trim_ascii_end().to_vec();
                let bytes = secret.len();
                if bytes < MIN_SECRET_BYTES {
                    return Err(SecretError::TooShort { path, bytes });
                }
                Ok(Self { secret, shared })
            }
            Err(source) => Err(SecretError::Io { path, source }),
        }
    }

    /// The cache domain of a tenant. All requests without a tenant share one.
    pub fn of(&self, tenant: &str) -> Domain {
        if tenant.is_empty() { self.shared.clone() } else { Domain::derived(&self.secret, tenant) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_named_pipe_is_no_secret_file_and_blocks_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let settings = Settings { tenant_secret_file: Some(path), ..Settings::default() };
        let error = CacheDomains::open(&settings).err().expect("the pipe is refused").to_string();
        assert!(error.starts_with("frontend.tenant_secret_file = "), "{error}");
        assert!(error.contains("/pipe\": expected a regular file"), "{error}");
    }
}
