//! What a request says of the cache: how long its blocks are kept, and, by its tenant, whose they are.

use super::fields::Fields;
use crate::error::Error;
use crate::settings::Settings;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;
use std::{fs, io};
use worker::engine::{Domain, Priority, Retention};

/// A year: longer than any model is served.
const TTL_SECONDS: RangeInclusive<i64> = 1..=31_536_000;
/// A day: a pin takes room from others. Who wants it longer asks again.
const PIN_SECONDS: RangeInclusive<i64> = 1..=86_400;
/// Shorter ones can be guessed.
const SECRET_BYTES_MIN: usize = 16;

/// Takes the field `cache`. What is not known in it is refused: a misspelt limit would be none.
pub(crate) fn take_retention(fields: &mut Fields) -> Result<Retention, Error> {
    let off = Retention::default();
    let Some(mut cache) = fields.object("cache")? else { return Ok(off) };
    let seconds = |seconds: i64| Duration::from_secs(seconds.unsigned_abs());
    let retention = Retention {
        ttl: cache.integer("ttl", TTL_SECONDS)?.map(seconds),
        pin: cache.integer("pin", PIN_SECONDS)?.map(seconds),
        store: cache.flag("store")?.unwrap_or(off.store),
        priority: priority(&mut cache)?,
    };
    match cache.unknown() {
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

/// The cache domains of tenants.
pub struct Domains {
    secret: Vec<u8>,
}

/// The secret of the cache domains cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// It cannot be read.
    #[error("frontend.tenant_secret_file = {path:?}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It can be guessed.
    #[error("frontend.tenant_secret_file = {path:?} holds {bytes} bytes; a secret has at least {SECRET_BYTES_MIN}")]
    TooShort {
        /// The file.
        path: PathBuf,
        /// What is in it, white space at the end left out.
        bytes: usize,
    },
}

impl Domains {
    /// Reads the secret, if there is one.
    pub fn open(settings: &Settings) -> Result<Self, SecretError> {
        let Some(path) = settings.tenant_secret_file.clone() else { return Ok(Self { secret: Vec::new() }) };
        match fs::read(&path) {
            Ok(text) => {
                let secret = text.trim_ascii_end().to_vec();
                let bytes = secret.len();
                if bytes < SECRET_BYTES_MIN { Err(SecretError::TooShort { path, bytes }) } else { Ok(Self { secret }) }
            }
            Err(source) => Err(SecretError::Io { path, source }),
        }
    }

    /// Whose cache a tenant's prompts belong to. Those of nobody in particular share one.
    pub fn of(&self, tenant: &str) -> Domain {
        if tenant.is_empty() { Domain::shared() } else { Domain::derived(&self.secret, tenant) }
    }
}
